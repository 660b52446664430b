# SPDX-License-Identifier: MIT
"""What happens around a step of an attached optimizer: clip, take the step or stop it, restore.

`replaced.ReplacedStep` stands in the place of ``optimizer.step``, and calls `Steps.take_step`.
`Steps.step_pre_hook` is a hook of PyTorch, which clips. How gradients are clipped is in
`gradients`, and how a step is skipped in `skip`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from uniclip._errors import counted, summarize
from uniclip.backends.torch.private import HAS_STEPPED, SCHEDULED, backward_number
from uniclip.integrations.torch.checks import spans_leaves
from uniclip.integrations.torch.gradients import ClosureLoss, GradientClipping
from uniclip.integrations.torch.guard import Guard
from uniclip.integrations.torch.rounds import Round
from uniclip.integrations.torch.skip import SkippedStep

Changed: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]] | None
"""The arguments that a step gets in place of its own, if any, with the optimizer first."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function outside of compiled code."""
    return function(*args)


class Steps:
    """The steps of some optimizers under one rule.

    Their replaced steps call `take_step`, and PyTorch calls `step_pre_hook`. The optimizers have
    this object, which therefore holds none of them.
    """

    loss: ClosureLoss = None
    """The loss of the next step, for rules that use it."""

    def __init__(self, clipping: GradientClipping) -> None:
        self._clipping = clipping
        self._params = clipping.params
        self._rule = clipping.rule
        self._spans_leaves = spans_leaves(clipping.rule)
        self._round = Round(clipping.params)
        self._is_skipped = False
        """Whether the steps of this round are stopped, by the rule or by an infinity of a
        GradScaler.
        """
        self._uncalled: object = None
        """The closure of a step, until the step calls it."""
        self._is_clean = False
        """Whether the step that runs has set nothing to clean up, as most on the spine."""
        self._guard = Guard(clipping.params, clipping.rule)

    def __repr__(self) -> str:
        """Return the rule and the optimizers."""
        params = counted(len(self._params.tensors()), "parameter")
        removed = ", removed" if self._params.is_released else ""
        return f"<attach: {self._rule!r}, {self._params.kinds} of {params}{removed}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Steps:
        """Return this object: a copied hook is of another optimizer, and does nothing there."""
        return self

    def remove(self) -> None:
        """Watch the parameters no more, and release them."""
        self._guard.remove()
        self._params.release()
        # A step that failed may have left gradients hidden.
        self._clipping.skip.end_step()

    def take_step(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[..., object],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> object:
        """Run the optimizer's own step, whose pre-hook clips; return early if that stops it."""
        guard = self._guard
        # An optimizer may call its own step, or that of another one of the list.
        if guard.is_running:
            self._round.mark_stepped(optimizer)
            return step(*args, **kwargs)

        guard.is_running = True
        try:
            result = step(*args, **kwargs)
            if not guard.is_open or self._uncalled is not None:
                self._raise_unclipped(optimizer)
            if self._params.is_joint:
                self._round.mark_stepped(optimizer)
        except SkippedStep as skipped:
            self._round.mark_stepped(optimizer)
            # A scheduler would warn that no step came before its own.
            if hasattr(optimizer.step, SCHEDULED):
                setattr(optimizer, HAS_STEPPED, True)
            return skipped.loss
        except Exception:
            self._clipping.drop_scale(optimizer)
            raise
        else:
            return result
        finally:
            guard.close()
            guard.is_running = False
            if self._is_clean:
                self._is_clean = False
            else:
                self._clean_up()

    def clip_and_step(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[..., object],
        *args: Any,
        **kwargs: Any,
    ) -> object:
        """Clip, and take a step that runs no hooks."""
        changed = self.step_pre_hook(optimizer, (optimizer, *args), kwargs)
        if changed is None:
            return step(*args, **kwargs)
        (_, *new_args), new_kwargs = changed
        return step(*new_args, **new_kwargs)

    def step_pre_hook(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Changed:
        """Clip before a step; also the gradients of a closure, each time the step calls it."""
        # A compiled step would not see what is set for it.
        if torch.compiler.is_dynamo_compiling():
            of_eager_code: Changed = _outside(self.step_pre_hook, optimizer, args, kwargs)
            return of_eager_code

        # A class that calls super().step() runs its hooks once more, and a copy runs them, too.
        guard = self._guard
        if guard.is_open or not guard.is_running:
            return None

        # During backward gradients may be missing.
        stops = None
        if len(args) == 1 and not kwargs and backward_number() == -1:
            stops = self._clipping.clip_on_spine(optimizer, self.loss)
        changed = None
        if stops is None:
            changed = self._clip_generally(optimizer, args, kwargs)
            stops = self._is_skipped
        else:
            self.loss = None
            # Kernels that skip by a flag need it until the step ends.
            self._is_clean = self._clipping.skip.flag is None

        # The gradients are clipped, or will be in the closure.
        guard.open()
        if stops:
            raise SkippedStep(None)
        return changed

    def _clip_generally(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Changed:
        """Clip before a step on the general path, or whose closure computes the gradients."""
        # An optimizer may have arguments of its own before the closure.
        closure = next(filter(callable, [kwargs.get("closure"), *args[1:]]), None)
        # The first step of a round has clipped these gradients, or found that all are skipped.
        if closure is None and self._round.includes(optimizer):
            self._clipping.continue_round(optimizer)
            return None

        self._is_skipped = False
        # A dummy step has no gradients to clip, and is not a step of the rule.
        if kwargs == {"closure": None} and self._clipping.only_makes_state(optimizer):
            return None
        self._raise_if_in_backward(optimizer)
        self._raise_if_it_unscales(optimizer, kwargs)

        # A loss that outlived a failed step would be used for another one.
        loss = self.loss
        self.loss = None
        if closure is None:
            self._clip(optimizer, loss)
            return None

        # The gradients of a closure do not exist yet.
        self._uncalled = closure
        if self._clipping.can_skip:
            self._clipping.skip.remember_params(self._params.tensors())
        clipped = partial(self._run_closure, optimizer, closure, loss)
        new_args = tuple([clipped if one is closure else one for one in args])
        return new_args, {key: clipped if v is closure else v for key, v in kwargs.items()}

    def _clip(self, optimizer: torch.optim.Optimizer, loss: ClosureLoss) -> None:
        """Clip the gradients of all optimizers, and begin a round."""
        self._is_skipped = self._clipping.clip(optimizer, loss)
        self._round.begin(optimizer)

    def _run_closure(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], ClosureLoss],
        loss: ClosureLoss,
    ) -> ClosureLoss:
        """Run the closure of a step, clip its gradients, and return its loss."""
        # An optimizer may have kept it for a time after the step.
        if not self._guard.is_running:
            return closure()

        # An optimizer may run it again after a skip.
        self._clipping.skip.restore_grads()
        self._uncalled = None
        # It is code of the user's, which may step other optimizers.
        self._guard.close()
        closure_loss = closure()
        self._guard.open()

        loss = loss if closure_loss is None else closure_loss
        stops = self._clipping.clip_on_spine(optimizer, loss)
        if stops is None:
            self._clip(optimizer, loss)
        else:
            self._is_skipped = stops
        self._clipping.skip.stop_or_hide(
            self._params.tensors(), closure_loss, skip=self._is_skipped
        )
        return closure_loss

    def _clean_up(self) -> None:
        """Clean up after a step, also after one that failed."""
        if torch.compiler.is_dynamo_compiling():
            _outside(self._clean_up)
            return

        self._uncalled = None
        self.loss = None
        self._clipping.skip.end_step()
        if self._round.is_over:
            self._is_skipped = False

    def _raise_if_it_unscales(
        self, optimizer: torch.optim.Optimizer, kwargs: dict[str, Any]
    ) -> None:
        """Raise for an optimizer that divides the gradients in its step, to which GradScaler passes
        itself.
        """
        if "grad_scaler" in kwargs:
            msg = (
                f"{type(optimizer).__name__} unscales inside its step; clip manually after "
                "scaler.unscale_()"
            )
            raise TypeError(msg)

    def _raise_if_in_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise for a step during backward, when other gradients are not there yet, if a norm or a
        limit of the rule depends on several leaves.
        """
        if not self._spans_leaves or backward_number() == -1:
            return
        msg = (
            f"{type(optimizer).__qualname__} took a step during backward, but a norm of "
            f"{summarize(self._rule)} spans several parameters, whose gradients are not all "
            "computed then; use a rule with a norm for each leaf, such as uc.by_norm(1.0) or "
            "uc.agc(0.01), or take the step after backward"
        )
        raise RuntimeError(msg)

    def _raise_unclipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise for a step that was taken without its hook, or without its closure: the gradients
        that it used were not clipped. Not if it removed the rule.
        """
        if self._params.is_released:
            return
        kind = type(optimizer).__qualname__
        msg = (
            f"{kind}.step was given a closure and did not call it, so the gradients that it used "
            "are not clipped; call step() without it, after backward"
        )
        if not self._guard.is_open:
            msg = (
                f"{kind}.step ran no step pre-hooks, so the gradients that it used are not "
                "clipped; its class or its step was changed after attach, so attach after that"
            )
        raise RuntimeError(msg)
