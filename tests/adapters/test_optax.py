"""Rules as gradient transformations of optax, in its wrappers, and in the loops of Flax and Equinox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState

import uniclip as uc
from adapters.contract import kinds, variants
from kit.training import MOMENTUM, RATE, Arrays, Batch, ByHand, batches, parts, weights
from uniclip.integrations.optax import from_dict, scalars, to_dict, to_optax

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.fixture(scope="module")
def quickly_compiled() -> Iterator[None]:
    """Have XLA leave out most optimizations: the rules themselves are tested with all of them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


def loss_of(model: Any, batch: Batch) -> Any:
    """Return the loss of a batch."""
    errors = model["table"][batch.ids] @ model["w"] + model["b"] - batch.targets
    return (errors**2).mean()


class Optax:
    """A rule around an optimizer, in a step under jit that gives its buffers away."""

    takes = frozenset({"loss", "scalars", "save", "memory", "micro", "bits"})
    optimizer = "momentum"
    left_out = frozenset[str]()
    own_clipping: ClassVar[MappingProxyType[str, Any]] = MappingProxyType({})

    def start(self, uc: ModuleType, rule: Any, *, record: Any = None, micro: int = 1, **options: Any) -> None:
        """Begin with the first weights."""
        self.rule, self.micro = rule, micro
        self.model = {name: jnp.asarray(array) for name, array in weights().items()}
        inner = optax.sgd(RATE, MOMENTUM)
        self.transformation = inner if rule is None else self.clipped(rule, inner)
        if micro > 1:
            self.transformation = optax.MultiSteps(self.transformation, micro).gradient_transformation()
        self.begin()

    def clipped(self, rule: Any, inner: Any) -> Any:
        """Put the rule and the optimizer together."""
        return to_optax(rule, inner)

    def begin(self) -> None:
        """Make the state, and the step."""
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

    def weights(self) -> Arrays:
        """Return the weights."""
        return {name: np.array(array) for name, array in self.model.items()}

    def inner(self) -> list[np.ndarray]:
        """Return the trace of the momentum."""
        return [np.array(leaf) for leaf in jax.tree.leaves(optax.tree.get(self.state, "trace"))]

    def scalars(self) -> dict[str, float]:
        """Return the scalars in the state."""
        return {name: float(value) for name, value in scalars(self.state).items()}

    def save(self, folder: Path) -> None:
        """Write all by Flax."""
        (folder / "all.msgpack").write_bytes(serialization.to_bytes((self.model, self.state)))

    def load(self, folder: Path) -> None:
        """Read all by Flax."""
        read = serialization.from_bytes((self.model, self.state), (folder / "all.msgpack").read_bytes())
        self.model, self.state = jax.tree.map(jnp.asarray, read)

    def remembered(self) -> dict[str, Any]:
        """Return the memory in the state."""
        return to_dict(self.rule, self.state, self.model)

    def recall(self, saved: dict[str, Any]) -> None:
        """Put a memory into the state."""
        self.state = from_dict(self.rule, saved, self.state, self.model)


class Chained(Optax):
    """A rule before an optimizer, which moves by its momentum in a step that is skipped; its memory in JSON."""

    takes = frozenset({"loss", "scalars", "save", "refuse"})
    left_out = frozenset({"skip", "skip_spikes"})

    def clipped(self, rule: Any, inner: Any) -> Any:
        """Put the rule and the optimizer together."""
        return optax.chain(to_optax(rule), inner)

    def save(self, folder: Path) -> None:
        """Write the memory of the rule beside the rest."""
        (folder / "rule.json").write_text(json.dumps(self.remembered()))
        (folder / "rest.msgpack").write_bytes(serialization.to_bytes((self.model, self.state[1])))

    def load(self, folder: Path) -> None:
        """Read both."""
        self.recall(json.loads((folder / "rule.json").read_text()))
        read = serialization.from_bytes((self.model, self.state[1]), (folder / "rest.msgpack").read_bytes())
        self.model, rest = jax.tree.map(jnp.asarray, read)
        self.state = (self.state[0], rest)


