# SPDX-License-Identifier: MIT
"""What `uniclip.integrations.keras` does with the optimizer inside and with variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from uniclip.backends import DEFAULT, backend_of

_INSTEAD = {"clipnorm": "uc.by_norm", "global_clipnorm": "uc.by_global_norm", "clipvalue": "uc.by_value"}
"""The rules that do as Keras' own options."""


def refuse(inner: Any) -> None:
    """Refuse an optimizer that is none, or does itself what the wrapper has to do."""
    if not isinstance(inner, keras.optimizers.Optimizer):
        msg = f"inner must be a keras.optimizers.Optimizer, such as keras.optimizers.Adam(), got {inner!r}"
        raise TypeError(msg)
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        msg = (
            "inner is a LossScaleOptimizer, which unscales the gradients only after they are clipped: put it outside, "
            "LossScaleOptimizer(ClippedOptimizer(optimizer, rule))"
        )
        raise ValueError(msg)  # noqa: TRY004 - an optimizer it is
    for option, preset in _INSTEAD.items():
        value = getattr(inner, option)
        if value is not None:
            msg = f"inner clips by itself, {option}={value!r}: leave that out, and give {preset}({value!r}) as the rule"
            raise ValueError(msg)
    for option in ("loss_scale_factor", "gradient_accumulation_steps"):
        value = getattr(inner, option)
        if value is not None:
            msg = (
                f"inner has {option}={value!r}, and would act after the gradients are clipped: leave that out, and "
                f"give it to the wrapper, ClippedOptimizer(inner, rule, {option}={value!r})"
            )
            raise ValueError(msg)


def refuse_replicas(optimizer: Any) -> None:
    """Refuse several replicas of TensorFlow, each of which has gradients of its own."""
    strategy = getattr(optimizer, "_distribution_strategy", None)
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        msg = (
            "under tf.distribute with several replicas each would clip its own gradients: clip in your own train step, "
            "by uc.clip with all_reduce, or use the JAX backend, whose gradients are those of all devices"
        )
        raise ValueError(msg)


def refuse_missing(rule: Any, paths: Sequence[str], present: Sequence[str]) -> None:
    """Refuse gradients of other variables than a rule remembers: it knows them by their order."""
    missing = [path for path in paths if path not in present]
    if missing and rule.by_leaf:
        msg = (
            f"{rule!r} remembers each of the {len(paths)} variables that the optimizer was built with, but "
            f"{missing[0]!r} has no gradient: make it not trainable before you compile, with a new optimizer, or "
            "use a rule for all leaves together"
        )
        raise ValueError(msg)


def paths_of(variables: Sequence[Any]) -> tuple[str, ...]:
    """Return the path of each variable; one that occurs again gets a number."""
    names = [str(getattr(variable, "path", variable.name)) for variable in variables]
    seen = [names[:index].count(name) for index, name in enumerate(names)]
    return tuple(f"{name}#{count + 1}" if count else name for name, count in zip(names, seen, strict=True))


def value_of(variable: Any) -> Any:
    """Return the value of a variable of Keras or of TensorFlow, an array of the framework."""
    return keras.ops.convert_to_tensor(variable.value if isinstance(variable, keras.Variable) else variable)


def stand_in(variable: Any) -> Any:
    """Return a NumPy array of a variable's shape that takes no memory; norms are float32 or wider anyway."""
    wide = keras.backend.standardize_dtype(variable.dtype) == "float64"
    return np.broadcast_to(np.zeros((), np.float64 if wide else np.float32), tuple(variable.shape))


def when(flag: Any, function: Callable[[], None], held: list[Any]) -> None:
    """Call a function where the flag holds, in compiled code too; the variables it may change are ``held``."""
    number = keras.ops.cast(flag, "int32")  # a boolean is no array that has a backend
    if not (backend_of(number) or DEFAULT).traced(number):  # JAX would compile the conditional anew at each step
        if bool(flag):
            function()
    elif keras.backend.backend() == "jax":
        _when_traced_by_jax(flag, function, held)
    else:
        keras.ops.cond(flag, function, lambda: None)


def _when_traced_by_jax(flag: Any, function: Callable[[], None], held: list[Any]) -> None:
    """Do as `when` where a branch cannot assign: it returns the new values of all variables."""
    before = list(map(value_of, held))

    def after() -> list[Any]:
        with keras.StatelessScope(list(zip(held, before, strict=True))) as scope:
            function()
        return list(map(scope.get_current_value, held))

    for variable, value in zip(held, keras.ops.cond(flag, after, lambda: before), strict=True):
        variable.assign(value)
