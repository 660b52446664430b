# SPDX-License-Identifier: MIT
"""Attach a rule to an optimizer, so that each of its steps is clipped.

The checks before a rule is attached are in `checks`, the search for the object that is stepped is
in `stepped`, and the wrapper that can stop a step in `step_wrapper`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from functools import partial, wraps
from inspect import unwrap
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
from uniclip._types import Number, State, Step
from uniclip._warnings import warn
from uniclip.backends.torch import BACKEND
from uniclip.backends.torch.fast_path import gradients_of
from uniclip.clipper import Clipper
from uniclip.compose import AnyRule
from uniclip.integrations import check_record, looks_at, rule_for_steps
from uniclip.integrations.torch.checks import (
    Optimizer,
    can_skip,
    check_masks_and_labels,
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
from uniclip.integrations.torch.step_wrapper import Changed, SkippedStep, StepWrapper, find_caller
from uniclip.integrations.torch.stepped import (
    ParamGroup,
    Snapshot,
    Stepped,
    has_hooks,
    parameter_ids,
    parameters_of,
    params_in,
)
from uniclip.report import Report
from uniclip.rule import BaseRule, Rule
from uniclip.saved import labels_of, renamed, shown

if TYPE_CHECKING:
    from uniclip.insight import Recorder

ClosureLoss: TypeAlias = "torch.Tensor | float | None"
"""A loss as a closure returns it, or as it was set on the handle."""

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

_attached_rules: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The rule attached to each optimizer, and to those that it holds; by identity, since a dataclass
has no hash.
"""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside(hook: Callable[..., Any], *args: Any) -> Any:
    """Run a hook outside of compiled code."""
    return hook(*args)


