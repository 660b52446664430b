# SPDX-License-Identifier: MIT
"""PyTorch tensors, dense and sparse, eager, compiled and under ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from array_api_compat import torch as compat
from torch.autograd import forward_ad

from uniclip.backends import dtensor
from uniclip.backends.base import PIECE, Array, Backend, Rebuild, row_slices, sum_dtype, unchanged
from uniclip.backends.dtensor import is_dtensor
from uniclip.backends.host import few, squares


def _result_type(*dtypes: torch.dtype) -> torch.dtype:
    """Promote dtypes; unlike ``torch.result_type`` this can be compiled."""
    return reduce(torch.promote_types, dtypes)


def _asarray(value: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert numbers and other frameworks' arrays; PyTorch reads the latter as sequences of numbers."""
    if isinstance(value, torch.Tensor):
        return value if dtype is None else value.to(dtype)
    if torch.compiler.is_compiling() and isinstance(value, (float, torch.SymFloat)):
        return torch.ones((), dtype=dtype) * value  # else torch.compile takes the number for a constant
    if isinstance(value, (bool, int, float, torch.SymInt)):
        return torch.full((), value, dtype=dtype)  # torch.export cannot save constants inside torch.cond
    return compat.asarray(np.array(value) if hasattr(value, "__array__") else value, dtype=dtype)


namespace = SimpleNamespace(**(vars(compat) | {"asarray": _asarray, "result_type": _result_type}))

