# SPDX-License-Identifier: MIT
"""The scope, first of the four choices of a rule: which elements of the gradients share one norm.

A scope has two parts: the axes of a leaf that one norm covers, and the leaves that share a norm.
How a norm is computed is in `uniclip.norms`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

from uniclip._errors import Printed, check, set_frozen_fields, whole_number
from uniclip._types import Path

__all__ = [
    "Scope",
    "all_leaves",
    "axes",
    "each_entry",
    "each_example",
    "each_leaf",
    "each_row",
    "groups",
    "stacked",
    "unit",
]

Axes: TypeAlias = int | tuple[int, ...] | Callable[[int, int], tuple[int, ...]] | None
Label: TypeAlias = Callable[[Path, Any], Hashable]
Layers: TypeAlias = int | Callable[[Path, Any], int]
"""The number of leading axes that stack layers, or a function of ``(path, leaf)`` that returns
it.
"""


@dataclass(frozen=True, repr=False)
class Scope(Printed):
    """Choose which elements share one norm.

    Parameters
    ----------
    axes : None, tuple of int, or callable
        The axes of a leaf that one norm covers: ``None`` for all, ``()`` for none (each element
        has a separate norm), or a function of ``(ndim, output_axis)`` that returns the tuple for a
        leaf.
    label : callable, optional
        ``label(path, leaf)`` returns the group of a leaf; leaves of one group share a norm. With
        ``None`` every leaf is its own group. ``path`` is the tuple of keys that leads to the leaf,
        for example ``("encoder", 0, "weight")``.

    Examples
    --------
    >>> uc.Scope(axes=(0,))
    uc.Scope(axes=(0,))
    >>> uc.scopes.all_leaves
    uc.scopes.all_leaves
    """

    axes: Axes = None
    label: Label | None = None

    def __post_init__(self) -> None:
        """Validate ``axes`` and ``label``."""
        # A tuple can be hashed, unlike a list, so scopes can be keys of caches.
        if self.axes is not None and not callable(self.axes):
            set_frozen_fields(self, axes=_axis_numbers(self.axes))

        is_label = self.label is None or callable(self.label)
        check("label", self.label, is_label, "a function of (path, leaf)")

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return source text that evaluates to an equal scope."""
        if isinstance(self.axes, FanIn) and self.label is None:
            if self.axes.axis is None:
                return "uc.scopes.unit()"
            return f"uc.scopes.unit({self.axes.axis})"

        if isinstance(self.axes, Stacked):
            one_layer = Scope(self.axes.axes, self.label)
            scope = "" if one_layer == each_leaf else f", {one_layer._printed(show)}"
            return f"uc.scopes.stacked({show(self.axes.layers)}{scope})"

        if self.axes is None and self.label not in {None, everything}:
            return f"uc.scopes.groups({show(self.label)})"
        return super()._printed(show)

    def covered(
        self, ndim: int, output_axis: int, path: Path = (), leaf: object = None
    ) -> tuple[int, ...] | None:
        """Return the axes of an ``ndim``-dimensional leaf that one norm covers,
        ``None`` for all.
        """
        axes = self.axes
        if isinstance(axes, Stacked):
            return axes(ndim, output_axis, path, leaf)
        if callable(axes):
            axes = axes(ndim, output_axis)
        if axes is None:
            return None

        axes = _axis_numbers(axes)
        for axis in axes:
            if not -ndim <= axis < ndim:
                msg = f"axis {axis} is out of range for {ndim} dimension(s)"
                raise ValueError(msg)

        # -1 and the last axis are the same, which only the remainder shows.
        covered = sorted({axis % ndim for axis in axes})
        if len(covered) < len(axes):
            msg = f"axes {axes} name an axis of {ndim} dimension(s) twice; name each axis once"
            raise ValueError(msg)
        return tuple(covered)


