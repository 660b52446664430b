# SPDX-License-Identifier: MIT
"""The saved form of a rule's state: its numbers, the labels of their norms, and the kind of rule.

It is a dict of three entries, in `uniclip.Clipper` and in the adapters whose files hold dicts; the others keep the
state in arrays of their own, and of the rest what fits there:

==============  ===================================================================================
``"rule"``      the kinds of limit, norm and scope that the numbers come from, see `identity`
``"leaves"``    for each rule that remembers the leaves or groups of its norms, see `leaves_of`
``"state"``     the arrays of the state by name, as numbers and lists or as arrays
==============  ===================================================================================
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import optree

from uniclip._repr import short, stable
from uniclip.backends import DEFAULT, Backend, backend_of
from uniclip.combine import Chain, Masked
from uniclip.limits import PerGroup
from uniclip.norms import Norm
from uniclip.rules import Rule
from uniclip.scopes import FanIn, Scope, everything
from uniclip.tree import Tree, flatten, place

Leaves: TypeAlias = list[list[str] | None]
"""For each rule that remembers, in the order of a chain: its leaves or groups, ``None`` if all leaves share a norm."""
_ENTRIES = ("rule", "leaves", "state")
_NEVER_NEGATIVE = {"below", "count", "limits", "squares", "variances"}
"""The fields of uniclip's own states that hold counts and squares."""
_NONE_YET = {"averages", "norms"}
"""Those that hold norms, and -1 where there is none yet."""


class Saved(NamedTuple):
    """A saved state that is of the right kind of rule, in arrays of its own."""

    leaves: Leaves | None
    """``None`` where it is not known whose norms they are, or must not be checked."""
    values: dict[str, Any]


def identity(rule: Any) -> str:
    """Return what a state of the rule depends on: the kinds of its limits, norms and scopes, their order in a chain.

    Numbers that may be tuned while a run goes on, such as a z-score or a decay, are no part of it, nor are functions
    or rules that remember nothing.
    """
    if not rule.memory:
        return "-"
    if isinstance(rule, Chain):
        return f"chain({', '.join(map(identity, rule.rules))})"
    if isinstance(rule, Masked):
        return f"masked({identity(rule.rule)})"
    if isinstance(rule, Rule):
        return f"{_limit(rule.limit)} of {_norm(rule.norm)} over {_scope(rule.scope)}"
    return type(rule).__name__


def labelled(rule: Any) -> bool:
    """Whether a state of the rule is that of certain leaves or groups."""
    if isinstance(rule, Chain):
        return any(map(labelled, rule.rules))
    if isinstance(rule, Masked):
        return labelled(rule.rule)
    if isinstance(rule, Rule):
        return rule.memory and rule.scope.label is not everything
    return bool(rule.by_leaf)


def leaves_of(rule: Any, tree: Tree) -> Leaves:
    """Return the leaves or groups of each rule that remembers, in the order of its norms."""
    if not rule.memory:
        return []
    if isinstance(rule, Chain):
        return [part for one in rule.rules for part in leaves_of(one, tree)]
    pairs = list(zip(tree.paths(), tree.leaves, strict=True))
    if isinstance(rule, Masked):
        some = tree.rebuild([leaf if rule.where(path, leaf) else None for path, leaf in pairs])
        return leaves_of(rule.rule, flatten(some))
    if not labelled(rule):
        return [None]
    if rule.by_leaf:
        return [[stable(place("", path)) for path, _ in pairs]]
    groups: dict[Hashable, None] = dict.fromkeys(rule.scope.label(path, leaf) for path, leaf in pairs)
    return [sorted(stable(repr(label)) for label in groups)]


def to_lists(array: Any) -> Any:
    """Return the values of an array as a number or nested lists."""
    return array.tolist() if hasattr(array, "tolist") else np.asarray(array).tolist()


def names_of(state: Any) -> list[str]:
    """Return a name for each array of a state: the fields, keys and numbers that lead to it."""
    return [_name(path) for path in optree.tree_accessors(state)]


def to_saved(rule: Any, leaves: Leaves | None, state: Any, convert: Callable[[Any], Any] = to_lists) -> dict[str, Any]:
    """Return a state as it is saved; ``convert`` makes of each array what the file can hold."""
    values = dict(zip(names_of(state), map(convert, optree.tree_leaves(state)), strict=True))
    return {"rule": identity(rule), "leaves": _copied(leaves), "state": values}


