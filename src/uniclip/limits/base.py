# SPDX-License-Identifier: MIT
"""The base class of limits: how large norms may be at a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from uniclip._errors import Printed
from uniclip._types import Number

if TYPE_CHECKING:
    from uniclip._core.measure import Measured
    from uniclip._core.plan import Block
    from uniclip.backends import Backend

Array: TypeAlias = Any
State: TypeAlias = Any

SAVED_NAMES = {"norm_count": "count"}
"""The names of fields of states in what is saved, where they differ.

Optimizers look up fields by name in all of a state: a field of optax or Flax, such as ``count``,
would be found twice.
"""
LARGEST = 1e18
"""The largest norm that enters a statistic of squares: its square fits into float32."""


class NoState(NamedTuple):
    """The state of a rule without memory.

    Examples
    --------
    >>> uc.by_global_norm(1.0).init([np.asarray([3.0])])
    NoState()
    """


class Context:
    """What a limit may use beside the norms of a block.

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
        "_divided",
        "_measured",
        "_needs",
        "_number",
        "absent",
        "labels",
        "norms",
        "present",
        "threshold",
        "xp",
    )

    def __init__(  # noqa: PLR0913 - made by one function, which has these
        self,
        backend: Backend,
        blocks: Sequence[Block],
        measured: Measured,
        number: int,
        needs: Collection[str] = (),
        *,
        divided: bool = False,
    ) -> None:
        self._backend = backend
        self._blocks = blocks
        self._measured = measured
        self._number = number
        self._needs = needs
        self._divided = divided
        """Whether some norms lie in other processes."""

        norms: Any = measured.finite_norms
        block, present = blocks[number], measured.present
        self.xp: Any = backend.xp
        """The array API namespace of the norms; NumPy's where the host can read them at no cost."""
        self.norms: Array = norms[number]
        """The norms of this block, of shape ``(k, *kept)``."""
        self.labels: Sequence[Any] = block.labels
        """The label of each row's group.

        ``None`` or the number of a leaf where leaves are not grouped by labels.
        """
        self.present: Array | None = None if present is None else present[number]
        """For each row, whether some process has a gradient of its group.

        ``None`` where this process knows.
        """
        self.absent: Sequence[bool] = block.absent if present is None else ()
        """For each row, whether all gradients of its group are absent and its norm is 0;
        empty if no gradient is.
        """
        self.threshold: Array | None = None
        """The norms above which a limit clips, if it then clips to less.

        Set by the limit, and broadcast as limits.
        """

    @property
    def count(self) -> Any:
        """How many groups have gradients, in all blocks and processes.

        A 0-d array where these are joined.
        """
        self._check_not_sharded("count")
        if self._measured.present is None:
            return sum([len(block.labels) - sum(block.absent) for block in self._blocks])
        dtype = self.norms.dtype
        counts = [self.xp.sum(self.xp.astype(rows, dtype)) for rows in self._measured.present]
        return sum(counts)

    @property
    def params(self) -> Array:
        """The norms of the parameters, like ``norms``; requires ``"params"`` in ``needs``."""
        self._check_needed("params")
        params: Any = self._measured.params
        return params[self._number]

    @property
    def sizes(self) -> Array:
        """The number of entries of each norm, may be 0, as ``(k, 1, ...)``.

        Requires ``"sizes"`` in ``needs``.
        """
        self._check_needed("sizes")
        sizes: Any = self._measured.sizes
        return sizes[self._number]

    @property
    def loss(self) -> Any:
        """The loss of this step as a 0-d float32 array, or ``None``.

        Requires ``"loss"`` in ``needs``.
        """
        self._check_needed("loss")
        loss = self._measured.loss
        return None if loss is None else self.asarray(loss, self.xp.float32)

    def total(self, function: Callable[[Context], Array]) -> Array:
        """Return the sum of all entries of ``function(context)`` over all blocks: 0-d,
        in the widest dtype.
        """
        self._check_not_sharded("total")
        return self._reduce_blocks(self.xp.sum, function)

    def largest(self, function: Callable[[Context], Array]) -> Array:
        """Return the largest entry of ``function(context)`` over all blocks: 0-d,
        in the widest dtype.
        """
        self._check_not_sharded("largest")
        return self._reduce_blocks(self.xp.max, function)

    def asarray(self, value: Any, dtype: Any = None) -> Array:
        """Return a value as an array on the device of the norms,
        in their dtype unless ``dtype`` is given.
        """
        array = self.xp.asarray(value, dtype=self.norms.dtype if dtype is None else dtype)
        return self._backend.to_device_of(self.norms, array)

    def constant(self, values: Any) -> Array:
        """Return numbers that are the same at every step as a vector in the dtype of the norms, on
        their device; it must not be written.
        """
        norms, backend = self.norms, self._backend
        array = np.asarray(values, np.float32 if norms.dtype == self.xp.float32 else np.float64)
        if isinstance(norms, np.ndarray):
            return array
        return backend.to_device_of(norms, backend.constant(array, backend.device(norms)))

    def arange(self, count: int, dtype: Any = None) -> Array:
        """Return the numbers from 0 to below ``count`` as a vector on the device of the norms,
        in their dtype unless ``dtype`` is given.
        """
        dtype = self.norms.dtype if dtype is None else dtype
        return self._backend.arange(count, dtype, self.norms)

    def row(self, number: int) -> Context:
        """Return the context of one row of this block."""
        rows = slice(number, number + 1)
        block = self._blocks[self._number]
        of_row = block._replace(groups=block.groups[rows], labels=block.labels[rows])
        measured = self._measured
        fields: dict[str, Any] = {"finite_norms": [self.norms[rows, ...]]}
        for name, arrays in (("params", measured.params), ("sizes", measured.sizes)):
            fields[name] = None if arrays is None else [arrays[self._number][rows, ...]]
        fields["present"] = None if self.present is None else [self.present[rows]]
        return self._like([of_row], measured._replace(**fields), 0)

    def _like(self, blocks: Sequence[Block], measured: Measured, number: int) -> Context:
        divided = self._divided
        return Context(self._backend, blocks, measured, number, self._needs, divided=divided)

    def _reduce_blocks(
        self, reduce: Callable[[Array], Array], function: Callable[[Context], Array]
    ) -> Array:
        reduced = []
        for number in range(len(self._blocks)):
            value = function(self._like(self._blocks, self._measured, number))
            if 0 not in value.shape:
                reduced.append(reduce(value))
        if not reduced:
            return self.asarray(0)
        if len(reduced) == 1:
            return reduced[0]
        dtype = self.xp.result_type(*[value.dtype for value in reduced])
        return reduce(self.xp.stack([self.asarray(value, dtype) for value in reduced]))

    def _check_not_sharded(self, name: str) -> None:
        if self._divided:
            msg = (
                f"context.{name} looks at all norms, and of norms along axes that are divided "
                "among processes each process has its own: take a scope of whole leaves, such as "
                "uc.scopes.each_leaf"
            )
            raise ValueError(msg)

    def _check_needed(self, name: str) -> None:
        if name not in self._needs:
            msg = (
                f"a limit that looks at context.{name} has to say so: needs = "
                f"frozenset({{{name!r}}})"
            )
            raise TypeError(msg)


