"""Derivatives through clips, compared with finite differences.

Reverse, forward and second derivatives of all cases run in one program. Each case has a row of a
matrix as its point, so that one pass finds the derivatives of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import uniclip as uc
from kit import rules
from kit.frameworks import MLX, Framework, JAXx64, TensorFlow, Torch, TorchCompile


def cases(*ways: Framework) -> Any:
    """Return the parametrization of a test by frameworks, each for the runs that include it."""
    params = [
        pytest.param(way, marks=pytest.mark.needs(way.name.partition(".")[0]), id=way.name)
        for way in ways
    ]
    return pytest.mark.parametrize("way", params)


RNG = np.random.default_rng(0)
SIGNS, SIZE = RNG.choice([-1.0, 1.0], 20), RNG.uniform(0.5, 1.5, 20)
WEIGHTS, DIRECTION = RNG.standard_normal((2, 20))
NUMPY = Framework()


def filled(w: float, b: float) -> np.ndarray:
    """Return elements with one modulus for each of the two leaves."""
    return SIGNS * np.repeat([w, b], [16, 4])


def one_entry(others: float) -> np.ndarray:
    """Return leaves whose largest modulus is 1."""
    x = filled(others, others)
    x[[6, 19]] = -1.0, 1.0
    return x


@dataclass(frozen=True)
class Case:
    """A function of two leaves, and elements exactly at its limit."""

    function: Callable[[list[Any]], Any]
    limit: np.ndarray | None = None
    """Up to this point the function is the identity; ``None`` if it never is."""
    smooth: bool = True
    """True if there is a second derivative next to a leaf of zeros."""
    above: float = 3.0


def by(rule: Any) -> Callable[[list[Any]], Any]:
    """Return a function that takes one step of a rule from its initial state."""
    return lambda g: rule.update(g, rule.init(g), [leaf * 0 + 1 for leaf in g])[0]


CASES = {
    "value": Case(lambda g: uc.clip_by_value(g, -1.0, 1.0), filled(1, 1), above=1.0),
    "norm": Case(lambda g: uc.clip_by_norm(g, 1.0), filled(1 / 4, 1 / 2)),
    "axis": Case(lambda g: uc.clip_by_norm(g, 1.0, axis=-1), filled(1 / 2, 1 / 2)),
    "L1": Case(lambda g: uc.clip_by_norm(g, 1.0, ord=1), filled(1 / 16, 1 / 4), smooth=False),
    "L1.5": Case(lambda g: uc.clip_by_norm(g, 1.0, ord=1.5), one_entry(0.0), smooth=False),
    "L3": Case(lambda g: uc.clip_by_norm(g, 1.0, ord=3), one_entry(0.0), smooth=False),
    "Linf": Case(lambda g: uc.clip_by_norm(g, 1.0, ord=math.inf), one_entry(0.25), smooth=False),
    "average norm": Case(lambda g: uc.clip_by_average_norm(g, 0.25), filled(1, 1 / 2)),
    "global norm": Case(lambda g: uc.clip_by_global_norm(g, 0.625)[0], filled(1 / 8, 3 / 16)),
    "block rms": Case(by(uc.by_block_rms(1.0)), filled(1, 1)),
    "each example": Case(by(uc.Rule(1.25, scope=uc.scopes.each_example)), filled(1 / 2, 3 / 4)),
    "unit": Case(by(uc.Rule(1.0, scope=uc.scopes.unit(-1))), filled(1 / 2, 1 / 2)),
    "agc": Case(by(uc.Rule(uc.limits.Relative(0.1), scope=uc.scopes.unit(0))), one_entry(0.0) / 40),
    "by size": Case(by(uc.by_example_layer_norm(1.0, by_size=True)), one_entry(0.0) / 40),
    **{
        f"curve {curve.__name__}": Case(by(uc.by_global_norm(1.0, curve=curve)))
        for curve in (
            uc.curves.soft,
            uc.curves.smooth,
            uc.curves.tanh,
            uc.curves.normalize,
            rules.root,
        )
    },
    **{
        f"global norm L{p}": Case(lambda g, p=p: [uc.global_norm(g, ord=p)], smooth=p == 2)
        for p in (1, 1.5, 2, 3, math.inf)
    },
}
AT_ZERO = {
    "larc": uc.larc(0.1),
    "adagc": uc.adagc(warmup=0),
    "warm-up": uc.adagc(warmup=2),
    "adagn": uc.adagn(),
    "percentile": uc.percentile_clipping(50, window=3),
    "units": uc.Rule(uc.limits.Split(1.0), scope=uc.scopes.unit(0)),
    "spam": uc.spam(warmup=0),
    "reject": uc.by_global_norm(1.0, curve=uc.curves.reject),
    "log_zscore": uc.log_zscore(),
}
"""Rules whose limit follows the norm: they leave zero gradients unchanged."""
FUNCTIONS = [case.function for case in CASES.values()] + [by(rule) for rule in AT_ZERO.values()]
NAMES = [*CASES, *AT_ZERO]
IDENTITIES = [case.limit is not None for case in CASES.values()] + [
    name != "adagn" for name in AT_ZERO
]
SMOOTH = [case.smooth for case in CASES.values()] + [False] * len(AT_ZERO)
POINTS = ("above", "below", "at the limit", "at zero", "beside zeros")


def at(point: str) -> np.ndarray:
    """Return the points of all functions, as rows.

    Rules whose limit follows the norm get zeros.
    """
    x = [
        SIGNS * SIZE * {"above": case.above, "below": 0.02}.get(point, 3.0)
        for case in CASES.values()
    ]
    if point == "at the limit":
        x = [
            row if case.limit is None else case.limit
            for row, case in zip(x, CASES.values(), strict=True)
        ]
    x = np.stack([*x, *np.zeros((len(AT_ZERO), 20))])
    return x * {"at zero": 0, "beside zeros": np.repeat([1, 0], [16, 4])}.get(point, 1)


def totals(
    fw: Framework, functions: list[Any] = FUNCTIONS, dtype: str = "float64"
) -> Callable[[Any], list[Any]]:
    """Return a function from rows to the weighted sum of each function of its row."""
    shaped, add = (lambda a, s: a.reshape(s)), (lambda a: a.sum())
    if fw.family == "TensorFlow":
        import tensorflow as tf

        shaped, add = tf.reshape, tf.reduce_sum
    weights = [fw.array(w, dtype) for w in (WEIGHTS[:16].reshape(4, 4), WEIGHTS[16:])]

    def total(function: Callable[[list[Any]], Any], row: Any) -> Any:
        # Multiply by 1 so that the leaves are arrays of their own.
        results = function([shaped(row[:16] * 1, (4, 4)), row[16:] * 1])
        return (
            add(results[0])
            if len(results) == 1
            else add(weights[0] * results[0]) + add(weights[1] * results[1])
        )

    return lambda x: [total(function, x[number]) for number, function in enumerate(functions)]


@cache
def wanted(point: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the derivatives of all totals, and those along the direction, as differences."""
    x, value, h = (
        at(point),
        lambda x: np.asarray(totals(NUMPY)(x)),
        0.01 if point == "below" else 1.0,
    )
    first, second = np.zeros((2, 20, len(NAMES)))
    for i, e in enumerate(np.eye(20) if point in {"above", "below", "beside zeros"} else ()):
        first[i] = (value(x + 1e-6 * h * e) - value(x - 1e-6 * h * e)) / (2e-6 * h)
        corners = [
            s * t * value(x + 3e-4 * h * (s * e + t * DIRECTION)) for s in (1, -1) for t in (1, -1)
        ]
        second[i] = sum(corners) / (4 * (3e-4 * h) ** 2)
    first, second = first.T, second.T
    if point in {"below", "at the limit", "at zero"}:
        first[IDENTITIES], second[IDENTITIES] = WEIGHTS, 0
    return first, second


