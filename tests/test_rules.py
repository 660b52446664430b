"""Rules: the numbers of their papers, combinations of rules, and custom parts.

Drawn rules are in the fuzz.
"""

from __future__ import annotations

import functools
import json
import math
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from record import taken

import uniclip as uc
from kit.frameworks import Framework
from kit.rules import (
    LOSSES,
    double,
    every_rule,
    falling,
    first_key,
    half,
    only_w,
    params,
    root,
    steps,
)
from kit.trees import EPS, close, close_trees, leaves, mapped
from uniclip.config import from_config, to_config

RULES = every_rule(uc)
CLOSE = 1e-5
"""The relative error of numbers that papers print with five or six digits."""
on_numpy = pytest.mark.needs("numpy")

# --- Numbers that papers, and the tests of their code, print


class Once(NamedTuple):
    """Gradients as lists of numbers, and the result of a rule."""

    rule: Any
    grads: Any
    wanted: Any
    params: Any = None


def once(uc: ModuleType) -> dict[str, Once]:
    """Return the stateless rules with numbers for them."""
    weights, grads = [[1.0, 1.0], [0.0, 0.0]], [[3.0, 4.0], [3.0, 4.0]]
    rows = [[0.00848528, 0.0113137], [6e-6, 8e-6]]
    examples = [[0.0, -0.5], [3.0, 4.0], [5.0, 6.0], [0.0, 0.0]], [[0.0], [5.0], [-3.0], [0.0]]
    sizes = [1.0, math.sqrt(50), math.sqrt(70), 1.0]
    return {
        "smooth, SPECTRA": Once(
            uc.by_global_norm(10.0, curve=uc.curves.smooth),
            [[6.0, 8.0]],
            [[0.6 * 7.07107, 0.8 * 7.07107]],
        ),
        "to_global_norm": Once(uc.to_global_norm(1.0), [[3e-4, 4e-4], [0.0]], [[0.6, 0.8], [0.0]]),
        "agc of rows": Once(uc.agc(axis=1), [grads], [rows], [weights]),
        "agc of columns": Once(uc.agc(axis=0), [grads], [np.full((2, 2), 0.00707107)], [weights]),
        "agc of weights at 0": Once(uc.agc(0.1), [[3.0, 4.0]], [[6e-5, 8e-5]], [[0.0, 0.0]]),
        "cowclip": Once(
            uc.cowclip(np.asarray([2.0, 1.0])),
            [[[30.0, 40.0], [0.3, 0.4]]],
            [[[6.0, 8.0], [0.3, 0.4]]],
            [[[3.0, 4.0], [0.0, 1.0]]],
        ),
        "larc": Once(
            uc.larc(0.1, weight_decay=0.5),
            [[30.0, 40.0], [7.0]],
            [[30 / 52.5, 40 / 52.5], [7.0]],
            [[3.0, 4.0], [0.0]],
        ),
        "by_example_norm": Once(
            uc.by_example_norm(1.0), examples, [(np.asarray(leaf).T / sizes).T for leaf in examples]
        ),
        "by_example_layer_norm": Once(
            uc.by_example_layer_norm(2**0.5), [[[3.0, 4.0]], [[0.5]]], [[[0.6, 0.8]], [[0.5]]]
        ),
        "by_example_layer_norm, by size": Once(
            uc.by_example_layer_norm(3.0, by_size=True),
            [[[6, 8]], [[5]]],
            [[[0.6 * 6**0.5, 0.8 * 6**0.5]], [[3**0.5]]],
        ),
        "by_example_layer_norm, by size, one leaf empty": Once(
            uc.by_example_layer_norm(1.0, by_size=True),
            [[[30, 40]], [[]], [[120]]],
            [[[0.6 * (2 / 3) ** 0.5, 0.8 * (2 / 3) ** 0.5]], [[]], [[(1 / 3) ** 0.5]]],
        ),
        "by_example_layer_norm, by size, all leaves empty": Once(
            uc.by_example_layer_norm(1.0, by_size=True), [[[]], [[]]], [[[]], [[]]]
        ),
        "AUTO-S": Once(uc.auto_s(), [[[0.6, 0.8]]], [[[0.6 * 0.9901, 0.8 * 0.9901]]]),
        "NSGD": Once(uc.auto_s(gamma=1.0), [[[0.6, 0.8]]], [[[0.3, 0.4]]]),
        "PSAC": Once(
            uc.psac(), [[[0.6, 0.8], [6.0, 8.0]]], [[[0.55, 0.733333], [0.599407, 0.799209]]]
        ),
    }


class Steps(NamedTuple):
    """Norms of the gradients of some steps, before and after a rule."""

    rule: Any
    norms: Sequence[float]
    wanted: Sequence[float]


