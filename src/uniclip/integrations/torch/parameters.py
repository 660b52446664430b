# SPDX-License-Identifier: MIT
"""The parameters of attached optimizers, with their names and the paths of their state.

What a rule remembers of them is in `state`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import ref

import torch

from uniclip._core.tree import place
from uniclip._errors import check, stable

if TYPE_CHECKING:
    from uniclip.integrations.torch.guard import Guard

ParamGroup: TypeAlias = dict[str, Any]
"""A parameter group of an optimizer: its parameters, perhaps their names, and its options."""

Names: TypeAlias = "torch.nn.Module | Iterable[tuple[str, torch.Tensor]]"
"""The names of parameters: a module, or pairs as of its ``named_parameters()``."""

ReadNames: TypeAlias = Callable[[], dict[int, str]]
"""A function that returns the names of parameters by their identity."""


class _Row(NamedTuple):
    """A parameter that has rows in the state of a rule."""

    name: str | None
    """Its name; ``None`` if it has only a number."""
    param: torch.Tensor | None
    """The parameter, ``None`` before the first step."""


class Parameters:
    """The parameters in the groups of some optimizers, as they are now, each once.

    Until the first step a parameter is known by its place (group and position), and none is held: a
    library that shards a model replaces them all, and frees those that were whole. From the first
    step on each is known by itself. It is never held weakly, since ``model.to()`` refuses to swap
    tensors that have weak references.
    """

    keys: list[list[Any]]
    """The names or numbers of the parameters of each group."""
    guard: Guard | None = None
    """Watches the steps that move the parameters, once a rule is attached."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], names: Names | None = None
    ) -> None:
        # The optimizers hold this object, so a strong reference back would be a cycle.
        self._optimizers = list(map(ref, optimizers))
        self._read_names = names_of(names, self.tensors())
        self.keys = []
        self._rows: dict[str, _Row] = {}
        """All parameters that are, or were, in the groups, by the paths of their state."""
        self._present: list[str] = []
        """The paths of the parameters in the groups now."""
        self._sizes: list[int] = []
        """The number of parameters in each group, repeated ones included."""
        self._has_stepped = False
        """Whether a step was taken, so that parameters are held."""
        self._is_loaded = False
        """Whether a file was loaded before the first step."""
        self._is_released = False

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that still exist."""
        existing = [reference() for reference in self._optimizers]
        return [optimizer for optimizer in existing if optimizer is not None]

    @property
    def known(self) -> list[str]:
        """The paths of all parameters that are, or were, in the groups."""
        return list(self._rows)

    @property
    def paths(self) -> list[tuple[int, Any]]:
        """The group and name of each parameter."""
        return [(number, key) for number, keys in enumerate(self.keys) for key in keys]

    @property
    def names(self) -> dict[int, str]:
        """The names that were passed to `attach`, by the identity of the parameter."""
        return self._read_names()

    def groups(self) -> list[ParamGroup]:
        """Return the groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters, each once."""
        params = [p for group in self.groups() for p in group["params"]]
        # PyTorch's optimizers repeat none, so this is usually all.
        if len(set(map(id, params))) == len(params):
            return params
        return list({id(p): p for p in params}.values())

    def tree(self, tensors: list[torch.Tensor]) -> list[OrderedDict[Any, torch.Tensor]]:
        """Return a tensor for each parameter, by its group and name."""
        rest = iter(tensors)
        return [OrderedDict(zip(keys, rest, strict=False)) for keys in self.keys]

    def have_changed(self, params: list[torch.Tensor], *, in_step: bool) -> bool:
        """Return whether `update` has something to do for these parameters of the groups."""
        if self._is_released:
            return False
        sizes = [len(group["params"]) for group in self.groups()]
        if sizes != self._sizes or not self._has_stepped:
            return in_step or sizes != self._sizes

        # A parameter that is gone from the groups is released as soon as nobody else has it.
        if len(self._rows) > len(self._present) and not in_step:
            return True
        held = [self._rows[path].param for path in self._present]
        return len(held) != len(params) or not all(map(is_, held, params))

    def update(self, params: list[torch.Tensor], *, in_step: bool) -> dict[str, str]:
        """Name the parameters and note their paths; return the new paths of those that had others.

        A parameter that is gone keeps its path, so that it finds its state when it comes back. If
        another one has that path now, it gets a free one; ``""`` if it was deleted.
        """
        was_held = self._has_stepped
        self._has_stepped |= in_step
        names = self._name_all()
        self._sizes = [len(group["params"]) for group in self.groups()]
        self._present = [stable(place("", path)) for path in self.paths]
        if self.guard is not None:
            self.guard.watch()

        new_paths = self._follow(params) if was_held else self._follow_places(names)
        kept = {new_paths.get(path, path): row for path, row in self._rows.items()}
        kept.pop("", None)
        held = params if self._has_stepped else [None] * len(params)
        self._rows = kept | dict(zip(self._present, map(_Row, names, held), strict=True))
        return new_paths

    def keep_names(self) -> None:
        """Keep the names of the parameters, although a file may have brought others to the
        groups.
        """
        self._is_loaded = True

    def release(self) -> None:
        """Hold no parameter any more."""
        self._is_released = True
        self._read_names = dict
        self._rows = {path: row._replace(param=None) for path, row in self._rows.items()}

    def _name_all(self) -> list[str | None]:
        """Return the name of each parameter, and set the keys of all groups: names, or numbers if
        names are not unique.
        """
        names_by_id = self.names
        held = {id(row.param): row.name for row in self._rows.values() if row.param is not None}
        known_names = {row.name for row in self._rows.values()}
        # Before the first step a place keeps its name, for a parameter that has replaced another.
        rows = map(self._rows.__getitem__, self._present)
        places = [[row.name for _, row in zip(keys, rows, strict=False)] for keys in self.keys]

        seen: set[int] = set()
        all_names = []
        self.keys = []
        for number, group in enumerate(self.groups()):
            params = group["params"]
            is_same = self._sizes[number : number + 1] == [len(params)]
            by_place = places[number] if is_same and not held else []
            names = []
            for p, own, before in zip_longest(params, group.get("param_names", ()), by_place):
                # A parameter of several optimizers belongs to the first group that has it.
                if id(p) in seen:
                    continue
                seen.add(id(p))
                # A file may have brought other names to the group.
                is_own = own in known_names or not (self._is_loaded and by_place)
                name = (own if is_own else None) or names_by_id.get(id(p)) or before
                names.append(held.get(id(p), name))

            # Two leaves of one name would be one leaf of the tree.
            keys = [position if name is None else name for position, name in enumerate(names)]
            is_unique = len(set(keys)) == len(keys)
            self.keys.append(keys if is_unique else list(range(len(keys))))
            all_names += names
        return all_names

    def _follow_places(self, names: list[str | None]) -> dict[str, str]:
        """Return the new paths of the parameters before the first step, when each is known by its
        name, or else by its place; ``""`` of those that are gone, unless a file has rows for them.
        """
        places = zip(names, self.paths, self._present, strict=True)
        path_by_name = {name: path for name, (_, key), path in places if key == name}
        new_paths: dict[str, str] = {}
        for path, (name, _) in self._rows.items():
            new_path = path_by_name.get(name, path)
            if new_path == path and path not in self._present and not self._is_loaded:
                new_path = ""
            if new_path != path:
                new_paths[path] = new_path
        return new_paths

    def _follow(self, params: list[torch.Tensor]) -> dict[str, str]:
        """Return the new paths of the parameters that are held, ``""`` of those that were deleted
        everywhere else.
        """
        path_by_id = dict(zip(map(id, params), self._present, strict=True))
        new_paths: dict[str, str] = {}
        gone: dict[str, ref[torch.Tensor]] = {}
        for path, (name, p) in self._rows.items():
            new_path = path_by_id.get(id(p))
            if p is None:
                # A file had rows for a place that another parameter has now.
                if path in self._present:
                    new_paths[path] = self._free_path(path)
            elif new_path is None:
                # Only for a moment: whoever else has the parameter may swap it.
                gone[path] = ref(p)
                self._rows[path] = _Row(name, None)
            elif new_path != path:
                new_paths[path] = new_path
        p = None

        for path, reference in gone.items():
            p = reference()
            self._rows[path] = self._rows[path]._replace(param=p)
            if p is None:
                new_paths[path] = ""
            elif path in self._present:
                new_paths[path] = self._free_path(path)
        return new_paths

    def _free_path(self, path: str) -> str:
        """Return a path like another one that no parameter has."""
        number = 2
        while f"{path}#{number}" in self._rows:
            number += 1
        return f"{path}#{number}"


def names_of(names: Names | None, params: list[torch.Tensor]) -> ReadNames:
    """Return a function that returns the names of parameters, from a module or from pairs.

    A module is asked each time, since its parameters may be replaced, as by FSDP2.

    Raises
    ------
    TypeError
        If ``names`` is neither.
    ValueError
        If there are no names, or a name occurs twice, or the names are those of another model.
    """
    if names is None:
        return dict

    pairs = names.named_parameters() if isinstance(names, torch.nn.Module) else names
    wanted = "a torch.nn.Module, or pairs as of model.named_parameters()"
    iterable = isinstance(pairs, Iterable) and not isinstance(pairs, (str, torch.Tensor))
    check("names", names, iterable, wanted)
    held: list[tuple[str, torch.Tensor]] = []
    for pair in pairs:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        fits = is_pair and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)
        check("names", names, fits, wanted)
        held.append(pair)

    names_by_id = {id(p): name for name, p in held}
    _check_names(names_by_id, params)
    if isinstance(names, torch.nn.Module):
        return partial(_names_in, ref(names))
    # The pairs hold the parameters, so that no other gets the identity of one.
    return lambda: {id(p): name for name, p in held}


def _check_names(names_by_id: dict[int, str], params: list[torch.Tensor]) -> None:
    """Raise if there are no names, if one occurs twice, or if all are of other parameters."""
    if not names_by_id:
        msg = (
            "names has no parameters: it is empty, a module without parameters, or an iterator "
            "that was used before; pass the model itself, as in attach(optimizer, rule, "
            "names=model)"
        )
        raise ValueError(msg)
    for name, occurrences in Counter(names_by_id.values()).items():
        if occurrences > 1:
            msg = f"names gives two parameters the name {name!r}; give each its own"
            raise ValueError(msg)
    if params and names_by_id.keys().isdisjoint(map(id, params)):
        msg = (
            "names has none of the parameters of the optimizer; pass the model that it was made for"
        )
        raise ValueError(msg)


def _names_in(module: Callable[[], torch.nn.Module | None]) -> dict[int, str]:
    """Return the names of a module's parameters; none of a module that was deleted."""
    existing = module()
    if existing is None:
        return {}
    return {id(p): name for name, p in existing.named_parameters()}
