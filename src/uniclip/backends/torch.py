# SPDX-License-Identifier: MIT
"""PyTorch tensors, dense and sparse, eager, compiled and under ``torch.func``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from array_api_compat import torch as compat

from uniclip.backends import dtensor
from uniclip.backends.base import PIECE, Array, Backend, Rebuild, both, row_slices, sum_dtype, unchanged
from uniclip.backends.dtensor import is_dtensor
from uniclip.backends.host import squares_along
from uniclip.backends.torch_modes import (
    at_home,
    in_forward_mode,
    in_transform,
    one_for_all,
    recorded,
    tracing,
    valueless,
)
from uniclip.backends.torch_sums import (
    SINGLE,
    in_order,
    squares_along_elsewhere,
    squares_elsewhere,
    squares_here,
    squares_in_double,
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

_COMPRESSED = {
    torch.sparse_csr: (torch.sparse_csr_tensor, torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.sparse_csc_tensor, torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}
_TENSOR, _TENSOR_OR_PARAMETER = {torch.Tensor}, {torch.Tensor, torch.nn.Parameter}
_HALVES = {torch.float16, torch.bfloat16}
_DOUBLE = {torch.float64, torch.complex128}
_FLOATS = {*SINGLE, *_DOUBLE, torch.complex64}
_CPU = torch.device("cpu")
_REAL = {torch.float32, torch.float64}
_VIEWED = {torch.float32, torch.float64, torch.bool, torch.int32, torch.int64}
"""The dtypes of values computed from norms."""
_STORED = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
"""Storage formats, with which PyTorch does not compute: they are converted to float32."""
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_DTYPES_TAKEN = {*_FLOATS, *_STORED, *_INTEGERS, torch.complex32}
_LAYOUTS = {torch.strided, torch.sparse_coo, *_COMPRESSED}
_UNFIT: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (lambda x: isinstance(x, torch.nn.parameter.UninitializedTensorMixin), "it has no shape yet; run the model once"),
    (lambda x: isinstance(x, torch.masked.MaskedTensor), "what masked entries count is not known; use to_tensor(0.0)"),
    (lambda x: x.layout is torch.jagged, "it holds rows of several lengths; use values()"),
    (lambda x: x.is_nested, "it holds tensors of several shapes; use unbind()"),
    (lambda x: x.layout is torch._mkldnn, "its layout is opaque; use to_dense()"),  # noqa: SLF001
    (
        lambda x: x.layout not in _LAYOUTS,
        "its layout, {0.layout}, cannot be clipped; use to_sparse_csr() or to_sparse()",
    ),
    (lambda x: x.is_quantized, "it is quantized; use dequantize()"),
    (lambda x: x.dtype not in _DTYPES_TAKEN, "PyTorch does not calculate with {0.dtype}; use to(torch.float32)"),
]
"""Kinds of tensors that cannot be clipped, why, and what to convert them to."""


class _Memory:
    """A tensor's memory as NumPy sees it, for its address only; the contents are never read."""

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
    """Return the operand, copied if it is another view of the array to change."""
    if torch.compiler.is_compiling():  # it reads before it writes
        return operand
    # The memory of subclasses and of traced tensors is unknown.
    unknown = type(array) is not torch.Tensor or type(operand) is not torch.Tensor or tracing()
    same = unknown or operand.untyped_storage().data_ptr() == array.untyped_storage().data_ptr()
    return operand.clone() if same else operand


def _operands(arrays: list[torch.Tensor], factors: Sequence[Any]) -> Any:
    """Return factors as ``torch._foreach_mul`` takes them, a single one if all arrays have the same."""
    first = factors[0]
    tensors = isinstance(first, torch.Tensor)
    same = all([one is first if tensors else one == first for one in factors]) and not (tensors and first.ndim)
    if isinstance(first, float) and any([array.dtype in _HALVES for array in arrays]):
        factors = torch.tensor(factors, dtype=torch.float64).unbind()  # Python numbers are narrowed first
    return factors[0] if same else list(factors)


