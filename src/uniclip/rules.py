# SPDX-License-Identifier: MIT
"""A rule is its four choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from uniclip import core
from uniclip._checks import check, one_of, real, settle
from uniclip._mistakes import is_rule, own_module, refuse_as_rule, refuse_as_transformation
from uniclip._repr import Printed, short
from uniclip.curves import hard
from uniclip.decide import Report, given_of
from uniclip.gradients import cast, read
from uniclip.limits import Limit, NoState, as_limit
from uniclip.measure import AllReduce, broadcasts, zeros
from uniclip.nonfinite import POLICIES, NonFinite
from uniclip.norms import L2, Norm
from uniclip.scopes import Scope, all_leaves

if TYPE_CHECKING:
    from uniclip.backends import Backend

Curve: TypeAlias = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True, repr=False)
class Rule(Printed):
    """Multiply each gradient by ``curve(norm, limit)``, with one norm per scope.

    Parameters
    ----------
    limit : float, 0-d array, or Limit
        How large the norm may be; a number is the same at every step, ``math.inf`` only measures.
    scope : Scope, default all_leaves
        Which entries share one norm.
    norm : Norm, default L2
        How their size is measured.
    curve : callable, default hard
        ``curve(xp, norm, limit)`` returns the factor; ``xp`` is the array API namespace of the
        gradients, the norm finite or not, the limit finite.
    nonfinite : {"propagate", "skip", "zero", "raise"}, default "propagate"
        What happens to gradients with NaN or ∞. ``"propagate"``: every entry of their scope becomes
        NaN. ``"skip"``: all gradients become 0, and the report says that they were not finite.
        ``"zero"``: the entries that are not finite become 0, then the rest is clipped. ``"raise"``:
        a ``FloatingPointError`` names the leaves; code that is traced has no values to look at, so
        there it is a ``TypeError``. In all of them the state stays as it was.

    Raises
    ------
    TypeError
        If one of the choices is none.
    ValueError
        If a constant limit is negative or NaN, or ``nonfinite`` is none of the four.

    Examples
    --------
    >>> uc.Rule(1.0, scope=uc.each_leaf, norm=uc.RMS)
    Rule(Constant(1.0), scope=each_leaf, norm=RMS)
    """

    limit: Any
    scope: Scope = field(default_factory=lambda: all_leaves)  # compilers cannot take plain defaults of a class
    norm: Norm = field(default_factory=lambda: L2)
    curve: Curve = hard
    nonfinite: NonFinite = "propagate"

    def __post_init__(self) -> None:
        """Read a number or an array as a constant limit, and refuse what is none of the four choices."""
        if not isinstance(self.limit, Limit):
            settle(self, limit=as_limit(self.limit))
        check("scope", self.scope, isinstance(self.scope, Scope), "a uc.Scope, such as uc.each_leaf or uc.unit()")
        check("norm", self.norm, isinstance(self.norm, Norm), "a uc.Norm, such as uc.L2")
        fits = callable(self.curve) and not isinstance(self.curve, type)
        check("curve", self.curve, fits, "a function of (xp, norm, limit), such as uc.hard or uc.Regularized(0.01)")
        one_of("nonfinite", self.nonfinite, POLICIES)

    @property
    def memory(self) -> bool:
        """Whether the rule remembers earlier steps."""
        limit: Limit = self.limit
        return limit.memory

    @property
    def by_leaf(self) -> bool:
        """Whether the state knows leaves by their order, so that the same ones must have gradients at every step."""
        return self.memory and self.scope.join is None

    def init(self, grads: Any) -> Any:
        """Return the state before the first step.

        Parameters
        ----------
        grads : array or tree of arrays
            Gradients, or parameters of the same shapes; only shapes and dtypes count.

        Returns
        -------
        state : tree of arrays
        """
        refuse_as_transformation(self)
        limit: Limit = self.limit
        if not limit.memory:
            return NoState()
        gradients = read(grads, self.scope, name="params")
        with gradients.backend.quiet(gradients.first):
            return limit.init(zeros(gradients), given_of(self, gradients))

    def update(
        self,
        grads: Any,
        state: Any,
        params: Any = None,
        all_reduce: AllReduce | None = None,
        *,
        in_place: bool = False,
        loss: Any = None,
    ) -> tuple[Any, Any, Report]:
        """Clip ``grads``; the pure form, for jit, scan and checkpoints.

        Parameters
        ----------
        grads, params, all_reduce
            As in `uniclip.clip`.
        state : tree of arrays
            What `init` or the step before returned.
        in_place : bool, default False
            Write into the given arrays, as `uniclip.clip_` does.
        loss : float or 0-d array, optional
            The loss of this step, for limits that look at it, such as that of `uniclip.skip_spikes`. Where norms are
            joined (by ``all_reduce``, or since arrays are distributed), they see the mean of all processes' losses.

        Returns
        -------
        clipped : tree
        state : tree of arrays
            The next state; the old one after a step that is not finite.
        report : Report

        Raises
        ------
        TypeError, ValueError, FloatingPointError
            As `uniclip.clip` and, with ``in_place``, `uniclip.clip_`.
        """
        return core.update(self, grads, state, params, all_reduce, in_place=in_place, loss=loss)

    def measure(
        self, grads: Any, state: Any, params: Any = None, all_reduce: AllReduce | None = None, *, loss: Any = None
    ) -> tuple[Any, Report]:
        """Do as `update` does but for the scaling: the report says what to multiply the gradients by.

        Parameters
        ----------
        grads, state, params, all_reduce, loss
            As in `update`.

        Returns
        -------
        state : tree of arrays
            The next state; the old one after a step that is not finite.
        report : Report

        Raises
        ------
        TypeError, ValueError, FloatingPointError
            As `uniclip.clip`.

        Examples
        --------
        >>> rule, grads = uc.by_global_norm(1.0), np.asarray([3.0, 4.0])
        >>> state, report = rule.measure(grads, rule.init(grads))
        >>> float(report.factors), grads
        (0.2, array([3., 4.]))
        """
        return core.measured(self, grads, state, params, all_reduce, loss=loss)


class EachArray(Printed):
    """A rule that measures no norm and remembers nothing; its reports are empty."""

    memory: ClassVar[bool] = False
    by_leaf: ClassVar[bool] = False

    def init(self, grads: Any) -> NoState:  # noqa: ARG002 - every rule has it
        """Return the empty state."""
        refuse_as_transformation(self)
        return NoState()

    def update(
        self,
        grads: Any,
        state: NoState,
        params: Any = None,  # noqa: ARG002 - every rule has it
        all_reduce: AllReduce | None = None,  # noqa: ARG002 - every rule has it
        *,
        in_place: bool = False,
        loss: Any = None,  # noqa: ARG002 - every rule has it
    ) -> tuple[Any, NoState, Report]:
        """Clip ``grads``; see `Rule.update`. The report is empty."""
        clipped, report = self.apply(grads, in_place=in_place)
        return clipped, state, report

    def apply(self, grads: Any, *, in_place: bool) -> tuple[Any, Report]:
        """Replace each array."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Function(EachArray):
    """A function of one gradient array as a rule."""

    function: Callable[[Any], Any]

    def apply(self, grads: Any, *, in_place: bool) -> tuple[Any, Report]:
        """Call the function on each gradient array."""
        return core.apply_function(grads, self.function, in_place=in_place)


