"""Training with clipped gradients in PyTorch, transformed, compiled, in half precision and sparse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import clip_grad_norm_

import oracle
import uniclip as uc
from frameworks import Torch
from promises import close

fw = Torch()
X = fw.array(np.random.default_rng(0).standard_normal((64, 3)))
Y = X @ torch.tensor([[3.0], [-2.0], [8.0]]) + 5


class Model(torch.nn.Module):
    """A linear model with a parameter that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Leave out what is unused."""
        return self.linear(x)


def is_global_norm(old: list[Any], new: list[Any], limit: float, dtype: str = "float32") -> None:
    """Assert that gradients are clipped by their global norm, as plain loops do it."""
    wanted = oracle.clip_global([fw.numpy(g) for g in old], limit)
    for a, b in zip(new, wanted, strict=True):
        close(fw, a, b, dtype)


def test_loop() -> None:
    """A loop that assigns .grad back learns, keeps the None of an unused parameter, and steps as PyTorch's does."""
    ours, theirs = Model(), Model()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.5) for model in (ours, theirs)]
    losses = []
    for _ in range(40):
        for model, opt in zip((ours, theirs), optimizers, strict=True):
            opt.zero_grad()
            loss = torch.nn.functional.mse_loss(model(X), Y)
            loss.backward()
        clip_grad_norm_(theirs.parameters(), 3.0)
        grads = [p.grad for p in ours.parameters()]
        clipped, norm = uc.clip_by_global_norm(grads, 3.0)
        assert [g is None for g in clipped] == [True, False, False]
        is_global_norm([g for g in grads if g is not None], [g for g in clipped if g is not None], 3.0)
        losses.append((loss.item(), norm.item()))
        for parameter, grad in zip(ours.parameters(), clipped, strict=True):
            parameter.grad = grad
        for opt in optimizers:
            opt.step()
    assert ours.unused.grad is None
    assert losses[0][1] > 3 > losses[-1][1]
    assert losses[-1][0] < 0.05 * losses[0][0]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # PyTorch divides by the norm + 1e-6


def test_named_parameters() -> None:
    """A dict by parameter name goes in and comes out."""
    model = Model()
    torch.nn.functional.mse_loss(model(X), Y).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    clipped, _ = uc.clip_by_global_norm(grads, 1.0)
    assert list(clipped) == list(grads)
    assert clipped["unused"] is None
    is_global_norm(
        [grads["linear.weight"], grads["linear.bias"]], [clipped["linear.weight"], clipped["linear.bias"]], 1.0
    )


def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of a linear model, as a function of its weights."""
    return ((x @ weights["w"] + weights["b"] - y) ** 2).mean()


def weights() -> dict[str, torch.Tensor]:
    """Return the weights to start from."""
    return {"w": torch.zeros(3, 1), "b": torch.zeros(1)}


def test_per_example() -> None:
    """torch.func.vmap over examples clips each one's gradient by its own norm, as the scope each_example does."""
    one = torch.func.grad(lambda w, x, y: loss_of(w, x[None], y[None]))
    each = torch.func.vmap(one, (None, 0, 0))(weights(), X, Y)
    clipped = torch.func.vmap(lambda x, y: uc.clip_by_global_norm(one(weights(), x, y), 20.0)[0])(X, Y)
    scoped, report = uc.clip(each, uc.Rule(20.0, scope=uc.scopes.each_example))
    assert 0 < int((report.factors < 1).sum()) < len(X)
    for example in range(len(X)):
        wanted = oracle.clip_global([fw.numpy(each["w"][example]), fw.numpy(each["b"][example])], 20.0)
        for result in (clipped, scoped):
            close(fw, result["w"][example], wanted[0], "float32")
            close(fw, result["b"][example], wanted[1], "float32")


def along(x: torch.Tensor) -> torch.Tensor:
    """Return one direction's part of a gradient clipped to norm 2."""
    return (torch.tensor([1.0, -2.0, 3.0], dtype=x.dtype) * uc.clip_by_norm(x, 2.0)).sum()


