"""Faults that the fuzz found, one test each."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import uniclip as uc
from frameworks import ROUNDED, Framework

pytestmark = pytest.mark.ways(*ROUNDED)


def numbers(fw: Framework, *leaves: object) -> list[float]:
    """Return the entries of leaves."""
    return [float(x) for leaf in leaves for x in fw.numpy(leaf).ravel()]


def test_warming_up_on_nothing(fw: Framework) -> None:
    """A joint norm of no norms is 0."""
    rule = uc.Rule(uc.limits.Ema(1.0, 0.9, warmup=2), scope=uc.scopes.each_entry)
    grads = fw.array(np.zeros((0,)))
    clipped, _, report = fw.run(lambda g: rule.update(g, rule.init(g)), grads)
    assert tuple(clipped.shape) == (0,)
    assert fw.numpy(report.finite)


def test_warming_up_to_a_tiny_norm(fw: Framework) -> None:
    """The share of a tiny norm is a share of it: no reciprocal leaves the range."""
    rule = uc.adagc(warmup_norm=1e-37)
    grads = [fw.array([3e-37, 4e-37]), fw.array([0.0])]
    clipped, _, report = fw.run(lambda g: rule.update(g, rule.init(g)), grads)
    assert fw.numpy(report.finite)
    np.testing.assert_allclose(numbers(fw, *clipped), [0.6e-37, 0.8e-37, 0.0], rtol=1e-5)


def test_examples_of_several_numbers_and_dtypes(fw: Framework) -> None:
    """Each of K leaves has its share, also where they differ in dtype or in the number of their examples."""
    wide = "float64" if "float64" in fw.dtypes else "float32"
    grads = [fw.array([[3.0], [0.0], [4.0]]), fw.array([[12.0]], wide)]
    for by_size in (False, True):
        rule = uc.by_example_layer_norm(math.sqrt(2.0), by_size=by_size)
        clipped = fw.run(lambda g, rule=rule: uc.clip(g, rule)[0], grads)
        np.testing.assert_allclose(numbers(fw, *clipped), [1, 0, 1, 1], rtol=1e-6)
        assert [fw.dtype(leaf) for leaf in clipped] == ["float32", wide]


def test_a_percentile_of_all_norms_far_from_one(fw: Framework) -> None:
    """The histogram covers the range of the norm's dtype."""
    far = (1.0, 1e100, 1e-60) if "float64" in fw.dtypes and fw.steps > 12 else (1.0, 1e30, 1e-30)
    dtype = "float64" if far[1] > 1e38 else "float32"
    rule = uc.autoclip(99, window=None)
    state = rule.init(fw.array([0.0], dtype))
    update = fw.compiled(lambda g, s: rule.update(g, s))
    for norm in far:
        clipped, state, _ = update(fw.array([norm], dtype), state)
        np.testing.assert_allclose(numbers(fw, clipped), [norm], rtol=0.03)  # 1 % of the way to the norm before


def test_nothing_is_not_skipped(fw: Framework) -> None:
    """A step in which the curve found nothing to judge is not one that it left out."""
    rows = uc.Rule(1.0, scope=uc.scopes.each_row, curve=uc.curves.reject)
    for rule, shape in ((rows, (0, 1)), (uc.Rule(1.0, curve=uc.curves.reject), (1, 1))):
        _, report = fw.run(lambda g, rule=rule: uc.clip(g, rule), [fw.array(np.ones(shape))])
        assert not fw.numpy(report.skipped)
    _, report = fw.run(lambda g: uc.clip(g, rows), [fw.array([[5.0], [6.0]])])
    assert fw.numpy(report.skipped)
    _, report = uc.clip([None], uc.Rule(1.0, scope=uc.scopes.each_leaf, curve=uc.curves.reject))
    assert not report.skipped


