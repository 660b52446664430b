# SPDX-License-Identifier: MIT
"""Reports of steps: what a rule measured and did, and the scalars of it for loggers.

Nothing is measured here; a report arranges the small arrays that a step has made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from operator import and_, or_
from typing import Any, Literal, NamedTuple

import numpy as np
import optree
from optree.registry import __GLOBAL_NAMESPACE as EVERYWHERE  # there is no public name for it

from uniclip._core.containers import NAMESPACE, flatten
from uniclip._core.plan import Plan
from uniclip._errors import summarize
from uniclip._types import Flags, Tree
from uniclip.backends import BACKEND_CACHE, Backend, backend_of, library_of, outlives
from uniclip.backends.base import NODES, NUMPY, stack_arrays, take

NORM = "clip/norm"
LIMIT = "clip/limit"
THRESHOLD = "clip/threshold"
FACTOR = "clip/factor"
SHARE = "clip/share"
SKIPPED = "clip/skipped"
LOGGED = (NORM, LIMIT, THRESHOLD, FACTOR, SHARE, SKIPPED)
"""The names of a report's scalars in loggers."""
AVERAGED = (SHARE, SKIPPED)
"""The scalars that are averaged over many steps."""
NORM_MAX = "clip/norm_max"
"""The largest finite norm of all steps since the last log, where not every step is logged."""
UNLIMITED = 3e38
"""A limit or threshold of at least this size means that there is none."""
MANY_SKIPPED = 20
"""Number of consecutive skipped steps after which a run is reported as dead."""
FIELDS = ("norms", "limits", "factors", "clipped", "finite", "skipped", "thresholds")


_WITHOUT_VALUES = "traced: the values are known when the program runs"


class StepValues(NamedTuple):
    """The small arrays that a step has made, where the norms are; no gradient.

    A report arranges them in the form of the rule's scope.
    """

    plan: Plan
    norms: list[Any]
    limits: list[Any]
    """Arrays that broadcast against the norms, or numbers."""
    factors: list[Any]
    thresholds: list[Any] | None = None
    elements_finite: Any = None
    """Whether all elements were finite, where that was checked."""
    skipped: Any = None
    """Whether the step is skipped, ``None`` if the rule skips none."""

    def arranged_norms(self) -> Any:
        """Return the norms as the report has them."""
        plan = self.plan
        return plan.arrange(list(map(plan.space.to_library, self.norms)))

    def report(self) -> Report:
        """Return the report of a step; of compiled code one that is filled,
        unless its compiler opens lazy ones.
        """
        # What compiled code returns must be a container that its compiler opens.
        report = LazyReport(self)
        space = self.plan.space
        if space.compiled and not space.library.opens_nodes:
            return FilledReport(*report)
        return report


