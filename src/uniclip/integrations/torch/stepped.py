# SPDX-License-Identifier: MIT
"""Find the object whose ``step()`` is clipped: an optimizer inside of its wrappers,
or one that holds several.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

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

    outer: Any
    """The object whose ``step()`` is called."""
    inner: list[Any]
    """The optimizers that its step calls; empty for a single optimizer."""
    wrappers: list[Any]
    """The wrappers around the outer object, which stand for it."""

    def __init__(self, outer: Any, inner: list[Any]) -> None:
        self.outer, self.inner, self.wrappers = outer, inner, []
        self._held = list(_all_held_by(outer, set()))

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that change parameters: those inside,
        and the outer one if it has parameters of its own.
        """
        known = parameter_ids(self.inner)
        owns = any(id(p) not in known for p in parameters_of(self.outer))
        return [*self.inner, self.outer] if owns or not self.inner else self.inner

    def has_changed(self) -> bool:
        """Return whether there is an optimizer inside that was not there before."""
        known = {id(one) for one in self._held}
        found = filter(has_hooks, _all_held_by(self.outer, set()))
        return any(id(one) not in known for one in found)

    def saves_state(self) -> bool:
        """Return whether ``outer.state_dict()`` is PyTorch's own,
        whose hooks add the state of a rule.
        """
        own = isinstance(self.outer, torch.optim.Optimizer) and has_hooks(self.outer)
        return own and type(self.outer).state_dict is torch.optim.Optimizer.state_dict

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups as they are now, each parameter once if there are optimizers
        inside.

        A ``load_state_dict`` gives optimizers new groups, so those of the outer one may be copies
        by then.
        """
        if not self.inner:
            groups: list[dict[str, Any]] = self.outer.param_groups
            return groups

        seen: set[int] = set()
        groups = [_without(seen, group) for one in self.inner for group in one.param_groups]
        own = [_without(seen, group) for group in getattr(self.outer, "param_groups", ())]
        return [*groups, *(group for group in own if group["params"])]


def _without(seen: set[int], group: dict[str, Any]) -> dict[str, Any]:
    """Return a group without the parameters that were seen before, and note those that it has."""
    names = group.get("param_names")
    kept: list[Any] = []
    kept_names: list[Any] = []
    for number, p in enumerate(group["params"]):
        if id(p) in seen:
            continue
        seen.add(id(p))
        kept.append(p)
        if names is not None:
            kept_names.append(names[number])
    return {**group, "params": kept} | ({} if names is None else {"param_names": kept_names})


def parameters_of(optimizer: Any) -> Iterator[Any]:
    """Yield the parameters of an optimizer; none of a wrapper that has no groups of its own."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def parameter_ids(optimizers: list[Any]) -> set[int]:
    """Return the identities of the parameters of some optimizers."""
    return {id(p) for one in optimizers for p in parameters_of(one)}


