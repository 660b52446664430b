# SPDX-License-Identifier: MIT
"""The optimizers of DeepSpeed: its private attributes, of version 0.19."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from uniclip.integrations.torch.engines.source import Limit, Part, Source, name_in_model

if TYPE_CHECKING:
    from uniclip.integrations.torch.handle import Attached

_KEY = "uniclip"
"""The key of the rule's state in the ``client_state`` of a checkpoint."""
_REFUSED = {
    "has_moe_layers": "experts",
    "swap_optimizer": "optimizer states on NVMe",
    "zenflow": "ZenFlow",
    "use_muon": "Muon, which changes gradients before the step",
}


class _Zero(Source):
    """An optimizer of ZeRO, whose step takes one group of parameters after the other."""

    def __init__(self, zero: Any) -> None:
        kind = type(zero).__qualname__
        for attribute, what in _REFUSED.items():
            if getattr(zero, attribute, False):
                msg = f"uniclip can't clip inside of DeepSpeed's {kind} with {what}"
                raise ValueError(msg)
        parallel = getattr(zero, "model_parallel_group", None)
        if parallel is not None and torch.distributed.get_world_size(parallel) > 1:
            msg = f"uniclip can't clip inside of DeepSpeed's {kind} with tensor parallelism"
            raise ValueError(msg)

        self.stepped = zero
        self._zero = zero
        self.limits = ((zero, "clip_grad"),)
        process_groups = {id(group): group for group in self._process_groups()}
        if len(process_groups) > 1:
            msg = (
                f"uniclip can't clip inside of DeepSpeed's {kind} whose parameters belong to "
                "several groups of processes, as those of experts do"
            )
            raise ValueError(msg)
        [self.group] = process_groups.values()
        self._flat: list[torch.Tensor] = []
        """The flat gradients of a step, one vector for each group."""
        self._starts: list[list[int]] = []
        """Where each part begins in the flat vector of its group."""
        self.groups = []
        for params, weights in zip(*self._params_and_weights(), strict=True):
            self._add_group(params, weights.detach())

    def _process_groups(self) -> list[Any]:
        """Return the processes that have the parts of each group."""
        return list(self._zero.real_dp_process_group)

    def _params_and_weights(self) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        """Return the parameters of each group, and the flat float32 weights of this process."""
        raise NotImplementedError

    def _place(self, p: Any) -> tuple[int, int]:
        """Return where the part of a parameter begins in the flat vector, and its size."""
        mapping = p._hp_mapping
        if mapping is None:
            return 0, 0
        address = mapping.hp_fragment_address
        return int(address.start), int(address.numel)

    def _add_group(self, params: Iterable[Any], weights: torch.Tensor) -> None:
        """Note the parts of one group, and where they begin."""
        parts = []
        starts = []
        for p in params:
            start, size = self._place(p)
            shape = tuple(getattr(p, "ds_shape", p.shape))
            parts.append(Part(self._zero.param_names[p], shape, weights.narrow(0, start, size)))
            starts.append(start)
        self.groups.append(parts)
        self._starts.append(starts)

    def _scale(self) -> float:
        """Return the loss scale."""
        return float(getattr(self._zero, "loss_scale", 1.0) or 1.0)

    def take(self) -> list[torch.Tensor | None]:
        self._flat = self._flat_gradients()
        scale = self._scale()
        if scale != 1.0:
            torch._foreach_div_(self._flat, scale)

        grads: list[torch.Tensor | None] = []
        for flat, parts, starts in zip(self._flat, self.groups, self._starts, strict=True):
            for part, start in zip(parts, starts, strict=True):
                grads.append(flat.narrow(0, start, part.values.numel()))
        return grads

    def give_back(self) -> None:
        # The engine's step divides by the loss scale.
        scale = self._scale()
        if scale != 1.0:
            torch._foreach_mul_(self._flat, scale)
        self._flat = []

    def _flat_gradients(self) -> list[torch.Tensor]:
        """Return the flat gradients that the step will use, one vector for each group."""
        raise NotImplementedError

    def has_overflowed(self) -> bool:
        zero = self._zero
        is_half = getattr(zero, "dtype", None) is torch.float16
        if not getattr(zero, "check_grad_overflow", is_half):
            return False
        return bool(zero.has_overflow())

    def skip(self) -> None:
        # The engine counts a skipped step, and its scheduler waits.
        self._zero.overflow = True
        self._zero.zero_grad(set_to_none=True)


