"""The layouts of the table, as real processes run them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from on_layouts.models import BAD, PROCESSES, SPOILT, TOKENS, WIDTH, Net, batch, first, loss_of, made
from torch import distributed, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

ABSENT = 1
"""The process that has no gradients in some cases."""


def gathered(mine: dict[str, Any]) -> dict[str, Any]:
    """Return what all processes have."""
    every: list[Any] = [None] * PROCESSES
    distributed.all_gather_object(every, mine)
    return {name: one for theirs in every for name, one in theirs.items()}


class OneProcess:
    """The whole model, and how it is trained; others change parts of this."""

    experts = ""
    shared = False
    """Whether what spoils a step is the loss of one share of the batch."""
    optimizer: Any = torch.optim.SGD

    def __init__(self, *, empty: bool = False) -> None:
        self.rank, self.empty = distributed.get_rank(), empty
        self.placements: dict[str, Any] = {}
        self.net: Any = self.made()

    def made(self) -> Any:
        """Return the model."""
        return made(self.experts)

    @property
    def shares(self) -> list[int]:
        """Return the shares of a batch that this process takes."""
        return list(range(PROCESSES))

    @property
    def all_reduce(self) -> Any:
        """Return what joins parts."""
        return None

    shared_leaves: Any = None

    def named(self) -> dict[str, Any]:
        """Return the parameters of this process."""
        return dict(self.net.named_parameters())

    def trained(self) -> Any:
        """Return what an optimizer gets: the parameters, with their names."""
        return list(self.named().items())

    def start(self) -> None:
        """Set the first weights."""
        for name, p in self.named().items():
            with torch.no_grad():
                p.copy_(self.part(name, first(self.experts)[name], p))
            p.grad = None

    def part(self, name: str, whole: torch.Tensor, like: Any) -> Any:
        """Return the part of a tensor that this process has."""
        if isinstance(like, DTensor):
            return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        return whole

    def backward(self, step: int, case: str, bad: bool) -> Any:
        """Leave the gradients of a step in the parameters, and return the loss."""
        tokens, wanted = batch(step, self.shares)
        unused = case == "none" and self.shared and ABSENT in self.shares
        loss = loss_of(self.net(tokens, unused), wanted, step)
        (loss * (BAD[case] if bad and self.shared and ABSENT in self.shares else 1.0)).backward()
        return loss

    def spoil(self, value: float) -> None:
        """Make one entry of the gradients another one."""
        name = SPOILT[self.experts]
        if name in self.named():
            p = self.named()[name]
            mark = torch.zeros(first(self.experts)[name].shape)
            mark.view(-1)[-1] = 1
            here, grad = (t.to_local() if isinstance(t, DTensor) else t for t in (self.part(name, mark, p), p.grad))
            grad[here > 0] = value

    def absent(self, name: str, p: Any) -> bool:
        """Whether this process has no gradient of a parameter in some cases, as all that hold this part of it."""
        if not isinstance(p, DTensor):
            return self.alone(name) and self.rank == ABSENT
        where = (p.device_mesh.mesh == ABSENT).nonzero()
        split = [n for n, placement in enumerate(self.placements[name]) if hasattr(placement, "dim")]
        here = p.device_mesh.get_coordinate()
        return len(where) > 0 and bool(split) and all(here[n] == where[0, n] for n in split)

    def alone(self, name: str) -> bool:
        """Whether no other process has a plain parameter."""
        return False

    def drop(self) -> None:
        """Leave a process without gradients."""
        grads = {name: p.grad for name, p in self.named().items()}
        self.placements |= {name: grad.placements for name, grad in grads.items() if isinstance(grad, DTensor)}
        for name, p in self.named().items():
            if self.absent(name, p):
                p.grad = None

    def masks(self) -> dict[str, Any]:
        """Return where there are gradients in the case of a process without, ``None`` for leaves that have none."""
        mine: dict[str, Any] = {}
        for name, p in self.named().items():
            if isinstance(p, DTensor):
                mask = torch.ones_like(p.detach())
                mask.to_local().fill_(not self.absent(name, p))
                mine[name] = mask.full_tensor()
            elif self.absent(name, p):
                mine[name] = None
        return gathered(mine)

    def path(self, path: Any) -> Any:
        """Return a path of a report with the full name of its parameter."""
        return path

    def whole(self, name: str, tensor: Any) -> torch.Tensor:
        """Return all of a tensor."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights, whole, that this process has a part of."""
        return {name: self.whole(name, p.detach()).clone() for name, p in self.named().items()}


