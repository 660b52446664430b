"""PyTorch's derivatives of every function equal finite differences: reverse, forward and second, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import derivatives
import uniclip as uc
from derivatives import CASES, EVERYWHERE, POINTS, PRESETS, SOME, Case

DIRECTION = tuple(torch.from_numpy(leaf) for leaf in derivatives.DIRECTION)
WEIGHTS = [torch.from_numpy(leaf) for leaf in derivatives.WEIGHTS]


def at(case: Case, point: str) -> list[torch.Tensor]:
    """Return the gradients at a point."""
    return [torch.tensor(leaf, requires_grad=True) for leaf in case.at(point)]


def total(case: Case, x: Any) -> torch.Tensor:
    """Return the weighted sum of all entries of the results."""
    results = case.function(list(x))
    weights = WEIGHTS if len(results) == len(WEIGHTS) else [1.0]
    return sum((w * leaf).sum() for leaf, w in zip(results, weights, strict=True))


def known(found: Any) -> list[Any]:
    """Return derivatives that autograd has found, detached."""
    return [leaf.detach() + 0 for leaf in found]  # PyTorch's lazy zeros are no NumPy arrays


@EVERYWHERE
def test_reverse(case: Case, point: str) -> None:
    """backward() fills in the right gradients."""
    x = at(case, point)
    total(case, x).backward()
    derivatives.same([leaf.grad for leaf in x], derivatives.gradient(case, point))


@EVERYWHERE
def test_forward(case: Case, point: str) -> None:
    """Forward mode finds the right derivative in a direction, by dual numbers and by torch.func.jvp."""
    x = [leaf.detach() for leaf in at(case, point)]
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(*pair) for pair in zip(x, DIRECTION, strict=True)]
        found = [torch.autograd.forward_ad.unpack_dual(leaf).tangent for leaf in case.function(duals)]
    derivatives.same(found, derivatives.along(case, point))
    _, found = torch.func.jvp(lambda *x: tuple(case.function(list(x))), tuple(x), DIRECTION)
    derivatives.same(found, derivatives.along(case, point))


@EVERYWHERE
def test_second(case: Case, point: str) -> None:
    """Reverse over reverse and forward over reverse find the right second derivatives."""
    x = at(case, point)
    slopes = torch.autograd.grad(total(case, x), x, create_graph=True)
    slope = sum((a * b).sum() for a, b in zip(slopes, DIRECTION, strict=True))
    found = torch.autograd.grad(slope, x, materialize_grads=True) if slope.requires_grad else map(torch.zeros_like, x)
    derivatives.same_second(case, point, known(found))
    reverse = torch.func.grad(lambda x: total(case, x))
    _, found = torch.func.jvp(reverse, (tuple(leaf.detach() for leaf in x),), (DIRECTION,))
    derivatives.same_second(case, point, known(found))


@pytest.mark.parametrize("point", ["below", "above"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradcheck(case: Case, point: str) -> None:
    """PyTorch's own checks of first and second derivatives in both modes, alone and batched, pass."""
    x = at(case, point)
    function = lambda *x: tuple(case.function(list(x)))
    options = {"eps": 1e-6, "atol": 1e-5, "check_batched_grad": True}
    assert torch.autograd.gradcheck(function, x, check_forward_ad=True, check_batched_forward_grad=True, **options)
    assert torch.autograd.gradgradcheck(function, x, check_fwd_over_rev=True, **options)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_at_zero(name: str) -> None:
    """Where all gradients are 0, no preset for each leaf changes a derivative, and no second one is there."""
    zeros = [torch.zeros(shape, dtype=torch.float64) for shape in [(4, 3), (4,)]]
    params, ways = [leaf + 1 for leaf in zeros], [torch.ones_like(zeros[0]), 2 * torch.ones_like(zeros[1])]
    state = PRESETS[name].init(zeros)
    function = lambda *x: tuple(PRESETS[name].update(list(x), state, params)[0])
    _, found = torch.func.jvp(function, tuple(zeros), tuple(ways))
    derivatives.same(found, [leaf.numpy() for leaf in ways])
    slope = torch.func.grad(lambda x: sum((leaf**3 + leaf).sum() for leaf in function(*x)))
    for hvp in (
        torch.func.jvp(slope, (tuple(zeros),), (tuple(ways),))[1],
        torch.func.vjp(slope, tuple(zeros))[1](tuple(ways))[0],
    ):
        derivatives.same(hvp, [np.zeros(leaf.shape) for leaf in zeros])


def test_compiled() -> None:
    """Compiled without a graph break, both autograd outside and torch.func.grad inside are right."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    def totals(points: list[Any]) -> list[Any]:
        return [total(case, x) for case, x in zip(SOME, points, strict=True)]

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    def slopes(points: list[Any]) -> list[Any]:
        return [torch.func.grad(lambda x, case=case: total(case, x))(x) for case, x in zip(SOME, points, strict=True)]

    for point in POINTS:
        points = [at(case, point) for case in SOME]
        inside = slopes([[leaf.detach() for leaf in x] for x in points])
        for case, x, y, found in zip(SOME, points, totals(points), inside, strict=True):
            wanted = derivatives.gradient(case, point)
            derivatives.same(torch.autograd.grad(y, x, retain_graph=True), wanted)
            derivatives.same(found, wanted)


def test_some_recorded() -> None:
    """Gradients of which only some carry a graph are clipped each by itself, and derivatives go through those."""
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    clipped, report = uc.clip([2 * x, torch.tensor([6.0, 8.0])], uc.by_norm(1.0))
    torch.testing.assert_close([leaf.detach() for leaf in clipped], 2 * [torch.tensor([0.6, 0.8])])
    assert [norm.item() for norm in report.norms] == [10, 10]
    torch.testing.assert_close(torch.autograd.grad(clipped[0][0], x)[0], torch.tensor([0.128, -0.096]))


def test_a_parameter_of_a_curve() -> None:
    """A curve may be a function of tensors of its own, and derivatives reach them."""
    scale = torch.tensor(2.0, requires_grad=True)
    rule = uc.Rule(1.0, curve=lambda xp, norm, limit: scale * limit / norm)
    clipped, _ = uc.clip(torch.tensor([3.0, 4.0]), rule)
    clipped.sum().backward()
    torch.testing.assert_close(scale.grad, torch.tensor(1.4))


def test_norms_beyond_one_dtype_beside_one_that_records() -> None:
    """Some factors need a power of two, others none, and one of the leaves has a derivative to keep."""
    recorded = torch.tensor([3.0, 4.0], requires_grad=True)
    huge = torch.full((2,), 1e100, dtype=torch.float64)
    clipped, _ = uc.clip([huge, 1.0 * recorded], uc.by_norm(1e39))
    assert torch.equal(clipped[1], recorded)
    torch.testing.assert_close(torch.linalg.vector_norm(clipped[0]), torch.tensor(1e39, dtype=torch.float64))
    clipped, _ = uc.clip([huge, torch.tensor([float("nan"), 1.0], requires_grad=True)], uc.by_norm(1e39))
    assert clipped[1].isnan().all()
