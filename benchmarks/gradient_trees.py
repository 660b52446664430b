# SPDX-License-Identifier: MIT
"""The shapes of the gradients of known networks, from their architecture, and of trees at the extremes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

Shape = tuple[int, ...]


def resnet50() -> Iterator[Shape]:
    """Yield the shapes of ResNet-50: 53 convolutions, each with a batch norm, and a linear layer to 1,000 classes."""
    yield from convolution(3, 64, 7)
    into = 64
    for width, blocks in [(64, 3), (128, 4), (256, 6), (512, 3)]:
        for block in range(blocks):
            yield from convolution(into, width, 1)
            yield from convolution(width, width, 3)
            yield from convolution(width, 4 * width, 1)
            if block == 0:
                yield from convolution(into, 4 * width, 1)
            into = 4 * width
    yield from linear(into, 1000)


def gpt2() -> Iterator[Shape]:
    """Yield the shapes of GPT-2 small: 12 blocks of width 768, 50,257 tokens, 1,024 positions."""
    width, norm = 768, [(768,), (768,)]
    yield from [(50257, width), (1024, width)]
    for _ in range(12):
        yield from [*norm, *linear(width, 3 * width), *linear(width, width)]
        yield from [*norm, *linear(width, 4 * width), *linear(4 * width, width)]
    yield from norm


def lstm() -> Iterator[Shape]:
    """Yield the shapes of two LSTM layers, 32 inputs to 64 units to 64 units, and a linear layer to 128 classes."""
    for into, units in pairwise([32, 64, 64]):
        yield from [(4 * units, into), (4 * units, units), (4 * units,), (4 * units,)]
    yield from linear(64, 128)


def mlp() -> Iterator[Shape]:
    """Yield the shapes of five linear layers: 32 inputs, four layers of 64 units, 10 classes."""
    for into, out in pairwise([32, 64, 64, 64, 64, 10]):
        yield from linear(into, out)


def convolutions() -> Iterator[Shape]:
    """Yield the shapes of ten convolutions of 3 x 3 without a bias, as a small residual network has them."""
    for into, out in pairwise([3, 16, 16, 16, 16, 32, 32, 32, 64, 64, 64]):
        yield (out, into, 3, 3)


def convolution(into: int, out: int, size: int) -> list[Shape]:
    """Return the shapes of a convolution without a bias and of the batch norm behind it."""
    return [(out, into, size, size), (out,), (out,)]


def linear(into: int, out: int) -> list[Shape]:
    """Return the shapes of a linear layer."""
    return [(out, into), (out,)]


RESNET, GPT, LSTM = "ResNet-50", "GPT-2 small", "LSTM"
TINY, BIG, SMALL = "1,000 leaves of 16", "one leaf of 25 M", "one leaf of 16"
MLP, TEN, FIFTY, CONVOLUTIONS = "MLP", "10 leaves of 16", "50 leaves of 64", "10 convolutions"
TREES: dict[str, list[Shape]] = {
    RESNET: list(resnet50()),
    GPT: list(gpt2()),
    LSTM: list(lstm()),
    TINY: [(16,)] * 1000,
    BIG: [(25_000_000,)],
    SMALL: [(16,)],
    MLP: list(mlp()),
    TEN: [(16,)] * 10,
    FIFTY: [(64,)] * 50,
    CONVOLUTIONS: list(convolutions()),
}
"""Shapes in PyTorch's order of axes, output units first."""
LARGE = [RESNET, GPT, BIG]


def entries(shapes: list[Shape]) -> int:
    """Count the entries of all leaves."""
    return sum(map(math.prod, shapes))


def check(tree: str, leaves: int, count: int) -> None:
    """Refuse shapes that are not those of the network as it was published."""
    if (len(TREES[tree]), entries(TREES[tree])) != (leaves, count):
        msg = f"{tree} has {leaves} leaves and {count:,} entries, not {len(TREES[tree])} and {entries(TREES[tree]):,}"
        raise ValueError(msg)


check(RESNET, 161, 25_557_032)
check(GPT, 148, 124_439_808)
check(LSTM, 10, 66_688)
