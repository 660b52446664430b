# SPDX-License-Identifier: MIT
"""Run one case on every library, uniclip beside it, say which results are right, and print them."""

from __future__ import annotations

import itertools
import math
import platform
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

import uniclip as uc
from native_functions import LIBRARIES, Library, NoResultError, NotOfferedError, Rows, Truth, Uniclip

RIGHT, WRONG, ERROR, NONE = "✓", "✗", "error", "–"  # noqa: RUF001 - a dash
TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2}
"""The largest relative error that counts as right: what rounding to half precision costs, else 1e-5."""


@dataclass(frozen=True)
class Result:
    """What came out: arrays or an error, the same in words, and a verdict."""

    values: list[np.ndarray] | Exception
    text: str
    mark: str = NONE

    @property
    def brief(self) -> str:
        """The verdict and the result as Markdown, an error without its message."""
        return f"{self.mark} `{type(self.values).__name__ if isinstance(self.values, Exception) else self.text}`"

    @property
    def full(self) -> str:
        """The verdict and the result as Markdown."""
        return f"{self.mark} `{self.text}`"


Measured = tuple[list[np.ndarray], str]


# What is measured: each takes a library, or uniclip on its arrays, or the truth.


def clipped(library: Library, case: Case) -> Measured:
    """Return what the function returns."""
    out = getattr(library, case.kind)(arrays(library, case), case.c)
    leaves = [library.numpy(leaf) for leaf in (out if isinstance(out, (list, tuple)) else [out])]
    return leaves, "`, `".join(map(show, leaves))


def norm_after(library: Library, case: Case) -> Measured:
    """Return the norm of what the function returns, in float64."""
    norm = norm64(clipped(library, case)[0])
    return [np.asarray(norm)], number(norm)


def derivative(library: Library, case: Case) -> Measured:
    """Return the derivative of g₁ + 2g₂, or of the norm, by the gradient (g₁, g₂) that went in."""

    def weighed(x: Any) -> Any:
        out = getattr(library, case.kind)([x], case.c)
        return out[0][0] + 2 * out[0][1] if isinstance(out, (list, tuple)) else out

    [x] = arrays(library, case)
    slope = library.numpy(library.gradient(weighed, x))
    return [slope], show(slope)


def altered(library: Library, case: Case) -> Measured:
    """Count the limits at which some bit changes, though all of them are above the norm."""
    function, limits = getattr(library, case.kind), range(1, 200)
    [before] = [library.numpy(g) for g in arrays(library, case)]
    after = [library.numpy(function(arrays(library, case), float(c))[0]) for c in limits]
    count = sum(not np.array_equal(before, a) for a in after)
    return [np.asarray(count)], f"{count} of {len(limits)}"


def excess(library: Library, case: Case) -> Measured:
    """Return the largest norm that random gradients have after clipping, and how many are above the limit."""
    function, dtype = getattr(library, case.kind), case.dtype[0]
    random = np.random.default_rng(0).standard_normal((100, 50)).astype(dtype)
    norms = [norm64([library.numpy(function([library.array(g, dtype)], case.c)[0])]) for g in random]
    most, above = max(norms) / case.c, sum(norm > case.c for norm in norms)
    how_far = f"`, `+{tidy(f'{most - 1:.1e}')}" if above else ""
    return [np.asarray(most)], f"{above} of {len(norms)}{how_far}"


@dataclass(frozen=True, eq=False)
class Case:
    """One gradient, one kind of function (a method of `Library`), one limit."""

    title: str
    kind: str
    grads: list[Any]
    """The leaves: what NumPy makes arrays of, or `Rows`."""
    c: float = 1.0
    dtype: tuple[str, ...] = ("float32",)
    """Of the leaves, in turn."""
    words: str = ""
    """The gradient in words, where it is too long to print."""
    measure: Callable[[Library, Case], Measured] = clipped
    exact: bool = False

    @property
    def tolerance(self) -> float:
        """The relative error that counts as right."""
        return 0.0 if self.exact else max(TOLERANCE.get(name, 1e-5) for name in self.dtype)


@dataclass(frozen=True, eq=False)
class Group:
    """Cases that have one reason."""

    title: str
    why: str
    look: str
    """What to look for in one's own training."""
    cases: list[Case]


@dataclass(frozen=True)
class Row:
    """One library's function in one case, and uniclip beside it; no results where it is not installed."""

    library: str
    code: str
    native: Result | None = None
    ours: Result | None = None

    def results(self) -> list[str]:
        """Return both results as Markdown."""
        return [result.full if result else "not installed" for result in (self.native, self.ours)]


