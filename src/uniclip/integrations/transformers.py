# SPDX-License-Identifier: MIT
"""Clipping inside the Trainer of Hugging Face Transformers.

There is a mixin for your own Trainer, which measures the norm once and whose loggers get all
scalars, and a callback for any Trainer.
"""

from __future__ import annotations

from uniclip._errors import check, needs, summarize
from uniclip._warnings import warn
from uniclip.compose import AnyRule, rules_with_norms
from uniclip.integrations import check_record, rule_for_steps
from uniclip.report import NORM, Report

with needs("Hugging Face transformers", "'transformers[torch]'"):
    from accelerate.state import AcceleratorState
    from transformers import TrainerCallback

import dataclasses
from typing import TYPE_CHECKING, Any

from uniclip.integrations.torch.attaching import attach_unsaved
from uniclip.integrations.torch.checks import names_in, unwrap
from uniclip.integrations.torch.handle import Attached

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import TrainOutput

    from uniclip._core.collectives import AllReduce, Shared
    from uniclip.insight import Recorder
    from uniclip.rule import BaseRule

_DEEPSPEED = "DEEPSPEED"
_MEGATRON = "MEGATRON_LM"
_KEY = "uniclip"
"""The key of the rule's state in ``trainer_state.json``, among the states of callbacks."""


