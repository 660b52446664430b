# SPDX-License-Identifier: MIT
"""A training run that is interrupted and resumed, with bitwise the same losses.

A small network reads scikit-learn's handwritten digits; one batch in twenty has random labels. The
rule is stateful: it limits norms to the 90th percentile of the last hundred. A checkpoint thus
needs the rule's state besides weights and momentum. Each framework trains without interruption,
then stops halfway and saves, then resumes in a new process; the losses must be equal bit for bit.
Last it resumes without the rule's state: those losses differ. Needs ``pip install
"uniclip-gradients[demo]"`` and PyTorch, or JAX and flax.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

import uniclip as uc

# The images have 64 pixels.
HIDDEN, CLASSES, BATCH = 64, 10, 32
LEARNING_RATE, MOMENTUM = 0.1, 0.9
# The share of batches with random labels.
SPOILED = 0.05
# The first rule is stateful, the second one caps its limit.
RULE = uc.chain(uc.autoclip(90, window=100), uc.by_global_norm(5.0))

Batch: TypeAlias = tuple[np.ndarray, np.ndarray]


class Part(NamedTuple):
    """The steps to take, and the checkpoints to load and to save."""

    steps: range
    load: Path | None = None
    save: Path | None = None
    # Discards the rule's state.
    forget: bool = False


Train: TypeAlias = Callable[
    [dict[str, np.ndarray], Callable[[int], Batch], Part], Iterator[tuple[Any, Any, Any]]
]


def make_start(seed: int) -> dict[str, np.ndarray]:
    """Draw the weights before the first step."""
    rng = np.random.default_rng(seed)
    start = {
        "in": rng.normal(size=(64, HIDDEN)) / 8,
        "out": rng.normal(size=(HIDDEN, CLASSES)) / math.sqrt(HIDDEN),
    }
    return {name: np.float32(value) for name, value in start.items()}


def draw_batch(digits: Any, seed: int, step: int) -> Batch:
    """Return the batch of a step, a function of seed and step, so that a run can start anywhere."""
    rng = np.random.default_rng((seed, step))
    chosen = rng.integers(len(digits.target), size=BATCH)
    labels = rng.integers(CLASSES, size=BATCH) if rng.random() < SPOILED else digits.target[chosen]
    return np.float32(digits.data[chosen] / 16), labels


def train_torch(
    start: dict[str, np.ndarray], batch: Callable[[int], Batch], part: Part
) -> Iterator[tuple[Any, Any, Any]]:
    """Train with PyTorch: a `uniclip.Clipper` in an eager loop.

    It is saved by ``torch.save`` like any other state_dict.
    """
    import torch

    # The matrices are so small that threads would only wait for each other.
    torch.set_num_threads(1)
    params = {
        name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in start.items()
    }
    optimizer = torch.optim.SGD(params.values(), lr=LEARNING_RATE, momentum=MOMENTUM)
    clipper = uc.Clipper(RULE)
    if part.load:
        saved = torch.load(part.load)  # weights_only is the default
        optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            for name, value in saved["params"].items():
                params[name].copy_(value)
        if not part.forget:
            clipper.load_state_dict(saved["clipper"])  # <-- THE STATE
    for step in part.steps:
        images, labels = map(torch.from_numpy, batch(step))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            torch.relu(images @ params["in"]) @ params["out"], labels
        )
        loss.backward()
        report = clipper.clip_([p.grad for p in params.values()])
        optimizer.step()
        yield loss.detach(), report.norms[0], min(report.limits)
    if part.save:
        checkpoint = {
            "params": {name: p.detach() for name, p in params.items()},
            "optimizer": optimizer.state_dict(),
        }
        torch.save({**checkpoint, "clipper": clipper.state_dict()}, part.save)  # <-- THE STATE


def train_jax(
    start: dict[str, np.ndarray], batch: Callable[[int], Batch], part: Part
) -> Iterator[tuple[Any, Any, Any]]:
    """Train with JAX: the pure form inside of ``jax.jit``.

    The rule's state is another tree of arrays, saved by flax.
    """
    import jax
    from flax import serialization

    def loss_of(params: dict[str, Any], images: Any, labels: Any) -> Any:
        logs = jax.nn.log_softmax(jax.nn.relu(images @ params["in"]) @ params["out"])
        return -jax.numpy.mean(logs[jax.numpy.arange(len(labels)), labels])

    @jax.jit
    def train_step(now: dict[str, Any], images: Any, labels: Any) -> tuple[dict[str, Any], Any]:
        loss, grads = jax.value_and_grad(loss_of)(now["params"], images, labels)
        grads, clip, report = RULE.update(grads, now["clip"])
        speed = jax.tree.map(lambda v, g: MOMENTUM * v + g, now["speed"], grads)
        params = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, now["params"], speed)
        seen = loss, report.norms[0], jax.numpy.minimum(*report.limits)
        return {"params": params, "speed": speed, "clip": clip}, seen

    params = jax.tree.map(jax.numpy.asarray, start)
    now = {
        "params": params,
        "speed": jax.tree.map(jax.numpy.zeros_like, params),
        "clip": RULE.init(params),
    }
    if part.load:
        saved = serialization.from_bytes(now, part.load.read_bytes())
        now = {**saved, "clip": now["clip"]} if part.forget else saved  # <-- THE STATE
    for step in part.steps:
        now, seen = train_step(now, *batch(step))
        yield seen
    if part.save:
        part.save.write_bytes(serialization.to_bytes(now))  # <-- THE STATE


FRAMEWORKS: dict[str, Train] = {"torch": train_torch, "jax": train_jax}


def run(name: str, seed: int, part: Part, label: str) -> np.ndarray:
    """Train for some steps.

    Return their losses, norms and limits as float32.
    """
    batch = partial(draw_batch, load_digits(), seed)
    with tqdm(
        FRAMEWORKS[name](make_start(seed), batch, part),
        f"{label:29}",
        len(part.steps),
        unit=" steps",
    ) as bar:
        return np.asarray([[np.float32(number) for number in seen] for seen in bar])


def resume(name: str, seed: int, rest: Part) -> dict[str, np.ndarray]:
    """Resume from a checkpoint, with the rule's state and without."""
    return {
        "resumed": run(name, seed, rest, f"{name}, resumed"),
        "forgetful": run(name, seed, rest._replace(forget=True), f"{name}, resumed without state"),
    }


