"""The published rules: golden numbers, where reference implementations go wrong, and what happens at the ends."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import numpy as np
import optree
import pytest

import uniclip as uc
from frameworks import CHOSEN, EAGER, ROUNDED, Framework
from uniclip.backends import backend_of
from uniclip.limits import NoState
from uniclip.limits.averages import Averages
from uniclip.limits.zscores import Moments

pytestmark = pytest.mark.ways(*EAGER)

CLOSE = 1e-5  # of golden numbers that are printed with so many digits


def clipped(fw: Framework, grads: Any, rule: uc.Rule, params: Any = None) -> tuple[Any, uc.Report]:
    """Clip a tree of lists of numbers; return lists of NumPy's arrays."""
    arrays = [fw.array(values) for values in grads]
    weights = None if params is None else [fw.array(values) for values in params]
    result, report = fw.run(lambda g, p: uc.clip(g, rule, params=p), arrays, weights)
    return [fw.numpy(array) for array in result], report


def test_golden_numbers(fw: Framework) -> None:
    """The rules with a given limit, by the numbers of the papers' tests."""
    for grads, rule, wanted in [
        ([[3.0, 4.0], [12.0]], uc.by_global_norm(6.5), [[1.5, 2.0], [6.0]]),
        ([[3.0, 4.0]], uc.by_average_norm(1.0), [[1.2, 1.6]]),
        ([[3.0, 4.0]], uc.by_block_rms(1.0), [[3 / 3.535534, 4 / 3.535534]]),
        ([[6.0, 8.0]], uc.by_global_norm(10.0, curve=uc.curves.smooth), [[0.6 * 7.07107, 0.8 * 7.07107]]),
    ]:
        result, _ = uc.clip([fw.array(g) for g in grads], rule)
        for new, expected in zip(result, wanted, strict=True):
            np.testing.assert_allclose(fw.numpy(new), expected, rtol=CLOSE)


def after(fw: Framework, rule: uc.Rule, state: Any, grads: Any) -> tuple[Any, Any, Any]:
    """Return the factor, the limit and the state after one step from a state of numbers."""
    count = fw.array([100], "int32")
    new, report = fw.run(lambda g, s: rule.update(g, s)[1:], fw.array(grads), state(fw.array, count))
    return float(fw.numpy(report.factors)), float(fw.numpy(report.limits)), new


def test_agc(fw: Framework) -> None:
    """Brock et al.: a unit is a row in PyTorch and a column elsewhere; weights of 0 may grow still."""
    weights, grads = [[1.0, 1.0], [0.0, 0.0]], [[3.0, 4.0], [3.0, 4.0]]
    rows, columns = [[0.00848528, 0.0113137], [6e-6, 8e-6]], np.full((2, 2), 0.00707107)
    own = rows if fw.family == "PyTorch" else columns
    for rule, wanted in ((uc.agc(axis=1), rows), (uc.agc(axis=(0,)), columns), (uc.agc(), own)):
        result, _ = uc.clip(fw.array(grads), rule, params=fw.array(weights))
        np.testing.assert_allclose(fw.numpy(result), wanted, rtol=CLOSE)
    [bias], _ = clipped(fw, [[3.0, 4.0]], uc.agc(0.1), [[0.0, 0.0]])
    np.testing.assert_allclose(bias, [6e-5, 8e-5], rtol=CLOSE)  # one unit; not 0, as without eps
    with pytest.raises(ValueError, match=r"Relative.*pass params="):
        uc.clip(fw.array([1.0]), uc.agc())


def test_agc_of_any_order(fw: Framework) -> None:
    """As timm's ``norm_type``: both norms are of that order."""
    rng = np.random.default_rng(0)
    weights, grads = rng.normal(size=(4, 3)), 9 * rng.normal(size=(4, 3))
    for order in (1, 2, 3, math.inf):
        sizes = [np.linalg.norm(values, order, axis=1, keepdims=True) for values in (weights, grads)]
        wanted = grads * np.minimum(1, 0.1 * np.maximum(sizes[0], 1e-3) / sizes[1])
        [result], _ = clipped(fw, [grads], uc.agc(0.1, axis=1, ord=order), [weights])
        np.testing.assert_allclose(result, wanted, rtol=CLOSE)


def test_agc_without_the_head(fw: Framework) -> None:
    """The last layer's weight is left out, its bias is not; params may be given for all."""
    rule = uc.masked(uc.agc(0.01), lambda path, leaf: path[-2:] != ("head", "kernel"))
    grads = {"body": fw.array([3.0, 4.0]), "head": {"kernel": fw.array([[5.0]]), "bias": fw.array([5.0])}}
    params = {"body": fw.array([3.0, 4.0]), "head": {"kernel": fw.array([[1.0]]), "bias": fw.array([1.0])}}
    result, _ = fw.run(lambda g, p: uc.clip(g, rule, params=p), grads, params)
    np.testing.assert_allclose(fw.numpy(result["body"]), [0.03, 0.04], rtol=CLOSE)
    np.testing.assert_allclose(fw.numpy(result["head"]["kernel"]), [[5.0]])
    np.testing.assert_allclose(fw.numpy(result["head"]["bias"]), [0.01], rtol=CLOSE)


