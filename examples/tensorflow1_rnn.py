# SPDX-License-Identifier: MIT
"""A recurrent network in a TensorFlow 1 graph: its gradients explode, and one line clips them.

It learns the text of this repository's license, character by character, in sequences of 60. The
recurrent weights and the learning rate are large, so gradients grow from character to character:
without clipping the first steps destroy the network. The same network is trained without the line
and with it, and resumes in a new graph from a checkpoint. Exits with 1 if the loss does not fall.
Needs ``pip install "uniclip-gradients[demo]"`` and TensorFlow.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tqdm import tqdm

import uniclip as uc
from uniclip.integrations.tensorflow import ClippedOptimizer, clip_gradients_by_norm

tf1 = tf.compat.v1
TEXT = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")
LETTERS = sorted(set(TEXT))
NUMBERS = np.asarray([LETTERS.index(letter) for letter in TEXT])
HIDDEN, LENGTH, BATCH = 64, 60, 16
LEARNING_RATE, CLIP_NORM = 4.0, 0.25
# The steps of an epoch.
STEPS = 50


class Network(NamedTuple):
    """The tensors and operations that a session runs."""

    letters: Any
    loss: Any
    train: Any
    logged: dict[str, Any]


def weights(name: str, rows: int, columns: int, gain: float) -> Any:
    """Return a variable of random numbers, which its name determines."""
    rng = np.random.default_rng(list(name.encode()))
    return tf1.get_variable(
        name, initializer=np.float32(gain * rng.normal(size=(rows, columns)) / math.sqrt(rows))
    )


def loss_of(letters: Any) -> Any:
    """Return the mean loss per letter of a recurrent network that predicts the next one."""
    w_in = weights("rnn/in", len(LETTERS), HIDDEN, math.sqrt(len(LETTERS)))
    w_state, w_out = (
        weights("rnn/state", HIDDEN, HIDDEN, 1.5),
        weights("out", HIDDEN, len(LETTERS), 1.0),
    )
    inputs = tf.gather(w_in, tf.transpose(letters[:, :-1]))
    states = tf.scan(
        lambda state, x: tf.tanh(x + state @ w_state), inputs, tf.zeros([BATCH, HIDDEN])
    )
    logits = tf.reshape(states, [-1, HIDDEN]) @ w_out
    targets = tf.reshape(tf.transpose(letters[:, 1:]), [-1])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))


def build(*, clip: bool) -> Network:
    """Build the graph, as programs for TensorFlow 1 do."""
    letters = tf1.placeholder(tf.int32, [BATCH, LENGTH + 1], name="letters")
    loss = loss_of(letters)
    optimizer = tf1.train.GradientDescentOptimizer(LEARNING_RATE)
    if clip:
        optimizer = clip_gradients_by_norm(optimizer, CLIP_NORM)  # the one line
    else:
        optimizer = ClippedOptimizer(optimizer, uc.by_global_norm(math.inf))  # measures only
    train = optimizer.minimize(loss, global_step=tf1.train.get_or_create_global_step())
    return Network(letters, loss, train, optimizer.scalars())


def batch(step: int) -> np.ndarray:
    """Return the letters of a step, a function of the step only."""
    first = np.random.default_rng(step).integers(len(NUMBERS) - LENGTH, size=(BATCH, 1))
    return NUMBERS[first + np.arange(LENGTH + 1)]


def run(
    label: str, epochs: range, *, clip: bool, load: str | None = None, save: str | None = None
) -> np.ndarray:
    """Train in a new graph, from a checkpoint or from the start.

    Print each epoch, and return the losses.
    """
    print(f"\n{label}\nepoch    loss  clip/norm (largest)  clip/limit  clip/share")
    losses = []
    with tf.Graph().as_default(), tf1.Session() as session:
        network, saver = build(clip=clip), tf1.train.Saver()
        session.run(tf1.global_variables_initializer())
        if load:
            saver.restore(session, load)
        for epoch in epochs:
            seen = []
            for step in tqdm(
                range(epoch * STEPS, (epoch + 1) * STEPS), f"epoch {epoch}", leave=False
            ):
                fetches = [network.train, network.loss, network.logged]
                _, loss, logged = session.run(fetches, {network.letters: batch(step)})
                losses.append(loss)
                seen.append([logged[name] for name in ("clip/norm", "clip/limit", "clip/share")])
            norms, limits, shares = np.transpose(seen)
            mean, largest = (
                np.mean(losses[-STEPS:]),
                f"{norms.mean():9.3g} {f'({norms.max():.3g})':>9}",
            )
            print(f"{epoch:5} {mean:7.3f}  {largest}  {limits.min():10.3g}  {shares.mean():10.0%}")
        if save:
            saver.save(session, save)
    return np.asarray(losses)


def main() -> str | None:
    """Train three times, and return any fault."""
    run("without clipping", range(2), clip=False)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = f"{folder}/model"
        first = run(
            f"clip_gradients_by_norm(optimizer, {CLIP_NORM})", range(2), clip=True, save=checkpoint
        )
        rest = run("the same, from the checkpoint on", range(2, 5), clip=True, load=checkpoint)
    before, after = first[:STEPS].mean(), rest[-STEPS:].mean()
    if not after < before / 2:
        return (
            f"FAILED: the loss went from {before:.3f} in the first epoch to {after:.3f} in the last"
        )
    return None


if __name__ == "__main__":
    sys.exit(main())
