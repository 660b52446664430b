"""Clipping PyTorch tensors in place: what is written where, what is refused, and what is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import uniclip as uc
from uniclip.backends.base import PIECE

RULE = uc.by_global_norm(6.5)


class Largest(TorchDispatchMode):
    """Note the largest new tensor that any operation makes."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {
            x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor) and x.layout is torch.strided
        }
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.entries = max(self.entries, result.untyped_storage().nbytes() // result.element_size())
        return result


@contextmanager
def only_pieces() -> Iterator[None]:
    """Fail if anything larger than a piece is allocated."""
    with Largest() as largest:
        yield
    assert largest.entries <= PIECE


def test_the_same_memory_counts_once() -> None:
    """A tensor that is given twice, as itself or as a view of all of it, is one gradient and scaled once."""
    w = torch.tensor([3.0, 4.0])
    report = uc.clip_([w, w, w.view(2), None, torch.tensor([12.0])], RULE)
    assert report.norms.item() == 13
    assert w.tolist() == [1.5, 2]


def test_tied_parameters() -> None:
    """A model whose parameters share memory has one gradient for them, which is clipped once."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model(torch.ones(1, 2)).sum().backward()
    once = torch.linalg.vector_norm(model[0].weight.grad).item()
    report = uc.clip_([layer.weight.grad for layer in model], uc.by_global_norm(0.1))
    assert report.norms.item() == pytest.approx(once)
    assert torch.linalg.vector_norm(model[0].weight.grad).item() == pytest.approx(0.1)


def test_views() -> None:
    """Views of one buffer that have no entry in common are gradients of their own; others are refused."""
    flat = torch.full((10,), 2.0)
    assert uc.clip_([flat[:6], flat[6:]], uc.by_global_norm(1.0)).norms.item() == pytest.approx(math.sqrt(40))
    torch.testing.assert_close(flat, torch.full((10,), 2 / math.sqrt(40)))
    before = flat.clone()
    for views in ([flat[:6], flat[5:]], [flat, flat[::2]], [flat.view(2, 5), flat]):
        with pytest.raises(ValueError, match=r"grads\[0\] and grads\[1\] overlap in memory"):
            uc.clip_(views, RULE)
    with pytest.raises(TypeError, match=r"grads\[1\].* several of its entries may lie in one place"):
        uc.clip_([flat, torch.ones(1).expand(3)], RULE)
    torch.testing.assert_close(flat, before, rtol=0, atol=0)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.t().clone().t(),
    "every other": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "channels last": lambda x: x.reshape(30, 20, 20, 20).to(memory_format=torch.channels_last),
    "one entry": lambda x: x[:1, :1].clone(),
    "empty": lambda x: x[:0].clone(),
}
RULES = {
    "global": uc.by_global_norm(1.0),
    "rows": uc.Rule(1.0, scope=uc.scopes.axes(-1)),
    "columns": uc.Rule(1.0, scope=uc.scopes.axes(0)),
    "value": uc.by_value(-0.5, 0.5),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_layouts(layout: Callable[[torch.Tensor], torch.Tensor], rule: Any, dtype: torch.dtype) -> None:
    """Any layout gets the very values that `uc.clip` returns, in its own memory, piece by piece."""
    tensor = layout(torch.randn(600, 400, generator=torch.Generator().manual_seed(0)).to(dtype))
    wanted, _ = uc.clip(tensor, rule)
    stride, address = tensor.stride(), tensor.data_ptr()
    with only_pieces():
        uc.clip_(tensor, rule)
    assert torch.equal(tensor, wanted)
    assert (tensor.stride(), tensor.data_ptr()) == (stride, address)


def test_gradients_of_a_graph() -> None:
    """Gradients that carry a graph are written to without being recorded; a leaf that requires one is a weight."""
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    [grad] = torch.autograd.grad((x**2).sum(), x, create_graph=True)
    uc.clip_([grad], uc.by_global_norm(1.0))
    torch.testing.assert_close(grad.detach(), torch.tensor([0.6, 0.8]))
    with pytest.raises(TypeError, match=r"grads\[0\].*is a weight \(pass w\.grad"):
        uc.clip_([x], uc.by_norm(1.0))
    uc.clip_([x.detach()], uc.by_norm(1.0))
    torch.testing.assert_close(x.detach(), torch.tensor([0.6, 0.8]))


def test_inference_mode() -> None:
    """A tensor made in inference mode is changed there, and refused elsewhere before any other is changed."""
    with torch.inference_mode():
        made = torch.tensor([3.0, 4.0])
        uc.clip_([made], uc.by_norm(2.5))
    assert made.tolist() == [1.5, 2]
    other = torch.tensor([3.0, 4.0])
    with pytest.raises(TypeError, match=r"grads\[1\].*inference mode"):
        uc.clip_([other, made], uc.by_norm(1.0))
    assert other.tolist() == [3, 4]


@pytest.mark.parametrize("turn", [lambda g: g.T, lambda g: g.flip(0), lambda g: g], ids=["turned", "flipped", "itself"])
def test_a_function_that_returns_a_view(turn: Any) -> None:
    """What a function returns is put in place also if it is a view of the tensor that is changed."""
    for n in (4, 600):
        tensor = torch.arange(float(n * n)).reshape(n, n)
        wanted = turn(tensor).clone()
        uc.clip_(tensor, turn)
        assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("rule", [uc.by_global_norm(1.0), uc.by_value(-2.0, 2.0)], ids=repr)
def test_sparse(rule: Any, coalesced: bool) -> None:
    """A sparse gradient, coalesced or not, is changed in its own memory and stays sparse."""
    grad = torch.sparse_coo_tensor([[7, 3, 7]], torch.tensor([[1.0], [4.0], [2.0]]), (10, 1), check_invariants=True)
    grad = grad.coalesce() if coalesced else grad
    wanted, _ = uc.clip(grad, rule)
    uc.clip_([grad], rule)
    assert grad.is_sparse
    torch.testing.assert_close(grad.to_dense(), wanted.to_dense(), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC) tensor support is in beta:UserWarning")  # PyTorch says so once
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_compressed(layout: torch.layout) -> None:
    """Compressed sparse gradients are changed in their own memory."""
    grad = torch.tensor([[3.0, 0.0], [0.0, -4.0]]).to_sparse(layout=layout)
    uc.clip_([grad], uc.by_global_norm(1.0))
    torch.testing.assert_close(grad.to_dense(), torch.tensor([[0.6, 0.0], [0.0, -0.8]]))


def test_not_finite() -> None:
    """The policies write what they say, and an error writes nothing."""
    values = torch.tensor([3.0, math.nan, 4.0])
    for policy, wanted in (("propagate", [math.nan] * 3), ("skip", [0.0] * 3), ("zero", [0.6, 0.0, 0.8])):
        tensor = values.clone()
        assert not uc.clip_([tensor], uc.by_global_norm(1.0, nonfinite=policy)).finite
        torch.testing.assert_close(tensor, torch.tensor(wanted), equal_nan=True)
    tensor = values.clone()
    with pytest.raises(FloatingPointError, match=r"grads\[0\]"):
        uc.clip_([tensor], uc.by_global_norm(1.0, nonfinite="raise"))
    torch.testing.assert_close(tensor, values, equal_nan=True)


def test_offsets_beyond_32_bits() -> None:
    """Entries may lie more than 2³¹ places apart."""
    far = torch.empty(2**31 + 16, dtype=torch.float16)[:: 2**31 + 15]  # of pages that are never touched
    far.copy_(torch.tensor([300.0, 400.0]))
    uc.clip_(far, uc.by_norm(5.0))
    assert far.tolist() == [3, 4]


@pytest.mark.parametrize(
    "view",
    [torch.complex(torch.tensor([3.0]), torch.tensor([4.0])).conj(), torch._neg_view(torch.tensor([-3.0, -4.0]))],
    ids=["conjugate", "negative"],
)
def test_lazy_views(view: torch.Tensor) -> None:
    """Tensors that are conjugated or negated when they are read are changed too."""
    before = view.resolve_conj().resolve_neg().clone()
    other = torch.tensor([3.0, 4.0])
    uc.clip_([other, view], uc.by_norm(1.0))
    torch.testing.assert_close(view.resolve_conj().resolve_neg(), before / 5)
    torch.testing.assert_close(other, torch.tensor([0.6, 0.8]))
