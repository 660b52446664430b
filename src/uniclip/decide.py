# SPDX-License-Identifier: MIT
"""The one algorithm: measure the norms, ask for their limits, bend the curve, scale.

It is written against the array API namespace ``xp`` of the gradients' own framework; see `decide`.

Where reading the norms costs nothing, the few numbers that follow from them are scalars of the host: an
operation on one takes a framework longer than clipping a small gradient does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import optree

from uniclip._checks import real
from uniclip._repr import short
from uniclip.backends import DEFAULT, backend_of
from uniclip.backends.scalars import NUMBERS, SCALARS
from uniclip.curves import ON_SCALARS, skip
from uniclip.gradients import Gradients, all_of, cast
from uniclip.limits import Constant, Given, NoState, PerGroup
from uniclip.logged import arrays_of, over, share_changed
from uniclip.losses import loss_of
from uniclip.measure import AllReduce, measure, same_shape, sizes_of, zeros
from uniclip.nonfinite import all_finite, refuse
from uniclip.scale import Bound, Factor, factor_of, reduced, scaled

if TYPE_CHECKING:
    from uniclip.backends import Backend
    from uniclip.rules import Rule


LOGGED = ("clip/norm", "clip/limit", "clip/factor", "clip/share", "clip/skipped")
"""The names of what a logger shows of a report."""
AVERAGED = LOGGED[3:]
"""Those that say something only as the mean over many steps."""


class Report(NamedTuple):
    """What a rule saw and did, in arrays of the framework (nothing is read from an accelerator).

    Where all leaves share their norms a field is one array (0-d, unless the scope keeps axes); with
    labelled groups, a dict by label; else a tree like the gradients. A rule that measures no norm
    (``by_value``, a function) leaves every field ``None``.
    """

    norms: Any = None
    """The norms before clipping."""
    limits: Any = None
    """What the norms were allowed to be; where nothing limits, the largest number of their dtype."""
    factors: Any = None
    """What the gradients were multiplied by."""
    clipped: Any = None
    """Whether any factor differs from 1 (a boolean 0-d array)."""
    finite: Any = None
    """Whether every gradient, as it was given, and every norm was finite (a boolean 0-d array)."""
    skipped: Any = None
    """Whether the rule left the whole step out, for the optimizer to do so too (a boolean 0-d array; ``None`` if the
    rule neither has the curve `uniclip.skip` nor the policy ``"skip"``)."""

    def scalars(self) -> dict[str, Any]:
        """Return what a logger shows, under the same names for every rule.

        Returns
        -------
        dict of str to 0-d array
            ``"clip/norm"``, the largest norm before clipping; ``"clip/limit"``, the smallest limit; ``"clip/factor"``,
            the smallest factor; ``"clip/share"``, the share of the factors that are not 1 (of one factor 0 or 1: its
            mean over the steps is the share of steps that were clipped); and, of a rule that may skip a step,
            ``"clip/skipped"``, 0 or 1. They are floats on the gradients' device, and nothing is read from it. Of a
            rule that measures no norm it is empty; of a `uniclip.chain`, ``"clip/factor"`` is the product of its
            rules', and ``"clip/share"`` that of the rule which clipped most.

        Examples
        --------
        >>> _, report = uc.clip([np.asarray([3.0, 4.0]), np.asarray([0.1])], uc.by_norm(1.0))
        >>> {name: float(value) for name, value in report.scalars().items()}
        {'clip/norm': 5.0, 'clip/limit': 1.0, 'clip/factor': 0.2, 'clip/share': 0.5}
        """
        norms, limits, factors = map(arrays_of, self[:3])
        if not norms:
            return {}
        backend = backend_of(norms[0]) or DEFAULT
        xp = backend.xp
        least = over(backend, xp.min, factors)
        values = [over(backend, xp.max, norms), over(backend, xp.min, limits), least, share_changed(backend, factors)]
        if self.skipped is not None:
            values.append(xp.asarray(self.skipped, dtype=least.dtype))
        return dict(zip(LOGGED, values, strict=False))

    def __repr__(self) -> str:
        """Say that the norms are those before clipping."""
        return (
            f"Report(norms={self.norms!r} (before clipping), limits={self.limits!r}, factors={self.factors!r}, "
            f"clipped={self.clipped!r}, finite={self.finite!r}, skipped={self.skipped!r})"
        )


class Decision(NamedTuple):
    """The norms of a step, and what is to be done about them: one value per group of gradients."""

    grads: Gradients
    norms: list[Any]
    small: Backend
    """The backend of the values below: that of the gradients, or of scalars where reading them costs nothing."""
    limits: list[Any]
    factors: list[Factor]
    products: list[Any]
    """The factors as single numbers."""
    ones: list[Any]
    """Whether each factor is 1."""
    finite: Any
    skipped: Any
    """Whether the step is left out, ``None`` if the rule leaves none out."""
    state: Any

    def report(self) -> Report:
        """Return the report, in arrays of the gradients' own framework."""
        grads, xp = self.grads, self.small.xp
        flags = [xp.logical_not(all_of(self.small, self.ones)), self.finite]
        values = [
            grads.arrange(grads.as_arrays([self._typed(*pair) for pair in zip(some, self.norms, strict=True)]))
            for some in (self.limits, self.products)
        ]
        flags += [] if self.skipped is None else [self.skipped]
        return Report(self.arranged_norms(), *values, *grads.as_arrays(flags))

    def _typed(self, value: Any, norm: Any) -> Any:
        """Return a number, or a scalar in double precision, in the dtype of its norm."""
        if self.small is SCALARS:
            return norm.dtype.type(value)
        return self.small.to_device_of(norm, self.small.xp.asarray(value, dtype=norm.dtype))

    def arranged_norms(self) -> Any:
        """Return the norms, as the scope's user thinks of them."""
        return self.grads.arrange(self.grads.as_arrays(self.norms))

    def clipped(self, rule: Rule) -> Any:
        """Return the clipped gradients."""
        return scaled(self.grads, self.small, self.factors, self.ones, skip=rule.nonfinite == "skip")

    def reduced(self, rule: Rule, *, mean: bool) -> Any:
        """Return the sum (or the mean) of the clipped gradients along their first axis."""
        return reduced(self.grads, self.factors, skip=rule.nonfinite == "skip", mean=mean)