def many(uc: ModuleType) -> dict[str, Steps]:
    """Return the stateful rules with numbers for them."""
    mean, variance = 0.97 + 0.03 * 1.500001, 0.97 * 0.25 + 0.03 * (1.500001 - 1.015) ** 2
    zclip = functools.partial(uc.zclip, 2.0, warmup=2)
    quantile = functools.partial(uc.by_example_quantile, start=1.0)
    return {
        "schedule": Steps(
            uc.by_global_norm(uc.limits.Schedule(falling)), [50, 50, 50, 50], [5, 3, 2, 1.5]
        ),
        "autoclip": Steps(uc.autoclip(window=5), [1, 2, 3, 4], [1, 1.1, 1.2, 1.3]),
        "autoclip, window": Steps(uc.autoclip(50, window=3), [1, 5, 3, 9, 2], [1, 3, 3, 5, 2]),
        "percentile_clipping": Steps(
            uc.percentile_clipping(25, 4), [5, 1, 9, 9, 9], [5, 1, 5, 5, 9]
        ),
        "zclip": Steps(
            zclip(), [0.5, 1.5, 3, 2.05], [0.5, 1.5, 1.500001, mean + 4 * variance / (2.05 - mean)]
        ),
        "zclip to the mean": Steps(
            zclip(target="mean"), [0.5, 1.5, 3, 1.4, 3], [0.5, 1.5, 1, 1.4, 1.012]
        ),
        "zclip to the threshold": Steps(
            zclip(target="threshold"), [0.5, 1.5, 3, 3], [0.5, 1.5, 2, 2.070628]
        ),
        "zclip, factor": Steps(zclip(clip_factor=0.5), [0.5, 1.5, 3], [0.5, 1.5, 0.75]),
        "zclip, no update": Steps(
            zclip(skip_update_on_spike=True), [0.5, 1.5, 3, 3], [0.5, 1.5, 1.500001, 1.500001]
        ),
        "log_zscore": Steps(uc.log_zscore(), [1, 2, 1, 2, 1, 2, 50], [1, 2, 1, 2, 1, 2, 2.353547]),
        "log_zscore of zeros": Steps(uc.log_zscore(), [0, 0, 1000], [0, 0, 1000]),
        "skip_spikes": Steps(
            uc.skip_spikes(window=4), [1, 1.1, 0.9, 50, 1, 50], [1, 1.1, 0.9, 0, 1, 50]
        ),
        "adagc": Steps(uc.Rule(uc.limits.Ema(1.05, 0.98)), [1, 2, 2], [1, 1.05, 1.05 * 1.001]),
        "adagc of zeros": Steps(uc.adagc(warmup=1), [0, 0, 3, 9], [0, 0, 3, 3.15]),
        "adagc, warm-up": Steps(uc.adagc(warmup=2, warmup_norm=0.5), [2, 0.4, 9], [0.5, 0.4, 0.42]),
        "norm_growth": Steps(uc.norm_growth(), [1, 2, 0.5, 5], [1, 1.01, 0.5, 0.505]),
        "spam": Steps(uc.spam(warmup=1), [math.sqrt(0.1), 2], [math.sqrt(0.1), 0.70711]),
        "adagn": Steps(uc.adagn(), [1, 1, 1, 100, 1], [1, 1, 1, 0.743250, 0.554296]),
        "by_example_quantile": Steps(quantile(), [0.5, 9, 9], [0.5, 0.904837, 1]),
        "by_example_quantile, bounds": Steps(
            quantile(min=0.95, max=1.1), [0.5, 9, 9, 9, 9], [0.5, 0.95, 1.049912, 1.1, 1.1]
        ),
    }


@pytest.mark.parametrize("name", once(uc))
def test_numbers_of_papers(framework: Framework, name: str) -> None:
    """Stateless rules reproduce numbers that were computed by hand."""
    rule, grads, wanted, weights = once(uc)[name]
    make = lambda some: None if some is None else [framework.array(leaf) for leaf in some]
    clipped, _ = uc.clip(make(grads), rule, params=make(weights))
    for found, leaf in zip(clipped, wanted, strict=True):
        np.testing.assert_allclose(framework.numpy(found), leaf, rtol=CLOSE)


@pytest.mark.parametrize("name", many(uc))
def test_numbers_of_papers_for_many_steps(framework: Framework, name: str) -> None:
    """Stateful rules reproduce numbers that were computed by hand."""
    rule, norms, wanted = many(uc)[name]
    state, found = rule.init(framework.array([[1.0]])), []
    for norm in norms:
        clipped, state, _ = rule.update(framework.array([[-norm]]), state)
        found.append(-framework.numpy(clipped).item())
    np.testing.assert_allclose(found, wanted, rtol=CLOSE)


@pytest.mark.only("strict", "mlx", "torch", "tensorflow")
@pytest.mark.parametrize("name", [name for name in RULES if name != "agc, units"])
def test_every_rule_does_what_it_does_on_numpy(framework: Framework, name: str) -> None:
    """Twelve steps, with a spike, NaN and zeros, reproduce NumPy's recorded results.

    Units differ in PyTorch.
    """
    make, rule = lambda tree: mapped(framework.array, tree), RULES[name]
    weights = make(params("float32"))
    state = rule.init(weights)
    for grads, loss, wanted in zip(steps("float32"), LOSSES, taken(rule, "float32"), strict=True):
        clipped, state, _ = rule.update(make(grads), state, params=weights, loss=loss)
        found = np.concatenate([framework.numpy(leaf).reshape(-1) for leaf in leaves(clipped)])
        np.testing.assert_allclose(found, wanted["gradients"], rtol=64 * EPS["float32"])


# --- The four choices


def test_a_unit_follows_the_framework(framework: Framework) -> None:
    """The output axis is the first in PyTorch and the last elsewhere; a vector is one unit."""
    matrix = np.random.default_rng(1).standard_normal((4, 3)).astype("float32")
    grads, axes = (
        [framework.array(matrix), framework.array([3, 4])],
        (1,) if framework.family == "PyTorch" else (0,),
    )
    [clipped, bias], _ = uc.clip(grads, uc.Rule(0.3, scope=uc.scopes.unit()))
    sizes = np.linalg.norm(matrix, axis=axes, keepdims=True)
    close(framework, clipped, matrix * np.minimum(1, 0.3 / sizes), ulps=8)
    close(framework, bias, [0.18, 0.24], ulps=8)
    [clipped], _ = uc.clip(grads[:1], uc.agc(0.1), params=grads[:1])
    [wanted], _ = uc.clip(grads[:1], uc.agc(0.1, axis=axes), params=grads[:1])
    close(framework, clipped, framework.numpy(wanted))


def in_layers(path: tuple[Any, ...], leaf: Any) -> int:
    """Return how many axes of a leaf stack layers."""
    return 2 if path[0] == "blocks" else int(path[0] == "layers")


STACKED: dict[str, Any] = {
    "agc": functools.partial(uc.agc, 0.1),
    "agc, axis": functools.partial(uc.agc, 0.1, axis=0),
    "agc, output axis": functools.partial(uc.agc, 0.1, output_axis=-1),
    "by_norm": functools.partial(uc.by_norm, 0.5),
    "by_norm, axis": functools.partial(uc.by_norm, 0.5, axis=-1),
    "by_norm, largest": functools.partial(uc.by_norm, 0.5, ord=math.inf),
    "by_block_rms": functools.partial(uc.by_block_rms, 0.1),
}


