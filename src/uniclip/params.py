# SPDX-License-Identifier: MIT
"""The parameters of a step: those of the gradients, for a limit that compares both; and what is absent here."""

from __future__ import annotations

from typing import Any

from uniclip._errors import short
from uniclip._types import Step
from uniclip.backends import compiling
from uniclip.backends.arrays import same_shape
from uniclip.backends.base import Leaf
from uniclip.choices import Choices
from uniclip.tree import Opened, open_tree


def with_params(rule: Choices, given: Opened, step: Step) -> tuple[Opened, Opened | None]:
    """Return the gradients, and the parameters if the limit needs them.

    Where gradients are absent, the parameters say which library's processes are joined, and over which meshes.
    """
    needed, theirs, nothing = "params" in rule.limit.needs, None, not given.kinds.present
    if needed and step.params is None:
        msg = f"{short(rule)} compares gradients with their parameters: pass params="
        raise ValueError(msg)
    if step.params is not None and (needed or nothing or len(given.kinds.present) < len(given.leaves)):
        theirs = _put_in_order(open_tree(step.params, "params"), given)
    if nothing and theirs is not None and theirs.kinds.present:
        given = given._replace(kinds=theirs.kinds.without_leaves())
    if theirs is not None and theirs.parts:
        absent = {n: Leaf(None, part=part) for n, part in theirs.parts.items() if given.leaves[n] is None}
        given = given._replace(odd=dict(sorted((given.odd | absent).items())))
    return given, _match_params(rule, given, theirs) if needed and theirs is not None else None


def _put_in_order(theirs: Opened, given: Opened) -> Opened:
    """Return the parameters in the order of the gradients, by their paths, ``None`` where there is none."""
    # PyTorch 2.11 and 2.12 cannot compile the comparison; without it the parameters are put in order one by one.
    if not compiling() and theirs.spec == given.spec:
        return theirs
    numbers = {path: number for number, path in enumerate(theirs.paths())}
    order = [numbers.get(path) for path in given.paths()]

    leaves, arrays = ([None if n is None else values[n] for n in order] for values in (theirs.leaves, theirs.arrays))
    odd = {number: theirs.odd[n] for number, n in enumerate(order) if n in theirs.odd}
    return theirs._replace(leaves=leaves, arrays=arrays, spec=given.spec, odd=odd)


def _match_params(rule: Choices, given: Opened, theirs: Opened) -> Opened:
    """Return the parameters of the gradients.

    Raises
    ------
    ValueError
        If a gradient has no parameter, or a parameter of another shape.
    TypeError
        If the parameters belong to another framework, or a gradient stores single entries that have norms of their own.
    """
    present, backend = given.kinds.present, given.backend
    if present and theirs.kinds.present and theirs.backend is not backend:
        msg = f"{theirs.place(present[0])} is of another framework than {given.place(present[0])}"
        raise TypeError(msg)
    for number in present:
        if theirs.leaves[number] is None:
            msg = f"{given.place(number)} has no parameter: {theirs.place(number)} is missing"
            raise ValueError(msg)
        shape, of_gradient = theirs.leaves[number].shape, given.shape_of(number)
        if not (shape == of_gradient or same_shape(shape, of_gradient)):  # some are known at run time
            msg = f"{theirs.place(number)} has shape {tuple(shape)}, {given.place(number)} {tuple(of_gradient)}"
            raise ValueError(msg)
    arrays = [None if leaf is None else a for leaf, a in zip(given.leaves, theirs.arrays, strict=True)]
    parts = theirs.parts
    if rule.scope.axes is not None and (parts or given.parts):
        arrays, parts = _divide_alike(rule, given, theirs, arrays)
    if rule.scope.axes is not None:
        for number in filter(given.is_sparse, given.odd):
            arrays[number] = _at_stored_rows(rule, given, number, arrays[number])
    odd = {number: Leaf(arrays[number], part=part) for number, part in parts.items() if part is not None}
    return Opened(theirs.kinds, theirs.leaves, arrays, given.spec, "params", odd=odd)


def _at_stored_rows(rule: Choices, given: Opened, number: int, array: Any) -> Any:
    """Return a parameter at the rows that its sparse gradient stores, if each row has a norm; else the parameter."""
    axes = rule.scope.covered(len(array.shape), given.backend.output_axis)
    if axes is None or 0 in axes:
        return array
    if given.odd[number].by_entry:
        msg = (
            f"{given.place(number)} is sparse, and stores single entries: {short(rule)} would compare them with other "
            "entries of the parameter; make the gradient dense, or take a norm of whole leaves"
        )
        raise TypeError(msg)
    return given.backend.xp.take(array, given.odd[number].rows, axis=0)


def _divide_alike(rule: Choices, given: Opened, theirs: Opened, arrays: list[Any]) -> tuple[list[Any], dict[int, Any]]:
    """Return the parameters and their parts, divided among processes as the gradients are where norms keep axes."""
    parts = theirs.parts
    for number in given.kinds.present:
        part, leaf = given.part(number), theirs.leaves[number]
        axes = rule.scope.covered(len(leaf.shape), given.backend.output_axis)
        mine: Any = parts.get(number)
        if (part and part.divided(axes)) != (mine and mine.divided(axes)):
            arrays[number], parts[number] = mine.gather(leaf) if part is None else part.divide(leaf), part
    return arrays, parts
