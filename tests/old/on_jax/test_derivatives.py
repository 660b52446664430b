"""JAX's derivatives of every function equal finite differences: reverse, forward and second, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import derivatives
from derivatives import DIRECTION, EVERYWHERE, POINTS, PRESETS, SOME, Case


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def total(case: Case, x: list[Any]) -> Any:
    """Return the weighted sum of all entries of the results."""
    results = case.function(x)
    return sum(jnp.sum(w * leaf) for w, leaf in zip(derivatives.weights(results), results, strict=True))


def slope(case: Case, x: list[Any]) -> Any:
    """Return the derivative of `total` in one direction."""
    slopes = jax.grad(lambda x: total(case, x))(x)
    return sum(jnp.sum(a * b) for a, b in zip(slopes, DIRECTION, strict=True))


@cache
def compiled(case: Case) -> Any:
    """Return all derivatives of a function, compiled once for all points."""

    def everything(x: list[Any]) -> tuple[Any, ...]:
        reverse = jax.grad(lambda x: total(case, x))
        forward = jax.jvp(case.function, (x,), (DIRECTION,))[1]
        return reverse(x), forward, jax.jvp(reverse, (x,), (DIRECTION,))[1], jax.grad(lambda x: slope(case, x))(x)

    return jax.jit(everything)


def at(case: Case, point: str) -> list[Any]:
    """Return the gradients at a point."""
    return [jnp.asarray(leaf) for leaf in case.at(point)]


@EVERYWHERE
def test_compiled(case: Case, point: str) -> None:
    """In jit, reverse mode, forward mode, forward over reverse and reverse over reverse are right."""
    reverse, forward, *second = compiled(case)(at(case, point))
    derivatives.same(reverse, derivatives.gradient(case, point))
    derivatives.same(forward, derivatives.along(case, point))
    for found in second:
        derivatives.same_second(case, point, found)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("case", SOME)
def test_eager(case: Case, point: str) -> None:
    """Outside jit, where each operation is compiled by itself, reverse and forward mode are right."""
    x = at(case, point)
    derivatives.same(jax.grad(lambda x: total(case, x))(x), derivatives.gradient(case, point))
    derivatives.same(
        jax.jvp(case.function, (x,), ([jnp.asarray(d) for d in DIRECTION],))[1], derivatives.along(case, point)
    )


@pytest.mark.parametrize("name", PRESETS)
def test_presets_at_zero(name: str) -> None:
    """Where all gradients are 0, no preset for each leaf changes a derivative, and no second one is there."""
    zeros = [jnp.zeros((4, 3)), jnp.zeros(4)]
    params, ways = [leaf + 1 for leaf in zeros], [jnp.ones_like(zeros[0]), 2 * jnp.ones_like(zeros[1])]
    state = PRESETS[name].init(zeros)
    function = lambda x: PRESETS[name].update(x, state, params)[0]
    slope = jax.grad(lambda x: sum(jnp.sum(leaf**3 + leaf) for leaf in function(x)))
    results = jax.jit(lambda x: (jax.jvp(function, (x,), (ways,))[1], jax.jvp(slope, (x,), (ways,))[1]))(zeros)
    derivatives.same(results[0], [np.asarray(leaf) for leaf in ways])
    derivatives.same(results[1], [np.zeros(leaf.shape) for leaf in zeros])
