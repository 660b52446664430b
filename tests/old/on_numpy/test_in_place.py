"""Clipping NumPy arrays in place: what is written where, and what is refused."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import uniclip as uc

RULE = uc.by_global_norm(6.5)


def test_the_same_memory_counts_once() -> None:
    """An array that is given twice, as itself or as a view of all of it, is one gradient and scaled once."""
    w = np.asarray([3.0, 4.0])
    report = uc.clip_({"a": w, "b": [w, w[:], None], "c": np.asarray([12.0])}, RULE)
    assert float(report.norms) == 13
    np.testing.assert_array_equal(w, [1.5, 2])
    report = uc.clip_([w, w], uc.by_norm(1.0))
    assert report.norms[1] is None
    np.testing.assert_allclose(w, [0.6, 0.8])


def test_views_apart() -> None:
    """Views of one array that have no entry in common are gradients of their own, also where they interleave."""
    whole = np.zeros((2, 4))
    left, right = whole[:, ::2], whole[:, 1::2]
    left[...], right[...] = 3.0, 4.0
    report = uc.clip_([left, right], uc.by_global_norm(math.sqrt(25)))
    assert float(report.norms) == pytest.approx(10)
    np.testing.assert_allclose(whole, [[1.5, 2, 1.5, 2]] * 2)


@pytest.mark.parametrize(
    "views",
    [
        lambda x: [x, x[1:]],
        lambda x: [x[:6], x[4:]],
        lambda x: [x.reshape(2, 5), x.reshape(5, 2)],
        lambda x: [x, x.view("complex128")],
        lambda x: [x[::-1], x],
    ],
    ids=["part", "ends", "shapes", "dtypes", "backwards"],
)
def test_overlaps_are_refused(views: Callable[[np.ndarray], list[np.ndarray]]) -> None:
    """Views that overlap would be scaled twice: an error names both, and nothing is changed."""
    x = np.arange(10.0)
    with pytest.raises(ValueError, match=r"grads\[0\] and grads\[1\] overlap in memory.*uc\.clip"):
        uc.clip_(views(x), RULE)
    np.testing.assert_array_equal(x, np.arange(10.0))


def frozen() -> np.ndarray:
    """Return a read-only array."""
    array = np.ones(2)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("leaf", "why"),
    [
        (frozen(), "it is read-only"),
        (np.broadcast_to(np.ones(2), (3, 2)), "it is read-only"),
        (np.lib.stride_tricks.as_strided(np.ones(4), (3, 2), (8, 8)), "several of its entries may lie in one place"),
        (np.float64(3), "a scalar never changes"),
    ],
    ids=["frozen", "broadcast", "overlapping itself", "scalar"],
)
def test_what_cannot_be_changed(leaf: Any, why: str) -> None:
    """An array that cannot take the result is refused by its place and the reason, before any other is changed."""
    first = np.asarray([30.0, 40.0])
    with pytest.raises(TypeError, match=rf"grads\['b'\], a .* cannot be changed in place: {why}; use clipped, report"):
        uc.clip_({"a": first, "b": leaf}, RULE)
    np.testing.assert_array_equal(first, [30, 40])


LAYOUTS = {
    "contiguous": lambda x: x.copy(),
    "columns first": np.asfortranarray,
    "every other": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "backwards": lambda x: x.copy()[::-1, ::-1],
    "transposed": lambda x: x.T.copy().T,
    "one entry": lambda x: x[:1, :1].copy(),
    "empty": lambda x: x[:0].copy(),
    "scalar": lambda x: np.asarray(x[0, 0]),
}
RULES = {
    "global": uc.by_global_norm(1.0),
    "rows": uc.Rule(1.0, scope=uc.scopes.axes(-1)),
    "columns": uc.Rule(1.0, scope=uc.scopes.axes(0)),
    "rms": uc.by_block_rms(0.1),
    "value": uc.by_value(-0.5, 0.5),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_layouts(layout: Callable[[np.ndarray], np.ndarray], rule: Any, dtype: str) -> None:
    """Any layout of memory gets the very values that `uc.clip` returns, in its own memory."""
    array = layout(np.random.default_rng(0).standard_normal((600, 400)).astype(dtype))
    if (array.ndim < 1 and rule in (RULES["rows"], RULES["columns"])) or (
        dtype == "complex64" and rule == RULES["value"]
    ):
        with pytest.raises((TypeError, ValueError)):
            uc.clip_(array, rule)
        return
    wanted, expected = uc.clip(array, rule)
    strides, address = array.strides, array.__array_interface__["data"]
    report = uc.clip_(array, rule)
    np.testing.assert_array_equal(array, wanted)
    assert (array.strides, array.__array_interface__["data"]) == (strides, address)
    np.testing.assert_equal(tuple(report), tuple(expected))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("limit", "nonfinite"), [(1.0, "zero"), (1.0, "skip"), (1e9, "raise")], ids=["zero", "skip", "below"]
)
def test_memory(limit: float, nonfinite: Any, dtype: str, rule: Any) -> None:
    """What is allocated is a few pieces, however large the gradient is."""
    if isinstance(rule, uc.Rule):
        rule = uc.Rule(limit, scope=rule.scope, norm=rule.norm, nonfinite=nonfinite)
    array = np.full((4000, 2000), 0.25, dtype)
    if nonfinite != "raise":
        array[1000, 1000] = math.nan
    tracemalloc.start()
    uc.clip_(array, rule)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6 < array.nbytes / 3


def test_not_finite() -> None:
    """The policies write what they say, and an error writes nothing."""
    values = np.asarray([3.0, math.nan, 4.0])
    for policy, wanted in (("propagate", [math.nan] * 3), ("skip", [0.0] * 3), ("zero", [0.6, 0.0, 0.8])):
        array = values.copy()
        assert not uc.clip_([array], uc.by_global_norm(1.0, nonfinite=policy)).finite
        np.testing.assert_allclose(array, wanted)
    array = values.copy()
    with pytest.raises(FloatingPointError, match=r"grads\[0\]"):
        uc.clip_([array], uc.by_global_norm(1.0, nonfinite="raise"))
    np.testing.assert_array_equal(array, values)


def test_below_nothing_is_written() -> None:
    """Within the limit an array is not written to at all: a page that is only read is not copied."""
    array = np.asarray([-0.0, 1e-310, 3.0])
    before = array.tobytes()
    assert not uc.clip_(array, RULE).clipped
    assert array.tobytes() == before


def test_an_error_changes_nothing() -> None:
    """A fault of the last leaf is found before the first one is changed."""
    first = np.asarray([3.0, math.nan])
    cases: list[tuple[Any, Any]] = [
        ([first, np.asarray([1j])], uc.by_value(-1.0, 1.0)),
        ([first, np.ones(3)], uc.by_value(np.zeros(2), np.ones(2))),
        ([first, np.ones(3)], lambda g: g if len(g) == 2 else None),
        ([first, np.ones(3)], uc.by_global_norm(np.asarray(-1.0), nonfinite="zero")),
        ([first, np.ones(3, "int64")], uc.by_global_norm(1.0)),
    ]
    for grads, rule in cases:
        with pytest.raises((TypeError, ValueError)):
            uc.clip_(grads, rule)
        np.testing.assert_array_equal(first, [3.0, math.nan])


def test_own_function_and_update() -> None:
    """A function of an array, and `update` with ``in_place=True``, write into the arrays too."""
    array = np.asarray([3.0, -4.0])
    assert uc.clip_([array], np.sign) == uc.Report()
    np.testing.assert_array_equal(array, [1, -1])
    tree = {"w": np.asarray([3.0, 4.0])}
    clipped, _, report = uc.by_norm(1.0).update(tree, (), in_place=True)
    assert clipped["w"] is tree["w"]
    np.testing.assert_allclose(tree["w"], [0.6, 0.8])
    assert float(report.norms["w"]) == 5


@pytest.mark.parametrize("turn", [lambda g: g[::-1], lambda g: g.T, lambda g: g], ids=["backwards", "turned", "itself"])
def test_a_function_that_returns_a_view(turn: Any) -> None:
    """What a function returns is put in place also if it is a view of the array that is changed."""
    array = np.arange(360_000.0).reshape(600, 600)
    wanted = turn(array).copy()
    uc.clip_(array, turn)
    np.testing.assert_array_equal(array, wanted)


def test_what_an_array_cannot_hold_is_refused() -> None:
    """Numbers that the array cannot hold are not cut off."""
    for array, function in ((np.asarray([3, 4]), lambda g: g * 0.5), (np.asarray([3.0, 4.0]), lambda g: g * 1j)):
        with pytest.raises(TypeError, match=r"grads: an array of \w+ cannot hold the result.*use uc\.clip"):
            uc.clip_(array, function)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_matrices_are_refused() -> None:
    """The square of a matrix is not that of its entries."""
    with pytest.raises(TypeError, match="not an array of numbers"):
        uc.global_norm(np.asmatrix(np.eye(2)))


def test_offsets_beyond_32_bits() -> None:
    """Entries that lie more than 2³¹ places apart, and more of them than that."""
    far = np.zeros(2**31 + 16, "float16")  # of pages that are never touched
    view = far[:: 2**31 + 15]
    view[...] = [300.0, 400.0]
    uc.clip_(view, uc.by_norm(5.0))
    np.testing.assert_array_equal(view, [3, 4])
    many = np.broadcast_to(np.float32(2.0), (2**31 + 2**10,))
    clipped, norm = uc.clip_by_global_norm([many, view], 1e9)
    assert clipped[0] is many
    assert float(norm) == pytest.approx(math.sqrt(4 * (2**31 + 2**10) + 25), rel=5e-7)


def test_masked_arrays_are_refused() -> None:
    """A masked array is no gradient: what its masked entries would count is not said."""
    masked = np.ma.masked_array([3.0, 4.0], [False, True])
    for call in (lambda g: uc.clip_(g, RULE), lambda g: uc.clip(g, RULE), uc.global_norm):
        with pytest.raises(TypeError, match=r"grads\[0\] is a numpy\.ma.*MaskedArray.*not an array of numbers"):
            call([masked])
