"""`check_layout` says of right layouts that they are right, and of wrong ones what is wrong.

This file is also the script of the processes: they check, and write what went wrong for the tests to read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from in_processes import failures_in
from on_layouts.cases import LAYOUTS, RULES
from on_layouts.models import optimizer_of
from on_layouts.together import Together
from torch import distributed

import uniclip as uc
from uniclip.integrations.torch import attach, check_layout
from uniclip.integrations.torch.layout_report import LayoutCheck

CHECKS: dict[str, Callable[[], None]] = {}
GLOBAL, LEAF = uc.by_global_norm(0.5), uc.by_norm(0.5)


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Have a function run in all processes."""
    CHECKS[function.__name__] = function
    return function


def rank() -> int:
    """Return the number of this process."""
    return distributed.get_rank()


def size() -> int:
    """Return the number of processes."""
    return distributed.get_world_size()


def optimizer(**leaves: tuple[Any, Any]) -> Any:
    """Return an optimizer of parameters that are drawn by a seed, and their gradients by another one."""
    named = []
    for name, (seed, grad) in leaves.items():
        value = torch.zeros(3, 2) if seed is None else drawn(seed)
        named.append((name.replace("__", "."), torch.nn.Parameter(value)))
        named[-1][1].grad = None if grad is None else drawn(grad)
    return torch.optim.SGD(named, lr=0.1)


def drawn(seed: int) -> torch.Tensor:
    """Return a tensor."""
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))


def found(check: LayoutCheck) -> dict[str, tuple[str, set[int]]]:
    """Return what leaves are taken for, and how often they count; the same in all processes."""
    every: list[Any] = [None] * size()
    distributed.all_gather_object(every, (check.ok, check.norm, check.norms, check.leaves, check.problems, str(check)))
    assert all(one == every[0] for one in every)
    return {leaf.name: (leaf.kind, leaf.counted) for leaf in check.leaves}


def norm_of(*seeds: int) -> float:
    """Return the norm of gradients in one process."""
    return torch.cat([drawn(seed).double() for seed in seeds]).norm().item()


@check
def copies() -> None:
    """Find copies right as they are, and change nothing."""
    opt = optimizer(a=(1, 2), b=(3, 4))
    before = [(p.detach().clone(), p.grad.clone()) for p in opt.param_groups[0]["params"]]
    seen = check_layout(opt, GLOBAL)
    assert seen.ok, seen
    assert found(seen) == {"grads[0]['a']": ("copy", {1}), "grads[0]['b']": ("copy", {1})}
    assert seen.norm == pytest.approx(norm_of(2, 4), rel=1e-12)
    assert seen.norms == pytest.approx([seen.norm] * size())
    seen.raise_if_wrong()
    after = [(p.detach(), p.grad) for p in opt.param_groups[0]["params"]]
    assert all(
        torch.equal(*pair) for one, two in zip(before, after, strict=True) for pair in zip(one, two, strict=True)
    )
    assert not opt.state
    attach(opt, GLOBAL).remove()  # it has no rule yet


@check
def stages_apart() -> None:
    """Tell a pipeline without all_reduce which leaves are missing."""
    opt = optimizer(**{f"layer{rank()}": (rank(), 10 + rank())})
    seen = check_layout(opt, GLOBAL)
    assert not seen.ok
    assert found(seen) == {f"grads[0]['layer{n}']": ("whole", {0, 1}) for n in range(size())}
    assert seen.norm == pytest.approx(norm_of(*range(10, 10 + size())), rel=1e-12)
    assert seen.norms == pytest.approx([norm_of(10 + n) for n in range(size())])
    assert "grads[0]['layer0']" in seen.problems[0]
    assert "give all_reduce=" in seen.problems[0]
    with pytest.raises(ValueError, match="NOT as in one process"):
        seen.raise_if_wrong()


