# SPDX-License-Identifier: MIT
"""One step of a rule: measure the norms, compute their limits and factors, then scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import optree

from uniclip._checks import refuse_in_step
from uniclip._repr import short
from uniclip.absent import Filled, filled
from uniclip.agree import joint_of, refuse_kept_axes
from uniclip.ask import Asked, Beside, Step, on_host, opened_params, refuse_shape
from uniclip.backends import DEFAULT, backend_by
from uniclip.backends.arrays import all_of, together
from uniclip.curves import rejects
from uniclip.layout import Layout, Opened, layout_of, opened
from uniclip.losses import Loss, as_scalars, mean_of
from uniclip.measure import in_range, measure
from uniclip.nonfinite import all_finite, refuse
from uniclip.processes import Joint, along_names, of
from uniclip.report import Late, Made, Report, scalars_of
from uniclip.ruler import Ruler, zeros
from uniclip.scale import factors_of, reduced, scaled
from uniclip.tree import Tree, are_apart

if TYPE_CHECKING:
    from uniclip.backends import Backend
    from uniclip.rules import Rule


class Decision(NamedTuple):
    """What a step comes to before anything is scaled: an array for each block of norms."""

    rule: Rule
    given: Opened
    backend: Backend
    """The backend of the arrays: NumPy's where the host can read them at no cost, else the gradients' own."""
    norms: list[Any]
    limits: list[Any]
    """Arrays that broadcast against the norms, or numbers."""
    factors: list[Any]
    state: Any
    layout: Layout | None = None
    """``None`` for one norm of all leaves, decided on without it."""
    sound: Sequence[Any] = ()
    """Whether all entries are finite, where that was checked."""
    skipped: Any = None
    """Whether the step is skipped, ``None`` if the rule skips none."""
    thresholds: list[Any] | None = None
    whole: Filled | None = None
    """The gradients with those that only other processes have."""

    def clipped(self) -> Tree:
        """Return the clipped gradients."""
        given, skip = self.given, self.rule.nonfinite == "skip"
        if self.layout is not None:
            return self._whole(scaled(given, self.layout, self.factors, skip=skip))
        factor, new = float(self.factors[0][0]), None
        if factor == 1:
            return given.tree
        if not given.in_place or are_apart(given.backend, given.tree):
            new = given.backend.scaled(given.arrays, [factor] * len(given.arrays), in_place=given.in_place)
        if new is None:
            return scaled(given, layout_of(given, self.rule.scope), self.factors, skip=skip)
        return given.tree.with_leaves(new)

    def summed(self) -> Tree:
        """Return the sum of the clipped gradients along their first axis."""
        layout = self.layout or layout_of(self.given, self.rule.scope)
        return self._whole(reduced(self.given, layout, self.factors, skip=self.rule.nonfinite == "skip"))

    def _whole(self, tree: Tree) -> Tree:
        return tree if self.whole is None else self.whole.emptied(self.given.tree, tree)

    def total(self) -> Any:
        """Return the norms of the report."""
        own = list(map(self.given.own, self.norms))
        return own[0][0] if self.layout is None else self.layout.arranged(self.given.tree, own)

    def report(self) -> Report:
        """Return the report, with its fields in traced code, else with functions that make them on first access."""
        given, own = self.given, self.given.backend
        structure = None if self.layout is None else given.tree._replace(leaves=[])
        seen = _Seen(
            own, self.backend, self.layout, structure, own.device(given.first), self.norms, self.limits, self.factors,
            self.sound, self.skipped, self.thresholds,
        )  # fmt: skip
        if structure is not None and (structure.spec is None or own.traced(given.first)):
            return Made(*[seen.field(name) for name in Made._fields])  # the way back may hold the gradients
        return Late(seen)


class _Seen(NamedTuple):
    """The data of a report: small arrays, and no gradient."""

    own: Backend
    backend: Backend
    layout: Layout | None
    tree: Any
    device: Any
    norms: list[Any]
    limits: list[Any]
    factors: list[Any]
    sound: Sequence[Any]
    skipped: Any
    thresholds: list[Any] | None

    def field(self, name: str) -> Any:
        """Return a field of the report, in arrays of the gradients' framework."""
        if name in {"skipped", "thresholds"} and getattr(self, name) is None:
            return None
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
            if blocks is None:
                return None
            own = list(map(self._own, blocks))
            return own[0][0] if self.layout is None else self.layout.arranged(self.tree, own)

    def scalars(self) -> dict[str, Any] | None:
        """Return the scalars, in NumPy where possible; ``None`` if some rows belong to absent gradients."""
        some_absent = self.layout is not None and not all(self.layout.groups)
        if not self.norms or some_absent or any([0 in n.shape for n in self.norms]):
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
        empty: Any = dict.fromkeys(names)  # arrays may hold what they were computed from
        rest = self._replace(own=DEFAULT, backend=DEFAULT, device=None, **empty)

        def on_host(found: list[Any]) -> _Seen:
            fields: Any = spec.unflatten(found)
            return rest._replace(**fields)

        return arrays, on_host

    def _like_norms(self, values: list[Any] | None) -> Any:
        xp = self.backend.xp
        return values and [xp.zeros_like(n) + value for n, value in zip(self.norms, values, strict=True)]

    def _own(self, value: Any) -> Any:
        host = isinstance(value, (bool, np.ndarray, np.generic))
        return self.own.from_host(np.asarray(value), self.device) if host else value


