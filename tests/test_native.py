"""The clipping functions of frameworks agree with uniclip, and all frameworks with each other."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import uniclip as uc
from kit import rules
from kit.frameworks import COMPILED, EAGER, Framework
from kit.trees import EPS, close, leaves

SHAPES = [(5, 3), (7,), ()]
TREES = (SHAPES, [(4,)], [(1, 1), (3, 2, 2), (3,)])
"""Shapes of the drawn trees; only the first one where each shape is compiled."""
RATIOS = (0.125, 0.5, 0.999, 1.0, 1.001, 2.0, 8.0)
"""Limits below, at and above the norm, as a multiple of it."""
FLOATS = ("float32", "float64")
REAL = ("float16", "bfloat16", *FLOATS, "int32", "int64")
ORDERS = tuple({"order": order} for order in (2, 1, 3, math.inf))
AXES = tuple({"axis": axis} for axis in (None, 0, -1))
FACTORS = np.asarray([1.0, 3.0, -0.25])
"""The examples of a batch are these multiples of one gradient."""

# The definitions of clipping, in float64.


def shrunk(leaf: Any, size: Any, limit: Any) -> Any:
    """Return a leaf times min(1, limit/size)."""
    return leaf * np.where(size <= limit, 1.0, limit / np.where(size == 0, 1.0, size))


def of_axis(leaf: np.ndarray, axis: int | None = None) -> Any:
    """Return the norms of a leaf along an axis, with that axis kept, or its one norm."""
    return np.sqrt(np.square(leaf).sum(axis, keepdims=axis is not None))


def total(values: list[np.ndarray], order: float = 2, **others: Any) -> Any:
    """Return the norm of all elements together."""
    return np.linalg.norm(np.concatenate([leaf.ravel() for leaf in values]), order)


def together(values: list[np.ndarray], c: float, plus: float = 0.0, **options: Any) -> list[Any]:
    """Clip all elements by their joint norm, to which a library may add an epsilon.

    Return the norm, too.
    """
    n = total(values, **options)
    return [*(shrunk(leaf, n + plus, c) for leaf in values), n]


def having(leaves: list[Any], axis: int | None) -> list[Any]:
    """Return the leaves that have an axis."""
    return [leaf for leaf in leaves if axis is None or len(leaf.shape)]


def flat(leaves: list[Any]) -> list[Any]:
    """Return the leaves that have at most two axes."""
    return [leaf for leaf in leaves if len(leaf.shape) <= 2]


def parameters(leaves: list[Any]) -> list[Any]:
    """Return parameters for gradients that have at most two axes."""
    return [0.5 * leaf + 0.25 for leaf in flat(leaves)]


def columns(values: list[np.ndarray], c: float) -> list[Any]:
    """Clip columns relative to those of the parameters."""
    along = lambda leaf: of_axis(leaf, 0 if leaf.ndim > 1 else None)
    pairs = zip(flat(values), parameters(values), strict=True)
    return [shrunk(grad, along(grad), c * np.maximum(along(param), 1e-3)) for grad, param in pairs]


def examples(values: list[np.ndarray], c: float, uniform: bool | None = None) -> list[Any]:
    """Return the sums of clipped examples, by a joint norm or by layers with shares of a limit."""
    count = sum(leaf.size for leaf in values)
    shares = [math.sqrt(1 / len(values) if uniform else leaf.size / count) for leaf in values]
    sizes = [
        total(values) if uniform is None else of_axis(leaf) / part
        for leaf, part in zip(values, shares, strict=True)
    ]
    return [
        leaf * shrunk(FACTORS, np.abs(FACTORS) * size, c).sum()
        for leaf, size in zip(values, sizes, strict=True)
    ]


class Kind(NamedTuple):
    """The definition of some functions: the results, and the smallest limit without effect."""

    result: Callable[..., list[Any]]
    size: Callable[..., Any]


def by_leaf(power: float) -> Kind:
    """Clip each leaf by its norm divided by a power of its number of elements."""
    size = lambda leaf, axis=None: of_axis(leaf, axis) / leaf.size**power
    clip = lambda values, c, axis=None: [
        shrunk(leaf, size(leaf, axis), c) for leaf in having(values, axis)
    ]
    return Kind(
        clip,
        lambda values, axis=None: max(np.max(size(leaf, axis)) for leaf in having(values, axis)),
    )


def by_value(low: float, high: float) -> Kind:
    """Clip each element between multiples of the limit."""
    clip = lambda values, c, **ways: [np.clip(leaf, low * c, high * c) for leaf in values]
    return Kind(clip, lambda values, **ways: total(values, math.inf))


VALUE, MODULUS = by_value(-1, 2), by_value(-1, 1)
LEAF, AVERAGE, RMS = by_leaf(0), by_leaf(1), by_leaf(0.5)
GLOBAL, NORM = (
    Kind(together, total),
    Kind(lambda values, c, **options: [total(values, **options)], total),
)
COLUMNS, EXAMPLES = Kind(columns, lambda values: 0.5), Kind(examples, total)

# The functions of each library.


class Native(NamedTuple):
    """A function of a library, and the call of uniclip that replaces it.

    Both take arrays and a limit.
    """

    library: str
    name: str
    kind: Kind
    native: Callable[..., list[Any]]
    ours: Callable[..., list[Any]]
    options: tuple[Mapping[str, Any], ...] = ({},)
    dtypes: tuple[str, ...] = FLOATS
    ulps: float = 4
    """The tolerance of both."""
    says: Mapping[str, float] = MappingProxyType({})
    """The options in which the library differs on purpose."""
    in_place: bool = False
    """True if both take parameters, and change their gradients."""

    @property
    def framework(self) -> str:
        """The framework whose arrays it takes."""
        return {"optax": "jax", "keras": os.environ["KERAS_BACKEND"]}.get(
            self.library, self.library
        )

    def arguments(self, framework: Framework, values: list[np.ndarray], dtype: str) -> list[Any]:
        """Return the arguments of both: arrays, or parameters with these gradients."""
        arrays = [framework.array(leaf, dtype) for leaf in values]
        if not self.in_place:
            return arrays
        import torch

        made = [torch.nn.Parameter(torch.zeros_like(array)) for array in arrays]
        for parameter, array in zip(made, arrays, strict=True):
            parameter.grad = array
        return made

    def results(
        self, framework: Framework, arguments: list[Any], returned: list[Any]
    ) -> list[np.ndarray]:
        """Return the clipped arrays, then any norm; all have the dtype of the arguments."""
        arrays = [*([x.grad for x in arguments] if self.in_place else []), *returned]
        assert {framework.dtype(array) for array in arrays} == {framework.dtype(arguments[0])}
        return [framework.numpy(array) for array in arrays]

    def check(
        self, framework: Framework, limit: float, option: Any, values: Any, calls: list[Any]
    ) -> None:
        """Require the right values from the calls of the library and of uniclip."""
        both = [self.results(framework, arguments, returned) for arguments, returned in calls]
        rtol = self.ulps * EPS.get(framework.dtype(calls[0][0][0]), 0.0)
        for found, differs in zip(both, (self.says, {}), strict=True):
            for array, true in zip(
                found, self.kind.result(values, limit, **option, **differs), strict=True
            ):
                assert array.shape == np.shape(true)
                np.testing.assert_allclose(
                    array.astype("float64"), true, rtol, atol=0, err_msg=f"{self} {option}"
                )
        if self.kind in {VALUE, MODULUS}:
            for one, other in zip(*both, strict=True):
                np.testing.assert_array_equal(one.astype("float64"), other.astype("float64"))
                np.testing.assert_array_equal(np.signbit(one), np.signbit(other))


def with_norm(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return a function that returns clipped leaves and their norm as one list."""
    listed = lambda clipped, norm: [*clipped, norm]
    return lambda grads, c, **known: listed(*function(grads, c, **known))


