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

`uniclip.rules` puts them together, `uniclip.presets` names the published ones, `uniclip.verbs` and
`uniclip.step` run them.
`uniclip.clipper` remembers for rules that learn from earlier steps, and `uniclip.combine` makes rules of rules.
"""

from uniclip.arraywise import ByValue
from uniclip.clipper import Clipper
from uniclip.combine import Chain, Masked, chain, masked
from uniclip.curves import NonMonotonic, Regularized, hard, normalize, skip, smooth, soft, tanh
from uniclip.limits import (
    Constant,
    Context,
    Ema,
    Limit,
    LogZScore,
    MeanOverRms,
    Percentile,
    PercentileOfAll,
    PerGroup,
    Relative,
    RollingZScore,
    Schedule,
    SecondMoment,
    Split,
    TrackedQuantile,
    TrustRatio,
    ZScore,
)
from uniclip.norms import AVERAGE, L1, L2, MEAN, RMS, Linf, Norm
from uniclip.presets import (
    adagc,
    adagn,
    agc,
    auto_s,
    autoclip,
    by_average_norm,
    by_block_rms,
    by_example_layer_norm,
    by_example_norm,
    by_example_quantile,
    by_global_norm,
    by_group_norm,
    by_norm,
    by_value,
    cowclip,
    larc,
    log_zscore,
    norm_growth,
    normalized,
    percentile,
    psac,
    skip_spikes,
    spam,
    zclip,
)
from uniclip.report import Report
from uniclip.rules import Rule
from uniclip.scopes import Scope, all_leaves, axes, each_entry, each_example, each_leaf, each_row, groups, unit
from uniclip.verbs import (
    clip,
    clip_,
    clip_and_mean,
    clip_and_sum,
    clip_by_average_norm,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    global_norm,
)

__all__ = [
    "AVERAGE",
    "L1",
    "L2",
    "MEAN",
    "RMS",
    "ByValue",
    "Chain",
    "Clipper",
    "Constant",
    "Context",
    "Ema",
    "Limit",
    "Linf",
    "LogZScore",
    "Masked",
    "MeanOverRms",
    "NonMonotonic",
    "Norm",
    "PerGroup",
    "Percentile",
    "PercentileOfAll",
    "Regularized",
    "Relative",
    "Report",
    "RollingZScore",
    "Rule",
    "Schedule",
    "Scope",
    "SecondMoment",
    "Split",
    "TrackedQuantile",
    "TrustRatio",
    "ZScore",
    "adagc",
    "adagn",
    "agc",
    "all_leaves",
    "auto_s",
    "autoclip",
    "axes",
    "by_average_norm",
    "by_block_rms",
    "by_example_layer_norm",
    "by_example_norm",
    "by_example_quantile",
    "by_global_norm",
    "by_group_norm",
    "by_norm",
    "by_value",
    "chain",
    "clip",
    "clip_",
    "clip_and_mean",
    "clip_and_sum",
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "cowclip",
    "each_entry",
    "each_example",
    "each_leaf",
    "each_row",
    "global_norm",
    "groups",
    "hard",
    "larc",
    "log_zscore",
    "masked",
    "norm_growth",
    "normalize",
    "normalized",
    "percentile",
    "psac",
    "skip",
    "skip_spikes",
    "smooth",
    "soft",
    "spam",
    "tanh",
    "unit",
    "zclip",
]


def __getattr__(name: str) -> str:
    """Look the version up only when asked (PEP 562)."""
    if name == "__version__":
        return _version()
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def _version() -> str:
    """Return the installed version; a copy among the files of another package has none."""
    from importlib.metadata import version  # noqa: PLC0415 - takes a third of the time that uniclip takes to import

    try:
        return version("uniclip-gradients") or "0+unknown"  # some Pythons return None where metadata is broken
    except (ImportError, KeyError):
        return "0+unknown"
