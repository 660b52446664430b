# SPDX-License-Identifier: MIT
"""The result of `check_layout`, and its printed form."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_SHOWN = 20
"""The number of leaves that are printed, wrong ones first."""

NOT_AVERAGED = "not averaged"
UNCLEAR = "part, or not averaged"


class Leaf(NamedTuple):
    """A leaf, or a part of one, and the processes that hold it."""

    name: str
    shape: tuple[int, ...]
    processes: tuple[int, ...]
    """The processes that hold it."""
    kind: str
    """``"whole"``, ``"distributed"`` (a DTensor), ``"copy"``, ``"part"``, ``"copy of a part"``, ``"not averaged"``, or
    ``"part, or not averaged"`` where that cannot be told."""
    counts: tuple[int | None, ...]
    """How often it counts in each process (correct: once); ``None`` where it has no norm."""

    @property
    def counted(self) -> set[int]:
        """How often it counts, where it counts."""
        return {count for count in self.counts if count is not None}

    @property
    def ok(self) -> bool:
        """Whether it counts once everywhere."""
        return self.counted <= {1} and self.kind not in {NOT_AVERAGED, UNCLEAR}


class Difference(NamedTuple):
    """A number that a process finds, and that one process alone would not."""

    what: str
    found: float
    wanted: float


@dataclass(frozen=True)
class LayoutCheck:
    """The result of `check_layout`; printed, it is a table with what to do.

    Attributes
    ----------
    ok : bool
        Whether norms and factors are those of one process, and each leaf counts once.
    rule : str
        The rule.
    norm : float or None
        The joint norm that one process would find, in float64; ``None`` for a rule with several norms or none.
    norms : tuple of float or None
        The joint norm in each process.
    leaves : tuple
        For each leaf, or part of one, its name, shape, the processes that hold it, its kind, and how often it counts.
    problems : tuple of str
        What is wrong, and what to do.

    Examples
    --------
    >>> import torch
    >>> from uniclip.integrations.torch import check_layout
    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> w.grad = torch.tensor([3.0, 4.0])
    >>> check = check_layout(torch.optim.SGD([("w", w)]), uc.by_global_norm(1.0))
    >>> check.ok, check.norm, check.problems
    (True, 5.0, ())
    """

    ok: bool
    rule: str
    norm: float | None
    norms: tuple[float | None, ...]
    leaves: tuple[Leaf, ...]
    problems: tuple[str, ...]

    def raise_if_wrong(self) -> None:
        """Raise the printed text as an error, if something is wrong.

        Raises
        ------
        ValueError
            If `ok` is false.
        """
        if not self.ok:
            raise ValueError(str(self))

    def __str__(self) -> str:
        """Return a table of the leaves, the norms, and what to do."""
        verdict = "as in one process" if self.ok else "NOT as in one process"
        count = len(self.norms)
        lines = [f"{self.rule} on {count} {'process' if count == 1 else 'processes'}: {verdict}"]
        if self.norm is not None:
            lines.append(_norms(self.norm, self.norms))
        ordered = sorted(self.leaves, key=lambda leaf: leaf.ok)
        rows = [(leaf.name, shape(leaf), ranks(leaf.processes), leaf.kind, often(leaf)) for leaf in ordered[:_SHOWN]]
        lines += ["", *_table([("leaf", "shape", "processes", "taken for", "counts"), *rows])]
        if len(ordered) > _SHOWN:
            lines += [f"and {len(ordered) - _SHOWN} more"]
        notes = [textwrap.fill(one, 90, initial_indent="- ", subsequent_indent="  ") for one in self.problems]
        return "\n".join([*lines, *([""] if notes else []), *notes])


def problems_of(
    leaves: Sequence[Leaf],
    *,
    joined: bool,
    differences: Iterable[tuple[int, Difference]],
    refused: Sequence[tuple[int, str]],
    unknown: Sequence[str],
) -> list[str]:
    """Return what is wrong, and what to do; if all leaves count once, which numbers differ anyway."""
    found = []
    if refused:
        found.append(f"the step is refused in {processes([rank for rank, _ in refused])}: {refused[0][1]}")
    absent = [leaf for leaf in leaves if 0 in leaf.counted]
    if absent:
        fix = (
            "the group of all_reduce has to reach the processes that hold them"
            if joined
            else "give all_reduce= the process group, or the dimension of the mesh, whose processes hold them"
        )
        found.append(f"{names(absent)} count not at all in some processes: {fix}")
    twice = [leaf for leaf in leaves if max(leaf.counted, default=1) > 1 and leaf.kind != NOT_AVERAGED]
    if twice:
        fix = "mark copies by shared=lambda path, leaf: ..., or give all_reduce= a group that has each of them once"
        found.append(f"{names(twice)} count several times: {fix}")
    addends = [leaf for leaf in leaves if leaf.kind == NOT_AVERAGED]
    if addends:
        why = "the parameters are the same in several processes, and the gradients are not"
        fix = "average the gradients over these processes before the step, as DistributedDataParallel does"
        found.append(f"{names(addends)}: {why}: {fix}")
    unclear = [leaf for leaf in leaves if leaf.kind == UNCLEAR]
    if unclear:
        why = "differ between processes, and the parameters, which are constant, do not tell whether these are parts"
        found.append(f"the gradients {names(unclear)} {why} or were never averaged: check after some steps")
    found += [] if found else _differing(differences)
    if unknown:
        found.append(f"norms along axes of plain parts cannot be checked: {', '.join(unknown[:3])}")
    return found


def _differing(differences: Iterable[tuple[int, Difference]]) -> list[str]:
    """Return the first numbers that differ from those of one process."""
    found: dict[str, list[tuple[int, Difference]]] = {}
    for rank, one in differences:
        found.setdefault(one.what, []).append((rank, one))
    problems = []
    for what, some in list(found.items())[:5]:
        here, one = [rank for rank, _ in some], some[0][1]
        problems.append(f"{what} is {one.found:.6g} in {processes(here)}, and would be {one.wanted:.6g} in one process")
    return problems


def processes(numbers: Sequence[int]) -> str:
    """Return the names of processes."""
    return f"{'process' if len(numbers) == 1 else 'processes'} {ranks(numbers)}"


def names(leaves: Sequence[Leaf]) -> str:
    """Return the names of some leaves."""
    every = list(dict.fromkeys(leaf.name for leaf in leaves))
    return ", ".join(every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")


def ranks(numbers: Iterable[int]) -> str:
    """Return the numbers of processes, ``0-3`` for ``0, 1, 2, 3``."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


def shape(leaf: Leaf) -> str:
    """Return the shape of a leaf."""
    return "x".join(map(str, leaf.shape)) or "0-d"


def often(leaf: Leaf) -> str:
    """Return how often a leaf counts, and where if that differs."""
    words = {0: "not at all", 1: "once", 2: "twice"}
    found = sorted(leaf.counted, reverse=True)
    where = {count: [rank for rank, here in enumerate(leaf.counts) if here == count] for count in found}
    some = [
        words.get(count, f"{count} times") + (f" in {ranks(where[count])}" if len(found) > 1 else "") for count in found
    ]
    return ", ".join(some) or "-"


def _norms(wanted: float, found: Sequence[float | None]) -> str:
    """Return the norm that one process would find, and those of the processes."""
    where: dict[float | None, list[int]] = {}
    for rank, norm in enumerate(found):
        where.setdefault(norm, []).append(rank)
    seen = [f"{'none' if norm is None else f'{norm:.6g}'} in {processes(here)}" for norm, here in where.items()]
    return f"norm: {wanted:.6g} in one process; {', '.join(seen)}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
