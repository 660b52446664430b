# SPDX-License-Identifier: MIT
"""Eight mistakes that a type checker finds, with or without a framework.

`mended` is the same file without them.

Each is on a line marked "mistake". The file is read by type checkers, and never run.
"""

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

rule = uc.by_global_norm("1.0")  # mistake: a text for a limit
clipped, report = uc.clip(grads, 1.0)  # mistake: a number for a rule
handle = attach(model, uc.zclip())  # mistake: a model for an optimizer
skipping = uc.by_norm(1.0, nonfinite="ignore")  # mistake: a wrong policy
scalars = uc.clip(grads, uc.by_norm(1.0)).scalars()  # mistake: a method of the report, on the pair
norms = uc.clip_(grads, uc.by_norm(1.0)).norm  # mistake: an unknown field
name = uc.clip_by_value(grads["w"], -1.0, 1.0).upper()  # mistake: a tensor taken for a text
norm = uc.globl_norm(grads)  # mistake: a misspelled name
