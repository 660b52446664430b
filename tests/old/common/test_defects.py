"""Fifteen defects found in other libraries, by their numbers D1 to D15: right here, wherever they apply.

What a compiler may change of them is promised, and tested in every way of running (``tests/promises.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

import oracle
import uniclip as uc
from frameworks import EAGER, Framework, some_of
from promises import PROMISES, Last, close, derivative, sparse


def d1_finite_gradients_survive_the_overflow_of_their_squares(fw: Framework) -> None:
    for dtype, big in (("float32", 1e30), ("float32", 2.7e19), ("float64", 2e200)):
        if dtype in fw.dtypes:
            grads = [fw.array([big, 1.0], dtype)]
            [clipped], norm = fw.run(lambda g: uc.clip_by_global_norm(g, 1.0), grads)
            close(fw, norm, big, dtype)
            close(fw, clipped, [1.0, 1 / big], dtype)
            close(fw, fw.run(lambda g: uc.clip_by_norm(g, 1.0), grads)[0], [1.0, 1 / big], dtype)


def d2_an_infinite_limit_only_measures(fw: Framework) -> None:
    [clipped], norm = fw.run(lambda g: uc.clip_by_global_norm(g, math.inf), [fw.array([1e30, -2.0])])
    close(fw, norm, 1e30, "float32")
    np.testing.assert_array_equal(fw.numpy(clipped), np.asarray([1e30, -2.0], "float32"))


def d3_rows_that_occur_twice_are_summed(fw: Framework) -> None:
    twice, cancelling = fw.sparse((5, 1), [0, 0], [[3.0], [3.0]]), fw.sparse((5, 1), [0, 0], [[3.0], [-3.0]])
    (clipped, norm), each = fw.run(lambda g: (uc.clip_by_global_norm(g, 1.0), uc.clip_by_norm(g, 1.0)), [twice])
    close(fw, norm, 6.0, "float32")
    for leaf in (clipped[0], each[0]):
        np.testing.assert_array_equal(fw.dense(leaf)[:, 0], [1, 0, 0, 0, 0])
    assert float(fw.numpy(fw.run(uc.global_norm, [cancelling]))) == 0
    [bounded] = fw.run(lambda g: uc.clip_by_value(g, -1, 1), [fw.sparse((5, 1), [2, 2], [[0.8], [0.8]])])
    np.testing.assert_array_equal(fw.dense(bounded)[:, 0], [0, 0, 1, 0, 0])


def d4_indices_are_no_gradients(fw: Framework) -> None:
    grads = [fw.sparse((9, 1), [0, 7], [[3.0], [4.0]])]
    norm, [bounded] = fw.run(lambda g: (uc.global_norm(g), uc.clip_by_value(g, -1, 1)), grads)
    close(fw, norm, 5.0, "float32")
    np.testing.assert_array_equal(fw.dense(bounded)[:, 0], [1, 0, 0, 0, 0, 0, 0, 1, 0])


def d5_the_norm_of_half_precision_does_not_stall(fw: Framework) -> None:
    leaves = [fw.array([16.0], "bfloat16"), *(fw.array([1.0], "bfloat16") for _ in range(fw.many - 1))]
    true = math.sqrt(256 + fw.many - 1)
    clipped, norm = fw.run(lambda g: uc.clip_by_global_norm(g, 17.0), leaves)
    close(fw, norm, true, "float32")
    assert oracle.norm(float(fw.numpy(leaf)[0]) for leaf in clipped) <= 17 * (1 + 2**-8)


def d6_half_precision_neither_overflows_nor_underflows(fw: Framework) -> None:
    for values in ([400.0, 400.0], [300.0, 300.0], [1e-4, 1e-5], np.full(1000, 100.0)):
        grads = [fw.array(values, "float16")]
        true = oracle.norm(fw.numpy(grads[0]).astype("float64").tolist())
        clipped, norm = fw.run(lambda g, limit=true / 2: uc.clip_by_global_norm(g, limit), grads)
        close(fw, norm, true, "float32")
        close(fw, clipped[0], fw.numpy(grads[0]).astype("float64") / 2, "float16")
    mixed = [fw.array([3.0], "float16"), fw.array([1e5])]
    clipped, norm = fw.run(lambda g: uc.clip_by_global_norm(g, 1e4), mixed)
    close(fw, norm, math.hypot(3, 1e5), "float32")
    close(fw, clipped[0], [0.3], "float16")
    assert [fw.dtype(leaf) for leaf in clipped] == ["float16", "float32"]


def d7_no_sentinel_turns_a_gradient_round(fw: Framework) -> None:
    [clipped], norm = fw.run(lambda g: uc.clip_by_global_norm(g, 1.0), [fw.array([1e30, -1.0])])
    assert float(fw.numpy(norm)) > 0
    assert np.sign(fw.numpy(clipped)).tolist() == [1, -1]
    [clipped], norm = fw.run(lambda g: uc.clip_by_global_norm(g, 1.0), [fw.array([math.inf, -1.0])])
    assert math.isinf(float(fw.numpy(norm))) or math.isnan(float(fw.numpy(norm)))
    assert np.isnan(fw.numpy(clipped)).all()
    [clipped], norm = fw.run(lambda g: uc.clip_by_global_norm(g, 1.0), [fw.array([0.0, 0.0])])
    assert float(fw.numpy(norm)) == 0
    assert not fw.numpy(clipped).any()


def d8_any_order_joins_leaves_as_it_should(fw: Framework) -> None:
    grads = [fw.array([1.0, 2.0]), fw.array([3.0])]
    for order, norm in zip((1, 3), fw.run(lambda g: [uc.global_norm(g, ord=p) for p in (1, 3)], grads), strict=True):
        close(fw, norm, {1: 6.0, 3: 36 ** (1 / 3)}[order], "float32")
    assert float(uc.global_norm([], ord=1)) == 0


def d9_a_limit_that_is_none_is_refused(fw: Framework) -> None:
    for limit in (-1.0, math.nan):
        for make in (uc.by_global_norm, uc.by_norm, uc.by_average_norm, uc.by_block_rms):
            with pytest.raises(ValueError, match=rf"must be 0 or more.*{limit}"):
                make(limit)


def d10_no_epsilon_scales_what_is_below_the_limit(fw: Framework) -> None:
    grads = [fw.array([3e-8, 4e-8])]
    np.testing.assert_array_equal(
        fw.numpy(fw.run(lambda g: uc.clip_by_global_norm(g, 1e-7)[0], grads)[0]), fw.numpy(grads[0])
    )
    [clipped], norm = fw.run(lambda g: uc.clip_by_global_norm(g, 1e-31), [fw.array([3e-30, 4e-30])])
    close(fw, norm, 5e-30, "float32")
    close(fw, clipped, [6e-32, 8e-32], "float32", ulps=8)


def d11_zero_by_zero_is_zero(fw: Framework) -> None:
    def every(grads: list[object]) -> list[object]:
        return [
            uc.clip(grads, rule(0.0))[0]
            for rule in (uc.by_global_norm, uc.by_norm, uc.by_average_norm, uc.by_block_rms)
        ]

    for [clipped] in fw.run(every, [fw.array([0.0, 0.0])]):
        assert (fw.numpy(clipped) == 0).all()


def d12_the_derivative_at_zero_is_finite(fw: Framework) -> None:
    for function in (uc.clip_by_global_norm, uc.clip_by_norm):

        def total(x: object, function: Callable[..., object] = function) -> object:
            result = function(x, 1.0)
            clipped = result[0] if isinstance(result, tuple) else result
            return clipped[0] + 2 * clipped[1]

        assert fw.numpy(fw.gradient(total, fw.array([0.0, 0.0]))).tolist() == [1, 2]
    derivative(fw)


def d13_nan_and_infinity_are_not_hidden(fw: Framework) -> None:
    grads = [fw.array([math.nan, 1.0]), fw.array([3.0, 4.0])]
    clipped, report = fw.run(lambda g: uc.clip(g, uc.by_global_norm(1.0)), grads)
    assert np.isnan(fw.numpy(report.norms))
    assert not fw.numpy(report.finite)
    assert all(np.isnan(fw.numpy(leaf)).all() for leaf in clipped)
    for bad in (math.nan, math.inf):
        examples = [fw.array([[bad, 1.0], [3.0, 4.0]])]
        [each], report = fw.run(lambda g: uc.clip(g, uc.Rule(1.0, scope=uc.scopes.each_example)), examples)
        assert np.isnan(fw.numpy(each)[0]).all()
        np.testing.assert_allclose(fw.numpy(each)[1], [0.6, 0.8], rtol=1e-6)
        assert not fw.numpy(report.finite)


def d14_one_step_of_nan_spoils_no_later_one(fw: Framework) -> None:
    for policy in ("propagate", "skip", "zero"):
        rule = uc.Rule(Last(), nonfinite=policy)

        def steps(grads: list[object], rule: uc.Rule = rule) -> object:
            state = rule.init(grads[0])
            for grad in grads[:-1]:
                _, state, _ = rule.update(grad, state)
            return rule.update(grads[-1], state)

        clipped, _, report = fw.run(steps, [fw.array([3.0, 4.0]), fw.array([math.nan, 0.0]), fw.array([30.0, 40.0])])
        close(fw, report.limits, 5.0, "float32")
        close(fw, clipped, [3.0, 4.0], "float32")


def d15_below_the_limit_nothing_changes_and_above_it_the_norm_is_the_limit(fw: Framework) -> None:
    limits = range(1, 200) if fw.cost < 5 else (41, 47, 55, 61, 82, 94, 97)
    grads = [fw.array(np.random.default_rng(0).random(5))]
    rules = (uc.by_global_norm, uc.by_norm)
    below = fw.run(lambda g: [uc.clip(g, rule(2.0 * c))[0][0] for c in limits for rule in rules], grads)
    for clipped in below:
        np.testing.assert_array_equal(fw.numpy(clipped), fw.numpy(grads[0]))
    many = [fw.array(100 * np.random.default_rng(seed).standard_normal(7)) for seed in range(60)]
    for clipped in fw.run(lambda g: [uc.clip_by_norm(leaf, 1.0) for leaf in g], many if fw.cost < 5 else many[:5]):
        assert abs(oracle.norm(fw.numpy(clipped).astype("float64").tolist()) - 1) <= 4 * 2**-23


DEFECTS = [function for name, function in list(globals().items()) if name.startswith("d") and name[1:2].isdigit()]
NEEDS = {"d3": sparse, "d4": sparse, "d12": derivative}
HALF = {"d5": "bfloat16", "d6": "float16"}


def reason(fw: Framework, number: str) -> str | None:
    """Return why a defect cannot be shown on a framework, as the table of promises has it."""
    if number in HALF:
        return fw.missing.get(HALF[number])
    return next((p.reason(fw) for p in PROMISES if p.check is NEEDS.get(number)), None)


CASES = [
    pytest.param(framework, defect, id=f"{framework.name}: {defect.__name__}")
    for framework in some_of(*EAGER)
    for defect in DEFECTS
    if reason(framework, defect.__name__.partition("_")[0]) is None
]


@pytest.mark.parametrize(("framework", "defect"), CASES)
def test_defect(framework: Framework, defect: Callable[[Framework], None]) -> None:
    """What others get wrong is right."""
    with framework.context():
        defect(framework)


def test_all_fifteen() -> None:
    """Each defect of the list has its test."""
    assert [defect.__name__.partition("_")[0] for defect in DEFECTS] == [f"d{number}" for number in range(1, 16)]
