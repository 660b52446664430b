# SPDX-License-Identifier: MIT
"""One step of a rule: measure the norms, compute their limits and factors, then scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import optree

from uniclip._repr import short
from uniclip.agree import joint_of
from uniclip.ask import Asked, Beside, Step, on_host, opened_params, refuse_shape
from uniclip.backends import DEFAULT
from uniclip.backends.arrays import all_of, together
from uniclip.curves import rejects
from uniclip.layout import Layout, Opened, layout_of
from uniclip.losses import Loss, as_scalars, mean_of
from uniclip.measure import in_range, measure
from uniclip.nonfinite import all_finite, refuse
from uniclip.processes import Joint, along_names
from uniclip.report import Late, Made, Report, scalars_of
from uniclip.ruler import Ruler, zeros
from uniclip.scale import factors_of, reduced, scaled
from uniclip.tree import Tree, are_apart

if TYPE_CHECKING:
    from uniclip.backends import Backend
    from uniclip.rules import Rule


class Decision(NamedTuple):
    """The result of a step before anything is scaled: an array for each block."""

    given: Opened
    layout: Layout
    backend: Backend
    """The backend of the arrays: NumPy's where the host can read them at no cost, else the gradients' own."""
    norms: list[Any]
    limits: list[Any]
    factors: list[Any]
    sound: list[Any]
    """Whether all entries are finite, where that was checked."""
    skipped: Any
    """Whether the step is skipped, ``None`` if the rule skips none."""
    state: Any
    thresholds: list[Any] | None = None

    def clipped(self, rule: Rule) -> Tree:
        """Return the clipped gradients."""
        return scaled(self.given, self.layout, self.factors, skip=rule.nonfinite == "skip")

    def reduced(self, rule: Rule) -> Tree:
        """Return the sum of the clipped gradients along their first axis."""
        return reduced(self.given, self.layout, self.factors, skip=rule.nonfinite == "skip")

    def total(self) -> Any:
        """Return the norms of the report."""
        tree, own = self.given.tree, list(map(self.given.own, self.norms))
        return self.layout.arranged(tree, own)

    def report(self) -> Report:
        """Return the report, with its fields in traced code, else with functions that make them on first access."""
        given, own = self.given, self.given.backend
        seen = _Seen(
            own, self.backend, self.layout, given.tree._replace(leaves=[]), own.device(given.first), self.norms,
            self.limits, self.factors, self.sound, self.skipped,
            self.thresholds,
        )  # fmt: skip
        if given.tree.spec is None or own.traced(given.first):  # the way back may hold the gradients
            return Made(*[seen.field(name) for name in Made._fields])
        return Late(seen)


class _Seen(NamedTuple):
    """The data of a report: small arrays, and no gradient."""

    own: Backend
    backend: Backend
    layout: Layout
    tree: Any
    device: Any
    norms: list[Any]
    limits: list[Any]
    factors: list[Any]
    sound: list[Any]
    skipped: Any
    thresholds: list[Any] | None

    def field(self, name: str) -> Any:
        """Return a field of the report, in arrays of the gradients' framework."""
        xp = self.backend.xp
        with self.own.quiet():
            if name == "clipped":
                same = all_of(self.backend, [xp.all(xp.equal(some, 1.0)) for some in self.factors])
                return self._own(xp.logical_not(same))
            if name == "finite":
                return self._own(finite(self.backend, self.sound, self.norms))
            if name == "skipped":
                return self._own(self.skipped)
            if name in {"limits", "thresholds"}:
                blocks = self._like_norms(self.limits if name == "limits" else self.thresholds)
            else:
                blocks = getattr(self, name)
            return None if blocks is None else self.layout.arranged(self.tree, list(map(self._own, blocks)))

    def scalars(self) -> dict[str, Any] | None:
        """Return the scalars, in NumPy where possible; ``None`` if some rows belong to absent gradients."""
        if not self.norms or not all(self.layout.groups) or any([0 in n.shape for n in self.norms]):
            return None
        with self.own.quiet():
            some = (self.limits, self.thresholds or [])
            limits, thresholds = (list(map(self._array, one, self.norms)) for one in some)
            found = scalars_of(self.backend, self.norms, limits, self.factors, self.skipped, thresholds)
            return found if self.own is self.backend else {name: self._own(value) for name, value in found.items()}

    def _array(self, value: Any, norms: Any) -> Any:
        """Return a limit as an array, which broadcasts against the norms."""
        return value if hasattr(value, "shape") else self.backend.xp.asarray(value, dtype=norms.dtype)

    def without_skip(self) -> _Seen:
        """Return the same of a rule that skips nothing."""
        return self._replace(skipped=None)

    def apart(self) -> tuple[list[Any], Callable[[list[Any]], _Seen]]:
        """Return the arrays, and a function that makes the record of NumPy arrays in their place."""
        names = "norms", "limits", "factors", "sound", "skipped", "thresholds"
        some: Any = {name: getattr(self, name) for name in names}
        arrays, spec = optree.tree_flatten(some)

        def on_host(found: list[Any]) -> _Seen:
            fields: Any = spec.unflatten(found)
            return self._replace(own=DEFAULT, backend=DEFAULT, device=None, **fields)

        return arrays, on_host

    def _like_norms(self, values: list[Any] | None) -> Any:
        xp = self.backend.xp
        return values and [xp.zeros_like(n) + value for n, value in zip(self.norms, values, strict=True)]

    def _own(self, value: Any) -> Any:
        host = isinstance(value, (bool, np.ndarray, np.generic))
        return self.own.from_host(np.asarray(value), self.device) if host else value


