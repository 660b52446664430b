# SPDX-License-Identifier: MIT
"""Sums of powers of tensors in the CPU's memory, by NumPy or by PyTorch, whichever takes less time
for their sizes.

`uniclip.backends.torch.one_norm` computes a single Euclidean norm of dense tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

import numpy as np
import torch

from uniclip._types import View
from uniclip.backends.arithmetic import PIECE, power_sum
from uniclip.backends.base import Backend, Terms, stack_terms, take
from uniclip.backends.numpy import BACKEND as NUMPY
from uniclip.backends.numpy import (
    add_groups,
    call_bound,
    concatenated_squares,
    sum_of_squares,
    sums_of_arrays,
    worth_concatenating,
)
from uniclip.backends.torch.one_norm import LONG, REAL, SINGLE, host_norm
from uniclip.backends.torch.private import flatten, foreach_norm

NOT_IN_NUMPY = {torch.bfloat16, torch.complex32}
"""The dtypes that NumPy does not have."""


def host_view(array: torch.Tensor) -> View:
    """Return a NumPy array of the same memory, detached; a copy if it is negated or conjugated."""
    return array.numpy(force=True)


def squares_on_host(arrays: list[torch.Tensor], lengths: list[int]) -> View | None:
    """Return the sums of squares in a NumPy array, from memory that the CPU can read.

    ``None`` if NumPy does not have a dtype, or a sum is out of range.
    """
    # The spine calls the same function, so that both round alike.
    norm = host_norm(arrays) if len(lengths) == 1 else None
    if norm is not None:
        return np.array([norm * norm])

    dtypes = {array.dtype for array in arrays}
    sizes = [array.numel() for array in arrays]
    if len(dtypes) == 1 and dtypes <= REAL and worth_concatenating(sizes, lengths):
        flat = flatten(arrays)
        return concatenated_squares(flat.numpy(force=True), sizes, lengths)

    if not dtypes <= SINGLE or call_bound(arrays, sum(sizes)):
        if not dtypes.isdisjoint(NOT_IN_NUMPY):
            return None
        return sum_of_squares(list(map(host_view, arrays)), lengths)

    norms = _norms_of_each(arrays)
    if norms is None:
        return None
    return np.array(add_groups(np.square(norms).tolist(), lengths))


def _norms_of_each(arrays: list[torch.Tensor]) -> list[float] | None:
    """Return the norm of each array on the CPU, ``None`` if one is out of range."""
    # One call for all short arrays. Converting the elements of long ones takes longer than calls.
    is_short = [array.numel() < LONG for array in arrays]
    short = list(compress(arrays, is_short))
    norms_of_short: Iterator[float] = iter(())
    if short:
        in_one_call = foreach_norm(short, 2, dtype=torch.float64)
        norms_of_short = iter(torch.stack(in_one_call).tolist())
    norms: list[float] = []
    for array, is_in_call in zip(arrays, is_short, strict=True):
        norm = next(norms_of_short) if is_in_call else host_norm([array])
        if norm is None:
            return None
        norms.append(norm)
    return norms


def sums_on_host(backend: Backend[torch.Tensor], terms: Terms) -> list[View]:
    """Return the rows of all norms in NumPy arrays, from memory that the CPU can read."""
    rows = squares_on_host(terms.arrays, terms.counts) if terms.whole else None
    if rows is not None:
        return terms.in_blocks(rows)

    # NumPy's calls take less time than PyTorch's, except for powers other than 2 of long arrays.
    arrays = terms.arrays
    axes = terms.axes
    in_numpy = [
        number
        for number, array in enumerate(arrays)
        if array.dtype not in NOT_IN_NUMPY and (terms.p == 2 or array.numel() <= PIECE)
    ]
    terms_in_numpy = terms._replace(
        arrays=list(map(host_view, take(arrays, in_numpy))),
        axes=axes and take(axes, in_numpy),
    )
    sums = dict(zip(in_numpy, sums_of_arrays(terms_in_numpy), strict=True))

    with torch.no_grad():
        for number, term in enumerate(terms.by_array()):
            if number not in sums:
                sums[number] = host_view(power_sum(backend, *term))
    return stack_terms(NUMPY, take(sums, range(len(arrays))), terms)
