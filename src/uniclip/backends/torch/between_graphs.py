# SPDX-License-Identifier: MIT
"""Run uniclip eagerly between the graphs of PyTorch 2.6 to 2.10, whose compiler cannot compile it.

If it may break the graph, that compiler tries to compile one function of uniclip after another, and
crashes in some. Importing this module makes it compile none. The import loads `torch._dynamo`,
which takes seconds, so only traced code imports it: the compiler runs the imports that it traces.

Later versions compile uniclip, and the import changes nothing there.
"""

from __future__ import annotations

from types import FunctionType

import optree
import torch
from array_api_compat.torch import _aliases

from uniclip.backends.torch.private import dynamo_skips

_CANNOT_COMPILE = torch.__version__ < (2, 11)


def _leave_between_graphs() -> None:
    """Make Dynamo break the graph at every call of uniclip, and run the call as it is."""
    skip_package, skip_code = dynamo_skips()
    skip_package("uniclip")

    # Functions that uniclip calls must not become graphs, either. A rule for their library, as
    # above, would break the graphs of programs that compile these functions themselves.
    for module in (optree.ops, _aliases):
        for function in vars(module).values():
            # `functools.wraps`, which a module only imported, is not the library's.
            if isinstance(function, FunctionType) and function.__module__ != "functools":
                skip_code(function.__code__)


if _CANNOT_COMPILE:
    _leave_between_graphs()
