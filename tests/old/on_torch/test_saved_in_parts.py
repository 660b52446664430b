"""Runs that `torch.distributed.checkpoint` saves and other layouts go on from: two processes, then four, then one.

This file is also the script of the processes: they compare, and write what went wrong for the tests to read.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.distributed.checkpoint as dcp
from in_processes import failure, failures_in
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import uniclip as uc
from uniclip.integrations.torch import attach, memory

SIZES = (2, 4, 1)
"""How many processes take one part of the training after the other."""
STEPS = 4
"""How many steps each part has."""
OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


class Case(NamedTuple):
    """A training."""

    rule: Any
    optimizer: str = "adamw"
    tensors: bool = False
    """Whether four processes hold parts of the layers, not FSDP2's."""
    at_once: bool = True
    """Whether a checkpoint is there when `save` returns."""
    large: int = memory._LARGE


CASES = {
    "autoclip": Case(uc.autoclip(50, window=6)),
    "autoclip, sgd": Case(uc.autoclip(50, window=6), "sgd", at_once=False),
    "adagc": Case(uc.adagc(warmup=2, warmup_norm=0.5), "momentum"),
    "adagc, tensors": Case(uc.adagc(warmup=2, warmup_norm=0.5), "adamw", tensors=True),
    "adagc, sgd": Case(uc.adagc(warmup=2, warmup_norm=0.5), "sgd", tensors=True),
    "zclip": Case(uc.chain(uc.zclip(z=1.0, warmup=2), uc.by_global_norm(5.0)), "sgd", tensors=True, at_once=False),
    "spam": Case(uc.spam(factor=2.0, decay=0.5, warmup=1), "momentum"),
    "spam, as tensors": Case(uc.spam(factor=2.0, decay=0.5, warmup=1), tensors=True, at_once=False, large=1),
    "no memory": Case(uc.by_global_norm(0.5)),
}


class Run(NamedTuple):
    """What is trained, and saved."""

    net: Any
    optimizer: Any
    handle: Any

    def state(self) -> dict[str, Any]:
        """Return what `torch.distributed.checkpoint` takes."""
        model, optimizer = get_model_state_dict(self.net), get_optimizer_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "clipping": self.handle}


def size() -> int:
    """Return the number of processes."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def made(case: Case) -> Run:
    """Return the same network, as so many processes hold it, with a rule attached."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    if split_examples(case):
        fully_shard(net, mesh=init_device_mesh("cpu", (size(),)))
    elif size() > 1:
        parallelize_module(net, init_device_mesh("cpu", (size(),)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = OPTIMIZERS[case.optimizer](net.named_parameters())
    return Run(net, optimizer, attach(optimizer, case.rule))


def split_examples(case: Case) -> bool:
    """Whether each process sees other examples."""
    return size() == 2 or (size() == 4 and not case.tensors)


def train(case: Case, run: Run, steps: range) -> None:
    """Take some steps."""
    for step in steps:
        run.optimizer.zero_grad()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)) * (1 + step % 3)
        share = x.chunk(size())[distributed.get_rank()] if split_examples(case) else x
        (run.net(share) ** 2).mean().backward()
        run.optimizer.step()
    run.optimizer.zero_grad()


def part(title: str, number: int, folder: Path) -> None:
    """Go on from the part of the training before, and save for the next; the last one compares."""
    case = CASES[title]
    memory._LARGE = case.large
    run = made(case)
    place = folder / title
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*uc[.]")
        if number > 0:
            state = run.state()
            dcp.load(state, checkpoint_id=place / str(number))
            set_model_state_dict(run.net, state["model"])
            set_optimizer_state_dict(run.net, run.optimizer, state["optimizer"])
        train(case, run, range(number * STEPS, (number + 1) * STEPS))
        if number < len(SIZES) - 1 and case.at_once:
            dcp.save(run.state(), checkpoint_id=place / str(number + 1))
        elif number < len(SIZES) - 1:
            apart = distributed.new_group()  # the other thread's collectives are not to meet those of the training
            later = dcp.async_save(run.state(), checkpoint_id=place / str(number + 1), process_group=apart)
            train(case, run, range(2))  # what is saved is what it was
            later.result()
        else:
            compare(case, run)


def compare(case: Case, run: Run) -> None:
    """Compare with a training that was never stopped, in one process."""
    whole, forgetful = made(case), made(case)
    train(case, whole, range(len(SIZES) * STEPS))
    for name in ("net", "handle"):
        found, wanted = (leaves(getattr(one, name)) for one in (run, whole))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    if case.rule.memory:
        train(case, forgetful, range(2 * STEPS, 3 * STEPS))
        with pytest.raises(AssertionError):
            torch.testing.assert_close(leaves(forgetful.handle), leaves(whole.handle), rtol=1e-5, atol=1e-6)


