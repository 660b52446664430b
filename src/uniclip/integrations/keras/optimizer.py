# SPDX-License-Identifier: MIT
"""An optimizer that clips the gradients, then calls the optimizer that it wraps."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import keras
import numpy as np
import numpy.typing as npt
import optree

from uniclip._errors import counted, summarize
from uniclip._types import Array, Tensor
from uniclip.compose import AnyRule
from uniclip.config import from_config as rule_from_config
from uniclip.config import to_config
from uniclip.integrations import rule_for_steps
from uniclip.integrations.keras.config import serialize_registered, with_output_axis_last
from uniclip.integrations.keras.variables import (
    current_replica,
    is_traced,
    paths_of,
    run_if,
    sum_over_replicas,
    value_of,
    zeros_like,
)
from uniclip.report import AVERAGED, LOGGED, NORM_MAX, Report, nan_where_unlimited
from uniclip.saved import from_dict, to_dict

Window: TypeAlias = npt.NDArray[np.float32]
"""The statistics of some steps: the scalars of the last step, the sums of those that are averaged,
the number of steps, and the largest norm.
"""
_ACCUMULATED = len(AVERAGED) + 2
"""The number of values at the end of a window that accumulate: sums, count and largest norm."""
_REPLACEMENTS = {
    "clipnorm": "uc.by_norm({0!r})",
    "global_clipnorm": "uc.by_global_norm({0!r})",
    "clipvalue": "uc.by_value(-{0!r}, {0!r})",
}
"""The rules that replace Keras' own options."""


