"""The array API namespace written for TensorFlow, function by function beside array-api-strict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import array_api_strict as strict
import numpy as np
import pytest
import tensorflow as tf

from uniclip.backends.tensorflow import namespace as xp

FLOATS = ["float32", "float64"]
COMPLEX = ["complex64", "complex128"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
SHAPES = [(), (4,), (2, 3), (2, 3, 2), (0, 3)]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -2.5]
AXES = [(None, 0), ((), 0), (0, 1), (-1, 1), ((0,), 1), (1, 2), ((0, 1), 2), ((-1, 0), 2)]
"""An axis, and how many dimensions it needs."""


def name(dtype: Any) -> str:
    """Return the name of a dtype of either library."""
    return dtype.name if isinstance(dtype, tf.DType) else str(dtype).rpartition(".")[2]


def both(function: Callable[[Any, Any], Any], *inputs: np.ndarray) -> None:
    """Call ``function(xp, *arrays)`` with both libraries; dtype, shape and every value must be the same."""
    ours = function(xp, *map(tf.constant, inputs))
    with np.errstate(all="ignore"):
        theirs = function(strict, *map(strict.asarray, inputs))
    assert tf.is_tensor(ours)
    assert name(ours.dtype) == name(theirs.dtype)
    np.testing.assert_allclose(ours.numpy(), np.asarray(theirs), rtol=2 * np.finfo("float32").eps, strict=True)


def random(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Return random quarters, whose sums are exact, in both parts of complex numbers."""
    rng = np.random.default_rng(seed)
    values = np.asarray(np.round(20 * rng.standard_normal(shape)) / 4, dtype)
    return values + 1j * values[..., ::-1] if dtype in COMPLEX and shape else values


ARRAYS = [random(shape, dtype) for shape in SHAPES for dtype in [*FLOATS, *COMPLEX]]
REAL = [random(shape, dtype) for shape in SHAPES for dtype in FLOATS]
SPECIALS = [np.asarray(SPECIAL, dtype) for dtype in FLOATS]

UNARY: dict[str, tuple[Callable[[Any, Any], Any], list[np.ndarray]]] = {
    "abs": (lambda xp, x: xp.abs(x), [*ARRAYS, *SPECIALS]),
    "sqrt": (lambda xp, x: xp.sqrt(x), [np.abs(x) for x in [*REAL, *SPECIALS]]),
    "isfinite": (lambda xp, x: xp.isfinite(x), [*ARRAYS, *SPECIALS, *(x * (1 + 1j) for x in SPECIALS)]),
    "isinf": (lambda xp, x: xp.isinf(x), [*REAL, *SPECIALS]),
    "logical_not": (lambda xp, x: xp.logical_not(x), [x > 0 for x in REAL]),
    "ones_like": (lambda xp, x: xp.ones_like(x), [*ARRAYS, *SPECIALS]),
    "real": (lambda xp, x: xp.real(x), [x for x in ARRAYS if x.dtype.kind == "c"]),
    "imag": (lambda xp, x: xp.imag(x), [x for x in ARRAYS if x.dtype.kind == "c"]),
    "where": (lambda xp, x: xp.where(x > 0, x, -x), [*REAL, *SPECIALS]),
    "not_equal": (lambda xp, x: xp.not_equal(x, xp.ones_like(x)), [*ARRAYS, *SPECIALS, np.ones(3)]),
    "stack": (lambda xp, x: xp.stack([x, x]), ARRAYS),
    "stack last": (lambda xp, x: xp.stack([x, -x, x], axis=-1), ARRAYS),
    "unstack": (lambda xp, x: xp.stack(xp.unstack(x)[::-1]), [x for x in ARRAYS if x.ndim and len(x)]),
    "unstack last": (lambda xp, x: xp.unstack(x, axis=-1)[0], [x for x in ARRAYS if x.ndim and x.shape[-1]]),
    "concat": (lambda xp, x: xp.concat([x, -x]), [x for x in ARRAYS if x.ndim]),
    "concat last": (lambda xp, x: xp.concat([x, -x], axis=-1), [x for x in ARRAYS if x.ndim]),
    "expand_dims": (lambda xp, x: xp.expand_dims(x, axis=0), ARRAYS),
    "expand_dims last": (lambda xp, x: xp.expand_dims(x, axis=-1), ARRAYS),
    "clip": (lambda xp, x: xp.clip(x, -1.0, 2.0), [*REAL, *SPECIALS]),
    "clip below": (lambda xp, x: xp.clip(x, min=-1.0), [*REAL, *SPECIALS]),
    "clip above": (lambda xp, x: xp.clip(x, max=2.0), [*REAL, *SPECIALS]),
    "clip arrays": (lambda xp, x: xp.clip(x, xp.ones_like(x), xp.ones_like(x) * 2), [*REAL, *SPECIALS]),
    "clip not": (lambda xp, x: xp.clip(x), [*REAL, *SPECIALS]),
    "isnan": (lambda xp, x: xp.isnan(x), [*REAL, *SPECIALS]),
    "logical_and": (lambda xp, x: xp.logical_and(x > 0, x < 2), [*REAL, *SPECIALS]),
    "logical_or": (lambda xp, x: xp.logical_or(x < 0, x > 2), [*REAL, *SPECIALS]),
    "zeros_like": (lambda xp, x: xp.zeros_like(x), [*ARRAYS, *SPECIALS]),
    "full_like": (lambda xp, x: xp.full_like(x, 2.5), [*ARRAYS, *SPECIALS]),
    "reshape": (lambda xp, x: xp.reshape(x, (-1, 1)), [x for x in ARRAYS if x.size]),
    "pow": (lambda xp, x: xp.pow(xp.abs(x), xp.full_like(x, 1.5)), [*REAL, *SPECIALS]),
}
for function in ("ceil", "exp", "expm1", "floor", "round", "sign", "square", "tanh"):
    UNARY[function] = (lambda xp, x, function=function: getattr(xp, function)(x), [*REAL, *SPECIALS])