class Report:
    """What a rule measured and did at one step, in arrays of the framework.

    Nothing is read from an accelerator. Where all leaves share a norm, a field is one array (0-d
    unless the scope keeps axes); with labeled groups a dict by label, the labels sorted as text;
    else a tree like the gradients. For a rule that measures no norm (``by_value``, a function)
    every field is ``None``.

    Attributes
    ----------
    norms : array, dict or tree
        The norms before clipping.
    limits : array, dict or tree
        The limits of the norms; the largest number of their dtype where nothing is limited.
    factors : array, dict or tree
        The factors that multiplied the gradients.
    clipped : 0-d array
        Whether any factor differs from 1 (boolean).
    finite : 0-d array
        Whether every gradient, before clipping, and every norm was finite (boolean).
    skipped : 0-d array
        Whether the rule skipped the whole step, which the optimizer should skip too (boolean).
        ``None`` if the rule neither has a curve that drops gradients (`uniclip.curves.reject`,
        ``skip_above=``) nor the policy ``"skip"``.
    thresholds : array, dict or tree
        The norms above which the rule clips, if it then clips to less, as `uniclip.zclip` does;
        ``None`` where these are the limits.

    Examples
    --------
    >>> clipped, report = uc.clip([np.asarray([3.0, 4.0]), np.asarray([0.5])], uc.by_norm(1.0))
    >>> report
    <Report: norm 5 (largest of 2), clipped 50%, finite>
    >>> report.norms, bool(report.clipped)
    ([np.float64(5.0), np.float64(0.5)], True)
    """

    __slots__ = ()

    def __new__(cls, *fields: Any, **named: Any) -> Report:  # noqa: PYI034 - a subclass
        """Return a report of its fields.

        Those that are not given are ``None``, as all of a rule without a norm.
        """
        if cls is not Report:
            return object.__new__(cls)
        return FilledReport(*fields, **dict.fromkeys(FIELDS[len(fields) :]) | named)

    norms: Any
    limits: Any
    factors: Any
    clipped: Any
    finite: Any
    skipped: Any
    thresholds: Any

    def scalars(self) -> dict[str, Any]:
        """Return the scalars for a logger, under the same names for every rule.

        Returns
        -------
        dict of str to 0-d array
            ``"clip/norm"``, the largest norm before clipping; ``"clip/limit"``, the smallest limit;
            ``"clip/threshold"``, the smallest norm that is clipped, for rules that have thresholds;
            ``"clip/factor"``, the smallest factor; ``"clip/share"``, the share of the factors that
            differ from 1 (0 or 1 with one factor, so its mean over the steps is the share of
            clipped steps, with the skipped ones); and ``"clip/skipped"``, 0 or 1, for rules that
            may skip a step. The values are floats on the device of the gradients; nothing is read
            from it. The dict is empty for a rule that measures no norm. For a `uniclip.chain`,
            ``"clip/factor"`` is the product over its rules, and ``"clip/share"`` that of the rule
            that clipped most.

        Examples
        --------
        >>> _, report = uc.clip([np.asarray([3.0, 4.0]), np.asarray([0.1])], uc.by_norm(1.0))
        >>> {name: float(value) for name, value in report.scalars().items()}
        {'clip/norm': 5.0, 'clip/limit': 1.0, 'clip/factor': 0.2, 'clip/share': 0.5}
        """
        norms, limits, factors, thresholds = map(
            _arrays_of, (self.norms, self.limits, self.factors, self.thresholds)
        )
        if not norms:
            return {}
        backend = library_of(norms[0])
        with backend.computation_context(norms[0]):
            return scalars_of(backend, norms, limits, factors, self.skipped, thresholds)

    def __str__(self) -> str:
        """Return the report in one line, without values while it is traced."""
        leaves = [leaf for leaf in flatten(self.norms).leaves if leaf is not None]
        if not leaves:
            return "no norm measured"
        backend = backend_of(leaves[0])
        # A pytree library may have put other objects into the fields.
        if backend is None:
            return ", ".join([f"{name}={getattr(self, name)!r}" for name in FIELDS])
        if backend.traced(leaves[0]):
            return _WITHOUT_VALUES
        return self._words(sum([math.prod(array.shape) for array in leaves]))

    def _words(self, count: int) -> str:
        """Return so many norms, limits and flags that have values in one line."""
        # From their device together.
        scalars, skipped, finite = read_arrays([self.scalars(), self.skipped, self.finite])
        # A step on no example at all has no norm.
        if NORM not in scalars:
            return "no norm measured"
        norm, limit, share = [float(scalars[name]) for name in (NORM, LIMIT, SHARE)]
        words = [f"norm {norm:.3g}"]
        if count > 1:
            words = [f"norm {norm:.3g} (largest of {count:,})"]
        elif limit < UNLIMITED:
            words.append(f"limit {limit:.3g}")

        if skipped is not None and bool(np.any(skipped)):
            words.append("skipped")
        elif count > 1:
            percent = "<1" if 0 < share < 0.005 else f"{100 * share:.0f}"
            words.append(f"clipped {percent}%")
        else:
            words.append("clipped" if share else "not clipped")

        words.append("finite" if bool(np.all(finite)) else "non-finite")
        return ", ".join(words)

    def without_skip(self) -> Report:
        """Return it without ``skipped``, of a rule whose other leaves take their step."""
        fields = {name: getattr(self, name) for name in FIELDS}
        return FilledReport(**{**fields, "skipped": None})

    def outlives_step(self) -> bool:
        """Return whether it may outlive the running code; nothing is arranged."""
        fields: Any = tuple(self)
        return outlives(optree.tree_leaves(fields))

    def was_skipped(self) -> bool:
        """Return whether a step was skipped, if the host reads that at no cost."""
        return False

    def __repr__(self) -> str:
        """Return the report in one line."""
        return f"<Report: {self}>"

    def __iter__(self) -> Iterator[Any]:
        """Yield the fields."""
        return iter([getattr(self, name) for name in FIELDS])