def test_cowclip(fw: Framework) -> None:
    """Zheng et al.: w = [3, 4] whose id occurs twice allows 10."""
    counts, grads, params = map(fw.array, ([2.0, 1.0], [[30.0, 40.0], [0.3, 0.4]], [[3.0, 4.0], [0.0, 1.0]]))
    result, report = fw.run(lambda n, g, p: uc.clip(g, uc.cowclip(n), params=p), counts, grads, params)
    np.testing.assert_allclose(fw.numpy(result), [[6.0, 8.0], [0.3, 0.4]], rtol=CLOSE)
    np.testing.assert_allclose(fw.numpy(report.limits), [10.0, 1.0], rtol=CLOSE)
    result, _ = uc.clip(grads, uc.cowclip(np.asarray([2, 1])), params=params)
    np.testing.assert_allclose(fw.numpy(result), [[6.0, 8.0], [0.3, 0.4]], rtol=CLOSE)
    with pytest.raises(ValueError, match=r"counts of shape \(3,\) do not fit norms of shape \(2,\)"):
        uc.clip(grads, uc.cowclip(np.ones(3)), params=params)


def test_larc(fw: Framework) -> None:
    """The factor min(trust·‖w‖ / (‖g‖ + decay·‖w‖) / lr, 1); weights of 0 limit nothing."""
    weights, grads = [[3.0, 4.0], [0.0]], [[30.0, 40.0], [7.0]]
    for decay in (0.0, 0.5):
        results, _ = clipped(fw, grads, uc.larc(0.1, weight_decay=decay), weights)
        factor = 0.02 * 5 / (50 + decay * 5) / 0.1
        np.testing.assert_allclose(results[0], np.asarray([30.0, 40.0]) * factor, rtol=CLOSE)
        np.testing.assert_allclose(results[1], [7.0])
    lr, grad, param = map(fw.array, (0.1, [0.3, 0.4], [3.0, 4.0]))
    small, _ = fw.run(lambda lr, g, p: uc.clip(g, uc.larc(lr), params=p), lr, grad, param)
    np.testing.assert_array_equal(fw.numpy(small), np.float32([0.3, 0.4]))


def test_percentile_of_four_norms(fw: Framework) -> None:
    """AutoClip: of 1, 2, 3, 4 the tenth percentile is 1.3; the first step is never clipped."""
    rule = uc.autoclip(window=5)
    state, limits = rule.init(fw.array([1.0])), []
    for norm in (1.0, 2.0, 3.0, 4.0):
        _, state, report = rule.update(fw.array([norm]), state)
        limits.append(float(fw.numpy(report.limits)))
    np.testing.assert_allclose(limits, [1.0, 1.1, 1.2, 1.3], rtol=1e-6)


def test_autoclip_clips_what_it_measures(fw: Framework) -> None:
    """The joint norm is clipped to the percentile: TensorFlow's port, which clips each tensor, leaves 5."""
    rule = uc.autoclip(0)
    state = rule.init([fw.array([1.0]), fw.array([1.0])])
    _, state, _ = rule.update([fw.array([4.0]), fw.array([0.0])], state)
    result, _, _ = rule.update([fw.array([3.0]), fw.array([4.0])], state)
    np.testing.assert_allclose(float(fw.numpy(uc.global_norm(result))), 4.0, rtol=1e-6)


def test_zclip_step(fw: Framework) -> None:
    """Kumar et al.: mean 1, variance 0.25, z 2 and the norm 3 give the limit 1.500001 and learn from 1.5."""
    state = lambda array, count: Moments(array([1.0]), array([0.25]), count)
    targets = {"reciprocal": 1.500001, "mean": 1.0, "threshold": 2.0}
    for target, limit in targets.items():
        _, found, new = after(fw, uc.zclip(2.0, target=target), state, [3.0])
        assert found == pytest.approx(limit, rel=1e-6)
        if target == "reciprocal":
            assert float(fw.numpy(new.means[0])) == pytest.approx(1.0150, rel=CLOSE)
            assert float(fw.numpy(new.variances[0])) == pytest.approx(0.249557, rel=CLOSE)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_spoils_no_memory(fw: Framework, bad: float) -> None:
    """After NaN or ∞ the state is the one before: the code of ZClip, AutoClip and OLMo does not recover soon."""
    for rule in (uc.zclip(warmup=2), uc.autoclip(window=4), uc.skip_spikes(window=4, warmup=2), uc.adagc(warmup=1)):
        state = rule.init([fw.array([1.0])])
        for norm in (1.0, 1.1, bad):
            before = state
            result, state, report = rule.update([fw.array([norm])], state)
        assert not fw.numpy(report.finite)
        plain = [uc.Clipper(rule), uc.Clipper(rule)]
        for clipper, one in zip(plain, (before, state), strict=True):
            clipper.state = one
        assert json.dumps(plain[0].state_dict()) == json.dumps(plain[1].state_dict())
        assert fw.numpy(result[0]).item() == 0.0 if rule.nonfinite == "skip" else math.isnan(fw.numpy(result[0]).item())
        [result], _, _ = rule.update([fw.array([1.05])], state)
        assert 1.0 <= fw.numpy(result).item() <= 1.06


def test_zclip_options(fw: Framework) -> None:
    """The published code multiplies mean and deviation by clip_factor; without an update a spike teaches nothing."""
    state = lambda array, count: Moments(array([1.0]), array([0.25]), count)
    _, found, new = after(fw, uc.zclip(2.0, clip_factor=0.5), state, [3.0])
    assert found == pytest.approx(0.5 * 1.500001, rel=1e-6)
    assert float(fw.numpy(new.means[0])) == pytest.approx(0.97 + 0.03 * 0.5 * 1.500001, rel=1e-6)
    _, found, new = after(fw, uc.zclip(2.0, skip_update_on_spike=True), state, [3.0])
    assert found == pytest.approx(1.500001, rel=1e-6)
    assert (float(fw.numpy(new.means[0])), float(fw.numpy(new.variances[0]))) == (1.0, 0.25)
    _, found, new = after(fw, uc.zclip(2.0, clip_factor=9.0), state, [3.0])  # nothing is learned that was not seen
    assert float(fw.numpy(new.means[0])) == pytest.approx(0.97 + 0.03 * 3, rel=1e-6)


