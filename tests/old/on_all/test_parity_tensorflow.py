"""TensorFlow's own functions beside uniclip's: the same results, and where the two differ on purpose."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import uniclip as uc
from frameworks import TensorFlow, TensorFlowFunction
from promises import close

fw = TensorFlow()
RUNS = pytest.mark.parametrize("run", [TensorFlow(), TensorFlowFunction()], ids=["eager", "tf.function"])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])
LIMITS = pytest.mark.parametrize("limit", [0.7, 5.0, 1000.0])
CLOSE_TO_ONE = np.nextafter(np.float32(1), np.float32(0))


def random(dtype: str = "float32") -> list[Any]:
    """Return random gradients of several shapes, one of them absent."""
    rng = np.random.default_rng(0)
    shapes = [(5, 3), (7,), None, (2, 3, 4), ()]
    return [None if shape is None else fw.array(3 * rng.standard_normal(shape), dtype) for shape in shapes]


def same(ours: list[Any], theirs: list[Any], dtype: str, ulps: float = 4) -> None:
    """Assert equality to a few units in the last place, and that absent gradients stay absent."""
    assert [a is None for a in ours] == [b is None for b in theirs]
    for a, b in zip(ours, theirs, strict=True):
        if a is not None:
            assert a.dtype == b.dtype
            close(fw, a, fw.numpy(b), dtype, ulps)


def slices(values: list[list[float]], rows: list[int]) -> tf.IndexedSlices:
    """Return a sparse gradient of four rows."""
    return tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([4, len(values[0])]))


@RUNS
@DTYPES
@LIMITS
def test_global_norm(run: TensorFlow, limit: float, dtype: str) -> None:
    """Above and below the limit the gradients and the norm agree."""
    theirs, their_norm = run.run(lambda g: tf.clip_by_global_norm(g, limit), random(dtype))
    ours, norm = run.run(lambda g: uc.clip_by_global_norm(g, limit), random(dtype))
    same(
        [*ours, norm, uc.global_norm(random(dtype))], [*theirs, their_norm, tf.linalg.global_norm(random(dtype))], dtype
    )


@RUNS
@DTYPES
@LIMITS
def test_known_norm(run: TensorFlow, limit: float, dtype: str) -> None:
    """A norm that is known already is used and returned, as TensorFlow's use_norm is."""
    known = fw.array(20.0, dtype)
    theirs, their_norm = run.run(lambda g, n: tf.clip_by_global_norm(g, limit, use_norm=n), random(dtype), known)
    ours, norm = run.run(lambda g, n: uc.clip_by_global_norm(g, limit, norm=n), random(dtype), known)
    same([*ours, norm], [*theirs, their_norm], dtype)


@RUNS
@DTYPES
@LIMITS
@pytest.mark.parametrize("axes", [None, 0, 1, -1, [0], [0, 2], [0, 1, 2]])
def test_norm(run: TensorFlow, axes: Any, limit: float, dtype: str) -> None:
    """One tensor is clipped alike, whatever the axes."""
    grad = random(dtype)[3]
    theirs = run.run(lambda g: tf.clip_by_norm(g, limit, axes), grad)
    axis = tuple(axes) if isinstance(axes, list) else axes
    same([run.run(lambda g: uc.clip_by_norm(g, limit, axis=axis), grad)], [theirs], dtype)


@RUNS
@pytest.mark.parametrize("limit", [0.01, 0.5, 1000.0])
def test_average_norm(run: TensorFlow, limit: float) -> None:
    """The average norm, which TensorFlow 2 has dropped, is the norm divided by the number of entries."""
    native = tf.compat.v1.clip_by_average_norm
    theirs = run.run(lambda g: [None if one is None else native(one, limit) for one in g], random())
    same(run.run(lambda g: uc.clip_by_average_norm(g, limit), random()), theirs, "float32")


