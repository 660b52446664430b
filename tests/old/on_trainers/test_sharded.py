"""The trainers where processes hold parts: two train under FSDP2, tensor parallelism and FSDP1 as one would.

This file is also the script of the processes: they compare, and write what went wrong for the tests to read.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from in_processes import failures_in, run_in_group
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as Lightning
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import Trainer, TrainingArguments

import uniclip as uc
from uniclip.integrations import transformers
from uniclip.integrations.lightning import ClipGradients as ForLightning
from uniclip.integrations.torch import attach, memory
from uniclip.integrations.transformers import ClipGradients as ForTransformers

PROCESSES = 2
STEPS = 8
RULES: dict[str, Any] = {
    "global": uc.by_global_norm(0.05),
    "each leaf": uc.by_norm(0.02),
    "agc": uc.agc(0.01),
    "autoclip": uc.autoclip(50),
    "adagc": uc.adagc(warmup=2, warmup_norm=0.05),
    "skip NaN": uc.by_global_norm(0.05, nonfinite="skip"),
}
LEARNING = ("autoclip", "adagc")
SOME = ("global", "adagc", "skip NaN")
"""One norm, one for each leaf that is remembered, and steps left out; every rule is under Lightning's FSDP2."""
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Have a function run in every process."""
    CHECKS[function.__name__] = function
    return function


def rank() -> int:
    """Return the number of this process."""
    return distributed.get_rank()


def all_reduce(array: torch.Tensor, op: str) -> torch.Tensor:
    """Join arrays as the documentation says."""
    distributed.all_reduce(array, getattr(distributed.ReduceOp, op.upper()))
    return array


class Net(torch.nn.Module):
    """A small network that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))

    def forward(self, x: Any, factor: Any) -> dict[str, Any]:
        """Multiply the mean square of the outputs."""
        return {"loss": (factor * self.layers(x) ** 2).mean()}


def batches(name: str) -> list[dict[str, torch.Tensor]]:
    """Return what all processes train on together, the factor of one example being NaN if the rule is to skip it."""
    made = torch.Generator().manual_seed(1)
    found = [{"x": 3 * torch.randn(8, 6, generator=made), "factor": torch.ones(8, 1)} for _ in range(STEPS)]
    if "NaN" in name:
        found[3]["factor"][7] = math.nan
    return found


def share(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the examples of this process."""
    return {key: value.chunk(PROCESSES)[rank()] for key, value in batch.items()}


def optimizer_of(net: Any) -> Any:
    """Make an optimizer."""
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def by_hand(name: str, epochs: int = 1) -> list[torch.Tensor]:
    """Return the weights that one process finds without a trainer."""
    net = Net()
    optimizer, rule = optimizer_of(net), RULES[name]
    params = list(net.parameters())
    state = rule.init(params)
    for batch in batches(name) * epochs:
        optimizer.zero_grad()
        net(**batch)["loss"].backward()
        _, state, report = rule.update([p.grad for p in params], state, params, in_place=True)
        if report.skipped is None or not bool(report.skipped):
            optimizer.step()
    return [p.detach() for p in params]


def same(net: Any, wanted: list[torch.Tensor], *, parts: bool = True) -> None:
    """Assert that a network in parts, or one of several copies, has the weights of one in one process."""
    found = [p.detach() for p in net.parameters()]
    assert all(isinstance(p, DTensor) == parts for p in found)
    torch.testing.assert_close([p.full_tensor() if parts else p for p in found], wanted, rtol=0, atol=1e-6)


def same_flat(net: Any, wanted: list[torch.Tensor]) -> None:
    """Assert the same of one under FSDP1."""
    with FullyShardedDataParallel.summon_full_params(net):
        torch.testing.assert_close([p.detach() for p in net.parameters()], wanted, rtol=0, atol=1e-6)


def common_folder() -> Path:
    """Return a new folder that all processes know."""
    found = [tempfile.mkdtemp() if rank() == 0 else None]
    distributed.broadcast_object_list(found)
    return Path(str(found[0]))


@contextmanager
def warned(message: str = "") -> Iterator[None]:
    """Assert that uniclip warns by a message, or not at all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(one.message) for one in caught if "uc.Rule" in str(one.message)]
    assert len(said) == bool(message), said
    assert message in "".join(said)


