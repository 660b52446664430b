# SPDX-License-Identifier: MIT
"""The one algorithm: measure the norms, ask for their limits, bend the curve, scale.

Everything here is written against the array API namespace ``xp`` of the gradients' own framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from uniclip.backends import backend_of
from uniclip.limits import NoState
from uniclip.norms import Norm, largest
from uniclip.scopes import Path, Scope, everything
from uniclip.tree import backend_for, flatten, place

if TYPE_CHECKING:
    from uniclip.backends import Backend
    from uniclip.rules import ByValue, Rule

AllReduce: TypeAlias = Callable[[Any, Literal["sum", "max"]], Any]


class Report(NamedTuple):
    """What a rule saw and did, in arrays of the framework (nothing is read to the host).

    Where all leaves share one norm a field is one 0-d array; with labelled groups, a dict by label;
    else a tree like the gradients. A rule that measures no norm (``by_value``, a function) leaves
    every field ``None``.
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
    """Whether every norm was finite (a boolean 0-d array)."""

    def __repr__(self) -> str:
        """Say that the norms are those before clipping."""
        return (
            f"Report(norms before clipping={self.norms!r}, limits={self.limits!r}, factors={self.factors!r}, "
            f"clipped={self.clipped!r}, finite={self.finite!r})"
        )


@dataclass(frozen=True, slots=True)
class Leaf:
    """One distinct gradient: as it was given, and as the array of its stored values, floating point."""

    path: Path
    given: Any
    array: Any
    rebuild: Callable[[Any], Any]
    axes: tuple[int, ...] | None
    group: Hashable


@dataclass(frozen=True, slots=True)
class Gradients:
    """The distinct leaves of a tree in their groups; the same array given twice is one leaf."""

    backend: Backend
    groups: list[list[Leaf]]
    order: list[int]
    rebuild: Callable[[list[Any]], Any]
    scope: Scope

    @property
    def leaves(self) -> list[Leaf]:
        """All distinct leaves, group by group."""
        return [leaf for group in self.groups for leaf in group]

    def arrange(self, values: list[Any]) -> Any:
        """Present one value per group as the scope's user thinks of them."""
        if self.scope.join is everything:
            return values[0]
        if self.scope.join is not None:
            return {group[0].group: value for group, value in zip(self.groups, values, strict=True)}
        by_id = {id(group[0].given): value for group, value in zip(self.groups, values, strict=True)}
        return self.rebuild([by_id[i] for i in self.order])


def read(tree: Any, scope: Scope, name: str = "grads") -> Gradients:
    """Flatten a tree of gradients and sort its distinct leaves into the scope's groups."""
    paths, leaves, rebuild = flatten(tree, name)
    backend = backend_for(paths, leaves, name)
    groups: dict[Hashable, list[Leaf]] = {None: []} if scope.join is everything else {}
    seen: set[int] = set()
    for path, leaf in zip(paths, leaves, strict=True):
        if id(leaf) not in seen:
            seen.add(id(leaf))
            group = path if scope.join is None else scope.join(path, leaf)
            groups.setdefault(group, []).append(_leaf(backend, scope, name, path, leaf, group))
    return Gradients(backend, list(groups.values()), [id(leaf) for leaf in leaves], rebuild, scope)


def _leaf(backend: Backend, scope: Scope, name: str, path: Path, given: Any, group: Hashable) -> Leaf:
    xp = backend.xp
    array, rebuild = backend.stored(given)
    if xp.isdtype(array.dtype, "integral"):
        array = xp.astype(array, xp.asarray(1.0).dtype)
    try:
        axes = None if scope.axes is None else scope.covered(len(array.shape), backend.output_axis)
    except ValueError as error:
        msg = f"{place(name, path)} of shape {tuple(array.shape)}: {error}"
        raise ValueError(msg) from None
    return Leaf(path, given, array, rebuild, axes, group)