@RUNS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
def test_value(run: TensorFlow, dtype: str) -> None:
    """Every dtype is clipped by value to the same bits, NaN and infinities too."""
    values = [-3, 0, 1, 5] if dtype.startswith("int") else [math.nan, math.inf, -math.inf, -0.0, 0.3, 1.7]
    grad = fw.array(values, dtype)
    theirs = run.run(lambda g: tf.clip_by_value(g, -1, 2), grad)
    ours = run.run(lambda g: uc.clip_by_value(g, -1, 2), grad)
    assert ours.dtype == theirs.dtype == grad.dtype
    np.testing.assert_array_equal(tf.bitcast(ours, "uint8"), tf.bitcast(theirs, "uint8"))


def test_array_bounds() -> None:
    """Bounds that are tensors apply to their entries."""
    grad, bound = random()[0], tf.constant([[0.1, 0.2, 0.3]])
    same([uc.clip_by_value(grad, -bound, bound)], [tf.clip_by_value(grad, -bound, bound)], "float32", ulps=0)


@pytest.mark.parametrize("limit", [41.0, 47.0, 55.0])
def test_below_the_limit(limit: float) -> None:
    """Below some limits tf.clip_by_global_norm rounds every gradient, since c·(1/c) != 1; uniclip changes no bit."""
    grad = tf.constant([1.0, 0.1, 3.0])
    assert np.float32(limit) * (np.float32(1) / np.float32(limit)) == CLOSE_TO_ONE
    np.testing.assert_array_equal(tf.clip_by_global_norm([grad], limit)[0][0], grad * CLOSE_TO_ONE)
    assert (tf.clip_by_global_norm([grad], limit)[0][0].numpy() != grad.numpy()).all()
    assert uc.clip_by_global_norm(grad, limit)[0] is grad


def test_one_norm_below_the_limit() -> None:
    """Below the limit tf.clip_by_norm returns (g·c)/c and the average norm's g·(c·(1/c)), rounded; uniclip g."""
    grad = tf.constant(np.random.default_rng(0).standard_normal(1000).astype("float32"))
    theirs = tf.clip_by_norm(grad, 47.0).numpy()
    np.testing.assert_array_equal(theirs, grad.numpy() * np.float32(47) / np.float32(47))
    assert (theirs != grad.numpy()).any()
    assert (tf.compat.v1.clip_by_average_norm(grad, 47.0).numpy() != grad.numpy()).any()
    assert uc.clip_by_norm(grad, 47.0) is grad
    assert uc.clip_by_average_norm(grad, 47.0) is grad


def test_squares_overflow() -> None:
    """Where squares overflow TensorFlow returns NaN for the global norm and zeros for others; uniclip clips."""
    grad = tf.constant([1e30, 1.0])
    [theirs], norm = tf.clip_by_global_norm([grad], 1.0)
    assert math.isinf(norm)
    assert np.isnan(theirs).all()
    assert not tf.clip_by_norm(grad, 1.0).numpy().any()
    assert not tf.compat.v1.clip_by_average_norm(grad, 1.0).numpy().any()
    ours, norm = uc.clip_by_global_norm(grad, 1.0)
    close(fw, norm, 1e30, "float32")
    for clipped, factor in [
        (ours, 1e-30),
        (uc.clip_by_norm(grad, 1.0), 1e-30),
        (uc.clip_by_average_norm(grad, 1.0), 2e-30),
    ]:
        close(fw, clipped, [1e30 * factor, factor], "float32")


def test_product_overflows() -> None:
    """tf.clip_by_norm multiplies by the limit first, which can overflow; uniclip divides first."""
    grad = tf.constant([1e10, 0.0])
    assert math.isinf(tf.clip_by_norm(grad, 1e30)[0])
    assert uc.clip_by_norm(grad, 1e30) is grad


def test_only_measure() -> None:
    """An infinite limit makes NaN of everything in TensorFlow; uniclip's only measures."""
    grad = tf.constant([3.0, 4.0])
    assert np.isnan(tf.clip_by_global_norm([grad], math.inf)[0][0]).all()
    assert np.isnan(tf.clip_by_norm(grad, math.inf)).all()
    assert uc.clip_by_global_norm(grad, math.inf)[0] is uc.clip_by_norm(grad, math.inf) is grad