def _axis_numbers(axes: object) -> tuple[int, ...]:
    """Return one axis, or a sequence of axes, as a tuple of Python integers."""
    if isinstance(axes, (list, tuple, range)):
        return tuple([whole_number("axis", axis) for axis in axes])

    check("axis", axes, hasattr(axes, "__index__"), "a whole number or a tuple of them")
    return (whole_number("axis", axes),)


def everything(path: Path, leaf: object) -> Hashable:  # noqa: ARG001 - the signature of a label
    """Put every leaf into one group."""
    return None


def all_but_first(ndim: int, output_axis: int) -> tuple[int, ...]:  # noqa: ARG001 - as all `axes`
    """Cover all axes but the first, the axis of the examples."""
    if ndim == 0:
        msg = "a leaf without dimensions has no example axis"
        raise ValueError(msg)
    return tuple(range(1, ndim))


@dataclass(frozen=True)
class FanIn:
    """Cover all axes but the output axis; a vector or a scalar is one unit."""

    axis: int | None = None

    def __post_init__(self) -> None:
        """Validate the axis."""
        if self.axis is not None:
            set_frozen_fields(self, axis=whole_number("axis", self.axis))

    def __call__(self, ndim: int, output_axis: int) -> tuple[int, ...]:
        """Return all axes but the output axis."""
        # Biases and scales have no output axis: one norm covers them, as in the paper of AGC.
        if ndim <= 1:
            return tuple(range(ndim))

        if self.axis is not None:
            output_axis = self.axis
        if not -ndim <= output_axis < ndim:
            msg = f"output axis {output_axis} is out of range for {ndim} dimensions"
            raise ValueError(msg)

        output_axis %= ndim
        return tuple([axis for axis in range(ndim) if axis != output_axis])


@dataclass(frozen=True)
class Stacked:
    """Cover the axes of a scope in each of the layers that a leaf stacks along its first axes."""

    layers: Layers
    axes: Axes = None
    """The axes of one layer, as those of a `Scope`."""

    def __post_init__(self) -> None:
        """Validate the number of axes."""
        if not callable(self.layers):
            set_frozen_fields(self, layers=whole_number("stacked", self.layers, 0))

    def __call__(
        self, ndim: int, output_axis: int, path: Path = (), leaf: object = None
    ) -> tuple[int, ...]:
        """Return the axes of a leaf that one norm covers."""
        count = self.layers
        if callable(count):
            count = whole_number("stacked", count(path, leaf), 0)
        if 0 < ndim <= count or ndim < count:
            msg = (
                f"stacked={count} leaves no axis of a layer; pass a function that returns the "
                "number of leading axes that stack layers, such as stacked=lambda path, leaf: "
                f"{count} if 'layers' in path else 0"
            )
            raise ValueError(msg)

        try:
            inside = Scope(axes=self.axes).covered(ndim - count, output_axis)
        except ValueError as error:
            msg = f"{error}, those of one layer"
            raise ValueError(msg) from None
        if inside is None:
            inside = tuple(range(ndim - count))
        return tuple([axis + count for axis in inside])


each_entry = Scope(axes=())
"""Give every element a separate norm, its modulus.

>>> uc.clip(np.asarray([-3.0, 0.5]), uc.Rule(1.0, scope=uc.scopes.each_entry))[0]
array([-1. ,  0.5])
"""
each_leaf = Scope()
"""Give every leaf one norm.

>>> grads = [np.asarray([3.0, 4.0]), np.asarray([0.5])]
>>> uc.clip(grads, uc.Rule(1.0, scope=uc.scopes.each_leaf))[0]
[array([0.6, 0.8]), array([0.5])]
"""
each_row = Scope(axes=all_but_first)
"""Give every index of a leaf's first axis one norm, such as a row of an embedding table.

>>> table = np.asarray([[3.0, 4.0], [0.3, 0.4]])
>>> uc.clip(table, uc.Rule(1.0, scope=uc.scopes.each_row))[0]
array([[0.6, 0.8],
       [0.3, 0.4]])
"""
each_example = Scope(axes=all_but_first, label=everything)
"""Give every index of the first axis one norm over all leaves, such as an example.

>>> grads = [np.asarray([[3.0], [0.3]]), np.asarray([[4.0], [0.4]])]
>>> uc.clip(grads, uc.Rule(1.0, scope=uc.scopes.each_example))[1].norms
array([5. , 0.5])
"""
all_leaves = Scope(label=everything)
"""Give all leaves together one norm.

>>> grads = [np.asarray([3.0, 4.0]), np.asarray([12.0])]
>>> uc.clip(grads, uc.Rule(6.5, scope=uc.scopes.all_leaves))[0]
[array([1.5, 2. ]), array([6.])]
"""


