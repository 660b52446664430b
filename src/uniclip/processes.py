# SPDX-License-Identifier: MIT
"""Join the rows of several processes: one packet for each owner of distributed arrays, and one for ``all_reduce``.

Only sums in float64 are joined, so that nothing overflows; of a copy that n processes hold, each contributes 1/n.
What differs between processes is a number in the packet, or agreed on at the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from itertools import accumulate
from typing import Any, Protocol, TypeAlias
from weakref import ref

import numpy as np

from uniclip._errors import check, holds_arrays, short, stable
from uniclip.arithmetic import Arithmetic
from uniclip.backends.base import NUMPY, Backend, Kinds, Op, Reduce, cast

_KEPT = 64
"""How many joins a rule remembers."""
_BYTES = 8
"""The length of a digest."""


AllReduce: TypeAlias = Reduce | str | tuple[str, ...] | Any
"""How to reduce over the parts of a tree: a function of ``(array, op)``, a process group, a mesh, or names of axes."""
Shared: TypeAlias = Callable[[tuple[Any, ...], Any], bool | int]
"""How many processes hold a leaf, given its path and itself; true for all of them."""


class Joinable(Protocol):
    """What is needed of a plan, which is made of what is here."""

    kinds: Kinds
    math: Arithmetic
    one_norm: bool

    @property
    def names(self) -> list[str]:
        """The groups or leaves of all norms."""


class Join:
    """How the processes of an ``all_reduce`` join the rows of a rule; Python values only, as traces read them."""

    __slots__ = ("_held", "checked", "narrow", "shared", "size")

    def __init__(self, held: Any, shared: Shared | None) -> None:
        self._held, self.shared = held, shared
        self.checked = False
        """Whether the processes have compared their rules and rows."""
        self.narrow = True
        """Whether no process has float64 gradients."""
        self.size = 0
        """How many processes there are; 0 if unknown."""

    @property
    def all_reduce(self) -> Any:
        """The user's ``all_reduce``."""
        return given_back(self._held)

    @property
    def named(self) -> bool:
        """Whether named axes are joined."""
        return isinstance(self.all_reduce, (str, tuple))

    def reduce(self, backend: Backend, array: Any, op: Op) -> Any:
        """Reduce an array over the processes."""
        return reducer_of(backend, self.all_reduce)(array, op)


def join_of(joins: dict[Any, Join] | None, all_reduce: Any, shared: Shared | None) -> Join | None:
    """Return the join of a rule that remembers some, or none in compiled code; ``None`` without ``all_reduce``."""
    refuse_shared(all_reduce, shared)
    if all_reduce is None:
        return None
    check("all_reduce", all_reduce, isinstance(all_reduce, Hashable), "a function, a process group, a mesh or a name")
    if joins is None:
        return Join(all_reduce, shared)
    said = held(all_reduce), shared
    if said not in joins:
        while len(joins) >= _KEPT:
            joins.pop(next(iter(joins)))
        joins[said] = Join(*said)
    return joins[said]


def held(all_reduce: Any) -> Any:
    """Return a reference to keep; a weak one to a process group, which must end when it is destroyed."""
    return ref(all_reduce) if hasattr(all_reduce, "allreduce") else all_reduce


def given_back(reference: Any) -> Any:
    """Return what `held` was given."""
    return reference() if isinstance(reference, ref) else reference


def refuse_shared(all_reduce: Any, shared: Any) -> None:
    """Refuse ``shared`` if it is no function, or there is no ``all_reduce``."""
    check("shared", shared, shared is None or callable(shared), "a function of (path, leaf)")
    if shared is not None and all_reduce is None:
        msg = "shared says which leaves are copies beside parts, and nothing joins parts: give all_reduce, too"
        raise ValueError(msg)


def compare(join: Join, rule: Any, plan: Joinable) -> None:
    """Compare the rules and the rows of all processes, once: one sum, from which all come to the same conclusion.

    Raises
    ------
    ValueError
        In every process, if they differ.
    """
    rows: Any = 1 if plan.one_norm else plan.names
    words = _digest(f"{stable(repr(rule))} {join.shared is not None} {rows}")
    with plan.math.library.allow_float64():
        [found] = packed(
            plan.math, [np.asarray([1.0, not plan.kinds.narrow, *words, *[w * w for w in words]])], "sum", join
        )
    values = np.asarray(
        plan.math.library.to_host([found])[0] if not isinstance(found, np.ndarray) else found, np.float64
    )
    count, wide, sums, squares = values[0], values[1], values[2 : 2 + _BYTES], values[2 + _BYTES :]
    if not np.allclose(count * squares, sums**2, rtol=1e-6 if values.dtype != np.float64 else 1e-12):
        msg = (
            f"the processes that all_reduce joins use different rules or have different leaves or groups, and this one "
            f"{short(rule)}: use one rule in all of them, on the same tree, with None for what is absent; leaves that "
            "are whole in their process need no all_reduce, and groups with a limit for each name "
            "(uc.by_group_norm) may be empty in some"
        )
        raise ValueError(msg)
    join.size, join.narrow, join.checked = round(float(count)), bool(wide == 0), True


def _digest(text: str) -> list[float]:
    from hashlib import blake2b  # noqa: PLC0415 - it loads a library that most runs do not need

    return [float(byte) for byte in blake2b(text.encode(), digest_size=_BYTES).digest()]


