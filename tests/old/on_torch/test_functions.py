"""The functions of torch.nn.utils by uniclip: as PyTorch's own where these are right, and right where they are not."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import uniclip as uc
from uniclip.integrations import torch as ours
from uniclip.integrations.torch import (
    attach,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)

NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")
PLUS = 1e-6
"""What PyTorch's functions add to the norm."""


def params_of(*grads: Any) -> list[Any]:
    """Return parameters with these gradients, copied."""
    params = [
        torch.nn.Parameter(torch.zeros(() if g is None else g.shape, dtype=getattr(g, "dtype", None))) for g in grads
    ]
    for p, grad in zip(params, grads, strict=True):
        p.grad = None if grad is None else grad.clone()
    return params


def some() -> list[Any]:
    """Return gradients of several shapes, and an absent one."""
    torch.manual_seed(0)
    return [torch.randn(4, 3), None, torch.randn(7), torch.randn(()), torch.randn(0, 2)]


def grads_of(params: Any) -> list[Any]:
    """Return the gradients."""
    return [p.grad for p in params]


@pytest.mark.parametrize("name", NAMES)
def test_signatures(name: str) -> None:
    """Every argument of PyTorch's function is there, in its order, with its default, and those for parts by name."""
    theirs, mine = (
        [(p.name, p.default) for p in inspect.signature(getattr(module, name)).parameters.values()]
        for module in (torch.nn.utils, ours)
    )
    more = [] if name == "clip_grad_value_" else [("all_reduce", None), ("shared", None)]
    assert mine == theirs + more


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [2.0, 1, 3.5, math.inf, "inf"])
@pytest.mark.parametrize("limit", [0.5, 0.0, 1e6, math.inf])
def test_norm_as_torch(limit: float, order: Any, foreach: bool | None) -> None:
    """Norm and gradients are PyTorch's up to its 1e-6, and the very same bits where nothing is clipped."""
    one, other = params_of(*some()), params_of(*some())
    norm = clip_grad_norm_(one, limit, order, foreach=foreach)
    # PyTorch finds no largest modulus of nothing.
    wanted = torch.nn.utils.clip_grad_norm_(other[:-1], limit, order, foreach=foreach)
    assert type(norm) is torch.Tensor
    assert not norm.requires_grad
    torch.testing.assert_close(norm, wanted)
    torch.testing.assert_close(grads_of(one[:-1]), grads_of(other[:-1]), rtol=2 * PLUS, atol=1e-7)
    if limit > norm:
        torch.testing.assert_close(grads_of(one), some(), rtol=0, atol=0)


def test_value_as_torch() -> None:
    """Entries are clipped as PyTorch clips them."""
    for value in (0.3, torch.tensor(0.3), 0, 1e6):
        one, other = params_of(*some()), params_of(*some())
        assert clip_grad_value_(one, value) is None
        torch.nn.utils.clip_grad_value_(other, value)
        torch.testing.assert_close(grads_of(one), grads_of(other), rtol=0, atol=0)


def test_in_two_steps() -> None:
    """Measuring and clipping with the norm is what clip_grad_norm_ does; the norm may be PyTorch's, or a number."""
    one = params_of(*some())
    norm = clip_grad_norm_(one, 0.5)
    torch.testing.assert_close(get_total_norm(g for g in some() if g is not None), norm, rtol=0, atol=0)
    theirs = torch.nn.utils.get_total_norm([g for g in some() if g is not None])
    for known in (norm, theirs, float(norm)):
        other = params_of(*some())
        assert clip_grads_with_norm_(other, 0.5, known) is None
        torch.testing.assert_close(grads_of(other), grads_of(one))


def test_weights_can_be_measured() -> None:
    """Parameters are tensors like any other to get_total_norm."""
    net = torch.nn.Linear(3, 2)
    torch.testing.assert_close(get_total_norm(net.parameters()), torch.nn.utils.get_total_norm(net.parameters()))


def test_a_list_of_parameters() -> None:
    """A ``ParameterList`` is a module, and yet an iterable of parameters, which PyTorch takes."""
    params = torch.nn.ParameterList(params_of(torch.tensor([3.0, 4.0])))
    assert clip_grad_norm_(params, 1.0).item() == 5
    torch.testing.assert_close(params[0].grad, torch.tensor([0.6, 0.8]))


