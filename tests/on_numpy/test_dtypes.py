"""NumPy's own dtypes, which other frameworks do not have."""

from __future__ import annotations

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