def from_saved(saved: Any, rule: Any, anew: str) -> Saved:
    """Check what can be checked of a saved state without gradients, and copy it.

    Parameters
    ----------
    saved : dict
        What `to_saved` returned; ``None`` instead of the rule, or of the leaves, is not checked.
    rule : Rule, Chain or Masked
        The rule that is to go on with it.
    anew : str
        What to do to begin anew, for errors.

    Raises
    ------
    ValueError
        If it does not say whose norms it holds, if it is that of another rule, or if a value is no number or NaN.
    """
    if not isinstance(saved, dict) or not set(_ENTRIES) <= set(saved) or not isinstance(saved["state"], dict):
        msg = (
            f"the saved state, {_outline(saved)}, does not say whose norms it holds, as old files do not: {anew}; or, "
            "if it surely is of this rule and these leaves, load {'rule': None, 'leaves': None, 'state': {name: array}}"
        )
        raise ValueError(msg)
    ours, theirs, leaves = identity(rule), saved["rule"], saved["leaves"]
    if not (theirs is None or isinstance(theirs, str)) or not (leaves is None or _are_labels(leaves)):
        msg = f"the saved state is damaged: its 'rule' has to be a text, its 'leaves' lists of texts; {anew}"
        raise ValueError(msg)
    if theirs not in (ours, None):
        msg = (
            f"the saved state is that of another rule than {short(rule)}: it is of {theirs}, this one of {ours}; {anew}"
        )
        raise ValueError(msg)
    return Saved(_copied(saved["leaves"]), {name: _array(name, value) for name, value in saved["state"].items()})


def restored(saved: Saved, rule: Any, leaves: Leaves | None, like: Any, anew: str) -> Any:
    """Return a saved state in arrays like those of a state before the first step.

    Parameters
    ----------
    saved : Saved
    rule : Rule, Chain or Masked
    leaves : list
        What `leaves_of` returns for the gradients here; ``None`` if that is not known.
    like : tree of arrays
        What ``rule.init`` returns for them.
    anew : str
        What to do to begin anew, for errors.

    Raises
    ------
    ValueError
        If it is that of other leaves, or if an array is missing, is of another shape, or cannot hold its values.
    """
    if saved.leaves is not None and leaves is not None:
        _refuse_others(rule, saved.leaves, leaves, anew)
    accessors, arrays, spec = optree.tree_flatten_with_accessor(like)
    names = [_name(path) for path in accessors]
    if set(names) != set(saved.values):
        msg = f"the saved state has {sorted(saved.values)}, and one of {short(rule)} here has {sorted(names)}: {anew}"
        raise ValueError(msg)
    values = [saved.values[name] for name in names]
    backend = next(filter(None, map(backend_of, arrays)), DEFAULT)  # there is none of a boolean by itself
    every = zip(names, values, arrays, map(_field, accessors), strict=True)
    new = [_like(backend, *one) for one in every]
    return optree.tree_unflatten(spec, new)


def labels_of(leaves: Leaves | None) -> list[str]:
    """Return the leaves or groups of all rules, one after the other."""
    return [label for part in leaves or () for label in part or ()]


def refuse_changed(rule: Any, known: Leaves | None, here: Leaves) -> None:
    """Refuse gradients of other leaves or groups than those of the step before."""
    if known in (None, here):
        return
    others = sorted(set(labels_of(known)) ^ set(labels_of(here)))
    change = f"{shown(others)} had a gradient at one step and none at another" if others else "their order has changed"
    msg = (
        f"{short(rule)} remembers each leaf or group by itself, and {change}: give the same ones, in the same order, "
        "at every step, zeros if there is no gradient"
    )
    raise ValueError(msg)


def _refuse_others(rule: Any, saved: Leaves, here: Leaves, anew: str) -> None:
    """Refuse a state of other leaves or groups than those that are here."""
    if saved == here:
        return
    theirs, ours = labels_of(saved), labels_of(here)
    missing, extra = ([label for label in a if label not in b] for a, b in ((theirs, ours), (ours, theirs)))
    what = [f"norms of {shown(missing)}, which are not here"] if missing else []
    what += [f"none of {shown(extra)}"] if extra else []
    msg = (
        f"the saved state of {short(rule)} is that of other leaves: it holds "
        f"{', and '.join(what) or 'their norms in another order'}; give the same leaves, or {anew} (if only their "
        "names have changed, put the new ones into its 'leaves')"
    )
    raise ValueError(msg)


def shown(labels: list[str]) -> str:
    """Return leaves and groups as an error names them."""
    names = [f"grads{label}" if label[:1] in {"", "["} else f"group {label}" for label in labels[:5]]
    return ", ".join(names) + (f" and {len(labels) - 5} more" if len(labels) > len(names) else "")


def _are_labels(leaves: Any) -> bool:
    """Whether a value is what `leaves_of` returns, as files hold it."""
    lists = isinstance(leaves, (list, tuple)) and all(
        part is None or isinstance(part, (list, tuple)) for part in leaves
    )
    return lists and all(isinstance(label, str) for label in labels_of(leaves))


def _outline(saved: Any) -> str:
    """Describe an invalid saved state for an error, without its numbers."""
    if not isinstance(saved, dict):
        return f"a {type(saved).__name__}"
    return f"of {sorted(map(str, saved))[:5]}"


def _copied(leaves: Any) -> Any:
    return None if leaves is None else [None if part is None else list(part) for part in leaves]


def _name(path: tuple[Any, ...]) -> str:
    return ".".join([str(entry.field if hasattr(entry, "field") else entry.entry) for entry in path])


def _field(path: tuple[Any, ...]) -> str | None:
    """Return the field of uniclip's own states that leads to an array, ``None`` in those of others' limits."""
    own = [entry.field for entry in path if hasattr(entry, "field") and entry.type.__module__.startswith("uniclip.")]
    return own[-1] if own else None


