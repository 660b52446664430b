# SPDX-License-Identifier: MIT
"""A recurrent network whose gradients explode, and the one line that lets it learn.

A plain RNN reads scikit-learn's handwritten digits two pixels at a time, 32 times in a row. All
singular values of its recurrent matrix start at 1.25, its learning rate at 1: soon one gradient is
enormous, one step destroys the weights, and the loss is NaN (or stays at chance, with all units
dead). With the line marked THE CLIP in `make_step`, the same for all four frameworks, the same
network learns to read. Needs ``pip install "uniclip-gradients[demo]"``.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

import uniclip as uc
from uniclip import insight

# The 64 pixels form a sequence of 32 pairs.
LENGTH, WIDTH, HIDDEN, CLASSES = 32, 2, 64, 10
# The other 397 images are for testing.
SINGULAR_VALUE, LEARNING_RATE, BATCH, TRAINING = 1.25, 1.0, 64, 1400
# ENOUGH is the required test accuracy.
STEPS, MAX_NORM, ENOUGH = 3000, 0.1, 0.9
# Steps, and the largest relative difference between the frameworks' losses.
COMPARED, TOLERANCE = 100, 1e-3
# Unclipped, then clipped, each narrower than the one below it.
LOOKS = ("r-", "C0-", "C1-", "k-", "y:")

Params: TypeAlias = dict[str, Any]
Step: TypeAlias = Callable[..., tuple[Params, Any, Any]]
# Images, labels, start and batches, the same for all frameworks.
Task: TypeAlias = tuple[np.ndarray, np.ndarray, Params, np.ndarray]
relu = partial(np.maximum, 0)


class Framework(NamedTuple):
    """The operations that differ between frameworks; all other code here is shared."""

    # Converts a NumPy array to the framework's own.
    array: Callable[[Any], Any]
    # Compiles a step.
    compile: Callable[[Step], Step]
    loss_and_grads: Callable[[Params, Any, Any], tuple[Any, Params]]


class Run(NamedTuple):
    """The results of one training."""

    label: str
    losses: list[float]
    norms: list[float]
    # True once the loss is not finite.
    failed: bool
    final_loss: str
    accuracy: float
    # The share of clipped steps.
    clipped: float
    seconds: float


def make_step(framework: Framework, max_norm: float) -> Step:
    """Return one step of gradient descent, the usual one except for the marked line."""

    def step(params: Params, images: Any, labels: Any, rate: Any) -> tuple[Params, Any, Any]:
        loss, grads = framework.loss_and_grads(params, images, labels)
        grads, report = uc.clip(grads, uc.by_global_norm(max_norm))  # <-- THE CLIP
        return {name: params[name] - rate * grads[name] for name in params}, loss, report

    return framework.compile(step)


def train(
    name: str, framework: Framework, task: Task, max_norm: float, path: Path | None = None
) -> Run:
    """Train until the batches end or the loss is not finite; ``math.inf`` does not clip.

    The reports are recorded in a file, if there is a path.
    """
    began, (images, labels, start, batches) = time.perf_counter(), task
    step, array = make_step(framework, max_norm), framework.array
    params = {key: array(value) for key, value in start.items()}
    record = insight.Recorder(path, rule=uc.by_global_norm(max_norm)) if path else None
    label, losses, norms, failed = (
        f"{name}, {'clipped' if max_norm < math.inf else 'unclipped'}",
        [],
        [],
        False,
    )
    with np.errstate(all="ignore"), tqdm(batches, f"{label:21}", unit=" steps") as bar:
        for done, batch in enumerate(bar):
            rate = np.asarray(LEARNING_RATE * (1 - done / len(batches)))
            params, loss, report = step(
                params, array(images[:, batch]), array(labels[batch]), array(rate)
            )
            losses.append(float(loss))
            norms.append(float(report.norms))
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            if record is not None:
                record(report, loss=loss)
            if failed := not math.isfinite(losses[-1]):
                break
        if record is not None:
            record.close()
        _, scores = forward(
            {key: np.asarray(value) for key, value in params.items()}, images[:, TRAINING:], relu
        )
    final_loss = (
        f"{losses[-1]} at step {len(losses)}" if failed else f"{np.mean(losses[-100:]):.2g}"
    )
    accuracy, clipped = (
        np.mean(scores.argmax(axis=1) == labels[TRAINING:]),
        np.mean(np.asarray(norms) > max_norm),
    )
    return Run(
        label, losses, norms, failed, final_loss, accuracy, clipped, time.perf_counter() - began
    )


def make_task(seed: int, steps: int) -> Task:
    """Shuffle the digits, and draw a start and batches.

    All are float64, since exploding gradients amplify rounding errors, too.
    """
    rng, digits = np.random.default_rng(seed), load_digits()
    order = rng.permutation(len(digits.target))
    images = (digits.data[order] / 16).reshape(-1, LENGTH, WIDTH).swapaxes(0, 1)
    start = {
        "in": rng.normal(size=(WIDTH, HIDDEN)) / math.sqrt(WIDTH),
        "recurrent": SINGULAR_VALUE * np.linalg.qr(rng.normal(size=(HIDDEN, HIDDEN)))[0],
        "out": 0.1 * rng.normal(size=(HIDDEN, CLASSES)) / math.sqrt(HIDDEN),
    }
    return images, digits.target[order], start, rng.integers(TRAINING, size=(steps, BATCH))


def forward(p: Params, images: Any, relu: Callable[[Any], Any]) -> tuple[list[Any], Any]:
    """Return the hidden states and the scores of the classes: the network, in any framework."""
    hidden = [relu(images[0] @ p["in"])]
    for t in range(1, LENGTH):
        hidden.append(relu(images[t] @ p["in"] + hidden[-1] @ p["recurrent"]))
    return hidden, hidden[-1] @ p["out"]


def use_numpy() -> Framework:
    """Use NumPy: gradients by hand, through time."""

    def loss_and_grads(p: Params, images: np.ndarray, labels: np.ndarray) -> tuple[Any, Params]:
        hidden, scores = forward(p, images, relu)
        logs = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
        right = np.eye(CLASSES)[labels]
        d_scores = (np.exp(logs) - right) / len(labels)
        grads = {name: np.zeros_like(value) for name, value in p.items()}
        grads["out"], d_hidden = hidden[-1].T @ d_scores, d_scores @ p["out"].T
        for t in reversed(range(LENGTH)):
            d_sum = d_hidden * (hidden[t] > 0)
            grads["in"] += images[t].T @ d_sum
            if t > 0:
                grads["recurrent"] += hidden[t - 1].T @ d_sum
                # The same matrix 31 times: this product explodes.
                d_hidden = d_sum @ p["recurrent"].T
        return -np.mean(np.sum(logs * right, axis=1)), grads

    return Framework(np.asarray, lambda step: step, loss_and_grads)


def use_torch() -> Framework:
    """Use PyTorch's autograd."""
    import torch

    # The matrices are so small that threads would only wait for each other.
    torch.set_num_threads(1)

    def loss_and_grads(params: Params, images: Any, labels: Any) -> tuple[Any, Params]:
        p = {name: value.detach().requires_grad_() for name, value in params.items()}
        loss = torch.nn.functional.cross_entropy(forward(p, images, torch.relu)[1], labels)
        return loss.detach(), dict(zip(p, torch.autograd.grad(loss, list(p.values())), strict=True))

    return Framework(torch.from_numpy, lambda step: step, loss_and_grads)


