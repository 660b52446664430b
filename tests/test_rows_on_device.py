"""Rules by row on an accelerator, where the norms of all leaves are one vector."""

from __future__ import annotations

from typing import Any

import pytest

import uniclip as uc
from kit.devices import on_torch

pytestmark = pytest.mark.needs("torch")


class Halves(uc.Limit):
    """Half of each norm, in the shape of the norms of a leaf."""

    def __call__(self, norms: Any, state: Any, context: Any) -> tuple[Any, Any]:
        # The limit does not declare itself elementwise, so it gets the shape of the leaf.
        assert len(norms.shape) > 1
        return norms / 2, state


def test_a_leaf_without_rows() -> None:
    """A leaf without rows, beside a vector with one norm, is clipped on a device as on the CPU."""
    import torch

    grads = [torch.ones(0, 5), torch.ones(300)]
    rule = uc.Rule(0.1, scope=uc.scopes.unit(0))
    expected, _ = uc.clip(grads, rule)
    with on_torch():
        clipped, report = uc.clip(grads, rule)
        shapes = [tuple(norm.shape) for norm in report.norms]
    torch.testing.assert_close(clipped, expected)
    assert shapes == [tuple(norm.shape) for norm in uc.clip(grads, rule)[1].norms]


@pytest.mark.parametrize(
    "rule",
    [
        uc.agc(0.01),
        uc.agc(0.01, nonfinite="skip"),
        uc.Rule(0.1, scope=uc.scopes.unit(0), norm=uc.norms.RMS),
        uc.Rule(0.1, scope=uc.scopes.unit(0), norm=uc.norms.Norm(8)),
        uc.Rule(Halves(), scope=uc.scopes.unit(0)),
    ],
    ids=["agc", "agc, skip", "rms", "l8", "not elementwise"],
)
def test_rows_of_all_shapes(rule: Any) -> None:
    """Rows of leaves of several shapes are clipped on a device as on the CPU.

    Their norms in the report have the shapes of the leaves.
    """
    import torch

    torch.manual_seed(0)
    grads = [torch.randn(shape) for shape in [(8, 40), (9, 50), (8, 30), (7, 3, 11, 5)]]
    given = {"params": [grad + 1 for grad in grads]} if rule.limit.needs else {}
    expected, report = uc.clip(grads, rule, **given)
    with on_torch():
        clipped, on_device = uc.clip(grads, rule, **given)
        norms, factors = on_device.norms, on_device.factors
    for found, wanted in ((clipped, expected), (norms, report.norms), (factors, report.factors)):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
