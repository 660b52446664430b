# SPDX-License-Identifier: MIT
"""Where norms are computed, in NumPy's arrays or in the library's, and how values cross.

They are NumPy's where the host reads the gradients at no cost, and then so are limits and factors.
After the sums of leaves, only what is here makes, converts, rounds and branches on norms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from uniclip._core.tree import OpenedTree
from uniclip.backends import DEFAULT, Backend, backend_of, numpy_of
from uniclip.backends.base import (
    HOST,
    LIBRARY,
    NUMPY,
    RECORDED,
    TRACED,
    LeafInfo,
    Op,
    Terms,
    cast,
    stack_arrays,
)


class NormSpace:
    """Where the norms of a plan lie, and what is done with them, whatever leaves they are of."""

    def __init__(self, leaf_info: LeafInfo, mode: int, device: Any, *, narrow: bool) -> None:
        library = leaf_info.backend
        self.library: Backend = library
        """The backend of the gradients."""
        self.mode = mode
        """The mode of the step."""
        self.device = device
        """The device of the norms in their library."""
        self.host = mode == HOST
        """Whether norms, limits and factors are NumPy's arrays."""
        self.backend: Backend = DEFAULT if self.host else library
        """The backend of norms, limits and factors."""
        self.xp = self.backend.xp
        self.compiled = mode == TRACED
        """Whether the step is traced: there are no values, and nothing may be kept."""
        self.on_device = mode == LIBRARY
        """Whether an accelerator has the values, and starts a kernel for each operation."""
        self.separate = self.compiled and not library.stacks(None)
        """Whether compilers want each norm as an array of its own."""

        self.double = leaf_info.double
        """Whether sums are float64."""
        self.sum_dtype = library.xp.float64 if self.double else library.xp.float32
        """The dtype of sums, of the library."""
        self.narrow = narrow
        """Whether all squares fit into float64, in all processes."""
        dtype = leaf_info.dtype
        if leaf_info.narrow and not narrow:
            dtype = library.xp.float64
        numpys = {library.xp.float32: np.float32, library.xp.float64: np.float64}
        self.dtypes = (dtype, numpys.get(dtype, dtype))
        """The dtypes of norms, of the library and of NumPy."""
        self.largest_norm = float(np.finfo(self.dtypes[1]).max)
        """The largest number of their dtype."""
        self.largest_factor = min(self.largest_norm, leaf_info.largest_factor)
        """The largest factor that all leaves can be multiplied by."""

    def at_host(self) -> NormSpace:
        """Return the same in NumPy's arrays, as norms are recorded."""
        new = copy.copy(self)
        new.library = new.backend = DEFAULT
        new.xp, new.mode, new.host, new.device = DEFAULT.xp, HOST, True, None
        return new

    def sums(self, tree: OpenedTree, terms: Terms) -> list[Any]:
        """Return the sums of each block's norms.

        No derivatives are recorded with respect to parameters.
        """
        mode = LIBRARY if self.mode == RECORDED and tree.name == "params" else self.mode
        return self.library.sums(mode, terms) if terms.arrays else []

    def norms_at_once(
        self, trees: Sequence[OpenedTree], terms: Sequence[Terms]
    ) -> list[Any] | None:
        """Return for each tree its norms, and the same with NaN where they are not finite, if the
        library makes them with their sums.
        """
        if not (self.on_device and self.double and self.narrow):
            return None
        if not all([tree.leaf_info.narrow and tree.leaf_info.double for tree in trees]):
            return None
        found = []
        for of_tree in terms:
            norms = self.library.norms(of_tree, self.dtypes[0]) if of_tree.arrays else None
            if norms is None:
                return None
            found.append(norms)
        return found

    # There and back.

    def read_foreign(self, value: Any) -> Any:
        """Return what came in beside the gradients as it is, an array of another library as NumPy's
        where no gradient says which library it is.
        """
        if self.library is DEFAULT and backend_of(value) not in {None, DEFAULT}:
            return numpy_of(value)
        return value

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        """Return the values of a small array."""
        return array if isinstance(array, np.ndarray) else self.library.to_host([array])[0]

    def to_library(self, array: Any) -> Any:
        """Return an array as one of the gradients' library, on their device."""
        if not isinstance(array, NUMPY):
            return array
        return self.library.from_host(np.asarray(array), self.device)

    def as_norms(self, arrays: list[Any]) -> list[Any]:
        """Return arrays where the norms are."""
        return arrays if self.host else list(map(self.to_library, arrays))

    def constants(self, arrays: list[Any]) -> list[Any]:
        """Return arrays that are the same at every step where the norms are: NumPy's are sent to a
        device once.
        """
        if self.host:
            return arrays
        return [
            self.library.constant(np.asarray(array), self.device)
            if isinstance(array, NUMPY)
            else array
            for array in arrays
        ]

    def view(self, array: Any) -> Any:
        """Return an array of the library or of NumPy where the norms are.

        ``None`` if the host cannot read it.
        """
        if isinstance(array, NUMPY):
            return array if self.host else self.to_library(np.asarray(array))
        return self.library.as_numpy(array) if self.host else array

    def recall(self, norms: Any, array: Any) -> Any:
        """Return an array of a state where the norms are.

        The gradients may have moved to another device since the step before.
        """
        if not self.host:
            return self.library.to_device_of(norms, self.library.detach(array))
        view = self.view(array)
        return self.library.to_host([self.library.detach(array)])[0] if view is None else view

    # With values of the norms.

    def zeros(self, shape: tuple[int, ...] = ()) -> Any:
        """Return sums of nothing."""
        zero = np.zeros(shape, np.float64 if self.double else np.float32)
        return zero if self.host else self.to_library(zero)

    def zero_like(self, first: Any) -> Any:
        """Return a leaf that adds nothing, of the kind of another one."""
        zero = self.library.from_host(np.zeros((), np.float32), self.device)
        return zero if first is None else cast(self.library.xp, zero, first.dtype)

    def round_to_norms(self, array: Any) -> Any:
        """Return an array in the dtype of the norms."""
        if isinstance(array, NUMPY):
            return np.asarray(array, self.dtypes[1])
        return cast(self.library.xp, array, self.dtypes[0])

    def cast_limit(self, value: Any, norms: Any) -> Any:
        """Return a limit in the dtype of norms, as an array that broadcasts against them."""
        return (
            cast(self.xp, value, norms.dtype)
            if hasattr(value, "shape")
            else self.xp.asarray(value, dtype=norms.dtype)
        )

    def stack(self, values: list[Any]) -> Any:
        """Return sums as the rows of one array."""
        if self.host and all([isinstance(value, NUMPY) for value in values]):
            return np.array(values)
        return stack_arrays(self.library, list(map(self.to_library, values)))

    def add(self, values: list[Any], op: Op) -> Any:
        """Return the sum or the maximum of sums, 0 of none."""
        if len(values) < 2:
            return values[0] if values else self.zeros()
        rows = self.stack(values)
        return (DEFAULT if isinstance(rows, np.ndarray) else self.library).reduce_rows(rows, op)

    def all(self, flags: list[Any]) -> Any:
        """Return whether all of some flags are true."""
        each = [self._all(flag) for flag in flags]
        if len(each) < 2:
            return each[0] if each else self.xp.asarray(1) == 1
        return self.xp.all(stack_arrays(self.backend, each))

    def each_finite(self, norms: Any, finite_norms: Any) -> Any:
        """Return whether each norm is finite; see `finite`."""
        if self.on_device and finite_norms is not norms:
            return self.xp.equal(finite_norms, finite_norms)  # one kernel
        return self.xp.isfinite(norms)

    def _all(self, flags: Any) -> Any:
        """Return whether all flags of an array are true, as a 0-d array."""
        shape = tuple(flags.shape)
        if not shape:
            return flags
        if self.on_device and shape == (1,):  # the flag of one norm, without a kernel
            return self.xp.reshape(flags, ())
        return self.xp.all(flags)

    def at_most_largest(self, values: Any) -> Any:
        """Return values, the largest number of the norms' dtype where they are beyond."""
        if self.on_device:
            return self.xp.clip(values, None, self.largest_norm)  # one kernel
        return self.xp.where(values > self.largest_norm, self.largest_norm, values)

    def finite(
        self, norms: list[Any], entries_finite: Any, finite_norms: list[Any] | None = None
    ) -> Any:
        """Return whether all norms are finite, and the entries, if these were looked at.

        ``finite_norms`` are NaN on an accelerator where a norm is not finite.
        """
        pairs = zip(norms, finite_norms or norms, strict=True)
        flags = [self.each_finite(*pair) for pair in pairs]
        return self.all(flags if entries_finite is None else [entries_finite, *flags])

    def choose(
        self, ok: Any, usual: Callable[[], list[Any]], rare: Callable[[], list[Any]]
    ) -> list[Any]:
        """Return ``usual()`` where a flag of the sums is true, else ``rare()``."""
        if isinstance(ok, (bool, np.bool_, np.ndarray)) or (
            self.mode == LIBRARY and self.library.readable(ok)
        ):
            return usual() if bool(ok) else rare()
        return self.library.cond(ok, usual, rare)
