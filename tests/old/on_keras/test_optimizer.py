"""`ClippedOptimizer` step by step against the loop that clips by hand, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import keras
import numpy as np
import pytest
from keras.optimizers import SGD, Adam, AdamW, LossScaleOptimizer

import uniclip as uc
from uniclip.integrations.keras import ClippedOptimizer
from uniclip.integrations.keras.config import rule_from_config, rule_to_config

# Keras' variables do not know NumPy's copy argument yet; that is between the two.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

BACKEND = keras.backend.backend()
PATHS = ("layer/kernel", "layer/bias", "head/kernel")
SHAPES = ((3, 2), (2,), (2, 4))
SIZES = (0.1, 3.0, 0.5, 40.0, 1.0, 2.0, 0.2, 5.0)  # of the gradients of each step


class Two(NamedTuple):
    """The norms of the last two steps."""

    last: Any
    before: Any


class Earlier(uc.Limit):
    """Allow the norm of the step before the last one; a part of its state is one of the state before."""

    memory: ClassVar[bool] = True

    def init(self, norms: Any, context: uc.limits.Context) -> Two:
        """Nothing is seen yet."""
        return Two(norms + 1, norms + 1)

    def __call__(self, norms: Any, state: Two, context: uc.limits.Context) -> Any:
        """Shift."""
        return state.before, Two(norms, state.last)


def is_kernel(path: Any, leaf: Any) -> bool:
    """Choose the kernels."""
    return bool(path[0].endswith("/kernel"))


RULES: dict[str, Any] = {
    "global": uc.by_global_norm(1.0),
    "global-huge": uc.by_global_norm(1e9),
    "norm": uc.by_norm(0.5),
    "value": uc.by_value(-0.3, 0.3),
    "agc": uc.agc(0.1),
    "autoclip": uc.autoclip(50, window=4),
    "adagc": uc.adagc(warmup=2),
    "skip-nan": uc.by_global_norm(1.0, nonfinite="skip"),
    "skip-spikes": uc.skip_spikes(2.0, window=4, warmup=3),
    "chain": uc.chain(uc.by_value(-2.0, 2.0), uc.zclip(warmup=2), lambda g: -g),
    "masked": uc.masked(uc.autoclip(50, window=4), is_kernel),
    "groups": uc.by_group_norm({"layer": 1.0, "head": 0.1}, lambda path, leaf: path[0].split("/")[0]),
    "earlier": uc.Rule(Earlier()),
}
BY_HAND = {**RULES, "agc": uc.agc(0.1, axis=0)}  # the weights of Keras are (in, out), on PyTorch too


def variables() -> list[Any]:
    """Return variables of a layer and a head."""
    rng = np.random.default_rng(0)
    made = [keras.Variable(rng.normal(size=shape).astype("float32")) for shape in SHAPES]
    for variable, path in zip(made, PATHS, strict=True):
        variable._path = path
    return made


def gradients(*, spoiled: bool) -> list[list[Any]]:
    """Return the gradients of some steps; if spoiled, with NaN in one."""
    rng = np.random.default_rng(1)
    steps = [[size * rng.normal(size=shape).astype("float32") for shape in SHAPES] for size in SIZES]
    if spoiled:
        steps[2][1][0] = math.nan
    return [[keras.ops.convert_to_tensor(grad.astype("float32")) for grad in step] for step in steps]


def stepper(optimizer: Any, params: list[Any], *, compiled: bool) -> Callable[[list[Any]], None]:
    """Return a function that takes a step, if asked for compiled as ``fit`` would."""
    optimizer.build(params)
    if not compiled or BACKEND == "torch":
        return lambda grads: optimizer.apply(grads, params)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(lambda grads: optimizer.apply(grads, params))
    import jax

    step = jax.jit(optimizer.stateless_apply, donate_argnums=(0, 2))

    def take(grads: list[Any]) -> None:
        new = step([v.value for v in optimizer.variables], grads, [v.value for v in params])
        for variable, value in zip([*params, *optimizer.variables], [*new[0], *new[1]], strict=True):
            variable.assign(value)

    return take


def close(ours: list[Any], theirs: list[Any], tolerance: float = 1e-5) -> None:
    """Compare the values of variables."""
    for pair in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, pair), rtol=tolerance, atol=tolerance)


EAGER = () if BACKEND == "torch" else ("global", "agc", "skip-nan")  # compiled, all of them are
WAYS = pytest.mark.parametrize("compiled", [True] if BACKEND == "torch" else [False, True], ids="compiled={}".format)
"""On PyTorch a step is eager either way."""


@pytest.mark.parametrize(
    ("name", "compiled"),
    [*[(name, True) for name in RULES], *[(name, False) for name in EAGER]],
    ids=[*RULES, *[f"{name}-eager" for name in EAGER]],
)
def test_steps(name: str, compiled: bool) -> None:
    """Weights, moments and step counts are those of clipping by hand, then stepping."""
    ours, theirs = variables(), variables()
    optimizer, plain = ClippedOptimizer(Adam(0.1, weight_decay=0.01), RULES[name]), Adam(0.1, weight_decay=0.01)
    plain.build(theirs)
    take, clipper, taken = stepper(optimizer, ours, compiled=compiled), uc.Clipper(BY_HAND[name]), 0
    for grads in gradients(spoiled=name == "skip-nan"):
        take(grads)
        params = [keras.ops.convert_to_tensor(v.value) for v in theirs]
        clipped = clipper(dict(zip(PATHS, grads, strict=True)), dict(zip(PATHS, params, strict=True)))
        if not clipper.report.skipped:
            plain.apply([clipped[path] for path in PATHS], theirs)
            taken += 1
        logged = {key: float(value) for key, value in optimizer.scalars().items()}
        wanted = {key: float(value) for key, value in clipper.report.scalars().items()}
        assert logged == pytest.approx(wanted, rel=1e-5, nan_ok=True)
    close(ours, theirs)
    close(optimizer.inner.variables, plain.variables)
    assert int(optimizer.iterations) == taken
    assert (taken < len(SIZES)) == (name in {"skip-nan", "skip-spikes"})


@WAYS
def test_unclipped_is_bitwise(compiled: bool) -> None:
    """Gradients within the limit change nothing, to the bit."""
    ours, theirs = variables(), variables()
    take = stepper(ClippedOptimizer(SGD(0.1, momentum=0.9), uc.by_global_norm(1e9)), ours, compiled=compiled)
    plain = stepper(SGD(0.1, momentum=0.9), theirs, compiled=compiled)
    for grads in gradients(spoiled=False):
        take(grads)
        plain(grads)
    close(ours, theirs, tolerance=0.0)


@WAYS
@pytest.mark.parametrize(
    "rule", [uc.by_global_norm(0.5), uc.autoclip(50, window=4), uc.skip_spikes(2.0, 4, 2)], ids=repr
)
def test_accumulation(rule: Any, compiled: bool) -> None:
    """The mean of the micro-batches is clipped, once for each step."""
    ours, theirs = variables(), variables()
    optimizer = ClippedOptimizer(Adam(0.1), rule, gradient_accumulation_steps=2)
    take, plain, clipper = stepper(optimizer, ours, compiled=compiled), Adam(0.1), uc.Clipper(rule)
    steps = gradients(spoiled=False)
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        before = [keras.ops.convert_to_numpy(v).copy() for v in ours]
        take(first)
        close(ours, before, tolerance=0.0)
        take(second)
        clipped = clipper([(a + b) / 2 for a, b in zip(first, second, strict=True)])
        if clipper.report.skipped is None or not bool(clipper.report.skipped):
            plain.apply(clipped, theirs)
    close(ours, theirs)
    assert int(optimizer.iterations) == int(plain.iterations)


def test_loss_scale_optimizer_outside() -> None:
    """The limit holds for the unscaled gradients, and a step with ∞ is none."""
    ours, theirs = variables(), variables()
    optimizer = LossScaleOptimizer(ClippedOptimizer(SGD(0.1), uc.by_global_norm(1.0)), initial_scale=64.0)
    take, plain = stepper(optimizer, ours, compiled=True), SGD(0.1)  # on JAX it cannot step otherwise
    grads = gradients(spoiled=False)[1]
    take([64 * grad for grad in grads])
    clipped, norm = uc.clip_by_global_norm(grads, 1.0)
    plain.apply(clipped, theirs)
    close(ours, theirs)
    assert float(optimizer.inner_optimizer.scalars()["clip/norm"]) == pytest.approx(float(norm), rel=1e-5)
    take([grad * math.inf for grad in grads])
    close(ours, theirs)
    assert int(optimizer.iterations) == 1


def test_loss_scale_factor() -> None:
    """A fixed scale is the wrapper's: it scales the loss, and divides the gradients before they are clipped."""
    ours, theirs = variables(), variables()
    optimizer, plain = ClippedOptimizer(SGD(0.1), uc.by_global_norm(1.0), loss_scale_factor=8.0), SGD(0.1)
    grads = gradients(spoiled=False)[1]
    assert float(optimizer.scale_loss(keras.ops.convert_to_tensor(2.0))) == 16.0
    optimizer.apply([8 * grad for grad in grads], ours)
    plain.apply(uc.clip_by_global_norm(grads, 1.0)[0], theirs)
    close(ours, theirs)


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")  # which is what is tested
def test_absent_gradients_and_some_variables() -> None:
    """A gradient that is absent is left out of the norm; variables can be left out altogether."""
    ours, theirs = variables(), variables()
    optimizer, plain = ClippedOptimizer(SGD(0.1), uc.by_global_norm(1.0)), SGD(0.1)
    for one in (optimizer, plain):
        one.build(ours if one is optimizer else theirs)
    grads = gradients(spoiled=False)[1]
    clipped = uc.clip_by_global_norm(grads[1:], 1.0)[0]
    optimizer.apply([None, *grads[1:]], ours)
    plain.apply([None, *clipped], theirs)
    optimizer.apply_gradients(list(zip(grads[1:], ours[1:], strict=True)))
    plain.apply(clipped, theirs[1:])
    close(ours, theirs)