def value(grads: list[Any], c: Any) -> Any:
    """Clip as `VALUE` does."""
    return uc.clip_by_value(grads, -c, 2 * c)


def modulus(grads: list[Any], c: Any) -> Any:
    """Clip as `MODULUS` does."""
    return uc.clip_by_value(grads, -c, c)


def norm(grads: list[Any], c: Any, order: float = 2) -> list[Any]:
    """Return the norm only."""
    return [uc.global_norm(grads, ord=order)]


def all_leaves(grads: list[Any], c: Any) -> Any:
    """Clip as `GLOBAL` does, without returning the norm."""
    return uc.clip_by_global_norm(grads, c)[0]


WITHOUT = Kind(lambda values, c: together(values, c)[:-1], total)
"""One norm for all leaves, which is not returned."""


def of_numpy() -> Iterator[Native]:
    """Yield NumPy's functions."""
    clip = lambda g, c: [np.clip(x, x.dtype.type(-c), x.dtype.type(2 * c)) for x in g]
    yield Native("numpy", "clip", VALUE, clip, value, dtypes=("float16", *FLOATS, "int32", "int64"))
    joined = lambda g, c, order: [np.linalg.norm(np.concatenate([x.ravel() for x in g]), order)]
    yield Native("numpy", "linalg.norm", NORM, joined, norm, ORDERS, ulps=8)


