# SPDX-License-Identifier: MIT
"""A rule attached to an optimizer."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from functools import partial, wraps
from inspect import unwrap
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from uniclip._core.collectives import (
    AllReduce,
    Shared,
    check_shared,
    follow_reference,
    keep_reference,
    reducer_of,
)
from uniclip._core.fast_path import report_fast_path, run_fast_path
from uniclip._core.tree import place
from uniclip._errors import check, counted, stable, summarize
from uniclip._types import Number, Step
from uniclip._warnings import warn
from uniclip.backends.torch import BACKEND
from uniclip.backends.torch.fast_path import gradients_of
from uniclip.clipper import Clipper
from uniclip.compose import AnyRule
from uniclip.integrations import check_answers_differ_in, check_record, looks_at, rule_for_steps
from uniclip.integrations.torch.checks import (
    Optimizer,
    can_skip,
    check_names,
    spans_leaves,
    stepped_by,
)
from uniclip.integrations.torch.functions import get_total_norm, grads_of
from uniclip.integrations.torch.processes import (
    any_found_inf,
    average_loss,
    check_shards,
    raise_if_unnamed,
    several,
)
from uniclip.integrations.torch.step_wrapper import SkippedStep, StepWrapper, find_caller
from uniclip.integrations.torch.stepped import (
    Snapshot,
    Stepped,
    has_hooks,
    parameter_ids,
    parameters_of,
)
from uniclip.report import Report
from uniclip.rule import BaseRule, Rule
from uniclip.saved import labels_of, renamed, shown

if TYPE_CHECKING:
    from uniclip.insight import Recorder

Names: TypeAlias = "torch.nn.Module | Iterable[tuple[str, torch.Tensor]]"
"""The names of parameters: a module, or pairs as of its ``named_parameters()``."""

_SKIPPING = {torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad}
"""The optimizers whose fused kernels skip a step by themselves, if ``optimizer.found_inf`` is 1.

That of SGD leaves its momentum uninitialized in a first step that is skipped.
"""
_IN_PLACE = Step(in_place=True)
_KEY = "uniclip"
"""The key of the rule's state in a ``state_dict``."""

_backward_number = torch._C._current_graph_task_id  # noqa: SLF001 - PyTorch has no public name for it
"""Returns the number of the backward pass that runs in this thread, -1 outside of one."""

