# SPDX-License-Identifier: MIT
"""A rule is its four choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from uniclip._checks import check, one_of, settle
from uniclip._repr import holds_arrays, short
from uniclip._types import Array
from uniclip.arraywise import Function
from uniclip.ask import Step
from uniclip.backends import compiling
from uniclip.backends.arrays import cast, together
from uniclip.base import BaseRule, RuleLike
from uniclip.curves import Curve, hard
from uniclip.layout import layout_of, opened
from uniclip.limits import Constant, Limit, NoState
from uniclip.limits.base import MaxNorm
from uniclip.limits.fixed import as_limit
from uniclip.measure import measure
from uniclip.nonfinite import POLICIES, NonFinite
from uniclip.norms import L2, Norm
from uniclip.processes import Joint
from uniclip.report import UNLIMITED, Report
from uniclip.ruler import Ruler
from uniclip.scopes import Scope, all_leaves, each_leaf, everything
from uniclip.step import decide, first_state

_PLAIN = {float, int, bool, str, type(None)}


AnyRule: TypeAlias = RuleLike | Callable[[Any], Array]
"""A rule, or a function of one gradient array. A preset that was not called is a function, but returns no array."""


@dataclass(frozen=True, repr=False)
class Rule(BaseRule):
    """Multiply each gradient by ``curve(norm, limit)``, with one norm per scope.

    Parameters
    ----------
    limit : float, 0-d array, or Limit
        How large the norm may be; a number for the same limit at every step, ``math.inf`` to only measure.
    scope : Scope, default all_leaves
        Which entries share one norm.
    norm : Norm, default L2
        How their size is measured.
    curve : callable, default hard
        ``curve(xp, norm, limit)`` returns the factor. ``xp`` is the array API namespace of the gradients; the norm
        may be NaN or ∞, the limit is finite.
    nonfinite : {"propagate", "skip", "zero", "raise"}, default "propagate"
        What happens to gradients with NaN or ∞. ``"propagate"``: every entry that shares their norm becomes
        NaN. ``"skip"``: all gradients become 0, and ``report.skipped`` is true. ``"zero"``: the entries that are
        not finite become 0, then the rest is clipped. ``"raise"``: a ``FloatingPointError``, which is a
        ``RuntimeError`` too, names the leaves; traced code has no values, so there it is a ``TypeError``. With each of
        them the state stays as it was.

    Raises
    ------
    TypeError
        If a choice has the wrong type.
    ValueError
        If a constant limit is negative or NaN, or ``nonfinite`` is not one of the four policies.

    Examples
    --------
    >>> uc.Rule(1.0, scope=uc.scopes.each_leaf, norm=uc.norms.RMS)
    uc.Rule(1.0, scope=uc.scopes.each_leaf, norm=uc.norms.RMS)
    >>> uc.clip(np.asarray([7.0, 1.0]), uc.Rule(1.0, norm=uc.norms.RMS))[0]
    array([1.4, 0.2])
    """

    if TYPE_CHECKING:
        limit: Limit  # which a number that is given becomes
    else:
        limit: MaxNorm
    scope: Scope = field(default_factory=lambda: all_leaves)  # compilers cannot take plain defaults of a class
    norm: Norm = field(default_factory=lambda: L2)
    curve: Curve = hard
    nonfinite: NonFinite = "propagate"
    simple: ClassVar[bool] = False
    """Whether it is one Euclidean norm with a constant limit and nothing else, found out when a rule is made."""

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
        value = self.limit.value if type(self.limit) is Constant else None
        number = type(value) is float and 0 < value < UNLIMITED and self.nonfinite == "propagate"
        whole = self.scope.label is everything and self.scope.axes is None
        settle(self, simple=number and whole and self.norm == L2 and self.curve is hard)

    def _arguments(self, show: Callable[[object], str]) -> list[str]:
        """Return the arguments as source text, a constant limit as its value."""
        limit, *others = super()._arguments(show)
        return [show(self.limit.value) if type(self.limit) is Constant else limit, *others]

    @property
    def memory(self) -> bool:
        """Whether the rule has memory, a state that changes from step to step."""
        return self.limit.memory

    def init(self, grads: Any) -> Any:
        """Return the state before the first step.

        Parameters
        ----------
        grads : array or tree of arrays
            Gradients, or parameters of the same shapes; only shapes and dtypes are used.

        Returns
        -------
        state : tree of arrays
        """
        if not self.memory:
            return NoState()
        given = opened(grads, name="params")
        with given.backend.quiet(given.first):
            return first_state(self, given)

    def _run(self, grads: Any, state: Any, step: Step) -> tuple[Any, Any, Report]:
        """Take a step; see `BaseRule`."""
        clipped, decision = decide(self, grads, state, step)
        return clipped, decision.state, decision.report()


def norm_of(grads: Any, scope: Scope, norm: Norm) -> Any:
    """Return the norms of the gradients, without clipping."""
    given = opened(grads)
    with given.backend.quiet(given.first):
        layout = layout_of(given, scope)
        joint = None if given.parts is None else Joint(given)
        blocks = measure([Ruler(given, layout, norm, joint)]).norms[0].blocks
        return layout.arranged(given.tree, list(map(given.own, blocks)))


def leaf_norms(grads: Any, norm: Norm = L2) -> Any:
    """Return the norms of all leaves as one array, ``(k,)``, in the order of the tree; the norm of ``None`` is 0.

    Parameters
    ----------
    grads : array or tree of k arrays, or ``None``
    norm : Norm, default L2

    Returns
    -------
    (k,) array
        In the framework of the gradients, in float32 or wider.

    Examples
    --------
    >>> from uniclip import insight
    >>> insight.leaf_norms({"w": np.asarray([3.0, 4.0]), "b": np.asarray([1.0])})
    array([1., 5.])
    """
    given = opened(grads)
    with given.backend.quiet(given.first):
        layout = layout_of(given, each_leaf, remembers=True)  # with rows of absent leaves
        joint = None if given.parts is None else Joint(given)
        blocks = measure([Ruler(given, layout, norm, joint)]).norms[0].blocks
        if not blocks:
            return given.own(np.zeros(0, np.float32))
        if len(blocks) == 1:  # of one dtype and one device
            return given.own(blocks[0])
        xp, blocks = given.backend.xp, list(map(given.own, together(given.backend, blocks)))
        wide = xp.result_type(*[block.dtype for block in blocks])
        row = xp.concat([cast(xp, given.backend.to_device_of(blocks[0], block), wide) for block in blocks], axis=0)
        order = np.argsort([group for block in layout.blocks for group in block.groups])
        return xp.take(row, given.own(order), axis=0)


def made_once(make: Callable[..., Rule]) -> Callable[..., Rule]:
    """Cache the rules that a function makes from plain numbers, which are the same at every step."""
    kept = lru_cache(maxsize=64, typed=True)(make)

    def rule(*choices: Any) -> Rule:
        plain = all([type(choice) in _PLAIN for choice in choices]) and not compiling()
        return kept(*choices) if plain else make(*choices)

    return rule


def as_rule(rule: AnyRule) -> RuleLike:
    """Return a rule as it is, a function of one gradient array as a rule."""
    known: Any = rule
    if hasattr(known, "memory") and hasattr(known, "update") and not isinstance(known, type):
        return known  # type: ignore[no-any-return]
    home = "" if compiling() else getattr(known, "__module__", None) or ""  # compilers know those of classes only
    if callable(rule) and not isinstance(rule, type) and not home.startswith("uniclip."):
        return Function(rule)
    advice, hint = "such as uc.by_global_norm(1.0), or a function of one array", ""
    if home.startswith(("uniclip.combine", "uniclip.presets", "uniclip.rules")):
        advice = f"and uc.{known.__name__} makes one: call it, uc.{known.__name__}(...), as in uc.by_global_norm(1.0)"
    elif holds_arrays(known):
        hint = "; gradients are clipped by uc.clip(grads, rule), or by uc.Clipper(rule)(grads)"
    msg = f"rule must be a rule, {advice}, got {short(known)}{hint}"
    raise TypeError(msg)