def of_strict() -> Iterator[Native]:
    """Yield the functions of the array API standard."""
    import array_api_strict as xp

    yield Native("strict", "clip", VALUE, lambda g, c: [xp.clip(x, -c, 2 * c) for x in g], value)


def of_mlx() -> Iterator[Native]:
    """Yield MLX's functions."""
    import mlx.core as mx
    from mlx.optimizers import clip_grad_norm

    both = with_norm(clip_grad_norm), with_norm(uc.clip_by_global_norm)
    yield Native("mlx", "clip_grad_norm", GLOBAL, *both, dtypes=("float32",), says={"plus": 1e-6})
    clip = lambda g, c: [mx.clip(x, -c, 2 * c) for x in g]
    yield Native("mlx", "clip", VALUE, clip, value, dtypes=("float16", "bfloat16", "float32"))


def of_torch() -> Iterator[Native]:
    """Yield PyTorch's functions, with our drop-ins of the same names if there are any."""
    import torch

    from uniclip.integrations import torch as drop_in

    def clip(module: Any) -> Callable[..., list[Any]]:
        return lambda p, c, order, **way: [module.clip_grad_norm_(p, c, order, **way)]

    def clip_known(module: Any) -> Callable[..., list[Any]]:
        def call(p: list[Any], c: Any, order: float, **way: Any) -> list[Any]:
            known = module.get_total_norm([x.grad for x in p], order, **way)
            module.clip_grads_with_norm_(p, c, known, **way)
            return [known]

        return call

    def clip_entries(module: Any) -> Callable[..., list[Any]]:
        return lambda p, c, **way: module.clip_grad_value_(p, c, **way) or []

    ways: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}]
    orders = tuple({**order, **way} for order, way in product(ORDERS, ways))
    both = lambda function: (function(torch.nn.utils), function(drop_in))
    here: dict[str, Any] = {"ulps": 8, "says": {"plus": 1e-6}, "in_place": True}
    yield Native("torch", "clip_grad_norm_", GLOBAL, *both(clip), orders, **here)
    yield Native(
        "torch", "get_total_norm, clip_grads_with_norm_", GLOBAL, *both(clip_known), orders, **here
    )
    yield Native(
        "torch", "clip_grad_value_", MODULUS, *both(clip_entries), tuple(ways), in_place=True
    )
    yield Native(
        "torch", "clamp", VALUE, lambda g, c: [x.clamp(-c, 2 * c) for x in g], value, dtypes=REAL
    )


def of_tensorflow() -> Iterator[Native]:
    """Yield TensorFlow's functions."""
    import tensorflow as tf

    here = "tensorflow"
    clip = lambda g, c: [tf.clip_by_value(x, -c, 2 * c) for x in g]
    yield Native(here, "clip_by_value", VALUE, clip, value, dtypes=REAL)
    each = lambda g, c, axis: [tf.clip_by_norm(x, c, axis) for x in having(g, axis)]
    yield Native(
        here,
        "clip_by_norm",
        LEAF,
        each,
        lambda g, c, axis: uc.clip_by_norm(having(g, axis), c, axis=axis),
        AXES,
    )
    both = with_norm(tf.clip_by_global_norm), with_norm(uc.clip_by_global_norm)
    yield Native(here, "clip_by_global_norm", GLOBAL, *both)
    known = lambda g, c: both[0](g, c, use_norm=tf.linalg.global_norm(g))
    yield Native(
        here, "use_norm", GLOBAL, known, lambda g, c: both[1](g, c, norm=uc.global_norm(g))
    )
    yield Native(here, "linalg.global_norm", NORM, lambda g, c: [tf.linalg.global_norm(g)], norm)
    average = lambda g, c: [tf.compat.v1.clip_by_average_norm(x, c) for x in g]
    yield Native(
        here,
        "v1.clip_by_average_norm",
        AVERAGE,
        average,
        uc.clip_by_average_norm,
        dtypes=("float32",),
    )


