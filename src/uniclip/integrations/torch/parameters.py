# SPDX-License-Identifier: MIT
"""The parameters of attached optimizers, with their names and the paths of their state.

What a rule remembers of them is in `state`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, zip_longest
from operator import is_
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch

from uniclip._core.containers import Spec, expression_of, flatten_known
from uniclip._errors import check, stable

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
    ids: set[int]
    """The parameters, by identity, as they were when they were last looked at."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], names: Names | None = None
    ) -> None:
        # The optimizers hold this object, so a strong reference back would be a cycle.
        self._optimizers = list(map(ref, optimizers))
        self.is_joint = len(optimizers) > 1
        """Whether there are several optimizers, which are clipped together."""
        self.is_released = False
        """Whether the rule was removed."""
        tensors = self.tensors()
        self.ids = set(map(id, tensors))
        self._read_names = read_names(names, tensors)
        self.keys = []
        self._names: list[list[str | None]] = []
        """The names of the parameters of each group, ``None`` for those that have only a number."""
        self._rows: dict[str, _Row] = {}
        """All parameters that are, or were, in the groups, by the paths of their state."""
        self._spec: tuple[list[list[Any]], Spec] | None = None
        """The structure of trees, with the keys that it was made of."""
        self._present_paths: list[str] = []
        """The paths of the parameters in the groups now."""
        self._sizes: list[int] = []
        """The number of parameters in each group, repeated ones included."""
        self._has_stepped = False
        """Whether a step was taken, so that parameters are held."""
        self._is_loaded = False
        """Whether a file was loaded before the first step."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that still exist."""
        existing = [reference() for reference in self._optimizers]
        return [optimizer for optimizer in existing if optimizer is not None]

    @property
    def kinds(self) -> str:
        """The classes of the optimizers, for a message."""
        kinds = [type(optimizer).__qualname__ for optimizer in self.optimizers]
        more = "" if len(kinds) < 4 else f" and {len(kinds) - 3} more"
        return " and ".join(kinds[:3]) + more

    @property
    def known_paths(self) -> list[str]:
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
        params = params_in(self.groups())
        # PyTorch's optimizers repeat none, so this is usually all.
        if len(set(map(id, params))) == len(params):
            return params
        return list({id(p): p for p in params}.values())

    def tree(self, tensors: list[torch.Tensor]) -> list[OrderedDict[Any, torch.Tensor]]:
        """Return a tensor for each parameter, by its group and name."""
        rest = iter(tensors)
        return [OrderedDict(zip(keys, rest, strict=False)) for keys in self.keys]

    @property
    def spec(self) -> Spec:
        """The structure of these trees, found again when names or groups have changed."""
        if self._spec is None or self._spec[0] is not self.keys:
            numbers: Any = [OrderedDict.fromkeys(keys) for keys in self.keys]
            self._spec = self.keys, flatten_known(numbers)[1]
        return self._spec[1]

    def have_changed(self, params: list[torch.Tensor], *, in_step: bool) -> bool:
        """Return whether `update` has something to do for these parameters of the groups."""
        if self.is_released:
            return False
        sizes = [len(group["params"]) for group in self.groups()]
        if sizes != self._sizes or not self._has_stepped:
            return in_step or sizes != self._sizes

        # A parameter that is gone from the groups is released as soon as nobody else has it.
        if len(self._rows) > len(self._present_paths) and not in_step:
            return True
        before = [self._rows[path].param for path in self._present_paths]
        return len(before) != len(params) or not all(map(is_, before, params))

    def update(self, params: list[torch.Tensor], *, in_step: bool) -> dict[str, str]:
        """Assign a path to each parameter, and return the changed paths, old to new.

        A parameter that is gone keeps its path, so that it finds its state when it comes back. If
        another one has that path now, it gets a free one; ``""`` if it was deleted.
        """
        self._has_stepped |= in_step
        self._name_all()
        names = list(chain.from_iterable(self._names))
        self._sizes = [len(group["params"]) for group in self.groups()]
        self._present_paths = [stable(expression_of("", path)) for path in self.paths]
        self.ids = set(map(id, params))

        new_paths = self._follow(params)
        kept = {new_paths.get(path, path): row for path, row in self._rows.items()}
        kept.pop("", None)
        to_hold = params if self._has_stepped else [None] * len(params)
        self._rows = kept | dict(zip(self._present_paths, map(_Row, names, to_hold), strict=True))
        return new_paths

    def keep_names(self) -> None:
        """Keep the names of the parameters, although a file may have brought others to the
        groups.
        """
        self._is_loaded = True

    def release(self) -> None:
        """Hold no parameter any more."""
        self.is_released = True
        self._read_names = dict
        self._rows = {path: row._replace(param=None) for path, row in self._rows.items()}

    def _name_all(self) -> None:
        """Set the names of the parameters, and the keys of all groups: names, or numbers if names
        are not unique.
        """
        names_by_id = self.names
        held_rows = [row for row in self._rows.values() if row.param is not None]
        held_names = {id(row.param): row.name for row in held_rows}
        known_names = {row.name for row in self._rows.values()}
        names_before = self._names
        self._names = []
        self.keys = []
        seen: set[int] = set()
        for number, group in enumerate(self.groups()):
            params = group["params"]
            # Before the first step a place keeps its name, for a parameter that replaces another.
            is_same = self._sizes[number : number + 1] == [len(params)]
            by_place = names_before[number] if is_same and not held_names else []
            # DeepSpeed puts one flat tensor into a group, but leaves the names of its parameters.
            own_names = group.get("param_names", ())
            if len(own_names) > len(params):
                own_names = ()
            names = []
            for p, own, before in zip_longest(params, own_names, by_place):
                # A parameter of several optimizers belongs to the first group that has it.
                if id(p) in seen:
                    continue
                seen.add(id(p))
                # A file may have brought other names to the group.
                is_own = own in known_names or not (self._is_loaded and by_place)
                name = (own if is_own else None) or names_by_id.get(id(p)) or before
                names.append(held_names.get(id(p), name))

            # Two leaves of one name would be one leaf of the tree.
            keys = [position if name is None else name for position, name in enumerate(names)]
            is_unique = len(set(keys)) == len(keys)
            self.keys.append(keys if is_unique else list(range(len(keys))))
            self._names.append(names)

    def _follow(self, params: list[torch.Tensor]) -> dict[str, str]:
        """Return the new paths of the parameters that are held, ``""`` of those that were deleted
        everywhere else, or are not held and have left their place.
        """
        path_by_id = dict(zip(map(id, params), self._present_paths, strict=True))
        new_paths: dict[str, str] = {}
        gone: dict[str, ref[torch.Tensor]] = {}
        for path, (name, p) in self._rows.items():
            new_path = path_by_id.get(id(p))
            if p is None:
                if path not in self._present_paths:
                    new_paths[path] = ""
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
            elif path in self._present_paths:
                new_paths[path] = self.free_path(path)
        return new_paths

    def free_path(self, path: str) -> str:
        """Return a path like another one that no parameter has."""
        number = 2
        while f"{path}#{number}" in self._rows:
            number += 1
        return f"{path}#{number}"


