# SPDX-License-Identifier: MIT
"""Agree with other processes that take the same step, which an optimizer does not know about.

How norms are reduced over processes is in `uniclip._core.collectives`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch

from uniclip._core.collectives import AllReduce, Loss, mean_loss, reducer_of
from uniclip._errors import check_step_arguments, summarize
from uniclip._types import Number
from uniclip.backends.torch import BACKEND
from uniclip.backends.torch.dtensor import is_dtensor
from uniclip.compose import ByValue, Chain, rules_with_norms, walk_rules
from uniclip.rule import BaseRule, Rule
from uniclip.scopes import all_leaves


def several() -> bool:
    """Return whether the run has several processes."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return bool(distributed.get_world_size() > 1)


def reduced_everywhere(params: Iterable[torch.Tensor]) -> bool:
    """Return whether the gradient of a parameter is reduced over all processes at once."""
    size = torch.distributed.get_world_size()
    for param in params:
        if is_dtensor(param) and param.requires_grad and size in param.device_mesh.shape:
            return True
    return False


def check_shards(
    tensors: Iterable[torch.Tensor], name: str, rule: BaseRule, all_reduce: AllReduce | None
) -> None:
    """Raise if tensors are the parameters of FSDP1, which are shards that look like whole tensors,
    unless ``all_reduce`` reduces their norm.

    Raises
    ------
    ValueError
        If one of them is, and there are several processes.
    """
    if not any(getattr(tensor, "_fsdp_flattened", False) for tensor in tensors):
        return
    if not several():
        return

    # A clip by value needs no other process.
    measuring = [inner for inner in walk_rules(rule) if not isinstance(inner, (Chain, ByValue))]
    if not measuring:
        return

    shards = (
        f"{name} holds parameters of FullyShardedDataParallel (FSDP1), of which each process has "
        "only a shard"
    )
    if all_reduce is None:
        msg = (
            f"{shards}, so each process would clip by another norm; use FSDP2 "
            "(torch.distributed.fsdp.fully_shard), pass the process group of that module as "
            "all_reduce=, or use its own clip_grad_norm_"
        )
        raise ValueError(msg)

    # Each of these shards has elements of several parameters.
    if not all(isinstance(inner, Rule) and inner.scope == all_leaves for inner in measuring):
        msg = (
            f"{shards} of several parameters together, but {summarize(rule)} has a norm for each; "
            "use FSDP2 (torch.distributed.fsdp.fully_shard), or a rule with one norm for all, "
            "such as uc.by_global_norm(1.0)"
        )
        raise ValueError(msg)


def raise_if_unnamed(
    rule: BaseRule, param_groups: list[dict[str, Any]], names: Container[int]
) -> None:
    """Raise if norms of parameters without names would be reduced over processes, in which other
    parameters have the same numbers.
    """
    # Norms of groups are matched by the labels of these.
    if all(inner.scope.label is not None for inner in rules_with_norms(rule)):
        return

    for group in param_groups:
        if "param_names" in group or all(id(p) in names for p in group["params"]):
            continue
        msg = (
            f"{summarize(rule)} has a norm for each leaf, and all_reduce= matches leaves by name, "
            "but the optimizer has only numbers for its parameters; pass names, as in "
            "attach(optimizer, rule, names=model) or torch.optim.AdamW(model.named_parameters())"
        )
        raise ValueError(msg)


def any_found_inf(
    found_inf: torch.Tensor | None, all_reduce: AllReduce | None, device: torch.device | None
) -> torch.Tensor | None:
    """Return GradScaler's flag, set if it is set in any of the processes."""
    if found_inf is None or all_reduce is None:
        return found_inf

    # In a process without gradients GradScaler gives the number 0 for a flag.
    flag = torch.as_tensor(found_inf, dtype=torch.float32, device=device)
    reduce = reducer_of(BACKEND, all_reduce)
    return reduce(flag.reshape(1), "max").reshape(())


def average_loss(loss: Number | None, device: torch.device | None) -> Loss:
    """Return the mean of the losses of all processes that have one; every process takes part."""
    check_step_arguments(loss)

    own: Any = loss
    if loss is None:
        own = 0.0
    elif is_dtensor(loss):
        own = own.full_tensor()

    # A process without a loss adds nothing to the number of losses.
    sums = torch.full((2,), float(loss is not None), device=device)
    sums[0] = own.detach() if isinstance(own, torch.Tensor) else own
    torch.distributed.all_reduce(sums)
    return Loss(mean_loss(BACKEND, loss, sums.unbind()), loss)
