"""Drawn cases by a constant limit on the spine in PyTorch, and on an earlier package without one.

The file is collected by ``tox -e old`` only.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import uniclip as uc

CASES = 3600
LIMITS = [0.0, 1e-38, 1e-3, 0.5, 1.0, 2, 1e3, 1e30, float("inf")]


@pytest.fixture(scope="module")
def old(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Return the package of the earlier commit."""
    sys.path.insert(0, request.config.getoption("--old"))
    yield importlib.import_module("uniclip_old")
    sys.path.pop(0)


def leaf_kinds(torch: Any) -> dict[str, Callable[[Any], Any]]:
    """Return functions that turn a dense tensor of three columns into leaves of many kinds."""
    wide = {"rows": 3000, "odd rows": 3001}
    return {
        "usual": lambda x: x,
        "usual again": lambda x: x,
        "scalar": lambda x: x.sum(),
        "empty": lambda x: x[:0],
        "absent": lambda x: None,
        "zeros": torch.zeros_like,
        "tiny": lambda x: x * 1e-30,
        "subnormal": lambda x: x * 1e-40,
        "large": lambda x: x * 1e18,
        "too large": lambda x: x * 1e30,
        "NaN": lambda x: x + float("nan"),
        "∞": lambda x: x + float("inf"),
        "equal": lambda x: torch.full_like(x, 0.1),
        "transposed": lambda x: x.t(),
        "strided": lambda x: x[::2, :],
        "negative": lambda x: torch.view_as_complex(torch.stack([x, x], -1)).conj().imag,
        "expanded": lambda x: x[:1].expand(4, 3),
        "channels last": lambda x: x.reshape(1, 3, -1, 1).to(memory_format=torch.channels_last),
        **{
            name: (lambda x, n=n: torch.cat([x] * (n // len(x) + 1))[:n].clone())
            for name, n in wide.items()
        },
        "long and transposed": lambda x: torch.cat([x] * 1500).t(),
        "long and strided": lambda x: torch.cat([x] * 3000)[::2],
        "float64": lambda x: x.double(),
        "bfloat16": lambda x: x.bfloat16(),
        "float16": lambda x: x.half(),
        "complex": lambda x: x.to(torch.complex64),
        "sparse": lambda x: x.to_sparse(1),
        "rows twice": lambda x: torch.sparse_coo_tensor(
            torch.arange(len(x))[None] % 3, x.abs(), (3, 3), check_invariants=False
        ),
        "requires a gradient": lambda x: x.requires_grad_() * 2,
        "shared": lambda x: x.view(-1)[: x.numel() // 2],
        "inference": lambda x: x,
    }


def leaves_of(torch: Any, draw: random.Random) -> list[Any]:
    """Return leaves, most of the usual kind.

    One may be a view of another, and one may occur twice.
    """
    makers = leaf_kinds(torch)
    names = draw.choices(
        list(makers), weights=[140, 60] + [1] * (len(makers) - 2), k=draw.randint(1, 6)
    )
    leaves: list[Any] = []
    for name in names:
        x = torch.from_numpy(
            np.random.default_rng(draw.randrange(10**6)).standard_normal((draw.randint(4, 7), 3))
        )
        with torch.inference_mode(name == "inference"):
            leaf = makers[name](x.float() * draw.choice([0.1, 1.0, 10.0]))
        leaves += [leaf, leaf[0]] if name == "shared" else [leaf]
    dtype = draw.choice([None] * 8 + [torch.bfloat16, torch.float16])
    if dtype is not None:
        leaves = [leaf if leaf is None or leaf.is_complex() else leaf.to(dtype) for leaf in leaves]
    return leaves + leaves[:1] * draw.choice([0] * 9 + [1])


def with_gradients(torch: Any, leaves: list[Any]) -> list[Any]:
    """Return parameters with these gradients."""
    params = []
    for leaf in leaves:
        dense = torch.zeros(2) if leaf is None else torch.zeros(leaf.shape, dtype=leaf.dtype)
        params.append(torch.nn.Parameter(dense))
        params[-1].grad = leaf if leaf is None else leaf.detach()
    return params


def outcome(
    package: ModuleType, way: str, leaves: list[Any], limit: float, torch: Any
) -> list[Any]:
    """Return the outcome of a case.

    This is an error with its text; or identity, form, strides and values of the leaves, and the
    norm.
    """
    module = importlib.import_module(f"{package.__name__}.integrations.torch")
    try:
        if way == "clip":
            clipped, report = package.clip(leaves, package.by_global_norm(limit))
            norm = report.norms
        elif way == "clip_":
            norm, clipped = package.clip_(leaves, package.by_global_norm(limit)).norms, leaves
        elif way == "drop-in":
            params = with_gradients(torch, leaves)
            norm, clipped = module.clip_grad_norm_(params, float(limit)), [p.grad for p in params]
        else:
            params = with_gradients(torch, leaves)
            optimizer = torch.optim.SGD(params, lr=0.0)
            handle = module.attach(optimizer, package.by_global_norm(limit))
            optimizer.step()
            report, clipped = handle.report, [p.grad for p in params]
            norm = None if report is None else report.norms
    except (ValueError, TypeError, RuntimeError) as error:
        text = str(error).replace("uniclip_old", "uniclip")
        return [type(error).__name__, text]
    same = [one is other for one, other in zip(clipped, leaves, strict=True)]
    form = [one if one is None else (one.dtype, one.layout, one.shape) for one in clipped]
    strides = [
        None if one is None or one.layout is not torch.strided else one.stride() for one in clipped
    ]
    dense = [
        None if one is None else one.detach().to_dense().resolve_neg().to(torch.complex128)
        for one in clipped
    ]
    return [
        same,
        form,
        strides,
        [np.zeros(0) if one is None else one.numpy() for one in dense],
        norm,
    ]


def taken() -> tuple[list[bool], Any]:
    """Return a list of whether the spine took each case, and a profiler that fills it."""
    found: list[bool] = []

    def listen(frame: Any, event: str, arg: Any) -> None:
        if event == "return" and frame.f_code.co_name == "run_spine":
            found.append(arg is not None)

    return found, listen


@pytest.mark.needs("torch")
@pytest.mark.parametrize("way", ["clip", "clip_", "drop-in", "attach"])
def test_spine(way: str, old: ModuleType) -> None:
    """Leaves, errors, identities and strides equal the old ones, and values up to rounding.

    The spine takes half of the cases.
    """
    import torch

    count, (found, listen) = 0, taken()
    for number in range(CASES // 4):
        seed, limit = f"{way} {number}", random.Random(number).choice(LIMITS)  # noqa: S311 - no secret
        both = []
        for package in (old, uc):
            leaves = leaves_of(torch, random.Random(seed))  # noqa: S311 - no secret
            found.clear()
            sys.setprofile(listen)
            with np.errstate(all="ignore"):
                both.append(outcome(package, way, leaves, limit, torch))
            sys.setprofile(None)
        count += any(found)
        there, here = both
        assert len(there) == len(here), (number, there, here)
        assert there[:3] == here[:3], (number, there[:3], here[:3])
        if len(there) > 2:
            for one, other in zip(there[3], here[3], strict=True):
                np.testing.assert_allclose(
                    other,
                    one,
                    rtol=8e-3 if "float16" in str(here[1]) else 4e-7,
                    atol=1e-38,
                    err_msg=str(number),
                )
            norms = [
                None if norm is None else float(torch.as_tensor(norm).detach())
                for norm in (there[4], here[4])
            ]
            np.testing.assert_allclose(
                *[np.asarray(norm, float) for norm in norms], rtol=4e-7, err_msg=str(number)
            )
    assert count >= CASES // 8