def stages(folder: Path) -> None:
    """Save the states of a pipeline's stages under names of their own; alike, one would be lost."""
    rank = distributed.get_rank()

    def stage() -> tuple[Any, Any]:
        weight = torch.nn.Parameter(torch.ones(2 + rank))
        optimizer = torch.optim.SGD([(f"layers.{rank}", weight)], lr=0.1)
        return weight, attach(optimizer, uc.adagc())

    weight, handle = stage()
    weight.grad = torch.full_like(weight, 1.0 + rank)
    handle._optimizer.step()
    dcp.save({f"clipping {rank}": handle}, checkpoint_id=folder / "stages")
    again = stage()[1]
    dcp.load({f"clipping {rank}": again}, checkpoint_id=folder / "stages")
    torch.testing.assert_close(again.state, handle.state, rtol=0, atol=0)
    dcp.save({"clipping": handle}, checkpoint_id=folder / "alike")
    again, error = stage()[1], ""
    try:
        dcp.load({"clipping": again}, checkpoint_id=folder / "alike")
    except ValueError as caught:
        error = str(caught)
    assert ("that of other leaves" in error) == (rank == 1)


def leaves(of: Any) -> list[torch.Tensor]:
    """Return weights, or the state of a rule."""
    return [p.detach() for p in of.parameters()] if hasattr(of, "parameters") else optree.tree_leaves(of.state)


def main(number: str, file: str) -> None:
    """Take part in each part of the trainings that has so many processes, and write what went wrong."""
    torch.set_num_threads(1)
    folder, failures = Path(file).parent, {}
    for which, processes in enumerate(SIZES):
        if int(number) < processes:
            if processes > 1:
                init = f"file://{folder}/init{processes}"
                limit = timedelta(seconds=60)
                distributed.init_process_group(
                    "gloo", init_method=init, rank=int(number), world_size=processes, timeout=limit
                )
            for title in CASES:
                failures |= failure(f"{title}, {processes}", partial(part, title, which, folder))
            if processes == SIZES[0]:
                failures |= failure("stages", partial(stages, folder))
            if processes > 1:
                distributed.destroy_process_group()
    Path(file).write_text(json.dumps(failures))


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Run the processes, and return what went wrong in each."""
    return failures_in(tmp_path_factory, __file__, [[str(number)] for number in range(max(SIZES))])


@pytest.mark.parametrize("processes", SIZES)
@pytest.mark.parametrize("title", CASES)
def test_goes_on(failures: list[dict[str, str]], title: str, processes: int) -> None:
    """What one number of processes has saved another one goes on from, as if there had always been one."""
    key = f"{title}, {processes}"
    found = [one[key] for one in failures if key in one]
    assert not found, found[0]


def test_stages(failures: list[dict[str, str]]) -> None:
    """The stages of a pipeline go on, each from its own state, and a state of another one's leaves is refused."""
    found = [one["stages"] for one in failures if "stages" in one]
    assert not found, found[0]


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def alone(rule: Any, optimizer: str = "adamw") -> tuple[Case, Run]:
    """Return a training in this process."""
    case = Case(rule, optimizer)
    return case, made(case)


def clipping_warnings(run: Callable[[], Any]) -> list[str]:
    """Return what uniclip warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert all(one.filename == __file__ for one in caught if "uc." in str(one.message))
    return [str(one.message) for one in caught if "uc." in str(one.message)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_gets_its_state(optimizer: str) -> None:
    """To ask for its state is no step for the rule, whenever it is asked for."""
    case, run = alone(uc.autoclip(50, window=6), optimizer)
    for steps in (0, 3):
        before = run.handle.numbers()
        run.handle.loss = 1.0
        assert not clipping_warnings(lambda: get_optimizer_state_dict(run.net, run.optimizer))
        assert run.handle.numbers() == before
        assert run.handle.loss == 1.0
        assert f" {steps} steps" in repr(run.handle)
        assert not clipping_warnings(lambda: train(case, run, range(3)))
    assert run.handle.state.count.item() == 6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_forgotten(optimizer: str, steps: int) -> None:
    """An optimizer that gets its state back without the rule's is warned of, once, before a step."""
    case, run = alone(uc.autoclip(50, window=6), optimizer)
    _, other = alone(uc.autoclip(50, window=6), optimizer)
    train(case, run, range(3))
    train(case, other, range(steps))
    saved = get_optimizer_state_dict(run.net, run.optimizer)
    assert not clipping_warnings(lambda: set_optimizer_state_dict(other.net, other.optimizer, saved))
    (said,) = clipping_warnings(lambda: train(case, other, range(2)))
    assert "has no state of uc.Rule(" in said
    assert '{"optimizer": ..., "clipping": handle}' in said


