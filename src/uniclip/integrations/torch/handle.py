# SPDX-License-Identifier: MIT
"""The handle of attached optimizers: their rule, its state, and the report of the last step.

A step passes through `replaced`, `step`, for a list `rounds`, `gradients` and `skip`, in this
order. `guard` raises an error for steps that go past it. `parameters` has the names of parameters,
`state` the state of the rule, and `checks` what is checked before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from uniclip._core.collectives import AllReduce, Shared
from uniclip._types import Number, State
from uniclip.clipper import Clipper, Totals
from uniclip.integrations.torch.checks import check_masks_and_labels
from uniclip.integrations.torch.gradients import ClosureLoss, GradientClipping
from uniclip.integrations.torch.parameters import Parameters
from uniclip.integrations.torch.replaced import ReplacedStep
from uniclip.integrations.torch.state import RuleState, has_stepped, saves_state
from uniclip.integrations.torch.step import Steps
from uniclip.report import Report
from uniclip.rule import BaseRule

if TYPE_CHECKING:
    import torch

    from uniclip.insight import Recorder


class Removable(Protocol):
    """A hook of an optimizer or an engine."""

    def remove(self) -> None:
        """Restore what was there before."""


class Attached:
    """The handle that `attach` returns.

    Examples
    --------
    >>> import torch
    >>> from uniclip.integrations.torch import attach
    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([w], lr=1.0)
    >>> handle = attach(optimizer, uc.by_global_norm(1.0))
    >>> w.grad = torch.tensor([3.0, 4.0])
    >>> optimizer.step()
    >>> handle.report
    <Report: norm 5, limit 1, clipped, finite>
    >>> handle.remove()
    """

    optimizers: list[torch.optim.Optimizer]
    """The optimizers, inside of known wrappers."""

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        clipper: Clipper,
        all_reduce: AllReduce | None,
        shared: Shared | None,
        params: Parameters,
    ) -> None:
        self.optimizers = optimizers
        self._clipper = clipper
        self._params = params
        has_stepped_before = any(map(has_stepped, optimizers))
        self._state = RuleState(clipper, params, is_missing=has_stepped_before)
        self._check_functions()
        # Make the first state now: one that is loaded before the first step is checked against it.
        self._state.reset()

        # All checks are done: from here on the optimizers change. What is set on them holds no
        # optimizer, so that an unused training is freed without a garbage collection.
        clipping = GradientClipping(clipper, params, self._state, all_reduce, shared)
        self._steps = Steps(clipping)
        self._replaced = [
            ReplacedStep(optimizer, self._steps, is_joint=params.is_joint)
            for optimizer in optimizers
        ]
        self._hooks: list[Removable] = [*self._state.add_hooks(optimizers)]
        if self.record is not None:
            self.record.holder = ref(self._steps)

    def add_hook(self, hook: Removable) -> None:
        """Have `remove` remove a hook, too."""
        self._hooks.append(hook)

    def _check_functions(self) -> None:
        """Check the functions in the rule that get paths."""
        # If there are names of other parameters, too, a mask or a label may be meant for those.
        leaves = [p.detach() for p in self._params.tensors()]
        if len(self._params.names) > len(leaves):
            check_masks_and_labels(self.rule, [], [])
            return
        check_masks_and_labels(self.rule, self._params.paths, leaves)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; the first of several."""
        return self.optimizers[0]

    @property
    def rule(self) -> BaseRule:
        """The rule."""
        return self._clipper.rule

    @property
    def record(self) -> Recorder | None:
        """The recorder of the steps, if any."""
        return self._clipper.record

    @property
    def loss(self) -> Number | None:
        """The loss of the next step, for rules that use it. If a closure returns a loss, the rule
        gets that one. ``None`` after the step. With several processes the rule gets the mean.
        """
        return self._steps.loss

    @loss.setter
    def loss(self, loss: ClosureLoss) -> None:
        self._steps.loss = loss

    @property
    def state(self) -> State:
        """The state of the rule."""
        return self._clipper.state

    @property
    def report(self) -> Report | None:
        """The report of the last step that clipped, with the norms of unscaled gradients.

        ``None`` before the first step, and after a step without any gradient.
        """
        return self._clipper.report

    def scalars(self) -> dict[str, Any]:
        """Return the scalars of the last step for a logger, see `uniclip.Report.scalars`;
        empty before the first.
        """
        return self._clipper.scalars()

    def logs(self) -> dict[str, float]:
        """Return the scalars since the last call as floats, see `uniclip.Clipper.logs`."""
        return self.totals().scalars()

    def totals(self) -> Totals:
        """Return the statistics for `logs`, which integrations add up over several windows."""
        return self._clipper.totals()

    def __repr__(self) -> str:
        """Return the rule and the optimizers."""
        return repr(self._steps)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Raise an error: a copy or a pickle would have the steps of another optimizer."""
        msg = (
            "a handle of attach belongs to one optimizer, and cannot be copied or pickled; leave "
            "it out, attach the rule to the other optimizer, and then load there what "
            "optimizer.state_dict() returns here"
        )
        raise TypeError(msg)

    def remove(self) -> None:
        """Detach from the optimizer, which is left as it was before. Idempotent."""
        if self._params.is_released:
            return
        for replaced in self._replaced:
            replaced.remove()
        while self._hooks:
            self._hooks.pop().remove()
        self._steps.remove()

        if self.record is not None:
            self.record.flush()
            self.record.holder = None

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's state in the format of `uniclip.Clipper.state_dict`, with tensors for
        numbers.

        The handle is a ``Stateful`` of ``torch.distributed.checkpoint``: ``dcp.save({"model": ...,
        "optimizer": ..., "clipping": handle})``.

        Returns
        -------
        dict
            Empty for a rule without state.
        """
        return self._state.save()

    @property
    def saved_by_optimizer(self) -> bool:
        """Whether the ``state_dict`` of the optimizer has the state of the rule."""
        return saves_state(self.optimizer)

    def expect_state(self) -> None:
        """Warn at the next step, unless a state of the rule is loaded by then."""
        self._state.warn_unless_loaded()

    def numbers(self) -> dict[str, Any]:
        """Return the same as `state_dict` as plain numbers and lists, for JSON."""
        return self._state.numbers()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a state saved by any integration and framework, as numbers and lists or as
        arrays.

        Parameters
        ----------
        saved : dict
            An empty dict resets the state.

        Raises
        ------
        TypeError
            If ``saved`` is not a dict.
        ValueError
            If it belongs to another rule or other parameters.
        """
        self._state.load(saved)
