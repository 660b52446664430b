# SPDX-License-Identifier: MIT
"""The parameters of a step: those of the gradients, for a limit that compares both; and what is absent here."""

from __future__ import annotations

from typing import Any

from uniclip._errors import short
from uniclip._types import Step
from uniclip.backends import backend_by
from uniclip.backends.base import HOST
from uniclip.choices import Choices
from uniclip.tree import Opened, open_tree


def beside(rule: Choices, given: Opened, step: Step) -> tuple[Opened, Opened | None]:
    """Return the gradients, and the parameters if the limit needs them.

    Where gradients are absent, the parameters say which library's processes are joined, and over which meshes.
    """
    needed, theirs, nothing = "params" in rule.limit.needs, None, not given.kinds.present
    if needed and step.params is None:
        msg = f"{short(rule)} compares gradients with their parameters: pass params="
        raise ValueError(msg)
    if step.params is not None and (needed or nothing or len(given.kinds.present) < len(given.leaves)):
        theirs = _in_order(open_tree(step.params, "params"), given)
    if nothing and theirs is not None and theirs.kinds.present:
        given = given._replace(kinds=theirs.kinds.without_leaves())
    elif nothing and step.all_reduce is not None:
        given = given._replace(kinds=given.kinds.without_leaves(backend_by(step.all_reduce)))
    if theirs is not None and theirs.parts is not None:
        parts = [theirs.parts[n] if leaf is None else given.part(n) for n, leaf in enumerate(given.leaves)]
        given = given._replace(parts=parts)
    return given, _matching(rule, given, theirs) if needed and theirs is not None else None


def _in_order(theirs: Opened, given: Opened) -> Opened:
    """Return the parameters in the order of the gradients, by their paths, ``None`` where there is none."""
    if theirs.spec == given.spec:
        return theirs
    numbers = {path: number for number, path in enumerate(theirs.paths())}
    order = [numbers.get(path) for path in given.paths()]

    def of(some: Any) -> Any:
        return None if some is None else [None if n is None else some[n] for n in order]

    ways = {number: theirs.stored[n] for number, n in enumerate(order) if n in theirs.stored}
    leaves, arrays, parts = map(of, (theirs.leaves, theirs.arrays, theirs.parts))
    return theirs._replace(leaves=leaves, arrays=arrays, spec=given.spec, stored=ways, parts=parts)


def _matching(rule: Choices, given: Opened, theirs: Opened) -> Opened:
    """Return the parameters of the gradients, detached.

    Raises
    ------
    ValueError
        If a gradient has no parameter, or a parameter of another shape.
    TypeError
        If the parameters belong to another framework, or a gradient stores only some rows.
    """
    present, backend = given.kinds.present, given.backend
    for number, way in given.stored.items() if rule.scope.axes is not None else ():
        axes = rule.scope.covered(len(given.leaves[number].shape), backend.output_axis)
        if axes is not None and 0 not in axes and way.sparse:
            msg = (
                f"{given.place(number)} is sparse: {short(rule)} would compare the rows that it stores with all "
                "rows of the parameter; make the gradient dense, or take a norm of whole leaves"
            )
            raise TypeError(msg)
    if present and theirs.kinds.present and theirs.backend is not backend:
        msg = f"{theirs.place(present[0])} is of another framework than {given.place(present[0])}"
        raise TypeError(msg)
    for number in present:
        if theirs.leaves[number] is None:
            msg = f"{given.place(number)} has no parameter: {theirs.place(number)} is missing"
            raise ValueError(msg)
        shapes = [tuple(one.leaves[number].shape) for one in (theirs, given)]
        if shapes[0] != shapes[1]:
            msg = f"{theirs.place(number)} has shape {shapes[0]}, {given.place(number)} {shapes[1]}"
            raise ValueError(msg)
    arrays = [None if leaf is None else a for leaf, a in zip(given.leaves, theirs.to_measure(), strict=True)]
    parts = theirs.parts
    if rule.scope.axes is not None and (parts or given.parts):
        arrays, parts = _divided_alike(rule, given, theirs, arrays)
    if not (theirs.kinds.reads and backend.mode(given.kinds) == HOST):
        arrays = [None if array is None else backend.detached(array) for array in arrays]
    return Opened(theirs.kinds, theirs.leaves, arrays, given.spec, "params", parts=parts)


def _divided_alike(rule: Choices, given: Opened, theirs: Opened, arrays: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the parameters and their parts, divided among processes as the gradients are where norms keep axes."""
    parts = list(theirs.parts or [None] * len(arrays))
    for number in given.kinds.present:
        part, leaf = given.part(number), theirs.leaves[number]
        axes = rule.scope.covered(len(leaf.shape), given.backend.output_axis)
        rows = [one and one.divided(axes) for one in (part, parts[number])]
        if rows[0] != rows[1]:
            arrays[number], parts[number] = given.backend.divided_as(leaf, part), part
    return arrays, parts
