# SPDX-License-Identifier: MIT
"""A rule attached to an optimizer."""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch

from uniclip._checks import refuse_in_step
from uniclip._repr import counted, short
from uniclip._types import Number
from uniclip.backends.torch import BACKEND
from uniclip.base import RuleLike
from uniclip.integrations import looks_at_loss, refuse_record, rule_for_steps
from uniclip.integrations.torch.checks import (
    Optimizer,
    has_stepped,
    initializing,
    probe,
    refuse_optimizer,
    unwrapped,
)
from uniclip.integrations.torch.functions import grad_of
from uniclip.integrations.torch.memory import ORDER, Memory
from uniclip.integrations.torch.processes import of_all, of_any, refuse_inner, refuse_parts, refuse_unnamed, several
from uniclip.labels import labelled, leaves_of, refuse_changed
from uniclip.processes import AllReduce, Shared, joining
from uniclip.report import Report
from uniclip.rules import AnyRule, Rule, clip_known, measured, norm_of, seen
from uniclip.scopes import all_leaves
from uniclip.tree import flatten

if TYPE_CHECKING:
    from uniclip.insight import Recorder

_FOLDING = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad}
"""The optimizers whose fused kernels divide the gradients by ``optimizer.grad_scale``, and write them back."""
_DIVIDED = {torch.float32, torch.bfloat16, torch.float16}
"""The dtypes that lose no accuracy by it: ``grad_scale`` is float32."""
_TINY = 1.2e-38
"""The smallest normal float32; kernels may flush smaller numbers to 0."""
_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""The code of PyTorch that runs the hooks around a step."""

_rules: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The rule attached to each optimizer."""


