# SPDX-License-Identifier: MIT
"""The one algorithm: measure the norms, ask for their limits, bend the curve, scale.

Everything here is written against the array API namespace ``xp`` of the gradients' own framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import optree

from uniclip.backends import backend_of
from uniclip.backends.scalars import SCALARS, Scalar
from uniclip.gradients import Gradients, Leaf, all_of, read
from uniclip.limits import Constant, NoState
from uniclip.measure import AllReduce, as_arrays, measure, same_shape, zeros
from uniclip.nonfinite import all_finite, refuse
from uniclip.scale import factor_of, scaled
from uniclip.scopes import each_leaf
from uniclip.tree import Tree, describe, flatten_grads

if TYPE_CHECKING:
    from uniclip.backends import Backend
    from uniclip.norms import Norm
    from uniclip.rules import Rule
    from uniclip.scopes import Scope


class Report(NamedTuple):
    """What a rule saw and did, in arrays of the framework (nothing is read to the host).

    Where all leaves share their norms a field is one array (0-d, unless the scope keeps axes); with
    labelled groups, a dict by label; else a tree like the gradients. A rule that measures no norm
    (``by_value``, a function) leaves every field ``None``.
    """

    norms: Any = None
    """The norms before clipping."""
    limits: Any = None
    """What the norms were allowed to be."""
    factors: Any = None
    """What the gradients were multiplied by."""
    clipped: Any = None
    """Whether any factor differs from 1 (a boolean 0-d array)."""
    finite: Any = None
    """Whether every gradient, as it was given, and every norm was finite (a boolean 0-d array)."""

    def __repr__(self) -> str:
        """Say that the norms are those before clipping."""
        return (
            f"Report(norms={self.norms!r} (before clipping), limits={self.limits!r}, factors={self.factors!r}, "
            f"clipped={self.clipped!r}, finite={self.finite!r})"
        )


def clip(grads: Any, rule: Any, params: Any = None, all_reduce: AllReduce | None = None) -> tuple[Any, Report]:
    """Clip gradients by a rule that remembers nothing, or by a function of one gradient array.

    Parameters
    ----------
    grads : array or tree of arrays
        Of one framework. ``None`` leaves are absent gradients and keep their place.
    rule : Rule, ByValue, or callable
        A callable gets one gradient array and returns the array to put in its place.
    params : tree, optional
        The parameters, for limits that compare with them; a tree of the same paths as ``grads``.
    all_reduce : callable, optional
        ``all_reduce(array, op)`` joins partial norms across devices; ``op`` is ``"sum"`` or ``"max"``.

    Returns
    -------
    clipped : tree
        Like ``grads``: every leaf keeps its dtype, shape, device and sparsity (integers become the
        framework's default float under a rule that measures norms).
    report : Report

    Raises
    ------
    TypeError
        If a leaf is no array, leaves belong to two frameworks, a function returns no array, or
        ``rule`` is neither a rule nor a function.
    ValueError
        If the rule remembers earlier steps, a limit is negative or NaN, or an iterator is spent.
    FloatingPointError
        If the rule's policy for gradients that are not finite is ``"raise"``, and they are not.

    Examples
    --------
    >>> grads = [np.asarray([3.0, 4.0]), np.asarray([12.0])]
    >>> clipped, report = uc.clip(grads, uc.by_global_norm(6.5))
    >>> clipped
    [array([1.5, 2. ]), array([6.])]
    >>> float(report.norms), float(report.factors)
    (13.0, 0.5)
    >>> uc.clip(np.asarray([3.0, -4.0]), np.sign)[0]
    array([ 1., -1.])
    """
    return _clip(grads, rule, params, all_reduce, in_place=False)


def clip_(grads: Any, rule: Any, params: Any = None, all_reduce: AllReduce | None = None) -> Report:
    """Clip gradients in place, piece by piece: no second set of gradients is made.

    Parameters
    ----------
    grads, rule, params, all_reduce
        As in `clip`; of a framework whose arrays can be changed. An array that is given twice is
        one gradient: it counts once and is scaled once.

    Returns
    -------
    report : Report

    Raises
    ------
    TypeError
        As `clip`; and if an array cannot be changed: its framework allows none, it is read-only, or holds
        several entries in one place; or if it holds integers and the rule measures norms.
    ValueError
        As `clip`; and if two arrays overlap.
    FloatingPointError
        As `clip`. After any error of uniclip's no array is changed.

    Notes
    -----
    A function of an array, the scope `each_entry`, and tensors that record derivatives need memory of
    the array's own size.

    Examples
    --------
    >>> grads = [np.asarray([3.0, 4.0]), np.asarray([12.0])]
    >>> report = uc.clip_(grads, uc.by_global_norm(6.5))
    >>> grads, float(report.norms)
    ([array([1.5, 2. ]), array([6.])], 13.0)
    """
    return _clip(grads, rule, params, all_reduce, in_place=True)[1]


def _clip(grads: Any, rule: Any, params: Any, all_reduce: AllReduce | None, *, in_place: bool) -> tuple[Any, Report]:
    if isinstance(rule, type) or not (callable(rule) or hasattr(rule, "memory")):
        msg = f"rule must be a rule, such as uc.by_global_norm(1.0), or a function of one array, got {rule!r}"
        raise TypeError(msg)
    if not hasattr(rule, "memory"):
        return apply(grads, partial(_of_function, rule, in_place), in_place=in_place)
    if rule.memory:
        update = f"clipped, state, report = rule.update(grads, state{', in_place=True' if in_place else ''})"
        msg = f"{rule!r} remembers earlier steps: use state = rule.init(grads), then {update}"
        raise ValueError(msg)
    clipped, _, report = rule.update(grads, _NO_STATE, params, all_reduce, in_place=in_place)
    return clipped, report


def _of_function(
    function: Callable[[Any], Any],
    in_place: bool,  # noqa: FBT001 - bound by position
    backend: Backend,
    array: Any,
) -> tuple[Any, ...]:
    """Call a function of a whole array, and prepare to put the result in its place."""
    result = function(array)
    if backend_of(result) is not backend or not same_shape(result.shape, array.shape):
        hint = f"; call it first, as {function.__name__}(1.0)" if hasattr(result, "update") else ""
        msg = f"the function must return an array like the one it got, but it returned {describe(result)}{hint}"
        raise TypeError(msg)
    kinds = ("complex floating", "real floating")  # what holds one holds those after it, and integers
    wide, narrow = ([backend.xp.isdtype(a.dtype, kind) for kind in kinds] for a in (result, array))
    if in_place and wide > narrow:
        msg = f"an array of {array.dtype} cannot hold the result, which is {describe(result)}; use uc.clip"
        raise TypeError(msg)
    return lambda _, new: new, result


class Decision(NamedTuple):
    """The norms of a step, and what is to be done about them: one value per group of gradients."""

    grads: Gradients
    norms: list[Any]
    small: Backend
    """The backend of the values below: that of the gradients, or of scalars where reading them costs nothing."""
    limits: list[Any]
    factors: list[Any]
    ones: list[Any]
    """Whether each factor is 1."""
    finite: Any
    state: Any

    def report(self) -> Report:
        """Return the report, in arrays of the gradients' own framework."""
        grads, xp = self.grads, self.small.xp
        flags = [xp.logical_not(all_of(self.small, self.ones)), self.finite]
        values = [
            grads.arrange(as_arrays(grads, [self._typed(*pair) for pair in zip(some, self.norms, strict=True)]))
            for some in (self.limits, self.factors)
        ]
        return Report(self.arranged_norms(), *values, *as_arrays(grads, flags))

    def _typed(self, value: Any, norm: Any) -> Any:
        """Return a number, or a scalar in double precision, in the dtype of its norm."""
        return norm.dtype.type(value) if self.small is SCALARS else self.small.xp.asarray(value, dtype=norm.dtype)

    def arranged_norms(self) -> Any:
        """Return the norms, as the scope's user thinks of them."""
        return self.grads.arrange(as_arrays(self.grads, self.norms))

    def clipped(self, rule: Rule) -> Any:
        """Return the clipped gradients."""
        return scaled(self.grads, self.small, self.factors, self.ones, skip=rule.nonfinite == "skip")


def update(  # noqa: PLR0913 - the arguments of Rule.update, and the rule
    rule: Rule,
    grads: Any,
    state: Any,
    params: Any = None,
    all_reduce: AllReduce | None = None,
    *,
    in_place: bool = False,
) -> tuple[Any, Any, Report]:
    """Clip ``grads`` by ``rule``; see `Rule.update`."""
    given = read(grads, rule.scope, in_place=in_place)
    with given.backend.quiet():
        decision = _decided(rule, given, state, params, all_reduce)
        return decision.clipped(rule), decision.state, decision.report()


def measured(  # noqa: PLR0913, PLR0917
    rule: Rule, grads: Any, state: Any, params: Any = None, all_reduce: AllReduce | None = None, norm: Any = None
) -> tuple[Any, Report]:
    """Return what `update` does, but for the scaled gradients; a norm that is known already is not measured."""
    given = read(grads, rule.scope)
    with given.backend.quiet():
        decision = _decided(rule, given, state, params, all_reduce, norm)
        return decision.state, decision.report()


def clip_known(rule: Rule, grads: Any, norm: Any) -> tuple[Any, Any]:
    """Clip by a rule that remembers nothing; return the gradients and their norms, ``norm`` if it is known already."""
    given = read(grads, rule.scope)
    with given.backend.quiet():
        decision = _decided(rule, given, _NO_STATE, norm=norm)
        return decision.clipped(rule), decision.arranged_norms()


_NO_STATE = NoState()
_NUMBERS: tuple[Any, ...] = (Scalar, float, int)


def _decided(  # noqa: PLR0913, PLR0917
    rule: Rule,
    grads: Gradients,
    state: Any,
    params: Any = None,
    all_reduce: AllReduce | None = None,
    norm: Any = None,
) -> Decision:
    """Measure the gradients and work out their factors."""
    backend = grads.backend

    def reference() -> list[Any]:
        if params is None:
            msg = f"{rule!r} compares gradients with their parameters: pass params="
            raise ValueError(msg)
        return measure(grads.matching(params), rule.norm, all_reduce)

    sound = [all_finite(grads, all_reduce)] if rule.nonfinite == "zero" else []
    if sound and not (backend.readable(sound[0]) and bool(sound[0])):
        grads = grads._replace(clean=True)
    norms = measure(grads, rule.norm, all_reduce) if norm is None else _known(grads, norm)
    limits, new_state = _limits(grads, rule, norms, state, reference)
    small, norms, limits, sound = _readable(grads, norms, limits, sound)
    seen = norms if small is backend else [small.xp.float64(n) for n in norms]
    finite = all_of(small, [*sound, *[small.xp.all(small.xp.isfinite(n)) for n in seen]])
    if rule.nonfinite == "raise":
        refuse(grads, finite)
    factors, ones = [], []
    for index, n in enumerate(seen):
        limits[index] = limit = _checked(small, "limit", limits[index], n)
        factor = factor_of(small, rule, n, limit, finite)
        factors.append(factor)
        ones.append(small.xp.all(small.xp.equal(factor, small.xp.ones_like(factor))))
    state = new_state if new_state is state else _kept(backend, finite, new_state, state)
    return Decision(grads, norms, small, limits, factors, ones, finite, state)


def _readable(grads: Gradients, norms: list[Any], limits: list[Any], sound: list[Any]) -> tuple[Any, ...]:
    """Return norms, limits and flags as scalars if reading them costs nothing, else as arrays; and their backend."""
    number = grads.backend.number
    found = []
    for value in (*norms, *limits, *sound):
        scalar = value if isinstance(value, _NUMBERS) else number(value)
        if scalar is None:
            return grads.backend, as_arrays(grads, norms), limits, sound
        found.append(scalar)
    count = len(norms)
    if not count:
        return grads.backend, norms, limits, sound
    return SCALARS, found[:count], found[count : 2 * count], found[2 * count :]


def _limits(
    grads: Gradients, rule: Rule, norms: list[Any], state: Any, reference: Callable[[], list[Any]]
) -> tuple[list[Any], Any]:
    """Ask the rule's limit; refuse an answer that is none."""
    if isinstance(rule.limit, Constant):
        return [rule.limit.value] * len(norms), state
    # It sees ∞ as NaN: as a limit, ∞ would leave alone.
    xp = grads.backend.xp
    seen = [xp.where(xp.isfinite(n), n, n * math.nan) for n in as_arrays(grads, norms)]
    answer = rule.limit(seen, state, reference)
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], (list, tuple))):  # noqa: PLR2004
        msg = f"{rule.limit!r} must return (limits, state), a list of limits and the next state, got {answer!r}"
        raise TypeError(msg)
    limits, state = answer
    if len(limits) != len(norms):
        msg = f"{rule.limit!r} must return one limit for each of the {len(norms)} norms, got {len(limits)}"
        raise ValueError(msg)
    return list(limits), state