class Single(NamedTuple):
    """The result of a step with one norm and a constant limit, in NumPy scalars."""

    given: Opened
    state: Any
    norms: Any
    limits: Any
    factors: Any
    skipped: None = None

    def clipped(self, rule: Rule) -> Tree:
        """Return the clipped gradients."""
        given, arrays, factor = self.given, self.given.arrays, float(self.factors)
        new: Any = arrays
        if factor != 1:
            free = not given.in_place or are_apart(given.backend, given.tree)
            new = given.backend.scaled(arrays, [factor] * len(arrays), in_place=given.in_place) if free else None
        return self._in_arrays(rule).clipped(rule) if new is None else given.tree.with_leaves(new)

    def reduced(self, rule: Rule) -> Tree:
        """Return the sum of the clipped gradients along their first axis."""
        return self._in_arrays(rule).reduced(rule)

    def _in_arrays(self, rule: Rule) -> Decision:
        """Return the same in arrays."""
        norms, limits, factors = (np.asarray([one]) for one in (self.norms, self.limits, self.factors))
        layout = layout_of(self.given, rule.scope)
        return Decision(self.given, layout, DEFAULT, [norms], [limits], [factors], [], None, self.state)

    def total(self) -> Any:
        """Return the norm of the report."""
        own = self.given.backend
        return own.from_host(np.asarray(self.norms), own.device(self.given.first))

    def report(self) -> Report:
        """Return the report."""
        own = self.given.backend
        return Late(_OfOne(own, own.device(self.given.first), self.norms, self.limits, self.factors))


class _OfOne(NamedTuple):
    """The data of a report on one norm."""

    own: Backend
    device: Any
    norms: Any
    limits: Any
    factors: Any

    def field(self, name: str) -> Any:
        """Return a field of the report, in an array of the gradients' framework."""
        if name in {"skipped", "thresholds"}:
            return None
        value = self.factors != 1 if name == "clipped" else True if name == "finite" else getattr(self, name)
        return self._own(value)

    def scalars(self) -> dict[str, Any]:
        """Return the scalars."""
        norms, limits, factors = ([np.asarray(value)] for value in (self.norms, self.limits, self.factors))
        return {name: self._own(value) for name, value in scalars_of(DEFAULT, norms, limits, factors).items()}

    def without_skip(self) -> _OfOne:
        """Return itself: it is of a rule that skips nothing."""
        return self

    def apart(self) -> tuple[list[Any], Callable[[list[Any]], _OfOne]]:
        """Return no array, and a function that makes the record of NumPy arrays."""
        return [], lambda _: self._replace(own=DEFAULT, device=None)

    def _own(self, value: Any) -> Any:
        return self.own.from_host(np.asarray(value), self.device)


def _single(rule: Rule, given: Opened, state: Any) -> Single | None:
    """Decide on one Euclidean norm with a constant limit, if the host can read it; ``None`` in any other case."""
    if not (rule.simple and given.ways is None and given.arrays):
        return None
    limit: Any = rule.limit
    own = given.backend
    read = own.readable(given.first) and not own.debug_infs()
    found = own.squares(given.arrays, [len(given.arrays)]) if read else None
    if not (found is None or isinstance(found, np.ndarray)):
        found = together(own, [found])[0]
    if not isinstance(found, np.ndarray):
        return None
    total = found[0]
    if not in_range(float(total), total.dtype == np.float32):
        return None
    n, most, one = np.sqrt(total), total.dtype.type(limit.value), total.dtype.type(1)
    return Single(given, state, n, most, one if n <= most else most / n)


