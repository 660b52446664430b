# SPDX-License-Identifier: MIT
"""Gradient clipping, once, for every array framework: NumPy, PyTorch, TensorFlow,
JAX and any array API library.

    import uniclip as uc

    grads, norm = uc.clip_by_global_norm(grads, 1.0)    # any list, dict or other tree of arrays

Familiar functions, which return clipped gradients
    `clip_by_value`, `clip_by_norm`, `clip_by_average_norm`, `clip_by_global_norm`; `global_norm`
    only measures.

Run any rule
    ``clipped, report = uc.clip(grads, rule)``, `clip_` in place, `clip_and_sum` over the gradients
    of examples. ``clipper = uc.Clipper(rule)`` keeps the state of adaptive rules:
    ``clipped = clipper(grads)``. Inside an optimizer: ``uniclip.integrations.torch``, ``.keras``,
    ``.optax``, ``.lightning``, ``.transformers`` and ``.tensorflow``.

Published rules
    Fixed limits: `by_value`, `by_norm`, `by_average_norm`, `by_global_norm`, `by_group_norm`,
    `by_block_rms`, `to_global_norm`. Relative to the parameters: `agc`, `larc`, `cowclip`.
    Adaptive, learned from earlier steps: `autoclip`, `percentile_clipping`, `zclip`, `log_zscore`,
    `skip_spikes`, `adagc`, `adagn`, `norm_growth`, `spam`. Per example: `by_example_norm`,
    `by_example_layer_norm`, `by_example_quantile`, `auto_s`, `psac`. Rules of rules: `chain`,
    `masked`.

Your own rule is four choices, ``g ← g · curve(norm(g over scope), limit)``, put together by `Rule`
    `uniclip.scopes`    which elements share one norm?
    `uniclip.norms`     how is their size measured?
    `uniclip.limits`    how large may it be?
    `uniclip.curves`    what happens above it?
"""

import sys as _sys
from typing import TYPE_CHECKING

from uniclip import api, curves, limits, norms, scopes
from uniclip._version import version as _version
from uniclip.api import *  # noqa: F403
from uniclip.clipper import Clipper
from uniclip.compose import chain, masked
from uniclip.limits import Limit
from uniclip.norms import Norm
from uniclip.presets import adaptive as _adaptive
from uniclip.presets import examples as _examples
from uniclip.presets import fixed as _fixed
from uniclip.presets import relative as _relative
from uniclip.presets.adaptive import *  # noqa: F403 - each module lists its names
from uniclip.presets.examples import *  # noqa: F403
from uniclip.presets.fixed import *  # noqa: F403
from uniclip.presets.relative import *  # noqa: F403
from uniclip.report import Report
from uniclip.rule import Rule
from uniclip.scopes import Scope

__all__ = [
    "Clipper",
    "Limit",
    "Norm",
    "Report",
    "Rule",
    "Scope",
    "chain",
    "curves",
    "limits",
    "masked",
    "norms",
    "scopes",
]
__all__ += _fixed.__all__
__all__ += _relative.__all__
__all__ += _adaptive.__all__
__all__ += _examples.__all__
__all__ += api.__all__


_ELSEWHERE = {
    "attach": "torch",
    "check_layout": "torch",
    "clip_grad_norm_": "torch",
    "clip_grad_value_": "torch",
    "clip_grads_with_norm_": "torch",
    "get_total_norm": "torch",
    "ClippedOptimizer": "keras",
    "LogClipping": "keras",
    "to_optax": "optax",
    "ClipGradients": "lightning, and for Hugging Face in uniclip.integrations.transformers",
    "ClippedTrainer": "transformers",
}
"""Names that users look for here, and the module of `uniclip.integrations` that has each."""


def __dir__() -> list[str]:
    """Return the public names, without uniclip's private modules."""
    return [*__all__, "__version__"]


# Type checkers must not see `__getattr__`, or they would accept every name.
if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Return the version, which is only read when it is needed (PEP 562)."""
        if name == "__version__":
            return _version()

        msg = f"module {__name__!r} has no attribute {name!r}"
        if name in _ELSEWHERE:
            msg += f"; it is in uniclip.integrations.{_ELSEWHERE[name]}"
        raise AttributeError(msg, name=name, obj=_sys.modules[__name__])