def has_hooks(optimizer: Any) -> bool:
    """Return whether PyTorch runs hooks around the steps of an object."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


class Snapshot:
    """Detect later changes of parameters by version counters, addresses and a few elements, without
    a copy of them all.
    """

    def __init__(self, params: list[Any]) -> None:
        self._marks = _marks_of(params)
        # A write through `p.data` leaves no mark, so a few elements are compared.
        plain = [p for p in params if _is_plain(p) and p.requires_grad and p.numel()]
        self._samples = [(p, _first_elements(p).clone()) for p in {*plain[:1], *plain[-1:]}]

    def has_moved(self, params: list[Any]) -> bool:
        """Return whether the parameters have moved; this reads values."""
        if self._marks != _marks_of(params):
            return True
        return any(_differs(_first_elements(p), sample) for p, sample in self._samples)


def _marks_of(params: list[Any]) -> list[tuple[int, int]]:
    """Return how often each parameter was written, and where it is."""
    # PyTorch has no public name for the version.
    return [(p._version, p.data_ptr() if _is_plain(p) else 0) for p in params]  # noqa: SLF001


def _differs(now: Any, before: Any) -> bool:
    """Return whether elements have changed; NaN that stays is no change."""
    same = (now == before) | ((now != now) & (before != before))  # noqa: PLR0124 - NaN
    return not bool(same.all())


def _is_plain(p: Any) -> bool:
    """Return whether a parameter has values in memory of its own: no subclass such as DTensor, and
    not on ``meta``.
    """
    return type(p) in {torch.nn.Parameter, torch.Tensor} and not p.is_meta


def _first_elements(p: Any) -> Any:
    """Return a few elements of a parameter."""
    return p.detach().reshape(-1)[:_SAMPLE]


def find_stepped(optimizer: Any) -> Stepped:
    """Return the object whose ``step()`` is clipped where a user gives ``optimizer``.

    A wrapper around one optimizer that has exactly its parameters stands for that optimizer, as the
    wrappers of Accelerate, Lightning and SAM do. What holds others is stepped as one, with the
    optimizers inside.
    """
    return _resolve(optimizer, {id(optimizer)})


def _resolve(outer: Any, path: set[int]) -> Stepped:
    """Return what is stepped; ``path`` has the objects around ``outer``."""
    # Two attributes may lead to one optimizer, one of them through a wrapper.
    found: dict[int, Stepped] = {}
    for one in _held_by(outer):
        if id(one) not in path:
            stepped = _resolve(one, path | {id(one)})
            known = found.setdefault(id(stepped.outer), stepped)
            if known is not stepped:
                known.wrappers += stepped.wrappers

    # Ignore an object without hooks whose parameters all belong to the outer object: it may be a
    # scheduler, not an optimizer.
    own = parameter_ids([outer])
    for stepped in list(found.values()):
        hooked = stepped.inner or has_hooks(stepped.outer)
        if not hooked and parameter_ids([stepped.outer]) <= own:
            del found[id(stepped.outer)]
    inner = list(
        {id(one): one for stepped in found.values() for one in stepped.optimizers}.values()
    )

    # The inner optimizer of ZeroRedundancyOptimizer has a part of the parameters, and no steps of
    # its own.
    held = parameter_ids(inner)
    if _is_of_pytorch(outer) and held <= own:
        return Stepped(outer, [])

    if len(found) == 1 and (own == held or not hasattr(outer, "param_groups")):
        (stepped,) = found.values()
        # An optimizer may know the wrapper around it.
        if any(one is outer for one in _held_by(stepped.outer)):
            return Stepped(outer, [])
        stepped.wrappers.append(outer)
        return stepped
    return Stepped(outer, inner)


def _all_held_by(outer: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the optimizers in an object, and in these, each once."""
    for one in _held_by(outer):
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            yield from _all_held_by(one, seen)


def _held_by(outer: Any) -> Iterator[Any]:
    """Yield the optimizers in the attributes of an object, and in containers there."""
    for name, value in _attributes_of(outer):
        if name not in _OF_OPTIMIZERS:
            yield from _optimizers_in(value, _DEPTH)


def _attributes_of(outer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object itself, in its ``__dict__`` and its slots."""
    yield from getattr(outer, "__dict__", {}).items()
    for base in type(outer).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__dict__" and hasattr(outer, name):
                yield name, getattr(outer, name)


def _optimizers_in(value: Any, depth: int) -> Iterator[Any]:
    """Yield the optimizers in a value: itself, or what a container has, up to a depth."""
    if is_held_optimizer(value):
        yield value
    elif depth and isinstance(value, (list, tuple, set, frozenset, deque)):
        for one in value:
            yield from _optimizers_in(one, depth - 1)
    elif depth and isinstance(value, dict):
        for pair in value.items():
            yield from _optimizers_in(pair, depth)


def is_optimizer(value: Any) -> bool:
    """Return whether an object is stepped as an optimizer: one of PyTorch's, or one with the same
    two attributes.
    """
    if isinstance(value, torch.optim.Optimizer):
        return True
    if isinstance(value, (type, torch.nn.Module)):
        return False
    return hasattr(value, "param_groups") and callable(getattr(value, "step", None))


def is_held_optimizer(value: Any) -> bool:
    """Return whether a value that was found in an object is an optimizer.

    Only its class and its ``__dict__`` are asked, since an attribute of a stranger may do anything.
    """
    if isinstance(value, torch.optim.Optimizer):
        return True
    if isinstance(value, (type, torch.nn.Module)):
        return False
    has_groups = hasattr(type(value), "param_groups") or "param_groups" in getattr(
        value, "__dict__", {}
    )
    return has_groups and callable(getattr(type(value), "step", None))


def _is_of_pytorch(optimizer: Any) -> bool:
    """Return whether an optimizer is, or inherits from, one of PyTorch's own, whose ``step()``
    takes all steps.
    """
    bases = {*type(optimizer).__mro__} - {torch.optim.Optimizer}
    leaf_info = [base for base in bases if issubclass(base, torch.optim.Optimizer)]
    return any(base.__module__.startswith("torch.") for base in leaf_info)