def test_log_zscore_of_seven_norms(fw: Framework) -> None:
    """Chorowski et al., as TensorFlow had it: after 1, 2, 1, 2, 1, 2 a norm of 50 becomes 2.3535."""
    rule = uc.log_zscore()
    state = rule.init(fw.array([1.0]))
    for norm in (1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 50.0):
        result, state, report = rule.update(fw.array([norm]), state)
    assert float(fw.numpy(report.factors)) == pytest.approx(0.04707, rel=1e-4)
    assert float(fw.numpy(result)[0]) == pytest.approx(2.3535, rel=1e-4)
    _, same, _ = rule.update(fw.array([0.0]), state)  # which has no logarithm
    np.testing.assert_array_equal(fw.numpy(same.means[0]), fw.numpy(state.means[0]))
    state = rule.init(fw.array([1.0]))
    for norm in (0.0, 0.0, 1000.0):  # the first one that counts is the mean
        result, state, _ = rule.update(fw.array([norm]), state)
    assert float(fw.numpy(result)[0]) == 1000.0


def test_adagc_step(fw: Framework) -> None:
    """Wang et al.: an average of 1 and the norm 2 give the factor 0.525 and the average 1.001."""
    rule = uc.Rule(uc.limits.Ema(1.05, 0.98))
    factor, _, new = after(fw, rule, lambda array, count: Averages(array([1.0]), count[0]), [2.0])
    assert factor == pytest.approx(0.525, rel=1e-6)
    assert float(fw.numpy(new.averages[0])) == pytest.approx(1.001, rel=1e-6)


def test_spam_step(fw: Framework) -> None:
    """Huang et al.: a second moment of 1e-4 lets 2 be 0.70711; an entry that was always 0 may grow."""
    rule, count = uc.spam(), fw.array([100], "int32")
    state = Averages(fw.array([[1e-4, 0.0]]), count)
    result, _ = fw.run(lambda g, s: rule.update([g], s)[0:2], fw.array([-2.0, 3.0]), state)
    np.testing.assert_allclose(fw.numpy(result[0]), [-0.70711, 3.0], rtol=CLOSE)


def test_adagn_of_five_norms(fw: Framework) -> None:
    """Huang et al.: norms 1, 1, 1, 100, 1 become 1, 1, 1, 0.7433, 0.5543."""
    rule = uc.adagn()
    state, found = rule.init([fw.array([1.0])]), []
    for norm in (1.0, 1.0, 1.0, 100.0, 1.0):
        [result], state, _ = rule.update([fw.array([norm])], state)
        found.append(fw.numpy(result).item())
    np.testing.assert_allclose(found, [1, 1, 1, 0.7433, 0.5543], rtol=1e-4)


def test_norms_that_begin_with_zero(fw: Framework) -> None:
    """A gradient of zeros, as of a layer that others mask at first, does not hold down all later ones."""
    for rule in (uc.norm_growth(), uc.adagc(warmup=0), uc.adagc(warmup=1), uc.adagc(warmup=3, warmup_norm=9.0)):
        state = rule.init([fw.array([1.0])])
        for norm in (0.0, 0.0, 3.0, 3.0):
            [result], state, _ = rule.update([fw.array([norm])], state)
            assert fw.numpy(result).item() == norm


def test_a_step_without_gradients(fw: Framework) -> None:
    """A tree without arrays teaches nothing, first or later; nor does one of which a mask leaves nothing."""
    for rule in (uc.zclip(warmup=2), uc.autoclip(window=3), uc.adagc(), uc.skip_spikes(window=4)):
        clipper, plain = uc.Clipper(rule), uc.Clipper(rule)
        for grads in ({"a": None}, {"a": fw.array([1.0])}, {"a": None}, {"a": fw.array([1.1])}):
            clipped = clipper(grads)
            assert (clipped["a"] is None) == (grads["a"] is None)
            if grads["a"] is not None:
                plain(grads)
        assert clipper.state_dict() == plain.state_dict()
        none = uc.masked(rule, lambda path, leaf: False)
        state = none.init([fw.array([1.0])])
        [clipped], state, report = none.update([fw.array([9.0])], state)
        assert fw.numpy(clipped).item() == 9.0
        assert report == uc.Report()


def test_gradients_that_come_and_go(fw: Framework) -> None:
    """A state of each leaf is of the same leaves at every step; groups keep theirs whichever leaf comes first."""
    one, two = fw.array([1.0]), fw.array([1000.0])
    clipper = uc.Clipper(uc.adagc())
    clipper({"x": one, "y": None})
    for grads in ({"x": None, "y": two}, {"x": one, "y": two}):
        with pytest.raises(ValueError, match=r"grads\['y'\].*had a gradient at one step and none at another"):
            clipper(grads)
    rule = uc.adagc()
    with pytest.raises(ValueError, match=r"the state of .* is for 1 norms, but there are 2"):
        rule.update([one, two], rule.init([one]))
    rule = uc.Rule(uc.limits.Ema(1.5, 0.9), scope=uc.scopes.groups(lambda path, leaf: "b" if path[0] == "q" else "a"))
    clipper = uc.Clipper(rule)
    clipper({"p": one, "q": two, "r": one})
    clipper({"p": None, "q": two, "r": one})
    assert not fw.numpy(clipper.report.clipped)