class _Zero12(_Zero):
    """Stages 1 and 2: each process has a part of the flat vector of each group."""

    def _params_and_weights(self) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        return self._zero.bit16_groups, self._zero.single_partition_of_fp32_groups

    def _flat_gradients(self) -> list[torch.Tensor]:
        zero = self._zero
        partitions = zero.single_partition_of_fp32_groups
        if zero.cpu_offload:
            zero._wait_for_offload_copies()
            return [partition.grad for partition in partitions]

        # The step flattens the list of gradients of each group. A single vector stays as it is.
        flats = []
        for number, partition in enumerate(partitions):
            flat = zero.flatten(zero.averaged_gradients[number]).to(partition.dtype)
            padding = partition.numel() - flat.numel()
            if padding:
                flat = torch.cat([flat, flat.new_zeros(padding)])
            zero.averaged_gradients[number] = [flat]
            flats.append(flat)
        return flats

    def skip(self) -> None:
        super().skip()
        zero = self._zero
        zero._update_scale(False)
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
            return
        for number in zero.averaged_gradients:
            zero.averaged_gradients[number] = None
            zero.all_grad_tensors[number] = None


class _Zero3(_Zero):
    """Stage 3: each process has a part of each parameter."""

    def _process_groups(self) -> list[Any]:
        default = self._zero.dp_process_group
        params = chain.from_iterable(self._zero.fp16_groups)
        return [getattr(p, "ds_process_group", default) for p in params]

    def _params_and_weights(self) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        return self._zero.fp16_groups, self._zero.fp32_partitioned_groups_flat

    def _place(self, p: Any) -> tuple[int, int]:
        zero = self._zero
        _, start, size = zero.grad_position[zero.get_param_id(p)]
        # The last processes have padding behind the parameter.
        begin = min(torch.distributed.get_rank(self.group) * size, p.ds_numel)
        return start, min(size, p.ds_numel - begin)

    def _flat_gradients(self) -> list[torch.Tensor]:
        zero = self._zero
        partitions = zero.fp32_partitioned_groups_flat
        if zero.offload_optimizer:
            return [partition.grad for partition in partitions]

        flats = []
        for number, partition in enumerate(partitions):
            grads = zero.averaged_gradients[number]
            flat = zero.flatten(grads).to(partition.dtype)
            # A single one is the buffer itself, to which the engine may add.
            if len(grads) == 1:
                flat = flat.clone()
            zero.averaged_gradients[number] = [flat]
            flats.append(flat)
        return flats

    def skip(self) -> None:
        super().skip()
        zero = self._zero
        zero._update_scale(False)
        zero.micro_step_id = 0
        zero._epilogue_ran_this_backward = False
        if zero.offload_optimizer:
            zero.reset_cpu_buffers()
        else:
            zero.averaged_gradients = {}


class _Bf16(_Zero):
    """``BF16_Optimizer``: stage 1 with gradients that are summed in float32."""

    def __init__(self, zero: Any) -> None:
        if zero.grad_acc_dtype is not torch.float32:
            msg = (
                "BF16_Optimizer sums gradients in bfloat16; write "
                '"data_types": {"grad_accum_dtype": "fp32"} in the config'
            )
            raise ValueError(msg)
        super().__init__(zero)

    def _params_and_weights(self) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        return self._zero.bf16_groups, self._zero.fp32_groups_flat_partition

    def _flat_gradients(self) -> list[torch.Tensor]:
        return list(self._zero.fp32_groups_gradient_flat_partition)

    def skip(self) -> None:
        self._zero.overflow = True
        self._zero.clear_hp_grads()
        self._zero.clear_lp_grads()