@pytest.mark.parametrize("name", STACKED)
def test_stacked_layers(framework: Framework, name: str) -> None:
    """A leaf of stacked layers is clipped as a Python loop over its layers clips them."""
    rng = np.random.default_rng(0)
    grads, weights = (
        {
            "layers": {"w": rng.normal(size=(3, 4, 5)), "b": rng.normal(size=(3, 5))},
            "blocks": rng.normal(size=(2, 3, 4, 5)),
            "head": rng.normal(size=(5, 2)),
        }
        for _ in range(2)
    )
    make = STACKED[name]
    given = {"params": mapped(framework.array, weights)} if "agc" in name else {}
    clipped, report = uc.clip(mapped(framework.array, grads), make(stacked=in_layers), **given)

    def of_layer(leaf: np.ndarray, param: np.ndarray) -> np.ndarray:
        single = {"params": framework.array(param)} if "agc" in name else {}
        return framework.numpy(uc.clip(framework.array(leaf), make(), **single)[0])

    def over_layers(count: int, leaf: np.ndarray, param: np.ndarray) -> np.ndarray:
        if count == 0:
            return of_layer(leaf, param)
        pairs = zip(leaf, param, strict=True)
        return np.stack([over_layers(count - 1, *pair) for pair in pairs])

    for path, count in {
        ("layers", "w"): 1,
        ("layers", "b"): 1,
        ("blocks",): 2,
        ("head",): 0,
    }.items():
        found, leaf, param, norms = [
            functools.reduce(lambda tree, key: tree[key], path, tree)
            for tree in (clipped, grads, weights, report.norms)
        ]
        close(framework, found, over_layers(count, leaf, param), ulps=8)
        assert tuple(norms.shape)[:count] == leaf.shape[:count]


@on_numpy
def test_stacked_layers_are_checked() -> None:
    """A leaf without an axis beside those of layers is refused by its path, with the fix."""
    grads = {"w": np.ones((3, 2)), "scale": np.ones(3)}
    text = r"grads\['scale'\] of shape \(3,\): stacked=1 leaves no axis .* 1 if 'layers' in path"
    with pytest.raises(ValueError, match=text):
        uc.clip(grads, uc.by_norm(1.0, stacked=1))
    with pytest.raises(ValueError, match="stacked=2 leaves no axis"):
        uc.clip(grads, uc.agc(stacked=lambda path, leaf: 2), params=grads)
    for wrong in (-1, 1.5, "1", True):
        with pytest.raises((TypeError, ValueError), match="stacked must be"):
            uc.by_norm(1.0, stacked=wrong)
        with pytest.raises((TypeError, ValueError), match="stacked must be"):
            uc.clip(grads, uc.by_norm(1.0, stacked=lambda path, leaf, wrong=wrong: wrong))
    with pytest.raises(TypeError, match=r"grads\['scale'\] .* stacked must be a whole number"):
        uc.clip(grads, uc.by_norm(1.0, stacked=lambda path, leaf: None))
    with pytest.raises(ValueError, match="those of one layer"):
        uc.clip({"w": np.ones((3, 2))}, uc.by_norm(1.0, axis=1, stacked=1))
    with pytest.raises(TypeError, match="output_axis must be a whole number"):
        uc.agc(output_axis="x")
    with pytest.raises(TypeError, match="scope must be a Scope"):
        uc.scopes.stacked(1, 0)
    with pytest.raises(ValueError, match=r"axis=1 names .* output_axis=0 .* pass one of them"):
        uc.agc(axis=1, output_axis=0)


@on_numpy
@pytest.mark.parametrize(
    "rule",
    [
        uc.agc(stacked=1),
        uc.agc(output_axis=0, stacked=in_layers),
        uc.by_block_rms(1.0, stacked=2),
        uc.Rule(1.0, scope=uc.scopes.stacked(1, uc.scopes.unit(0))),
        uc.Rule(1.0, scope=uc.scopes.stacked(1, uc.scopes.each_example)),
        uc.Rule(uc.limits.Ema(2.0, 0.5), scope=uc.scopes.stacked(1)),
    ],
    ids=repr,
)
def test_stacked_layers_come_back(rule: Any) -> None:
    """The text and the config of a rule for stacked layers make an equal one; states load."""
    names = {"in_layers": in_layers}
    assert eval(repr(rule), {"uc": uc, **names}) == rule
    assert from_config(json.loads(json.dumps(to_config(rule, names))), names) == rule
    one, other = uc.Clipper(rule), uc.Clipper(rule)
    grads = {"layers": np.ones((2, 3, 4)), "blocks": np.ones((2, 3, 4))}
    one(grads, grads if "params" in rule.limit.needs else None)
    other.init(grads)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.state_dict() == one.state_dict()


def test_groups(framework: Framework) -> None:
    """Leaves with the same label share a norm and a limit, also a stateful one."""
    make, number = (
        lambda tree: mapped(framework.array, tree),
        lambda array: float(framework.numpy(array)),
    )
    grads = {
        "a": [np.asarray([3.0]), np.asarray([4.0])],
        "b": np.asarray([12.0]),
        "c": np.asarray([7.0]),
    }
    clipped, report = uc.clip(
        make(grads), uc.by_group_norm({"a": 1.0, "b": 6.0, "c": math.inf}, first_key)
    )
    wanted = {
        "a": [np.asarray([0.6]), np.asarray([0.8])],
        "b": np.asarray([6.0]),
        "c": np.asarray([7.0]),
    }
    close_trees(framework, clipped, wanted, 1e-6)
    assert {label: number(norm) for label, norm in report.norms.items()} == {
        "a": 5,
        "b": 12,
        "c": 7,
    }
    rule = uc.by_group_norm(
        {"a": uc.limits.Ema(2.0, 0.0), "b": uc.limits.Relative(0.5), "c": 1.0}, first_key
    )
    state = rule.init(make(grads))
    for factor in (10, 100):
        some = {**grads, "a": [factor * leaf for leaf in grads["a"]]}
        _, state, report = rule.update(
            make(some), state, params=make({**grads, "b": np.asarray([8.0])})
        )
    assert [number(report.limits[label]) for label in "abc"] == pytest.approx([100.0, 4.0, 1.0])


