# SPDX-License-Identifier: MIT
"""Run each framework's own clipping function beside uniclip, and both beside the true result in float64.

Every result is the output of a call that this script makes; a library that is not installed is named.
A case is a few lines in `GROUPS`. Run ``python benchmarks/how_others_behave.py``; with ``--markdown FILE`` the tables
are written as Markdown too.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np

from native_functions import Rows
from side_by_side import Case, Group, altered, derivative, excess, markdown, norm_after, terminal, versions

HALF, BRAIN = ("float16",), ("bfloat16",)


ONES = [[1.0] for _ in range(500)]
MANY = np.random.default_rng(0).standard_normal(10_000_000, dtype="float32")
SHARED = [1.0, 1.0]  # one list, so one array
GROUPS = [
    Group(
        "The usual case",
        "A check that each function is called as it should be.",
        "",
        [
            Case("An ordinary gradient, clipped by its global norm", "by_global_norm", [[3.0, 4.0], [12.0]], 6.5),
            Case("An ordinary gradient, clipped by value", "by_value", [[3.0, -0.5]]),
            Case("An ordinary gradient, each tensor clipped by its norm", "by_norm", [[3.0, 4.0], [0.5]]),
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
            Case("A finite gradient of 1e30", "by_global_norm", [[1e30, 1.0]]),
            Case("A finite gradient of 1e30, each tensor by its norm", "by_norm", [[1e30, 1.0]]),
            Case("A finite gradient of 1e30, by root mean square", "by_block_rms", [[1e30, -1e30]]),
            Case("One example of 1e30 in a batch of two", "each_example", [[[1e30, 0.0], [0.0, 3.0]]]),
            Case("A limit of ∞, only to measure", "by_global_norm", [[1e30, 1.0]], math.inf),
            Case("A limit far above an ordinary gradient", "by_norm", [[1e10, 1.0]], 1e30),
            Case("A gradient of 1e-30 above its limit", "by_global_norm", [[3e-30, 4e-30]], 1e-30),
            Case("The norm of a gradient of 1e-30", "global_norm", [[3e-30, 4e-30]]),
            Case("Clip by value, which needs no norm", "by_value", [[1e30, -1e-30]]),
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
            Case("The norm of 500 bfloat16 tensors", "global_norm", ONES, dtype=BRAIN, words="500 times `[1]`"),
            Case(
                "The norm of 500 bfloat16 tensors after clipping",
                "by_global_norm",
                ONES,
                20.0,
                BRAIN,
                "500 times `[1]`",
                norm_after,
            ),
            Case("A float16 gradient of 400", "by_global_norm", [[300.0, 400.0]], 250.0, HALF),
            Case(
                "10,000 float16 entries of 1000",
                "by_global_norm",
                [np.full(10_000, 1000.0)],
                1000.0,
                HALF,
                "`[1000, 1000, …]`",
            ),
            Case("float16 and float32 in one model", "by_global_norm", [[3.0], [1e5]], 5e4, ("float16", "float32")),
            Case("The norm of a float16 gradient of 1e-4", "global_norm", [[1e-4, 1e-4]], dtype=HALF),
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
            Case("Two different rows", "by_global_norm", [Rows((0, 7), (3.0, 4.0))]),
            Case("Two different rows, clipped by value", "by_value", [Rows((0, 7), (3.0, 0.5))]),
            Case("The norm of a row that occurs twice", "global_norm", [Rows((0, 0), (3.0, 3.0))]),
            Case("A row that occurs twice", "by_global_norm", [Rows((0, 0), (3.0, 3.0))]),
            Case("A row that occurs twice, clipped by value", "by_value", [Rows((0, 0), (0.8, 0.8))]),
            Case("The norm of two rows that cancel", "global_norm", [Rows((0, 0), (3.0, -3.0))]),
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
            Case("A negative limit", "by_global_norm", [[3.0, 4.0]], -1.0),
            Case("A negative limit, each tensor by its norm", "by_norm", [[3.0, 4.0]], -1.0),
            Case("A negative limit, by value", "by_value", [[3.0, 0.5]], -1.0),
            Case("A limit of NaN", "by_global_norm", [[3.0, 4.0]], math.nan),
            Case("A limit of 0", "by_global_norm", [[3.0, 4.0]], 0.0),
            Case("A limit of 0 and a gradient of 0", "by_global_norm", [[0.0, 0.0]], 0.0),
            Case("A limit of 0 and a gradient of 0, each tensor by its norm", "by_norm", [[0.0, 0.0]], 0.0),
            Case("A small gradient below a small limit", "by_global_norm", [[6e-7, 8e-7]], 1.5e-6),
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
            Case("Where the gradient is clipped", "by_global_norm", [[3.0, 4.0]], measure=derivative),
            Case(
                "Where the gradient is 0",
                "by_global_norm",
                [[0.0, 0.0]],
                measure=derivative,
            ),
            Case("Where the gradient is 0, each tensor by its norm", "by_norm", [[0.0, 0.0]], measure=derivative),
            Case("Where the gradient is 0, by root mean square", "by_block_rms", [[0.0, 0.0]], measure=derivative),
            Case(
                "Of the norm, where the gradient is 0",
                "global_norm",
                [[0.0, 0.0]],
                measure=derivative,
            ),
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
                "by_global_norm",
                [[0.5, 0.1, 0.3]],
                words="`[0.5, 0.1, 0.3]` at the limits 1, 2, …, 199",
                measure=altered,
                exact=True,
            ),
            Case(
                "Unclipped gradients that change, each tensor by its norm",
                "by_norm",
                [[0.5, 0.1, 0.3]],
                words="`[0.5, 0.1, 0.3]` at the limits 1, 2, …, 199",
                measure=altered,
                exact=True,
            ),
            Case("A gradient exactly at its limit", "by_global_norm", [[1.0, 0.0]], exact=True),
            Case(
                "Norms above the limit after clipping, and by how much at most",
                "by_global_norm",
                [],
                words="100 random gradients of 50 entries",
                measure=excess,
            ),
            Case(
                "The norm of 10 million numbers",
                "global_norm",
                [MANY],
                words="random, normally distributed",
            ),
            Case("Two parameters that share one gradient array", "by_global_norm", [SHARED, SHARED]),
            Case("Complex numbers", "by_global_norm", [[3 + 4j, 12j]], 6.5, ("complex64",)),
        ],
    ),
]


def main() -> None:
    """Run all cases, print the tables and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown too")
    file = parser.parse_args().markdown
    print(versions(), end="\n\n")
    for group in GROUPS:
        print(terminal(group))
    if file:
        file.write_text(markdown(GROUPS), encoding="utf-8")


if __name__ == "__main__":
    main()