@pytest.mark.ways(*EAGER, without="Dask")  # whose graph grows with each step
def test_ranks_and_ranges(fw: Framework) -> None:
    """A percentile that is one of the norms is that one exactly; constant norms of any size are no spikes."""
    clipper = uc.Clipper(uc.percentile_clipping(14, 50))
    for i in range(50):
        clipper(fw.array([1.0 if 10 <= i < 18 else 1e6]))
    assert fw.numpy(clipper(fw.array([2.0]))).item() == 1.0
    for norm in (1e-30, 1.0, 1e19):
        clipper = uc.Clipper(uc.skip_spikes(window=4))
        for _ in range(6):
            assert fw.numpy(clipper(fw.array([norm]))).item() == np.float32(norm)


def test_quantile_step(fw: Framework) -> None:
    """Andrew et al.: a limit of 1 that all norms are within becomes exp(-0.1); half of them leave it."""
    rule = uc.by_example_quantile(start=1.0)
    for values, wanted in (([[0.5], [0.1]], 0.904837), ([[0.5], [2.0]], 1.0), ([[3.0], [2.0]], math.exp(0.1))):
        state = rule.init([fw.array(values)])
        _, new, _ = rule.update([fw.array(values)], state)
        assert float(fw.numpy(new.limits[0])) == pytest.approx(wanted, rel=1e-6)
    _, same, _ = rule.update([fw.array(np.zeros((0, 1)))], new)  # a batch of no example
    assert float(fw.numpy(same.limits[0])) == float(fw.numpy(new.limits[0]))


def test_quantile_bounds(fw: Framework) -> None:
    """The bounds of Opacus' AdaClip: the limit moves, and stays between them."""
    rule = uc.by_example_quantile(start=1.0, min=0.95, max=1.05)
    for values, wanted in (([[0.5], [0.1]], 0.95), ([[0.5], [2.0]], 1.0), ([[3.0], [2.0]], 1.05)):
        state = rule.init([fw.array(values)])
        _, new, _ = fw.run(lambda g, s: rule.update([g], s), fw.array(values), state)
        assert float(fw.numpy(new.limits[0])) == pytest.approx(wanted, rel=1e-6)


def test_automatic_clipping(fw: Framework) -> None:
    """AUTO-S, NSGD and PSAC of a norm of 1; PSAC's large gradients end near c, not near 0 as in a fork of Opacus."""
    for rule, wanted in ((uc.auto_s(), 0.9901), (uc.auto_s(gamma=1.0), 0.5), (uc.psac(), 0.91667)):
        [result], _ = clipped(fw, [[[0.6, 0.8]]], rule)
        np.testing.assert_allclose(np.linalg.norm(result), wanted, rtol=CLOSE)
    [result], _ = clipped(fw, [[[6.0, 8.0], [0.0, 0.0]]], uc.psac())
    np.testing.assert_allclose(np.linalg.norm(result, axis=1), [0.999, 0.0], rtol=1e-4)


EXAMPLES = [[[0.0, -0.5], [3.0, 4.0], [5.0, 6.0], [0.0, 0.0]], [[0.0], [5.0], [-3.0], [0.0]]]


def test_examples(fw: Framework) -> None:
    """Abadi et al.: each example's gradient over all leaves is clipped, then they are added."""
    rows = np.concatenate([np.asarray(leaf) for leaf in EXAMPLES], axis=1)
    wanted = (rows / np.maximum(np.linalg.norm(rows, axis=1), 1)[:, None]).sum(0)
    arrays = [fw.array(leaf) for leaf in EXAMPLES]
    total, report = fw.run(lambda g: uc.clip_and_sum(g, uc.by_example_norm(1.0)), arrays)
    np.testing.assert_allclose(np.concatenate([fw.numpy(t) for t in total]), wanted, rtol=1e-6)
    assert (fw.numpy(report.factors) < 1).sum() == 2
    each, _ = fw.run(lambda g: uc.clip(g, uc.by_example_norm(1.0)), arrays)
    np.testing.assert_allclose(np.concatenate([fw.numpy(e).sum(0) for e in each]), wanted, rtol=1e-6)


def test_examples_layer_by_layer(fw: Framework) -> None:
    """McMahan et al.: the limit is shared among the leaves, evenly or by their size."""
    ones = [np.ones((1, 2)), np.ones((1, 1, 17)) * 9]
    total, _ = clipped(fw, ones, uc.by_example_layer_norm(2**0.5))
    np.testing.assert_allclose([np.linalg.norm(t) for t in total], [1, 1], rtol=1e-6)
    total, _ = clipped(fw, [ones[0] * 9, ones[1]], uc.by_example_layer_norm(19**0.5, by_size=True))
    np.testing.assert_allclose([np.linalg.norm(t) ** 2 for t in total], [2, 17], rtol=1e-5)


def test_examples_that_differ_in_number(fw: Framework) -> None:
    """Leaves with other numbers of examples are refused, and both shapes are named."""
    grads = {"w": fw.array(np.ones((4, 2))), "b": fw.array(np.ones((3,)))}
    for call in (uc.clip, uc.clip_and_sum):
        with pytest.raises(ValueError, match=r"grads\['b'\].*\(3,\).*grads\['w'\].*\(4, 2\)|\[\(3,\), \(4, 2\)\]"):
            call(grads, uc.by_example_norm(1.0))
    with pytest.raises(ValueError, match=r"\[\(3,\), \(4, 2\)\]|\[\(4, 2\), \(3,\)\]"):
        uc.clip_and_sum(grads, uc.by_example_layer_norm(1.0, by_size=True))
    for wrong in (uc.by_norm(1.0), uc.by_global_norm(1.0), uc.Rule(1.0, scope=uc.scopes.axes(0))):
        with pytest.raises(ValueError, match="rule must keep the examples apart"):
            uc.clip_and_sum(fw.array(np.ones((4, 2))), wrong)
    with pytest.raises(ValueError, match=r"no example axis|along the first axis"):
        uc.clip_and_sum([fw.array(1.0)], uc.by_example_norm(1.0))