class _Found(NamedTuple):
    """The measurements of a step, reduced over processes."""

    given: Opened
    norms: list[Any]
    sound: list[Any]
    """Whether all entries are finite, where that was checked."""
    beside: Beside


def _found(  # noqa: PLR0913, PLR0917
    rule: Rule, given: Opened, layout: Layout, joint: Joint | None, step: Step, theirs: Opened | None
) -> _Found:
    """Measure what a step needs, ``theirs`` being the parameters, and reduce it over processes in one call."""
    own, needs, scalars = given.backend, rule.limit.needs, []
    looks = rule.nonfinite == "zero"
    here = all_finite(given) if looks else None
    if looks and not (own.readable(here) and bool(here)):
        given = given._replace(clean=True)
    if looks and joint is not None:
        scalars.append(own.xp.astype(own.xp.logical_not(here), own.xp.float32))
    joins_loss = "loss" in needs and joint is not None and not isinstance(step.loss, Loss)
    if joins_loss:
        scalars += as_scalars(given, step.loss)
    rulers = [Ruler(given, layout, rule.norm, joint)]
    if theirs is not None:
        rulers.append(Ruler(theirs, _like(layout, theirs, rule), rule.norm, joint))
    known = None if step.norm is None else _known(given, layout, step)
    if known is not None and not needs and not scalars:
        return _Found(given, known, [here] if looks else [], Beside())
    found = measure(rulers, sizes="sizes" in needs, scalars=scalars)
    norms, sums = found.norms[0], list(found.scalars)
    sound = [sums.pop(0) < 1 if joint is not None else here] if looks else []
    params = found.norms[1] if len(rulers) > 1 else None
    loss = _loss(given, step.loss, sums if joins_loss else None) if "loss" in needs else None
    beside = Beside(params, found.sizes, loss, norms.elsewhere)
    return _Found(given, norms.blocks if known is None else known, sound, beside)


def _loss(given: Opened, loss: Any, sums: list[Any] | None) -> Any:
    """Return the loss as a float32 array, ``None`` if there is none; ``sums`` are those of all processes."""
    loss, own = loss() if isinstance(loss, Loss) else loss, given.backend
    loss = loss if sums is None else mean_of(given, *sums, own=loss is not None)
    return loss if loss is None else own.detached(own.xp.astype(own.xp.asarray(loss), own.xp.float32))


def _like(layout: Layout, theirs: Opened, rule: Rule) -> Layout:
    """Return the layout of the parameters, with the blocks of their gradients."""
    found = layout_of(theirs, rule.scope, remembers=rule.limit.memory)
    wide = theirs.backend.xp.result_type
    blocks = [b._replace(dtype=wide(b.dtype, *[found.dtypes[group] for group in b.groups])) for b in layout.blocks]
    return found._replace(blocks=tuple(blocks))


def decide(rule: Rule, given: Opened, state: Any, step: Step) -> Decision | Single:
    """Measure the gradients and compute their factors."""
    if step.norm is None and step.all_reduce is None and given.parts is None:
        single = _single(rule, given, state)
        if single is not None:
            return single
    own = given.backend
    layout = layout_of(given, rule.scope, remembers=rule.limit.memory, joined=along_names(step.all_reduce))
    theirs = opened_params(rule, given, layout, step) if "params" in rule.limit.needs else None
    joint = joint_of(rule, given, layout, step.all_reduce, theirs)
    given, norms, sound, beside = _found(rule, given, layout, joint, step, theirs)
    read = [*sound, *(one for one in (beside.loss, beside.elsewhere) if one is not None)]
    host = (
        all(isinstance(n, np.ndarray) for n in norms)
        and getattr(rule.curve, "host", False)
        and on_host(own, rule.limit)
        and all(isinstance(array, np.ndarray) or own.viewed(array) is not None for array in read)
    )
    backend, sound = (DEFAULT, [_on_host(own, flag) for flag in sound]) if host else (own, list(map(given.own, sound)))
    elsewhere = [] if beside.elsewhere is None else [beside.elsewhere]
    if not host:
        norms, elsewhere = (list(map(given.own, some)) for some in (norms, elsewhere))
    faults = [n - n for n in norms]
    # A limit gets NaN for ∞, since a limit of ∞ would not clip. The derivative stays 1.
    seen = [n + fault for n, fault in zip(norms, faults, strict=True)]
    beside = beside._replace(elsewhere=elsewhere[0] + (elsewhere[0] - elsewhere[0]) if elsewhere else None)
    limits, new_state, thresholds = Asked(rule, given, layout, backend, step, beside).limits(seen, state)
    decided = rule.nonfinite in {"raise", "skip"} or rule.limit.memory
    fine = finite(backend, sound, [*norms, *elsewhere]) if decided else None
    if rule.nonfinite == "raise":
        refuse(given, backend, fine)
    measured = zip(layout.blocks, norms, limits, faults, strict=True)
    factors = [factors_of(backend, rule, *some, fine) for some in measured]
    if rule.limit.memory:
        state = kept(backend, fine, new_state, state)
    skipped = _skipped(backend, rule, layout, factors, fine, joint)
    sound = [*sound, *[backend.xp.all(backend.xp.isfinite(n)) for n in elsewhere]]
    return Decision(given, layout, backend, norms, limits, factors, sound, skipped, state, thresholds)


