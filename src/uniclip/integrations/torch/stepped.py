# SPDX-License-Identifier: MIT
"""Find the object whose ``step()`` is clipped: an optimizer inside of its wrappers,
or one that holds several.

Objects are searched by their attributes; nothing is called. Any object with a ``step`` may be one,
so an annotation ``torch.optim.Optimizer`` here says what an object is used as, not its class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch

ParamGroup: TypeAlias = dict[str, Any]
"""A parameter group of an optimizer: its parameters, perhaps their names, and its options."""

_OF_OPTIMIZERS = {"state", "param_groups", "defaults"}
"""Attributes of every ``torch.optim.Optimizer``. They hold tensors and numbers, so they are not
searched.
"""
_DEPTH = 3
"""How deep containers may lie in each other, as in a list of pairs of a name and an optimizer."""
_SAMPLE = 16
"""How many elements of a parameter are compared to find out whether it has moved."""


class Stepped:
    """An object that is stepped as one optimizer, with the optimizers that it holds."""

    outer: torch.optim.Optimizer
    """The object whose ``step()`` is called."""
    inner: list[torch.optim.Optimizer]
    """The optimizers that its step calls; empty for a single optimizer."""
    wrappers: list[torch.optim.Optimizer]
    """The wrappers around the outer object, which stand for it."""

    def __init__(self, outer: torch.optim.Optimizer, inner: list[torch.optim.Optimizer]) -> None:
        self.outer = outer
        self.inner = inner
        self.wrappers = []
        self._all_inside = list(_all_optimizers_inside(outer, set()))

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that change parameters: those inside, and the outer one if it has
        parameters that these do not have.
        """
        if not self.inner:
            return [self.outer]

        ids = parameter_ids(self.inner)
        if any(id(p) not in ids for p in parameters_of(self.outer)):
            return [*self.inner, self.outer]
        return self.inner

    def has_changed(self) -> bool:
        """Return whether there is an optimizer inside that was not there before."""
        ids_before = set(map(id, self._all_inside))
        for optimizer in _all_optimizers_inside(self.outer, set()):
            if has_hooks(optimizer) and id(optimizer) not in ids_before:
                return True
        return False

    def saves_state(self) -> bool:
        """Return whether ``outer.state_dict()`` has the state of a rule.

        Only PyTorch's own runs the hooks that add it. A single optimizer with hooks is trusted to
        call it.
        """
        if not has_hooks(self.outer):
            return False
        is_own = (
            isinstance(self.outer, torch.optim.Optimizer)
            and type(self.outer).state_dict is torch.optim.Optimizer.state_dict
        )
        return not self.inner or is_own

    def groups(self) -> list[ParamGroup]:
        """Return the parameter groups as they are now, each parameter once if there are optimizers
        inside.
        """
        if not self.inner:
            groups: list[ParamGroup] = self.outer.param_groups
            return groups

        seen: set[int] = set()
        groups = [
            _without(seen, group) for optimizer in self.inner for group in optimizer.param_groups
        ]

        # A load_state_dict gives the optimizers inside new groups, of which the outer one may
        # still have the old ones.
        for group in getattr(self.outer, "param_groups", ()):
            rest = _without(seen, group)
            if rest["params"]:
                groups.append(rest)
        return groups


def _without(seen: set[int], group: ParamGroup) -> ParamGroup:
    """Return a group without the parameters that were seen before, and note those that it has."""
    names = group.get("param_names")
    new_params: list[torch.Tensor] = []
    new_names: list[str] = []
    for number, p in enumerate(group["params"]):
        if id(p) in seen:
            continue
        seen.add(id(p))
        new_params.append(p)
        if names is not None:
            new_names.append(names[number])

    rest = {**group, "params": new_params}
    if names is not None:
        rest["param_names"] = new_names
    return rest


def params_in(groups: list[ParamGroup]) -> list[torch.Tensor]:
    """Return the parameters of some groups."""
    return [p for group in groups for p in group["params"]]


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of an optimizer; none of a wrapper that has no groups."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def parameter_ids(optimizers: list[torch.optim.Optimizer]) -> set[int]:
    """Return the identities of the parameters of some optimizers."""
    ids: set[int] = set()
    for optimizer in optimizers:
        ids.update(map(id, parameters_of(optimizer)))
    return ids


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether PyTorch runs hooks around the steps of an object."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


class Snapshot:
    """Detect later changes of parameters by version counters, addresses and a few elements, without
    a copy of them all.
    """

    def __init__(self, params: list[torch.Tensor]) -> None:
        self._marks = _marks_of(params)

        # A write through `p.data` changes no version counter, so a few elements are compared.
        readable = [p for p in params if _is_regular(p) and p.requires_grad and p.numel()]
        ends = {*readable[:1], *readable[-1:]}
        self._samples = [(p, _first_elements(p).clone()) for p in ends]

    def has_moved(self, params: list[torch.Tensor]) -> bool:
        """Return whether the parameters have moved; this reads values."""
        if self._marks != _marks_of(params):
            return True
        return any(_differs(_first_elements(p), sample) for p, sample in self._samples)


