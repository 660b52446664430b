# SPDX-License-Identifier: MIT
"""The base class of limits: how large norms may be at a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from uniclip._errors import Checked
from uniclip._types import DType, Flags, Limits, Namespace, Norms, Number, State, Tensor

if TYPE_CHECKING:
    from uniclip._core.blocks import Block, Measured
    from uniclip.backends import Backend

SAVED_NAMES = {"norm_count": "count"}
"""Fields of states, and the names under which they are saved, if these differ.

optax and Flax look up fields by name in the whole state of an optimizer, so a field with a name of
theirs, such as ``count``, would be found twice.
"""
LARGEST = 1e18
"""The largest norm that enters a statistic of squares: its square fits into float32."""


class NoState(NamedTuple):
    """The state of a rule that is not stateful.

    Examples
    --------
    >>> uc.by_global_norm(1.0).init([np.asarray([3.0])])
    NoState()
    """


class Context:
    """The inputs of a limit in addition to the norms of a block.

    Most steps have one block. A limit is called once for each block; ``total`` and ``largest``
    reduce over all blocks.

    Examples
    --------
    >>> class Mean(uc.Limit):
    ...     def __call__(self, norms, state, context):
    ...         return context.total(lambda block: block.norms) / context.count, state
    ...
    >>> rule = uc.Rule(Mean(), scope=uc.scopes.each_leaf)
    >>> uc.clip([np.asarray([1.0]), np.asarray([3.0])], rule)[0]
    [array([1.]), array([2.])]
    """

    __slots__ = (
        "_backend",
        "_blocks",
        "_measured",
        "_needs",
        "_norms_sharded",
        "_number",
        "absent",
        "labels",
        "norms",
        "present",
        "threshold",
        "xp",
    )

    def __init__(  # noqa: PLR0913 - called in one place
        self,
        backend: Backend,
        blocks: Sequence[Block],
        measured: Measured,
        number: int,
        needs: Collection[str] = (),
        *,
        norms_sharded: bool = False,
    ) -> None:
        self._backend = backend
        self._blocks = blocks
        self._measured = measured
        self._number = number
        self._needs = needs
        self._norms_sharded = norms_sharded
        """Whether norms keep a sharded axis, so that each process has only some of them."""

        block = blocks[number]
        present = measured.present
        self.xp: Namespace = backend.xp
        """The array API namespace of the norms; NumPy's if the host can read them at no cost."""
        self.norms: Norms = measured.finite_norms[number]
        """The norms of this block, of shape ``(k, *kept)``."""
        self.labels: Sequence[Any] = block.labels
        """The label of each row's group.

        Without named groups it is the number of a leaf, or ``None`` for one norm of all leaves.
        """
        self.present: Flags | None = None if present is None else present[number]
        """For each row, whether some process has a gradient of its group.

        ``None`` where `absent` is enough, as in a single process.
        """
        self.absent: Sequence[bool] = block.absent if present is None else ()
        """For each row, whether all gradients of its group are absent, so that its norm is 0.

        Empty if no row is absent.
        """
        self.threshold: Limits | None = None
        """The norms above which the limit clips, if these differ from the limits.

        Set by the limit, in a shape that broadcasts against the norms.
        """

    @property
    def count(self) -> int | Tensor:
        """The number of groups that have gradients, in all blocks and processes.

        A 0-d array if there are several processes.
        """
        self._check_not_sharded("count")
        present = self._measured.present
        if present is None:
            return sum([len(block.labels) - sum(block.absent) for block in self._blocks])

        xp = self.xp
        dtype = self.norms.dtype
        return sum([xp.sum(xp.astype(rows, dtype)) for rows in present])

    @property
    def params(self) -> Norms:
        """The norms of the parameters, like ``norms``; requires ``"params"`` in ``needs``."""
        self._check_needed("params")
        params: Any = self._measured.params
        return params[self._number]

    @property
    def sizes(self) -> Tensor:
        """The number of elements of each norm, possibly 0, as ``(k, 1, ...)``.

        Requires ``"sizes"`` in ``needs``.
        """
        self._check_needed("sizes")
        sizes: Any = self._measured.sizes
        return sizes[self._number]

    @property
    def loss(self) -> Tensor | None:
        """The loss of this step as a 0-d float32 array, or ``None``.

        Requires ``"loss"`` in ``needs``.
        """
        self._check_needed("loss")
        loss = self._measured.loss
        if loss is None:
            return None
        return self.asarray(loss, self.xp.float32)

    def total(self, function: Callable[[Context], Tensor]) -> Tensor:
        """Return the sum of all elements of ``function(context)`` over all blocks: 0-d,
        in the widest dtype.
        """
        self._check_not_sharded("total")
        return self._reduce_blocks(self.xp.sum, function)

    def largest(self, function: Callable[[Context], Tensor]) -> Tensor:
        """Return the largest element of ``function(context)`` over all blocks: 0-d,
        in the widest dtype.
        """
        self._check_not_sharded("largest")
        return self._reduce_blocks(self.xp.max, function)

    def asarray(self, value: Any, dtype: DType | None = None) -> Tensor:
        """Return a value as an array on the device of the norms,
        in their dtype unless ``dtype`` is given.
        """
        if dtype is None:
            dtype = self.norms.dtype
        return self._backend.to_device_of(self.norms, self.xp.asarray(value, dtype=dtype))

    def constant(self, values: Sequence[float] | np.ndarray[Any, Any]) -> Tensor:
        """Return numbers that never change as a vector in the dtype and on the device of the norms.

        Do not write into it: it may be cached.
        """
        norms = self.norms
        backend = self._backend
        array = np.asarray(values, np.float32 if norms.dtype == self.xp.float32 else np.float64)
        if isinstance(norms, np.ndarray):
            return array

        # The backend caches constants by their values, so that each is sent to a device once.
        on_device = backend.constant(array, backend.device(norms))
        return backend.to_device_of(norms, on_device)

    def row(self, number: int) -> Context:
        """Return the context of one row of this block."""
        rows = slice(number, number + 1)
        block = self._blocks[self._number]
        block = block._replace(groups=block.groups[rows], labels=block.labels[rows])

        measured = self._measured
        fields: dict[str, Any] = {"finite_norms": [self.norms[rows, ...]], "present": None}
        if self.present is not None:
            fields["present"] = [self.present[rows]]
        for name, arrays in (("params", measured.params), ("sizes", measured.sizes)):
            fields[name] = None if arrays is None else [arrays[self._number][rows, ...]]
        return self._like([block], measured._replace(**fields), 0)

    def _like(self, blocks: Sequence[Block], measured: Measured, number: int) -> Context:
        """Return the context of another block."""
        backend, needs = self._backend, self._needs
        sharded = self._norms_sharded
        return Context(backend, blocks, measured, number, needs, norms_sharded=sharded)

    def _reduce_blocks(
        self, reduce: Callable[[Tensor], Tensor], function: Callable[[Context], Tensor]
    ) -> Tensor:
        """Return the values of a function of each block, reduced to a 0-d array."""
        reduced = []
        for number in range(len(self._blocks)):
            values = function(self._like(self._blocks, self._measured, number))
            # The maximum of an empty array would raise an error.
            if 0 not in values.shape:
                reduced.append(reduce(values))
        if not reduced:
            return self.asarray(0)
        if len(reduced) == 1:
            return reduced[0]

        # Blocks may differ in dtype and device.
        dtype = self.xp.result_type(*[value.dtype for value in reduced])
        return reduce(self.xp.stack([self.asarray(value, dtype) for value in reduced]))

    def _check_not_sharded(self, name: str) -> None:
        if self._norms_sharded:
            msg = (
                f"context.{name} needs all norms, but with norms along sharded axes each process "
                "has only its own; use a scope of whole leaves, such as uc.scopes.each_leaf"
            )
            raise ValueError(msg)

    def _check_needed(self, name: str) -> None:
        if name not in self._needs:
            msg = (
                f"context.{name} is computed only for limits that declare it; set needs = "
                f"frozenset({{{name!r}}}) in the class of the limit"
            )
            raise TypeError(msg)