def measure(grads: Gradients, norm: Norm, all_reduce: AllReduce | None = None) -> list[Any]:
    """Return the norm of each group, in float32 or wider.

    ``Σx²`` is summed first as it is; only where it leaves the range in which that is accurate (it
    overflows, or small squares underflow) is it summed again in units of the largest entry: one more
    reading of the gradients, and only when needed. For a power p other than 2 the units come first:
    the rounding of 1/p would cost precision when the sum is far from 1.
    """
    backend, xp = grads.backend, grads.backend.xp
    join = partial(_joined, backend, all_reduce)
    plain = [partial(_plain, backend, norm, join, group) for group in grads.groups]
    in_units = [partial(_in_units, backend, norm, join, group) for group in grads.groups]
    if not norm.has_powers:
        norms = [total() for total in plain]
    elif norm.p != 2:  # noqa: PLR2004
        norms = [root() for root in in_units]
    else:
        squares = [total() for total in plain]
        usual = [partial(norm.root, xp, total) for total in squares]
        norms = _choose(backend, [xp.all(_in_range(xp, total)) for total in squares], usual, in_units)
    if norm.size_power:
        counts = [partial(_size, backend, n.dtype) for n in norms]
        sizes = [join(group, "sum", count) for group, count in zip(grads.groups, counts, strict=True)]
        norms = [n / size**norm.size_power for n, size in zip(norms, sizes, strict=True)]
    return norms


def _joined(
    backend: Backend,
    all_reduce: AllReduce | None,
    group: list[Leaf],
    op: Literal["sum", "max"],
    part: Callable[[Leaf], Any],
) -> Any:
    """Join the parts of a group's leaves, and of other devices."""
    parts = [part(leaf) for leaf in group]
    for leaf, one in zip(group, parts, strict=True):
        _same_shape(group[0].path, parts[0].shape, leaf.path, one.shape)
    if len(parts) == 1:
        total = parts[0]
    else:
        xp = backend.xp
        parts = parts or [xp.asarray(0.0, dtype=xp.float32)]
        dtype = xp.result_type(*(one.dtype for one in parts))
        stacked = xp.stack([cast(xp, backend.beside(one, parts[0]), dtype) for one in parts])
        total = xp.sum(stacked, axis=0) if op == "sum" else xp.max(stacked, axis=0)
    return total if all_reduce is None else all_reduce(total, op)


def _same_shape(first: Path, shape: Any, path: Path, other: Any) -> None:
    if len(shape) == len(other) and all(m == n or None in (m, n) for m, n in zip(shape, other, strict=True)):
        return
    msg = (
        "leaves that share norms need equal shapes outside the axes a norm covers, but "
        f"{place('grads', first)} has {tuple(shape)} and {place('grads', path)} has {tuple(other)}"
    )
    raise ValueError(msg)


def _plain(backend: Backend, norm: Norm, join: Callable[..., Any], group: list[Leaf]) -> Any:
    xp = backend.xp
    return join(group, norm.op, lambda leaf: norm.total(xp, _wide(xp, leaf.array), leaf.axes))


_RANGE = {True: (1.2e-38, 8e37), False: (2.3e-308, 4e307)}
"""Normal numbers whose reciprocals are normal, in float32 (True) and float64."""


def _in_units(backend: Backend, norm: Norm, join: Callable[..., Any], group: list[Leaf]) -> Any:
    xp = backend.xp
    top = join(group, "max", lambda leaf: largest(xp, _wide(xp, leaf.array), leaf.axes))
    # The norm does not depend on its unit, so its derivative must not either (it would overflow).
    # It stays where its reciprocal is a normal number too: XLA multiplies by that instead of dividing.
    low, high = _RANGE[top.dtype == xp.float32]
    unit = backend.constant(xp.clip(top, xp.asarray(low, dtype=top.dtype), xp.asarray(high, dtype=top.dtype)))
    total = join(
        group,
        "sum",
        lambda leaf: norm.total(xp, _wide(xp, leaf.array) / _spread(backend, unit, leaf), leaf.axes),
    )
    return unit * norm.root(xp, total)


def _choose(
    backend: Backend, ok: list[Any], usual: list[Callable[[], Any]], rare: list[Callable[[], Any]]
) -> list[Any]:
    if all(backend.readable(one) for one in ok):
        return [(u if bool(one) else r)() for one, u, r in zip(ok, usual, rare, strict=True)]
    # One conditional for the whole tree: one per group costs compiled code its speed.
    every = backend.xp.all(backend.xp.stack(ok))
    return backend.cond(every, lambda: [u() for u in usual], lambda: [r() for r in rare])


def _in_range(xp: Any, total: Any) -> Any:
    """Whether neither overflow nor underflow can have touched a sum of powers (NaN: it may have)."""
    smallest = 1e-24 if total.dtype == xp.float32 else 1e-277  # smallest normal number / eps²
    return xp.isfinite(total) & (total > smallest)


def _size(backend: Backend, dtype: Any, leaf: Leaf) -> Any:
    return backend.xp.asarray(backend.size(leaf.given, leaf.axes), dtype=dtype)


