"""Layouts of a distributed run: the rules that each accepts, and how it lays out a small model.

A page of the documentation prints the table.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
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

import uniclip as uc

RANKS = 4
TOKENS, WIDTH, LENGTH = 12, 8, 4
ABSENT = 1
"""The process without gradients in some cases."""


def label(path: Any, leaf: Any) -> str:
    """Return the group of a leaf, by its name, or by its index in an optimizer without names."""
    return (
        "rest"
        if str(path[-1]).startswith(("up", "down", "head", "experts")) or path[-1] in range(3, 9)
        else "first"
    )


class Kind(NamedTuple):
    """A rule, which is a column of the table."""

    title: str
    rule: Any
    many_norms: bool = False
    """True if there are several norms."""
    loss: bool = False


RULES = {
    "global": Kind("`by_global_norm`", uc.by_global_norm(0.2)),
    "largest": Kind("`by_global_norm`, ∞-norm", uc.by_global_norm(0.03, ord=math.inf)),
    "leaf": Kind("`by_norm`", uc.by_norm(0.1), many_norms=True),
    "groups": Kind(
        "`by_group_norm`", uc.by_group_norm({"first": 0.05, "rest": 0.1}, label), many_norms=True
    ),
    "agc": Kind("`agc`", uc.agc(0.02), many_norms=True),
    "autoclip": Kind("`autoclip`", uc.autoclip(50, window=4)),
    "zclip": Kind("`zclip`", uc.zclip(0.5, 0.5, warmup=2)),
    "adagc": Kind("`adagc`", uc.adagc(1.0, warmup=1), many_norms=True),
    "skip": Kind('`nonfinite="skip"`', uc.by_global_norm(0.2, nonfinite="skip")),
    "spikes": Kind(
        "`skip_spikes` with a loss", uc.skip_spikes(z=1.0, window=4, warmup=2), loss=True
    ),
}
KEPT = "norms along axes take no `all_reduce=`: omit it if leaves are whole, or use DTensors"
EACH = (
    "with `all_reduce=`, only a rule with one norm or named groups allows different leaves in each "
    "process: omit it, because these leaves are whole in their process"
)
FLAT = (
    "a flat parameter is a shard of several leaves, with unknown boundaries: use FSDP2, or a rule "
    "with one norm"
)


class Net(nn.Module):
    """A model that predicts a token from another one, with a layer of experts in some layouts."""

    def __init__(self, experts: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(TOKENS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        drawn = torch.randn(RANKS, WIDTH, WIDTH) / 4
        if experts == "stacked":
            self.experts: Any = nn.Parameter(drawn)
        elif experts == "listed":
            self.experts = nn.ParameterList(list(drawn))

    def forward(self, tokens: Any) -> Any:
        """Return a score for each token."""
        x = self.down(torch.tanh(self.up(self.norm(self.embed(tokens)))))
        if hasattr(self, "experts"):
            x = x + sum(torch.tanh(x @ one) for one in self.experts)
        return self.head(x)


def loss_of(net: Any, step: int, shares: Iterable[int] = range(RANKS)) -> Any:
    """Return the loss of some of the four shares of a batch.

    It differs from step to step, with a spike at the 4th.
    """
    both = torch.randint(
        TOKENS, (RANKS, 2, 2, LENGTH), generator=torch.Generator().manual_seed(step)
    )
    tokens, wanted = both[list(shares)].unbind(1)
    loss = nn.functional.cross_entropy(net(tokens.flatten(0, 1)).flatten(0, 1), wanted.flatten())
    return loss * (20 if step == 3 else 1 + 0.1 * step)


def part(tensor: Any, like: Any) -> Any:
    """Return a tensor distributed like another one."""
    if isinstance(like, DTensor):
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return tensor.clone()


def local(tensor: Any) -> Any:
    """Return the local shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class OneProcess:
    """The whole model in each process, and the base class of the layouts."""

    title = "one process"
    refused: Mapping[str, str] = MappingProxyType({})
    """The reason why a rule is refused in this layout, by the rule's name."""
    experts = ""
    optimizer: Any = torch.optim.SGD
    all_reduce: Any = None
    shared: Any = None
    spoilt = "down.weight"
    """The leaf whose last element is overwritten in some cases."""

    def __init__(self, **options: Any) -> None:
        self.rank, self.options = distributed.get_rank(), options
        self.net: Any = self.made(Net(self.experts))

    def made(self, net: Any) -> Any:
        """Return the model in this layout."""
        return net

    def shares(self) -> list[int]:
        """Return the shares of a batch that this process takes."""
        return list(range(RANKS))

    def named(self) -> dict[str, Any]:
        """Return the parameters of this process by their names in the whole model."""
        return {name.removeprefix("module."): p for name, p in self.net.named_parameters()}

    def joins(self) -> dict[str, Any]:
        """Return the arguments that join the processes of this layout."""
        return {"all_reduce": self.all_reduce} | ({"shared": self.shared} if self.shared else {})

    def trained(self) -> Any:
        """Return the parameters for the optimizer."""
        return list(self.named().items())

    def backward(self, step: int) -> Any:
        """Compute the gradients of a step, and return the loss."""
        loss = loss_of(self.net, step, self.shares())
        loss.backward()
        return loss.detach()

    def entries(self, tensor: Any) -> Any:
        """Return the indices of the local elements in the whole tensor."""
        return local(part(torch.arange(tensor.numel()).view(tensor.shape), tensor))

    def spoil(self, grads: dict[str, Any], value: float) -> None:
        """Overwrite one element, in the processes that have it."""
        if self.spoilt in grads:
            grad = grads[self.spoilt]
            local(grad)[self.entries(grad) == grad.numel() - 1] = value

    def absent(self, name: str, grad: Any) -> bool:
        """Return whether this process has no gradient in some cases.

        A replicated leaf is absent in all processes, a sharded one in one of them.
        """
        if not isinstance(grad, DTensor):
            return name == "head.bias"
        place = (grad.device_mesh.mesh == ABSENT).nonzero()
        split = [n for n, one in enumerate(grad.placements) if hasattr(one, "dim")]
        here = grad.device_mesh.get_coordinate()
        return len(place) > 0 and bool(split) and all(here[n] == place[0, n] for n in split)

    def gathered(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the full tensors of all processes without the absent ones."""
        here = {name: self.whole(one) for name, one in tree.items() if one is not None}
        trees: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(trees, here)
        return {name: one for tree_of_rank in trees for name, one in tree_of_rank.items()}

    def whole(self, tensor: Any) -> Any:
        """Return the full tensor of a local one."""
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    def in_parts(self, tensor: Any) -> bool:
        """Return whether a tensor is a shard of a larger one."""
        return isinstance(tensor, DTensor)

    def whole_parts(self) -> dict[str, Any]:
        """Return the full tensors of the parameters that optimizers have."""
        return self.gathered(self.named())

    def weights(self) -> dict[str, Any]:
        """Return the full weights by their own names."""
        return self.whole_parts()


class DataParallel(OneProcess):
    """Replicas of the model."""

    title = "`DistributedDataParallel`"

    def made(self, net: Any) -> Any:
        return nn.parallel.DistributedDataParallel(net)

    def shares(self) -> list[int]:
        return [self.rank]


class Zero(DataParallel):
    """Replicas, with an optimizer that shards its state and has no names."""

    title = "`ZeroRedundancyOptimizer`, attached outside"
    optimizer = staticmethod(
        lambda params, **how: ZeroRedundancyOptimizer(params, torch.optim.SGD, **how)
    )

    def trained(self) -> Any:
        return list(self.named().values())


def fully_sharded(net: Any, mesh: Any) -> Any:
    """Shard a model layer by layer."""
    for name in ("up", "down", "head"):
        fsdp.fully_shard(getattr(net, name), mesh=mesh)
    return fsdp.fully_shard(net, mesh=mesh)


class FullySharded(OneProcess):
    """Shards, as DTensors."""

    title = "FSDP2, `fully_shard`"
    mesh: tuple[int, ...] = (RANKS,)

    def made(self, net: Any) -> Any:
        return fully_sharded(
            net,
            init_device_mesh(
                "cpu", self.mesh, mesh_dim_names=("replicate", "shard")[-len(self.mesh) :]
            ),
        )

    def shares(self) -> list[int]:
        return [self.rank]


class Hybrid(FullySharded):
    """Shards, each replicated in two processes."""

    title = "HSDP, 2x2"
    mesh = (2, 2)


def tensor_parallel(net: Any, mesh: Any) -> Any:
    """Shard layers along their features, and activations along the sequence."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(net, mesh, plan)


class TensorParallel(OneProcess):
    """Shards along several axes, and partial sums."""

    title = "tensor and sequence parallel"

    def made(self, net: Any) -> Any:
        return tensor_parallel(net, init_device_mesh("cpu", (RANKS,)))


class TensorParallelSharded(OneProcess):
    """Shards of shards."""

    title = "tensor parallel x FSDP2"

    def made(self, net: Any) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return fully_sharded(tensor_parallel(net, mesh["tp"]), mesh["dp"])

    def shares(self) -> list[int]:
        first = self.rank // 2 * 2
        return [first, first + 1]


class Experts(OneProcess):
    """Experts as one DTensor next to replicas; the gradients are those of a whole model."""

    title = "experts as DTensors on a separate mesh"
    experts = "stacked"
    spoilt = "experts"

    def made(self, net: Any) -> Any:
        mesh = init_device_mesh("cpu", (RANKS,))
        net.experts = nn.Parameter(distribute_tensor(net.experts.detach(), mesh, [Shard(0)]))
        return net

    def backward(self, step: int) -> Any:
        model = Net(self.experts)
        model.load_state_dict(self.weights())
        loss = loss_of(model, step)
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        for name, p in self.named().items():
            p.grad = part(grads[name], p)
        return loss.detach()

    def absent(self, name: str, grad: Any) -> bool:
        return isinstance(grad, DTensor) and super().absent(name, grad)


class PlainExperts(Experts):
    """Experts as regular tensors, each in one process."""

    title = "experts as regular tensors, next to replicas"
    refused = MappingProxyType({"agc": KEPT, "leaf": EACH, "adagc": EACH})
    experts = "listed"
    spoilt = "experts.3"
    shared = staticmethod(lambda path, leaf: "experts" not in path[-1])

    def made(self, net: Any) -> Any:
        self.all_reduce = distributed.group.WORLD
        return net

    def named(self) -> dict[str, Any]:
        mine = f"experts.{self.rank}"
        return {
            name: p for name, p in super().named().items() if "experts" not in name or name == mine
        }

    def absent(self, name: str, grad: Any) -> bool:
        return name in {f"experts.{ABSENT}", "head.bias"}


class Pipeline(Experts):
    """Different layers in each process."""

    title = "a pipeline"
    refused = MappingProxyType({"agc": KEPT, "leaf": EACH, "adagc": EACH})
    experts = ""
    spoilt = "down.weight"
    stages: tuple[tuple[str, ...], ...] = (("embed", "norm"), ("up",), ("down",), ("head",))

    def made(self, net: Any) -> Any:
        self.all_reduce = distributed.group.WORLD
        for name in {"embed", "norm", "up", "down", "head"} - set(self.stages[self.rank]):
            delattr(net, name)
        return net

    def absent(self, name: str, grad: Any) -> bool:
        return self.rank == ABSENT


class PipelineSharded(Pipeline):
    """Two pipeline stages, each sharded over two processes."""

    title = "a pipeline x FSDP2"
    stages = (("embed", "norm", "up"),) * 2 + (("down", "head"),) * 2
    absent = OneProcess.absent

    def made(self, net: Any) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stage = super().made(net)
        self.all_reduce = mesh["pp"]
        return fsdp.fully_shard(stage, mesh=mesh["dp"])


class Flat(OneProcess):
    """One flat parameter, sharded over the processes."""

    title = "FSDP1, `FullyShardedDataParallel`"
    refused = MappingProxyType({name: FLAT for name, kind in RULES.items() if kind.many_norms})
    spoilt = "_flat_param"
    in_parts = staticmethod(lambda tensor: True)

    def made(self, net: Any) -> Any:
        self.all_reduce = distributed.group.WORLD
        with warnings.catch_warnings():
            # FSDP1 is deprecated.
            warnings.simplefilter("ignore")
            return fsdp.FullyShardedDataParallel(net, device_id=torch.device("cpu"), **self.options)

    def shares(self) -> list[int]:
        return [self.rank]

    def entries(self, tensor: Any) -> Any:
        return torch.arange(tensor.numel()) + self.rank * tensor.numel()

    def absent(self, name: str, grad: Any) -> bool:
        return self.rank == ABSENT

    def whole(self, tensor: Any) -> Any:
        parts = [torch.empty_like(tensor) for _ in range(RANKS)]
        distributed.all_gather(parts, tensor.detach())
        return torch.cat(parts)

    def weights(self) -> dict[str, Any]:
        with fsdp.FullyShardedDataParallel.summon_full_params(self.net, writeback=False):
            return {name: p.detach().clone() for name, p in self.net.module.named_parameters()}


LAYOUTS: dict[str, type[OneProcess]] = {
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


def table() -> str:
    """Return the layouts and rules as a Markdown table, then the reason for each error."""
    notes = list(
        dict.fromkeys(why for layout in LAYOUTS.values() for why in layout.refused.values())
    )
    lines = [["", *(kind.title for kind in RULES.values())], ["---", *[":-:"] * len(RULES)]]
    for layout in LAYOUTS.values():
        cells = [
            f"({notes.index(layout.refused[name]) + 1})" if name in layout.refused else "✓"
            for name in RULES
        ]
        lines.append([layout.title, *cells])
    numbered = [f"{number}. Raises an error: {note}." for number, note in enumerate(notes, 1)]
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n" + "\n".join(numbered) + "\n"
    )