def test_a_limit_for_each_norm(framework: Framework) -> None:
    """A limit is one number, possibly an integer, or one for each norm.

    Other shapes are not broadcast.
    """
    grads = framework.array([[3.0, 4.0], [6.0, 8.0]])
    close(
        framework,
        uc.clip_by_norm(grads, framework.array([1.0, 2.0]), axis=1),
        [[0.6, 0.8], [1.2, 1.6]],
    )
    close(
        framework,
        uc.clip(grads[1, ...], uc.by_global_norm(framework.array(5, "int32")))[0],
        [3.0, 4.0],
    )
    with pytest.raises(ValueError, match=r"\(2,\)"):
        uc.clip_by_global_norm(grads, framework.array([1.0, 2.0]))


def test_a_known_norm(framework: Framework) -> None:
    """A precomputed norm is used and returned as it is; it is one nonnegative number."""
    grads = [framework.array([3.0, 4.0])]
    for known in (10.0, framework.array(10.0)):
        [clipped], norm = uc.clip_by_global_norm(grads, 1.0, norm=known)
        close(framework, clipped, [0.3, 0.4])
        assert float(framework.numpy(norm)) == 10.0
    for wrong in (framework.array([1.0, 1.0]), *([-1.0] if framework.raises else [])):
        with pytest.raises(ValueError, match="norm"):
            uc.clip_by_global_norm(grads, 1.0, norm=wrong)


def test_bounds_of_entries(framework: Framework) -> None:
    """Bounds are numbers or arrays, symmetric or not.

    A bound beyond the range of a dtype does not bind.
    """
    grads = framework.array([[-3.0, 0.5, 3.0]])
    low, high = framework.array([-2.0, 0.0, 0.0]), framework.array([0.0, 0.25, 9.0])
    for least, most, wanted in (
        (-1, 2, [[-1, 0.5, 2]]),
        (0.0, math.inf, [[0, 0.5, 3]]),
        (low, high, [[-2, 0.25, 3]]),
    ):
        for clipped in (
            uc.clip_by_value(grads, least, most),
            uc.clip(grads, uc.by_value(least, most))[0],
        ):
            np.testing.assert_array_equal(framework.numpy(clipped), wanted)
    clipped = uc.clip_by_value(framework.array([math.nan, 5.0]), -1, 1)
    np.testing.assert_array_equal(framework.numpy(clipped), [math.nan, 1])
    for dtype in {"float16", "bfloat16"} & set(framework.dtypes):
        clipped = uc.clip_by_value(framework.array([-300.0, 3.0], dtype), -1e6, 2)
        assert (framework.numpy(clipped).astype("float32").tolist(), framework.dtype(clipped)) == (
            [-300.0, 2.0],
            dtype,
        )


@on_numpy
def test_bounds_of_integers() -> None:
    """A bound beyond the range of an integer gradient does not bind."""
    for bound in (300, np.asarray(300), np.asarray([300, 300])):
        assert uc.clip_by_value(np.asarray([1, 100], "int8"), -1, bound).tolist() == [1, 100]
    assert uc.clip_by_value(np.asarray([1, 200, 255], "uint8"), np.asarray(-5), 254).tolist() == [
        1,
        200,
        254,
    ]


# --- Rules of rules


def test_a_chain(framework: Framework) -> None:
    """Rules and functions run one after the other.

    The report has the norms that each of them saw.
    """
    rule = uc.chain(double, uc.by_norm(4.0), uc.by_global_norm(1.0))
    clipped, report = uc.clip([framework.array([3.0]), framework.array([0.5])], rule)
    close_trees(framework, clipped, [np.asarray([4 / 17**0.5]), np.asarray([1 / 17**0.5])], 1e-6)
    assert report.norms[0] is None
    assert [float(framework.numpy(norm)) for norm in report.norms[1]] == [6.0, 1.0]
    assert float(framework.numpy(report.norms[2])) == pytest.approx(17**0.5)
    assert [bool(framework.numpy(flag)) for flag in (report.clipped, report.finite)] == [True, True]


def test_a_chain_remembers_together(framework: Framework) -> None:
    """If a rule of a chain skips a step or finds it non-finite, no rule updates its state.

    Later rules must not learn from the zeros of a skipped step.
    """
    spikes = uc.skip_spikes(window=9, warmup=3)
    for first, norms, wanted in (
        (uc.by_global_norm(1.0, nonfinite="skip"), (0.5, math.nan, 0.7), [0.5, 0.0, 0.6]),
        (spikes, (1.0, 1.1, 0.9, 100.0, 1.2), [1.0, 1.05, 0.9, 0.0, 1.05]),
    ):
        rule, found = uc.chain(first, uc.autoclip(50, window=9)), []
        state = rule.init(framework.array([1.0]))
        for norm in norms:
            clipped, state, report = rule.update(framework.array([norm]), state)
            found.append(framework.numpy(clipped).item())
            assert bool(framework.numpy(report.skipped)) == (found[-1] == 0.0)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_masked(framework: Framework) -> None:
    """Leaves outside of a mask come back unchanged, and are part of no norm.

    Any rule or function can be masked.
    """
    grads = {
        "b": framework.array([math.nan]),
        "none": None,
        "w": [framework.array([3.0]), framework.array([4.0])],
    }
    clipped, report = uc.clip(grads, uc.masked(uc.by_global_norm(1.0, nonfinite="skip"), only_w))
    close_trees(framework, clipped["w"], [np.asarray([0.6]), np.asarray([0.8])], 1e-6)
    assert np.isnan(framework.numpy(clipped["b"])).all()
    assert (float(framework.numpy(report.norms)), bool(framework.numpy(report.finite))) == (
        5.0,
        True,
    )
    # The optimizer steps the other leaves in any case.
    assert report.skipped is None
    clipped, _ = uc.clip(grads, uc.masked(double, only_w))
    assert [framework.numpy(leaf).item() for leaf in clipped["w"]] == [6.0, 8.0]
    rule = uc.masked(uc.chain(uc.zclip(warmup=2), uc.by_norm(1.0)), only_w)
    clipped, *_ = rule.update(grads, rule.init(grads))
    assert [framework.numpy(leaf).item() for leaf in clipped["w"]] == [1.0, 1.0]