def right(fw: Framework, point: str, *found: Any, rtol: float = 1e-6) -> None:
    """Require derivatives to agree with finite differences where these exist, else to be finite."""
    first, along, *seconds = map(fw.numpy, found)
    slopes, curvatures = wanted(point)
    there = {"at the limit": IDENTITIES, "at zero": IDENTITIES, "beside zeros": SMOOTH}.get(
        point, [name in CASES for name in NAMES]
    )
    for name, row, side, slope, known in zip(NAMES, first, along, slopes, there, strict=True):
        where = f"{name}, {point}"
        assert np.isfinite(row).all(), where
        assert np.isfinite(side), where
        if known:
            np.testing.assert_allclose(row, slope, rtol=rtol, atol=rtol, err_msg=where)
            np.testing.assert_allclose(
                side, slope @ DIRECTION, rtol=rtol, atol=10 * rtol, err_msg=where
            )
    for second in seconds:
        for name, row, curvature, known in zip(NAMES, second, curvatures, there, strict=True):
            assert np.isfinite(row).all(), f"{name}, {point}"
            if known:
                np.testing.assert_allclose(
                    row, curvature, rtol=1e-4, atol=1e-4, err_msg=f"{name}, {point}"
                )


@pytest.mark.needs("torch")
def test_torch() -> None:
    """PyTorch's first and second derivatives are right, by autograd and by functorch."""
    import torch

    fw, d = Torch(), torch.from_numpy(DIRECTION)
    every = lambda x: torch.stack(totals(fw)(x))
    for point in POINTS:
        x = torch.tensor(at(point), requires_grad=True)
        (first,) = torch.autograd.grad(every(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * d).sum(), x)
        plain, way = x.detach(), d.expand(x.shape)
        along = torch.func.jvp(every, (plain,), (way,))[1]
        mixed = torch.func.jvp(torch.func.grad(lambda x: every(x).sum()), (plain,), (way,))[1]
        # PyTorch's lazy zeros do not convert to NumPy arrays.
        right(fw, point, first, along, second, mixed + 0)