@keras.saving.register_keras_serializable(package="uniclip")
class ClippedOptimizer(keras.optimizers.Optimizer):
    """Clip the gradients by a rule, then take the step of the wrapped optimizer.

    The rule clips once per step: unscaled and, with ``gradient_accumulation_steps``, accumulated
    gradients, before weight decay and the moments. Its state is among the optimizer's variables,
    and so in the files that Keras saves.

    Parameters
    ----------
    inner : keras.optimizers.Optimizer
        The optimizer that takes the steps. The wrapper has its ``learning_rate`` and
        ``iterations``.
    rule : Rule or function of one gradient array
        The rule gets the gradients as a dict by ``variable.path``, so that the path of a leaf is,
        for example, ``("sequential/dense/kernel",)``.
    loss_scale_factor : float, optional
        As in Keras' optimizers. For dynamic loss scaling, wrap this in
        ``keras.optimizers.LossScaleOptimizer``.
    gradient_accumulation_steps : int, optional
        As in Keras' optimizers, at least 2: the gradients of this many batches are averaged, then
        clipped, then applied.
    name : str, optional
        The name of the optimizer.

    Raises
    ------
    TypeError
        If ``inner`` is not an optimizer, or ``rule`` not a rule.
    ValueError
        If ``inner`` itself clips, scales the loss, or accumulates gradients; at a step with several
        replicas, if the rule may skip the step, or gradients are accumulated.

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
            msg = (
                f"inner is clipped already, by {summarize(inner.rule)}; chain the rules: "
                "ClippedOptimizer(inner, uc.chain(a, b))"
            )
            raise ValueError(msg)  # noqa: TRY004 - an optimizer it is
        _check_optimizer(inner)

        super().__init__(
            # Keras would turn a number into another variable.
            learning_rate=lambda: self.learning_rate,
            loss_scale_factor=loss_scale_factor,
            gradient_accumulation_steps=gradient_accumulation_steps,
            name=name,
        )
        self.inner = inner
        self.rule: Any = rule_for_steps(rule)
        self._keras_rule = with_output_axis_last(self.rule)
        self._scalar_names: Sequence[str] = ()

    def __repr__(self) -> str:
        """Return the rule, the wrapped optimizer and, if it is readable, the number of steps."""
        optimizer = f"{self.rule!r}, {type(self.inner).__name__}"
        if not self.built:
            return f"<ClippedOptimizer: {optimizer}, not built>"

        variables = counted(len(self._paths), "variable")
        # While a step is compiled, the number of steps has no value.
        iterations: Any = value_of(self.iterations)
        if is_traced(iterations):
            return f"<ClippedOptimizer: {optimizer} of {variables}>"
        steps = counted(int(keras.ops.convert_to_numpy(iterations)), "step")
        return f"<ClippedOptimizer: {optimizer} of {variables}, {steps}>"

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create the variables: those of the rule, and those of the wrapped optimizer."""
        if self.built:
            return
        variables = list(variables)
        self.inner.build(variables)
        # A MultiOptimizer may choose its inner optimizers only when it is built.
        _check_optimizer(self.inner)

        self._paths = paths_of(variables)
        self._zeros = OrderedDict(zip(self._paths, map(zeros_like, variables), strict=True))
        first, self._state_structure = optree.tree_flatten(self.rule.init(self._zeros))
        self._state = [
            self._add_variable_for(np.asarray(array), f"rule_{number}")
            for number, array in enumerate(first)
        ]
        empty_window = np.zeros(len(LOGGED) + _ACCUMULATED, np.float32)
        self._logs = self._add_variable_for(empty_window, "clip_logs")
        super().build(variables)

    def _add_variable_for(self, array: np.ndarray[Any, Any], name: str) -> keras.Variable:
        """Add a variable with the value of a NumPy array."""
        return self.add_variable(array.shape, lambda *_, **__: array, str(array.dtype), name=name)

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the wrapper, then those of the wrapped optimizer."""
        return [*super().variables, *self.inner.variables]

    def set_weights(self, weights: Sequence[Array]) -> None:
        """Set all variables, including those of the wrapped optimizer."""
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def load_own_variables(self, store: Mapping[str, Array]) -> None:
        """Load the variables; raise for a file of a version before 0.2, which has others."""
        if "uniclip" in store.keys():  # noqa: SIM118 - a store is no dict
            msg = (
                "the file has the variables of another version of uniclip; load the model without "
                "its optimizer, keras.saving.load_model(path, compile=False), and compile it "
                "again, so that the rule starts with empty state"
            )
            raise ValueError(msg)
        super().load_own_variables(store)

    def rule_state_dict(self) -> dict[str, Any]:
        """Return the rule's state as plain numbers, in the format of `uniclip.Clipper.state_dict`.

        Without moments and other variables. Empty before ``build``, and for a rule without state.
        """
        if not (self.rule.stateful and self.built):
            return {}
        arrays = [keras.ops.convert_to_numpy(value_of(variable)) for variable in self._state]
        state = optree.tree_unflatten(self._state_structure, arrays)
        return to_dict(self.rule, state, self._zeros)

    def load_rule_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a rule's state that was saved by any integration, in any framework.

        Parameters
        ----------
        saved : dict
            The saved state; an empty dict starts with empty state.

        Raises
        ------
        TypeError
            If ``saved`` is not a dict.
        ValueError
            Before ``build``; if ``saved`` belongs to another rule or other variables.
        """
        if not self.built:
            msg = "the optimizer has no variables yet; call build(model.trainable_variables) first"
            raise ValueError(msg)
        state = from_dict(self.rule, saved, self._zeros)
        for variable, array in zip(self._state, optree.tree_leaves(state), strict=True):
            variable.assign(array)

    @property
    def learning_rate(self) -> keras.Variable | float:
        """The learning rate of the wrapped optimizer.

        NaN for an optimizer without one, such as ``MultiOptimizer``.
        """
        return getattr(self.inner, "learning_rate", math.nan)

    @learning_rate.setter
    def learning_rate(
        self, learning_rate: float | keras.optimizers.schedules.LearningRateSchedule
    ) -> None:
        self.inner.learning_rate = learning_rate

    @property
    def iterations(self) -> keras.Variable:
        """The number of steps that the wrapped optimizer has taken."""
        return self.inner.iterations

    def exclude_from_weight_decay(
        self,
        var_list: Sequence[keras.Variable] | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Exclude variables from the weight decay of the wrapped optimizer.

        See Keras' optimizers.
        """
        self.inner.exclude_from_weight_decay(var_list, var_names)

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Finalize variables as the wrapped optimizer does: with ``use_ema``, set the averages."""
        self.inner.finalize_variable_values(var_list)

    def _backend_update_step(
        self,
        grads: Sequence[Tensor],
        trainable_variables: Sequence[keras.Variable],
        learning_rate: keras.Variable | float,
    ) -> None:
        """Clip gradients, which Keras has unscaled and averaged; then take the wrapped step."""
        replica = current_replica()
        if replica is not None:
            if self.gradient_accumulation_steps:
                _raise_for_replicas("gradients are accumulated")
            grads = sum_over_replicas(replica, grads)

        clipped, report = self._clip(grads, trainable_variables)

        if replica is not None:
            if report.skipped is not None:
                _raise_for_replicas(f"{summarize(self.rule)} may skip a step")
            # The wrapped optimizer sums the gradients of all replicas again.
            clipped = [grad / replica.num_replicas_in_sync for grad in clipped]

        if report.skipped is None:
            self.inner.apply(clipped, trainable_variables)
            return
        run_if(
            keras.ops.logical_not(report.skipped),
            lambda: self.inner.apply(clipped, trainable_variables),
            [*self._trainable_variables, *self.variables],
        )

    def _clip(
        self, grads: Sequence[Tensor], variables: Sequence[keras.Variable]
    ) -> tuple[list[Tensor], Report]:
        """Run the rule, and store its state and its scalars in the variables."""
        paths = [self._paths[self._get_variable_index(variable)] for variable in variables]
        # A variable that gets no gradient in this step keeps its state.
        tree: OrderedDict[str, Any] = OrderedDict.fromkeys(self._paths)
        tree.update(zip(paths, grads, strict=True))
        values = map(value_of, self._trainable_variables)
        params = OrderedDict(zip(self._paths, values, strict=True))

        # On PyTorch, assigning to a variable changes its array, which the new state may contain.
        old_arrays = [keras.ops.copy(value_of(variable)) for variable in self._state]
        old_state = optree.tree_unflatten(self._state_structure, old_arrays)
        clipped, state, report = self._keras_rule.update(tree, old_state, params)

        for variable, array in zip(self._state, optree.tree_leaves(state), strict=True):
            variable.assign(array)
        self._store_scalars(report)
        return [clipped[path] for path in paths], report

    def _store_scalars(self, report: Report) -> None:
        """Store the scalars of a report in a variable: nothing else outlives a compiled step."""
        scalars = report.scalars()
        # Python code runs only while a step is traced, so this stores names and no values.
        self._scalar_names = tuple(name for name in LOGGED if name in scalars)
        if not scalars:
            return

        last = [keras.ops.cast(scalars.get(name, 0.0), "float32") for name in LOGGED]
        norm = last[0]
        # One non-finite norm would hide all others until the next reset.
        finite_norm = keras.ops.where(keras.ops.isfinite(norm), norm, 0.0)

        window = keras.ops.unstack(value_of(self._logs), len(LOGGED) + _ACCUMULATED)
        *sums, count, largest = window[len(LOGGED) :]
        averaged = last[-len(AVERAGED) :]
        sums = [total + scalar for total, scalar in zip(sums, averaged, strict=True)]
        largest = keras.ops.maximum(largest, finite_norm)
        self._logs.assign(keras.ops.stack([*last, *sums, count + 1, largest]))

    def scalars(self) -> dict[str, Tensor]:
        """Return the scalars of the last step, with the names of `uniclip.Report.scalars`.

        Returns
        -------
        dict of str to 0-d array
            Empty before the first step in this process, and for a rule that measures no norm. On
            JAX, ``fit`` sets the variables of an optimizer only at the end of an epoch.
        """
        if not self._scalar_names:
            return {}
        window = value_of(self._logs)
        return {name: window[LOGGED.index(name)] for name in self._scalar_names}

    def logs(self) -> dict[str, float]:
        """Return the scalars since the last call as floats, as `uniclip.Clipper.logs` does.

        Empty if there was no step.
        """
        window = self.window()
        count = window[-2]
        return self.named(window) if count else {}

    def window(self) -> Window:
        """Return and reset the statistics accumulated since the last call.

        Returns
        -------
        (10,) array of float32
            The scalars of the last step, the sums of those that are averaged, the number of steps,
            the largest norm.
        """
        if not self.built:
            return np.zeros(len(LOGGED) + _ACCUMULATED, np.float32)
        # The conversion may give a view of the variable, which the assignment below changes.
        window = np.array(keras.ops.convert_to_numpy(value_of(self._logs)))

        reset = window.copy()
        reset[-_ACCUMULATED:] = 0
        self._logs.assign(reset)
        return window

    def named(self, window: Window) -> dict[str, float]:
        """Return the scalars of a window by name.

        Means and the largest norm are NaN if it has no step, and so is a limit that does not exist.
        """
        *sums, count, largest = map(float, window[-_ACCUMULATED:])
        # A window begins with the scalars of the last step.
        values = dict(zip(LOGGED, map(float, window), strict=False))
        for name, total in zip(AVERAGED, sums, strict=True):
            values[name] = total / count if count else math.nan

        scalars = {name: values[name] for name in self._scalar_names}
        if scalars:
            scalars[NORM_MAX] = largest if count else math.nan
        return nan_where_unlimited(scalars)

    def batches(self) -> int:
        """Return the number of batches, including skipped and accumulated ones."""
        return int(keras.ops.convert_to_numpy(value_of(self._iterations)))

    def get_config(self) -> dict[str, Any]:
        """Return the wrapped optimizer, the rule and the options as plain data."""
        return {
            "name": self.name,
            "inner": keras.saving.serialize_keras_object(self.inner),
            "rule": to_config(self.rule, other=serialize_registered),
            "loss_scale_factor": self.loss_scale_factor,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, object] | None = None
    ) -> ClippedOptimizer:
        """Return the optimizer described by a config."""
        deserialize = partial(keras.saving.deserialize_keras_object, custom_objects=custom_objects)
        options = dict(config)
        options["inner"] = deserialize(config["inner"])
        options["rule"] = rule_from_config(config["rule"], other=deserialize)
        return cls(**options)


