"""JAX's own searches for NaN and ∞ find none that uniclip has made from healthy gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import uniclip as uc
from healthy import PARAMS, RULES, STEPS, arrays_of, train

GRADS, WEIGHTS = arrays_of(jnp.asarray, STEPS), arrays_of(jnp.asarray, PARAMS)


@contextmanager
def stopping() -> Iterator[None]:
    """Stop at the first NaN or ∞."""
    with jax.debug_nans(True), jax.debug_infs(True):
        yield


@pytest.mark.parametrize("name", RULES)
def test_outside_of_jit(name: str) -> None:
    """Neither NaN nor ∞ is made, in a result, in a report or in a state."""
    with stopping():
        train(RULES[name], GRADS[1:4], WEIGHTS)


def test_inside_of_jit() -> None:
    """The same for all rules in one program, whose outputs are looked at."""

    @jax.jit
    def step(grads: Any, states: Any, params: Any, loss: Any) -> Any:
        results = {name: rule.update(grads, states[name], params, loss=loss) for name, rule in RULES.items()}
        return {name: (*result, result[2].scalars()) for name, result in results.items()}

    states = {name: rule.init(WEIGHTS) for name, rule in RULES.items()}
    with stopping():
        for grads in GRADS[1:4]:
            states = {name: result[1] for name, result in step(grads, states, WEIGHTS, 2.0).items()}


DEEP = ("rows", "L3", "agc", "larc", "groups", "autoclip", "zclip", "adagc", "skip_spikes", "policy zero", "curve tanh")
"""Rules that together run most of the code: to look at every operation takes long."""
FEW_OPTIMIZATIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""To compile so takes half as long as to run the operations one by one."""


@pytest.mark.parametrize("name", DEEP)
def test_checkify(name: str) -> None:
    """Inside of compiled code every operation is looked at."""

    def steps(grads: Any, params: Any) -> Any:
        return train(RULES[name], grads, params)

    checked = checkify.checkify(steps, errors=checkify.float_checks)
    error, _ = jax.jit(checked, compiler_options=FEW_OPTIMIZATIONS)(GRADS[2:4], WEIGHTS)
    error.throw()


def test_vmap_and_sums() -> None:
    """The same of transformed code, and of gradients of single examples that are added up."""
    rules = [uc.by_norm(1.0), uc.by_global_norm(1.0), uc.agc(0.1), uc.by_global_norm(1.0, ord=3)]
    with stopping():
        for rule in rules:
            jax.vmap(lambda g, p, rule=rule: uc.clip(g, rule, p)[0])(GRADS[0], WEIGHTS)
            jax.grad(lambda g, rule=rule: sum(map(jnp.sum, jax.tree.leaves(uc.clip(g, rule, WEIGHTS)[0]))))(GRADS[2])
        for rule in (uc.by_example_norm(1.0), uc.auto_s(), uc.by_example_layer_norm(1.0)):
            uc.clip_and_sum(GRADS[0], rule)
            uc.clip_and_sum(GRADS[2], rule)


@pytest.mark.parametrize("by", [1e30, 1e-30])
def test_squares_out_of_range(by: float) -> None:
    """Finite gradients whose squares are not pass, too."""
    grads, rule = {"w": jnp.full((400, 400), by), "b": jnp.full(3, by)}, uc.by_norm(1e-3 * by)
    clip = lambda g: uc.clip(g, rule)[0]
    with stopping():
        for clipped in (clip(grads), jax.jit(clip)(grads)):
            assert clipped["w"][0, 0] == pytest.approx(1e-3 * by / 400, rel=1e-5)
            assert clipped["b"].tolist() == pytest.approx([1e-3 * by / 3**0.5] * 3, rel=1e-5)
