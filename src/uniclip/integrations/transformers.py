# SPDX-License-Identifier: MIT
"""Clipping inside the Trainer of Hugging Face Transformers: one callback."""

from __future__ import annotations

from uniclip._errors import check, needs, short
from uniclip.arraywise import AnyRule
from uniclip.integrations import refuse_record, rule_for_steps
from uniclip.report import AVERAGED, NORM, NORM_MAX

with needs("Hugging Face transformers", "'transformers[torch]'"):
    from transformers import TrainerCallback

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import optree

from uniclip.backends.dtensor import is_dtensor
from uniclip.integrations.torch.optimizer import Attached, attach

if TYPE_CHECKING:
    from uniclip.insight import Recorder

_ENGINES = {"DEEPSPEED", "MEGATRON_LM"}
"""The kinds of distributed training whose gradients are parts that tensors do not describe."""
_KEY = "uniclip"
"""The key of the rule's state in ``trainer_state.json``, among the states of callbacks."""


class ClipGradients(TrainerCallback):
    """Clip the gradients by a rule, at the beginning of each step of the optimizer.

    It clips accumulated, unscaled gradients. ``max_grad_norm`` is 0 during training, so that the Trainer does not also
    clip.

    Parameters
    ----------
    rule : Rule or callable
    all_reduce : callable, process group or device mesh, optional
        How to reduce over processes that hold parts of the gradients as plain tensors; see
        `uniclip.integrations.torch.attach`. Distributed tensors, as with FSDP2, need none.
    shared : callable, optional
        A function of a leaf's path and the leaf: true for copies held beside such parts.
    record : uniclip.insight.Recorder, optional
        Records each step, without the loss, which the Trainer does not pass to callbacks. A training run resumed from a
        checkpoint continues the file.

    Attributes
    ----------
    handle : Attached or None
        The handle of `uniclip.integrations.torch.attach` for the optimizer: ``handle.report`` is the report of the last
        step. ``None`` before training.

    Raises
    ------
    TypeError
        If ``rule`` is neither a rule nor a function of one gradient array.
    ValueError
        At the start of training: if the optimizer already has a rule; if DeepSpeed or Megatron hides parts of the
        gradients; if the parameters are parts that look whole (FSDP1), and there is no ``all_reduce``; if the state in
        the checkpoint belongs to another rule; if the policy is ``"zero"``, since the Trainer makes all gradients NaN
        where one is not finite.
    RuntimeError
        If the optimizer took a step without the rule, as layer-wise optimizers do.

    Warns
    -----
    UserWarning
        If ``max_grad_norm`` is not its default, since it is not used; if training resumes from a checkpoint without
        the state of a rule with memory.

    Notes
    -----
    The state of a rule with memory is in ``trainer_state.json`` of each checkpoint, as plain numbers.

    The Trainer's logs get ``"clip/norm"``, ``"clip/limit"``, ``"clip/factor"`` and, for a rule that has one,
    ``"clip/threshold"`` of the last step; and over the steps since the last log the means ``"clip/share"`` and, for a
    rule that may skip a step, ``"clip/skipped"``, and the largest norm ``"clip/norm_max"``; see
    `uniclip.Report.scalars`.

    Examples
    --------
    >>> from uniclip.integrations.transformers import ClipGradients
    >>> callbacks = [ClipGradients(uc.by_global_norm(1.0))]  # Trainer(..., callbacks=callbacks)
    """

    def __init__(
        self, rule: AnyRule, all_reduce: Any = None, shared: Any = None, record: Recorder | None = None
    ) -> None:
        self.rule = rule_for_steps(rule)
        refuse_record(record, all_reduce)
        self.all_reduce, self.shared, self.record = all_reduce, shared, record
        self.handle: Attached | None = None
        self._seen: Any = None
        self._loaded: dict[str, Any] = {}
        self._given: Any = None  # the arguments and their max_grad_norm, while it is set to 0
        self._last: dict[str, Any] = {}
        self._sums: dict[str, Any] = {}
        self._largest: Any = None
        self._steps = 0

    def __repr__(self) -> str:
        """Return the rule, and the number of steps."""
        return (
            f"<ClipGradients: {self.rule!r}, before training>"
            if self.handle is None
            else f"<ClipGradients: {self.handle!r}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle: the rule, without hooks in an optimizer."""
        return dict(vars(ClipGradients(self.rule, self.all_reduce, self.shared, self.record)))

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's memory as plain numbers and lists, in the format of `uniclip.Clipper.state_dict`."""
        return self._loaded if self.handle is None else self.handle.numbers()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a memory saved by any integration; checkpoints of the Trainer already hold it.

        Parameters
        ----------
        saved : dict
            An empty dict starts over. Before training it is checked when training starts.

        Raises
        ------
        TypeError
            If ``saved`` is not a dict.
        ValueError
            If it belongs to another rule or other parameters.
        """
        check("saved", saved, isinstance(saved, dict), "what a state_dict() returned")
        if self.handle is not None and self._given is not None:  # while training
            self.handle.load_state_dict(saved)
        else:
            self._loaded, self.handle = saved, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Attach to the optimizer, and restore the state from a checkpoint if there is one."""
        self._detach()  # if the previous training failed
        optimizer = kwargs["optimizer"]
        _refuse(optimizer, self.rule)
        self.handle = attach(optimizer, self.rule, self.all_reduce, self.shared, self.record)
        _refuse_parts(self.handle)
        self._seen, self._last, self._sums, self._largest, self._steps = None, {}, {}, None, 0
        saved = state.stateful_callbacks.get(_KEY) or self._loaded
        if self.rule.memory:
            if saved or not state.global_step:  # else it warns, at the first step
                self.handle.load_state_dict(saved)
            state.stateful_callbacks[_KEY] = _Snapshot(self.handle)
        self._loaded = {}
        if self.record is not None:
            self.record.resume(state.global_step)
            self.handle.name_leaves(kwargs["model"])
        self._given = args, args.max_grad_norm
        _warn(args)
        args.max_grad_norm = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Omit the numbers of steps that a loss scale skipped."""
        if self.record is not None:
            self.record.step = max(self.record.step or 0, state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Accumulate the report of the step, without reading it."""
        report = None if self.handle is None else self.handle.report
        if report is None or report is self._seen:
            _check_skipped(kwargs["optimizer"], self.rule)
            return
        self._seen, self._last = report, report.scalars()
        self._steps += 1
        if NORM in self._last:
            norm = self._last[NORM]
            norm = norm.where(norm.isfinite(), 0.0)
            self._largest = norm if self._largest is None else self._largest.maximum(norm)
        for name in self._last.keys() & set(AVERAGED):
            self._sums[name] = self._sums.get(name, 0) + self._last[name]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Add the scalars since the last log to what is logged."""
        if "loss" not in logs or not self._steps:  # a log of evaluation
            return
        means = {name: total / self._steps for name, total in self._sums.items()}
        largest = {} if self._largest is None else {NORM_MAX: self._largest}
        clip = {name: float(value) for name, value in (self._last | means | largest).items()}
        self._sums, self._largest, self._steps = {}, None, 0
        logs.update(clip)
        state.log_history[-1].update(clip)  # written before this is called

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Restore the optimizer and the arguments."""
        self._detach()

    def _detach(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        if self._given is not None:
            args, value = self._given
            args.max_grad_norm, self._given = value, None


class _Snapshot:
    """The state of the rule, read when the Trainer copies its own state to write it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        saved: dict[str, Any] = self._handle.numbers()
        return saved


def _refuse(optimizer: Any, rule: Any) -> None:
    """Refuse optimizers that see only parts of the gradients, and a policy that the Trainer makes useless."""
    kind = optimizer.accelerator_state.distributed_type.value
    if kind in _ENGINES:
        msg = (
            f"ClipGradients cannot be used with {kind}: each process would clip by the norm of its own part of the "
            "gradients; leave the callback out and use max_grad_norm, or use FSDP2"
        )
        raise ValueError(msg)
    if getattr(rule, "nonfinite", None) == "zero":  # where the norm is not finite, the Trainer multiplies all by NaN
        msg = 'with nonfinite="zero" the Trainer leaves NaN only of gradients that are not finite: use nonfinite="skip"'
        raise ValueError(msg)


def _refuse_parts(handle: Attached) -> None:
    """Refuse a state in parts: the Trainer writes its state in one process, which lacks the others."""
    if any(map(is_dtensor, optree.tree_leaves(handle.state))):
        handle.remove()
        msg = (
            f"{short(handle.rule)} has a state as large as the model, which is in parts here, and trainer_state.json "
            "cannot hold it: use a rule with one norm for each leaf, or for all; or a loop of your own with Accelerate"
        )
        raise ValueError(msg)


def _check_skipped(optimizer: Any, rule: Any) -> None:
    """Refuse a step that was not clipped, unless GradScaler skipped it."""
    if not optimizer.step_was_skipped:
        msg = (
            f"{type(optimizer.optimizer).__name__} took a step in which {short(rule)} saw no gradients: ClipGradients "
            "needs an optimizer that takes them from p.grad in step(), which layer-wise ones do not"
        )
        raise RuntimeError(msg)


def _warn(args: Any) -> None:
    """Warn that ``max_grad_norm`` is not used if the user has set it."""
    default = next(field.default for field in dataclasses.fields(args) if field.name == "max_grad_norm")
    if args.max_grad_norm and args.max_grad_norm != default:
        msg = f"max_grad_norm={args.max_grad_norm} is not used, since ClipGradients clips: leave it out, or set it to 0"
        warnings.warn(msg, UserWarning, stacklevel=3)