def test_a_sparse_gradient_stays_sparse() -> None:
    """TensorFlow's IndexedSlices reach the optimizer inside as they were, rows that occur twice measured once."""
    grad: Any = keras.ops.convert_to_tensor([[6.0, 8.0], [0.0, 0.0], [0.0, 0.0]])
    if BACKEND == "tensorflow":
        import tensorflow as tf

        grad = tf.IndexedSlices(tf.constant([[3.0, 4.0], [3.0, 4.0]]), tf.constant([0, 0]), tf.constant([3, 2]))
    seen = []

    class Recorded(SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            seen.extend(grads)
            super().apply(grads, trainable_variables)

    table = keras.Variable(np.ones((3, 2), np.float32))
    optimizer = ClippedOptimizer(Recorded(1.0), uc.by_global_norm(1.0))
    optimizer.apply([grad], [table])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(table), [[0.4, 0.2], [1, 1], [1, 1]], rtol=1e-6)
    assert float(optimizer.scalars()["clip/norm"]) == 10.0
    assert type(seen[0]) is type(grad)


def test_what_is_the_inner_optimizers() -> None:
    """Learning rate and step count are those of the optimizer inside, also when set."""
    optimizer = ClippedOptimizer(SGD(0.5), uc.by_norm(1.0))
    optimizer.learning_rate = 0.25
    assert float(optimizer.inner.learning_rate) == float(optimizer.learning_rate) == 0.25
    params = variables()
    optimizer.apply(gradients(spoiled=False)[0], params)
    assert int(optimizer.iterations) == int(optimizer.inner.iterations) == 1
    other = ClippedOptimizer(SGD(0.5), uc.by_norm(1.0))
    other.build(params)
    other.set_weights([keras.ops.convert_to_numpy(v) for v in optimizer.variables])
    close(other.variables, optimizer.variables, tolerance=0.0)
    assert int(other.iterations) == 1


