# SPDX-License-Identifier: MIT
"""Other processes that take the same step, which an optimizer does not know about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from uniclip._core.collectives import Loss, mean_loss, reducer_of
from uniclip._errors import check_step_arguments, summarize
from uniclip.backends.torch import BACKEND
from uniclip.backends.torch.dtensor import is_dtensor
from uniclip.compose import ByValue, Chain, rules_with_norms, walk_rules
from uniclip.rule import Rule
from uniclip.scopes import all_leaves


def several() -> bool:
    """Whether there are other processes."""
    here = torch.distributed
    return bool(here.is_available() and here.is_initialized() and here.get_world_size() > 1)


def check_shards(tensors: Iterable[Any], name: str, rule: Any, all_reduce: Any) -> None:
    """Refuse the parameters of FSDP1, plain tensors that are parts,
    unless ``all_reduce`` joins their norm.

    Raises
    ------
    ValueError
        If there is one, and there are several processes.
    """
    flat = any(getattr(tensor, "_fsdp_flattened", False) for tensor in tensors)
    if not flat or not several():
        return
    parts = [one for one in walk_rules(rule) if not isinstance(one, (Chain, ByValue))]
    one_norm = all(isinstance(one, Rule) and one.scope == all_leaves for one in parts)
    if not parts or (all_reduce is not None and one_norm):
        return
    what = (
        f"{name} holds parameters of FullyShardedDataParallel (FSDP1), of which each process has a "
        "part"
    )
    if all_reduce is not None:
        msg = (
            f"{what} of several leaves as one, and {summarize(rule)} has a norm for each leaf: use "
            "FSDP2 (torch.distributed.fsdp.fully_shard), or a rule with one norm for all, such "
            "as uc.by_global_norm(1.0)"
        )
        raise ValueError(msg)
    msg = (
        f"{what} that looks like the whole, so that each would clip by another norm: use FSDP2 "
        "(torch.distributed.fsdp.fully_shard), give all_reduce=, the process group of that "
        "module, or use its own clip_grad_norm_ instead"
    )
    raise ValueError(msg)


def raise_if_unnamed(rule: Any, param_groups: Any, names: Any) -> None:
    """Refuse to join norms of leaves without names,
    since other processes have leaves with the same numbers.
    """
    unnamed = [
        p
        for group in param_groups
        if "param_names" not in group
        for p in group["params"]
        if p not in names
    ]
    if unnamed and any(one.scope.label is None for one in rules_with_norms(rule)):
        msg = (
            f"{summarize(rule)} has a norm for each leaf, and processes know their leaves by name, "
            "but the optimizer knows its parameters by their numbers only: give their names, by "
            "attach(optimizer, rule, names=model), or to the optimizer, as in "
            "torch.optim.AdamW(model.named_parameters())"
        )
        raise ValueError(msg)


def any_found_inf(found_inf: Any, all_reduce: Any, device: Any) -> Any:
    """Return GradScaler's flag, set if it is set in any of the processes."""
    if found_inf is None or all_reduce is None:
        return found_inf
    # 0 in a process without gradients
    flag = torch.as_tensor(found_inf, dtype=torch.float32, device=device)
    return reducer_of(BACKEND, all_reduce)(flag.reshape(1), "max").reshape(())


def average_loss(loss: Any, device: Any) -> Loss:
    """Return the mean of the losses of all processes that have one; all of them take part."""
    check_step_arguments(loss)
    own = 0.0 if loss is None else loss.full_tensor() if is_dtensor(loss) else loss
    value = torch.as_tensor(own, dtype=torch.float32, device=device).detach().reshape(())
    sums = torch.stack([value, torch.full_like(value, float(loss is not None))])
    torch.distributed.all_reduce(sums)
    return Loss(mean_loss(BACKEND, loss, sums.unbind()), loss)