def _in_eager_code(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that compiled code calls between its graphs.

    A compiled step would not see what the hook sets.
    """

    @wraps(hook)
    def run(*args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            _outside(hook, *args)
        else:
            hook(*args)

    return run


def attach(  # noqa: PLR0913 - an optimizer has none of these itself
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
        At a step, if its gradients are not clipped, or not all of them: a closure that the
        optimizer does not call, a step during backward under a norm that spans several leaves, a
        step of an optimizer inside of another by itself, or none of one whose parameters have
        gradients.

    Warns
    -----
    UserWarning
        At a step of a stateful rule, if the optimizer had taken steps before it was attached, or
        loaded a ``state_dict`` without the state of the rule; and when a state is loaded that has
        no entry for some parameters, which then start with empty state. For a stateful rule, if the
        ``state_dict`` of an optimizer that holds others may leave the rule's state out.

    Notes
    -----
    The state that a rule has for a parameter belongs to the parameter itself: groups can be added,
    removed and changed between steps, and a parameter that comes back goes on from its own norms. A
    saved state is matched by names; entries of parameters that are not here are kept for
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
    return attach_unsaved(optimizer, rule, all_reduce, shared, record, names=names, warns=True)


def attach_unsaved(  # noqa: PLR0913 - the same as of attach
    optimizer: Optimizer,
    rule: AnyRule,
    all_reduce: AllReduce | None = None,
    shared: Shared | None = None,
    record: Recorder | None = None,
    *,
    names: Names | None = None,
    warns: bool = False,
) -> Attached:
    """Do the same as `attach`, for an integration that saves the state of the rule itself.

    So it does not warn that the optimizer may leave the state out, unless ``warns`` is true.
    """
    stepped = stepped_by(optimizer, rule)
    rule = rule_for_steps(rule)
    check_shared(all_reduce, shared)
    _raise_if_attached(stepped)

    groups = stepped.groups()
    if any(group.get("differentiable") for group in groups):
        msg = (
            "attach clips in place, which the derivative of a step (differentiable=True) does not "
            "include; use uc.clip"
        )
        raise ValueError(msg)

    params = params_in(groups)
    check_shards(params, "optimizer", rule, all_reduce)
    names_by_param = names_of(names, params)
    if all_reduce is not None:
        # This raises an error for what cannot reduce.
        reducer_of(BACKEND, all_reduce)
        raise_if_unnamed(rule, groups, names_by_param)
    check_record(record, all_reduce)

    if warns and rule.stateful and not stepped.saves_state():
        msg = (
            f"{type(stepped.outer).__qualname__}.state_dict() is not PyTorch's own, and may leave "
            f"out the state of {summarize(rule)}; save handle.state_dict(), too, and load it by "
            "handle.load_state_dict(saved)"
        )
        warn(msg)
    return Attached(stepped, Clipper(rule, record), all_reduce, shared, names_by_param)


def _raise_if_attached(stepped: Stepped) -> None:
    """Raise if an optimizer, or one that it holds, has a rule: gradients would be clipped twice."""
    for optimizer in (stepped.outer, *stepped.inner):
        if optimizer in _attached_rules:
            msg = (
                f"this optimizer is clipped already, by {summarize(_attached_rules[optimizer])}; "
                "call remove() of that handle first"
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

    optimizer: torch.optim.Optimizer
    """The optimizer inside its wrappers, or the one that holds several."""
    loss: Number | None = None
    """The loss of the next step, for rules that use it; by default the closure's, if it returns
    one. ``None`` after the step. With several processes the rule gets the mean.
    """

    def __init__(
        self,
        stepped: Stepped,
        clipper: Clipper,
        all_reduce: AllReduce | None,
        shared: Shared | None,
        names: WeakTensorKeyDictionary,
    ) -> None:
        self.optimizer = stepped.outer
        self._stepped = stepped
        self._clipper = clipper
        self._all_reduce = keep_reference(all_reduce)
        self._shared = shared
        self._needs_params = looks_at("params", self.rule)
        self._spans_leaves = spans_leaves(self.rule)

        self._init_step_fields()
        self._init_params(names)
        # A state may be loaded before the first step, and is checked against this one.
        self._init_state()
        if self.record is not None:
            self.record.holder = ref(self)

        # All checks are done: from here on the optimizer changes.
        self._attached = True
        self._calls_super = _calls_super(self.optimizer)
        self._wrapper = self._wrap_step()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._add_hooks()
        for part in (stepped.outer, *stepped.inner):
            _attached_rules[part] = self.rule

        self._fast_rule: Rule | None = None
        """The rule, if its steps may take the fast path, which decides by itself."""
        # A recorder wants the norms of all leaves, and a wrapper has work around the step.
        unobserved = all_reduce is None and clipper.record is None and self._wrapper is None
        if unobserved and type(clipper.rule) is Rule:
            self._fast_rule = clipper.rule

    def _init_step_fields(self) -> None:
        """Define what steps leave for each other, before the first one."""
        self._load_next_state: Callable[[], None] | None = None
        """Loads the state that was saved, between two hooks."""
        self._state_is_missing = self.rule.stateful and _has_stepped(self._stepped.optimizers)
        """Whether the optimizer has taken steps that the rule has not."""

        self._inner_stepped: set[int] | None = None
        """The optimizers inside that have stepped in the current step, by identity.

        ``None`` outside of a step.
        """
        self._has_closure = False
        """Whether the step was given a closure."""
        self._waits_for_closure = False
        """Whether the step was given a closure that it has not called yet."""
        self._before_closure: Snapshot | None = None
        """The parameters before the first closure of a step, ``None`` after it."""
        self._before_wrappers: dict[int, Snapshot] = {}
        """The parameters before the steps of wrappers that have not called a step inside yet."""

        self._hidden_grads: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """The parameters and gradients of a skipped step, hidden from the optimizer."""
        self._flagged: list[torch.optim.Optimizer] = []
        """The optimizers with a flag that makes their fused kernels skip a step."""

    def _init_params(self, names: WeakTensorKeyDictionary) -> None:
        """Name the parameters, and check the functions in the rule that get their paths."""
        self._names = names
        """The names of parameters, as they were first: a file that is loaded may bring others."""
        self._keys: list[list[Any]] = []
        """The names or numbers of the parameters of each group."""
        self._params_here: list[ref[torch.Tensor]] = []
        """The parameters, weakly, in the order of the groups."""
        self._params_by_path: dict[str, ref[torch.Tensor]] = {}
        """The parameters, weakly, by the paths of their state; also those that are gone."""
        self._update_params()

        # If there are names of other parameters, too, a mask or a label may be meant for those.
        params = self._params()
        if len(self._names) > len(params):
            check_masks_and_labels(self.rule, [], [])
            return
        paths = [(number, key) for number, keys in enumerate(self._keys) for key in keys]
        check_masks_and_labels(self.rule, paths, [p.detach() for p in params])

    def _init_state(self) -> None:
        """Make the state before the first step."""
        self._clipper.init(self._tree([p.detach() for p in self._params()]))

    def _add_hooks(self) -> None:
        """Add hooks around steps and states, if the optimizer runs them, and around the steps of
        those inside and of wrappers.
        """
        optimizer = self.optimizer
        if has_hooks(optimizer):
            self._hooks += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
                optimizer.register_state_dict_post_hook(self._after_save),
                optimizer.register_load_state_dict_pre_hook(self._before_load),
                optimizer.register_load_state_dict_post_hook(self._after_load),
            ]

        # One inside may be stepped by itself, which nothing else would notice.
        for inner in self._stepped.inner:
            self._hooks.append(inner.register_step_pre_hook(self._before_inner_step))

        # A wrapper may move the parameters without a step inside, as SAM does.
        for wrapper in filter(has_hooks, self._stepped.wrappers):
            self._hooks += [
                wrapper.register_step_pre_hook(self._before_wrapper_step),
                wrapper.register_step_post_hook(self._after_wrapper_step),
            ]

    def _wrap_step(self) -> StepWrapper | None:
        """Put a wrapper in the place of the step, if hooks are not enough for this rule and
        optimizer.
        """
        needs_wrapper = (
            not has_hooks(self.optimizer)
            or self._calls_super
            or self._stepped.inner
            or can_skip(self.rule)
        )
        if not needs_wrapper:
            return None
        return StepWrapper(self.optimizer, self._before_step, self._after_step, self._end_step)

    @property
    def rule(self) -> BaseRule:
        """The rule."""
        return self._clipper.rule

    @property
    def record(self) -> Recorder | None:
        """The recorder of the steps, if any."""
        return self._clipper.record

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
        """Return the rule and the optimizer."""
        kind = type(self.optimizer).__name__
        params = counted(len(self._params()), "parameter")
        removed = "" if self._attached else ", removed"
        return f"<attach: {self.rule!r}, {kind} of {params}{removed}>"

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Raise an error: a copy or a pickle would have hooks of another optimizer."""
        msg = (
            "a handle of attach belongs to one optimizer, and cannot be copied or pickled; leave "
            "it out, attach the rule to the other optimizer, and then load there what "
            "optimizer.state_dict() returns here"
        )
        raise TypeError(msg)

    def remove(self) -> None:
        """Detach from the optimizer, which is left as it was before. Idempotent."""
        if not self._attached:
            return
        # A step that failed may have left gradients hidden, or flags set.
        self._attached = False
        self._end_step()
        for part in (self.optimizer, *self._stepped.inner):
            _attached_rules.pop(part, None)

        if self._wrapper is not None:
            self._wrapper.remove()
            self._wrapper = None
        while self._hooks:
            self._hooks.pop().remove()

        if self.record is not None:
            self.record.flush()
            self.record.holder = None

    # The state of the rule.

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
        # Groups that were added since the last step have rows in the file, too.
        self._update_params()
        return self._clipper.state_dict(lambda array: torch.as_tensor(array).detach().clone())

    @property
    def saved_by_optimizer(self) -> bool:
        """Whether the ``state_dict`` of the optimizer has the state of the rule."""
        return self._stepped.saves_state()

    def expect_state(self) -> None:
        """Warn at the next step, unless a state of the rule is loaded by then."""
        self._state_is_missing = self.rule.stateful

    def numbers(self) -> dict[str, Any]:
        """Return the same as `state_dict` as plain numbers and lists, for JSON."""
        self._update_params()
        return self._clipper.state_dict()

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
        check("saved", saved, isinstance(saved, dict), "what state_dict() returned")
        if saved:
            load = self._prepare_load(saved)
            load()
        else:
            self._update_params()
            self._init_state()
        self._state_is_missing = False

    def _prepare_load(self, saved: dict[str, Any]) -> Callable[[], None]:
        """Return a function that loads a saved state, and warns of parameters without an entry.

        A saved state with an error raises it here, before anything is loaded.
        """
        self._update_params()
        if isinstance(saved, dict):
            saved = self._follow_names(saved)
        load, new = self._clipper.look_up(saved)

        def load_and_warn() -> None:
            load()
            if new:
                msg = (
                    f"the saved state of {summarize(self.rule)} has no entry for {shown(new)}; "
                    "these parameters start with empty state"
                )
                warn(msg)

        return load_and_warn

    def _follow_names(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a saved state with the paths that its parameters have here, whatever groups they
        were in.
        """
        saved_paths = labels_of(saved.get("leaves"))
        here = {_name_in(path): path for path in self._params_by_path}
        there = {_name_in(path): path for path in saved_paths}
        counts = Counter(map(_name_in, (*self._params_by_path, *saved_paths)))

        new_paths = {}
        for name, saved_path in there.items():
            path = here.get(name, saved_path)
            # A name that is a number, or that one side has twice, identifies no parameter.
            identifies = "'" in name and counts[name] == 2
            if identifies and path != saved_path:
                new_paths[saved_path] = path
        if not new_paths:
            return saved
        return renamed(saved, new_paths)

    def _after_save(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the state of the rule to that of the optimizer."""
        # A run that resumes from this checkpoint finds the steps before it in the file.
        if self.record is not None:
            self.record.flush()
        if self.rule.stateful:
            state_dict[_KEY] = self.state_dict()

    def _before_load(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Check a saved state before the optimizer changes, which may still raise an error."""
        self._load_next_state = None
        if self.rule.stateful and _KEY in state_dict:
            self._load_next_state = self._prepare_load(state_dict[_KEY])

    def _after_load(self, _: torch.optim.Optimizer) -> None:
        """Restore the saved state, now that the optimizer has loaded the rest."""
        load = self._load_next_state
        self._load_next_state = None
        self._state_is_missing = self.rule.stateful and load is None
        if load is not None:
            load()

    # A step.

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Changed:
        """Clip before a step; also the gradients of a closure, each time the step calls it."""
        # A compiled step would not see what is set for it.
        if torch.compiler.is_dynamo_compiling():
            changed: Changed = _outside(self._before_step, optimizer, args, kwargs)
            return changed

        # The wrappers around this step have called it.
        self._before_wrappers.clear()

        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        rule = self._fast_rule
        if rule is not None and closure is None and not kwargs and self._clip_on_fast_path(rule):
            return None

        if self._wrapper is not None and self._enter_step(optimizer, self._wrapper):
            return None

        # The previous step may have failed.
        self._end_step()
        self._inner_stepped = set()
        # A dummy step has no gradients to clip, and is not a step of the rule.
        no_closure = "closure" in kwargs and closure is None
        if no_closure and self._only_makes_state(self._stepped.groups()):
            return None

        self._check_before_step(kwargs)
        # A loss that outlived a failed step would be used for another one.
        loss = self.loss
        self.loss = None
        if callable(closure):
            return self._clip_in_closure(closure, loss, args, kwargs)
        self._clip(loss)
        return None

    def _clip_in_closure(
        self,
        closure: Callable[[], ClosureLoss],
        loss: ClosureLoss,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Changed:
        """Return the arguments of a step with a closure that clips the gradients it computes."""
        self._has_closure = True
        self._waits_for_closure = True

        # A step can only be stopped by the wrapper, and only as long as nothing has moved.
        if self._wrapper is not None:
            self._before_closure = Snapshot(self._params())

        clipped = partial(self._run_closure, closure, loss)
        if len(args) > 1:
            return (args[0], clipped, *args[2:]), kwargs
        return args, {**kwargs, "closure": clipped}

    def _enter_step(self, optimizer: torch.optim.Optimizer, wrapper: StepWrapper) -> bool:
        """Count a step that the wrapper runs, and return whether another step calls it."""
        if wrapper.depth is not None:
            wrapper.depth += 1
            return wrapper.depth > 1

        if self._calls_super:
            msg = (
                f"{type(optimizer).__name__} calls super().step(), and a wrapper runs the step "
                "that it had before the rule was attached; attach first, then wrap the optimizer"
            )
            raise RuntimeError(msg)
        return False

    def _check_before_step(self, kwargs: dict[str, Any]) -> None:
        """Raise if a step cannot be clipped, and warn if the rule did not get its state back."""
        self._raise_if_others_inside()
        self._raise_if_in_backward()

        # The rule's state may be loaded after the optimizer's, so the warning waits for a step.
        if self._state_is_missing:
            self._warn_of_missing_state()
        self._state_is_missing = False

        # GradScaler passes itself to optimizers that divide the gradients in their step.
        if "grad_scaler" in kwargs:
            msg = (
                f"{type(self.optimizer).__name__} unscales inside its step; clip manually after "
                "scaler.unscale_()"
            )
            raise TypeError(msg)

    @_in_eager_code
    def _before_inner_step(
        self, optimizer: torch.optim.Optimizer, _: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note the step of an optimizer inside.

        Raise if it is outside of the step that clips for all of them.
        """
        caller = find_caller(self.optimizer, self._wrapper)
        if self._inner_stepped is not None:
            if isinstance(caller, torch.amp.GradScaler):
                self._raise_scaled_inside(optimizer)

            # A step that failed, and that no wrapper saw, has not come to its end.
            unwrapped = self._wrapper is None or self._wrapper.depth is None
            failed = caller is None and unwrapped
            if not failed:
                self._inner_stepped.add(id(optimizer))
                return

        no_closure = "closure" in kwargs and kwargs["closure"] is None
        if no_closure and self._only_makes_state(optimizer.param_groups):
            return
        msg = (
            f"{type(optimizer).__qualname__} took a step outside of the step of "
            f"{type(self.optimizer).__qualname__}, which holds it, and which clips all gradients "
            "together at its beginning; call the step() of the outer one, and attach before "
            "another library wraps it (Accelerate's prepare), or attach a rule to each of the "
            "optimizers inside"
        )
        raise RuntimeError(msg)

    @_in_eager_code
    def _before_wrapper_step(self, wrapper: torch.optim.Optimizer, *_: object) -> None:
        """Note where the parameters are before the step of a wrapper around the optimizer."""
        self._before_wrappers[id(wrapper)] = Snapshot(self._params())

    @_in_eager_code
    def _after_wrapper_step(self, wrapper: torch.optim.Optimizer, *_: object) -> None:
        """Raise if a wrapper moved the parameters by itself: nothing clips for it."""
        before = self._before_wrappers.pop(id(wrapper), None)
        if before is not None and before.has_moved(self._params()):
            msg = (
                f"{type(wrapper).__qualname__} moved the parameters without a step of the "
                f"{type(self.optimizer).__qualname__} inside, which has all of them and at whose "
                "beginning the gradients are clipped; clip manually before its step, by "
                "clip_grad_norm_ or uc.clip_"
            )
            raise RuntimeError(msg)

    def _raise_scaled_inside(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise for the step of an optimizer inside by a GradScaler, which has not divided the
        gradients that the rule has clipped.
        """
        outer = type(self.optimizer).__qualname__
        msg = (
            f"{outer} steps the {type(optimizer).__qualname__} inside by a GradScaler, which "
            "divides the gradients after they were clipped; call scaler.step() with the "
            f"{outer} itself, whose step calls step() of each optimizer inside"
        )
        raise RuntimeError(msg)

    def _raise_if_others_inside(self) -> None:
        """Raise if the object holds other optimizers than before: nothing would clip for them."""
        if self._stepped.inner and self._stepped.has_changed():
            msg = (
                f"{type(self.optimizer).__qualname__} holds other optimizers than when the rule "
                "was attached; call remove() of the handle, and attach again"
            )
            raise RuntimeError(msg)

    def _raise_if_in_backward(self) -> None:
        """Raise for a step during backward, when other gradients are not there yet, if the rule
        needs them.

        Raises
        ------
        RuntimeError
            If a norm or a limit of the rule depends on several leaves.
        """
        if not self._spans_leaves or _backward_number() == -1:
            return
        msg = (
            f"{type(self.optimizer).__qualname__} took a step during backward, but a norm of "
            f"{summarize(self.rule)} spans several parameters, whose gradients are not all "
            "computed then; use a rule with a norm for each leaf, such as uc.by_norm(1.0) or "
            "uc.agc(0.01), or take the step after backward"
        )
        raise RuntimeError(msg)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _only_makes_state(self, groups: list[ParamGroup]) -> bool:
        """Return whether a step only makes the optimizer's state, as
        ``torch.distributed.checkpoint`` takes one before it loads.

        Then all rates are 0, and each parameter that takes a gradient has one of zeros; all
        processes decide alike.
        """
        for group in groups:
            rate = group.get("lr", 0)
            if rate is None or float(rate) != 0:
                return False

        params = params_in(groups)
        # A norm of NaN is not 0 either.
        has_gradients = bool(get_total_norm([p.grad for p in params]) != 0)
        lacks_one = any([p.grad is None and p.requires_grad for p in params])

        # All processes take part, whatever each of them finds.
        device = params[0].device if params else None
        flag = torch.tensor(float(has_gradients or lacks_one))
        return not any_found_inf(flag, follow_reference(self._all_reduce), device)

    def _warn_of_missing_state(self) -> None:
        """Warn that the rule did not get its state back."""
        msg = (
            "the optimizer resumed from a checkpoint (or already took steps), but no saved state "
            f"of {summarize(self.rule)} was found, so the rule knows only the steps since then; "
            "attach the rule first, then call optimizer.load_state_dict(saved), and save with the "
            "rule attached. With torch.distributed.checkpoint, save the handle, too: "
            '{"optimizer": ..., "clipping": handle}'
        )
        warn(msg)

    def _clip_on_fast_path(self, rule: Rule) -> bool:
        """Clip on the fast path.

        Return ``False``, with nothing changed, if the step takes the general way.
        """
        # A step that failed has left something behind. During backward gradients may be missing.
        if self._inner_stepped is not None or self.loss is not None or _backward_number() != -1:
            return False

        # The gradients are still those of the loss that a GradScaler has scaled.
        optimizer = self.optimizer
        is_scaled = getattr(optimizer, "grad_scale", None) is not None
        if is_scaled or getattr(optimizer, "found_inf", None) is not None:
            return False

        # Without a wrapper there are no optimizers inside.
        groups = optimizer.param_groups
        params = groups[0]["params"] if len(groups) == 1 else self._params()
        grads = gradients_of(params)
        if grads is None:
            return False
        numbers = run_fast_path(rule, BACKEND, grads, rule.constant, _IN_PLACE)
        if numbers is None:
            return False
        self._clipper.hold_report(report_fast_path(BACKEND, numbers))
        return True

    def _run_closure(self, closure: Callable[[], ClosureLoss], loss: ClosureLoss) -> ClosureLoss:
        """Run the closure of a step, clip its gradients, and return its loss."""
        # An optimizer may run it again after a skip.
        self._undo_skip()
        self._waits_for_closure = False

        closure_loss = closure()
        self._clip(loss if closure_loss is None else closure_loss, closure_loss)
        # An optimizer may move parameters between evaluations, so only the first can stop a step.
        self._before_closure = None
        return closure_loss

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _clip(self, loss: ClosureLoss, result: ClosureLoss = None) -> None:
        """Gather the gradients, agree with other processes, and clip.

        ``result`` is what a skipped step returns.
        """
        params = self._update_params()
        grads = grads_of(params)
        all_reduce = follow_reference(self._all_reduce)
        device = params[0].device if params else None

        # A process without any gradient takes part, too, or the others would wait.
        if several() and looks_at("loss", self.rule):
            loss = average_loss(loss, device)
        found_inf = any_found_inf(getattr(self.optimizer, "found_inf", None), all_reduce, device)

        absent = sum([grad is None for grad in grads])
        if absent == len(grads) and all_reduce is None:
            return

        # GradScaler skips this step itself.
        if found_inf is not None and self._knows_infinity(found_inf):
            self._skip_step(result)
            return
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is not None:
            self._unscale(grads, scale)

        # The parameter of an absent gradient has the shape of its row.
        params_tree = None
        if self._needs_params or absent or all_reduce is not None:
            params_tree = self._tree(params)
        report = self._clipper.clip_(
            self._tree(grads), params_tree, all_reduce, loss=loss, shared=self._shared
        )
        if report.skipped is not None:
            self._skip_step_if(report.skipped, found_inf, result)

    def _knows_infinity(self, found_inf: torch.Tensor) -> bool:
        """Return whether GradScaler has found an infinity, if its flag may be read.

        Reading it would wait for an accelerator. Unread, the infinity makes the norm one that no
        state accepts, except under two policies.
        """
        policy = getattr(self.rule, "nonfinite", None)
        if not BACKEND.readable(found_inf) and policy not in {"raise", "zero"}:
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

        # GradScaler sets it before each step.
        self.optimizer.grad_scale = None
        for grad in present.values():
            grad.div_(scale.to(grad.device))

    def _skip_step_if(
        self, skipped: torch.Tensor, found_inf: torch.Tensor | None, result: ClosureLoss
    ) -> None:
        """Skip a step if the rule demands it: in fused kernels by a flag, which the host need not
        read.
        """
        optimizers = self._stepped.optimizers
        fused = all(map(_skips_by_flag, optimizers))
        if not fused or BACKEND.readable(skipped):
            if bool(skipped):
                self._skip_step(result)
            return

        # The kernel reads the flag where it runs, so the host waits for nothing.
        flag = skipped.to(torch.float32)
        if found_inf is not None:
            flag = torch.maximum(flag, found_inf.to(flag.device))
        for optimizer in optimizers:
            # A GradScaler takes a flag away that it has set itself.
            if getattr(optimizer, "found_inf", None) is None:
                self._flagged.append(optimizer)
            optimizer.found_inf = flag

    def _skip_step(self, result: ClosureLoss) -> None:
        """Stop the step if it has changed nothing yet, else hide the gradients from the rest of it.

        Hidden gradients are not enough in an optimizer that takes an absent gradient for zeros, as
        Muon's reference does.
        """
        if self._wrapper is None or self._wrapper.depth is None:
            self._hide_grads()
            return

        # An optimizer may evaluate a closure again, or have moved the parameters before it.
        if self._has_closure:
            before = self._before_closure
            if before is None or before.has_moved(self._params()):
                self._hide_grads()
                return
        raise SkippedStep(result)

    def _hide_grads(self) -> None:
        """Hide the gradients until the step is over, since optimizers skip parameters without."""
        self._hidden_grads = [(p, p.grad) for p in self._params()]
        for p, _ in self._hidden_grads:
            p.grad = None

    def _after_step(self, *_: object) -> None:
        """End a step that went through: restore what was hidden from the optimizer, and raise if
        something was not clipped.
        """
        if torch.compiler.is_dynamo_compiling():
            _outside(self._after_step)
            return

        wrapper = self._wrapper
        if wrapper is not None and wrapper.depth:
            wrapper.depth -= 1
            if wrapper.depth > 0:
                return

        # On the fast path nothing is left to do.
        if self._inner_stepped is None:
            return
        # Even if a check fails, the hidden gradients have to come back.
        try:
            self._check_closure()
            self._check_inner()
        finally:
            self._end_step()

    def _check_closure(self) -> None:
        """Raise if a step was given a closure and did not call it: the gradients that it used were
        not clipped.
        """
        if self._waits_for_closure:
            msg = (
                f"{type(self.optimizer).__qualname__}.step was given a closure and did not call "
                "it, so the gradients that it used are not clipped; call step() without it, "
                "after backward"
            )
            raise RuntimeError(msg)

    def _check_inner(self) -> None:
        """Raise if an optimizer inside, whose parameters have gradients, has not stepped."""
        if not self._stepped.inner:
            return

        # Two optimizers may have the same parameters, and take turns.
        ids = self._inner_stepped or set()
        stepped = [optimizer for optimizer in self._stepped.inner if id(optimizer) in ids]
        stepped_params = parameter_ids(stepped)
        for optimizer in self._stepped.inner:
            left = [p for p in parameters_of(optimizer) if id(p) not in stepped_params]
            grads = [p.grad for p in left if p.grad is not None]

            # Gradients of zeros are what `zero_grad(set_to_none=False)` leaves.
            if not grads or bool(get_total_norm(grads) == 0):
                continue
            msg = (
                f"{type(self.optimizer).__qualname__} took a step without the "
                f"{type(optimizer).__qualname__} inside, whose parameters have gradients; these "
                "are clipped already, and the next step would clip them again, so call "
                "zero_grad() first, or attach a rule to each of the optimizers inside"
            )
            raise RuntimeError(msg)

    def _end_step(self) -> None:
        """Leave nothing behind of a step."""
        self._undo_skip()
        self._inner_stepped = None
        self._before_closure = None
        self._has_closure = False
        self._waits_for_closure = False

    def _undo_skip(self) -> None:
        """Restore the hidden gradients, and take away the flags."""
        for optimizer in self._flagged:
            del optimizer.found_inf
        self._flagged = []

        for p, grad in self._hidden_grads:
            p.grad = grad
        self._hidden_grads = []

    # The parameters.

    def _params(self) -> list[torch.Tensor]:
        """Return the parameters of all groups."""
        return [p for group in self._stepped.groups() for p in group["params"]]

    def _tree(self, tensors: list[torch.Tensor]) -> list[OrderedDict[Any, torch.Tensor]]:
        """Return a tensor for each parameter, by its group and name."""
        rest = iter(tensors)
        return [OrderedDict(zip(keys, rest, strict=False)) for keys in self._keys]

    def _update_params(self) -> list[torch.Tensor]:
        """Return the parameters; if groups have changed, name them, and give each its rows of the
        state.
        """
        groups = self._stepped.groups()
        params = [p for group in groups for p in group["params"]]
        sizes = [len(group["params"]) for group in groups]
        unchanged = sizes == list(map(len, self._keys)) and all(
            [r() is p for r, p in zip(self._params_here, params, strict=True)]
        )
        if unchanged or not params:
            return params

        # References are weak, so that a parameter that is deleted is freed.
        self._name_params(groups)
        self._params_here = list(map(ref, params))
        new_paths = self._update_paths(params)
        tree = self._tree([p.detach() for p in params])
        if self._clipper.state is not None:
            self._clipper.change_leaves(tree, new_paths)

        if self.record is not None:
            names = [key for keys in self._keys for key in keys]
            # Names that are unique over all groups need no number of a group before them.
            if len(set(names)) == len(names):
                self.record.describe(self.rule, OrderedDict(zip(names, params, strict=True)))
            else:
                self.record.describe(self.rule, tree)
        return params

    def _name_params(self, groups: list[ParamGroup]) -> None:
        """Name the parameters of each group, by numbers if names are not unique."""
        named_before = {id(reference()) for reference in self._params_by_path.values()}
        self._keys = []
        for group in groups:
            params = group["params"]
            for name, p in zip(group.get("param_names", ()), params, strict=False):
                # A file that was loaded may have brought other names.
                if id(p) not in named_before:
                    self._names[p] = name

            # Two leaves of one name would be one leaf of the tree.
            keys = [self._names.get(p, number) for number, p in enumerate(params)]
            if len(set(keys)) < len(keys):
                keys = list(range(len(keys)))
            self._keys.append(keys)

    def _update_paths(self, params: list[torch.Tensor]) -> dict[str, str]:
        """Note the path of each parameter, and return the new paths of those that had others.

        A parameter that is gone keeps its path, so that it finds its state when it comes back. If
        another one has that path now, it gets a free one; ``""`` if it was deleted.
        """
        paths = []
        for number, keys in enumerate(self._keys):
            paths += [stable(place("", (number, key))) for key in keys]
        path_by_id = dict(zip(map(id, params), paths, strict=True))
        paths_here = set(paths)

        new_paths: dict[str, str] = {}
        gone: dict[str, ref[torch.Tensor]] = {}
        for old_path, reference in self._params_by_path.items():
            p = reference()
            new_path = old_path
            if id(p) in path_by_id:
                new_path = path_by_id[id(p)]
            elif old_path in paths_here:
                new_path = "" if p is None else self._free_path(old_path)

            if new_path != old_path:
                new_paths[old_path] = new_path
            if p is not None:
                gone[new_path] = reference
        self._params_by_path = gone | dict(zip(paths, self._params_here, strict=True))
        return new_paths

    def _free_path(self, path: str) -> str:
        """Return a path like another one that no parameter has."""
        number = 2
        while f"{path}#{number}" in self._params_by_path:
            number += 1
        return f"{path}#{number}"


def names_of(names: Names | None, params: list[torch.Tensor]) -> WeakTensorKeyDictionary:
    """Return the names of parameters, from a module or from pairs.

    Raises
    ------
    TypeError
        If ``names`` is neither.
    ValueError
        If a name occurs twice, or the names are those of another model.
    """
    pairs: Iterable[tuple[str, torch.Tensor]] = ()
    if isinstance(names, torch.nn.Module):
        pairs = names.named_parameters()
    elif names is not None:
        pairs = names

    wanted = "a torch.nn.Module, or pairs as of model.named_parameters()"
    iterable = isinstance(pairs, Iterable) and not isinstance(pairs, (str, torch.Tensor))
    check("names", names, iterable, wanted)
    names_by_param = WeakTensorKeyDictionary()
    for pair in pairs:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        fits = is_pair and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)
        check("names", names, fits, wanted)
        name, p = pair
        names_by_param[p] = name

    for name, occurrences in Counter(names_by_param.values()).items():
        if occurrences > 1:
            msg = f"names gives two parameters the name {name!r}; give each its own"
            raise ValueError(msg)
    if names_by_param and params and not any([p in names_by_param for p in params]):
        msg = (
            "names has none of the parameters of the optimizer; pass the model that it was made for"
        )
        raise ValueError(msg)
    return names_by_param


def _has_stepped(optimizers: list[torch.optim.Optimizer]) -> bool:
    """Return whether one of the optimizers has taken a step."""
    for optimizer in optimizers:
        for state in getattr(optimizer, "state", {}).values():
            # Optimizers without a count of steps have no state before the first one.
            if isinstance(state, dict) and state.get("step", 1):
                return True
    return False


def _skips_by_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the kernels of an optimizer skip a step by its flag ``found_inf``."""
    if type(optimizer) not in _SKIPPING:
        return False
    return all(group["fused"] for group in optimizer.param_groups)


def _calls_super(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the class of an optimizer has a step that may call that of a base class, and
    so its hooks.
    """
    # PyTorch puts a wrapper of an inherited step into a class.
    steps = {unwrap(vars(kind)["step"]) for kind in type(optimizer).__mro__ if "step" in vars(kind)}
    return has_hooks(optimizer) and len(steps) > 2


def _name_in(path: str) -> str:
    """Return what follows the number of the group in a path."""
    return path.partition("]")[2]