@dataclass(frozen=True)
class Table:
    """A case that was run."""

    case: Case
    truth: Result
    rows: list[Row]

    def about(self) -> str:
        """Return the gradient, the limit and the true result in one line of Markdown."""
        case = self.case
        words = case.words or f"`{'`, `'.join(map(show, case.grads))}`"
        limit = "" if case.kind == "global_norm" or case.measure is altered else f", limit {number(case.c)}"
        truth = self.truth.text if isinstance(self.truth.values, Exception) else f"`{self.truth.text}`"
        dtype = "" if case.dtype == ("float32",) else f" in {' and '.join(case.dtype)}"
        return f"{words}{dtype}{limit}; right: {truth}"

    def native(self, library: str) -> str:
        """Return the result of a library's function in few words."""
        cells = [row.native.brief if row.native else "not installed" for row in self.rows if row.library == library]
        return cells[0] if cells else NONE

    def ours(self) -> str:
        """Return uniclip's result in few words; two where it is right on some arrays only."""
        ours = [(row.library, row.ours) for row in self.rows if row.ours]
        right = [result.brief for _, result in ours if result.mark == RIGHT]
        others = [f"on {name}: {result.brief}" for name, result in ours if result.mark != RIGHT]
        return "; ".join([*right[:1], *others]) or NONE

    def details(self) -> list[list[str]]:
        """Return a head, and the call and result of each library beside uniclip's, as rows of Markdown."""
        head = ["function", "its result", f"`{code(Uniclip, self.case)}`"]
        return [head, *([f"{row.library}: `{row.code}`", *row.results()] for row in self.rows)]


# Running a case


@cache
def installed() -> tuple[list[Library], list[type[Library]]]:
    """Return the libraries that could be imported, and those that could not."""
    found: list[Library] = []
    missing: list[type[Library]] = []
    for library in LIBRARIES:
        try:
            found.append(library())
        except ImportError:  # noqa: PERF203 - a few libraries
            missing.append(library)
    return found, missing


@cache
def run(case: Case) -> Table:
    """Run a case, once, on every library that has such a function."""
    found, missing = installed()
    truth = true_result(case)
    rows = [row for library in found for row in compare(case, library, truth)]
    absent = [Row(library.name, code(library, case)) for library in missing if getattr(library, case.kind, None)]
    return Table(case, truth, rows + absent)


def compare(case: Case, library: Library, truth: Result) -> Iterator[Row]:
    """Yield the row of a library, if it has such a function and such arrays."""
    if getattr(library, case.kind, None) is None:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            native = result(library, case)
        ours = ours_on(library.modules[0], case)
    except NotOfferedError:
        return
    yield Row(library.name, code(library, case), *(replace(r, mark=verdict(r, truth, case)) for r in (native, ours)))


def true_result(case: Case) -> Result:
    """Return what should come out; a mistake in a case is raised."""
    try:
        return Result(*case.measure(Truth(), case))
    except NoResultError as error:
        return Result(error, "an error")


@cache
def ours_on(module: str, case: Case) -> Result:
    """Return uniclip's result on a module's arrays; Keras has those of TensorFlow."""
    library = next(library for library in installed()[0] if library.modules[0] == module)
    return result(Uniclip(library), case)


def result(library: Library, case: Case) -> Result:
    """Return what a library returns or raises."""
    try:
        return Result(*case.measure(library, case))
    except NotOfferedError:
        raise
    except Exception as error:  # noqa: BLE001 - an error of any kind is a result here
        return Result(error, f"{type(error).__name__}: {first_words(error)}".removesuffix(": "))


def verdict(result: Result, truth: Result, case: Case) -> str:
    """Return whether the result is the true one; an error is right only where there is none."""
    if isinstance(result.values, Exception):
        return RIGHT if isinstance(truth.values, Exception) else ERROR
    if isinstance(truth.values, Exception):
        return WRONG
    close = (near(a, b, case.tolerance) for a, b in zip(result.values, truth.values, strict=True))
    return RIGHT if all(close) else WRONG


