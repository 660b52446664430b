"""NumPy's own clip beside uniclip's: the same bits, and where the two differ on purpose."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import uniclip as uc

BITS = {"float16": "u2", "float32": "u4", "float64": "u8", "int8": "u1", "uint8": "u1", "int32": "u4", "int64": "u8"}


@pytest.mark.parametrize("dtype", BITS)
def test_same_bits(dtype: str) -> None:
    """Every entry, NaN, infinities and signed zeros too, has the bits that np.clip gives it."""
    values = np.random.default_rng(0).normal(scale=3, size=(5, 7)).astype(dtype)
    if dtype.startswith("float"):
        values[0] = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 2.0]
    kind = values.dtype.type
    clipped = uc.clip_by_value(values, 0, 2)
    np.testing.assert_array_equal(
        clipped.view(BITS[dtype]), np.clip(values, kind(0), kind(2)).view(BITS[dtype]), strict=True
    )


def test_array_bounds() -> None:
    """Bounds of an array each apply to their entries, as in np.clip."""
    values = np.random.default_rng(0).normal(size=(5, 7))
    lo, hi = -np.linspace(0, 1, 7), np.linspace(0, 1, 5)[:, None]
    np.testing.assert_array_equal(uc.clip_by_value(values, lo, hi), np.clip(values, lo, hi), strict=True)


def test_dtype_of_the_gradient_wins() -> None:
    """np.clip returns the dtype of wider bounds; uniclip keeps the gradient's."""
    values, bound = np.asarray([-3, 0.5], dtype="float32"), np.asarray(0.1)
    assert np.clip(values, -bound, bound).dtype == "float64"
    np.testing.assert_array_equal(
        uc.clip_by_value(values, -bound, bound), np.asarray([-0.1, 0.1], "float32"), strict=True
    )


def test_fractional_bounds_of_integers() -> None:
    """np.clip turns integers with fractional bounds into floats; uniclip raises."""
    values = np.asarray([1, 5])
    assert np.clip(values, 0, 2.5).dtype == "float64"
    with pytest.raises(TypeError, match="whole"):
        uc.clip_by_value(values, 0, 2.5)


@pytest.mark.parametrize(("lo", "hi", "native"), [(3.0, 1.0, [1.0, 1.0]), (math.nan, 1.0, [math.nan, math.nan])])
def test_wrong_bounds(lo: float, hi: float, native: list[float]) -> None:
    """np.clip returns the upper bound where the bounds are swapped and NaN where one is NaN; uniclip raises."""
    values = np.asarray([0.5, 5.0])
    np.testing.assert_array_equal(np.clip(values, lo, hi), native)
    with pytest.raises(ValueError, match="must not be above"):
        uc.clip_by_value(values, lo, hi)


def test_complex() -> None:
    """np.clip orders complex numbers by their real parts first; uniclip raises."""
    values = np.asarray([3 + 4j])
    np.testing.assert_array_equal(np.clip(values, -1, 1), [1 + 0j])
    with pytest.raises(TypeError, match="complex"):
        uc.clip_by_value(values, -1, 1)


def test_bfloat16() -> None:
    """np.clip returns the bfloat16 of ml_dtypes as float32; uniclip keeps it, with the same values."""
    values, bound = np.linspace(-2, 2, 9).astype(ml_dtypes.bfloat16), ml_dtypes.bfloat16(0.7)
    native, clipped = np.clip(values, -bound, bound), uc.clip_by_value(values, -0.7, 0.7)
    assert (native.dtype, clipped.dtype) == (np.float32, values.dtype)
    np.testing.assert_array_equal(clipped.astype("float32"), native)
