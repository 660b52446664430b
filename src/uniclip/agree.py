# SPDX-License-Identifier: MIT
"""At the first step, processes that hold parts of one tree find out what each of them holds.

They compare their rules and the labels of their leaves or groups. Leaves with equal labels are parts of one leaf, whose
sums are added; leaves with different labels are whole. The comparison uses only ``all_reduce``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from uniclip._checks import check
from uniclip._repr import holds_arrays, short, stable
from uniclip.backends.processes import Op, Reduce
from uniclip.layout import Layout, Opened
from uniclip.limits import Constant
from uniclip.processes import Joining, Joint, Rows, reducer_of
from uniclip.scopes import Scope, everything
from uniclip.tree import place

if TYPE_CHECKING:
    from uniclip.rules import Rule

_KEPT = 64
"""For how many layouts a scope keeps what the processes agreed on."""
_TOP = 2**23
"""Integers below it, and twice as large, are exact in float32."""
_WORDS = 3
"""How many such numbers encode a text."""


class Agreed(NamedTuple):
    """What the processes agreed on."""

    rows: Rows | None
    """``None`` if all processes have the same rows."""
    copies: list[int] | None
    """The number of processes that hold each leaf; ``None`` if each leaf, or each part of one, is held once."""


def joint_of(rule: Rule, given: Opened, layout: Layout, all_reduce: Any, theirs: Opened | None) -> Joint | None:
    """Return how measurements of gradients and parameters are reduced over processes.

    ``None`` if there are no other processes.
    """
    if all_reduce is None:
        if rule.scope.axes is None and given.backend.traced(given.first):
            # Refuses parts without a reduction.
            given.backend.processes.copies(given.arrays, None, None, given.tree.place)
        whole = given.parts is None and (theirs is None or theirs.parts is None)
        return None if whole else Joint(given)
    said = all_reduce if isinstance(all_reduce, Joining) else Joining(all_reduce)
    backend, reduce = given.backend, reducer_of(given.backend, said.all_reduce)
    shared = None if said.shared is None else _shared(given, said.shared)
    copies = backend.processes.copies(given.arrays, said.all_reduce, shared, given.tree.place)
    if backend.traced(given.first) or copies is not None:  # one program, the same in all processes
        if shared is not None and any(shared) and copies is None:
            msg = (
                "shared marks copies, and in code that is compiled it is not known how many processes hold one: join "
                "along named axes, or run the step before it is compiled"
            )
            raise TypeError(msg)
        return Joint(given, reduce, None, copies)
    tree, structure = given.tree, None
    if rule.scope.label is not everything or shared is not None:
        structure = tuple(tree.paths()) if tree.spec is None else tree.spec
    key, known = (said, structure, *_kind(rule)), rule.scope.agreed
    if key not in known:
        while len(known) >= _KEPT:
            known.pop(next(iter(known)))  # the oldest; other threads may be comparing by a newer one
        known[key] = _agreed(rule, given, layout, reduce, shared), rule  # whose choices keep their ids
    return Joint(given, reduce, *known[key][0])


def _kind(rule: Rule) -> tuple[Any, ...]:
    """Return what must be the same in all processes."""
    limit = rule.limit.value if type(rule.limit) is Constant else rule.limit
    return limit if isinstance(limit, (int, float)) else id(limit), rule.norm, id(rule.curve), rule.nonfinite


def refuse_kept_axes(scope: Scope, all_reduce: Any) -> None:
    """Refuse norms along axes beside ``all_reduce``: which axis of a part is cut is not known.

    Raises
    ------
    ValueError
        If the norms of the scope keep axes: those of different units, rows or entries would be added.
    """
    if all_reduce is not None and scope.axes is not None:
        msg = (
            f"all_reduce= joins the norms of whole leaves, and {scope!r} gives a leaf many: plain arrays do not say "
            "which of their axes is divided, so norms of different units could be added. Leave all_reduce= out where "
            "each leaf is whole in its process; where leaves are divided, use distributed arrays (DTensors, or jax.jit "
            "with sharded arrays), which need no all_reduce="
        )
        raise ValueError(msg)


def _shared(given: Opened, shared: Callable[..., Any]) -> list[bool]:
    """Return for each leaf whether the user declares it a copy."""
    answers = [shared(*pair) for pair in zip(given.tree.paths(), given.tree.leaves, strict=True)]
    for answer in answers:
        check("what shared(path, leaf) returns", answer, not holds_arrays(answer), "True or False")
    return list(map(bool, answers))


def _over(given: Opened, reduce: Reduce) -> Callable[[Any, Op], Any]:
    """Return the reduction for NumPy arrays."""

    def call(array: Any, op: Op) -> Any:
        flat = given.own(np.asarray(array, np.float32).reshape(-1))
        (found,) = given.backend.to_host([reduce(flat, op)])
        return found.reshape(np.shape(array))

    return call


def _agreed(rule: Rule, given: Opened, layout: Layout, reduce: Reduce, shared: list[bool] | None) -> Agreed:
    """Compare rules and labels with those of all other processes."""
    over, labels = _over(given, reduce), _labels(rule, given, layout)
    paths = [stable(place("", path)) for path in given.tree.paths()] if shared is not None else []
    copied = [path for path, one in zip(paths, shared or (), strict=True) if one]
    dtype = "" if rule.scope.label is None else next(iter(layout.dtypes), given.backend.xp.float32)
    text = f"{stable(repr(rule))} {shared is not None} {dtype}"
    same = _words(over, text, repr((sorted(labels), sorted(copied))), rule)
    if same and shared is None:
        return Agreed(None, None)
    if same:
        count = round(float(over(np.ones(1), "sum")[0]))
        return Agreed(None, [count if one else 1 for one in shared or ()])
    joins = rule.scope.label is not None
    free = set(labels if joins else copied)
    sets = {label: "" if label in free else repr(sorted(set(labels) - free)) for label in labels}
    table = _table(over, sets)
    _refuse(table)
    if rule.scope.label is everything:
        rows = None
    else:
        order = [labels[group] for block in layout.blocks for group in block.groups]
        rows = _rows([table.places[label] for label in order], sorted(table.every))
    if shared is None:
        return Agreed(rows, None)
    holders = _table(over, dict.fromkeys(copied, "")).holders if joins else table.holders
    return Agreed(rows, [holders[path] if one else 1 for path, one in zip(paths, shared or (), strict=True)])


def _labels(rule: Rule, given: Opened, layout: Layout) -> list[str]:
    """Return the label of each group as a text; all leaves that share one norm have one label."""
    if rule.scope.label is everything:
        return [""] * len(layout.labels)
    if rule.scope.label is not None:
        return [stable(repr(label)) for label in layout.labels]
    whole = given.tree.with_none() if rule.limit.memory else given.tree
    return [stable(place("", path)) for path in whole.paths()]


def _digest(text: str, salt: int = 0) -> list[int]:
    """Return integers that encode a hash of a text."""
    from hashlib import blake2b  # noqa: PLC0415 - it loads a library that most runs do not need

    data = blake2b(f"{salt} {text}".encode(), digest_size=4 * (_WORDS + 1)).digest()
    return [int.from_bytes(data[4 * n : 4 * n + 4], "big") % _TOP for n in range(_WORDS + 1)]


def _words(over: Any, rule_text: str, labels: str, rule: Any) -> bool:
    """Return whether all processes have the same labels; refuse other rules."""
    numbers = np.asarray([_digest(rule_text), _digest(labels)])
    got = over(np.concatenate([numbers.ravel(), _TOP - numbers.ravel()]), "max")
    half = numbers.size
    alike = (got[:half] == _TOP - got[half:]).reshape(2, -1).all(axis=1)
    if not alike[0]:
        msg = (
            f"the processes that all_reduce joins use different rules, shared= in some only, or norms of two dtypes, "
            f"and this one {short(rule)}: use one rule in all of them"
        )
        raise ValueError(msg)
    return bool(alike[1])


class _Table(NamedTuple):
    """The labels of all processes."""

    places: dict[str, int]
    """The places of the labels here among all labels."""
    holders: dict[str, int]
    """The number of processes that have each label."""
    every: list[int]
    """The places of all labels."""
    torn: list[str]
    """Labels that some processes share whose other labels differ: those here, or an empty text for one elsewhere."""


def _table(over: Any, sets: dict[str, str]) -> _Table:
    """Return the labels of all processes, hashed into a table that grows until no two labels collide.

    ``sets`` has for each label here a text for the labels that have to come with it; those of copies come alone.
    """
    table, left, salt, start = _Table({}, {}, [], []), dict(sets), 0, 0
    total = round(float(over(np.asarray([len(left)]), "sum")[0]))
    while total:
        size = max(64, 4 * total)
        slots = {label: _digest(label, salt)[_WORDS] % size for label in left}
        sent, here = np.zeros((2, _WORDS + 1, size)), np.zeros(size)
        for label, slot in slots.items():
            words = np.asarray([*_digest(label, salt)[:_WORDS], _digest(sets[label])[0]])
            sent[:, :, slot] = np.maximum(sent[:, :, slot], [words + 1, _TOP - words])
            here[slot] += 1
        top, here = over(sent, "max"), over(here, "sum")
        equal = top[0] - 1 == _TOP - top[1]
        clean = (here > 0) & equal[:_WORDS].all(axis=0)
        place_of = np.cumsum(clean) - 1 + start
        names = {slot: label for label, slot in slots.items() if clean[slot]}
        table.torn.extend(names.get(slot, "") for slot in np.flatnonzero(clean & ~equal[_WORDS]).tolist())
        table.every.extend(place_of[clean].tolist())
        for slot, label in names.items():
            table.places[label], table.holders[label] = int(place_of[slot]), round(float(here[slot]))
            del left[label]
        total, start, salt = round(float(here[~clean].sum())), start + int(clean.sum()), salt + 1
    return table


def _refuse(table: _Table) -> None:
    """Refuse leaves that are neither parts of the same leaves nor whole."""

    def named(found: list[str]) -> str:
        here = [label for label in found if label]
        return f"grads{here[0]}" if here else "a leaf of other processes"

    if table.torn:
        msg = (
            f"{named(table.torn)} is in several processes that all_reduce joins, which differ in other leaves: is it a "
            "copy, mark it by shared=lambda path, leaf: ...; are these different leaves of one name (of a list, or of "
            "an optimizer without names), give them names of their own"
        )
        raise ValueError(msg)


def _rows(places: list[int], every: list[int]) -> Rows:
    """Return the places of rows among those of all processes."""
    number = {one: index for index, one in enumerate(every)}
    own = np.asarray([number[one] for one in places], np.int64)
    inverse = np.full(len(every), len(places), np.int64)
    inverse[own] = np.arange(len(places))
    return Rows(inverse, own, np.flatnonzero(inverse == len(places)))