def test_zeros_of_complex_numbers_keep_their_sign(fw: Framework) -> None:
    """A row that is within its limit comes back bit for bit beside one that is not."""
    if "complex64" in fw.missing:
        return
    grads = np.asarray([[complex(-0.0, -1.0)], [30.0]])
    clipped = fw.numpy(fw.run(lambda g: uc.clip_by_norm(g, 5.0, axis=1), fw.array(grads, "complex64")))
    np.testing.assert_allclose(clipped, [[-1j], [5.0]], rtol=1e-6)
    assert math.copysign(1.0, float(clipped[0, 0].real)) == -1.0


def test_bounds_beyond_the_dtype(fw: Framework) -> None:
    """A bound that the dtype cannot hold bounds nothing."""
    grads = [fw.array([3.0, -2.0]), *([fw.array([1.0, -5.0], "float16")] if "float16" in fw.dtypes else [])]
    clipped = fw.run(lambda g: uc.clip_by_value(g, -1e39, 1e39), grads)
    assert numbers(fw, *clipped) == numbers(fw, *grads)


def test_equal_norms_are_no_spikes(fw: Framework) -> None:
    """The mean of equal norms may be off by rounding; that is no deviation."""
    rule = uc.skip_spikes(window=8, warmup=2)
    update = fw.compiled(lambda g, s: rule.update(g, s, loss=g[0]))
    for norm in (30.11644, 0.1, 7.3e-5):
        state = rule.init(fw.array([0.0]))
        for _ in range(3 if fw.cost > 20 or fw.steps < 100 else 12):
            _, state, report = update(fw.array([norm]), state)
            assert not fw.numpy(report.skipped), norm


def test_farther_apart_than_two_numbers_reach(fw: Framework) -> None:
    """The largest limit that a tiny norm can be normalized to, in two steps."""
    far = [("float64", 1e-300, 1e300)] if "float64" in fw.dtypes else []
    far += [("float32", 3e-40, 1e30)] if fw.family not in {"TensorFlow", "JAX"} else []  # where 3e-40 is 0
    for dtype, norm, limit in far:
        clipped = fw.run(lambda g, c=limit: uc.clip(g, uc.to_global_norm(c))[0], fw.array([norm, 0.0], dtype))
        np.testing.assert_allclose(numbers(fw, clipped), [limit, 0.0], rtol=1e-4)


def test_curves_of_norms_far_above_the_limit(fw: Framework) -> None:
    """Each is the ratio there, whatever unit the norm is taken in."""
    norms = [3e12, 3e18, 3e37]
    curves = (uc.curves.soft, uc.curves.smooth, uc.curves.tanh, uc.curves.Regularized(0.1), uc.curves.NonMonotonic(0.1))
    rules = [uc.Rule(1e-18, scope=uc.scopes.each_entry, curve=curve) for curve in curves]
    for clipped in fw.run(lambda g: [uc.clip(g, rule)[0] for rule in rules], fw.array(norms)):
        np.testing.assert_allclose(numbers(fw, clipped), [1e-18] * 3, rtol=1e-5)


def test_a_factor_beyond_the_dtype_of_one_of_the_leaves(fw: Framework) -> None:
    """Zeros in float32 stay zeros beside tiny numbers in float64, which are normalized."""
    if "float64" not in fw.dtypes:
        return
    kind = "complex64" if "complex128" in fw.dtypes else "float32"
    grads = [fw.array([0.0, 0.0]), fw.array([1e-300], "float64"), fw.array([0.0], kind)]
    clipped = fw.run(lambda g: uc.clip(g, uc.to_global_norm(1.0))[0], grads)
    np.testing.assert_allclose(np.real(np.concatenate([fw.numpy(leaf) for leaf in clipped])), [0, 0, 1, 0], rtol=1e-6)
    assert [fw.dtype(leaf) for leaf in clipped] == ["float32", "float64", kind]


def test_warming_up_beside_a_huge_norm(fw: Framework) -> None:
    """The share of a tiny norm keeps its digits."""
    rule = uc.adagc(warmup_norm=1e24)
    clipped, _, _ = fw.run(lambda g: rule.update(g, rule.init(g)), [fw.array([1e25]), fw.array([3e-20])])
    np.testing.assert_allclose(numbers(fw, *clipped), [1e24, 3e-21], rtol=1e-5)