def _raise_for_replicas(reason: str) -> None:
    """Raise an error about a step that several replicas cannot take together."""
    msg = (
        f"{reason}, which isn't supported with several replicas; use a rule that skips no step and "
        "clip each batch, or clip with uc.clip in a custom training loop"
    )
    raise ValueError(msg)


def _check_optimizer(inner: object, name: str = "inner") -> None:
    """Raise unless an object is an optimizer that neither clips, scales nor accumulates."""
    if not isinstance(inner, keras.optimizers.Optimizer):
        msg = (
            "inner must be a keras.optimizers.Optimizer, such as keras.optimizers.Adam(), got "
            f"{summarize(inner)}"
        )
        raise TypeError(msg)
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        msg = (
            "inner is a LossScaleOptimizer, which would unscale the gradients only after they are "
            "clipped; put it outside: LossScaleOptimizer(ClippedOptimizer(optimizer, rule))"
        )
        raise ValueError(msg)  # noqa: TRY004 - an optimizer it is

    # A MultiOptimizer has an optimizer for each group of variables.
    for number, optimizer in enumerate(getattr(inner, "optimizers", ())):
        _check_optimizer(optimizer, f"inner.optimizers[{number}], of some of the variables,")

    _check_options(inner, name)


def _check_options(optimizer: keras.optimizers.Optimizer, name: str) -> None:
    """Raise if an option of an optimizer does what the wrapper has to do."""
    for option, replacement in _REPLACEMENTS.items():
        limit = getattr(optimizer, option)
        if limit is None:
            continue
        remedy = f"remove it, and pass {replacement.format(limit)} as the rule"
        # Keras ignores a limit of 0.
        if not limit > 0:
            remedy = "remove it, since Keras ignores it"
        msg = f"{name} clips the gradients itself, with {option}={limit!r}; {remedy}"
        raise ValueError(msg)

    for option in ("loss_scale_factor", "gradient_accumulation_steps"):
        setting = getattr(optimizer, option)
        if setting is not None:
            msg = (
                f"{name} has {option}={setting!r}, which would take effect after the gradients are "
                "clipped; remove it, and pass it to the wrapper: ClippedOptimizer(inner, rule, "
                f"{option}={setting!r})"
            )
            raise ValueError(msg)
