# SPDX-License-Identifier: MIT
"""Clipping inside Lightning's Trainer: one callback."""

from __future__ import annotations

from uniclip._errors import needs
from uniclip.compose import AnyRule
from uniclip.integrations import check_record, rule_for_steps
from uniclip.report import AVERAGED, NORM, NORM_MAX

with needs("Lightning", "lightning"):
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from uniclip.integrations.torch import Attached, attach
from uniclip.integrations.torch.checks import names_in

if TYPE_CHECKING:
    from uniclip.insight import Recorder

_ENGINES = {"DeepSpeedStrategy"}
"""The strategies that shard gradients into plain tensors.

Pytorch_lightning has others with these names.
"""
_OF_MODULE = {"log", "log_dict"}
"""The methods of the module that Lightning sets on each callback when it fits.

The whole model hangs on them.
"""


class ClipGradients(Callback):
    """Clip the gradients of every optimizer by a rule, at the beginning of each of its steps.

    It clips accumulated, unscaled gradients, in automatic and in manual optimization. Each
    optimizer has its own norm and state.

    Parameters
    ----------
    rule : Rule, callable, or list of these
        A list has one for each optimizer, in the order of ``configure_optimizers``; ``None`` for no
        clipping.
    all_reduce : callable, optional
        How to reduce over processes that hold parts of the gradients as plain tensors; see
        `uniclip.integrations.torch.attach`. Distributed tensors, as with ModelParallelStrategy,
        need none.
    shared : callable, optional
        A function of a leaf's path and the leaf: true for copies held beside such parts.
    record : uniclip.insight.Recorder, optional
        Records each step of the one clipped optimizer, with its loss: the mean over accumulated
        batches, and none with a loss scale (``"16-mixed"``). A fit resumed from a checkpoint
        continues the file.

    Attributes
    ----------
    all_reduce, shared
        As given; used when a ``fit`` starts, so that ``configure_model`` can still set them, for
        example to a process group.
    handles : list of Attached
        The handle of `uniclip.integrations.torch.attach` for each clipped optimizer, from the start
        of the last ``fit`` on: ``handles[0].report`` is the report of the last step.

    Raises
    ------
    TypeError
        If ``rule`` is neither a rule nor a function of one gradient array.
    lightning.pytorch.utilities.exceptions.MisconfigurationException
        At the start of ``fit``: if the Trainer also has a ``gradient_clip_val``; if the length of a
        list differs from the number of optimizers; if the strategy hides parts of the gradients
        (DeepSpeed); if there is a ``record`` and several optimizers are clipped.
    ValueError
        At the start of ``fit``: if an optimizer already has a rule; if its parameters are parts
        that look whole (FSDPStrategy), and there is no ``all_reduce``.

    Notes
    -----
    The state of a rule with memory is in the checkpoint, as that of this callback. The optimizers
    stay clipped after ``fit``, so that ``trainer.save_checkpoint`` still finds it.

    Logged after each step are ``"clip/norm"``, ``"clip/limit"``, ``"clip/factor"`` and, for a rule
    that has one, ``"clip/threshold"``; once per epoch the means over its steps ``"clip/share"``
    and, for a rule that may skip a step, ``"clip/skipped"``, and the largest norm
    ``"clip/norm_max"``; see `uniclip.Report.scalars`. With several optimizers the names are
    ``"clip/norm/0"``, ``"clip/norm/1"`` and so on.

    Examples
    --------
    >>> from uniclip.integrations.lightning import ClipGradients
    >>> callbacks = [ClipGradients(uc.by_global_norm(1.0))]  # Trainer(callbacks=callbacks)
    """

    def __init__(
        self,
        rule: AnyRule | Sequence[AnyRule | None],
        all_reduce: Any = None,
        shared: Any = None,
        record: Recorder | None = None,
    ) -> None:
        given: Any = rule  # of the sequences only lists and tuples are taken
        several = isinstance(rule, (list, tuple))
        self._rules: Any = (
            [None if one is None else rule_for_steps(one) for one in given]
            if several
            else rule_for_steps(given)
        )
        check_record(record, all_reduce)
        self.all_reduce, self.shared, self.record = all_reduce, shared, record
        self.handles: list[Attached] = []
        self._numbers: list[int] = []
        """The numbers of their optimizers."""
        self._logged: dict[int, Any] = {}
        """The last report of each that was logged."""
        self._loaded: dict[str, Any] = {}

    def __repr__(self) -> str:
        """Return the rules, and their optimizers."""
        return (
            "<ClipGradients: "
            f"{self.handles or self._rules!r}{'' if self.handles else ', before fit'}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle: the rules, without hooks in optimizers."""
        kept = {name: value for name, value in vars(self).items() if name not in _OF_MODULE}
        return kept | {"handles": [], "_numbers": [], "_logged": {}, "_loaded": {}}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget what an evaluation has loaded."""
        self._loaded = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the optimizers, which exist by now but are not yet loaded."""
        self._refuse(trainer)
        while self.handles:
            self.handles.pop().remove()
        optimizers = trainer.optimizers
        rules = self._rules if isinstance(self._rules, list) else [self._rules] * len(optimizers)
        if len(rules) != len(optimizers):
            msg = (
                f"ClipGradients has {len(rules)} rules for {len(optimizers)} optimizers: give one "
                "for each, or None"
            )
            raise MisconfigurationException(msg)
        chosen = [number for number, rule in enumerate(rules) if rule is not None]
        if self.record is not None and len(chosen) > 1:
            msg = (
                f"record holds the steps of one optimizer, and {len(chosen)} are clipped: set None "
                "for the others"
            )
            raise MisconfigurationException(msg)
        for number in chosen:  # one by one, so that those before an error can be removed
            how, optimizer = (self.all_reduce, self.shared, self.record), optimizers[number]
            self.handles.append(
                attach(optimizer, rules[number], *how, names=names_in(pl_module, optimizer))
            )
        self._numbers, self._logged = chosen, {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Go on from the checkpoint, if there is one."""
        loaded, self._loaded = self._loaded, {}
        for number, handle in zip(self._numbers, self.handles, strict=True):
            if str(number) in loaded:
                handle.load_state_dict(loaded[str(number)])
        if self.record is not None:
            self.record.resume(trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Omit the numbers of steps that a loss scale skipped."""
        if self.record is not None:
            self.record.step = max(self.record.step or 0, trainer.global_step)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Add up the losses of a step's batches, which Lightning has divided by their number."""
        if self.record is not None and getattr(trainer.precision_plugin, "scaler", None) is None:
            before = self.record.loss
            self.record.loss = loss.detach().clone() if before is None else before + loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the rules by the numbers of their optimizers,
        as strategies omit them from theirs.
        """
        pairs = zip(self._numbers, self.handles, strict=True)
        return {
            str(number): handle.state_dict() for number, handle in pairs if handle.rule.stateful
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states of a checkpoint until there are optimizers, which are loaded later."""
        self._loaded = state_dict

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the reports of the steps that this batch took."""
        for number, handle in zip(self._numbers, self.handles, strict=True):
            report, name = handle.report, f"/{number}" if len(trainer.optimizers) > 1 else ""
            # Batches are accumulated.
            if report is None or report is self._logged.get(number) or trainer.barebones:
                continue
            self._logged[number] = report
            for key, value in report.scalars().items():
                mean = key in AVERAGED
                pl_module.log(
                    key + name, value, on_step=not mean, on_epoch=mean, sync_dist=mean, batch_size=1
                )
                if key == NORM:
                    over = {"on_step": False, "on_epoch": True, "reduce_fx": "max", "batch_size": 1}
                    pl_module.log(
                        NORM_MAX + name, value.where(value.isfinite(), 0.0), sync_dist=True, **over
                    )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the remaining lines of the record."""
        if self.record is not None:
            self.record.flush()

    def _refuse(self, trainer: Any) -> None:
        """Refuse a trainer that clips by itself, or a strategy that hides parts of
        the gradients.
        """
        if trainer.gradient_clip_val:
            msg = (
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) and ClipGradients would "
                "clip twice: leave gradient_clip_val out"
            )
            raise MisconfigurationException(msg)
        if not _ENGINES.isdisjoint(base.__name__ for base in type(trainer.strategy).__mro__):
            msg = (
                f"ClipGradients cannot be used with {type(trainer.strategy).__name__}: each "
                "process would clip by the norm of its own part of the gradients; use the "
                "strategy's own clipping, or ModelParallelStrategy"
            )
            raise MisconfigurationException(msg)
