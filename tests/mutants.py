"""Plant random faults in copies of ``src/``, run a command on each, and count the detected ones.

    python tests/mutants.py --count 120 -- pytest -x -q tests/test_contract.py tests/test_fuzz.py

The command runs with ``PYTHONPATH`` at the copy, and detects a fault by failing. It must first pass
on the unchanged code. A run with a fault may take four times as long. Annotations and error texts
stay unchanged. Some faults are equivalent, or choose between two right ways: read the survivors.
"""
# ruff: noqa: T201 - a script prints

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"
OTHERS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip
"""The replacement of each operator."""


def quiet(tree: ast.AST) -> set[int]:
    """Return the ids of nodes in annotations and error texts."""
    found: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(args=given, returns=returned):
                parts: list[Any] = [arg.annotation for arg in (*given.args, *given.kwonlyargs)] + [
                    returned
                ]
            case ast.AnnAssign(annotation=annotation):
                parts = [annotation]
            case ast.Raise() | ast.JoinedStr():
                parts = [node]
            case _:
                continue
        found |= {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
    return found


def faulty(node: ast.AST) -> bool:
    """Put a fault into a node; return False if its type has none."""
    match node:
        case ast.Compare(ops=[first, *rest]) if type(first) in OTHERS:
            node.ops = [OTHERS[type(first)](), *rest]  # type: ignore[list-item]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OTHERS:
            node.op = OTHERS[type(op)]()  # type: ignore[union-attr]
        case ast.If(test=test):
            node.test = ast.UnaryOp(ast.Not(), test)
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            node.value = value + 1
        case _:
            return False
    return True


def find_files(only: list[str], skip: list[str]) -> list[Path]:
    """Return the files below ``src/`` with a path in ``only`` and none in ``skip``."""
    paths = {file: file.relative_to(SOURCE).as_posix() for file in sorted(SOURCE.rglob("*.py"))}
    chosen = {file: path for file, path in paths.items() if any(part in path for part in only)}
    return [file for file, path in chosen.items() if not any(part in path for part in skip)]


def places(file: Path) -> Iterator[int]:
    """Yield the indices of the nodes that can get a fault."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    # List the nodes before any of them is changed.
    left, nodes = quiet(tree), list(ast.walk(tree))
    for number, node in enumerate(nodes):
        if id(node) not in left and faulty(node):
            yield number


def planted(file: Path, number: int) -> tuple[str, str]:
    """Return the text of a file with a fault, and a description of the fault."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    node: Any = list(ast.walk(tree))[number]
    before = f"{file.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node).splitlines()[0][:90]}"
    faulty(node)
    return ast.unparse(ast.fix_missing_locations(tree)), before


def ended(command: list[str], source: Path, most: float | None = None) -> str:
    """Return how a command ends on a copy of the sources."""
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=most, check=False
        )
    except subprocess.TimeoutExpired:
        return "timed out"
    return "noticed" if done.returncode else "SURVIVED"


def main() -> int:
    """Plant faults and print the outcome of each; return 1 if too few are detected."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="parts of paths, such as backends/torch"
    )
    parser.add_argument("--skip", nargs="*", default=[], help="parts of paths that are left alone")
    parser.add_argument("--gate", type=float, default=0.0, help="the share that has to be noticed")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    files = find_files(asked.only, asked.skip)
    start = time.monotonic()
    if ended(asked.command, SOURCE) != "SURVIVED":
        sys.exit("the command fails on the code as it is")
    most, counts = 4 * (time.monotonic() - start) + 5, Counter[str]()
    sites = [(file, number) for file in files for number in places(file)]
    random.Random(asked.seed).shuffle(sites)  # noqa: S311 - no secret
    for file, number in sites[: asked.count]:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "src"
            shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
            text, before = planted(file, number)
            (copy / file.relative_to(SOURCE)).write_text(text, encoding="utf-8")
            start, result = time.monotonic(), ended(asked.command, copy, most)
        counts[result] += 1
        print(f"{result:9} {before}  {time.monotonic() - start:.1f} s", flush=True)
    print(f"{dict(counts)} of {sum(counts.values())}; {len(sites):,} places in all")
    return int(counts["SURVIVED"] > (1 - asked.gate) * sum(counts.values()) and asked.gate > 0)


if __name__ == "__main__":
    sys.exit(main())
