# SPDX-License-Identifier: MIT
"""Run one case on every library and on uniclip, say which results are right, and write them as Markdown."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from native_functions import LIBRARIES, TRUTH, Library, uniclip_on

RIGHT, WRONG, ERROR, NONE = "✓", "✗", "error", "–"  # noqa: RUF001 - a dash
TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2}
"""The largest relative error that counts as right: what rounding to half precision costs, else 1e-5."""


@dataclass(frozen=True)
class Rows:
    """A sparse gradient of a matrix of 8 rows and one column; a row that occurs twice counts as the sum."""

    rows: tuple[int, ...]
    values: tuple[float, ...]


Measured = tuple[list[np.ndarray], str]


# What is measured: each takes a library, uniclip or the definition, and returns numbers, and the same in words.


def clipped(library: Library, case: Case) -> Measured:
    """Return what the function returns."""
    out = library.call(case.kind, arrays(library, case), case.c)
    leaves = [library.numpy(leaf) for leaf in (out if isinstance(out, (list, tuple)) else [out])]
    return leaves, "`, `".join(map(show, leaves))


def norm_after(library: Library, case: Case) -> Measured:
    """Return the norm of what the function returns, in float64."""
    norm = norm64(clipped(library, case)[0])
    return [np.asarray(norm)], number(norm)


def derivative(library: Library, case: Case) -> Measured:
    """Return the derivative of g₁ + 2g₂, or of the norm, by the gradient (g₁, g₂) that went in."""

    def weighed(x: Any) -> Any:
        out = library.call(case.kind, [x], case.c)
        return out[0][0] + 2 * out[0][1] if isinstance(out, (list, tuple)) else out

    slope = library.numpy(library.framework.gradient(weighed, *arrays(library, case)))
    return [slope], show(slope)


def altered(library: Library, case: Case) -> Measured:
    """Count the limits at which some bit changes, though all of them are above the norm."""
    before, limits = library.numpy(arrays(library, case)[0]), range(1, 200)
    after = [library.numpy(library.call(case.kind, arrays(library, case), float(c))[0]) for c in limits]
    count = sum(not np.array_equal(before, a) for a in after)
    return [np.asarray(count)], f"{count} of {len(limits)}"


def excess(library: Library, case: Case) -> Measured:
    """Return the largest norm that random gradients have after clipping, and how many are above the limit."""
    random = np.random.default_rng(0).standard_normal((100, 50)).astype("float32")
    outs = [library.call(case.kind, [library.framework.array(g)], case.c)[0] for g in random]
    norms = [norm64([library.numpy(out)]) for out in outs]
    most, above = max(norms) / case.c, sum(norm > case.c for norm in norms)
    how_far = f"`, `+{tidy(f'{most - 1:.1e}')}" if above else ""
    return [np.asarray(most)], f"{above} of {len(norms)}{how_far}"


@dataclass(frozen=True, eq=False)
class Case:
    """One gradient, one kind of call, one limit."""

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

    @property
    def needs(self) -> set[str]:
        """What some libraries lack."""
        return {"sparse" for g in self.grads if isinstance(g, Rows)} | {"derivative"} & {self.measure.__name__}


@dataclass(frozen=True, eq=False)
class Group:
    """Cases that have one reason."""

    title: str
    why: str
    look: str
    """What to look for in one's own training."""
    cases: list[Case]


@dataclass(frozen=True)
class Result:
    """A verdict, and what came out."""

    mark: str
    text: str = ""

    def __str__(self) -> str:
        mark = self.mark if self.mark in {RIGHT, NONE} else f"**{self.mark}**"
        return f"{mark} `{self.text}`" if self.text else mark


@cache
def run(case: Case) -> dict[str, Result]:
    """Run a case, once, on uniclip and on every library."""
    native = [library for library in LIBRARIES if offers(library, case)]
    ours = {library.framework.name: uniclip_on(library) for library in native}
    results = {f"uniclip on {name}": result(library, case) for name, library in ours.items()}
    return results | {library.name: result(library, case) for library in native}


def offers(library: Library, case: Case) -> bool:
    """Whether a library has such a function, and such arrays."""
    return case.kind in library.calls and not library.lacks & case.needs


