# SPDX-License-Identifier: MIT
"""A recurrent network in a TensorFlow 1 graph: its gradients explode, and one line clips them.

It learns to write the text of this repository's license, character by character. The network is unrolled over 60
characters and its recurrent weights are large, so the gradient of a step is now and then a thousand times as long as it
usually is. Plain gradient descent makes one huge step then, and the network has forgotten everything. So the same
network is trained without clipping, with it, and, from a checkpoint written halfway, once more.
Needs ``pip install "uniclip[demo]"`` and TensorFlow.
"""

from __future__ import annotations

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
HIDDEN, LENGTH, BATCH = 64, 60, 16
EPOCHS, STEPS = 6, 60  # steps of an epoch
SEED = 0
CELL, LR, GAIN, LIMIT = tf.tanh, 1.0, 1.5, 1.0


class Network(NamedTuple):
    """What is run in a session."""

    letters: Any
    loss: Any
    train: Any
    logged: dict[str, Any]


def build(clip: bool) -> Network:
    """Build the graph, as programs for TensorFlow 1 do."""
    rng = np.random.default_rng(SEED)

    def weights(name: str, rows: int, columns: int, size: float) -> Any:
        return tf1.get_variable(name, initializer=np.float32(size * rng.normal(size=(rows, columns)) / rows**0.5))

    letters = tf1.placeholder(tf.int32, [BATCH, LENGTH + 1], name="letters")
    w_in = weights("rnn/in", len(LETTERS), HIDDEN, len(LETTERS) ** 0.5)
    w_state = weights("rnn/state", HIDDEN, HIDDEN, GAIN)
    w_out = weights("out", HIDDEN, len(LETTERS), 1.0)
    inputs = tf.gather(w_in, tf.transpose(letters[:, :-1]))
    states = tf.scan(lambda state, x: CELL(x + state @ w_state), inputs, tf.zeros([BATCH, HIDDEN]))
    logits = tf.reshape(states, [-1, HIDDEN]) @ w_out
    targets = tf.reshape(tf.transpose(letters[:, 1:]), [-1])
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))

    optimizer = tf1.train.GradientDescentOptimizer(LR)
    if clip:
        optimizer = clip_gradients_by_norm(optimizer, LIMIT)  # <-- THE LINE
    else:
        optimizer = ClippedOptimizer(optimizer, uc.by_global_norm(float("inf")))  # which only measures
    train = optimizer.minimize(loss, global_step=tf1.train.get_or_create_global_step())
    return Network(letters, loss, train, optimizer.scalars())
