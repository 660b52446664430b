"""A rule inside optax's own wrappers, and what its state has to be for them and for compiled loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import uniclip as uc
from uniclip.integrations.optax import ClipState, scalars, to_optax

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(3), "absent": None}
LARGE = {"w": 3 * PARAMS["w"], "b": 4 * PARAMS["b"], "absent": None}
NORM = np.sqrt(6 * 9 + 3 * 16)
RULES = [
    uc.by_global_norm(1.0),
    uc.by_norm(1.0, nonfinite="skip"),
    uc.autoclip(50, window=4),
    uc.adagc(warmup=1),
    uc.skip_spikes(window=4),
    uc.chain(uc.by_value(-1.0, 1.0), uc.zclip()),
]


def kinds(tree: Any) -> Any:
    """Return structure, shapes, dtypes and whether dtypes are weak."""
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_state(rule: Any) -> None:
    """Its kinds stay those of init, it can be given away at each step, and one compilation is enough."""
    optimizer, traces = to_optax(rule, optax.trace(0.9)), []

    def update(grads: Any, state: Any) -> Any:
        traces.append(1)
        return optimizer.update(grads, state, PARAMS)

    compiled = jax.jit(update, donate_argnums=1)
    state = optimizer.init(PARAMS)
    wanted = kinds(state)
    assert kinds(jax.eval_shape(optimizer.init, PARAMS)) == wanted
    _, state = optimizer.update(LARGE, state, PARAMS)
    assert kinds(state) == wanted
    for _ in range(3):
        updates, state = compiled(LARGE, state)
        assert kinds(state) == wanted
    assert kinds(updates) == kinds(LARGE)
    assert len(traces) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
def test_dtypes(dtype: str) -> None:
    """Updates keep the dtype of the gradients; what is logged is float32."""
    grads = jax.tree.map(lambda g: g.astype(dtype), LARGE)
    optimizer = to_optax(uc.autoclip(nonfinite="skip"))
    state = optimizer.init(grads)
    for _ in range(2):
        updates, new = optimizer.update(grads, state)
        assert kinds(new) == kinds(state)
        assert kinds(updates) == kinds(grads)
        state = new
    assert {value.dtype for value in scalars(state).values()} == {np.dtype("float32")}
    np.testing.assert_allclose(state.norm, NORM, rtol=1e-6)


def test_parameters_of_numpy() -> None:
    """Flax reads checkpoints as NumPy arrays: the state is JAX's all the same."""
    plain = {"w": np.ones((3, 2), np.float32)}
    state = to_optax(uc.autoclip()).init(plain)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))


def test_names_of_optax() -> None:
    """Optax's own search finds what is in the state."""
    optimizer = optax.chain(to_optax(uc.by_global_norm(1.0)), optax.adam(0.1))
    _, state = optimizer.update(LARGE, optimizer.init(PARAMS), PARAMS)
    np.testing.assert_allclose(optax.tree_utils.tree_get(state, "norm"), NORM, rtol=1e-6)
    assert isinstance(optax.tree_utils.tree_get(state, "ClipState"), ClipState)


BARE = [
    uc.by_global_norm(1.0),
    uc.zclip(),
    uc.by_value(-1.0, 1.0),
    uc.chain(uc.zclip()),
    uc.masked(uc.zclip(), lambda *_: True),
]


@pytest.mark.parametrize("rule", BARE, ids=[type(rule).__name__ + str(rule.memory) for rule in BARE])
def test_a_rule_is_no_transformation(rule: Any) -> None:
    """Optax and Flax take whatever has ``init`` and ``update``: the rule says what to write instead."""
    makers = [
        optax.chain(rule, optax.adam(0.1)).init,
        optax.masked(rule, {"w": True}).init,
        optax.MultiSteps(rule, 2).init,
        lambda params: TrainState.create(apply_fn=None, params=params, tx=rule),
    ]
    for make in makers:
        with pytest.raises(TypeError, match=r"write to_optax\("):
            make({"w": PARAMS["w"]})
        with pytest.raises(TypeError, match=r"write to_optax\("):
            jax.jit(make)({"w": PARAMS["w"]})


