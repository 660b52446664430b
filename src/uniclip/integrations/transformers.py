# SPDX-License-Identifier: MIT
"""Clipping inside the Trainer of Hugging Face Transformers: a callback,
or a trainer whose loggers see all of it.
"""

from __future__ import annotations

from uniclip._errors import check, needs, summarize
from uniclip._warnings import warn
from uniclip.compose import AnyRule, rules_with_norms
from uniclip.integrations import check_record, rule_for_steps
from uniclip.report import NORM

with needs("Hugging Face transformers", "'transformers[torch]'"):
    from accelerate.state import AcceleratorState
    from transformers import TrainerCallback

import dataclasses
from typing import TYPE_CHECKING, Any

from uniclip.integrations.torch.checks import names_in
from uniclip.integrations.torch.optimizer import Attached, attach
from uniclip.integrations.torch.stepped import find_stepped

if TYPE_CHECKING:
    from uniclip.insight import Recorder

_ENGINES = {"DEEPSPEED", "MEGATRON_LM"}
"""The kinds of distributed training whose gradients are parts that tensors do not describe."""
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
        How to reduce over processes that hold parts of the gradients as plain tensors; see
        `uniclip.integrations.torch.attach`. Distributed tensors, as with FSDP2, need none.
    shared : callable, optional
        A function of a leaf's path and the leaf: true for copies held beside such parts.
    record : uniclip.insight.Recorder, optional
        Records each step, without the loss, which the Trainer does not pass to callbacks. A
        training run resumed from a checkpoint continues the file.

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
        At the start of training: if the optimizer already has a rule; if DeepSpeed or Megatron
        hides parts of the gradients; if the parameters are parts that look whole (FSDP1), and there
        is no ``all_reduce``; if the state in the checkpoint belongs to another rule; if the policy
        is ``"zero"``, since the Trainer makes all gradients NaN where one is not finite.
    RuntimeError
        If the optimizer took a step without the rule, as layer-wise optimizers do.

    Warns
    -----
    UserWarning
        If ``max_grad_norm`` is not its default, since it is not used; if training resumes from a
        checkpoint without the state of a rule with memory.

    Notes
    -----
    The state of a rule with memory is in ``trainer_state.json`` of each checkpoint, as plain
    numbers.

    The Trainer's logs get ``"clip/norm"``, ``"clip/limit"``, ``"clip/factor"`` and, for a rule that
    has one, ``"clip/threshold"`` of the last step; and over the steps since the last log the means
    ``"clip/share"`` and, for a rule that may skip a step, ``"clip/skipped"``, and the largest norm
    ``"clip/norm_max"``; see `uniclip.Report.scalars`.

    Examples
    --------
    >>> from uniclip.integrations.transformers import ClipGradients
    >>> callbacks = [ClipGradients(uc.by_global_norm(1.0))]  # Trainer(..., callbacks=callbacks)
    """

    def __init__(
        self,
        rule: AnyRule,
        all_reduce: Any = None,
        shared: Any = None,
        record: Recorder | None = None,
    ) -> None:
        self.rule = rule_for_steps(rule)
        check_record(record, all_reduce)
        self.all_reduce, self.shared, self.record = all_reduce, shared, record
        self.handle: Attached | None = None
        self._seen: Any = None
        self._loaded: dict[str, Any] = {}
        self._given: Any = None  # the arguments and their max_grad_norm, while it is set to 0

    def __repr__(self) -> str:
        """Return the rule and the optimizer."""
        return (
            "<ClipGradients: "
            f"{self.handle or self.rule!r}{'' if self.handle else ', before training'}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle: the rule, without hooks in an optimizer."""
        return vars(self) | {"handle": None, "_seen": None, "_loaded": {}, "_given": None}

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's memory as plain numbers and lists,
        in the format of `uniclip.Clipper.state_dict`.
        """
        return self._loaded if self.handle is None else self.handle.numbers()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Begin the next training with a memory saved by any integration.

        Checkpoints of the Trainer already hold it.

        Parameters
        ----------
        saved : dict
            An empty dict starts over. It is checked when training starts.

        Raises
        ------
        TypeError
            If ``saved`` is not a dict.
        """
        check("saved", saved, isinstance(saved, dict), "what a state_dict() returned")
        self._end()
        self._loaded, self.handle = saved, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the optimizer, and restore the state from a checkpoint if there is one."""
        self._end()  # if the previous training failed
        optimizer = kwargs["optimizer"]
        # Accelerate wraps PyTorch's optimizers only, and returns other objects as they are.
        engine = getattr(optimizer, "accelerator_state", None) or AcceleratorState()
        _refuse(engine.distributed_type.value, self.rule)
        names = names_in(kwargs["model"], optimizer)
        self.handle = attach(
            optimizer, self.rule, self.all_reduce, self.shared, self.record, names=names
        )
        self.handle.logs()
        self._seen = None
        saved = state.stateful_callbacks.get(_KEY) or self._loaded
        if self.rule.stateful:
            if saved or not state.global_step:  # else it warns, at the first step
                self.handle.load_state_dict(saved)
            state.stateful_callbacks[_KEY] = _Snapshot(self.handle)
        self._loaded = {}
        if self.record is not None:
            self.record.resume(state.global_step)
        self._given = args, _take_max_grad_norm(args)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Omit the numbers of steps that a loss scale skipped."""
        if self.record is not None:
            self.record.step = max(self.record.step or 0, state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a step that was not clipped, unless GradScaler skipped it."""
        report = None if self.handle is None else self.handle.report
        # A scaler skips the steps of what Accelerate has wrapped.
        was_skipped = getattr(kwargs["optimizer"], "step_was_skipped", False)
        if (report is None or report is self._seen) and not was_skipped:
            outer = type(find_stepped(kwargs["optimizer"]).outer).__qualname__
            msg = (
                f"{outer} took a step in which {summarize(self.rule)} saw no gradients: ClipGradients "
                "needs an optimizer that takes them from p.grad in step(), which layer-wise ones "
                "do not"
            )
            raise RuntimeError(msg)
        self._seen = report

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the scalars since the last log to what is logged."""
        if self.handle is not None and "loss" in logs:  # else a log of evaluation
            scalars = self.handle.logs()
            logs.update(scalars)
            state.log_history[-1].update(scalars)  # written before this is called

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the optimizer and the arguments."""
        self._end()

    def _end(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        if self._given is not None:
            args, value = self._given
            args.max_grad_norm, self._given = value, None


class ClippedTrainer:
    """A mixin for trainers that clip by a rule, whose loggers see the scalars whatever their order.

    The state of a rule with memory is in ``optimizer.pt`` of each checkpoint. During training
    ``max_grad_norm`` is 0, and the Trainer measures no norm of its own: ``grad_norm`` in the logs
    is that of the rule.

    Parameters
    ----------
    *args, **kwargs
        Those of the trainer.
    rule : Rule or callable
    all_reduce, shared : optional
        As for `ClipGradients`, which can also record steps.

    Attributes
    ----------
    clipping : Attached or None
        The handle of `uniclip.integrations.torch.attach`, from the start of training on.

    Raises
    ------
    TypeError, ValueError
        As `ClipGradients`.
    RuntimeError
        At the first step, if the optimizer was made without ``create_optimizer``.

    Examples
    --------
    >>> from transformers import Trainer
    >>> from uniclip.integrations.transformers import ClippedTrainer
    >>> class MyTrainer(ClippedTrainer, Trainer): ...
    >>> # MyTrainer(model, args, train_dataset=data, rule=uc.by_global_norm(1.0)).train()
    """

    args: Any
    accelerator: Any
    model: Any
    optimizer: Any

    def __init__(
        self,
        *args: Any,
        rule: AnyRule,
        all_reduce: Any = None,
        shared: Any = None,
        **kwargs: Any,
    ) -> None:
        self._rule, self._how = rule_for_steps(rule), (all_reduce, shared)
        self.clipping: Attached | None = None
        super().__init__(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer, and attach the rule to it, with the names of the model."""
        made = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        optimizer = self.optimizer if made is None else made
        if self.clipping is None or self.clipping.optimizer is not find_stepped(optimizer).outer:
            _refuse(self.accelerator.distributed_type.value, self._rule)
            if self.clipping is not None:
                self.clipping.remove()
            # Under FSDP the one that is prepared.
            model = next(iter(args), kwargs.get("model")) or self.model
            names = names_in(model, optimizer)
            self.clipping = attach(optimizer, self._rule, *self._how, names=names)
            self.clipping.logs()
        return optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; the trainer does not also clip."""
        given = _take_max_grad_norm(self.args)
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.args.max_grad_norm = given

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss and the gradients; refuse an optimizer that no rule is attached to."""
        if self.clipping is None:
            msg = (
                "no rule is attached to the optimizer, which ClippedTrainer.create_optimizer "
                "does: call it in a create_optimizer of your own, by super(); where another "
                "library makes the optimizer, use the callback ClipGradients"
            )
            raise RuntimeError(msg)
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return a number in the place of the norm, which the rule measures in the step;
        `log` has it then.
        """
        if rules_with_norms(self._rule):
            return 0.0
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the scalars since the last log.

        ``grad_norm`` is the norm that the rule has measured.
        """
        scalars = self.clipping.logs() if self.clipping is not None and "loss" in logs else {}
        if "grad_norm" in logs and NORM in scalars:
            logs = logs | {"grad_norm": scalars[NORM]}
        super().log({**logs, **scalars}, *args, **kwargs)  # type: ignore[misc]


class _Snapshot:
    """The state of the rule, read when the Trainer copies its own state to write it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        saved: dict[str, Any] = self._handle.numbers()
        return saved


def _refuse(kind: str, rule: Any) -> None:
    """Refuse engines whose optimizers see only parts of the gradients,
    and a policy that the Trainer makes useless.
    """
    if kind in _ENGINES:
        msg = (
            f"ClipGradients cannot be used with {kind}: each process would clip by the norm of "
            "its own part of the gradients; leave the callback out and use max_grad_norm, or use "
            "FSDP2"
        )
        raise ValueError(msg)
    # where the norm is not finite, the Trainer multiplies all by NaN
    if getattr(rule, "nonfinite", None) == "zero":
        msg = (
            'with nonfinite="zero" the Trainer leaves NaN only of gradients that are not finite: '
            'use nonfinite="skip"'
        )
        raise ValueError(msg)


def _take_max_grad_norm(args: Any) -> Any:
    """Set ``max_grad_norm`` to 0 and return it; warn that it is not used if the user has set it."""
    default = next(
        field.default for field in dataclasses.fields(args) if field.name == "max_grad_norm"
    )
    if args.max_grad_norm and args.max_grad_norm != default:
        msg = (
            f"max_grad_norm={args.max_grad_norm} is not used, since uniclip clips: leave it out, "
            "or set it to 0"
        )
        warn(msg)
    given, args.max_grad_norm = args.max_grad_norm, 0.0
    return given
