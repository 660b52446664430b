"""Every kind of rule in compiled code, many in one program, does what it does in NumPy, step after step.

What each should do is tested elsewhere, eagerly; promises and long trainings are compiled, too.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import optree
import pytest

import uniclip as uc
from frameworks import CHOSEN, KNOWN, Framework
from tracing import Largest

RTOL = 2e-5
"""How far compiled code may be off: it adds in another order, and rules learn from what they did."""


def label(path: Any, leaf: Any) -> Any:
    """Return the group of a leaf."""
    return path[0]


def double(grad: Any) -> Any:
    """Stand for a function of one's own."""
    return 2 * grad


def falling(step: Any) -> Any:
    """Return the limit of a step."""
    return 1.0 + 4.0 * 0.5**step


def half(xp: Any, norm: Any, limit: Any) -> float:
    """Stand for a curve that returns a number of Python's."""
    return 0.5


def root(xp: Any, norm: Any, limit: Any) -> Any:
    """Stand for a curve of one's own."""
    return xp.sqrt(uc.curves.hard(xp, norm, limit))


@dataclass(frozen=True)
class Beside(uc.Limit):
    """A limit of one's own that compares with the parameters."""

    needs: ClassVar[frozenset[str]] = frozenset({"params"})

    def __call__(self, norms: Any, state: Any, context: uc.limits.Context) -> Any:
        return 0.1 * context.params, state


FIXED = {
    "by_value": uc.by_value(-1.0, 2.0),
    "by_norm": uc.by_norm(1.0),
    "by_norm, axis": uc.by_norm(1.0, axis=-1, ord=1),
    "by_average_norm": uc.by_average_norm(0.1),
    "by_global_norm": uc.by_global_norm(np.float32(2)),
    "by_global_norm, whole": uc.by_global_norm(2),
    "by_block_rms": uc.by_block_rms(0.5),
    "by_group_norm": uc.by_group_norm({"b": 1.0, "w": math.inf}, label),
    "normalized": uc.to_global_norm(2.0),
    "unlimited": uc.by_global_norm(math.inf),
    "zero": uc.by_norm(1.0, nonfinite="zero"),
    "skip": uc.by_global_norm(1.0, nonfinite="skip"),
    "chain": uc.chain(double, uc.by_norm(4.0), uc.by_global_norm(1.0)),
    "masked": uc.masked(uc.by_global_norm(1.0), lambda path, leaf: "b" not in path),
}
PARTS = {
    **{
        str(scope): uc.Rule(0.5, scope=scope)
        for scope in (
            uc.scopes.each_entry,
            uc.scopes.axes(0),
            uc.scopes.axes(-1),
            uc.scopes.unit(1),
            uc.scopes.unit(0),
            uc.scopes.each_example,
        )
    },
    **{
        str(norm): uc.Rule(0.5, norm=norm)
        for norm in (uc.norms.L1, uc.norms.Linf, uc.Norm(3), uc.norms.RMS, uc.norms.MEAN, uc.Norm(2, size_power=1))
    },
    "groups, L3": uc.Rule(0.5, scope=uc.scopes.groups(label), norm=uc.Norm(3)),
    **{
        f"curve {number}": uc.Rule(1.0, curve=curve)
        for number, curve in enumerate(
            [
                uc.curves.soft,
                uc.curves.smooth,
                uc.curves.tanh,
                uc.curves.reject,
                uc.curves.Regularized(0.1),
                uc.curves.NonMonotonic(0.1),
                half,
                root,
            ]
        )
    },
}
RELATIVE = {
    "agc": uc.agc(0.1, axis=-1),
    "agc, axis": uc.agc(0.1, axis=0, ord=1),
    "cowclip": uc.masked(uc.cowclip(np.asarray([1.0, 2.0, 3.0])), lambda path, leaf: path == ("w",)),
    "larc": uc.larc(0.1, weight_decay=0.1),
    "own": uc.Rule(Beside(), scope=uc.scopes.each_leaf),
    "group": uc.by_group_norm({"b": uc.limits.Relative(0.5), "w": 1.0}, label),
}
EXAMPLES = {
    "by_example_norm": uc.by_example_norm(1.0),
    "by_example_layer_norm": uc.by_example_layer_norm(1.0),
    "by_example_layer_norm, by size": uc.by_example_layer_norm(1.0, by_size=True),
    "by_example_quantile": uc.by_example_quantile(min=0.05, max=2.0),
    "auto_s": uc.auto_s(),
    "psac": uc.psac(),
}
LEARNING = {
    "schedule": uc.by_global_norm(uc.limits.Schedule(falling)),
    "autoclip": uc.autoclip(50, window=4),
    "autoclip, all": uc.autoclip(50, window=None),
    "percentile": uc.percentile_clipping(50, window=3),
    "zclip": uc.zclip(z=1.0, warmup=2),
    "zclip, mean": uc.zclip(z=1.0, warmup=2, target="mean"),
    "zclip, threshold": uc.zclip(z=1.0, warmup=2, target="threshold"),
    "zclip, spikes": uc.zclip(z=1.0, warmup=2, clip_factor=0.7, skip_update_on_spike=True),
    "log_zscore": uc.log_zscore(z=1.2),  # at 1 the second step is on the bound
}
MORE = {
    "adagc": uc.adagc(warmup=2),
    "norm_growth": uc.norm_growth(),
    "skip_spikes": uc.skip_spikes(z=1.0, window=4, warmup=2),
    "spam": uc.spam(factor=2.0, decay=0.5, warmup=1),
    "adagn": uc.adagn(),
    "groups": uc.Rule(uc.limits.PerGroup({"b": uc.limits.Ema(1.05, 0.98), "w": 1.0}), scope=uc.scopes.groups(label)),
    "masked": uc.masked(uc.chain(double, uc.adagc(warmup=0)), lambda path, leaf: path[0] == "w"),
    "chain": uc.chain(uc.by_global_norm(1.0, nonfinite="skip"), uc.autoclip(50, window=3)),
    "own": uc.Rule(Largest(), scope=uc.scopes.unit(0)),
}
PROGRAMS = {
    "fixed": FIXED, "parts": PARTS, "relative": RELATIVE, "examples": EXAMPLES, "learning": LEARNING, "more": MORE,
}  # fmt: skip
TRACED = [one for one in CHOSEN if one.traced and one.name != "jax.jit-x64"] or CHOSEN[:1]
DOUBLE = [one for one in CHOSEN if one.name == "jax.jit-x64"] or CHOSEN[:1]
"""Where numbers may become double precision: the same program otherwise, so it is traced only."""
NUMPY = KNOWN["numpy"]()
SIZES = (1.0, 1.2, 100.0, math.nan, 0.9, 0.0, 0.5)
LOSSES = (1.0, 1.1, 0.9, 1.0, 99.0, 1.0, 1.0)