def test_tree_map_params() -> None:
    """The state of the rule counts as no copy of the parameters: sharding specs come out right."""
    optimizer = to_optax(uc.chain(uc.by_norm(1.0), uc.autoclip()), optax.trace(0.9))
    specs = optax.tree_map_params(
        optimizer, lambda _: "as the parameter", optimizer.init(PARAMS), transform_non_params=lambda _: "everywhere"
    )
    assert set(jax.tree.leaves(specs.inner)) == {"as the parameter"}
    assert set(jax.tree.leaves(specs._replace(inner=None))) == {"everywhere"}


def test_a_schedule_of_limits() -> None:
    """A limit that optax injects changes without compiling again, and can be set by hand."""
    make = optax.inject_hyperparams(lambda max_norm: to_optax(uc.by_global_norm(max_norm)))
    scheduled, fixed = make(max_norm=lambda step: 2.0 + step), make(max_norm=1.0)
    update, state = jax.jit(scheduled.update), scheduled.init(PARAMS)
    for step in range(3):
        updates, state = update(LARGE, state, PARAMS)
        np.testing.assert_allclose(scalars(state)["clip/limit"], 2.0 + step)
        np.testing.assert_allclose(optax.tree_utils.tree_norm(updates), 2.0 + step, rtol=1e-6)
    assert update._cache_size() == 1
    state = fixed.init(PARAMS)
    state.hyperparams["max_norm"] = 0.5
    updates, _ = fixed.update(LARGE, state, PARAMS)
    np.testing.assert_allclose(optax.tree_utils.tree_norm(updates), 0.5, rtol=1e-6)


def test_groups() -> None:
    """Each part of ``optax.partition`` has a norm of its own, one without parameters none; both are logged."""
    optimizer = optax.partition(
        {
            "w": to_optax(uc.by_global_norm(1.0)),
            "b": to_optax(uc.by_norm(2.0, nonfinite="skip")),
            "unused": to_optax(uc.masked(uc.autoclip(), lambda path, _: path[0] == "w")),
        },
        {"w": "w", "b": "b", "absent": None},
    )
    update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
    for _ in range(2):
        updates, state = update(LARGE, state, PARAMS)
    np.testing.assert_allclose(jnp.linalg.norm(updates["w"]), 1.0, rtol=1e-6)
    np.testing.assert_allclose(jnp.linalg.norm(updates["b"]), 2.0, rtol=1e-6)
    seen = scalars(state)  # in the order of the labels
    np.testing.assert_allclose(seen["clip/norm/0"], np.sqrt(48), rtol=1e-6)
    np.testing.assert_allclose(seen["clip/norm/2"], np.sqrt(54), rtol=1e-6)
    assert "clip/skipped/0" in seen
    assert "clip/norm/1" not in seen


def test_masked() -> None:
    """Under ``optax.masked`` the others come back as they are; ``uc.masked`` does the same by paths."""
    optaxes = optax.masked(to_optax(uc.agc(0.1)), {"w": True, "b": False, "absent": None})
    ours = to_optax(uc.masked(uc.agc(0.1), lambda path, _: path[0] == "w"))
    wanted, state = optaxes.update(LARGE, optaxes.init(PARAMS), PARAMS)
    updates, _ = ours.update(LARGE, ours.init(PARAMS), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, updates, wanted)
    np.testing.assert_array_equal(updates["b"], LARGE["b"])
    np.testing.assert_allclose(jnp.linalg.norm(updates["w"]), 0.1 * np.sqrt(6), rtol=1e-6)
    assert "clip/norm" in scalars(state)


def test_accumulation() -> None:
    """Inside of MultiSteps the mean of the micro-batches is clipped, once per step that is taken."""
    optimizer = optax.MultiSteps(optax.chain(to_optax(uc.autoclip(50, window=4)), optax.sgd(1.0)), 2)
    update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
    clipper = uc.Clipper(uc.autoclip(50, window=4))
    for size in (1.0, 3.0, 0.5):
        first, second = (jax.tree.map(lambda g: size * scale * g, LARGE) for scale in (1.5, 0.5))
        updates, state = update(first, state, PARAMS)
        assert not any(np.count_nonzero(update) for update in jax.tree.leaves(updates))
        updates, state = update(second, state, PARAMS)
        wanted = clipper(jax.tree.map(lambda g: size * g, LARGE))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, -b, rtol=1e-5), updates, wanted)
        np.testing.assert_allclose(scalars(state)["clip/norm"], size * NORM, rtol=1e-6)