def decide(
    rule: Rule,
    grads: Gradients,
    state: Any,
    params: Any = None,
    all_reduce: AllReduce | None = None,
    norm: Any = None,
    loss: Any = None,
) -> Decision:
    """Measure the gradients and work out their factors."""
    backend = grads.backend
    sound = [all_finite(grads, all_reduce)] if rule.nonfinite == "zero" else []
    if sound and not (backend.readable(sound[0]) and bool(sound[0])):
        grads = grads._replace(clean=True)
    norms = measure(grads, rule.norm, all_reduce) if norm is None else _known(grads, norm)
    limits, new_state = _limits(grads, rule, norms, state, lambda: given_of(rule, grads, params, all_reduce, loss))
    small, norms, limits, sound = _readable(rule, grads, norms, limits, sound)
    seen = norms if small is backend else [small.xp.float64(n) for n in norms]
    finite = all_of(small, [*sound, *[small.xp.all(small.xp.isfinite(n)) for n in seen]])
    if rule.nonfinite == "raise":
        refuse(grads, finite)
    factors, ones, products, measures = [], [], [], _measures(backend, rule.limit)
    for index, (norm_, n) in enumerate(zip(norms, seen, strict=True)):
        top = float(small.xp.finfo(norm_.dtype).max)
        limits[index] = limit = _checked(small, "limit", limits[index], n, top)
        factor = factor_of(small, rule, n, Bound(limit, top, measures), finite)
        factors.append(factor)
        products.append(factor.product(small.xp, top))
        ones.append(small.xp.all(small.xp.equal(factor.rest, small.xp.ones_like(factor.rest))))
    if new_state is not state:
        state = kept(small, finite, optree.tree_map(backend.detached, new_state), state)
    skipped = _skipped(small, rule, products, finite)
    return Decision(grads, norms, small, limits, factors, products, ones, finite, skipped, state)