@cache
def alone(library: Library, case: Case) -> Result:
    """Run a case on one library."""
    if library in LIBRARIES:
        return run(case).get(library.name, Result(NONE))
    return result(library, case) if offers(library, case) else Result(NONE)


def result(library: Library, case: Case) -> Result:
    """Return what a library returns or raises; an error is right only where there is nothing to return."""
    true = truth(case)
    _ = library.modules  # a library that is missing is no result
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values, text = case.measure(library, case)
    except Exception as error:  # noqa: BLE001 - an error of any kind is a result here
        return Result(ERROR if true else RIGHT, f"{type(error).__name__}: {first_words(error)}".removesuffix(": "))
    right = true and all(near(a, b, case.tolerance) for a, b in zip(values, true[0], strict=True))
    return Result(RIGHT if right else WRONG, text)


@cache
def truth(case: Case) -> Measured | None:
    """Return what should come out; nothing for a limit below 0 or NaN, which should be an error."""
    return case.measure(TRUTH, case) if case.c >= 0 else None


def near(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    """Whether two arrays agree, relative to the largest entry, and are NaN in the same places."""
    if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
        return False
    a, b = a[~np.isnan(a)].astype(b.dtype), b[~np.isnan(b)]
    return bool(np.all(np.abs(a - b) <= tolerance * np.max(np.abs(b), initial=0.0)))


def arrays(library: Library, case: Case) -> list[Any]:
    """Return the gradient of a case as arrays; a leaf that occurs twice as one array."""
    made: dict[int, Any] = {}
    for leaf, dtype in zip(case.grads, itertools.cycle(case.dtype), strict=False):
        if isinstance(leaf, Rows):
            made[id(leaf)] = library.framework.sparse((8, 1), list(leaf.rows), [[x] for x in leaf.values])
        elif id(leaf) not in made:
            made[id(leaf)] = library.framework.array(leaf, dtype)
    return [made[id(leaf)] for leaf in case.grads]


def norm64(leaves: list[np.ndarray]) -> float:
    """Return the norm of the leaves together, in float64."""
    return math.sqrt(sum(float(np.sum(np.square(leaf.astype(np.float64)))) for leaf in leaves))


# Writing


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
    """Return a number in six digits, the parts of a complex one in three."""
    x = complex(x)
    real, imaginary = f"{x.real + 0:.{3 if x.imag else 6}g}", f"{x.imag:+.3g}j"
    words = real if not x.imag else real + imaginary if x.real else imaginary.strip("+")
    return tidy(words).replace("inf", "∞").replace("nan", "NaN")


def tidy(text: str) -> str:
    """Write ``1e30`` rather than ``1e+30``."""
    return re.sub(r"e([+-])0*(?=\d)", lambda e: "e" + e[1].strip("+"), text)


def first_words(error: Exception) -> str:
    """Return the beginning of a message."""
    line = re.sub(r"^\{\{.*?\}\}\s*", "", str(error).strip()).partition("\n")[0]
    return textwrap.shorten(line.translate(dict.fromkeys(map(ord, "`|"))), 60, placeholder=" …")


def verdicts(case: Case) -> dict[str, Result]:
    """Return the result of each library, and one of uniclip: a wrong one if there is any."""
    results = run(case)
    ours = [result for name, result in results.items() if name.startswith("uniclip")]
    native = {library.name: results.get(library.name, Result(NONE)) for library in LIBRARIES}
    return {"uniclip": next((r for r in ours if r.mark != RIGHT), ours[0])} | native


def summary(groups: list[Group]) -> dict[str, Any]:
    """Count the cases, those that some native function gets wrong without an error, and each library's verdicts."""
    found = [verdicts(case) for group in groups for case in group.cases]
    natives = [[result.mark for name, result in results.items() if name != "uniclip"] for results in found]
    return {
        "cases": len(found),
        "uniclip right": sum(results["uniclip"].mark == RIGHT for results in found),
        "some native wrong": sum(WRONG in marks for marks in natives),
        "no native right": sum(RIGHT not in marks for marks in natives),
        "libraries": {name: Counter(results[name].mark for results in found) for name in found[0]},
    }