class Module(LightningModule):
    """The network, cut up as Lightning's documentation says."""

    def __init__(self, *, own: bool = True) -> None:
        super().__init__()
        self.net, self._own = Net(), own

    def configure_model(self) -> None:
        """Cut it up."""
        if not self._own or any(isinstance(p, DTensor) for p in self.parameters()):
            return
        tensor, data = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        if tensor.size() > 1:
            parallelize_module(self.net.layers, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        else:
            fully_shard(self.net, mesh=data)

    def training_step(self, batch: Any, _: int) -> Any:
        """Return the loss."""
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        """Make the optimizer."""
        return optimizer_of(self.net)


def fit(name: str, strategy: Any, callback: Any = None, *, epochs: int = 1, cut: bool = True, path: Any = None) -> Any:
    """Train with Lightning; return the module and the trainer."""
    module = Module(own=isinstance(strategy, ModelParallelStrategy))
    trainer = Lightning(
        accelerator="cpu",
        devices=PROCESSES,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[callback or ForLightning(RULES[name])],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    found = [share(batch) if cut else batch for batch in batches(name)]
    trainer.fit(module, torch.utils.data.DataLoader(found, batch_size=None), ckpt_path=path)
    return module, trainer


def lightning(name: str, data: int) -> None:
    """Assert that Lightning's ModelParallelStrategy trains as one process does."""
    strategy = ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=PROCESSES // data)
    module, trainer = fit(name, strategy, cut=data > 1)
    same(module.net, by_hand(name))
    assert trainer.callback_metrics["clip/norm"] > 0


def lightning_resumed(name: str, *, several_files: bool) -> None:
    """Assert that a fit goes on from a checkpoint, which holds the rule's state, and that it is needed."""

    def strategy() -> Any:
        return ModelParallelStrategy(PROCESSES, 1, save_distributed_checkpoint=several_files)

    path = common_folder() / "half.ckpt"
    with warned():
        fit(name, strategy())[1].save_checkpoint(path)
        same(fit(name, strategy(), epochs=2, path=path)[0].net, by_hand(name, epochs=2))
    if several_files:
        if rank() == 0:
            saved = torch.load(path / "meta.pt", weights_only=False)
            del saved["uniclip"]
            torch.save(saved, path / "meta.pt")
        distributed.barrier()
        with warned("has no state of uc.Rule"):
            module, _ = fit(name, strategy(), epochs=2, path=path)
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            same(module.net, by_hand(name, epochs=2))


for name in RULES:
    CHECKS[f"Lightning, FSDP2, {name}"] = lambda name=name: lightning(name, PROCESSES)
for name in SOME:
    CHECKS[f"Lightning, tensors, {name}"] = lambda name=name: lightning(name, 1)
for name in LEARNING:
    for several_files in (False, True):
        CHECKS[f"Lightning, resumed, {name}, {several_files}"] = lambda name=name, several_files=several_files: (
            lightning_resumed(name, several_files=several_files)
        )


def in_fabric(name: str, *, path: Path | None = None, save: Path | None = None) -> torch.nn.Module:
    """Train under Fabric as its documentation says, from a checkpoint or to one, and return the network."""

    def cut(net: Any, mesh: Any) -> Any:
        return fully_shard(net, mesh=mesh["data_parallel"])

    strategy = FabricModelParallel(cut, data_parallel_size=PROCESSES, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=PROCESSES, strategy=strategy)
    fabric.launch()
    net = fabric.setup_module(Net())
    optimizer = fabric.setup_optimizers(optimizer_of(net))
    handle = attach(optimizer, RULES[name])
    state: dict[str, Any] = {"model": net, "optimizer": optimizer, "clipping": {}}
    if path is not None:
        fabric.load(path, state)
        handle.load_state_dict(state["clipping"])
    for batch in batches(name):
        optimizer.zero_grad()
        fabric.backward(net(**share(batch))["loss"])
        optimizer.step()
    if save is not None:
        fabric.save(save, state | {"clipping": handle.state_dict()})
    return net


@check
def fabric() -> None:
    """Clip under Fabric as in one process, and go on from a checkpoint."""
    for name in LEARNING:
        path = common_folder() / "half.ckpt"
        with warned():
            same(in_fabric(name, save=path), by_hand(name))
            same(in_fabric(name, path=path), by_hand(name, epochs=2))


@check
def lightning_copies() -> None:
    """Clip whole gradients as they are."""
    for name in LEARNING:
        same(fit(name, "ddp")[0].net, by_hand(name), parts=False)


class OnCpu(FSDPStrategy):
    """Lightning and FSDP1 want an accelerator, if not told otherwise."""

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


@check
def lightning_fsdp1() -> None:
    """Refuse FSDP1 without ``all_reduce``; with it clip right, and go on from a checkpoint."""
    with pytest.raises(ValueError, match="FSDP1"):
        fit("global", OnCpu())
    for name in ("global", "autoclip"):
        path, callback = common_folder() / "half.ckpt", ForLightning(RULES[name], all_reduce=all_reduce)
        with warned():
            _, half = fit(name, OnCpu(state_dict_type="sharded"), callback)
            same_flat(half.strategy.model, by_hand(name))
            half.save_checkpoint(path)
            _, rest = fit(name, OnCpu(state_dict_type="sharded"), callback, epochs=2, path=path)
            same_flat(rest.strategy.model, by_hand(name, epochs=2))


@contextmanager
def accelerate_on_cpu(*, shards: bool = True) -> Iterator[None]:
    """Have Accelerate take two processes on CPUs for what it shards on, which are only accelerators."""
    real = PartialState.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if shards and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.device = DistributedType.MULTI_GPU, torch.device("cpu")

    environ = dict(os.environ)
    try:
        PartialState.__init__ = made
        yield
    finally:
        PartialState.__init__ = real
        os.environ.clear()
        os.environ.update(environ)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def accelerated(name: str, first: str, *, resume: bool = False) -> None:
    """Assert that Accelerate under FSDP2 trains as one process does, and goes on from what it saved."""
    folder = common_folder()
    for part in ("first", "second") if resume else ("all",):
        with accelerate_on_cpu(), warned():
            accelerator, net = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)), Net()
            inside = optimizer_of(net)
            handle = attach(inside, RULES[name]) if first == "attach" else None
            model, optimizer = accelerator.prepare(net, inside)
            assert accelerator.is_fsdp2
            handle = handle or attach(optimizer, RULES[name])
            accelerator.register_for_checkpointing(handle)
            if part == "second":
                accelerator.load_state(str(folder))
            for batch in batches(name):
                accelerator.backward(model(**share(batch))["loss"])
                optimizer.step()
                optimizer.zero_grad()
            if part == "first":
                accelerator.save_state(str(folder))
            else:
                same(model, by_hand(name, epochs=1 + resume))