@on_numpy
def test_a_mask_of_nothing_teaches_nothing() -> None:
    """A mask without leaves changes neither gradients nor state, like a step without gradients."""
    for name, rule in many(uc).items():
        nothing = uc.masked(rule.rule, lambda path, leaf: False)
        clipped, _, report = nothing.update(
            [np.asarray([[9.0]])], nothing.init([np.asarray([[1.0]])])
        )
        assert clipped[0].item() == 9.0, name
        assert leaves([report.norms]) == [], name


class Negate:
    """A custom rule with the two methods that every rule has."""

    stateful = False

    def init(self, grads: Any) -> Any:
        """Return no state."""
        return ()

    def update(
        self, grads: Any, state: Any, params: Any = None, all_reduce: Any = None, **others: Any
    ) -> Any:
        """Negate the gradients of a dict."""
        assert set(others) <= {"in_place", "loss", "shared"}
        return (
            {key: grad if grad is None else -grad for key, grad in grads.items()},
            state,
            uc.Report(),
        )


def test_own_rules_in_chains_and_masks(framework: Framework) -> None:
    """A custom rule in a chain gets the gradients of the rule before, and passes its own on."""
    own = Negate()
    grads, of_b = (
        {"a": framework.array([3.0]), "b": framework.array([4.0])},
        lambda path, leaf: path == ("b",),
    )
    rule = uc.chain(uc.by_norm(9.0), own, uc.masked(own, of_b), uc.by_global_norm(1.0))
    clipped, report = uc.clip(grads, uc.chain(rule))
    close_trees(framework, clipped, {"a": np.asarray([-0.6]), "b": np.asarray([0.8])}, 1e-6)
    assert framework.numpy(report.clipped)


class Around:
    """A custom rule around another one, stateful and without the attributes of uniclip's rules."""

    stateful = True

    def __init__(self) -> None:
        self.rule = uc.Rule(uc.limits.ZScore(2.0, 0.5, warmup=2), scope=uc.scopes.each_leaf)

    def init(self, grads: Any) -> Any:
        """Return its state."""
        return self.rule.init(grads)

    def update(self, *arguments: Any, **others: Any) -> Any:
        """Take a step of the inner rule."""
        return self.rule.update(*arguments, **others)


class Twice(uc.Rule):
    """A rule with its own ``update``."""

    def update(self, *arguments: Any, **others: Any) -> Any:
        """Double the result."""
        clipped, *rest = super().update(*arguments, **others)
        return ({key: 2 * grad for key, grad in clipped.items()}, *rest)


def test_own_rules_take_their_own_steps(framework: Framework) -> None:
    """A clipper needs nothing of a rule but its own ``update``, also that of a subclass."""
    own = uc.Clipper(Around())
    clipped = [own({"a": framework.array([norm])})["a"] for norm in (1.0, 1.0, 99.0)]
    assert [float(framework.numpy(grad)[0]) for grad in clipped] == [1.0, 1.0, 1.0]
    close_trees(
        framework,
        uc.Clipper(Twice(1.0))({"a": framework.array([5.0])}),
        {"a": np.asarray([2.0])},
        1e-6,
    )


# --- Custom functions, limits and curves


def test_a_function(framework: Framework) -> None:
    """Any function of one array is a rule, called for each array; absent ones stay absent."""
    calls, shared = [], framework.array([4.0])
    grads = {"a": shared, "b": [shared, None], "c": framework.array([[8.0]])}
    clipped, report = uc.clip(grads, lambda grad: calls.append(1) or grad / 2)
    wanted = {"a": np.asarray([2.0]), "b": [np.asarray([2.0]), None], "c": np.asarray([[4.0]])}
    close_trees(framework, clipped, wanted, 0)
    assert clipped["b"][1] is None
    assert len(calls) == 3
    assert (report.norms, report.scalars()) == (None, {})
    with pytest.raises(TypeError, match=r"grads\[0\]"):
        uc.clip([shared], lambda grad: None)


@dataclass(frozen=True)
class Tenth(uc.Limit):
    """A custom limit that compares with the parameters."""

    needs: ClassVar[frozenset[str]] = frozenset({"params", "sizes"})

    def __call__(self, norms: Any, state: Any, context: uc.limits.Context) -> tuple[Any, Any]:
        """Return a tenth of the norms of the parameters, whatever their sizes."""
        return 0.1 * context.params * context.sizes / context.sizes, state


@dataclass(frozen=True)
class Share(uc.Limit):
    """A custom limit of all norms: their mean times the number of leaves, over the largest."""

    def __call__(self, norms: Any, state: Any, context: uc.limits.Context) -> tuple[Any, Any]:
        """Return one limit for all norms of all shapes."""
        total, largest = (
            context.total(lambda one: one.norms),
            context.largest(lambda one: one.norms),
        )
        return total / largest / context.count, state


class Last(NamedTuple):
    """The state of `Previous`."""

    norms: Any


@dataclass(frozen=True)
class Previous(uc.Limit):
    """A custom stateful limit: twice the norm of the step before."""

    stateful: ClassVar[bool] = True

    def init(self, norms: Any, context: uc.limits.Context) -> Last:
        """Return the norms before the first step."""
        return Last(norms + 1)

    def __call__(self, norms: Any, state: Last, context: uc.limits.Context) -> tuple[Any, Last]:
        """Compare with the last norms, and store the new ones."""
        return 2 * state.norms, Last(norms)