_FIELDS = [(name, Any) for name in FIELDS]


class FilledReport(NamedTuple("Fields", _FIELDS), Report):  # type: ignore[misc]
    """A report of fields, which every framework's functions on trees can open and return."""

    __slots__ = ()
    __repr__ = Report.__repr__
    __str__ = Report.__str__


class LazyReport(Report):
    """A report whose fields are arranged when they are asked for.

    Pytree libraries open it into its fields.
    """

    __slots__ = ("_fields", "_values")

    def __init__(
        self, values: StepValues | Callable[[], StepValues] | None, fields: Iterable[Any] = ()
    ) -> None:
        self._values = values
        self._fields: dict[str, Any] = dict(zip(FIELDS, fields, strict=False))

    @property
    def values(self) -> StepValues | None:
        """What the step made, asked for once; ``None`` if only the fields are known."""
        if callable(self._values):
            self._values = self._values()
        return self._values

    def outlives_step(self) -> bool:
        """Return whether it may outlive the running code; nothing is arranged."""
        if self._values is None:
            return super().outlives_step()
        # The spine takes no compiled step.
        return callable(self._values) or not self._values.plan.space.compiled

    def was_skipped(self) -> bool:
        """Return whether a step was skipped, if the host reads that at no cost."""
        values = self.values
        if values is None or values.skipped is None:
            return False
        space = values.plan.space
        # Reading a flag on an accelerator would make every step wait for the device.
        return (space.host or space.library.readable(values.skipped)) and bool(values.skipped)

    def without_skip(self) -> Report:
        """Return it without ``skipped``."""
        values = self._values
        if values is None:
            return super().without_skip()
        if callable(values):
            return LazyReport(lambda: values()._replace(skipped=None))
        return LazyReport(values._replace(skipped=None))

    def scalars(self) -> dict[str, Any]:
        """Return the scalars for a logger, under the same names for every rule.

        Most are made without the fields.
        """
        # Without the fields, which would have to be arranged as trees first.
        values = self.values
        if values is None:
            return super().scalars()
        plan = values.plan
        norms = values.norms
        # Absent leaves must not count, and empty arrays have no maximum: the fields omit both.
        some_absent = any([block.absent for block in plan.blocks]) and not plan.one_norm
        if not norms or some_absent or any([0 in n.shape for n in norms]):
            return super().scalars()
        with plan.space.backend.computation_context(norms[0]):
            limits = list(map(plan.space.cast_limit, values.limits, norms))
            thresholds = list(map(plan.space.cast_limit, values.thresholds or (), norms))
            scalars = scalars_of(
                plan.space.backend, norms, limits, values.factors, values.skipped, thresholds
            )
            return {name: plan.space.to_library(value) for name, value in scalars.items()}

    def __getattr__(self, name: str) -> Any:
        _check_name(name)
        if name in self._fields or self.values is None:
            return self._fields[name]
        space = self.values.plan.space
        norms = self.values.norms
        with space.backend.computation_context(norms[0] if norms else None):
            field = _arrange(self.values, name)
        # A tracer of one branch must not be found in another.
        if not space.compiled:
            self._fields[name] = field
        return field

    def __getitem__(self, number: int | slice) -> Any:
        return tuple(self)[number]

    def __reduce__(self) -> Any:
        """Return the fields, for a copy or a pickle."""
        return _rebuild, (None, tuple(self))

    def __len__(self) -> int:
        """Return the number of fields."""
        return len(FIELDS)

    def __str__(self) -> str:
        """Return the report in one line, of compiled code without values,
        wherever it is printed.
        """
        values = self._values
        compiled = isinstance(values, StepValues) and values.plan.space.compiled
        return _WITHOUT_VALUES if compiled else super().__str__()