@dataclass(frozen=True, repr=False)
class ByValue(EachArray):
    """Clip each entry into ``[min, max]``: the one rule that is no norm (it runs ``xp.clip``).

    Parameters
    ----------
    min, max : float or array
        The bounds; arrays broadcast against each leaf. Integer gradients need whole bounds.
    """

    min: Any
    max: Any

    def __post_init__(self) -> None:
        """Refuse bounds that are no numbers, NaN or the wrong way round."""
        wanted = "a number or an array of real numbers (math.inf or -math.inf for no bound)"
        settle(self, min=real("min", self.min, wanted), max=real("max", self.max, wanted))
        if isinstance(self.min, Real) and isinstance(self.max, Real) and not self.min <= self.max:
            raise ValueError(self._wrong_way())

    def _wrong_way(self) -> str:
        return f"min must not be above max, and neither NaN: got min={short(self.min)}, max={short(self.max)}"

    def apply(self, grads: Any, *, in_place: bool) -> tuple[Any, Report]:
        """Clip each entry."""
        return core.apply(grads, self._bounds, in_place=in_place)

    def _bounds(self, backend: Backend, array: Any) -> tuple[Any, ...]:
        """Return the function that clips, and the bounds that fit the array."""
        xp = backend.xp
        if xp.isdtype(array.dtype, "complex floating"):
            msg = f"complex numbers have no order to clip by value in, got {array.dtype}; clip by norm instead"
            raise TypeError(msg)
        if xp.isdtype(array.dtype, "integral"):
            low, high = (_whole(xp, bound, xp.iinfo(array.dtype)) for bound in (self.min, self.max))
        else:
            low, high = self.min, self.max
        low, high = (xp.asarray(bound, dtype=array.dtype) for bound in (low, high))
        for name, bound in (("min", low), ("max", high)):
            if not broadcasts(bound.shape, array.shape):
                msg = f"{name} of shape {tuple(bound.shape)} does not fit an array of shape {tuple(array.shape)}"
                raise ValueError(msg)
        if backend.readable(low) and backend.readable(high) and not bool(xp.all(low <= high)):
            raise ValueError(self._wrong_way())
        low, high = (backend.replicated(array, bound) for bound in (low, high))
        return lambda x, low, high: cast(xp, xp.clip(x, low, high), x.dtype), low, high


def as_rule(rule: Any) -> Any:
    """Return a rule as it is, a function of one gradient array as a rule."""
    if is_rule(rule):
        return rule
    if callable(rule) and not isinstance(rule, type) and not hasattr(rule, "load_state_dict") and not own_module(rule):
        return Function(rule)
    return refuse_as_rule(rule)


def _whole(xp: Any, bound: Any, info: Any) -> Any:
    """Return a bound of integer gradients as an integer that their dtype can hold."""
    if not isinstance(bound, Real):
        if "int" not in str(bound.dtype):
            msg = f"integer gradients need whole bounds, got an array of {bound.dtype}"
            raise TypeError(msg)
        bound = xp.asarray(bound)
        own = xp.iinfo(bound.dtype)
        return xp.clip(bound, max(info.min, own.min), min(info.max, own.max))
    inside = max(info.min, min(info.max, bound))
    if not float(inside).is_integer():
        msg = f"integer gradients need whole bounds, got {short(bound)}"
        raise TypeError(msg)
    return int(inside)
