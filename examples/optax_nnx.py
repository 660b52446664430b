# SPDX-License-Identifier: MIT
"""Clip by a rule with an adaptive limit, in optax, with a network of Flax NNX.

A small convolutional network reads scikit-learn's handwritten digits; one batch in twenty has
random labels, and a larger gradient than the others. The rule limits norms to the 90th percentile
of the last hundred; its state is a part of the optimizer's state. Needs ``pip install
"uniclip-gradients[demo]" flax optax``.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from tqdm import tqdm

import uniclip as uc
from uniclip.integrations.optax import scalars, to_optax

EPOCHS, BATCH = 5, 64
# The share of batches with random labels.
SPOILED = 0.05


class Network(nnx.Module):
    """A convolution and a dense layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Draw the weights."""
        self.convolution = nnx.Conv(1, 16, (3, 3), strides=2, rngs=rngs)
        self.dense = nnx.Linear(16 * 4 * 4, 10, rngs=rngs)

    def __call__(self, images: Any) -> Any:
        """Return a score for each class."""
        features = nnx.relu(self.convolution(images))
        return self.dense(features.reshape(len(images), -1))


def loss_of(model: Network, images: Any, labels: Any) -> Any:
    """Return the mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


@nnx.jit
def train_step(
    model: Network, optimizer: nnx.Optimizer, images: Any, labels: Any
) -> dict[str, Any]:
    """Take a step and return what to log; the optimizer clips."""
    loss, grads = nnx.value_and_grad(loss_of)(model, images, labels)
    optimizer.update(model, grads)
    return {"loss": loss, **scalars(optimizer.opt_state)}


def batches(rng: np.random.Generator) -> list[tuple[Any, Any]]:
    """Return the batches of an epoch, some of them spoiled."""
    digits = load_digits()
    images, labels = np.float32(digits.images[..., None] / 16), digits.target
    order = rng.permutation(len(labels))[: len(labels) // BATCH * BATCH]
    return [
        (images[some], rng.integers(10, size=BATCH) if rng.random() < SPOILED else labels[some])
        for some in np.split(order, len(order) // BATCH)
    ]


def main() -> str | None:
    """Train, print each epoch, and return any fault."""
    rng, model = np.random.default_rng(0), Network(nnx.Rngs(0))
    clip = to_optax(uc.autoclip(90, window=100))  # the one line
    optimizer = nnx.Optimizer(model, optax.chain(clip, optax.adam(3e-3)), wrt=nnx.Param)
    losses = []
    print("epoch   loss  clip/norm  clip/limit  clip/share")
    for epoch in range(EPOCHS):
        seen = [
            train_step(model, optimizer, *batch)
            for batch in tqdm(batches(rng), f"epoch {epoch}", leave=False)
        ]
        # The host reads the values once an epoch.
        mean = {name: np.mean([step[name] for step in seen]) for name in seen[0]}
        losses.append(mean["loss"])
        row = [mean[name] for name in ("loss", "clip/norm", "clip/limit", "clip/share")]
        print("{:5} {:6.3f} {:10.3f} {:11.3f} {:11.0%}".format(epoch, *row))
    return (
        None
        if losses[-1] < losses[0]
        else f"FAILED: the loss did not fall: {losses[0]:.3f}, {losses[-1]:.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
