# SPDX-License-Identifier: MIT
"""The published rules by name, each one expression over the four choices.

===========  ===========================================================================
module       rules
===========  ===========================================================================
`fixed`      with a fixed limit: by value, by norm, for groups, normalized
`relative`   relative to the parameters
`adaptive`   adaptive: they learn from the norms of earlier steps
`examples`   for gradients of single examples
===========  ===========================================================================
"""

from uniclip.presets.adaptive import (
    adagc,
    adagn,
    autoclip,
    log_zscore,
    norm_growth,
    percentile_clipping,
    skip_spikes,
    spam,
    zclip,
)
from uniclip.presets.examples import auto_s, by_example_layer_norm, by_example_norm, by_example_quantile, psac
from uniclip.presets.fixed import (
    by_average_norm,
    by_block_rms,
    by_global_norm,
    by_group_norm,
    by_norm,
    by_value,
    to_global_norm,
)
from uniclip.presets.relative import agc, cowclip, larc

__all__ = [
    "adagc",
    "adagn",
    "agc",
    "auto_s",
    "autoclip",
    "by_average_norm",
    "by_block_rms",
    "by_example_layer_norm",
    "by_example_norm",
    "by_example_quantile",
    "by_global_norm",
    "by_group_norm",
    "by_norm",
    "by_value",
    "cowclip",
    "larc",
    "log_zscore",
    "norm_growth",
    "percentile_clipping",
    "psac",
    "skip_spikes",
    "spam",
    "to_global_norm",
    "zclip",
]
