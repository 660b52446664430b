# SPDX-License-Identifier: MIT
"""Third choice, the limit: how large a norm may be.

==============  =====================================================================
module          limits
==============  =====================================================================
`base`          the base class, and what a limit may use
`fixed`         fixed, or computed from the step, the parameters or the group
`averages`      from running averages of the norms
`zscores`       in standard deviations above the mean of the norms
`percentiles`   percentiles of the norms
==============  =====================================================================
"""

from uniclip.limits.averages import Ema, MeanOverRms, SecondMoment
from uniclip.limits.base import Context, Limit, NoState
from uniclip.limits.fixed import Constant, PerGroup, Relative, Schedule, Split, TrustRatio
from uniclip.limits.percentiles import Percentile, PercentileOfAll, TrackedQuantile
from uniclip.limits.zscores import LogZScore, RollingZScore, ZScore

__all__ = [
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
    "TrackedQuantile",
    "TrustRatio",
    "ZScore",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