@pytest.mark.needs("jax")
@pytest.mark.usefixtures("_quickly")
def test_jax() -> None:
    """JAX's first and second derivatives are right, in reverse and forward mode of one program."""
    import jax
    import jax.numpy as jnp

    fw = JAXx64()

    def every(x: Any) -> Any:
        return jnp.stack(totals(fw)(x))

    @jax.jit
    def derived(x: Any) -> Any:
        slope, way = jax.grad(lambda x: every(x).sum()), jnp.broadcast_to(DIRECTION, x.shape)
        first, mixed = jax.jvp(slope, (x,), (way,))
        return first, jax.jvp(every, (x,), (way,))[1], mixed

    with fw.context():
        for point in POINTS:
            right(fw, point, *derived(at(point)))


@pytest.mark.needs("tensorflow")
def test_tensorflow() -> None:
    """TensorFlow's tapes, nested and partly in a graph, and its forward accumulators are right."""
    import tensorflow as tf

    fw = TensorFlow()

    def twice(x: Any, functions: list[Any] = FUNCTIONS) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                total = sum(totals(fw, functions)(x))
            first = tape.gradient(total, x)
            along = tf.reduce_sum(first * DIRECTION)
        return first, outer.gradient(along, x)

    # A graph takes five times as long to trace as the functions outside of it.
    traced, slopes = tf.function(lambda x: twice(x, FUNCTIONS[::3]), autograph=False), {}
    for point in POINTS:
        x = tf.constant(at(point))
        first, second = twice(x)
        slopes[point] = first
        right(fw, point, first, tf.linalg.matvec(first, DIRECTION), second)
        for found, eager in zip(traced(x[::3]), (first, second), strict=True):
            np.testing.assert_allclose(found, eager[::3], rtol=1e-9, atol=1e-12, err_msg=point)
    x = tf.constant(at("above"))
    with tf.autodiff.ForwardAccumulator(
        x, tf.broadcast_to(tf.constant(DIRECTION), x.shape)
    ) as accumulator:
        along = tf.stack(totals(fw)(x))
    right(fw, "above", slopes["above"], accumulator.jvp(along))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("bounds", ["numbers", "tensors"])
def test_the_derivative_at_a_bound(bounds: str) -> None:
    """The derivative at a bound is 1, and NaN stays NaN.

    PyTorch's ``clamp`` is avoided, since its derivative there depends on the version.
    """
    import torch

    def names(node: Any) -> set[str]:
        return {node.name()}.union(
            *[names(one) for one, _ in node.next_functions if one is not None]
        )

    low, high = (
        (-1.0, 2.0)
        if bounds == "numbers"
        else (torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0]), torch.tensor(2.0))
    )
    x = torch.tensor([-3.0, -1.0, 0.5, 2.0, 4.0], requires_grad=True)
    for clip in (
        uc.clip_by_value,
        torch.compile(uc.clip_by_value, backend="aot_eager", fullgraph=True),
    ):
        clipped = clip(x, low, high)
        assert not [name for name in names(clipped.grad_fn) if "Clamp" in name]
        np.testing.assert_array_equal(clipped.detach(), [-1.0, -1.0, 0.5, 2.0, 2.0])
        np.testing.assert_array_equal(torch.autograd.grad(clipped.sum(), x)[0], [0, 1, 1, 1, 0])
    assert torch.func.jacfwd(lambda x: uc.clip_by_value(x, -1.0, 2.0))(torch.tensor(2.0)) == 1
    bad = torch.tensor([math.nan, math.inf, -math.inf], requires_grad=True)
    np.testing.assert_array_equal(uc.clip_by_value(bad, -1.0, 2.0).detach(), [math.nan, 2.0, -1.0])