def test_nothing_is_saved_and_loaded(fw: Framework) -> None:
    """Lists of nothing have neither shape nor dtype."""
    grads = [fw.array(np.ones((2, 0, 3))), fw.array([1.0])]
    for rule in (uc.spam(warmup=1), uc.Rule(uc.limits.LogZScore(2.0, 0.9), scope=uc.scopes.each_entry)):
        clipper, other = (uc.Clipper(rule) for _ in range(2))
        clipper(grads)
        other.load_state_dict(json.loads(json.dumps(clipper.state_dict())))
        assert tuple(other(grads)[0].shape) == (2, 0, 3)


def test_in_place_in_two_steps(fw: Framework) -> None:
    """Arrays are divided by the unit once, also where the factor is an array and cannot be taken in one go."""
    if not fw.writes or fw.traced:
        return
    for curve in (uc.curves.hard, uc.curves.smooth, uc.curves.Regularized(0.1)):
        grads = [fw.array([3e30, 0.0]), fw.array([4e30], "bfloat16")]
        uc.clip_(grads, uc.Rule(1e-18, curve=curve))
        np.testing.assert_allclose(numbers(fw, *grads), [0.6e-18, 0.0, 0.8e-18], rtol=0.01)


def test_norms_whose_reciprocals_are_not_normal(fw: Framework) -> None:
    """Compilers that multiply by the reciprocal, and take what is not normal for 0, divide by a smaller unit."""
    rules = [
        uc.Rule(uc.limits.RollingZScore(1.0, 3, 2), scope=uc.scopes.each_entry),
        uc.Rule(uc.limits.Ema(2.0, 0.5, 9), uc.scopes.each_entry),
    ]
    values = [[1e38, 3e37, 0.0], [1.6e38, 1e37, 1.0], [2e38, 2e37, 2.0]]

    def train(steps: list[object]) -> list[object]:
        limits = []
        for rule in rules:
            state = rule.init(steps[0])
            for grads in steps:
                _, state, report = rule.update(grads, state)
            limits.append(report.limits)
        return limits

    rolling, warm = (fw.numpy(limits) for limits in fw.run(train, [fw.array(one) for one in values]))
    np.testing.assert_allclose(rolling, [1.3e38 + 3e37 * 2**0.5, 2e37 + 1e37 * 2**0.5, 0.5 + 0.5**0.5], rtol=1e-5)
    np.testing.assert_allclose(warm[:2], [2 / 4.04**0.5, 0.2 / 4.04**0.5], rtol=1e-5)


def test_the_largest_norms_in_a_histogram(fw: Framework) -> None:
    """A percentile of norms near the largest number is a number, too."""
    rule, grads = uc.autoclip(0, window=None), fw.array([3e38, 0.0])
    _, _, report = fw.run(lambda g: rule.update(g, rule.init(g)), grads)
    assert 2.9e38 < numbers(fw, report.limits)[0] <= 3.41e38


def test_a_joint_norm_beyond_the_dtype_of_a_leaf(fw: Framework) -> None:
    """In the warm-up a float32 leaf has its share also beside a float64 leaf whose norm no float32 can hold."""
    wide, large = ("float64", 1e45) if "float64" in fw.dtypes else ("float32", 1e38)
    grads = [fw.array([1e37]), fw.array([large], wide)]
    rule = uc.adagc(warmup_norm=1e37)
    clipped = fw.run(lambda g: rule.update(g, rule.init(g))[0], grads)
    np.testing.assert_allclose(numbers(fw, *clipped), [1e37 / large * 1e37, 1e37], rtol=6e-3)


def test_a_batch_of_no_examples(fw: Framework) -> None:
    """Poisson sampling may draw none: the sum is 0, and the report can be printed."""
    summed, report = uc.clip_and_sum([fw.array(np.zeros((0, 3)))], uc.by_example_norm(1.0))
    np.testing.assert_array_equal(fw.numpy(summed[0]), [0.0, 0.0, 0.0])
    assert str(report) == "no norm measured"