class DataParallel(OneProcess):
    """Copies."""

    shared = True

    def made(self) -> Any:
        return nn.parallel.DistributedDataParallel(super().made(), find_unused_parameters=True)

    @property
    def shares(self) -> list[int]:
        return [self.rank]

    def named(self) -> dict[str, Any]:
        return dict(self.net.module.named_parameters())


class Zero(DataParallel):
    """Copies, and an optimizer that splits its states; it knows no names."""

    optimizer = staticmethod(
        lambda groups, **options: ZeroRedundancyOptimizer(
            groups[0]["params"], optimizer_class=torch.optim.SGD, **options
        )
    )

    def trained(self) -> Any:
        return list(self.named().values())

    def path(self, path: Any) -> Any:
        return (path[0], list(self.named())[path[1]]) if len(path) > 1 else path


class FullySharded(OneProcess):
    """Parts, as DTensors."""

    def mesh(self) -> Any:
        """Return the mesh."""
        return init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("dp",))

    def made(self) -> Any:
        net, mesh = super().made(), self.mesh()
        for layer in (net.up, net.down, net.head):
            fsdp.fully_shard(layer, mesh=mesh)
        return fsdp.fully_shard(net, mesh=mesh)

    @property
    def shares(self) -> list[int]:
        return [self.rank]


