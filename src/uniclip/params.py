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
    """Return the gradients, and the parameters if the limit needs them.

    Where gradients are absent, the parameters say which library's processes are joined, and over which meshes.
    """
    needed, theirs, nothing = "params" in rule.limit.needs, None, not given.kinds.present
    if needed and step.params is None:
        msg = f"{short(rule)} compares gradients with their parameters: pass params="
        raise ValueError(msg)
    if step.params is not None and (needed or nothing or len(given.kinds.present) < len(given.leaves)):
        theirs = open_tree(step.params, "params")
    if nothing and theirs is not None and theirs.kinds.present:
        given = given._replace(kinds=theirs.kinds.without_leaves())
    elif nothing and step.all_reduce is not None:
        given = given._replace(kinds=given.kinds.without_leaves(backend_by(of(step.all_reduce))))
    if theirs is not None and theirs.parts is not None and theirs.spec == given.spec:
        pairs = zip(given.leaves, given.parts or given.leaves, theirs.parts, strict=True)
        given = given._replace(parts=[part if leaf is None else own for leaf, own, part in pairs])
    return given, _matching(rule, given, theirs) if needed and theirs is not None else None


def _matching(rule: Rule, given: Opened, theirs: Opened) -> Opened:
    """Return the parameters of the gradients, detached.

    Raises
    ------
    ValueError
        If a gradient has no parameter, or a parameter of another shape.
    TypeError
        If the parameters belong to another framework, or a gradient stores only some rows.
    """
    present, backend, paths = given.kinds.present, given.backend, given.paths
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
        numbers = {path: number for number, path in enumerate(theirs.paths())}
        order = [numbers.get(path) for path in paths()]
        arrays = [None if n is None else arrays[n] for n in order]
        leaves = [None if n is None else leaves[n] for n in order]
        parts = None if parts is None else [None if n is None else parts[n] for n in order]
    if present and theirs.kinds.present and theirs.backend is not backend:
        msg = f"{theirs.place(theirs.kinds.present[0])} is of another framework than {given.place(present[0])}"
        raise TypeError(msg)
    for number in present:
        if arrays[number] is None:
            msg = f"{given.place(number)} has no parameter: {place('params', paths()[number])} is missing"
            raise ValueError(msg)
        shapes = [tuple(leaf.shape) for leaf in (leaves[number], given.leaves[number])]
        if shapes[0] != shapes[1]:
            where = place("params", paths()[number])
            msg = f"{where} has shape {shapes[0]}, {given.place(number)} {shapes[1]}"
            raise ValueError(msg)
    if not (theirs.kinds.reads and backend.mode(given.kinds) == HOST):
        arrays = [None if array is None else backend.detached(array) for array in arrays]
    arrays = [None if leaf is None else array for leaf, array in zip(given.leaves, arrays, strict=True)]
    return Opened(theirs.kinds, leaves, arrays, given.spec, "params", parts=parts)
