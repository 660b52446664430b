"""Rules: the four choices, how they print and compare, limits of one's own, reports, reduction over devices."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from parts import together

import oracle
import uniclip as uc
from frameworks import COMPILED, EAGER, KNOWN, ROUNDED, Framework
from promises import EPS

pytestmark = pytest.mark.ways(*EAGER)

PRESETS = [
    uc.by_value(-1.0, 1.0),
    uc.by_value(-1.0, 2.0),
    uc.by_norm(1.0),
    uc.by_norm(1.0, axis=0, ord=1),
    uc.by_norm(1.0, axis=(0, -1), ord=math.inf),
    uc.by_average_norm(1.0),
    uc.by_global_norm(0.5),
    uc.by_global_norm(0.5, ord=3),
    uc.by_block_rms(2.0),
    uc.Rule(1.0, scope=uc.scopes.unit(), norm=uc.norms.MEAN),
    uc.Rule(1.0, scope=uc.scopes.each_example, norm=uc.norms.L1),
    uc.Rule(1.0, scope=uc.scopes.each_entry, norm=uc.norms.Linf),
    uc.Rule(uc.limits.Constant(3.0), scope=uc.scopes.unit(0)),
    uc.by_global_norm(1.0, curve=uc.curves.soft),
    uc.by_group_norm({"a": 1.0, "b": uc.limits.Ema(1.05, 0.98)}, max),
    uc.to_global_norm(2.0),
    uc.agc(),
    uc.agc(0.1, axis=0),
    uc.larc(0.1),
    uc.autoclip(),
    uc.autoclip(window=None),
    uc.percentile_clipping(),
    uc.zclip(),
    uc.zclip(3.0, target="mean", nonfinite="skip"),
    uc.zclip(clip_factor=0.7, skip_update_on_spike=True),
    uc.agc(ord=math.inf),
    uc.by_example_quantile(min=0.05, max=2.0),
    uc.log_zscore(),
    uc.adagc(),
    uc.norm_growth(),
    uc.skip_spikes(),
    uc.spam(),
    uc.adagn(),
    uc.by_example_norm(1.0),
    uc.by_example_layer_norm(1.0, by_size=True),
    uc.by_example_quantile(),
    uc.auto_s(),
    uc.psac(),
    uc.by_global_norm(uc.limits.Schedule(abs)),
    uc.chain(uc.zclip(), abs, uc.by_value(-1.0, 1.0)),
    uc.masked(uc.chain(abs), max),
]


@pytest.mark.parametrize("rule", PRESETS, ids=repr)
def test_a_rule_prints_as_its_source(rule: uc.Rule) -> None:
    """What a rule prints evaluates to an equal rule of equal hash; it is frozen and can be pickled."""
    names = {"uc": uc, "inf": math.inf}
    again = eval(repr(rule), names)
    assert again == rule
    assert hash(again) == hash(rule)
    assert pickle.loads(pickle.dumps(rule)) == rule
    with pytest.raises(AttributeError):
        rule.limit = 2.0


def test_what_has_no_name_prints_too() -> None:
    """Partial functions, objects that can be called and arrays are in a rule's text, as what they print."""
    ready = functools.partial(max, 1)
    assert repr(uc.chain(ready, uc.masked(uc.by_norm(1.0), ready))).count("functools.partial") == 2
    assert "array([1., 1.])" in repr(uc.cowclip(np.ones(2)))


def test_rules_differ_by_their_choices() -> None:
    """Equality looks at all four choices."""
    assert len(set(PRESETS)) == len(PRESETS)


def matrix(fw: Framework) -> tuple[np.ndarray, Any]:
    """Return a matrix and the framework's copy of it."""
    values = np.random.default_rng(1).standard_normal((4, 3)).astype("float32")
    return values, fw.array(values)


SCOPED = {
    "each_entry": (uc.scopes.each_entry, ()),
    "each_leaf": (uc.scopes.each_leaf, (0, 1)),
    "axes(0)": (uc.scopes.axes(0), (0,)),
    "axes(-1)": (uc.scopes.axes(-1), (1,)),
    "unit(0)": (uc.scopes.unit(0), (1,)),
    "unit(-1)": (uc.scopes.unit(-1), (0,)),
    "each_example": (uc.scopes.each_example, (1,)),
    "all_leaves": (uc.scopes.all_leaves, (0, 1)),
    "groups": (uc.scopes.groups(lambda path, leaf: "one"), (0, 1)),
}