def use_tensorflow() -> Framework:
    """Use TensorFlow's gradient tape, compiled by ``tf.function``."""
    os.environ.update({"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"} | os.environ)
    import tensorflow as tf

    def loss_and_grads(p: Params, images: Any, labels: Any) -> tuple[Any, Params]:
        with tf.GradientTape() as tape:
            tape.watch(p)
            scores = forward(p, images, tf.nn.relu)[1]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))
        return loss, tape.gradient(loss, p)

    return Framework(tf.constant, partial(tf.function, autograph=False), loss_and_grads)


def use_jax() -> Framework:
    """Use JAX's gradients, compiled by ``jax.jit``."""
    import jax

    jax.config.update("jax_enable_x64", val=True)

    def loss(p: Params, images: Any, labels: Any) -> Any:
        logs = jax.nn.log_softmax(forward(p, images, jax.nn.relu)[1])
        return -jax.numpy.mean(logs[jax.numpy.arange(len(labels)), labels])

    return Framework(jax.numpy.asarray, jax.jit, jax.value_and_grad(loss))


FRAMEWORKS = {"numpy": use_numpy, "torch": use_torch, "tensorflow": use_tensorflow, "jax": use_jax}


def print_table(runs: list[Run]) -> None:
    """Print a line for each run."""
    row = "{:<21} {:>15} {:>9} {:>14} {:>8}".format
    print("\n" + row("framework", "final loss", "accuracy", "clipped steps", "time"))
    for run in runs:
        print(
            row(
                run.label,
                run.final_loss,
                f"{run.accuracy:.1%}",
                f"{run.clipped:.0%}",
                f"{run.seconds:.1f} s",
            )
        )