def _kept(backend: Backend, finite: Any, new: Any, old: Any) -> Any:
    """Return the new state, the old one after a step that is not finite: one NaN must not spoil all later steps."""
    if not optree.tree_leaves(old):
        return new
    if isinstance(finite, Scalar) or backend.readable(finite):
        return new if bool(finite) else old
    return optree.tree_map(lambda a, b: backend.xp.where(backend.to_device_of(a, finite), a, b), new, old)


def norm_of(grads: Any, scope: Scope, norm: Norm) -> Any:
    """Return the norms of the gradients, without clipping."""
    given = read(grads, scope)
    with given.backend.quiet():
        return given.arrange(as_arrays(given, measure(given, norm)))


def apply(
    grads: Any, prepare: Callable[[Backend, Any], tuple[Any, ...]], *, in_place: bool = False
) -> tuple[Any, Report]:
    """Replace each gradient array (a sparse one's stored values) by a function of it.

    ``prepare(backend, array)`` returns the function, of the array entry by entry and of operands that
    broadcast against it, and the operands.
    """
    backend, tree = flatten_grads(grads, in_place=in_place)
    given = Gradients(backend, each_leaf, {}, tree, in_place=in_place)
    with backend.quiet():
        leaves = [Leaf(number, leaf, *backend.stored(leaf), None) for number, leaf in enumerate(tree.leaves)]
        ready = [(leaf, _named(tree, leaf, prepare, backend, leaf.array)) for leaf in leaves]
        return tree.rebuild([_named(tree, leaf, given.put, leaf, *change) for leaf, change in ready]), Report()