@pytest.mark.parametrize("name", SCOPED)
@pytest.mark.parametrize(
    "norm",
    [uc.norms.L1, uc.norms.L2, uc.norms.Linf, uc.Norm(3), uc.norms.RMS, uc.norms.MEAN, uc.Norm(2, size_power=1)],
    ids=repr,
)
def test_every_scope_with_every_norm(fw: Framework, name: str, norm: uc.Norm) -> None:
    """One leaf under each scope and norm agrees with the oracle."""
    scope, axes = SCOPED[name]
    values, leaf = matrix(fw)
    clipped, report = uc.clip(leaf, uc.Rule(0.1, scope=scope, norm=norm))
    wanted = oracle.clip_axes(values, 0.1, axes, norm.ord, norm.size_power)
    np.testing.assert_allclose(fw.numpy(clipped), wanted, rtol=8 * EPS["float32"])
    assert bool(fw.numpy(report.clipped))
    assert bool(fw.numpy(report.finite))


def test_unit_follows_the_framework(fw: Framework) -> None:
    """The output axis is the first in PyTorch and the last elsewhere; a vector is one unit."""
    values, leaf = matrix(fw)
    [clipped, bias], _ = uc.clip([leaf, fw.array([3.0, 4.0])], uc.Rule(0.3, scope=uc.scopes.unit()))
    wanted = oracle.clip_axes(values, 0.3, (1,) if fw.family == "PyTorch" else (0,))
    np.testing.assert_allclose(fw.numpy(clipped), wanted, rtol=8 * EPS["float32"])
    np.testing.assert_allclose(fw.numpy(bias), [0.18, 0.24], rtol=1e-6)


def test_each_example_joins_leaves(fw: Framework) -> None:
    """The norm of an example runs over all leaves (values of optax's per-example test)."""
    w = fw.array([[0, -0.5], [3, 4], [5, 6], [0, 0]])
    b = fw.array([[0.0], [5], [-3], [0]])
    rule = uc.Rule(1.0, scope=uc.scopes.each_example)
    (w, b), report = uc.clip((w, b), rule)
    np.testing.assert_allclose(fw.numpy(report.norms), [0.5, math.sqrt(50), math.sqrt(70), 0], rtol=1e-6)
    np.testing.assert_allclose(fw.numpy(w)[1], np.asarray([3, 4]) / math.sqrt(50), rtol=1e-6)
    np.testing.assert_allclose(fw.numpy(b)[2], [-3 / math.sqrt(70)], rtol=1e-6)
    np.testing.assert_array_equal(fw.numpy(w)[0], [0, -0.5])


def test_unequal_numbers_of_examples(fw: Framework) -> None:
    """Leaves with 4 examples and with 1 are refused by both shapes, not broadcast."""
    with pytest.raises(
        ValueError, match=r"grads\[0\] of shape \(4, 2\) .*\(4,\), grads\[1\] of shape \(1, 2\) has \(1,\)"
    ):
        uc.clip([fw.array(np.ones((4, 2))), fw.array(np.ones((1, 2)))], uc.Rule(1.0, scope=uc.scopes.each_example))


def test_groups_by_label(fw: Framework) -> None:
    """Leaves of equal label share a norm, and the report is a dict by label."""
    grads = {"enc": {"w": fw.array([3.0]), "b": fw.array([4.0])}, "head": [fw.array([0.5])]}
    clipped, report = uc.clip(grads, uc.Rule(1.0, scope=uc.scopes.groups(lambda path, leaf: path[0])))
    assert {label: round(float(fw.numpy(norm)), 5) for label, norm in report.norms.items()} == {"enc": 5.0, "head": 0.5}
    np.testing.assert_allclose(fw.numpy(clipped["enc"]["w"]), [0.6], rtol=1e-6)
    np.testing.assert_array_equal(fw.numpy(clipped["head"][0]), [0.5])


def test_report_of_each_leaf_is_a_tree(fw: Framework) -> None:
    """Per-leaf norms stand where their leaves stand."""
    grads = {"w": fw.array([3.0, 4.0]), "none": None, "l": [fw.array([0.5])]}
    _, report = uc.clip(grads, uc.by_norm(1.0))
    assert report.norms["none"] is None
    assert [float(fw.numpy(x)) for x in (report.norms["w"], report.norms["l"][0])] == pytest.approx([5.0, 0.5])
    assert [float(fw.numpy(x)) for x in (report.factors["w"], report.factors["l"][0])] == pytest.approx([0.2, 1.0])
    assert float(fw.numpy(report.limits["w"])) == 1.0


def test_axis_out_of_range(fw: Framework) -> None:
    """A leaf without the axis is named, with its shape."""
    with pytest.raises(ValueError, match=r"grads\['b'\] of shape \(2,\): axis 1 is out of range"):
        uc.clip_by_norm({"w": fw.array([[1.0, 2.0]]), "b": fw.array([1.0, 2.0])}, 1.0, axis=1)
    with pytest.raises(ValueError, match=r"grads of shape \(\): a leaf without dimensions"):
        uc.clip(fw.array(1.0), uc.Rule(1.0, scope=uc.scopes.each_example))
    with pytest.raises(ValueError, match=r"grads of shape \(1, 2\): output axis 2 is out of range"):
        uc.clip(fw.array([[1.0, 2.0]]), uc.Rule(1.0, scope=uc.scopes.unit(2)))