def test_apply_if_finite() -> None:
    """Optax's own way to leave out steps that are not finite keeps the state of the rule, too."""
    optimizer = optax.apply_if_finite(optax.chain(to_optax(uc.autoclip()), optax.adam(0.1)), 3)
    update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
    _, before = update(LARGE, state, PARAMS)
    _, after = update(jax.tree.map(lambda g: g * jnp.nan, LARGE), before, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, after.inner_state, before.inner_state)


def test_many_models_at_once() -> None:
    """Under vmap each of several models has norms and a state of its own."""
    optimizer = to_optax(uc.autoclip(50, window=4, nonfinite="skip"), optax.trace(0.9))
    sizes = jnp.asarray([1.0, 2.0, jnp.nan])
    many = jax.tree.map(lambda g: sizes.reshape(3, *[1] * g.ndim) * g, LARGE)
    update = jax.jit(jax.vmap(optimizer.update))
    states = jax.vmap(optimizer.init)(jax.tree.map(lambda p: jnp.stack([p] * 3), PARAMS))
    for _ in range(2):
        _, states = update(many, states)
    for number, size in enumerate(sizes):
        state = optimizer.init(PARAMS)
        for _ in range(2):
            _, state = optimizer.update(jax.tree.map(lambda g: size * g, LARGE), state)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[number], b, rtol=1e-6), states, state)


def test_scalars_of_several() -> None:
    """They are numbered in the order of the tree; one inside of another follows it."""
    one, two, three = (to_optax(uc.by_global_norm(float(c))) for c in (1, 2, 3))
    optimizer = optax.chain(to_optax(uc.by_global_norm(4.0), optax.chain(one, two)), three)
    _, state = optimizer.update(LARGE, optimizer.init(PARAMS), PARAMS)
    assert [float(scalars(state)[f"clip/limit/{number}"]) for number in range(4)] == [4, 1, 2, 3]


def test_a_rule_without_norms_logs_nothing() -> None:
    """By value there is no norm."""
    assert scalars(to_optax(uc.by_value(-1.0, 1.0)).init(PARAMS)) == {}


def test_scalars_of_an_optimizer_that_does_not_clip() -> None:
    """The error says what to do."""
    with pytest.raises(ValueError, match=r"opt_state holds no ClipState: put to_optax\(rule\) into the optimizer"):
        scalars(optax.adam(0.1).init(PARAMS))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (optax.adam(0.1), r"the arguments are swapped"),
        (1.0, r"rule must be a rule, .* got 1.0"),
        (uc.Clipper(uc.by_norm(1.0)), r"rule must be a rule, and a uc.Clipper has one"),
        (uc.autoclip().limit, r"rule must be a rule, and a limit is only one of its choices: uc.Rule\(limit\)"),
    ],
    ids=["transformation", "number", "clipper", "limit"],
)
def test_what_is_no_rule(wrong: Any, message: str) -> None:
    """The error names what it got, and the fix."""
    with pytest.raises(TypeError, match=message):
        to_optax(wrong)


def test_a_preset_that_was_not_called() -> None:
    """The error says what to do."""
    with pytest.raises(TypeError, match=r"uc\.by_norm makes one: call it"):
        to_optax(uc.by_norm)


@pytest.mark.parametrize("wrong", [0.1, optax.adam, uc.by_norm(1.0)], ids=["number", "function", "rule"])
def test_what_is_no_transformation(wrong: Any) -> None:
    """So does the error for the optimizer."""
    with pytest.raises(TypeError, match=r"inner must be an optax.GradientTransformation, such as optax.adam\(1e-3\)"):
        to_optax(uc.by_norm(1.0), wrong)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_params_are_missing(jit: Any) -> None:
    """The error names the argument of ``update``, and with it all is well."""
    optimizer = optax.chain(to_optax(uc.agc()), optax.sgd(0.1))
    state = optimizer.init(PARAMS)
    with pytest.raises(ValueError, match="compares gradients with their parameters: pass params="):
        jit(optimizer.update)(LARGE, state)
    jit(optimizer.update)(LARGE, state, params=PARAMS)