def _skipped(backend: Backend, rule: Rule, factors: list[Any], finite: Any) -> Any:
    """Return whether the whole step is left out, ``None`` if the rule leaves none out."""
    xp, skipped = backend.xp, None
    if rule.nonfinite == "skip":
        skipped = xp.logical_not(finite)
    if rule.curve is skip:
        gone = [xp.equal(factor, xp.zeros_like(factor)) for factor in factors]
        every = all_of(backend, [xp.all(flag) for flag in gone])
        none = all_of(backend, [xp.logical_not(xp.any(flag)) for flag in gone])  # holds, too, where there is nothing
        none_left = every & xp.logical_not(none)
        skipped = none_left if skipped is None else skipped | none_left
    return skipped


def _readable(
    rule: Rule, grads: Gradients, norms: list[Any], limits: list[Any], sound: list[Any]
) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """Return norms, limits and flags as scalars if reading them costs nothing, else as arrays; and their backend."""
    backend, found = grads.backend, []
    for value in (*norms, *limits, *sound):
        scalar = value if isinstance(value, NUMBERS) else backend.number(backend.xp.asarray(value))
        if scalar is None:
            return backend, grads.as_arrays(norms), limits, sound
        found.append(scalar)
    count = len(norms)
    if not count or rule.curve not in ON_SCALARS:
        return backend, grads.as_arrays(norms), limits, sound
    norms = found[:count]
    # As in code that reads nothing, a limit has the precision of its norm.
    limits = [_rounded(limit, n.dtype) for n, limit in zip(norms, found[count:], strict=False)]
    return SCALARS, norms, limits, found[2 * count :]


def _rounded(limit: Any, dtype: Any) -> float:
    """Return a limit in the precision of a dtype: a finite one stays finite."""
    rounded = float(dtype.type(limit))
    return rounded if rounded != math.inf else SCALARS.xp.finfo(dtype).max


def _measures(backend: Backend, limit: Any) -> Any:
    """Return whether a limit is a constant ∞, which only measures: a boolean, or an array of one."""
    if type(limit) is not Constant:
        return False
    if isinstance(limit.value, NUMBERS):
        return bool(limit.value > sys.float_info.max)  # to compilers, no symbol equals ∞
    xp, value = backend.xp, backend.xp.asarray(limit.value)
    if not xp.isdtype(value.dtype, "real floating"):
        return False
    number = backend.number(value)
    return xp.isinf(value) if number is None else bool(number == math.inf)


def given_of(
    rule: Rule, grads: Gradients, params: Any = None, all_reduce: AllReduce | None = None, loss: Any = None
) -> Given:
    """Return what the rule's limit may ask for beside the norms."""

    def reference() -> list[Any]:
        if params is None:
            msg = f"{short(rule)} compares gradients with their parameters: pass params="
            raise ValueError(msg)
        theirs = grads.matching(params)
        return [theirs.backend.detached(n) for n in theirs.as_arrays(measure(theirs, rule.norm, all_reduce))]

    find_loss = loss_of(grads, all_reduce, loss)
    return Given(grads.backend, list(grads.groups), reference, lambda: sizes_of(grads, all_reduce), find_loss)


def _limits(
    grads: Gradients, rule: Rule, norms: list[Any], state: Any, given: Callable[[], Given]
) -> tuple[list[Any], Any]:
    """Ask the rule's limit; refuse an answer that is none."""
    if type(rule.limit) is Constant:  # which asks for no norms
        return [rule.limit.value] * len(norms), state
    # It sees ∞ as NaN: as a limit, ∞ would leave alone. No NaN is made of a finite norm, and its derivative stays 1.
    seen = [n + (n - n) for n in grads.as_arrays(norms)]
    if rule.limit.memory:
        if not grads.tree.leaves:  # a step without gradients teaches nothing
            return [math.inf] * len(norms), state
        _check_state(rule, seen, state)
    answer = rule.limit(seen, state, given())
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], (list, tuple))):  # noqa: PLR2004
        wanted = "(limits, state), a list of limits and the next state"
        msg = f"{short(rule.limit)} must return {wanted}, got {short(answer)}"
        raise TypeError(msg)
    limits, state = answer
    if len(limits) != len(norms):
        msg = f"{short(rule.limit)} must return one limit for each of the {len(norms)} norms, got {len(limits)}"
        raise ValueError(msg)
    wanted = "a number or an array of real numbers"
    return [n if hasattr(n, "dtype") else real(f"a limit of {short(rule.limit)}", n, wanted) for n in limits], state