@dataclass(frozen=True)
class Relative(uc.Limit):
    """A limit of one's own that compares with the parameters."""

    ratio: float
    needs: ClassVar[frozenset[str]] = frozenset({"params"})

    def __call__(self, norms: Any, state: Any, context: uc.limits.Context) -> tuple[Any, Any]:
        return self.ratio * context.params, state


class Seen(NamedTuple):
    """The state of `Previous`."""

    last: Any


@dataclass(frozen=True)
class Previous(uc.Limit):
    """A limit of one's own that remembers: twice the norm of the step before."""

    memory: ClassVar[bool] = True

    def init(self, norms: Any, context: uc.limits.Context) -> Seen:
        return Seen(norms + 1)

    def __call__(self, norms: Any, state: Seen, context: uc.limits.Context) -> tuple[Any, Seen]:
        return 2 * state.last, Seen(norms)


def test_a_limit_that_compares_with_parameters(fw: Framework) -> None:
    """`params` are measured the parameters by the rule's scope and norm; absent gradients are left out."""
    rule = uc.Rule(Relative(0.1), scope=uc.scopes.each_leaf)
    grads = {"w": fw.array([3.0, 4.0]), "frozen": None, "b": [fw.array([0.1])]}
    params = {"w": fw.array([0.0, 10.0]), "frozen": fw.array([7.0]), "b": [fw.array([5.0])]}
    clipped, report = uc.clip(grads, rule, params=params)
    np.testing.assert_allclose(fw.numpy(clipped["w"]), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(fw.numpy(clipped["b"][0]), np.float32([0.1]))
    assert float(fw.numpy(report.limits["b"][0])) == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"Relative.*pass params="):
        uc.clip(grads, rule)
    with pytest.raises(ValueError, match=r"params\['w'\] is missing"):
        uc.clip(grads, rule, params={"b": params["b"]})
    with pytest.raises(ValueError, match=r"params\['w'\] has shape \(1,\), grads\['w'\] \(2,\)"):
        uc.clip(grads, rule, params={**params, "w": params["b"][0]})
    other = KNOWN["array-api-strict" if fw.family == "NumPy" else "numpy"]()
    with pytest.raises(TypeError, match="another framework"):
        uc.clip(grads, rule, params={"w": other.array([0.0, 1.0]), "b": [other.array([5.0])]})


def test_a_limit_that_remembers(fw: Framework) -> None:
    """State goes in and out of `update`; `clip` refuses a rule that needs it."""
    rule = uc.Rule(Previous(), scope=uc.scopes.axes(-1))

    def two_steps(grads: Any) -> Any:
        state = rule.init(grads)
        first, state, _ = rule.update(grads, state)
        second, state, report = rule.update([10 * g for g in grads], state)
        return first, second, state, report

    first, second, state, report = fw.run(two_steps, [fw.array([[3.0, 4.0], [0.0, 1.0]])])
    np.testing.assert_allclose(fw.numpy(first[0]), [[1.2, 1.6], [0, 1]], rtol=1e-6)
    np.testing.assert_allclose(fw.numpy(second[0]), [[6, 8], [0, 2]], rtol=1e-6)
    np.testing.assert_allclose(fw.numpy(state.last)[0], [50, 10], rtol=1e-6)
    np.testing.assert_allclose(fw.numpy(report.limits[0]), [10, 2], rtol=1e-6)
    with pytest.raises(ValueError, match=r"remembers earlier steps.*rule\.init"):
        uc.clip([fw.array([[1.0]])], rule)


CURVE_FUNCTIONS = [
    "abs", "ceil", "exp", "expm1", "floor", "isfinite", "isnan", "log", "log1p", "ones_like", "round", "sign", "sqrt",
    "square", "tanh", "zeros_like",
]  # fmt: skip
CURVE_PAIRS = ["equal", "greater", "greater_equal", "less", "less_equal", "maximum", "minimum", "not_equal", "pow"]


def test_a_curve_of_ones_own(fw: Framework) -> None:
    """A curve may use the elementwise functions of the array API on every framework."""

    def curve(xp: Any, norm: Any, limit: Any) -> Any:
        for name in CURVE_FUNCTIONS:
            getattr(xp, name)(norm)
        for name in CURVE_PAIRS:
            getattr(xp, name)(norm, limit)
        return xp.tanh(norm / limit) * limit / norm

    [clipped], _ = uc.clip([fw.array([3.0, 4.0])], uc.Rule(1.0, curve=curve))
    np.testing.assert_allclose(fw.numpy(clipped), np.asarray([0.6, 0.8]) * math.tanh(5), rtol=1e-6)


