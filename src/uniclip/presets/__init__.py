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

from uniclip.presets import adaptive, examples, fixed, relative
from uniclip.presets.adaptive import *  # noqa: F403 - each module lists its rules
from uniclip.presets.examples import *  # noqa: F403
from uniclip.presets.fixed import *  # noqa: F403
from uniclip.presets.relative import *  # noqa: F403

__all__: list[str] = []
__all__ += fixed.__all__
__all__ += relative.__all__
__all__ += adaptive.__all__
__all__ += examples.__all__
