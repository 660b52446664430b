# SPDX-License-Identifier: MIT
"""A rule attached to an optimizer."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from functools import partial, wraps
from inspect import unwrap
from itertools import count
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from uniclip._core.apply import LaneDecision
from uniclip._core.collectives import (
    AllReduce,
    Shared,
    follow_reference,
    keep_reference,
    reducer_of,
    refuse_shared,
)
from uniclip._core.tree import place
from uniclip._errors import check, counted, short, stable
from uniclip._types import Number
from uniclip.backends.torch import BACKEND
from uniclip.backends.torch.fast_path import gradients_of, lane
from uniclip.clipper import Clipper
from uniclip.compose import AnyRule
from uniclip.integrations import looks_at, refuse_one_answer_in, refuse_record, rule_for_steps
from uniclip.integrations.torch.checks import Optimizer, optimizer_inside, refuse_names
from uniclip.integrations.torch.functions import get_total_norm, grads_of
from uniclip.integrations.torch.processes import (
    of_all,
    of_any,
    refuse_parts,
    refuse_unnamed,
    several,
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
_KEY = "uniclip"
"""The key of the rule's state in a ``state_dict``."""

_rules: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The rule attached to each optimizer."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside(hook: Callable[..., Any], *args: Any) -> Any:
    """Run a hook outside of compiled code."""
    return hook(*args)


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
    optimizer : torch.optim.Optimizer
        Wrappers, such as those of Accelerate and Lightning, stand for the optimizer inside.
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
        nor pairs.
    ValueError
        If the optimizer already has a rule, holds another optimizer, or is differentiable; if
        ``names`` has none of its parameters, or a mask or label in the rule looks for names that
        they do not have. With several processes, if the parameters are those of
        ``FullyShardedDataParallel`` (FSDP1) without ``all_reduce``, or if ``all_reduce`` would join
        norms of leaves without names. At the first step, if the processes have different rules, or
        leaves that are neither parts of the same leaves nor distinct.

    Warns
    -----
    UserWarning
        At a step of a rule with memory, if the optimizer had taken steps before it was attached, or
        loaded a ``state_dict`` without the state of the rule; and where a state is loaded that has
        none of the norms of some parameters, which then begin anew.

    Notes
    -----
    What a rule remembers of a parameter belongs to the parameter itself: groups can be added, taken
    away and changed between steps, and a parameter that comes back goes on from its own norms. In a
    saved state they go by the names; those of parameters that are not here are kept for
    ``add_param_group``.

    A step that the rule skips, by the policy ``nonfinite="skip"`` or the curve
    `uniclip.curves.reject`, is not taken: parameters, moments and step counts stay as they are. On
    an accelerator this reads one boolean to the host, except in the fused Adam, AdamW and Adagrad.

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
    optimizer, rule = optimizer_inside(optimizer, rule), rule_for_steps(rule)
    refuse_shared(all_reduce, shared)
    if optimizer in _rules:
        msg = (
            f"this optimizer is clipped already, by {short(_rules[optimizer])}: call remove() of "
            "that handle first"
        )
        raise ValueError(msg)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        msg = (
            "attach clips in place, which derivatives of a step (differentiable=True) do not see: "
            "use uc.clip"
        )
        raise ValueError(msg)
    refuse_parts(
        (p for group in optimizer.param_groups for p in group["params"]),
        "optimizer",
        rule,
        all_reduce,
    )
    known = names_of(names, optimizer)
    if all_reduce is not None:
        reducer_of(BACKEND, all_reduce)  # which says what is taken
        refuse_unnamed(rule, optimizer.param_groups, known)
    refuse_record(record, all_reduce)
    return Attached(optimizer, Clipper(rule, record), all_reduce, shared, known)


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
    """The optimizer inside its wrappers."""
    loss: Number | None = None
    """The loss of the next step, for rules that use it; by default the closure's,
    if it returns one. ``None`` after the step. With several processes the rule gets the mean."""

    def __init__(
        self,
        optimizer: Any,
        clipper: Clipper,
        all_reduce: Any,
        shared: Any,
        names: WeakTensorKeyDictionary,
    ) -> None:
        self.optimizer, self._clipper = optimizer, clipper
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
        self._skip_flag: Any = None
        """The flag that was set for a fused kernel, by which it skips a step."""
        self._next_memory: Any = None
        """What loads the memory that was saved, between two hooks."""
        # Optimizers without a count of steps have no state at first.
        used = any(one.get("step", 1) for one in optimizer.state.values() if isinstance(one, dict))
        self._lacks_memory = self.rule.memory and used
        """Whether the optimizer knows more steps than the rule."""
        self._takes_params = looks_at("params", self.rule)
        self._look_up_leaves()
        self._refuse_one_answer()
        self._begin()
        if self.record is not None:
            self.record.holder = ref(self)
        self._depth: int | None = None
        """How many nested calls of ``step`` run, in a class that calls ``super().step()``;
        ``None`` outside of one.
        """
        self._step_before = vars(optimizer).get("step")
        self._counting_step = self._count_steps(optimizer)
        rule = clipper.rule
        fits = type(rule) is Rule and rule.simple and type(rule.constant) in {float, int}
        alone = (
            all_reduce is None
            and shared is None
            and clipper.record is None
            and self._counting_step is None
        )
        self._lane_rule: Any = rule if fits and alone else None
        """The rule, if its steps may take the lane."""
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._check),
            optimizer.register_load_state_dict_post_hook(self._load),
        ]
        _rules[optimizer] = self.rule

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
        return f"<attach: {self.rule!r}, {clips}{'' if self._hooks else ', removed'}>"

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
        if not self._hooks:
            return
        self._give_back()
        _rules.pop(self.optimizer, None)
        if (
            self._counting_step is not None
            and vars(self.optimizer).get("step") is self._counting_step
        ):
            del self.optimizer.step
            if self._step_before is not None:
                self.optimizer.step = self._step_before
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
            self._look_up(saved)(3)
        else:
            self._look_up_leaves()
            self._begin()
        self._lacks_memory = False

    def _begin(self) -> None:
        """Make the state before the first step."""
        self._clipper.init(self._tree([p.detach() for p in self._params()]))

    def _look_up(self, saved: dict[str, Any]) -> Callable[[int], None]:
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

        def load_and_warn(level: int) -> None:
            load()
            if new:
                msg = (
                    f"the saved state of {short(self.rule)} has no norms of {shown(new)}, which "
                    "begin anew"
                )
                warnings.warn(msg, UserWarning, stacklevel=level)

        return load_and_warn

    def _save(self, _: Any, state_dict: dict[str, Any]) -> None:
        if self.record is not None:
            self.record.flush()
        if self.rule.memory:
            state_dict[_KEY] = self.state_dict()

    def _check(self, _: Any, state_dict: dict[str, Any]) -> None:
        """Check a state, before the optimizer changes, which may still refuse the rest."""
        there = self.rule.memory and _KEY in state_dict
        self._next_memory = self._look_up(state_dict[_KEY]) if there else None

    def _load(self, _: Any) -> None:
        """Restore the loaded state, now that the optimizer has accepted the rest."""
        load, self._next_memory = self._next_memory, None
        self._lacks_memory = self.rule.memory and load is None
        if load is not None:
            load(6)

    # A step.

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Clip before a step; also the gradients of a closure, each time the step calls it."""
        if torch.compiler.is_dynamo_compiling():  # a compiled step would not see what is set for it
            return _outside(self._before, optimizer, args, kwargs)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if (
            closure is None
            and not kwargs
            and self._lane_rule is not None
            and self._clip_in_lane(self._lane_rule)
        ):
            return None
        if self._counting_step is not None and self._depth is None:
            msg = (
                f"{type(optimizer).__name__} calls super().step(), and a wrapper runs the step "
                "that it had before the rule was attached: attach first, then wrap the optimizer"
            )
            raise RuntimeError(msg)
        if self._depth is not None:
            self._depth += 1
            if self._depth > 1:
                return None
        self._hidden_grads.clear()
        self._give_back()  # the flag, if the previous step failed
        if closure is None and "closure" in kwargs and self._makes_state():
            return None
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
        clipped = partial(self._evaluate, closure, given)
        return (
            ((args[0], clipped, *args[2:]), kwargs)
            if len(args) > 1
            else (args, {**kwargs, "closure": clipped})
        )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _makes_state(self) -> bool:
        """Whether a step only makes the optimizer's state,
        as ``torch.distributed.checkpoint`` takes before it loads.

        Then all rates are 0, and each parameter that takes a gradient has one of zeros; all
        processes decide alike.
        """
        rates = [group["lr"] for group in self.optimizer.param_groups if "lr" in group]
        if any([rate is None or float(rate) != 0 for rate in rates]):
            return False
        params, all_reduce = self._params(), follow_reference(self._join)
        norm = get_total_norm([p.grad for p in params])  # NaN is no 0
        real = bool(norm != 0) or any([p.grad is None and p.requires_grad for p in params])
        flag = of_any(torch.tensor(float(real)), all_reduce, params[0].device if params else None)
        return not flag

    def _warn(self) -> None:
        """Warn that the rule did not get its state back; at a step,
        as it may be loaded after the optimizer's.
        """
        if self._lacks_memory:
            msg = (
                "the optimizer goes on from steps, or a state_dict, with no state of "
                f"{short(self.rule)}, which goes "
                "on with what it has seen by itself: attach the rule first, then "
                "optimizer.load_state_dict(saved), and "
                "save it with the rule attached; torch.distributed.checkpoint saves it beside the "
                "optimizer: "
                '{"optimizer": ..., "clipping": handle}'
            )
            warnings.warn(msg, UserWarning, stacklevel=4)
        self._lacks_memory = False

    def _count_steps(self, optimizer: Any) -> Any:
        """Put a step that counts into an optimizer whose class calls ``super().step()``.

        ``None`` for other classes.

        The call runs the hooks once more, and only the outermost act. If the step fails, the next
        one begins at the outermost again.
        """
        # PyTorch puts a wrapper of an inherited step into a class.
        steps = {
            unwrap(vars(kind)["step"]) for kind in type(optimizer).__mro__ if "step" in vars(kind)
        }
        if len(steps) <= 2:
            return None
        step = optimizer.step

        @wraps(step)
        def count_depth(_: Any, *args: Any, **kwargs: Any) -> Any:
            outer, self._depth = self._depth, 0
            try:
                return step(*args, **kwargs)
            finally:
                self._depth = outer
                if outer is None:
                    self._give_back()

        optimizer.step = counting = MethodType(count_depth, optimizer)
        return counting

    def _clip_in_lane(self, rule: Rule) -> bool:
        """Clip in the lane.

        Return False, with nothing changed, if the step needs the general way.
        """
        optimizer = self.optimizer
        if self._hidden_grads or self._skip_flag is not None or self.loss is not None:
            return False
        if (
            getattr(optimizer, "grad_scale", None) is not None
            or getattr(optimizer, "found_inf", None) is not None
        ):
            return False
        groups = optimizer.param_groups
        grads = gradients_of(groups[0]["params"] if len(groups) == 1 else self._params())
        result = None if grads is None else lane(grads, rule.constant, in_place=True)
        if result is None:
            return False
        self._clipper.hold_report(LaneDecision(rule, BACKEND, list, result, None).report())
        return True

    def _evaluate(self, closure: Callable[[], Any], given: Any) -> Any:
        self._give_back()
        loss = closure()
        self._clip(given if loss is None else loss)
        return loss

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _clip(self, loss: Any) -> None:
        """Gather the gradients, agree with other processes, and clip."""
        params, all_reduce = self._look_up_leaves(), follow_reference(self._join)
        grads = grads_of(params)
        device = params[0].device if params else None
        if several() and looks_at("loss", self.rule):
            loss = of_all(loss, device)  # also without any gradient, or other processes would wait
        found_inf = of_any(getattr(self.optimizer, "found_inf", None), all_reduce, device)
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
            self._hide()  # GradScaler skips this step
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
            self._skip(report.skipped, found_inf)

    def _unscale(self, grads: list[Any], scale: Any) -> None:
        """Divide by the scale of a GradScaler, as a fused kernel would do later."""
        if any(grad.dtype is torch.float16 for grad in grads):
            msg = (
                f"{short(self.rule)} needs unscaled gradients, and float16 cannot hold them: keep "
                "the parameters in float32 under autocast"
            )
            raise ValueError(msg)
        self.optimizer.grad_scale = None  # GradScaler sets it before each step
        for grad in grads:
            grad.div_(scale.to(grad.device))

    def _skip(self, skipped: Any, found_inf: Any) -> None:
        """Skip a step, as the rule demands."""
        optimizer = self.optimizer
        fused = type(optimizer) in _SKIPPING and all(
            group["fused"] for group in optimizer.param_groups
        )
        if fused and not BACKEND.readable(skipped):
            flag = skipped.to(torch.float32)
            if found_inf is None:
                self._skip_flag = optimizer.found_inf = flag
            else:
                optimizer.found_inf = torch.maximum(flag, found_inf.to(flag.device))
        elif bool(skipped):
            self._hide()

    def _hide(self) -> None:
        """Hide the gradients until the step is over,
        since optimizers skip parameters without one.
        """
        self._hidden_grads = [(p, p.grad) for p in self._params()]
        for p, _ in self._hidden_grads:
            p.grad = None

    def _after(self, *_: Any) -> None:
        """Give back after a step what the optimizer did not see."""
        if torch.compiler.is_dynamo_compiling():
            _outside(self._after)
            return
        if self._depth:
            self._depth -= 1
            if self._depth > 0:
                return
        if self._hidden_grads or self._skip_flag is not None:
            self._give_back()

    def _give_back(self) -> None:
        """Give back the gradients, and take away the flag."""
        if self._skip_flag is not None:
            del self.optimizer.found_inf
        for p, grad in self._hidden_grads:
            p.grad = grad
        self._skip_flag, self._hidden_grads = None, []

    def _params(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _tree(self, values: list[Any]) -> list[Any]:
        """Return a value for each parameter, by its group and name."""
        left = iter(values)
        return [OrderedDict(zip(keys, left, strict=False)) for keys in self._keys]

    def _look_up_leaves(self) -> list[Any]:
        """Return the parameters; if groups have changed, name them,
        and give each its own rows of the memory.
        """
        params, groups = self._params(), self.optimizer.param_groups
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

    def _refuse_one_answer(self) -> None:
        """Refuse a mask or a label that says the same of all parameters,
        unless ``names`` tells of others.

        Raises
        ------
        ValueError
            See `uniclip._core.plan.refuse_one_answer`.
        """
        params = self._params()
        paths = [(number, key) for number, keys in enumerate(self._keys) for key in keys]
        numbered = [path for path in paths if isinstance(path[1], int)]
        some = len(self._names) > len(params)
        leaves = [p.detach() for p in params]
        try:
            if len(numbered) == len(paths):
                refuse_names(self.rule, paths, leaves)
            refuse_one_answer_in(self.rule, *([], []) if some else (paths, leaves))
        except (AttributeError, TypeError) as error:  # as of a number that is taken for a name
            where, fix = f"{paths[0]}, of group and name", ""
            if numbered:
                where = f"{numbered[0]}, of group and number"
                fix = (
                    ": where it looks for names, give them by attach(optimizer, rule, names=model)"
                )
            msg = (
                f"a function of {short(self.rule)} fails for paths as {where}{fix} "
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


def names_of(names: Any, optimizer: Any) -> WeakTensorKeyDictionary:
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
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if found and params and not any([p in found for p in params]):
        msg = (
            "names has none of the parameters of the optimizer: give the model that it was made for"
        )
        raise ValueError(msg)
    return found