def _wide(xp: Any, array: Any) -> Any:
    """Return the array in float32 or wider (complex64 or wider)."""
    return cast(xp, array, xp.result_type(array.dtype, xp.float32))


def cast(xp: Any, array: Any, dtype: Any) -> Any:
    """Return the array in ``dtype``, itself if it has it already."""
    return array if array.dtype == dtype else xp.astype(array, dtype)


def _spread(backend: Backend, value: Any, leaf: Leaf) -> Any:
    """Return a group's value in the leaf's own precision, device and number of dimensions."""
    xp = backend.xp
    value = backend.beside(value, leaf.array)
    for axis in leaf.axes or ():
        value = xp.expand_dims(value, axis=axis)
    return cast(xp, value, xp.result_type(leaf.array.dtype, xp.float32))


def factors_for(backend: Backend, rule: Rule, norms: list[Any], limits: list[Any]) -> list[Any]:
    """Return the rule's factor for each norm: 1 where the limit is infinite, NaN where the norm is not finite."""
    xp = backend.xp
    factors = []
    for norm, limit in zip(norms, limits, strict=True):
        one = xp.ones_like(norm)
        unlimited = xp.isinf(limit)
        factor = rule.curve(xp, norm, xp.where(unlimited, one, limit))
        factor = xp.where(xp.isfinite(norm), factor, one * math.nan)
        factors.append(xp.where(unlimited, one, factor))
    return factors


def scale(grads: Gradients, factors: list[Any]) -> Any:
    """Multiply each group by its factor; leaves whose factor is known to be 1 come back as they are."""
    backend, xp = grads.backend, grads.backend.xp
    new: dict[int, Any] = {}
    for group, factor in zip(grads.groups, factors, strict=True):
        alone = backend.readable(factor) and not bool(_differs(xp, factor))
        for leaf in group:
            new[id(leaf.given)] = _unscaled(leaf) if alone else leaf.rebuild(_scaled(backend, leaf, factor))
    return grads.rebuild([new[i] for i in grads.order])


def _unscaled(leaf: Leaf) -> Any:
    return leaf.given if leaf.array.dtype == leaf.given.dtype else leaf.rebuild(leaf.array)


def _scaled(backend: Backend, leaf: Leaf, factor: Any) -> Any:
    xp = backend.xp
    return cast(xp, _wide(xp, leaf.array) * _spread(backend, factor, leaf), leaf.array.dtype)


def update(
    rule: Rule,
    grads: Any,
    state: Any,
    params: Any = None,
    all_reduce: AllReduce | None = None,
    norm: Any = None,
) -> tuple[Any, Any, Report]:
    """Clip ``grads`` by ``rule`` (see `Rule.update`); a given ``norm`` is used instead of measuring one."""
    tree = read(grads, rule.scope)
    backend, xp = tree.backend, tree.backend.xp
    with backend.quiet():
        norms = measure(tree, rule.norm, all_reduce) if norm is None else [xp.asarray(norm, dtype=_norm_dtype(tree))]
        reference = partial(_reference, params, tree, rule, all_reduce)
        limits, state = rule.limit(norms, state, reference)
        limits = [_limit(backend, limit, n) for limit, n in zip(limits, norms, strict=True)]
        factors = factors_for(backend, rule, norms, limits)
        return scale(tree, factors), state, _report(tree, norms, limits, factors)


def clip(
    grads: Any, rule: Rule | ByValue | Callable[[Any], Any], params: Any = None, all_reduce: AllReduce | None = None
) -> tuple[Any, Report]:
    """Clip gradients by a rule that remembers nothing, or by a function of one gradient array.

    Parameters
    ----------
    grads : array or tree of arrays
        Of one framework. ``None`` leaves are absent gradients and keep their place; the same array
        given twice counts once.
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
        If a leaf is no array, leaves belong to two frameworks, or a function returns no array.
    ValueError
        If the rule remembers earlier steps, a limit is negative or NaN, or an iterator is spent.

    Examples
    --------
    >>> import numpy as np
    >>> import uniclip as uc
    >>> clipped, report = uc.clip([np.asarray([3.0, 4.0]), np.asarray([12.0])], uc.by_global_norm(6.5))
    >>> clipped
    [array([1.5, 2. ]), array([6.])]
    >>> float(report.norms), float(report.factors)
    (13.0, 0.5)
    >>> uc.clip(np.asarray([3.0, -4.0]), np.sign)[0]
    array([ 1., -1.])
    """
    if not hasattr(rule, "update"):
        return apply(grads, lambda xp, array: rule(array))  # noqa: ARG005
    if rule.memory:
        msg = f"{rule!r} remembers earlier steps: use state = rule.init(grads) and rule.update(grads, state)"
        raise ValueError(msg)
    clipped, _, report = rule.update(grads, NoState(), params, all_reduce)
    return clipped, report


