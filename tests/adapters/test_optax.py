"""Rules as gradient transformations of optax, in its wrappers, and in loops of Flax and Equinox."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState
from jax.experimental import sparse

import uniclip as uc
from adapters.contract import Adapter, variants
from kit import rules
from kit.training import MOMENTUM, RATE, Arrays, Batch, parts, weights
from uniclip.integrations.optax import from_dict, scalars, to_dict, to_optax
from uniclip.saved import renamed

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.fixture(scope="module")
def quickly_compiled() -> Iterator[None]:
    """Disable most optimizations of XLA: other tests compile the rules with all of them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


def loss_of(model: Any, batch: Batch) -> Any:
    """Return the loss of a batch."""
    errors = model["table"][batch.ids] @ model["w"] + model["b"] - batch.targets
    return (errors**2).mean()


def can_skip(rule: Any) -> bool:
    """Return whether the reports of a rule say whether it skipped."""
    grads = [np.ones(3, "float32")]
    _, _, report = rule.update(grads, rule.init(grads), grads, loss=1.0)
    return report.skipped is not None


class Optax(Adapter):
    """A rule around an optimizer, in a step under jit with donated buffers."""

    recorded = "optax"
    takes = frozenset({"loss", "scalars", "save", "state", "micro"})

    def start(
        self, uc: ModuleType, rule: Any, *, record: Any = None, micro: int = 1, **options: Any
    ) -> None:
        """Start from the first weights."""
        self.rule, self.micro = rule, micro
        self.model = {name: jnp.asarray(array) for name, array in weights().items()}
        inner = optax.sgd(RATE, MOMENTUM)
        self.transformation = inner if rule is None else self.clipped(rule, inner)
        if micro > 1:
            self.transformation = optax.MultiSteps(
                self.transformation, micro
            ).gradient_transformation()
        self.begin()

    def clipped(self, rule: Any, inner: Any) -> Any:
        """Return the combination of rule and optimizer."""
        return to_optax(rule, inner)

    def begin(self) -> None:
        """Create the state and the step."""
        self.state = jax.jit(self.transformation.init)(self.model)
        update = optax.with_extra_args_support(self.transformation).update

        def step(model: Any, state: Any, batch: Batch) -> Any:
            loss, grads = jax.value_and_grad(loss_of)(model, batch)
            updates, state = update(grads, state, model, value=loss)
            return optax.apply_updates(model, updates), state

        self.once = jax.jit(step, donate_argnums=(0, 1))

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        for part in parts(batch, self.micro):
            self.model, self.state = self.once(self.model, self.state, part)
        # One compilation: the state keeps its dtypes and shapes, as a scan requires.
        assert self.once._cache_size() == 1

    def weights(self) -> Arrays:
        """Return the weights."""
        return {name: np.array(array) for name, array in self.model.items()}

    def inner(self) -> list[np.ndarray]:
        """Return the trace of the momentum."""
        return [np.array(leaf) for leaf in jax.tree.leaves(optax.tree.get(self.state, "trace"))]

    def scalars(self) -> dict[str, float]:
        """Return the scalars in the state, but for that of skips if the rule never skips."""
        found = {name: float(value) for name, value in scalars(self.state).items()}
        if not can_skip(self.rule):
            assert found.pop("clip/skipped", 0.0) == 0
        return found

    def save(self, folder: Path) -> None:
        """Save everything with Flax."""
        (folder / "all.msgpack").write_bytes(serialization.to_bytes((self.model, self.state)))

    def load(self, folder: Path) -> None:
        """Load everything with Flax."""
        read = serialization.from_bytes(
            (self.model, self.state), (folder / "all.msgpack").read_bytes()
        )
        self.model, self.state = jax.tree.map(jnp.asarray, read)

    def rule_state(self) -> dict[str, Any]:
        """Return the state of the rule."""
        return to_dict(self.rule, self.state, self.model)

    def load_rule_state(self, saved: dict[str, Any]) -> None:
        """Replace the state of the rule."""
        self.state = from_dict(self.rule, saved, self.state, self.model)


