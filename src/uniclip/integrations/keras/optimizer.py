# SPDX-License-Identifier: MIT
"""An optimizer that wraps another one."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import optree

from uniclip._checks import check
from uniclip._repr import counted, short
from uniclip.backends import DEFAULT, backend_of
from uniclip.integrations import refuse_record, rule_for_steps
from uniclip.integrations.keras.checks import refuse_groups, refuse_missing, refuse_optimizer
from uniclip.integrations.keras.config import output_last, rule_from_config, rule_to_config
from uniclip.integrations.keras.replicas import (
    addable,
    addends,
    apply,
    is_first,
    refuse_strategies,
    summed,
    when_in_all,
    writes,
)
from uniclip.integrations.keras.saving import ANEW, SAVED, known_of, renumbered, to_bytes
from uniclip.integrations.keras.tape import Tape
from uniclip.integrations.keras.variables import paths_of, stand_in, traced, value_of
from uniclip.labels import Leaves, labels_of, leaves_of
from uniclip.report import AVERAGED, LOGGED, NORM_MAX, Report
from uniclip.rules import AnyRule, seen
from uniclip.saved import from_saved, names_of, of_others, restored, to_saved
from uniclip.tree import flatten

if TYPE_CHECKING:
    from uniclip.insight import Recorder

_BEGIN = "start over with load_rule_state_dict({})"


@keras.saving.register_keras_serializable(package="uniclip")
class ClippedOptimizer(keras.optimizers.Optimizer):
    """Clip the gradients by a rule, then take the step of the wrapped optimizer.

    The rule acts once per step: on unscaled and, with ``gradient_accumulation_steps``, accumulated gradients, before
    weight decay and the moments. Its state is among the optimizer's variables, and so in the files that Keras saves.

    Parameters
    ----------
    inner : keras.optimizers.Optimizer
        The optimizer that takes the steps. The wrapper has its ``learning_rate`` and ``iterations``.
    rule : Rule or function of one gradient array
        It gets the gradients as a dict by ``variable.path``, so that the path of a leaf is, for example,
        ``("sequential/dense/kernel",)``.
    loss_scale_factor : float, optional
        As in Keras' optimizers. For dynamic loss scaling, wrap this in ``keras.optimizers.LossScaleOptimizer``.
    gradient_accumulation_steps : int, optional
        As in Keras' optimizers, at least 2: gradients of this many batches are averaged, then clipped, then applied.
    name : str, optional
        The name of the optimizer.
    record : uniclip.insight.Recorder, optional
        Records each step, without the loss, which Keras' optimizers do not know. The compiled steps of ``fit`` are kept
        in unsaved variables: pass ``callbacks=[LogClipping()]`` to ``fit``, which reads them once per window. In your
        own compiled loop call ``record.flush()`` at least every ``every`` steps (on JAX when the optimizer's variables
        are assigned). The record is written when the optimizer is saved, but is not part of its config: set
        ``optimizer.record = record`` on a loaded optimizer.

    Raises
    ------
    TypeError
        If ``inner`` is not an optimizer, ``rule`` not a rule, or ``record`` not a recorder.
    ValueError
        If ``inner`` itself clips, scales the loss, or accumulates gradients.

    Examples
    --------
    >>> import keras
    >>> from uniclip.integrations.keras import ClippedOptimizer
    >>> optimizer = ClippedOptimizer(keras.optimizers.SGD(1.0), uc.by_global_norm(1.0))
    >>> w = keras.Variable([0.0, 0.0])
    >>> optimizer.apply([keras.ops.convert_to_tensor([3.0, 4.0])], [w])
    >>> keras.ops.convert_to_numpy(w).round(2), float(optimizer.scalars()["clip/norm"])
    (array([-0.6, -0.8], dtype=float32), 5.0)
    """

    def __init__(  # noqa: PLR0913 - Keras' own, and the recorder
        self,
        inner: keras.optimizers.Optimizer,
        rule: AnyRule,
        *,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
        record: Recorder | None = None,
    ) -> None:
        if isinstance(inner, ClippedOptimizer):
            clipped = f"inner is clipped already, by {short(inner.rule)}"
            msg = f"{clipped}: chain the rules, ClippedOptimizer(inner, uc.chain(a, b))"
            raise ValueError(msg)  # noqa: TRY004 - an optimizer it is
        refuse_optimizer(inner)
        super().__init__(
            learning_rate=lambda: inner.learning_rate,  # a number would become a variable itself
            loss_scale_factor=loss_scale_factor,
            gradient_accumulation_steps=gradient_accumulation_steps,
            name=name,
        )
        self.inner = inner
        self.rule: Any = rule_for_steps(rule)
        self._acting = output_last(self.rule)
        self._logged: Sequence[str] = ()
        self._tape: Tape | None = None
        self._sync: Callable[[], Any] | None = None
        self._record: Recorder | None = None
        self.record = record

    def __repr__(self) -> str:
        """Return the rule, the wrapped optimizer and, where it can be read, the number of steps."""
        clips = f"<ClippedOptimizer: {self.rule!r}, {type(self.inner).__name__}"
        if not self.built:
            return f"{clips}, not built>"
        steps: Any = value_of(self.iterations)
        traced = (backend_of(steps) or DEFAULT).traced(steps)
        seen = "" if traced else f", {counted(int(keras.ops.convert_to_numpy(steps)), 'step')}"
        return f"{clips} of {counted(len(self._paths), 'variable')}{seen}>"

    def build(self, variables: Any) -> None:
        """Create the variables: those of the rule, and those of the wrapped optimizer."""
        if self.built:
            return
        refuse_strategies(self, self.inner)
        variables = list(variables)
        self.inner.build(variables)
        self._paths = paths_of(variables)
        tree = OrderedDict(zip(self._paths, map(stand_in, variables), strict=True))
        self._leaves = leaves_of(self.rule, flatten(tree))
        first, self._spec = optree.tree_flatten(self._acting.init(tree))
        self._state = [self._remember(np.asarray(array), f"rule_{number}") for number, array in enumerate(first)]
        self._last = self._remember(np.zeros(len(LOGGED), np.float32), "scalars")
        self._totals = self._remember(np.zeros(len(AVERAGED) + 2, np.float32), "totals")
        with addends(self):  # the accumulated gradients
            super().build(variables)
        self._begin_record()

    @property
    def record(self) -> Recorder | None:
        """The recorder of the steps, if any; set before the steps are compiled."""
        return self._record

    @record.setter
    def record(self, record: Recorder | None) -> None:
        refuse_record(record)
        self._record, self._tape = record, None
        if self.built:
            self._begin_record()
            self._go_on()

    def _begin_record(self) -> None:
        """Describe the rule and the variables to the recorder, and make variables for the steps of compiled code."""
        if self._record is not None:
            tree = OrderedDict(zip(self._paths, map(stand_in, self._trainable_variables), strict=True))
            self._record.describe(self.rule, flatten(tree))
            self._tape = Tape(self._record, len(self._paths), writes=writes(self))
            self._tape.sync = self._sync

    def _go_on(self) -> None:
        """Let the recorder continue after the steps that a loaded optimizer has taken."""
        steps = int(keras.ops.convert_to_numpy(value_of(self.iterations)))
        if self._record is not None and self._record.step is None and steps:
            self._record.resume(steps)

    @contextmanager
    def _not_recording(self) -> Iterator[None]:
        """Remove the variables of recorded steps."""
        tape, self._tape = self._tape, None
        try:
            yield
        finally:
            self._tape = tape

    def _remember(self, array: Any, name: str) -> Any:
        """Return a new variable with the value of a NumPy array."""
        return self.add_variable(array.shape, lambda *_, **__: array, str(array.dtype), name=name)

    @property
    def variables(self) -> list[Any]:
        """The variables of the wrapper, then those of the wrapped optimizer; on JAX, last, those of recorded steps."""
        if self._tape is None or keras.backend.backend() != "jax":  # only there must a step pass them on
            return self._saved
        return [*self._saved, *self._tape.variables]

    @property
    def _saved(self) -> list[Any]:
        """The variables that are saved."""
        return [*super().variables, *self.inner.variables]

    def set_weights(self, weights: Any) -> None:
        """Set all variables, including those of the wrapped optimizer."""
        weights = list(weights)
        if len(weights) == len(self.variables):
            weights = weights[: len(self._saved)]
        if self.rule.memory and self.built and len(weights) == len(self._saved):
            self._check({"rule": None, "leaves": None}, weights)
        for variable, weight in zip(self._saved, weights, strict=True):
            variable.assign(weight)

    def save_own_variables(self, store: Any) -> None:
        """Save the variables, together with the leaves of the rule's norms."""
        if self._record is not None:
            self._record.flush()
        with self._not_recording():
            super().save_own_variables(store)
        if self.rule.memory and self.built:
            store[SAVED] = to_bytes({name: self.rule_state_dict()[name] for name in ("format", "rule", "leaves")})

    def load_own_variables(self, store: Any) -> None:
        """Load the variables, unless the rule's state in the file belongs to other variables or another rule."""
        names = [name for name in store.keys() if name != SAVED]  # noqa: SIM118 - a store is no dict
        if self.rule.memory and self.built and len(names) == len(self._saved):
            self._check(known_of(store, self.rule), [store[name] for name in map(str, range(len(names)))])
        with self._not_recording():
            super().load_own_variables({name: store[name] for name in names})
        if self._tape is not None and self._record is not None:
            self._record.resume(int(keras.ops.convert_to_numpy(value_of(self.iterations))))

    def _check(self, known: dict[str, Any], weights: list[Any]) -> None:
        """Refuse a state of the rule that does not fit, before anything has changed."""
        numbers = {id(variable): number for number, variable in enumerate(self.variables)}
        names = names_of(optree.tree_unflatten(self._spec, self._state))
        arrays = [np.asarray(keras.ops.convert_to_numpy(weights[numbers[id(v)]])) for v in self._state]
        found, _ = self._restored({**known, "state": dict(zip(names, arrays, strict=True))}, ANEW)
        if found not in (None, self._leaves):  # Keras assigns variables in the order of the file
            raise ValueError(of_others(self.rule, labels_of(found), labels_of(self._leaves), ANEW))

    def _restored(self, saved: Any, anew: str) -> tuple[Leaves | None, Any]:
        """Return the leaves of a saved state, with their names here, and the state in NumPy arrays."""
        like = optree.tree_unflatten(self._spec, [np.zeros(v.shape, str(v.dtype)) for v in self._state])
        found = from_saved(saved, self.rule, anew)
        found = found._replace(leaves=renumbered(found.leaves, self._leaves))
        return found.leaves, restored(found, self.rule, self._leaves, like, anew)

    def rule_state_dict(self) -> dict[str, Any]:
        """Return the rule's memory as plain numbers and lists, in the format of `uniclip.Clipper.state_dict`.

        Without moments and other variables. Empty before ``build``, and for a rule without memory.
        """
        if not (self.rule.memory and self.built):
            return {}
        arrays = [keras.ops.convert_to_numpy(value_of(variable)) for variable in self._state]
        return to_saved(self.rule, self._leaves, optree.tree_unflatten(self._spec, arrays))

    def load_rule_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a rule's memory that was saved by any integration, in any framework.

        Parameters
        ----------
        saved : dict
            An empty dict starts over.

        Raises
        ------
        TypeError
            If ``saved`` is not a dict.
        ValueError
            Before ``build``; if it belongs to another rule or other variables, or holds anything but finite numbers.
        """
        check("saved", saved, isinstance(saved, dict), "what a state_dict() returned")
        if not self.built:
            msg = "the optimizer has no variables yet: call build(model.trainable_variables) first"
            raise ValueError(msg)
        tree = OrderedDict(zip(self._paths, map(stand_in, self._trainable_variables), strict=True))
        state = self._restored(saved, _BEGIN)[1] if saved else self._acting.init(tree)
        for variable, array in zip(self._state, optree.tree_leaves(state), strict=True):
            variable.assign(array)

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the wrapped optimizer."""
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        """The number of steps that the wrapped optimizer has taken."""
        return self.inner.iterations

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Exclude variables from the weight decay of the wrapped optimizer; see Keras' optimizers."""
        self.inner.exclude_from_weight_decay(var_list, var_names)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Do as the wrapped optimizer: with ``use_ema``, set the averages as the final values."""
        self.inner.finalize_variable_values(var_list)

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        """Clip unscaled gradients, and take a step: the part of Keras' ``apply`` that an optimizer implements."""
        if len(grads) != len(trainable_variables):
            msg = (
                f"grads must hold one gradient (or None) for each of the {len(trainable_variables)} variables, got "
                f"{len(grads)}"
            )
            raise ValueError(msg)
        act = self._accumulate if self.gradient_accumulation_steps else self._step
        act(list(grads), list(trainable_variables))

    def _accumulate(self, grads: list[Any], variables: list[Any]) -> None:
        """Accumulate the gradients; in the last of the micro-batches take a step with their mean."""
        steps = self.gradient_accumulation_steps
        sums = [self._accumulated_gradients[self._get_variable_index(v)] for v in variables]
        for total, grad in zip(sums, grads, strict=True):
            self.assign_add(total, addable(grad))

        def step() -> None:
            self._step([keras.ops.divide(value_of(total), steps) for total in sums], variables)
            for total in sums:
                total.assign(keras.ops.zeros_like(value_of(total)))

        self._when(keras.ops.equal((self._iterations + 1) % steps, 0), step)

    def _step(self, grads: list[Any], variables: list[Any]) -> None:
        """Clip the summed gradients of the replicas, and take the step unless the rule skips it."""
        clipped, report = self._clip(summed(grads), variables)

        def take(clipped: list[Any]) -> None:
            apply(self.inner, clipped, variables)

        if report.skipped is None:
            take(clipped)
        else:
            self._when(keras.ops.logical_not(report.skipped), take, clipped)

    def _clip(self, grads: list[Any], variables: list[Any]) -> tuple[list[Any], Report]:
        """Run the rule, and store its state and its report in the variables."""
        places = [self._paths[self._get_variable_index(v)] for v in variables]
        refuse_missing(self.rule, self._paths, places)
        tree = OrderedDict.fromkeys(self._paths)
        tree.update(zip(places, grads, strict=True))
        refuse_groups(self.rule, self._leaves, tree)
        params = OrderedDict(zip(self._paths, map(value_of, self._trainable_variables), strict=True))
        # Copies: on PyTorch a variable is written in place, and the new state may contain arrays of the old.
        state = optree.tree_unflatten(self._spec, [keras.ops.copy(value_of(variable)) for variable in self._state])
        leaves = None
        if self._record is not None and self._record.leaves:
            clipped, state, report, leaves = seen(self._acting, tree, state, params)
        else:
            clipped, state, report = self._acting.update(tree, state, params)
        for variable, array in zip(self._state, optree.tree_leaves(state), strict=True):
            variable.assign(array)
        self._note(report)
        if self._record is not None and self._tape is not None:
            there = set(places)
            self._write(report, leaves, [number for number, path in enumerate(self._paths) if path in there])
        return [clipped[place] for place in places], report

    def _note(self, report: Report) -> None:
        """Store the scalars of a report in variables, since nothing else outlives a compiled step."""
        scalars = report.scalars()
        self._logged = tuple(name for name in LOGGED if name in scalars)
        if scalars:
            values = [keras.ops.cast(scalars.get(name, 0.0), "float32") for name in LOGGED]
            self._last.assign(keras.ops.stack(values))
            *sums, count, largest = keras.ops.unstack(value_of(self._totals))
            finite = keras.ops.where(keras.ops.isfinite(values[0]), values[0], 0.0)
            sums = [total + value for total, value in zip(sums, values[-len(AVERAGED) :], strict=True)]
            self._totals.assign(keras.ops.stack([*sums, count + 1, keras.ops.maximum(largest, finite)]))

    def _write(self, report: Report, leaves: Any, places: Sequence[int]) -> None:
        """Record a step."""
        if self._tape is None or self._record is None:
            return
        if traced(value_of(self._iterations)):
            self._tape.write(report, leaves, places)
        elif is_first():
            self._record.take(report.parts(), leaves=[] if leaves is None else [leaves], places=places)

    def _when(self, flag: Any, function: Callable[..., None], *args: Any) -> None:
        when_in_all(flag, function, args, [*self._trainable_variables, *self.variables])

    def scalars(self) -> dict[str, Any]:
        """Return the scalars of the last step, as `uniclip.Report.scalars` names them.

        Returns
        -------
        dict of str to 0-d array
            Empty before the first step in this process, and for a rule that measures no norm. On JAX, ``fit`` sets the
            variables of an optimizer only at the end of an epoch.
        """
        values = value_of(self._last) if self._logged else ()
        return {name: values[LOGGED.index(name)] for name in self._logged}

    def begin_epoch(self) -> None:
        """Restart the averages of the shares, and the largest norm."""
        if self.built:
            self._totals.assign(np.zeros(self._totals.shape, np.float32))

    def begin_reading(self, sync: Callable[[], Any] | None) -> None:
        """Let a callback read the steps of compiled code; it gets a function that sets the variables."""
        self._sync = sync
        if self._tape is not None:
            self._tape.sync = sync
            self._go_on()

    def epoch_scalars(self) -> dict[str, float]:
        """Return the scalars of the last step as floats, with mean shares and the largest norm since `begin_epoch`.

        ``"clip/share"``, ``"clip/skipped"`` and ``"clip/norm_max"`` are NaN if no step was taken since then.
        """
        values = {name: float(value) for name, value in self.scalars().items()}
        if not values:
            return {}
        *sums, count, largest = map(float, keras.ops.convert_to_numpy(value_of(self._totals)))
        means = {name: total / count if count else math.nan for name, total in zip(AVERAGED, sums, strict=True)}
        over_epoch = {name: mean for name, mean in means.items() if name in values}
        return values | over_epoch | {NORM_MAX: largest if count else math.nan}

    def get_config(self) -> dict[str, Any]:
        """Return the wrapped optimizer, the rule and the options as plain data."""
        return {
            "name": self.name,
            "inner": keras.saving.serialize_keras_object(self.inner),
            "rule": rule_to_config(self.rule),
            "loss_scale_factor": self.loss_scale_factor,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> ClippedOptimizer:
        """Return the optimizer described by a config."""
        inner = keras.saving.deserialize_keras_object(config["inner"], custom_objects=custom_objects)
        return cls(**{**config, "inner": inner, "rule": rule_from_config(config["rule"], custom_objects)})
