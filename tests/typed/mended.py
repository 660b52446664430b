# SPDX-License-Identifier: MIT
"""The file `mistakes` with its mistakes corrected: a type checker finds none."""

from __future__ import annotations

from typing import Any

import numpy as np

import uniclip as uc
from uniclip.integrations.torch import attach


class Model:
    """The part of a model that the calls below use."""

    def parameters(self) -> list[Any]:
        """Return the parameters."""
        return []

    def forward(self, x: float) -> float:
        """Return the prediction for a number."""
        return x


class Optimizer:
    """The part of an optimizer that the calls below use."""

    def __init__(self, params: list[Any]) -> None:
        self.param_groups = [{"params": params}]

    def step(self) -> None:
        """Take a step."""


model = Model()
optimizer = Optimizer(model.parameters())
grads = {"w": np.asarray([3.0, 4.0]), "b": np.asarray([12.0])}

rule = uc.by_global_norm(1.0)
clipped, report = uc.clip(grads, rule)
handle = attach(optimizer, uc.zclip())
skipping = uc.by_norm(1.0, nonfinite="skip")
scalars = uc.clip(grads, uc.by_norm(1.0))[1].scalars()
norms = uc.clip_(grads, uc.by_norm(1.0)).norms
name = uc.clip_by_value(grads["w"], -1.0, 1.0).dtype.name
norm = uc.global_norm(grads)
