# SPDX-License-Identifier: MIT
"""Triton kernels that measure and change many tensors in one launch.

PyTorch's functions of lists start many kernels, and one for each tensor if dtypes differ. Here one
launch covers all tensors of a dtype. The host makes a *work table* with one row of integers for
each program (CUDA: thread block), which is the stretch of a tensor that the program works on, and
an array of the tensors' addresses. A kernel reads its row, follows the address, and works.

Read it in this order:

1. **Kernels.** Sums of squares (of chunks of tensors, of short rows), norm and factor, products,
   bounds. Many GPUs have 32 to 64 times as many units for float32 as for float64, so up to 16,384
   squares are added in float32, and these sums in float64; squares out of range are computed again.
   The order is fixed: the same input has the same bits. Nothing is written where nothing
   changes: a product by 1 in place returns before it reads its tensor.
2. **Work tables**, which depend on shapes and dtypes, and **addresses**, which depend on memory.
   Both are sent to the device without a wait, and cached.
3. **Launches.** All kernels that write are compiled before the first one starts, so that a kernel
   that cannot be compiled leaves no tensor half changed. There is one warning, and the caller uses
   PyTorch's own functions.
4. **The backend's functions**: `clip`, `sums`, `norms`, `scale` and `bound`. Each returns ``None``
   for unsupported tensors, before anything is written.

CUDA graphs: a step must have run once before it is captured, since nothing is compiled and no table
is sent during a capture. Tables and addresses that a graph reads stay alive and unchanged.

`uniclip.backends.torch.gpus` decides where this module is used.
"""

# No `from __future__ import annotations`: Triton reads the annotations of kernels.
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version
from triton.errors import TritonError

from uniclip._types import Axes
from uniclip.backends.arithmetic import in_groups
from uniclip.backends.base import Backend, Products, Terms, stack_terms, take
from uniclip.backends.torch import private
from uniclip.backends.torch.gpus import give_up
from uniclip.backends.torch.one_norm import are_dense

_Vector: TypeAlias = np.ndarray[Any, Any]

DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}
"""The dtypes of tensors that the kernels take."""

# Launch parameters, tuned on an H200. A program takes a CHUNK, one BLOCK after another.
CHUNK = 2**14
SUM_PARAMETERS = {"CHUNK": CHUNK, "BLOCK": 4096, "num_warps": 16}
SCALE_PARAMETERS = {"CHUNK": CHUNK, "BLOCK": 4096, "num_warps": 16}
ROWS_PARAMETERS = {"ROWS": 8, "COLUMNS": 256, "num_warps": 4}
JOIN_PARAMETERS = {"BLOCK": 1024, "num_warps": 4}
ROOT_PARAMETERS = {"BLOCK": 1024, "num_warps": 4}
NORM_PARAMETERS = {"BLOCK": 8192, "num_warps": 16}

_SHORT_ROW = 2**13
"""The length of rows up to which a program measures ``ROWS`` of them; longer ones have chunks."""
_LONG_VECTOR = 2**20
"""The length of vectors up to which they may be rows of one element, as biases among matrices."""
_CACHE_SIZE = 64
"""The number of work tables, and the number of lists of addresses, that are cached."""
_RESERVED_ADDRESSES = 2**16
"""The number of addresses for which memory is reserved, so that graphs can be captured."""

# The columns of a work table. For chunks: elements START to STOP of the leaf whose address has the
# number LEAF. SUM is the number of the sum of squares, NORM that of the norm and its factor.
LEAF: tl.constexpr = tl.constexpr(0)
START: tl.constexpr = tl.constexpr(1)
STOP: tl.constexpr = tl.constexpr(2)
SUM: tl.constexpr = tl.constexpr(3)
NORM: tl.constexpr = tl.constexpr(4)

# For tiles: ROWS rows of a leaf that has HEIGHT rows of WIDTH elements. The norms have consecutive
# numbers, and FIRST_NORM is that of the leaf's row 0.
FIRST_ROW: tl.constexpr = tl.constexpr(1)
HEIGHT: tl.constexpr = tl.constexpr(2)
WIDTH: tl.constexpr = tl.constexpr(3)
FIRST_NORM: tl.constexpr = tl.constexpr(4)
COLUMNS_OF_TABLE: tl.constexpr = tl.constexpr(5)

# The columns of the table of norms: the partial sums FROM to UNTIL are those of norm number RESULT.
FROM: tl.constexpr = tl.constexpr(0)
UNTIL: tl.constexpr = tl.constexpr(1)
RESULT: tl.constexpr = tl.constexpr(2)
COLUMNS_OF_NORMS: tl.constexpr = tl.constexpr(3)


# --- 1. Kernels.


@triton.jit
def _row_of_program(table, COLUMNS: tl.constexpr):
    # In int64, as all arithmetic of pointers: a table may have more than 2³¹ bytes.
    return table + tl.program_id(0).to(tl.int64) * COLUMNS


@triton.jit
def _aligned(address, DTYPE: tl.constexpr):
    # A thread reads 16 bytes at a time if the compiler can assume that they are aligned. The hint
    # belongs to an operation, here the cast: it must not be shared with code for other addresses.
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _times_16(number):
    # The compiler infers that the result is a multiple of 16.
    return number // 16 * 16


@triton.jit
def _scale_of(total):
    # Squares in float32 overflow for numbers above 2⁶⁴, and lose bits below 2⁻⁶³. A sum that may
    # have such squares is computed again, from numbers times a power of two, which is exact. From
    # 2⁻⁸⁰ on, squares that lose bits are less than 2⁻³⁰ of the sum, and an overflow gives ∞, whose
    # exponent is 1024. Zeros are read again, too: they look like squares that underflowed.
    # Exponents are compared as integers, since many GPUs have few units for float64.
    exponent = (total.to(tl.int64, bitcast=True) >> 52) - 1023
    return tl.where(exponent < -80, 2.0**96, tl.where(exponent > 110, 2.0**-96, 1.0))