def apply(grads: Any, function: Callable[[Any, Any], Any]) -> tuple[Any, Report]:
    """Replace each distinct gradient array (a sparse one's stored values) by ``function(xp, array)``."""
    paths, leaves, rebuild = flatten(grads)
    backend = backend_for(paths, leaves)
    new: dict[int, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if id(leaf) not in new:
            array, close = backend.stored(leaf)
            with backend.quiet():
                result = _at(path, function, backend.xp, array)
            if backend_of(result) is not backend:
                msg = f"the function returned {result!r} for {place('grads', path)}; it must return an array like the one it got"
                raise TypeError(msg)
            new[id(leaf)] = close(result)
    return rebuild([new[id(leaf)] for leaf in leaves]), Report()


def _at(path: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a leaf, and name the leaf where it finds fault."""
    try:
        return function(*args)
    except (TypeError, ValueError) as error:
        msg = f"{place('grads', path)}: {error}"
        raise type(error)(msg) from error


def _norm_dtype(grads: Gradients) -> Any:
    """Return the real dtype, float32 or wider, in which these gradients' joint norm is measured."""
    xp = grads.backend.xp
    wide = xp.result_type(xp.float32, *(leaf.array.dtype for leaf in grads.leaves))
    return xp.abs(xp.asarray(0, dtype=wide)).dtype


def _limit(backend: Backend, limit: Any, norm: Any) -> Any:
    xp = backend.xp
    limit = xp.asarray(limit, dtype=norm.dtype)
    if backend.readable(limit) and not bool(xp.all(limit >= 0)):
        msg = f"the limit must be 0 or more (0 zeroes the gradients, math.inf only measures them), got {limit}"
        raise ValueError(msg)
    return limit


def _reference(params: Any, grads: Gradients, rule: Rule, all_reduce: AllReduce | None) -> list[Any]:
    """Measure the parameters that have a gradient, by the rule's own scope and norm."""
    if params is None:
        msg = f"{rule!r} compares gradients with their parameters: pass params="
        raise ValueError(msg)
    paths, leaves, _ = flatten(params, "params")
    by_path = dict(zip(paths, leaves, strict=True))
    if missing := [leaf.path for leaf in grads.leaves if leaf.path not in by_path]:
        msg = f"{place('grads', missing[0])} has no parameter: {place('params', missing[0])} is missing"
        raise ValueError(msg)
    groups = [
        [_leaf(grads.backend, rule.scope, "params", leaf.path, by_path[leaf.path], leaf.group) for leaf in group]
        for group in grads.groups
    ]
    return measure(replace(grads, groups=groups), rule.norm, all_reduce)


def _report(grads: Gradients, norms: list[Any], limits: list[Any], factors: list[Any]) -> Report:
    xp = grads.backend.xp
    clipped = _any(grads.backend, [_differs(xp, factor) for factor in factors])
    infinite = _any(grads.backend, [xp.any(xp.logical_not(xp.isfinite(norm))) for norm in norms])
    return Report(*map(grads.arrange, (norms, limits, factors)), clipped, xp.logical_not(infinite))


def _differs(xp: Any, factor: Any) -> Any:
    """Whether any factor differs from 1."""
    return xp.any(xp.not_equal(factor, xp.ones_like(factor)))


def _any(backend: Backend, flags: list[Any]) -> Any:
    xp = backend.xp
    return xp.any(xp.stack([backend.beside(flag, flags[0]) for flag in flags])) if flags else xp.asarray(False)


def norm_of(grads: Any, rule: Rule) -> Any:
    """Return the norms that ``rule`` measures, without clipping."""
    tree = read(grads, rule.scope)
    with tree.backend.quiet():
        return tree.arrange(measure(tree, rule.norm))


def zeros(grads: Gradients) -> list[Any]:
    """Return a zero for each norm that `measure` would return, of its shape and dtype."""
    xp, dtype = grads.backend.xp, _norm_dtype(grads)
    return [xp.zeros(_shape(group), dtype=dtype) for group in grads.groups]


def _shape(group: list[Leaf]) -> tuple[int, ...]:
    if not group or group[0].axes is None:
        return ()
    return tuple(n for axis, n in enumerate(group[0].array.shape) if axis not in group[0].axes)