def _marks_of(params: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the version counter and the address of each parameter."""
    marks = []
    for p in params:
        address = p.data_ptr() if _is_regular(p) else 0
        marks.append((p._version, address))  # noqa: SLF001 - PyTorch has no public name for it
    return marks


def _differs(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether elements have changed; NaN that stays is no change."""
    both_nan = (now != now) & (before != before)  # noqa: PLR0124 - only NaN differs from itself
    same = (now == before) | both_nan
    return not bool(same.all())


def _is_regular(p: torch.Tensor) -> bool:
    """Return whether a parameter has values in one storage: no subclass such as DTensor, and not on
    ``meta``.
    """
    return type(p) in {torch.nn.Parameter, torch.Tensor} and not p.is_meta


def _first_elements(p: torch.Tensor) -> torch.Tensor:
    """Return a few elements of a parameter."""
    return p.detach().reshape(-1)[:_SAMPLE]


def find_stepped(optimizer: torch.optim.Optimizer) -> Stepped:
    """Return the object whose ``step()`` is clipped if a rule is attached to ``optimizer``.

    A wrapper around one optimizer that has exactly its parameters stands for that optimizer, as the
    wrappers of Accelerate, Lightning and SAM do. An object that holds others is stepped as one,
    with the optimizers inside.
    """
    return _resolve(optimizer, {id(optimizer)})


def _resolve(outer: torch.optim.Optimizer, around: set[int]) -> Stepped:
    """Return the object that is stepped; ``around`` has ``outer`` and the objects that hold it."""
    found = _find_inside(outer, around)
    optimizers = {id(optimizer): optimizer for stepped in found for optimizer in stepped.optimizers}
    inner = list(optimizers.values())

    # The optimizer inside of ZeroRedundancyOptimizer has a part of the parameters, and is stepped
    # by nothing else.
    outer_params = parameter_ids([outer])
    inner_params = parameter_ids(inner)
    if _is_of_pytorch(outer) and inner_params <= outer_params:
        return Stepped(outer, [])

    # What has other parameters, too, or several optimizers, is stepped as one with them.
    stands_for_one = not hasattr(outer, "param_groups") or outer_params == inner_params
    if len(found) != 1 or not stands_for_one:
        return Stepped(outer, inner)

    # An optimizer may have the wrapper around it as an attribute.
    stepped = found[0]
    if any(optimizer is outer for optimizer in _optimizers_inside(stepped.outer)):
        return Stepped(outer, [])
    stepped.wrappers.append(outer)
    return stepped


def _find_inside(outer: torch.optim.Optimizer, around: set[int]) -> list[Stepped]:
    """Return what is stepped inside of an object, each once."""
    found: dict[int, Stepped] = {}
    for optimizer in _optimizers_inside(outer):
        if id(optimizer) in around:
            continue
        stepped = _resolve(optimizer, around | {id(optimizer)})

        # Two attributes may lead to one optimizer, one of them through a wrapper.
        first = found.setdefault(id(stepped.outer), stepped)
        if first is not stepped:
            first.wrappers += stepped.wrappers

    # An object without hooks whose parameters all belong to the outer object may be a scheduler.
    outer_params = parameter_ids([outer])
    steppers = []
    for stepped in found.values():
        has_own_step = stepped.inner or has_hooks(stepped.outer)
        if has_own_step or not parameter_ids([stepped.outer]) <= outer_params:
            steppers.append(stepped)
    return steppers


def _all_optimizers_inside(
    outer: torch.optim.Optimizer, seen: set[int]
) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers in an object, and in these, each once."""
    for optimizer in _optimizers_inside(outer):
        if id(optimizer) in seen:
            continue
        seen.add(id(optimizer))
        yield optimizer
        yield from _all_optimizers_inside(optimizer, seen)


def _optimizers_inside(outer: object) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers in the attributes of an object, and in containers there."""
    for name, attribute in _attributes_of(outer):
        if name not in _OF_OPTIMIZERS:
            yield from _optimizers_in(attribute, _DEPTH)


def _attributes_of(outer: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes of an object itself, in its ``__dict__`` and its slots."""
    # Only stored attributes are read: a property of an unknown class may run any code.
    yield from getattr(outer, "__dict__", {}).items()

    # A class and its bases each name their own slots.
    for base in type(outer).__mro__:
        slots = vars(base).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        for name in names:
            if name != "__dict__" and hasattr(outer, name):
                yield name, getattr(outer, name)


def _optimizers_in(attribute: object, depth: int) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers in an attribute: itself, or what a container has, up to a depth."""
    if _is_optimizer_inside(attribute):
        yield attribute
        return
    # The bound ends the search in a container that holds itself.
    if not depth:
        return

    elements: Iterable[object] = ()
    if isinstance(attribute, (list, tuple, set, frozenset, deque)):
        elements = attribute
    elif isinstance(attribute, dict):
        elements = attribute.items()
    for element in elements:
        yield from _optimizers_in(element, depth - 1)


def is_optimizer(candidate: object) -> bool:
    """Return whether an object is stepped as an optimizer: one of PyTorch's, or one with the same
    two attributes.
    """
    if isinstance(candidate, torch.optim.Optimizer):
        return True
    if isinstance(candidate, (type, torch.nn.Module)):
        return False
    return hasattr(candidate, "param_groups") and callable(getattr(candidate, "step", None))


def _is_optimizer_inside(attribute: object) -> bool:
    """Return whether an attribute that was found in an object is an optimizer.

    This looks at its class and its ``__dict__`` only, since an attribute of a stranger may do
    anything when it is read.
    """
    if isinstance(attribute, torch.optim.Optimizer):
        return True
    if isinstance(attribute, (type, torch.nn.Module)):
        return False

    # A scheduler has a step as well, but no groups.
    kind = type(attribute)
    if not callable(getattr(kind, "step", None)):
        return False
    return hasattr(kind, "param_groups") or "param_groups" in getattr(attribute, "__dict__", {})


def _is_of_pytorch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is, or inherits from, one of PyTorch's own, whose ``step()``
    takes all steps.
    """
    for base in type(optimizer).__mro__:
        if base is torch.optim.Optimizer or not issubclass(base, torch.optim.Optimizer):
            continue
        if base.__module__.startswith("torch."):
            return True
    return False
