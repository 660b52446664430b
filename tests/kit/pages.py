"""Run the examples of the documentation: the code blocks of its pages, and those of docstrings."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import linecache
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import uniclip as uc

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(
    r"^(`{3,})\{(testsetup|testcode|testoutput|testcleanup|doctest)\} *(\S*)[^\n]*\n(.*?)^\1 *$",
    re.DOTALL | re.MULTILINE,
)
OPTION = re.compile(r"\A(:\w+:[^\n]*\n)+\n?")
FLAGS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


@dataclass
class Block:
    """A block of code on a page, with its expected output; ``None`` if the page shows none."""

    kind: str
    code: str
    line: int
    output: str | None = None


@dataclass
class Story:
    """The blocks of a page that share variables, in the order of execution."""

    page: str
    group: str
    blocks: list[Block] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Run the blocks, compare their output, and return the variables."""
        namespace = names()
        for block in self.blocks:
            where = f"{self.page}:{block.line}"
            if block.kind == "doctest":
                run_examples(
                    doctest.DocTestParser().get_doctest(block.code, {}, where, where, 0), namespace
                )
                continue
            printed = _printed(block.code, f"<{where}>", namespace)
            if block.output is not None:
                matches = doctest.OutputChecker().check_output(block.output, printed, FLAGS)
                assert matches, f"{where} printed\n{printed}\ninstead of\n{block.output}"
        return namespace


def _printed(code: str, name: str, namespace: dict[str, Any]) -> str:
    """Run code, and return its output. Compilers that read the source of functions can find it."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, name, "exec"), namespace)  # noqa: S102 - our own pages
    return printed.getvalue()


def names() -> dict[str, Any]:
    """Return the names that every example may use."""
    return {"__name__": "__main__", "np": np, "uc": uc, "README": str(ROOT / "README.md")}


def run_examples(test: doctest.DocTest, namespace: dict[str, Any]) -> None:
    """Run examples with prompts in a namespace, and add their variables to it."""
    test.globs = namespace
    output = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    runner.run(test, out=output.write, clear_globs=False)
    assert not runner.failures, output.getvalue()


def stories() -> Iterator[Story]:
    """Yield the examples of all pages."""
    for file in sorted(DOCS.rglob("*.md")):
        page = file.relative_to(DOCS).as_posix()
        if page.startswith("_"):
            continue
        text, found = file.read_text(encoding="utf-8"), dict[str, Story]()
        for match in BLOCK.finditer(text):
            _, kind, group, body = match.groups()
            story = found.setdefault(group or "default", Story(page, group or "default"))
            code = OPTION.sub("", body)
            if kind == "testoutput":
                story.blocks[-1].output = code
            else:
                story.blocks.append(Block(kind, code, text.count("\n", 0, match.start()) + 1))
        yield from found.values()


def run_story(page: str, group: str) -> dict[str, Any]:
    """Run a group of blocks of a page, and return its variables."""
    return next(story for story in stories() if (story.page, story.group) == (page, group)).run()


def modules() -> list[str]:
    """Return the names of all modules of uniclip except the kernels, which need Triton."""
    names = [found.name for found in pkgutil.walk_packages(uc.__path__, "uniclip.")]
    return sorted(["uniclip", *(name for name in names if not name.endswith(".triton"))])


def examples_of(name: str) -> list[doctest.DocTest]:
    """Return the examples in the docstrings of a module."""
    module: ModuleType = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(module, name) if test.examples]
