# SPDX-License-Identifier: MIT
"""Third choice, the limit: how large a norm may be.

==============  =====================================================================
module          limits
==============  =====================================================================
`base`          what a limit is, and what it may ask for
`fixed`         that are given, or follow from the step, the parameters or the group
`averages`      that follow from running averages of the norms
`zscores`       in standard deviations above the mean of the norms
`percentiles`   that are percentiles of the norms
==============  =====================================================================
"""

from uniclip.limits.averages import Ema, MeanOverRms, SecondMoment
from uniclip.limits.base import Block, Context, Limit, NoState
from uniclip.limits.fixed import Constant, PerGroup, Relative, Schedule, Split, TrustRatio, as_limit
from uniclip.limits.percentiles import Percentile, PercentileOfAll, TrackedQuantile
from uniclip.limits.zscores import LogZScore, RollingZScore, Target, ZScore

__all__ = [
    "Block",
    "Constant",
    "Context",
    "Ema",
    "Limit",
    "LogZScore",
    "MeanOverRms",
    "NoState",
    "PerGroup",
    "Percentile",
    "PercentileOfAll",
    "Relative",
    "RollingZScore",
    "Schedule",
    "SecondMoment",
    "Split",
    "Target",
    "TrackedQuantile",
    "TrustRatio",
    "ZScore",
    "as_limit",
]