def test_sums_of_examples_keep_the_dtype(fw: Framework) -> None:
    """Half precision is added in float32; absent gradients stay absent; a batch of none gives zeros."""
    for dtype in {"float16", "bfloat16", "float32"} & set(fw.dtypes):
        grads = {"w": fw.array(np.full((3000, 2), 0.01), dtype), "none": None}
        total, _ = fw.run(lambda g: uc.clip_and_sum(g, uc.by_example_norm(1.0)), grads)
        assert total["none"] is None
        assert fw.dtype(total["w"]) == dtype
        np.testing.assert_allclose(fw.numpy(total["w"]).astype("float64"), [30, 30], rtol=5e-3)
    none, _ = uc.clip_and_sum(fw.array(np.ones((0, 2))), uc.by_example_norm(1.0))
    np.testing.assert_array_equal(fw.numpy(none), [0.0, 0.0])


def test_one_bad_example(fw: Framework) -> None:
    """An example that is not finite leaves the others alone; the policies skip all, or zero its bad entries."""
    grads = [fw.array([[math.nan], [3.0]]), fw.array([[1.0], [4.0]])]
    for make in (uc.by_example_norm, uc.by_example_layer_norm):
        for policy, wanted in (("propagate", [math.nan, 1.0]), ("skip", [0.0, 0.0]), ("zero", [1.0, 1.0])):
            result, report = uc.clip(grads, make(1.0, nonfinite=policy))
            norms = np.linalg.norm([fw.numpy(x).ravel() for x in result], axis=0)
            if make is uc.by_example_norm:
                np.testing.assert_allclose(norms, wanted, rtol=1e-6)
            assert not fw.numpy(report.finite)


def test_normalized(fw: Framework) -> None:
    """Every gradient gets the norm c, small ones too, and zeros stay zeros."""
    for values, wanted in (([3e-4, 4e-4], [0.6, 0.8]), ([30.0, 40.0], [0.6, 0.8]), ([0.0, 0.0], [0.0, 0.0])):
        [result], _ = clipped(fw, [values], uc.to_global_norm(1.0))
        np.testing.assert_allclose(result, wanted, rtol=1e-6)


def test_groups_with_limits_of_their_own(fw: Framework) -> None:
    """Each label has its limit, one that remembers too; a label without one is refused by name."""
    label = lambda path, leaf: path[0]
    grads = {"a": [fw.array([3.0]), fw.array([4.0])], "b": fw.array([12.0]), "c": fw.array([7.0])}
    rule = uc.by_group_norm({"a": 1.0, "b": 6.0, "c": math.inf}, label)
    result, report = fw.run(lambda g: uc.clip(g, rule), grads)
    np.testing.assert_allclose([fw.numpy(x).item() for x in result["a"]], [0.6, 0.8], rtol=1e-6)
    assert [float(fw.numpy(result[k])[0]) for k in "bc"] == [6.0, 7.0]
    assert [float(fw.numpy(report.norms[k])) for k in "abc"] == [5.0, 12.0, 7.0]
    mixed = uc.by_group_norm({"a": uc.limits.Ema(2.0, 0.0, 0), "b": uc.limits.Relative(0.5), "c": 1.0}, label)
    state = mixed.init(grads)
    for _ in range(2):
        grads["a"] = [10 * x for x in grads["a"]]
        result, state, report = mixed.update(grads, state, params={**grads, "b": fw.array([8.0])})
    assert [float(fw.numpy(report.limits[k])) for k in "abc"] == pytest.approx([100.0, 4.0, 1.0])
    with pytest.raises(ValueError, match=r"group 'c' has no limit: add it to \['a'\]"):
        uc.clip({"c": fw.array([1.0])}, uc.by_group_norm({"a": 1.0}, label))


@pytest.mark.everywhere
def test_init_of_parameters() -> None:
    """The state can be made from what the framework calls parameters, not only from gradients."""
    if "torch" in {fw.family.lower().removeprefix("py") for fw in CHOSEN}:
        import torch

        rule = uc.adagc()
        state = rule.init([torch.nn.Parameter(torch.ones(2))])
        assert not state.averages[0].requires_grad
    if "TensorFlow" in {fw.family for fw in CHOSEN}:
        import tensorflow as tf

        assert uc.zclip().init({"w": tf.Variable([1.0])}).count == 0


def test_schedule(fw: Framework) -> None:
    """A schedule gets the step, and compiles once."""
    rule = uc.by_global_norm(uc.limits.Schedule(lambda step: 1.0 + 4.0 * 0.5**step))
    update = fw.compiled(lambda g, s: rule.update(g, s))
    state, found = rule.init(fw.array([1.0])), []
    for _ in range(4):
        result, state, _ = update(fw.array([30.0, 40.0]), state)
        found.append(float(np.linalg.norm(fw.numpy(result))))
    np.testing.assert_allclose(found, [5, 3, 2, 1.5], rtol=1e-6)


CURVES = {
    "hard": (uc.curves.hard, lambda r: min(1.0, 1 / r)),
    "soft": (uc.curves.soft, lambda r: 1 / (1 + r)),
    "smooth": (uc.curves.smooth, lambda r: 1 / math.hypot(1, r)),
    "tanh": (uc.curves.tanh, lambda r: math.tanh(r) / r),
    "normalize": (uc.curves.normalize, lambda r: 1 / r),
    "skip": (uc.curves.reject, lambda r: float(r <= 1)),
}