def points(run: Run, values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the points to draw: all of a failed run, else means over bins of equal width."""
    edges = np.unique(
        range(1, len(values) + 2)
        if run.failed
        else np.geomspace(1, len(values) + 1, 160).astype(int)
    )
    return edges[:-1], np.add.reduceat(values, edges[:-1] - 1) / np.diff(edges)


def draw(runs: list[Run], max_norm: float, path: Path) -> None:
    """Draw loss and gradient norm, step by step."""
    plt.switch_backend("Agg")
    figure, (losses, norms) = plt.subplots(2, 1, figsize=(12, 8), sharex=True, layout="constrained")
    for panel, kind in ((losses, "losses"), (norms, "norms")):
        for run, look, width in zip(
            runs, LOOKS, (1.5, *range(2 * len(runs) - 2, 0, -2)), strict=False
        ):
            label = f"{run.label}: {run.accuracy:.0%} right"
            panel.plot(
                *points(run, getattr(run, kind)),
                look,
                linewidth=width,
                zorder=12 - width,
                label=label,
            )
            if run.failed:
                end, axes = (len(run.losses), 0.93), panel.get_xaxis_transform()
                panel.plot(*end, "rX", markersize=11, zorder=12, transform=axes)
                panel.annotate(f"   {run.final_loss}", end, xycoords=axes, color="r", va="center")
    norms.axhline(max_norm, color="k", linestyle="--", linewidth=1)
    norms.annotate(f"threshold: max_norm = {max_norm:g}", (1, 0.6 * max_norm), va="top")
    losses.set(xscale="log", ylim=(0, 4), ylabel="loss")
    norms.set(
        yscale="log",
        ylim=(1e-4, 1e12),
        ylabel="gradient norm before clipping",
        xlabel="training step",
    )
    losses.legend(loc="lower left")
    figure.suptitle("The same network, start and batches, and one line of difference")
    figure.savefig(path, dpi=100)
    print(f"\nWrote {path}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train an RNN whose gradients explode, without and with clipping. Exits with "
        f"1 if a run clipped at {MAX_NORM} stays below {ENOUGH:.0%} accuracy, or if "
        f"losses differ by over {TOLERANCE:g} within {COMPARED} steps.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option(
        "--framework",
        default="numpy",
        choices=[*FRAMEWORKS, "all"],
        help="what to train with; all compares them",
    )
    option(
        "--steps",
        type=int,
        default=STEPS,
        help="batches to train on; accuracy is checked if these are all",
    )
    option(
        "--max-norm",
        type=float,
        default=MAX_NORM,
        help="the threshold; longer gradients are scaled to this norm",
    )
    option("--seed", type=int, default=0, help="of the data's split, the start and the batches")
    option(
        "--record", type=Path, help="where to record the (first) clipped run, for python -m uniclip"
    )
    option("--out", type=Path, default=Path("exploding_rnn.png"), help="where to write the picture")
    arguments = parser.parse_args()
    if not (arguments.steps > 0 and 0 < arguments.max_norm < math.inf):
        parser.error("--steps and --max-norm must be above 0, and finite")
    return arguments


def main() -> str | None:
    """Train without and with the clip, show both, and return any fault of the clipped runs."""
    arguments, failures = parse_arguments(), []
    names = list(FRAMEWORKS) if arguments.framework == "all" else [arguments.framework]
    try:
        frameworks = [FRAMEWORKS[name]() for name in names]
    except ModuleNotFoundError as error:
        return (
            f"--framework {arguments.framework} needs a module that is not installed: pip install "
            f"{error.name}"
        )
    task = make_task(arguments.seed, arguments.steps)
    unclipped = train(names[0], frameworks[0], task, math.inf)
    paths = [arguments.record, *[None] * len(names)]
    clipped = [
        train(name, framework, task, arguments.max_norm, path)
        for name, framework, path in zip(names, frameworks, paths, strict=False)
    ]
    print_table([unclipped, *clipped])
    draw([unclipped, *clipped], arguments.max_norm, arguments.out)
    if arguments.record:
        print(
            f"Wrote {arguments.record}; to read it: python -m uniclip {arguments.record} -o "
            "run.html"
        )
    if len(clipped) > 1:
        losses = np.asarray(list(zip(*(run.losses[:COMPARED] for run in clipped), strict=False)))
        difference = float(np.max(np.ptp(losses, axis=1) / np.min(losses, axis=1)))
        print(
            f"\nLargest relative difference between the losses, first {COMPARED} steps: "
            f"{difference:.1e}"
        )
        if not difference <= TOLERANCE:
            failures = [f"the frameworks disagree by {difference:.1e}, more than {TOLERANCE:g}"]
    if arguments.steps >= STEPS and arguments.max_norm == MAX_NORM:
        failures += [
            f"{run.label}: accuracy below {ENOUGH:.0%}"
            for run in clipped
            if not run.accuracy >= ENOUGH
        ]
    return f"FAILED: {'; '.join(failures)}" if failures else None


if __name__ == "__main__":
    sys.exit(main())