class ClipGradients(TrainerCallback):
    """Clip the gradients by a rule, at the beginning of each step of the optimizer.

    It clips accumulated, unscaled gradients. ``max_grad_norm`` is 0 during training, so that the
    Trainer does not also clip.

    Parameters
    ----------
    rule : Rule or callable
    all_reduce : callable, process group or device mesh, optional
        How to reduce over processes that hold shards of the gradients as regular tensors; see
        `uniclip.integrations.torch.attach`. Distributed tensors, as with FSDP2, need none.
    shared : callable, optional
        A function of a leaf's path and the leaf: true for leaves that are replicated, while others
        are sharded.
    record : uniclip.insight.Recorder, optional
        Records each step, without the loss, which the Trainer does not pass to callbacks. A
        training run resumed from a checkpoint continues the file.
    resume : bool, default True
        ``False`` ignores the state of a rule in a checkpoint, so the rule starts with empty state.
        Use it for the first run with another rule than the one that wrote the checkpoint.

    Attributes
    ----------
    handle : Attached or None
        The handle of `uniclip.integrations.torch.attach` for the optimizer: ``handle.report`` is
        the report of the last step. ``None`` before training.

    Raises
    ------
    TypeError
        If ``rule`` is neither a rule nor a function of one gradient array.
    ValueError
        At the start of training: if the optimizer already has a rule; if Accelerate trains with
        Megatron; if the parameters are shards that look whole (FSDP1), and there is no
        ``all_reduce``; if the state in the checkpoint belongs to another rule; if the policy is
        ``"zero"``, since the Trainer makes all gradients NaN if one is non-finite.
    RuntimeError
        If the optimizer took a step without the rule, as layer-wise optimizers do.

    Warns
    -----
    UserWarning
        If ``max_grad_norm`` is not its default, since it is not used; if training resumes from a
        checkpoint that lacks the state of a stateful rule.

    Notes
    -----
    The state of a stateful rule is in ``trainer_state.json`` of each checkpoint, as plain numbers.

    The Trainer's logs get ``"clip/norm"``, ``"clip/limit"``, ``"clip/factor"`` and, for a rule that
    has one, ``"clip/threshold"`` of the last step. Over the steps since the last log, they get the
    means ``"clip/share"`` and, for a rule that may skip a step, ``"clip/skipped"``, and the largest
    norm ``"clip/norm_max"``; see `uniclip.Report.scalars`. A limit or threshold that does not exist
    is NaN. The loggers of ``report_to`` come before the callbacks that a Trainer is given, and see
    none of these, unless they are moved:
    ``trainer.add_callback(trainer.pop_callback(WandbCallback))``.

    The Trainer still measures ``grad_norm`` itself. With `ClippedTrainer`, the norm is measured
    once.

    Examples
    --------
    >>> from uniclip.integrations.transformers import ClipGradients
    >>> callbacks = [ClipGradients(uc.by_global_norm(1.0))]  # Trainer(..., callbacks=callbacks)
    """

    def __init__(
        self,
        rule: AnyRule,
        all_reduce: AllReduce | None = None,
        shared: Shared | None = None,
        record: Recorder | None = None,
        *,
        resume: bool = True,
    ) -> None:
        self.rule = rule_for_steps(rule)
        check_record(record, all_reduce)
        self.all_reduce = all_reduce
        self.shared = shared
        self.record = record
        self.resume = resume
        self.handle: Attached | None = None
        self._last_report: Report | None = None
        self._loaded: dict[str, Any] = {}
        """A loaded state for the next training."""
        self._replaced: tuple[TrainingArguments, float] | None = None
        """The arguments and their ``max_grad_norm``, while it is 0."""

    def __repr__(self) -> str:
        """Return the rule and the optimizer."""
        if self.handle is None:
            return f"<ClipGradients: {self.rule!r}, before training>"
        return f"<ClipGradients: {self.handle!r}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle: the rule, without hooks in an optimizer."""
        unused: dict[str, Any] = {"handle": None, "_last_report": None, "_loaded": {}}
        return vars(self) | unused | {"_replaced": None}

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's state as plain numbers.

        The format is that of `uniclip.Clipper.state_dict`.
        """
        return self._loaded if self.handle is None else self.handle.numbers()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Start the next training with a state that any integration saved.

        Checkpoints of the Trainer already contain it.

        Parameters
        ----------
        saved : dict
            The saved state; an empty dict starts with empty state. It is checked when training
            starts.

        Raises
        ------
        TypeError
            If ``saved`` is not a dict.
        """
        check("saved", saved, isinstance(saved, dict), "the result of a state_dict()")
        self._detach()
        self._loaded = saved
        self.handle = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach to the optimizer, and restore the state from a checkpoint if there is one."""
        # A training that failed has not called on_train_end.
        self._detach()

        optimizer = kwargs["optimizer"]
        # Accelerate wraps PyTorch's optimizers only, and returns other objects as they are.
        engine = getattr(optimizer, "accelerator_state", None) or AcceleratorState()
        kind = engine.distributed_type.value
        _check_engine(kind, self.rule)
        # The optimizer of DeepSpeed has copies of the parameters.
        model = kwargs["model"]
        names = model if kind == _DEEPSPEED else names_in(model, optimizer)
        self.handle = attach_unsaved(
            optimizer,
            self.rule,
            self.all_reduce,
            self.shared,
            self.record,
            names=names,
            resume=self.resume,
        )
        # The statistics for the logs start with this call.
        self.handle.logs()
        self._last_report = None
        self._restore(self.handle, state)

        if self.record is not None:
            self.record.resume(state.global_step)
        self._replaced = args, _take_max_grad_norm(args)

    def _restore(self, handle: Attached, state: TrainerState) -> None:
        """Restore the state of a stateful rule, and have the Trainer's checkpoints contain it."""
        saved = state.stateful_callbacks.get(_KEY) or self._loaded
        if self.rule.stateful:
            # Without a saved state, a resumed training warns at its first step.
            is_new_training = not state.global_step
            if saved or is_new_training:
                handle.load_state_dict(saved)
            state.stateful_callbacks[_KEY] = _Snapshot(handle)
        else:
            # A state of an earlier training would be loaded by a later one.
            state.stateful_callbacks.pop(_KEY, None)
        self._loaded = {}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Omit the numbers of steps that a loss scale skipped."""
        if self.record is not None:
            self.record.step = max(self.record.step or 0, state.global_step)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise if a step was not clipped, unless GradScaler skipped it."""
        report = None if self.handle is None else self.handle.report
        is_clipped = report is not None and report is not self._last_report

        # The wrapper of Accelerate shows whether its scaler skipped the step.
        was_skipped = getattr(kwargs["optimizer"], "step_was_skipped", False)
        if not (is_clipped or was_skipped):
            outer = type(unwrap(kwargs["optimizer"])).__qualname__
            msg = (
                f"{outer} took a step in which {summarize(self.rule)} got no gradients; use an "
                "optimizer that reads p.grad in step(), which layer-wise optimizers don't"
            )
            raise RuntimeError(msg)
        self._last_report = report

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the scalars since the last log."""
        # A log without a loss is one of an evaluation.
        if self.handle is None or logs is None or "loss" not in logs:
            return
        scalars = self.handle.logs()
        logs.update(scalars)
        # The Trainer has already copied the logs into its history.
        state.log_history[-1].update(scalars)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the optimizer and the arguments."""
        self._detach()

    def _detach(self) -> None:
        """Remove the rule from the optimizer, and restore ``max_grad_norm``."""
        if self.handle is not None:
            self.handle.remove()
        if self._replaced is not None:
            args, max_grad_norm = self._replaced
            args.max_grad_norm = max_grad_norm
            self._replaced = None