class InTrainState(Optax):
    """Flax's train state, in files of Orbax."""

    takes = frozenset({"scalars", "save"})

    def begin(self) -> None:
        """Make the train state, and the step."""
        self.held = TrainState.create(apply_fn=None, params=self.model, tx=self.transformation)
        self.state = self.held.opt_state
        self.once = jax.jit(lambda held, batch: held.apply_gradients(grads=jax.grad(loss_of)(held.params, batch)))

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.held = self.once(self.held, batch)
        self.model, self.state = self.held.params, self.held.opt_state

    def scalars(self) -> dict[str, float]:
        """Return the scalars, of the train state as it is."""
        return {name: float(value) for name, value in scalars(self.held).items()}

    def save(self, folder: Path) -> None:
        """Write the train state."""
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "state", self.held)

    def load(self, folder: Path) -> None:
        """Read the train state."""
        with ocp.StandardCheckpointer() as checkpointer:
            self.held = checkpointer.restore(folder / "state", self.held)
        self.model, self.state = self.held.params, self.held.opt_state


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
        """Make the module, its optimizer, and the step."""
        self.module = Leaf(self.model)
        self.wrapped = nnx.Optimizer(self.module, self.transformation, wrt=nnx.Param)

        @nnx.jit
        def once(module: Any, wrapped: Any, batch: Batch) -> Any:
            loss, grads = nnx.value_and_grad(loss_of)(module, batch)
            wrapped.update(module, grads, value=loss)
            return scalars(wrapped.opt_state)

        self.once = once

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.seen = self.once(self.module, self.wrapped, batch)
        self.model = {name: self.module[name] for name in weights()}

    def inner(self) -> list[np.ndarray]:
        """Return all that the optimizer holds of the shapes of the matrices."""
        held = jax.tree.leaves(nnx.as_pure(nnx.state(self.wrapped)))
        return [np.array(leaf) for leaf in held if leaf.shape in {(5, 3), (3, 2)}]

    def scalars(self) -> dict[str, float]:
        """Return the scalars of the last step."""
        return {name: float(value) for name, value in self.seen.items()}


class Model(eqx.Module):
    """A module of Equinox, in which what is no parameter has no gradient."""

    arrays: dict[str, Any]
    name: str = "model"

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name]


class InEquinox(Optax):
    """Equinox, whose gradients are modules with ``None`` in the place of what is no array."""

    takes = frozenset({"loss", "scalars"})

    def begin(self) -> None:
        """Make the module, its state, and the step."""
        self.module = Model(self.model)
        self.state = self.transformation.init(eqx.filter(self.module, eqx.is_array))

        @eqx.filter_jit
        def once(module: Any, state: Any, batch: Batch) -> Any:
            loss, grads = eqx.filter_value_and_grad(loss_of)(module, batch)
            updates, state = self.transformation.update(grads, state, eqx.filter(module, eqx.is_array), value=loss)
            return eqx.apply_updates(module, updates), state

        self.once = once

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.module, self.state = self.once(self.module, self.state, batch)
        self.model = self.module.arrays


VARIANTS: dict[type[Optax], tuple[str, ...] | None] = {
    Optax: None,
    Chained: ("adagc",),
    InTrainState: ("adagc",),
    InNNX: ("skip_spikes",),
    InEquinox: ("skip",),
}


@pytest.mark.parametrize(("make", "check"), variants(VARIANTS))
def test_contract(make: Any, check: Any, tmp_path: Path) -> None:
    """A transformation keeps the contract of all adapters, in whichever loop."""
    check(make, uc, tmp_path)


PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(3), "absent": None}
LARGE = {"w": 3 * PARAMS["w"], "b": 4 * PARAMS["b"], "absent": None}
NORM = np.sqrt(6 * 9 + 3 * 16)
SOME = {name: kinds(uc)[name].rule for name in ("skip", "adagc", "skip_spikes", "chain")}


def outline(tree: Any) -> Any:
    """Return structure, shapes, dtypes and whether dtypes are weak."""
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


def times(size: Any, tree: Any) -> Any:
    """Return a tree times a number."""
    return jax.tree.map(lambda leaf: size * leaf, tree)


