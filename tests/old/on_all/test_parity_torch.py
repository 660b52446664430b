"""PyTorch's own functions beside uniclip's: the same results, and where the two differ on purpose."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import uniclip as uc
from frameworks import Torch
from promises import close

fw = Torch()
ORDERS = [1, 2, 3, math.inf]
DTYPES = ["float32", "float64"]


def random(dtype: str = "float32") -> list[torch.Tensor]:
    """Return random gradients of several shapes."""
    rng = np.random.default_rng(0)
    return [fw.array(3 * rng.standard_normal(shape), dtype) for shape in [(5, 3), (7,), (2, 3, 4), ()]]


def parameters(grads: list[Any]) -> list[torch.nn.Parameter]:
    """Return parameters that have these gradients."""
    made = [torch.nn.Parameter(torch.zeros(1) if g is None else torch.zeros_like(g)) for g in grads]
    for parameter, grad in zip(made, grads, strict=True):
        parameter.grad = None if grad is None else grad.clone()
    return made


def native(grads: list[Any], max_norm: float, norm_type: float = 2) -> tuple[list[Any], torch.Tensor]:
    """Clip by PyTorch's own function and return what uniclip would."""
    made = parameters(grads)
    norm = clip_grad_norm_(made, max_norm, norm_type)
    return [parameter.grad for parameter in made], norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_global_norm_clipped(order: float, dtype: str) -> None:
    """Above the limit PyTorch's result is uniclip's times n/(n + 1e-6), and the norms agree."""
    theirs, their_norm = native([*random(dtype), None], 1.5, order)
    ours, norm = uc.clip_by_global_norm([*random(dtype), None], 1.5, ord=order)
    assert ours[-1] is theirs[-1] is None
    assert norm.dtype == their_norm.dtype
    close(fw, norm, fw.numpy(their_norm), dtype)
    n = float(norm)
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        close(fw, b, fw.numpy(a).astype("float64") * (n / (n + 1e-6)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_global_norm_below(order: float, dtype: str) -> None:
    """Well below the limit both return the gradients bit for bit."""
    grads = random(dtype)
    theirs, _ = native(grads, 1000.0, order)
    ours, _ = uc.clip_by_global_norm(grads, 1000.0, ord=order)
    for a, b, g in zip(ours, theirs, grads, strict=True):
        assert a is g
        assert torch.equal(b, g)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_total_norm(order: float, dtype: str) -> None:
    """get_total_norm and uc.global_norm return the same number in the same dtype."""
    theirs, ours = get_total_norm(random(dtype), order), uc.global_norm(random(dtype), ord=order)
    assert ours.dtype == theirs.dtype
    close(fw, ours, fw.numpy(theirs), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", *DTYPES])
def test_value(dtype: str) -> None:
    """clip_grad_value_, torch.clamp and uc.clip_by_value give the same bits."""
    grads = random(dtype)
    made = parameters(grads)
    clip_grad_value_(made, 0.7)
    for parameter, g, ours in zip(made, grads, uc.clip_by_value(grads, -0.7, 0.7), strict=True):
        assert torch.equal(ours, parameter.grad)
        assert torch.equal(ours, torch.clamp(g, -0.7, 0.7))
        assert ours.dtype == g.dtype


def test_value_of_special_numbers() -> None:
    """NaN stays, infinities are clipped and integers keep their dtype, as in torch.clamp."""
    special = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    torch.testing.assert_close(uc.clip_by_value(special, -1, 1), special.clamp(-1, 1), rtol=0, atol=0, equal_nan=True)
    whole = torch.tensor([-5, 0, 7])
    torch.testing.assert_close(uc.clip_by_value(whole, -1, 1), whole.clamp(-1, 1), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_at_the_limit(dtype: str) -> None:
    """At the limit PyTorch scales [1, 0] to [0.999999, 0]; uniclip returns it as it is."""
    grad = fw.array([1.0, 0.0], dtype)
    close(fw, native([grad], 1.0)[0][0], [1 / (1 + 1e-6), 0.0], dtype)
    assert uc.clip_by_global_norm(grad, 1.0)[0] is grad


def test_small_gradients() -> None:
    """Half the limit of 1e-7 is too much for PyTorch, which divides by about 10; uniclip leaves it alone."""
    grad = torch.tensor([3e-8, 4e-8])
    close(fw, native([grad], 1e-7)[0][0], fw.numpy(grad).astype("float64") * 1e-7 / (5e-8 + 1e-6), "float32")
    assert uc.clip_by_global_norm(grad, 1e-7)[0] is grad


@pytest.mark.parametrize(
    ("values", "limit", "native_norm"),
    [([1e30, 0.0], 1.0, math.inf), ([3e-30, 4e-30], 1e-30, 0.0)],
    ids=["over", "under"],
)
def test_squares_out_of_range(values: list[float], limit: float, native_norm: float) -> None:
    """Where squares overflow or underflow PyTorch zeroes the gradient; uniclip clips it."""
    grad = torch.tensor(values)
    theirs, norm = native([grad], limit)
    assert norm == native_norm
    assert not theirs[0].any()
    ours, norm = uc.clip_by_global_norm(grad, limit)
    n = math.hypot(*grad.tolist())
    close(fw, norm, n, "float32")
    close(fw, ours, fw.numpy(grad).astype("float64") * (limit / n), "float32")


def test_only_measure() -> None:
    """Where squares overflow, PyTorch's infinite limit makes NaN; uniclip's only measures."""
    grad = torch.tensor([1e30, 1.0])
    assert native([grad], math.inf)[0][0].isnan().all()
    assert uc.clip_by_global_norm(grad, math.inf)[0] is grad


@pytest.mark.parametrize(("limit", "factor"), [(-1.0, -0.2), (math.nan, math.nan)])
def test_wrong_limits(limit: float, factor: float) -> None:
    """PyTorch turns the gradient round for a negative limit and makes NaN for NaN; uniclip raises."""
    grad = torch.tensor([3.0, 4.0])
    np.testing.assert_allclose(native([grad], limit)[0][0], fw.numpy(grad) * factor, rtol=1e-5)
    with pytest.raises(ValueError, match="must be 0 or more"):
        uc.clip_by_global_norm(grad, limit)


def test_wrong_bounds() -> None:
    """PyTorch returns the upper bound where the bounds are swapped and NaN where one is NaN; uniclip raises."""
    [parameter] = parameters([torch.tensor([0.5, 4.0])])
    clip_grad_value_([parameter], -1.0)
    assert parameter.grad.tolist() == [-1.0, -1.0]
    assert torch.tensor([0.5]).clamp(math.nan, 1.0).isnan().all()
    for bounds in [(1.0, -1.0), (math.nan, 1.0)]:
        with pytest.raises(ValueError, match="must not be above"):
            uc.clip_by_value(torch.tensor([0.5, 4.0]), *bounds)


def test_fractional_bounds_of_integers() -> None:
    """torch.clamp turns integers with fractional bounds into floats; uniclip raises."""
    assert torch.tensor([1, 5]).clamp(0, 2.5).tolist() == [1.0, 2.5]
    with pytest.raises(TypeError, match="whole"):
        uc.clip_by_value(torch.tensor([1, 5]), 0, 2.5)


@pytest.mark.parametrize(("dtype", "native_norm"), [("float16", 31.625), ("bfloat16", 31.625)])
def test_half_precision_norm(dtype: str, native_norm: float) -> None:
    """PyTorch rounds the norm to the gradient's half precision; uniclip returns it in float32."""
    grads = [fw.array(np.ones(1000), dtype)]
    theirs, ours = get_total_norm(grads), uc.global_norm(grads)
    assert (fw.dtype(theirs), float(theirs)) == (dtype, native_norm)
    assert fw.dtype(ours) == "float32"
    close(fw, ours, math.sqrt(1000), "float32")


def test_half_precision_overflow() -> None:
    """A float16 gradient whose norm no float16 can hold is zeroed by PyTorch and clipped by uniclip."""
    grad = fw.array([40000.0, 60000.0], "float16")
    assert not native([grad], 1.0)[0][0].any()
    values = np.asarray(grad.tolist())
    close(fw, uc.clip_by_global_norm(grad, 1.0)[0], values / math.hypot(*values), "float16")


def test_same_parameter_twice() -> None:
    """A parameter listed twice is measured twice by both, but PyTorch also scales its one gradient twice."""
    [parameter] = parameters([torch.tensor([3.0, 4.0])])
    clipped, norm = uc.clip_by_global_norm([parameter.grad, parameter.grad], 1.0)
    close(fw, clip_grad_norm_([parameter, parameter], 1.0), fw.numpy(norm), "float32")
    for leaf in clipped:
        close(fw, leaf, np.asarray([3.0, 4.0]) / math.sqrt(50), "float32")
    np.testing.assert_allclose(parameter.grad, [0.06, 0.08], rtol=1e-6)


def test_sparse() -> None:
    """PyTorch's functions take no sparse gradients; uniclip's clip them as their dense forms."""
    grad = torch.sparse_coo_tensor([[1, 1, 3]], torch.tensor([[1.0], [2.0], [4.0]]), (5, 1), check_invariants=True)
    parameter = torch.nn.Parameter(torch.zeros(5, 1))
    parameter.grad = grad
    for refusing in (clip_grad_norm_, clip_grad_value_):
        with pytest.raises(NotImplementedError, match="Sparse"):
            refusing([parameter], 1.0)
    assert torch.equal(uc.clip_by_value(grad, -1, 2).to_dense(), grad.to_dense().clamp(-1, 2))
    [dense], norm = uc.clip_by_global_norm([grad.to_dense()], 1.0)
    clipped, sparse_norm = uc.clip_by_global_norm(grad, 1.0)
    assert torch.equal(clipped.to_dense(), dense)
    assert sparse_norm == norm == 5


@pytest.mark.parametrize(("order", "native_norm"), [(0, 2.0), (0.5, 4.0)])
def test_orders_below_one(order: float, native_norm: float) -> None:
    """PyTorch returns numbers for orders that are no norms (0 counts tensors, not entries); uniclip raises."""
    grads = [torch.ones(1), torch.tensor([1.0, 0.0, 0.0])]
    assert get_total_norm(grads, order) == native_norm
    with pytest.raises(ValueError, match=r"order .*of a norm"):
        uc.global_norm(grads, ord=order)


def test_infinite_gradient() -> None:
    """An infinite entry makes PyTorch zero the finite ones; uniclip makes the whole scope NaN."""
    grads = [torch.tensor([1.0, math.inf]), torch.tensor([1.0])]
    theirs, _ = native(grads, 1.0)
    np.testing.assert_array_equal(torch.cat(theirs), [0.0, math.nan, 0.0])
    assert torch.cat(uc.clip_by_global_norm(grads, 1.0)[0]).isnan().all()


def test_derivative() -> None:
    """PyTorch's clip leaves out its own factor's derivative, and so returns the wrong one; uniclip's is right."""

    def first(clip: Any, x: float) -> tuple[float, float]:
        w = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        y = clip(torch.stack([w, torch.ones_like(w)]))[0]
        return y.item(), float(torch.autograd.grad(y, w)[0])

    def theirs(grad: torch.Tensor) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        parameter.grad = grad
        clip_grad_norm_([parameter], 1.0)
        return parameter.grad

    def ours(grad: torch.Tensor) -> torch.Tensor:
        return uc.clip_by_global_norm(grad, 1.0)[0]

    slope = (first(ours, 3.001)[0] - first(ours, 2.999)[0]) / 0.002
    np.testing.assert_allclose(first(ours, 3.0)[1], slope, rtol=1e-5)
    assert first(theirs, 3.0)[1] == 1.0


def test_empty_leaf_and_infinity_norm() -> None:
    """PyTorch raises for the largest modulus of an empty gradient; uniclip counts it as 0."""
    grads = [torch.zeros(0), torch.tensor([3.0])]
    with pytest.raises(RuntimeError, match="empty tensor"):
        get_total_norm(grads, math.inf)
    assert uc.global_norm(grads, ord=math.inf) == 3


def test_integers() -> None:
    """PyTorch measures no integers; uniclip does in the default float."""
    with pytest.raises(RuntimeError, match="Expected a floating point"):
        get_total_norm([torch.tensor([3, 4])])
    assert uc.global_norm([torch.tensor([3, 4])]) == 5


def test_expanded_gradient() -> None:
    """PyTorch cannot write into a gradient whose entries share memory; uniclip returns a new one."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0]).expand(2)
    with pytest.raises(RuntimeError, match="single memory location"):
        clip_grad_norm_([parameter], 1.0)
    clipped, _ = uc.clip_by_global_norm(parameter.grad, 1.0)
    close(fw, clipped, np.full(2, math.sqrt(0.5)), "float32")
    assert parameter.grad.tolist() == [3.0, 3.0]


def test_in_place() -> None:
    """PyTorch writes into the gradients it is given; uniclip leaves them as they were."""
    [parameter] = parameters([torch.tensor([3.0, 4.0])])
    uc.clip_by_global_norm([parameter.grad], 1.0)
    assert parameter.grad.tolist() == [3.0, 4.0]
    clip_grad_norm_([parameter], 1.0)
    assert parameter.grad.tolist() != [3.0, 4.0]


def test_trees() -> None:
    """PyTorch takes flat lists only; uniclip takes any tree."""
    grads = {"a": torch.tensor([3.0]), "b": [torch.tensor([4.0])]}
    with pytest.raises(AttributeError):
        get_total_norm(grads)
    assert uc.global_norm(grads) == 5