@pytest.mark.needs("mlx")
def test_mlx() -> None:
    """MLX's derivatives are right, in float32; at a bound of values MLX takes the other side."""
    import mlx.core as mx

    fw = MLX()
    slopes = mx.grad(lambda x: sum(totals(fw, dtype="float32")(x)))
    for point in set(POINTS) - {"at the limit"}:
        first = slopes(fw.array(at(point)))
        right(fw, point, first, first @ fw.array(DIRECTION), rtol=1e-4)


# Steps of stateful rules

LEARNING = {
    "zclip": uc.zclip(warmup=2),
    "threshold": uc.zclip(warmup=2, target="threshold"),
    "skip_spikes": uc.skip_spikes(window=4, warmup=2),
    "spam": uc.spam(warmup=1),
    "adagc": uc.adagc(warmup=2),
    "adagn": uc.adagn(),
    "log_zscore": uc.log_zscore(z=1.5),
    "autoclip": uc.autoclip(50, window=4),
}
STEPS = {
    "different": [[3.0, 4.0], [1.0, 2.0], [2.0, 2.0], [5.0, 1.0], [60.0, 80.0]],
    "equal": [[3.0, 4.0], [4.0, 3.0], [3.0, 4.0], [4.0, 3.0], [60.0, 80.0]],
    "zeros": [[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [3.0, 0.0], [0.0, 0.0]],
}


@cache
def differences(name: str, kind: str) -> np.ndarray:
    """Return the derivative of each clipped gradient by its own gradient, for a fixed state."""
    rule, steps, found = LEARNING[name], np.asarray(STEPS[kind]), []
    state = rule.init(steps[0])
    for grads in steps:
        value = lambda e, grads=grads, state=state: np.dot([1, 2], rule.update(grads + e, state)[0])
        found.append([(value(1e-6 * e) - value(-1e-6 * e)) / 2e-6 for e in np.eye(2)])
        state = rule.update(grads, state)[1]
    return np.asarray(found)


def left(steps: Any, state: Any, rule: Any) -> Any:
    """Return the sum of the clipped gradients of some steps."""
    total = 0
    for number in range(5):
        clipped, state, _ = rule.update(steps[number], state)
        total = total + clipped[0] + 2 * clipped[1]
    return total


def left_by_scan(steps: Any, state: Any, rule: Any) -> Any:
    """Return the sum of the clipped gradients, by a loop that JAX compiles once."""
    import jax

    def step(state: Any, grads: Any) -> Any:
        clipped, state, _ = rule.update(grads, state)
        return state, clipped[0] + 2 * clipped[1]

    return jax.lax.scan(step, state, steps)[1].sum()


@cases(Torch(), TensorFlow(), JAXx64())
@pytest.mark.usefixtures("_quickly")
def test_steps(way: Framework) -> None:
    """No derivative goes through a state, and those through steps are right and finite."""
    total = left_by_scan if way.family == "JAX" else left
    slopes = {name: way.derivative(partial(total, rule=rule)) for name, rule in LEARNING.items()}
    with way.context():
        for kind, values in STEPS.items():
            steps = way.array(values, "float64")
            for name, slope in slopes.items():
                found = way.numpy(slope(steps, LEARNING[name].init(steps[0])))
                assert np.isfinite(found).all(), f"{name}, {kind}: {found}"
                if kind == "different":
                    np.testing.assert_allclose(
                        found, differences(name, kind), rtol=1e-5, atol=1e-6, err_msg=name
                    )


@pytest.mark.needs("jax", "torch")
@pytest.mark.parametrize("size", [1e-20, 1e-12, 1e12, 1e25])
@pytest.mark.parametrize("name", ["hard", "normalize", "soft", "smooth", "tanh"])
@pytest.mark.usefixtures("_quickly")
def test_derivatives_of_any_size(name: str, size: float) -> None:
    """Float32 derivatives of norms whose squares leave the range are those of float64, in JAX.

    The order of compilation and differentiation does not matter.
    """
    import jax
    import jax.numpy as jnp
    import torch

    rule = uc.by_global_norm(0.5 * size, curve=getattr(uc.curves, name))
    clip = lambda x: uc.clip([x], rule)[0][0]
    point = np.asarray([3.0, -4.0]) * size
    wanted = torch.autograd.functional.jacobian(clip, torch.from_numpy(point)).numpy()
    x = jnp.asarray(point, "float32")
    first, last = jax.jit(jax.jacrev(clip)), jax.jacrev(jax.jit(clip))
    for way in (jax.jacrev(clip), jax.jacfwd(clip), first, last):
        np.testing.assert_allclose(way(x), wanted, rtol=1e-5, atol=1e-6)


# Transformations


@cases(Torch(), JAXx64())
@pytest.mark.usefixtures("_quickly")
def test_transformations(way: Framework) -> None:
    """Hessians, batches of derivatives and recomputed clips agree with formulas.

    So do derivatives with respect to the limit.
    """
    if way.family == "JAX":
        import jax

        grad, hessian, vmap, again, jit = jax.grad, jax.hessian, jax.vmap, jax.checkpoint, jax.jit
    else:
        import torch
        from torch.utils.checkpoint import checkpoint

        grad, hessian, vmap, jit = (
            torch.func.grad,
            torch.func.hessian,
            torch.func.vmap,
            lambda function: function,
        )
        again = lambda function: lambda x: checkpoint(function, x, use_reentrant=False)
    w, x = np.asarray([1.0, -2.0, 3.0]), np.asarray([1.0, 2.0, -2.5])
    n, s, mixed = np.linalg.norm(x), w @ x, np.outer(w, x)
    first = 2 * (w / n - s * x / n**3)
    second = 2 * ((-mixed - mixed.T - s * np.eye(3)) / n**3 + 3 * s * np.outer(x, x) / n**5)
    with way.context():
        weights, point = way.array(w, "float64"), way.array(x, "float64")
        along = lambda x: (weights * uc.clip_by_norm(x, 2.0)).sum()
        batch = jit(vmap(grad(along)))(way.array([x, 0.1 * x, 0 * x], "float64"))
        np.testing.assert_allclose(batch, [first, w, w], rtol=1e-12)
        curved = jit(vmap(hessian(along)))(way.array([x, 0.1 * x, 0 * x], "float64"))
        np.testing.assert_allclose(curved, [second, 0 * second, 0 * second], rtol=1e-11, atol=1e-14)
        np.testing.assert_allclose(way.gradient(again(along), point), first, rtol=1e-12)
        grads = [way.array([3.0, 4.0], "float64"), way.array(12.0, "float64")]
        share = lambda limit: sum(leaf.sum() for leaf in uc.clip_by_global_norm(grads, limit)[0])
        np.testing.assert_allclose(jit(grad(share))(way.array(2.0, "float64")), 19 / 13, rtol=1e-12)
        assert jit(grad(share))(way.array(20.0, "float64")) == 0


@pytest.mark.needs("torch")
def test_what_autograd_records() -> None:
    """Some gradients carry a graph, and others do not.

    A curve has a parameter; a compiled clip is differentiated.
    """
    import torch

    x = torch.tensor([3.0, 4.0], requires_grad=True)
    clipped, _ = uc.clip([2 * x, torch.tensor([6.0, 8.0])], uc.by_norm(1.0))
    np.testing.assert_allclose([leaf.detach() for leaf in clipped], [[0.6, 0.8]] * 2, rtol=1e-6)
    np.testing.assert_allclose(torch.autograd.grad(clipped[0][0], x)[0], [0.128, -0.096], rtol=1e-6)
    scale = torch.tensor(2.0, requires_grad=True)
    rule = uc.Rule(1.0, curve=lambda xp, norm, limit: scale * limit / norm)
    uc.clip(torch.tensor([3.0, 4.0]), rule)[0].sum().backward()
    np.testing.assert_allclose(scale.grad, 1.4, rtol=1e-6)


@pytest.mark.compiled
@pytest.mark.needs("torch")
def test_torch_compiled() -> None:
    """Code compiled without a graph break has the eager derivatives, at the limit and at 0, too."""
    import torch

    row, eager = list(CASES).index("global norm"), Torch()
    clipped = totals(eager, [CASES["global norm"].function], "float32")
    total = lambda x: clipped(x)[0]
    slope, plain = TorchCompile().derivative(total), eager.derivative(total)
    for point in POINTS:
        x = torch.tensor(at(point)[[row]], dtype=torch.float32)
        np.testing.assert_allclose(slope(x), plain(x), rtol=1e-5, atol=1e-6, err_msg=point)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("rule", [uc.zclip(), uc.autoclip(), uc.adagc()], ids=str)
def test_a_state_that_records_derivatives(rule: uc.Rule) -> None:
    """A state with a graph is accepted, and the next state is detached."""
    import torch

    grads = [torch.ones(3)]
    state = rule.init(grads)
    recorded = type(state)(
        *[x.clone().requires_grad_() if x.is_floating_point() else x for x in state]
    )
    (_, after, report), (_, wanted, expected) = (
        rule.update(grads, before) for before in (recorded, state)
    )
    assert str(report) == str(expected)
    for one, other in zip(after, wanted, strict=True):
        torch.testing.assert_close(one, other)
        assert not one.requires_grad