def counting(run: Callable[[Any, Any], Any], asked: list[str]) -> Callable[[Any, Any], Any]:
    """Return a run of a process whose reductions after the first step are counted."""

    def counted(part: Any, all_reduce: Any) -> Any:
        own: list[str] = []

        def join(array: Any, op: str) -> Any:
            own.append(op)
            return all_reduce(array, op)

        run(part, join)
        own.clear()
        found = run(part, join)
        asked[:] = own
        return found

    return counted


@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
@pytest.mark.parametrize("by", [1.0, 1e30])
def test_all_reduce(fw: Framework, ord: float, by: float) -> None:
    """Two processes that each hold a part clip as one that holds all, by one reduction for each operation."""
    parts = [np.asarray([3.0, -4.0]) * by, np.asarray([12.0]) * by]
    rule, asked = uc.by_global_norm(1.0, ord=ord), []
    whole, report = uc.clip([fw.array(part) for part in parts], rule)

    def run(part: Any, join: Any) -> Any:
        [mine], seen = uc.clip([fw.array(part)], rule, all_reduce=join)
        return mine, seen.norms

    for found, wanted in zip(together(fw, parts, counting(run, asked)), whole, strict=True):
        np.testing.assert_allclose(found[1], fw.numpy(report.norms), rtol=1e-6)
        np.testing.assert_allclose(found[0], fw.numpy(wanted), rtol=1e-6)
    once = {1: ["sum"], 2: ["sum"], 3: ["max", "sum"], math.inf: ["max"]}
    if fw.family in {"array-api-strict", "MLX", "Dask"} or (
        fw.family == "JAX" and by > 1
    ):  # these cannot be asked which one to take
        once[2] = ["sum", "sum"]
    assert asked == once[ord]


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("ord", [2, 3, math.inf])
def test_all_reduce_whose_maximum_drops_nan(fw: Framework, ord: float, where: int) -> None:
    """A process whose gradients are NaN is not alone with them, where the maximum of its library leaves NaN out."""
    parts = [np.asarray([3.0, -4.0]) * 1e30, np.asarray([12.0, 1.0]) * 1e30]
    parts[where][0] = np.nan
    for nonfinite in ("propagate", "skip"):
        rule = uc.by_global_norm(1.0, ord=ord, nonfinite=nonfinite)

        def run(part: Any, join: Any, rule: uc.Rule = rule) -> Any:
            [mine], report = uc.clip([fw.array(part)], rule, all_reduce=join)
            return mine, report.norms, report.finite

        for mine, norms, finite in together(fw, parts, run, np.fmax):
            assert np.isnan(norms)
            assert not finite
            np.testing.assert_equal(mine, [np.nan] * 2 if nonfinite == "propagate" else [0.0] * 2)


def test_own_function(fw: Framework) -> None:
    """MyCapper: any function of one gradient array runs on every framework."""
    calls = []

    def my_capper(grad: Any) -> Any:
        calls.append(1)
        return grad / 2

    shared = fw.array([4.0])
    clipped, report = uc.clip({"a": shared, "b": [shared, None], "c": fw.array([[8.0]])}, my_capper)
    assert [float(fw.numpy(x).ravel()[0]) for x in (clipped["a"], clipped["b"][0], clipped["c"])] == [2, 2, 4]
    assert len(calls) == 3
    assert report == uc.Report()
    with pytest.raises(TypeError, match=r"grads\[0\]: .*it returned NoneType"):
        uc.clip([shared], lambda grad: None)


def test_scalars(fw: Framework) -> None:
    """A report in the few numbers that a logger shows: the same names for every rule."""

    def shown(rule: Any, grads: Any) -> dict[str, float]:
        scalars = fw.run(lambda grads: uc.clip(grads, rule)[1].scalars(), grads)
        assert all(tuple(value.shape) == () and fw.owns(value) for value in scalars.values())
        return {name.removeprefix("clip/"): round(float(fw.numpy(value)), 6) for name, value in scalars.items()}

    grads = {"a": fw.array([3.0, 4.0]), "b": [None, fw.array([[0.25]])], "empty": fw.array(np.zeros((0, 2)))}
    together = {"norm": 5.006246, "limit": 1.0, "factor": 0.19975, "share": 1.0}
    assert shown(uc.by_global_norm(1.0), grads) == together
    assert shown(uc.by_global_norm(1.0, nonfinite="skip"), grads) == together | {"skipped": 0.0}
    each = {"norm": 5.0, "limit": 1.0, "factor": 0.2, "share": 0.333333}
    assert shown(uc.by_norm(1.0), grads) == each
    columns = {"norm": 0.4, "limit": 0.3, "factor": 0.75, "share": 0.25}
    wide = fw.array([0.4, 0.0], "float64" if "float64" in fw.dtypes else "float32")
    assert shown(uc.Rule(0.3, scope=uc.scopes.axes(0)), [fw.array([[0.1, 0.2, 0.3], [0.0, 0.0, 0.0]]), wide]) == columns
    chained = {"norm": 1.414214, "limit": 0.5, "factor": 0.353553, "share": 0.333333}
    assert shown(uc.chain(uc.by_value(-1.0, 1.0), uc.by_norm(0.5)), grads) == chained
    chained = {"norm": 5.006246, "limit": 2.0, "factor": 0.399501, "share": 1.0}
    assert shown(uc.chain(uc.by_global_norm(9.0), uc.by_global_norm(2.0)), grads) == chained
    assert shown(uc.by_value(-1.0, 1.0), grads) == {}