@pytest.mark.parametrize(
    "rule", [uc.adagc(), uc.percentile_clipping(50, 4), uc.spam(), uc.chain(uc.autoclip(), uc.adagc())], ids=repr
)
def test_as_many_other_leaves(rule: Any) -> None:
    """The state of as many other leaves, or of another kind of rule, is refused by name where it can be read."""
    optimizer, other = to_optax(rule), {"b": jnp.ones(2), "w": jnp.ones(2)}
    grads = {"a": jnp.ones(2), "w": jnp.ones(2)}
    _, state = jax.jit(optimizer.update)(grads, optimizer.init(grads))
    with pytest.raises(ValueError, match=r"holds no norms of grads\['b'\], but of as many others; begin with init"):
        optimizer.update(other, state)
    optimizer.update(other, state._replace(leaves=optimizer.init(other).leaves))
    with pytest.raises(ValueError, match="does not say whose norms it holds, and here are"):
        optimizer.update(grads, state._replace(leaves=None))
    with pytest.raises(ValueError, match="does not say whose norms it holds, and here are"):
        jax.jit(optimizer.update)(grads, state._replace(leaves=None))
    _, again = optimizer.update(grads, state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert isinstance(again.leaves, jax.Array)


def test_another_kind_of_rule() -> None:
    """States that look alike, but are of another kind of rule, are told apart; other numbers are not another kind."""
    grads = {"w": jnp.ones(2)}
    state = to_optax(uc.Rule(uc.limits.Percentile(50, 4))).init(grads)
    with pytest.raises(ValueError, match="and this one is that of another kind of rule"):
        to_optax(uc.Rule(uc.limits.Percentile(50, 4), norm=uc.norms.L1)).update(grads, state)
    to_optax(uc.Rule(uc.limits.Percentile(90, 4))).update(grads, state)
    assert to_optax(uc.by_norm(1.0)).init(grads).leaves is None


def test_checksums_under_vmap() -> None:
    """Several optimizers side by side have a state each."""
    optimizer, grads = to_optax(uc.adagc()), {"w": jnp.ones((3, 2))}
    state = jax.vmap(optimizer.init)(grads)
    _, state = jax.vmap(optimizer.update)(grads, state)
    assert state.leaves.shape == (3, 2)
    assert state.memory.count.tolist() == [1, 1, 1]


def test_another_set_of_leaves() -> None:
    """A rule that remembers each leaf refuses gradients that are absent where there were parameters."""
    optimizer = to_optax(uc.adagc())
    with pytest.raises(ValueError, match=r"is of 2 leaves or groups, and here are 1 .* or some are None that were not"):
        optimizer.update({**LARGE, "b": None}, optimizer.init(PARAMS), PARAMS)


@pytest.mark.parametrize("grads", [{}, {"w": None}], ids=["no leaves", "no gradient"])
@pytest.mark.parametrize(
    "rule", [uc.autoclip(), uc.chain(uc.by_value(-1.0, 1.0), uc.autoclip(), uc.skip_spikes())], ids=repr
)
def test_a_tree_without_gradients(rule: Any, grads: Any) -> None:
    """A part without gradients, as masks and groups of optax may leave, changes nothing and is no error."""
    optimizer = to_optax(rule, optax.adam(0.1))
    state = optimizer.init(grads)
    for update in optimizer.update, jax.jit(optimizer.update):
        updates, after = update(grads, state, grads)
        assert updates == grads
        jax.tree.map(np.testing.assert_array_equal, after.memory, state.memory)


def test_another_state() -> None:
    """The state of another rule, or of another transformation, is refused."""
    optimizer = to_optax(uc.by_global_norm(1.0, nonfinite="skip"))
    before = to_optax(uc.by_global_norm(1.0)).init(PARAMS)
    with pytest.raises(ValueError, match=r"nonfinite='skip'\)\), and this one was made by another rule: begin with"):
        jax.jit(optimizer.update)(LARGE, before)
    with pytest.raises(TypeError, match=r"state must be what init returned.*, got tuple: begin with init\(params\)"):
        optimizer.update(LARGE, optax.sgd(0.1).init(PARAMS))


def test_errors_name_the_leaf() -> None:
    """Outside of jit, ``"raise"`` names the gradients; inside, where there are no values, it is refused."""
    optimizer = to_optax(uc.by_global_norm(1.0, nonfinite="raise"))
    state, nan = optimizer.init(PARAMS), {**LARGE, "b": LARGE["b"] * jnp.nan}
    with pytest.raises(FloatingPointError, match=r"grads\['b'\]"):
        optimizer.update(nan, state, PARAMS)
    with pytest.raises(TypeError, match="use 'propagate', 'skip' or 'zero' there"):
        jax.jit(optimizer.update)(nan, state, PARAMS)