def copies_of(plan: Joinable, given: Any, join: Join) -> list[int] | None:
    """Return how many processes hold each leaf, ``None`` if each is held once."""
    backend = plan.math.library
    answers = (
        [] if join.shared is None else [join.shared(*pair) for pair in zip(given.paths(), given.leaves, strict=True)]
    )
    for answer in answers:
        check(
            "what shared(path, leaf) returns", answer, not holds_arrays(answer), "True, False, or a number of processes"
        )
    present = given.kinds.present
    arrays = [given.arrays[number] for number in present]
    marked = None if join.shared is None else [bool(answers[number]) for number in present]
    found = backend.copies(arrays, join.all_reduce, marked, lambda n: given.place(present[n]))
    if found is not None:
        known = dict(zip(present, found, strict=True))
        return [known.get(number, 1) for number in range(len(given.leaves))]
    if not any(answers):
        return None
    return [join.size if isinstance(one, (bool, np.bool_)) and one else max(1, int(one)) for one in answers]


def packed(arithmetic: Arithmetic, arrays: list[Any], op: Op, join: Any) -> list[Any]:
    """Return arrays reduced over processes, as one vector in float64; NaN stays NaN in a maximum.

    NumPy arrays stay NumPy arrays in the mode in which the host reads them.
    """
    backend = arithmetic.library
    if not arrays:
        return []
    xp, dtype = backend.xp, arithmetic.sum_dtype
    if arithmetic.host and all([isinstance(array, (float, *NUMPY)) for array in arrays]):
        own: list[Any] = list(map(np.asarray, arrays))
        vector = arithmetic.to_library(np.concatenate([array.ravel() for array in own]).astype(np.float64, copy=False))
    else:
        own = [arithmetic.to_library(np.asarray(a) if isinstance(a, (float, *NUMPY)) else a) for a in arrays]
        if arithmetic.separate:  # XLA makes one reduction of many
            return [_reduced(arithmetic, cast(xp, array, dtype), op, join) for array in own]
        flat = [xp.reshape(cast(xp, backend.to_device_of(own[0], array), dtype), (-1,)) for array in own]
        vector = xp.concat(flat, axis=0)
    vector = _reduced(arithmetic, vector, op, join)
    view = backend.viewed(vector) if arithmetic.host else None
    xp, vector = (xp, vector) if view is None else (np, view)
    shapes = [tuple(array.shape) for array in own]
    ends = accumulate(map(math.prod, shapes))
    pairs = zip(shapes, ends, strict=True)
    return [xp.reshape(vector[end - math.prod(shape) : end], shape) for shape, end in pairs]


def _reduced(arithmetic: Arithmetic, array: Any, op: Op, join: Any) -> Any:
    reduce = join.reduce if not isinstance(join, Join) else lambda x, op: join.reduce(arithmetic.library, x, op)
    return reduce(array, op) if op == "sum" else _largest_of_all(arithmetic.library.xp, array, reduce)


def _largest_of_all(xp: Any, value: Any, reduce: Reduce) -> Any:
    """Return the largest of all processes' values, NaN if one of them is NaN."""
    isnan, shape = xp.isnan(value), tuple(value.shape)
    both = [xp.where(isnan, xp.zeros_like(value), value), xp.astype(isnan, value.dtype)]
    pair = reduce(xp.concat([xp.reshape(one, (-1,)) for one in both], axis=0), "max")
    top, bad = (xp.reshape(one, shape) for one in (pair[: math.prod(shape)], pair[math.prod(shape) :] > 0))
    # 0/0, not a constant NaN, which a debugger would report as a result.
    return xp.where(bad, xp.zeros_like(top), top) / xp.astype(xp.logical_not(bad), value.dtype)


def reducer_of(backend: Backend, all_reduce: Any) -> Reduce:
    """Return a function of ``(array, op)`` that reduces over the parts of a tree.

    Raises
    ------
    TypeError
        If ``all_reduce`` is neither a function nor what the library of the backend joins by.
    """
    reduce: Reduce | None = backend.reducer(all_reduce)
    if reduce is not None:
        return reduce
    if callable(all_reduce):
        return all_reduce
    msg = f"all_reduce must be {backend.joins_by} for gradients of this library, got {short(all_reduce)}"
    raise TypeError(msg)


def refuse_kept_axes(scope: Any, all_reduce: Any) -> None:
    """Refuse norms along axes beside ``all_reduce``: which axis of a part is cut is not known.

    Raises
    ------
    ValueError
        If the norms of the scope keep axes: those of different units, rows or entries would be added.
    """
    if all_reduce is not None and scope.axes is not None:
        msg = (
            f"all_reduce= joins the norms of whole leaves, and {scope!r} gives a leaf many: plain arrays do not say "
            "which of their axes is divided, so norms of different units could be added. Leave all_reduce= out where "
            "each leaf is whole in its process; where leaves are divided, use distributed arrays (DTensors, or jax.jit "
            "with sharded arrays), which need no all_reduce="
        )
        raise ValueError(msg)


class Loss:
    """A loss that is already reduced; it is computed on first access and then stays the same."""

    def __init__(self, find: Callable[[], Any], own: Any = None) -> None:
        self._find, self._found = find, False
        self.own = own
        """That of this process."""
        self._value: Any = None

    def __call__(self) -> Any:
        """Return the loss, ``None`` if there is none."""
        if not self._found:
            self._value, self._found = self._find(), True
        return self._value