class Limit:
    """The base class of limits. A limit without memory needs only ``__call__``.

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
    """Whether the state changes from step to step; if so, `init` makes the first one."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """What it uses beside the norms, of ``"params"``, ``"sizes"`` and ``"loss"``,
    which take time to compute.

    With ``"loss"`` every process takes part in averaging the losses."""
    elementwise: ClassVar[bool] = False
    """Whether each limit depends on its own norm, parameter and size alone.

    Norms of any shape may come as one vector then, which takes less time on an accelerator."""
    groups: ClassVar[Sequence[Any]] = ()
    """The labels of groups that it names itself, which have a norm in every process."""

    def __init_subclass__(cls) -> None:
        """Refuse a limit that makes a first state and says that it has none."""
        if "init" in vars(cls) and not cls.stateful:
            msg = (
                f"{cls.__name__} has an init, which makes the first state: set stateful = True in "
                "the class"
            )
            raise TypeError(msg)

    def init(self, norms: Array, context: Context) -> State:
        """Return the state before the first step; the norms are zeros.

        Returns
        -------
        NamedTuple of arrays
            Each has one row for each group along its first axis, or is shared by all groups: 0-d,
            or of length 1 along that axis. If a group has no gradients at a step, the caller
            restores its rows.
        """
        return NoState()

    def __call__(self, norms: Array, state: State, context: Context) -> tuple[Array, State]:
        """Return the limits of the norms, and the next state.

        Parameters
        ----------
        norms : array
            The norms of this step, of shape ``(k, *kept)``: one row for each group in the order of
            the tree (dict keys sorted), ``kept`` the axes that a norm does not cover; in float32 or
            wider. They are NumPy's arrays where the host can read the gradients at no cost, unless
            the limit has arrays as attributes; else arrays of the gradients' library. A norm that
            is not finite is NaN here.
        state : NamedTuple of arrays
            What `init` or the previous step returned.
        context : Context
            Holds the array API namespace ``context.xp``, the ``context.labels`` of groups, sums
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