@pytest.mark.ways(*ROUNDED)
def test_curves(fw: Framework) -> None:
    """Each curve is its formula, as far as float32 reaches; a limit of 0 and a norm of 0 give numbers."""
    call = fw.compiled(
        lambda g, c: {name: uc.clip(g, uc.by_global_norm(c, curve=curve)) for name, (curve, _) in CURVES.items()}
    )

    def clip(norm: float, limit: float) -> dict[str, tuple[float, float]]:
        results = call(fw.array([norm]), fw.array(limit))
        return {name: (float(fw.numpy(g)[0]), float(fw.numpy(report.factors))) for name, (g, report) in results.items()}

    for norm, limit in [(2.0, 1.0), (1.0, 1.0), (0.3, 1.0), (1e-20, 1e10), (1e20, 1e-10), (3e38, 1.0), (1e-3, 1e30)]:
        for name, (result, factor) in clip(norm, limit).items():
            wanted = CURVES[name][1](norm / limit)
            if 1e-37 < wanted < 1e37 and norm * wanted > 1e-37:
                np.testing.assert_allclose([factor, result], [wanted, norm * wanted], rtol=3e-6, err_msg=name)
    for norm, limit in [(0.0, 1.0), (0.0, 0.0), (5.0, 0.0)]:
        assert {result for result, _ in clip(norm, limit).values()} == {0.0}
    assert set(clip(5.0, math.inf).values()) == {(5.0, 1.0)}


@pytest.mark.parametrize("name", ["soft", "smooth", "tanh", "normalize", "skip"])
@pytest.mark.ways("torch", "tensorflow", "jax.jit")
def test_derivatives_of_curves(fw: Framework, name: str) -> None:
    """The derivative through every curve is finite, at zero and at the limit too."""
    if fw.family in {"PyTorch", "TensorFlow", "JAX"}:
        slope = fw.derivative(partial(_product, uc.by_global_norm(1.0, curve=CURVES[name][0])))
        for values in ([0.0, 0.0], [0.6, 0.8], [3.0, 4.0], [1e-4, 0.0]):
            assert np.isfinite(fw.numpy(slope(fw.array(values)))).all(), values


@pytest.mark.parametrize("name", ["adagc", "adagn", "zclip", "autoclip", "log_zscore", "by_example_layer_norm"])
@pytest.mark.ways("torch", "tensorflow", "jax.jit")
def test_derivatives_through_limits(fw: Framework, name: str) -> None:
    """The derivative is finite also where the limit depends on the norm: at a step in the warm-up, and at a spike."""
    if fw.family in {"PyTorch", "TensorFlow", "JAX"}:
        rule = {
            "adagc": uc.adagc(warmup=3),
            "adagn": uc.adagn(),
            "zclip": uc.zclip(warmup=3),
            "autoclip": uc.autoclip(50, window=4),
            "log_zscore": uc.log_zscore(z=0.5),
            "by_example_layer_norm": uc.by_example_layer_norm(1.0),
        }[name]
        update = fw.compiled(rule.update)
        slope = fw.derivative(lambda x, state: backend_of(x).xp.sum(rule.update(x, state)[0] * x))
        state = rule.init(fw.array([[1.0, 1.0]]))
        for values in ([[1.0, 1.0]], [[1.1, 0.9]], [[0.0, 0.0]], [[1.0, 1.1]], [[50.0, 1.0]]):
            old = state
            _, state, _ = update(fw.array(values), old)
            assert np.isfinite(fw.numpy(slope(fw.array(values), old))).all(), values


def _product(rule: uc.Rule, x: Any) -> Any:
    return backend_of(x).xp.sum(uc.clip(x, rule)[0] * x)


def double(g: Any) -> Any:
    """Stand for a function of one's own."""
    return 2 * g


def test_chain(fw: Framework) -> None:
    """Rules and functions run one after the other; the report has the norms that each of them saw."""
    rule = uc.chain(double, uc.by_norm(4.0), uc.by_global_norm(1.0))
    result, report = fw.run(lambda g: uc.clip(g, rule), [fw.array([3.0]), fw.array([0.5])])
    np.testing.assert_allclose([fw.numpy(x).item() for x in result], np.asarray([4, 1]) / 17**0.5, rtol=1e-6)
    assert report.norms[0] is None
    assert [float(fw.numpy(n)) for n in report.norms[1]] == [6.0, 1.0]
    assert float(fw.numpy(report.norms[2])) == pytest.approx(17**0.5)
    assert fw.numpy(report.clipped)
    assert fw.numpy(report.finite)


def test_chain_remembers_together(fw: Framework) -> None:
    """What one rule finds not finite teaches none of them: not the zeros that a skipped step consists of."""
    rule = uc.chain(uc.by_global_norm(1.0, nonfinite="skip"), uc.autoclip(50, window=3))
    update = fw.compiled(lambda g, s: rule.update(g, s))
    state = rule.init(fw.array([1.0]))
    for norm in (0.5, math.nan, 0.7):
        result, state, report = update(fw.array([norm]), state)
    assert float(fw.numpy(report.limits[1])) == pytest.approx(0.6)
    np.testing.assert_allclose(fw.numpy(result), [0.6], rtol=1e-6)
    rule = uc.chain(uc.skip_spikes(warmup=3), uc.autoclip(50, window=9))
    update, state = fw.compiled(lambda g, s: rule.update(g, s)), rule.init(fw.array([1.0]))
    for norm in (1.0, 1.1, 0.9, 100.0):
        _, state, report = update(fw.array([norm]), state)
    assert fw.numpy(report.skipped)
    np.testing.assert_allclose(sorted(fw.numpy(state[1].norms)[0, :4]), [-1, 0.9, 1.0, 1.1], rtol=1e-6)