for function in ("log", "log1p", "log2"):
    UNARY[function] = (lambda xp, x, function=function: getattr(xp, function)(abs(x)), [*REAL, *SPECIALS])
for function in ("equal", "greater", "greater_equal", "less", "less_equal", "maximum", "minimum"):
    UNARY[function] = (
        lambda xp, x, function=function: getattr(xp, function)(x, xp.ones_like(x) * 1.5),
        [*REAL, *SPECIALS],
    )


@pytest.mark.parametrize(("function", "inputs"), UNARY.values(), ids=UNARY)
def test_same_values(function: Callable[[Any, Any], Any], inputs: list[np.ndarray]) -> None:
    """The standard's results, dtypes and shapes, from 0-d to empty arrays and for NaN and infinities."""
    for x in inputs:
        both(function, x)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(("axis", "ndim"), AXES)
@pytest.mark.parametrize("reduction", ["sum", "mean", "max", "min", "all", "any"])
def test_reductions(reduction: str, axis: Any, ndim: int, keepdims: bool) -> None:
    """Reductions take any axis, a tuple of axes, none of them (an empty tuple) or all, and keep dimensions if asked."""
    inputs = [x for x in (ARRAYS if reduction == "sum" else [*REAL, *SPECIALS]) if x.ndim >= ndim]
    # The standard leaves the largest and the mean of nothing open.
    inputs = [x for x in inputs if x.size or reduction not in ("max", "min", "mean")]
    assert len(inputs) >= 4
    for x in inputs:
        values = x > 0 if reduction in ("all", "any") else x
        both(lambda xp, x: getattr(xp, reduction)(x, axis=axis, keepdims=keepdims), values)


PASSING_NAN = {
    "max": lambda x: xp.max(x),
    "max along an axis": lambda x: xp.max(x, axis=0),
    "min": lambda x: xp.min(x),
    "maximum": lambda x: xp.maximum(x, xp.zeros_like(x))[0],
    "minimum": lambda x: xp.minimum(x, xp.zeros_like(x))[0],
    "clip": lambda x: xp.clip(x, -1.0, 1.0)[0],
}


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("function", PASSING_NAN.values(), ids=PASSING_NAN)
def test_nan_in_compiled_code(function: Callable[[Any], Any], jit_compile: bool) -> None:
    """Compiled code passes NaN on too, as the standard asks."""
    for values in ([math.nan, 1.0, 2.0], [math.nan, -2.0, 0.5]):
        assert math.isnan(tf.function(function, jit_compile=jit_compile)(tf.constant(values)))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_clip_by_numbers(dtype: str) -> None:
    """Bounds that are Python numbers take the array's dtype, integers too."""
    both(lambda xp, x: xp.clip(x, 1, 3), np.arange(6).astype(dtype))


@pytest.mark.parametrize(
    ("old", "new"), list(itertools.product([*FLOATS, "int32", "int64", "bool"], [*FLOATS, "int32", "complex64"]))
)
def test_astype(old: str, new: str) -> None:
    """A cast gives the standard's values in the new dtype."""
    both(lambda xp, x: xp.astype(x, getattr(xp, new, getattr(tf, new))), np.asarray([[0, 1, 3]]).astype(old))


@pytest.mark.parametrize("values", [2, 2.5, [1, 2], [[1.5], [2.5]], np.arange(3), np.float32(2)], ids=repr)
@pytest.mark.parametrize("dtype", FLOATS)
def test_asarray(dtype: str, values: Any) -> None:
    """Numbers, lists, NumPy arrays and the library's own arrays become arrays of the dtype that is asked for."""
    both(lambda xp: xp.asarray(values, dtype=getattr(xp, dtype)))
    both(lambda xp, x: xp.asarray(x, dtype=getattr(xp, dtype)), np.asarray(values))
    both(lambda xp, x: xp.asarray(x), np.asarray(values))


