# SPDX-License-Identifier: MIT
"""The four choices and the policy of a rule, validated, and attributes derived from them.

The core takes it as an argument; `uniclip.Rule` adds ``init`` and ``update``.

The attributes that follow from the choices select the path of a step:

- `on_spine`: `uniclip._core.spine` measures one norm with few calls, if the leaves are dense.
  There, `by_numbers` has the limit and the factor computed with Python's numbers, not with arrays.
- All other rules, and leaves of other formats, take the general step in `uniclip._core.step`.
  There, `limits_checked` saves a check of the limits, and `elementwise_curve` lets all norms be one
  vector.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from uniclip._errors import Printed, attributes_of, check, held_by, one_of, set_frozen_fields
from uniclip._types import NonFinite
from uniclip.curves import Curve, hard, of_numbers, rejects
from uniclip.limits import Constant, Limit, PerGroup, Schedule
from uniclip.limits.base import BuiltIn, MaxNorm
from uniclip.limits.fixed import as_limit
from uniclip.norms import L2, Norm
from uniclip.scopes import Scope, all_leaves, everything, is_one_norm

POLICIES = get_args(NonFinite)
"""Policies for gradients with NaN or ∞, or with a norm that overflows.

In the order of a step: ``"zero"`` sets such elements to 0 and measures again, ``"raise"`` raises an
error, ``"skip"`` sets all factors to 0, and ``"propagate"`` does nothing. See
`uniclip._core.step`.
"""


class RuleCache:
    """The caches of a rule: made with it, bounded, and never compared or copied.

    They need no lock. If two threads make the same plan at once, one of the two is kept.
    """

    __slots__ = ("plans", "reductions")

    def __init__(self) -> None:
        self.plans: dict[Hashable, Any] = {}
        """The plan of each tree structure, see `uniclip._core.plan.plan_for`."""
        self.reductions: dict[Hashable, Any] = {}
        """The reduction of each ``all_reduce``, see `uniclip._core.collectives.reduction_of`."""


@dataclass(frozen=True, repr=False)
class RuleSpec(Printed):
    """The choices of a `uniclip.Rule`, and attributes derived from them."""

    if TYPE_CHECKING:
        limit: Limit  # `__post_init__` converts numbers
    else:
        limit: MaxNorm
    # Factories: compilers cannot trace defaults that are instances of uniclip's classes.
    scope: Scope = field(default_factory=lambda: all_leaves)
    norm: Norm = field(default_factory=lambda: L2)
    curve: Curve = hard
    nonfinite: NonFinite = "propagate"

    # Derived when a rule is made, since a step has no time for it. `ClassVar` keeps these
    # attributes out of the fields: they are neither compared, nor printed, nor copied.
    stateful: ClassVar[bool]
    """Whether the state of the rule changes from step to step."""
    on_spine: ClassVar[bool]
    """Whether the spine may run it: one Euclidean norm over all leaves, a limit that needs nothing
    else but the loss, and neither a limit nor a curve with arrays.
    """
    by_numbers: ClassVar[bool]
    """Whether the spine can decide with Python's numbers: the limit is built in, and the curve is
    `hard` or rejects.
    """
    constant: ClassVar[Any]
    """The constant limit, ``None`` if the limit is not constant."""
    holds_arrays: ClassVar[bool]
    """Whether the curve, or a limit that is not constant, has arrays as attributes or in a closure.

    If so, a step keeps its norms in the library of the gradients, not in NumPy.
    """
    limits_checked: ClassVar[bool]
    """Whether a step need not check the limits: they are built in, and their numbers were validated
    when the rule was made.
    """
    needs_finite: ClassVar[bool]
    """Whether a step must find out if it is finite: to keep the old state, to raise, or to skip."""
    zeroes: ClassVar[bool]
    """Whether a factor of 0 turns NaN and ∞ into 0, too."""
    elementwise_curve: ClassVar[bool]
    """Whether its curve is built in, takes norms of any shape, and rejects none."""
    by_shape: ClassVar[bool]
    """Whether its plans depend on the shapes of leaves, not only on their dtypes and paths."""
    answers_checked: ClassVar[list[bool]]
    """Non-empty once `uniclip._core.plan.check_answers_differ` has accepted the labels of all
    leaves.
    """
    cache: ClassVar[RuleCache]
    """Plans, and what processes have agreed on, kept between steps."""

    if TYPE_CHECKING:

        def __init__(
            self,
            limit: MaxNorm,
            scope: Scope = all_leaves,
            norm: Norm = L2,
            curve: Curve = hard,
            nonfinite: NonFinite = "propagate",
        ) -> None: ...

    def __post_init__(self) -> None:
        """Convert a number or an array to a constant limit, and validate the choices."""
        if not isinstance(self.limit, Limit):
            set_frozen_fields(self, limit=as_limit(self.limit))
        wanted = "a uc.Scope, such as uc.scopes.each_leaf or uc.scopes.unit()"
        check("scope", self.scope, isinstance(self.scope, Scope), wanted)
        check("norm", self.norm, isinstance(self.norm, Norm), "a uc.Norm, such as uc.norms.L2")
        is_function = callable(self.curve) and not isinstance(self.curve, type)
        wanted = (
            "a function of (xp, norm, limit), such as uc.curves.hard or uc.curves.Regularized(0.01)"
        )
        check("curve", self.curve, is_function, wanted)
        one_of("nonfinite", self.nonfinite, POLICIES)
        self._derive()

    def _derive(self) -> None:
        """Set the attributes that follow from the choices, and make the cache."""
        limit = self.limit
        scope = self.scope
        # A property of `PerGroup` must hold for the limit of each group.
        limits = [limit]
        if isinstance(limit, PerGroup):
            limits = [of_group for _, of_group in limit.limits]
        constant = limit.value if type(limit) is Constant else None

        one_norm = is_one_norm(scope) and self.norm == L2 and not isinstance(limit, PerGroup)
        holds_arrays = _holds_arrays(limits, self.curve)
        built_in = [isinstance(one, BuiltIn) and not isinstance(one, Schedule) for one in limits]
        own_curve = getattr(self.curve, "__module__", "") == hard.__module__
        by_group = scope.label is not None and scope.label is not everything
        uses_sizes = bool(self.norm.size_power) or "sizes" in limit.needs
        set_frozen_fields(
            self,
            stateful=bool(limit.stateful),
            constant=constant,
            on_spine=one_norm and limit.needs <= {"loss"} and not holds_arrays,
            by_numbers=all(built_in) and of_numbers(self.curve),
            holds_arrays=holds_arrays,
            limits_checked=all(built_in) and not holds_arrays,
            needs_finite=bool(limit.stateful) or self.nonfinite in {"raise", "skip"},
            zeroes=self.nonfinite in {"skip", "zero"},
            elementwise_curve=own_curve and not rejects(self.curve),
            by_shape=scope.axes is not None or by_group or uses_sizes,
            answers_checked=[],
            cache=RuleCache(),
        )

    @property
    def must_agree(self) -> bool:
        """Whether processes must decide alike: a step may skip, raise, replace elements, or change
        a state.
        """
        return self.stateful or self.nonfinite != "propagate" or rejects(self.curve)

    def __getstate__(self) -> dict[str, Any]:
        """Return the choices, for a copy or a pickle."""
        choices = {choice.name: getattr(self, choice.name) for choice in fields(self)}
        return choices | {"origin": self.origin}

    def __setstate__(self, choices: dict[str, Any]) -> None:
        """Restore from a copy or a pickle."""
        set_frozen_fields(self, **choices)
        self._derive()

    def _arguments(self, show: Callable[[object], str]) -> list[str]:
        """Return the arguments as source text, a constant limit as its value."""
        limit, *others = super()._arguments(show)
        if type(self.limit) is Constant:
            limit = show(self.limit.value)
        return [limit, *others]


def _holds_arrays(limits: list[Limit], curve: Curve) -> bool:
    """Return whether a curve, or limits that are not constant, have arrays."""
    choices: list[object] = [limit for limit in limits if type(limit) is not Constant]
    choices.append(curve)
    values: list[Any] = []
    for choice in choices:
        values += attributes_of(choice)
    # Arrays in the closures of functions count, too.
    for function in (curve, *values):
        values += held_by(function)
    return any([hasattr(value, "shape") for value in values])
