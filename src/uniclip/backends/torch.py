# SPDX-License-Identifier: MIT
"""PyTorch tensors, dense and sparse, eager, compiled and under ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from array_api_compat import torch as compat

from uniclip.backends import dtensor
from uniclip.backends.base import Array, Backend, Rebuild, both
from uniclip.backends.dtensor import is_dtensor
from uniclip.backends.host import squares_along
from uniclip.backends.torch_in_place import TensorsInPlace
from uniclip.backends.torch_kinds import FLOATS, pieces_of, stored, why_unfit
from uniclip.backends.torch_modes import at_home, in_forward_mode, in_transform, recorded, tracing, valueless
from uniclip.backends.torch_sums import (
    squares_along_elsewhere,
    squares_elsewhere,
    squares_here,
    squares_in_double,
    view_of,
)


def _result_type(*dtypes: torch.dtype) -> torch.dtype:
    """Promote dtypes; unlike ``torch.result_type`` this can be compiled."""
    return reduce(torch.promote_types, dtypes)


_NARROW = {dtype: torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32)}
"""The largest numbers of the dtypes that cannot hold all Python numbers."""


def _asarray(value: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert numbers and other frameworks' arrays; PyTorch reads the latter as sequences of numbers."""
    if isinstance(value, torch.Tensor):
        return value if dtype is None else value.to(dtype)
    if torch.compiler.is_compiling() and isinstance(value, (float, torch.SymFloat)):
        return torch.ones((), dtype=dtype) * value  # else torch.compile treats the number as a constant
    if isinstance(value, float) and dtype in _NARROW and abs(value) > _NARROW[dtype]:
        return torch.full((), value, dtype=torch.float64).to(dtype)  # ∞, as elsewhere, instead of an error
    if isinstance(value, (bool, int, float, torch.SymInt)):
        return torch.full((), value, dtype=dtype)  # torch.export cannot save constants inside torch.cond
    return compat.asarray(np.array(value) if hasattr(value, "__array__") else value, dtype=dtype)


def _isfinite(x: torch.Tensor, /) -> torch.Tensor:
    """Check in two operations, where PyTorch takes four."""
    return x - x == 0


def _clip(x: torch.Tensor, /, min: Any = None, max: Any = None) -> torch.Tensor:  # noqa: A002 - the standard's names
    """Clip in one operation where bounds are numbers; array-api-compat, which also takes arrays, does more."""
    numbers = all([bound is None or isinstance(bound, (int, float)) for bound in (min, max)])
    return torch.clamp(x, min, max) if numbers and x.is_floating_point() else compat.clip(x, min, max)


namespace = SimpleNamespace(
    **(
        vars(compat)
        | {"asarray": _asarray, "clip": _clip, "isfinite": _isfinite, "result_type": _result_type, "where": torch.where}
    )
)

_TENSOR, _TENSOR_OR_PARAMETER = {torch.Tensor}, {torch.Tensor, torch.nn.Parameter}
_HALVES = {torch.float16, torch.bfloat16}
_CPU = torch.device("cpu")
_REAL = {torch.float32, torch.float64}
_VIEWED = {torch.float32, torch.float64, torch.bool, torch.int32, torch.int64}
"""The dtypes of values computed from norms."""


def _operands(arrays: list[torch.Tensor], factors: Sequence[Any]) -> Any:
    """Return factors as ``torch._foreach_mul`` takes them, a single one if all arrays have the same."""
    first = factors[0]
    if isinstance(first, torch.Tensor):
        same = all([one is first for one in factors]) and not first.ndim
        return first if same else list(factors)
    same, kinds = factors.count(first) == len(factors), {array.dtype for array in arrays}
    if not _HALVES.isdisjoint(kinds):  # for which numbers are narrowed first
        kinds = {torch.float64}
    elif not (len(kinds) == 1 and kinds <= _REAL and all([array.is_cpu for array in arrays])):
        return first if same else list(factors)
    # On the CPU a 0-d tensor of the arrays' dtype takes half the time of a number.
    wide = torch.scalar_tensor(first, dtype=kinds.pop()) if same else torch.tensor(factors, dtype=kinds.pop())
    return wide if same else list(wide.unbind())