def test_epoch_scalars() -> None:
    """Shares are averaged since the epoch began; a rule that measures no norm has no scalars."""
    params = variables()
    optimizer = ClippedOptimizer(SGD(0.1), uc.by_global_norm(10.0, nonfinite="skip"))
    assert optimizer.scalars() == optimizer.epoch_scalars() == {}
    optimizer.build(params)
    for grads in gradients(spoiled=True)[:4]:
        optimizer.apply(grads, params)
    assert optimizer.epoch_scalars()["clip/share"] == 0.75  # NaN counts as clipped
    assert optimizer.epoch_scalars()["clip/skipped"] == 0.25
    optimizer.begin_epoch()
    assert math.isnan(optimizer.epoch_scalars()["clip/share"])
    assert math.isnan(optimizer.epoch_scalars()["clip/norm_max"])
    optimizer.apply(gradients(spoiled=False)[0], params)
    assert optimizer.epoch_scalars()["clip/share"] == 0.0
    assert optimizer.epoch_scalars()["clip/norm_max"] == float(optimizer.scalars()["clip/norm"])
    other = ClippedOptimizer(SGD(0.1), uc.by_value(-1.0, 1.0))
    other.apply(gradients(spoiled=False)[0], variables())
    assert other.scalars() == other.epoch_scalars() == {}


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no-optimizer": (lambda: ClippedOptimizer("adam", uc.by_norm(1.0)), TypeError, "inner must be a keras.optim"),
    "no-rule": (lambda: ClippedOptimizer(SGD(), 1.0), TypeError, "rule must be a rule, such as uc.by_global_norm"),
    "a-limit": (lambda: ClippedOptimizer(SGD(), uc.limits.Ema(1.0, 0.9)), TypeError, r"uc\.Rule\(limit\)"),
    "clipnorm": (lambda: ClippedOptimizer(SGD(clipnorm=2.0), uc.by_norm(1.0)), ValueError, r"uc\.by_norm\(2\.0\)"),
    "global": (
        lambda: ClippedOptimizer(SGD(global_clipnorm=2.0), uc.by_norm(1.0)), ValueError, r"uc\.by_global_norm\(2\.0\)",
    ),
    "clipvalue": (lambda: ClippedOptimizer(SGD(clipvalue=2.0), uc.by_norm(1.0)), ValueError, r"value\(-2\.0, 2\.0\)"),
    "clipped": (
        lambda: ClippedOptimizer(ClippedOptimizer(SGD(), uc.by_norm(1.0)), uc.by_norm(1.0)), ValueError, r"uc\.chain",
    ),
    "scaled-inside": (
        lambda: ClippedOptimizer(LossScaleOptimizer(SGD()), uc.by_norm(1.0)),
        ValueError,
        r"LossScaleOptimizer\(ClippedOptimizer",
    ),
    "accumulating": (
        lambda: ClippedOptimizer(SGD(gradient_accumulation_steps=4), uc.by_norm(1.0)),
        ValueError,
        r"ClippedOptimizer\(inner, rule, gradient_accumulation_steps=4\)",
    ),
    "scaling": (
        lambda: ClippedOptimizer(SGD(loss_scale_factor=4.0), uc.by_norm(1.0)), ValueError, r"loss_scale_factor=4\.0\)",
    ),
    "not-built": (
        lambda: ClippedOptimizer(SGD(), uc.by_norm(1.0)).apply(gradients(spoiled=False)[0]), ValueError, "build",
    ),
    "too-few": (
        lambda: ClippedOptimizer(SGD(), uc.by_norm(1.0)).apply(gradients(spoiled=False)[0][:2], variables()),
        ValueError,
        "one gradient .or None. for each of the 3 variables, got 2",
    ),
    "by-leaf-absent": (
        lambda: ClippedOptimizer(SGD(), uc.adagc()).apply([None, *gradients(spoiled=False)[0][1:]], variables()),
        ValueError,
        "'layer/kernel' has no gradient: make it not trainable before you compile, with a new optimizer",
    ),
    "lambda": (
        lambda: ClippedOptimizer(SGD(), uc.masked(uc.by_norm(1.0), lambda path, leaf: True)).get_config(),
        TypeError,
        "register_keras_serializable",
    ),
    "limit-class": (
        lambda: ClippedOptimizer(SGD(), uc.Rule(Earlier())).get_config(), TypeError, "Earlier is part of the rule",
    ),
}  # fmt: skip


