# SPDX-License-Identifier: MIT
"""Rounds of a list of optimizers: one step of each, clipped together at the first of these steps.

A single optimizer has a round at each step.
"""

from __future__ import annotations

import torch

from uniclip.integrations.torch.functions import get_total_norm
from uniclip.integrations.torch.parameters import Parameters
from uniclip.integrations.torch.snapshot import Snapshot


class Round:
    """One step of each of some optimizers, whose gradients are clipped at the first of them."""

    def __init__(self, params: Parameters) -> None:
        self._params = params
        self._is_joint = len(params.optimizers) > 1
        self._stepped: list[int] = []
        """The optimizers that have taken their step, or skipped it, by identity."""
        self._clipped: dict[int, Snapshot] = {}
        """The gradients of each optimizer, after they were clipped."""
        self._norms: dict[int, torch.Tensor] = {}
        """The norms of those gradients that may be changed past PyTorch's counters."""

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
            "optimizer that steps first, or registered after attach; with a GradScaler call "
            "unscale_ for each optimizer before the first step; optimizers that take turns need a "
            "rule for each"
        )
        raise RuntimeError(msg)

    def begin(self, *, is_scaled: bool) -> None:
        """Begin a round, with gradients that are clipped, perhaps under a GradScaler."""
        self._stepped = []
        if not self._is_joint:
            return
        for optimizer in self._params.optimizers:
            grads = _gradients_of(optimizer)
            self._clipped[id(optimizer)] = Snapshot(grads, reads=False)
            # GradScaler and collectives raise no counter. The rule has one of the hooks itself.
            hooks = getattr(optimizer, "_optimizer_step_pre_hooks", ())
            if is_scaled or len(hooks) > 1:
                self._norms[id(optimizer)] = get_total_norm(grads)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has stepped."""
        if self._is_joint and id(optimizer) not in self._stepped:
            self._stepped.append(id(optimizer))
        if self.is_over:
            self._clipped = {}
            self._norms = {}

    def _has_changed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the gradients of an optimizer are others than those that were clipped."""
        clipped = self._clipped.get(id(optimizer))
        grads = _gradients_of(optimizer)
        if clipped is None or clipped.has_changed(grads):
            return True
        norm = self._norms.get(id(optimizer))
        if norm is None:
            return False
        # NaN that stays is no change.
        now = get_total_norm(grads)
        return not torch.allclose(now, norm, rtol=0.0, atol=0.0, equal_nan=True)


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients of an optimizer that are present."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.grad for p in params if p.grad is not None]
