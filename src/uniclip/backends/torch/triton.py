# SPDX-License-Identifier: MIT
"""Many tensors in one kernel each, by Triton: sums of squares, norm and factor, products, bounds.

PyTorch's own functions of lists take many launches, and one for each tensor as soon as dtypes
differ. Here a launch takes all tensors of a dtype: a table says which stretch of which tensor each
program reads, and a list of addresses where the tensors are. Sums are float64 in a fixed order, so
that no square is out of range and bits are the same at each run; a product by 1 in place writes
nothing.

Addresses go to the device in pinned memory, without a wait. What a CUDA graph captures stays:
tables are kept for good, addresses are copied again at each replay from memory that is written
once. Nothing is uploaded first in a capture, so that a step needs a run before it, as Triton needs
to compile; else the caller goes its other way.
"""

# Without `annotations` from __future__: Triton reads them.
import os
import threading
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from uniclip.backends.base import Products, Terms, in_groups, stack_terms
from uniclip.backends.torch.fast_path import in_order

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels run on the CPU, for tests."""
_CHUNK = 2**14
"""How many entries a program takes."""
_SUMS = {"CHUNK": _CHUNK, "BLOCK": 4096, "num_warps": 16}
_PRODUCTS = {"CHUNK": _CHUNK, "BLOCK": 4096, "num_warps": 16}
ALIGNS = True
"""Whether 16 bytes are loaded at a time where all addresses allow it."""
_JOIN = {"BLOCK": 1024, "num_warps": 4}
_ALL = {"BLOCK": 8192, "num_warps": 16}
_TILE = {"ROWS": 8, "COLUMNS": 256, "num_warps": 4}
_NARROW = 2**13
"""Rows of up to so many entries are measured several by a program."""
_ENTRIES = 2**20
"""Up to so many entries of a vector are rows of one entry: it is a bias beside matrices."""
_FIELDS = tl.constexpr(5)
"""The length of a row of a table: tensor, start, stop, place of the sum, number of the norm;
or of a tile: tensor, first row, number of rows, their length, number of the first norm."""
_PRODUCT, _ZERO, _BOUND = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""How entries are changed: multiplied, multiplied where the product by 0 is 0,
brought between bounds.
"""
_KEPT = 64
"""How many tables, and how many lists of addresses, are remembered."""
_RESERVE = 2**16
"""How many addresses captured graphs may have before memory is reserved again."""
KINDS = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}
_PLAIN = {torch.Tensor, torch.nn.Parameter}


