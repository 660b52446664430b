# SPDX-License-Identifier: MIT
"""PyTorch's process groups and distributed tensors: each process works on its local tensor,
and process groups reduce.

Nothing here imports ``torch.distributed.tensor``, which takes long, before there is such a tensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from uniclip._types import Axes, Op
from uniclip.backends.base import (
    NO_SHARDS,
    SHARDS_CACHE_SIZE,
    Backend,
    Reduce,
    Shards,
    WrappedLeaf,
    shards_of,
)
from uniclip.backends.torch.modes import is_recorded, tracing
from uniclip.backends.torch.one_norm import SINGLE, move
from uniclip.backends.torch.private import LOCAL_TENSOR, SPEC, in_forward_mode, local_tensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

SHARD_CACHE_SIZE = 4096
"""The number of shards of single tensors that are cached, so that equal ones are one object."""


def is_dtensor(leaf: object) -> bool:
    """Return whether a tensor is a distributed one."""
    if type(leaf) is torch.Tensor:
        return False
    # No distributed tensor exists before this module is imported.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


def sum_partials(tensor: DTensor) -> DTensor:
    """Return a distributed tensor whose partial values are summed over processes."""
    return tensor.redistribute(placements=_without_partials(tensor.placements))


def _without_partials(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return the placements of a sum."""
    from torch.distributed.tensor import Replicate

    return tuple([Replicate() if p.is_partial() else p for p in placements])


def divide_sum(like: DTensor, total: torch.Tensor) -> DTensor:
    """Undo `sum_partials`, given a changed local tensor, in the placements of ``like``."""
    return _like_local(like, first_of(like, total))


def write_sum(leaf: DTensor, total: torch.Tensor) -> DTensor:
    """Write a changed local tensor into the partial one that it was summed from; return that."""
    with torch.no_grad():
        leaf.to_local().copy_(first_of(leaf, total))
    return leaf


def first_of(like: DTensor, total: torch.Tensor) -> torch.Tensor:
    """Return this process's addend of a sum: the first process has all of it, others zeros."""
    for dimension, placement in enumerate(like.placements):
        is_sum = placement.is_partial() and placement.reduce_op == "sum"
        if is_sum and like.device_mesh.get_local_rank(dimension):
            total = _zeros_like(total)
    return total


def _zeros_like(addend: torch.Tensor) -> torch.Tensor:
    """Return zeros with the derivative of an addend, which is 1 in every process."""
    if is_recorded(addend):
        return _Weighted.apply(addend, 0.0, 1.0)
    return torch.zeros_like(addend)