def steps_of(fw: Framework) -> list[Any]:
    """Return the gradients of some steps: usual ones, a spike, NaN, zeros."""
    rng = np.random.default_rng(3)
    return [
        {"b": fw.array(size * rng.standard_normal(3)), "none": None, "w": fw.array(size * rng.standard_normal((3, 2)))}
        for size in SIZES
    ]


def params_of(fw: Framework) -> Any:
    """Return the parameters."""
    return {"b": fw.array([1.0, 2.0, 3.0]), "none": None, "w": fw.array(np.ones((3, 2)))}


def start(kind: str, params: Any) -> Any:
    """Return the first state of each rule of a program."""
    return {name: rule.init(params) for name, rule in PROGRAMS[kind].items()}


def step(kind: str, grads: Any, states: Any, params: Any, loss: Any) -> Any:
    """Return what each rule of a program does and knows after a step."""
    results = {name: rule.update(grads, states[name], params, loss=loss) for name, rule in PROGRAMS[kind].items()}
    return {name: (*result[:2], tuple(result[2]), result[2].scalars()) for name, result in results.items()}


def trained(fw: Framework, kind: str) -> list[Any]:
    """Return what each rule of a program does and knows after each step."""
    params, found, compiled = params_of(fw), [], fw.compiled(functools.partial(step, kind))
    states = fw.run(functools.partial(start, kind), params)
    for grads, loss in zip(steps_of(fw), LOSSES, strict=True):
        found.append(compiled(grads, states, params, fw.array(loss)))
        states = {name: result[1] for name, result in found[-1].items()}
    return found


@functools.cache
def wanted(kind: str) -> list[Any]:
    """Return what NumPy makes of a program."""
    return trained(NUMPY, kind)


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("fw", TRACED, ids=lambda framework: framework.name, indirect=True)
def test_compiled(fw: Framework, kind: str) -> None:
    """Gradients, states, reports and what loggers show are those of NumPy."""
    for number, (one, other) in enumerate(zip(trained(fw, kind), wanted(kind), strict=True)):
        for name in other:
            known = slice(2) if math.isnan(SIZES[number]) else slice(None)  # of a NaN no limit is promised
            same(fw, one[name][known], other[name][known], f"{name}, step {number}")


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("fw", DOUBLE, ids=lambda framework: framework.name, indirect=True)
def test_nothing_becomes_double(fw: Framework, kind: str) -> None:
    """Where there is double precision, what is single stays so: gradients, states, reports, what loggers show."""
    params = params_of(fw)
    states = fw.outline(functools.partial(start, kind), params)
    for number in range(2):
        found = fw.outline(functools.partial(step, kind), steps_of(fw)[number], states, params, fw.array(1.0))
        states = {name: result[1] for name, result in found.items()}
        assert optree.tree_structure(found) == optree.tree_structure(wanted(kind)[number])
        for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(wanted(kind)[number]), strict=True):
            assert tuple(a.shape) == b.shape
            assert "float" not in fw.dtype(a) or fw.dtype(a) == str(b.dtype)


@pytest.mark.parametrize("fw", TRACED, ids=lambda framework: framework.name, indirect=True)
def test_sums_of_examples(fw: Framework) -> None:
    """So are the sums over clipped examples."""
    rules = [rule for rule in EXAMPLES.values() if not rule.memory]
    sums = lambda grads: [uc.clip_and_sum(grads, rule) for rule in rules]
    for found, expected in zip(fw.run(sums, steps_of(fw)[2]), sums(steps_of(NUMPY)[2]), strict=True):
        same(fw, (found[0], tuple(found[1])), (expected[0], tuple(expected[1])), "sums")


def same(fw: Framework, found: Any, wanted: Any, where: str) -> None:
    """Compare two trees of arrays, but for rounding."""
    assert optree.tree_structure(found) == optree.tree_structure(wanted), where
    for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True):
        assert tuple(a.shape) == b.shape, where
        assert "float" not in fw.dtype(a) or fw.dtype(a) == str(b.dtype), where
        np.testing.assert_allclose(fw.numpy(a), b, rtol=RTOL, atol=1e-7, err_msg=where)
