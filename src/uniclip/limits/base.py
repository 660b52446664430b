# SPDX-License-Identifier: MIT
"""What a limit is: how large norms may be at a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from uniclip._repr import Printed

if TYPE_CHECKING:
    from uniclip.backends import Backend

Arrays: TypeAlias = list[Any]
State: TypeAlias = Any

LARGEST = 1e18
"""The largest norm that enters a statistic of squares: a float32 can hold the square."""


class NoState(NamedTuple):
    """The state of a rule that remembers nothing."""


class Given(NamedTuple):
    """What a limit may ask for beside the norms."""

    backend: Backend
    labels: list[Any]
    """The label of each norm's group; ``None`` or a number where leaves are not grouped by labels."""
    reference: Callable[[], Arrays]
    """``reference()`` measures the parameters by the rule's own scope and norm; a ``ValueError`` without ``params``."""
    sizes: Callable[[], Arrays]
    """``sizes()`` counts the entries that each norm covers."""
    find_loss: Callable[[], Any] = lambda: None
    """What finds the loss of this step."""

    @property
    def loss(self) -> Any:
        """The loss of this step, if the caller gave it; the mean of all processes' where norms are joined, too."""
        return self.find_loss()

    @property
    def xp(self) -> Any:
        """The array API namespace of the norms."""
        return self.backend.xp

    def only(self, number: int) -> Given:
        """Return the same for one of the norms."""
        return self._replace(
            labels=[self.labels[number]],
            reference=lambda: [self.reference()[number]],
            sizes=lambda: [self.sizes()[number]],
        )

    def place(self, like: Any, array: Any) -> Any:
        """Return an array on the device of another one."""
        return self.backend.to_device_of(like, array)

    def counter(self, norms: Arrays) -> Any:
        """Return the number of steps before the first one: an int32 0."""
        zero = self.xp.zeros((), dtype=self.xp.int32)
        return self.place(norms[0], zero) if norms else zero


class Limit:
    """How large norms may be; one without memory is its ``__call__`` alone.

    Examples
    --------
    >>> class Tenth(uc.Limit):
    ...     def __call__(self, norms, state, given):
    ...         return [0.1 * norm for norm in given.reference()], state
    >>> rule = uc.Rule(Tenth(), scope=uc.each_leaf)
    >>> uc.clip(np.asarray([3.0, 4.0]), rule, params=np.asarray([0.0, 10.0]))[0]
    array([0.6, 0.8])
    """

    memory: ClassVar[bool] = False
    """Whether the state changes from step to step; if so, `init` makes the first one."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """``{"loss"}`` if it looks at ``given.loss``: then every process takes part in joining their losses."""

    def init(self, norms: Arrays, given: Given) -> State:  # noqa: ARG002 - a limit with memory wants them
        """Return the state before the first step, given zeros for norms."""
        return NoState()

    def __call__(self, norms: Arrays, state: State, given: Given) -> tuple[Arrays, State]:
        """Return one limit for each norm, and the next state.

        Parameters
        ----------
        norms : list of arrays
            The norms just measured, one for each group in the order of the tree (the keys of a dict
            sorted), in float32 or wider; 0-d, or of the shape of the axes that a norm does not cover.
            A norm that is not finite is NaN here.
        state : tree of arrays, such as a NamedTuple
            What `init` or the step before returned.
        given : Given
            The array API namespace ``given.xp``, the norms of the parameters ``given.reference()``, the
            numbers of entries ``given.sizes()``, the ``given.labels`` of groups, and ``given.loss``.

        Returns
        -------
        limits : list of floats or arrays
            Infinity leaves alone.
        state : tree of arrays
            Of the same shapes and dtypes. After a step that is not finite, the old one is kept.
        """
        raise NotImplementedError


class Remembers(Printed, Limit):
    """A limit with memory."""

    memory: ClassVar[bool] = True


def empty(given: Given, n: Any, window: int) -> Any:
    """Return a history without norms, for norms like ``n``: -1 where there is none."""
    like = given.xp.expand_dims(0 * n, axis=0)  # divided among devices as the norms are
    return given.place(n, given.xp.zeros((window, *([1] * len(n.shape))), dtype=n.dtype)) + like - 1


def unlimited(xp: Any, n: Any) -> Any:
    """Return the limit of a norm that is not limited: the largest number, since ∞ would alarm who looks for it."""
    return xp.ones_like(n) * float(xp.finfo(n.dtype).max)


def unit_of(xp: Any, top: Any) -> Any:
    """Return what to divide by, so that squares of numbers up to ``top`` stay in range: ``top`` or a little less.

    Its reciprocal, by which compilers multiply, is a normal number.
    """
    most = xp.ones_like(top) * (float(xp.finfo(top.dtype).max) / 4)
    return xp.where(top > 0, at_most(xp, top, most), xp.ones_like(top))


def pushed(xp: Any, history: Any, n: Any) -> Any:
    """Return a history with a new first entry, without its last one."""
    return xp.concat([xp.expand_dims(n, axis=0), history[:-1, ...]], axis=0)


def at_most(xp: Any, norm: Any, bound: Any) -> Any:
    """Return the smaller of two; the norm if it is NaN."""
    return xp.where(norm > bound, bound, norm)
