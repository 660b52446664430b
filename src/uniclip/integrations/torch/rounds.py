# SPDX-License-Identifier: MIT
"""Rounds of a list of optimizers: one step of each, clipped together at the first of these steps.

A single optimizer has a round at each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from uniclip.backends.torch.private import STEP_PRE_HOOKS
from uniclip.integrations.torch.functions import get_total_norm
from uniclip.integrations.torch.parameters import Parameters, params_in
from uniclip.integrations.torch.snapshot import Snapshot, is_same

if TYPE_CHECKING:
    import torch


class Round:
    """One step of each of some optimizers, whose gradients are clipped at the first of them."""

    def __init__(self, params: Parameters) -> None:
        self._params = params
        self._stepped: list[int] = []
        """The optimizers that have taken their step, or skipped it, by identity."""
        self._clipped: dict[int, tuple[Snapshot, torch.Tensor | None]] = {}
        """The gradients of each optimizer after they were clipped, with their norm if they may
        change without a new version number: a GradScaler and collectives write past it.
        """

    @property
    def is_over(self) -> bool:
        """Whether all optimizers have stepped."""
        return not self._params.is_joint or len(self._stepped) == len(self._params.optimizers)

    def includes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step belongs to this round. If not, it begins the next one.

        Raises
        ------
        RuntimeError
            If its gradients have changed since they were clipped, and those of the optimizers that
            have stepped have not.
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

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin a round at the step of an optimizer, with gradients that are clipped."""
        self._stepped = []
        self._clipped = {}
        if not self._params.is_joint:
            return

        is_scaled = hasattr(optimizer, "found_inf")
        for one in self._params.optimizers:
            grads = _gradients_of(one)
            # The rule has one of the hooks itself. Others may call collectives.
            hooks = getattr(one, STEP_PRE_HOOKS, ())
            norm = get_total_norm(grads) if is_scaled or len(hooks) > 1 else None
            self._clipped[id(one)] = Snapshot(grads, reads=False), norm

    def mark_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has stepped."""
        if id(optimizer) not in self._stepped:
            self._stepped.append(id(optimizer))
        if self.is_over:
            self._clipped = {}

    def _has_changed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the gradients of an optimizer are others than those that were clipped."""
        if id(optimizer) not in self._clipped:
            return True
        snapshot, norm = self._clipped[id(optimizer)]
        grads = _gradients_of(optimizer)
        if snapshot.has_changed(grads):
            return True
        return norm is not None and not is_same(get_total_norm(grads), norm)


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients of an optimizer that are present."""
    grads = [p.grad for p in params_in(optimizer.param_groups)]
    return [grad for grad in grads if grad is not None]