_COMPRESSED = {
    torch.sparse_csr: (torch.sparse_csr_tensor, torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.sparse_csc_tensor, torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}
_SINGLE = {torch.float16, torch.bfloat16, torch.float32}
_DOUBLE = {torch.float64, torch.complex128}
_FLOATS = {*_SINGLE, *_DOUBLE, torch.complex64}
_CPU = torch.device("cpu")
_SCALARS = {torch.float32: np.float32, torch.float64: np.float64, torch.bool: np.bool_}
_DTYPES = {np.dtype(scalar).char: dtype for dtype, scalar in _SCALARS.items()}
_LAYOUTS = {torch.strided, torch.sparse_coo, *_COMPRESSED}


class _Memory:
    """What NumPy may know of a tensor's memory; it looks at the address, never at what is there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "typestr": f"|V{size}",
        }


def _apart(operand: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
    """Return the operand, a copy if it is another view of the array that is to be changed."""
    if torch.compiler.is_compiling() or operand.untyped_storage().data_ptr() != array.untyped_storage().data_ptr():
        return operand
    return operand.clone()


_ROW = 256
"""How many squares are added in a row: so few keep precision even if equal, and rows are read as fast as memory is."""
_SHORT = 2**11
"""Up to how many entries a copy in double precision takes no longer than norms of rows."""
_SMALL = 2**14
"""Up to how many entries it is faster to copy arrays into one than to look at each."""
_KEPT = 2**22
"""Of how many entries, about, norms of rows are kept before these are added: the memory for them is limited."""


def _rows(flat: torch.Tensor) -> list[torch.Tensor]:
    """Return vectors of the same norm together, which are short: the norms of rows, and the entries that are left."""
    if flat.numel() < _SHORT:
        return [flat]
    whole = flat.numel() - flat.numel() % _ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    return [norms] if whole == flat.numel() else [norms, flat[whole:].clone()]  # a view would keep all of it


def _squares_here(arrays: list[torch.Tensor]) -> Any:
    """Return the sum of squares as a scalar, from memory that the CPU can read."""
    dtype, sizes = arrays[0].dtype, [array.numel() for array in arrays]
    if dtype is not torch.bfloat16 and few(arrays, sum(sizes)):
        return squares([(array.detach() if array.requires_grad else array).numpy() for array in arrays])
    wide = dtype if dtype is torch.float64 else torch.float32
    total, parts, entries = 0.0, [], 0
    for flat in _vectors(arrays, wide):
        if flat is None:
            return None
        parts += _rows(flat)
        entries += flat.numel()
        if entries > _KEPT:
            total += _dot(parts)
            parts, entries = [], 0
        del flat  # before the next one is made
    return _SCALARS[wide](total + _dot(parts) if parts else total)


def _vectors(arrays: list[torch.Tensor], wide: torch.dtype) -> Iterator[torch.Tensor | None]:
    """Yield the entries of arrays in pieces, small arrays together; ``None`` for one that does not lie in a row."""
    small: list[torch.Tensor] = []
    entries = 0
    for array in arrays:
        size = array.numel()
        if size > _SMALL:
            flat = _flat(array)
            if flat is None:
                yield None
            elif array.dtype is wide:
                yield from flat.split(_KEPT) if size > _KEPT else (flat,)
            else:
                yield from (piece.to(wide) for piece in flat.split(PIECE))
            continue
        if entries + size > PIECE:
            yield torch.cat(small).to(wide)
            small, entries = [], 0
        small.append(array if array.ndim == 1 else array.reshape(-1))
        entries += size
    if small:
        yield torch.cat(small).to(wide)


def _dot(parts: list[torch.Tensor]) -> float:
    """Return the sum of squares of vectors."""
    rows = (torch.cat(parts) if len(parts) > 1 else parts[0]).double()
    return float(torch.dot(rows, rows))


def _squares_in_double(arrays: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the sum of squares in double precision, to which a compiler converts each entry where it is read."""
    if any(array.dtype not in _SINGLE or array.device.type == "mps" for array in arrays):  # has no doubles
        return None
    return torch.stack([array.float().double().square().sum() for array in arrays]).sum()


def _squares_elsewhere(arrays: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares on an accelerator, in double precision: there is no second look at what overflowed."""
    narrow = arrays[0].device.type == "mps"  # has no doubles
    norms = torch.stack(torch._foreach_norm(arrays, 2, dtype=torch.float32 if narrow else torch.float64))  # noqa: SLF001
    return torch.dot(norms, norms)


def _flat(array: torch.Tensor) -> torch.Tensor | None:
    """Return a real array as a vector without a copy, ``None`` if it does not lie in a row."""
    if array.is_contiguous():
        return array.view(-1)
    ordered = _in_order(array)
    return ordered.view(-1) if ordered.is_contiguous() else None


def _in_order(array: torch.Tensor) -> torch.Tensor:
    """Return the array with its axes as they lie in memory."""
    return array.permute(sorted(range(array.ndim), key=array.stride, reverse=True))


class _Torch(Backend):
    output_axis = 0

    def plain(self, leaves: list[Any]) -> bool:
        for leaf in leaves:
            if type(leaf) is not torch.Tensor or leaf.dtype not in _FLOATS or leaf.layout is not torch.strided:
                return False
        return True

    def apart(self, leaves: list[Any]) -> bool:
        if self.traced(leaves[0]):
            return False
        spans = []
        for leaf in leaves:
            if leaf.requires_grad or not leaf.is_contiguous() or leaf.is_inference():
                return False
            start = leaf.data_ptr()
            spans.append((start, start + leaf.nbytes))
        spans.sort()
        return all([one[1] <= two[0] for one, two in pairwise(spans)])

    def number(self, array: Array) -> Any:
        if array.ndim or not self.readable(array) or _recorded(array):
            return None
        return _SCALARS.get(array.dtype, np.float64)(array.item())

    def array_of(self, number: Any, like: Array) -> Array:
        array = torch.scalar_tensor(number.item(), dtype=_DTYPES[number.dtype.char], device=_CPU)
        return array if like.is_cpu else array.to(like.device)

    def squares(self, arrays: list[Array]) -> Array | None:
        first = arrays[0]
        if self.traced(first):
            return _squares_in_double(arrays)
        dtype, cpu = first.dtype, first.is_cpu
        if dtype.is_complex or _in_forward_mode():
            return None
        recording = torch.is_grad_enabled()
        for array in arrays:
            if array.dtype is not dtype or array.is_cpu is not cpu or array.is_neg():
                return None
            if recording and array.requires_grad:
                return None
        if not self.readable(first):
            return None if len({array.device for array in arrays}) > 1 else _squares_elsewhere(arrays)
        return _squares_here(arrays)

    def scaled(self, arrays: list[Array], factor: Any, *, in_place: bool) -> list[Array] | None:
        if self.traced(arrays[0]):
            return None
        if isinstance(factor, np.generic):
            wide = torch.float64 if any([array.dtype in _DOUBLE for array in arrays]) else torch.float32
            factor = torch.scalar_tensor(factor.item(), dtype=wide, device=_CPU)
        elif factor.ndim or any(map(_recorded, (factor, *arrays))):
            return None
        if not all([array.is_cpu for array in arrays]):
            if len({array.device for array in arrays}) > 1:
                return None
            factor = factor.to(arrays[0].device)
        if not in_place:
            new = torch._foreach_mul(arrays, factor)  # noqa: SLF001
            # 0-d ones have become as wide as the factor.
            return [one.to(old.dtype) for one, old in zip(new, arrays, strict=True)]
        if any([array.is_neg() or array.is_conj() for array in arrays]):
            return None
        with torch.no_grad():
            torch._foreach_mul_(arrays, factor)
        return arrays

    def is_array(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dtype is not torch.bool

    def advice(self, leaf: Any) -> str | None:
        if leaf.layout not in _LAYOUTS:
            return f"its layout, {leaf.layout}, cannot be clipped; convert it with to_sparse_csr() or to_sparse()"
        if not isinstance(leaf, torch.nn.Parameter):
            return None
        return "not a gradient; pass the gradients, [p.grad for p in parameters] (to clip the weights, p.detach())"

    def traced(self, array: Array) -> bool:  # noqa: ARG002 - it is the code that is traced
        return torch.compiler.is_compiling() or _in_transform()

    def readable(self, array: Array) -> bool:
        return not self.traced(array) and bool(array.is_cpu)

    def one_pass(self, norm: Array) -> bool:
        return not self.traced(norm) and not self.readable(norm)

    def large(self, array: Array) -> bool:
        recorded = _recorded(array)  # derivatives would keep every piece anyway
        return type(array) is torch.Tensor and not recorded and array.numel() > PIECE and not self.traced(array)

    def pieces(self, array: Array) -> Iterable[Array]:
        ordered = _in_order(array)
        flat = ordered.view(-1) if ordered.is_contiguous() else ordered
        return [flat[rows] for rows in row_slices(flat.shape)]

    def sum(self, array: Array, axes: tuple[int, ...] | None) -> Array:
        return self.xp.sum(array, axis=axes)

    def stored(self, leaf: Any) -> tuple[Array, Rebuild]:
        if leaf.layout is torch.sparse_coo:
            # Entries that occur often are summed in float32, not in half precision.
            merged = leaf if leaf.is_coalesced() else leaf.to(sum_dtype(self.xp, leaf.dtype)).coalesce()
            return merged.values(), lambda new: torch.sparse_coo_tensor(
                merged.indices(), new, leaf.shape, is_coalesced=True, check_invariants=False
            )
        if leaf.layout in _COMPRESSED:
            make, outer, inner = _COMPRESSED[leaf.layout]
            return leaf.values(), lambda new: make(outer(leaf), inner(leaf), new, leaf.shape, check_invariants=False)
        if is_dtensor(leaf):
            whole = dtensor.summed(leaf)
            return whole, unchanged if whole is leaf else partial(dtensor.unsummed, leaf)
        return super().stored(leaf)

    def own_part(
        self, array: Array, scale: Array | None, axes: tuple[int, ...] | None, op: Literal["sum", "max"]
    ) -> tuple[Array, Array | None, Callable[[Array], Array]]:
        return dtensor.own_part(array, scale, axes, op) if is_dtensor(array) else (array, scale, unchanged)

    def joined(self, parts: list[Array], op: Literal["sum", "max"]) -> list[Array]:
        return dtensor.joined(parts, op) if any([is_dtensor(part) for part in parts]) else parts

    def agreed(self, arrays: list[Array], flag: Array) -> Array:
        meshes = dtensor.meshes(arrays)
        return dtensor.agreed(meshes, flag) if meshes else flag

    def added(self, arrays: list[Array]) -> Callable[[Array], Array] | None:
        meshes = dtensor.meshes(arrays)
        return partial(dtensor.added, meshes) if meshes else None

    def replicated(self, array: Array, operand: Array) -> Array:
        return dtensor.replicated(array, operand) if is_dtensor(array) and not is_dtensor(operand) else operand

    def why_fixed(self, leaf: Any) -> str | None:
        if leaf.requires_grad and leaf.is_leaf:
            return "a leaf that requires a gradient is a weight (pass w.grad, or w.detach() to clip the weights)"
        compiling = torch.compiler.is_compiling()  # which knows no inference mode
        if not compiling and leaf.is_inference() and not torch.is_inference_mode_enabled():
            return "a tensor made in inference mode can be changed only there"
        return None

    def memory(self, leaf: Any) -> Any:
        if is_dtensor(leaf):
            leaf = leaf.to_local()
        if type(leaf) is not torch.Tensor or self.traced(leaf):
            return None
        if leaf.layout is torch.strided:
            return np.asarray(_Memory(leaf))
        return np.asarray(_Memory(leaf._values() if leaf.layout is torch.sparse_coo else leaf.values()))  # noqa: SLF001

    def write(self, leaf: Any, array: Array, function: Callable[..., Array], *operands: Array) -> None:
        if is_dtensor(array):
            with torch.no_grad():
                self._write_own(leaf, array, function, *operands)
            return
        with torch.no_grad():
            if self.large(array) and not any(operand.ndim for operand in operands):
                for piece in self.pieces(array):
                    piece.copy_(function(piece, *operands))
            else:
                operands = tuple(_apart(operand, array).expand(array.shape) for operand in operands)
                for rows in row_slices(array.shape) if self.large(array) else [...]:
                    array[rows].copy_(function(array[rows], *(operand[rows] for operand in operands)))
            if leaf.layout is torch.sparse_coo and not leaf.is_coalesced():
                leaf.copy_(self.stored(leaf)[1](array.to(leaf.dtype)))

    def _write_own(self, leaf: Any, array: Any, function: Callable[..., Array], *operands: Array) -> None:
        here = array.to_local()
        self.write(here, here, function, *[dtensor.own_operand(array, operand) for operand in operands])
        if leaf is not array:
            leaf.to_local().copy_(dtensor.unsummed(leaf, array).to_local())

    def cond(self, ok: Array, usual: Callable[[], list[Array]], rare: Callable[[], list[Array]]) -> list[Array]:
        if torch.compiler.is_compiling() and not _in_transform():  # torch.cond cannot be transformed
            return list(torch.cond(ok, lambda: tuple(usual()), lambda: tuple(rare())))
        return super().cond(ok, usual, rare)

    def detached(self, array: Array) -> Array:
        return array.detach()

    def to_device_of(self, other: Array, array: Array) -> Array:
        return array.to(other.device)

    def quiet(self) -> AbstractContextManager[Any]:
        return nullcontext() if torch.compiler.is_compiling() else super().quiet()


def _recorded(array: torch.Tensor) -> bool:
    """Whether derivatives with respect to the array are being worked out."""
    return _in_forward_mode() or (array.requires_grad and torch.is_grad_enabled())


def _in_forward_mode() -> bool:
    return bool(forward_ad._current_level >= 0)  # noqa: SLF001 - torch has no public question


def _in_transform() -> bool:
    """Whether ``torch.func`` is transforming the caller: then a value may stand for many."""
    return bool(torch._C._functorch.get_dynamic_layer_stack_depth())  # noqa: SLF001 - torch has no public question


BACKEND = _Torch(namespace)