def test_asarray_of_a_variable() -> None:
    """A variable's value is read."""
    read = xp.asarray(tf.Variable([1.0, 2.0]), dtype=tf.float64)
    assert isinstance(read, tf.Tensor)
    assert read.dtype == tf.float64


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros(dtype: str, shape: tuple[int, ...]) -> None:
    """Zeros of a shape and dtype."""
    both(lambda xp: xp.zeros(shape, dtype=getattr(xp, dtype)))


def promoted(one: str, other: str) -> str | None:
    """Return the standard's promotion of two dtypes, ``None`` where it defines none."""
    try:
        return name(strict.result_type(getattr(strict, one), getattr(strict, other)))
    except TypeError:
        return None


TABLE = {pair: promoted(*pair) for pair in itertools.product([*FLOATS, *COMPLEX, *INTEGERS], repeat=2)}
TABLE = {pair: dtype for pair, dtype in TABLE.items() if dtype is not None}


@pytest.mark.parametrize("pair", TABLE, ids="-".join)
def test_promotion(pair: tuple[str, str]) -> None:
    """Dtypes and arrays promote by the standard's table."""
    one, other = (tf.as_dtype(dtype) for dtype in pair)
    assert xp.result_type(one, other).name == TABLE[pair]
    assert xp.result_type(tf.zeros([2], one), other).name == TABLE[pair]
    assert xp.result_type(one, tf.zeros([], other), one).name == TABLE[pair]


def test_promotion_table() -> None:
    """The table has every pair of floating dtypes and every pair of integers the standard defines."""
    assert len(TABLE) == 4**2 + 2 * 4**2 + 2 * 4 * 3


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_promotion_of_half_precision(half: str) -> None:
    """Half precision, which the standard does not know, stays itself alone and widens beside anything wider."""
    dtype = tf.as_dtype(half)
    assert xp.result_type(dtype) == xp.result_type(dtype, dtype) == dtype
    for other in [*FLOATS, *COMPLEX]:
        assert xp.result_type(dtype, tf.as_dtype(other)).name == other
        assert xp.result_type(tf.as_dtype(other), dtype).name == other


def test_promotion_of_two_halves() -> None:
    """Of float16 and bfloat16 neither holds the other, so both become float32."""
    assert xp.result_type(tf.float16, tf.bfloat16) == tf.float32


@pytest.mark.parametrize("kind", ["integral", "real floating", "complex floating"])
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, *INTEGERS, "bool"])
def test_isdtype(dtype: str, kind: str) -> None:
    """Dtypes are of the standard's kinds, booleans of none of them."""
    assert xp.isdtype(tf.as_dtype(dtype), kind) is strict.isdtype(getattr(strict, dtype), kind)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_isdtype_of_half_precision(half: str) -> None:
    """Half precision is floating point."""
    assert xp.isdtype(tf.as_dtype(half), "real floating")
    assert not xp.isdtype(tf.as_dtype(half), "integral")


@pytest.mark.parametrize("dtype", INTEGERS)
def test_iinfo(dtype: str) -> None:
    """The bounds of an integer dtype are the standard's."""
    ours, theirs = xp.iinfo(tf.as_dtype(dtype)), strict.iinfo(getattr(strict, dtype))
    assert (ours.min, ours.max) == (theirs.min, theirs.max)


@pytest.mark.parametrize("dtype", FLOATS)
def test_finfo(dtype: str) -> None:
    """The largest number of a floating-point dtype is the standard's."""
    assert xp.finfo(tf.as_dtype(dtype)).max == strict.finfo(getattr(strict, dtype)).max


def test_every_function_is_compared() -> None:
    """No function is in the namespace without a test here, and none that the standard does not have."""
    compared = {key.partition(" ")[0] for key in UNARY}
    compared |= {"sum", "mean", "max", "min", "all", "any", "sort", "take", "arange"}
    compared |= {"astype", "asarray", "zeros", "result_type", "isdtype", "iinfo", "finfo", "int32", *FLOATS}
    public = {key for key in vars(xp) if not key.startswith("_")}
    assert public == compared
    assert all(hasattr(strict, key) for key in public)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 3, 2), (0, 3)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_order(shape: tuple[int, ...], dtype: str) -> None:
    """Sorting, taking and counting; ∞ is last."""
    array = random(shape, dtype)
    if array.size:
        array.flat[0] = math.inf
    for axis in range(-len(shape), len(shape)):
        both(lambda xp, x, axis=axis: xp.sort(x, axis=axis), array)
        if shape[axis]:
            both(lambda xp, x, axis=axis: xp.take(x, xp.asarray([0]), axis=axis), array)
    both(lambda xp, x: xp.arange(5, dtype=xp.int32), array)