class Hybrid(FullySharded):
    """Parts, which two processes each have."""

    def mesh(self) -> Any:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def tensor_parallel(net: Any, mesh: Any) -> Any:
    """Split a model by its layers' features, and between them by the sequence."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(net, mesh, plan)


class TensorParallel(OneProcess):
    """Parts along several axes, and partial sums."""

    def made(self) -> Any:
        return tensor_parallel(super().made(), init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("tp",)))


class TensorParallelSharded(OneProcess):
    """Parts of parts."""

    def made(self) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = tensor_parallel(super().made(), mesh["tp"])
        for layer in (net.up, net.down, net.head):
            fsdp.fully_shard(layer, mesh=mesh["dp"])
        return fsdp.fully_shard(net, mesh=mesh["dp"])

    @property
    def shares(self) -> list[int]:
        half = self.rank // 2
        return [2 * half, 2 * half + 1]


class Stage(nn.Module):
    """Some layers of the model, one after the other; their names are those of the whole."""

    def __init__(self, net: Net, names: list[str]) -> None:
        super().__init__()
        self.names = names
        for name in names:
            setattr(self, name, getattr(net, name))

    def forward(self, x: Any) -> Any:
        """Return what the next stage gets."""
        for name in self.names:
            x = getattr(self, name)(x)
            x = torch.tanh(x) if name == "up" else x
        return x


INPUTS = {"norm": WIDTH, "up": WIDTH, "down": 2 * WIDTH, "head": WIDTH}


class Pipeline(OneProcess):
    """Each process has layers of its own."""

    split = (["embed", "norm"], ["up"], ["down"], ["head"])
    split_empty = (["embed", "norm"], ["up"], ["down", "head"], [])
    rows = 1
    """How many processes have the same layers."""

    def made(self) -> Any:
        self.stage = self.rank // self.rows
        return Stage(super().made(), (self.split_empty if self.empty else self.split)[self.stage])

    @property
    def all_reduce(self) -> Any:
        return distributed.group.WORLD

    def alone(self, name: str) -> bool:
        return True

    def backward(self, step: int, case: str, bad: bool) -> Any:
        tokens, wanted = batch(step, self.shares)
        begins, ends = self.stage == 0, self.stage == len(self.split) - 1
        x = (
            tokens
            if begins
            else self.received((*tokens.shape, INPUTS[self.net.names[0]] if self.net.names else TOKENS))
        )
        x = x if begins else x.requires_grad_()
        y = self.net(x)
        loss = loss_of(y, wanted, step) if ends else None
        if loss is not None:
            loss.backward()
        else:
            distributed.send(y.detach().contiguous(), self.rank + self.rows)
            y.backward(self.received(y.shape, self.rows))
        if not begins:
            distributed.send(x.grad.contiguous(), self.rank - self.rows)
        return loss

    def received(self, shape: Any, by: int | None = None) -> torch.Tensor:
        """Return what another stage sends, the one before if none is named."""
        tensor = torch.empty(shape)
        distributed.recv(tensor, self.rank - self.rows if by is None else self.rank + by)
        return tensor


class PipelineSharded(Pipeline):
    """Two stages, each split among two processes."""

    split = (["embed", "norm", "up"], ["down", "head"])
    split_empty = (["embed", "norm", "up", "down", "head"], [])
    rows = 2

    def made(self) -> Any:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stage = super().made()
        return fsdp.fully_shard(stage, mesh=self.mesh["dp"]) if stage.names else stage

    @property
    def all_reduce(self) -> Any:
        return self.mesh["pp"]

    @property
    def shares(self) -> list[int]:
        half = self.rank % 2
        return [2 * half, 2 * half + 1]


class Experts(OneProcess):
    """Experts as one DTensor beside plain copies; the gradients are those of the whole model."""

    experts = "stacked"

    def made(self) -> Any:
        net = super().made()
        self.whole_net = super().made()
        mesh = init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("ep",))
        net.experts = nn.Parameter(distribute_tensor(net.experts.detach(), mesh, [Shard(0)]))
        return net

    def backward(self, step: int, case: str, bad: bool) -> Any:
        self.whole_net.load_state_dict(gathered(self.weights()))
        self.whole_net.zero_grad()
        tokens, wanted = batch(step)
        loss = loss_of(self.whole_net(tokens), wanted, step)
        loss.backward()
        grads = dict(self.whole_net.named_parameters())
        for name, p in self.named().items():
            p.grad = self.part(name, grads[name].grad.clone(), p)
        return loss


class PlainExperts(Experts):
    """Experts as plain tensors, each in one process."""

    experts = "list"

    def made(self) -> Any:
        self.whole_net = OneProcess.made(self)
        return OneProcess.made(self)

    def named(self) -> dict[str, Any]:
        mine = f"experts.{self.rank}.weight"
        return {name: p for name, p in self.net.named_parameters() if "experts" not in name or name == mine}

    def alone(self, name: str) -> bool:
        return "experts" in name

    @property
    def all_reduce(self) -> Any:
        return distributed.group.WORLD

    shared_leaves = staticmethod(lambda path, leaf: "experts" not in path[1])


class Flat(OneProcess):
    """One flat parameter, of which each process has a part."""

    def made(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 is deprecated
            return fsdp.FullyShardedDataParallel(super().made(), device_id=torch.device("cpu"))

    @property
    def shares(self) -> list[int]:
        return [self.rank]

    @property
    def all_reduce(self) -> Any:
        return distributed.group.WORLD

    def start(self) -> None:
        with fsdp.FullyShardedDataParallel.summon_full_params(self.net, writeback=True):
            self.net.module.load_state_dict(first())
        self.net.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        with fsdp.FullyShardedDataParallel.summon_full_params(self.net, writeback=False):
            return {name: p.detach().clone() for name, p in self.net.module.named_parameters()}

    def spoil(self, value: float) -> None:
        sizes = [p.numel() for p in first().values()]
        last = sum(sizes[: list(first()).index(SPOILT[""]) + 1]) - 1
        [p] = self.named().values()
        if last // p.numel() == self.rank:
            p.grad[last % p.numel()] = value

    def absent(self, name: str, p: Any) -> bool:
        return self.rank == ABSENT

    def masks(self) -> dict[str, Any]:
        [p] = self.named().values()
        flat = torch.ones(PROCESSES * p.numel())
        flat[ABSENT * p.numel() : (ABSENT + 1) * p.numel()] = 0
        sizes = [one.numel() for one in first().values()]
        parts = flat[: sum(sizes)].split(sizes)
        return {name: part.view(one.shape) for (name, one), part in zip(first().items(), parts, strict=True)}


KINDS: dict[str, Callable[..., Any]] = {
    "one": OneProcess,
    "ddp": DataParallel,
    "fsdp2": FullySharded,
    "hsdp": Hybrid,
    "tp": TensorParallel,
    "tp_fsdp2": TensorParallelSharded,
    "experts": Experts,
    "plain_experts": PlainExperts,
    "pipeline": Pipeline,
    "pipeline_fsdp2": PipelineSharded,
    "fsdp1": Flat,
    "zero": Zero,
}