class ClippedTrainer:
    """A mixin for trainers that clip by a rule; their loggers get its scalars in any order.

    The state of a stateful rule is in ``optimizer.pt`` of each checkpoint, or, with several
    optimizers stepped as one, in ``trainer_state.json``. During training ``max_grad_norm`` is 0,
    and the Trainer does not measure a norm: ``grad_norm`` in the logs is the norm that the rule
    measures.

    Parameters
    ----------
    *args, **kwargs
        The arguments of the trainer.
    rule : Rule or callable
    all_reduce, shared, resume : optional
        As for `ClipGradients`, which can also record steps.

    Attributes
    ----------
    clipping : Attached or None
        The handle of `uniclip.integrations.torch.attach`; ``None`` before training.

    Raises
    ------
    TypeError, ValueError
        As `ClipGradients`; also with DeepSpeed, where `ClipGradients` clips.
    RuntimeError
        At the first step, if the optimizer was created without ``create_optimizer``.

    Examples
    --------
    >>> from transformers import Trainer
    >>> from uniclip.integrations.transformers import ClippedTrainer
    >>> class MyTrainer(ClippedTrainer, Trainer): ...
    >>> # MyTrainer(model, args, train_dataset=data, rule=uc.by_global_norm(1.0)).train()
    """

    args: TrainingArguments
    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        *args: Any,
        rule: AnyRule,
        all_reduce: AllReduce | None = None,
        shared: Shared | None = None,
        resume: bool = True,
        **kwargs: Any,
    ) -> None:
        self._rule = rule_for_steps(rule)
        self._all_reduce = all_reduce
        self._shared = shared
        self._resume = resume
        self.clipping: Attached | None = None
        self._saves_state = _SavesState()
        super().__init__(*args, **kwargs)
        self.add_callback(self._saves_state)  # type: ignore[attr-defined]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the optimizer, and attach the rule to it, with the names of the model."""
        created = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        optimizer = self.optimizer if created is None else created
        # The Trainer may call this again, for the same optimizer or for a new one.
        if self.clipping is not None:
            if self.clipping.optimizer is unwrap(optimizer):
                return optimizer
            self.clipping.remove()

        kind = self.accelerator.distributed_type.value
        if kind == _DEEPSPEED:
            msg = (
                "ClippedTrainer attaches the rule before DeepSpeed makes its own optimizer; use "
                "the callback ClipGradients(rule)"
            )
            raise ValueError(msg)
        _check_engine(kind, self._rule)
        # Under FSDP the Trainer passes the wrapped model.
        model = next(iter(args), kwargs.get("model")) or self.model
        names = names_in(model, optimizer)
        self.clipping = attach_unsaved(
            optimizer,
            self._rule,
            self._all_reduce,
            self._shared,
            names=names,
            resume=self._resume,
        )
        self._saves_state.handle = self.clipping
        # The statistics for the logs start with this call.
        self.clipping.logs()
        return optimizer

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, with a ``max_grad_norm`` of 0."""
        # The arguments belong to the user, so even an error must restore them.
        max_grad_norm = _take_max_grad_norm(self.args)
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.args.max_grad_norm = max_grad_norm

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the loss and the gradients; raise if the optimizer has no rule."""
        if self.clipping is None:
            msg = (
                "the optimizer has no rule, because ClippedTrainer.create_optimizer wasn't called; "
                "call super().create_optimizer() in your own create_optimizer, or, if another "
                "library creates the optimizer, use the callback ClipGradients"
            )
            raise RuntimeError(msg)
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def _get_grad_norm(
        self, model: torch.nn.Module, grad_norm: torch.Tensor | float | None = None
    ) -> torch.Tensor | float | None:
        """Return a placeholder for the norm, which the rule measures during the step."""
        if rules_with_norms(self._rule):
            return 0.0
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the scalars since the last log.

        ``grad_norm`` is the norm that the rule measured.
        """
        scalars = {}
        # A log without a loss is one of an evaluation.
        if self.clipping is not None and "loss" in logs:
            scalars = self.clipping.logs()
        # The Trainer got the placeholder of `_get_grad_norm`.
        if "grad_norm" in logs and NORM in scalars:
            logs = logs | {"grad_norm": scalars[NORM]}
        super().log({**logs, **scalars}, *args, **kwargs)  # type: ignore[misc]


class _SavesState(TrainerCallback):
    """Has checkpoints contain the state of the rule if the optimizer leaves it out."""

    def __init__(self) -> None:
        self.handle: Attached | None = None
        """The handle of the trainer; not the trainer, which would keep itself in memory."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle: without hooks in an optimizer."""
        return {"handle": None}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the state, now that the optimizer has loaded its own."""
        handle = self.handle
        # Another trainer may have got the callbacks of this one.
        if handle is None or unwrap(kwargs["optimizer"]) is not handle.optimizer:
            return
        # A state of an earlier training would be loaded by a later one.
        if not handle.rule.stateful or handle.saved_by_optimizer:
            state.stateful_callbacks.pop(_KEY, None)
            return

        saved = state.stateful_callbacks.get(_KEY)
        if saved:
            handle.load_state_dict(saved)
        elif state.global_step:
            handle.expect_state()
        state.stateful_callbacks[_KEY] = _Snapshot(handle)


class _Snapshot:
    """The state of the rule, read when the Trainer copies its own state to write it."""

    def __init__(self, handle: Attached) -> None:
        self._handle = handle

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return self._handle.numbers()


def _check_engine(engine: str, rule: BaseRule) -> None:
    """Raise for an engine that hides shards of the gradients, and for a policy without effect."""
    if engine == _MEGATRON:
        msg = (
            f"ClipGradients doesn't support {engine}, because each process would clip by the norm "
            "of only its shard of the gradients; in your own loop, write attach(optimizer, rule, "
            "names=model) for the optimizer of Megatron Core"
        )
        raise ValueError(msg)

    # The Trainer multiplies all gradients by NaN if their norm is non-finite.
    if getattr(rule, "nonfinite", None) == "zero":
        msg = (
            'nonfinite="zero" has no effect in the Trainer, which makes all gradients NaN if one '
            'is non-finite; use nonfinite="skip"'
        )
        raise ValueError(msg)


def _take_max_grad_norm(args: TrainingArguments) -> float:
    """Set ``max_grad_norm`` to 0 and return it; warn if the user has set it."""
    max_grad_norm: float = args.max_grad_norm
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    if max_grad_norm and max_grad_norm != defaults["max_grad_norm"]:
        msg = (
            f"max_grad_norm={max_grad_norm} isn't used, because uniclip clips the gradients; "
            "remove it, or set it to 0"
        )
        warn(msg)

    args.max_grad_norm = 0.0
    return max_grad_norm