class Chained(Optax):
    """A rule before an optimizer, which still applies momentum in a skipped step.

    The state of the rule is saved as JSON.
    """

    takes = frozenset({"loss", "scalars", "save", "refuse"})
    left_out = frozenset({"skip", "skip_spikes"})

    def clipped(self, rule: Any, inner: Any) -> Any:
        """Return the chain of rule and optimizer."""
        return optax.chain(to_optax(rule), inner)

    def save(self, folder: Path) -> None:
        """Save the state of the rule in a file of its own."""
        (folder / "rule.json").write_text(json.dumps(self.rule_state()))
        (folder / "rest.msgpack").write_bytes(serialization.to_bytes((self.model, self.state[1])))

    def load(self, folder: Path) -> None:
        """Load both files."""
        self.load_rule_state(json.loads((folder / "rule.json").read_text()))
        read = serialization.from_bytes(
            (self.model, self.state[1]), (folder / "rest.msgpack").read_bytes()
        )
        self.model, rest = jax.tree.map(jnp.asarray, read)
        self.state = (self.state[0], rest)


class Leaf(nnx.Module):
    """A module of NNX, whose gradients are variables."""

    def __init__(self, model: Any) -> None:
        self.b, self.table, self.w = (nnx.Param(model[name]) for name in ("b", "table", "w"))

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)[...]


class InNNX(Optax):
    """Flax's NNX, whose optimizer changes a module in place."""

    takes = frozenset({"loss", "scalars"})

    def begin(self) -> None:
        """Create the module, its optimizer, and the step."""
        self.module = Leaf(self.model)
        self.wrapped = nnx.Optimizer(self.module, self.transformation, wrt=nnx.Param)
        self.state = self.wrapped.opt_state

        @nnx.jit
        def once(module: Any, wrapped: Any, batch: Batch) -> None:
            loss, grads = nnx.value_and_grad(loss_of)(module, batch)
            wrapped.update(module, grads, value=loss)

        self.once = once

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.once(self.module, self.wrapped, batch)
        self.model = {name: self.module[name] for name in weights()}
        self.state = self.wrapped.opt_state


class Model(eqx.Module):
    """A module of Equinox; only its arrays have gradients."""

    arrays: dict[str, Any]
    name: str = "model"

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name]


class InEquinox(Optax):
    """Equinox, whose gradients are modules with ``None`` in place of non-arrays."""

    takes = frozenset({"loss", "scalars"})

    def begin(self) -> None:
        """Create the module, its state, and the step."""
        self.module = Model(self.model)
        self.state = self.transformation.init(eqx.filter(self.module, eqx.is_array))

        @eqx.filter_jit
        def once(module: Any, state: Any, batch: Batch) -> Any:
            loss, grads = eqx.filter_value_and_grad(loss_of)(module, batch)
            updates, state = self.transformation.update(
                grads, state, eqx.filter(module, eqx.is_array), value=loss
            )
            return eqx.apply_updates(module, updates), state

        self.once = once

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.module, self.state = self.once(self.module, self.state, batch)
        self.model = self.module.arrays


VARIANTS: dict[type[Optax], tuple[str, ...] | None] = {
    Optax: ("by_global_norm", "agc", "autoclip", "adagc", "skip", "zero", "skip_spikes", "chain"),
    Chained: ("adagc",),
    InNNX: ("skip_spikes",),
    InEquinox: ("skip",),
}


@pytest.mark.parametrize(("make", "check"), variants(VARIANTS))
def test_contract(make: Any, check: Any, tmp_path: Path) -> None:
    """A transformation keeps the contract of all integrations in each loop."""
    check(make, uc, tmp_path)


@pytest.mark.parametrize("layer", ["Linear", "Conv2d", "LayerNorm"])
def test_units_of_equinox(layer: str) -> None:
    """With `output_axis=0`, each output unit of Equinox' own layers has one norm, a vector too."""
    make = getattr(eqx.nn, layer)
    sizes = {"Linear": (8, 4), "Conv2d": (8, 4, 3), "LayerNorm": (8,)}[layer]
    options = {} if layer == "LayerNorm" else {"key": jax.random.key(0)}
    params = eqx.filter(make(*sizes, **options), eqx.is_array)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), "float32"), params
    )
    clipped, report = uc.clip(grads, uc.agc(0.1, output_axis=0), params=params)
    units = 1 if layer == "LayerNorm" else 4
    assert report.norms.weight.size == units
    assert report.norms.bias.size == (4 if layer == "Conv2d" else 1)

    # A layer's output channel by the formula of the paper.
    rows = np.asarray(grads.weight).reshape(units, -1)
    of_params = np.asarray(params.weight).reshape(units, -1)
    limits = 0.1 * np.maximum(np.linalg.norm(of_params, axis=1), 1e-3)
    factors = np.minimum(1, limits / np.linalg.norm(rows, axis=1))
    wanted = (rows * factors[:, None]).reshape(params.weight.shape)
    np.testing.assert_allclose(clipped.weight, wanted, rtol=1e-5)


PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(3), "absent": None}


LARGE = {"w": 3 * PARAMS["w"], "b": 4 * PARAMS["b"], "absent": None}
NORM = np.sqrt(6 * 9 + 3 * 16)


@pytest.mark.parametrize("make", [uc.by_global_norm, uc.by_norm, uc.agc], ids=lambda f: f.__name__)
def test_one_structure_for_each_policy(make: Any) -> None:
    """A checkpoint of Flax is loaded after a policy was added to the rule."""
    before, after = (to_optax(make(1.0, nonfinite=policy)) for policy in ("propagate", "skip"))
    _, state = before.update(LARGE, before.init(PARAMS), PARAMS)
    read = serialization.from_bytes(after.init(PARAMS), serialization.to_bytes(state))
    _, state = jax.jit(after.update)(LARGE, read, PARAMS)
    assert scalars(state)["clip/skipped"] == 0
    bad = {**LARGE, "b": LARGE["b"] * jnp.nan}
    assert scalars(jax.jit(after.update)(bad, state, PARAMS)[1])["clip/skipped"] == 1


def test_norms_of_leaves() -> None:
    """With `keep_norms`, the state has the norms of the leaves before clipping, by their paths."""
    params = {"layers": [{"w": jnp.ones((3, 2))}, {"w": None}], "b": jnp.ones(3, "bfloat16")}
    grads = jax.tree.map(lambda leaf: 2 * leaf, params)
    for rule in (uc.by_global_norm(0.1), uc.by_value(-1.0, 1.0), uc.zclip(), uc.agc()):
        optimizer = optax.chain(to_optax(rule, keep_norms=True), optax.adam(1e-3))
        state = optimizer.init(params)
        assert optax.tree.get(state, "norms") == {"b": 0, "layers/0/w": 0}
        _, state = jax.jit(optimizer.update)(grads, state, params)
        found = optax.tree.get(state, "norms")
        assert {name: float(norm) for name, norm in found.items()} == pytest.approx(
            {"b": 2 * 3**0.5, "layers/0/w": 2 * 6**0.5}, rel=1e-6
        )
        optax.tree_map_params(optimizer, lambda leaf: leaf, state)
    assert to_optax(uc.zclip()).init(params).norms == {}
    transform = to_optax(uc.by_global_norm(1.0), keep_norms=True)
    _, state = transform.update(grads, transform.init(params))
    _, state = transform.update({**grads, "b": None}, state)
    assert state.norms["b"] == 0
    matrix = sparse.BCOO.fromdense(3 * jnp.eye(2))
    _, state = transform.update({"m": matrix}, transform.init({"m": matrix}))
    np.testing.assert_allclose(state.norms["m"], 18**0.5, rtol=1e-6)
    with pytest.raises(ValueError, match="two have the path 'a/b'"):
        transform.init({"a/b": jnp.ones(2), "a": {"b": jnp.ones(3)}})
    with pytest.raises(TypeError, match="keep_norms must be True or False"):
        to_optax(uc.zclip(), keep_norms=1)


def test_norms_that_are_donated() -> None:
    """The state of ``init`` can be donated to a loop: no array is in it twice."""
    optimizer = to_optax(uc.zclip(), optax.adam(1e-3), keep_norms=True)
    params = {"w": jnp.ones(2), "b": jnp.ones(3)}

    def step(carry: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, *carry)
        return (state, optax.apply_updates(carry[1], updates)), state.norms["b"]

    many = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
    run = jax.jit(lambda state: jax.lax.scan(step, (state, params), many), donate_argnums=0)
    _, norms = run(optimizer.init(params))
    np.testing.assert_allclose(norms, np.sqrt([3.0, 12.0]), rtol=1e-6)


def times(size: Any, tree: Any) -> Any:
    """Return a tree times a number."""
    return jax.tree.map(lambda leaf: size * leaf, tree)


