# SPDX-License-Identifier: MIT
"""The optimizers of DeepSpeed: its private attributes, of version 0.19."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from inspect import signature
from itertools import chain
from typing import Any

import torch

from uniclip.backends.torch.private import foreach_div_, foreach_mul_
from uniclip.integrations.torch.engines.source import (
    Handle,
    Part,
    ReplacedAttribute,
    Source,
    name_in_model,
)

_KEY = "uniclip"
"""The key of the rule's state in the ``client_state`` of a checkpoint."""
_REFUSED = {
    "has_moe_layers": "experts",
    "swap_optimizer": "optimizer states on NVMe",
    "zenflow": "ZenFlow",
    "torch_autocast_gradscaler": "torch_autocast in float16, which has a loss scale of its own",
    "use_muon": "Muon, which changes gradients before the step",
}


class _Zero(Source):
    """An optimizer of ZeRO, whose step takes one group of parameters after the other."""

    params_attribute: str
    """Its attribute with the parameters of each flat vector."""
    weights_attribute: str
    """Its attribute with the float32 weights of each flat vector, the part of this process."""
    offload_attribute: str
    """Its attribute that says whether gradients are on the host."""

    def __init__(self, zero: Any, names: dict[int, str]) -> None:
        self.stepped = zero
        self._zero = zero
        self.limits = ((zero, "clip_grad"),)
        process_groups = {id(group): group for group in self._process_groups()}

        refused = [what for attribute, what in _REFUSED.items() if getattr(zero, attribute, False)]
        parallel = getattr(zero, "model_parallel_group", None)
        if parallel is not None and torch.distributed.get_world_size(parallel) > 1:
            refused.append("tensor parallelism")
        if len(process_groups) > 1:
            refused.append("parameters of several groups of processes, as those of experts")
        if refused:
            msg = (
                f"uniclip can't clip inside of DeepSpeed's {type(zero).__qualname__} with "
                f"{refused[0]}; use its gradient_clipping"
            )
            raise ValueError(msg)

        [self.group] = process_groups.values()
        self._flat: list[torch.Tensor] = []
        """The flat gradients of a step."""
        self._places: list[list[tuple[int, int]]] = []
        """Where each part begins in each flat vector, and its size."""
        self._names = names
        self._weights = [p.detach() for p in getattr(zero, self.weights_attribute)]
        numbers = self._group_numbers(len(self._weights))
        self.groups = [[] for _ in range(max(numbers) + 1)]
        params_of_flat = getattr(zero, self.params_attribute)
        for number, params, weights in zip(numbers, params_of_flat, self._weights, strict=True):
            places = [self._place(p) for p in params]
            self._places.append(places)
            self.groups[number] += self._parts(params, places, weights)

    def _process_groups(self) -> list[Any]:
        """Return the processes that have the parts of each group."""
        return list(self._zero.real_dp_process_group)

    def _group_numbers(self, count: int) -> list[int]:
        """Return the parameter group of each of ``count`` flat vectors."""
        return list(range(count))

    def _place(self, p: Any) -> tuple[int, int]:
        """Return where the part of a parameter begins in the flat vector, and its size."""
        mapping = p._hp_mapping
        if mapping is None:
            return 0, 0
        address = mapping.hp_fragment_address
        return int(address.start), int(address.numel)

    def _parts(
        self, params: Iterable[Any], places: list[tuple[int, int]], weights: torch.Tensor
    ) -> Iterator[Part]:
        """Yield the parts of parameters in a flat vector."""
        for p, place in zip(params, places, strict=True):
            name = name_in_model(self._names.get(id(p), self._zero.param_names[p]))
            yield Part(name, tuple(getattr(p, "ds_shape", p.shape)), weights.narrow(0, *place))

    def _scale(self) -> float:
        """Return the loss scale."""
        return float(getattr(self._zero, "loss_scale", 1.0) or 1.0)

    def take(self) -> list[torch.Tensor | None]:
        self._flat = self._flat_gradients()
        scale = self._scale()
        if scale != 1.0:
            foreach_div_(self._flat, scale)

        grads: list[torch.Tensor | None] = []
        for flat, places in zip(self._flat, self._places, strict=True):
            grads += [flat.narrow(0, *place) for place in places]
        return grads

    def give_back(self) -> None:
        # The engine's step divides by the loss scale.
        scale = self._scale()
        if scale != 1.0:
            foreach_mul_(self._flat, scale)
        self._flat = []

    def _flat_gradients(self) -> list[torch.Tensor]:
        """Return the flat gradients that the step will use."""
        if getattr(self._zero, self.offload_attribute):
            return [weights.grad for weights in getattr(self._zero, self.weights_attribute)]

        # The step flattens the gradients of each vector; a single one stays as it is.
        gradients = self._zero.averaged_gradients
        flats = []
        for number, weights in enumerate(self._weights):
            parts = self._zero.flatten(gradients[number])
            # The last process has padding, and the engine may still add to its own buffer.
            flat = torch.zeros_like(weights)
            flat[: parts.numel()].copy_(parts)
            gradients[number] = [flat]
            flats.append(flat)
        return flats

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

    params_attribute = "bit16_groups"
    weights_attribute = "single_partition_of_fp32_groups"
    offload_attribute = "cpu_offload"

    def _flat_gradients(self) -> list[torch.Tensor]:
        self._zero._wait_for_offload_copies()
        return super()._flat_gradients()

    def skip(self) -> None:
        super().skip()
        zero = self._zero
        zero._update_scale(False)
        # As at the beginning of a step: the next gradients are not added to these.
        zero.micro_step_id = -1
        if zero.cpu_offload:
            zero._offload_accumulated_param_ids = set()
            zero.reset_cpu_buffers()
            return
        for number in zero.averaged_gradients:
            zero.averaged_gradients[number] = None
            zero.all_grad_tensors[number] = None