def _named(tree: Tree, leaf: Leaf, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; name the leaf where it finds fault."""
    try:
        return function(*arguments)
    except (TypeError, ValueError) as error:
        if type(error) not in {TypeError, ValueError}:
            raise  # a framework's own error explains itself, and may not be made from a message
        msg = f"{tree.place(leaf.number)}: {error}"
        raise type(error)(msg) from error


def _known(grads: Gradients, norm: Any) -> list[Any]:
    """Return a norm that is known already, in the dtype that measuring would give it."""
    backend = grads.backend
    return [
        backend.xp.asarray(_checked(backend, "norm", backend.xp.asarray(norm), zero), dtype=zero.dtype)
        for zero in zeros(grads)
    ]


def _checked(backend: Backend, name: str, value: Any, norm: Any) -> Any:
    """Return a limit (or a known norm), a number or an array like the norm; refuse a wrong one that can be read."""
    if type(value) is float and value >= 0:
        return value
    if isinstance(value, _NUMBERS):
        wrong = not value >= 0 and not _not_finite(backend, norm)  # NaN too is not >= 0
    else:
        value = backend.xp.asarray(value, dtype=norm.dtype)
        wrong = _wrong(backend, name, value, norm)
    if wrong:
        msg = f"{name} must be 0 or more{' (0 zeroes the gradients)' if name == 'limit' else ''}, got {value}"
        raise ValueError(msg)
    return value


def _not_finite(backend: Backend, norm: Any) -> bool:
    """Whether the norm is known not to be finite; then its limit need not be one."""
    xp = backend.xp
    return backend.readable(norm) and not bool(xp.any(xp.isfinite(norm)))


def _wrong(backend: Backend, name: str, array: Any, norm: Any) -> bool:
    xp = backend.xp
    if len(array.shape) and not same_shape(array.shape, norm.shape):
        msg = f"a {name} of shape {tuple(array.shape)} does not fit norms of shape {tuple(norm.shape)}; give one number"
        raise ValueError(msg)
    if not (backend.readable(array) and backend.readable(norm)):
        return False
    # A NaN norm is one that was measured, and the limit of one that is not finite need not be finite.
    return bool(xp.any(array < 0 if name == "norm" else xp.logical_not(array >= 0) & xp.isfinite(norm)))
