# SPDX-License-Identifier: MIT
"""Products and norms of many tensors by PyTorch's functions of lists, which start few kernels."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from uniclip._types import Axes, View
from uniclip.backends.arithmetic import in_groups, same
from uniclip.backends.base import take
from uniclip.backends.torch.formats import FLOATS
from uniclip.backends.torch.modes import is_recorded, tracing
from uniclip.backends.torch.one_norm import CPU, HALVES, REAL, in_memory_order, multiply_group
from uniclip.backends.torch.private import foreach_mul, foreach_mul_, foreach_norm

Factors: TypeAlias = "Sequence[float | View | torch.Tensor]"
"""A factor for each array: all numbers or NumPy's arrays, or all tensors."""
_NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
"""The integer dtype of the same size."""


def multiply_lists(
    arrays: list[torch.Tensor], factors: Factors, *, in_place: bool, zero: bool
) -> list[torch.Tensor] | None:
    """Return the products by PyTorch's functions of lists.

    ``None``, with nothing written, if these do not apply, for example because derivatives are
    recorded.
    """
    are_tensors = isinstance(factors[0], torch.Tensor)
    convert = _tensors_for if are_tensors else _numbers_for
    converted = convert(arrays, factors)
    if converted is None:
        return None
    if in_place and any([array.is_neg() or array.is_conj() for array in arrays]):
        return None
    if are_tensors:
        return _multiply_groups(arrays, converted, in_place=in_place, zero=zero)

    operands = _operands(arrays, converted)
    if in_place:
        foreach_mul_(arrays, operands)
        return arrays

    # 0-d products have the dtype of the factor.
    products = list(foreach_mul(arrays, operands))
    for number, array in enumerate(arrays):
        if products[number].dtype is not array.dtype:
            products[number] = products[number].to(array.dtype)
    return products


def _numbers_for(arrays: list[torch.Tensor], factors: Factors) -> Factors | None:
    """Return factors that the host reads, ``None`` if PyTorch's functions do not take them."""
    if torch.is_grad_enabled() and any([array.requires_grad for array in arrays]):
        return None
    if not any([isinstance(factor, np.ndarray) for factor in factors]):
        return factors
    if not all([array.is_cpu and array.dtype in REAL for array in arrays]):
        return None

    converted = []
    for factor, array in zip(factors, arrays, strict=True):
        of_dtype = np.asarray(factor, _NUMPY_DTYPES[array.dtype])
        converted.append(torch.from_numpy(np.array(of_dtype)))
    return converted


def _tensors_for(arrays: list[torch.Tensor], factors: Sequence[Any]) -> Sequence[Any] | None:
    """Return factors that are tensors, ``None`` if PyTorch's functions do not take them."""
    pairs = list(zip(factors, arrays, strict=True))
    if tracing() or any([is_recorded(array) for pair in pairs for array in pair]):
        return None

    # A factor for each leaf is on its device already. One for all is sent to each of them.
    if not same(factors) and any([f.device != array.device for f, array in pairs]):
        return None
    if any([f.ndim and f.dtype is not array.dtype for f, array in pairs]):
        return None
    return factors


def _operands(arrays: list[torch.Tensor], factors: Factors) -> Any:
    """Return numbers, or arrays, as ``torch._foreach_mul`` takes them."""
    if isinstance(factors[0], torch.Tensor):
        return list(factors)

    dtypes = {array.dtype for array in arrays}
    if not HALVES.isdisjoint(dtypes):
        # PyTorch would round a number to half precision before the product.
        dtypes = {torch.float64}
    elif not (len(dtypes) == 1 and dtypes <= REAL and all([array.is_cpu for array in arrays])):
        return list(factors)

    # On the CPU a 0-d tensor of the arrays' dtype takes half the time of a number.
    dtype = dtypes.pop()
    return list(torch.tensor(factors, dtype=dtype, device=CPU).unbind())