def _check_state(rule: Rule, norms: list[Any], state: Any) -> None:
    """Refuse a state that is none, or one for another number of norms."""
    own = type(rule.limit).__module__.startswith("uniclip.limits.")  # whose states are all of one kind
    kind = isinstance(state, list) if isinstance(rule.limit, PerGroup) else hasattr(state, "_fields")
    if state is None or isinstance(state, NoState) or (own and not kind):
        msg = f"state must be what rule.init(grads) returns, or an update before, for {short(rule)}, got {short(state)}"
        raise TypeError(msg)
    for part in state if isinstance(state, tuple) else ():
        if isinstance(part, list) and len(part) != len(norms):
            msg = (
                f"the state of {short(rule)} is for {len(part)} norms, but there are {len(norms)}: it was made for "
                "other gradients, or some are None that were not, or the other way round"
            )
            raise ValueError(msg)


def kept(backend: Backend, finite: Any, new: Any, old: Any) -> Any:
    """Return the new state, the old one after a step that is not finite: one NaN must not spoil all later steps."""
    if not optree.tree_leaves(old):
        return new
    if backend.readable(finite):
        return new if bool(finite) else old
    xp = backend.xp
    zero = xp.zeros_like(xp.astype(finite, xp.float32))
    finite = backend.once(xp.where(finite, zero + 1, zero)) > 0  # compilers would work it out again for each array
    return optree.tree_map(lambda a, b: xp.where(backend.to_device_of(a, finite), a, b), new, old)


def _known(grads: Gradients, norm: Any) -> list[Any]:
    """Return a norm that is known already, in the dtype that measuring would give it."""
    backend = grads.backend
    return [_checked(backend, "norm", _as_known(backend, norm, zero.dtype), zero) for zero in zeros(grads)]


def _as_known(backend: Backend, norm: Any, dtype: Any) -> Any:
    """Return a known norm as an array of a dtype, of a wider one if it needs that: it may be that of wider arrays."""
    xp = backend.xp
    if hasattr(norm, "dtype"):
        norm = xp.asarray(norm)
        wide = xp.isdtype(norm.dtype, "real floating")
        return cast(xp, norm, xp.result_type(dtype, norm.dtype) if wide else dtype)
    largest = float(xp.finfo(dtype).max)
    if not largest < norm < math.inf:
        return xp.asarray(norm, dtype=dtype)
    wide = xp.result_type(xp.float64, dtype)  # not always wider
    if wide == dtype:
        msg = f"norm must be within the range of {dtype}, up to {largest:.3g}, got {short(norm)}"
        raise ValueError(msg)
    return xp.asarray(norm, dtype=wide)


def _checked(backend: Backend, name: str, value: Any, norm: Any, top: float = math.inf) -> Any:
    """Return a limit (or a known norm), a number or an array like the norm, ``top`` at most; refuse a wrong one."""
    if isinstance(value, NUMBERS):
        wrong = not value >= 0 and not _not_finite(backend, norm)  # NaN too is not >= 0
        value = min(value, top)  # the other way round NaN would become top
    else:
        xp = backend.xp
        value = xp.asarray(value, dtype=value.dtype if name == "norm" else norm.dtype)
        wrong = _wrong(backend, name, value, norm)
        value = value if top == math.inf else xp.where(value > top, xp.ones_like(value) * top, value)
    if wrong:
        shown = short(value) if getattr(value, "shape", ()) else value
        msg = f"{name} must be 0 or more{' (0 zeroes the gradients)' if name == 'limit' else ''}, got {shown}"
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
