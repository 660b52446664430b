"""Every hook that is there for speed or memory gives what its default in the array API gives."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

import uniclip as uc
from frameworks import Framework
from uniclip.backends import backend_of
from uniclip.backends.base import Backend

SHAPES = [(300_001,), (700, 500), (3, 7, 20_000)]


def norms(fw: Framework, dtype: str) -> list[np.ndarray]:
    """Return norms over all of large leaves and along their axes."""
    rng = np.random.default_rng(0)
    grads = [fw.array(100 * rng.standard_normal(shape), dtype) for shape in SHAPES]
    scopes = [uc.each_leaf, uc.all_leaves, uc.axes(0), uc.axes(-1)][: 4 if fw.cost < 10 else 1]
    kinds = [uc.L2, uc.Norm(3), uc.L1, uc.Linf][: 4 if fw.cost < 10 else 2]  # each one is compiled
    rules = [uc.Rule(1.0, scope=scope, norm=norm) for scope in scopes for norm in kinds]
    leaves: list[Any] = []
    for report in fw.run(lambda g: [uc.clip(g, rule)[1].norms for rule in rules], grads):
        leaves += report if isinstance(report, list) else [report]
    return [fw.numpy(leaf) for leaf in leaves]


def no_array(self: Backend, array: Any) -> bool:
    """Take no array for large."""
    return False


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_defaults(fw: Framework, dtype: str) -> None:
    """With any hook of the framework switched off the norms are the same, and with pieces switched off or on."""
    dtype = "float64" if dtype in fw.missing else dtype
    kind = type(backend_of(fw.array([1.0])))
    usual = norms(fw, dtype)
    off = {hook: vars(Backend)[hook] for hook in {"pieces", "sum", "once"} & set(vars(kind)) if kind is not Backend}
    for hook, default in {**off, "large": no_array}.items():
        with mock.patch.object(kind, hook, default):
            for one, other in zip(norms(fw, dtype), usual, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6)
