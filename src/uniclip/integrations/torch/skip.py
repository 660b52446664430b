# SPDX-License-Identifier: MIT
"""Skip a step that a rule does not want.

The rule decides, and `gradients.GradientClipping.clip` returns its decision. What happens then
depends on how far the step is. One that has moved nothing is stopped by `SkippedStep`. In one that
has begun, the gradients are hidden. A fused kernel that runs later on an accelerator gets a flag.
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

    def __init__(self) -> None:
        self._before_closure: Snapshot | None = None
        """The parameters before the first closure of a step."""
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """The parameters and their gradients."""
        self._flagged: list[torch.optim.Optimizer] = []
        """The optimizers with a flag that makes their fused kernels skip a step."""

    def expect_closure(self, params: Sequence[torch.Tensor]) -> None:
        """Note where the parameters are before a step that calls a closure."""
        self._before_closure = Snapshot(params)

    def leave_closure(self, params: Sequence[torch.Tensor], loss: object, *, skip: bool) -> None:
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

    def show_grads(self) -> None:
        """Restore the hidden gradients."""
        for p, grad in self._hidden:
            p.grad = grad
        self._hidden = []

    def set_flags(self, optimizers: Sequence[torch.optim.Optimizer], flag: torch.Tensor) -> None:
        """Have fused kernels skip a step if the flag is 1; the host need not read it."""
        for optimizer in optimizers:
            # A GradScaler takes a flag away that it has set itself.
            if getattr(optimizer, "found_inf", None) is None:
                self._flagged.append(optimizer)
            optimizer.found_inf = flag

    def clear_flags(self) -> None:
        """Take the flags away."""
        for optimizer in self._flagged:
            del optimizer.found_inf
        self._flagged = []

    def end_step(self) -> None:
        """Restore what a step was not to see."""
        self._before_closure = None
        self.show_grads()


def skips_by_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the kernels of an optimizer skip a step by its flag ``found_inf``."""
    if type(optimizer) not in _BY_FLAG:
        return False
    return all(group["fused"] for group in optimizer.param_groups)
