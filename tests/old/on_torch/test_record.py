"""What `attach` records: with and without fused kernels and a loss scale, of leaves without a gradient, in processes.

This file is also the script of the processes: they compare, and write what went wrong for the tests to read.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_processes import failures_in, run_in_group
from torch import distributed

import uniclip as uc
from uniclip import insight
from uniclip.integrations.torch import attach

PROCESSES, STEPS = 2, 6
RULES: dict[str, Any] = {
    "global": uc.by_global_norm(0.5),
    "each leaf": uc.by_norm(0.3),
    "zclip": uc.zclip(warmup=2),
    "losses": uc.skip_spikes(warmup=2),
    "chain": uc.chain(uc.by_value(-0.3, 0.3), uc.by_norm(0.2), uc.by_global_norm(0.5)),
}
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Have a function run in every process."""
    CHECKS[function.__name__] = function
    return function


def batches() -> list[torch.Tensor]:
    """Return the batches of all processes together."""
    made = torch.Generator().manual_seed(0)
    return [torch.randn(8, 5, generator=made, dtype=torch.float64) * (1 + step % 3) for step in range(STEPS)]


def network() -> torch.nn.Module:
    """Return a small network, always with the same weights."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()


def train(
    net: Any, record: insight.Recorder | None, rule: Any, found: list[Any], scaler: Any = None, **options: Any
) -> None:
    """Train, and record."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, **options)
    handle = attach(optimizer, rule, record=record)
    for batch in found:
        optimizer.zero_grad()
        loss = (net(batch) ** 2).mean()
        (scaler.scale(loss) if scaler else loss).backward()
        handle.loss = loss.detach()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def by_hand(rule: Any) -> insight.Record:
    """Return the record of a loop by hand in one process."""
    net = network()
    params = list(net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    state = rule.init(params)
    with tempfile.TemporaryDirectory() as folder:
        with insight.Recorder(Path(folder, "run.jsonl"), leaves="all", rule=rule, params=params) as record:
            for batch in batches():
                optimizer.zero_grad()
                loss = (net(batch) ** 2).mean()
                loss.backward()
                grads = [p.grad for p in params]
                norms = insight.leaf_norms(grads)
                _, state, report = rule.update(grads, state, params, in_place=True, loss=loss.detach())
                record(report, loss=loss, leaves=norms)
                if report.skipped is None or not bool(report.skipped):
                    optimizer.step()
        return insight.read(record.path)


def same(found: insight.Record, wanted: insight.Record) -> None:
    """Compare the numbers of two records."""
    for column, values in wanted._asdict().items():
        if isinstance(values, np.ndarray):
            np.testing.assert_allclose(getattr(found, column), values, rtol=1e-6, err_msg=column)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("way", ["plain", "fused", "scaled", "fused and scaled"])
def test_as_by_hand(name: str, way: str, tmp_path: Path) -> None:
    """Norms, also of leaves, are those of gradients without a loss scale, whatever multiplies them."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if "scaled" in way else None
    with insight.Recorder(tmp_path / "run.jsonl", every=4, leaves="all") as record:
        train(network(), record, RULES[name], batches(), scaler, fused="fused" in way)
    same(insight.read(record.path), by_hand(RULES[name]))


def test_steps_that_a_loss_scale_skips(tmp_path: Path) -> None:
    """They are no steps of the rule, and have no line."""
    found = batches()
    found[2] = found[2] * torch.inf
    with insight.Recorder(tmp_path / "run.jsonl") as record:
        train(network(), record, uc.by_global_norm(0.5), found, torch.amp.GradScaler("cpu", init_scale=8.0))
    assert insight.read(record.path).finite.tolist() == [True] * (STEPS - 1)


def test_leaves_without_a_gradient(tmp_path: Path) -> None:
    """They have no norm, and the others keep their places."""
    net = network()
    net[0].weight.requires_grad_(requires_grad=False)
    with insight.Recorder(tmp_path / "run.jsonl", leaves="all") as record:
        train(net, record, uc.by_global_norm(0.5), batches()[:1])
    found = insight.read(record.path)
    np.testing.assert_allclose(found.leaves[0, 1:], by_hand(uc.by_global_norm(0.5)).leaves[0, 1:], rtol=1e-6)
    assert np.isnan(found.leaves[0, 0])
    assert found.sizes.tolist() == [20, 4, 8, 2]


def test_a_checkpoint_is_written_and_gone_on_from(tmp_path: Path) -> None:
    """``state_dict`` finds the steps in the file; a run that goes on from it drops the later ones."""
    path = tmp_path / "run.jsonl"
    net = network()
    with insight.Recorder(path) as record:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        attach(optimizer, uc.by_global_norm(0.5), record=record)
        for number, batch in enumerate(batches()):
            if number == 4:
                saved = optimizer.state_dict()
                assert insight.read(path).steps.tolist() == [1, 2, 3, 4]
            optimizer.zero_grad()
            (net(batch) ** 2).mean().backward()
            optimizer.step()
    assert insight.read(path).steps.tolist() == [1, 2, 3, 4, 5, 6]
    with insight.Recorder(path) as record:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        attach(optimizer, uc.by_global_norm(0.5), record=record)
        optimizer.load_state_dict(saved)
        record.resume(4)
        optimizer.step()
    assert insight.read(path).steps.tolist() == [1, 2, 3, 4, 5]


def test_wrong_arguments(tmp_path: Path) -> None:
    """What is no recorder is refused, and norms of leaves that are not all in this process."""
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(TypeError, match="record must be a recorder"):
        attach(optimizer, uc.by_global_norm(0.5), record="run.jsonl")  # type: ignore[arg-type]
    record = insight.Recorder(tmp_path / "run.jsonl", leaves=True)
    with pytest.raises(ValueError, match="record without leaves"):
        attach(optimizer, uc.by_global_norm(0.5), lambda array, op: array, record=record)


@check
def copies() -> None:
    """Under DistributedDataParallel the first process writes what one process would, and the others nothing."""
    for name in ("global", "each leaf", "zclip", "chain"):
        folder = [tempfile.mkdtemp()]
        distributed.broadcast_object_list(folder)
        path = Path(folder[0], f"{distributed.get_rank()}.jsonl")
        parts = [batch.chunk(PROCESSES)[distributed.get_rank()] for batch in batches()]
        with insight.Recorder(path, every=4, leaves="all") as record:
            train(torch.nn.parallel.DistributedDataParallel(network()), record, RULES[name], parts)
        distributed.barrier()
        assert [one.name for one in Path(folder[0]).iterdir()] == ["0.jsonl"], name
        if distributed.get_rank() == 0:
            zeros = {"losses": np.zeros(STEPS)}
            same(insight.read(path)._replace(**zeros), by_hand(RULES[name])._replace(**zeros))


@check
def parts() -> None:
    """Under FSDP2 the norms, also of leaves, are those of whole gradients."""
    from torch.distributed.fsdp import fully_shard

    for name in ("global", "each leaf", "zclip"):
        folder = [tempfile.mkdtemp()]
        distributed.broadcast_object_list(folder)
        path = Path(folder[0], f"{distributed.get_rank()}.jsonl")
        net: Any = network()
        fully_shard(net)
        pieces = [batch.chunk(PROCESSES)[distributed.get_rank()] for batch in batches()]
        with insight.Recorder(path, every=4, leaves="all") as record:
            train(net, record, RULES[name], pieces)
        distributed.barrier()
        assert [one.name for one in Path(folder[0]).iterdir()] == ["0.jsonl"], name
        if distributed.get_rank() == 0:
            zeros = {"losses": np.zeros(STEPS)}
            same(insight.read(path)._replace(**zeros), by_hand(RULES[name])._replace(**zeros))


def main(number: str, file: str) -> None:
    """Run every check as one of the processes, and write what went wrong."""
    run_in_group(CHECKS, number, PROCESSES, file)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Run the processes, and return what went wrong in each."""
    return failures_in(tmp_path_factory, __file__, [[str(number)] for number in range(PROCESSES)])


@pytest.mark.parametrize("title", CHECKS)
def test_the_first_process_writes(failures: list[dict[str, str]], title: str) -> None:
    """Every process finds what one process would."""
    found = [one[title] for one in failures if title in one]
    assert not found, found[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