def _multiply_groups(
    arrays: list[torch.Tensor], factors: Sequence[torch.Tensor], *, in_place: bool, zero: bool
) -> list[torch.Tensor] | None:
    """Return products by 0-d factors, or by factors of each element, in few launches.

    If ``zero``, the product by 0 is 0 also for NaN. ``None`` for dtypes without bits to multiply.
    """
    if zero and not all([array.dtype in _BITS for array in arrays]):
        return None

    products = list(arrays)
    for numbers in _by_layout(arrays):
        group = take(arrays, numbers)
        factor: Any = take(factors, numbers)
        if same(factor):
            factor = _factor_for(group[0], factor[0])

        # Zeroed arrays are new, or are changed in place, so the product may overwrite them.
        writes = in_place
        if zero:
            group = _zero_by_factor(group, factor, in_place=in_place)
            writes = True
        group = multiply_group(group, factor, in_place=writes)

        # 0-d products get the dtype of a wider factor.
        for number, product in zip(numbers, group, strict=True):
            dtype = arrays[number].dtype
            products[number] = product if product.dtype is dtype else product.to(dtype)
    return products


def _factor_for(array: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return a factor on the device of an array, in the dtype in which PyTorch multiplies."""
    dtype = factor.dtype
    if array.dtype in HALVES:
        dtype = torch.float32
    elif array.dtype in FLOATS:
        dtype = array.dtype
    return factor.to(array.device, dtype, non_blocking=True)


def _zero_by_factor(
    arrays: list[torch.Tensor], factor: torch.Tensor | list[torch.Tensor], *, in_place: bool
) -> list[torch.Tensor]:
    """Return arrays of one dtype with 0 for all elements, NaN included, where the factor is 0.

    Their bits are multiplied by 0 or 1, as integers. The arrays may be written afterwards.
    """
    # NaN times 0 is NaN, but its bits times the integer 0 are those of the number 0.
    integer = _BITS[arrays[0].dtype]
    bits = [array.view(integer) for array in arrays]
    flags: Any
    if isinstance(factor, torch.Tensor):
        flags = (factor != 0).to(integer)
    else:
        flags = [(single != 0).to(integer) for single in factor]

    if in_place:
        foreach_mul_(bits, flags)
        return arrays
    return [new.view(arrays[0].dtype) for new in foreach_mul(bits, flags)]


def _by_layout(arrays: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the numbers of arrays that PyTorch's functions of lists take in one launch.

    One array of another device or dtype, or with gaps, would cost a launch for each of a list.
    """
    numbers: dict[Hashable, list[int]] = {}
    for number, array in enumerate(arrays):
        is_dense = array.is_contiguous() or in_memory_order(array).is_contiguous()
        numbers.setdefault((array.device, array.dtype, is_dense), []).append(number)
    return list(numbers.values())


def squares_on_device(arrays: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """Return the sums of squares on an accelerator, in float64 where the device has it:
    then nothing overflows and needs a second pass.
    """
    home = arrays[0].device
    norms: list[Any] = [None] * len(arrays)
    for numbers in _by_layout(arrays):
        group = take(arrays, numbers)
        device = group[0].device
        # MPS has no float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        group_norms = foreach_norm(group, 2, dtype=dtype)
        # All norms of another device are moved by one transfer, not by one for each.
        if device != home:
            group_norms = torch.stack(group_norms).to(home, non_blocking=True).unbind()
        for number, norm in zip(numbers, group_norms, strict=True):
            norms[number] = norm

    stacked = torch.stack(norms)
    # A dot product is one kernel, where a square and a sum are two.
    if len(lengths) == 1:
        return torch.dot(stacked, stacked).unsqueeze(0)
    rows = stacked.square()
    if len(lengths) == len(arrays):
        return rows
    groups = in_groups(list(rows.unbind()), lengths)
    return torch.stack([torch.stack(list(group)).sum() for group in groups])


def squares_along_on_device(arrays: list[torch.Tensor], axes: list[Axes]) -> list[torch.Tensor]:
    """Return the sums of squares along axes on an accelerator, in float64."""
    norms = [
        torch.linalg.vector_norm(array, dim=along, dtype=torch.float64)
        for array, along in zip(arrays, axes, strict=True)
    ]
    if len({norm.shape for norm in norms}) > 1:
        return foreach_mul(norms, norms)
    return list(torch.stack(norms).square().unbind())
