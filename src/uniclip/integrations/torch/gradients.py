# SPDX-License-Identifier: MIT
"""Clip the gradients of attached optimizers, and find out whether their step is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from uniclip._core.collectives import AllReduce, Shared, follow_reference, keep_reference
from uniclip._errors import counted, summarize
from uniclip._types import StepOptions
from uniclip._warnings import warn
from uniclip.backends.torch import BACKEND
from uniclip.backends.torch.dtensor import shards_of_gradients
from uniclip.backends.torch.one_norm import gradients_of
from uniclip.clipper import Clipper
from uniclip.compose import rules_with_norms
from uniclip.integrations import looks_at
from uniclip.integrations.torch.checks import can_skip, moves_nothing
from uniclip.integrations.torch.engines import raise_if_inside
from uniclip.integrations.torch.functions import get_total_norm, grads_of
from uniclip.integrations.torch.parameters import Parameters
from uniclip.integrations.torch.processes import (
    any_found_inf,
    average_loss,
    reduced_everywhere,
    several,
    whole_loss,
)
from uniclip.integrations.torch.skip import Skip, skips_by_flag
from uniclip.integrations.torch.state import RuleState
from uniclip.rule import Rule

ClosureLoss: TypeAlias = "torch.Tensor | float | None"
"""A loss as a closure returns it, or as it was set on the handle."""

_IN_PLACE = StepOptions(in_place=True)


class GradientClipping:
    """Clips the gradients of some optimizers by one rule."""

    def __init__(
        self,
        clipper: Clipper,
        params: Parameters,
        state: RuleState,
        all_reduce: AllReduce | None,
        shared: Shared | None,
    ) -> None:
        self.skip = Skip()
        self.params = params
        self.rule = clipper.rule
        self.can_skip = can_skip(clipper.rule)
        """Whether the rule may skip a step."""
        self._clipper = clipper
        self._state = state
        self._all_reduce = keep_reference(all_reduce)
        self._shared = shared
        self._needs_params = looks_at("params", clipper.rule)
        policies = {inner.nonfinite for inner in rules_with_norms(clipper.rule)}
        self._reads_infinity = not policies.isdisjoint({"raise", "zero"})
        """Whether the rule does more with an infinity than to keep its state."""
        self._has_looked = False
        """Whether a step has looked for an engine, and for gradients in ``main_grad``."""
        self._has_warned = False
        """Whether a step without gradients has warned."""

        self._needs_loss = looks_at("loss", clipper.rule)
        """Whether the rule uses the loss."""
        self._takes_spine = all_reduce is None and not params.is_joint
        """Whether steps may take the spine."""

    def clip_on_spine(self, optimizer: torch.optim.Optimizer, loss: ClosureLoss) -> bool | None:
        """Clip on the spine, and return what `clip` returns.

        Return ``None``, with nothing changed, if the step takes the general path.
        """
        if not self._takes_spine or self._state.needs_check:
            return None

        # The gradients are still those of the loss that a GradScaler has scaled.
        is_scaled = getattr(optimizer, "grad_scale", None) is not None
        if is_scaled or getattr(optimizer, "found_inf", None) is not None:
            return None

        groups = optimizer.param_groups
        params = groups[0]["params"] if len(groups) == 1 else self.params.tensors()
        grads = gradients_of(params)
        spec = None
        if grads is None and not self._needs_params:
            grads = shards_of_gradients(params)
            spec = self.params.spec
        if grads is None or self._averages_loss(params):
            return None
        step = _IN_PLACE
        if loss is not None:
            loss = whole_loss(loss.detach()) if isinstance(loss, torch.Tensor) else loss
            step = StepOptions(loss=loss, in_place=True)
        taken = self._clipper.step_on_spine(grads, step, spec)
        if taken is None:
            return None

        if not self._has_looked:
            self._look_once(optimizer, params)
        self.skip.flag = None
        skipped = taken[1]
        return skipped is not False and self._decide_skip(optimizer, skipped, None)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def clip(self, optimizer: torch.optim.Optimizer, loss: ClosureLoss) -> bool:
        """Clip the gradients of all optimizers, in a step of one of them.

        Return ``True`` if the step must be stopped: the rule skips it, or a GradScaler has found an
        infinity; ``False``, too, if fused kernels skip it themselves, by a flag.
        """
        self.skip.flag = None
        params = self._state.follow_parameters(in_step=True)
        # The rule's state may be loaded after the optimizer's, so the warning waits for a step.
        self._state.warn_if_missing()
        grads = grads_of(params)
        all_reduce = follow_reference(self._all_reduce)
        device = params[0].device if params else None
        if not self._has_looked:
            self._look_once(optimizer, params)

        # A process without any gradient takes part, too, or the others would wait.
        of_step = whole_loss(loss)
        if self._averages_loss(params):
            of_step = average_loss(of_step, device)
        found_inf = any_found_inf(self._flag_of(optimizer, grads), all_reduce, device)

        absent = sum([grad is None for grad in grads])
        if absent == len(grads) and all_reduce is None:
            self._clipper.forget_report()
            self._warn_of_no_gradient(optimizer)
            return False

        # A GradScaler leaves the check to an optimizer that takes its flag.
        if found_inf is not None and self._read_found_inf(found_inf):
            return True
        self._take_scale(optimizer, grads)

        # The parameter of an absent gradient has the shape of its row.
        params_tree = None
        if self._needs_params or absent or all_reduce is not None:
            params_tree = self.params.tree(params)
        report = self._clipper.clip_(
            self.params.tree(grads), params_tree, all_reduce, loss=of_step, shared=self._shared
        )
        if not self.can_skip or report.skipped is None:
            return False
        return self._decide_skip(optimizer, report.skipped, found_inf)

    def _averages_loss(self, params: list[torch.Tensor]) -> bool:
        """Return whether all processes average their losses before the step, with a loss or
        without, since they have to decide alike.

        Norms of distributed parameters that are reduced over all processes bring the loss along.
        """
        if not (self._needs_loss and several()):
            return False
        sends_once = type(self.rule) is Rule and self._all_reduce is None
        return not (sends_once and reduced_everywhere(params))

    def _look_once(self, optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> None:
        """Raise at the first step if an engine takes it; warn if parameters have their gradients in
        ``main_grad``, as those of Megatron do.
        """
        self._has_looked = True
        raise_if_inside(optimizer)
        has_other = [p.grad is None and getattr(p, "main_grad", None) is not None for p in params]
        if any(has_other):
            self._has_warned = True
            msg = (
                f"{counted(sum(has_other), 'parameter')} of {len(params)} have a gradient in "
                f"main_grad and none in grad, which alone {summarize(self.rule)} clips; "
                "if the optimizer reads main_grad, clip it before step(), as in "
                "uc.clip_([p.main_grad for p in params], rule)"
            )
            warn(msg)

    def _warn_of_no_gradient(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of a step without any gradient, once; groups may be empty on purpose."""
        if self._has_warned or not any(group["params"] for group in optimizer.param_groups):
            return
        self._has_warned = True
        msg = (
            f"{type(optimizer).__qualname__} took a step in which no parameter had a gradient in "
            f"p.grad, so {summarize(self.rule)} clipped nothing; call backward() before step(), "
            "and make the optimizer after fully_shard(), or whatever else replaces the parameters "
            "of a model. If its step() reads or makes gradients elsewhere, attach to the optimizer "
            "inside whose parameters have them in p.grad, or clip them by hand"
        )
        warn(msg)

    def only_makes_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step only makes the optimizer's state, in all processes alike.

        PyTorch takes such steps of the optimizers of a list one after the other, so that only the
        rates of one are 0.
        """
        params = self.params.tensors()
        device = params[0].device if params else None
        moves = torch.tensor(float(not moves_nothing(optimizer.param_groups)))
        return not any_found_inf(moves, follow_reference(self._all_reduce), device)

    def continue_round(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare the step of an optimizer whose gradients are clipped already."""
        self._take_scale(optimizer, [])
        self.skip.flag_step(optimizer)

    def _flag_of(
        self, optimizer: torch.optim.Optimizer, grads: list[torch.Tensor | None]
    ) -> torch.Tensor | None:
        """Return the flag of a GradScaler, 1 if it has found an infinity, if there is one."""
        found_inf: torch.Tensor | None = getattr(optimizer, "found_inf", None)
        if found_inf is None or not self.params.is_joint:
            return found_inf
        # It has looked at the gradients of one optimizer only.
        return torch.logical_not(get_total_norm(grads).isfinite()).to(torch.float32)

    def _take_scale(
        self, optimizer: torch.optim.Optimizer, grads: list[torch.Tensor | None]
    ) -> None:
        """Take the scale of a GradScaler from an optimizer, and divide the gradients by it.

        Raises
        ------
        RuntimeError
            If the optimizer is one of several, whose gradients are clipped by the first step.
        """
        scale = getattr(optimizer, "grad_scale", None)
        # Only fused kernels accept the flag; GradScaler sets and deletes both around each step.
        if self.params.is_joint and hasattr(optimizer, "found_inf"):
            optimizer.found_inf = None
        if scale is None:
            return

        optimizer.grad_scale = None
        if self.params.is_joint:
            msg = (
                "a GradScaler would divide the gradients of each optimizer in its own step, but "
                "the first step clips those of all; call scaler.unscale_(optimizer) for each of "
                "them before the first scaler.step()"
            )
            raise RuntimeError(msg)
        self._unscale(grads, scale)

    def drop_scale(self, optimizer: torch.optim.Optimizer) -> None:
        """Delete ``grad_scale`` after a step that failed.

        GradScaler deletes it only after one that succeeded, and would multiply the next scale by
        the ``None`` that is left.
        """
        if vars(optimizer).get("grad_scale", 0) is None:
            del optimizer.grad_scale

    def _read_found_inf(self, found_inf: torch.Tensor) -> bool:
        """Return whether a GradScaler has found an infinity.

        On an accelerator the flag is not read, except for policies that do more with a norm that is
        not finite than to keep the state.
        """
        if not BACKEND.readable(found_inf) and not self._reads_infinity:
            return False
        return bool(found_inf)

    def _unscale(self, grads: list[torch.Tensor | None], scale: torch.Tensor) -> None:
        """Divide by the scale of a GradScaler, as a fused kernel would do later."""
        # Two parameters may have one gradient, which is divided once.
        present = {id(grad): grad for grad in grads if grad is not None}
        if any(grad.dtype is torch.float16 for grad in present.values()):
            msg = (
                f"{summarize(self.rule)} needs unscaled gradients, and float16 cannot hold them; "
                "keep the parameters in float32 under autocast"
            )
            raise ValueError(msg)
        for grad in present.values():
            grad.div_(scale.to(grad.device))

    def _decide_skip(
        self, optimizer: torch.optim.Optimizer, skipped: Any, found_inf: torch.Tensor | None
    ) -> bool:
        """Return whether a step must be stopped; fused kernels get a flag, which the host need not
        read.
        """
        fused = all(map(skips_by_flag, self.params.optimizers))
        if not fused or skipped is True or BACKEND.readable(skipped):
            return bool(skipped)

        # The kernel reads the flag where it runs, so the host waits for nothing.
        flag = skipped.to(torch.float32)
        if found_inf is not None:
            flag = torch.maximum(flag, found_inf.to(flag.device))
        self.skip.flag = flag
        self.skip.flag_step(optimizer)
        return False
