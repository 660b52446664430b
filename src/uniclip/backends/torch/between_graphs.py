# SPDX-License-Identifier: MIT
"""Run uniclip eagerly between the graphs of PyTorch 2.6 to 2.10, whose compiler cannot compile it.

Where it may break the graph, that compiler tries one function of uniclip after another, and crashes
in some. Importing this module tells it to try none. The import loads `torch._dynamo`, which takes
seconds: only import it where that is loaded already. Traced code is such a place, as the compiler
runs the imports in it.
"""

from __future__ import annotations

from types import FunctionType

import optree
from array_api_compat.torch import _aliases

from uniclip.backends.torch.modes import ONLY_BETWEEN_GRAPHS


def _leave_between_graphs() -> None:
    """Tell Dynamo to break the graph at every call of uniclip,
    and to run what is called there as it is.
    """
    # PyTorch has no public functions for either.
    from torch._dynamo import trace_rules
    from torch._dynamo.eval_frame import skip_code

    trace_rules.add("uniclip")
    # Functions that uniclip calls must not become graphs of their own. A rule for their library, as
    # above, would break the graphs of programs that compile these functions themselves.
    for module in (optree.ops, _aliases):
        for function in vars(module).values():
            # Not what a module has only imported, such as `functools.wraps`.
            if isinstance(function, FunctionType) and function.__module__ != "functools":
                skip_code(function.__code__)


if ONLY_BETWEEN_GRAPHS:
    _leave_between_graphs()