@triton.jit
def _memory(addresses, leaf, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    array = tl.load(addresses + leaf).to(tl.pointer_type(KIND))
    return tl.multiple_of(array, 16) if ALIGNED else array  # so that a thread loads 16 bytes


@triton.jit
def _start(row, ALIGNED: tl.constexpr):
    start = tl.load(row + 1)
    return tl.multiple_of(start, 16) if ALIGNED else start


@triton.jit
def _sum_of_squares(
    array, start, stop, WHOLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, CHUNK, BLOCK):
        at = start + first + tl.arange(0, BLOCK)
        x = (tl.load(array + at) if WHOLE else tl.load(array + at, mask=at < stop, other=0.0)).to(
            tl.float64
        )
        total += x * x
    return tl.sum(total, 0)


@triton.jit
def _add_squares(
    table,
    addresses,
    sums,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = table + tl.program_id(0).to(tl.int64) * _FIELDS
    start, stop, place = _start(row, ALIGNED), tl.load(row + 2), tl.load(row + 3)
    array = _memory(addresses, tl.load(row), KIND, ALIGNED)
    if stop - start == CHUNK:
        tl.store(sums + place, _sum_of_squares(array, start, stop, True, CHUNK, BLOCK))
    else:
        tl.store(sums + place, _sum_of_squares(array, start, stop, False, CHUNK, BLOCK))


@triton.jit
def _add_squares_of_rows(
    table, addresses, out, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    tile = table + tl.program_id(0).to(tl.int64) * _FIELDS
    array = _memory(addresses, tl.load(tile), KIND, False)
    rows = tl.load(tile + 1) + tl.arange(0, ROWS)
    height, width = tl.load(tile + 2), tl.load(tile + 3)
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    for first in range(0, width, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        there = (rows[:, None] < height) & (columns[None, :] < width)
        x = tl.load(array + rows[:, None] * width + columns[None, :], mask=there, other=0.0).to(
            tl.float64
        )
        total += x * x
    tl.store(out + tl.load(tile + 4) + rows, tl.sum(total, 1), mask=rows < height)


@triton.jit
def _total(sums, start, stop, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(start, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(sums + at, mask=at < stop, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _join(groups, sums, out, BLOCK: tl.constexpr):
    group = groups + tl.program_id(0).to(tl.int64) * 3
    tl.store(out + tl.load(group + 2), _total(sums, tl.load(group), tl.load(group + 1), BLOCK))


@triton.jit(do_not_specialize=["count", "limit"])
def _limit(sums, count, limit, out, BLOCK: tl.constexpr):
    norm = tl.sqrt(_total(sums, 0, count, BLOCK)).to(tl.float32)
    factor = tl.div_rn(limit, tl.maximum(norm, limit))  # exactly 1 within the limit
    tl.store(out, factor + (norm - norm))  # NaN if the norm is not finite
    tl.store(out + 1, norm)


@triton.jit
def _changed(x, factor, low, high, HOW: tl.constexpr):
    if HOW == _BOUND:
        new = tl.where(x < low, low, tl.where(x > high, high, x))  # NaN stays
    elif HOW == _ZERO:
        new = tl.where(factor == 0, 0.0, x * factor)
    else:
        new = x * factor
    return new


@triton.jit
def _change_stretch(
    array, out, start, stop, factor, low, high, others, KIND: tl.constexpr, HOW: tl.constexpr,
    WHOLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for first in range(0, CHUNK, BLOCK):
        at = start + first + tl.arange(0, BLOCK)
        x = tl.load(array + at) if WHOLE else tl.load(array + at, mask=at < stop, other=0.0)
        x = x.to(factor.dtype)
        new = _changed(x, factor, low, high, HOW).to(KIND)
        if HOW == _BOUND:  # few are outside
            tl.store(out + at, new, mask=(at < stop) & ((x < low) | (x > high) | (others > 0)))
        elif WHOLE:
            tl.store(out + at, new)
        else:
            tl.store(out + at, new, mask=at < stop)


@triton.jit(do_not_specialize=["others", "low", "high"])
def _change(
    table, addresses, others, factors, low, high, KIND: tl.constexpr, HOW: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0).to(tl.int64) * _FIELDS
    wide: tl.constexpr = tl.float64 if KIND == tl.float64 else tl.float32  # noqa: SIM300 - no constant to Python
    factor = tl.load(factors + tl.load(row + 4)).to(wide)
    if (factor != 1) | (others > 0) | (HOW == _BOUND):  # NaN is not 1
        leaf, start, stop = tl.load(row), _start(row, ALIGNED), tl.load(row + 2)
        array, out = (
            _memory(addresses, leaf, KIND, ALIGNED),
            _memory(addresses + others, leaf, KIND, ALIGNED),
        )
        if stop - start == CHUNK:
            _change_stretch(
                array, out, start, stop, factor, low, high, others, KIND, HOW, True, CHUNK, BLOCK
            )
        else:
            _change_stretch(
                array, out, start, stop, factor, low, high, others, KIND, HOW, False, CHUNK, BLOCK
            )


@triton.jit(do_not_specialize=["others"])
def _change_rows(
    table, addresses, others, factors,
    KIND: tl.constexpr, HOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile = table + tl.program_id(0).to(tl.int64) * _FIELDS
    rows, height = tl.load(tile + 1) + tl.arange(0, ROWS), tl.load(tile + 2)
    wide: tl.constexpr = tl.float64 if KIND == tl.float64 else tl.float32  # noqa: SIM300 - no constant to Python
    factor = tl.load(factors + tl.load(tile + 4) + rows, mask=rows < height, other=1.0).to(wide)
    if (tl.min((factor == 1).to(tl.int32), 0) == 0) | (others > 0):
        leaf, width = tl.load(tile), tl.load(tile + 3)
        array, out = (
            _memory(addresses, leaf, KIND, False),
            _memory(addresses + others, leaf, KIND, False),
        )
        for first in range(0, width, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            there = (rows[:, None] < height) & (columns[None, :] < width)
            at = rows[:, None] * width + columns[None, :]
            x = tl.load(array + at, mask=there, other=0.0).to(wide)
            tl.store(out + at, _changed(x, factor[:, None], 0.0, 0.0, HOW).to(KIND), mask=there)


class Table(NamedTuple):
    """Which stretches of tensors programs take, on the device."""

    chunks: list[tuple[Any, int, torch.dtype]]
    """Rows for programs, how many, and of which dtype:
    of stretches of whole tensors and of long rows.
    """
    tiles: list[tuple[Any, int, torch.dtype]]
    """The same of short rows."""
    groups: Any
    """The first and the last place of the sums of each norm, and its number."""
    group_count: int
    sums: int
    """How many sums the chunks have."""
    single: bool
    """Whether each sum is that of a norm, in their order."""
    aligned: bool
    """Whether all chunks start at a multiple of 16."""

    def tensors(self) -> list[Any]:
        """Return what is on the device."""
        return [self.groups, *[rows for rows, *_ in (*self.chunks, *self.tiles)]]


_tables: dict[Any, tuple[Table, int, Any]] = {}
_addresses: dict[Any, Any] = {}
_captured: dict[int, Any] = {}
"""What captured graphs read."""
_reserves: list[Any] = []
"""Pinned memory that no captured graph has yet."""
_LOCK = threading.Lock()


def _stream(device: torch.device) -> tuple[int, bool]:
    """Return the current stream, and whether a graph is captured."""
    if device.type == "cuda":
        return torch._C._cuda_getCurrentRawStream(
            device.index
        ), torch._C._cuda_isCurrentStreamCapturing()
    if device.type == "xpu":
        return torch._C._xpu_getCurrentRawStream(device.index), False
    return 0, False


def _table(
    shapes: tuple[tuple[int, int], ...],
    firsts: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    stream: int,
    capturing: bool,
) -> Table | None:
    """Return the table of tensors that are measured as rows of a length,
    given the numbers of their first norms.
    """
    key = shapes, firsts, dtypes, device
    found = _tables.get(key)
    if capturing:  # where a graph begins, all is there
        if found is not None:
            _captured[id(found)] = found
        return None if found is None else found[0]
    if found is None:
        table, event = _make_table(*key), None
        if device.type != "cpu":
            event = getattr(torch, device.type).Event()
            event.record()
        with _LOCK:
            if len(_tables) >= _KEPT:
                _tables.clear()
            found = _tables[key] = table, stream, event
    elif found[1] != stream:
        found[2].wait()  # on the current stream, for the table to be there
        current = getattr(torch, device.type).current_stream(device)
        for tensor in found[0].tensors():
            tensor.record_stream(current)
    return found[0]


def _make_table(
    shapes: tuple[tuple[int, int], ...],
    firsts: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> Table:
    chunks: dict[torch.dtype, list[Any]] = {}
    tiles: dict[torch.dtype, list[Any]] = {}
    groups: list[Any] = []
    place = 0
    for leaf, ((height, width), number, dtype) in enumerate(
        zip(shapes, firsts, dtypes, strict=True)
    ):
        if height > 1 and width <= _NARROW:
            rows = np.arange(0, height, _TILE["ROWS"])
            tiles.setdefault(dtype, []).append(_rows(leaf, rows, height, width, number))
            continue
        starts = np.arange(0, width, _CHUNK)
        places = place + np.arange(height * len(starts))
        place += len(places)
        numbers = number + np.arange(height)
        at = (np.arange(height)[:, None] * width + starts).ravel()
        stops = (np.arange(height)[:, None] * width + np.minimum(starts + _CHUNK, width)).ravel()
        if not height:
            continue
        if len(places):
            chunks.setdefault(dtype, []).append(
                _rows(leaf, at, stops, places, np.repeat(numbers, len(starts)))
            )
        ends = place - height * len(starts) + np.arange(height + 1) * len(starts)
        if groups and height == 1 and groups[-1][-1, 2] == number:
            groups[-1][-1, 1] = place
        else:
            groups.append(np.stack([ends[:-1], ends[1:], numbers], 1))

    def send(rows: list[Any]) -> Any:
        host = torch.as_tensor(np.ascontiguousarray(np.concatenate(rows), np.int64))
        return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)

    sent = [
        [(send(rows), sum(map(len, rows)), dtype) for dtype, rows in by.items()]
        for by in (chunks, tiles)
    ]
    all_groups = np.concatenate(groups) if groups else np.zeros((0, 3), np.int64)
    firsts_, lasts, numbers_ = all_groups.T
    aligned = all(
        [not (rows[:, 1] & 15).any() for of_dtype in chunks.values() for rows in of_dtype]
    )
    single = bool((firsts_ == numbers_).all() and (lasts - firsts_ == 1).all())
    return Table(sent[0], sent[1], send([all_groups]), len(all_groups), place, single, aligned)


def _rows(*columns: Any) -> Any:
    return np.stack(np.broadcast_arrays(*columns), 1)


def _send_addresses(
    addresses: tuple[int, ...], device: torch.device, stream: int, capturing: bool
) -> Any:
    """Return addresses on the device; ``None`` in a capture for which no memory is reserved."""
    if INTERPRETED:
        return torch.tensor(addresses, dtype=torch.int64)
    if capturing:
        with _LOCK:
            if not _reserves or len(_reserves[0]) < len(addresses):
                return None
            kept, _reserves[0] = _reserves[0][: len(addresses)], _reserves[0][len(addresses) :]
            _captured[id(kept)] = kept
        kept.copy_(torch.tensor(addresses, dtype=torch.int64))
        return kept.to(device, non_blocking=True)
    key = addresses, device, stream  # another stream might read before they are there
    found = _addresses.get(key)
    if found is None:
        found = (
            torch.tensor(addresses, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
        )
        with _LOCK:
            if not _reserves or len(_reserves[0]) < max(len(addresses), _RESERVE // 2):
                _reserves[:] = [
                    torch.empty(
                        max(4 * len(addresses), _RESERVE), dtype=torch.int64, pin_memory=True
                    )
                ]
            if len(_addresses) >= _KEPT:
                _addresses.clear()
            _addresses[key] = found
    return found


class Launch(NamedTuple):
    """Tensors of one device, ready for kernels."""

    arrays: Sequence[Any]
    addresses: tuple[int, ...]
    device: torch.device
    stream: int
    capturing: bool
    written: list[bool]
    """Whether a kernel has begun to change the tensors."""

    def send(
        self, shapes: Sequence[tuple[int, int]], firsts: Sequence[int], others: Sequence[Any] = ()
    ) -> Any:
        """Return table, addresses on the device, those of others behind them,
        and whether all have steps of 16 bytes.

        ``None`` in a capture for which something is not prepared.
        """
        dtypes = tuple([array.dtype for array in self.arrays])
        table = _table(
            tuple(shapes), tuple(firsts), dtypes, self.device, self.stream, self.capturing
        )
        addresses = (
            (*self.addresses, *map(torch.Tensor.data_ptr, others)) if others else self.addresses
        )
        sent = (
            None
            if table is None
            else _send_addresses(addresses, self.device, self.stream, self.capturing)
        )
        if table is None or sent is None:
            return None
        return table, sent, ALIGNS and table.aligned and not reduce(or_, addresses) & 15

    def empty(self, count: int, dtype: torch.dtype) -> Any:
        """Return new memory."""
        return torch.empty(count, dtype=dtype, device=self.device)


def _launch_of(arrays: Sequence[Any], *, checked: bool = False) -> Launch | None:
    """Return plain dense tensors of one device ready for kernels, ``None`` for others."""
    device = arrays[0].device
    for array in () if checked else arrays:
        if (
            type(array) not in _PLAIN
            or array.dtype not in KINDS
            or array.device != device
            or array.is_neg()
        ):
            return None
        if not (array.is_contiguous() or in_order(array).is_contiguous()):
            return None
    if torch._C._len_torch_dispatch_stack():  # a mode wants to see what is done
        return None
    if INTERPRETED and device.type != "cpu":  # whose memory it cannot read
        return None
    return Launch(
        arrays, tuple([array.data_ptr() for array in arrays]), device, *_stream(device), []
    )


_broken: set[torch.device] = set()
"""The devices for which kernels could not be compiled: they are not tried again."""


def _try(launch: Launch, run: Callable[[], Any]) -> Any:
    """Return what a function of kernels returns, ``None`` where Triton cannot compile them:
    nothing is written then.
    """
    if launch.device in _broken:
        return None
    try:
        if launch.device.type != "cuda" or torch._C._cuda_getDevice() == launch.device.index:
            return run()
        with torch.cuda.device(launch.device):
            return run()
    except torch.OutOfMemoryError:
        raise
    except Exception:
        _broken.add(launch.device)
        if INTERPRETED or any(launch.written):
            raise
        return None


# What the backend calls.


def clip(arrays: Sequence[Any], limit: float, *, in_place: bool) -> tuple[Any, Any, Any] | None:
    """Return joint norm and factor, 0-d and float32, and the products,
    of plain dense tensors of one device.
    """
    launch = _launch_of(arrays, checked=True)
    if launch is None:
        return None

    def run() -> Any:
        new = arrays if in_place else list(map(torch.empty_like, arrays))
        sent = launch.send(
            [(1, array.numel()) for array in arrays], [0] * len(arrays), () if in_place else new
        )
        if sent is None:
            return None
        table, addresses, aligned = sent
        parts, out = launch.empty(table.sums, torch.float64), launch.empty(2, torch.float32)
        _run_chunks(table, addresses, aligned, parts)
        _limit[(1,)](parts, table.sums, limit, out, **_ALL)
        _run_changes(table, addresses, aligned, launch, out, _PRODUCT, in_place=in_place)
        factor, norm = out.unbind()
        return norm, factor, new

    return _try(launch, run)


def sums(backend: Any, terms: Terms) -> list[Any] | None:
    """Return the sums of squares of each block's norms, in float64.

    ``None`` for axes that are not the last.
    """
    arrays = terms.arrays
    launch = _launch_of(arrays)
    shapes = None if launch is None else _shapes(arrays, terms.axes)
    if launch is None or shapes is None:
        return None
    whole = terms.axes is None or all(
        [not _kept(array, along) for array, along in zip(arrays, terms.axes, strict=True)]
    )
    joint = whole and terms.weigh is None
    if joint:
        firsts = [number for number, count in enumerate(terms.counts) for _ in range(count)]
        total = len(terms.counts)
    else:
        ends = list(accumulate([height for height, _ in shapes], initial=0))
        firsts, total = ends[:-1], ends[-1]

    def run() -> Any:
        sent = launch.send(shapes, firsts)
        if sent is None:
            return None
        table, addresses, aligned = sent
        out = launch.empty(total, torch.float64)
        if table.group_count:
            parts = out if table.single else launch.empty(table.sums, torch.float64)
            _run_chunks(table, addresses, aligned, parts)
            if not table.single:
                _join[(table.group_count,)](table.groups, parts, out, **_JOIN)
        for rows, count, dtype in table.tiles:
            _add_squares_of_rows[(count,)](rows, addresses, out, KINDS[dtype], **_TILE)
        return out

    out = _try(launch, run)
    if out is None:
        return None
    if joint:
        return list(out.split(terms.blocks)) if len(terms.blocks) > 1 else [out]
    return _rows_of_blocks(backend, terms, shapes, out)


def _rows_of_blocks(
    backend: Any, terms: Terms, shapes: list[tuple[int, int]], out: Any
) -> list[Any]:
    """Return the sums of each block's norms, given those of all rows."""
    arrays = terms.arrays
    kept = [
        _kept(array, along)
        for array, along in zip(arrays, terms.axes or [None] * len(arrays), strict=True)
    ]
    if terms.weigh is not None or len(terms.counts) < len(arrays):
        each = zip(out.split([height for height, _ in shapes]), kept, strict=True)
        return stack_terms(backend, [rows.view(shape) for rows, shape in each], terms)
    numbers = in_groups(range(len(arrays)), terms.blocks)  # the norms of a block are alike
    lengths = [sum([shapes[number][0] for number in block]) for block in numbers]
    rows = out.split(lengths)
    return [
        part.view(len(block), *kept[block[0]]) for part, block in zip(rows, numbers, strict=True)
    ]


def scale(products: Products) -> list[Any] | None:
    """Return the products of dense tensors with factors for each, or for each row."""
    arrays, blocks = products.arrays, products.blocks
    if torch.is_grad_enabled() and any([array.requires_grad for array in arrays]):
        return None
    launch = _launch_of(arrays)
    shapes = None if launch is None else _shapes(arrays, products.axes)
    if (
        launch is None
        or shapes is None
        or not all([type(block) is torch.Tensor for block in blocks])
    ):
        return None
    first = blocks[0]
    if any([block.device != launch.device or block.dtype is not first.dtype for block in blocks]):
        return None
    starts = list(accumulate([block.numel() for block in blocks], initial=0))
    lengths = [block.numel() // max(len(block), 1) for block in blocks]
    every = list(zip(products.places, shapes, strict=True))
    # A factor for several rows.
    if any([lengths[block] != height for (block, _), (height, _) in every]):
        return None
    firsts = [starts[block] + row * height for (block, row), (height, _) in every]

    def run() -> Any:
        new = arrays if products.in_place else list(map(torch.empty_like, arrays))
        sent = launch.send(shapes, firsts, () if products.in_place else new)
        if sent is None:
            return None
        table, addresses, aligned = sent
        factors = (
            first.reshape(-1)
            if len(blocks) == 1
            else torch.cat([block.reshape(-1) for block in blocks])
        )
        how = _ZERO if products.zero else _PRODUCT
        _run_changes(
            table, addresses, aligned, launch, factors.contiguous(), how, in_place=products.in_place
        )
        return new

    return _try(launch, run)


def bound(arrays: Sequence[Any], low: float, high: float, *, in_place: bool) -> list[Any] | None:
    """Return plain dense tensors of one device with entries between two numbers,
    which are rounded to float32.
    """
    if not all([array.dtype in KINDS and array.dtype is not torch.float64 for array in arrays]):
        return None
    launch = _launch_of(arrays, checked=True)
    if launch is None:
        return None

    def run() -> Any:
        new = arrays if in_place else list(map(torch.empty_like, arrays))
        sent = launch.send(
            [(1, array.numel()) for array in arrays], [0] * len(arrays), () if in_place else new
        )
        if sent is None:
            return None
        table, addresses, aligned = sent
        bounds, one = (
            (float(np.float32(low)), float(np.float32(high))),
            launch.empty(1, torch.float32),
        )
        _run_changes(table, addresses, aligned, launch, one, _BOUND, bounds, in_place=in_place)
        return new

    return _try(launch, run)


def _run_chunks(table: Table, addresses: Any, aligned: bool, sums: Any) -> None:
    for rows, count, dtype in table.chunks:
        _add_squares[(count,)](rows, addresses, sums, KINDS[dtype], aligned, **_SUMS)


def _run_changes(
    table: Table,
    addresses: Any,
    aligned: bool,
    launch: Launch,
    factors: Any,
    how: Any,
    bounds: tuple[float, float] = (0.0, 0.0),
    *,
    in_place: bool,
) -> None:
    if in_place:  # which kernels of Triton do not tell autograd
        torch._C._increment_version(list(launch.arrays))
    others = 0 if in_place else len(launch.arrays)
    for rows, count, dtype in table.chunks:
        _change[(count,)](
            rows, addresses, others, factors, *bounds, KINDS[dtype], how.value, aligned, **_PRODUCTS
        )
        launch.written.append(in_place)
    for rows, count, dtype in table.tiles:
        _change_rows[(count,)](rows, addresses, others, factors, KINDS[dtype], how.value, **_TILE)
        launch.written.append(in_place)


def _shapes(arrays: Sequence[Any], axes: Sequence[Any] | None) -> list[tuple[int, int]] | None:
    """Return each dense tensor as so many rows of so many entries that share a norm;
    ``None`` if one is not.
    """
    if axes is None:
        return [(1, array.numel()) for array in arrays]
    found = []
    for array, along in zip(arrays, axes, strict=True):
        if along is None or len(along) == array.ndim:
            found.append((1, array.numel()))
        elif (
            along == tuple(range(1, array.ndim))
            and array.is_contiguous()
            and (along or array.numel() <= _ENTRIES)
        ):
            height = array.shape[0]
            found.append((height, array.numel() // max(height, 1)))
        else:
            return None
    return found


def _kept(array: Any, along: Any) -> tuple[int, ...]:
    """Return the shape of the norms of a tensor, all entries or rows of which have one."""
    return () if along is None or len(along) == array.ndim else (array.shape[0],)