def _straight(rule: Rule, given: Opened, state: Any) -> Decision | None:
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
    norms, most = np.sqrt(found), total.dtype.type(limit.value)
    factors = np.asarray([1.0 if norms[0] <= most else most / norms[0]], norms.dtype)
    return Decision(rule, given, DEFAULT, [norms], [most], [factors], state)


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


def decide(
    rule: Rule, grads: Any, state: Any, step: Step, finish: Callable[[Decision], Tree] | None = Decision.clipped
) -> tuple[Any, Decision]:
    """Open gradients, which may be flattened, measure them, compute their factors, and scale them.

    Parameters
    ----------
    rule : Rule
    grads : tree
    state : tree of arrays
    step : Step
    finish : callable, default `Decision.clipped`
        What is made of the gradients, or `Decision.summed`; ``None`` to measure only.

    Returns
    -------
    finished : Tree or None
    decision : Decision

    Raises
    ------
    TypeError, ValueError, FloatingPointError
        As `uniclip.clip`.
    """
    refuse_in_step(step.all_reduce, None if isinstance(step.loss, Loss) else step.loss, step.params)
    if step.all_reduce is None:
        given, whole = opened(grads, in_place=step.in_place), None
    else:
        refuse_kept_axes(rule.scope, step.all_reduce)
        backend = backend_by(of(step.all_reduce))
        whole = filled(rule.scope, grads, step.params, state, known=backend is not None, left_out=step.left_out)
        given, step = opened(whole.grads, in_place=step.in_place), step._replace(absent=whole.absent)
        given = given if given.arrays else given._replace(backend=backend or given.backend)
    with given.backend.quiet(given.first):
        alone = whole is None and step.norm is None and given.parts is None
        decision = (_straight(rule, given, state) if alone else None) or _decided(rule, given, state, step, whole)
        return None if finish is None else finish(decision), decision


def _decided(rule: Rule, given: Opened, state: Any, step: Step, whole: Filled | None) -> Decision:
    """Decide on any norms."""
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
    return Decision(rule, given, backend, norms, limits, factors, state, layout, sound, skipped, thresholds, whole)


def _on_host(own: Backend, array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else own.viewed(array)


def first_state(rule: Rule, given: Opened) -> Any:
    """Return the state before the first step."""
    layout = layout_of(given, rule.scope, remembers=True)
    contexts = Asked(rule, given, layout, given.backend).contexts(zeros(given, layout))
    states = [rule.limit.init(context.norms, context) for context in contexts]
    return states[0] if len(states) == 1 else tuple(states)


def finite(backend: Backend, sound: Sequence[Any], norms: list[Any]) -> Any:
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
