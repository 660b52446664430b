# SPDX-License-Identifier: MIT
"""Checks of what can be clipped inside Keras' optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from uniclip._repr import short
from uniclip.labels import Leaves, labelled, leaves_of, refuse_changed
from uniclip.tree import flatten

_INSTEAD = {
    "clipnorm": "uc.by_norm({0!r})",
    "global_clipnorm": "uc.by_global_norm({0!r})",
    "clipvalue": "uc.by_value(-{0!r}, {0!r})",
}
"""The rules that do the same as Keras' own options."""


def refuse_optimizer(inner: Any) -> None:
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
    for option, preset in _INSTEAD.items():
        value = getattr(inner, option)
        if value is not None:
            rule = preset.format(value)
            msg = f"inner clips by itself, {option}={value!r}: leave that out, and give {rule} as the rule"
            raise ValueError(msg)
    for option in ("loss_scale_factor", "gradient_accumulation_steps"):
        value = getattr(inner, option)
        if value is not None:
            msg = (
                f"inner has {option}={value!r}, and would act after the gradients are clipped: leave that out, and "
                f"give it to the wrapper, ClippedOptimizer(inner, rule, {option}={value!r})"
            )
            raise ValueError(msg)


def refuse_missing(rule: Any, paths: Sequence[str], present: Sequence[str]) -> None:
    """Refuse gradients of other variables than those in the state, whose rows are in their order."""
    there = set(present)
    missing = [path for path in paths if path not in there] if rule.by_leaf else []
    if missing:
        msg = (
            f"{short(rule)} remembers each of the {len(paths)} variables that the optimizer was built with, but "
            f"{missing[0]!r} has no gradient: make it not trainable before you compile, with a new optimizer, or "
            "use a rule for all leaves together"
        )
        raise ValueError(msg)


def refuse_groups(rule: Any, known: Leaves, grads: Any) -> None:
    """Refuse gradients of other groups than those in the state, whose rows are in their order."""
    if labelled(rule) and not rule.by_leaf:
        refuse_changed(rule, known, leaves_of(rule, flatten(grads)))