def test_a_limit_that_compares_with_parameters(framework: Framework) -> None:
    """Parameters are measured by the rule's scope and norm.

    Those of absent gradients are left out.
    """
    rule = uc.Rule(Tenth(), scope=uc.scopes.each_leaf)
    grads = {"b": [framework.array([0.1])], "frozen": None, "w": framework.array([3.0, 4.0])}
    weights = {
        "b": [framework.array([5.0])],
        "frozen": framework.array([7.0]),
        "w": framework.array([0.0, 10.0]),
    }
    clipped, report = uc.clip(grads, rule, params=weights)
    close_trees(framework, clipped, {"b": [np.asarray([0.1])], "w": np.asarray([0.6, 0.8])}, 1e-6)
    close(framework, report.limits["b"][0], 0.5)
    with pytest.raises(ValueError, match="params="):
        uc.clip(grads, rule)
    with pytest.raises(ValueError, match=r"params\['w'\]"):
        uc.clip(grads, rule, params={"b": weights["b"]})


def test_a_limit_of_all_norms(framework: Framework) -> None:
    """Sums and maxima run over all leaves, also where their norms have different shapes."""
    grads = [framework.array([[3.0, 4.0], [0.0, 1.0]]), framework.array([[2.0], [8.0]])]
    _, report = uc.clip(grads, uc.Rule(Share(), scope=uc.scopes.axes(0)))
    wanted = (3 + 17**0.5 + 68**0.5) / 68**0.5 / 2
    for limit in leaves(report.limits):
        np.testing.assert_allclose(np.unique(framework.numpy(limit)), [wanted], rtol=1e-6)


def test_a_limit_that_remembers(framework: Framework) -> None:
    """A custom state goes in and out of ``update``; ``clip`` refuses a stateful rule."""
    rule, found = uc.Rule(Previous(), scope=uc.scopes.axes(-1)), []
    grads = framework.array([[3.0, 4.0], [0.0, 1.0]])
    state = rule.init(grads)
    for factor in (1, 10, math.nan, 100):
        clipped, state, _ = rule.update(factor * grads, state)
        found.append(framework.numpy(clipped))
    np.testing.assert_allclose(found[0], [[1.2, 1.6], [0, 1]], rtol=1e-6)
    np.testing.assert_allclose(found[1], [[6, 8], [0, 2]], rtol=1e-6)
    np.testing.assert_allclose(found[3], [[60, 80], [0, 20]], rtol=1e-6)
    close(framework, state.norms, [[500, 100]] if state.norms.shape[0] == 1 else [500, 100])
    with pytest.raises(ValueError, match=r"rule\.init"):
        uc.clip(grads, rule)


class InTorch(uc.Limit):
    """A limit that uses PyTorch's functions."""

    def __call__(self, norms: Any, state: Any, context: Any) -> Any:
        """Return half of the norms."""
        import torch

        return torch.div(norms, 2), state


class HoldsArray(InTorch):
    """A limit that contains an array, and thus gets arrays of its library."""

    def __init__(self, array: Any) -> None:
        self.array = array


@pytest.mark.needs("torch")
def test_functions_of_one_library() -> None:
    """Norms that the host reads are NumPy's; an error says so to a limit for tensors only."""
    import torch

    grads = torch.tensor([3.0, 4.0])
    choices = [
        uc.Rule(InTorch()),
        uc.Rule(1.0, curve=lambda xp, n, limit: torch.where(n > limit, limit / n, 1.0)),
    ]
    for rule in [*choices, uc.Rule(uc.limits.Schedule(lambda step: 1 + torch.sqrt(step)))]:
        with pytest.raises(TypeError, match=r"context\.xp"):
            rule.update(grads, rule.init(grads))
    torch.testing.assert_close(uc.clip(grads, uc.Rule(HoldsArray(torch.ones(1))))[0], grads / 2)
    # Other errors pass unchanged.
    with pytest.raises(TypeError, match="needs"):
        uc.clip(
            grads,
            uc.Rule(type("Asks", (uc.Limit,), {"__call__": lambda self, n, s, c: (c.params, s)})()),
        )


OF_ONE = (
    "abs", "ceil", "exp", "expm1", "floor", "isfinite", "isnan", "log", "log1p", "ones_like",
    "round", "sign", "sqrt", "square", "tanh", "zeros_like",
)  # fmt: skip
OF_TWO = (
    "equal",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "maximum",
    "minimum",
    "not_equal",
    "pow",
)
"""The standard's elementwise functions that a curve may use on every framework.

``where`` is tested beside them.
"""


def test_a_curve(framework: Framework) -> None:
    """A curve may use elementwise functions of the array API standard, or return a number."""

    def curve(xp: Any, norm: Any, limit: Any) -> Any:
        some = [getattr(xp, name)(norm) for name in OF_ONE] + [
            getattr(xp, name)(norm, limit) for name in OF_TWO
        ]
        assert {tuple(one.shape) for one in some} == {tuple(norm.shape)}
        return xp.where(norm > limit, xp.tanh(norm / limit) * limit / norm, 1.0)

    grads = framework.array([3.0, 4.0])
    close(
        framework,
        uc.clip(grads, uc.Rule(1.0, curve=curve))[0],
        np.asarray([0.6, 0.8]) * math.tanh(5),
    )
    close(framework, uc.clip(grads, uc.Rule(1.0, curve=half))[0], [1.5, 2.0])


def test_a_curve_that_fails_changes_nothing(framework: Framework) -> None:
    """All factors exist before any write, so an error in the second leaf changes none."""
    calls = []

    def failing(xp: Any, norm: Any, limit: Any) -> Any:
        calls.append(norm)
        if len(calls) == 2:
            message = "the second one"
            raise ArithmeticError(message)
        return 0.5 * norm / norm

    grads, clip = (
        [framework.array([3.0]), framework.array([[5.0]])],
        uc.clip_ if framework.writes else uc.clip,
    )
    with pytest.raises(ArithmeticError, match="the second one"):
        clip(grads, uc.Rule(1.0, scope=uc.scopes.each_entry, curve=failing))
    assert [framework.numpy(leaf).item() for leaf in grads] == [3.0, 5.0]


# --- Per-example gradients


