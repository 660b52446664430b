# SPDX-License-Identifier: MIT
"""The four choices of a rule, validated, and what is known of them before any gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from uniclip._errors import Printed, attributes_of, check, held_by, one_of, settle
from uniclip._types import NonFinite
from uniclip.curves import Curve, hard
from uniclip.limits import Constant, Limit, PerGroup, Schedule
from uniclip.limits.base import BuiltIn, MaxNorm
from uniclip.limits.fixed import as_limit
from uniclip.norms import L2, Norm
from uniclip.scopes import Scope, all_leaves, everything

POLICIES = get_args(NonFinite)
"""Policies for gradients that hold NaN or ∞, or whose norm overflows; what each does is in `uniclip.step`.

In the order of a step ``"zero"`` makes such entries 0 and measures again, ``"raise"`` refuses the step, and ``"skip"``
makes all factors 0.
"""


@dataclass(frozen=True, repr=False)
class Choices(Printed):
    """What a `uniclip.Rule` is made of."""

    if TYPE_CHECKING:
        limit: Limit  # which a number that is given becomes
    else:
        limit: MaxNorm
    scope: Scope = field(default_factory=lambda: all_leaves)  # compilers cannot take plain defaults of a class
    norm: Norm = field(default_factory=lambda: L2)
    curve: Curve = hard
    nonfinite: NonFinite = "propagate"
    # Found out when a rule is made:
    memory: ClassVar[bool]
    """Whether the rule has memory, a state that changes from step to step."""
    simple: ClassVar[bool]
    """Whether it is one Euclidean norm with a constant limit and nothing else."""
    constant: ClassVar[Any]
    """Its constant limit, ``None`` if it has another one."""
    holds_arrays: ClassVar[bool]
    """Whether limit or curve have arrays, beside a constant, as attributes or in a closure: then nothing is NumPy's."""
    limits_checked: ClassVar[bool]
    """Whether its limits need no check at a step: uniclip's own, of numbers that were checked when it was made."""
    decides: ClassVar[bool]
    """Whether it has to know that a step is finite."""
    zeroes: ClassVar[bool]
    """Whether factors of 0 make zeros of NaN and ∞, too."""
    by_shape: ClassVar[bool]
    """Whether its norms depend on more of a leaf than its kind and its place."""
    tells_apart: ClassVar[list[bool]]
    """Whether the label of its groups was seen to say different things of leaves: empty before."""
    plans: ClassVar[dict[Any, Any]]
    """What is the same from step to step, by the structure of the gradients."""
    agreed: ClassVar[dict[Any, Any]]
    """What the processes of a run have told each other."""

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
            settle(self, limit=as_limit(self.limit))
        check(
            "scope",
            self.scope,
            isinstance(self.scope, Scope),
            "a uc.Scope, such as uc.scopes.each_leaf or uc.scopes.unit()",
        )
        check("norm", self.norm, isinstance(self.norm, Norm), "a uc.Norm, such as uc.norms.L2")
        fits = callable(self.curve) and not isinstance(self.curve, type)
        check(
            "curve",
            self.curve,
            fits,
            "a function of (xp, norm, limit), such as uc.curves.hard or uc.curves.Regularized(0.01)",
        )
        one_of("nonfinite", self.nonfinite, POLICIES)
        self._find_out()

    def _find_out(self) -> None:
        limit, scope = self.limit, self.scope
        constant = limit.value if type(limit) is Constant else None
        limits = [inner for _, inner in limit.limits] if isinstance(limit, PerGroup) else [limit]
        others = [inner for inner in limits if type(inner) is not Constant]
        held = [value for choice in (*others, self.curve) for value in attributes_of(choice)]
        held += [value for function in (self.curve, *held) for value in held_by(function)]
        holds_arrays = any([hasattr(value, "shape") for value in held])
        settle(
            self,
            memory=bool(limit.memory),
            constant=constant,
            simple=constant is not None
            and (scope.label, scope.axes, self.norm, self.nonfinite) == (everything, None, L2, "propagate")
            and self.curve is hard,
            holds_arrays=holds_arrays,
            limits_checked=not holds_arrays
            and all([isinstance(inner, BuiltIn) and not isinstance(inner, Schedule) for inner in limits]),
            decides=bool(limit.memory) or self.nonfinite in {"raise", "skip"},
            zeroes=self.nonfinite in {"skip", "zero"},
            by_shape=scope.axes is not None
            or scope.label not in {None, everything}
            or bool(self.norm.size_power)
            or "sizes" in limit.needs,
            plans={},
            tells_apart=[],
            agreed={},
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the choices, for a copy or a pickle."""
        return {choice.name: getattr(self, choice.name) for choice in fields(self)} | {"origin": self.origin}

    def __setstate__(self, held: dict[str, Any]) -> None:
        """Restore from a copy or a pickle."""
        settle(self, **held)
        self._find_out()

    def _arguments(self, show: Callable[[object], str]) -> list[str]:
        """Return the arguments as source text, a constant limit as its value."""
        limit, *others = super()._arguments(show)
        return [show(self.limit.value) if type(self.limit) is Constant else limit, *others]
