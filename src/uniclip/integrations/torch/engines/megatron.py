# SPDX-License-Identifier: MIT
"""The optimizers of Megatron Core: their private attributes, of version 0.16.

They copy all gradients, then clip, and then update all parameters by ``step_with_ready_grads``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from uniclip.integrations.torch.engines.source import Part, Source, name_in_model

_KNOWN = {"FP32Optimizer", "Float16OptimizerWithFloat16Params", "DistributedOptimizer"}
_REFUSED = {
    "get_pipeline_model_parallel_world_size": "pipelines, whose stages have equal names",
    "get_expert_model_parallel_world_size": "experts on several processes, which have equal names",
    "get_context_parallel_world_size": "context parallelism",
}
"""Functions that return how many processes divide the model in a way that was not tested."""


class Megatron(Source):
    """One optimizer of Megatron, or several in a chain."""

    method = "step_with_ready_grads"

    def __init__(self, outer: Any, names: dict[int, str]) -> None:
        _check_layout()
        self.stepped = outer
        chained = getattr(outer, "chained_optimizers", [outer])
        optimizers = [one for one in chained if not getattr(one, "is_stub_optimizer", False)]
        for one in optimizers:
            kind = type(one).__name__
            if kind not in _KNOWN:
                msg = (
                    f"uniclip doesn't know where Megatron's {kind} has its gradients; use one of "
                    f"{', '.join(sorted(_KNOWN))}, or clip_grad"
                )
                raise TypeError(msg)
            if one.config.use_precision_aware_optimizer or one.config.optimizer_cpu_offload:
                msg = (
                    "with use_precision_aware_optimizer or optimizer_cpu_offload, Megatron keeps "
                    "the float32 weights elsewhere; set both to False, or use clip_grad"
                )
                raise ValueError(msg)
        # Several optimizers may have one configuration.
        configs = {id(one.config): one.config for one in optimizers}
        self.limits = tuple((config, "clip_grad") for config in configs.values())
        self.group = _group_of(optimizers)

        self._names = names
        self.groups = []
        self._params: list[torch.Tensor | None] = []
        """The tensors whose ``.grad`` the optimizers use, ``None`` without a part here."""
        for one in optimizers:
            for pairs in _params_of(one):
                self._add_group(one, pairs)

    def _add_group(self, optimizer: Any, pairs: list[tuple[Any, Any]]) -> None:
        """Note the parts of some parameters of the model."""
        parts = []
        for number, (p, main) in enumerate(pairs):
            name = self._names.get(id(p))
            if name is None and self.group is not None:
                msg = (
                    "a parameter of Megatron's optimizer has no name; pass the model, as in "
                    "attach(optimizer, rule, names=model)"
                )
                raise ValueError(msg)
            values = torch.zeros(0, device=p.device) if main is None else main.detach().view(-1)
            # Tensor parallelism repeats a parameter that it does not divide.
            is_divided = getattr(p, "tensor_model_parallel", False) or self.group is None
            holders = 1 if is_divided else torch.distributed.get_world_size(optimizer.tp_group)
            key = number if name is None else name_in_model(name)
            parts.append(Part(key, tuple(p.shape), values, holders))
            self._params.append(main)
        self.groups.append(parts)

    def take(self) -> list[torch.Tensor | None]:
        grads = [None if p is None else p.grad for p in self._params]
        return [None if grad is None else grad.view(-1) for grad in grads]

    def skip(self) -> bool:
        # A loop does not step its scheduler then.
        return False


def _check_layout() -> None:
    """Raise if the model is divided in a way that is not supported."""
    state = sys.modules["megatron.core.parallel_state"]
    for function, what in _REFUSED.items():
        if getattr(state, function)() > 1:
            msg = f"uniclip can't clip inside of Megatron with {what}; use clip_grad"
            raise ValueError(msg)


def _group_of(optimizers: list[Any]) -> Any:
    """Return the processes over which optimizers reduce norms, ``None`` if it is one process."""
    groups = {id(group): group for group in [o.get_grad_stats_parallel_group() for o in optimizers]}
    of_several = [g for g in groups.values() if torch.distributed.get_world_size(g) > 1]
    if not of_several:
        return None
    if len(groups) > 1:
        msg = (
            "Megatron's optimizers reduce norms over different processes; use "
            "use_distributed_optimizer=True, or clip_grad"
        )
        raise ValueError(msg)
    # Megatron's None stands for all processes.
    return of_several[0] or torch.distributed.group.WORLD


def _params_of(optimizer: Any) -> list[list[tuple[Any, Any]]]:
    """Return the parameters of the model by group, each with the tensor that the optimizer updates:
    itself, its float32 copy, or a part of that; ``None`` if the part is elsewhere.
    """
    kind = type(optimizer).__name__
    if kind == "FP32Optimizer":
        return [[(p, p) for p in group["params"]] for group in optimizer.optimizer.param_groups]

    if kind == "Float16OptimizerWithFloat16Params":
        groups = []
        for params, copies, full in zip(
            optimizer.float16_groups,
            optimizer.fp32_from_float16_groups,
            optimizer.fp32_from_fp32_groups,
            strict=True,
        ):
            groups.append([*zip(params, copies, strict=True), *[(p, p) for p in full]])
        return groups

    # The groups list only parameters with a local part, the buffers list all.
    parts: dict[Any, Any] = {}
    for models, shards in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for of_model, of_shards in zip(models, shards, strict=True):
            parts.update(zip(of_model, of_shards, strict=True))
    return [[(p, parts.get(p)) for buffer in optimizer.buffers for p in buffer.params]]