def _arrange(values: StepValues, name: str) -> Any:
    """Return a field in arrays of the gradients' library."""
    plan = values.plan
    space = values.plan.space
    xp = values.plan.space.xp
    if name == "clipped":
        same = space.all([xp.equal(factors, xp.ones_like(factors)) for factors in values.factors])
        return space.to_library(xp.logical_not(same))

    if name == "finite":
        return space.to_library(space.finite(values.norms, values.elements_finite))

    arrays = getattr(values, name)
    if arrays is None:
        return None
    if name == "skipped":
        return space.to_library(arrays)
    # Limits may be numbers, and have fewer elements than the norms.
    if name in {"limits", "thresholds"}:
        arrays = [xp.zeros_like(n) + value for n, value in zip(values.norms, arrays, strict=True)]
    return plan.arrange(list(map(space.to_library, arrays)))


def _rebuild(_: None, fields: Iterable[Any]) -> LazyReport:
    """Return a lazy report, whatever the fields have become."""
    return LazyReport(None, fields)


def _open(report: LazyReport) -> tuple[tuple[Any, ...], None, tuple[str, ...]]:
    """Return the fields of a lazy report and their names."""
    return tuple(report), None, FIELDS


_node: Any = (LazyReport, _open, _rebuild)
optree.register_pytree_node(*_node, namespace=EVERYWHERE)
NODES.append((LazyReport, FIELDS, _rebuild))


class ChainReport(NamedTuple("Rules", [("rules", tuple[Report, ...])]), Report):
    """The report of a chain: those of its rules.

    A field is a tuple of theirs, or a flag for all of them.
    """

    __slots__ = ()
    __repr__ = Report.__repr__

    def without_skip(self) -> Report:
        """Return those of the rules without ``skipped``."""
        return ChainReport(tuple([report.without_skip() for report in self.rules]))

    def outlives_step(self) -> bool:
        """Return whether all may outlive the running code."""
        return all([report.outlives_step() for report in self.rules])

    def was_skipped(self) -> bool:
        """Return whether one of the rules skipped the step."""
        return any([report.was_skipped() for report in self.rules])

    def __getattr__(self, name: str) -> Any:
        _check_name(name)
        values = [getattr(report, name) for report in self.rules]
        flags = [value for value in values if value is not None]
        if not flags or name not in _JOINED:
            return tuple(values) if flags else None
        with library_of(flags[0]).computation_context(flags[0]):
            return reduce(_JOINED[name], flags)

    def scalars(self) -> dict[str, Any]:
        """Return the combined scalars of all rules.

        A step counts as clipped if one of them clipped.
        """
        each = [report.scalars() for report in self.rules]
        skipped = self.skipped
        joined: dict[str, Any] = {}
        # Rules run one after the other, so their factors multiply.
        for name, function in zip(LOGGED, ("max", "min", "min", "prod", "max", "max"), strict=True):
            scalars = [of_rule[name] for of_rule in each if name in of_rule]
            if scalars:
                backend = library_of(scalars[0])
                with backend.computation_context(scalars[0]):
                    joined[name] = _over(backend, getattr(backend.xp, function), scalars)

        # A rule without norms may have skipped the step, too.
        if joined and skipped is not None:
            share = joined[SHARE]
            backend = library_of(share)
            with backend.computation_context(share):
                joined[SKIPPED] = backend.xp.asarray(skipped, dtype=share.dtype)

        return joined

    def __str__(self) -> str:
        """Return the lines of the rules that measure norms, joined."""
        lines = [str(report) for report in self.rules if report.norms is not None]
        return " | ".join(lines) or str(Report())