class Ordered(Trainer):
    """A Trainer that takes the examples in their order."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


def train(name: str, folder: Path, version: int, *, epochs: int = 1, resume: Any = None, all_reduce: Any = None) -> Any:
    """Train with the Trainer of Hugging Face under a version of FSDP, or none, and return it."""
    net = Net()
    sharding = {"version": version, "state_dict_type": "SHARDED_STATE_DICT", "sync_module_states": False}
    found = batches(name)
    examples = [{key: value[i] for key, value in batch.items()} for batch in found for i in range(8)]
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=8 // PROCESSES,
        num_train_epochs=epochs,
        lr_scheduler_type="constant",
        learning_rate=0.1,
        optim="sgd",
        optim_args="momentum=0.9",
        weight_decay=0.0,
        remove_unused_columns=False,
        logging_steps=4,
        save_strategy="steps",
        save_steps=STEPS,
        report_to=[],
        disable_tqdm=True,
        fsdp=version > 0,
        fsdp_config=sharding if version else None,
    )
    callback = ForTransformers(RULES[name], all_reduce=all_reduce)
    trainer = Ordered(net, arguments, train_dataset=examples, callbacks=[callback])  # type: ignore[arg-type]
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def transformed(name: str, *, resume: bool = False) -> None:
    """Assert that the Trainer under FSDP2 trains as one process does, and goes on from a checkpoint."""
    folder = common_folder()
    with accelerate_on_cpu(), warned():
        trainer = train(name, folder, 2)
        assert trainer.accelerator.is_fsdp2
        same(trainer.model, by_hand(name))
        if resume:
            again = train(name, folder, 2, epochs=2, resume=folder / f"checkpoint-{STEPS}")
            same(again.model, by_hand(name, epochs=2))


for name in SOME:
    CHECKS[f"Accelerate, {name}"] = lambda name=name: accelerated(name, "prepare")
    CHECKS[f"Hugging Face, {name}"] = lambda name=name: transformed(name)
for name in LEARNING:
    CHECKS[f"Accelerate, attached first, {name}"] = lambda name=name: accelerated(name, "attach")
    CHECKS[f"Accelerate, resumed, {name}"] = lambda name=name: accelerated(name, "prepare", resume=True)
    CHECKS[f"Hugging Face, resumed, {name}"] = lambda name=name: transformed(name, resume=True)


@check
def hugging_face_copies() -> None:
    """Clip whole gradients as they are."""
    for name in LEARNING:
        with accelerate_on_cpu(shards=False):
            trainer = train(name, common_folder(), 0)
            same(trainer.model, by_hand(name), parts=False)


@check
def hugging_face_fsdp1() -> None:
    """Refuse FSDP1 without ``all_reduce``, and clip right with it."""
    with accelerate_on_cpu(), pytest.raises(ValueError, match="FSDP1"):
        train("global", common_folder(), 1)
    for name in ("global", "autoclip"):
        with accelerate_on_cpu():
            trainer = train(name, common_folder(), 1, all_reduce=all_reduce)
            same_flat(trainer.model_wrapped, by_hand(name))


@check
def states_in_parts() -> None:
    """Save a state as large as the model whole with Lightning, and refuse it where one process alone would write it."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    optimizer = optimizer_of(Net())
    handle = attach(optimizer, RULES["adagc"])
    numbers = handle.numbers()
    handle.state = optree.tree_map(
        lambda t: distribute_tensor(t, mesh, [Shard(0) if t.ndim else Replicate()]), handle.state
    )
    assert handle.numbers() == numbers
    checkpoint: dict[str, Any] = {"optimizer_states": [{}]}
    callback = ForLightning(RULES["adagc"])
    callback.handles, callback._numbers = [handle], [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_LARGE", 1)
        callback.on_save_checkpoint(None, None, checkpoint)
        saved = checkpoint["uniclip"][0]["state"]
        assert type(saved["averages"]) is torch.Tensor
        assert saved["averages"].tolist() == numbers["state"]["averages"]
        patch.setattr(transformers, "attached", lambda *_: handle)
        wrapped = SimpleNamespace(accelerator_state=SimpleNamespace(distributed_type=DistributedType.FSDP))
        with pytest.raises(ValueError, match="cannot hold it"):
            ForTransformers(RULES["adagc"]).on_train_begin(None, None, None, optimizer=wrapped)
    attach(optimizer, RULES["adagc"])  # it is free again


def main(number: str, file: str) -> None:
    """Run every check as one of the processes, and write what went wrong."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    known = {"RANK": number, "LOCAL_RANK": number, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests"}
    known |= {"WORLD_SIZE": str(PROCESSES), "LOCAL_WORLD_SIZE": str(PROCESSES)}
    os.environ.update(known, MASTER_ADDR="localhost", MASTER_PORT="0")  # nobody listens there
    run_in_group(CHECKS, number, PROCESSES, file)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Run the processes, and return what went wrong in each."""
    return failures_in(tmp_path_factory, __file__, [[str(number)] for number in range(PROCESSES)])


@pytest.mark.parametrize("title", CHECKS)
def test_as_in_one_process(failures: list[dict[str, str]], title: str) -> None:
    """Every process finds what one process would."""
    found = [one[title] for one in failures if title in one]
    assert not found, found[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