def equal(one: Any, other: Any, rtol: float = 1e-6) -> None:
    """Require two trees to be equal up to rounding."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol), one, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_dtypes(dtype: str) -> None:
    """Updates keep the dtype of the gradients, and scalars are float32."""
    grads = jax.tree.map(lambda g: g.astype(dtype), LARGE)
    optimizer = to_optax(uc.autoclip(nonfinite="skip"))
    state = optimizer.init(grads)
    updates, after = optimizer.update(grads, state)
    assert jax.tree.map(jax.typeof, (updates, after)) == jax.tree.map(jax.typeof, (grads, state))
    assert {value.dtype for value in scalars(after).values()} == {np.dtype("float32")}
    np.testing.assert_allclose(scalars(after)["clip/norm"], NORM, rtol=1e-6)


def first_key(path: Any, leaf: Any) -> Any:
    """Return the group of a leaf: the first key of its path."""
    return path[0]


def only_w(path: Any, leaf: Any) -> bool:
    """Return whether a leaf belongs to ``w``."""
    return path[0] == "w"


LEARNED = uc.limits.PerGroup(
    {"w": uc.limits.Ema(1.05, 0.98), "absent": 1.0, "b": uc.limits.ZScore(2.0, 0.5)}
)
MAPPED: dict[str, Any] = {
    "by_global_norm": uc.by_global_norm(1.0),
    "by_norm": uc.by_norm(1.0, nonfinite="skip"),
    "zclip": uc.zclip(),
    "adagc": uc.adagc(),
    "autoclip": uc.autoclip(),
    "chain": uc.chain(uc.by_value(-1.0, 1.0), uc.adagc(), uc.skip_spikes()),
    "masked": uc.masked(uc.by_norm(1.0, nonfinite="skip"), only_w),
    "masked zclip": uc.masked(uc.zclip(), only_w),
    "chain of masked": uc.chain(
        uc.masked(uc.norm_growth(), only_w), uc.agc(), uc.by_norm(1.0, nonfinite="skip")
    ),
    "masked, none chosen": uc.masked(uc.zclip(), lambda path, leaf: leaf.size > 99),
    "groups": uc.Rule(uc.limits.Ema(1.0, 0.5), scope=uc.scopes.groups(first_key)),
    "groups with limits": uc.Rule(LEARNED, scope=uc.scopes.groups(first_key)),
}
ALONG_AXES: dict[str, Any] = {
    "spam": uc.spam(),
    "units": uc.Rule(uc.limits.Ema(1.0, 0.5), scope=uc.scopes.unit()),
    "rows": uc.chain(uc.zclip(), uc.Rule(uc.limits.ZScore(2.0, 0.5), scope=uc.scopes.axes(-1))),
    "masked spam": uc.masked(uc.spam(), only_w),
}


@pytest.mark.parametrize("name", [*MAPPED, *ALONG_AXES])
def test_copies_of_the_parameters(name: str) -> None:
    """Only the inner optimizer's state has copies of the parameters, so sharding specs work."""
    rule = MAPPED.get(name) or ALONG_AXES[name]
    optimizer = optax.MultiSteps(to_optax(rule, optax.trace(0.9)), 2)
    _, state = optimizer.update(LARGE, optimizer.init(PARAMS), PARAMS)
    told = optax.tree_map_params(
        optimizer, lambda _: "copy", state, transform_non_params=lambda _: "other"
    )
    clip = optax.tree.get(told, "ClipState")
    assert set(jax.tree.leaves((clip.memory, clip.clip))) == {"other"}
    assert jax.tree.leaves(clip.inner) == ["copy", "copy"]
    # The number of arrays in a state along axes depends on the parameters, so it has one spec.
    whole = jax.tree.broadcast(told, state) if name in ALONG_AXES else told
    assert jax.tree.structure(whole) == jax.tree.structure(state)

    doubled = optax.tree_map_params(optimizer, lambda param: 2 * param, state)
    assert jax.tree.structure(doubled) == jax.tree.structure(state)
    equal(
        doubled.inner_opt_state,
        state.inner_opt_state._replace(inner=times(2.0, state.inner_opt_state.inner)),
    )


def test_limits_that_optax_injects() -> None:
    """Injected limits change by a schedule without recompilation."""
    make = optax.inject_hyperparams(lambda max_norm: to_optax(uc.by_global_norm(max_norm)))
    scheduled = make(max_norm=lambda step: 2.0 + step)
    update, state = jax.jit(scheduled.update), scheduled.init(PARAMS)
    for step in range(3):
        updates, state = update(LARGE, state, PARAMS)
        np.testing.assert_allclose(
            [scalars(state)["clip/limit"], optax.tree.norm(updates)], 2.0 + step, rtol=1e-6
        )
    assert update._cache_size() == 1