def groups_of(all_reduce: Any) -> list[Any] | None:
    """Return the process groups of a group or a mesh, ``None`` for anything else."""
    if not torch.distributed.is_available():
        return None
    if isinstance(all_reduce, torch.distributed.ProcessGroup):
        return [all_reduce]
    mesh = sys.modules.get("torch.distributed.device_mesh")
    if mesh is not None and isinstance(all_reduce, mesh.DeviceMesh):
        return list(all_reduce.get_all_groups())
    return None


def _all_reduce(groups: Sequence[Any], array: Array, op: Literal["sum", "max"]) -> Array:
    """Return a new array, reduced over process groups one after the other."""
    operation = torch.distributed.ReduceOp.SUM if op == "sum" else torch.distributed.ReduceOp.MAX
    array = array.clone()
    for group in groups:
        torch.distributed.all_reduce(array, operation, group=group)
    return array


class _Torch(Backend):
    output_axis = 0
    closes_over_symbols = False
    joins_by = "a process group, a device mesh, or a function of (array, op)"

    def plain(self, leaves: list[Any], *, gradient: bool = True) -> bool:
        kinds = _TENSOR if gradient else _TENSOR_OR_PARAMETER
        for leaf in leaves:
            one = leaf
            if type(leaf) not in kinds:
                one = self._inside(leaf, gradient=gradient)
                if type(one) is not torch.Tensor:
                    return False
            if one.dtype not in _FLOATS or one.layout is not torch.strided or one.is_nested:
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
        for leaf in self.local(leaves)[0]:
            if leaf.requires_grad or not leaf.is_contiguous() or leaf.is_inference():
                return False
            start = leaf.data_ptr()
            spans.append((start, start + leaf.nbytes))
        spans.sort()
        return all([one[1] <= two[0] for one, two in pairwise(spans)])

    def viewed(self, array: Array) -> np.ndarray[Any, Any] | None:
        if tracing() or type(array) is not torch.Tensor or array.dtype not in _VIEWED:
            return None
        if not array.is_cpu or recorded(array):
            return None
        return np.asarray((array.detach() if array.requires_grad else array).numpy())

    def device(self, array: Array) -> Any:
        return _CPU if array is None else array.device

    def from_host(self, array: np.ndarray[Any, Any], device: Any) -> Array:
        here = torch.from_numpy(array) if array.flags.writeable else torch.from_numpy(array.copy())
        return here if device == _CPU else here.to(device)

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        return np.asarray(array.detach().cpu().numpy())

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

    def fetched(self, arrays: list[Array]) -> list[np.ndarray[Any, Any]]:
        found: list[Any] = [None] * len(arrays)
        for numbers in _by_device(arrays):
            flat = torch.cat([arrays[number].detach().reshape(-1) for number in numbers]).cpu()
            flat = flat if flat.dtype is not torch.bfloat16 else flat.float()
            ends = np.cumsum([arrays[number].numel() for number in numbers])[:-1]
            for number, piece in zip(numbers, np.split(flat.numpy(), ends), strict=True):
                found[number] = piece.reshape(arrays[number].shape)
        return found

    def process(self) -> int:
        runs = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_rank() if runs else 0

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
            return list(map(squares_along, [array.detach().numpy() for array in arrays], axes))
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
            return [one.to(old.dtype) for one, old in zip(new, arrays, strict=True)]
        if any([array.is_neg() or array.is_conj() for array in arrays]):
            return None
        with torch.no_grad():
            torch._foreach_mul_(arrays, by)
        return arrays

    def is_array(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dtype is not torch.bool

    def unfit(self, leaf: Any, *, gradient: bool) -> str | None:
        for holds, why in _UNFIT:
            if holds(leaf):
                return why.format(leaf)
        if not (gradient and isinstance(leaf, torch.nn.Parameter)):
            return None
        return "not a gradient; pass the gradients, [p.grad for p in parameters] (to clip the weights, p.detach())"

    def traced(self, array: Array) -> bool:
        return tracing() or valueless(array)

    def readable(self, array: Array) -> bool:
        return not self.traced(array) and bool(array.is_cpu)

    def one_pass(self, norm: Array) -> bool:
        return not tracing() and not norm.is_cpu

    def large(self, array: Array) -> bool:
        if type(array) is not torch.Tensor or self.traced(array):  # whose size may be symbolic
            return False
        return array.numel() > PIECE and not recorded(array)  # derivatives would keep every piece anyway

    def pieces(self, array: Array) -> Iterable[Array]:
        ordered = in_order(array)
        flat = ordered.view(-1) if ordered.is_contiguous() else ordered
        return [flat[rows] for rows in row_slices(flat.shape)]

    def sum(self, array: Array, axes: tuple[int, ...] | None) -> Array:
        return self.xp.sum(array, axis=axes)

    def sparse(self, leaf: Any) -> bool:
        return leaf.layout is not torch.strided

    def stored(self, leaf: Any) -> tuple[Array, Rebuild]:
        if leaf.dtype in _STORED:
            array, rebuild = self.stored(leaf.to(torch.float32))
            return array, lambda new: rebuild(new).to(leaf.dtype)
        if leaf.layout is torch.sparse_coo:
            # Repeated entries are summed in float32, not in half precision.
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

    def local(self, arrays: list[Array]) -> tuple[list[Array], list[Any] | None]:
        if not any([type(array) is not torch.Tensor and is_dtensor(array) for array in arrays]):
            return arrays, None
        parts = [dtensor.part_of(array) if is_dtensor(array) else None for array in arrays]
        return [dtensor.local_of(array) if part else array for array, part in zip(arrays, parts, strict=True)], parts

    def whole(self, like: Array, local: Array) -> Array:
        return dtensor.like_local(like, local) if is_dtensor(like) else local

    def summed_whole(self, like: Array, local: Array) -> Array:
        return dtensor.summed_first(like, local)

    def join_parts(self, owner: Any, array: Array, op: Literal["sum", "max"]) -> Array:
        if tracing() or recorded(array):
            return dtensor.joined(owner, array, op)
        return _all_reduce([group for group in owner.get_all_groups() if group.size() > 1], array, op)

    def covering(self, owners: list[Any]) -> list[Any]:
        chosen: list[Any] = []
        for owner in sorted(owners, key=lambda one: -one.size()):
            if not any([dtensor.processes_of(owner) <= dtensor.processes_of(one) for one in chosen]):
                chosen.append(owner)
        return chosen

    def reducer(self, all_reduce: Any) -> Callable[[Array, Literal["sum", "max"]], Array]:
        groups = groups_of(all_reduce)
        return super().reducer(all_reduce) if groups is None else partial(_all_reduce, groups)

    def joined_dtype(self, dtype: Any, array: Array) -> Any:
        narrow = array is not None and array.device.type == "mps"  # has no float64
        return dtype if narrow else torch.float64

    def replicated(self, array: Array, operand: Array) -> Array:
        if is_dtensor(operand):
            return operand
        if operand.ndim or array.is_meta:  # every other device accepts 0-d CPU tensors
            operand = operand.to(array.device)
        return dtensor.replicated(array, operand) if is_dtensor(array) else operand

    def why_fixed(self, leaf: Any) -> str | None:
        if leaf.requires_grad and leaf.is_leaf:
            return "a leaf that requires a gradient is a weight (pass w.grad, or w.detach() to clip the weights)"
        if torch.compiler.is_compiling():  # which knows neither of the following
            return None
        if leaf.is_inference() and not torch.is_inference_mode_enabled():
            return "a tensor made in inference mode can be changed only there"
        if in_transform() and one_for_all(leaf):
            return "torch.func.vmap maps over many examples, and it is one for all of them"
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
        with torch.no_grad():
            if is_dtensor(array):  # a function of the whole tensor
                self.write(leaf, array.to_local(), function, *[dtensor.own_operand(array, one) for one in operands])
                return
            if self.large(array) and not any(operand.ndim for operand in operands):
                for piece in self.pieces(array):
                    piece.copy_(function(piece, *operands))
            else:
                operands = tuple(_apart(operand, array).expand(array.shape) for operand in operands)
                for rows in row_slices(array.shape) if self.large(array) else [...]:
                    array[rows].copy_(function(array[rows], *(operand[rows] for operand in operands)))
            if is_dtensor(leaf):
                if dtensor.is_partial(leaf):
                    leaf.to_local().copy_(dtensor.first_of(leaf, array))
            elif leaf.dtype in _STORED or (leaf.layout is torch.sparse_coo and not leaf.is_coalesced()):
                leaf.copy_(self.stored(leaf)[1](array.to(leaf.dtype)))

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
