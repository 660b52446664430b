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
from torch.autograd import forward_ad

from uniclip.backends import dtensor
from uniclip.backends.base import HOST, OWN, PIECE, RECORDED, TRACED, Array, Axes, Backend, Blocks, Kinds, Stored, both
from uniclip.backends.dtensor import is_dtensor
from uniclip.backends.numpy import BACKEND as DEFAULT
from uniclip.backends.torch_in_place import TensorsInPlace
from uniclip.backends.torch_kinds import coalesced, pieces_of, stored, why_unfit
from uniclip.backends.torch_modes import at_home, in_transform, recorded, tracing, valueless
from uniclip.backends.torch_sums import (
    FOREIGN,
    squares_along_elsewhere,
    squares_elsewhere,
    squares_here,
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

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_HALVES = {torch.float16, torch.bfloat16}
_CPU = torch.device("cpu")
_REAL = {torch.float32, torch.float64}
_NUMPYS = {torch.float32: np.float32, torch.float64: np.float64}
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
    wide = (
        torch.scalar_tensor(first, dtype=kinds.pop(), device=_CPU)
        if same
        else torch.tensor(factors, dtype=kinds.pop(), device=_CPU)
    )
    return wide if same else list(wide.unbind())


class _Torch(Backend):
    output_axis = 0
    in_place = TensorsInPlace()
    processes = dtensor.Distributed()

    def kinds(self, leaves: list[Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return None  # which would compile again for each entry of a cache
        return tuple([
            (leaf.dtype, leaf.is_cpu or leaf.device, leaf.layout, leaf.requires_grad, leaf.is_nested)
            if type(leaf) is torch.Tensor else None if leaf is None else _kind(leaf)
            for leaf in leaves
        ])  # fmt: skip

    def state(self, arrays: list[Array]) -> tuple[bool, bool, bool]:
        reads = all([type(array) in _PLAIN and array.is_cpu for array in arrays])
        return any(map(valueless, arrays)), reads, any([array.requires_grad for array in arrays])

    def mode(self, kinds: Kinds) -> int:
        if kinds.traced or tracing():
            return TRACED
        if (kinds.records and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
            return RECORDED
        return HOST if kinds.reads else OWN

    def doubles(self, arrays: list[Array]) -> bool:
        return all([array.device.type != "mps" for array in arrays])  # which has no float64

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

    def constant(self, array: np.ndarray[Any, Any], device: Any) -> Array:
        return torch.as_tensor(array, device=device)

    def to_keep(self, arrays: list[Array]) -> list[Array]:
        return [array.detach().clone() for array in arrays]  # a CUDA graph overwrites the outputs of its last run

    def to_host(self, arrays: list[Array]) -> list[np.ndarray[Any, Any]]:
        found: list[Any] = [None] * len(arrays)
        for numbers in _by_device(arrays):
            flat = torch.cat([arrays[number].detach().reshape(-1) for number in numbers]).cpu()
            flat = flat if flat.dtype is not torch.bfloat16 else flat.float()
            ends = np.cumsum([arrays[number].numel() for number in numbers])[:-1]
            for number, piece in zip(numbers, np.split(flat.numpy(), ends), strict=True):
                found[number] = piece.reshape(arrays[number].shape)
        return found

    def squares(self, mode: int, arrays: list[Array], lengths: list[int]) -> Array | None:
        if mode == HOST:
            return squares_here(arrays, lengths)
        first = arrays[0]
        alike = all([array.dtype is first.dtype and array.device == first.device for array in arrays])
        if mode != OWN or not alike or first.is_complex():
            return None
        return squares_elsewhere(arrays, lengths)

    def sums(self, mode: int, arrays: list[Array], p: float, axes: list[Axes], units: Any, blocks: Blocks) -> list[Any]:
        if mode == HOST:
            here = [n for n, a in enumerate(arrays) if a.dtype not in FOREIGN and (p == 2 or a.numel() <= PIECE)]
            views, by = [view_of(arrays[n]) for n in here], None if units is None else [units[n] for n in here]
            found = dict(zip(here, DEFAULT.sums(mode, views, p, [axes[n] for n in here], by, blocks), strict=True))
            units = [None] * len(arrays) if units is None else list(map(torch.as_tensor, units))
            with torch.no_grad():
                pairs = enumerate(zip(arrays, axes, units, strict=True))
                return [found[n] if n in found else view_of(self.total(a, p, *some)) for n, (a, *some) in pairs]
        real = self.doubles(arrays) and not any([array.is_complex() for array in arrays])
        if mode == OWN and p == 2 and units is None and all(axes) and real:
            return squares_along_elsewhere(arrays, list(axes))
        return super().sums(mode, arrays, p, axes, units, blocks)

    def scaled(self, arrays: list[Array], factors: Sequence[Any], *, in_place: bool, zero: bool) -> list[Array]:
        slow = zero and (isinstance(factors[0], torch.Tensor) or any([np.any(factor == 0) for factor in factors]))
        fast = None if slow else self._at_once(arrays, factors, in_place=in_place)
        return super().scaled(arrays, factors, in_place=in_place, zero=zero) if fast is None else fast

    def scaled_alike(self, arrays: list[Array], factor: float, kinds: Kinds, *, in_place: bool) -> list[Array]:
        if kinds.only not in _REAL:
            return super().scaled_alike(arrays, factor, kinds, in_place=in_place)
        # On the CPU a 0-d tensor of the arrays' dtype takes half the time of a number.
        by = torch.scalar_tensor(factor, dtype=kinds.only, device=_CPU)
        if not in_place:
            return list(torch._foreach_mul(arrays, by))
        torch._foreach_mul_(arrays, by)
        return arrays

    def _at_once(self, arrays: list[Array], factors: Sequence[Any], *, in_place: bool) -> list[Array] | None:
        """Return the products by one operation; ``None`` where that records derivatives or is traced."""
        if not isinstance(factors[0], torch.Tensor):
            if torch.is_grad_enabled() and any([array.requires_grad for array in arrays]):
                return None
            if any([isinstance(factor, np.ndarray) for factor in factors]):
                if not all([array.is_cpu and array.dtype in _REAL for array in arrays]):
                    return None
                factors = [
                    self.from_host(np.asarray(f, _NUMPYS[a.dtype]), _CPU) for f, a in zip(factors, arrays, strict=True)
                ]
        else:
            pairs = list(zip(factors, arrays, strict=True))
            apart = len({array.device for pair in pairs for array in pair}) > 1
            if apart or tracing() or any([recorded(array) for pair in pairs for array in pair]):
                return None
            if any([factor.ndim and factor.dtype is not array.dtype for factor, array in pairs]):
                return None
        by = _operands(arrays, factors)
        if not in_place:
            new = torch._foreach_mul(arrays, by)
            # 0-d ones now have the dtype of the factor.
            return [a if a.dtype is b.dtype else a.to(b.dtype) for a, b in zip(new, arrays, strict=True)]
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

    def sparse(self, leaf: Any) -> bool:
        return leaf.layout is not torch.strided

    def stored(self, leaf: Any, *, in_place: bool) -> Stored | None:
        return stored(leaf, in_place=in_place)

    def coalesced(self, leaf: Any) -> Any:
        return coalesced(leaf)

    def certain(self, flag: Any) -> bool:
        if not tracing():
            return bool(flag)
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes seconds

        return statically_known_true(flag)

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


def _kind(leaf: Any) -> Any:
    """Return the kind of what is not just a tensor."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, torch.nn.parameter.UninitializedTensorMixin):
        return type(leaf), None
    places = (leaf.device_mesh, tuple(leaf.placements)) if is_dtensor(leaf) else ()
    return (
        type(leaf),
        leaf.dtype,
        leaf.is_cpu or leaf.device,
        leaf.layout,
        leaf.requires_grad,
        leaf.is_nested,
        *places,
    )


def _by_device(arrays: list[Array]) -> list[list[int]]:
    """Return the numbers of the arrays by device and dtype."""
    found: dict[Any, list[int]] = {}
    for number, array in enumerate(arrays):
        found.setdefault((array.device, array.dtype), []).append(number)
    return list(found.values())


BACKEND = _Torch(namespace)