def near(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    """Whether two arrays agree, relative to the largest entry; NaN never does."""
    if a.shape != b.shape:
        return False
    size = float(np.max(np.abs(b), initial=0.0))
    return bool(np.all(np.abs(a.astype(b.dtype) - b) <= tolerance * size))


def arrays(library: Library, case: Case) -> list[Any]:
    """Return the gradient of a case as arrays of a library; a leaf that occurs twice as one array."""
    made: dict[int, Any] = {}
    for leaf, dtype in zip(case.grads, itertools.cycle(case.dtype), strict=False):
        if id(leaf) not in made:
            made[id(leaf)] = (library.sparse if isinstance(leaf, Rows) else library.array)(leaf, dtype)
    return [made[id(leaf)] for leaf in case.grads]


def norm64(leaves: list[np.ndarray]) -> float:
    """Return the norm of the leaves together, in float64."""
    return math.sqrt(sum(float(np.sum(np.square(leaf.astype(np.float64)))) for leaf in leaves))


# Printing


def code(library: Library | type[Library], case: Case) -> str:
    """Return what to write for the function of a case."""
    limit = "c" if case.measure is altered else f"{'' if math.isfinite(case.c) else 'math.'}{tidy(str(float(case.c)))}"
    return str(getattr(library, case.kind).code).format(c=limit).replace("--", "")


def show(leaf: Any) -> str:
    """Return the first few numbers of an array, or the rows of a sparse one."""
    if isinstance(leaf, Rows):
        return rows_of(leaf.rows, leaf.values)
    values = np.asarray(leaf)
    if values.ndim == 0:
        return number(values[()])
    if values.shape[1:] == (1,):
        stored = np.flatnonzero(values)
        return rows_of(stored, values[stored, 0])
    shown = [*map(show, values[:3])] if len(values) <= 3 else [*map(show, values[:2]), "…"]  # noqa: PLR2004 - enough
    return f"[{', '.join(shown)}]"


def rows_of(rows: Any, values: Any) -> str:
    """Return the rows of a sparse gradient that are not 0."""
    return f"{{{', '.join(f'{i}: {number(x)}' for i, x in zip(rows, values, strict=True))}}}"


def number(x: Any) -> str:
    """Return a number in six digits."""
    x = complex(x)
    real, imaginary = f"{x.real + 0:.6g}", f"{x.imag:+.6g}j"
    words = real if not x.imag else real + imaginary if x.real else imaginary.strip("+")
    return tidy(words).replace("inf", "∞").replace("nan", "NaN")


def tidy(text: str) -> str:
    """Write ``1e30`` rather than ``1e+30``."""
    return re.sub(r"e([+-])0*(?=\d)", lambda e: "e" + e[1].strip("+"), text)


def first_words(error: Exception) -> str:
    """Return the beginning of a message."""
    line = re.sub(r"^\{\{.*?\}\}\s*", "", str(error).strip()).partition("\n")[0]
    return textwrap.shorten(line.translate(dict.fromkeys(map(ord, "`|"))), 60, placeholder=" …")


def versions() -> str:
    """Return what was measured, and where."""
    found, missing = installed()
    names = dict.fromkeys(f"{name} {version}" for library in found for name, version in library.versions().items())
    text = ", ".join([*names, f"numpy {np.__version__}", f"uniclip {uc.__version__}"])
    text += f"; Python {platform.python_version()} on {platform.machine()}."
    return text + (f" Not installed: {', '.join(library.name for library in missing)}." if missing else "")


def terminal(group: Group) -> str:
    """Return what a group measures, as aligned text."""
    look = f"In your own training, look for {group.look}" if group.look else ""
    lines = [group.title, "=" * len(group.title), *textwrap.wrap(group.why, 100), *textwrap.wrap(look, 100), ""]
    for table in map(run, group.cases):
        lines += [table.case.title, f"  {table.about()}", *aligned(table.details()), ""]
    return "\n".join(lines).replace("`", "")


def aligned(rows: list[list[str]]) -> list[str]:
    """Return the rows without Markdown, with columns of equal width."""
    rows = [[cell.replace("`", "") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [f"    {line}".rstrip() for line in lines]


def markdown(groups: list[Group]) -> str:
    """Return what all groups measure."""
    return "\n\n".join([versions(), *(block for group in groups for block in blocks(group))]) + "\n"


def blocks(group: Group) -> Iterator[str]:
    """Yield a group's heading, reason and table, and its calls one by one, folded."""
    yield f"## {group.title}"
    yield group.why
    if group.look:
        yield f"**In your own training, look for** {group.look}"
    names = [library.name for library in LIBRARIES]
    tables = [run(case) for case in group.cases]
    rows = [[f"**{t.case.title}**: {t.about()}", *map(t.native, names), t.ours()] for t in tables]
    yield grid(["case", *names, "uniclip"], *rows)
    yield "<details><summary>The calls, one by one</summary>"
    for table in tables:
        yield f"**{table.case.title}**"
        yield grid(*table.details())
    yield "</details>"


def grid(head: list[str], *rows: list[str]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