def of_jax() -> Iterator[Native]:
    """Yield JAX's functions."""
    import jax.numpy as jnp
    from jax.example_libraries import optimizers

    yield Native(
        "jax",
        "clip",
        VALUE,
        lambda g, c: [jnp.clip(x, -c, 2 * c) for x in g],
        value,
        dtypes=("bfloat16", "float32", "int32"),
    )
    yield Native("jax", "clip_grads", WITHOUT, optimizers.clip_grads, all_leaves)
    yield Native("jax", "l2_norm", NORM, lambda g, c: [optimizers.l2_norm(g)], norm)


def of_optax() -> Iterator[Native]:
    """Yield optax's functions."""
    import jax.numpy as jnp
    import optax

    def run(transformation: Any, g: list[Any], params: Any = None) -> list[Any]:
        return transformation.update(g, transformation.init(g), params)[0]

    def batch(g: list[Any]) -> list[Any]:
        return [jnp.stack([x * jnp.asarray(factor, x.dtype) for factor in FACTORS]) for x in g]

    def summed(g: list[Any], rule: Any) -> list[Any]:
        return uc.clip_and_sum(batch(g), rule)[0]

    yield Native("optax", "clip", MODULUS, lambda g, c: run(optax.clip(c), g), modulus)
    yield Native(
        "optax",
        "clip_by_global_norm",
        WITHOUT,
        lambda g, c: run(optax.clip_by_global_norm(c), g),
        all_leaves,
    )
    block = lambda g, c: uc.clip(g, uc.by_block_rms(c))[0]
    yield Native(
        "optax", "clip_by_block_rms", RMS, lambda g, c: run(optax.clip_by_block_rms(c), g), block
    )
    yield Native(
        "optax",
        "tree.norm",
        NORM,
        lambda g, c, order: [optax.tree.norm(g, ord=order)],
        norm,
        ORDERS[:2],
        ulps=8,
    )
    relative = lambda g, c: run(optax.adaptive_grad_clip(c), flat(g), parameters(g))
    agc = lambda g, c: uc.clip(flat(g), uc.agc(c), parameters(g))[0]
    yield Native("optax", "adaptive_grad_clip", COLUMNS, relative, agc)
    one = lambda g, c: optax.per_example_global_norm_clip(batch(g), c)[0]
    yield Native(
        "optax",
        "per_example_global_norm_clip",
        EXAMPLES,
        one,
        lambda g, c: summed(g, uc.by_example_norm(c)),
    )
    layers = lambda g, c, uniform: optax.per_example_layer_norm_clip(batch(g), c, uniform)[0]
    ours = lambda g, c, uniform: summed(g, uc.by_example_layer_norm(c, by_size=not uniform))
    both = ({"uniform": True}, {"uniform": False})
    yield Native("optax", "per_example_layer_norm_clip", EXAMPLES, layers, ours, both)


def of_keras() -> Iterator[Native]:
    """Yield the options of Keras' optimizers.

    Each is compared with an optimizer without them, which gets clipped gradients.
    """
    import keras

    def steps(g: list[Any], **options: Any) -> list[Any]:
        weights = [keras.Variable(keras.ops.zeros(x.shape), dtype="float32") for x in g]
        optimizer = keras.optimizers.SGD(1.0, **options)
        optimizer.apply(g, weights)
        return [-weight.value for weight in weights]

    clips = {
        "clipnorm": (LEAF, uc.clip_by_norm),
        "global_clipnorm": (WITHOUT, all_leaves),
        "clipvalue": (MODULUS, modulus),
    }
    for name, (kind, clip) in clips.items():
        native = lambda g, c, name=name: steps(g, **{name: c})
        yield Native(
            "keras",
            name,
            kind,
            native,
            lambda g, c, clip=clip: steps(clip(g, c)),
            dtypes=("float32",),
        )