def test_sums_of_examples(framework: Framework) -> None:
    """Sums of clipped examples have the dtype of each leaf, summed in float32; none gives zeros."""
    rng = np.random.default_rng(0)
    for dtype in {"float16", "bfloat16", "float32"} & set(framework.dtypes):
        many = {"none": None, "w": framework.array(np.full((3000, 2), 0.01), dtype)}
        total, _ = uc.clip_and_sum(many, uc.by_example_norm(1.0))
        assert (total["none"], framework.dtype(total["w"])) == (None, dtype)
        np.testing.assert_allclose(
            framework.numpy(total["w"]).astype("float64"), [30, 30], rtol=5e-3
        )
    values = [
        rng.standard_normal((5, 2, 3)).astype("float32"),
        rng.standard_normal((5, 4)).astype("float32"),
    ]
    for rule in (uc.by_example_norm(1.0), uc.by_example_layer_norm(1.0), uc.auto_s(), uc.psac()):
        total, report = uc.clip_and_sum([framework.array(leaf) for leaf in values], rule)
        for found, leaf in zip(total, uc.clip(values, rule)[0], strict=True):
            np.testing.assert_allclose(framework.numpy(found), leaf.sum(0), rtol=1e-5, atol=1e-6)
        assert framework.numpy(report.clipped)
    none, _ = uc.clip_and_sum(framework.array(np.ones((0, 2))), uc.by_example_norm(1.0))
    assert framework.numpy(none).tolist() == [0.0, 0.0]


def test_a_limit_for_each_layer_of_an_example(framework: Framework) -> None:
    """Masks and groups that would mix examples are refused with the right line to write."""
    grads = {
        "body": [framework.array([[3, 4], [0.03, 0.04]]), None],
        "head": framework.array([[12.0], [0.5]]),
    }
    masks = [
        uc.masked(uc.by_example_norm(limit), lambda path, leaf, name=name: path[0] == name)
        for name, limit in (("body", 0.1), ("head", 1.0))
    ]
    by_group = uc.by_group_norm({"body": 0.1, "head": 1.0}, first_key)
    for rule, error in (
        (uc.chain(*masks), TypeError),
        (masks[0], TypeError),
        (by_group, ValueError),
    ):
        with pytest.raises(error, match=r"for a limit for each layer, write uc\.Rule") as refused:
            uc.clip_and_sum(grads, rule)
        line = re.search(r"write (uc\.Rule\(.*\)), where", str(refused.value))
        assert line
        total, _ = uc.clip_and_sum(grads, eval(line[1], {"uc": uc, "label": first_key}))
        np.testing.assert_allclose(framework.numpy(total["body"][0]), [0.09, 0.12], rtol=1e-6)
        np.testing.assert_allclose(framework.numpy(total["head"]), [1.5], rtol=1e-6)
        assert total["body"][1] is None


# --- Rules as text, as bytes and as JSON

OWN = {f.__name__: f for f in (double, falling, first_key, half, only_w, root)}


@on_numpy
@pytest.mark.parametrize("name", RULES)
def test_a_rule_comes_back(name: str) -> None:
    """The repr, the pickle and the config of a rule restore an equal one; rules are frozen."""
    rule = RULES[name]
    pickled = pickle.loads(pickle.dumps(rule))
    by_config = from_config(json.loads(json.dumps(to_config(rule, OWN), allow_nan=False)), OWN)
    assert repr(pickled) == repr(by_config) == repr(rule)
    # It contains an array.
    if name != "cowclip":
        printed = [eval(repr(one), {"uc": uc, "inf": math.inf, **OWN}) for one in (rule, by_config)]
        assert all(
            one == rule and hash(one) == hash(rule) for one in (pickled, by_config, *printed)
        )
    with pytest.raises(AttributeError):
        rule.stateful = True


PRINTED = {
    "uc.by_global_norm(0.5)": uc.by_global_norm(0.5),
    "uc.by_global_norm(1.5, curve=uc.curves.soft)": uc.by_global_norm(
        np.float32(1.5), curve=uc.curves.soft
    ),
    "uc.zclip()": uc.zclip(2.5, decay=0.97),
    "uc.zclip(decay=0.9)": uc.zclip(2.5, 0.9),
    "uc.by_norm(1.0, 0)": uc.by_norm(1.0, 0),
    "uc.agc(0.02)": uc.agc(0.02),
    "uc.cowclip(<array of shape (3,)>)": uc.cowclip(np.ones(3)),
    "uc.chain(uc.by_value(-1.0, 1.0), uc.zclip())": uc.chain(uc.by_value(-1.0, 1.0), uc.zclip()),
    "uc.masked(uc.agc(), only_w)": uc.masked(uc.agc(), only_w),
    "uc.Rule(uc.limits.ZScore(2.5, 0.97), nonfinite='skip')": replace(uc.zclip(), nonfinite="skip"),
}


@on_numpy
@pytest.mark.parametrize("text", PRINTED)
def test_a_rule_prints_as_the_call_that_made_it(text: str) -> None:
    """A rule prints as its call, without defaults.

    A rule composed by hand, or changed, prints its choices.
    """
    assert repr(PRINTED[text]) == text


@on_numpy
def test_where_a_rule_comes_from_is_no_choice() -> None:
    """The call of a rule is no part of comparisons and states; errors show it."""
    preset, by_hand = uc.by_global_norm(1.0), uc.Rule(1.0)
    assert (preset, hash(preset), to_config(preset)["fields"]) == (
        by_hand,
        hash(by_hand),
        to_config(by_hand)["fields"],
    )
    one, other = uc.Clipper(uc.zclip()), uc.Clipper(replace(uc.zclip()))
    one.init(np.ones(1))
    other.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match=r"uc.adagc\(\) remembers each leaf"):
        (clipper := uc.Clipper(uc.adagc())).init([np.ones(1)]) or clipper([np.ones(1), np.ones(1)])


