"""PyTorch's search for NaN finds none that uniclip has made from healthy gradients."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

from healthy import PARAMS, RULES, STEPS, arrays_of


def variable(array: Any) -> torch.Tensor:
    """Return a tensor whose derivatives count."""
    return torch.tensor(array, dtype=torch.float32, requires_grad=True)


@pytest.mark.parametrize("name", RULES)
def test_detect_anomaly(name: str) -> None:
    """Derivatives through any rule, of usual gradients, of zeros and of a spike, pass the search."""
    rule, params = RULES[name], arrays_of(variable, PARAMS)
    state = rule.init(params)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        for number, values in enumerate(STEPS):
            grads = arrays_of(variable, values)
            clipped, state, report = rule.update(grads, state, params, loss=2.0 - 0.1 * number)
            norms = [norm for norm in optree.tree_leaves(report.norms) if norm.requires_grad]
            sum(leaf.sum() for leaf in [*optree.tree_leaves(clipped), *norms]).backward()
            assert all(torch.isfinite(leaf.grad).all() for leaf in optree.tree_leaves(grads))
