"""NumPy's own dtypes, which other frameworks do not have."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import uniclip as uc


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8", ">c8"])
def test_byte_order(dtype: str) -> None:
    """Arrays keep their byte order, clipped or not, and in place."""
    grad = np.asarray([3.0, 4.0], dtype)
    for limit in (1.0, 10.0):
        clipped, norm = uc.clip_by_global_norm(grad, limit)
        assert clipped.dtype.str == dtype
        assert norm == 5
    uc.clip_(grad, uc.by_norm(1.0))
    np.testing.assert_allclose(grad, np.asarray([0.6, 0.8], dtype), rtol=1e-3)


def test_long_double() -> None:
    """What is beyond double precision and its range stays so."""
    by = np.longdouble("1e400")
    clipped, report = uc.clip(np.asarray([3, 4], np.longdouble) * by, uc.by_global_norm(1.0))
    assert report.finite
    assert abs(report.norms / by - 5) < 1e-18
    assert clipped.dtype == np.longdouble
    np.testing.assert_allclose(clipped, np.asarray([3, 4], np.longdouble) / 5, rtol=1e-18)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e3m4], ids=str)
@pytest.mark.parametrize("rule", [uc.by_global_norm(2.5), uc.by_norm(2.5, axis=-1), uc.by_value(-2, 2)], ids=repr)
def test_8_bits(dtype: type, rule: uc.Rule) -> None:
    """8-bit floats are clipped as float32, and rounded once; in place too."""
    wide = np.asarray([3.0, 4.0, -0.5], "float32")
    wanted = uc.clip(wide, rule)[0].astype(dtype)
    grad = wide.astype(dtype)
    clipped, _ = uc.clip(grad, rule)
    uc.clip_(grad, rule)
    for found in (clipped, grad):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.astype("float32"), wanted.astype("float32"))


@pytest.mark.parametrize(
    "leaf",
    [
        np.asarray([2.0, 4.0]).astype(ml_dtypes.float8_e8m0fnu),  # neither zero nor negative numbers
        np.asarray([3, 4]).astype(ml_dtypes.int4),
        np.zeros(2, [("a", "f4"), ("b", "f4")]),
        np.asarray(["2020-01-01"], "M8[D]"),
        np.asarray([3], "m8[D]"),
        np.asarray([3.0, 4.0], object),
        np.asarray([True]),
        np.asarray(["a"]),
    ],
    ids=lambda leaf: str(leaf.dtype),
)
def test_no_numbers(leaf: np.ndarray) -> None:
    """What holds no numbers that gradients can have is refused, before anything is changed."""
    first = np.asarray([3.0, 4.0])
    for clip in (uc.clip, uc.clip_):
        for rule in (uc.by_norm(1.0), uc.by_value(-1.0, 1.0)):
            with pytest.raises(TypeError, match=r"grads\[1\] is a numpy.ndarray of dtype .* not an array of numbers"):
                clip([first, leaf], rule)
    assert first.tolist() == [3, 4]


def test_warming_up_to_a_subnormal_norm() -> None:
    """The joint norm of subnormal norms is theirs; TensorFlow and JAX take such numbers for 0."""
    rule = uc.adagc(warmup_norm=3.5e-43)
    for norm, left in ((2.1e-43, 2.1e-43), (7e-43, 3.5e-43)):
        grads = [np.asarray([0.6 * norm, 0.8 * norm], np.float32), np.zeros(1, np.float32)]
        clipped = rule.update(grads, rule.init(grads))[0]
        np.testing.assert_allclose(clipped[0], [0.6 * left, 0.8 * left], rtol=0, atol=5e-45)


def test_a_scalar_parameter() -> None:
    """A scalar of NumPy's is a tree of one array, as gradients and as parameters."""
    clipped, _ = uc.clip(np.float32(3.0), uc.larc(0.1), params=np.float32(4.0))
    assert clipped == uc.clip(np.asarray(3.0, np.float32), uc.larc(0.1), params=np.asarray(4.0, np.float32))[0]
    with pytest.raises(TypeError, match="params must be a tree of parameters"):
        uc.clip(np.float32(3.0), uc.larc(0.1), params=4.0)