def _array(name: str, value: Any) -> Any:
    """Return values as an array of its own."""
    backend = backend_of(value)
    try:
        array = np.array(to_lists(value)) if backend is None else _twin(backend.detached(value))
    except ValueError:  # rows of unequal lengths
        array = np.array(None)
    if backend is None and array.dtype.kind not in "biuf":
        msg = f"the saved {name} is made of {array.dtype}, and a state is made of real numbers"
        raise ValueError(msg)
    return array


def _twin(array: Any) -> Any:
    """Return a copy of an array."""
    return array.clone() if hasattr(array, "clone") else copy.copy(array)


def _like(backend: Backend, name: str, value: Any, like: Any, field: str | None) -> Any:
    """Return values as an array like another one."""
    if 0 == math.prod(value.shape) == math.prod(like.shape):  # lists of nothing have neither shape nor dtype
        return like
    if tuple(value.shape) != tuple(like.shape):
        msg = (
            f"the saved {name} has shape {tuple(value.shape)}, but here it is {tuple(like.shape)}: load the state of "
            "the same rule on gradients of the same shapes"
        )
        raise ValueError(msg)
    value = value if backend_of(value) is backend else np.asarray(to_lists(value))
    with backend.quiet(like):  # where a number does not fit
        why = _illegal(backend, value, like, field)
        if why:
            msg = f"the saved {name} cannot be restored: {why}"
            raise ValueError(msg)
        return backend.to_device_of(like, backend.xp.asarray(value, dtype=like.dtype))


def _illegal(backend: Backend, value: Any, like: Any, field: str | None) -> str | None:
    """Return why an array cannot take values, ``None`` if it can."""
    theirs, ours = (backend_of(value) or DEFAULT).xp, backend.xp
    kind, theirs_is = _kind(like), _kind(value)
    if theirs_is != kind and not (kind == "float" and theirs_is == "int"):
        return f"it is made of {value.dtype}, and has to be of {like.dtype}"
    if kind == "int":
        low, high = ours.iinfo(like.dtype).min, ours.iinfo(like.dtype).max
        outside = [number for number in np.ravel(np.asarray(to_lists(value))).tolist() if not low <= number <= high]
        if outside:
            return f"{outside[0]} does not fit into {like.dtype}"
    why = _not_finite(theirs, ours, value, like, field) if kind == "float" else None
    if why:
        return why
    if field in _NEVER_NEGATIVE | _NONE_YET:
        wrong = (value < 0) & (value != -1) if field in _NONE_YET else value < 0
        if bool(theirs.any(wrong)):
            return "it holds negative numbers"
    return None


def _not_finite(theirs: Any, ours: Any, value: Any, like: Any, field: str | None) -> str | None:
    """Return what is wrong with numbers that are not finite, or would not be; a user's own limit may hold ∞."""
    if bool(theirs.any(value != value)):  # noqa: PLR0124 - of integers, too
        return "it holds NaN"
    if _infinite(theirs, value):
        return "it holds ∞" if field else None
    fits = not _infinite(ours, ours.asarray(value, dtype=like.dtype))
    return None if fits else f"its numbers do not fit into {like.dtype}"


def _kind(array: Any) -> str:
    """Return the kind of numbers in an array, by the name of its dtype: not every framework can say otherwise."""
    return next((kind for kind in ("bool", "int", "complex") if kind in str(array.dtype)), "float")


def _infinite(xp: Any, array: Any) -> bool:
    return bool(xp.any((array == math.inf) | (array == -math.inf)))


def _limit(limit: Any) -> str:
    """Return the kind of a limit, and what its state is arranged by."""
    if isinstance(limit, PerGroup):
        inside = [f"{stable(repr(label))}: {_limit(one)}" for label, one in limit.limits if one.memory]
        return f"PerGroup({', '.join(sorted(inside))})"
    values = {f.name: getattr(limit, f.name) for f in fields(limit)} if is_dataclass(limit) else {}
    shown = [f"window={int(values['window'])}"] if "window" in values else []
    shown += [name for name, value in values.items() if isinstance(value, (bool, np.bool_)) and value]
    return type(limit).__name__ + (f"({', '.join(shown)})" if shown else "")


def _norm(norm: Norm) -> str:
    name = repr(norm).rpartition(".")[2]
    return name if name.isidentifier() else f"{type(norm).__name__}({float(norm.ord):g}, {float(norm.size_power):g})"


def _scope(scope: Scope) -> str:
    """Return which leaves share a norm, and along which axes."""
    joined = "each leaf" if scope.label is None else "all leaves" if scope.label is everything else "groups of leaves"
    axes = scope.axes
    if axes is None:
        return joined
    if isinstance(axes, FanIn):
        return f"the units of {joined}" if axes.axis is None else f"the units of axis {int(axes.axis)} of {joined}"
    along = getattr(axes, "__name__", type(axes).__name__) if callable(axes) else str([int(axis) for axis in axes])
    return f"axes {along} of {joined}"
