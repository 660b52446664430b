"""Bad use hangs nowhere: of two processes one is wrong, and both say so.

This file is also the script of the processes: they check, and write what went wrong for the tests to read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from in_processes import failures_in
from on_layouts.together import Together
from torch import distributed

import uniclip as uc
from uniclip.integrations.torch import attach, clip_grad_norm_

PROCESSES = 2
WRONG = 1
"""The process that is wrong."""
REFUSALS: dict[str, Callable[[bool], Any]] = {}
LEAF, GLOBAL = uc.by_norm(0.5), uc.by_global_norm(0.5)


def refusal(function: Callable[[bool], Any]) -> Callable[[bool], Any]:
    """Have a function run in both processes; both have to raise, and the one that is wrong knows that it is."""
    REFUSALS[function.__name__] = function
    return function


def world() -> Any:
    """Return the group of both processes."""
    return distributed.group.WORLD


def parameters(*names: str, dtype: torch.dtype = torch.float32) -> list[tuple[str, Any]]:
    """Return named parameters with gradients."""
    named = [(name, torch.nn.Parameter(torch.ones(3, 2, dtype=dtype))) for name in names]
    for number, (_, p) in enumerate(named):
        p.grad = torch.full_like(p, 1.0 + number)
    return named


def stepped(rule: Any, *names: str, loss: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Take a step with an attached rule that joins the processes."""
    optimizer = torch.optim.SGD(parameters(*names, dtype=dtype), lr=0.1)
    handle = attach(optimizer, rule, **{"all_reduce": world()} | options)
    handle.loss = loss
    optimizer.step()
    return handle


@refusal
def some_leaves_are_the_same(wrong: bool) -> None:
    """Refuse, by each leaf, labels of which some are alike."""
    stepped(LEAF, "a", "c" if wrong else "b")


@refusal
def parts_of_leaves_with_another_number_of_axes(wrong: bool) -> None:
    """Refuse parts of a leaf with other axes."""
    named = parameters("a")
    if wrong:
        named[0][1].data = named[0][1].data.flatten()
        named[0][1].grad = named[0][1].data.clone()
    uc.clip({"a": named[0][1].grad}, uc.by_norm(0.5, axis=0), all_reduce=world())


@refusal
def another_rule(wrong: bool) -> None:
    """Refuse another rule."""
    stepped(LEAF if wrong else GLOBAL, "a", "b")


@refusal
def another_limit(wrong: bool) -> None:
    """Refuse another limit."""
    stepped(uc.by_global_norm(2.0 if wrong else 1.0), "a")


@refusal
def another_dtype(wrong: bool) -> None:
    """Refuse another dtype."""
    stepped(GLOBAL, "a", dtype=torch.float64 if wrong else torch.float32)


@refusal
def other_shared_leaves(wrong: bool) -> None:
    """Refuse what is shared in one process only."""
    stepped(GLOBAL, "a", "b", shared=(lambda path, leaf: path[1] == "a") if wrong else None)


@refusal
def a_loss_that_is_none(wrong: bool) -> None:
    """Refuse a loss that is no number."""
    stepped(uc.skip_spikes(window=4), "a", loss="1.0" if wrong else 1.0)


@refusal
def parameters_are_missing(wrong: bool) -> None:
    """Refuse a rule that needs the parameters without them."""
    grads = [torch.ones(3, 2)]
    uc.clip(grads, uc.agc(0.01), None if wrong else [torch.ones(3, 2)], all_reduce=world())


@refusal
def gradients_that_are_none(wrong: bool) -> None:
    """Refuse what is no array."""
    uc.clip(["text"] if wrong else [torch.ones(3)], GLOBAL, all_reduce=world())


@refusal
def not_finite(wrong: bool) -> None:
    """Raise in all where one has a NaN."""
    grads = [torch.full((3,), math.nan if wrong else 1.0)]
    uc.clip(grads, uc.by_global_norm(1.0, nonfinite="raise"), all_reduce=world())


@refusal
def a_drop_in_by_another_limit(wrong: bool) -> None:
    """Refuse a negative limit."""
    clip_grad_norm_([p for _, p in parameters("a")], -1.0 if wrong else 1.0, all_reduce=world())


def flat() -> list[Any]:
    """Return the flat parameter of an FSDP1 model, with a gradient."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(torch.nn.Linear(3, 2), device_id=torch.device("cpu"))
    net(torch.ones(1, 3)).sum().backward()
    return list(net.named_parameters())


@refusal
def flat_parameters_by_leaf(wrong: bool) -> None:
    """Refuse rules of each leaf on a flat parameter."""
    attach(torch.optim.SGD(flat(), lr=0.1), LEAF, all_reduce=world())


@refusal
def flat_parameters_in_a_drop_in(wrong: bool) -> None:
    """Refuse FSDP1 there, too."""
    clip_grad_norm_([p for _, p in flat()], 1.0)


@refusal
def an_inner_optimizer(wrong: bool) -> None:
    """Refuse the inner optimizer, which has some of the parameters only."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    zero = ZeroRedundancyOptimizer([p for _, p in parameters("a", "b")], optimizer_class=torch.optim.SGD, lr=0.1)
    attach(zero.optim, GLOBAL)


@refusal
def an_optimizer_without_hooks(wrong: bool) -> None:
    """Refuse what has no hooks, and name what to attach to."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    inner = torch.optim.SGD(parameters("a"), lr=0.1)
    with pytest.raises(TypeError, match=r"\.optim"):
        attach(PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2)), GLOBAL)
    raise TypeError


def refused(function: Callable[[bool], Any]) -> None:
    """Assert that both processes raise, by errors of uniclip's: one that waits in vain gets another one."""
    with pytest.raises((ValueError, TypeError, FloatingPointError, RuntimeError)) as caught:
        function(distributed.get_rank() == WRONG)
    if caught.type is RuntimeError or not isinstance(caught.value, (ValueError, TypeError, FloatingPointError)):
        assert "another process" in str(caught.value), caught.value


def main(number: str, file: str) -> None:
    """Run every check as one of the processes."""
    together = Together(int(number), PROCESSES, file)
    together.run({title: partial(refused, one) for title, one in REFUSALS.items()}, fresh=True)
    together.end()


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Run the processes, and return what went wrong in each."""
    return failures_in(tmp_path_factory, __file__, [[str(number)] for number in range(PROCESSES)])


@pytest.mark.parametrize("title", REFUSALS)
def test_both_processes_raise(failures: list[dict[str, str]], title: str) -> None:
    """Neither waits for the other."""
    found = [one[title] for one in failures if title in one]
    assert not found, found[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