def derivatives(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and second derivative of `along` where it clips."""
    w, n = np.asarray([1.0, -2.0, 3.0]), np.linalg.norm(x)
    s, mixed = w @ x, np.outer(w, x)
    return 2 * (w / n - s * x / n**3), 2 * ((-mixed - mixed.T - s * np.eye(3)) / n**3 + 3 * s * np.outer(x, x) / n**5)


def test_grad_and_hessian() -> None:
    """torch.func's grad, jvp, hessian and vmap of grad see the exact derivatives of the clip."""
    x = torch.tensor([1.0, 2.0, -2.5], dtype=torch.float64)
    first, second = derivatives(x.numpy())
    np.testing.assert_allclose(torch.func.grad(along)(x), first, rtol=1e-13)
    np.testing.assert_allclose(torch.func.hessian(along)(x), second, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(torch.func.jvp(along, (x,), (torch.ones_like(x),))[1], first.sum(), rtol=1e-12)
    batch = torch.stack([x, 2 * x, 0.1 * x])
    wanted = [derivatives(x.numpy())[0], derivatives(2 * x.numpy())[0], [1.0, -2.0, 3.0]]
    np.testing.assert_allclose(torch.func.vmap(torch.func.grad(along))(batch), wanted, rtol=1e-12)


def test_gradcheck_where_squares_overflow() -> None:
    """The norm's derivative equals finite differences also where its square is beyond the range."""
    grad = fw.array([0.3, -0.4, 1.2], "float64").requires_grad_()
    assert torch.autograd.gradcheck(lambda g: uc.global_norm(1e200 * g) / 1e200, [grad])


def test_compiled_step() -> None:
    """A whole training step compiled without a graph break learns, and a changing limit compiles nothing again."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=False)
    def step(w: dict[str, torch.Tensor], limit: torch.Tensor) -> tuple[Any, ...]:
        grads, loss = torch.func.grad_and_value(loss_of)(w, X, Y)
        clipped, norm = uc.clip_by_global_norm(grads, limit)
        return {name: w[name] - 0.1 * clipped[name] for name in w}, loss, grads, clipped, norm

    w, losses = weights(), []
    for i in range(60):
        limit = 3.0 + i / 10
        w, loss, grads, clipped, norm = step(w, torch.tensor(limit))
        is_global_norm(list(grads.values()), list(clipped.values()), limit)
        losses.append((loss.item(), norm.item()))
    assert losses[0][1] > 3
    assert losses[-1][0] < 0.01 * losses[0][0]
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str) -> None:
    """Half-precision gradients keep their dtype, are measured in float32, and the model learns."""
    model = Model().to(getattr(torch, dtype))
    x, y = X.to(getattr(torch, dtype)), Y.to(getattr(torch, dtype))
    losses = []
    for _ in range(40):
        model.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        grads = [model.linear.weight.grad, model.linear.bias.grad]
        clipped, norm = uc.clip_by_global_norm(grads, 3.0)
        assert norm.dtype is torch.float32
        close(fw, norm, oracle.norm(float(g) for grad in grads for g in grad.ravel()), "float32")
        assert [g.dtype for g in clipped] == [p.dtype for p in model.linear.parameters()]
        is_global_norm(grads, clipped, 3.0, dtype)
        with torch.no_grad():
            for parameter, grad in zip(model.linear.parameters(), clipped, strict=True):
                parameter.sub_(0.1 * grad)
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_sparse_embedding() -> None:
    """A sparse embedding's gradient stays sparse, equals the clipped dense one, and its optimizer learns from it."""
    ids = torch.tensor([1, 7, 1, 1, 3])  # a row that occurs three times
    sparse, dense = (torch.nn.Embedding(10, 2, sparse=kind) for kind in (True, False))
    dense.load_state_dict(sparse.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in (sparse, dense)]
    losses = []
    for _ in range(100):
        for model, opt in zip((sparse, dense), optimizers, strict=True):
            opt.zero_grad()
            loss = ((model(ids) - 4.0) ** 2).sum()
            loss.backward()
            model.weight.grad, norm = uc.clip_by_global_norm(model.weight.grad, 5.0)
            losses.append((loss.item(), norm.item()))
        assert sparse.weight.grad.is_sparse
        torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad)
        for opt in optimizers:
            opt.step()
    assert losses[0][1] > 5
    assert losses[-1][0] < 0.01 * losses[0][0]
    torch.testing.assert_close(sparse.weight, dense.weight)


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC) tensor support is in beta:UserWarning")  # PyTorch says so once
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_compressed(layout: torch.layout) -> None:
    """Compressed sparse gradients keep their layout and are clipped as their dense forms."""
    dense = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, -4.0], [12.0, 0.0, 0.0]])
    grad = dense.to_sparse(layout=layout)
    clipped, norm = uc.clip_by_global_norm([grad, torch.tensor(84.0)], 8.5)
    close(fw, norm, 85.0, "float32")
    by_value, rms = uc.clip_by_value(grad, -5, 5), uc.clip(grad, uc.by_block_rms(1.0))[0]
    wanted = [dense / 10, dense.clamp(-5, 5), dense * (3 / 13)]
    for result, expected in zip((clipped[0], by_value, rms), wanted, strict=True):
        assert result.layout is layout
        torch.testing.assert_close(result.to_dense(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_many_duplicates_in_half_precision(dtype: torch.dtype) -> None:
    """Entries that occur often are summed in float32."""
    grad = torch.sparse_coo_tensor(
        torch.zeros(1, 3000, dtype=int), torch.ones(3000, dtype=dtype), (2,), check_invariants=True
    )
    assert uc.global_norm(grad).item() == 3000
    clipped, _ = uc.clip_by_global_norm(grad, 10.0)
    assert clipped.dtype is dtype
    assert clipped.to_dense().tolist() == [10, 0]
    uc.clip_([grad], uc.by_global_norm(10.0))
    assert grad.to_dense().tolist() == [10, 0]


@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support is in beta:UserWarning")  # PyTorch says so once
def test_block_layouts_are_refused() -> None:
    """A sparse layout of blocks is refused by its place and name."""
    with pytest.raises(
        TypeError, match=r"grads\['w'\] is a torch\.Tensor.* layout, torch\.sparse_bsr,.* to_sparse\(\)"
    ):
        uc.clip_by_norm({"w": torch.eye(4).to_sparse_bsr((2, 2))}, 1.0)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csc])
