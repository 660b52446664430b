# SPDX-License-Identifier: MIT
"""Run each framework's own clipping function beside uniclip, and both beside the true result in float64.

Every result is the output of a call that this script makes. A case is a few lines in `GROUPS`.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import numpy as np

from side_by_side import Case, Group, Rows, altered, derivative, excess, norm_after

HALF, BRAIN, COMPLEX, MIXED = ("float16",), ("bfloat16",), ("complex64",), ("float16", "float32")
ONES, ONES_IN_WORDS = [[1.0] for _ in range(500)], "500 times `[1]`"
THOUSANDS = np.full(10_000, 1000.0)
MANY = np.random.default_rng(0).standard_normal(10_000_000, dtype="float32")
SHARED = [1.0, 1.0]  # one list, so one array
BELOW, BELOW_IN_WORDS = [[0.5, 0.1, 0.3]], "`[0.5, 0.1, 0.3]` at the limits 1, 2, …, 199"
NORM, GLOBAL, VALUE, EXAMPLES = "global norm", "by global norm", "by value", "sum of clipped examples"
TENSOR, ROW, RMS = "each tensor by norm", "each row by norm", "each tensor by root mean square"

GROUPS = [
    Group(
        "The usual case",
        "A check that each function is called as it should be.",
        "",
        [
            Case("An ordinary gradient, clipped by its global norm", GLOBAL, [[3.0, 4.0], [12.0]], 6.5),
            Case("An ordinary gradient, clipped by value", VALUE, [[3.0, -0.5]]),
            Case("An ordinary gradient, each tensor clipped by its norm", TENSOR, [[3.0, 4.0], [0.5]]),
            Case("An ordinary gradient, each tensor clipped by its root mean square", RMS, [[3.0, -3.0], [0.5]]),
            Case("An ordinary gradient, each row clipped by its norm", ROW, [[[3.0, 4.0], [0.0, 0.5]]]),
            Case("An ordinary gradient, the sum of clipped examples", EXAMPLES, [[[3.0, 4.0], [0.0, 0.5]]]),
            Case("The norm of an ordinary gradient", NORM, [[3.0, 4.0], [12.0]]),
        ],
    ),
    Group(
        "Very large and very small numbers",
        "A norm is the root of a sum of squares, and squares leave the range of float32 long before the numbers do: "
        "the largest float32 is 3.4e38, so the square of 2e19 is ∞, and the square of 1e-23 is 0. A norm of ∞ makes "
        "the factor limit/∞ = 0, or NaN where ∞ meets ∞; a norm of 0 leaves the gradient as it is. Dividing by the "
        "largest entry before squaring avoids both.",
        "a logged norm of ∞ or 0, and steps that write zeros or NaN although the loss was finite.",
        [
            Case("A finite gradient of 1e30", GLOBAL, [[1e30, 1.0]]),
            Case("A finite gradient of 1e30, each tensor by its norm", TENSOR, [[1e30, 1.0]]),
            Case("A finite gradient of 1e30, by root mean square", RMS, [[1e30, -1e30]]),
            Case("One example of 1e30, the sum of clipped examples", EXAMPLES, [[[1e30, 0.0], [0.0, 3.0]]]),
            Case("A limit of ∞, only to measure", GLOBAL, [[1e30, 1.0]], math.inf),
            Case("A limit far above an ordinary gradient, each tensor by its norm", TENSOR, [[1e10, 1.0]], 1e30),
            Case("A gradient of 1e-30 above its limit", GLOBAL, [[3e-30, 4e-30]], 1e-30),
            Case("The norm of a gradient of 1e-30", NORM, [[3e-30, 4e-30]]),
            Case("Clip by value, which needs no norm", VALUE, [[1e30, -1e-30]]),
        ],
    ),
    Group(
        "NaN in the gradient",
        "A NaN makes the norm NaN, and all that is clipped by that norm: every tensor under one global norm, and one "
        "tensor, row or example where each has its own. So it is seen, and it spreads no further than the norm does. "
        "A factor of NaN that is replaced by 1 lets the numbers beside the NaN pass without a limit. An ∞ has no "
        "clipped value either, and becomes NaN.",
        "examples that were meant to be bounded and are not, as in differentially private training.",
        [
            Case("The norm, with a NaN in one of two tensors", NORM, [[math.nan, 1.0], [2.0]]),
            Case("A NaN in one of two tensors", GLOBAL, [[math.nan, 1.0], [2.0]]),
            Case("A NaN in one of two tensors, each by its norm", TENSOR, [[math.nan, 1.0], [2.0]]),
            Case("A NaN in one of two rows, each by its norm", ROW, [[[math.nan, 1e10], [0.0, 3.0]]]),
            Case("∞ in one of two rows, each by its norm", ROW, [[[math.inf, -math.inf], [0.0, 3.0]]]),
            Case(
                "A NaN in one of two examples, the sum of clipped examples", EXAMPLES, [[[math.nan, 1e10], [0.0, 3.0]]]
            ),
            Case(
                "∞ in one of two examples, the sum of clipped examples", EXAMPLES, [[[math.inf, -math.inf], [0.0, 3.0]]]
            ),
        ],
    ),
    Group(
        "Half precision",
        "float16 ends at 65504: the square of 300 is ∞ there, the square of 1e-4 is 0. bfloat16 has the range of "
        "float32 but only 8 significant bits: a sum of ones kept in bfloat16 stops growing at 256, since 256 + 1 "
        "rounds to 256. Squares are safe when they are added up in float32, within a tensor and from tensor to "
        "tensor, and when the norm stays in float32.",
        "a norm that is a round number such as 16, or that stays the same while the model grows, and float16 steps "
        "that are all zero.",
        [
            Case("The norm of 500 bfloat16 tensors", NORM, ONES, 1.0, BRAIN, ONES_IN_WORDS),
            Case(
                "The norm of 500 bfloat16 tensors after clipping", GLOBAL, ONES, 20.0, BRAIN, ONES_IN_WORDS, norm_after
            ),
            Case("A float16 gradient of 400", GLOBAL, [[300.0, 400.0]], 250.0, HALF),
            Case("10,000 float16 entries of 1000", GLOBAL, [THOUSANDS], 1000.0, HALF, "`[1000, 1000, …]`"),
            Case("float16 and float32 in one model", GLOBAL, [[3.0], [1e5]], 5e4, MIXED),
            Case("The norm of a float16 gradient of 1e-4", NORM, [[1e-4, 1e-4]], 1.0, HALF),
        ],
    ),
    Group(
        "Sparse gradients",
        "The gradient of an embedding holds only the rows that were looked up: `{0: 3, 7: 4}` is a 3 in row 0 and a "
        "4 in row 7. A row looked up twice occurs twice, as in `{0: 3, 0: 3}`, and its gradient is the sum of both, "
        "so they have to be added before they are measured or clipped; a function that reads only the stored numbers "
        "sees two separate ones. In JAX a sparse array is itself a tree, of numbers and indices, so a function of "
        "trees may take the indices for gradients. Not every library says that it clips sparse gradients, and an "
        "error is better than a wrong step.",
        "embedding gradients whose dense form is above the limit after clipping.",
        [
            Case("Two different rows", GLOBAL, [Rows((0, 7), (3.0, 4.0))]),
            Case("Two different rows, clipped by value", VALUE, [Rows((0, 7), (3.0, 0.5))]),
            Case("The norm of a row that occurs twice", NORM, [Rows((0, 0), (3.0, 3.0))]),
            Case("A row that occurs twice", GLOBAL, [Rows((0, 0), (3.0, 3.0))]),
            Case("A row that occurs twice, clipped by value", VALUE, [Rows((0, 0), (0.8, 0.8))]),
            Case("The norm of two rows that cancel", NORM, [Rows((0, 0), (3.0, -3.0))]),
        ],
    ),
    Group(
        "Unusual limits",
        "No gradient has a norm below 0, so a negative limit is a mistake, and an error counts as right here; the "
        "same holds for NaN. Without a check, limit/norm is negative and turns the gradient around, or the limit is "
        "ignored or taken for 0. A limit of 0 and a gradient of 0 make 0/0 = NaN unless that is handled. The small "
        "number in limit/(norm + 1e-6), there to avoid that division, is no longer small where the norm is about "
        "1e-6.",
        "schedules whose limit decays to 0, gradients divided by a large number such as a count of tokens, and a loss "
        "that rises from the first step.",
        [
            Case("A negative limit", GLOBAL, [[3.0, 4.0]], -1.0),
            Case("A negative limit, each tensor by its norm", TENSOR, [[3.0, 4.0]], -1.0),
            Case("A negative limit, by value", VALUE, [[3.0, 0.5]], -1.0),
            Case("A limit of NaN", GLOBAL, [[3.0, 4.0]], math.nan),
            Case("A limit of 0", GLOBAL, [[3.0, 4.0]], 0.0),
            Case("A limit of 0 and a gradient of 0", GLOBAL, [[0.0, 0.0]], 0.0),
            Case("A limit of 0 and a gradient of 0, each tensor by its norm", TENSOR, [[0.0, 0.0]], 0.0),
            Case("A small gradient below a small limit", GLOBAL, [[6e-7, 8e-7]], 1.5e-6),
        ],
    ),
    Group(
        "Derivatives through the clip",
        "Learned optimizers, meta-learning and some penalties differentiate through clipping. The square root has an "
        "infinite slope at 0, and the chain rule makes NaN of ∞·0 there, even where clipping changes nothing. A "
        "function that works outside the framework's record of operations leaves the derivative as if there were no "
        "clipping. Measured is the derivative of g₁ + 2g₂, where g is the clipped gradient, or of the norm; the true "
        "one is a central difference in float64.",
        "NaN at parameters whose gradient is exactly 0.",
        [
            Case("Where the gradient is clipped", GLOBAL, [[3.0, 4.0]], measure=derivative),
            Case("Where the gradient is 0", GLOBAL, [[0.0, 0.0]], measure=derivative),
            Case("Where the gradient is 0, each tensor by its norm", TENSOR, [[0.0, 0.0]], measure=derivative),
            Case("Where the gradient is 0, by root mean square", RMS, [[0.0, 0.0]], measure=derivative),
            Case("Of the norm, where the gradient is 0", NORM, [[0.0, 0.0]], measure=derivative),
        ],
    ),
    Group(
        "The last digits",
        "A gradient within the limit should not change at all. Where the factor is computed as limit · (1/limit) or "
        "limit/(norm + 1e-6), it is not quite 1 for some limits. That does no harm to training, but a run with a "
        "limit that is never reached is then not the same as a run without one. Above the limit the result is "
        "rounded, so some norms end up a little above it; that counts as right. A sum of many float32 squares loses "
        "digits if it is kept in one float32 or a few. An array that two parameters share is scaled twice by a "
        "function that works in place.",
        "two runs that should be the same and are not.",
        [
            Case(
                "Unclipped gradients that change, by global norm",
                GLOBAL,
                BELOW,
                words=BELOW_IN_WORDS,
                measure=altered,
                exact=True,
            ),
            Case(
                "Unclipped gradients that change, each tensor by its norm",
                TENSOR,
                BELOW,
                words=BELOW_IN_WORDS,
                measure=altered,
                exact=True,
            ),
            Case("A gradient exactly at its limit", GLOBAL, [[1.0, 0.0]], exact=True),
            Case(
                "Norms above the limit after clipping, and by how much at most",
                GLOBAL,
                [],
                words="100 random gradients of 50 entries",
                measure=excess,
            ),
            Case("The norm of 10 million numbers", NORM, [MANY], words="random, normally distributed"),
            Case("Two parameters that share one gradient array", GLOBAL, [SHARED, SHARED]),
            Case("Complex numbers", GLOBAL, [[3 + 4j, 12j]], 6.5, COMPLEX),
        ],
    ),
]


def main() -> None:
    """Print the cases, then how many each library gets right."""
    from compared_tables import blocks, tally, versions  # noqa: PLC0415 - it imports the cases from here

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", default="", metavar="TEXT", help="only the cases with TEXT in their title")
    text = parser.parse_args().case.lower()
    chosen = [replace(group, cases=[c for c in group.cases if text in c.title.lower()]) for group in GROUPS]
    chosen = [group for group in chosen if group.cases]
    if not chosen:
        parser.error(f"no title has {text!r} in it")
    for block in [versions(), *blocks(chosen)]:
        print(block, end="\n\n", flush=True)
    print(f"### In all\n\n{tally(chosen)}")


if __name__ == "__main__":
    main()
