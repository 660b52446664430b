"""Kernels for many tensors of an accelerator, which Triton's interpreter runs on the CPU: numbers,
how many start.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import uniclip as uc

pytestmark = [
    pytest.mark.skipif("triton" in sys.modules, reason="Triton was imported to compile"),
    # NumPy's in the interpreter.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),
]
os.environ["TRITON_INTERPRET"] = "1"  # is read when Triton is imported
torch = pytest.importorskip("torch")
pytest.importorskip("triton")
os.environ.pop("TRITON_INTERPRET")

TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3, "float64": 1e-10, "mixed": 1e-2}
SHAPES = {
    "w": (300, 70),
    "b": (70,),
    "k": (8, 3, 5, 5),
    "s": (),
    "none": (0, 4),
    "wide": (3, 9000),
    "one": (1, 50),
}
RULES = {
    "global": uc.by_global_norm(1.0),
    "skip": uc.by_global_norm(1.0, nonfinite="skip"),
    "norm": uc.by_norm(0.5),
    "value": uc.by_value(-0.3, 0.3),
    "agc": uc.agc(0.01),
    "zclip": uc.zclip(),
    "adagc": uc.adagc(),
    "rms": uc.by_block_rms(0.1),
    "zero": uc.by_global_norm(1.0, nonfinite="zero"),
}


@pytest.fixture
def started() -> Iterator[list[str]]:
    """Let tensors say that they are elsewhere, and kernels take them.

    Return the names of those that started.
    """
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        from uniclip.backends.torch import fast_path, triton

        names: list[str] = []

        class Noted:
            """A kernel that notes when it starts."""

            def __init__(self, name: str) -> None:
                self.name, self.kernel = name, getattr(triton, name)

            def __getitem__(self, grid: Any) -> Any:
                names.append(self.name)
                return self.kernel[grid]

        kernels = (
            "_add_squares",
            "_add_squares_of_rows",
            "_join",
            "_limit",
            "_change",
            "_change_rows",
        )
        with (
            mock.patch.multiple(
                triton, INTERPRETED=True, **{name: Noted(name) for name in kernels}
            ),
            mock.patch.object(fast_path, "_ACCELERATORS", {"cpu"}),
            mock.patch.dict(fast_path.KERNELS, {"cpu": triton}),
            mock.patch.object(torch.Tensor, "is_cpu", property(lambda tensor: False)),
        ):
            yield names


def tree(dtype: str, seed: int = 0) -> dict[str, Any]:
    """Return random tensors, large and small, with rows and without."""
    rng = np.random.default_rng(seed)
    names = {
        name: ("bfloat16" if name in "wb" else "float32") if dtype == "mixed" else dtype
        for name in SHAPES
    }
    return {
        name: torch.from_numpy(rng.normal(size=shape)).to(getattr(torch, names[name]))
        for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", RULES)
def test_rules(started: list[str], name: str, dtype: str, in_place: bool) -> None:
    """Rules do what they do in float64 on the CPU, in the dtype of each leaf."""
    rule, grads, params, tol = RULES[name], tree(dtype), tree(dtype, 1), TOLERANCES[dtype]
    clipper, other = uc.Clipper(rule), uc.Clipper(rule)
    needed = "params" in getattr(getattr(rule, "limit", None), "needs", ())
    wide, of_params = (
        {key: leaf.double() for key, leaf in given.items()} for given in (grads, params)
    )
    for step in (1, 2):
        given = {key: leaf * step for key, leaf in grads.items()}
        made = (clipper.clip_ if in_place else clipper)(given, params if needed else None)
        with mock.patch.object(torch.Tensor, "is_cpu", torch._C.TensorBase.is_cpu):
            expected = other(
                {key: leaf * step for key, leaf in wide.items()}, of_params if needed else None
            )
    found = given if in_place else made
    assert started or (name == "value" and dtype == "float64")
    for key, leaf in found.items():
        assert leaf.dtype is grads[key].dtype
        wanted = expected[key].numpy()
        largest = np.abs(wanted).max(initial=0)
        np.testing.assert_allclose(
            leaf.double().numpy(), wanted, rtol=tol, atol=tol * largest + 1e-7
        )


def test_few_start(started: list[str]) -> None:
    """One norm takes three kernels, and a norm for each leaf or row hardly more,
    of however many leaves.
    """
    leaves = [torch.ones(8, 4 + number) for number in range(20)]
    for rule, most in (
        (uc.by_global_norm(1.0), 3),
        (uc.by_norm(1.0), 3),
        (uc.by_value(-0.5, 0.5), 1),
    ):
        started.clear()
        uc.clip_(leaves, rule)
        assert len(started) <= most, (rule, started)
    started.clear()
    uc.clip_(leaves, uc.agc(), params=[leaf + 1 for leaf in leaves])
    assert len(started) <= 5, started


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-38])
def test_range(started: list[str], scale: float) -> None:
    """No square is out of range."""
    norm = uc.clip_(leaf := [torch.full((20_000,), scale)], uc.by_global_norm(1e38)).norms
    assert abs(float(norm) / (scale * 20_000**0.5) - 1) < 1e-5
    assert leaf[0].unique().numel() == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite(started: list[str], bad: float) -> None:
    """NaN and ∞ spread over all leaves, become 0 with all others,
    and stay alone in a clip by value.
    """
    for nonfinite, check in (("propagate", torch.isnan), ("skip", lambda leaf: leaf == 0)):
        leaves = [torch.ones(70), torch.tensor([bad, 1.0]), torch.ones(3, dtype=torch.bfloat16)]
        uc.clip_(leaves, uc.by_global_norm(1.0, nonfinite=nonfinite))
        assert all(bool(check(leaf).all()) for leaf in leaves)


def test_order_of_memory(started: list[str]) -> None:
    """Tensors in any order of memory are clipped whole.

    What a change in place may disturb is told by the version.
    """
    base = torch.ones(2 * 2**14 + 3)
    leaves = [
        base[1:],
        torch.ones(7, 9).t(),
        torch.ones(2, 8, 6, 6).to(memory_format=torch.channels_last),
    ]
    versions = [leaf._version for leaf in leaves]
    norm = uc.clip_(leaves, uc.by_global_norm(1.0)).norms
    assert started
    assert float(norm) == pytest.approx(sum(leaf.numel() for leaf in leaves) ** 0.5, rel=1e-6)
    assert all(leaf.unique().numel() == 1 for leaf in leaves)
    assert all(leaf._version > before for leaf, before in zip(leaves, versions, strict=True))
    assert float(base[0]) == 1


def test_no_compiler(started: list[str]) -> None:
    """Where a kernel cannot be compiled, PyTorch's own functions are taken, from then on."""
    from uniclip.backends.torch import triton

    class Broken:
        """A kernel that cannot be compiled."""

        def __getitem__(self, grid: Any) -> Any:
            def fail(*args: Any, **options: Any) -> None:
                msg = "Failed to find C compiler"
                raise RuntimeError(msg)

            return fail

    send = mock.Mock(side_effect=lambda addresses, *rest: torch.tensor(addresses))
    with mock.patch.multiple(
        triton, INTERPRETED=False, _add_squares=Broken(), _broken=set(), _send_addresses=send
    ):
        for _ in range(2):
            leaves = [torch.full((70,), 3.0)]
            uc.clip_(leaves, uc.by_global_norm(1.0))
            assert float(leaves[0].norm()) == pytest.approx(1)
        assert send.call_count == 1


def test_compiled() -> None:
    """All kernels compile, from Turing to Blackwell, and load 16 bytes at a time where they can."""
    script = Path(__file__).parent / "kit" / "compiled.py"
    subprocess.run([sys.executable, str(script), "75", "80", "90", "100"], check=True, timeout=300)
