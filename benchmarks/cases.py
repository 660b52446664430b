# SPDX-License-Identifier: MIT
"""The cases of the comparison: a gradient, a kind of call and a limit each, in groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2}
"""The tolerated relative error, by dtype: the cost of half precision, else 1e-5."""


@dataclass(frozen=True)
class Rows:
    """A sparse gradient of a matrix of 8 rows and one column; duplicate rows are summed."""

    rows: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """One gradient, one kind of call, one limit."""

    title: str
    kind: str
    grads: list[Any]
    """The leaves: values for NumPy arrays, or `Rows`."""
    c: float = 1.0
    dtype: tuple[str, ...] = ("float32",)
    """The dtypes of the leaves, in turn."""
    words: str = ""
    """A description of the gradient, if it is too long to print."""
    measure: str = "clipped"
    """The compared quantity, a function of `compared`."""
    exact: bool = False

    @property
    def tolerance(self) -> float:
        """The tolerated relative error."""
        return 0.0 if self.exact else max(TOLERANCE.get(name, 1e-5) for name in self.dtype)

    @property
    def needs(self) -> set[str]:
        """The features that a case needs, and which some libraries lack."""
        return {"sparse" for g in self.grads if isinstance(g, Rows)} | {"derivative"} & {
            self.measure
        }


HALF, BRAIN, COMPLEX, MIXED = ("float16",), ("bfloat16",), ("complex64",), ("float16", "float32")
ONES, ONES_IN_WORDS = [[1.0] for _ in range(500)], "500 times `[1]`"
THOUSANDS = np.full(10_000, 1000.0)
MANY = np.random.default_rng(0).standard_normal(10_000_000, dtype="float32")
# One list, so one array.
SHARED = [1.0, 1.0]
BELOW, BELOW_IN_WORDS = [[0.5, 0.1, 0.3]], "`[0.5, 0.1, 0.3]` at the limits 1 to 199"
NORM, GLOBAL, VALUE, EXAMPLES = (
    "global norm",
    "by global norm",
    "by value",
    "sum of clipped examples",
)
TENSOR, ROW, RMS = "each tensor by norm", "each row by norm", "each tensor by root mean square"

GROUPS: dict[str, list[Case]] = {
    "usual": [
        Case("An ordinary gradient, clipped by its global norm", GLOBAL, [[3.0, 4.0], [12.0]], 6.5),
        Case("An ordinary gradient, clipped by value", VALUE, [[3.0, -0.5]]),
        Case("An ordinary gradient, each tensor clipped by its norm", TENSOR, [[3.0, 4.0], [0.5]]),
        Case(
            "An ordinary gradient, each tensor clipped by its root mean square",
            RMS,
            [[3.0, -3.0], [0.5]],
        ),
        Case("An ordinary gradient, each row clipped by its norm", ROW, [[[3.0, 4.0], [0.0, 0.5]]]),
        Case(
            "An ordinary gradient, the sum of clipped examples",
            EXAMPLES,
            [[[3.0, 4.0], [0.0, 0.5]]],
        ),
        Case("The norm of an ordinary gradient", NORM, [[3.0, 4.0], [12.0]]),
    ],
    "range": [
        Case("A finite gradient of 1e30", GLOBAL, [[1e30, 1.0]]),
        Case("A finite gradient of 1e30, each tensor by its norm", TENSOR, [[1e30, 1.0]]),
        Case("A finite gradient of 1e30, by root mean square", RMS, [[1e30, -1e30]]),
        Case(
            "One example of 1e30, the sum of clipped examples",
            EXAMPLES,
            [[[1e30, 0.0], [0.0, 3.0]]],
        ),
        Case("A limit of ∞, only to measure", GLOBAL, [[1e30, 1.0]], math.inf),
        Case(
            "A limit far above an ordinary gradient, each tensor by its norm",
            TENSOR,
            [[1e10, 1.0]],
            1e30,
        ),
        Case("A gradient of 1e-30 above its limit", GLOBAL, [[3e-30, 4e-30]], 1e-30),
        Case("The norm of a gradient of 1e-30", NORM, [[3e-30, 4e-30]]),
        Case("Clip by value, which needs no norm", VALUE, [[1e30, -1e-30]]),
    ],
    "nan": [
        Case("The norm, with a NaN in one of two tensors", NORM, [[math.nan, 1.0], [2.0]]),
        Case("A NaN in one of two tensors", GLOBAL, [[math.nan, 1.0], [2.0]]),
        Case("A NaN in one of two tensors, each by its norm", TENSOR, [[math.nan, 1.0], [2.0]]),
        Case("A NaN in one of two rows, each by its norm", ROW, [[[math.nan, 1e10], [0.0, 3.0]]]),
        Case("∞ in one of two rows, each by its norm", ROW, [[[math.inf, -math.inf], [0.0, 3.0]]]),
        Case(
            "A NaN in one of two examples, the sum of clipped examples",
            EXAMPLES,
            [[[math.nan, 1e10], [0.0, 3.0]]],
        ),
        Case(
            "∞ in one of two examples, the sum of clipped examples",
            EXAMPLES,
            [[[math.inf, -math.inf], [0.0, 3.0]]],
        ),
    ],
    "half": [
        Case("The norm of 500 bfloat16 tensors", NORM, ONES, 1.0, BRAIN, ONES_IN_WORDS),
        Case(
            "The norm of 500 bfloat16 tensors after clipping",
            GLOBAL,
            ONES,
            20.0,
            BRAIN,
            ONES_IN_WORDS,
            "norm_after",
        ),
        Case("A float16 gradient of 400", GLOBAL, [[300.0, 400.0]], 250.0, HALF),
        Case(
            "10,000 float16 elements of 1000",
            GLOBAL,
            [THOUSANDS],
            1000.0,
            HALF,
            "`[1000, 1000, …]`",
        ),
        Case("float16 and float32 in one model", GLOBAL, [[3.0], [1e5]], 5e4, MIXED),
        Case("The norm of a float16 gradient of 1e-4", NORM, [[1e-4, 1e-4]], 1.0, HALF),
    ],
    "sparse": [
        Case("Two different rows", GLOBAL, [Rows((0, 7), (3.0, 4.0))]),
        Case("Two different rows, clipped by value", VALUE, [Rows((0, 7), (3.0, 0.5))]),
        Case("The norm of a row that occurs twice", NORM, [Rows((0, 0), (3.0, 3.0))]),
        Case("A row that occurs twice", GLOBAL, [Rows((0, 0), (3.0, 3.0))]),
        Case("A row that occurs twice, clipped by value", VALUE, [Rows((0, 0), (0.8, 0.8))]),
        Case("The norm of two rows that cancel", NORM, [Rows((0, 0), (3.0, -3.0))]),
    ],
    "limits": [
        Case("A negative limit", GLOBAL, [[3.0, 4.0]], -1.0),
        Case("A negative limit, each tensor by its norm", TENSOR, [[3.0, 4.0]], -1.0),
        Case("A negative limit, by value", VALUE, [[3.0, 0.5]], -1.0),
        Case("A limit of NaN", GLOBAL, [[3.0, 4.0]], math.nan),
        Case("A limit of 0", GLOBAL, [[3.0, 4.0]], 0.0),
        Case("A limit of 0 and a gradient of 0", GLOBAL, [[0.0, 0.0]], 0.0),
        Case(
            "A limit of 0 and a gradient of 0, each tensor by its norm", TENSOR, [[0.0, 0.0]], 0.0
        ),
        Case("A small gradient below a small limit", GLOBAL, [[6e-7, 8e-7]], 1.5e-6),
    ],
    "derivatives": [
        Case("Where the gradient is clipped", GLOBAL, [[3.0, 4.0]], measure="derivative"),
        Case("Where the gradient is 0", GLOBAL, [[0.0, 0.0]], measure="derivative"),
        Case(
            "Where the gradient is 0, each tensor by its norm",
            TENSOR,
            [[0.0, 0.0]],
            measure="derivative",
        ),
        Case(
            "Where the gradient is 0, by root mean square", RMS, [[0.0, 0.0]], measure="derivative"
        ),
        Case("Of the norm, where the gradient is 0", NORM, [[0.0, 0.0]], measure="derivative"),
    ],
    "digits": [
        Case(
            "Unclipped gradients that change, by global norm",
            GLOBAL,
            BELOW,
            words=BELOW_IN_WORDS,
            measure="altered",
        ),
        Case(
            "Unclipped gradients that change, each by its norm",
            TENSOR,
            BELOW,
            words=BELOW_IN_WORDS,
            measure="altered",
        ),
        Case("A gradient exactly at its limit", GLOBAL, [[1.0, 0.0]], exact=True),
        Case(
            "The largest norm after clipping",
            GLOBAL,
            [],
            words="100 random gradients of 50 elements",
            measure="largest",
        ),
        Case("The norm of 10 million numbers", NORM, [MANY], words="random, normally distributed"),
        Case("Two parameters that share one gradient array", GLOBAL, [SHARED, SHARED]),
        Case("Complex numbers", GLOBAL, [[3 + 4j, 12j]], 6.5, COMPLEX),
    ],
}
"""Groups of cases with one cause, which the page explains, by a key."""