class _Unfused(Source):
    """``FP16_UnfusedOptimizer``, stage 0 in 16 bits: whole float32 copies, updated by one step."""

    def __init__(self, outer: Any, names: dict[int, str]) -> None:
        self.limits = ((outer, "clip_grad"),)
        self._outer = outer
        # When this one steps, the float32 gradients of all groups are there, unscaled.
        self.stepped = outer.optimizer
        self._copies = list(chain.from_iterable(outer.fp32_groups))
        self.groups = []
        for params, copies in zip(outer.fp16_groups, outer.fp32_groups, strict=True):
            parts = []
            for number, (p, copy) in enumerate(zip(params, copies, strict=True)):
                name = name_in_model(names[id(p)]) if id(p) in names else number
                parts.append(Part(name, tuple(p.shape), copy.detach().view(-1)))
            self.groups.append(parts)

    def take(self) -> list[torch.Tensor | None]:
        return [None if p.grad is None else p.grad.view(-1) for p in self._copies]

    def skip(self) -> None:
        self._outer.overflow = True


def source_of(optimizer: Any, names: dict[int, str]) -> Source:
    """Return the gradients inside of an optimizer of DeepSpeed, which is known by its class."""
    kind = type(optimizer).__name__
    sources: dict[str, Callable[[Any], Source]] = {
        "DeepSpeedZeroOptimizer": _Zero12,
        "DeepSpeedZeroOptimizer_Stage3": _Zero3,
        "BF16_Optimizer": _Bf16,
    }
    if kind in sources:
        return sources[kind](optimizer)
    if kind == "FP16_UnfusedOptimizer":
        return _Unfused(optimizer, names)
    msg = (
        f"uniclip doesn't know where DeepSpeed's {kind} has its gradients; use ZeRO stage 1, 2 or "
        "3, or stage 0 with an optimizer of PyTorch"
    )
    raise TypeError(msg)


def limit_of(engine: Any) -> Limit:
    """Return where an engine without ZeRO, in float32, has the limit of its own clipping."""
    return engine._config, "gradient_clipping"


def has_limit(engine: Any) -> bool:
    """Return whether the config of an engine sets a limit; 1.0 is the default."""
    return "gradient_clipping" in engine._config._param_dict


def raise_if_pipeline(engine: Any) -> None:
    """Raise for an engine whose processes have different layers."""
    if any(base.__name__ == "PipelineEngine" for base in type(engine).__mro__):
        msg = "uniclip can't clip inside of DeepSpeed's PipelineEngine; use its gradient_clipping"
        raise ValueError(msg)


class CheckpointHooks:
    """Save the state of a rule in the checkpoints of an engine, and load it with them."""

    def __init__(self, engine: Any, handle: Attached) -> None:
        self._attributes = vars(engine)
        self._before = {
            name: self._attributes.get(name) for name in ("save_checkpoint", "load_checkpoint")
        }
        save_checkpoint, load_checkpoint = engine.save_checkpoint, engine.load_checkpoint

        def save(
            save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            state = {**(client_state or {}), _KEY: handle.numbers()}
            return save_checkpoint(save_dir, tag, state, *args, **kwargs)

        def load(*args: Any, **kwargs: Any) -> Any:
            path, client_state = load_checkpoint(*args, **kwargs)
            if path is not None and _KEY in (client_state or {}):
                handle.load_state_dict(client_state[_KEY])
            elif path is not None:
                handle.expect_state()
            return path, client_state

        self._attributes |= {"save_checkpoint": save, "load_checkpoint": load}

    def remove(self) -> None:
        """Give the engine its own methods back."""
        for name, method in self._before.items():
            del self._attributes[name]
            if method is not None:
                self._attributes[name] = method