_JOINED: dict[str, Callable[[Any, Any], Any]] = {"clipped": or_, "finite": and_, "skipped": or_}


def _check_name(name: str) -> None:
    if name not in FIELDS:
        msg = f"a report has no {name!r}: it has {', '.join(FIELDS)}, and scalars()"
        raise AttributeError(msg)


def keep_arrays(tree: Tree) -> Any:
    """Return a tree of reports and small arrays to read later,
    copied where they may be overwritten.
    """
    return _move_arrays(tree, "to_keep")


def read_arrays(tree: Tree) -> Any:
    """Return a tree of reports and small arrays with NumPy's in their places,
    those of a library read together.
    """
    return _move_arrays(tree, "to_host")


def has_values(part: Any) -> bool:
    """Return whether an object is a lazy report of a step, whose fields were not given."""
    return isinstance(part, LazyReport) and part.values is not None


def _take_apart(part: Any) -> Any:
    """Return the arrays of a report, those of a user's class as its fields.

    Other objects are returned as they are.
    """
    if has_values(part):
        return part.values._replace(plan=None)
    return FilledReport(*part) if isinstance(part, Report) else part


def _move_arrays(tree: Any, hook: Literal["to_keep", "to_host"]) -> Any:
    """Return a tree of reports and small arrays with others in their places;
    no report is arranged.
    """
    # The arrays of all reports are moved together, without their plans.
    # A report is a leaf here: its fields are not arranged.
    parts, outer = optree.tree_flatten(tree, is_leaf=has_values, namespace=NAMESPACE)
    opened: Any = list(map(_take_apart, parts))
    arrays, inner = optree.tree_flatten(opened, namespace=NAMESPACE)
    moved: Any = inner.unflatten(_move_by_library(arrays, hook))
    for number, part in enumerate(parts):
        if has_values(part):
            plan = part.values.plan
            # A plan computes in the library of its arrays, which are NumPy's from here on.
            if hook == "to_host":
                plan = plan.in_numpy()
            moved[number] = LazyReport(moved[number]._replace(plan=plan))

    return outer.unflatten(moved)


def backend_in(tree: Any) -> Backend | None:
    """Return the backend of the gradients of a report, or that of a tree of arrays;
    ``None`` if unknown.
    """
    for part in optree.tree_leaves(tree, is_leaf=has_values, namespace=NAMESPACE):
        if has_values(part):
            return part.values.plan.space.library
        backend = backend_of(part)
        if backend is not None:
            return backend

    return None


def _move_by_library(arrays: list[Any], hook: Literal["to_keep", "to_host"]) -> list[Any]:
    """Return arrays as their backends make them by a hook, all of one class together.

    Those of the host as copies.
    """
    # A host waits for its device once, not for each array.
    moved = list(arrays)
    by_class: dict[type, list[int]] = {}
    for number, array in enumerate(arrays):
        if isinstance(array, NUMPY):
            moved[number] = np.array(array)
        elif not isinstance(array, (float, int)):
            by_class.setdefault(type(array), []).append(number)

    for numbers in by_class.values():
        alike = take(arrays, numbers)
        # A flag is no gradient: `backend_of` finds its library, and says that it is none.
        backend_of(alike[0])
        backend = BACKEND_CACHE.get(type(alike[0]))
        if backend is None:
            msg = f"a report holds {summarize(alike[0])}, which is no array"
            raise TypeError(msg)

        if any(map(backend.traced, alike)):
            msg = (
                "inside of code that is compiled there are no values to read: return the report, "
                "and use it outside"
            )
            raise TypeError(msg)

        with backend.computation_context():
            for number, array in zip(numbers, getattr(backend, hook)(alike), strict=True):
                moved[number] = array

    return moved


