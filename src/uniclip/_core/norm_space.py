# SPDX-License-Identifier: MIT
"""Where norms are computed, by NumPy or by the gradients' library, and conversions between the two.

If the host reads the gradients at no cost, norms, limits and factors are NumPy arrays: eager JAX
and TensorFlow take 2 to 18 times as long for so small arrays. After the sums of leaves, only this
module creates, converts, rounds and branches on norms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from uniclip._core.tree import OpenedTree
from uniclip._types import Array, Device, DType, Flags, Limits, Namespace, Norms, Op, Tensor
from uniclip.backends import DEFAULT, Backend, backend_of, numpy_of
from uniclip.backends.arithmetic import cast
from uniclip.backends.base import (
    HOST,
    LIBRARY,
    NUMPY,
    RECORDED,
    TRACED,
    LeafInfo,
    Terms,
    reduce_rows,
    stack_arrays,
)


def _norm_dtypes(leaf_info: LeafInfo, *, narrow: bool) -> tuple[Any, Any]:
    """Return the dtypes of norms, of the library and of NumPy."""
    # All processes use the widest dtype of any, or they would reduce sums of different dtypes.
    xp = leaf_info.backend.xp
    dtype = leaf_info.dtype
    if leaf_info.narrow and not narrow:
        dtype = xp.float64
    numpys = {xp.float32: np.float32, xp.float64: np.float64}
    return dtype, numpys.get(dtype, dtype)


def zero_or_nan(array: Tensor) -> Tensor:
    """Return 0 for each finite number, and NaN for NaN and ∞.

    Added to a result, it marks what is not finite. Unlike `where` with a constant NaN, it keeps
    derivatives, and does not stop NaN debuggers while all numbers are finite.
    """
    # ∞ - ∞ is NaN.
    return array - array


class NormSpace:
    """The library, dtype and device of a plan's norms, and the operations that depend on them."""

    def __init__(self, leaf_info: LeafInfo, mode: int, device: Device, *, narrow: bool) -> None:
        self.library: Backend = leaf_info.backend
        """The backend of the gradients."""
        self.mode = mode
        """The mode of the step."""
        self.device = device
        """The device of the norms in their library."""
        self.host = mode == HOST
        """Whether norms, limits and factors are NumPy's arrays."""
        self.compiled = mode == TRACED
        """Whether the step is traced: arrays have no values, and nothing may be cached."""
        self.on_device = mode == LIBRARY
        """Whether the library computes eagerly: on an accelerator, or for a limit with arrays."""
        self.unstacked = self.compiled and not self.library.stacks(None)
        """Whether compilers want each norm as an array of its own."""
        self.backend: Backend = DEFAULT if self.host else self.library
        """The backend of norms, limits and factors."""
        self.xp: Namespace = self.backend.xp
        """Its array API namespace."""

        self.double = leaf_info.double
        """Whether sums are float64."""
        self.narrow = narrow
        """Whether all squares fit into float64, in all processes."""
        xp = self.library.xp
        self.sum_dtype: DType = xp.float64 if self.double else xp.float32
        """The library's dtype of sums."""
        self.dtypes = _norm_dtypes(leaf_info, narrow=narrow)
        self.largest_norm = float(np.finfo(self.dtypes[1]).max)
        """The largest number of the norms' dtype."""
        self.largest_factor = min(self.largest_norm, leaf_info.largest_factor)
        """The largest factor that the dtypes of norms and of all leaves can hold."""

    @property
    def derives(self) -> bool:
        """Whether norms may have derivatives."""
        return self.mode in {RECORDED, TRACED}

    def at_host(self) -> NormSpace:
        """Return the space of the same norms as NumPy arrays, as they are recorded."""
        # A recorded report has to be readable without the library of the run.
        host = copy.copy(self)
        host.library = DEFAULT
        host.backend = DEFAULT
        host.xp = DEFAULT.xp
        host.mode = HOST
        host.host = True
        host.device = None
        return host

    # Sums of the leaves.

    def sums(self, tree: OpenedTree, terms: Terms) -> list[Any]:
        """Return the sums of each block's norms."""
        if not terms.arrays:
            return []
        # A limit is a constant of the step, so parameters are detached and need no derivative.
        mode = self.mode
        if mode == RECORDED and tree.name == "params":
            mode = LIBRARY
        return self.library.sums(mode, terms)

    def zero_like(self, first: Any) -> Array:
        """Return a 0-d leaf of 0, of the dtype of another leaf."""
        zero = self.library.from_host(np.zeros((), np.float32), self.device)
        if first is None:
            return zero
        return cast(self.library.xp, zero, first.dtype)

    # Convert arrays to where the norms are, and back.

    def read_foreign(self, value: Any) -> Any:
        """Return an argument as it is, but an array of another library as a NumPy array if all
        gradients are absent.
        """
        # Without any gradient, the library is unknown, and NumPy is the default.
        if self.library is DEFAULT and backend_of(value) not in {None, DEFAULT}:
            return numpy_of(value)
        return value

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        """Return the values of a small array."""
        if isinstance(array, np.ndarray):
            return array
        [values] = self.library.to_host([array])
        return values

    def to_library(self, array: Any) -> Tensor:
        """Return an array as one of the gradients' library, on their device."""
        if not isinstance(array, NUMPY):
            return array
        return self.library.from_host(np.asarray(array), self.device)

    def as_norms(self, arrays: list[Any]) -> list[Any]:
        """Return arrays where the norms are."""
        return arrays if self.host else list(map(self.to_library, arrays))

    def constants(self, arrays: list[Any]) -> list[Any]:
        """Return arrays that are the same at every step where the norms are.

        NumPy's are sent to a device once.
        """
        if self.host:
            return arrays
        library = self.library
        device = self.device
        return [
            library.constant(np.asarray(array), device) if isinstance(array, NUMPY) else array
            for array in arrays
        ]

    def view(self, array: Any) -> Any:
        """Return an array of the library or of NumPy where the norms are.

        ``None`` if the host cannot read it.
        """
        if not self.host:
            return self.to_library(array)
        return array if isinstance(array, NUMPY) else self.library.as_numpy(array)

    def state_to_norms(self, norms: Norms, array: Any) -> Tensor:
        """Return an array of a state where the norms are.

        The gradients may have moved to another device since the previous step.
        """
        if not self.host:
            return self.library.to_device_of(norms, self.library.detach(array))
        view = self.view(array)
        if view is not None:
            return view
        # The state is still on an accelerator, and the gradients are on the host.
        [values] = self.library.to_host([self.library.detach(array)])
        return values

    # Operations on sums and norms.

    def round_to_norms(self, array: Any) -> Tensor:
        """Return an array in the dtype of the norms."""
        # Norms are rounded before they are compared with limits, so that a norm equal to its limit
        # is not clipped, in any backend.
        if isinstance(array, NUMPY):
            return np.asarray(array, self.dtypes[1])
        return cast(self.library.xp, array, self.dtypes[0])

    def cast_limit(self, limit: Any, norms: Norms) -> Limits:
        """Return a limit in the dtype of norms, as an array that broadcasts against them."""
        if isinstance(limit, (float, int, np.generic)):
            return self.xp.asarray(limit, dtype=norms.dtype)
        return cast(self.xp, limit, norms.dtype)

    def at_most_largest(self, limits: Tensor) -> Limits:
        """Return limits, at most the largest number of the norms' dtype."""
        # `clip` is one kernel. Like `where` it keeps NaN.
        if self.on_device:
            return self.xp.clip(limits, None, self.largest_norm)
        return self.xp.where(limits > self.largest_norm, self.largest_norm, limits)

    def join(self, arrays: list[Any]) -> Tensor:
        """Return the elements of sums as one vector."""
        if self.host and all([isinstance(array, NUMPY) for array in arrays]):
            return np.concatenate([np.asarray(array).reshape(-1) for array in arrays])
        xp = self.library.xp
        vectors = []
        for array in arrays:
            wide = cast(xp, self.to_library(array), self.sum_dtype)
            vectors.append(xp.reshape(wide, (-1,)))
        return vectors[0] if len(vectors) == 1 else xp.concat(vectors, axis=0)

    def take(self, vector: Any, indices: Any, shape: tuple[int, ...] = (-1,)) -> Tensor:
        """Return elements of a vector in a shape, by a slice, or by indices that never change."""
        if isinstance(vector, np.ndarray):
            return vector[indices].reshape(shape)
        xp = self.library.xp
        if isinstance(indices, slice):
            return xp.reshape(vector[indices], shape)
        [numbers] = self.constants([indices])
        return xp.reshape(xp.take(vector, numbers, axis=0), shape)

    def stack(self, sums: list[Any]) -> Tensor:
        """Return sums as the rows of one array."""
        if self.host and all([isinstance(total, NUMPY) for total in sums]):
            return np.array(sums)
        return stack_arrays(self.library, list(map(self.to_library, sums)))

    def add(self, sums: list[Any], op: Op) -> Tensor:
        """Return the sum or the maximum of sums, 0 if there are none."""
        if not sums:
            [zero] = self.as_norms([np.zeros((), np.float64 if self.double else np.float32)])
            return zero
        if len(sums) == 1:
            return sums[0]
        # Stacked and reduced at once, since a chain of additions is slow to compile.
        rows = self.stack(sums)
        backend: Backend = DEFAULT if isinstance(rows, np.ndarray) else self.library
        return reduce_rows(backend, rows, op)

    def all(self, flags: list[Any]) -> Flags:
        """Return whether all of some flags are true."""
        of_arrays = [self._all_of(flag) if len(flag.shape) else flag for flag in flags]
        # A tree without leaves is finite, and reports an array for it as others do.
        if not of_arrays:
            return self.xp.asarray(1) == 1
        if len(of_arrays) == 1:
            return of_arrays[0]
        return self.xp.all(stack_arrays(self.backend, of_arrays))

    def _all_of(self, flags: Tensor) -> Flags:
        """Return whether all flags of an array are true."""
        # On an accelerator a reshape of a single flag starts no kernel.
        if tuple(flags.shape) == (1,):
            return self.xp.reshape(flags, ())
        return self.xp.all(flags)

    def each_finite(self, norms: Norms, finite_norms: Norms) -> Flags:
        """Return whether each norm is finite; see `finite`."""
        # NaN differs from itself: one kernel, where `isfinite` takes several.
        if self.on_device and finite_norms is not norms:
            return self.xp.equal(finite_norms, finite_norms)
        return self.xp.isfinite(norms)

    def finite(
        self,
        norms: list[Any],
        elements_finite: Flags | None,
        finite_norms: list[Any] | None = None,
    ) -> Flags:
        """Return whether all norms are finite, and all elements, if these were checked.

        ``finite_norms`` are the norms, on an accelerator with NaN where they are not finite.
        """
        flags = list(map(self.each_finite, norms, finite_norms or norms))
        if elements_finite is not None:
            flags = [elements_finite, *flags]
        return self.all(flags)

    def choose(
        self, ok: Flags, usual: Callable[[], list[Any]], rare: Callable[[], list[Any]]
    ) -> list[Any]:
        """Return ``usual()`` if a flag of the sums is true, else ``rare()``."""
        # To read a flag lets the step skip the other branch; traced code has to compile both.
        is_numpy = isinstance(ok, (bool, np.bool_, np.ndarray))
        if is_numpy or (self.mode == LIBRARY and self.library.readable(ok)):
            return usual() if bool(ok) else rare()
        return self.library.cond(ok, usual, rare)