class Limit:
    """The base class of limits. A limit that is not stateful needs only ``__call__``.

    Examples
    --------
    >>> class Tenth(uc.Limit):
    ...     needs = frozenset({"params"})
    ...
    ...     def __call__(self, norms, state, context):
    ...         return 0.1 * context.params, state
    >>> rule = uc.Rule(Tenth(), scope=uc.scopes.each_leaf)
    >>> uc.clip(np.asarray([3.0, 4.0]), rule, params=np.asarray([0.0, 10.0]))[0]
    array([0.6, 0.8])
    """

    stateful: ClassVar[bool] = False
    """Whether the state changes from step to step; if so, `init` returns the first one."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """The inputs in addition to the norms, of ``"params"``, ``"sizes"`` and ``"loss"``,
    which take time to compute.

    With ``"loss"`` every process takes part in averaging the losses."""
    elementwise: ClassVar[bool] = False
    """Whether each limit depends on its own norm, parameter and size alone.

    If so, it may get the norms of all blocks as one vector, which saves kernels on an accelerator.
    """
    in_range: ClassVar[bool] = False
    """Whether limits and thresholds are always finite numbers of the norms' dtype.

    If not, a step clips them to its range, which takes an operation."""
    groups: ClassVar[Sequence[Any]] = ()
    """The labels of the groups that the limit names; each has a norm in every process."""

    def __init_subclass__(cls) -> None:
        """Raise if a class defines `init` and is not stateful: its state would never be used."""
        if "init" in vars(cls) and not cls.stateful:
            msg = (
                f"{cls.__name__} defines init, which returns a first state, but is not stateful; "
                "set stateful = True in the class"
            )
            raise TypeError(msg)

    def init(self, norms: Norms, context: Context) -> State:
        """Return the state before the first step; the norms are zeros.

        Returns
        -------
        NamedTuple of arrays
            An array has one row for each group along its first axis. An array that all groups share
            is 0-d, or has length 1 along that axis. If a group has no gradients at a step, the
            caller restores its rows.
        """
        return NoState()

    def __call__(self, norms: Norms, state: Any, context: Context) -> tuple[Limits | Number, State]:
        """Return the limits of the norms, and the next state.

        Parameters
        ----------
        norms : array
            The norms of this step, of shape ``(k, *kept)``: one row for each group in the order of
            the tree (dict keys sorted), ``kept`` the axes that a norm does not cover; in float32 or
            wider. They are NumPy's arrays if the host can read the gradients at no cost and the
            limit has no arrays as attributes, else arrays of the gradients' library. A norm that is
            not finite is NaN here.
        state : NamedTuple of arrays
            The result of `init` or of the previous step.
        context : Context
            Has the array API namespace ``context.xp``, the ``context.labels`` of groups, sums
            over all blocks of norms and, if in `needs`, ``context.params``, ``context.sizes`` and
            ``context.loss``. A limit that clips above a threshold to less than the threshold sets
            ``context.threshold`` for the report.

        Returns
        -------
        limits : number or array
            Of a shape that broadcasts against the norms; infinity for no limit.
        state : NamedTuple of arrays
            With the same shapes and dtypes. After a step that is not finite the old state is kept.
        """
        raise NotImplementedError


MaxNorm: TypeAlias = Number | Limit
"""The type of arguments that are limits."""


class BuiltIn(Checked, Limit):
    """One of uniclip's limits."""


