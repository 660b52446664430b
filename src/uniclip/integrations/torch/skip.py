# SPDX-License-Identifier: MIT
"""Skip a step.

Who decides: the rule does, or a GradScaler that has found an infinity; see
`gradients.GradientClipping.clip`. The step is then skipped in one of three ways:

1. It has moved nothing yet: `SkippedStep` stops it.
2. It has begun: the gradients are hidden from the rest of it.
3. The decision is on an accelerator, and all optimizers are fused: each gets a flag in its own
   step, which its kernel reads. The host need not know, so hooks run as in other steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from uniclip.integrations.torch.snapshot import Snapshot

_BY_FLAG = {torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad}
"""The optimizers whose fused kernels skip a step by themselves, if ``optimizer.found_inf`` is 1.

That of SGD leaves its momentum uninitialized in a first step that is skipped.
"""


class SkippedStep(BaseException):
    """Stop a step that a rule skips, from a hook or a closure inside of it.

    The replaced step catches it. It is not an error, and derives from ``BaseException`` so that
    ``except Exception`` in an optimizer does not catch it.
    """

    def __init__(self, loss: object) -> None:
        super().__init__("a step was skipped")
        self.loss = loss
        """What the step returns."""


class Skip:
    """What a skipped step changes in parameters and optimizers, to be restored after it."""

    flag: torch.Tensor | None = None
    """1 if the kernels have to skip the steps of this round, ``None`` if the host decides."""

    def __init__(self) -> None:
        self._before_closure: Snapshot | None = None
        """The parameters before the first closure of a step."""
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """The parameters and their gradients."""
        self._flagged: torch.optim.Optimizer | None = None
        """The optimizer whose flag has to be taken away after its step."""

    def remember_params(self, params: Sequence[torch.Tensor]) -> None:
        """Note where the parameters are before a step that calls a closure."""
        self._before_closure = Snapshot(params)

    def stop_or_hide(self, params: Sequence[torch.Tensor], loss: object, *, skip: bool) -> None:
        """Stop a step after its closure, if the rule skips it and nothing has moved yet; else hide
        the gradients from the rest of it.

        Hidden gradients are not enough in an optimizer that takes an absent gradient for zeros, as
        Muon's reference does.
        """
        # An optimizer may move the parameters between two closures, so only the first can stop it.
        before = self._before_closure
        self._before_closure = None
        if not skip:
            return
        if before is not None and not before.has_changed(params):
            raise SkippedStep(loss)
        self._hidden = [(p, p.grad) for p in params]
        for p in params:
            p.grad = None

    def restore_grads(self) -> None:
        """Restore the hidden gradients."""
        for p, grad in self._hidden:
            p.grad = grad
        self._hidden = []

    def flag_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the kernel of an optimizer skip its step, if the flag of the round is 1."""
        if self.flag is None:
            return
        # A GradScaler takes the attribute away itself, after the step.
        if not hasattr(optimizer, "found_inf"):
            self._flagged = optimizer
        optimizer.found_inf = self.flag

    def end_step(self) -> None:
        """Restore what a step was not to see."""
        self._before_closure = None
        self.restore_grads()
        if self._flagged is not None:
            del self._flagged.found_inf
            self._flagged = None


def skips_by_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the kernels of an optimizer skip a step by its flag ``found_inf``."""
    if type(optimizer) not in _BY_FLAG:
        return False
    return all(group["fused"] for group in optimizer.param_groups)
