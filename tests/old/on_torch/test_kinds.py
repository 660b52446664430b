"""Unusual kinds of tensors: clipped where that makes sense, else refused by name before any is changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import uniclip as uc

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
RULES = [uc.by_global_norm(2.5), uc.by_norm(2.5, ord=3), uc.by_norm(2.5, axis=-1), uc.by_value(-2.0, 2.0), torch.neg]


class Own(torch.Tensor):
    """A class of one's own."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: getattr(rule, "__name__", repr(rule)))
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8(dtype: torch.dtype, rule: Any) -> None:
    """8-bit floats are clipped as float32, and rounded once."""
    wide = torch.tensor([3.0, 4.0, -0.5])
    wanted, report = uc.clip([wide, torch.ones(2)], rule)
    grads = [wide.to(dtype), torch.ones(2)]
    new, seen = uc.clip(grads, rule)
    assert new[0].dtype is dtype
    torch.testing.assert_close(new[0].float(), wanted[0].to(dtype).float(), rtol=0, atol=0)
    torch.testing.assert_close(seen.norms, report.norms)
    uc.clip_(grads, rule)
    torch.testing.assert_close(grads[0].float(), new[0].float(), rtol=0, atol=0)


def test_float8_policies() -> None:
    """NaN in 8-bit floats is seen, and gradients within the limit are the very same tensors."""
    grad = torch.tensor([3.0, math.nan, 4.0]).to(torch.float8_e5m2)
    for policy, wanted in (("skip", [0.0] * 3), ("zero", [0.625, 0.0, 0.75])):
        new, report = uc.clip(grad, uc.by_norm(1.0, nonfinite=policy))
        assert new.float().tolist() == wanted
        assert not report.finite
    within = torch.ones(2).to(torch.float8_e4m3fn)
    assert uc.clip([within], uc.by_global_norm(2.0))[0][0] is within


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_complex_half() -> None:
    """Complex numbers of half precision are measured in single precision."""
    grad = torch.tensor([300 + 400j, 0], dtype=torch.complex32)
    new, report = uc.clip(grad, uc.by_norm(5.0))
    assert report.norms.item() == 500
    torch.testing.assert_close(new.to(torch.complex64), torch.tensor([3 + 4j, 0]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("make", [lambda x: x.as_subclass(Own), lambda x: TwoTensor(x, x.clone())], ids=["own", "two"])
def test_subclasses(make: Callable[[torch.Tensor], Any]) -> None:
    """Subclasses keep their class, those without memory of their own too, and are changed in place."""
    for rule in RULES[:4]:
        wanted = uc.clip(torch.tensor([3.0, 4.0]), rule)[0]
        given = make(torch.tensor([3.0, 4.0]))
        new = uc.clip(given, rule)[0]
        uc.clip_(given, rule)
        for found in (new, given):
            assert type(found) is type(given)
            parts = (found.a, found.b) if isinstance(found, TwoTensor) else (found.as_subclass(torch.Tensor),)
            for part in parts:
                torch.testing.assert_close(part, wanted)


def nested(layout: torch.layout) -> torch.Tensor:
    """Return a tensor of rows of several lengths."""
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


UNFIT: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        r"quantized; use dequantize\(\)",
    ),
    "jagged": (lambda: nested(torch.jagged), r"rows of several lengths; use values\(\)"),
    "nested": (lambda: nested(torch.strided), r"tensors of several shapes; use unbind\(\)"),
    "mkldnn": (lambda: torch.ones(3, 3).to_mkldnn(), r"opaque; use to_dense\(\)"),
    "blocks": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), r"its layout, torch.sparse_bsr, .*use to_sparse_csr\(\)"),
    "uint16": (lambda: torch.ones(2).to(torch.uint16), r"dtype torch.uint16 .*use to\(torch.float32\)"),
    "powers": (lambda: torch.ones(2).to(torch.float8_e8m0fnu), r"does not calculate with torch.float8_e8m0fnu"),
    "masked": (lambda: torch.masked.masked_tensor(torch.ones(2), torch.ones(2) > 0), r"use to_tensor\(0\.0\)"),
    "no shape": (torch.nn.parameter.UninitializedBuffer, r"has no shape yet"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # half of these PyTorch calls prototypes
@pytest.mark.parametrize(("make", "message"), UNFIT.values(), ids=UNFIT)
def test_unfit(make: Callable[[], torch.Tensor], message: str) -> None:
    """The error names the leaf, what it is and what to make of it; nothing is changed, and so it is for parameters."""
    first = torch.tensor([3.0, 4.0])
    for clip in (uc.clip, uc.clip_):
        for rule in (RULES[0], RULES[3]):
            with pytest.raises(TypeError, match=rf"grads\['w'\] is a torch.*{message}"):
                clip({"a": first, "w": make()}, rule)
    assert first.tolist() == [3.0, 4.0]
    with pytest.raises(TypeError, match=rf"params\[1\] is a torch.*{message}"):
        uc.clip([first, first], uc.larc(lr=0.1), params=[first, make()])


def test_compiled() -> None:
    """Compiled code looks at unusual kinds without a graph break."""
    given = [torch.tensor([3.0, 4.0]).to(torch.float8_e5m2), torch.tensor([3, 4])]

    def function(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        return [uc.clip(grad, uc.by_norm(2.5, ord=1))[0] for grad in grads]

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(given), function(given), strict=True):
        assert found.dtype is wanted.dtype
        torch.testing.assert_close(found.float(), wanted.float())


ROWS = torch.tensor([[3.0, 4.0], [0.3, 0.4], [30.0, 40.0]])


@pytest.mark.parametrize(
    "rule", [*RULES[:2], RULES[3], lambda g: g.flip(0)], ids=["all", "order 3", "value", "a function"]
)
def test_in_place_under_vmap(rule: Any) -> None:
    """Each example is changed by itself."""
    given = ROWS.clone()
    torch.func.vmap(lambda row: uc.clip_(row, rule) and row)(given)
    torch.testing.assert_close(given, torch.stack([uc.clip(row, rule)[0] for row in ROWS]))


def test_one_for_all_examples() -> None:
    """A tensor that is one for all examples cannot be changed for each; it is refused before another is changed."""
    given, other = ROWS.clone(), torch.ones(2)
    with pytest.raises(TypeError, match=r"grads\[1\].*cannot be changed in place: torch.func.vmap maps over"):
        torch.func.vmap(lambda row: uc.clip_([row, other], RULES[0]) and row)(given)
    with pytest.raises(TypeError, match=r"grads.*cannot be changed in place: torch.func.vmap maps over"):
        torch.func.vmap(lambda limit: uc.clip_(other, uc.by_norm(limit)) and other)(torch.ones(3))
    assert torch.equal(given, ROWS)
    assert torch.equal(other, torch.ones(2))
