# SPDX-License-Identifier: MIT
"""Six small tasks, in JAX, of the kinds on which people clip: what ``choose_a_limit.py`` trains.

Digits of 8 x 8 pixels from scikit-learn, read by a tanh RNN, a CNN, a deep MLP and an LSTM; text of a made-up grammar,
read by a tanh RNN and a transformer. A bad batch has inputs 20 times as large and any labels; of text, a loss 20 times
as large, as if it was summed over the positions, and any next letters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

Params = dict[str, Any]
LETTERS, LENGTH = 28, 24
BAD_SHARE, LOUDNESS = 0.02, 20.0
BATCH = 32


class Task(NamedTuple):
    """A network and what it learns."""

    init: Callable[[Any], Params]
    logits: Callable[[Params, Any], Any]
    data: str
    adam: bool
    rates: tuple[float, float]
    """Learning rates: a usual one, and a bold one."""
    bad_rates: tuple[float, ...]
    """Those with bad batches too."""


class Data(NamedTuple):
    """What is learned, and what is left for validation."""

    inputs: np.ndarray[Any, Any]
    targets: np.ndarray[Any, Any]
    val_inputs: np.ndarray[Any, Any]
    val_targets: np.ndarray[Any, Any]
    classes: int


def digits() -> Data:
    """Return the digits, with pixels from 0 to 1; every fifth one is for validation."""
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = (pixels / 16).astype(np.float32), labels.astype(np.int32)
    held = np.arange(len(labels)) % 5 == 0
    return Data(pixels[~held], labels[~held], pixels[held], labels[held], 10)


def text() -> Data:
    """Return windows of text: 60 words of a random language, and a random grammar of which word follows which."""
    rng = np.random.default_rng(0)
    words = [rng.integers(1, LETTERS, rng.integers(2, 8)) for _ in range(60)]
    follows = rng.dirichlet(np.full(60, 0.1), size=60)
    stream: list[int] = []
    word = 0
    while len(stream) < 4400 * LENGTH:
        word = int(rng.choice(60, p=follows[word]))
        stream += [*words[word].tolist(), 0]
    windows = np.asarray(stream[: 4400 * LENGTH], np.int32).reshape(-1, LENGTH)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    return Data(inputs[:4000], targets[:4000], inputs[4000:], targets[4000:], LETTERS)


DATA: dict[str, Callable[[], Data]] = {"digits": digits, "text": text}


def dense(key: Any, into: int, out: int, gain: float = 1.0) -> Any:
    """Return a matrix whose entries have the deviation ``gain / √into``."""
    return gain / math.sqrt(into) * jax.random.normal(key, (into, out))


def rnn_init(key: Any, into: int, width: int, out: int, gain: float = 1.3) -> Params:
    """Return the parameters of a tanh RNN."""
    first, second, third = jax.random.split(key, 3)
    return {
        "in": dense(first, into, width),
        "own": dense(second, width, width, gain),
        "b": jnp.zeros(width),
        "out": dense(third, width, out),
        "c": jnp.zeros(out),
    }


def rnn_states(params: Params, inputs: Any) -> Any:
    """Return the states after each step, (steps, batch, width), of inputs (steps, batch, features)."""

    def step(state: Any, given: Any) -> Any:
        state = jnp.tanh(given + state @ params["own"])
        return state, state

    start = jnp.zeros((inputs.shape[1], params["b"].shape[0]))
    return jax.lax.scan(step, start, inputs @ params["in"] + params["b"])[1]


def rnn_digits(params: Params, pixels: Any) -> Any:
    """Read four pixels at a time."""
    states = rnn_states(params, pixels.reshape(-1, 16, 4).swapaxes(0, 1))
    return states[-1] @ params["out"] + params["c"]


def rnn_text(params: Params, letters: Any) -> Any:
    """Read a letter at a time."""
    states = rnn_states(params, jax.nn.one_hot(letters.T, LETTERS))
    return (states @ params["out"] + params["c"]).swapaxes(0, 1)


def lstm_init(key: Any) -> Params:
    """Return the parameters of an LSTM of 32 units that reads eight pixels at a time."""
    first, second, third = jax.random.split(key, 3)
    forget = jnp.zeros(128).at[32:64].set(1.0)
    return {
        "in": dense(first, 8, 128),
        "own": dense(second, 32, 128),
        "b": forget,
        "out": dense(third, 32, 10),
        "c": jnp.zeros(10),
    }


def lstm_logits(params: Params, pixels: Any) -> Any:
    """Read a row of pixels at a time."""

    def step(carry: Any, given: Any) -> Any:
        state, cell = carry
        write, keep, show, new = jnp.split(given + state @ params["own"], 4, axis=1)
        cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(write) * jnp.tanh(new)
        return (jax.nn.sigmoid(show) * jnp.tanh(cell), cell), None

    rows = pixels.reshape(-1, 8, 8).swapaxes(0, 1) @ params["in"] + params["b"]
    start = jnp.zeros((pixels.shape[0], 32))
    (state, _), _ = jax.lax.scan(step, (start, start), rows)
    return state @ params["out"] + params["c"]


def mlp_init(key: Any) -> Params:
    """Return the parameters of eight layers of 32 units and a last one."""
    keys = jax.random.split(key, 9)
    sizes = [64, *[32] * 8, 10]
    gain = math.sqrt(2)
    pairs = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return {f"layer {n}": (dense(key, i, o, gain), jnp.zeros(o)) for n, (key, i, o) in enumerate(pairs)}


def mlp_logits(params: Params, pixels: Any) -> Any:
    """Apply the layers, with ReLU between them."""
    x = pixels
    for n in range(9):
        weight, bias = params[f"layer {n}"]
        x = (jax.nn.relu(x) if n else x) @ weight + bias
    return x


def cnn_init(key: Any) -> Params:
    """Return the parameters of two convolutions of 3 x 3, with 8 and 16 channels, and a linear layer."""
    first, second, third = jax.random.split(key, 3)
    gain = math.sqrt(2)
    return {
        "first": dense(first, 9, 8, gain),
        "second": dense(second, 72, 16, gain),
        "b": jnp.zeros(8),
        "c": jnp.zeros(16),
        "out": dense(third, 256, 10),
        "d": jnp.zeros(10),
    }


def cnn_logits(params: Params, pixels: Any) -> Any:
    """Apply them, halving the picture after the first convolution."""
    x = jax.nn.relu(patches(pixels.reshape(-1, 8, 8, 1)) @ params["first"] + params["b"])
    x = x.reshape(-1, 4, 2, 4, 2, 8).mean(axis=(2, 4))
    x = jax.nn.relu(patches(x) @ params["second"] + params["c"])
    return x.reshape(-1, 256) @ params["out"] + params["d"]


def patches(x: Any) -> Any:
    """Return the 3 x 3 neighbors of each pixel along the last axis."""
    height, width = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return jnp.concatenate([padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)], axis=3)


def transformer_init(key: Any) -> Params:
    """Return the parameters of two blocks of width 32 with two heads."""
    keys = jax.random.split(key, 11)
    blocks = [
        {
            "qkv": dense(keys[4 * n], 32, 96),
            "join": dense(keys[4 * n + 1], 32, 32),
            "up": dense(keys[4 * n + 2], 32, 64),
            "down": dense(keys[4 * n + 3], 64, 32),
            "scales": jnp.ones((2, 32)),
        }
        for n in range(2)
    ]
    letters, places = jax.random.normal(keys[8], (LETTERS, 32)), jax.random.normal(keys[9], (LENGTH - 1, 32))
    return {"letters": letters, "places": places / 2, "blocks": blocks, "out": dense(keys[10], 32, LETTERS)}


def transformer_logits(params: Params, letters: Any) -> Any:
    """Apply the blocks, normalizing in front of each half."""
    x = params["letters"][letters] + params["places"]
    future = jnp.triu(jnp.full((LENGTH - 1, LENGTH - 1), -1e9), 1)
    for block in params["blocks"]:
        heads = jnp.split(normalized(x, block["scales"][0]) @ block["qkv"], 3, axis=2)
        q, k, v = [part.reshape(*part.shape[:2], 2, 16).swapaxes(1, 2) for part in heads]
        seen = jax.nn.softmax(q @ k.swapaxes(2, 3) / 4 + future) @ v
        x = x + seen.swapaxes(1, 2).reshape(x.shape) @ block["join"]
        x = x + jax.nn.gelu(normalized(x, block["scales"][1]) @ block["up"]) @ block["down"]
    return x @ params["out"]


def normalized(x: Any, scale: Any) -> Any:
    """Divide by the root mean square over the last axis."""
    return scale * x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


TASKS: dict[str, Task] = {
    "tanh RNN, digits": Task(
        lambda key: rnn_init(key, 4, 32, 10), rnn_digits, "digits", adam=False, rates=(0.03, 0.1), bad_rates=(0.03, 0.1)
    ),
    "CNN, digits": Task(cnn_init, cnn_logits, "digits", adam=False, rates=(0.05, 0.2), bad_rates=(0.05,)),
    "MLP, digits": Task(mlp_init, mlp_logits, "digits", adam=False, rates=(0.02, 0.1), bad_rates=(0.02,)),
    "LSTM, digits": Task(lstm_init, lstm_logits, "digits", adam=True, rates=(0.005, 0.03), bad_rates=(0.005,)),
    "tanh RNN, text": Task(
        lambda key: rnn_init(key, LETTERS, 48, LETTERS),
        rnn_text,
        "text",
        adam=False,
        rates=(0.1, 0.5),
        bad_rates=(0.1,),
    ),
    "transformer, text": Task(
        transformer_init, transformer_logits, "text", adam=True, rates=(0.003, 0.02), bad_rates=(0.003,)
    ),
}


class Cell(NamedTuple):
    """A task with a learning rate, and whether some batches are bad."""

    task: str
    rate: float
    bad: bool


CELLS = [Cell(name, rate, bad=False) for name, task in TASKS.items() for rate in task.rates]
CELLS += [Cell(name, rate, bad=True) for name, task in TASKS.items() for rate in task.bad_rates]