def axes(*axis: int) -> Scope:
    """Let one norm cover the axes ``axis`` of each leaf; negative axes count from the end.

    Examples
    --------
    >>> rule = uc.Rule(1.0, scope=uc.scopes.axes(1))
    >>> uc.clip(np.asarray([[3.0, 4.0], [0.3, 0.4]]), rule)[0]
    array([[0.6, 0.8],
           [0.3, 0.4]])
    """
    return Scope(axes=axis)


def unit(axis: int | None = None) -> Scope:
    """Give each output unit one norm, over all axes of a leaf but the output axis ``axis``.

    By default the output axis follows the convention of the framework, see `uniclip.agc`. A vector
    or a scalar is one unit.

    Examples
    --------
    >>> rule = uc.Rule(1.0, scope=uc.scopes.unit(0))
    >>> uc.clip(np.asarray([[3.0, 4.0], [0.3, 0.4]]), rule)[1].norms
    array([5. , 0.5])
    """
    return Scope(axes=FanIn(axis))


def stacked(layers: Layers, scope: Scope = each_leaf) -> Scope:
    """Treat each layer of a leaf that stacks several layers along its first axes as a leaf.

    A scan over layers has the weights of all layers in one array, such as (12, 64, 64) for twelve
    matrices.

    Parameters
    ----------
    layers : int or callable
        The number of leading axes that stack layers, for all leaves; or a function of
        ``(path, leaf)`` that returns it, 0 for a leaf of one layer.
    scope : Scope, default each_leaf
        The scope of one layer.

    Raises
    ------
    TypeError
        If ``layers`` is neither a whole number nor a function, or ``scope`` not a `Scope`.
    ValueError
        If ``layers`` is negative; when gradients are clipped, if a leaf has no more axes than those
        that stack layers.

    Examples
    --------
    >>> rule = uc.Rule(1.0, scope=uc.scopes.stacked(1))
    >>> uc.clip(np.asarray([[3.0, 4.0], [0.3, 0.4]]), rule)[0]
    array([[0.6, 0.8],
           [0.3, 0.4]])
    """
    check("scope", scope, isinstance(scope, Scope), "a Scope, such as uc.scopes.unit()")
    return Scope(Stacked(layers, scope.axes), scope.label)


def is_one_norm(scope: Scope) -> bool:
    """Return whether a scope has one norm for all leaves."""
    return scope.label is everything and scope.axes is None


def with_layers(scope: Scope, layers: Layers | None) -> Scope:
    """Return a scope with norms for each layer of stacked leaves; without ``layers``, the scope."""
    return scope if layers is None else stacked(layers, scope)


def groups(label: Label) -> Scope:
    """Give the leaves with equal ``label(path, leaf)`` one norm.

    ``path`` is the tuple of keys that leads to the leaf; the label must be hashable. A
    stateful rule also labels absent gradients, whose leaf is ``None``, so their labels must follow
    from the path.

    Examples
    --------
    >>> rule = uc.Rule(1.0, scope=uc.scopes.groups(lambda path, leaf: path[0]))
    >>> grads = {"body": [np.asarray([3.0]), np.asarray([4.0])], "head": np.asarray([12.0])}
    >>> norms = uc.clip(grads, rule)[1].norms
    >>> float(norms["body"]), float(norms["head"])
    (5.0, 12.0)
    """
    wanted = "a function of (path, leaf) that returns the group of a leaf"
    check("label", label, callable(label), wanted)
    return Scope(label=label)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
