"""Layout invariance: whatever the layout of a run, its norms and weights are those of one process.

This file is also the script of the processes: they compare, and write what went wrong for the tests to read.
"""

from __future__ import annotations

import os
import sys
from functools import cache, partial
from typing import Any
from unittest import mock

import in_processes
import pytest
import torch
from on_layouts.cases import LAYOUTS, RULES, combinations
from on_layouts.models import (
    BAD,
    PROCESSES,
    SPIKE,
    STEPS,
    Seen,
    bad_step,
    by_hand,
    flags_of,
    norms_of,
    optimizer_of,
    told,
)
from on_layouts.together import Together
from torch import distributed

from uniclip.integrations.torch import attach

CLOSE = 1e-6
SECONDS = 900
"""How long the whole table may take, on a busy machine too; on two cores of its own it takes less than four minutes."""


def attached(layout: Any, rule: str, case: str) -> Seen:
    """Train with an attached rule."""
    layout.start()
    optimizer = optimizer_of(layout.trained(), case, layout.optimizer)
    options = {"all_reduce": layout.all_reduce, "shared": layout.shared_leaves}
    handle = attach(optimizer, RULES[rule].rule, **{name: one for name, one in options.items() if one is not None})
    norms, flags = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        bad = step == bad_step(rule, case)
        loss = layout.backward(step, case, bad)
        if bad and not layout.shared:
            layout.spoil(BAD[case])
        if case == "none":
            layout.drop()
        handle.loss = None if loss is None else told(loss, step, layout.shares)
        optimizer.step()
        norms.append(norms_of(handle.report))
        flags.append(flags_of(handle.report))
    return Seen(norms, flags, layout.weights())


@cache
def reference(rule: str, case: str, experts: str, shared: bool) -> Seen:
    """Return what one process finds where no leaf is without a gradient."""
    return by_hand(rule, case, experts, shared=shared)


def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Compare to 1e-6 of the size of a tensor."""
    size = wanted.nan_to_num(0, 0, 0).abs().max().item()
    torch.testing.assert_close(found, wanted, rtol=0, atol=CLOSE * size, equal_nan=True, msg=lambda m: f"{what}: {m}")


def compared(layout: Any, rule: str, case: str) -> None:
    """Assert that a layout gives what one process does, and the same bits in all."""
    found = attached(layout, rule, case)
    if case == "none" and not layout.shared:
        wanted = by_hand(rule, case, layout.experts, layout.masks(), shared=False)
    else:
        wanted = reference(rule, case, layout.experts, layout.shared)
    assert found.flags == wanted.flags
    for step, (norms, theirs) in enumerate(zip(found.norms, wanted.norms, strict=True)):
        for path, norm in norms.items():
            there = theirs.get(layout.path(path), torch.zeros_like(norm))  # of a leaf that has no gradient anywhere
            close(norm, there, f"norm of {path or 'all'} at step {step}")
    for name, weight in found.weights.items():
        close(weight, wanted.weights[name], name)
    same_bits(found)


def same_bits(found: Seen) -> None:
    """Assert that flags and norms are the same in all processes that have them."""
    bits = [{path: norm.numpy().tobytes() for path, norm in norms.items()} for norms in found.norms]
    every: list[Any] = [None] * PROCESSES
    distributed.all_gather_object(every, (found.flags, bits))
    for flags, norms in every:
        assert flags == found.flags
        for mine, theirs in zip(bits, norms, strict=True):
            shared = mine.keys() & theirs.keys()
            others = [path for path in shared if mine[path] != theirs[path]]
            assert not others, f"other bits in another process: norms of {others}"


def sane() -> None:
    """Assert that the cases are what they are called: steps are left out, and norms clipped."""
    for case in ("finite", "NaN"):
        flags = reference("spikes", case, "", False).flags
        assert [skipped for _, skipped in flags] == [step in {SPIKE, bad_step("spikes", case)} for step in range(STEPS)]


class Table:
    """The layouts, each made once."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def forget(self) -> None:
        """Make all layouts anew: the process group is another one."""
        self._made.clear()

    def check(self, layout: str, rule: str, case: str) -> None:
        """Run one of the combinations."""
        from on_layouts.layouts import KINDS

        empty = case == "empty stage"
        key = f"{layout}, empty" if empty else layout
        if key not in self._made:
            self._made = {key: KINDS[layout](empty=empty)}
        if rule in LAYOUTS[layout].refused:
            with pytest.raises(ValueError, match="FSDP1"):
                attached(self._made[key], rule, case)
        else:
            compared(self._made[key], rule, case)


TITLES = {", ".join(one): one for one in combinations()}


def main(number: str, file: str) -> None:
    """Run every check as one of the processes."""
    together, table = Together(int(number), PROCESSES, file), Table()
    chosen = os.environ.get("LAYOUTS", "")  # to look at some of them
    together.run({title: partial(table.check, *one) for title, one in TITLES.items() if chosen in title}, table.forget)
    together.end()


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Run the processes, and return what went wrong in each."""
    with mock.patch.object(in_processes, "LIMIT", SECONDS):
        return in_processes.failures_in(tmp_path_factory, __file__, [[str(number)] for number in range(PROCESSES)])


@pytest.mark.parametrize("title", TITLES)
def test_as_in_one_process(failures: list[dict[str, str]], title: str) -> None:
    """Every process finds what one process would."""
    found = [one[title] for one in failures if title in one]
    assert not found, found[0]


def test_cases_are_what_they_are_called() -> None:
    """Steps are left out where they are to be."""
    sane()


if __name__ == "__main__":
    main(*sys.argv[1:])