def test_by_value_bounds(fw: Framework) -> None:
    """Bounds are numbers or arrays, symmetric or not."""
    grads = fw.array([[-3.0, 0.5, 3.0]])
    np.testing.assert_array_equal(fw.numpy(uc.clip_by_value(grads, -1, 2)), [[-1, 0.5, 2]])
    np.testing.assert_array_equal(fw.numpy(uc.clip(grads, uc.by_value(-1.0, 1.0))[0]), [[-1, 0.5, 1]])
    np.testing.assert_array_equal(fw.numpy(uc.clip(grads, uc.by_value(0.0, math.inf))[0]), [[0, 0.5, 3]])
    low, high = fw.array([-2.0, 0.0, 0.0]), fw.array([0.0, 0.25, 9.0])
    np.testing.assert_array_equal(fw.numpy(uc.clip_by_value(grads, low, high)), [[-2, 0.25, 3]])
    np.testing.assert_array_equal(fw.numpy(uc.clip_by_value(fw.array([math.nan, 5.0]), -1, 1)), [math.nan, 1])
    with pytest.raises(ValueError, match="min=nan"):
        uc.clip_by_value(grads, math.nan, 1)


def test_by_value_in_half_precision(fw: Framework) -> None:
    """Bounds beyond what the dtype can hold do not bind."""
    for dtype in {"float16", "bfloat16"} & set(fw.dtypes):
        clipped = uc.clip_by_value(fw.array([-300.0, 3.0], dtype), -1e6, 2)
        np.testing.assert_array_equal(fw.numpy(clipped).astype("float32"), fw.numpy(fw.array([-300.0, 2.0], dtype)))
        assert fw.dtype(clipped) == dtype


def test_integer_bounds_saturate() -> None:
    """A bound that the integers of the gradient cannot hold does not bind, as a number or as an array."""
    for bound in (300, np.asarray(300), np.asarray([300, 300])):
        np.testing.assert_array_equal(uc.clip_by_value(np.asarray([1, 100], "int8"), -1, bound), [1, 100])
    low = np.asarray(-5)
    np.testing.assert_array_equal(uc.clip_by_value(np.asarray([1, 200, 255], "uint8"), low, 255), [1, 200, 255])


def test_unsigned_integers() -> None:
    """A bound below what the dtype can hold does not bind."""
    np.testing.assert_array_equal(uc.clip_by_value(np.asarray([0, 3], "uint8"), -1, 2), np.asarray([0, 2], "uint8"))


@pytest.mark.parametrize("limit", [None, "1.0", [1.0]], ids=repr)
def test_a_limit_that_is_none(limit: Any) -> None:
    """What is neither a number nor an array is refused by the name of its argument."""
    with pytest.raises(TypeError, match="max_norm must be a number or a 0-d array"):
        uc.clip_by_global_norm([np.ones(2)], limit)


def test_a_rule_that_is_none() -> None:
    """A number is no rule, and a preset that was not called is no function of a gradient."""
    for rule in (1.0, uc.Rule, {"w": uc.by_norm(1.0)}, None):
        with pytest.raises(TypeError, match="rule must be a rule"):
            uc.clip([np.ones(2)], rule)
    with pytest.raises(TypeError, match=r"it returned uniclip\.rules\.Rule; call .*<lambda> first"):
        uc.clip([np.float32(1)], lambda norm: uc.by_global_norm(norm))
    with pytest.raises(TypeError, match=r"call functools\.partial\(uc\.by_global_norm, \.\.\.\) first"):
        uc.clip([np.float32(1)], functools.partial(uc.by_global_norm, ord=1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: uc.Rule(1.0, scope="leaf"), r"scope must be a uc\.Scope.*got 'leaf'"),
        (lambda: uc.Rule(1.0, scope=uc.scopes.unit), r"scope must be a uc\.Scope"),
        (lambda: uc.Rule(1.0, norm=2), r"norm must be a uc\.Norm.*got 2"),
        (lambda: uc.Rule(1.0, curve=1.0), r"curve must be a function"),
        (lambda: uc.Rule(lambda norm: 1.0), r"limit, must be a number"),
        (lambda: uc.scopes.axes((0, 1)), r"axis must be a whole number, got \(0, 1\)"),
        (lambda: uc.by_value(None, 1.0), r"min must be a number"),
        (lambda: uc.clip_by_value([np.ones(2)], -1.0, None), r"max must be a number or an array .*got None"),
    ],
)
def test_a_choice_that_is_none(make: Any, message: str) -> None:
    """What is none of the choices is refused when the rule is made, by name and value."""
    with pytest.raises(TypeError, match=message):
        make()