def scalars_of(  # noqa: PLR0913, PLR0917 - the parts of a report
    backend: Backend,
    norms: list[Any],
    limits: list[Any],
    factors: list[Any],
    skipped: Flags | None = None,
    thresholds: list[Any] | tuple[()] = (),
) -> dict[str, Any]:
    """Return the scalars of all norms, limits, factors and thresholds, given as arrays."""
    xp = backend.xp
    norms = _computed_once(backend, norms)
    factors = _computed_once(backend, factors)
    scalars = {NORM: _over(backend, xp.max, norms), LIMIT: _over(backend, xp.min, limits)}
    if thresholds:
        scalars[THRESHOLD] = _over(backend, xp.min, thresholds)
    least = _over(backend, xp.min, factors)
    scalars[FACTOR] = least
    scalars[SHARE] = _share_changed(backend, factors)
    if skipped is not None:
        scalars[SKIPPED] = xp.asarray(skipped, dtype=least.dtype)
    return scalars


def nan_where_unlimited(scalars: dict[str, float]) -> dict[str, float]:
    """Return scalars for a logger, with NaN, a gap in a plot, where there is no limit."""
    absent = [name for name in (LIMIT, THRESHOLD) if scalars.get(name, 0.0) >= UNLIMITED]
    return scalars | dict.fromkeys(absent, math.nan)


def _arrays_of(values: Any) -> list[Any]:
    """Return the arrays in a field of a report that are not empty."""
    leaves = [values] if hasattr(values, "shape") else flatten(values).leaves
    return [array for array in leaves if array is not None and 0 not in array.shape]


_JOINED_AT_ONCE = 32
"""How many norms one operation of compiled code joins."""


def _computed_once(backend: Backend, arrays: list[Any]) -> list[Any]:
    """Return the norms or factors of many blocks joined in compiled code.

    XLA copies all operations before a number into each operation that uses it. A reduction of
    hundreds of numbers would then take most of the time to compile.
    """
    if len(arrays) == 1 or not all(map(backend.traced, arrays)):
        return arrays
    vectors = [backend.xp.reshape(array, (-1,)) for array in arrays]
    parts = []
    for start in range(0, len(vectors), _JOINED_AT_ONCE):
        part = backend.xp.concat(vectors[start : start + _JOINED_AT_ONCE])
        parts.append(backend.fence(part))
    return [backend.fence(backend.xp.concat(parts))]


def _over(backend: Backend, function: Callable[[Any], Any], arrays: list[Any]) -> Any:
    """Reduce over all elements of all arrays.

    Only 0-d arrays are stacked, since others may be sharded.
    """
    if len(arrays) == 1:
        return function(arrays[0])
    reduced = [function(array) if len(array.shape) else array for array in arrays]
    return function(stack_arrays(backend, reduced))


def _share_changed(backend: Backend, factors: list[Any]) -> Any:
    """Return the share of the factors that are not 1."""
    xp = backend.xp
    # The mean of means would weigh blocks of few norms more.
    changed = [xp.astype(xp.not_equal(factor, 1.0), factor.dtype) for factor in factors]
    if len(changed) == 1 or not any(len(factor.shape) for factor in factors):
        return _over(backend, xp.mean, changed)
    total = _over(backend, xp.sum, changed)
    if all([type(length) is int for factor in factors for length in factor.shape]):
        return total / sum([math.prod(factor.shape) for factor in factors])
    # Compiled code may know the lengths only when it runs.
    return total / _over(backend, xp.sum, [xp.ones_like(factor) for factor in factors])