@pytest.mark.parametrize("forget", [False, True])
def test_loaded_in_place(tmp_path: Path, forget: bool) -> None:
    """The tensors of an optimizer may be loaded where they are, which nobody tells the rule."""
    case, run = alone(uc.autoclip(50, window=6))
    train(case, run, range(3))
    dcp.save(run.state(), checkpoint_id=tmp_path)
    _, other = alone(case.rule)
    state = other.state()
    if forget:
        del state["clipping"]
    dcp.load(state, checkpoint_id=tmp_path)
    said = clipping_warnings(lambda: train(case, other, range(2)))
    assert [text.partition(",")[0] for text in said] == [
        "the optimizer goes on from another state than it began with"
    ] * forget


class Begun(torch.optim.SGD):
    """An optimizer that begins with a state, and does not count its steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for p in self.param_groups[0]["params"]:
            self.state[p]["average"] = torch.zeros_like(p)


@pytest.mark.parametrize("make", [torch.optim.Adagrad, Begun])
def test_a_state_before_the_first_step(make: Any) -> None:
    """An optimizer that begins with a state has forgotten nothing."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = make([weight])

    def step() -> None:
        attach(optimizer, uc.autoclip())
        weight.grad = torch.ones(2)
        optimizer.step()

    assert not clipping_warnings(step)


def test_steps_that_a_scaler_skips() -> None:
    """Neither an optimizer nor its rule sees them, so that both begin together."""
    _, run = alone(uc.autoclip(50, window=6))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def steps() -> None:
        for factor in (float("inf"), 1.0, 1.0):
            run.optimizer.zero_grad()
            scaler.scale(factor * (run.net(torch.ones(8, 6)) ** 2).mean()).backward()
            scaler.step(run.optimizer)
            scaler.update()

    assert not clipping_warnings(steps)
    assert run.handle.state.count.item() == 2


def test_attached_again() -> None:
    """A rule that is attached anew has been warned of, once."""
    case, run = alone(uc.autoclip(50, window=6))
    train(case, run, range(2))
    run.handle.remove()
    (said,) = clipping_warnings(lambda: attach(run.optimizer, case.rule))
    assert "starts over" in said
    assert not clipping_warnings(lambda: train(case, run, range(2)))


def test_another_rule(tmp_path: Path) -> None:
    """The state of another rule is refused by name, and nothing has changed."""
    case, run = alone(uc.adagc(warmup=2))
    train(case, run, range(3))
    dcp.save({"clipping": run.handle}, checkpoint_id=tmp_path)
    _, other = alone(uc.norm_growth())
    dcp.load({"clipping": other.handle}, checkpoint_id=tmp_path)
    assert other.handle.state.count.item() == 3
    for rule, error, message in (
        (uc.Rule(uc.limits.Ema(1.05, 0.98)), ValueError, r"another rule than uc\.Rule.*load_state_dict\(\{\}\)"),
        (uc.autoclip(), dcp.CheckpointException, r"Missing key in checkpoint state_dict: clipping\.state\.norms"),
    ):
        _, third = alone(rule)
        before = third.handle.state
        with pytest.raises(error, match=message):
            dcp.load({"clipping": third.handle}, checkpoint_id=tmp_path)
        assert third.handle.state is before


def test_large_states() -> None:
    """They stay tensors, of their own, and are numbers for JSON only."""
    weight = torch.nn.Parameter(torch.ones(300, 300))
    handle = attach(torch.optim.SGD([("w", weight)], lr=0.1), uc.spam())
    saved = handle.state_dict()
    sizes = {name: value.numel() for name, value in saved["state"].items() if isinstance(value, torch.Tensor)}
    assert sorted(sizes.values()) == [90_000]
    for name in sizes:
        saved["state"][name].fill_(7.0)
    assert all(float(tensor.max()) == 0 for tensor in optree.tree_leaves(handle.state))
    numbers = json.loads(json.dumps(handle.numbers()))
    assert numbers["state"].keys() == saved["state"].keys()
    handle.load_state_dict(saved)
    assert any(float(tensor.max()) == 7 for tensor in optree.tree_leaves(handle.state))
    handle.load_state_dict(numbers)
    assert all(float(tensor.max()) == 0 for tensor in optree.tree_leaves(handle.state))


if __name__ == "__main__":
    main(*sys.argv[1:])