def equal(one: Any, other: Any, rtol: float = 1e-6) -> None:
    """Require two trees to be equal but for rounding."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol), one, other)


def test_a_compiled_loop() -> None:
    """Steps in one scan, of several rules, are those by hand; states keep their dtypes, of whatever arrays they are."""
    optimizers = {name: to_optax(rule, optax.sgd(RATE, MOMENTUM)) for name, rule in SOME.items()}
    model = {name: jnp.asarray(array) for name, array in weights().items()}

    def step(carry: Any, batch: Batch) -> Any:
        after, seen = {}, {}
        for name, (now, before) in carry.items():
            loss, grads = jax.value_and_grad(loss_of)(now, batch)
            updates, state = optimizers[name].update(grads, before, now, value=loss)
            after[name], seen[name] = (optax.apply_updates(now, updates), state), scalars(state)
        return after, seen

    init = lambda model: {name: (model, one.init(model)) for name, one in optimizers.items()}
    begin = jax.jit(init)(model)
    assert outline(jax.eval_shape(init, weights())) == outline(begin)
    steps = Batch(*map(np.stack, zip(*batches()[:-2], strict=True)))
    after, seen = jax.lax.scan(step, begin, steps)
    for name, rule in SOME.items():
        hand = ByHand(uc, rule)
        for number, batch in enumerate(batches()[:-2]):
            hand.step(batch)
            np.testing.assert_allclose(seen[name]["clip/norm"][number], hand.scalars()["clip/norm"], rtol=5e-4)
        for leaf, array in hand.weights.items():
            np.testing.assert_allclose(after[name][0][leaf], array, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_dtypes(dtype: str) -> None:
    """Updates keep the dtype of the gradients; what is logged is float32."""
    grads = jax.tree.map(lambda g: g.astype(dtype), LARGE)
    optimizer = to_optax(uc.autoclip(nonfinite="skip"))
    state = optimizer.init(grads)
    updates, after = optimizer.update(grads, state)
    assert outline(after) == outline(state)
    assert outline(updates) == outline(grads)
    assert {value.dtype for value in scalars(after).values()} == {np.dtype("float32")}
    np.testing.assert_allclose(scalars(after)["clip/norm"], NORM, rtol=1e-6)


BARE = [uc.zclip(), uc.by_value(-1.0, 1.0), uc.chain(uc.zclip()), uc.masked(uc.zclip(), lambda *_: True)]


@pytest.mark.parametrize("rule", BARE, ids=lambda rule: type(rule).__name__)
def test_a_rule_is_no_transformation(rule: Any) -> None:
    """Optax and Flax take whatever has ``init`` and ``update``: the rule says what to write instead."""
    for make in (
        optax.chain(rule, optax.adam(0.1)).init,
        optax.MultiSteps(rule, 2).init,
        lambda params: TrainState.create(apply_fn=None, params=params, tx=rule),
        jax.jit(optax.masked(rule, {"w": True}).init),
    ):
        with pytest.raises(TypeError, match=r"to_optax\("):
            make({"w": PARAMS["w"]})


def test_copies_of_the_parameters() -> None:
    """Only the optimizer inside has any in its state, so sharding specs come out right."""
    optimizer = to_optax(uc.chain(uc.by_norm(1.0), uc.autoclip()), optax.trace(0.9))
    told = optax.tree_map_params(
        optimizer, lambda _: "copy", optimizer.init(PARAMS), transform_non_params=lambda _: "other"
    )
    assert jax.tree.leaves(told).count("copy") == 2
    assert "other" in jax.tree.leaves(told)


def test_limits_that_optax_injects() -> None:
    """They change by a schedule without compiling again, and can be set by hand."""
    make = optax.inject_hyperparams(lambda max_norm: to_optax(uc.by_global_norm(max_norm)))
    scheduled, fixed = make(max_norm=lambda step: 2.0 + step), make(max_norm=1.0)
    update, state = jax.jit(scheduled.update), scheduled.init(PARAMS)
    for step in range(3):
        updates, state = update(LARGE, state, PARAMS)
        np.testing.assert_allclose(scalars(state)["clip/limit"], 2.0 + step)
        np.testing.assert_allclose(optax.tree.norm(updates), 2.0 + step, rtol=1e-6)
    assert update._cache_size() == 1
    state = fixed.init(PARAMS)
    state.hyperparams["max_norm"] = 0.5
    updates, _ = jax.jit(fixed.update)(LARGE, state, PARAMS)
    np.testing.assert_allclose(optax.tree.norm(updates), 0.5, rtol=1e-6)


def test_parts_of_a_tree() -> None:
    """Under ``optax.partition`` each part has a norm, one without parameters none; ``masked`` leaves others out."""
    by_parts = optax.partition(
        {
            "w": to_optax(uc.by_global_norm(1.0)),
            "b": to_optax(uc.by_norm(2.0, nonfinite="skip")),
            "unused": to_optax(uc.masked(uc.autoclip(), lambda path, _: path[0] == "w")),
        },
        {"w": "w", "b": "b", "absent": None},
    )
    masked = optax.masked(to_optax(uc.agc(0.1)), {"w": True, "b": False, "absent": None})
    ours = to_optax(uc.masked(uc.agc(0.1), lambda path, _: path[0] == "w"))

    @jax.jit
    def update(states: Any) -> Any:
        return [one.update(LARGE, state, PARAMS) for one, state in zip((by_parts, masked, ours), states, strict=True)]

    (parted, state), (wanted, _), (found, _) = update([one.init(PARAMS) for one in (by_parts, masked, ours)])
    equal(parted, {"w": jnp.full((3, 2), 1 / np.sqrt(6)), "b": jnp.full(3, 2 / np.sqrt(3)), "absent": None})
    norms = sorted(float(value) for name, value in scalars(state).items() if name.startswith("clip/norm/"))
    np.testing.assert_allclose(norms, [np.sqrt(48), np.sqrt(54)], rtol=1e-6)
    equal(found, wanted, rtol=0)
    np.testing.assert_array_equal(found["b"], LARGE["b"])
    np.testing.assert_allclose(jnp.linalg.norm(found["w"]), 0.1 * np.sqrt(6), rtol=1e-6)


def test_apply_if_finite() -> None:
    """Optax's own way to leave out steps that are not finite keeps the state of the rule, too."""
    optimizer = optax.apply_if_finite(optax.chain(to_optax(uc.autoclip()), optax.adam(0.1)), 3)
    update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
    _, before = update(LARGE, state, PARAMS)
    _, after = update(times(jnp.nan, LARGE), before, PARAMS)
    equal(after.inner_state, before.inner_state, rtol=0)


