"""Shared parts of the tests of PyTorch's optimizers: the model, parameters, wrappers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.optim import SGD, Optimizer

from adapters.contract import Adapter
from kit.training import MOMENTUM, RATE, Arrays, Batch, parts, weights
from uniclip.integrations.torch import attach
from uniclip.saved import renamed

if TYPE_CHECKING:
    import numpy as np


class Attached(Adapter):
    """A rule attached to an optimizer."""

    recorded = "torch"
    takes = frozenset({"loss", "scalars", "record", "save", "refuse", "state", "micro", "bits"})
    sparse = False
    make = staticmethod(partial(SGD, lr=RATE, momentum=MOMENTUM))
    handle: Any = None

    def start(
        self, uc: ModuleType, rule: Any, *, record: Any = None, micro: int = 1, **options: Any
    ) -> None:
        """Begin with the first weights."""
        self.record, self.micro = record, micro
        self.model = {
            name: torch.nn.Parameter(torch.tensor(array)) for name, array in weights().items()
        }
        self.inside = self.make(list(self.model.items()), **options)
        if rule is not None:
            self.handle = attach(self.target(), rule, record=record)

    def target(self) -> Any:
        """Return what the rule is attached to."""
        return self.inside

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch."""
        rows = functional.embedding(
            torch.tensor(batch.ids), self.model["table"], sparse=self.sparse
        )
        errors = rows @ self.model["w"] + self.model["b"] - torch.tensor(batch.targets)
        return (errors**2).mean()

    def backward(self, batch: Batch) -> torch.Tensor:
        """Compute the gradients, and return the loss."""
        self.inside.zero_grad()
        total = torch.zeros(())
        for part in parts(batch, self.micro):
            loss = self.loss(part) / self.micro
            loss.backward()
            total += loss.detach()
        return total

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        loss = self.backward(batch)
        if self.handle is not None:
            self.handle.loss = loss
        self.inside.step()
        # A loss is for one step.
        assert self.handle is None or self.handle.loss is None

    def weights(self) -> Arrays:
        """Return the weights."""
        return {name: p.detach().numpy().copy() for name, p in self.model.items()}

    def inner(self) -> list[np.ndarray]:
        """Return the tensors of the optimizer's state."""
        states = (self.inside.state[p] for p in self.model.values())
        return [
            value.numpy().copy()
            for state in states
            for value in state.values()
            if value is not None
        ]

    def scalars(self) -> dict[str, float]:
        """Return the scalars of the handle."""
        return {name: float(value) for name, value in self.handle.scalars().items()}

    def finish(self) -> None:
        """Write the record."""
        self.record.flush()

    def save(self, folder: Path) -> None:
        """Write a file with the states of optimizer and handle."""
        torch.save(
            {"model": self.model, "optimizer": self.inside.state_dict()}, folder / "checkpoint.pt"
        )

    def load(self, folder: Path) -> None:
        """Read the file with ``weights_only``, the default."""
        saved = torch.load(folder / "checkpoint.pt")
        self.inside.load_state_dict(saved["optimizer"])
        for name, p in self.model.items():
            p.data.copy_(saved["model"][name])

    def rule_state(self) -> dict[str, Any]:
        """Return the state of the handle."""
        return renamed(self.handle.numbers(), lambda name: name.removeprefix("[0]"))

    def load_rule_state(self, saved: dict[str, Any]) -> None:
        """Load a state into the handle."""
        self.handle.load_state_dict(
            renamed(saved, lambda name: f"[0]{name}" if name.startswith("[") else name)
        )


class Scaled(Attached):
    """A loss scale, with gradients unscaled before the step or in it."""

    takes = Attached.takes - {"micro", "record", "refuse", "bits"} | {"scale"}

    def start(self, uc: ModuleType, rule: Any, **options: Any) -> None:
        """Start with a scale of 1024."""
        super().start(uc, rule, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.inside.zero_grad()
        loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        if self.handle is not None:
            self.handle.loss = loss.detach()
        self.take_step(batch)
        self.scaler.update()

    def take_step(self, batch: Batch) -> None:
        """Unscale or not, and take a step."""
        if batch.ids[0] % 2:
            self.scaler.unscale_(self.inside)
        self.scaler.step(self.inside)


class Compiled(Attached):
    """A compiled step."""

    takes = frozenset({"scalars"})

    def start(self, uc: ModuleType, rule: Any, **options: Any) -> None:
        """Compile the step."""
        super().start(uc, rule, **options)
        torch.compiler.reset()
        self.inside.step = torch.compile(self.inside.step, backend="eager")


def params_of(*grads: Any) -> list[Any]:
    """Return parameters of zeros with these gradients, copied."""
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    return params


def five() -> Any:
    """Return a parameter whose gradient has the norm 5."""
    return params_of(torch.tensor([3.0, 4.0]))[0]


class Wrapper(Optimizer):
    """A wrapper with the inner optimizer as its only attribute, as a user may write it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Combined(Optimizer):
    """Several optimizers combined into one, which trainers accept."""

    def __init__(self, *opts: Any) -> None:
        super().__init__([group for one in opts for group in one.param_groups], {})
        self.optimizers = list(opts)

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for one in self.optimizers:
            one.step()
        return loss


class WithoutInit(Optimizer):
    """A combination without ``super().__init__``, so without hooks, and with named optimizers."""

    def __init__(self, *opts: Any) -> None:
        self.by_name = {str(number): one for number, one in enumerate(opts)}

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return [group for one in self.by_name.values() for group in one.param_groups]

    step = Combined.step

    @property
    def optimizers(self) -> Any:
        return self.by_name.values()

    def zero_grad(self) -> None:
        for one in self.optimizers:
            one.zero_grad()


@dataclass
class Plain:
    """A combination without the base class, and without a hash."""

    optimizers: tuple[Any, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def __init__(self, *opts: Any) -> None:
        self.optimizers = opts

    param_groups = WithoutInit.param_groups
    by_name = property(lambda self: dict(enumerate(self.optimizers)))
    step = Combined.step
    zero_grad = WithoutInit.zero_grad
