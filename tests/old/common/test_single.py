"""One norm with a constant limit takes a short way, in floats: bit for bit what the general way gives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import uniclip as uc
from frameworks import CHOSEN, Framework
from promises import EPS
from uniclip import step

EAGER = pytest.mark.parametrize("framework", [fw for fw in CHOSEN if not fw.traced], ids=lambda fw: fw.name)
SIZES = [1.0, 3.0, 0.1, 1e-20, 1e-38, 1e-42, 1e-45, 1e18, 1e25, 3e38, 65504.0, 5e-324, 1e-300, 1e300, 0.0]
"""How large gradients and limits are, some beyond what the dtype of a gradient holds."""
SPOILT = [math.nan, math.inf, -math.inf]
PLACES = [-3, -2, -1, 0, 1, 2, 3]
"""How many units in the last place a limit is away from the norm."""


def bits(fw: Framework, array: Any) -> tuple[Any, ...]:
    """Return the dtype, the shape and the bytes of an array."""
    values = np.asarray(fw.numpy(array))
    return fw.dtype(array), values.shape, np.where(np.isnan(values), np.nan, values).tobytes()


def arrays(fw: Framework, leaves: list[np.ndarray], dtypes: list[str]) -> list[Any]:
    """Return new gradients; what a dtype cannot hold becomes infinite."""
    with np.errstate(all="ignore"):
        return [fw.array(leaf.copy(), dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]


def outcome(fw: Framework, leaves: list[np.ndarray], dtypes: list[str], rule: uc.Rule, *, in_place: bool) -> Any:
    """Return all that can be seen of a step; what it raises, if it does."""
    grads = arrays(fw, leaves, dtypes)
    try:
        clipped, state, report = rule.update(grads, rule.init(grads), in_place=in_place)
    except (ValueError, FloatingPointError) as error:
        return type(error), str(error)
    kept = [a is b for a, b in zip(clipped, grads, strict=True)]
    shown = [None if field is None else bits(fw, field) for field in report]
    return kept, [bits(fw, leaf) for leaf in clipped], state, shown


@st.composite
def steps(draw: st.DrawFn, dtypes: list[str]) -> Any:
    """Draw gradients, their dtypes, and a limit as large as their norm or of any other size."""
    shapes = draw(st.lists(st.sampled_from([(), (1,), (3,), (2, 3), (0,), (40,)]), min_size=1, max_size=3))
    size = draw(st.sampled_from(SIZES))
    one = draw(st.sampled_from(dtypes))
    kinds = [draw(st.sampled_from([one, one, one, *dtypes])) for _ in shapes]
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    leaves = [np.asarray(size * rng.standard_normal(shape)) for shape in shapes]
    if leaves[0].size and draw(st.integers(0, 5)) == 0:
        leaves[0].ravel()[...] = draw(st.sampled_from(SPOILT))
    limit = draw(st.one_of(st.sampled_from([*SIZES, math.inf]), st.sampled_from(PLACES)))
    return leaves, kinds, limit


def clipped_both_ways(fw: Framework, monkeypatch: pytest.MonkeyPatch, *case: Any, in_place: bool = False) -> list[Any]:
    """Return what the short way and what the general one makes of a step."""
    short = outcome(fw, *case, in_place=in_place)
    with monkeypatch.context() as patched:
        patched.setattr(step, "_single", lambda *_: None)
        return [short, outcome(fw, *case, in_place=in_place)]


def beside(fw: Framework, grads: list[Any], places: int) -> float:
    """Return a limit that lies so many places above the norm of gradients."""
    norm = np.asarray(fw.numpy(uc.global_norm(grads)))
    for _ in range(abs(places)):
        norm = np.nextafter(norm, norm.dtype.type(math.copysign(math.inf, places)))
    return 1.0 if np.isnan(norm) else max(0.0, float(norm))


@EAGER
def test_as_the_general_way(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, their identity, the report and its dtypes are the same for any norm, limit, dtype and policy."""
    taken, single = [], step._single
    dtypes = [name for name in ("float32", "float64", "float16", "bfloat16", "complex64") if name in framework.dtypes]

    def noted(*args: Any) -> Any:
        taken.append(single(*args))
        return taken[-1]

    monkeypatch.setattr(step, "_single", noted)

    @settings(max_examples=max(40, 300 // framework.cost) // framework.first)
    @given(steps(dtypes), st.sampled_from(["propagate", "propagate", "skip", "zero", "raise"]), st.booleans())
    def alike(drawn: Any, nonfinite: Any, in_place: bool) -> None:
        leaves, kinds, limit = drawn
        limit = limit if isinstance(limit, float) else beside(framework, arrays(framework, leaves, kinds), limit)
        rule = uc.by_global_norm(limit, nonfinite=nonfinite)
        in_place = in_place and framework.writes
        short, general = clipped_both_ways(framework, monkeypatch, leaves, kinds, rule, in_place=in_place)
        assert short == general

    with framework.context():
        alike()
    # Libraries that cannot be asked whether the host can read an array have the general way alone.
    assert any(found is not None for found in taken) == (framework.family in {"NumPy", "PyTorch", "TensorFlow", "JAX"})


def test_at_the_limit(fw: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    """So they are where the norm is the limit, a unit in the last place above it, and a thousand of them."""
    if fw.traced:
        return
    for dtype in ("float32", "float64"):
        if dtype in fw.missing:
            continue
        for values in ([3.0, 4.0], [0.1, 0.2, 0.3], [1e-30], [1e-42], [1e30, 1e30]):
            leaves = [np.asarray(values)]
            norm = float(fw.numpy(uc.global_norm([fw.array(leaves[0], dtype)])))
            for places in (-1000, -1, 0, 1, 1000):
                rule = uc.by_global_norm(norm * (1 + places * EPS[dtype]))
                short, general = clipped_both_ways(fw, monkeypatch, leaves, [dtype], rule)
                assert short == general
                assert short[0] == [True] or places < 0 or not fw.same_objects
