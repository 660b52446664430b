# SPDX-License-Identifier: MIT
"""Gradients of the shapes of known networks, and of small trees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

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


def lstm() -> Iterator[Shape]:
    """Yield the shapes of two LSTM layers, 32 inputs to 64 units to 64 units, and a linear layer to 128 classes."""
    for into, units in pairwise([32, 64, 64]):
        yield from [(4 * units, into), (4 * units, units), (4 * units,), (4 * units,)]
    yield from linear(64, 128)


def convolution(into: int, out: int, size: int) -> list[Shape]:
    """Return the shapes of a convolution without a bias and of the batch norm behind it."""
    return [(out, into, size, size), (out,), (out,)]


def linear(into: int, out: int) -> list[Shape]:
    """Return the shapes of a linear layer."""
    return [(out, into), (out,)]


RESNET, LSTM, MLP, SMALL = "ResNet-50", "LSTM", "MLP", "one leaf of 16"
TEN, FIFTY, CONVOLUTIONS = "10 leaves of 16", "50 leaves of 64", "10 convolutions"
LAYERS = [32, 64, 64, 64, 64, 10]
"""The small MLP."""
TREES: dict[str, list[Shape]] = {
    RESNET: list(resnet50()),
    LSTM: list(lstm()),
    MLP: [shape for into, out in pairwise(LAYERS) for shape in linear(into, out)],
    SMALL: [(16,)],
    TEN: [(16,)] * 10,
    FIFTY: [(64,)] * 50,
    CONVOLUTIONS: [(out, into, 3, 3) for into, out in pairwise([3, 16, 16, 16, 16, 32, 32, 32, 64, 64, 64])],
}
"""Shapes in PyTorch's order of axes, output units first."""


def normal(shapes: list[Shape]) -> list[np.ndarray]:
    """Return normally distributed numbers whose root mean square is 0.001 in each array."""
    rng = np.random.default_rng(0)
    made = [rng.standard_normal(shape, dtype="float32") for shape in shapes]
    return [v * np.float32(1e-3 * math.sqrt(v.size) / np.linalg.norm(v)) for v in made]
