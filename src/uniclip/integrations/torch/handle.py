# SPDX-License-Identifier: MIT
"""Attach a rule to an optimizer, so that each of its steps is clipped: `attach` and its handle.

What happens at a step is in `step`, how gradients are clipped in `gradients`, the names of
parameters in `parameters`, the state of the rule in `state`, and the error for a step that goes
past the attached one in `guard`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from uniclip._core.collectives import AllReduce, Shared, check_shared, reducer_of
from uniclip._errors import summarize
from uniclip._types import Number, State
from uniclip._warnings import warn
from uniclip.backends.torch import BACKEND
from uniclip.clipper import Clipper
from uniclip.compose import AnyRule
from uniclip.integrations import check_record, rule_for_steps
from uniclip.integrations.torch.checks import (
    Optimizers,
    check_masks_and_labels,
    optimizers_of,
    unwrap,
)
from uniclip.integrations.torch.gradients import ClosureLoss, GradientClipping
from uniclip.integrations.torch.guard import guard_of
from uniclip.integrations.torch.parameters import Names, Parameters
from uniclip.integrations.torch.processes import check_shards, raise_if_unnamed
from uniclip.integrations.torch.replaced import ReplacedStep
from uniclip.integrations.torch.state import RuleState, has_stepped, saves_state
from uniclip.integrations.torch.step import Steps
from uniclip.report import Report
from uniclip.rule import BaseRule

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

    from uniclip.insight import Recorder


def attach(  # noqa: PLR0913 - an optimizer has none of these itself
    optimizer: Optimizers,
    rule: AnyRule,
    all_reduce: AllReduce | None = None,
    shared: Shared | None = None,
    record: Recorder | None = None,
    *,
    names: Names | None = None,
    resume: bool = True,
) -> Attached:
    """Clip the gradients of an optimizer by a rule, at the beginning of each of its steps.

    All parameter groups are clipped together, in place, and only when a step is taken, so
    accumulated gradients are clipped once. With a ``torch.amp.GradScaler`` the norms are those of
    the unscaled gradients, whether ``unscale_`` was called or not.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer, or any object with ``step`` and ``param_groups``
        The object whose ``step()`` your loop calls. The parameters in its groups are clipped. A
        list, tuple or dict of several, such as Muon and AdamW, which your loop steps one after the
        other: all of their parameters are clipped together, at the first of these steps. A wrapper
        of Accelerate, Lightning, Opacus or MMEngine stands for the optimizer inside.
    rule : Rule or a function of one gradient
        The state of a stateful rule is saved in ``optimizer.state_dict()``. Paths are
        ``(group, name)``, where name is an index if neither the optimizer nor ``names`` has names.
    all_reduce : ProcessGroup, DeviceMesh, or function of (array, op), optional
        The processes whose optimizers hold shards of one tree as regular tensors (not DTensors):
        stages of a pipeline, experts, the parameters of ``FullyShardedDataParallel`` (FSDP1).
        Leaves with equal names are shards of one leaf; a leaf that only one process has is whole.
        Not needed for distributed tensors, nor for replicas, as in DistributedDataParallel.
    shared : function of (path, leaf), optional
        True for a parameter that is a replica in several of these processes, so that it counts
        once.
    record : uniclip.insight.Recorder, optional
        Records each step, with the loss if the handle or a closure provides one, and is written at
        each ``state_dict()``. Each of several processes has one, and the first writes. After a
        checkpoint call ``record.resume(step)``.
    names : torch.nn.Module, or pairs as of ``model.named_parameters()``, optional
        The names of the parameters, if the optimizer was made without, as by
        ``AdamW(model.parameters())``: the rule, its state and the record then have them in their
        paths. They are read once; other parameters have numbers.

    Returns
    -------
    handle : Attached

    Raises
    ------
    TypeError
        If ``optimizer`` is not an optimizer, or ``rule`` not a rule, or ``names`` neither a module
        nor pairs; if a mask or label in the rule fails, for example because it looks for names but
        the parameters have only numbers.
    ValueError
        If the optimizer already has a rule, or is differentiable; if ``names`` has none of its
        parameters; if parameters have no names, and a mask or label in the rule returns the same
        for all of them, or a mask by names takes none. With several
        processes, if the parameters are those of ``FullyShardedDataParallel`` (FSDP1) without
        ``all_reduce``, or if ``all_reduce`` would reduce norms of leaves without names. At the
        first step, if the processes have different rules, or leaves that are neither shards of the
        same leaves nor distinct.
    RuntimeError
        At a step whose gradients are not clipped: a closure that the optimizer does not call, a
        step during backward under a norm that spans several leaves, or a step of any
        ``torch.optim.Optimizer`` that moves the same parameters outside of the attached step.

    Warns
    -----
    UserWarning
        At a step of a stateful rule, if the optimizer had taken steps before it was attached, or
        loaded a ``state_dict`` without the state of the rule; and when a state is loaded that has
        no entry for some parameters, which then start with empty state. For a stateful rule, if the
        optimizer has a ``state_dict`` of its own, which may leave the rule's state out.

    Notes
    -----
    The state that a rule has for a parameter belongs to the parameter itself: groups can be added,
    removed and changed between steps, and a parameter that comes back goes on from its own norms. A
    saved state is matched by names; entries of parameters that are not here are kept for
    ``add_param_group``.

    A step that the rule skips, by the policy ``nonfinite="skip"`` or the curve
    `uniclip.curves.reject`, is not taken: parameters, moments and step counts stay as they are. On
    an accelerator this reads one boolean to the host, except in the fused Adam, AdamW and Adagrad.
    A step with a closure goes on without gradients, for which most optimizers do nothing.

    With several optimizers the state of a stateful rule is in the ``state_dict`` of the first.

    With several processes in ``torch.distributed``, a rule that uses the loss gets the mean of
    their losses, so that all decide alike. This takes one small reduction in the default group, in
    which every process must take part at each step, with a loss or without.

    Examples
    --------
    >>> import torch
    >>> from uniclip.integrations.torch import attach
    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([w], lr=1.0)
    >>> handle = attach(optimizer, uc.by_global_norm(1.0))
    >>> (w @ torch.tensor([3.0, 4.0])).backward()
    >>> optimizer.step()
    >>> w.tolist(), handle.report.norms.item()
    ([-0.6000000238418579, -0.800000011920929], 5.0)
    """
    return attach_unsaved(
        optimizer, rule, all_reduce, shared, record, names=names, resume=resume, warns=True
    )


def attach_unsaved(  # noqa: PLR0913 - the same as of attach
    optimizer: Optimizers,
    rule: AnyRule,
    all_reduce: AllReduce | None = None,
    shared: Shared | None = None,
    record: Recorder | None = None,
    *,
    names: Names | None = None,
    resume: bool = True,
    warns: bool = False,
) -> Attached:
    """Do the same as `attach`, for an integration that saves the state of the rule itself.

    So it does not warn that the optimizer may leave the state out, unless ``warns`` is true.
    """
    optimizers = optimizers_of(optimizer, rule)
    rule = rule_for_steps(rule)
    check_shared(all_reduce, shared)
    _raise_if_attached(optimizers)

    params = Parameters(optimizers, names)
    groups = params.groups()
    if any(group.get("differentiable") for group in groups):
        msg = (
            "attach clips in place, which the derivative of a step (differentiable=True) does not "
            "include; use uc.clip"
        )
        raise ValueError(msg)

    check_shards(params.tensors(), "optimizer", rule, all_reduce)
    if all_reduce is not None:
        # This raises an error for what cannot reduce.
        reducer_of(BACKEND, all_reduce)
        raise_if_unnamed(rule, groups, params.names)
    check_record(record, all_reduce)

    if warns and rule.stateful and not saves_state(optimizers[0]):
        msg = (
            f"{type(optimizers[0]).__qualname__}.state_dict() is not PyTorch's own, and may leave "
            f"out the state of {summarize(rule)}; save handle.state_dict(), too, and load it by "
            "handle.load_state_dict(saved)"
        )
        warn(msg)
    clipper = Clipper(rule, record, resume=resume)
    handle = Attached(optimizers, clipper, all_reduce, shared, params)
    _renew_kept_step(optimizer)
    return handle


def _renew_kept_step(wrapper: Any) -> None:
    """Have the wrapper of Accelerate call the new step: with a loss scale it keeps the old one."""
    is_wrapper = unwrap(wrapper) is not wrapper
    if is_wrapper and getattr(wrapper, "scaler", None) is not None:
        # A wrapper that is unpickled asks its optimizer for the step.
        wrapper.__setstate__({})


def _raise_if_attached(optimizers: list[torch.optim.Optimizer]) -> None:
    """Raise if an optimizer has a rule: gradients would be clipped twice."""
    for optimizer in optimizers:
        guard = guard_of(optimizer)
        if guard is not None:
            msg = (
                f"this optimizer is clipped already, by {summarize(guard.rule)}; call remove() of "
                "that handle first"
            )
            raise ValueError(msg)


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
        self._is_removed = False

        has_stepped_before = any(map(has_stepped, optimizers))
        self._state = RuleState(clipper, params, is_missing=has_stepped_before)
        self._check_functions()
        # A state may be loaded before the first step, and is checked against this one.
        self._state.reset()

        # All checks are done: from here on the optimizers change. What they get holds none of them,
        # so that a training that is used no more is freed at once.
        clipping = GradientClipping(clipper, params, self._state, all_reduce, shared)
        self._steps = Steps(self.rule, params, self._state, clipping)
        self._replaced = [
            ReplacedStep(optimizer, self._steps, is_joint=len(optimizers) > 1)
            for optimizer in optimizers
        ]
        self._hooks: list[RemovableHandle] = self._state.add_hooks(optimizers[0])
        self._hooks += [
            optimizer.register_step_pre_hook(self._steps.before)
            for optimizer, replaced in zip(optimizers, self._replaced, strict=True)
            if replaced.runs_hooks
        ]
        if self.record is not None:
            self.record.holder = ref(self._steps)

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
        """The loss of the next step, for rules that use it; by default the closure's, if it returns
        one. ``None`` after the step. With several processes the rule gets the mean.
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
        """The report of the last step, with the norms of unscaled gradients.

        ``None`` before the first step.
        """
        return self._clipper.report

    def scalars(self) -> dict[str, Any]:
        """Return the scalars of the last step for a logger, see `uniclip.Report.scalars`;
        empty before the first.
        """
        return self._clipper.scalars()

    def logs(self) -> dict[str, float]:
        """Return the scalars since the last call as floats, see `uniclip.Clipper.logs`."""
        return self._clipper.logs()

    def __repr__(self) -> str:
        """Return the rule and the optimizers."""
        removed = ", removed" if self._is_removed else ""
        return f"{self._steps!r}".removesuffix(">") + f"{removed}>"

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
        if self._is_removed:
            return
        self._is_removed = True
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
        self._state.expect()

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
