"""The small model that every integration trains, and its training by hand in NumPy and float64."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Arrays: TypeAlias = dict[str, np.ndarray]

RATE = 0.1
MOMENTUM = 0.9
SIZES = (1.0, 0.3, 2.0, 60.0, 0.5, 1.5, math.nan, 0.9)
"""The factors of the targets of each batch: a spike in the 4th, NaN in the 7th."""


class Batch(NamedTuple):
    """The inputs of one step."""

    ids: np.ndarray
    """Rows of the table, shape (8,): some occur twice, the last row of the table never."""
    targets: np.ndarray
    """Shape (8, 2), float32."""


def weights() -> Arrays:
    """Return the initial weights: a bias, a table with one row for each id, a matrix."""
    rng = np.random.default_rng(7)
    shapes = {"b": (2,), "table": (5, 3), "w": (3, 2)}
    return {
        name: (0.5 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def batches() -> list[Batch]:
    """Return the batches of a training.

    The gradients of the usual ones have global norms of about 1.
    """
    rng = np.random.default_rng(8)
    made = []
    for size in SIZES:
        targets = rng.standard_normal((8, 2)).astype(np.float32)
        # A NaN reaches one column of the matrix and one row of the table.
        targets[0, 0] *= size
        targets[1:] *= size if math.isfinite(size) else 1
        made.append(Batch(rng.integers(0, 4, 8), targets))
    return made


def overflowing() -> Batch:
    """Return a batch with finite float32 gradients that overflow when multiplied by 1024."""
    ids, targets = batches()[0]
    return Batch(ids, targets * np.float32(1e37))


def parts(batch: Batch, count: int) -> list[Batch]:
    """Return a batch as several of equal size; the mean of their gradients is that of the batch."""
    return [Batch(*part) for part in zip(*(np.split(array, count) for array in batch), strict=True)]


def loss_and_grads(of: Arrays, batch: Batch) -> tuple[float, Arrays]:
    """Return the mean square of ``table[ids] @ w + b - targets``, and its gradients."""
    rows = of["table"][batch.ids]
    errors = rows @ of["w"] + of["b"] - batch.targets.astype(np.float64)
    slopes = 2 * errors / errors.size
    table = np.zeros_like(of["table"])
    np.add.at(table, batch.ids, slopes @ of["w"].T)
    return float((errors**2).mean()), {"b": slopes.sum(0), "table": table, "w": rows.T @ slopes}


class Momentum:
    """Gradient descent with momentum, which may be 0."""

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.sums: Arrays = {}

    def step(self, of: Arrays, grads: Arrays) -> None:
        """Take a step."""
        for name, grad in grads.items():
            self.sums[name] = self.momentum * self.sums.get(name, 0) + grad
            of[name] = of[name] - RATE * self.sums[name]


class Adam:
    """Adam with decoupled weight decay (AdamW), or without."""

    def __init__(self, decay: float = 0.0) -> None:
        self.decay, self.count = decay, 0
        self.means: Arrays = {}
        self.squares: Arrays = {}

    def step(self, of: Arrays, grads: Arrays) -> None:
        """Take a step."""
        self.count += 1
        for name, grad in grads.items():
            self.means[name] = 0.9 * self.means.get(name, 0) + 0.1 * grad
            self.squares[name] = 0.999 * self.squares.get(name, 0) + 0.001 * grad**2
            mean = self.means[name] / (1 - 0.9**self.count)
            root = np.sqrt(self.squares[name] / (1 - 0.999**self.count))
            of[name] = of[name] * (1 - RATE * self.decay) - RATE * mean / (root + 1e-8)


OPTIMIZERS = {"sgd": lambda: Momentum(0.0), "momentum": lambda: Momentum(MOMENTUM), "adam": Adam}


class ByHand:
    """The reference training: gradients, the rule, and an optimizer step unless it is skipped."""

    def __init__(self, uc: ModuleType, rule: Any, optimizer: str = "momentum") -> None:
        self.weights: Arrays = {name: array.astype(np.float64) for name, array in weights().items()}
        self.optimizer = OPTIMIZERS[optimizer]()
        self.clipper = uc.Clipper(rule)
        self.loss = math.nan

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.loss, grads = loss_and_grads(self.weights, batch)
        clipped = self.clipper(grads, self.weights, loss=self.loss)
        if not self.skipped:
            self.optimizer.step(self.weights, clipped)

    @property
    def skipped(self) -> bool:
        """Return whether the rule skipped the last step."""
        skipped = self.clipper.report.skipped
        return skipped is not None and bool(skipped)

    def scalars(self) -> dict[str, float]:
        """Return the scalars of the last step for a logger."""
        return {name: float(value) for name, value in self.clipper.report.scalars().items()}
