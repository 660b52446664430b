# SPDX-License-Identifier: MIT
"""Clipping inside the Trainer of Hugging Face transformers: one callback."""

from __future__ import annotations

from uniclip._checks import check
from uniclip._repr import short
from uniclip.integrations import needs, refuse_record, rule_for_steps
from uniclip.report import AVERAGED, NORM, NORM_MAX
from uniclip.rules import AnyRule

with needs("Hugging Face transformers", "'transformers[torch]'"):
    from transformers import TrainerCallback

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import optree

from uniclip.backends.dtensor import is_dtensor
from uniclip.integrations.torch.optimizer import Attached, attached

if TYPE_CHECKING:
    from uniclip.insight import Recorder

_ENGINES = {"DEEPSPEED", "MEGATRON_LM"}
"""The kinds of distributed training that cut gradients into parts of which no tensor tells."""
_KEY = "uniclip"
"""Where ``trainer_state.json`` keeps the state of the rule, among those of the callbacks."""
_ANEW = f"begin anew by deleting {_KEY!r} from stateful_callbacks in the checkpoint's trainer_state.json"


class ClipGradients(TrainerCallback):
    """Clip the gradients by a rule, at the beginning of each step of the optimizer.

    It acts after all micro-batches are accumulated and unscaled. ``max_grad_norm`` is 0 while it trains, so
    that the Trainer does not clip, too.

    Parameters
    ----------
    rule : Rule or callable
    all_reduce : callable, process group or device mesh, optional
        How parts of the gradients in other processes are joined, where they are plain tensors; see
        `uniclip.integrations.torch.attach`. Distributed tensors, those of FSDP2, need none.
    shared : callable, optional
        Which leaves are copies beside such parts.
    record : uniclip.insight.Recorder, optional
        Records each step, with the loss that the model returns, if it does: the Trainer tells its callbacks none. A
        training that goes on from a checkpoint goes on in the file.

    Attributes
    ----------
    handle : Attached or None
        What `uniclip.integrations.torch.attach` returned for the optimizer: ``handle.report`` is the report of the
        last step. ``None`` before the training.

    Raises
    ------
    TypeError
        If ``rule`` is neither a rule nor a function of one gradient array.
    ValueError
        At the beginning of the training: if the optimizer has a rule already; if DeepSpeed or Megatron keeps parts of
        the gradients to itself; if the parameters are parts that look like the whole (FSDP1), and there is no
        ``all_reduce``; if the state in the checkpoint is that of another rule; if the policy is ``"zero"``, since the
        Trainer makes all gradients NaN where one is not finite.
    RuntimeError
        If the optimizer took a step that the rule did not see, as layer-wise optimizers do.

    Warns
    -----
    UserWarning
        If ``max_grad_norm`` was set to another value than its default, since it is not used; if a checkpoint is gone
        on from that has no state of a rule that remembers.

    Notes
    -----
    The state of a rule that remembers is in ``trainer_state.json`` of each checkpoint, as plain numbers.

    To what the Trainer logs about training are added ``"clip/norm"``, ``"clip/limit"``, ``"clip/factor"`` and, of a
    rule that has one, ``"clip/threshold"`` of the last step and, over the steps since the last log, the means
    ``"clip/share"`` and, of a rule that may skip a step, ``"clip/skipped"``, and the largest norm,
    ``"clip/norm_max"``; see `uniclip.Report.scalars`.

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
        self._hook: Any = None
        self._losses: list[Any] = []
        self._are_parts = False  # of accumulated batches: parts of a mean over all of them, or a mean of each
        self.handle: Attached | None = None
        self._seen: Any = None
        self._loaded: dict[str, Any] = {}
        self._given: Any = None  # the arguments and their max_grad_norm, while it is set to 0
        self._last: dict[str, Any] = {}
        self._sums: dict[str, Any] = {}
        self._largest: Any = None
        self._steps = 0

    def __repr__(self) -> str:
        """Return the rule, and what it has seen."""
        return (
            f"<ClipGradients: {self.rule!r}, before training>"
            if self.handle is None
            else f"<ClipGradients: {self.handle!r}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: the rule, no hooks in an optimizer."""
        return dict(vars(ClipGradients(self.rule, self.all_reduce, self.shared, self.record)))

    def state_dict(self) -> dict[str, Any]:
        """Return what the rule remembers as plain numbers and lists, as `uniclip.Clipper.state_dict` does."""
        return self._loaded if self.handle is None else self.handle.numbers()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what was saved, by whatever holder; a training that goes on from a checkpoint has that of its own.

        Parameters
        ----------
        saved : dict
            An empty one is a new beginning. Before a training it is checked when that begins.

        Raises
        ------
        TypeError
            If it is no dict.
        ValueError
            If it is that of another rule or of other parameters, or holds what is no finite number.
        """
        check("saved", saved, isinstance(saved, dict), "what a state_dict() returned")
        if self.handle is not None and self._given is not None:  # it trains
            self.handle.load_state_dict(saved)
        else:
            self._loaded, self.handle = saved, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Attach to the optimizer, and go on from a checkpoint if there is one."""
        self._detach()  # where the training before failed
        optimizer = kwargs["optimizer"]
        _refuse(optimizer, self.rule)
        self.handle = attached(optimizer, self.rule, self.all_reduce, self.shared, self.record)
        _refuse_parts(self.handle)
        self._seen, self._last, self._sums, self._largest, self._steps = None, {}, {}, None, 0
        saved = state.stateful_callbacks.get(_KEY)
        if self.rule.memory:
            if saved is not None:
                self.handle.load_state_dict(saved, anew=_ANEW)
            elif self._loaded:
                self.handle.load_state_dict(self._loaded)
            elif state.global_step:
                msg = (
                    f"the checkpoint, saved without the callback, has no state of {short(self.rule)}, which begins anew"
                )
                warnings.warn(msg, UserWarning, stacklevel=2)
            state.stateful_callbacks[_KEY] = _Snapshot(self.handle)
        self._loaded = {}
        if self.record is not None:
            self.record.resume(state.global_step)
            self.handle.name_leaves(kwargs["model"])
            self._hook = kwargs["model"].register_forward_hook(self._see_loss, with_kwargs=True)
        self._given = args, args.max_grad_norm
        _warn(args)
        args.max_grad_norm = 0.0

    def _see_loss(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        """Keep the loss in what the model returns in training."""
        loss = output.get("loss") if isinstance(output, dict) else None
        if model.training and loss is not None:
            self._losses.append(loss.detach().mean())
            self._are_parts = kwargs.get("num_items_in_batch") is not None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Leave out the numbers of steps that a loss scale skipped."""
        if self.record is not None:
            self.record.step = max(self.record.step or 0, state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Have the loss recorded with the step."""
        if self.record is not None and self._losses:
            self.record.loss = sum(self._losses) / (1 if self._are_parts else len(self._losses))
        self._losses = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Take in the report of the step, and read nothing of it."""
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
        """Add to what is logged about the steps since the last log."""
        if "loss" not in logs or not self._steps:  # it is about evaluation
            return
        means = {name: total / self._steps for name, total in self._sums.items()}
        largest = {} if self._largest is None else {NORM_MAX: self._largest}
        clip = {name: float(value) for name, value in (self._last | means | largest).items()}
        self._sums, self._largest, self._steps = {}, None, 0
        logs.update(clip)
        state.log_history[-1].update(clip)  # written before this is called

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Leave the optimizer and the arguments as they were before."""
        self._detach()

    def _detach(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook, self._losses = None, []
        if self.handle is not None:
            self.handle.remove()
        if self._given is not None:
            args, value = self._given
            args.max_grad_norm, self._given = value, None


class _Snapshot:
    """The state of a rule, read when the Trainer copies its own state to write it into a file."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        saved: dict[str, Any] = self._handle.numbers()
        return saved


def _refuse(optimizer: Any, rule: Any) -> None:
    """Refuse optimizers that see parts of the gradients only, and a policy that the Trainer leaves nothing to do."""
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
    """Refuse a state in parts: the Trainer writes its own in one process, where the others' are not."""
    if any(map(is_dtensor, optree.tree_leaves(handle.state))):
        handle.remove()
        msg = (
            f"{short(handle.rule)} has a state as large as the model, which is in parts here, and trainer_state.json "
            "cannot hold it: use a rule with one norm for each leaf, or for all; or a loop of your own with Accelerate"
        )
        raise ValueError(msg)


def _check_skipped(optimizer: Any, rule: Any) -> None:
    """Refuse a step that nobody clipped, unless GradScaler skipped it."""
    if not optimizer.step_was_skipped:
        msg = (
            f"{type(optimizer.optimizer).__name__} took a step in which {short(rule)} saw no gradients: ClipGradients "
            "needs an optimizer that takes them from p.grad in step(), which layer-wise ones do not"
        )
        raise RuntimeError(msg)


def _warn(args: Any) -> None:
    """Say that ``max_grad_norm`` is not used where the user has set it."""
    default = next(field.default for field in dataclasses.fields(args) if field.name == "max_grad_norm")
    if args.max_grad_norm and args.max_grad_norm != default:
        msg = f"max_grad_norm={args.max_grad_norm} is not used, since ClipGradients clips: leave it out, or set it to 0"
        warnings.warn(msg, UserWarning, stacklevel=2)
