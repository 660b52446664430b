# SPDX-License-Identifier: MIT
"""Rules without a norm: each gradient array is replaced by a function of that array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from uniclip._checks import real, settle
from uniclip._repr import describe, short
from uniclip._types import Array, Number
from uniclip.ask import Step
from uniclip.backends import backend_of
from uniclip.backends.arrays import cast
from uniclip.base import BaseRule
from uniclip.layout import Opened
from uniclip.limits import NoState
from uniclip.report import Report
from uniclip.ruler import broadcasts, same_shape
from uniclip.tree import Tree, flatten_grads, in_memory_before


class EachArray(BaseRule):
    """A rule without norm and memory; its reports are empty."""

    memory = False

    def init(self, grads: Any) -> NoState:  # noqa: ARG002 - every rule has it
        """Return the empty state."""
        return NoState()

    def _run(self, grads: Any, state: Any, step: Step) -> tuple[Tree, Any, Report]:
        """Replace each gradient array, or the stored values of a sparse one."""
        backend, tree = flatten_grads(grads, in_place=step.in_place)
        arrays, ways = [list(some) for some in zip(*map(backend.stored, tree.leaves), strict=True)] or ([], [])
        given = Opened(backend, tree, arrays, ways, step.in_place)
        with backend.quiet(given.first):
            ready = [_named(tree, number, self._change, given, array) for number, array in enumerate(arrays)]
            before = in_memory_before(backend, tree) if step.in_place else ()
            new = [
                tree.leaves[number] if number in before else _named(tree, number, given.put, number, *change)
                for number, change in enumerate(ready)
            ]
            return tree.with_leaves(new), state, Report()

    def _change(self, given: Opened, array: Any) -> tuple[Any, ...]:
        """Return an elementwise function of the array and of operands that broadcast against it, and these operands."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Function(EachArray):
    """A function of one gradient array as a rule."""

    function: Callable[[Any], Array]

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return the function."""
        return show(self.function)

    def _change(self, given: Opened, array: Any) -> tuple[Any, ...]:
        """Call the function, and return how to put the result in the place of the array."""
        result, xp = self.function(array), given.backend.xp
        if backend_of(result) is not given.backend or not same_shape(result.shape, array.shape):
            hint = f"; call {short(self.function)} first" if hasattr(result, "update") else ""
            msg = f"the function must return an array like the one it got, but it returned {describe(result)}{hint}"
            raise TypeError(msg)
        kinds = ("complex floating", "real floating")  # a kind holds those after it, and integers
        wide, narrow = ([xp.isdtype(a.dtype, kind) for kind in kinds] for a in (result, array))
        if given.in_place and wide > narrow:
            msg = f"an array of {array.dtype} cannot hold the result, which is {describe(result)}; use uc.clip"
            raise TypeError(msg)
        return lambda _, new: new, result


@dataclass(frozen=True, repr=False)
class ByValue(EachArray):
    """Clip each entry into ``[min, max]`` by ``xp.clip``: the one preset that measures no norm.

    Parameters
    ----------
    min, max : float or array
        The bounds; arrays broadcast against each leaf. Integer gradients need whole-number bounds.
    """

    min: Number
    max: Number

    def __post_init__(self) -> None:
        """Validate the bounds."""
        wanted = "a number or an array of real numbers (math.inf or -math.inf for no bound)"
        settle(self, min=real("min", self.min, wanted), max=real("max", self.max, wanted))
        if isinstance(self.min, Real) and isinstance(self.max, Real) and not self.min <= self.max:
            raise ValueError(self._wrong_way())

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return source text that evaluates to an equal rule."""
        return f"uc.by_value({show(self.min)}, {show(self.max)})"

    def _wrong_way(self) -> str:
        return f"min must not be above max, and neither NaN: got min={short(self.min)}, max={short(self.max)}"

    def _change(self, given: Opened, array: Any) -> tuple[Any, ...]:
        """Return the function that clips, and the bounds in the dtype of the array."""
        backend = given.backend
        xp = backend.xp
        if xp.isdtype(array.dtype, "complex floating"):
            msg = f"complex numbers have no order to clip by value in, got {array.dtype}; clip by norm instead"
            raise TypeError(msg)
        if xp.isdtype(array.dtype, "integral"):
            low, high = (_whole(xp, bound, xp.iinfo(array.dtype)) for bound in (self.min, self.max))
        else:
            low, high = self.min, self.max
        low, high = (xp.asarray(bound, dtype=array.dtype) for bound in (low, high))
        for name, bound in (("min", low), ("max", high)):
            if not broadcasts(bound.shape, array.shape):
                msg = f"{name} of shape {tuple(bound.shape)} does not fit an array of shape {tuple(array.shape)}"
                raise ValueError(msg)
        if backend.readable(low) and backend.readable(high) and not bool(xp.all(low <= high)):
            raise ValueError(self._wrong_way())
        low, high = (backend.processes.replicated(array, bound) for bound in (low, high))
        return lambda x, low, high: cast(xp, xp.clip(x, low, high), x.dtype), low, high


def _named(tree: Tree, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, and add the place of the leaf to its errors."""
    try:
        return function(*arguments)
    except (TypeError, ValueError) as error:
        if type(error) not in {TypeError, ValueError}:
            raise  # a framework's error class may not take a message
        msg = f"{tree.place(number)}: {error}"
        raise type(error)(msg) from error


def _whole(xp: Any, bound: Any, info: Any) -> Any:
    """Return a bound as an integer in the range of the gradients' dtype."""
    if not isinstance(bound, Real):
        if "int" not in str(bound.dtype):
            msg = f"integer gradients need whole bounds, got an array of {bound.dtype}"
            raise TypeError(msg)
        bound = xp.asarray(bound)
        own = xp.iinfo(bound.dtype)
        return xp.clip(bound, max(info.min, own.min), min(info.max, own.max))
    inside = max(info.min, min(info.max, bound))
    if not float(inside).is_integer():
        msg = f"integer gradients need whole bounds, got {short(bound)}"
        raise TypeError(msg)
    return int(inside)