@pytest.mark.parametrize("jitted", [False, True])
def test_what_is_not_clipped(jitted: bool) -> None:
    """Unclipped updates have the bits of the optimizer without uniclip.

    A whole step may be rounded differently by XLA next to any clip.
    """
    inner = optax.sgd(RATE)
    clipped = to_optax(uc.by_global_norm(1e9), inner)
    params, updates = jax.tree.map(jnp.asarray, weights()), []
    for one in (clipped, inner):
        update = jax.jit(one.update) if jitted else one.update
        updates.append(update(jax.tree.map(jnp.sin, params), one.init(params), params)[0])
    jax.tree.map(np.testing.assert_array_equal, *updates)


def test_parts_of_a_tree() -> None:
    """Under ``optax.partition`` each part has a norm; that of an empty part is 0."""
    parts = {
        "w": to_optax(uc.by_global_norm(1.0)),
        "b": to_optax(uc.by_norm(2.0, nonfinite="skip")),
        "unused": to_optax(uc.autoclip()),
    }
    optimizer = optax.partition(parts, {"w": "w", "b": "b", "absent": None})
    updates, state = jax.jit(optimizer.update)(LARGE, optimizer.init(PARAMS))
    equal(
        updates,
        {"w": jnp.full((3, 2), 1 / np.sqrt(6)), "b": jnp.full(3, 2 / np.sqrt(3)), "absent": None},
    )
    norms = sorted(
        float(value) for name, value in scalars(state).items() if name.startswith("clip/norm/")
    )
    np.testing.assert_allclose(norms, [0, np.sqrt(48), np.sqrt(54)], rtol=1e-6)


