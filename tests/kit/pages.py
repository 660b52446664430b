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
    """A block of code on a page, and what it has to print, ``None`` if nothing is said of that."""

    kind: str
    code: str
    line: int
    output: str | None = None


@dataclass
class Story:
    """The blocks of a page that share their names, in the order in which they run."""

    page: str
    group: str
    blocks: list[Block] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Run the blocks, compare what they print, and return what they define."""
        known = names()
        for block in self.blocks:
            where = f"{self.page}:{block.line}"
            if block.kind == "doctest":
                run_examples(
                    doctest.DocTestParser().get_doctest(block.code, {}, where, where, 0), known
                )
                continue
            printed = _printed(block.code, f"<{where}>", known)
            if block.output is not None:
                matches = doctest.OutputChecker().check_output(block.output, printed, FLAGS)
                assert matches, f"{where} printed\n{printed}\ninstead of\n{block.output}"
        return known


def _printed(code: str, name: str, known: dict[str, Any]) -> str:
    """Run code, and return what it prints; compilers that read the source of functions find it."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, name, "exec"), known)  # noqa: S102 - our own pages
    return printed.getvalue()


def names() -> dict[str, Any]:
    """Return the names that every example may use."""
    return {"__name__": "__main__", "np": np, "uc": uc, "README": str(ROOT / "README.md")}


def run_examples(test: doctest.DocTest, known: dict[str, Any]) -> None:
    """Run examples with prompts, with these names; what they define is added to them."""
    test.globs = known
    said = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    runner.run(test, out=said.write, clear_globs=False)
    assert not runner.failures, said.getvalue()


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
    """Run the blocks of a page that share a name, and return what they define."""
    return next(story for story in stories() if (story.page, story.group) == (page, group)).run()


def modules() -> list[str]:
    """Return the names of all modules of uniclip but the kernels, which need Triton."""
    names = [found.name for found in pkgutil.walk_packages(uc.__path__, "uniclip.")]
    return sorted(["uniclip", *(name for name in names if not name.endswith(".triton"))])


def examples_of(name: str) -> list[doctest.DocTest]:
    """Return the examples in the docstrings of a module."""
    module: ModuleType = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(module, name) if test.examples]
