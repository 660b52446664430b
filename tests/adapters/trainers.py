"""Shared parts of the tests of trainers: the small model in PyTorch, and control batch by batch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch

import uniclip as uc
from kit.training import MOMENTUM, RATE, Arrays, Batch, ByHand, parts, weights
from uniclip.saved import renamed

LENGTH = 100
"""The number of batches that a loader reports; a trainer that knows it prefetches none."""
SECONDS = 30
"""Seconds that a step may take."""


class Net(torch.nn.Module):
    """The small model, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in weights().items():
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(value)))

    def forward(self, ids: Any, targets: Any) -> dict[str, Any]:
        """Look up rows, and multiply."""
        return {"loss": ((self.table[ids] @ self.w + self.b - targets) ** 2).mean()}

    def arrays(self) -> Arrays:
        """Return copies of the weights."""
        return {name: p.detach().numpy().copy() for name, p in self.named_parameters()}


def sgd(net: Any) -> Any:
    """Return the optimizer of the training by hand, without names, as most are created."""
    return torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)


def joint(net: Any, kind: Any) -> Any:
    """Return two such optimizers, each of some of the parameters, stepped as one."""
    return kind(
        *(
            torch.optim.SGD(some, lr=RATE, momentum=MOMENTUM)
            for some in ([net.table], [net.b, net.w])
        )
    )


def tensors(batch: Batch) -> dict[str, Any]:
    """Return a batch as inputs of the model."""
    return {"ids": torch.tensor(batch.ids), "targets": torch.tensor(batch.targets)}


def short(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a state with the names that `kit.training` uses."""
    return renamed(saved, lambda name: f"['{name.split(chr(39))[1].rpartition('.')[2]}']")


def long(saved: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a state with the names of a PyTorch optimizer, whose groups are a list."""
    return renamed(saved, lambda name: f"[0]['{prefix}{name.split(chr(39))[1]}']")


class Fed:
    """A loader that passes on one batch at a time, until ``None``."""

    def __init__(self) -> None:
        self.asked, self.given = threading.Semaphore(0), queue.SimpleQueue[Any]()
        self.ended = False

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[Any]:
        """Yield batches; a request means that the step before has ended."""
        while not self.ended:
            self.asked.release()
            batch = self.given.get()
            self.ended = batch is None
            if not self.ended:
                yield batch


class Handled:
    """A base class of integrations that use a handle of ``attach``.

    They have ``net``, ``inside`` and ``handle``.
    """

    optimizer = "momentum"
    left_out = frozenset[str]()
    own_clipping: ClassVar[dict[str, Any]] = {}
    prefix = ""
    """The prefix of the names of the weights in the rule's model."""
    net: Net
    inside: Any
    handle: Any

    def weights(self) -> Arrays:
        """Return the weights."""
        return self.net.arrays()

    def inner(self) -> list[np.ndarray]:
        """Return the state of the optimizer, without uniclip's part."""
        return [
            value.numpy().copy() for state in self.inside.state.values() for value in state.values()
        ]

    def scalars(self) -> dict[str, float]:
        """Return the scalars of the handle."""
        return {name: float(value) for name, value in self.handle.scalars().items()}

    def rule_state(self) -> dict[str, Any]:
        """Return the state of the handle."""
        return short(self.handle.numbers())

    def load_rule_state(self, saved: dict[str, Any]) -> None:
        """Load a state into the handle."""
        self.handle.load_state_dict(long(saved, self.prefix))


class Looping(Handled):
    """A base class of integrations whose trainers have the loop.

    The training runs in a thread that takes one batch at a time.
    """

    alive: ClassVar[list[Looping]] = []
    """The trainings that have not ended."""
    train: Callable[[Fed, Any], Any]
    """Trains to the end, given a loader and a place to start from."""
    fed: Fed | None = None
    error: BaseException | None = None
    micro = 1

    def begin(self, start: Any = None) -> None:
        """Start the training."""
        self.fed = Fed()
        self.thread = threading.Thread(target=self._run, args=(start,), daemon=True)
        self.thread.start()
        self._wait()
        self.alive.append(self)

    def _run(self, start: Any) -> None:
        try:
            self.train(self.fed, start)
        except BaseException as error:  # noqa: BLE001 - raised where the training is waited for
            self.error = error
        finally:
            self.fed.asked.release()

    def _wait(self) -> None:
        assert self.fed.asked.acquire(timeout=SECONDS), "the trainer asks for no more batches"
        if self.error is not None:
            raise self.error

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        if self.fed is None:
            self.begin()
        for part in parts(batch, self.micro):
            self.fed.given.put(tensors(part))
            self._wait()

    def finish(self) -> None:
        """Signal the end of the batches, and wait for the end of the training."""
        self.alive.remove(self)
        self.fed.given.put(None)
        self.thread.join(SECONDS)
        assert not self.thread.is_alive(), "the trainer does not end"
        if self.error is not None:
            raise self.error

    @classmethod
    def end_all(cls) -> None:
        """End the trainings that a check leaves running."""
        while cls.alive:
            cls.alive[-1].finish()


def by_hand(rule: Any, of: list[Batch]) -> tuple[ByHand, list[dict[str, float]]]:
    """Return the training by hand, and the logs of its steps."""
    hand, seen = ByHand(uc, rule), []
    for batch in of:
        hand.step(batch)
        seen.append(hand.scalars())
    return hand, seen


def remembers(saved: dict[str, Any], clipper: uc.Clipper) -> None:
    """Require a state to be that of a `Clipper`."""
    for name, value in clipper.state_dict()["state"].items():
        np.testing.assert_allclose(saved["state"][name], value, rtol=1e-4, err_msg=name)


def near(found: Arrays, wanted: Arrays, tolerance: float = 1e-4) -> None:
    """Require two sets of weights to be nearly equal."""
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)