class _Torch(Backend):
    output_axis = 0
    static_shapes = False
    in_place = TensorsInPlace()
    processes = dtensor.Distributed()

    def plain(self, leaves: list[Any], *, gradient: bool = True) -> bool:
        kinds = _TENSOR if gradient else _TENSOR_OR_PARAMETER
        for leaf in leaves:
            one = leaf
            if type(leaf) not in kinds:
                one = self._inside(leaf, gradient=gradient)
                if type(one) is not torch.Tensor:
                    return False
            if one.dtype not in FLOATS or one.layout is not torch.strided or one.is_nested:
                return False
        return True

    def _inside(self, leaf: Any, *, gradient: bool) -> Any:
        """Return the local tensor of a distributed one without special cases; ``None`` for anything else."""
        if not is_dtensor(leaf) or (gradient and isinstance(leaf, torch.nn.Parameter)):
            return None
        care = dtensor.is_partial(leaf) or (leaf.requires_grad and torch.is_grad_enabled()) or in_forward_mode()
        return None if care or tracing() else leaf._local_tensor  # noqa: SLF001

    def apart(self, leaves: list[Any]) -> bool:
        if tracing():
            return False
        spans = []
        for leaf in self.processes.local(leaves)[0]:
            if leaf.requires_grad or not leaf.is_contiguous() or leaf.is_inference():
                return False
            spans.append((leaf.data_ptr(), leaf.nbytes))
        end = 0
        for start, size in sorted(spans):
            if start < end:
                return False
            end = start + size
        return True

    def viewed(self, array: Array) -> np.ndarray[Any, Any] | None:
        if tracing() or type(array) is not torch.Tensor or array.dtype not in _VIEWED:
            return None
        if not array.is_cpu or recorded(array):
            return None
        return view_of(array)

    def device(self, array: Array) -> Any:
        return _CPU if array is None else array.device

    def from_host(self, array: np.ndarray[Any, Any], device: Any) -> Array:
        here = torch.from_numpy(array) if array.flags.writeable else torch.from_numpy(array.copy())
        return here if device == _CPU else here.to(device)

    def to_keep(self, arrays: list[Array]) -> list[Array]:
        arrays = [array.detach() for array in arrays]
        if all([array.is_cpu for array in arrays]):
            return [array.clone() for array in arrays]
        kept = list(arrays)  # a CUDA graph overwrites the outputs of its last run
        for numbers in _by_device(arrays):
            flat = torch.cat([arrays[number].reshape(-1) for number in numbers])
            pieces = flat.split([arrays[number].numel() for number in numbers])
            for number, piece in zip(numbers, pieces, strict=True):
                kept[number] = piece.view(arrays[number].shape)
        return kept

    def to_host(self, arrays: list[Array]) -> list[np.ndarray[Any, Any]]:
        found: list[Any] = [None] * len(arrays)
        for numbers in _by_device(arrays):
            flat = torch.cat([arrays[number].detach().reshape(-1) for number in numbers]).cpu()
            flat = flat if flat.dtype is not torch.bfloat16 else flat.float()
            ends = np.cumsum([arrays[number].numel() for number in numbers])[:-1]
            for number, piece in zip(numbers, np.split(flat.numpy(), ends), strict=True):
                found[number] = piece.reshape(arrays[number].shape)
        return found

    def squares(self, arrays: list[Array], lengths: list[int]) -> Array | None:
        if tracing():
            return squares_in_double(arrays, lengths)
        first = arrays[0]
        dtype, cpu = first.dtype, first.is_cpu
        if dtype.is_complex or in_forward_mode():
            return None
        recording = torch.is_grad_enabled()
        for array in arrays:
            if array.dtype is not dtype or array.is_cpu is not cpu or array.is_neg():
                return None
            if recording and array.requires_grad:
                return None
        if not cpu:
            return None if len({array.device for array in arrays}) > 1 else squares_elsewhere(arrays, lengths)
        return squares_here(arrays, lengths)

    def squares_along(self, arrays: list[Array], axes: list[Any]) -> list[Array | None]:
        if tracing() or not all([type(array) is torch.Tensor and array.dtype in _REAL for array in arrays]):
            return [None] * len(arrays)
        if len({array.device for array in arrays}) > 1 or any([array.is_neg() or recorded(array) for array in arrays]):
            return [None] * len(arrays)
        if arrays[0].is_cpu:
            return list(map(squares_along, map(view_of, arrays), axes))
        return squares_along_elsewhere(arrays, axes)

    def scaled(self, arrays: list[Array], factors: Sequence[Any], *, in_place: bool) -> list[Array] | None:
        if not isinstance(factors[0], torch.Tensor):
            if torch.is_grad_enabled() and any([array.requires_grad for array in arrays]):
                return None
            if isinstance(factors[0], np.ndarray):
                if not all([array.is_cpu for array in arrays]):
                    return None
                factors = [self.from_host(factor, _CPU) for factor in factors]
        elif tracing() or any(map(recorded, (*factors, *arrays))) or len({a.device for a in (*factors, *arrays)}) > 1:
            return None
        by = _operands(arrays, factors)
        if not in_place:
            new = torch._foreach_mul(arrays, by)  # noqa: SLF001
            # 0-d ones now have the dtype of the factor.
            pairs = zip(new, arrays, strict=True)
            return [one if one.dtype is old.dtype else one.to(old.dtype) for one, old in pairs]
        if any([array.is_neg() or array.is_conj() for array in arrays]):
            return None
        torch._foreach_mul_(arrays, by)  # nothing here records a derivative
        return arrays

    def is_array(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dtype is not torch.bool

    def unfit(self, leaf: Any, *, gradient: bool) -> str | None:
        why = why_unfit(leaf)
        if why or not (gradient and isinstance(leaf, torch.nn.Parameter)):
            return why
        return "not a gradient; pass the gradients, [p.grad for p in parameters] (to clip the weights, p.detach())"

    def traced(self, array: Array) -> bool:
        return tracing() or valueless(array)

    def readable(self, array: Array) -> bool:
        return not self.traced(array) and bool(array.is_cpu)

    def pieces(self, array: Array) -> Iterable[Array] | None:
        return pieces_of(array)

    def sum(self, array: Array, axes: tuple[int, ...] | None) -> Array:
        return self.xp.sum(array, axis=axes)

    def sparse(self, leaf: Any) -> bool:
        return leaf.layout is not torch.strided

    def stored(self, leaf: Any) -> tuple[Array, Rebuild]:
        return stored(leaf)

    def cond(self, ok: Array, usual: Callable[[], list[Array]], rare: Callable[[], list[Array]]) -> list[Array]:
        if torch.compiler.is_compiling() and not in_transform():  # torch.cond cannot be transformed
            return list(torch.cond(ok, lambda: tuple(usual()), lambda: tuple(rare())))
        return super().cond(ok, usual, rare)

    def detached(self, array: Array) -> Array:
        return array.detach()

    def to_device_of(self, other: Array, array: Array) -> Array:
        return array.to(other.device)

    def quiet(self, first: Array | None = None) -> AbstractContextManager[Any]:
        home = at_home(first)
        if torch.compiler.is_compiling():
            return home or nullcontext()
        return super().quiet(first) if home is None else both(super().quiet(first), home)


def _by_device(arrays: list[Array]) -> list[list[int]]:
    """Return the numbers of the arrays by device and dtype."""
    found: dict[Any, list[int]] = {}
    for number, array in enumerate(arrays):
        found.setdefault((array.device, array.dtype), []).append(number)
    return list(found.values())


BACKEND = _Torch(namespace)