@triton.jit
def _unscaled(total, scale):
    # Undo the square of the scale, exactly. A float64 division takes about 30 instructions.
    return total * tl.where(scale > 1, 2.0**-192, 2.0**192)


@triton.jit
def _sum_chunk(chunk, length, scale, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    wide: tl.constexpr = tl.float64 if chunk.dtype.element_ty == tl.float64 else tl.float32
    squares = tl.zeros((BLOCK,), wide)
    for first in range(0, CHUNK, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(chunk + at, mask=at < length, other=0.0).to(wide) * scale
        squares += x * x

    # A warp has 128 float32 elements of a block, four in each thread. With four blocks and the
    # square itself, no square is rounded more than 12 times, so norms are accurate to 5e-7. Norms
    # in half precision need 2e-6, so a whole chunk is added in float32.
    group: tl.constexpr = 128 if chunk.dtype.element_ty == tl.float32 else BLOCK
    sums = tl.sum(tl.reshape(squares, (BLOCK // group, group)), 1)
    return tl.sum(sums.to(tl.float64), 0)


@triton.jit(do_not_specialize=["table", "addresses", "partial_sums"])
def sum_chunks(
    table, addresses, partial_sums, DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the sum of squares of each chunk."""
    row = _row_of_program(table, COLUMNS_OF_TABLE)
    start = tl.load(row + START)
    length = tl.load(row + STOP) - start
    address = tl.load(addresses + tl.load(row + LEAF))
    chunk = address.to(tl.pointer_type(DTYPE)) + start

    if (address | start | length) % 16 == 0:
        aligned = _aligned(address, DTYPE) + _times_16(start)
        total = _sum_chunk(aligned, _times_16(length), 1.0, CHUNK, BLOCK)
    else:
        total = _sum_chunk(chunk, length, 1.0, CHUNK, BLOCK)
    # Squares of float16 numbers are in range, and those of float64 numbers are float64.
    if DTYPE == tl.float32 or DTYPE == tl.bfloat16:  # noqa: PLR1714, SIM300
        scale = _scale_of(total)
        if scale != 1:
            total = _unscaled(_sum_chunk(chunk, length, scale, CHUNK, BLOCK), scale)
    tl.store(partial_sums + tl.load(row + SUM), total)


@triton.jit
def _sum_rows(leaf, rows, height, width, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    wide: tl.constexpr = tl.float64 if leaf.dtype.element_ty == tl.float64 else tl.float32
    group: tl.constexpr = 128 if leaf.dtype.element_ty == tl.float32 else COLUMNS
    total = tl.zeros((ROWS, COLUMNS // group), tl.float64)
    for start in range(0, width, 4 * COLUMNS):
        squares = tl.zeros((ROWS, COLUMNS), wide)
        for first in range(start, tl.minimum(start + 4 * COLUMNS, width), COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            inside = (rows[:, None] < height) & (columns[None, :] < width)
            x = tl.load(leaf + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
            x = x.to(wide) * scale
            squares += x * x
        sums = tl.sum(tl.reshape(squares, (ROWS, COLUMNS // group, group)), 2)
        total += sums.to(tl.float64)
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=["table", "addresses", "sums"])
def sum_rows(
    table, addresses, sums, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Store the sums of squares of some short rows."""
    tile = _row_of_program(table, COLUMNS_OF_TABLE)
    height = tl.load(tile + HEIGHT)
    width = tl.load(tile + WIDTH).to(tl.int32)
    rows = tl.load(tile + FIRST_ROW) + tl.arange(0, ROWS)
    address = tl.load(addresses + tl.load(tile + LEAF))
    leaf = address.to(tl.pointer_type(DTYPE))

    if (address | width) % 16 == 0:
        aligned = _aligned(address, DTYPE)
        total = _sum_rows(aligned, rows, height, _times_16(width), 1.0, ROWS, COLUMNS)
    else:
        total = _sum_rows(leaf, rows, height, width, 1.0, ROWS, COLUMNS)
    if DTYPE == tl.float32 or DTYPE == tl.bfloat16:  # noqa: PLR1714, SIM300
        scale = tl.where(rows < height, _scale_of(total), 1.0)
        if tl.max((scale != 1).to(tl.int32), 0) > 0:
            scaled = _sum_rows(leaf, rows, height, width, scale[:, None], ROWS, COLUMNS)
            total = tl.where(scale == 1, total, _unscaled(scaled, scale))
    tl.store(sums + tl.load(tile + FIRST_NORM) + rows, total, mask=rows < height)


@triton.jit
def _add_up(partial_sums, first, last, BLOCK: tl.constexpr):
    at = first + tl.arange(0, BLOCK)
    total = tl.load(partial_sums + at, mask=at < last, other=0.0)
    for start in range(first + BLOCK, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(partial_sums + at, mask=at < last, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["norms", "partial_sums", "sums"])
def join_sums(norms, partial_sums, sums, BLOCK: tl.constexpr):
    """Add up the partial sums of each norm."""
    row = _row_of_program(norms, COLUMNS_OF_NORMS)
    total = _add_up(partial_sums, tl.load(row + FROM), tl.load(row + UNTIL), BLOCK)
    tl.store(sums + tl.load(row + RESULT), total)


@triton.jit
def _root_of(total):
    # The second is NaN if the norm is ∞, too.
    norm = tl.sqrt(total).to(tl.float32)
    return norm, norm + (norm - norm)


@triton.jit(do_not_specialize=["norms", "partial_sums", "roots", "count"])
def join_norms(norms, partial_sums, roots, count, BLOCK: tl.constexpr):
    """Add up the partial sums of each norm, and store the roots; see `find_norms`."""
    row = _row_of_program(norms, COLUMNS_OF_NORMS)
    total = _add_up(partial_sums, tl.load(row + FROM), tl.load(row + UNTIL), BLOCK)
    norm, finite_norm = _root_of(total)
    at = tl.load(row + RESULT)
    tl.store(roots + at, norm)
    tl.store(roots + count + at, finite_norm)


@triton.jit(do_not_specialize=["sums", "roots", "count"])
def find_norms(sums, roots, count, BLOCK: tl.constexpr):
    """Store the roots of sums, and behind them the same with NaN where they are not finite."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(sums + at, mask=at < count, other=0.0)
    norm, finite_norm = _root_of(total)
    tl.store(roots + at, norm, mask=at < count)
    tl.store(roots + count + at, finite_norm, mask=at < count)


@triton.jit(do_not_specialize=["partial_sums", "count", "limit", "factor_and_norm"])
def find_factor(partial_sums, count, limit, factor_and_norm, BLOCK: tl.constexpr):
    """Store the factor min(1, limit / norm) and the norm of all partial sums."""
    norm = tl.sqrt(_add_up(partial_sums, 0, count, BLOCK)).to(tl.float32)
    # As `uniclip.curves.hard`. div_rn rounds as PyTorch does. The operator is an approximation.
    factor = tl.where(norm <= limit, 1.0, tl.div_rn(limit, norm))
    # NaN if the norm is ∞, too, as by `uniclip._core.norm_space.zero_or_nan`.
    tl.store(factor_and_norm, factor + (norm - norm))
    tl.store(factor_and_norm + 1, norm)


@triton.jit
def _multiply(x, factor, ZERO: tl.constexpr):
    # The product by 1 may be another number: some versions of Triton flush subnormal ones to 0.
    product = tl.where(factor == 1, x, x * factor)
    # Also NaN · 0 is 0.
    if ZERO:
        product = tl.where(factor == 0, 0.0, product)
    return product


@triton.jit
def _scale_chunk(
    chunk, out, length, factor, ZERO: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    for first in range(0, CHUNK, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(chunk + at, mask=at < length, other=0.0).to(factor.dtype)
        new = _multiply(x, factor, ZERO).to(out.dtype.element_ty)
        tl.store(out + at, new, mask=at < length)


@triton.jit(do_not_specialize=["table", "addresses", "to_outputs", "factors"])
def scale_chunks(
    table, addresses, to_outputs, factors, DTYPE: tl.constexpr, ZERO: tl.constexpr,
    ONE_NORM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply chunks by the factors of their norms.

    The address of an output is ``to_outputs`` behind that of its tensor; 0 stands for in place.
    """
    row = _row_of_program(table, COLUMNS_OF_TABLE)
    # Within the limit, a program only waits for two loads: the number of its norm, and then the
    # factor. One norm has number 0, which saves a load.
    norm = 0 if ONE_NORM else tl.load(row + NORM)
    # Products of numbers up to float32 are computed in float32.
    wide: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32  # noqa: SIM300
    factor = tl.load(factors + norm).to(wide)
    # NaN is not 1.
    if (factor != 1) | (to_outputs > 0):
        start = tl.load(row + START)
        length = tl.load(row + STOP) - start
        leaf = tl.load(row + LEAF)
        address = tl.load(addresses + leaf)
        out_address = tl.load(addresses + to_outputs + leaf)

        if (address | out_address | start | length) % 16 == 0:
            chunk = _aligned(address, DTYPE) + _times_16(start)
            out = _aligned(out_address, DTYPE) + _times_16(start)
            _scale_chunk(chunk, out, _times_16(length), factor, ZERO, CHUNK, BLOCK)
        else:
            chunk = address.to(tl.pointer_type(DTYPE)) + start
            out = out_address.to(tl.pointer_type(DTYPE)) + start
            _scale_chunk(chunk, out, length, factor, ZERO, CHUNK, BLOCK)


@triton.jit
def _scale_rows(
    leaf, out, rows, height, width, factor,
    ZERO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    for first in range(0, width, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = (rows[:, None] < height) & (columns[None, :] < width)
        at = rows[:, None] * width + columns[None, :]
        x = tl.load(leaf + at, mask=inside, other=0.0).to(factor.dtype)
        new = _multiply(x, factor[:, None], ZERO).to(out.dtype.element_ty)
        tl.store(out + at, new, mask=inside)


@triton.jit(do_not_specialize=["table", "addresses", "to_outputs", "factors"])
def scale_rows(
    table, addresses, to_outputs, factors, DTYPE: tl.constexpr, ZERO: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply short rows by their factors; see `scale_chunks`."""
    tile = _row_of_program(table, COLUMNS_OF_TABLE)
    height = tl.load(tile + HEIGHT)
    rows = tl.load(tile + FIRST_ROW) + tl.arange(0, ROWS)
    wide: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32  # noqa: SIM300
    first_factor = factors + tl.load(tile + FIRST_NORM)
    factor = tl.load(first_factor + rows, mask=rows < height, other=1.0).to(wide)
    changed = tl.max((factor != 1).to(tl.int32), 0)
    if (changed > 0) | (to_outputs > 0):
        leaf_number = tl.load(tile + LEAF)
        width = tl.load(tile + WIDTH).to(tl.int32)
        address = tl.load(addresses + leaf_number)
        out_address = tl.load(addresses + to_outputs + leaf_number)

        if (address | out_address | width) % 16 == 0:
            leaf = _aligned(address, DTYPE)
            out = _aligned(out_address, DTYPE)
            width = _times_16(width)
            _scale_rows(leaf, out, rows, height, width, factor, ZERO, ROWS, COLUMNS)
        else:
            leaf = address.to(tl.pointer_type(DTYPE))
            out = out_address.to(tl.pointer_type(DTYPE))
            _scale_rows(leaf, out, rows, height, width, factor, ZERO, ROWS, COLUMNS)


@triton.jit
def _count_outside(chunk, length, low, high, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    outside = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, CHUNK, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(chunk + at, mask=at < length, other=0.0).to(tl.float32)
        outside += ((at < length) & ((x < low) | (x > high))).to(tl.int32)
    return tl.sum(outside, 0)


@triton.jit
def _bound_chunk(chunk, out, length, in_place, low, high, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    write = True
    if in_place:
        write = _count_outside(chunk, length, low, high, CHUNK, BLOCK) > 0
    if write:
        for first in range(0, CHUNK, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(chunk + at, mask=at < length, other=0.0).to(tl.float32)
            # NaN is neither below nor above.
            new = tl.where(x < low, low, tl.where(x > high, high, x))
            tl.store(out + at, new.to(out.dtype.element_ty), mask=at < length)


@triton.jit(do_not_specialize=["table", "addresses", "to_outputs", "low", "high"])
def bound_chunks(
    table, addresses, to_outputs, low, high, DTYPE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Clamp the elements of chunks between two numbers; see `scale_chunks`.

    In place a chunk is read first, and written as a whole if an element is outside. Storing single
    elements takes longer: 2 bytes at a time in half precision.
    """
    row = _row_of_program(table, COLUMNS_OF_TABLE)
    start = tl.load(row + START)
    length = tl.load(row + STOP) - start
    leaf = tl.load(row + LEAF)
    address = tl.load(addresses + leaf)
    out_address = tl.load(addresses + to_outputs + leaf)

    if (address | out_address | start | length) % 16 == 0:
        chunk = _aligned(address, DTYPE) + _times_16(start)
        out = _aligned(out_address, DTYPE) + _times_16(start)
        _bound_chunk(chunk, out, _times_16(length), to_outputs == 0, low, high, CHUNK, BLOCK)
    else:
        chunk = address.to(tl.pointer_type(DTYPE)) + start
        out = out_address.to(tl.pointer_type(DTYPE)) + start
        _bound_chunk(chunk, out, length, to_outputs == 0, low, high, CHUNK, BLOCK)


INTERPRETED = not isinstance(sum_chunks, triton.runtime.JITFunction)
"""Whether Triton's interpreter runs the kernels, on the CPU: for tests."""


# --- 2. Work tables and addresses.


class Part(NamedTuple):
    """The work on the tensors of one dtype by one kernel."""

    dtype: torch.dtype
    table: torch.Tensor
    """A row of integers for each program, on the device."""
    programs: int


class Work(NamedTuple):
    """The work of all programs, for tensors of some shapes and dtypes. It is never changed."""

    chunks: list[Part]
    """Whole tensors and long rows, by chunks."""
    tiles: list[Part]
    """Short rows."""
    norms: torch.Tensor
    """The range of the partial sums of each norm that has chunks, on the device."""
    norm_count: int
    sum_count: int
    """The number of partial sums of the chunks."""
    one_chunk_each: bool
    """Whether partial sum number n is all of norm number n."""


class _Sent(NamedTuple):
    """A work table that was sent on a stream, and the event after which it has arrived."""

    work: Work
    stream: int
    event: Any


_works: dict[Any, _Sent] = {}
_addresses: dict[Any, torch.Tensor] = {}
_captured: list[Any] = []
"""The memory that captured graphs read, which is never freed."""
_reserved: list[torch.Tensor] = []
"""At most one array of pinned memory, for the addresses that graphs keep."""
_compiled: set[Any] = set()
"""The kernels that are ready on a device, for arguments of some dtypes."""
_lock = threading.Lock()


_CLASSES = {torch.Tensor, torch.nn.Parameter}
_DTYPES = frozenset(DTYPES)


class Batch(NamedTuple):
    """Regular dense tensors of one device, and the state of that device."""

    arrays: Sequence[torch.Tensor]
    device: torch.device
    stream: int
    capturing: bool
    """Whether a CUDA graph is captured."""

    def new(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new vector on the device."""
        return self.arrays[0].new_empty(count, dtype=dtype)


def _batch_of(arrays: Sequence[torch.Tensor], *, checked: bool = False) -> Batch | None:
    """Return tensors as a batch, ``None`` if one is not a regular dense tensor of the device.

    ``checked`` skips that test, for tensors with dtypes that the kernels support.
    """
    device = arrays[0].device
    if not checked:
        if not (set(map(type, arrays)) <= _CLASSES and {a.dtype for a in arrays} <= _DTYPES):
            return None
        if not all([array.device == device for array in arrays]) or not are_dense(arrays):
            return None

    # Kernels are invisible to a dispatch mode, which may count or log operations.
    if private.dispatch_depth():
        return None

    if INTERPRETED:
        return Batch(arrays, device, 0, False)
    if device.type == "xpu":
        return Batch(arrays, device, private.xpu_stream(device.index), False)
    stream = private.cuda_stream(device.index)
    return Batch(arrays, device, stream, private.cuda_captures())


class Rows(NamedTuple):
    """Each tensor as ``heights`` rows of ``widths`` elements, which share a norm.

    ``heights`` is ``None`` if all tensors are one row each. ``first_norms`` are the numbers of the
    norms of their first rows, ``None`` if all tensors are parts of norm 0.
    """

    widths: tuple[int, ...]
    heights: tuple[int, ...] | None = None
    first_norms: tuple[int, ...] | None = None


def _work_of(batch: Batch, rows: Rows) -> Work | None:
    """Return the work table for a batch, ``None`` during a capture if it was not sent before."""
    dtypes = tuple([array.dtype for array in batch.arrays])
    key = rows, dtypes, batch.device
    sent = _works.get(key)

    # No table is sent during a capture, and the graph reads this one at each replay.
    if batch.capturing:
        if sent is None:
            return None
        _captured.append(sent)
        return sent.work

    if sent is None:
        sent = _Sent(_make_work(batch, rows, dtypes), batch.stream, _record_event(batch))
        # Shapes may change at every step, and each table takes memory of the device.
        with _lock:
            if len(_works) >= _CACHE_SIZE:
                _works.clear()
            _works[key] = sent
    elif sent.stream != batch.stream:
        _use_on_another_stream(sent, batch)
    return sent.work


def _record_event(batch: Batch) -> Any:
    """Return an event after everything that was sent to the device so far."""
    if INTERPRETED:
        return None
    event = getattr(torch, batch.device.type).Event()
    event.record()
    return event


def _use_on_another_stream(sent: _Sent, batch: Batch) -> None:
    """Make a stream wait for a table that was sent on another one, and keep its memory."""
    work = sent.work
    sent.event.wait()
    stream = getattr(torch, batch.device.type).current_stream(batch.device)
    # The allocator must not reuse the memory before this stream has read it.
    work.norms.record_stream(stream)
    for part in (*work.chunks, *work.tiles):
        part.table.record_stream(stream)


class _Tables:
    """The tables of chunks, tiles and norms while they are made, leaf by leaf."""

    def __init__(self) -> None:
        self.chunks: dict[torch.dtype, list[_Vector]] = {}
        self.tiles: dict[torch.dtype, list[_Vector]] = {}
        self.norms: list[_Vector] = [np.zeros((0, 3), np.int64)]
        self.sum_count = 0

    def add_tiles(
        self, leaf: int, dtype: torch.dtype, *, height: int, width: int, first_norm: int
    ) -> None:
        """Add the tiles of a leaf with short rows."""
        first_rows = np.arange(0, height, ROWS_PARAMETERS["ROWS"])
        tiles = _table(leaf, first_rows, height, width, first_norm)
        self.tiles.setdefault(dtype, []).append(tiles)

    def add_chunks(
        self, leaf: int, dtype: torch.dtype, *, height: int, width: int, first_norm: int
    ) -> None:
        """Add the chunks of each row of a leaf, one row after another."""
        in_row = np.arange(0, width, CHUNK)
        row_starts = np.arange(height)[:, None] * width
        starts = (row_starts + in_row).ravel()
        stops = (row_starts + np.minimum(in_row + CHUNK, width)).ravel()
        sums = self.sum_count + np.arange(len(starts))
        numbers = first_norm + np.arange(height)
        chunks = _table(leaf, starts, stops, sums, np.repeat(numbers, len(in_row)))
        self.chunks.setdefault(dtype, []).append(chunks)

        # One more leaf of the same norm.
        last = self.norms[-1]
        if height == 1 and len(last) and last[-1, RESULT.value] == first_norm:
            last[-1, UNTIL.value] += len(in_row)
        else:
            # A row without elements has a norm, too: the sum of no partial sums.
            first_sums = self.sum_count + np.arange(height) * len(in_row)
            self.norms.append(_table(first_sums, first_sums + len(in_row), numbers))
        self.sum_count += len(starts)


def _make_work(batch: Batch, rows: Rows, dtypes: tuple[torch.dtype, ...]) -> Work:
    """Make a work table, and send it to the device."""
    heights = rows.heights or (1,) * len(dtypes)
    first_norms = rows.first_norms or (0,) * len(dtypes)

    tables = _Tables()
    leaves = zip(rows.widths, heights, first_norms, dtypes, strict=True)
    for leaf, (width, height, first_norm, dtype) in enumerate(leaves):
        is_short = height > 1 and width <= _SHORT_ROW
        add = tables.add_tiles if is_short else tables.add_chunks
        add(leaf, dtype, height=height, width=width, first_norm=first_norm)

    norms = np.concatenate(tables.norms)
    starts, stops, numbers = norms.T
    return Work(
        _send_parts(batch, tables.chunks),
        _send_parts(batch, tables.tiles),
        _copy_to_device(batch, norms),
        len(norms),
        tables.sum_count,
        bool((starts == numbers).all() and (stops - starts == 1).all()),
    )


def _table(*columns: int | _Vector) -> _Vector:
    """Return integers, and vectors of them, as the columns of a table."""
    return np.stack(np.broadcast_arrays(*columns), 1).astype(np.int64)


def _send_parts(batch: Batch, by_dtype: dict[torch.dtype, list[_Vector]]) -> list[Part]:
    """Send the tables of each dtype as one."""
    parts = []
    for dtype, tables in by_dtype.items():
        table = np.concatenate(tables)
        if len(table):
            parts.append(Part(dtype, _copy_to_device(batch, table), len(table)))
    return parts


def _copy_to_device(batch: Batch, integers: _Vector | tuple[int, ...]) -> torch.Tensor:
    """Send integers to the device without a wait: from pinned memory."""
    host = torch.as_tensor(integers, dtype=torch.int64, device="cpu")
    if INTERPRETED:
        return host
    return host.pin_memory().to(batch.device, non_blocking=True)


def _send_addresses(batch: Batch, outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the addresses of tensors, followed by those of outputs, on the device.

    ``None`` during a capture for which no memory is reserved.
    """
    addresses = tuple(map(torch.Tensor.data_ptr, (*batch.arrays, *outputs)))
    if batch.capturing:
        return _send_addresses_of_graph(batch, addresses)

    # Addresses that were sent on another stream may not have arrived yet.
    key = addresses, batch.device, batch.stream
    sent = _addresses.get(key)
    if sent is None:
        sent = _copy_to_device(batch, addresses)
        with _lock:
            _reserve(len(addresses))
            if len(_addresses) >= _CACHE_SIZE:
                _addresses.clear()
            _addresses[key] = sent
    return sent


def _send_addresses_of_graph(batch: Batch, addresses: tuple[int, ...]) -> torch.Tensor | None:
    """Send addresses during a capture; the graph copies them from the host at each replay."""
    count = len(addresses)
    # Each graph reads its own part of the memory again at each replay.
    with _lock:
        if not _reserved or len(_reserved[0]) < count:
            return None
        host = _reserved[0][:count]
        _reserved[0] = _reserved[0][count:]
        _captured.append(host)
    host.copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
    return host.to(batch.device, non_blocking=True)


def _reserve(count: int) -> None:
    """Reserve pinned memory, which cannot be done during a capture."""
    if INTERPRETED or (_reserved and len(_reserved[0]) >= max(count, _RESERVED_ADDRESSES // 2)):
        return
    # One reservation has to last for several captures, and each uses up a part.
    size = max(4 * count, _RESERVED_ADDRESSES)
    _reserved[:] = [torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)]


# --- 3. Launches.


class Launch(NamedTuple):
    """A kernel, the number of its programs, and their arguments."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def variant(self, device: torch.device) -> tuple[Any, ...]:
        """Return a key of the compiled code, which does not depend on the values of arguments."""
        dtypes = [getattr(argument, "dtype", None) for argument in self.arguments]
        return self.kernel.fn.__name__, device, *dtypes, *self.constants.values()

    def compile(self) -> None:
        """Compile the kernel, and load it onto the device."""
        compiled = self.kernel.warmup(*self.arguments, grid=(self.programs,), **self.constants)
        # The property makes the launcher, by a C compiler.
        if not INTERPRETED:
            compiled.run  # noqa: B018

    def start(self) -> None:
        """Start the kernel on the current stream."""
        self.kernel[(self.programs,)](*self.arguments, **self.constants)


_COMPILE_ERRORS = (TritonError, ImportError, OSError, RuntimeError, subprocess.SubprocessError)
"""The errors of Triton if it cannot compile: no C compiler, no cache, a broken launcher."""


def _compile(batch: Batch, launches: Sequence[Launch]) -> bool:
    """Compile kernels that were not used before. Return whether all are ready.

    A capture compiles nothing.
    """
    variants = [launch.variant(batch.device) for launch in launches]
    missing = [number for number, variant in enumerate(variants) if variant not in _compiled]
    if missing and batch.capturing:
        return False
    for number in missing:
        try:
            launches[number].compile()
        except _COMPILE_ERRORS as error:
            give_up(batch.device, error)
            return False
        _compiled.add(variants[number])
    return True


@contextmanager
def _current_device(device: torch.device) -> Iterator[None]:
    """Make a device the current one, where Triton starts kernels."""
    if INTERPRETED or (device.type == "cuda" and private.cuda_device() == device.index):
        yield
        return
    with getattr(torch, device.type).device(device):
        yield


def _run_changes(
    batch: Batch,
    rows: Rows,
    *,
    in_place: bool,
    launches: Callable[[Work, torch.Tensor, int], Sequence[Launch]],
) -> Sequence[torch.Tensor] | None:
    """Run kernels that write tensors, and return these: the batch's own, or new ones.

    ``launches`` returns the launches, given the work table, the addresses and the offset of the
    addresses of outputs. Returns ``None``, and writes nothing, if a kernel or a table is not ready.
    """
    with _current_device(batch.device):
        work = _work_of(batch, rows)
        if work is None:
            return None
        new: list[torch.Tensor] = [] if in_place else list(map(torch.empty_like, batch.arrays))
        addresses = _send_addresses(batch, new)
        if addresses is None:
            return None

        ready = launches(work, addresses, len(batch.arrays) if new else 0)
        if not _compile(batch, ready):
            return None
        for launch in ready:
            launch.start()
    if not in_place:
        return new

    # Autograd does not see what kernels write.
    increment_version(batch.arrays)
    return batch.arrays


def _launches(
    kernel: Any, parts: Sequence[Part], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> list[Launch]:
    """Return the launches of a kernel that takes the table of each part."""
    launches = []
    for part in parts:
        dtype = {"DTYPE": DTYPES[part.dtype]}
        launches.append(Launch(kernel, part.programs, (part.table, *arguments), dtype | constants))
    return launches


def _sum_launches(work: Work, addresses: torch.Tensor, partial_sums: torch.Tensor) -> list[Launch]:
    """Return the launches that measure all chunks."""
    return _launches(sum_chunks, work.chunks, (addresses, partial_sums), SUM_PARAMETERS)


def _scale_launches(
    work: Work, arguments: tuple[Any, ...], *, zero: bool, one_norm: bool = False
) -> list[Launch]:
    """Return the launches that multiply chunks and tiles."""
    of_chunks = {"ZERO": zero, "ONE_NORM": one_norm, **SCALE_PARAMETERS}
    chunks = _launches(scale_chunks, work.chunks, arguments, of_chunks)
    tiles = _launches(scale_rows, work.tiles, arguments, {"ZERO": zero, **ROWS_PARAMETERS})
    return chunks + tiles


# --- 4. The backend's functions.


class Shape(NamedTuple):
    """The rows of tensors that share norms."""

    heights: tuple[int, ...] | None
    """The number of rows of each tensor, ``None`` if all tensors have one norm each."""
    widths: tuple[int, ...]
    """The length of the rows of each tensor."""
    kept: tuple[tuple[int, ...], ...]
    """The shape of the norms of each tensor."""


_shapes: dict[Any, Shape | None] = {}


def clip(
    arrays: Sequence[torch.Tensor], limit: float, *, in_place: bool
) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]] | None:
    """Clip regular dense tensors of one device by their joint norm.

    Returns norm and factor, 0-d and float32, and the tensors.
    """
    batch = _batch_of(arrays, checked=True)
    if batch is None:
        return None
    factor_and_norm = batch.new(2, torch.float32)

    def launches(work: Work, addresses: torch.Tensor, to_outputs: int) -> list[Launch]:
        partial_sums = batch.new(work.sum_count, torch.float64)
        of_factor = (partial_sums, work.sum_count, limit, factor_and_norm)
        of_products = (addresses, to_outputs, factor_and_norm)
        return [
            *_sum_launches(work, addresses, partial_sums),
            Launch(find_factor, 1, of_factor, NORM_PARAMETERS),
            *_scale_launches(work, of_products, zero=False, one_norm=True),
        ]

    rows = Rows(_lengths(arrays))
    new = _run_changes(batch, rows, in_place=in_place, launches=launches)
    if new is None:
        return None
    factor, norm = factor_and_norm.unbind()
    return norm, factor, new


def sums(backend: Backend, terms: Terms) -> list[torch.Tensor] | None:
    """Return the sums of squares of each block's norms, in float64.

    ``None`` for norms along other axes than the last ones.
    """
    batch = _batch_of(terms.arrays)
    shape = None if batch is None else _as_rows(terms.arrays, terms.axes)
    if batch is None or shape is None:
        return None

    if terms.weigh is None and shape.heights is None:
        rows = Rows(shape.widths, None, _norm_of_leaf(terms))
        out = _run_sums(batch, rows, len(terms.counts))
        return None if out is None else _in_blocks(terms, out)

    # The sums of each leaf's rows, which are added below.
    lengths = shape.heights or (1,) * len(shape.widths)
    ends = list(accumulate(lengths, initial=0))
    out = _run_sums(batch, Rows(shape.widths, shape.heights, tuple(ends[:-1])), ends[-1])
    return None if out is None else _rows_in_blocks(backend, terms, shape, out)


def norms(terms: Terms) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """Return the float32 norms of each block, and the same with NaN where they are not finite.

    ``None`` if `sums` returns that, or if leaves share norms along axes.
    """
    batch = _batch_of(terms.arrays)
    shape = None if batch is None else _as_rows(terms.arrays, terms.axes)
    if batch is None or shape is None or terms.weigh is not None:
        return None

    heights = shape.heights
    if heights is None:
        rows = Rows(shape.widths, None, _norm_of_leaf(terms))
        count = len(terms.counts)
    elif len(terms.counts) == len(terms.arrays):
        ends = list(accumulate(heights, initial=0))
        rows = Rows(shape.widths, heights, tuple(ends[:-1]))
        count = ends[-1]
    else:
        return None

    out = _run_sums(batch, rows, count, roots=True)
    if out is None:
        return None
    measured = out[:count]
    finite = out[count:]
    if heights is None:
        return _in_blocks(terms, measured), _in_blocks(terms, finite)
    return (
        _one_leaf_each(terms, heights, shape.kept, measured),
        _one_leaf_each(terms, heights, shape.kept, finite),
    )


def _norm_of_leaf(terms: Terms) -> tuple[int, ...]:
    """Return the number of each leaf's norm."""
    return tuple([norm for norm, count in enumerate(terms.counts) for _ in range(count)])


def _run_sums(batch: Batch, rows: Rows, count: int, *, roots: bool = False) -> torch.Tensor | None:
    """Return so many sums of squares, ``None`` if a kernel or a table is not ready.

    With ``roots`` return the norms, followed by the same with NaN where they are not finite.
    """
    with _current_device(batch.device):
        work = _work_of(batch, rows)
        addresses = None if work is None else _send_addresses(batch, ())
        if work is None or addresses is None:
            return None

        if roots:
            out = batch.new(2 * count, torch.float32)
            launches = _root_launches(batch, work, addresses, out, count)
        else:
            out = batch.new(count, torch.float64)
            launches = _all_sum_launches(batch, work, addresses, out)
        if not _compile(batch, launches):
            return None
        for launch in launches:
            launch.start()
        return out


def _root_launches(
    batch: Batch, work: Work, addresses: torch.Tensor, out: torch.Tensor, count: int
) -> list[Launch]:
    """Return the launches that write norms into a vector, as `find_norms` does."""
    # `join_norms` has a program for each norm, and each of its threads takes the root. If no sums
    # are left to add, `find_norms` takes 1,024 roots in a program.
    if not (work.tiles or work.one_chunk_each):
        partial_sums = batch.new(work.sum_count, torch.float64)
        launches = _sum_launches(work, addresses, partial_sums)
        arguments = (work.norms, partial_sums, out, count)
        launches.append(Launch(join_norms, work.norm_count, arguments, JOIN_PARAMETERS))
        return launches

    sums_of_rows = batch.new(count, torch.float64)
    launches = _all_sum_launches(batch, work, addresses, sums_of_rows)
    programs = triton.cdiv(count, ROOT_PARAMETERS["BLOCK"])
    launches.append(Launch(find_norms, programs, (sums_of_rows, out, count), ROOT_PARAMETERS))
    return launches


def _all_sum_launches(
    batch: Batch, work: Work, addresses: torch.Tensor, out: torch.Tensor
) -> list[Launch]:
    """Return the launches that write the sums of squares of all norms into a vector."""
    launches = []
    if work.norm_count:
        # A norm with one partial sum needs no addition.
        partial_sums = out if work.one_chunk_each else batch.new(work.sum_count, torch.float64)
        launches += _sum_launches(work, addresses, partial_sums)
        if not work.one_chunk_each:
            arguments = (work.norms, partial_sums, out)
            launches.append(Launch(join_sums, work.norm_count, arguments, JOIN_PARAMETERS))

    return launches + _launches(sum_rows, work.tiles, (addresses, out), ROWS_PARAMETERS)


def _in_blocks(terms: Terms, out: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums of all norms as those of each block."""
    return [out] if len(terms.blocks) == 1 else list(out.split(terms.blocks))


def _rows_in_blocks(
    backend: Backend, terms: Terms, shape: Shape, out: torch.Tensor
) -> list[torch.Tensor]:
    """Return the sums of each block's norms, given those of each leaf's rows."""
    count = len(terms.arrays)
    lengths = shape.heights or (1,) * count
    kept = shape.kept or ((),) * count
    if terms.weigh is not None or len(terms.counts) < count:
        rows = zip(out.split(list(lengths)), kept, strict=True)
        return stack_terms(backend, [of_leaf.view(axes) for of_leaf, axes in rows], terms)
    return _one_leaf_each(terms, lengths, kept, out)


def _one_leaf_each(
    terms: Terms, lengths: Sequence[int], kept: Sequence[tuple[int, ...]], out: torch.Tensor
) -> list[torch.Tensor]:
    """Return the rows of each block, given those of each leaf, if each norm has one leaf, and the
    norms of a block have one shape.
    """
    blocks = in_groups(range(len(terms.arrays)), terms.blocks)
    heights = [sum(take(lengths, block)) for block in blocks]
    rows = []
    for part, block in zip(out.split(heights), blocks, strict=True):
        shape = len(block), *kept[block[0]]
        rows.append(part.view(shape))
    return rows


def scale(products: Products) -> Sequence[torch.Tensor] | None:
    """Return the products of regular dense tensors by a factor for each, or for each row."""
    arrays = products.arrays
    if torch.is_grad_enabled() and any([array.requires_grad for array in arrays]):
        return None
    batch = _batch_of(arrays)
    shape = None if batch is None else _as_rows(arrays, products.axes)
    if batch is None or shape is None or not _are_factors(products.blocks, batch):
        return None

    # Norms along other axes, of an array with axes of length 1, are no rows.
    per_norm = [block.numel() // max(len(block), 1) for block in products.blocks]
    lengths = shape.heights or (1,) * len(arrays)
    if [per_norm[block] for block, _ in products.places] != list(lengths):
        return None

    # All factors are one vector, block after block.
    starts = list(accumulate([block.numel() for block in products.blocks], initial=0))
    places = zip(products.places, lengths, strict=True)
    first_norms = tuple([starts[block] + row * height for (block, row), height in places])
    factors = _flat(products.blocks)

    def launches(work: Work, addresses: torch.Tensor, to_outputs: int) -> list[Launch]:
        return _scale_launches(work, (addresses, to_outputs, factors), zero=products.zero)

    rows = Rows(shape.widths, shape.heights, first_norms)
    return _run_changes(batch, rows, in_place=products.in_place, launches=launches)


def _are_factors(blocks: Sequence[torch.Tensor], batch: Batch) -> bool:
    """Return whether factors are tensors of the batch's device, and of one dtype."""
    first = blocks[0]
    if not all([type(block) is torch.Tensor for block in blocks]):
        return False
    return all([b.device == batch.device and b.dtype is first.dtype for b in blocks])


def _flat(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all factors as one vector."""
    if len(blocks) == 1:
        return blocks[0].reshape(-1).contiguous()
    return torch.cat([block.reshape(-1) for block in blocks])


def bound(
    arrays: Sequence[torch.Tensor], low: float, high: float, *, in_place: bool
) -> Sequence[torch.Tensor] | None:
    """Return regular dense tensors of one device, clamped between two numbers.

    ``None`` for float64, since the numbers are rounded to float32.
    """
    if not all([array.dtype in DTYPES and array.dtype is not torch.float64 for array in arrays]):
        return None
    batch = _batch_of(arrays, checked=True)
    if batch is None:
        return None
    low = float(np.float32(low))
    high = float(np.float32(high))

    def launches(work: Work, addresses: torch.Tensor, to_outputs: int) -> list[Launch]:
        arguments = (addresses, to_outputs, low, high)
        return _launches(bound_chunks, work.chunks, arguments, SCALE_PARAMETERS)

    rows = Rows(_lengths(arrays))
    return _run_changes(batch, rows, in_place=in_place, launches=launches)


def _lengths(arrays: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the number of elements of each tensor."""
    return tuple(map(torch.Tensor.numel, arrays))


def _as_rows(arrays: Sequence[torch.Tensor], axes: Sequence[Axes] | None) -> Shape | None:
    """Return tensors as rows that share a norm, ``None`` if the norms of one are no rows."""
    if axes is None:
        return Shape(None, _lengths(arrays), ())

    # The rows of contiguous tensors depend only on shapes and axes.
    are_contiguous = all(map(torch.Tensor.is_contiguous, arrays))
    key = tuple([array.shape for array in arrays]), tuple(axes)
    if are_contiguous and key in _shapes:
        return _shapes[key]

    shape = _find_rows(arrays, axes)
    if are_contiguous:
        with _lock:
            if len(_shapes) >= _CACHE_SIZE:
                _shapes.clear()
            _shapes[key] = shape
    return shape


def _find_rows(arrays: Sequence[torch.Tensor], axes: Sequence[Axes]) -> Shape | None:
    """Compute the result of `_as_rows`."""
    heights: list[int] = []
    widths: list[int] = []
    kept: list[tuple[int, ...]] = []
    for array, along in zip(arrays, axes, strict=True):
        if along is None or len(along) == array.ndim:
            heights.append(1)
            widths.append(array.numel())
            kept.append(())
            continue

        is_rows = along == tuple(range(1, array.ndim)) and array.is_contiguous()
        if not is_rows or (not along and array.numel() > _LONG_VECTOR):
            return None
        height = array.shape[0]
        heights.append(height)
        widths.append(array.numel() // max(height, 1))
        kept.append((height,))
    return Shape(tuple(heights) if any(kept) else None, tuple(widths), tuple(kept))