_rules: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The rule attached to each optimizer, and to those that it holds; by identity,
as a dataclass has no hash.
"""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside(hook: Callable[..., Any], *args: Any) -> Any:
    """Run a hook outside of compiled code."""
    return hook(*args)


def _in_eager_code(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that compiled code calls between its graphs, since it would not see what the
    hook sets.
    """

    @wraps(hook)
    def run(*args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            _outside(hook, *args)
        else:
            hook(*args)

    return run


def attach(  # noqa: PLR0913 - what an optimizer does not know of itself
    optimizer: Optimizer,
    rule: AnyRule,
    all_reduce: AllReduce | None = None,
    shared: Shared | None = None,
    record: Recorder | None = None,
    *,
    names: Names | None = None,
) -> Attached:
    """Clip the gradients of an optimizer by a rule, at the beginning of each of its steps.

    All parameter groups are clipped together, in place, and only when a step is taken, so
    accumulated gradients are clipped once. With a ``torch.amp.GradScaler`` the norms are those of
    the unscaled gradients, whether ``unscale_`` was called or not.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer, or any object with ``step`` and ``param_groups``
        A wrapper around one optimizer with the same parameters, such as those of Accelerate,
        Lightning and SAM, stands for the optimizer inside. One that holds several is stepped as
        one: their parameters have one norm.
    rule : Rule or a function of one gradient
        The state of a rule with memory is saved in ``optimizer.state_dict()``. Paths are
        ``(group, name)``, where name is an index if neither the optimizer nor ``names`` knows
        names.
    all_reduce : ProcessGroup, DeviceMesh, or function of (array, op), optional
        The processes whose optimizers hold parts of one tree as plain tensors: stages of a
        pipeline, experts, the parameters of ``FullyShardedDataParallel`` (FSDP1). Leaves with equal
        names are parts of one leaf; a leaf that only one process has is whole. Not needed for
        distributed tensors, nor for copies, as in DistributedDataParallel.
    shared : function of (path, leaf), optional
        True for a parameter that is a copy held by several of these processes, so that it counts
        once.
    record : uniclip.insight.Recorder, optional
        Records each step, with the loss if the handle or a closure provides one, and is written at
        each ``state_dict()``. Each of several processes has one, and the first writes. After a
        checkpoint call ``record.resume(step)``.
    names : torch.nn.Module, or pairs as of ``model.named_parameters()``, optional
        The names of the parameters, where the optimizer was made without, as by
        ``AdamW(model.parameters())``: the rule, its memory and the record then have them in their
        paths. They are read once; others have numbers.

    Returns
    -------
    handle : Attached

    Raises
    ------
    TypeError
        If ``optimizer`` is not an optimizer, or ``rule`` not a rule, or ``names`` neither a module
        nor pairs; if a mask or label in the rule looks for names that the parameters do not have.
    ValueError
        If the optimizer already has a rule, or is differentiable; if ``names`` has none of its
        parameters, or a mask or label in the rule says the same of all of them. With several
        processes, if the parameters are those of ``FullyShardedDataParallel`` (FSDP1) without
        ``all_reduce``, or if ``all_reduce`` would join norms of leaves without names. At the first
        step, if the processes have different rules, or leaves that are neither parts of the same
        leaves nor distinct.
    RuntimeError
        At a step, if its gradients are not clipped, or not all of them: a closure that the
        optimizer does not call, a step during backward under a norm that spans several leaves, a
        step of an optimizer inside of another by itself, or none of one whose parameters have
        gradients.

    Warns
    -----
    UserWarning
        At a step of a rule with memory, if the optimizer had taken steps before it was attached, or
        loaded a ``state_dict`` without the state of the rule; and where a state is loaded that has
        none of the norms of some parameters, which then begin anew. For a rule with memory, if the
        ``state_dict`` of an optimizer that holds others may leave the rule's state out.

    Notes
    -----
    What a rule remembers of a parameter belongs to the parameter itself: groups can be added, taken
    away and changed between steps, and a parameter that comes back goes on from its own norms. In a
    saved state they go by the names; those of parameters that are not here are kept for
    ``add_param_group``.

    A step that the rule skips, by the policy ``nonfinite="skip"`` or the curve
    `uniclip.curves.reject`, is not taken: parameters, moments and step counts stay as they are. On
    an accelerator this reads one boolean to the host, except in the fused Adam, AdamW and Adagrad.
    An optimizer that moves the parameters before it calls its closure goes on without gradients.

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
    stepped, rule = stepped_by(optimizer, rule), rule_for_steps(rule)
    check_shared(all_reduce, shared)
    for one in (stepped.outer, *stepped.inner):
        if one in _rules:
            msg = (
                f"this optimizer is clipped already, by {summarize(_rules[one])}: call remove() of "
                "that handle first"
            )
            raise ValueError(msg)
    groups = stepped.groups()
    if any(group.get("differentiable") for group in groups):
        msg = (
            "attach clips in place, which derivatives of a step (differentiable=True) do not see: "
            "use uc.clip"
        )
        raise ValueError(msg)
    check_shards((p for group in groups for p in group["params"]), "optimizer", rule, all_reduce)
    known = names_of(names, groups)
    if all_reduce is not None:
        reducer_of(BACKEND, all_reduce)  # which says what is taken
        raise_if_unnamed(rule, groups, known)
    check_record(record, all_reduce)
    single = not stepped.inner and has_hooks(stepped.outer)
    if rule.stateful and not single and not stepped.saves_state():
        msg = (
            f"{type(stepped.outer).__qualname__}.state_dict() is not PyTorch's own, and may leave "
            f"out what {summarize(rule)} remembers: save handle.state_dict() beside it, and load it "
            "by handle.load_state_dict(saved)"
        )
        warn(msg)
    return Attached(stepped, Clipper(rule, record), all_reduce, shared, known)


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

    optimizer: Any
    """The optimizer inside its wrappers, or the one that holds several."""
    loss: Number | None = None
    """The loss of the next step, for rules that use it; by default the closure's,
    if it returns one. ``None`` after the step. With several processes the rule gets the mean."""

    def __init__(
        self,
        stepped: Stepped,
        clipper: Clipper,
        all_reduce: Any,
        shared: Any,
        names: WeakTensorKeyDictionary,
    ) -> None:
        self._stepped, self.optimizer, self._clipper = stepped, stepped.outer, clipper
        self._join, self._shared = keep_reference(all_reduce), shared
        self._names = names
        """The names of parameters.

        Those of the first time, as a file that is loaded may bring others.
        """
        self._leaves: dict[str, Any] = {}
        """The parameters, weakly, by their paths, under which they have their memory;
        also those that are gone.
        """
        self._keys: list[list[Any]] = []
        """The names or numbers of the parameters of each group."""
        self._here: list[Any] = []
        """The parameters, weakly, in the order of the groups."""
        self._hidden_grads: list[tuple[Any, Any]] = []
        """The parameters and gradients of a step that is skipped,
        which the optimizer must not see.
        """
        self._flagged: list[Any] = []
        """The optimizers whose flag was set for a fused kernel, by which it skips a step."""
        self._next_memory: Any = None
        """What loads the memory that was saved, between two hooks."""
        self._waits_for_closure = False
        """Whether the step was given a closure that it has not called yet."""
        self._has_closure = False
        """Whether the step was given a closure."""
        self._before_closure: Snapshot | None = None
        """The parameters before the first closure of a step, ``None`` after it."""
        self._around: dict[int, Snapshot] = {}
        """The parameters before the steps of the wrappers that run, which call none inside yet."""
        self._taken: set[int] | None = None
        """The optimizers inside that have stepped in the current step, by identity.

        ``None`` outside of a step.
        """
        self._lacks_memory = bool(self.rule.stateful) and _has_stepped(stepped.optimizers)
        """Whether the optimizer knows more steps than the rule."""
        self._takes_params = looks_at("params", self.rule)
        self._spans_leaves = spans_leaves(self.rule)
        self._look_up_leaves()
        self._check_answers_differ()
        self._begin()
        if self.record is not None:
            self.record.holder = ref(self)

        # From here on nothing is refused: the optimizer changes.
        self._hooks: list[Any] = []
        self._attached = True
        self._nested = _calls_super(self.optimizer)
        self._wrapper = self._wrap_step()
        self._add_hooks()
        for one in (stepped.outer, *stepped.inner):
            _rules[one] = self.rule

        self._fast_rule: Rule | None = None
        """The rule, if its steps may take the fast path, which decides by itself."""
        # A recorder wants the norms of all leaves, and a wrapper has work around the step.
        alone = all_reduce is None and clipper.record is None and self._wrapper is None
        if alone and type(clipper.rule) is Rule:
            self._fast_rule = clipper.rule

    def _add_hooks(self) -> None:
        """Add the hooks around steps and states, where the optimizer has them,
        and around the steps inside.
        """
        optimizer = self.optimizer
        if has_hooks(optimizer):
            self._hooks += [
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
                optimizer.register_state_dict_post_hook(self._save),
                optimizer.register_load_state_dict_pre_hook(self._check),
                optimizer.register_load_state_dict_post_hook(self._load),
            ]
        self._hooks += [
            one.register_step_pre_hook(self._before_inner) for one in self._stepped.inner
        ]
        for one in filter(has_hooks, self._stepped.wrappers):
            self._hooks += [
                one.register_step_pre_hook(self._before_wrapper),
                one.register_step_post_hook(self._after_wrapper),
            ]

    def _wrap_step(self) -> StepWrapper | None:
        """Put a wrapper in the place of the step, if hooks alone cannot do what this rule and
        optimizer need.
        """
        enough = has_hooks(self.optimizer) and not (
            self._nested or self._stepped.inner or can_skip(self.rule)
        )
        return (
            None
            if enough
            else StepWrapper(self.optimizer, self._before, self._after, self._end_step)
        )

    @property
    def rule(self) -> BaseRule:
        """The rule."""
        return self._clipper.rule

    @property
    def record(self) -> Recorder | None:
        """The recorder of the steps, if any."""
        return self._clipper.record

    @property
    def state(self) -> Any:
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
        """Return the rule and the optimizer."""
        clips = f"{type(self.optimizer).__name__} of {counted(len(self._params()), 'parameter')}"
        return f"<attach: {self.rule!r}, {clips}{'' if self._attached else ', removed'}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled, since the hooks belong to one optimizer."""
        msg = (
            "a handle of attach is tied to its optimizer, and cannot be copied or pickled: leave "
            "it out, attach the rule to the other optimizer, and then load there what "
            "optimizer.state_dict() returns here"
        )
        raise TypeError(msg)

    def remove(self) -> None:
        """Detach from the optimizer, which is left as it was before. Idempotent."""
        if not self._attached:
            return
        self._attached = False
        self._end_step()
        for one in (self.optimizer, *self._stepped.inner):
            _rules.pop(one, None)
        if self._wrapper is not None:
            self._wrapper.remove()
            self._wrapper = None
        while self._hooks:
            self._hooks.pop().remove()
        if self.record is not None:
            self.record.flush()
            self.record.holder = None

    # The memory of the rule.

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's memory in the format of `uniclip.Clipper.state_dict`,
        with tensors for numbers.

        The handle is a ``Stateful`` of ``torch.distributed.checkpoint``: ``dcp.save({"model": ...,
        "optimizer": ..., "clipping": handle})``.

        Returns
        -------
        dict
            Empty for a rule without memory.
        """
        self._look_up_leaves()
        return self._clipper.state_dict(lambda array: torch.as_tensor(array).detach().clone())

    def numbers(self) -> dict[str, Any]:
        """Return the same as `state_dict` as plain numbers and lists, for JSON."""
        self._look_up_leaves()
        return self._clipper.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a memory saved by any integration and framework,
        as numbers and lists or as arrays.

        Parameters
        ----------
        saved : dict
            An empty dict starts over.

        Raises
        ------
        TypeError
            If ``saved`` is not a dict.
        ValueError
            If it belongs to another rule or other parameters.
        """
        check("saved", saved, isinstance(saved, dict), "what state_dict() returned")
        if saved:
            self._look_up(saved)()
        else:
            self._look_up_leaves()
            self._begin()
        self._lacks_memory = False

    def _begin(self) -> None:
        """Make the state before the first step."""
        self._clipper.init(self._tree([p.detach() for p in self._params()]))

    def _look_up(self, saved: dict[str, Any]) -> Callable[[], None]:
        """Return what loads a saved memory, whatever groups its parameters were in,
        and warns of those it lacks.
        """
        self._look_up_leaves()
        theirs = labels_of(saved.get("leaves")) if isinstance(saved, dict) else []
        names = [path.partition("]")[2] for path in [*self._leaves, *theirs]]
        here, strange = (
            {path.partition("]")[2]: path for path in some} for some in (self._leaves, theirs)
        )
        # By a name that is no number, and that each side has once.
        moved = {
            strange[name]: here[name]
            for name in here.keys() & strange.keys()
            if "'" in name and here[name] != strange[name] and names.count(name) == 2
        }
        load, new = self._clipper.look_up(renamed(saved, moved) if moved else saved)

        def load_and_warn() -> None:
            load()
            if new:
                msg = (
                    f"the saved state of {summarize(self.rule)} has no norms of {shown(new)}, which "
                    "begin anew"
                )
                warn(msg)

        return load_and_warn

    def _save(self, _: Any, state_dict: dict[str, Any]) -> None:
        if self.record is not None:
            self.record.flush()
        if self.rule.stateful:
            state_dict[_KEY] = self.state_dict()

    def _check(self, _: Any, state_dict: dict[str, Any]) -> None:
        """Check a state, before the optimizer changes, which may still refuse the rest."""
        there = self.rule.stateful and _KEY in state_dict
        self._next_memory = self._look_up(state_dict[_KEY]) if there else None

    def _load(self, _: Any) -> None:
        """Restore the loaded state, now that the optimizer has accepted the rest."""
        load, self._next_memory = self._next_memory, None
        self._lacks_memory = self.rule.stateful and load is None
        if load is not None:
            load()

    # A step.

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Clip before a step; also the gradients of a closure, each time the step calls it."""
        if torch.compiler.is_dynamo_compiling():  # a compiled step would not see what is set for it
            return _outside(self._before, optimizer, args, kwargs)
        self._around.clear()  # the wrappers around this step have called it
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if (
            closure is None
            and not kwargs
            and self._fast_rule is not None
            and self._clip_on_fast_path(self._fast_rule)
        ):
            return None
        wrapper = self._wrapper
        if self._nested and wrapper is not None and wrapper.depth is None:
            msg = (
                f"{type(optimizer).__name__} calls super().step(), and a wrapper runs the step "
                "that it had before the rule was attached: attach first, then wrap the optimizer"
            )
            raise RuntimeError(msg)
        if wrapper is not None and wrapper.depth is not None:
            wrapper.depth += 1
            if wrapper.depth > 1:
                return None

        self._end_step()  # if the previous step failed
        self._taken = set()
        if closure is None and "closure" in kwargs and self._makes_state(self._stepped.groups()):
            return None
        self._raise_if_others_inside()
        self._raise_if_in_backward()
        self._warn()
        if "grad_scaler" in kwargs:
            msg = (
                f"{type(self.optimizer).__name__} unscales inside its step: clip by hand after "
                "scaler.unscale_()"
            )
            raise TypeError(msg)

        given, self.loss = self.loss, None
        if not callable(closure):
            self._clip(given)
            return None
        self._waits_for_closure = self._has_closure = True
        if wrapper is not None:
            self._before_closure = Snapshot(self._params())
        clipped = partial(self._evaluate, closure, given)
        return (
            ((args[0], clipped, *args[2:]), kwargs)
            if len(args) > 1
            else (args, {**kwargs, "closure": clipped})
        )

    @_in_eager_code
    def _before_inner(self, optimizer: Any, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the step of an optimizer inside.

        Refuse one outside of the step that clips for all of them.
        """
        caller = find_caller(self.optimizer, self._wrapper)
        if self._taken is not None and isinstance(caller, torch.amp.GradScaler):
            self._raise_if_scaled_inside(optimizer)
        # A step that failed, and that no wrapper saw, has not come to its end.
        failed = caller is None and (self._wrapper is None or self._wrapper.depth is None)
        if self._taken is not None and not failed:
            self._taken.add(id(optimizer))
            return

        # A step that torch.distributed.checkpoint takes to make the state has no gradients to clip.
        no_closure = "closure" in kwargs and kwargs["closure"] is None
        if no_closure and self._makes_state(optimizer.param_groups):
            return
        outer = type(self.optimizer).__qualname__
        msg = (
            f"{type(optimizer).__qualname__} took a step outside of the step of {outer}, which "
            "holds it and at whose beginning all gradients are clipped together: call the step() "
            "of the outer one, and attach before another library wraps it (Accelerate's "
            "prepare); or attach a rule to each of the optimizers inside"
        )
        raise RuntimeError(msg)

    @_in_eager_code
    def _before_wrapper(self, wrapper: Any, *_: Any) -> None:
        """Note where the parameters are before the step of a wrapper around the optimizer."""
        self._around[id(wrapper)] = Snapshot(self._params())

    @_in_eager_code
    def _after_wrapper(self, wrapper: Any, *_: Any) -> None:
        """Refuse a wrapper that moves the parameters by itself: nothing clips for it."""
        before = self._around.pop(id(wrapper), None)
        if before is not None and before.has_moved(self._params()):
            msg = (
                f"{type(wrapper).__qualname__} moved the parameters without a step of the "
                f"{type(self.optimizer).__qualname__} inside, which has all of them and at whose "
                "beginning the gradients are clipped: clip by hand before its step, by "
                "clip_grad_norm_ or uc.clip_"
            )
            raise RuntimeError(msg)

    def _raise_if_scaled_inside(self, optimizer: Any) -> None:
        """Refuse the step of an optimizer inside by a GradScaler: the rule has clipped gradients
        that it has not divided yet.
        """
        outer = type(self.optimizer).__qualname__
        msg = (
            f"{outer} steps the {type(optimizer).__qualname__} inside by a GradScaler, which "
            "divides the gradients after they were clipped: call scaler.step() with the "
            f"{outer} itself, whose step calls step() of each optimizer inside"
        )
        raise RuntimeError(msg)

    def _raise_if_others_inside(self) -> None:
        """Refuse a step of an object that holds other optimizers than before:
        nothing would clip for them.
        """
        if self._stepped.inner and self._stepped.has_changed():
            msg = (
                f"{type(self.optimizer).__qualname__} holds other optimizers than when the rule "
                "was attached: call remove() of the handle, and attach again"
            )
            raise RuntimeError(msg)

    def _raise_if_in_backward(self) -> None:
        """Refuse a step during backward, where other gradients are not there yet, if the rule
        needs them.

        Raises
        ------
        RuntimeError
            If a norm or a limit of the rule depends on several leaves.
        """
        if not self._spans_leaves or _backward_number() == -1:
            return
        msg = (
            f"{type(self.optimizer).__qualname__} took a step during backward, and a norm of "
            f"{summarize(self.rule)} spans several parameters, whose gradients are not all computed "
            "then: use a rule with a norm for each leaf, such as uc.by_norm(1.0) or "
            "uc.agc(0.01), or take the step after backward"
        )
        raise RuntimeError(msg)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _makes_state(self, groups: list[dict[str, Any]]) -> bool:
        """Whether a step only makes the optimizer's state,
        as ``torch.distributed.checkpoint`` takes before it loads.

        Then all rates are 0, and each parameter that takes a gradient has one of zeros; all
        processes decide alike.
        """
        rates = [group["lr"] for group in groups if "lr" in group]
        if any([rate is None or float(rate) != 0 for rate in rates]):
            return False
        params, all_reduce = (
            [p for group in groups for p in group["params"]],
            follow_reference(self._join),
        )
        norm = get_total_norm([p.grad for p in params])  # NaN is no 0
        real = bool(norm != 0) or any([p.grad is None and p.requires_grad for p in params])
        flag = any_found_inf(
            torch.tensor(float(real)), all_reduce, params[0].device if params else None
        )
        return not flag

    def _warn(self) -> None:
        """Warn that the rule did not get its state back; at a step,
        as it may be loaded after the optimizer's.
        """
        if self._lacks_memory:
            msg = (
                "the optimizer goes on from steps, or a state_dict, with no state of "
                f"{summarize(self.rule)}, which goes "
                "on with what it has seen by itself: attach the rule first, then "
                "optimizer.load_state_dict(saved), and "
                "save it with the rule attached; torch.distributed.checkpoint saves it beside the "
                "optimizer: "
                '{"optimizer": ..., "clipping": handle}'
            )
            warn(msg)
        self._lacks_memory = False

    def _clip_on_fast_path(self, rule: Rule) -> bool:
        """Clip on the fast path.

        Return ``False``, with nothing changed, if the step takes the general way.
        """
        optimizer = self.optimizer
        # A step that failed has left something behind.
        if self._taken is not None or self.loss is not None:
            return False
        if _backward_number() != -1:
            return False
        if (
            getattr(optimizer, "grad_scale", None) is not None
            or getattr(optimizer, "found_inf", None) is not None
        ):
            return False
        groups = optimizer.param_groups  # without a wrapper there are no optimizers inside
        grads = gradients_of(groups[0]["params"] if len(groups) == 1 else self._params())
        if grads is None:
            return False
        numbers = run_fast_path(rule, BACKEND, grads, rule.constant, _IN_PLACE)
        if numbers is None:
            return False
        self._clipper.hold_report(report_fast_path(BACKEND, numbers))
        return True

    def _evaluate(self, closure: Callable[[], Any], given: Any) -> Any:
        self._give_back()
        self._waits_for_closure = False
        loss = closure()
        self._clip(given if loss is None else loss, loss)
        self._before_closure = None
        return loss

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _clip(self, loss: Any, result: Any = None) -> None:
        """Gather the gradients, agree with other processes, and clip.

        ``result`` is what a skipped step returns.
        """
        params, all_reduce = self._look_up_leaves(), follow_reference(self._join)
        grads = grads_of(params)
        device = params[0].device if params else None
        if several() and looks_at("loss", self.rule):
            loss = average_loss(
                loss, device
            )  # also without any gradient, or other processes would wait
        found_inf = any_found_inf(getattr(self.optimizer, "found_inf", None), all_reduce, device)
        absent = sum([grad is None for grad in grads])
        if absent == len(grads) and all_reduce is None:
            return
        policy = getattr(self.rule, "nonfinite", None)
        # Without reading it, GradScaler's ∞ makes the norm one that no state accepts, except under
        # these policies.
        if (
            found_inf is not None
            and (BACKEND.readable(found_inf) or policy in {"raise", "zero"})
            and bool(found_inf)
        ):
            self._leave_out(result)  # GradScaler skips this step
            return
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is not None:
            self._unscale(
                list({id(grad): grad for grad in grads if grad is not None}.values()), scale
            )
        every = (
            self._tree(params) if self._takes_params or absent or all_reduce is not None else None
        )
        report = self._clipper.clip_(
            self._tree(grads), every, all_reduce, loss=loss, shared=self._shared
        )
        if report.skipped is not None:
            self._skip(report.skipped, found_inf, result)

    def _unscale(self, grads: list[Any], scale: Any) -> None:
        """Divide by the scale of a GradScaler, as a fused kernel would do later."""
        if any(grad.dtype is torch.float16 for grad in grads):
            msg = (
                f"{summarize(self.rule)} needs unscaled gradients, and float16 cannot hold them: keep "
                "the parameters in float32 under autocast"
            )
            raise ValueError(msg)
        self.optimizer.grad_scale = None  # GradScaler sets it before each step
        for grad in grads:
            grad.div_(scale.to(grad.device))

    def _skip(self, skipped: Any, found_inf: Any, result: Any) -> None:
        """Skip a step, if the rule demands it: in fused kernels by a flag,
        so that the host need not read one.
        """
        optimizers = self._stepped.optimizers
        fused = all(
            [
                type(one) in _SKIPPING and all(group["fused"] for group in one.param_groups)
                for one in optimizers
            ]
        )
        if not fused or BACKEND.readable(skipped):
            if bool(skipped):
                self._leave_out(result)
            return

        flag = skipped.to(torch.float32)
        if found_inf is not None:
            flag = torch.maximum(flag, found_inf.to(flag.device))
        for one in optimizers:
            # A GradScaler takes the flag away that it has set itself.
            if getattr(one, "found_inf", None) is None:
                self._flagged.append(one)
            one.found_inf = flag

    def _leave_out(self, result: Any) -> None:
        """Leave out the step: stop it, if it has changed nothing yet;
        else hide the gradients from the rest of it.

        To hide them is no skip in an optimizer that takes an absent gradient for zeros, as Muon's
        reference does.
        """
        if self._wrapper is None or self._wrapper.depth is None:
            self._hide()
            return
        # With a closure: an optimizer may evaluate it again, or have moved the parameters before
        # it.
        before = self._before_closure
        if self._has_closure and (before is None or before.has_moved(self._params())):
            self._hide()
            return
        raise SkippedStep(result)

    def _hide(self) -> None:
        """Hide the gradients until the step is over,
        since optimizers skip parameters without one.
        """
        self._hidden_grads = [(p, p.grad) for p in self._params()]
        for p, _ in self._hidden_grads:
            p.grad = None

    def _after(self, *_: Any) -> None:
        """End a step that went through: give back what the optimizer did not see,
        and refuse what was not clipped.
        """
        if torch.compiler.is_dynamo_compiling():
            _outside(self._after)
            return
        wrapper = self._wrapper
        if wrapper is not None and wrapper.depth:
            wrapper.depth -= 1
            if wrapper.depth > 0:
                return
        if self._taken is None:  # the fast path
            return
        try:
            self._check_closure()
            self._check_inner()
        finally:
            self._end_step()

    def _check_closure(self) -> None:
        """Refuse a step that was given a closure and did not call it:
        its gradients were not clipped.
        """
        if self._waits_for_closure:
            msg = (
                f"{type(self.optimizer).__qualname__}.step was given a closure and did not call "
                "it, so the gradients that it used are not clipped: call step() without it, "
                "after backward"
            )
            raise RuntimeError(msg)

    def _check_inner(self) -> None:
        """Refuse a step in which an optimizer inside, whose parameters have gradients,
        has not stepped.
        """
        # Two optimizers may have the same parameters, and take turns.
        stepped = [one for one in self._stepped.inner if id(one) in (self._taken or ())]
        known = parameter_ids(stepped)
        for one in self._stepped.inner:
            left = [p.grad for p in parameters_of(one) if id(p) not in known]
            # Gradients of zeros are what `zero_grad(set_to_none=False)` leaves.
            if not any([grad is not None for grad in left]) or bool(get_total_norm(left) == 0):
                continue
            msg = (
                f"{type(self.optimizer).__qualname__} took a step without the "
                f"{type(one).__qualname__} inside, whose parameters have gradients: these are "
                "clipped already, and the next step would clip them again; call zero_grad() "
                "first, or attach a rule to each of the optimizers inside"
            )
            raise RuntimeError(msg)

    def _end_step(self) -> None:
        """Leave nothing behind of a step."""
        self._give_back()
        self._taken = self._before_closure = None
        self._waits_for_closure = self._has_closure = False

    def _give_back(self) -> None:
        """Give back the gradients, and take away the flags."""
        for one in self._flagged:
            del one.found_inf
        for p, grad in self._hidden_grads:
            p.grad = grad
        self._flagged, self._hidden_grads = [], []

    def _params(self) -> list[Any]:
        return [p for group in self._stepped.groups() for p in group["params"]]

    def _tree(self, values: list[Any]) -> list[Any]:
        """Return a value for each parameter, by its group and name."""
        left = iter(values)
        return [OrderedDict(zip(keys, left, strict=False)) for keys in self._keys]

    def _look_up_leaves(self) -> list[Any]:
        """Return the parameters; if groups have changed, name them,
        and give each its own rows of the memory.
        """
        groups = self._stepped.groups()
        params = [p for group in groups for p in group["params"]]
        sizes = [len(group["params"]) for group in groups]
        same = sizes == list(map(len, self._keys)) and all(
            [r() is p for r, p in zip(self._here, params, strict=True)]
        )
        if same or not params:
            return params
        self._name(groups)
        self._here = list(map(ref, params))
        moved = self._follow(params)
        every = self._tree([p.detach() for p in params])
        if self._clipper.state is not None:
            self._clipper.change_leaves(every, moved)
        if self.record is not None:
            names = [key for keys in self._keys for key in keys]
            apart = len(set(names)) == len(names)
            self.record.describe(
                self.rule, OrderedDict(zip(names, params, strict=True)) if apart else every
            )
        return params

    def _check_answers_differ(self) -> None:
        """Refuse a mask or a label that says the same of all parameters,
        unless ``names`` tells of others.

        Raises
        ------
        ValueError
            See `uniclip._core.plan.check_answers_differ`.
        """
        params = self._params()
        paths = [(number, key) for number, keys in enumerate(self._keys) for key in keys]
        numbered = [path for path in paths if isinstance(path[1], int)]
        some = len(self._names) > len(params)
        leaves = [p.detach() for p in params]
        try:
            if len(numbered) == len(paths):
                check_names(self.rule, paths, leaves)
            check_answers_differ_in(self.rule, *([], []) if some else (paths, leaves))
        except (
            AttributeError,
            LookupError,
            TypeError,
        ) as error:  # as of a number that is taken for a name
            where, fix = f"{paths[0]}, of group and name", ""
            if numbered:
                where = f"{numbered[0]}, of group and number"
                fix = (
                    ": where it looks for names, give them by attach(optimizer, rule, names=model)"
                )
            msg = (
                f"a function of {summarize(self.rule)} fails for paths as {where}{fix} "
                f"({type(error).__name__}: {error})"
            )
            raise TypeError(msg) from error

    def _name(self, groups: list[dict[str, Any]]) -> None:
        """Name the parameters of each group, by numbers if some have no name,
        or names are not unique.
        """
        known = {id(leaf()) for leaf in self._leaves.values()}
        self._keys = []
        for group in groups:
            params = group["params"]
            for name, p in zip(group.get("param_names", ()), params, strict=False):
                if id(p) not in known:  # later a file that was loaded may have brought others
                    self._names[p] = name
            keys = [self._names.get(p, number) for number, p in enumerate(params)]
            self._keys.append(keys if len(set(keys)) == len(keys) else list(range(len(keys))))

    def _follow(self, params: list[Any]) -> dict[str, str]:
        """Note the path of each parameter, and return the new ones of those that had others."""
        places = [
            stable(place("", (number, key)))
            for number, keys in enumerate(self._keys)
            for key in keys
        ]
        here, moved, gone = dict(zip(map(id, params), places, strict=True)), {}, {}
        for old, leaf in self._leaves.items():
            p, new = leaf(), old
            if id(p) in here:
                new = here[id(p)]
            elif old in places and p is None:  # what is deleted never comes back
                new = ""
            elif old in places:  # another one has that path now
                new = next(
                    path for path in (f"{old}#{n}" for n in count(2)) if path not in self._leaves
                )
            if new != old:
                moved[old] = new
            if p is not None:
                gone[new] = leaf
        self._leaves = gone | dict(zip(places, self._here, strict=True))
        return moved


def names_of(names: Any, groups: list[dict[str, Any]]) -> WeakTensorKeyDictionary:
    """Return the names of parameters, from a module or from pairs.

    Refuse those of another model.
    """
    found = WeakTensorKeyDictionary()
    pairs = (
        names.named_parameters()
        if isinstance(names, torch.nn.Module)
        else ()
        if names is None
        else names
    )
    wanted = "a torch.nn.Module, or pairs as of model.named_parameters()"
    check(
        "names",
        names,
        isinstance(pairs, Iterable) and not isinstance(pairs, (str, torch.Tensor)),
        wanted,
    )
    for pair in pairs:
        fits = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)
        check("names", names, fits and isinstance(pair[0], str), wanted)
        found[pair[1]] = pair[0]
    twice = [name for name, n in Counter(found.values()).items() if n > 1]
    if twice:
        msg = f"names gives two parameters the name {twice[0]!r}"
        raise ValueError(msg)
    params = [p for group in groups for p in group["params"]]
    if found and params and not any([p in found for p in params]):
        msg = (
            "names has none of the parameters of the optimizer: give the model that it was made for"
        )
        raise ValueError(msg)
    return found


def _has_stepped(optimizers: list[Any]) -> bool:
    """Return whether one of the optimizers has taken a step.

    Those without a count of steps have no state at first.
    """
    states = [one for optimizer in optimizers for one in getattr(optimizer, "state", {}).values()]
    return any(one.get("step", 1) for one in states if isinstance(one, dict))


def _calls_super(optimizer: Any) -> bool:
    """Return whether the class of an optimizer has a step that may call that of a base class,
    and so its hooks.
    """
    # PyTorch puts a wrapper of an inherited step into a class.
    steps = {unwrap(vars(kind)["step"]) for kind in type(optimizer).__mro__ if "step" in vars(kind)}
    return has_hooks(optimizer) and len(steps) > 2