def test_masked(fw: Framework) -> None:
    """What is left out comes back as it is and does not count; any rule or function can be masked."""
    where = lambda path, leaf: "b" not in path
    grads = {"a": [fw.array([3.0]), None, fw.array([4.0])], "b": fw.array([math.nan])}
    result, report = fw.run(lambda g: uc.clip(g, uc.masked(uc.by_global_norm(1.0), where)), grads)
    np.testing.assert_allclose([fw.numpy(x).item() for x in result["a"] if x is not None], [0.6, 0.8], rtol=1e-6)
    assert result["a"][1] is None
    assert np.isnan(fw.numpy(result["b"]))
    assert float(fw.numpy(report.norms)) == 5.0
    result, _ = fw.run(lambda g: uc.clip(g, uc.masked(double, where)), grads)
    assert float(fw.numpy(result["a"][0])[0]) == 6.0
    rule = uc.masked(uc.chain(uc.zclip(), uc.by_norm(1.0)), where)
    state = rule.init(grads)
    result, state, _ = rule.update(grads, state)
    assert float(fw.numpy(result["a"][0])[0]) == 1.0


def first_and_c(path: Any, leaf: Any) -> bool:
    """Leave out ``b``."""
    return path[0] != "b"


NESTED = {
    "chain": uc.chain(uc.by_value(-4.0, 4.0), uc.by_norm(3.0), uc.by_global_norm(1.0)),
    "masked": uc.masked(uc.by_global_norm(1.0), first_and_c),
    "nested": uc.chain(uc.masked(uc.chain(double, uc.by_norm(5.0), uc.adagc(warmup=0)), first_and_c), uc.zclip()),
}


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("name", NESTED)
def test_gradients_are_flattened_once(
    fw: Framework, name: str, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rules there are, and wherever they clip; what a state needs of the structure is not counted."""
    if in_place and not fw.writes:
        return
    grads = {"a": fw.array([3.0, 4.0]), "b": fw.array([12.0]), "c": [fw.array([5.0]), None]}
    rule, flattened = NESTED[name], []
    state, flatten = rule.init(grads), optree.tree_flatten
    monkeypatch.setattr(optree, "tree_flatten", lambda tree, **how: flattened.append(how) or flatten(tree, **how))
    clipped, _, _ = rule.update(grads, state, in_place=in_place)
    assert flattened.count({"none_is_leaf": False}) == 1
    if not rule.memory:
        assert len(flattened) == 1
    assert clipped["c"][1] is None
    if fw.same_objects:
        assert (clipped["b"] is grads["b"]) == (in_place or name != "chain")


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("kind", ["floats", "integers", "0-d", "iterator"])
def test_a_chain_does_what_its_rules_do(fw: Framework, kind: str, in_place: bool) -> None:
    """With any kind of gradients, of which each rule gets what the one before returned."""
    if in_place and (kind == "integers" or not fw.writes):
        return
    values, dtype = ([3, 40], "int32") if kind == "integers" else ([3.0, 40.0], "float32")

    def grads() -> Any:
        leaves = [fw.array(values, dtype), fw.array(values if kind != "0-d" else 7.0, dtype)]
        return {"a": iter(leaves) if kind == "iterator" else leaves, "b": fw.array(values, dtype)}

    rules = [uc.by_value(-30, 30), uc.masked(uc.chain(double, uc.by_norm(20.0)), first_and_c), uc.by_global_norm(9.0)]
    alone, reports = grads(), []
    for rule in rules:
        alone, _, report = rule.update(alone, NoState(), in_place=in_place)
        reports.append(report)
    clipped, _, report = uc.chain(*rules).update(grads(), NoState(), in_place=in_place)
    for one, other in zip([*clipped["a"], clipped["b"]], [*alone["a"], alone["b"]], strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(fw.numpy(one), fw.numpy(other))
    assert repr(report) == f"<Report: {' | '.join(str(one) for one in reports[1:])}>"


class Own:
    """A rule of somebody's own, which has only what every rule has."""

    memory = by_leaf = False

    def init(self, grads: Any) -> Any:
        """Return no state."""
        return NoState()

    def update(self, grads: Any, state: Any, params: Any = None, all_reduce: Any = None, **others: Any) -> Any:
        """Negate the gradients of a dict, and say so."""
        assert set(others) <= {"in_place", "loss", "shared"}
        return {key: None if grad is None else -grad for key, grad in grads.items()}, state, uc.Report()


class Negative(uc.Rule):
    """A rule of somebody's own that does more than the rule it is made from."""

    def update(self, *args: Any, **named: Any) -> Any:
        """Clip, then negate."""
        clipped, state, report = super().update(*args, **named)
        return {key: None if grad is None else -grad for key, grad in clipped.items()}, state, report


@pytest.mark.parametrize("own", [Own(), Negative(math.inf)], ids=["own", "subclass"])
def test_own_rules_in_chains_and_masks(fw: Framework, own: Any) -> None:
    """They get the gradients as they are, whatever ran before, and what they return goes on."""
    grads = {"a": fw.array([3.0]), "b": fw.array([4.0])}
    rule = uc.chain(uc.by_norm(9.0), own, uc.masked(own, lambda path, leaf: path == ("b",)), uc.by_global_norm(1.0))
    for some in (rule, uc.chain(rule), uc.chain(uc.by_global_norm(1.0), rule.rules[2], own)):
        result, report = uc.clip(grads, some)
        np.testing.assert_allclose([fw.numpy(result[key]).item() for key in "ab"], [-0.6, 0.8], rtol=1e-6)
        assert fw.numpy(report.clipped)


def test_in_place(fw: Framework) -> None:
    """Chains and masks clip in place too, each memory once."""
    if fw.writes:
        a, b = fw.array([3.0]), fw.array([5.0])
        one = uc.masked(uc.by_norm(2.0), lambda path, leaf: path != (1,))
        report = uc.clip_([a, b, a], uc.chain(one, lambda g: g / 2))
        assert [fw.numpy(x).item() for x in (a, b)] == [1.0, 2.5]
        assert [float(fw.numpy(n)) for n in (report.norms[0][0],)] == [3.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: uc.clip(g, uc.Clipper(uc.zclip())), "a uc.Clipper has one, clipper.rule"),
        (lambda g: uc.chain(uc.Clipper(uc.zclip())), "a uc.Clipper has one, clipper.rule"),
        (lambda g: uc.clip(g, uc.limits.ZScore(2.5, 0.97)), r"a limit is only one of its choices: uc\.Rule\(limit\)"),
        (lambda g: uc.Clipper(uc.agc)(g), r"uc\.agc makes one: call it"),
        (lambda g: uc.by_global_norm(uc.zclip()), r"limit, must be a number, a 0-d array or a uc\.Limit"),
        (lambda g: uc.by_group_norm({0: uc.zclip()}, max), r"limit, must be a number, a 0-d array or a uc\.Limit"),
        (lambda g: uc.zclip().update(g, None), r"state must be what rule\.init\(grads\) returns"),
    ],
)
def test_one_thing_for_another(call: Any, message: str) -> None:
    """A clipper, a limit, an uncalled preset or no state in place of a rule is refused, with what to write."""
    with pytest.raises(TypeError, match=message):
        call([np.ones(2)])