PARTS: dict[str, Any] = {
    "masked": lambda clip, chosen: optax.masked(clip, chosen),
    "partition": lambda clip, chosen: optax.partition(
        {True: clip, False: optax.identity()}, chosen
    ),
    "multi_transform": lambda clip, chosen: optax.multi_transform(
        {True: clip, False: optax.identity()}, chosen
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_module(name: str) -> None:
    """NNX's optimizer passes variables, of which only the chosen ones are measured and clipped."""

    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.w, self.b = nnx.Param(jnp.zeros(2)), nnx.Param(jnp.zeros(1))
            self.pair = nnx.Param({"one": jnp.zeros(1), "two": jnp.zeros((2, 2))})

    def chosen(tree: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: "'b'" not in jax.tree_util.keystr(path), tree)

    def loss(layer: Layer) -> Any:
        large = jnp.asarray([[6.0, 0.0], [0.0, 8.0]])
        of_pair = 24 * layer.pair["one"].sum() + (large * layer.pair["two"]).sum()
        return (jnp.asarray([3.0, 4.0]) * layer.w[...]).sum() + 12 * layer.b[...].sum() + of_pair

    rule = uc.chain(uc.zclip(), uc.by_global_norm(1.0))
    layer = Layer()
    clip = PARTS[name](to_optax(rule), chosen)
    optimizer = nnx.Optimizer(layer, optax.chain(clip, optax.sgd(1.0)), wrt=nnx.Param)
    nnx.jit(lambda layer, optimizer: optimizer.update(layer, nnx.grad(loss)(layer)))(
        layer, optimizer
    )

    grads = {"w": [3.0, 4.0], "one": [24.0], "two": [[6.0, 0.0], [0.0, 8.0]]}
    arrays = {key: jnp.asarray(value) for key, value in grads.items()}
    wanted, _, report = rule.update(arrays, rule.init(arrays))
    found = {"w": layer.w[...], "one": layer.pair["one"], "two": layer.pair["two"]}
    equal(found, times(-1.0, wanted))
    equal(layer.b[...], jnp.asarray([-12.0]))
    np.testing.assert_allclose(
        scalars(optimizer.opt_state)["clip/norm"], report.scalars()["clip/norm"], rtol=1e-6
    )


IN_CONDITIONAL: dict[str, tuple[Any, Any]] = {
    "apply_if_finite, norm_growth": (
        lambda inner: optax.apply_if_finite(inner, 3),
        uc.norm_growth(),
    ),
    "apply_if_finite, entries": (lambda inner: optax.apply_if_finite(inner, 3), uc.spam(warmup=1)),
    "conditionally_transform, masked": (
        lambda inner: optax.transforms.conditionally_transform(inner, lambda step: step < 9),
        uc.masked(uc.norm_growth(), only_w),
    ),
}


@pytest.mark.parametrize("name", IN_CONDITIONAL)
def test_in_a_conditional(name: str) -> None:
    """Outside of jit, optax traces branches, in which known gradients are constants."""
    wrapper, rule = IN_CONDITIONAL[name]
    optimizer, alone = wrapper(to_optax(rule)), to_optax(rule)
    state, other = optimizer.init(PARAMS), alone.init(PARAMS)
    for size in (1.0, 50.0):
        updates, state = optimizer.update(times(size, LARGE), state, PARAMS)
        wanted, other = alone.update(times(size, LARGE), other, PARAMS)
        equal(updates, wanted)
    equal(state.inner_state, other)


def test_apply_if_finite() -> None:
    """Optax's ``apply_if_finite`` also keeps the state of the rule."""
    optimizer = optax.apply_if_finite(optax.chain(to_optax(uc.autoclip()), optax.adam(0.1)), 3)
    update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
    _, before = update(LARGE, state, PARAMS)
    _, after = update(times(jnp.nan, LARGE), before, PARAMS)
    equal(after.inner_state, before.inner_state, rtol=0)


def test_many_models_at_once() -> None:
    """Under vmap each model has its own norms and state."""
    optimizer = to_optax(uc.autoclip(50, window=4, nonfinite="skip"), optax.trace(0.9))
    sizes, first = jnp.asarray([1.0, 2.0, jnp.nan]), optimizer.init(PARAMS)
    update = lambda size: optimizer.update(
        times(size, LARGE), optimizer.update(times(0.5 * size, LARGE), first)[1]
    )
    together, alone = jax.jit(jax.vmap(update))(sizes), jax.jit(update)
    for number, size in enumerate(sizes):
        equal(jax.tree.map(lambda array: array[number], together), alone(size))


def test_scalars_of_several_and_of_none() -> None:
    """The scalars of several rules are numbered.

    A rule without norms has none, and an optimizer without a rule is an error.
    """
    two = optax.chain(
        to_optax(uc.by_global_norm(1.0)), to_optax(uc.by_global_norm(2.0)), optax.sgd(0.1)
    )
    seen = scalars(TrainState.create(apply_fn=None, params=PARAMS, tx=two))
    assert {"clip/norm/0", "clip/norm/1", "clip/limit/0", "clip/limit/1"} <= set(seen)
    inside = optax.chain(to_optax(uc.by_global_norm(3.0), two), to_optax(uc.by_global_norm(4.0)))
    state = inside.update(LARGE, inside.init(PARAMS))[1]
    assert [float(scalars(state)[f"clip/limit/{number}"]) for number in range(4)] == [
        3.0,
        4.0,
        1.0,
        2.0,
    ]
    assert scalars(to_optax(uc.by_value(-1.0, 1.0)).init(PARAMS)) == {}
    with pytest.raises(ValueError, match=r"to_optax\(rule\)"):
        scalars(optax.adam(0.1).init(PARAMS))


def test_a_skipped_step_keeps_the_inner_state() -> None:
    """A skipped step has zero updates, and keeps the inner state.

    Later updates equal those without it: counts, schedules, random keys and the loss.
    """
    schedule, noise = (
        optax.scale_by_schedule(lambda n: -n),
        optax.add_noise(0.1, 0.5, key=jax.random.key(0)),
    )
    optimizer = to_optax(
        uc.by_global_norm(1.0, nonfinite="skip"),
        optax.chain(noise, optax.polyak_sgd(1.0), schedule),
    )
    update = jax.jit(lambda grads, state: optimizer.update(grads, state, PARAMS, value=1.0))
    _, before = update(LARGE, optimizer.init(PARAMS))
    updates, after = update(times(jnp.nan, LARGE), before)
    equal(updates, times(0.0, LARGE), rtol=0)
    (updates, last), (wanted, _) = update(LARGE, after), update(LARGE, before)
    equal(updates, wanted, rtol=0)
    assert np.count_nonzero(updates["w"])
    assert (scalars(after)["clip/skipped"], scalars(last)["clip/skipped"]) == (1, 0)


@pytest.mark.parametrize("grads", [{}, {"w": None}], ids=["no leaves", "no gradient"])
def test_a_tree_without_gradients(grads: Any) -> None:
    """An empty part, as masks and partitions may leave, changes nothing and is no error."""
    optimizer = to_optax(
        uc.chain(uc.by_value(-1.0, 1.0), uc.autoclip(), uc.skip_spikes()), optax.adam(0.1)
    )
    state = optimizer.init(grads)
    updates, after = jax.jit(optimizer.update)(grads, state, grads)
    assert updates == grads
    equal(after[0], state[0], rtol=0)


REMEMBERING: dict[str, Any] = {
    "leaves": uc.chain(uc.adagc(warmup=1), uc.spam()),
    "groups": uc.Rule(
        uc.limits.Ema(1.0, 0.5), scope=uc.scopes.groups(lambda path, leaf: path[0] == "w")
    ),
}


@pytest.mark.parametrize("name", REMEMBERING)
@pytest.mark.parametrize("compiling", [False, True])
def test_gradients_that_are_absent_in_some_steps(name: str, compiling: bool) -> None:
    """Absent gradients leave their rows of the state unchanged, as in ``rule.update``."""
    rule, optimizer = REMEMBERING[name], to_optax(REMEMBERING[name])
    update = jax.jit(optimizer.update) if compiling else optimizer.update
    state, memory = optimizer.init(PARAMS), rule.init(PARAMS)
    for absent, size in ((None, 1.0), ("w", 4.0), ("b", 0.5), (None, 9.0)):
        grads = {key: None if key == absent else leaf for key, leaf in times(size, LARGE).items()}
        wanted, memory, _ = rule.update(grads, memory, PARAMS)
        found, state = update(grads, state, PARAMS)
        equal(found, wanted)
        equal(state.memory, memory)


def injected(rule: Any) -> Any:
    """Return an optimizer with a hyperparameter named like a field of `ClipState`."""
    make = optax.inject_hyperparams(lambda clip: optax.chain(to_optax(rule), optax.sgd(clip)))
    return make(clip=optax.constant_schedule(0.1))


def in_parts(rule: Any) -> Any:
    """Return an optimizer with a rule for one of two parts."""
    return optax.partition(
        {"clipped": to_optax(rule), "unused": optax.adam(0.1)}, {"b": "clipped", "w": "clipped"}
    )


WRAPPED: dict[str, Any] = {
    "chain": lambda rule: optax.chain(optax.identity(), to_optax(rule), optax.adam(0.1)),
    "masked": lambda rule: optax.masked(optax.chain(to_optax(rule), optax.trace(0.9)), True),
    "partition": in_parts,
    "MultiSteps": lambda rule: optax.MultiSteps(to_optax(rule, optax.adam(0.1)), 1),
    "apply_if_finite": lambda rule: optax.apply_if_finite(to_optax(rule), 3),
    "inject_hyperparams": injected,
}


@pytest.mark.parametrize("name", WRAPPED)
def test_states_inside_of_wrappers(name: str) -> None:
    """Scalars and states are found in any wrapper of optax; replacing a state changes no other."""
    rule, params = uc.norm_growth(), {"b": PARAMS["b"], "w": PARAMS["w"]}
    optimizer = WRAPPED[name](rule)
    first = optimizer.init(params)
    _, state = optimizer.update(times(3.0, params), first, params)
    np.testing.assert_allclose(scalars(state)["clip/norm"], np.sqrt(54), rtol=1e-6)
    saved = to_dict(rule, state, params)
    again = from_dict(rule, saved, first, params)
    assert to_dict(rule, again, params) == saved
    assert jax.tree.map(jax.typeof, again) == jax.tree.map(jax.typeof, first)
    equal(from_dict(rule, {}, again, params), first, rtol=0)


def test_counts_of_other_transformations() -> None:
    """Setting the only ``count`` restarts the schedule, and not the warmup of the rule."""
    params = {"w": jnp.zeros(2)}
    schedule = optax.scale_by_schedule(lambda step: -0.1)
    for rule in (
        uc.zclip(warmup=4),
        uc.autoclip(window=8),
        uc.norm_growth(),
        uc.by_global_norm(uc.limits.Schedule(abs)),
    ):
        optimizer = optax.chain(to_optax(rule), schedule)
        state = optimizer.init(params)
        for step in range(6):
            _, state = optimizer.update(
                {"w": jnp.asarray([0.6, 0.8]) * (1 + 0.01 * step)}, state, params
            )
        assert optax.tree_utils.tree_get(state, "count") == 6
        again = optax.tree_utils.tree_set(state, count=0)
        assert optax.tree_utils.tree_get(again, "count") == 0
        equal(again[0], state[0], rtol=0)
        spike = {"w": jnp.asarray([30.0, 40.0])}
        equal(
            optimizer.update(spike, again, params)[0],
            optimizer.update(spike, state, params)[0],
            rtol=0,
        )


def test_names_of_fields() -> None:
    """No state of a rule, or field of one, has a name that optax or Flax look up."""
    theirs = {field.name for field in dataclasses.fields(TrainState)}
    for kind in tuple.__subclasses__():
        if kind.__module__.startswith(("optax.", "flax.")):
            theirs |= {kind.__name__, *getattr(kind, "_fields", ())}
    assert {"count", "mu", "inner_state", "ScaleByAdamState", "opt_state"} <= theirs

    def names(node: Any) -> set[str]:
        if not isinstance(node, tuple):
            return set()
        fields = getattr(node, "_fields", ())
        return {*fields, *([type(node).__name__] if fields else [])}.union(*map(names, node))

    some = [*rules.learning(uc).values(), *rules.learning_more(uc).values()]
    params = rules.params("float32")
    ours = set().union(*[names(to_optax(rule).init(params)) for rule in some])
    assert {"norm_count", "averages", "Moments", "Counted", "ClipState"} <= ours
    assert not ours & theirs


def test_memory_of_other_leaves() -> None:
    """A state from `to_dict` is ordered by names, and refused for other leaves or another rule."""
    rule, optimizer = uc.adagc(), to_optax(uc.adagc())
    state = optimizer.update(LARGE, optimizer.init(PARAMS), PARAMS)[1]
    saved = to_dict(rule, state, PARAMS)
    names = {"absent": "absent", "b": "z", "w": "y"}
    other = {names[name]: leaf for name, leaf in PARAMS.items()}
    with pytest.raises(ValueError, match=r"grads\['y'\]"):
        from_dict(rule, saved, optimizer.init(other), other)
    moved = from_dict(
        rule, renamed(saved, {"['b']": "['z']", "['w']": "['y']"}), optimizer.init(other), other
    )
    np.testing.assert_array_equal(
        moved.memory.averages, state.memory.averages[jnp.asarray([0, 2, 1])]
    )
    with pytest.raises(ValueError, match="a different rule"):
        from_dict(uc.autoclip(), saved, to_optax(uc.autoclip()).init(PARAMS), PARAMS)
    with pytest.raises(TypeError, match="this rule"):
        to_dict(uc.zclip(), state, PARAMS)
    with pytest.raises(ValueError, match="it holds 2"):
        to_dict(rule, (state, state), PARAMS)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "swapped": (lambda: to_optax(optax.adam(0.1), uc.by_norm(1.0)), TypeError, "to_optax"),
    "not called": (lambda: to_optax(uc.by_norm), TypeError, "call it"),
    "a rate": (lambda: to_optax(uc.by_norm(1.0), 0.1), TypeError, "optax.adam"),
    "an optimizer not called": (
        lambda: to_optax(uc.by_norm(1.0), optax.adam),
        TypeError,
        "optax.adam",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    """A value that is no rule, or no transformation, is refused."""
    call, error, token = WRONG[name]
    with pytest.raises(error, match=token):
        call()


def test_wrong_steps() -> None:
    """Missing parameters, another state, and unreadable values in a trace are refused by name."""
    relative = optax.chain(to_optax(uc.agc()), optax.sgd(0.1))
    with pytest.raises(ValueError, match="params="):
        jax.jit(relative.update)(LARGE, relative.init(PARAMS))
    raising, skipping = (
        to_optax(uc.by_global_norm(1.0, nonfinite=policy)) for policy in ("raise", "skip")
    )
    for other in (to_optax(uc.zclip()).init(PARAMS), relative.init(PARAMS)):
        with pytest.raises(TypeError, match=r"state must be .*init"):
            skipping.update(LARGE, other)
    with pytest.raises(TypeError, match=r"state must be .*init"):
        jax.jit(to_optax(uc.autoclip()).update)(LARGE, raising.init(PARAMS))
    bad = {**LARGE, "b": LARGE["b"] * jnp.nan}
    with pytest.raises(FloatingPointError, match=r"grads\['b'\]"):
        raising.update(bad, raising.init(PARAMS))
    with pytest.raises(TypeError, match="'skip'"):
        jax.jit(raising.update)(bad, raising.init(PARAMS))