def attach(
    optimizer: Optimizer,
    rule: AnyRule,
    all_reduce: AllReduce | None = None,
    shared: Shared | None = None,
    record: Recorder | None = None,
) -> Attached:
    """Clip the gradients of an optimizer by a rule, at the beginning of each of its steps.

    All parameter groups are clipped together, in place, and only when a step is taken, so accumulated gradients are
    clipped once. With a ``torch.amp.GradScaler`` the norms are those of the unscaled gradients, whether ``unscale_``
    was called or not. Fused optimizers (``fused=True``) multiply by the factor inside their own kernel, if all
    gradients share one factor.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Wrappers, such as those of Accelerate and Lightning, stand for the optimizer inside.
    rule : Rule or a function of one gradient
        The state of a rule with memory is saved in ``optimizer.state_dict()``. Paths are ``(group, name)``, where name
        is an index if the optimizer knows no names.
    all_reduce : ProcessGroup, DeviceMesh, or function of (array, op), optional
        The processes whose optimizers hold parts of one tree as plain tensors: stages of a pipeline, experts, the
        parameters of ``FullyShardedDataParallel`` (FSDP1). Leaves with equal names are parts of one leaf; a leaf that
        only one process has is whole. Not needed for distributed tensors, nor for copies, as in
        DistributedDataParallel.
    shared : function of (path, leaf), optional
        True for a parameter that is a copy held by several of these processes, so that it counts once.
    record : uniclip.insight.Recorder, optional
        Records each step, with the loss if the handle or a closure provides one, and is written at each
        ``state_dict()``. Each of several processes has one, and the first writes. After a checkpoint call
        ``record.resume(step)``.

    Returns
    -------
    handle : Attached

    Raises
    ------
    TypeError
        If ``optimizer`` is not an optimizer, or ``rule`` not a rule; or if a function in the rule needs names of
        parameters that the optimizer does not know.
    ValueError
        If the optimizer already has a rule, or is differentiable. With several processes, if the parameters are those
        of ``FullyShardedDataParallel`` (FSDP1) without ``all_reduce``, if the optimizer is inside a
        ``ZeroRedundancyOptimizer``, or if ``all_reduce`` would join norms of leaves without names. At the first step,
        if the processes have different rules, or leaves that are neither parts of the same leaves nor distinct.

    Warns
    -----
    UserWarning
        If a rule with memory is attached to an optimizer that has taken steps or loaded a state without it; and at a
        step, if a ``state_dict`` without the state of the rule was loaded.

    Notes
    -----
    A step that the rule skips, by the policy ``nonfinite="skip"`` or the curve `uniclip.curves.reject`, is not
    taken: parameters, moments and step counts stay as they are. On an accelerator this reads one boolean to
    the host, except in the fused Adam, AdamW and Adagrad.

    With several processes in ``torch.distributed``, a rule that uses the loss gets the mean of their losses, so that
    all decide alike. This takes one small reduction in the default group, in which every process must take part at each
    step, with a loss or without.

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
    handle = attached(optimizer, rule, all_reduce, shared, record)
    if handle.rule.memory and has_stepped(unwrapped(optimizer)):
        msg = (
            f"the optimizer has taken steps, or loaded a state, without {short(handle.rule)}, which starts over: to go "
            f"on from a checkpoint {ORDER}"
        )
        warnings.warn(msg, UserWarning, stacklevel=2)
    return handle


def attached(
    optimizer: Any, rule: AnyRule, all_reduce: Any = None, shared: Shared | None = None, record: Recorder | None = None
) -> Attached:
    """Attach a rule as `attach` does, also to an optimizer in use, for callers that restore its state themselves."""
    refuse_optimizer(optimizer, rule)
    optimizer = unwrapped(optimizer)
    rule, joins = rule_for_steps(rule), joining(all_reduce, shared, object())
    refuse_in_step(joins)
    refuse_inner(optimizer)
    if optimizer in _rules:
        msg = f"this optimizer is clipped already, by {short(_rules[optimizer])}: call remove() of that handle first"
        raise ValueError(msg)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        msg = "attach clips in place, which derivatives of a step (differentiable=True) do not see: use uc.clip"
        raise ValueError(msg)
    refuse_parts((p for group in optimizer.param_groups for p in group["params"]), "optimizer", rule, joins)
    if joins is not None:
        refuse_unnamed(rule, optimizer.param_groups)
    refuse_record(record, joins)
    return Attached(optimizer, rule, joins, record)


class Attached(Memory):
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

    report: Report | None = None
    """The `uniclip.Report` of the last step, with the norms of unscaled gradients; ``None`` before the first step."""
    loss: Number | None = None
    """The loss of the next step, for rules that use it; by default the closure's, if it returns one. ``None`` after
    the step. With several processes the rule gets the mean."""

    def __init__(self, optimizer: Any, rule: RuleLike, all_reduce: Any = None, record: Recorder | None = None) -> None:
        self.rule = rule
        self.record = record
        self._all_reduce = all_reduce
        self._optimizer = optimizer
        self._steps = 0
        self._changed: dict[str, Any] = {}
        self._hidden: list[tuple[Any, Any]] = []
        self._unreal = False
        self._nests = sum("step" in vars(kind) for kind in type(optimizer).__mro__) > 2  # noqa: PLR2004 - base and its own
        self._required = [p.requires_grad for p in self._params()]
        tree = self._known_tree()
        probe(rule, tree)
        if record is not None:
            every = self._tree(lambda p: p.detach())
            record.describe(rule, flatten(every if len(every) > 1 else every[0]))
            record.holder = ref(self)
        self.state = self._first()
        self._leaves = leaves_of(rule, flatten(tree))
        eager = torch.compiler.disable  # a compiled step would not see the attributes that are set for it
        self._hooks = [
            optimizer.register_step_pre_hook(eager(self._before)),
            optimizer.register_step_post_hook(eager(self._after)),
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._load),
            optimizer.register_load_state_dict_post_hook(self._take),
        ]
        _rules[optimizer] = rule
        self._watch()

    def __repr__(self) -> str:
        """Return the rule, the optimizer, and the number of steps."""
        gone = "" if self._hooks else ", removed"
        clips = f"{type(self._optimizer).__name__} of {counted(len(self._params()), 'parameter')}"
        return f"<attach: {self.rule!r}, {clips}, {counted(self._steps, 'step')}{gone}>"

    def scalars(self) -> dict[str, Any]:
        """Return the scalars of the last step for a logger, see `uniclip.Report.scalars`; empty before the first."""
        return {} if self.report is None else self.report.scalars()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled, since the hooks belong to one optimizer."""
        msg = (
            "a handle of attach is tied to its optimizer, and cannot be copied or pickled: leave it out, attach the "
            "rule to the other optimizer, and then load there what optimizer.state_dict() returns here"
        )
        raise TypeError(msg)

    def remove(self) -> None:
        """Detach from the optimizer, which is left as it was before. Idempotent."""
        if self._hooks:
            self._restore()
            _rules.pop(self._optimizer, None)
        while self._hooks:
            self._hooks.pop().remove()
        if self.record is not None:
            self.record.flush()
            self.record.holder = None

    def name_leaves(self, model: torch.nn.Module) -> None:
        """Let the recorder name leaves as the model does, as many optimizers know no names."""
        if self.record is not None:
            names = {id(p): name for name, p in model.named_parameters()}
            some = OrderedDict((names.get(id(p), str(number)), p.detach()) for number, p in enumerate(self._params()))
            self.record.describe(self.rule, flatten(some))

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Clip before a step; also the gradients of a closure, each time the step calls it."""
        if self._nested():
            return None
        self._hidden.clear()
        self._restore()  # if the previous step failed
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._unreal = closure is None and (len(args) > 1 or "closure" in kwargs) and initializing()
        if self._unreal:
            return None
        self._warn()
        if "grad_scaler" in kwargs:
            msg = f"{type(self._optimizer).__name__} unscales inside its step: clip by hand after scaler.unscale_()"
            raise TypeError(msg)
        given, self.loss = self.loss, None
        if not callable(closure):
            self._clip(given)
            return None
        clipped = partial(self._evaluate, closure, given)
        return ((args[0], clipped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": clipped})

    def _after(self, *_: Any) -> None:
        if not self._nested():
            self._restore()
            if self._unreal:
                self._watch()

    def _nested(self) -> bool:
        """Whether the step is part of another one, as a class that calls ``super().step()`` runs the hooks twice."""
        frame: Any = sys._getframe() if self._nests else None  # noqa: SLF001 - a flag would outlive a step that fails
        steps = 0
        while frame is not None:
            steps += frame.f_code is _STEP and frame.f_locals.get("self") is self._optimizer
            frame = frame.f_back
        return steps > 1

    def _evaluate(self, closure: Callable[[], Any], given: Any) -> Any:
        self._restore()
        loss = closure()
        self._clip(given if loss is None else loss)
        return loss

    def _clip(self, loss: Any) -> None:
        found = [(p, grad) for p, grad in ((p, grad_of(p)) for p in self._params()) if grad is not None]
        given = loss
        params, grads = [p for p, _ in found], list({id(grad): grad for _, grad in found}.values())
        if several():
            looked_at = looks_at_loss(self.rule)
            loss = of_all(loss, next((p.device for p in self._params()), None), looked_at=looked_at)
            if looked_at:
                loss()  # also without any gradient, or other processes would wait
        if not grads and self._all_reduce is None:
            return
        scale, found_inf = (getattr(self._optimizer, name, None) for name in ("grad_scale", "found_inf"))
        found_inf = of_any(found_inf, self._all_reduce, next((p.device for p in self._params()), None))
        policy = getattr(self.rule, "nonfinite", None)
        # Without reading it, GradScaler's ∞ makes the norm one that no state accepts, except under these policies.
        if found_inf is not None and (BACKEND.readable(found_inf) or policy in {"raise", "zero"}) and bool(found_inf):
            self._hide(params)  # GradScaler skips this step
            return
        fused = type(self._optimizer) in _FOLDING and all(g["fused"] for g in self._optimizer.param_groups)
        one_factor = isinstance(self.rule, Rule) and self.rule.scope == all_leaves and policy != "zero"
        with torch.no_grad():
            alone = self._all_reduce is None  # otherwise processes have to take the same branch
            if alone and fused and one_factor and len(grads) == len(params) and all(map(_divided, grads)):
                leaves = self._fold(grads, scale, loss)
            else:
                leaves = self._scale(params, grads, scale, loss)
        self._steps += 1
        if self.record is not None and self.report is not None:
            places = self._places(params) if leaves else None
            given = given if self.record.loss is None else None  # a trainer knows the loss of all accumulated batches
            self.record.take(self.report.parts(), loss=given, leaves=leaves, places=places)
        skipped = None if self.report is None else self.report.skipped
        if skipped is not None:
            self._skip(skipped, params, found_inf, fused=fused)

    def _places(self, params: list[Any]) -> list[int]:
        """Return the numbers of the parameters whose leaves are recorded; refuse others than at the first step."""
        some, every = set(map(id, params)), self._params()
        if len(every) != len(self._required):
            msg = (
                f"record names the leaves of {len(self._required)} parameters, and the optimizer has {len(every)}: "
                "after add_param_group, remove() this handle and attach with a new recorder"
            )
            raise ValueError(msg)
        return [number for number, p in enumerate(every) if id(p) in some]

    def _fold(self, grads: list[Any], scale: Any, loss: Any) -> list[Any]:
        """Let the fused kernel multiply by the factor, as it divides by ``grad_scale``. Return the norms of leaves."""
        tree, params = self._tree(grad_of), self._tree(lambda p: p)
        norm = None
        if scale is not None:
            scaled = norm_of(tree, self.rule.scope, self.rule.norm)
            norm = scaled / scale.to(scaled.device)
        self.state, self.report, leaves = measured(
            self.rule, tree, self.state, params, norm=norm, loss=loss, leaves=self._sees_leaves
        )
        self._fold_factor(self.report, grads, scale)
        if leaves is None:
            return []
        return [leaves if scale is None else BACKEND.xp.asarray(leaves) / scale]

    def _fold_factor(self, report: Report, grads: list[Any], scale: Any) -> None:
        """Set the divisor of the fused kernel."""
        factor = report.factors
        divisor = factor.reciprocal() if scale is None else scale.to(factor.device) / factor
        known = BACKEND.readable(factor)
        if known and not bool(report.clipped):
            return
        if not known or all(_TINY < float(one) < 1 / _TINY for one in (factor, divisor)):
            self._set("grad_scale", divisor)
        else:  # kernels cannot divide by some values, such as 0, NaN or 1e-40
            self._unscale(grads, scale)
            rule = replace(self.rule, limit=report.limits)
            clip_known(rule, grads, report.norms, in_place=True)

    def _unscale(self, grads: list[Any], scale: Any) -> None:
        """Divide by the divisor of a fused kernel."""
        if scale is not None:
            self._set("grad_scale", None)
            for grad in grads:
                grad.div_(scale.to(grad.device))

    def _scale(self, params: list[Any], grads: list[Any], scale: Any, loss: Any) -> list[Any]:
        """Clip in place, after dividing by the divisor of a fused kernel. Return the norms of leaves."""
        if self._all_reduce is None:  # otherwise there is a norm for every parameter
            if self.rule.by_leaf:
                self._same(params)
            elif labelled(self.rule):
                self._same_groups()
        if scale is not None and any(grad.dtype is torch.float16 for grad in grads):
            msg = (
                f"{short(self.rule)} needs unscaled gradients, and float16 cannot hold them: keep the parameters "
                "in float32 under autocast, or clip by a rule with one factor for all, such as uc.by_global_norm"
            )
            raise ValueError(msg)
        self._unscale(grads, scale)
        tree, every = self._tree(grad_of), self._tree(lambda p: p)
        if self._sees_leaves:
            _, self.state, self.report, leaves = seen(self.rule, tree, self.state, every, in_place=True, loss=loss)
            return [leaves]
        _, self.state, self.report = self.rule.update(
            tree, self.state, every, self._all_reduce, in_place=True, loss=loss
        )
        return []

    @property
    def _sees_leaves(self) -> bool:
        return self.record is not None and bool(self.record.leaves)

    def _same(self, params: list[Any]) -> None:
        """Refuse gradients of other parameters than those in the state, whose rows are in their order."""
        known = self._known()
        if [id(p) for p in params] != [id(p) for p in known]:
            msg = (
                f"{short(self.rule)} remembers each of the {len(known)} parameters that required a gradient when "
                f"it was attached, but {len(params)} have one, or others do; freeze a parameter that gets none "
                "(requires_grad_(False)) and add new ones before you attach"
            )
            raise ValueError(msg)

    def _same_groups(self) -> None:
        """Refuse gradients of other groups than those in the state, whose rows are in their order."""
        refuse_changed(self.rule, self._leaves, leaves_of(self.rule, flatten(self._tree(grad_of))))

    def _skip(self, skipped: Any, params: list[Any], found_inf: Any, *, fused: bool) -> None:
        """Skip a step, as the rule demands."""
        # The fused SGD leaves its momentum uninitialized in a first step that is skipped.
        if fused and not BACKEND.readable(skipped) and not isinstance(self._optimizer, torch.optim.SGD):
            flag = skipped.to(torch.float32)
            self._set("found_inf", flag if found_inf is None else torch.maximum(flag, found_inf.to(flag.device)))
        elif bool(skipped):
            self._hide(params)

    def _hide(self, params: list[Any]) -> None:
        """Hide the gradients until the step is over, since optimizers skip parameters without one."""
        self._hidden = [(p, p.grad) for p in params]
        for p in params:
            p.grad = None

    def _set(self, name: str, value: Any) -> None:
        """Set an attribute of the optimizer until the step is over."""
        self._changed.setdefault(name, vars(self._optimizer).get(name, self))
        setattr(self._optimizer, name, value)

    def _restore(self) -> None:
        for name, old in self._changed.items():
            setattr(self._optimizer, name, old)
            if old is self:  # there was none
                delattr(self._optimizer, name)
        for p, grad in self._hidden:
            p.grad = grad
        self._changed, self._hidden = {}, []

    def _first(self) -> Any:
        return self.rule.init(self._known_tree())

    def _known_tree(self) -> list[Any]:
        """Return the parameters that the state belongs to."""
        known = set(map(id, self._known()))
        return self._tree(lambda p: p.detach() if id(p) in known else None)

    def _known(self) -> list[Any]:
        """Return the parameters that required a gradient, by position; Accelerate replaces those of FSDP2."""
        return [p for p, required in zip(self._params(), self._required, strict=False) if required]

    def _params(self) -> list[Any]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _tree(self, of: Callable[[Any], Any]) -> list[Any]:
        """Return ``of(parameter)`` for each parameter, by its group and name (its index without unique names)."""
        trees = []
        for group in self._optimizer.param_groups:
            numbers = range(len(group["params"]))
            names = group.get("param_names", numbers)
            names = names if len(set(names)) == len(numbers) else numbers
            trees.append(OrderedDict(zip(names, map(of, group["params"]), strict=True)))
        return trees


def _divided(grad: Any) -> bool:
    """Whether a fused kernel can divide the gradient as accurately as uniclip."""
    return type(grad) is torch.Tensor and grad.layout is torch.strided and grad.dtype in _DIVIDED