@check
def stages_apart_by_leaf() -> None:
    """Find a rule of each leaf right there."""
    opt = optimizer(**{f"layer{rank()}": (rank(), 10 + rank())})
    seen = check_layout(opt, LEAF)
    assert seen.ok, seen
    assert found(seen) == {f"grads[0]['layer{n}']": ("whole", {1}) for n in range(size())}


@check
def stages_joined() -> None:
    """Find a pipeline right with all_reduce."""
    opt = optimizer(**{f"layer{rank()}": (rank(), 10 + rank())})
    seen = check_layout(opt, GLOBAL, distributed.group.WORLD)
    assert seen.ok, seen
    assert list(found(seen).values()) == [("whole", {1})] * size()


@check
def copies_counted_twice() -> None:
    """Name copies beside parts, where nobody says that they are copies."""
    opt = optimizer(copied=(1, 2), **{f"expert{rank()}": (10 + rank(), 20 + rank())})
    world = distributed.group.WORLD
    seen = check_layout(opt, GLOBAL, world)
    assert not seen.ok
    assert found(seen)["grads[0]['copied']"] == ("copy", {size()})
    assert found(seen)["grads[0]['expert0']"] == ("whole", {1})
    assert "grads[0]['copied'] count several times" in seen.problems[0]
    assert "shared=" in seen.problems[0]
    seen = check_layout(opt, GLOBAL, world, lambda path, leaf: path[1] == "copied")
    assert seen.ok, seen
    assert seen.norm == pytest.approx(norm_of(2, *range(20, 20 + size())), rel=1e-12)


@check
def parts() -> None:
    """Tell parts of one leaf from copies by their parameters."""
    opt = optimizer(a=(rank(), 10 + rank()), zeros=(None, 30 + rank()))
    seen = check_layout(opt, GLOBAL)
    assert not seen.ok
    names = found(seen)
    assert names["grads[0]['a']"] == ("part", {0, 1})
    assert names["grads[0]['zeros']"][0] == "part, or not averaged"
    seen = check_layout(optimizer(a=(rank(), 10 + rank())), GLOBAL, distributed.group.WORLD)
    assert seen.ok, seen
    seen = check_layout(optimizer(a=(rank(), 10 + rank())), LEAF, distributed.group.WORLD)
    assert seen.ok, seen
    seen = check_layout(optimizer(a=(rank(), 10 + rank())), LEAF)
    assert not seen.ok


@check
def addends() -> None:
    """Tell gradients that were never averaged by their parameters, and those of constant ones by the others."""
    seen = check_layout(optimizer(a=(1, 10 + rank()), zeros=(None, 30 + rank())), GLOBAL)
    assert not seen.ok
    assert {kind for kind, _ in found(seen).values()} == {"not averaged"}
    assert "average the gradients" in seen.problems[0]