@on_numpy
def test_a_config_holds_the_call_that_made_a_rule() -> None:
    """A rule from a config prints as its call, unless the config was changed."""
    rule = uc.chain(
        uc.masked(uc.by_norm(Fraction(1, 2), [0, 1]), only_w), uc.by_group_norm({True: 1}, double)
    )
    config = json.loads(json.dumps(to_config(rule, OWN)))
    text = (
        "uc.chain(uc.masked(uc.by_norm(0.5, (0, 1)), only_w), uc.by_group_norm({True: 1}, double))"
    )
    assert (from_config(config, OWN), repr(from_config(config, OWN))) == (rule, text)

    changed = to_config(uc.by_global_norm(1.0))
    changed["fields"]["limit"]["fields"]["value"] = 0.5
    assert repr(from_config(changed)) == "uc.Rule(0.5)"
    for preset, named in (
        ("uniclip.later", {}),
        ("uniclip.zclip", {"later": 1}),
        ("uniclip.zclip", {"z": 1}),
        ("uniclip.by_global_norm", {"max_norm": -1.0}),
        ("uniclip.by_global_norm", {"max_norm": "1"}),
    ):
        call = {"preset": preset, "positional": [], "named": named}
        assert (
            repr(from_config(to_config(uc.by_global_norm(1.0)) | {"call": call})) == "uc.Rule(1.0)"
        )
    assert repr(from_config(to_config(uc.Rule(1.0)))) == "uc.Rule(1.0)"


@on_numpy
def test_rules_differ_by_their_choices() -> None:
    """Equality compares every choice."""
    alike = {
        "by_global_norm, limit in float32",
        "by_global_norm, whole limit",
        "cowclip",
        "unlimited",
    }
    some = [rule for name, rule in RULES.items() if name not in alike]
    assert len(set(some)) == len({repr(rule) for rule in some}) == len(some)


LONG = {"float64": 1e-14, "float32": 5e-7, "float16": 2e-6, "bfloat16": 2e-6}
"""The tolerated relative errors of norms."""


@pytest.mark.only("numpy", "torch", "tensorflow")
@pytest.mark.parametrize("dtype", LONG)
@pytest.mark.parametrize("size", [8192, 300_001])
def test_long_leaves(framework: Framework, dtype: str, size: int) -> None:
    """A norm over leaves of any size, random or equal elements, is that of float64."""
    values = np.random.default_rng(0).standard_normal(size)
    for entries in (values, np.full(size, 0.1)):
        leaf = framework.array(entries, dtype)
        wanted = math.sqrt(float(np.square(framework.numpy(leaf).astype(float)).sum()))
        for tree in ([leaf], [leaf, framework.array([0.0, 0.0], dtype)]):
            (clipped, *_), report = uc.clip(tree, uc.by_global_norm(wanted / 2))
            assert float(framework.numpy(report.norms)) == pytest.approx(wanted, rel=LONG[dtype])
            assert framework.dtype(clipped) == dtype
            assert float(framework.numpy(uc.global_norm(tree))) == pytest.approx(
                wanted, rel=LONG[dtype]
            )


SHORT = {
    "equal": lambda rng, shape: np.full(shape, 0.1),
    "random": lambda rng, shape: rng.standard_normal(shape),
    "zeros": lambda rng, shape: np.zeros(shape),
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 1e-30,
    "huge": lambda rng, shape: rng.standard_normal(shape) * 1e25,
    "one of many": lambda rng, shape: np.eye(*shape, k=7) * 3e4,
}


@pytest.mark.only("numpy", "torch", "tensorflow", "jax")
@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_short_leaves(framework: Framework, dtype: str, name: str) -> None:
    """The joint norm of leaves that are short, but many, is as accurate as that of a long one."""
    rng = np.random.default_rng(0)
    grads = [framework.array(SHORT[name](rng, (100, 41)), dtype) for _ in range(11)]
    exact = np.concatenate([framework.numpy(grad).astype(np.float64).ravel() for grad in grads])
    wanted = np.sqrt(np.sum(exact.astype(np.longdouble) ** 2)).astype(np.float64)
    np.testing.assert_allclose(float(uc.global_norm(grads)), wanted, rtol=5e-7)


@pytest.mark.needs("torch")
def test_one_norm_has_one_value() -> None:
    """The norm of the same gradients has the same bits for any limit, function, or write."""
    import torch

    from uniclip.integrations.torch import get_total_norm

    for seed in range(40):
        leaf = torch.randn(10007, generator=torch.Generator().manual_seed(seed))
        for grads in ([leaf], [leaf, leaf]):
            wanted = float(uc.global_norm(grads))
            assert float(get_total_norm(grads)) == wanted
            for limit in (0.0, 1.0, 1e9, math.inf):
                assert float(uc.clip(grads, uc.by_global_norm(limit))[1].norms) == wanted
                copied = leaf.clone()
                there = [copied for _ in grads]
                assert float(uc.clip_(there, uc.by_global_norm(limit)).norms) == wanted


class Doubled(uc.limits.Ema):
    """A subclass of one of uniclip's limits with a state of its own."""

    def init(self, norms: Any, context: uc.limits.Context) -> Any:
        return {"inner": super().init(norms, context)}

    def __call__(self, norms: Any, state: Any, context: uc.limits.Context) -> Any:
        limits, inner = super().__call__(norms, state["inner"], context)
        return 2 * limits, {"inner": inner}


def test_a_subclass_of_a_limit(framework: Framework) -> None:
    """A subclass of one of uniclip's limits may have any state."""
    clipper = uc.Clipper(uc.Rule(Doubled(1.0, 0.9)))
    for size in (1.0, 1.0, 8.0):
        clipper(framework.array([size]))
    np.testing.assert_allclose(framework.numpy(clipper.report.limits), 2.0, rtol=1e-6)


@pytest.mark.needs("torch")
def test_bounds_on_another_device() -> None:
    """Bounds on the CPU are moved to the device of the gradients."""
    import torch

    bounds = torch.tensor([-1.0, -2.0])
    [clipped], _ = uc.clip([torch.ones(2, device="meta")], uc.by_value(bounds, 1.0))
    assert clipped.device.type == "meta"
    with pytest.raises(ValueError, match="min"):
        uc.clip([torch.ones(2)], uc.by_value(bounds, -1.5))