class StatefulLimit(BuiltIn):
    """A stateful limit."""

    stateful: ClassVar[bool] = True


def zero_counts(context: Context) -> Tensor:
    """Return an int32 0 for each row."""
    xp = context.xp
    rows = tuple(context.norms.shape)[:1]
    return context.asarray(xp.zeros(rows, dtype=xp.int32), xp.int32)


def zeros(context: Context, length: int, dtype: DType | None = None) -> Tensor:
    """Return zeros of shape ``(k, length, *kept)``, sharded as the norms are."""
    xp = context.xp
    like = xp.expand_dims(0 * context.norms, axis=1)
    if dtype is None:
        dtype = like.dtype

    # Adding the norms, times 0, gives the zeros their sharding.
    kept = [1] * (len(like.shape) - 2)
    history = xp.zeros((1, length, *kept), dtype=dtype)
    return context.asarray(history, dtype) + xp.astype(like, dtype)


def push(xp: Namespace, histories: Tensor, newest: Tensor) -> Tensor:
    """Return histories, newest first along axis 1, with a new first value and without the last."""
    first = xp.expand_dims(newest, axis=1)
    return xp.concat([first, histories[:, :-1, ...]], axis=1)


def align(xp: Namespace, rows: Tensor, norms: Tensor) -> Tensor:
    """Return an array of one value for each row with axes added, to broadcast against the norms."""
    missing = len(norms.shape) - len(rows.shape)
    return xp.reshape(rows, tuple(rows.shape) + (1,) * missing)


def unlimited(xp: Namespace, norms: Tensor) -> float:
    """Return the sentinel for "no limit": the largest number of the norms' dtype.

    NaN debuggers stop at an infinity.
    """
    return float(xp.finfo(norms.dtype).max)


def unit_of(xp: Namespace, largest: Tensor) -> Tensor:
    """Return a divisor, near ``largest``, that keeps squares of numbers up to ``largest`` in range.

    Its reciprocal, by which compilers multiply, is a normal number. For zeros it is a number whose
    reciprocal can be squared, as a second derivative does.
    """
    numbers = xp.finfo(largest.dtype)
    unit = xp.clip(largest, float(numbers.smallest_normal), float(numbers.max) / 4)
    return xp.where(largest > 0, unit, 2.0**-30)


def squarable(xp: Namespace, norms: Norms) -> Norms:
    """Return norms for a statistic of squares, at most `LARGEST`."""
    return xp.clip(norms, 0.0, LARGEST)