@pytest.mark.any_backend
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")  # in one of the cases
@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    """Wrong use is an error that names the fix."""
    use, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        use()


def test_arrays_as_config() -> None:
    """Arrays become numbers."""
    tensor = keras.ops.convert_to_tensor
    for dtype in ("float32", "bfloat16", "float16"):
        limit = keras.ops.cast(tensor(0.5), dtype)
        assert rule_from_config(rule_to_config(uc.by_norm(limit))) == uc.by_norm(0.5)
    rule = rule_from_config(
        json.loads(json.dumps(rule_to_config(uc.by_value(tensor([-1.0, -2.0]), np.asarray([1.0, np.inf])))))
    )
    assert rule.min.tolist() == [-1.0, -2.0]
    assert rule.max.tolist() == [1.0, math.inf]
    assert rule.min.dtype == np.float32


@pytest.mark.any_backend
def test_functions_as_config() -> None:
    """A function that Keras knows is saved by its name, in each place where a rule can hold one."""
    known = keras.saving.register_keras_serializable("test")
    where, function = known(is_kernel), known(half)
    rule = uc.chain(uc.masked(uc.by_norm(1.0), where), uc.by_group_norm({True: 1.0, False: 2.0}, where), function)
    assert rule_from_config(json.loads(json.dumps(rule_to_config(rule)))) == rule
    optimizer = ClippedOptimizer(AdamW(0.5), rule, loss_scale_factor=2.0, gradient_accumulation_steps=3, name="mine")
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))
    again = keras.saving.deserialize_keras_object(config)
    assert again.get_config() == optimizer.get_config()
    assert again.rule == rule
    assert isinstance(again.inner, AdamW)


def half(grad: Any) -> Any:
    """Halve a gradient."""
    return grad / 2
