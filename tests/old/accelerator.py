"""What is clipped as if on an accelerator, whose arrays the host must not read: it would wait for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

import uniclip as uc
from tracing import Halving, leaves, soft

SHAPES = [(40, 35), (4, 5), (7,), (3, 1, 2)]
VALUES = {"above": 1.0, "below": 1e-6, "overflow": 1e30, "underflow": 1e-30, "NaN": math.nan, "zeros": 0.0}
SCOPES = {
    "all": uc.scopes.all_leaves,
    "leaf": uc.scopes.each_leaf,
    "groups": uc.scopes.groups(lambda path, leaf: len(leaf.shape)),
    "axes": uc.scopes.axes(-1),
    "entry": uc.scopes.each_entry,
}
RULES = {
    **{
        f"{name}, {policy}": uc.Rule(1.0, scope=scope, nonfinite=policy)
        for name, scope in SCOPES.items()
        for policy in ("propagate", "skip", "zero")
    },
    "soft": uc.Rule(1.0, curve=soft),
    "L3": uc.Rule(1.0, norm=uc.Norm(3)),
    "Linf": uc.Rule(1.0, norm=uc.norms.Linf),
    "rms": uc.by_block_rms(0.01),
    "unlimited": uc.Rule(math.inf),
    "value": uc.by_value(-0.5, 0.5),
}
LAUNCHED = {
    "global": uc.by_global_norm(1.0),
    "by_norm": uc.by_norm(1.0),
    "zclip": uc.zclip(),
    "adagc": uc.adagc(),
    "agc": uc.agc(),
}
"""The rules of which is counted what a step launches."""
EVERY_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def refuse(*args: Any, **kwargs: Any) -> Any:
    """Stand for what reads an array."""
    msg = "the host reads an array"
    raise AssertionError(msg)


refused = pytest.raises(AssertionError, match="the host reads")


@contextmanager
def patched(target: Any, **new: Any) -> Iterator[None]:
    """Put others in place of some attributes, which the target may only inherit."""
    with ExitStack() as stack:
        for name, value in new.items():
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        yield


def values(value: float = 1.0) -> list[np.ndarray]:
    """Return random gradients times a value, NaN in one place alone."""
    rng = np.random.default_rng(0)
    made = [rng.standard_normal(shape).astype("float32") for shape in SHAPES]
    if math.isnan(value):
        made[1][2, 3] = value
        return made
    return [leaf * np.float32(value) for leaf in made]


def close(found: Any, wanted: Any, rtol: float = 1e-5) -> None:
    """Assert that results are equal, but for rounding."""
    for one, other in zip(leaves(found), leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=rtol)


def functions(limit: Any) -> list[Callable[[Any], Any]]:
    """Return calls of the familiar functions, with an array as the limit too, and of rules that remember."""
    rules = [
        uc.Rule(Halving(4.0)),
        uc.autoclip(window=3),
        uc.autoclip(window=None),
        uc.zclip(),
        uc.log_zscore(),
        uc.adagc(),
        uc.skip_spikes(window=4),
        uc.spam(),
        uc.chain(uc.zclip(), uc.skip_spikes(window=4), uc.adagn()),
    ]
    return [
        lambda g: uc.clip_by_global_norm(g, 1.0),
        lambda g: uc.clip_by_global_norm(g, limit),
        lambda g: uc.clip_by_global_norm(g, 1.0, norm=uc.global_norm(g)),
        lambda g: uc.clip_by_norm(g, limit),
        lambda g: uc.clip_by_average_norm(g, 1.0),
        lambda g: uc.clip_by_value(g, -0.1, 0.1),
        *[lambda g, rule=rule: rule.update(g, rule.init(g)) for rule in rules],
    ]
