# SPDX-License-Identifier: MIT
"""Checks of what can be clipped inside Keras' optimizers."""

from __future__ import annotations

from typing import Any

import keras

from uniclip._errors import short

_INSTEAD = {
    "clipnorm": "uc.by_norm({0!r})",
    "global_clipnorm": "uc.by_global_norm({0!r})",
    "clipvalue": "uc.by_value(-{0!r}, {0!r})",
}
"""The rules that do the same as Keras' own options."""


def refuse_optimizer(inner: Any, name: str = "inner") -> None:
    """Refuse objects that are not optimizers, and optimizers that do what the wrapper has to do."""
    if not isinstance(inner, keras.optimizers.Optimizer):
        msg = f"inner must be a keras.optimizers.Optimizer, such as keras.optimizers.Adam(), got {short(inner)}"
        raise TypeError(msg)
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        msg = (
            "inner is a LossScaleOptimizer, which unscales the gradients only after they are clipped: put it outside, "
            "LossScaleOptimizer(ClippedOptimizer(optimizer, rule))"
        )
        raise ValueError(msg)  # noqa: TRY004 - an optimizer it is
    for number, one in enumerate(getattr(inner, "optimizers", ())):  # those of a MultiOptimizer
        refuse_optimizer(one, f"inner.optimizers[{number}], of some of the variables,")
    for option, preset in _INSTEAD.items():
        value = getattr(inner, option)
        if value is not None:
            instead = f", and give {preset.format(value)} as the rule" if value > 0 else ", which Keras takes for none"
            msg = f"{name} clips by itself, {option}={value!r}: leave that out{instead}"
            raise ValueError(msg)
    for option in ("loss_scale_factor", "gradient_accumulation_steps"):
        value = getattr(inner, option)
        if value is not None:
            msg = (
                f"{name} has {option}={value!r}, and would act after the gradients are clipped: leave that out, and "
                f"give it to the wrapper, ClippedOptimizer(inner, rule, {option}={value!r})"
            )
            raise ValueError(msg)