def params_in(groups: Iterable[ParamGroup]) -> list[torch.Tensor]:
    """Return the parameters of some groups."""
    return [p for group in groups for p in group["params"]]


def read_names(names: Names | None, params: list[torch.Tensor]) -> ReadNames:
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

    if isinstance(names, torch.nn.Module):
        read: ReadNames = partial(_read_module_names, ref(names))
    else:
        # The pairs hold the parameters, so that no other gets the identity of one.
        read = partial(_names_by_id, _check_pairs(names))
    _check_names(read(), params)
    return read


def _check_pairs(names: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Return pairs of names and parameters."""
    wanted = "a torch.nn.Module, or pairs as of model.named_parameters()"
    iterable = isinstance(names, Iterable) and not isinstance(names, (str, torch.Tensor))
    check("names", names, iterable, wanted)
    pairs = list(names)
    for pair in pairs:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        fits = is_pair and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)
        check("names", names, fits, wanted)
    return pairs


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
            "names has none of the parameters of the optimizer; pass the model that it was made "
            "for, and make the optimizer after fully_shard(), which replaces the parameters"
        )
        raise ValueError(msg)


def _read_module_names(module: Callable[[], torch.nn.Module | None]) -> dict[int, str]:
    """Return the names of a module's parameters; none of a module that was deleted."""
    existing = module()
    if existing is None:
        return {}
    return _names_by_id(existing.named_parameters())


def _names_by_id(pairs: Iterable[tuple[str, torch.Tensor]]) -> dict[int, str]:
    """Return the names in pairs by the identities of the parameters."""
    return {id(p): name for name, p in pairs}