def _local_of(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor of a distributed one."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return tensor.to_local()

    # The attribute is faster, but it may be a tensor that a collective has not filled yet.
    local = getattr(tensor, LOCAL_TENSOR, None)
    if type(local) is torch.Tensor:
        return local
    return tensor.to_local()


def _like_local(like: DTensor, local: torch.Tensor) -> DTensor:
    """Return a local tensor as a distributed one with the mesh, placements and shape of another."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


class MeshGroup(NamedTuple):
    """The processes along one dimension of a mesh."""

    mesh: DeviceMesh
    dimension: int

    @property
    def size(self) -> int:
        """The number of processes."""
        return int(self.mesh.size(self.dimension))

    def processes(self) -> frozenset[int]:
        """Return the ranks of the processes."""
        group = self.mesh.get_group(self.dimension)
        return frozenset(torch.distributed.get_process_group_ranks(group))

    def reduce(self, array: torch.Tensor, op: Op) -> torch.Tensor:
        """Return the sum or maximum over the processes."""
        return _all_reduce([self.mesh.get_group(self.dimension)], array, op)


_mesh_groups: WeakKeyDictionary[ProcessGroup, MeshGroup] = WeakKeyDictionary()
"""By process group. A strong reference would keep a destroyed group alive."""


def _group_along(mesh: DeviceMesh, dimension: int) -> MeshGroup:
    """Return the processes along a dimension, one object for all meshes that share them."""
    group = MeshGroup(mesh, dimension)
    if torch.compiler.is_compiling():
        return group
    return _mesh_groups.setdefault(mesh.get_group(dimension), group)


class LocalShard:
    """The shard of a distributed tensor in this process; equal shards are one object."""

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: tuple[int, ...],
        local: tuple[int, ...],
    ) -> None:
        self.is_here = mesh.get_coordinate() is not None
        """Whether this process belongs to the mesh."""
        self.mesh = mesh
        self.placements = _without_partials(placements)
        self.partial = self.placements != placements
        """Whether the tensor is partial. Its shard is that of the sum."""
        self.shape = shape
        self.local = local
        """The shape of the local tensor."""

        sizes = zip(mesh.shape, self.placements, strict=True)
        self.replicas = math.prod([size for size, p in sizes if p.is_replicate()])
        """The number of processes of the mesh that have the same elements."""

    def divided(self, axes: Axes) -> tuple[DeviceMesh, dict[int, Placement]] | None:
        """Return the mesh and those of its dimensions that shard an axis which norms along
        ``axes`` keep.
        """
        if axes is None:
            return None

        sharding = {
            dimension: placement
            for dimension, placement in enumerate(self.placements)
            if not placement.is_replicate() and placement.dim not in axes
        }
        if not sharding:
            return None
        return self.mesh, sharding

    def groups(self, axes: Axes = None, *, replicas: bool = True) -> tuple[MeshGroup, ...]:
        """Return the processes over which norms along ``axes`` are reduced, one group for each
        dimension of the mesh, with those that hold replicas, if wanted.
        """
        divided = self.divided(axes)
        kept = {} if divided is None else divided[1]
        groups = []
        for dimension, placement in enumerate(self.placements):
            is_reduced = dimension not in kept and (replicas or not placement.is_replicate())
            if is_reduced and self.mesh.size(dimension) > 1:
                groups.append(_group_along(self.mesh, dimension))
        return tuple(groups)

    def divide(self, leaf: torch.Tensor | DTensor) -> torch.Tensor:
        """Return the same shard of another leaf, however that is sharded, if at all."""
        if not is_dtensor(leaf):
            leaf = _replicate(self.mesh, leaf)
        elif leaf.device_mesh != self.mesh:
            leaf = _replicate(self.mesh, leaf.full_tensor())
        return leaf.redistribute(self.mesh, self.placements).to_local()

    def gather(self, leaf: DTensor) -> torch.Tensor:
        """Return all elements of a leaf with this sharding."""
        return leaf.full_tensor()

    def distribute(self, like: DTensor, local: torch.Tensor) -> DTensor:
        """Return a leaf with another local tensor. A partial one is distributed already."""
        return local if is_dtensor(local) else _like_local(like, local)

    def weigh_derivative(self, value: Any, *, inverse: bool = False) -> Any:
        """Return a value whose derivative is multiplied by the number of replicas, or divided by it
        if ``inverse``, so that replicas count once.
        """
        if self.replicas == 1 or not isinstance(value, torch.Tensor):
            return value
        if not (tracing() or is_recorded(value)):
            return value

        weight = 1 / self.replicas if inverse else self.replicas
        return _Weighted.apply(value, 1, weight)

    def sum_examples(self, like: DTensor, local: torch.Tensor) -> DTensor:
        """Return the sum of a distributed tensor along its first axis,
        given the sum of the local tensor.
        """
        from torch.distributed.tensor import DTensor, Partial, Shard

        # A sum along a sharded axis is a partial one; without the first axis, the others move.
        placements: list[Placement] = []
        for placement in sum_partials(like).placements:
            if placement.is_replicate():
                placements.append(placement)
            elif placement.dim == 0:
                placements.append(Partial("sum"))
            else:
                placements.append(Shard(placement.dim - 1))

        # A tensor on `meta` has the strides of a contiguous one, but takes no memory.
        total = torch.empty(like.shape[1:], device="meta")
        return DTensor.from_local(
            local,
            like.device_mesh,
            placements,
            run_check=False,
            shape=total.shape,
            stride=total.stride(),
        )


def open_partial(leaf: DTensor, *, in_place: bool, as_given: bool) -> WrappedLeaf | None:
    """Return a partial tensor summed, as a whole or as its local tensor; ``None`` for others."""
    if not any([p.is_partial() for p in leaf.placements]):
        return None
    total = sum_partials(leaf)
    rebuild = partial(write_sum if in_place else divide_sum, leaf)
    if as_given:
        return WrappedLeaf(total, lambda new: rebuild(new.to_local()))
    return WrappedLeaf(_local_of(total), rebuild)


def open_shards(leaves: list[Any]) -> tuple[list[Any], Shards]:
    """Return leaves with the local tensors of distributed ones, and the shards of these.

    See `uniclip.backends.base.Backend.open_shards`. A partial tensor stays as it is.
    """
    if set(map(type, leaves)) <= _DENSE_CLASSES or not any(map(is_dtensor, leaves)):
        return leaves, NO_SHARDS

    shards = _find_shards(leaves)
    # Usually all leaves are distributed, and present.
    if shards.dense and len(shards) == len(leaves):
        local = local_tensors(leaves)
        if _are_dense(local) and not any(map(_RECORDED, leaves)):
            return local, shards

    arrays = list(leaves)
    for number, shard in shards.items():
        if not shard.partial:
            arrays[number] = _local_of(leaves[number])
    if shards.dense and not _are_dense(arrays):
        shards = shards_of(shards)
    return arrays, shards


_DENSE_CLASSES = {torch.Tensor, type(None)}
"""The classes of local tensors whose attributes say all, and of absent leaves."""
# Functions that `map` calls without Python code for each of many tensors.
_LAYOUT = attrgetter("layout")
_RECORDED = attrgetter("requires_grad")


def _are_dense(arrays: list[Any]) -> bool:
    """Return whether tensors that are present are dense, not traced, and have no derivative."""
    if tracing() or in_forward_mode() or not set(map(type, arrays)) <= _DENSE_CLASSES:
        return False
    present = [array for array in arrays if array is not None]
    return set(map(_LAYOUT, present)) <= {torch.strided} and not any(map(_RECORDED, present))


def shards_of_gradients(params: list[Any]) -> list[Any] | None:
    """Return the gradients of distributed parameters, and of regular ones beside them.

    ``None`` if one is absent or has a derivative, or a parameter is of another class.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not set(map(type, params)) <= {module.DTensor, torch.nn.Parameter}:
        return None
    grads = [param.grad for param in params]
    if type(None) in set(map(type, grads)) or any(map(_RECORDED, grads)):
        return None
    return grads


def _find_shards(leaves: list[Any]) -> Shards:
    """Return the shards of leaves."""
    if torch.compiler.is_compiling():
        return shards_of({n: _shard_of(leaf) for n, leaf in enumerate(leaves) if is_dtensor(leaf)})

    # FSDP2 gives the gradients of a parameter one layout at all steps. It is looked up by its
    # identity, since it takes long to hash one.
    layouts = [getattr(leaf, SPEC, None) or getattr(leaf, "dtype", None) for leaf in leaves]
    key = tuple(map(id, layouts))
    cached = _shards_by_layouts.get(key)
    if cached is not None:
        return cached[0]

    by_leaf = {n: _shard_of(leaf) for n, leaf in enumerate(leaves) if is_dtensor(leaf)}
    dense = {leaf.dtype for leaf in leaves if leaf is not None} <= SINGLE
    dense = dense and all([shard.is_here and not shard.partial for shard in by_leaf.values()])
    shards = shards_of(by_leaf, dense=dense)
    # A key of layouts does not identify a distributed tensor that has none.
    if not all([hasattr(leaves[number], SPEC) for number in by_leaf]):
        return shards
    if len(_shards_by_layouts) >= SHARDS_CACHE_SIZE:
        _shards_by_layouts.clear()
    _shards_by_layouts[key] = shards, layouts
    return shards


_shards_by_layouts: dict[tuple[int, ...], tuple[Shards, list[Any]]] = {}
"""By the identities of layouts, which are kept with them so that they stay their own."""
_shards: dict[Any, LocalShard] = {}


def _shard_of(tensor: DTensor) -> LocalShard:
    """Return this process's shard of a distributed tensor, after partial values are summed."""
    mesh = tensor.device_mesh
    placements = tuple(tensor.placements)
    # `from_local` may divide a tensor in other places than PyTorch does.
    layout = mesh, placements, tuple(tensor.shape), tuple(_local_of(tensor).shape)
    if torch.compiler.is_compiling():
        return LocalShard(*layout)

    # Meshes of another initialization are equal, but have other groups.
    groups: list[str] = []
    if mesh.get_coordinate() is not None:
        groups = [mesh.get_group(n).group_name for n in range(mesh.ndim)]
    key = (*layout, *groups)
    shard = _shards.get(key)
    if shard is None:
        if len(_shards) >= SHARD_CACHE_SIZE:
            _shards.clear()
        shard = _shards[key] = LocalShard(*layout)
    return shard


def _replicate(mesh: DeviceMesh, array: torch.Tensor) -> DTensor:
    """Return a regular tensor, the same in every process, as a distributed one on a mesh."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(array, mesh, [Replicate()] * mesh.ndim, run_check=False)


def own_operand(like: DTensor, operand: torch.Tensor | DTensor) -> torch.Tensor:
    """Return the shard of an operand that changes this process's shard of a tensor."""
    if not is_dtensor(operand):
        operand = _replicate(like.device_mesh, operand)
    if operand.ndim == 0:
        return operand.to_local()
    return operand.expand(like.shape).redistribute(placements=like.placements).to_local()


def _groups_of(all_reduce: object) -> list[ProcessGroup] | None:
    """Return the process groups of a group or a mesh, ``None`` for anything else."""
    if not torch.distributed.is_available():
        return None
    if isinstance(all_reduce, torch.distributed.ProcessGroup):
        return [all_reduce]

    module = sys.modules.get("torch.distributed.device_mesh")
    if module is not None and isinstance(all_reduce, module.DeviceMesh):
        return list(all_reduce.get_all_groups())
    return None


def _all_reduce(groups: Sequence[ProcessGroup], array: torch.Tensor, op: Op) -> torch.Tensor:
    """Return a new array, reduced over one process group after the other."""
    for group in groups:
        # PyTorch's collective records no derivative, so an autograd function wraps it.
        reduce = reduce_over_group
        if tracing() or is_recorded(array):
            reduce = _Reduced.apply
        array = reduce(array, op, group)
    return array


def reduce_over_group(array: torch.Tensor, op: Op, group: ProcessGroup) -> torch.Tensor:
    """Return a new array, reduced over a process group without a derivative."""
    operation = torch.distributed.ReduceOp.MAX
    if op == "sum":
        operation = torch.distributed.ReduceOp.SUM

    # `all_reduce` overwrites its argument, which the caller still uses.
    reduced = array.clone()
    # A group for accelerators alone is enough for gradients that FSDP2 has offloaded to the host.
    if array.is_cpu and not tracing():
        reduced = reduced.to(_reducing_device(group))
    torch.distributed.all_reduce(reduced, operation, group=group)
    return reduced.to(array.device)


def _reducing_device(group: ProcessGroup) -> str:
    """Return the type of a device whose tensors a group reduces: the CPU, if it does."""
    if group not in _device_types:
        # Such as "cpu:gloo,cuda:nccl".
        config = torch.distributed.get_backend_config(group).split(",")
        types = [of_device.split(":")[0] for of_device in config]
        _device_types[group] = "cpu" if "cpu" in types else types[0]
    return _device_types[group]


_device_types: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()


class _Reduced(torch.autograd.Function):  # type: ignore[misc]
    """A sum or maximum over a process group.

    Its derivative is that of the sum of the losses of all processes.
    """

    @staticmethod
    def forward(array: torch.Tensor, op: Op, group: ProcessGroup) -> torch.Tensor:
        """Reduce."""
        return reduce_over_group(array, op, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Save the arguments of the derivative."""
        array, ctx.op, ctx.group = inputs
        ctx.save_for_backward(array, output)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Sum the derivatives of all processes.

        The derivative of a maximum is divided among those that have it.
        """
        slope = _all_reduce([ctx.group], slope, "sum")
        if ctx.op == "max":
            array, top = ctx.saved_tensors
            is_top = (array == top).to(slope.dtype)
            slope = slope * is_top / reduce_over_group(is_top, "sum", ctx.group)
        return slope, None, None


class _Weighted(torch.autograd.Function):  # type: ignore[misc]
    """The product of a value and one number, whose derivative is multiplied by another number."""

    @staticmethod
    def forward(value: torch.Tensor, value_weight: float, slope_weight: float) -> torch.Tensor:
        """Multiply."""
        return value * value_weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Save the factors."""
        _, value_weight, slope_weight = inputs
        ctx.weights = slope_weight, value_weight

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Multiply the derivative, whose own derivative is multiplied as the value is."""
        return _Weighted.apply(slope, *ctx.weights), None, None


class Distributed(Backend[torch.Tensor]):
    """The hooks for distributed tensors and process groups."""

    joins_by = "a process group, a device mesh, or a function of (array, op)"

    def to_device_of(self, like: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
        if is_dtensor(array):
            return array

        array = move(array, like.device)
        if is_dtensor(like):
            return _replicate(like.device_mesh, array)
        return array

    open_shards = staticmethod(open_shards)

    def reducer(self, all_reduce: object) -> Reduce | None:
        groups = _groups_of(all_reduce)
        if groups is None:
            return None
        return partial(_all_reduce, groups)

    def rank(self) -> int:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return int(torch.distributed.get_rank())
        return 0