class _Zero3(_Zero):
    """Stage 3: each process has a part of each parameter."""

    params_attribute = "fp16_groups"
    weights_attribute = "fp32_partitioned_groups_flat"
    offload_attribute = "offload_optimizer"

    def _process_groups(self) -> list[Any]:
        default = self._zero.dp_process_group
        params = chain.from_iterable(self._zero.fp16_groups)
        return [getattr(p, "ds_process_group", default) for p in params]

    def _group_numbers(self, count: int) -> list[int]:
        # A large group has several flat vectors.
        return [self._zero.sub_group_to_group_id[number] for number in range(count)]

    def _place(self, p: Any) -> tuple[int, int]:
        zero = self._zero
        _, start, size = zero.grad_position[zero.get_param_id(p)]
        # The last processes have padding behind the parameter.
        begin = min(torch.distributed.get_rank(self.group) * size, p.ds_numel)
        return start, min(size, p.ds_numel - begin)

    def skip(self) -> None:
        zero = self._zero
        zero._pre_step()
        super().skip()
        zero._update_scale(False)
        zero._overflow_clean_up(zero.loss_scale)


class _Bf16(_Zero):
    """``BF16_Optimizer``: stage 1 with gradients that are summed in float32."""

    params_attribute = "bf16_groups"
    weights_attribute = "fp32_groups_flat_partition"

    def __init__(self, zero: Any, names: dict[int, str]) -> None:
        if zero.grad_acc_dtype is not torch.float32:
            msg = (
                f"BF16_Optimizer sums gradients in {zero.grad_acc_dtype}; write "
                '"data_types": {"grad_accum_dtype": "fp32"} in the config'
            )
            raise ValueError(msg)
        super().__init__(zero, names)

    def _flat_gradients(self) -> list[torch.Tensor]:
        return list(self._zero.fp32_groups_gradient_flat_partition)

    def skip(self) -> None:
        self._zero.overflow = True
        self._zero.clear_hp_grads()
        self._zero.clear_lp_grads()


class _Unfused(Source):
    """``FP16_UnfusedOptimizer``, stage 0 in 16 bits: whole float32 copies, updated by one step."""

    def __init__(self, outer: Any, names: dict[int, str]) -> None:
        if outer.fused_lamb_legacy:
            msg = "uniclip can't clip inside of DeepSpeed's legacy FusedLamb; use another optimizer"
            raise ValueError(msg)
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
    sources: dict[str, Callable[[Any, dict[int, str]], Source]] = {
        "DeepSpeedZeroOptimizer": _Zero12,
        "DeepSpeedZeroOptimizer_Stage3": _Zero3,
        "BF16_Optimizer": _Bf16,
        "FP16_UnfusedOptimizer": _Unfused,
    }
    if kind in sources:
        return sources[kind](optimizer, names)
    msg = (
        f"uniclip doesn't know where DeepSpeed's {kind} has its gradients; use ZeRO stage 1, 2 or "
        "3, or stage 0 with an optimizer of PyTorch"
    )
    raise TypeError(msg)


def checkpoint_hooks(engine: Any, handle: Handle) -> list[ReplacedAttribute]:
    """Save the state of a rule in the checkpoints of an engine, and load it with them."""
    save_checkpoint, load_checkpoint = engine.save_checkpoint, engine.load_checkpoint

    def save(
        save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        state = {**(client_state or {}), _KEY: handle.numbers()}
        return save_checkpoint(save_dir, tag, state, *args, **kwargs)

    def load(*args: Any, **kwargs: Any) -> Any:
        path, client_state = load_checkpoint(*args, **kwargs)
        options = signature(load_checkpoint).bind(*args, **kwargs).arguments
        # The state of the rule is one of the optimizer.
        leaves_out = not options.get("load_optimizer_states", True)
        if path is None or leaves_out or options.get("load_module_only"):
            return path, client_state
        if _KEY in (client_state or {}):
            handle.load_state_dict(client_state[_KEY])
        else:
            handle.expect_state()
        return path, client_state

    return [
        ReplacedAttribute(engine, "save_checkpoint", save),
        ReplacedAttribute(engine, "load_checkpoint", load),
    ]
