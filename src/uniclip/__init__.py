# SPDX-License-Identifier: MIT
"""Gradient clipping, once, for every array framework.

Every clipping rule is four choices. A gradient is multiplied by a factor:

    g ← g · curve(norm(g over scope), limit)

=========  =================================  ==============================
choice     question                           module
=========  =================================  ==============================
scope      which entries share one norm?      `uniclip.scopes`
norm       how is their size measured?        `uniclip.norms`
limit      how large may it be?               `uniclip.limits`
curve      what happens above it?             `uniclip.curves`
=========  =================================  ==============================

`uniclip.rules` puts them together, `uniclip.presets` names the published ones, `uniclip.core` runs them.
"""

from uniclip.core import clip, clip_
from uniclip.curves import hard
from uniclip.decide import Report
from uniclip.functional import clip_by_average_norm, clip_by_global_norm, clip_by_norm, clip_by_value, global_norm
from uniclip.limits import Constant, Limit
from uniclip.norms import AVERAGE, L1, L2, MEAN, RMS, Linf, Norm
from uniclip.presets import by_average_norm, by_block_rms, by_global_norm, by_norm, by_value
from uniclip.rules import ByValue, Rule
from uniclip.scopes import Scope, all_leaves, axes, each_entry, each_example, each_leaf, groups, unit

__all__ = [
    "AVERAGE",
    "L1",
    "L2",
    "MEAN",
    "RMS",
    "ByValue",
    "Constant",
    "Limit",
    "Linf",
    "Norm",
    "Report",
    "Rule",
    "Scope",
    "all_leaves",
    "axes",
    "by_average_norm",
    "by_block_rms",
    "by_global_norm",
    "by_norm",
    "by_value",
    "clip",
    "clip_",
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "each_entry",
    "each_example",
    "each_leaf",
    "global_norm",
    "groups",
    "hard",
    "unit",
]


def __getattr__(name: str) -> str:
    """Look the version up only when asked (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - takes a third of the time that uniclip takes to import

        return version("uniclip")
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
