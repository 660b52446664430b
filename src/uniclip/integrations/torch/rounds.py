# SPDX-License-Identifier: MIT
"""Rounds of a list of optimizers: one step of each, clipped together at the first of these steps.

A single optimizer has a round at each step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from uniclip.integrations.torch.parameters import Parameters


class Round:
    """One step of each of some optimizers, whose gradients are clipped at the first of them."""

    def __init__(self, params: Parameters) -> None:
        self._params = params
        self._is_joint = len(params.optimizers) > 1
        self._stepped: list[int] = []
        """The optimizers that have taken their step, or skipped it, by identity."""
        self._clipped: dict[int, _Marks] = {}
        """Marks of the gradients of each optimizer, after they were clipped."""

    @property
    def is_over(self) -> bool:
        """Whether all optimizers have stepped."""
        return not self._is_joint or len(self._stepped) == len(self._params.optimizers)

    def includes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step belongs to this round, rather than begin the next.

        Raises
        ------
        RuntimeError
            If only its own gradients have changed since they were clipped.
        """
        if not self._stepped or self.is_over or id(optimizer) in self._stepped:
            return False

        if not self._has_changed(optimizer):
            return True
        # After another backward the gradients of those that have stepped are others, too.
        have_stepped = [one for one in self._params.optimizers if id(one) in self._stepped]
        if any(map(self._has_changed, have_stepped)):
            return False
        msg = (
            f"the gradients of {type(optimizer).__qualname__} have changed since the first step of "
            "a list of optimizers, which has clipped those of all; step all of them after "
            "backward, one after the other. A hook that changes gradients has to be one of the "
            "optimizer that steps first, or registered after attach; optimizers that take turns "
            "need a rule for each"
        )
        raise RuntimeError(msg)

    def begin(self) -> None:
        """Begin a round, with gradients that are clipped."""
        self._stepped = []
        if self._is_joint:
            self._clipped = {id(one): _marks_of(one) for one in self._params.optimizers}

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has stepped."""
        if self._is_joint and id(optimizer) not in self._stepped:
            self._stepped.append(id(optimizer))
        if self.is_over:
            self._clipped = {}

    def _has_changed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the gradients of an optimizer are others than those that were clipped."""
        marks = self._clipped.get(id(optimizer))
        if marks is None:
            return True
        # Other gradients may have the identities of those that were freed, but not of this one.
        grads = _gradients_of(optimizer)
        is_kept = any(grad is marks.smallest for grad in grads) or not grads
        return not is_kept or _marks_of(optimizer).versions != marks.versions


class _Marks(NamedTuple):
    """What tells whether gradients are the same as before, without a copy or a weak reference."""

    versions: list[tuple[int, int]]
    """The identity and the version counter of each."""
    smallest: torch.Tensor | None
    """The smallest one, which is held."""


def _marks_of(optimizer: torch.optim.Optimizer) -> _Marks:
    """Return the marks of the gradients of an optimizer."""
    grads = _gradients_of(optimizer)
    # PyTorch has no public name for the counter.
    versions = [(id(grad), grad._version) for grad in grads]  # noqa: SLF001
    return _Marks(versions, min(grads, key=torch.Tensor.numel, default=None))


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients of an optimizer that are present."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.grad for p in params if p.grad is not None]
