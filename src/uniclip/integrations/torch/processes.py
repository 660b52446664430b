# SPDX-License-Identifier: MIT
"""Agree with other processes that take the same step, which an optimizer does not know about, and
refuse parameters of FSDP1 whose norm is not reduced right.

How norms are reduced over processes is in `uniclip._core.collectives`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch

from uniclip._core.collectives import AllReduce, Loss, mean_loss, reducer_of
from uniclip._errors import check_step_arguments, summarize
from uniclip._types import Number, StepOptions
from uniclip.backends.torch import BACKEND
from uniclip.backends.torch.dtensor import is_dtensor, reduce_over_group
from uniclip.backends.torch.private import FSDP1_FLAT_PARAM, FSDP1_PARAM, FSDP1_SIZE
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


FSDP1_MARKS = (FSDP1_PARAM, FSDP1_FLAT_PARAM, FSDP1_SIZE)
"""Attributes that FSDP1 sets."""


def check_shards(
    tensors: Iterable[torch.Tensor], name: str, rule: BaseRule, step: StepOptions
) -> None:
    """Raise if tensors are parameters of FSDP1, which are regular tensors, and the step does not
    say how to reduce their norm.

    Raises
    ------
    ValueError
        If there are several processes, and some are shards without ``all_reduce``, or whole with
        ``all_reduce`` and without ``shared``.
    """
    marked = [tensor for tensor in tensors if getattr(tensor, FSDP1_PARAM, False)]
    if not marked or not several():
        return

    # A clip by value needs no other process.
    measuring = [inner for inner in walk_rules(rule) if not isinstance(inner, (Chain, ByValue))]
    if not measuring:
        return

    fsdp1 = f"{name} holds parameters of FullyShardedDataParallel (FSDP1)"
    whole = _known_whole(marked)
    if whole and step.all_reduce is not None and step.shared is None:
        msg = (
            f"{fsdp1} that are whole in each process (NO_SHARD), so all_reduce= would count them "
            "once for each; leave all_reduce= out if all are, or mark those that several of its "
            "processes hold, by shared=lambda path, leaf: ..."
        )
        raise ValueError(msg)

    if len(whole) < len(marked) and step.all_reduce is None:
        msg = (
            f"{fsdp1}, of which each process has only a shard, so each process would clip by "
            "another norm; use FSDP2 (torch.distributed.fsdp.fully_shard), pass the process group "
            "of that module as all_reduce=, or use its own clip_grad_norm_. If they are whole "
            "(NO_SHARD with vectors alone), pass shared=lambda path, leaf: True as well"
        )
        raise ValueError(msg)

    # A shard, and a flat parameter, have elements of several leaves.
    flat = [tensor for tensor in marked if hasattr(tensor, FSDP1_FLAT_PARAM)]
    has_one_norm = all(isinstance(one, Rule) and one.scope == all_leaves for one in measuring)
    if not has_one_norm and (flat or len(whole) < len(marked)):
        msg = (
            f"{fsdp1}, which have several leaves together or parts of them, but "
            f"{summarize(rule)} has a norm for each; use FSDP2 "
            "(torch.distributed.fsdp.fully_shard), or a rule with one norm for all, such as "
            "uc.by_global_norm(1.0)"
        )
        raise ValueError(msg)


def _known_whole(marked: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return those parameters of FSDP1 that are known to be whole.

    A flat parameter has its whole size. Those with their own shapes (``use_orig_params``) share the
    storage of their module; if they were shards, all of them would be vectors.
    """
    storages = [tensor.untyped_storage().data_ptr() for tensor in marked]
    of_whole = {s for s, tensor in zip(storages, marked, strict=True) if tensor.ndim > 1}
    whole = []
    for storage, tensor in zip(storages, marked, strict=True):
        size = getattr(tensor, FSDP1_SIZE, None)
        is_whole_flat = size is not None and tensor.numel() >= size.numel()
        if is_whole_flat or storage in of_whole:
            whole.append(tensor)
    return whole


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


def whole_loss(loss: Any) -> Any:
    """Return a loss, a distributed one as a regular tensor."""
    return loss.full_tensor() if is_dtensor(loss) else loss


def average_loss(loss: Number | None, device: torch.device | None) -> Loss:
    """Return the mean of the losses of all processes that have one; every process takes part."""
    check_step_arguments(loss)
    own: Any = 0.0 if loss is None else loss

    # A process without a loss adds nothing to the number of losses.
    sums = torch.full((2,), float(loss is not None), device=device)
    sums[0] = own.detach() if isinstance(own, torch.Tensor) else own
    sums = reduce_over_group(sums, "sum", torch.distributed.group.WORLD)
    return Loss(mean_loss(BACKEND, loss, sums.unbind()), loss)
