"""What the tests of the trainers share: the small model in PyTorch,
and trainers that wait for each batch.
"""

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
"""How many batches a loader says that it has; a trainer that knows asks for none too early."""
SECONDS = 30
"""How long a step may take."""


class Net(torch.nn.Module):
    """The small model, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in weights().items():
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(value)))

    def forward(self, ids: Any, targets: Any) -> dict[str, Any]:
        """Look rows up, and multiply."""
        return {"loss": ((self.table[ids] @ self.w + self.b - targets) ** 2).mean()}

    def arrays(self) -> Arrays:
        """Return copies of the weights."""
        return {name: p.detach().numpy().copy() for name, p in self.named_parameters()}


def sgd(net: Any) -> Any:
    """Return the optimizer of the training by hand, without names, as most are made."""
    return torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)


def tensors(batch: Batch) -> dict[str, Any]:
    """Return a batch as the model takes it."""
    return {"ids": torch.tensor(batch.ids), "targets": torch.tensor(batch.targets)}


def short(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a memory with the names that `kit.training` gives to the weights."""
    return renamed(saved, lambda name: f"['{name.split(chr(39))[1].rpartition('.')[2]}']")


def long(saved: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a memory with names as an optimizer of PyTorch has them: its groups are a list."""
    return renamed(saved, lambda name: f"[0]['{prefix}{name.split(chr(39))[1]}']")


class Fed:
    """A loader whose batches come one by one, until there is ``None``."""

    def __init__(self) -> None:
        self.asked, self.given = threading.Semaphore(0), queue.SimpleQueue[Any]()
        self.ended = False

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[Any]:
        """Ask for batches: by then the step before is over."""
        while not self.ended:
            self.asked.release()
            batch = self.given.get()
            self.ended = batch is None
            if not self.ended:
                yield batch


class Handled:
    """What adapters have that train the model by a handle of ``attach``: ``net``,
    ``inside`` and ``handle``.
    """

    optimizer = "momentum"
    left_out = frozenset[str]()
    own_clipping: ClassVar[dict[str, Any]] = {}
    prefix = ""
    """What the names of the weights begin with, in the model that the rule knows."""
    net: Net
    inside: Any
    handle: Any

    def weights(self) -> Arrays:
        """Return the weights."""
        return self.net.arrays()

    def inner(self) -> list[np.ndarray]:
        """Return what the optimizer remembers, without what uniclip adds."""
        return [
            value.numpy().copy() for state in self.inside.state.values() for value in state.values()
        ]

    def scalars(self) -> dict[str, float]:
        """Return what the handle has."""
        return {name: float(value) for name, value in self.handle.scalars().items()}

    def remembered(self) -> dict[str, Any]:
        """Return the memory of the handle."""
        return short(self.handle.numbers())

    def recall(self, saved: dict[str, Any]) -> None:
        """Give it a memory."""
        self.handle.load_state_dict(long(saved, self.prefix))


class Looping(Handled):
    """What adapters have whose trainers loop by themselves: in a thread of its own,
    which goes from batch to batch.
    """

    alive: ClassVar[list[Looping]] = []
    """Those whose training has not ended."""
    train: Callable[[Fed, Any], Any]
    """Trains to the end, given a loader, and where to begin."""
    fed: Fed | None = None
    error: BaseException | None = None
    micro = 1

    def begin(self, start: Any = None) -> None:
        """Begin to train."""
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
        """Let the training find no more batches, and end."""
        self.alive.remove(self)
        self.fed.given.put(None)
        self.thread.join(SECONDS)
        assert not self.thread.is_alive(), "the trainer does not end"
        if self.error is not None:
            raise self.error

    @classmethod
    def end_all(cls) -> None:
        """End what a check leaves."""
        while cls.alive:
            cls.alive[-1].finish()


def by_hand(rule: Any, of: list[Batch]) -> tuple[ByHand, list[dict[str, float]]]:
    """Return the training by hand, and what its steps log."""
    hand, seen = ByHand(uc, rule), []
    for batch in of:
        hand.step(batch)
        seen.append(hand.scalars())
    return hand, seen


def remembers(saved: dict[str, Any], clipper: uc.Clipper) -> None:
    """Require a memory to be that of a `Clipper`."""
    for name, value in clipper.state_dict()["state"].items():
        np.testing.assert_allclose(saved["state"][name], value, rtol=1e-4, err_msg=name)


def near(found: Arrays, wanted: Arrays, tolerance: float = 1e-4) -> None:
    """Require two sets of weights to be nearly the same."""
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)