def test_orders_that_are_none() -> None:
    """An order is a number of at least 1."""
    for order, error in (("fro", TypeError), (None, TypeError), (0, ValueError), (math.nan, ValueError)):
        with pytest.raises(error, match=r"order.*at least 1"):
            uc.Norm(order)


def test_errors_in_own_functions() -> None:
    """An own error is raised as it is; a plain TypeError also names the leaf."""

    class OwnError(TypeError):
        def __init__(self, first: int, second: int) -> None:
            super().__init__(first, second)

    def own(grad: Any) -> Any:
        raise OwnError(1, 2)

    with pytest.raises(OwnError):
        uc.clip([np.ones(2)], own)
    with pytest.raises(TypeError, match=r"grads\[0\]: .*argument"):
        uc.clip([np.ones(2)], lambda: None)
    with pytest.raises(TypeError, match=r"grads\[0\]: .*it returned numpy.float64 of dtype float64 and shape \(\)"):
        uc.clip([np.ones(2)], np.sum)


def test_bounds_the_wrong_way_round(fw: Framework) -> None:
    """Arrays of bounds are compared too where they can be read."""
    low, high = fw.array(1.0), fw.array(-1.0)
    if fw.raises:
        with pytest.raises(ValueError, match=r"grads: min must not be above max"):
            uc.clip_by_value(fw.array([1.0]), low, high)


@dataclass(frozen=True)
class Half(uc.Limit):
    """A limit of one's own that is made of this step's norms."""

    def __call__(self, norms: Any, state: Any, context: uc.limits.Context) -> tuple[Any, Any]:
        return 0.5 * norms, state


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_limit_of_a_norm_that_is_not_finite(fw: Framework, bad: float) -> None:
    """A limit made of such a norm is no fault of the limit's: the policy decides."""
    rules = [uc.Rule(Half(), nonfinite=policy) for policy in ("propagate", "skip", "zero")]
    for (clipped, report), wanted in zip(
        fw.run(lambda g: [uc.clip(g, rule) for rule in rules], fw.array([3.0, bad, -4.0])),
        ([math.nan] * 3, [0.0] * 3, [1.5, 0.0, -2.0]),
        strict=True,
    ):
        np.testing.assert_allclose(fw.numpy(clipped), wanted, rtol=1e-6)
        assert not fw.numpy(report.finite)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (2.0, TypeError, r"must return \(limits, state\)"),
        (([], ()), TypeError, r"an array of real numbers that broadcasts against norms of shape \(1,\)"),
        ((np.ones(2), ()), ValueError, r"a limit of shape \(2,\) does not fit norms of shape \(1,\)"),
    ],
)
def test_a_limit_that_returns_none(answer: Any, error: type[Exception], message: str) -> None:
    """What a limit of one's own returns is checked."""

    class Wrong(uc.Limit):
        def __call__(self, norms: Any, state: Any, context: uc.limits.Context) -> Any:
            return answer

    with pytest.raises(error, match=message):
        uc.clip(np.ones(2), uc.Rule(Wrong()))


def test_zero_with_all_reduce(fw: Framework) -> None:
    """What is not finite in another process keeps this one's state too, or the processes would part."""
    rule = uc.by_global_norm(1.0, nonfinite="zero")
    parts = [np.asarray([3.0, 4.0]), np.asarray([np.inf, 1.0])]
    for finite in together(fw, parts, lambda part, join: uc.clip(fw.array(part), rule, all_reduce=join)[1].finite):
        assert not finite


@pytest.mark.parametrize("order", [1, 1.5, 3, 20, 110, 1000])
def test_any_order(fw: Framework, order: float) -> None:
    """No order overflows, however large."""
    for values in ([1.99], [1.99] * 1000, [1e-30, 1.99e-30], [1.9e37, 1.0]):
        true = oracle.norm(np.asarray(values, "float32").tolist(), order)
        np.testing.assert_allclose(fw.numpy(uc.global_norm(fw.array(values), ord=order)), true, rtol=1e-5)