def test_huge_embedding(layout: torch.layout) -> None:
    """Only stored entries take memory: the dense form of this gradient would need 38 GB."""
    size = (148_331_760, 64)
    if layout is torch.sparse_coo:
        indices, rows = torch.tensor([[7, size[0] - 1, 7]]), torch.ones(3, 64)
        grad, entries = torch.sparse_coo_tensor(indices, rows, size, check_invariants=True), 5 * 64
    else:
        columns, rows = torch.tensor([0, 2] + [2] * 63), torch.tensor([3, size[0] - 1])
        grad, entries = torch.sparse_csc_tensor(columns, rows, torch.ones(2), size, check_invariants=True), 2
    [clipped], norm = uc.clip_by_global_norm([grad], 1.0)
    close(fw, norm, math.sqrt(entries), "float32")
    close(fw, uc.global_norm(clipped), 1.0, "float32")
    close(fw, uc.clip(grad, uc.by_block_rms(1.0))[1].norms, math.sqrt(entries / (size[0] * size[1])), "float32")
    assert uc.clip_by_value(grad, -1, 1).layout is layout
    uc.clip_([grad], uc.by_global_norm(1.0))
    close(fw, uc.global_norm(grad), 1.0, "float32")


@pytest.mark.parametrize("limit", [1.0, 1000.0], ids=["above", "below"])
def test_channels_last(limit: float) -> None:
    """A gradient whose channels come last in memory keeps that order."""
    grad = fw.array(np.random.default_rng(0).standard_normal((2, 3, 4, 5))).to(memory_format=torch.channels_last)
    for clipped in (
        uc.clip_by_global_norm(grad, limit)[0],
        uc.clip_by_norm(grad, limit, axis=1),
        uc.clip_by_value(grad, -limit, limit),
    ):
        assert clipped.is_contiguous(memory_format=torch.channels_last)
    close(fw, uc.clip_by_norm(grad, limit), oracle.clip_leaf(grad, limit), "float32")


def test_parameter() -> None:
    """A parameter in place of its gradient is a mistake and says so; detached, its weights can be clipped."""
    parameter = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    with pytest.raises(TypeError, match=r"p\.grad for p in parameters"):
        uc.clip_by_norm([parameter], 1.0)
    with torch.no_grad():
        parameter.copy_(uc.clip_by_norm(parameter.detach(), 1.0))
    close(fw, parameter, [0.6, 0.8], "float32")


def test_derivative_of_the_limit() -> None:
    """A limit that requires its own derivative gets it: the clipped part of g/‖g‖."""
    limit = torch.tensor(2.0, requires_grad=True)
    clipped, norm = uc.clip_by_global_norm([torch.tensor([3.0, 4.0]), torch.tensor(12.0)], limit)
    (clipped[0].sum() + clipped[1]).backward()
    close(fw, norm, 13.0, "float32")
    close(fw, limit.grad, 19 / 13, "float32")
    limit.grad = None
    uc.clip_by_norm([torch.tensor([3.0, 4.0]), torch.tensor(1.0)], limit)[0].sum().backward()
    close(fw, limit.grad, 7 / 5, "float32")


def test_default_device() -> None:
    """The default device is not asked: results are where the gradients are."""
    grad = torch.tensor([3.0, 4.0])
    with torch.device("meta"):
        clipped, norm = uc.clip_by_global_norm(grad, 1.0)
        report = uc.clip_(grad, uc.by_global_norm(2.5))
    assert clipped.tolist() == pytest.approx([0.6, 0.8])
    assert norm == 5
    assert report.factors == 0.5