def test_many_models_at_once() -> None:
    """Under vmap each of several models has norms and a state of its own."""
    optimizer = to_optax(uc.autoclip(50, window=4, nonfinite="skip"), optax.trace(0.9))
    sizes = jnp.asarray([1.0, 2.0, jnp.nan])
    many = jax.tree.map(lambda g: sizes.reshape(3, *[1] * g.ndim) * g, LARGE)
    update, one = jax.jit(jax.vmap(optimizer.update)), jax.jit(optimizer.update)
    first = jax.jit(optimizer.init)(PARAMS)
    states = jax.vmap(lambda _: first)(sizes)
    _, states = update(many, states)
    _, states = update(many, states)
    for number, size in enumerate(sizes):
        _, state = one(times(size, LARGE), first)
        _, state = one(times(size, LARGE), state)
        equal(jax.tree.map(lambda array: array[number], states), state)


def test_parts_on_devices() -> None:
    """Arrays that lie on two devices are whole to the rule: same steps, and they stay where they are."""
    mesh = jax.make_mesh((2,), ("part",), devices=jax.devices()[:2])
    place = jax.NamedSharding(mesh, jax.P(None, "part"))
    optimizer = to_optax(uc.by_norm(2.0), optax.trace(0.9))
    params, grads = {"w": jnp.ones((3, 2))}, {"w": jnp.arange(6.0).reshape(3, 2)}
    update = jax.jit(optimizer.update)
    wanted, state = update(grads, optimizer.init(params), params)
    params, grads = jax.device_put((params, grads), place)
    updates, after = update(grads, optimizer.init(params), params)
    equal(updates, wanted)
    equal(scalars(after), scalars(state))
    assert updates["w"].sharding.is_equivalent_to(place, 2)
    assert all(value.sharding.is_fully_replicated for value in scalars(after).values())


