# SPDX-License-Identifier: MIT
"""An optimizer that wraps another one."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import optree

from uniclip._errors import counted, summarize
from uniclip.compose import AnyRule
from uniclip.config import from_config as rule_from_config
from uniclip.config import to_config
from uniclip.integrations import rule_for_steps
from uniclip.integrations.keras.config import output_last, registered
from uniclip.integrations.keras.variables import (
    paths_of,
    replica_here,
    stand_in,
    summed,
    traced,
    value_of,
    when,
)
from uniclip.report import AVERAGED, LOGGED, NORM_MAX, Report
from uniclip.saved import from_dict, to_dict

_WINDOW = len(AVERAGED) + 2
"""How many numbers are of a window: sums, the number of its steps, and the largest norm."""
_INSTEAD = {
    "clipnorm": "uc.by_norm({0!r})",
    "global_clipnorm": "uc.by_global_norm({0!r})",
    "clipvalue": "uc.by_value(-{0!r}, {0!r})",
}
"""The rules that do the same as Keras' own options."""


@keras.saving.register_keras_serializable(package="uniclip")
class ClippedOptimizer(keras.optimizers.Optimizer):
    """Clip the gradients by a rule, then take the step of the wrapped optimizer.

    The rule acts once per step: on unscaled and, with ``gradient_accumulation_steps``, accumulated
    gradients, before weight decay and the moments. Its state is among the optimizer's variables,
    and so in the files that Keras saves.

    Parameters
    ----------
    inner : keras.optimizers.Optimizer
        The optimizer that takes the steps. The wrapper has its ``learning_rate`` and
        ``iterations``.
    rule : Rule or function of one gradient array
        It gets the gradients as a dict by ``variable.path``, so that the path of a leaf is, for
        example, ``("sequential/dense/kernel",)``.
    loss_scale_factor : float, optional
        As in Keras' optimizers. For dynamic loss scaling, wrap this in
        ``keras.optimizers.LossScaleOptimizer``.
    gradient_accumulation_steps : int, optional
        As in Keras' optimizers, at least 2: gradients of this many batches are averaged, then
        clipped, then applied.
    name : str, optional
        The name of the optimizer.

    Raises
    ------
    TypeError
        If ``inner`` is not an optimizer, or ``rule`` not a rule.
    ValueError
        If ``inner`` itself clips, scales the loss, or accumulates gradients; at a step of one of
        several replicas, if the rule may skip it, or gradients are accumulated.

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

    def __init__(
        self,
        inner: keras.optimizers.Optimizer,
        rule: AnyRule,
        *,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
    ) -> None:
        if isinstance(inner, ClippedOptimizer):
            clipped = f"inner is clipped already, by {summarize(inner.rule)}"
            msg = f"{clipped}: chain the rules, ClippedOptimizer(inner, uc.chain(a, b))"
            raise ValueError(msg)  # noqa: TRY004 - an optimizer it is
        _check_optimizer(inner)
        super().__init__(
            learning_rate=lambda: self.learning_rate,  # a number would become a variable itself
            loss_scale_factor=loss_scale_factor,
            gradient_accumulation_steps=gradient_accumulation_steps,
            name=name,
        )
        self.inner = inner
        self.rule: Any = rule_for_steps(rule)
        self._acting = output_last(self.rule)
        self._logged: Sequence[str] = ()

    def __repr__(self) -> str:
        """Return the rule, the wrapped optimizer and, where it can be read, the number of steps."""
        clips = f"<ClippedOptimizer: {self.rule!r}, {type(self.inner).__name__}"
        if not self.built:
            return f"{clips}, not built>"
        steps: Any = value_of(self.iterations)
        seen = (
            "" if traced(steps) else f", {counted(int(keras.ops.convert_to_numpy(steps)), 'step')}"
        )
        return f"{clips} of {counted(len(self._paths), 'variable')}{seen}>"

    def build(self, variables: Any) -> None:
        """Create the variables: those of the rule, and those of the wrapped optimizer."""
        if self.built:
            return
        variables = list(variables)
        self.inner.build(variables)
        # Again: a MultiOptimizer may only now have chosen those inside.
        _check_optimizer(self.inner)
        self._paths = paths_of(variables)
        self._stand_ins = OrderedDict(zip(self._paths, map(stand_in, variables), strict=True))
        first, self._spec = optree.tree_flatten(self.rule.init(self._stand_ins))
        self._state = [
            self._remember(np.asarray(array), f"rule_{number}")
            for number, array in enumerate(first)
        ]
        self._logs = self._remember(np.zeros(len(LOGGED) + _WINDOW, np.float32), "clip_logs")
        super().build(variables)

    def _remember(self, array: Any, name: str) -> Any:
        """Return a new variable with the value of a NumPy array."""
        return self.add_variable(array.shape, lambda *_, **__: array, str(array.dtype), name=name)

    @property
    def variables(self) -> list[Any]:
        """The variables of the wrapper, then those of the wrapped optimizer."""
        return [*super().variables, *self.inner.variables]

    def set_weights(self, weights: Any) -> None:
        """Set all variables, including those of the wrapped optimizer."""
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def load_own_variables(self, store: Any) -> None:
        """Load the variables; refuse a file of the time before 0.2, which has others."""
        if "uniclip" in store.keys():  # noqa: SIM118 - a store is no dict
            msg = (
                "the file has the variables of another version of uniclip: load the model without "
                "its optimizer, keras.saving.load_model(path, compile=False), compile it again, "
                "and let the rule start over"
            )
            raise ValueError(msg)
        super().load_own_variables(store)

    def rule_state_dict(self) -> dict[str, Any]:
        """Return the rule's memory as plain numbers and lists,
        in the format of `uniclip.Clipper.state_dict`.

        Without moments and other variables. Empty before ``build``, and for a rule without memory.
        """
        if not (self.rule.stateful and self.built):
            return {}
        arrays = [keras.ops.convert_to_numpy(value_of(variable)) for variable in self._state]
        return to_dict(self.rule, optree.tree_unflatten(self._spec, arrays), self._stand_ins)

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
            Before ``build``; if it belongs to another rule or other variables.
        """
        if not self.built:
            msg = "the optimizer has no variables yet: call build(model.trainable_variables) first"
            raise ValueError(msg)
        state = from_dict(self.rule, saved, self._stand_ins)
        for variable, array in zip(self._state, optree.tree_leaves(state), strict=True):
            variable.assign(array)

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the wrapped optimizer.

        NaN for one without, such as ``MultiOptimizer``.
        """
        return getattr(self.inner, "learning_rate", math.nan)

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        """The number of steps that the wrapped optimizer has taken."""
        return self.inner.iterations

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Exclude variables from the weight decay of the wrapped optimizer;
        see Keras' optimizers.
        """
        self.inner.exclude_from_weight_decay(var_list, var_names)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Do as the wrapped optimizer: with ``use_ema``, set the averages as the final values."""
        self.inner.finalize_variable_values(var_list)

    def _backend_update_step(
        self,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
        learning_rate: Any,
    ) -> None:
        """Clip, and let the wrapped optimizer take the step:
        Keras gives gradients that are unscaled and averaged.
        """
        replica = replica_here()
        if replica is not None and self.gradient_accumulation_steps:
            self._check_replicas("gradients are accumulated")
        clipped, report = self._clip(
            grads if replica is None else summed(replica, grads), trainable_variables
        )
        if replica is not None and report.skipped is not None:
            self._check_replicas(f"{summarize(self.rule)} may skip a step")
        if replica is not None:
            # The wrapped optimizer sums them again.
            clipped = [grad / replica.num_replicas_in_sync for grad in clipped]
        if report.skipped is None:
            self.inner.apply(clipped, trainable_variables)
        else:
            held = [*self._trainable_variables, *self.variables]
            taken = keras.ops.logical_not(report.skipped)
            when(taken, lambda: self.inner.apply(clipped, trainable_variables), held)

    def _clip(self, grads: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], Report]:
        """Run the rule, and store its state and its report in the variables."""
        places = [self._paths[self._get_variable_index(v)] for v in variables]
        tree = OrderedDict.fromkeys(self._paths)
        tree.update(zip(places, grads, strict=True))
        params = OrderedDict(
            zip(self._paths, map(value_of, self._trainable_variables), strict=True)
        )
        # Copies: on PyTorch a variable is written in place, and the new state may contain arrays of
        # the old.
        state = optree.tree_unflatten(
            self._spec, [keras.ops.copy(value_of(variable)) for variable in self._state]
        )
        clipped, state, report = self._acting.update(tree, state, params)
        for variable, array in zip(self._state, optree.tree_leaves(state), strict=True):
            variable.assign(array)
        self._note(report)
        return [clipped[place] for place in places], report

    def _check_replicas(self, what: str) -> None:
        msg = (
            f"{what}, which several replicas cannot do together: use a rule that skips none, in "
            "each batch, or clip in a loop of your own by uc.clip"
        )
        raise ValueError(msg)

    def _note(self, report: Report) -> None:
        """Store the scalars of a report in a variable,
        since nothing else outlives a compiled step.
        """
        scalars = report.scalars()
        self._logged = tuple(name for name in LOGGED if name in scalars)
        if scalars:
            values = [keras.ops.cast(scalars.get(name, 0.0), "float32") for name in LOGGED]
            *sums, count, largest = keras.ops.unstack(value_of(self._logs), len(LOGGED) + _WINDOW)[
                len(LOGGED) :
            ]
            finite = keras.ops.where(keras.ops.isfinite(values[0]), values[0], 0.0)
            sums = [
                total + value for total, value in zip(sums, values[-len(AVERAGED) :], strict=True)
            ]
            largest = keras.ops.maximum(largest, finite)
            self._logs.assign(keras.ops.stack([*values, *sums, count + 1, largest]))

    def scalars(self) -> dict[str, Any]:
        """Return the scalars of the last step, as `uniclip.Report.scalars` names them.

        Returns
        -------
        dict of str to 0-d array
            Empty before the first step in this process, and for a rule that measures no norm. On
            JAX, ``fit`` sets the variables of an optimizer only at the end of an epoch.
        """
        values = value_of(self._logs) if self._logged else ()
        return {name: values[LOGGED.index(name)] for name in self._logged}

    def logs(self) -> dict[str, float]:
        """Return the scalars since the last call as floats, as `uniclip.Clipper.logs` does;
        empty without a step.
        """
        window = self.window()
        return self.named(window) if window[-2] else {}

    def window(self) -> np.ndarray[Any, Any]:
        """Return what the steps since the last call have left, and begin anew.

        Returns
        -------
        (10,) array of float32
            The scalars of the last step, the sums of those that are averaged, the number of steps,
            the largest norm.
        """
        if not self.built:
            return np.zeros(len(LOGGED) + _WINDOW, np.float32)
        found = np.array(keras.ops.convert_to_numpy(value_of(self._logs)))
        self._logs.assign(np.concatenate([found[:-_WINDOW], np.zeros(_WINDOW, np.float32)]))
        return found

    def named(self, window: np.ndarray[Any, Any]) -> dict[str, float]:
        """Return the scalars of a window by their names.

        Means and the largest norm are NaN if it has no step.
        """
        *sums, count, largest = map(float, window[-_WINDOW:])
        values = dict(zip(LOGGED, map(float, window), strict=False))
        values |= {
            name: total / count if count else math.nan
            for name, total in zip(AVERAGED, sums, strict=True)
        }
        found = {name: values[name] for name in self._logged}
        return found | ({NORM_MAX: largest if count else math.nan} if found else {})

    def batches(self) -> int:
        """Return how many batches there were: steps that were skipped, too,
        and parts of accumulated ones.
        """
        return int(keras.ops.convert_to_numpy(value_of(self._iterations)))

    def get_config(self) -> dict[str, Any]:
        """Return the wrapped optimizer, the rule and the options as plain data."""
        return {
            "name": self.name,
            "inner": keras.saving.serialize_keras_object(self.inner),
            "rule": to_config(self.rule, other=registered),
            "loss_scale_factor": self.loss_scale_factor,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> ClippedOptimizer:
        """Return the optimizer described by a config."""
        read = partial(keras.saving.deserialize_keras_object, custom_objects=custom_objects)
        return cls(
            **{
                **config,
                "inner": read(config["inner"]),
                "rule": rule_from_config(config["rule"], other=read),
            }
        )


def _check_optimizer(inner: Any, name: str = "inner") -> None:
    """Refuse objects that are not optimizers, and optimizers that do what the wrapper has to do."""
    if not isinstance(inner, keras.optimizers.Optimizer):
        msg = (
            "inner must be a keras.optimizers.Optimizer, such as keras.optimizers.Adam(), got "
            f"{summarize(inner)}"
        )
        raise TypeError(msg)
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        msg = (
            "inner is a LossScaleOptimizer, which unscales the gradients only after they are "
            "clipped: put it outside, LossScaleOptimizer(ClippedOptimizer(optimizer, rule))"
        )
        raise ValueError(msg)  # noqa: TRY004 - an optimizer it is
    for number, one in enumerate(getattr(inner, "optimizers", ())):  # those of a MultiOptimizer
        _check_optimizer(one, f"inner.optimizers[{number}], of some of the variables,")
    for option, preset in _INSTEAD.items():
        value = getattr(inner, option)
        if value is not None:
            instead = (
                f", and give {preset.format(value)} as the rule"
                if value > 0
                else ", which Keras takes for none"
            )
            msg = f"{name} clips by itself, {option}={value!r}: leave that out{instead}"
            raise ValueError(msg)
    for option in ("loss_scale_factor", "gradient_accumulation_steps"):
        value = getattr(inner, option)
        if value is not None:
            msg = (
                f"{name} has {option}={value!r}, and would act after the gradients are clipped: "
                "leave that out, and give it to the wrapper, ClippedOptimizer(inner, rule, "
                f"{option}={value!r})"
            )
            raise ValueError(msg)