def test_zero_limit_of_zero() -> None:
    """A zero gradient under a zero limit is NaN in TensorFlow and zero in uniclip."""
    grad = tf.zeros([2])
    for theirs in (tf.clip_by_global_norm([grad], 0.0)[0][0], tf.clip_by_norm(grad, 0.0)):
        assert np.isnan(theirs).all()
    for ours in (uc.clip_by_global_norm(grad, 0.0)[0], uc.clip_by_norm(grad, 0.0)):
        assert not ours.numpy().any()


@pytest.mark.parametrize(
    ("limit", "by_global_norm", "by_norm"), [(-1.0, [3, 4], [0, 0]), (math.nan, [math.nan] * 2, [math.nan] * 2)]
)
def test_wrong_limits(limit: float, by_global_norm: list[float], by_norm: list[float]) -> None:
    """A negative limit does not clip or zeroes in TensorFlow, and NaN makes NaN; uniclip raises."""
    grad = tf.constant([3.0, 4.0])
    np.testing.assert_array_equal(tf.clip_by_global_norm([grad], limit)[0][0], by_global_norm)
    np.testing.assert_array_equal(tf.clip_by_norm(grad, limit), by_norm)
    for ours in (uc.clip_by_global_norm, uc.clip_by_norm):
        with pytest.raises(ValueError, match="must be 0 or more"):
            ours(grad, limit)


@pytest.mark.parametrize(("lo", "hi", "native"), [(3.0, 1.0, 3.0), (math.nan, 1.0, math.nan)])
def test_wrong_bounds(lo: float, hi: float, native: float) -> None:
    """tf.clip_by_value returns the lower bound of swapped bounds and NaN for a NaN bound; uniclip raises."""
    np.testing.assert_array_equal(tf.clip_by_value(tf.constant([2.0]), lo, hi), [native])
    with pytest.raises(ValueError, match="must not be above"):
        uc.clip_by_value(tf.constant([2.0]), lo, hi)


def test_two_precisions() -> None:
    """TensorFlow measures gradients of one dtype only; uniclip mixes them, and each keeps its own."""
    grads = [tf.constant([3.0]), tf.constant([4.0], tf.float64)]
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.clip_by_global_norm(grads, 1.0)
    clipped, norm = uc.clip_by_global_norm(grads, 1.0)
    assert norm == 5
    assert [g.dtype for g in clipped] == [tf.float32, tf.float64]


def test_average_norm_of_float64() -> None:
    """tf.clip_by_average_norm takes float32 only; uniclip takes every floating dtype."""
    grad = tf.constant([3.0, 4.0], tf.float64)
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.compat.v1.clip_by_average_norm(grad, 1.0)
    close(fw, uc.clip_by_average_norm(grad, 1.0), [1.2, 1.6], "float64")


def test_complex() -> None:
    """TensorFlow's documentation allows complex gradients but its functions raise; uniclip clips the modulus."""
    grad = tf.constant([3 + 4j], tf.complex64)
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.clip_by_global_norm([grad], 1.0)
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.clip_by_norm(grad, 1.0)
    close(fw, uc.clip_by_norm(grad, 1.0), [0.6 + 0.8j], "complex64")


def test_integers() -> None:
    """tf.clip_by_norm takes no integers; uniclip returns them in the default float."""
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.clip_by_norm(tf.constant([3, 4]), 1.0)
    close(fw, uc.clip_by_norm(tf.constant([3, 4]), 1.0), [0.6, 0.8], "float32")


def test_rows_that_occur_twice() -> None:
    """TensorFlow measures rows that occur twice one by one; uniclip measures their sum, which is the gradient."""
    grad = slices([[3.0], [3.0]], [0, 0])
    close(fw, tf.linalg.global_norm([grad]), math.sqrt(18), "float32")
    close(fw, uc.global_norm(grad), 6.0, "float32")
    close(fw, tf.convert_to_tensor(tf.clip_by_norm(grad, 1.0))[0, 0], math.sqrt(2), "float32")
    close(fw, fw.dense(uc.clip_by_norm(grad, 1.0))[0, 0], 1.0, "float32")
    assert fw.dense(tf.clip_by_value(grad, -1.0, 1.0))[0, 0] == 2
    assert fw.dense(uc.clip_by_value(grad, -1.0, 1.0))[0, 0] == 1