class BuiltIn(Printed, Limit):
    """One of uniclip's limits."""


class StatefulLimit(BuiltIn):
    """A limit with memory."""

    stateful: ClassVar[bool] = True


def zero_counts(context: Context) -> Array:
    """Return an int32 0 for each row."""
    return context.asarray(
        context.xp.zeros(tuple(context.norms.shape)[:1], dtype=context.xp.int32), context.xp.int32
    )


def zeros(context: Context, length: int, dtype: Any = None) -> Array:
    """Return zeros of shape ``(k, length, *kept)``, sharded as the norms are."""
    xp, like = context.xp, context.xp.expand_dims(0 * context.norms, axis=1)
    dtype = like.dtype if dtype is None else dtype
    zeros = xp.zeros((1, length, *[1] * (len(like.shape) - 2)), dtype=dtype)
    return context.asarray(zeros, dtype) + xp.astype(like, dtype)


def push(xp: Any, histories: Array, newest: Array) -> Array:
    """Return histories, newest first along axis 1, with a new first entry and without the last."""
    return xp.concat([xp.expand_dims(newest, axis=1), histories[:, :-1, ...]], axis=1)


def align(xp: Any, rows: Array, norms: Array) -> Array:
    """Return one value for each row with as many axes as the norms, so that they broadcast."""
    return xp.reshape(rows, tuple(rows.shape) + (1,) * (len(norms.shape) - len(rows.shape)))


def unlimited(xp: Any, n: Array) -> float:
    """Return the limit that stands for none: the dtype's largest number,
    since NaN debuggers stop at ∞.
    """
    return float(xp.finfo(n.dtype).max)


def unit_of(xp: Any, top: Array) -> Array:
    """Return a divisor that keeps squares of numbers up to ``top`` in range:
    ``top`` or a little less.

    Its reciprocal, by which compilers multiply, is a normal number. For zeros it is a number whose
    reciprocal can be squared in a second derivative.
    """
    numbers = xp.finfo(top.dtype)
    return xp.where(
        top > 0, xp.clip(top, float(numbers.smallest_normal), float(numbers.max) / 4), 2.0**-30
    )


def at_most(xp: Any, norms: Array, bound: Array | float) -> Array:
    """Return the smaller of norm and bound; the norm if it is NaN."""
    return xp.where(norms > bound, bound, norms)


def squarable(xp: Any, norms: Array) -> Array:
    """Return norms for a statistic of squares, at most `LARGEST`."""
    return xp.clip(norms, 0.0, LARGEST)
