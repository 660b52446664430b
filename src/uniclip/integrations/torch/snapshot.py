# SPDX-License-Identifier: MIT
"""Find out whether tensors have changed since they were last seen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from uniclip.backends.torch.private import local_tensors, version_of

_SAMPLE = 16
"""How many elements of a tensor are compared."""

is_same = partial(torch.allclose, rtol=0.0, atol=0.0, equal_nan=True)
"""Returns whether two tensors are equal; NaN equals NaN."""


class Snapshot:
    """Detect later changes of tensors without a copy of them all."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, reads: bool = True) -> None:
        self._marks = _marks_of(tensors)

        # Keep two tensors alive, so that no other tensor can get their addresses.
        moving = [p for p in tensors if p.requires_grad] or tensors
        self._kept_alive = sorted(moving, key=torch.Tensor.numel)[:2]
        # A write through `p.data` changes no version counter, so a few elements are compared.
        readable = filter(_is_regular, self._kept_alive if reads else ())
        self._samples = [(p, _first_elements(p).clone()) for p in readable]

    def has_changed(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these are others, or have moved; this reads values."""
        if self._marks != _marks_of(tensors):
            return True
        return not all(is_same(_first_elements(p), sample) for p, sample in self._samples)


def _marks_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Return the version counter of each tensor and of its local tensor, and the address.

    FSDP2 adds gradients to the local tensor of a distributed one. PyTorch's functions of lists of
    distributed tensors change no version counter, and are not noticed.
    """
    marks = []
    for p, local in zip(tensors, local_tensors(list(tensors)), strict=True):
        address = local.data_ptr() if _is_regular(local) else id(local)
        marks.append((version_of(p), version_of(local), address))
    return marks


def _is_regular(p: torch.Tensor) -> bool:
    """Return whether a parameter has values in one storage: no subclass such as DTensor, and not on
    ``meta``.
    """
    return type(p) in {torch.nn.Parameter, torch.Tensor} and not p.is_meta


def _first_elements(p: torch.Tensor) -> torch.Tensor:
    """Return a few elements of a parameter."""
    return p.detach().reshape(-1)[:_SAMPLE]