def test_known_norm(fw: Framework) -> None:
    """A norm that is known already is used as it is, and returned."""
    grads = [fw.array([3.0, 4.0])]
    for known in (10.0, fw.array(10.0)):
        [clipped], norm = uc.clip_by_global_norm(grads, 1.0, norm=known)
        np.testing.assert_allclose(fw.numpy(clipped), [0.3, 0.4], rtol=1e-6)
        assert float(fw.numpy(norm)) == 10.0


@pytest.mark.ways(*ROUNDED)
def test_a_known_norm_has_the_precision_of_the_gradients(fw: Framework) -> None:
    """A number of Python's is taken in the dtype of the norm, not in the framework's default one."""
    dtype, known = ("float64", 5e300) if "float64" in fw.dtypes else ("float32", 5e30)
    clipped, norm = uc.clip_by_global_norm(fw.array([0.6 * known, 0.8 * known], dtype), 1.0, norm=known)
    rtol = 1e-15 if dtype == "float64" else 1e-6
    np.testing.assert_allclose(fw.numpy(clipped), [0.6, 0.8], rtol=rtol)
    np.testing.assert_allclose(fw.numpy(norm), known, rtol=rtol)


@pytest.mark.ways(*ROUNDED)
def test_a_known_norm_beyond_the_dtype(fw: Framework) -> None:
    """A finite norm that float32 cannot hold, of wider arrays say, is no ∞."""
    grads = fw.array([3e5, 4e5])
    if "float64" in fw.dtypes:
        for norm in (5e200, fw.array(5e200, "float64")):
            clipped, _ = uc.clip_by_global_norm(grads, 1e199, norm=norm)
            np.testing.assert_allclose(fw.numpy(clipped), [6e3, 8e3], rtol=1e-6)
            clipped, _ = uc.clip_by_global_norm(grads, 1.0, norm=norm)
            np.testing.assert_array_equal(fw.numpy(clipped), [0.0, 0.0])
    else:
        with pytest.raises(ValueError, match=r"norm must be within the range of .*float32.*got 5e\+200"):
            uc.clip_by_global_norm(grads, 1.0, norm=5e200)


def test_a_known_norm_is_not_negative() -> None:
    """A negative norm is a mistake."""
    with pytest.raises(ValueError, match=r"norm must be 0 or more, got -1\.0"):
        uc.clip_by_global_norm([np.ones(2)], 1.0, norm=-1.0)
    with pytest.raises(ValueError, match=r"a norm of shape \(2,\) does not fit"):
        uc.clip_by_global_norm([np.ones(2)], 1.0, norm=np.ones(2))


def test_a_limit_for_each_norm(fw: Framework) -> None:
    """A limit is one number or one for each norm; other shapes are refused, not broadcast."""
    grads, limits = fw.array([[3.0, 4.0], [6.0, 8.0]]), fw.array([1.0, 2.0])
    clipped = uc.clip_by_norm(grads, limits, axis=1)
    np.testing.assert_allclose(fw.numpy(clipped), [[0.6, 0.8], [1.2, 1.6]], rtol=1e-6)
    with pytest.raises(ValueError, match=r"limit of shape \(2,\) does not fit norms of shape \(1,\)"):
        uc.clip_by_global_norm(grads, limits)


@pytest.mark.ways(*COMPILED)
def test_limit_as_an_array(fw: Framework) -> None:
    """The limit may be a 0-d array, a traced one too."""
    grads, limit = [fw.array([3.0, 4.0])], fw.array(1.0)
    [clipped] = fw.run(lambda g, c: uc.clip_by_global_norm(g, c)[0], grads, limit)
    np.testing.assert_allclose(fw.numpy(clipped), [0.6, 0.8], rtol=1e-6)


def test_limits_that_are_no_floats(fw: Framework) -> None:
    """A limit may be an integer, a NumPy scalar or an array of another dtype than the norm's."""
    for limit in (5, np.float32(5), np.float64(5)):
        clipped = fw.run(lambda g, limit=limit: uc.clip(g, uc.by_global_norm(limit))[0], fw.array([6.0, 8.0]))
        np.testing.assert_allclose(fw.numpy(clipped), [3.0, 4.0], rtol=1e-6)
    arrays = fw.array([6.0, 8.0]), fw.array(5, "int32")
    clipped = fw.run(lambda g, limit: uc.clip(g, uc.by_global_norm(limit))[0], *arrays)
    np.testing.assert_allclose(fw.numpy(clipped), [3.0, 4.0], rtol=1e-6)


def test_a_curve_that_returns_a_number(fw: Framework) -> None:
    """A curve may return a number of Python's."""
    half = uc.Rule(1.0, curve=lambda xp, norm, limit: 0.5)
    clipped = fw.run(lambda g: uc.clip(g, half)[0], fw.array([6.0, 8.0]))
    np.testing.assert_allclose(fw.numpy(clipped), [3.0, 4.0], rtol=1e-6)


