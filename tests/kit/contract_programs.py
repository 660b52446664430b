"""The promises that make values: each is a program of arrays, which runs eagerly or is traced with all others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kit.frameworks import Framework
from kit.promise import Program
from kit.trees import leaves


def norm_rules(uc: Any) -> dict[str, Callable[[float], Any]]:
    """Return rules of each scope and norm, to be called with a limit."""
    return {
        "global": uc.by_global_norm,
        "leaf": uc.by_norm,
        "rows": lambda limit: uc.by_norm(limit, axis=-1),
        "columns": lambda limit: uc.Rule(limit, scope=uc.scopes.axes(0)),
        "L1": lambda limit: uc.by_global_norm(limit, ord=1),
        "L3": lambda limit: uc.by_norm(limit, ord=3),
        "Linf": lambda limit: uc.by_global_norm(limit, ord=math.inf),
        "average": uc.by_average_norm,
        "rms": uc.by_block_rms,
    }


def floats(fw: Framework) -> list[str]:
    """Return the floating dtypes of a framework, complex ones too."""
    return [name for name in fw.dtypes if not name.startswith("int")]


def tree(fw: Framework, dtype: str = "float32", by: float = 1.0) -> dict[str, Any]:
    """Return a small tree of gradients of global norm 13·by."""
    return {"w": fw.array([[3.0 * by, -4.0 * by]], dtype), "b": [fw.array([12.0 * by, 0.0], dtype), None]}


class Below(Program):
    """At the limit and below it, every dtype comes back to the bit."""

    def arrays(self, fw: Framework) -> Any:
        return {dtype: tree(fw, dtype) for dtype in floats(fw)}

    def run(self, uc: Any, given: Any) -> Any:
        def unclipped(dtype: str, grads: Any) -> Any:
            rules = norm_rules(uc)
            some = rules.values() if dtype == "float32" else [rules["global"], rules["rows"]]
            results = [uc.clip(grads, rule(100.0)) for rule in some] + [uc.clip(grads, uc.by_global_norm(13.0))]
            return [[clipped, report.clipped] for clipped, report in results]

        return {dtype: unclipped(dtype, grads) for dtype, grads in given.items()}

    def require(self, fw: Framework, given: Any, found: Any) -> None:
        for dtype, grads in given.items():
            for clipped, changed in found[dtype]:
                for old, new in zip(leaves(grads), leaves(clipped), strict=True):
                    np.testing.assert_array_equal(fw.numpy(old), fw.numpy(new), strict=True)
                    assert new is old or not fw.same_objects
                assert not fw.numpy(changed)