def test_rules_that_are_none() -> None:
    """Wrong choices are refused by name and value when the rule is made."""
    for make, message in [
        (lambda: uc.autoclip(101), "percentile must be from 0 to 100, got 101"),
        (lambda: uc.autoclip(10, window=0), "window must be at least 1, got 0"),
        (lambda: uc.zclip(target="median"), "target must be one of 'reciprocal', 'mean', 'threshold', got 'median'"),
        (lambda: uc.zclip(decay=1.5), "decay must be from 0 to below 1, got 1.5"),
        (lambda: uc.zclip(warmup=1), "warmup must be at least 2, got 1"),
        (lambda: uc.percentile_clipping(150), "percentile must be from 0 to 100, got 150"),
        (lambda: uc.percentile_clipping(5, window=1), "window must be at least 2, got 1"),
        (lambda: uc.by_example_quantile(start=0.0), "start must be above 0"),
        (lambda: uc.larc(0.1, trust_coefficient=-1.0), "trust_coefficient must be 0 or more"),
        (lambda: uc.agc(-0.1), "ratio must be 0 or more"),
        (lambda: uc.skip_spikes(window=10, warmup=20), "warmup must be from 2 to 10, got 20"),
        (lambda: uc.auto_s(gamma=0.0), "gamma must be above 0"),
        (lambda: uc.by_group_norm({"a": -1.0}, str), "limit, must be 0 or more"),
        (lambda: uc.zclip(clip_factor=-1.0), "clip_factor must be 0 or more"),
        (lambda: uc.zclip(target="mean", clip_factor=0.7), "clip_factor is for target='reciprocal' only, got 0.7"),
        (lambda: uc.agc(ord=0.5), "ord, .*at least 1"),
        (lambda: uc.by_example_quantile(min=1.0), "start must be from min to max, got start=0.1, min=1.0, max=inf"),
        (lambda: uc.by_example_quantile(start=2.0, max=1.0), "start must be from min to max"),
        (
            lambda: uc.autoclip(0.95),
            r"percentile must be in percent, 95 for a share of 0\.95.*uc\.limits\.Percentile\(0\.95",
        ),
        (lambda: uc.autoclip(0.95, window=None), r"percentile must be in percent, 95 for a share of 0\.95"),
        (lambda: uc.percentile_clipping(0.05), r"percentile must be in percent, 5 for a share of 0\.05, got 0\.05"),
        (lambda: uc.by_example_quantile(50), r"quantile must be from 0 to 1 \(a share: 0\.5 for 50 %\), got 50"),
        (lambda: uc.zclip(decay=97), r"decay must be from 0 to below 1 \(a share: 0\.97 for 97 %\), got 97"),
        (lambda: uc.norm_growth(0.01), r"ratio must be at least 1 .*1\.01 for a growth of 1 %.*got 0\.01"),
        (lambda: uc.adagc(0.05), r"ratio must be at least 1 .*1\.05 for a growth of 5 %.*got 0\.05"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
    for make, message in [
        (lambda: uc.chain(1.0), "rule must be a rule"),
        (lambda: uc.masked(uc.by_norm(1.0), True), "where must be a function"),
        (lambda: uc.limits.Schedule(1.0), "fn must be a function"),
        (lambda: uc.clip_and_sum(np.ones((2, 2)), uc.by_value(-1.0, 1.0)), "rule must be one of norms"),
    ]:
        with pytest.raises(TypeError, match=message):
            make()
    with pytest.raises(ValueError, match=r"remembers earlier steps.*Clipper"):
        uc.clip(np.ones(2), uc.chain(uc.zclip(), uc.by_norm(1.0)))