def test_scalars_of_several_and_of_none() -> None:
    """Those of several are numbered; a rule without norms has none, and an optimizer without a rule is an error."""
    two = optax.chain(to_optax(uc.by_global_norm(1.0)), to_optax(uc.by_global_norm(2.0)), optax.sgd(0.1))
    seen = scalars(two.init(PARAMS))
    assert {"clip/norm/0", "clip/norm/1", "clip/limit/0", "clip/limit/1"} <= set(seen)
    assert scalars(to_optax(uc.by_value(-1.0, 1.0)).init(PARAMS)) == {}
    with pytest.raises(ValueError, match=r"to_optax\(rule\)"):
        scalars(optax.adam(0.1).init(PARAMS))


def test_a_skipped_step_keeps_the_inner_state() -> None:
    """Counts, schedules and random keys stay bit for bit, and the updates are zeros; the loss reaches the inside."""
    inner = optax.chain(
        optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.polyak_sgd(1.0), optax.scale_by_schedule(lambda n: -n)
    )
    optimizer = to_optax(uc.by_global_norm(1.0, nonfinite="skip"), inner)
    update = jax.jit(lambda grads, state: optimizer.update(grads, state, PARAMS, value=1.0))
    plain = lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    _, before = update(LARGE, optimizer.init(PARAMS))
    updates, after = update(times(jnp.nan, LARGE), before)
    equal(jax.tree.map(plain, after.inner), jax.tree.map(plain, before.inner), rtol=0)
    equal(updates, times(0.0, LARGE), rtol=0)
    assert scalars(after)["clip/skipped"] == 1
    updates, after = update(LARGE, after)
    assert scalars(after)["clip/skipped"] == 0
    assert any(np.count_nonzero(leaf) for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize("grads", [{}, {"w": None}], ids=["no leaves", "no gradient"])
def test_a_tree_without_gradients(grads: Any) -> None:
    """A part that is empty, as masks and partitions may leave, changes nothing and is no error."""
    optimizer = to_optax(uc.chain(uc.by_value(-1.0, 1.0), uc.autoclip(), uc.skip_spikes()), optax.adam(0.1))
    state = optimizer.init(grads)
    updates, after = jax.jit(optimizer.update)(grads, state, grads)
    assert updates == grads
    equal(after[0], state[0], rtol=0)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "swapped": (lambda: to_optax(optax.adam(0.1), uc.by_norm(1.0)), TypeError, "to_optax"),
    "number": (lambda: to_optax(1.0), TypeError, "uc.by_global_norm"),
    "clipper": (lambda: to_optax(uc.Clipper(uc.by_norm(1.0))), TypeError, "uc.Clipper"),
    "limit": (lambda: to_optax(uc.autoclip().limit), TypeError, r"uc\.Rule\("),
    "not called": (lambda: to_optax(uc.by_norm), TypeError, "call it"),
    "a rate": (lambda: to_optax(uc.by_norm(1.0), 0.1), TypeError, "optax.adam"),
    "an optimizer not called": (lambda: to_optax(uc.by_norm(1.0), optax.adam), TypeError, "optax.adam"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    """What is no rule, or no transformation, is refused."""
    call, error, token = WRONG[name]
    with pytest.raises(error, match=token):
        call()


def test_wrong_steps() -> None:
    """Missing parameters, other states and values that nobody can read in a trace are refused, and named."""
    relative = optax.chain(to_optax(uc.agc()), optax.sgd(0.1))
    with pytest.raises(ValueError, match="params="):
        jax.jit(relative.update)(LARGE, relative.init(PARAMS))
    skipping = to_optax(uc.by_global_norm(1.0, nonfinite="skip"))
    for other in (to_optax(uc.autoclip()).init(PARAMS), optax.sgd(0.1).init(PARAMS)):
        with pytest.raises((ValueError, TypeError), match="init"):
            jax.jit(skipping.update)(LARGE, other)
    raising = to_optax(uc.by_global_norm(1.0, nonfinite="raise"))
    bad = {**LARGE, "b": LARGE["b"] * jnp.nan}
    with pytest.raises(FloatingPointError, match=r"grads\['b'\]"):
        raising.update(bad, raising.init(PARAMS), PARAMS)
    with pytest.raises(TypeError, match="'skip'"):
        jax.jit(raising.update)(bad, raising.init(PARAMS), PARAMS)