LIBRARIES = {
    "numpy": of_numpy, "strict": of_strict, "mlx": of_mlx, "torch": of_torch,
    "tensorflow": of_tensorflow, "jax": of_jax, "optax": of_optax, "keras": of_keras,
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test by the functions of the run's libraries, or by the ways of running."""
    wanted = metafunc.config.getoption("--frameworks").split(",")
    names = [name for name in LIBRARIES if {name, "all"} & {*wanted}]
    rows = [(row, pytest.mark.needs(name)) for name in names for row in LIBRARIES[name]()]
    none = pytest.mark.needs("none")
    if "row" in metafunc.fixturenames:
        cases = [
            pytest.param(row, marks=mark, id=f"{row.library} {row.name}") for row, mark in rows
        ]
        metafunc.parametrize("row", cases or [pytest.param(None, marks=none)])
    if "way" in metafunc.fixturenames:
        ways = [
            (way(), pytest.mark.needs(name))
            for name in LIBRARIES
            for way in (*EAGER.get(name, ()), *COMPILED.get(name, ()))
        ]
        some = [(way, mark, [row for row, _ in rows if runs(row, way)]) for way, mark in ways]
        cases = [pytest.param(of, way, marks=mark, id=way.name) for way, mark, of in some if of]
        metafunc.parametrize(("rows", "way"), cases or [pytest.param(None, None, marks=none)])


def runs(row: Native, way: Framework) -> bool:
    """Return whether a way of running takes the arrays of a library.

    The steps of Keras are not compiled.
    """
    return way.family == EAGER[row.framework][0].family and not (
        way.traced and row.library == "keras"
    )


def random(rng: Any, shapes: list[Any], scale: float = 1.0) -> list[np.ndarray]:
    """Return random leaves, a third of whose elements are zero."""
    return [scale * rng.standard_normal(shape) * (rng.random(shape) < 2 / 3) for shape in shapes]


def check_drawn(row: Native, data: Any) -> None:
    """Compare a function with uniclip and with the definition on a drawn tree."""
    framework = EAGER[row.framework][0]()
    draw = lambda choices: data.draw(st.sampled_from(choices))
    dtype = draw([dtype for dtype in row.dtypes if dtype in framework.dtypes])
    option, whole = draw(row.options), dtype.startswith("int")
    shapes = SHAPES if row.framework == "jax" else draw(TREES)
    made = random(
        np.random.default_rng(data.draw(st.integers(0, 2**32))), shapes, 2.0 ** draw(range(-6, 7))
    )
    if row.kind in {VALUE, MODULUS} and not whole:
        made[0].ravel()[:4] = draw([[1.0, 2.0, 3.0, 4.0], [math.nan, math.inf, -math.inf, -0.0]])[
            : made[0].size
        ]
    arrays = [framework.array(np.rint(8 * leaf) if whole else leaf, dtype) for leaf in made]
    values = [framework.numpy(array).astype("float64") for array in arrays]
    reached = (
        float(row.kind.size([np.nan_to_num(leaf, posinf=9, neginf=9) for leaf in values], **option))
        or 1.0
    )
    limit = draw(RATIOS) * reached
    limit = max(1, round(limit)) if whole else float(np.float32(limit))
    taken = [row.arguments(framework, values, dtype) for _ in range(2)]
    calls = [
        (one, f(one, limit, **option)) for one, f in zip(taken, (row.native, row.ours), strict=True)
    ]
    row.check(framework, limit, option, values, calls)


def test_native(row: Native) -> None:
    """The library, uniclip and the definition agree, for limits below, at and above the norm."""
    count = 15 if row.library in {"jax", "optax", "keras"} else 40
    settings(max_examples=count)(given(data=st.data())(lambda data: check_drawn(row, data)))()


SCALES = (1.0, 0.25, 4.0)


def one_of_each(
    rows: list[Native], values: list[np.ndarray]
) -> list[tuple[Native, Mapping[str, Any], float]]:
    """Return each function with one of its options and a limit that some leaves exceed."""
    options = [row.options[5 * number % len(row.options)] for number, row in enumerate(rows)]
    return [
        (row, option, float(row.kind.size(values, **option)))
        for row, option in zip(rows, options, strict=True)
    ]


def test_same_numbers(rows: list[Native], way: Framework) -> None:
    """The framework's function and uniclip agree with the definition, eager and compiled."""
    first, dtype = random(np.random.default_rng(0), SHAPES), way.default_float
    sides = one_of_each(rows, first)

    def clip_all(taken: list[list[list[Any]]]) -> list[Any]:
        called = zip(sides, taken, strict=True)
        return [
            [f(g, c, **option) for f, g in zip(row[3:5], both, strict=True)]
            for (row, option, c), both in called
        ]

    with way.context():
        compiled = way.compiled(clip_all)
        for seed, scale in enumerate(SCALES):
            values = random(np.random.default_rng(seed), SHAPES, scale)
            values = [way.numpy(way.array(leaf, dtype)).astype("float64") for leaf in values]
            taken = [[row.arguments(way, values, dtype) for _ in range(2)] for row, _, _ in sides]
            returned = compiled(taken)
            for (row, option, c), *both in zip(sides, taken, returned, strict=True):
                row.check(way, c, option, values, list(zip(*both, strict=True)))


def check_rules(way: Framework) -> None:
    """Require eager and compiled rules and norms to follow NumPy in float64 for several steps."""
    some = {name: rules.kinds(uc)[name].rule for name in ("autoclip", "zclip", "adagc")}
    # PyTorch's units are along another axis by default.
    some["agc"] = uc.agc(0.05, axis=0)

    def step(states: Any, grads: Any, params: Any) -> Any:
        results = [
            rule.update(grads, state, params)
            for rule, state in zip(some.values(), states, strict=True)
        ]
        return [state for _, state, _ in results], [
            (clipped, leaves(report.norms)) for clipped, _, report in results
        ]

    def start(framework: Framework, dtype: str) -> Any:
        params = [
            framework.array(leaf, dtype) for leaf in random(np.random.default_rng(9), SHAPES[:2])
        ]
        return params, [rule.init(params) for rule in some.values()]

    numpy = EAGER["numpy"][0]()
    with way.context():
        (params, states), (weights, memory) = start(way, way.default_float), start(numpy, "float64")
        compiled = way.compiled(step)
        for seed, scale in enumerate((1.0, 1.2, 0.9, 100.0, 0.5)):
            values = [
                np.float32(leaf) / 4
                for leaf in random(np.random.default_rng(seed), SHAPES[:2], scale)
            ]
            states, found = compiled(
                states, [way.array(leaf, way.default_float) for leaf in values], params
            )
            memory, wanted = step(memory, [leaf.astype("float64") for leaf in values], weights)
            for array, true in zip(leaves(found), leaves(wanted), strict=True):
                close(way, array, true, way.default_float, ulps=8)


def test_rules(framework: Framework) -> None:
    """Rules of each kind give the same numbers on every framework."""
    check_rules(framework)


def test_rules_compiled(compiler: Framework) -> None:
    """Rules of each kind give the same numbers in compiled code."""
    check_rules(compiler)


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    "name", ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"]
)
def test_signatures(name: str) -> None:
    """Every argument of PyTorch's function exists, with the same order and default.

    Additional arguments are keyword-only.
    """
    import torch

    from uniclip.integrations import torch as drop_in

    theirs, ours = (
        list(inspect.signature(getattr(m, name)).parameters.values())
        for m in (torch.nn.utils, drop_in)
    )
    same = ours[: len(theirs)]
    assert [(p.name, p.default, p.kind) for p in same] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in ours[len(theirs) :])


@pytest.mark.needs("torch")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_error_if_nonfinite(bad: float) -> None:
    """Both raise the same type of error before any gradient is changed."""
    import torch

    from uniclip.integrations import torch as drop_in

    for module in (torch.nn.utils, drop_in):
        made = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        for parameter, values in zip(made, [[3.0, 4.0], [1.0, bad]], strict=True):
            parameter.grad = torch.tensor(values)
        with pytest.raises(RuntimeError, match=r"non-finite|NaN"):
            module.clip_grad_norm_(made, 1.0, error_if_nonfinite=True)
        with pytest.raises(RuntimeError, match=r"non-finite|NaN"):
            module.get_total_norm([p.grad for p in made], error_if_nonfinite=True)
        assert made[0].grad.tolist() == [3.0, 4.0]