def test_sparse_kind() -> None:
    """tf.clip_by_average_norm makes an IndexedSlices dense and tf.clip_by_global_norm does not; uniclip never does."""
    grad = slices([[3.0, 4.0]], [2])
    assert tf.is_tensor(tf.compat.v1.clip_by_average_norm(grad, 0.1))
    assert isinstance(tf.clip_by_global_norm([grad], 1.0)[0][0], tf.IndexedSlices)
    ours = uc.clip_by_average_norm(grad, 0.1)
    np.testing.assert_allclose(fw.dense(ours), tf.compat.v1.clip_by_average_norm(grad, 0.1), rtol=1e-6)
    np.testing.assert_array_equal(fw.dense(uc.clip_by_global_norm(grad, 10.0)[0]), fw.dense(grad))


def test_half_precision() -> None:
    """TensorFlow adds float16 squares in float16, which overflow at 65504; uniclip adds them in float32."""
    grad = tf.constant([300.0, 400.0], tf.float16)
    [theirs], norm = tf.clip_by_global_norm([grad], 1.0)
    assert norm.dtype == tf.float16
    assert np.isnan(theirs).all()
    ours, norm = uc.clip_by_global_norm(grad, 1.0)
    assert norm.dtype == tf.float32
    assert norm == 500
    close(fw, ours, [0.6, 0.8], "float16")


def test_trees() -> None:
    """TensorFlow takes flat lists only and stacks inner lists into one tensor; uniclip keeps any tree."""
    grads = {"a": tf.constant([3.0]), "b": [tf.constant([4.0]), (tf.constant([12.0]),)]}
    with pytest.raises(TypeError, match="sequence of tensors"):
        tf.clip_by_global_norm(grads, 1.0)
    assert tf.is_tensor(tf.clip_by_global_norm([[tf.constant([3.0]), tf.constant([4.0])]], 1.0)[0][0])
    clipped, norm = uc.clip_by_global_norm(grads, 1.0)
    assert norm == 13
    close(fw, clipped["b"][1][0], [12 / 13], "float32")


def test_derivative_at_zero() -> None:
    """The derivative through TensorFlow's global norm is NaN at zero; through uniclip's it is finite."""
    for function, wanted in [
        (lambda x: tf.linalg.global_norm([x]), math.nan),
        (lambda x: tf.clip_by_global_norm([x], 1.0)[0][0], math.nan),
        (lambda x: uc.global_norm([x]), 0.0),
        (lambda x: uc.clip_by_global_norm([x], 1.0)[0][0], 1.0),
    ]:
        np.testing.assert_array_equal(fw.gradient(function, tf.zeros([2])), [wanted, wanted])


def test_known_norm_as_a_number() -> None:
    """TensorFlow's use_norm must be a tensor; uniclip's norm may be a number."""
    with pytest.raises(AttributeError):
        tf.clip_by_global_norm([tf.constant([3.0, 4.0])], 1.0, use_norm=10.0)
    close(fw, uc.clip_by_global_norm(tf.constant([3.0, 4.0]), 1.0, norm=10.0)[0], [0.3, 0.4], "float32")


def test_same_tensor_twice() -> None:
    """A tensor in two places counts in each, in both."""
    grad = tf.constant([3.0, 4.0])
    ours, norm = uc.clip_by_global_norm([grad, grad], 1.0)
    theirs, their_norm = tf.clip_by_global_norm([grad, grad], 1.0)
    close(fw, norm, math.sqrt(50), "float32")
    same([*ours, norm], [*theirs, their_norm], "float32")


def test_infinite_gradient() -> None:
    """An infinite entry makes tf.clip_by_norm zero the finite ones; uniclip makes all NaN, as both global norms do."""
    grad = tf.constant([1.0, math.inf])
    np.testing.assert_array_equal(tf.clip_by_norm(grad, 1.0), [0.0, math.nan])
    for clipped in (
        uc.clip_by_norm(grad, 1.0),
        uc.clip_by_global_norm(grad, 1.0)[0],
        tf.clip_by_global_norm([grad], 1.0)[0][0],
    ):
        assert np.isnan(clipped).all()