@pytest.mark.ways(*ROUNDED)
def test_each_leaf_of_mixed_precision_gets_the_factor_in_its_own(fw: Framework) -> None:
    """The factor of a leaf in double precision is not rounded to that of the first leaf."""
    if "float64" in fw.missing:
        return
    values = np.asarray([1.0, 3.0, 7.0])
    clipped = fw.run(lambda g: uc.clip_by_global_norm(g, 0.7)[0], [fw.array([5.0]), fw.array(values, "float64")])
    by = 0.7 / np.sqrt(25 + np.sum(values**2))
    np.testing.assert_allclose(fw.numpy(clipped[1]), by * values, rtol=1e-14)


@pytest.mark.ways(*ROUNDED)
def test_leaves_without_dimensions_keep_their_dtype(fw: Framework) -> None:
    """A 0-d leaf is no wider after clipping than before, beside others and beside wider ones."""
    for narrow, wide in (("float16", "float16"), ("float16", "float32"), ("float32", "float64")):
        if narrow in fw.missing or wide in fw.missing:
            continue
        grads = [fw.array(2.0, narrow), fw.array([[1.0, 2.0]], wide), fw.array(4.0, wide)]
        clipped = fw.run(lambda g: uc.clip_by_global_norm(g, 2.5)[0], grads)
        assert [fw.dtype(leaf) for leaf in clipped] == [fw.dtype(leaf) for leaf in grads]
        np.testing.assert_allclose([float(fw.numpy(leaf).ravel()[0]) for leaf in clipped], [1.0, 0.5, 2.0], rtol=1e-3)


@pytest.mark.ways(*ROUNDED)
def test_a_limit_has_the_precision_of_its_norm(fw: Framework) -> None:
    """A norm that is the limit rounded to float32 is not above it."""
    grad = fw.array([0.1])
    clipped, report = fw.run(lambda g: uc.clip(g, uc.by_global_norm(0.1)), grad)
    assert not fw.numpy(report.clipped)
    assert clipped is grad or not fw.same_objects


@pytest.mark.ways(*ROUNDED)
def test_small_squares_beside_double_precision(fw: Framework) -> None:
    """Squares that float32 cannot hold count although the norm is in double precision."""
    if "float64" in fw.missing:
        return
    grads = [fw.array(np.full(1000, 1e-30)), fw.array([1e-33], "float64")]
    norm = float(fw.numpy(fw.run(uc.global_norm, grads)))
    assert norm == pytest.approx(math.sqrt(1000) * float(np.float32(1e-30)), rel=1e-6)


@pytest.mark.ways(*ROUNDED)
def test_norms_of_mixed_dtypes(fw: Framework) -> None:
    """A norm over leaves of two dtypes is as accurate as the wider one, of any order."""
    narrow, wide, rtol = ("float32", "float64", 2e-14) if "float64" in fw.dtypes else ("float16", "float32", 1e-6)
    rng = np.random.default_rng(0)
    grads = [fw.array(rng.standard_normal(1000), dtype) for dtype in (narrow, wide)]
    orders = (2, 3) if fw.cost > 20 else (1, 1.5, 2, 2.5, 3, 7, math.inf)
    entries = [float(x) for leaf in grads for x in fw.numpy(leaf)]
    found = fw.run(lambda g: [uc.global_norm(g, ord=p) for p in orders], grads)
    for p, norm in zip(orders, found, strict=True):
        assert fw.dtype(norm) == wide
        np.testing.assert_allclose(float(fw.numpy(norm)), oracle.norm(entries, p), rtol=rtol, err_msg=f"order {p}")


def test_all_factors_exist_before_anything_is_written(fw: Framework) -> None:
    """A curve that fails for the second array of norms leaves the leaves of the first one as they were."""
    calls = []

    def failing(xp: Any, norm: Any, limit: Any) -> Any:
        calls.append(norm)
        if len(calls) == 2:
            msg = "the second one"
            raise ArithmeticError(msg)
        return 0.5 * norm / norm

    grads, clip = [fw.array([3.0]), fw.array([[5.0]])], uc.clip_ if fw.writes else uc.clip
    with pytest.raises(Exception, match="the second one"):  # compilers have their own kinds of errors
        fw.run(lambda g: clip(g, uc.Rule(1.0, scope=uc.scopes.each_entry, curve=failing)), grads)
    assert [fw.numpy(leaf).item() for leaf in grads] == [3.0, 5.0]


def test_a_limit_that_has_a_first_state_has_a_memory() -> None:
    """It is refused where it is written, not at a step."""
    with pytest.raises(TypeError, match="Forgetful has an init, which makes the first state: set memory = True"):

        class Forgetful(uc.Limit):
            def init(self, norms: Any, context: Any) -> Any:
                return norms