def resume_in_new_process(name: str, seed: int, rest: Part) -> dict[str, np.ndarray]:
    """Call `resume` in a new Python process, which has only the checkpoint."""
    answer = f"{rest.load}.npz"
    resumed = [str(rest.steps.start), str(rest.steps.stop), str(rest.load), answer]
    command = [
        sys.executable,
        __file__,
        "--framework",
        name,
        "--seed",
        str(seed),
        "--resume",
        *resumed,
    ]
    subprocess.run(command, check=True)  # noqa: S603 - this very file
    return dict(np.load(answer))


def compare(
    name: str, seed: int, steps: int, folder: Path
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Train uninterrupted, interrupted and resumed; return the results and the faults."""
    stop, checkpoint = steps // 2, folder / f"{name}.checkpoint"
    seen = {
        "whole": run(name, seed, Part(range(steps)), f"{name}, whole"),
        "interrupted": run(name, seed, Part(range(stop), save=checkpoint), f"{name}, interrupted"),
    }
    seen |= resume_in_new_process(name, seed, Part(range(stop, steps), load=checkpoint))
    kilobytes = checkpoint.stat().st_size / 1000
    wrong = []
    print(f"\n{name}, {steps} steps, interrupted after {stop}, a checkpoint of {kilobytes:.0f} kB")
    for label, wanted in (("interrupted", True), ("resumed", True), ("forgetful", False)):
        first = 0 if label == "interrupted" else stop
        losses, whole = seen[label][:, 0], seen["whole"][first : first + len(seen[label]), 0]
        equal = losses.view(np.int32) == whole.view(np.int32)
        said = "all losses bitwise those of the whole run"
        if not equal.all():
            step, difference = first + int(np.argmin(equal)), np.max(np.abs(losses - whole))
            said = (
                f"{np.mean(~equal):.0%} of the losses differ, from step {step} on, by "
                f"{difference:.2g} at most"
            )
        print(f"  {label if wanted else 'resumed without the state':27} {said}")
        if equal.all() != wanted:
            wrong.append(f"{name}, {label}: {said}")
    return seen, wrong


def draw(results: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    """Draw losses, and norms with their limits, step by step, with the interruption."""
    plt.switch_backend("Agg")
    figure, panels = plt.subplots(
        2,
        len(results),
        figsize=(7 * len(results), 8),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for (name, seen), (losses, norms) in zip(results.items(), panels.T, strict=True):
        stop, steps = len(seen["interrupted"]), len(seen["whole"])
        before, after = np.arange(stop), np.arange(stop, steps)
        losses.plot(seen["whole"][:, 0], color="0.8", linewidth=5, label="whole")
        losses.plot(before, seen["interrupted"][:, 0], "C0", linewidth=1, label="interrupted")
        losses.plot(
            after, seen["resumed"][:, 0], "C2", linewidth=1, label="resumed: the same, bit for bit"
        )
        losses.plot(
            after,
            seen["forgetful"][:, 0],
            "r:",
            linewidth=1,
            label="resumed without the rule's state",
        )
        norm, limit = np.concatenate([seen["interrupted"], seen["resumed"]])[:, 1:].T
        above = norm > limit
        norms.plot(norm, color="0.6", linewidth=1, label="norm before clipping")
        norms.plot(
            np.flatnonzero(above),
            norm[above],
            "C1.",
            markersize=4,
            label=f"clipped: {np.mean(above):.0%}",
        )
        norms.plot(limit, "k", linewidth=1.5, label="limit, interrupted and resumed")
        norms.plot(
            after,
            seen["forgetful"][:, 2],
            "r:",
            linewidth=1.5,
            label="limit without the rule's state",
        )
        for panel in (losses, norms):
            panel.axvline(stop - 0.5, color="C0", linestyle="--", linewidth=1)
            panel.set(yscale="log")
            panel.legend(loc="lower left", ncols=2)
        norms.annotate(
            "  interrupted here", (stop, 0.95), xycoords=norms.get_xaxis_transform(), color="C0"
        )
        losses.set(title=name, ylim=(1e-3, 20), ylabel="loss")
        norms.set(ylim=(3e-3, 20), xlabel="training step", ylabel="gradient norm")
    figure.suptitle(f"Interrupted, and resumed in a new process\n{RULE!r}")
    figure.savefig(path, dpi=100)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train, interrupt, resume. Exits with 1 if a resumed run has other losses "
        "than one that was not interrupted, or if leaving out the rule's state "
        "changes none.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option("--framework", default="torch", choices=[*FRAMEWORKS, "all"], help="what to train with")
    option(
        "--steps",
        type=int,
        default=600,
        help="of the whole run; it is interrupted after half of them",
    )
    option("--seed", type=int, default=0, help="of the start and the batches")
    option(
        "--out", type=Path, default=Path("resume_training.png"), help="where to write the picture"
    )
    # The arguments of the new process: from, to, checkpoint, result.
    option("--resume", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps < 100:
        parser.error("--steps must be 100 or more")
    return arguments


def main() -> str | None:
    """Train as the command line asks, print the results, and return any fault."""
    arguments, results, failures = parse_arguments(), {}, []
    if arguments.resume:
        first, last, checkpoint, answer = arguments.resume
        rest = Part(range(int(first), int(last)), load=Path(checkpoint))
        np.savez(answer, **resume(arguments.framework, arguments.seed, rest))
        return None
    names = list(FRAMEWORKS) if arguments.framework == "all" else [arguments.framework]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                results[name], wrong = compare(name, arguments.seed, arguments.steps, Path(folder))
            except ModuleNotFoundError as error:
                return (
                    f"--framework {name} needs a module that is not installed: pip install "
                    f"{error.name}"
                )
            failures += wrong
    draw(results, arguments.out)
    return f"FAILED: {'; '.join(failures)}" if failures else None


if __name__ == "__main__":
    sys.exit(main())
