# SPDX-License-Identifier: MIT
"""Clipping inside Lightning's Trainer, by one callback for all optimizers."""

from __future__ import annotations

from uniclip._errors import needs
from uniclip.clipper import NO_STEPS, Totals
from uniclip.compose import AnyRule
from uniclip.integrations import check_record, rule_for_steps
from uniclip.report import AVERAGED, NORM_MAX

with needs("Lightning", "lightning"):
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from uniclip.integrations.torch import Attached
from uniclip.integrations.torch.attaching import attach_unsaved
from uniclip.integrations.torch.checks import names_in

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer

    from uniclip._core.collectives import AllReduce, Shared
    from uniclip.insight import Recorder
    from uniclip.rule import BaseRule

_ENGINES = {"DeepSpeedStrategy"}
"""The strategies that shard gradients into regular tensors.

The package pytorch_lightning has other classes with these names.
"""
_OF_MANY_STEPS = {*AVERAGED, NORM_MAX}
"""The scalars over several steps: those of an epoch, and with ``"_step"`` since the last log."""
_MODULE_METHODS = {"log", "log_dict"}
"""The methods of the module that Lightning sets on each callback during a fit.

Their objects are bound to the whole model.
"""


class ClipGradients(Callback):
    """Clip the gradients of every optimizer by a rule, at the beginning of each of its steps.

    The callback clips accumulated, unscaled gradients, in automatic and in manual optimization.
    Each optimizer has its own norm and state.

    Parameters
    ----------
    rule : Rule, callable, or list of these
        A list has a rule for each optimizer, in the order of ``configure_optimizers``; ``None``
        stands for no clipping.
    all_reduce : callable, optional
        How to reduce over processes that hold shards of the gradients as regular tensors; see
        `uniclip.integrations.torch.attach`. Distributed tensors, as with ModelParallelStrategy,
        need none.
    shared : callable, optional
        A function of a leaf's path and the leaf: true for leaves that are replicated, while others
        are sharded.
    record : uniclip.insight.Recorder, optional
        Records each step of the only clipped optimizer, with its loss: the mean over accumulated
        batches. With a loss scale (``"16-mixed"``), it records no loss. A fit resumed from a
        checkpoint continues the file.
    resume : bool, default True
        ``False`` ignores the state of a rule in a checkpoint, so the rule starts with empty state.
        Use it for the first run with another rule than the one that wrote the checkpoint.

    Attributes
    ----------
    all_reduce, shared, resume
        The arguments. The callback uses them when a ``fit`` starts, so that ``configure_model`` can
        still set them, for example to a process group.
    handles : list of Attached
        The handle of `uniclip.integrations.torch.attach` for each clipped optimizer, since the
        start of the last ``fit``: ``handles[0].report`` is the report of the last step.

    Raises
    ------
    TypeError
        If ``rule`` is neither a rule nor a function of one gradient array.
    lightning.pytorch.utilities.exceptions.MisconfigurationException
        At the start of ``fit``: if the Trainer also has a ``gradient_clip_val``; if the length of a
        list differs from the number of optimizers; if the strategy hides shards of the gradients
        (DeepSpeed); if there is a ``record`` and several optimizers are clipped.
    ValueError
        At the start of ``fit``: if an optimizer already has a rule; if its parameters are shards
        that look whole (FSDPStrategy), and there is no ``all_reduce``.

    Notes
    -----
    The state of a stateful rule is in the checkpoint, as the state of this callback. The optimizers
    stay clipped after ``fit``, so that ``trainer.save_checkpoint`` still finds the state.

    When the Trainer logs, every ``log_every_n_steps`` steps, and at the end of an epoch, the
    callback logs ``"clip/norm"``, ``"clip/limit"``, ``"clip/factor"`` and, for a rule that has one,
    ``"clip/threshold"``, all of the last step; see `uniclip.Report.scalars`. A limit or threshold
    that does not exist is NaN. The means ``"clip/share"`` and, for a rule that may skip a step,
    ``"clip/skipped"``, and the largest norm ``"clip/norm_max"`` are those of the epoch;
    ``"clip/share_step"``, ``"clip/skipped_step"`` and ``"clip/norm_max_step"`` are those of all
    steps since the last log. With several optimizers the names are ``"clip/norm/0"``,
    ``"clip/norm/1"`` and so on.

    Between these logs the values stay on the gradients' device, those of 200 steps at most.

    Examples
    --------
    >>> from uniclip.integrations.lightning import ClipGradients
    >>> callbacks = [ClipGradients(uc.by_global_norm(1.0))]  # Trainer(callbacks=callbacks)
    """

    def __init__(
        self,
        rule: AnyRule | Sequence[AnyRule | None],
        all_reduce: AllReduce | None = None,
        shared: Shared | None = None,
        record: Recorder | None = None,
        *,
        resume: bool = True,
    ) -> None:
        self._rules = _to_rules(rule)
        check_record(record, all_reduce)
        self.all_reduce = all_reduce
        self.shared = shared
        self.record = record
        self.resume = resume
        self.handles: list[Attached] = []
        self._numbers: list[int] = []
        """The numbers of the clipped optimizers, in the order of the handles."""
        self._epoch: dict[int, Totals] = {}
        """The totals of the steps of this epoch that were read, by the optimizers' numbers."""
        self._loaded: dict[str, Any] = {}
        """The states in a checkpoint, until there are optimizers."""

    def __repr__(self) -> str:
        """Return the rules, and their optimizers."""
        if self.handles:
            return f"<ClipGradients: {self.handles!r}>"
        return f"<ClipGradients: {self._rules!r}, before fit>"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle: the rules, without hooks in optimizers."""
        state = {name: field for name, field in vars(self).items() if name not in _MODULE_METHODS}
        return state | {"handles": [], "_numbers": [], "_epoch": {}, "_loaded": {}}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the states that an evaluation has loaded."""
        self._loaded = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the optimizers, which exist by now but are not yet loaded."""
        _check_trainer(trainer)
        # An optimizer of an earlier fit may be used again, and would be clipped twice.
        while self.handles:
            self.handles.pop().remove()

        rules = self._rules_of(trainer.optimizers)
        # A handle is kept before the next attach, so that it can be removed after an error there.
        for number, rule in rules.items():
            optimizer = trainer.optimizers[number]
            names = names_in(pl_module, optimizer)
            handle = attach_unsaved(
                optimizer,
                rule,
                self.all_reduce,
                self.shared,
                self.record,
                names=names,
                resume=self.resume,
            )
            self.handles.append(handle)
        self._numbers = list(rules)

    def _rules_of(self, optimizers: list[torch.optim.Optimizer]) -> dict[int, BaseRule]:
        """Return the rules by the numbers of the optimizers that they clip."""
        rules = self._rules
        if not isinstance(rules, list):
            rules = [rules] * len(optimizers)
        if len(rules) != len(optimizers):
            msg = (
                f"ClipGradients has {len(rules)} rules for {len(optimizers)} optimizers; pass one "
                "rule for each, or None"
            )
            raise MisconfigurationException(msg)

        clipped = {number: rule for number, rule in enumerate(rules) if rule is not None}
        if self.record is not None and len(clipped) > 1:
            msg = (
                f"record= records the steps of one optimizer, but {len(clipped)} are clipped; pass "
                "None for the others"
            )
            raise MisconfigurationException(msg)
        return clipped

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the states from the checkpoint, if there is one."""
        loaded = self._loaded
        self._loaded = {}
        for number, handle in zip(self._numbers, self.handles, strict=True):
            if str(number) in loaded:
                handle.load_state_dict(loaded[str(number)])

        # The statistics for the logs start with this call.
        self._read(trainer)
        self._epoch = {}

        if self.record is not None:
            self.record.resume(trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Omit the numbers of steps that a loss scale skipped."""
        if self.record is not None:
            self.record.step = max(self.record.step or 0, trainer.global_step)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        """Add up the losses of a step's batches, which Lightning has divided by their number."""
        # A loss that is scaled is not the loss of the model.
        has_loss_scale = getattr(trainer.precision_plugin, "scaler", None) is not None
        if self.record is None or has_loss_scale:
            return

        earlier = self.record.loss
        if earlier is None:
            # The loss may be changed in place later.
            self.record.loss = loss.detach().clone()
        else:
            self.record.loss = earlier + loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the rules by the numbers of their optimizers.

        Strategies omit the states of rules from those of the optimizers.
        """
        states = {}
        for number, handle in zip(self._numbers, self.handles, strict=True):
            if handle.rule.stateful:
                states[str(number)] = handle.state_dict()
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states of a checkpoint until there are optimizers, which are loaded later."""
        self._loaded = state_dict

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log the steps since the last log, if the Trainer logs after this batch."""
        if not trainer._logger_connector.should_update_logs:  # noqa: SLF001 - as in Lightning's callbacks
            return
        # The Trainer doesn't log between the batches of one step.
        accumulates = trainer.fit_loop._should_accumulate()  # noqa: SLF001 - as in Lightning's callbacks
        if accumulates and pl_module.automatic_optimization:
            return
        _log(trainer, pl_module, self._read(trainer), of_epoch=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log all steps of the epoch."""
        self._read(trainer)
        _log(trainer, pl_module, self._epoch, of_epoch=True)
        self._epoch = {}

    def _read(self, trainer: Trainer) -> dict[int, Totals]:
        """Return the totals since the last call, and add them to those of the epoch."""
        totals: dict[int, Totals] = {}
        # A bare run can't log, so nothing is kept for it.
        if trainer.barebones:
            return totals
        for number, handle in zip(self._numbers, self.handles, strict=True):
            totals[number] = handle.totals()
            earlier = self._epoch.get(number, NO_STEPS)
            self._epoch[number] = earlier.followed_by(totals[number])
        return totals

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the remaining steps of the recorded run."""
        if self.record is not None:
            self.record.flush()


def _to_rules(
    rules: AnyRule | Sequence[AnyRule | None],
) -> BaseRule | list[BaseRule | None]:
    """Return a rule, or a list of rules and ``None``."""
    # Of the sequences only lists and tuples are taken, since a rule may be iterable.
    if isinstance(rules, (list, tuple)):
        return [None if rule is None else rule_for_steps(rule) for rule in rules]
    return rule_for_steps(cast("AnyRule", rules))


def _log(
    trainer: Trainer, pl_module: LightningModule, totals: dict[int, Totals], *, of_epoch: bool
) -> None:
    """Log the scalars of some steps of each optimizer."""
    for number, steps in totals.items():
        suffix = f"/{number}" if len(trainer.optimizers) > 1 else ""
        for key, scalar in steps.scalars().items():
            part = "" if of_epoch or key not in _OF_MANY_STEPS else "_step"
            pl_module.log(
                f"{key}{part}{suffix}",
                scalar,
                on_step=not of_epoch,
                on_epoch=of_epoch,
                reduce_fx="max" if key == NORM_MAX else "mean",
                sync_dist=of_epoch,
                # Without a batch size, Lightning infers one from the batch, and may warn.
                batch_size=1,
            )


def _check_trainer(trainer: Trainer) -> None:
    """Raise if a trainer clips, or its strategy hides shards of the gradients."""
    if trainer.gradient_clip_val:
        msg = (
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) and ClipGradients would clip "
            "twice; leave gradient_clip_val out"
        )
        raise MisconfigurationException(msg)

    bases = {base.__name__ for base in type(trainer.strategy).__mro__}
    if bases & _ENGINES:
        msg = (
            f"ClipGradients doesn't support {type(trainer.strategy).__name__}, because each "
            "process would clip by the norm of only its shard of the gradients; use the strategy's "
            "built-in clipping, or ModelParallelStrategy"
        )
        raise MisconfigurationException(msg)
