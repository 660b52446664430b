# SPDX-License-Identifier: MIT
"""Run each framework's own clipping function next to uniclip, and compare both with float64.

Every result is the output of a call that this program makes; `cases` defines the calls and inputs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import platform
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from calls import LIBRARIES, TRUTH, Framework, Library, uniclip_on
from cases import GROUPS, Case, Rows

RIGHT, WRONG, ERROR, NONE = "✓", "✗", "error", "–"  # noqa: RUF001 - a dash
# The number of elements to show.
MORE = 3
Leaves = list[np.ndarray]


# The compared quantities: each function takes a library, uniclip or the definition.


def clipped(library: Library, case: Case) -> Leaves:
    """Return the clipped gradients."""
    out = library.call(case.kind, arrays(library, case), case.c)
    return [library.numpy(leaf) for leaf in (out if isinstance(out, (list, tuple)) else [out])]


def norm_after(library: Library, case: Case) -> Leaves:
    """Return the norm of the clipped gradients, in float64."""
    return [np.asarray(norm64(clipped(library, case)))]


def derivative(library: Library, case: Case) -> Leaves:
    """Return the derivative of g₁ + 2g₂, or of the norm, with respect to the gradient (g₁, g₂)."""

    def weighed(x: Any) -> Any:
        out = library.call(case.kind, [x], case.c)
        return out[0][0] + 2 * out[0][1] if isinstance(out, (list, tuple)) else out

    return [library.numpy(library.framework.gradient(weighed, *arrays(library, case)))]


def altered(library: Library, case: Case) -> Leaves:
    """Count the limits above the norm at which some bit changes."""
    before = library.numpy(arrays(library, case)[0])
    after = [
        library.numpy(library.call(case.kind, arrays(library, case), float(c))[0])
        for c in range(1, 200)
    ]
    return [np.asarray(sum(not np.array_equal(before, a) for a in after))]


def largest(library: Library, case: Case) -> Leaves:
    """Return the largest norm of random gradients after clipping."""
    random = np.random.default_rng(0).standard_normal((100, 50)).astype("float32")
    outs = [library.call(case.kind, [library.framework.array(g)], case.c)[0] for g in random]
    return [np.asarray(max(norm64([library.numpy(out)]) for out in outs))]


MEASURES = {
    function.__name__: function for function in (clipped, norm_after, derivative, altered, largest)
}


@dataclass(frozen=True)
class Result:
    """A verdict, and the output."""

    mark: str
    text: str = ""

    def __str__(self) -> str:
        mark = self.mark if self.mark in {RIGHT, NONE} else f"**{self.mark}**"
        return f"{mark} `{self.text}`" if self.text else mark


def offers(library: Library, case: Case) -> bool:
    """Return whether a library has the function and the arrays of a case."""
    return case.kind in library.calls and not library.lacks & case.needs


def result(library: Library, case: Case) -> Result:
    """Return what a library returns or raises.

    An error is right only if the case has no result.
    """
    true = truth(case)
    # A missing library is not a result.
    _ = library.modules
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = MEASURES[case.measure](library, case)
    except Exception as error:  # noqa: BLE001 - an error of any kind is a result here
        return Result(
            ERROR if true else RIGHT,
            f"{type(error).__name__}: {first_words(error)}".removesuffix(": "),
        )
    right = true and all(near(a, b, case.tolerance) for a, b in zip(found, true, strict=True))
    return Result(RIGHT if right else WRONG, shown(found))


@cache
def truth(case: Case) -> Leaves | None:
    """Return the right output; ``None`` for a negative or NaN limit, which should be an error."""
    return MEASURES[case.measure](TRUTH, case) if case.c >= 0 else None


@cache
def verdicts(case: Case) -> dict[str, Result]:
    """Return the result of each library, and one of uniclip on the arrays of all.

    The latter is a wrong result if there is any.
    """
    able = [library for library in LIBRARIES if offers(library, case)]
    frameworks = {library.framework.name: library for library in able}
    ours = [result(uniclip_on(library), case) for library in frameworks.values()]
    found = {
        library.name: result(library, case) if library in able else Result(NONE)
        for library in LIBRARIES
    }
    return {"uniclip": next((one for one in ours if one.mark != RIGHT), ours[0])} | found


def near(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    """Return whether two arrays agree, relative to the largest element; NaN equals NaN."""
    if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
        return False
    a, b = a[~np.isnan(a)].astype(b.dtype), b[~np.isnan(b)]
    return bool(np.all(np.abs(a - b) <= tolerance * np.max(np.abs(b), initial=0.0)))


def arrays(library: Library, case: Case) -> list[Any]:
    """Return the gradient of a case as arrays; a leaf that occurs twice is one array."""
    pairs = zip(case.grads, itertools.cycle(case.dtype), strict=False)
    made = {id(leaf): array(library.framework, leaf, dtype) for leaf, dtype in pairs}
    return [made[id(leaf)] for leaf in case.grads]


def array(framework: Framework, leaf: Any, dtype: str) -> Any:
    """Return a leaf as an array."""
    if isinstance(leaf, Rows):
        return framework.sparse((8, 1), list(leaf.rows), [[x] for x in leaf.values])
    return framework.array(leaf, dtype)


def norm64(leaves: list[np.ndarray]) -> float:
    """Return the joint norm of the leaves in float64."""
    return math.sqrt(sum(float(np.sum(np.square(leaf.astype(np.float64)))) for leaf in leaves))


# Writing


def shown(leaves: list[Any]) -> str:
    """Return a description of arrays."""
    return "`, `".join(map(show, leaves))


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
    shown = [*map(show, values[:3])] if len(values) <= MORE else [*map(show, values[:2]), "…"]
    return f"[{', '.join(shown)}]"


def rows_of(rows: Any, values: Any) -> str:
    """Return the nonzero rows of a sparse gradient."""
    return f"{{{', '.join(f'{i}: {number(x)}' for i, x in zip(rows, values, strict=True))}}}"


def number(x: Any) -> str:
    """Return a number with six digits, or a complex one with three for each component."""
    x = complex(x)
    real, imaginary = f"{x.real + 0:.{3 if x.imag else 6}g}", f"{x.imag:+.3g}j"
    words = real if not x.imag else real + imaginary if x.real else imaginary.strip("+")
    return tidy(words).replace("inf", "∞").replace("nan", "NaN")


def tidy(text: str) -> str:
    """Write ``1e30`` rather than ``1e+30``."""
    return re.sub(r"e([+-])0*(?=\d)", lambda e: "e" + e[1].strip("+"), text)


def first_words(error: Exception) -> str:
    """Return the beginning of an error message."""
    line = re.sub(r"^\{\{.*?\}\}\s*", "", str(error).strip()).partition("\n")[0]
    return textwrap.shorten(line.translate(dict.fromkeys(map(ord, "`|"))), 60, placeholder=" …")


def parts() -> dict[str, str]:
    """Return the parts of the page by name, in Markdown.

    Usual cases, in which all libraries are right, are omitted.
    """
    cases = {
        f"cases-{name}": "\n\n".join(map(block, cases))
        for name, cases in GROUPS.items()
        if name != "usual"
    }
    return {"tally": tally(itertools.chain(*GROUPS.values())), "versions": versions(), **cases}


def tally(cases: Iterable[Case]) -> str:
    """Return how many cases each library gets right, and how many some built-in gets wrong."""
    found = list(map(verdicts, cases))
    counts = {name: Counter(results[name].mark for results in found) for name in found[0]}
    rows = [
        [name, *(str(marks[mark]) for mark in (RIGHT, WRONG, ERROR, NONE))]
        for name, marks in counts.items()
    ]
    wrong = sum(
        any(result.mark == WRONG for result in list(results.values())[1:]) for results in found
    )
    rows.append(["at least one built-in", "", str(wrong), "", ""])
    return table([" ", "right", "wrong", "error", "none"], rows, "--:")


def versions() -> str:
    """Return the versions and the machine."""
    everything = [*LIBRARIES, TRUTH, uniclip_on(TRUTH)]
    modules = [module for library in everything for module in library.modules.values()]
    names = {
        m.__name__.partition(".")[0]: m.__version__ for m in modules if hasattr(m, "__version__")
    }
    texts = ", ".join(f"{name} {version}" for name, version in names.items())
    return f"{texts}; Python {platform.python_version()} on {platform.machine()}"


def block(case: Case) -> str:
    """Return a case, the right result, and the result of each library."""
    words = case.words or f"`{shown(case.grads)}`"
    dtype = "" if case.dtype == ("float32",) else f" in {' and '.join(case.dtype)}"
    limit = (
        ""
        if case.kind == "global norm" or case.measure == "altered"
        else f", limit {number(case.c)}"
    )
    right = f"`{shown(true)}`" if (true := truth(case)) else "an error"
    lines = [f"- {f'*{name}*':12} {result}" for name, result in verdicts(case).items()]
    return "\n".join([f"**{case.title}**: {words}{dtype}{limit}; right: {right}", "", *lines])


def table(heads: list[str], rows: Iterable[list[str]], align: str = "---") -> str:
    """Return a Markdown table; ``align`` is the alignment of all columns but the first."""
    lines = [heads, ["---", *[align] * (len(heads) - 1)], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def main() -> None:
    """Print the cases, and then how many each library gets right."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--case", default="", metavar="TEXT", help="only the cases with TEXT in their title"
    )
    text = parser.parse_args().case.lower()
    chosen = [case for case in itertools.chain(*GROUPS.values()) if text in case.title.lower()]
    if not chosen:
        parser.error(f"no title has {text!r} in it")
    for part in itertools.chain([versions()], map(block, chosen)):
        print(part, end="\n\n", flush=True)
    print(tally(chosen))


if __name__ == "__main__":
    main()