@check
def another_group() -> None:
    """Count the copies of a part, and find a group right that has each once."""
    if size() == 2:
        return
    part, groups = rank() % 2, [distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    opt = optimizer(a=(part, 10 + part))
    seen = check_layout(opt, GLOBAL, distributed.group.WORLD)
    assert not seen.ok
    assert found(seen) == {"grads[0]['a']": ("copy of a part", {2})}
    seen = check_layout(opt, GLOBAL, groups[rank() // 2])
    assert seen.ok, seen
    assert [leaf.processes for leaf in seen.leaves] == [(0, 2), (1, 3)]


@check
def no_gradients() -> None:
    """Refuse to look where there are no gradients at all."""
    with pytest.raises(ValueError, match="after backward"):
        check_layout(optimizer(a=(1, None)), GLOBAL)
    seen = check_layout(optimizer(**{f"layer{rank()}": (rank(), 10 + rank() if rank() else None)}), GLOBAL)
    assert not seen.ok
    assert "grads[0]['layer0']" not in found(seen)


@check
def several_rules() -> None:
    """Look into chains and masks."""
    opt = optimizer(a=(1, 2), **{f"layer{rank()}": (rank(), 10 + rank())})
    assert not check_layout(opt, uc.chain(uc.by_value(-1, 1), GLOBAL)).ok
    assert check_layout(opt, uc.chain(uc.by_value(-1, 1), LEAF)).ok
    assert check_layout(opt, uc.by_value(-1, 1)).ok
    assert check_layout(opt, uc.masked(GLOBAL, lambda path, leaf: path[1] == "a")).ok
    assert not check_layout(opt, uc.masked(GLOBAL, lambda path, leaf: path[1] != "a")).ok
    assert check_layout(opt, uc.agc()).ok


@check
def rules_that_refuse() -> None:
    """Say what a rule refuses, in all processes."""
    opt = optimizer(**{f"layer{rank()}": (rank(), 10 + rank())})
    opt.param_groups[0]["params"][0]._fsdp_flattened = rank() == 0
    seen = check_layout(opt, GLOBAL)
    assert not seen.ok
    found(seen)
    assert "FSDP1" in str(seen)


@check
def another_rule() -> None:
    """Say that processes have different rules, in all of them."""
    opt = optimizer(**{f"layer{rank()}": (rank(), 10 + rank())})
    seen = check_layout(opt, uc.by_global_norm(1.0 + rank()), distributed.new_group())
    assert not seen.ok
    assert "use different rules" in " ".join(str(seen).split())


@check
def an_inner_optimizer() -> None:
    """Say that the optimizer inside of another is refused."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    made = optimizer(a=(1, 2), b=(3, 4), c=(5, 6), d=(7, 8)).param_groups[0]["params"]
    zero = ZeroRedundancyOptimizer(made, optimizer_class=torch.optim.SGD, lr=0.1)
    assert check_layout(zero, GLOBAL).ok
    seen = check_layout(zero.optim, GLOBAL)
    assert not seen.ok
    assert "attach to the outer one" in " ".join(str(seen).split())


@check
def numbers() -> None:
    """Compare half precision and sparse gradients, too."""
    p = torch.nn.Parameter(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16))
    p.grad = torch.randn(4, 2, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    with torch.no_grad():
        embedding.weight.fill_(1.0)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    seen = check_layout(torch.optim.SGD([("a", p), ("b", embedding.weight)]), GLOBAL)
    assert seen.ok, seen
    assert {kind for kind, _ in found(seen).values()} == {"copy"}


def right(layout: str, rule: str) -> None:
    """Assert that a layout of the table is right."""
    from on_layouts.layouts import KINDS

    made = KINDS[layout]()
    made.start()
    made.backward(0, "finite", False)
    seen = check_layout(
        optimizer_of(made.trained(), "finite", made.optimizer), RULES[rule].rule, made.all_reduce, made.shared_leaves
    )
    assert seen.ok, seen
    found(seen)


RIGHT = {
    f"{layout}, {rule}": partial(right, layout, rule)
    for layout, one in LAYOUTS.items()
    for rule in ("global", "largest", "agc", "adagc")
    if rule not in one.refused
}
TITLES = [(2, title) for title in CHECKS] + [(4, title) for title in (*CHECKS, *RIGHT)]


def main(count: str, number: str, file: str) -> None:
    """Run every check as one of the processes."""
    together = Together(int(number), int(count), file)
    together.run(CHECKS | RIGHT if count == "4" else CHECKS)
    together.end()


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, str]]]:
    """Run two processes and four, and return what went wrong in each."""
    calls = [[str(count), str(number)] for count in (2, 4) for number in range(count)]
    found = failures_in(tmp_path_factory, __file__, calls)
    return {2: found[:2], 4: found[2:]}


@pytest.mark.parametrize(("count", "title"), TITLES)
def test_it_says_what_is_wrong(failures: dict[int, list[dict[str, str]]], count: int, title: str) -> None:
    """All processes say the same, and the right thing."""
    found = [one[title] for one in failures[count] if title in one]
    assert not found, found[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
