# SPDX-License-Identifier: MIT
"""What an optimizer cannot see: that other processes take the same step."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from uniclip._checks import refuse_in_step
from uniclip.backends.dtensor import is_dtensor
from uniclip.losses import Loss


def several() -> bool:
    """Whether there are other processes."""
    here = torch.distributed
    return bool(here.is_available() and here.is_initialized() and here.get_world_size() > 1)


def refuse_parts(tensors: Iterable[Any], name: str) -> None:
    """Refuse the parameters of FSDP1, plain tensors of which each process holds a part.

    Raises
    ------
    ValueError
        If there is one, and there are several processes.
    """
    flat = any(getattr(tensor, "_fsdp_flattened", False) for tensor in tensors)
    if flat and several():
        msg = (
            f"{name} holds parameters of FullyShardedDataParallel (FSDP1), of which each process has a part that looks "
            "like the whole, so that each would clip by another norm: use FSDP2 (torch.distributed.fsdp.fully_shard), "
            "or that module's own clip_grad_norm_ instead"
        )
        raise ValueError(msg)


def of_all(loss: Any, device: Any) -> Loss:
    """Return the mean of the losses of all processes that have one, which is found once and by all together."""
    refuse_in_step(None, loss)
    return Loss(partial(_mean, loss, device))


def _mean(loss: Any, device: Any) -> Any:
    own = 0.0 if loss is None else loss.full_tensor() if is_dtensor(loss) else loss
    value = torch.as_tensor(own, dtype=torch.float32, device=device).detach().reshape(())
    total = torch.stack([value, torch.full_like(value, loss is not None)])
    torch.distributed.all_reduce(total)
    return total[0] / total[1] if loss is not None or bool(total[1] > 0) else None