def test_one_tensor() -> None:
    """A tensor need not be in a list."""
    (w,) = params_of(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_(w, 1.0).item() == get_total_norm(torch.tensor([3.0, 4.0])).item() == 5
    torch.testing.assert_close(w.grad, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("given", [[], (), params_of(None)], ids=["list", "tuple", "absent"])
def test_nothing_to_clip(given: Any) -> None:
    """Without gradients the norm is a 0 of PyTorch's."""
    for norm in (clip_grad_norm_(given, 1.0), get_total_norm([p.grad for p in given])):
        torch.testing.assert_close(norm, torch.tensor(0.0), rtol=0, atol=0)
    clip_grad_value_(given, 1.0)
    clip_grads_with_norm_(given, 1.0, torch.tensor(3.0))


def test_generators() -> None:
    """A generator is read once, and a spent one is a warning in all functions: in PyTorch only in clip_grad_norm_."""
    net = torch.nn.Linear(2, 1, bias=False)
    net.weight.grad = torch.tensor([[3.0, 4.0]])
    given = net.parameters()
    assert clip_grad_norm_(given, 1.0).item() == 5
    stage = torch.nn.ReLU()  # of a pipeline, without parameters
    for make in (lambda: given, stage.parameters, lambda: map(abs, given)):
        for call in (
            lambda: clip_grad_norm_(make(), 1.0),
            lambda: clip_grad_value_(make(), 1.0),
            lambda: clip_grads_with_norm_(make(), 1.0, 5.0),
            lambda: get_total_norm(make()),
        ):
            with pytest.warns(UserWarning, match="is an empty generator, and there is nothing to clip") as seen:
                assert not call()
            assert [one.filename for one in seen] == [__file__]  # where the user's code is
    with pytest.warns(UserWarning, match="empty generator"):
        torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(given, 1.0), torch.tensor(0.0))


def test_gradients_instead_of_parameters() -> None:
    """Tensors that can have no gradient are refused: PyTorch clips none of them, and returns 0."""
    grads = [torch.tensor([3.0, 4.0])]
    w = torch.nn.Parameter(torch.tensor([1.5, 2.0]))
    recorded = torch.autograd.grad(w.square().sum(), w, create_graph=True)
    for make in (lambda: grads, lambda: grads[0], lambda: recorded, lambda: iter(grads), lambda: [w.detach()]):
        for call in (
            lambda: clip_grad_norm_(make(), 1.0),
            lambda: clip_grad_value_(make(), 1.0),
            lambda: clip_grads_with_norm_(make(), 1.0, 5.0),
        ):
            with pytest.raises(TypeError, match=r"can have no gradient: pass the parameters.*uc\.clip_\("):
                call()
    assert torch.nn.utils.clip_grad_norm_(grads, 1.0).item() == 0


def test_without_gradients_as_torch() -> None:
    """What could have a gradient and has none is 0, as in PyTorch: frozen parameters, too."""
    frozen = torch.nn.Linear(2, 1).requires_grad_(requires_grad=False)
    held = torch.zeros(2)
    held.grad = torch.tensor([3.0, 4.0])
    inner = torch.nn.Parameter(torch.ones(2)) * 1
    inner.retain_grad()
    for make, norm in (
        (frozen.parameters, 0),
        (lambda: [held, torch.zeros(3)], 5),
        (lambda: [torch.zeros(2, requires_grad=True)], 0),
        (lambda: [inner], 0),
    ):
        assert torch.nn.utils.clip_grad_norm_(make(), 9.0).item() == norm
        assert clip_grad_norm_(make(), 9.0).item() == norm


def test_a_norm_that_is_nan() -> None:
    """A known norm may be NaN, as a number or as a tensor; all gradients become NaN."""
    for norm in (math.nan, torch.tensor(math.nan)):
        (w,) = params_of(torch.tensor([3.0, 4.0]))
        clip_grads_with_norm_(w, 1.0, norm)
        assert w.grad.isnan().all()


def test_sparse() -> None:
    """Sparse gradients stay sparse, rows that occur twice are summed first; PyTorch raises."""
    rows = torch.sparse_coo_tensor([[0, 2, 2]], [[3.0, 0.0], [0.0, 1.0], [0.0, 3.0]], (4, 2), check_invariants=True)
    compressed = torch.eye(2).mul(6).to_sparse_coo()
    w, v, u = params_of(rows, compressed, torch.tensor([2.0]))
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.nn.utils.clip_grad_norm_(params_of(rows, torch.tensor([2.0])), 1.0)
    norm = math.sqrt(25 + 72 + 4)
    assert get_total_norm([w.grad, v.grad, u.grad]).item() == pytest.approx(norm)
    assert clip_grad_norm_([w, v, u], 1.0).item() == pytest.approx(norm)
    assert w.grad.layout is torch.sparse_coo
    torch.testing.assert_close(w.grad.to_dense(), rows.to_dense() / norm)
    torch.testing.assert_close(u.grad, torch.tensor([2 / norm]))
    clip_grad_value_([w], 0.2)
    torch.testing.assert_close(w.grad.to_dense(), (rows.to_dense() / norm).clip(-0.2, 0.2))


def test_compressed_rows() -> None:
    """Gradients of compressed rows are clipped, too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        rows = torch.tensor([[3.0, 0.0], [0.0, 4.0]]).to_sparse_csr()
    w = torch.nn.Parameter(torch.zeros(2, 2).to_sparse_csr())
    w.grad = rows
    assert clip_grad_norm_(w, 1.0).item() == 5
    assert w.grad.layout is torch.sparse_csr
    torch.testing.assert_close(w.grad.to_dense(), torch.tensor([[0.6, 0.0], [0.0, 0.8]]))


def test_the_same_parameter_twice() -> None:
    """It counts once and is scaled once; PyTorch does both twice."""
    (w,) = params_of(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_([w, w], 1.0).item() == 5
    torch.testing.assert_close(w.grad, torch.tensor([0.6, 0.8]))
    assert get_total_norm([w.grad, w.grad]).item() == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Half precision is measured in float32: squares of 300 are beyond float16, and so is the sum of 100,000 ones."""
    (w,) = params_of(torch.full((1000,), 300.0, dtype=dtype))
    norm = clip_grad_norm_(w, 1.0)
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(300 * math.sqrt(1000), rel=5e-3)
    assert w.grad.dtype is dtype
    torch.testing.assert_close(w.grad.float(), torch.full((1000,), 1000**-0.5), rtol=5e-3, atol=0)


def test_mixed_dtypes() -> None:
    """The norm has the widest dtype, each gradient keeps its own."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    params = params_of(*[torch.full((3,), 2.0, dtype=dtype) for dtype in dtypes])
    norm = clip_grad_norm_(params, 3.0)
    assert norm.dtype is torch.float64
    assert norm.item() == 6
    for p, dtype in zip(params, dtypes, strict=True):
        torch.testing.assert_close(p.grad, torch.ones(3, dtype=dtype))


def test_huge_and_tiny() -> None:
    """Squares that overflow or underflow do not; PyTorch makes zeros of 1e30."""
    for value in (1e30, 1e-30):
        w, v = params_of(torch.full((2,), value), torch.full((2,), value))
        assert clip_grad_norm_(w, value / 10).item() == pytest.approx(value * math.sqrt(2))
        torch.testing.assert_close(w.grad / value, torch.full((2,), 0.1 / math.sqrt(2)))
        clip_grads_with_norm_(v, value / 10, value * math.sqrt(2))
        torch.testing.assert_close(v.grad, w.grad)


def test_not_finite() -> None:
    """Without the error everything becomes NaN; with it nothing is changed, and it names the gradients."""
    for bad in (math.nan, math.inf, -math.inf):
        grads = [torch.ones(2), torch.tensor([1.0, bad])]
        params = params_of(*grads)
        for call in (
            lambda: clip_grad_norm_(params, 1.0, error_if_nonfinite=True),
            lambda: get_total_norm(grads_of(params), error_if_nonfinite=True),
        ):
            with pytest.raises(RuntimeError, match=r"^NaN or ∞ in grads\[1\]; pass error_if_nonfinite=False"):
                call()
        torch.testing.assert_close(grads_of(params), grads, rtol=0, atol=0, equal_nan=True)
        assert not get_total_norm(grads_of(params)).isfinite()
        assert not clip_grad_norm_(params, 1.0).isfinite()
        assert all(grad.isnan().all() for grad in grads_of(params))


def test_limits_that_are_tensors() -> None:
    """A limit may be a tensor, of one entry."""
    for limit in (torch.tensor(1.0), torch.tensor([1.0]), torch.tensor(1, dtype=torch.int64)):
        (w,) = params_of(torch.tensor([3.0, 4.0]))
        clip_grad_norm_(w, limit)
        torch.testing.assert_close(w.grad, torch.tensor([0.6, 0.8]))


def test_gradients_with_a_graph() -> None:
    """Gradients that were made with create_graph=True are clipped outside of the graph, as PyTorch does it."""
    w = torch.nn.Parameter(torch.tensor([1.5, 2.0]))
    (w.grad,) = torch.autograd.grad(w.square().sum(), w, create_graph=True)
    assert w.grad.requires_grad
    norm = clip_grad_norm_(w, 1.0)
    assert norm.item() == 5
    assert not norm.requires_grad
    torch.testing.assert_close(w.grad.detach(), torch.tensor([0.6, 0.8]))
    w.grad = None  # its graph keeps itself alive


class Net(torch.nn.Module):
    """A module, which is no iterable."""


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "named": (
        lambda: clip_grad_norm_(torch.nn.Linear(2, 1).named_parameters(), 1.0),
        TypeError,
        r"must hold tensors, got the pair of a name and a parameter \('weight', ...\): pass model.parameters\(\)",
    ),
    "groups": (
        lambda: clip_grad_value_(torch.optim.SGD(params_of(torch.ones(1))).param_groups, 1.0),
        TypeError,
        "parameters must hold tensors, got a dict: pass model",
    ),
    "module": (lambda: clip_grad_norm_(Net(), 1.0), TypeError, "iterable of tensors, got a Net: pass model.parameters"),
    "modules": (lambda: clip_grad_norm_(torch.nn.Sequential(), 1.0), TypeError, "got a Sequential: pass model"),
    "number": (
        lambda: get_total_norm(3.0),
        TypeError,
        "tensors must be a tensor or an iterable of tensors, got a float",
    ),
    "arrays": (lambda: get_total_norm([1.0]), TypeError, "tensors must hold tensors, got a float"),
    "negative": (lambda: clip_grad_norm_([], -1.0), ValueError, r"max_norm must be 0 or more .* got -1.0"),
    "NaN": (lambda: clip_grad_norm_([], math.nan), ValueError, "max_norm must be 0 or more"),
    "negative tensor": (lambda: clip_grad_norm_([], torch.tensor(-2.0)), ValueError, "max_norm .* got -2.0"),
    "no number": (lambda: clip_grad_norm_([], "1"), TypeError, "max_norm must be a number or a 0-d array"),
    "negative value": (lambda: clip_grad_value_([], -1.0), ValueError, "clip_value must be 0 or more, got -1.0"),
    "swapped": (
        lambda: clip_grad_norm_(1.0, params_of(torch.ones(2))),
        TypeError,
        "parameters must be a tensor or an iterable of tensors, got a float, and parameters come first: pass model",
    ),
    "order in words": (lambda: clip_grad_norm_([], 1.0, "fro"), TypeError, "norm_type must be a number .* got 'fro'"),
    "several norms": (
        lambda: clip_grads_with_norm_(params_of(torch.ones(2)), 1.0, torch.ones(1000)),
        ValueError,
        r"total_norm must be one number, got a torch.Tensor of dtype torch.float32 and shape \(1000,\)",
    ),
    "negative with norm": (lambda: clip_grads_with_norm_([], -1.0, 1.0), ValueError, "max_norm must be 0 or more"),
    "negative norm": (
        lambda: clip_grads_with_norm_(params_of(torch.ones(2)), 1.0, -1.0),
        ValueError,
        "norm must be 0 or more",
    ),
    "order": (lambda: clip_grad_norm_(params_of(torch.ones(2)), 1.0, 0.5), ValueError, "at least 1"),
    "a flag for an order": (
        lambda: clip_grad_norm_(params_of(torch.ones(2)), 1.0, True),
        TypeError,
        "norm_type must be .*got True: write error_if_nonfinite=True",
    ),
    "a tensor's flag for an order": (
        lambda: get_total_norm([torch.ones(2)], torch.tensor(False)),
        TypeError,
        "write error_if_nonfinite=False",
    ),
}


@pytest.mark.parametrize("title", REFUSED)
def test_refused(title: str) -> None:
    """What cannot be meant is refused, and the error says what to pass."""
    call, error, message = REFUSED[title]
    with pytest.raises(error, match=message):
        call()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let no thread wait for another: the matrices are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(clip: Callable[[Any, Any], Callable[[], Any]]) -> list[Any]:
    """Train a recurrent network for 50 steps, and return its weights and how many steps were clipped."""
    torch.manual_seed(0)
    net, head = torch.nn.LSTM(4, 8, batch_first=True), torch.nn.Linear(8, 1)
    params = [*net.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    before = clip(optimizer, params)
    clipped = 0
    for step in range(50):
        x = torch.randn(8, 12, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        ((head(net(x)[0][:, -1]) - x.sum((1, 2))[:, None]) ** 2).mean().backward()
        before()
        clipped += int(torch.nn.utils.get_total_norm(grads_of(params)).item() > 0.999)
        optimizer.step()
    assert clipped > 5  # those that attach will clip are above the limit, the others at it
    return [p.detach() for p in params]


@pytest.mark.usefixtures("one_thread")
def test_migration() -> None:
    """50 steps with either line end at the weights that PyTorch's function leads to.

    Its factor is 1/(norm + 1e-6), a share of 1e-6/norm below ours, which with rounding makes 1e-6 at the end.
    """

    def by(function: Any) -> Any:
        return lambda optimizer, params: lambda: function(params, 1.0)

    def attached(optimizer: Any, params: Any) -> Any:
        attach(optimizer, uc.by_global_norm(1.0))
        return lambda: None

    theirs = trained(by(torch.nn.utils.clip_grad_norm_))
    for mine in (trained(by(clip_grad_norm_)), trained(attached)):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=2e-6)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(trained(by(lambda params, limit: None)), theirs, rtol=1e-2, atol=1e-2)
