# SPDX-License-Identifier: MIT
"""The parameters of a step: those of the gradients, for a limit that compares both; and what is absent here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uniclip._repr import short
from uniclip.backends import backend_by
from uniclip.backends.base import HOST
from uniclip.measure import Step
from uniclip.processes import of
from uniclip.tree import Opened, open_tree, place

if TYPE_CHECKING:
    from uniclip.rules import Rule


def beside(rule: Rule, given: Opened, step: Step) -> tuple[Opened, Opened | None]:
    """Return the gradients, and the parameters if they are needed: by the limit, or by processes without gradients."""
    needed, theirs = "params" in rule.limit.needs, None
    if needed and step.params is None:
        msg = f"{short(rule)} compares gradients with their parameters: pass params="
        raise ValueError(msg)
    if step.params is not None and (needed or len(given.kinds.present) < len(given.leaves) or not given.leaves):
        theirs = open_tree(step.params, "params")
        given = _like(given, theirs, step)
    elif step.all_reduce is not None and not given.kinds.present:
        given = _without_gradients(given, None, step)
    return given, _matching(rule, given, theirs) if needed and theirs is not None else None


def _like(given: Opened, theirs: Opened, step: Step) -> Opened:
    """Return gradients whose absent ones take part as their parameters would, which may be distributed."""
    if step.all_reduce is not None and not given.kinds.present:
        given = _without_gradients(given, theirs, step)
    if theirs.parts is not None and theirs.spec == given.spec:
        own = given.parts or [None] * len(given.leaves)
        parts = [part if leaf is None else one for leaf, one, part in zip(given.leaves, own, theirs.parts, strict=True)]
        given = given._replace(parts=parts)
        if not given.kinds.present:
            given = given._replace(kinds=theirs.kinds.without_leaves())
    return given


def _without_gradients(given: Opened, theirs: Opened | None, step: Step) -> Opened:
    """Return a tree without gradients as one of the library whose processes are joined."""
    if theirs is not None and theirs.kinds.present:
        return given._replace(kinds=theirs.kinds.without_leaves())
    backend = backend_by(of(step.all_reduce))
    return given if backend is None else given._replace(kinds=given.kinds.without_leaves(backend))


def _matching(rule: Rule, given: Opened, theirs: Opened) -> Opened:
    """Return the parameters of the gradients, detached.

    Raises
    ------
    ValueError
        If a gradient has no parameter, or a parameter of another shape.
    TypeError
        If the parameters belong to another framework, or a gradient stores only some rows.
    """
    present, backend = given.kinds.present, given.backend
    for number in given.ways if rule.scope.axes is not None else ():
        axes = rule.scope.covered(len(given.leaves[number].shape), backend.output_axis)
        if axes is not None and 0 not in axes and backend.sparse(given.leaves[number]):
            msg = (
                f"{given.place(number)} is sparse: {short(rule)} would compare the rows that it stores with all "
                "rows of the parameter; make the gradient dense, or take a norm of whole leaves"
            )
            raise TypeError(msg)
    arrays, leaves, parts = theirs.measured(), theirs.leaves, theirs.parts
    if theirs.spec != given.spec:
        numbers, paths = {path: number for number, path in enumerate(theirs.paths())}, given.paths()
        missing = [number for number in present if paths[number] not in numbers]
        if missing:
            path = paths[missing[0]]
            msg = f"{place('grads', path)} has no parameter: {place('params', path)} is missing"
            raise ValueError(msg)
        order = [numbers.get(path) for path in paths]
        arrays = [None if n is None else arrays[n] for n in order]
        leaves = [None if n is None else leaves[n] for n in order]
        parts = None if parts is None else [None if n is None else parts[n] for n in order]
    absent = [number for number in present if arrays[number] is None]
    if absent:
        msg = f"{given.place(absent[0])} has no parameter: {place('params', given.paths()[absent[0]])} is None"
        raise ValueError(msg)
    if present and theirs.kinds.present and theirs.backend is not backend:
        msg = f"{theirs.place(theirs.kinds.present[0])} is of another framework than {given.place(present[0])}"
        raise TypeError(msg)
    for number in present:
        if tuple(leaves[number].shape) != tuple(given.leaves[number].shape):
            where = place("params", given.paths()[number])
            msg = (
                f"{where} has shape {tuple(leaves[number].shape)}, {given.place(number)} "
                f"{tuple(given.leaves[number].shape)}"
            )
            raise ValueError(msg)
    if not (theirs.kinds.reads and given.kinds.reads and given.kinds.backend.mode(given.kinds) == HOST):
        arrays = [None if array is None else backend.detached(array) for array in arrays]
    arrays = [None if leaf is None else array for leaf, array in zip(given.leaves, arrays, strict=True)]
    return Opened(theirs.kinds, leaves, arrays, given.spec, "params", parts=parts)