def _on_host(own: Backend, array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else own.viewed(array)


def first_state(rule: Rule, given: Opened) -> Any:
    """Return the state before the first step."""
    layout = layout_of(given, rule.scope, remembers=True)
    contexts = Asked(rule, given, layout, given.backend).contexts(zeros(given, layout))
    states = [rule.limit.init(context.norms, context) for context in contexts]
    return states[0] if len(states) == 1 else tuple(states)


def finite(backend: Backend, sound: list[Any], norms: list[Any]) -> Any:
    """Return whether all entries (where checked) and all norms are finite."""
    return all_of(backend, [*sound, *[backend.xp.all(backend.xp.isfinite(n)) for n in norms]])


def kept(backend: Backend, finite: Any, new: Any, old: Any) -> Any:
    """Return the new state, or the old one after a step that is not finite, so that NaN never enters a state."""
    if not optree.tree_leaves(old):
        return new
    if backend.readable(finite):
        return new if bool(finite) else old
    finite = backend.barrier(finite)  # or compilers would compute it again for each array
    return optree.tree_map(lambda a, b: backend.xp.where(backend.to_device_of(a, finite), a, b), new, old)


def _skipped(  # noqa: PLR0913, PLR0917
    backend: Backend, rule: Rule, layout: Layout, factors: list[Any], finite: Any, joint: Joint | None
) -> Any:
    """Return whether the whole step is skipped, ``None`` if the rule skips none."""
    xp, skipped = backend.xp, None
    if rule.nonfinite == "skip":
        skipped = xp.logical_not(finite)
    if rejects(rule.curve):
        every, none = [], []
        for some, block in zip(factors, layout.blocks, strict=True):
            gone = xp.equal(some, 0.0)
            joined = joint is not None and joint.reduce is not None
            here = [row for row, group in enumerate(block.groups) if joined or layout.groups[group]]
            rows = [gone] if len(here) == len(block.groups) else [gone[row, ...] for row in here]
            every += [xp.all(row) for row in rows]
            none += [xp.logical_not(xp.any(row)) for row in rows]  # true also where there is no norm
        every, none = all_of(backend, every), all_of(backend, none)
        if joint is not None and joint.rows is not None:  # other processes have norms of their own
            not_all = [xp.astype(xp.logical_not(flag), xp.float32) for flag in (every, none)]
            every, none = (count < 1 for count in joint.columns([], "sum", not_all)[1])
        none_left = every & xp.logical_not(none)
        skipped = none_left if skipped is None else skipped | none_left
    return skipped


def _known(given: Opened, layout: Layout, step: Step) -> list[Any]:
    """Return a given norm as measuring would return it; refuse an invalid one."""
    backend, norms = given.backend, []
    for zero in zeros(given, layout):
        norm = backend.xp.asarray(step.norm, dtype=zero.dtype)
        refuse_shape("norm", norm, zero)
        if backend.readable(norm) and bool(backend.xp.any(norm < 0)):  # NaN is a norm that was measured
            msg = f"norm must be 0 or more, got {short(norm) if norm.shape else norm}"
            raise ValueError(msg)
        norms.append(zero + norm)
    return together(backend, norms)
