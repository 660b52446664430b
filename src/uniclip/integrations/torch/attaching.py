# SPDX-License-Identifier: MIT
"""Attach a rule to an optimizer, so that each of its steps is clipped.

The handle is in `handle`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uniclip._core.collectives import AllReduce, Shared, check_shared, reducer_of
from uniclip._errors import summarize
from uniclip._types import StepOptions
from uniclip._warnings import warn
from uniclip.backends.torch import BACKEND
from uniclip.clipper import Clipper
from uniclip.compose import AnyRule
from uniclip.integrations import check_record, rule_for_steps
from uniclip.integrations.torch.checks import Optimizers, as_list, optimizers_of, unwrap
from uniclip.integrations.torch.engines import engine_of
from uniclip.integrations.torch.guard import guard_of
from uniclip.integrations.torch.handle import Attached
from uniclip.integrations.torch.parameters import Names, Parameters
from uniclip.integrations.torch.processes import check_shards, raise_if_unnamed
from uniclip.integrations.torch.state import saves_state

if TYPE_CHECKING:
    import torch

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
    accumulated gradients are clipped once. What is clipped is what is in ``param_groups``, in
    ``.grad``. With a ``torch.amp.GradScaler`` the norms are those of the unscaled gradients,
    whether ``unscale_`` was called or not.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer, or any object with ``step`` and ``param_groups``
        The object whose ``step()`` your loop calls. The parameters in its groups are clipped. A
        list, tuple or dict of several, such as Muon and AdamW, which your loop steps one after the
        other: all of their parameters are clipped together, at the first of these steps. A wrapper
        of Accelerate, Lightning, Opacus or MMEngine stands for the optimizer inside. Also
        DeepSpeed's engine, its optimizer, or one of Megatron Core, after it was made.
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
        paths. A module is asked again when parameters were replaced, as by FSDP2; parameters that
        have no name have numbers.
    resume : bool, default True
        ``False`` ignores the state of a rule in a checkpoint, so the rule starts with empty state.
        Use it for the first run with another rule than the one that wrote the checkpoint.

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
        If the optimizer already has a rule, or is differentiable; if ``names`` is empty, or has
        none of its parameters; if parameters have no names, and a mask or label in the rule returns
        the same for all of them, or a mask by names takes none. With several processes, if the
        parameters are those of ``FullyShardedDataParallel`` (FSDP1) without ``all_reduce``, or if
        ``all_reduce`` would reduce norms of leaves without names. At the first step, if the
        processes have different rules, or leaves that are neither shards of the same leaves nor
        distinct.
    RuntimeError
        At a step whose gradients would not be clipped, or not rightly:

        - it is during backward, and a norm of the rule spans several leaves;
        - another ``torch.optim.Optimizer`` moves the same parameters outside of the attached step,
          or others inside of it that are not in ``param_groups``;
        - two optimizers with rules for the same parameters step inside of each other;
        - of a list, the gradients of one that has yet to step have changed, or a ``GradScaler``
          has not divided them;
        - after the step: it did not call its closure, or ran no step pre-hooks.

    Warns
    -----
    UserWarning
        At a step of a stateful rule, if the optimizer had taken steps before it was attached, or
        loaded a ``state_dict`` without the state of the rule; and when a state is loaded that has
        no entry for some parameters, which then start with empty state. For a stateful rule, if the
        class of the optimizer has a ``state_dict`` of its own, which may leave the rule's state
        out. At the first step without any gradient, or with gradients in ``main_grad`` only; at the
        first step of a copy of the optimizer, which has no rule.

    Notes
    -----
    The state that a rule has for a parameter belongs to the parameter itself: groups can be added,
    removed and changed between steps, and a parameter that comes back goes on from its own norms. A
    saved state is matched by names; entries of parameters that are not here are kept for
    ``add_param_group``.

    The rule clips in a step pre-hook of the optimizer. So hooks that you registered before
    ``attach`` run before it, and later ones see clipped gradients. An object without such hooks is
    clipped at the beginning of its ``step()``. Of a list, only the optimizer that steps first may
    have hooks that change gradients before the clip.

    A step that the rule skips, by the policy ``nonfinite="skip"`` or the curve
    `uniclip.curves.reject`, is not taken: parameters, moments and step counts stay as they are, and
    later hooks do not run. On an accelerator this reads one boolean to the host, except in the
    fused Adam, AdamW and Adagrad, which skip in their kernels. An optimizer that moves the
    parameters before it calls its closure goes on without gradients.

    With several optimizers the state of a stateful rule is in the ``state_dict`` of the first, and
    is loaded with whichever has it.

    The handle can be dropped. It keeps the optimizer alive, but not the other way around.

    With several processes in ``torch.distributed``, a rule that uses the loss gets the mean of
    their losses, so that all decide alike. Every process must take part at each step, with a loss
    or without. If one dimension of a mesh has all processes, as in FSDP2, a rule sends the loss
    with the norm. Otherwise, and in chains and masks, one small reduction of the default group
    comes first.

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
    engine = engine_of(optimizer, names)
    if engine is not None:
        reduces = all_reduce is not None or shared is not None
        engine.check(rule_for_steps(rule), reduces=reduces, warns=warns)
        optimizer, names = engine.optimizer, engine.names
        all_reduce, shared = engine.group, engine.shared

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

    step = StepOptions(all_reduce=all_reduce, shared=shared)
    check_shards(params.tensors(), "optimizer", rule, step)
    if all_reduce is not None:
        # This raises an error for what cannot reduce.
        reducer_of(BACKEND, all_reduce)
        raise_if_unnamed(rule, groups, params.names)
    check_record(record, all_reduce)

    if engine is None and warns and rule.stateful and not saves_state(optimizers[0]):
        msg = (
            f"{type(optimizers[0]).__qualname__}.state_dict() is not PyTorch's own, and may leave "
            f"out the state of {summarize(rule)}; save handle.state_dict(), too, and load it by "
            "handle.load_state_dict(saved)"
        )
        warn(msg)
    clipper = Clipper(rule, record, resume=resume)
    handle = Attached(optimizers, clipper, all_reduce, shared, params)
    for wrapper in as_list(optimizer):
        _renew_kept_step(wrapper)
    if engine is not None:
        engine.add_hooks(handle)
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
