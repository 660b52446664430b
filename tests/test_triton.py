"""Triton kernels for many tensors, run on the CPU by the interpreter: results and launches."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch._dynamo  # which notes the attributes of tensors, before they are patched
from test_calls import INLINED, judge
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

import kit.devices
import uniclip as uc
from kit.devices import elsewhere

pytestmark = [
    # NumPy warns inside the interpreter.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),
]
HERE = Path(__file__).parent
ROOT = HERE.parent
FAKED = kit.devices.__file__
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3, "float64": 1e-10, "mixed": 1e-2}
SHAPES = {
    "w": (300, 70),
    "b": (70,),
    "k": (8, 3, 5, 5),
    "s": (),
    "none": (0, 4),
    "no entries": (4, 0),
    "wide": (3, 9000),
    "even": (5, 64),
    "one": (1, 50),
}
RULES = {
    "global": uc.by_global_norm(1.0),
    "skip": uc.by_global_norm(1.0, nonfinite="skip"),
    "norm": uc.by_norm(0.5),
    "value": uc.by_value(-0.3, 0.3),
    "agc": uc.agc(0.01),
    "rows": uc.Rule(0.1, scope=uc.scopes.unit(0)),
    "zclip": uc.zclip(),
    "adagc": uc.adagc(),
    "rms": uc.by_block_rms(0.1),
    "zero": uc.by_global_norm(1.0, nonfinite="zero"),
}


MANY = {name: rule for name, rule in RULES.items() if name != "zero"} | {
    "skip_above": uc.by_global_norm(1.0, skip_above=4.0),
    "autoclip": uc.autoclip(),
    "percentile_clipping": uc.percentile_clipping(),
    "skip_spikes": uc.skip_spikes(),
    "log_zscore": uc.log_zscore(),
    "norm_growth": uc.norm_growth(),
    "by_group_norm": uc.by_group_norm({0: 1.0, 1: 2.0}, lambda path, leaf: path[0] % 2),
}
"""Rules whose steps do as much for many leaves as for few."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the kernels that start."""
    names: list[str] = []
    start = interpreter.GridExecutor.__call__

    def note(kernel: Any, *args: Any, **options: Any) -> None:
        names.append(kernel.fn.__name__)
        with record_function("kernel"):
            start(kernel, *args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", note)
    return names


def clip_(grads: Any, rule: Any, params: Any = None) -> Any:
    """Clip tensors that report an accelerator, and return the report."""
    with elsewhere():
        return uc.clip_(grads, rule, params=params)


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
    """Rules give the results of float64 on the CPU, in the dtype of each leaf."""
    rule, tolerance = RULES[name], TOLERANCES[dtype]
    left_out = {"s"} if name == "rows" else set()
    grads, params = (
        {key: leaf for key, leaf in tree(dtype, seed).items() if key not in left_out}
        for seed in (0, 1)
    )
    with_params = "params" in getattr(getattr(rule, "limit", None), "needs", ())
    clipper, other = uc.Clipper(rule), uc.Clipper(rule)
    for step in (1, 2):
        given = {key: leaf * step for key, leaf in grads.items()}
        with elsewhere():
            made = (clipper.clip_ if in_place else clipper)(given, params if with_params else None)
        wide, of_params = (
            {key: leaf.double() * number for key, leaf in leaves.items()}
            for leaves, number in ((grads, step), (params, 1))
        )
        expected = other(wide, of_params if with_params else None)

    assert started or (name == "value" and dtype == "float64")
    for key, leaf in (given if in_place else made).items():
        assert leaf.dtype is grads[key].dtype
        wanted = expected[key].numpy()
        bound = tolerance * np.abs(wanted).max(initial=0) + 1e-7
        np.testing.assert_allclose(leaf.double().numpy(), wanted, rtol=tolerance, atol=bound)


WITHOUT_KERNEL = {
    "alias", "as_strided", "broadcast_to", "concat", "detach", "empty", "empty_like", "expand",
    "lift_fresh", "new_empty", "reshape", "resolve_conj", "resolve_neg", "result_type", "select",
    "slice", "split", "split_with_sizes", "to", "unbind", "unsqueeze", "view",
}  # fmt: skip
"""Operations that only create views or allocate, or that call others, which are counted."""


ON_HOST = "scalar_tensor"
"""The operation that makes a number of the host, which becomes an argument of kernels."""


def starts_kernel(event: Any) -> bool:
    """Return whether an event of the profiler is an operation that an accelerator runs."""
    name = event.name[6:]
    if not event.name.startswith("aten::") or name in WITHOUT_KERNEL or name == ON_HOST:
        return False
    parent = event.cpu_parent
    while parent is not None:
        # The inner work of an operation, or of an interpreted kernel, does not count.
        if parent.name == "kernel" or (
            parent.name.startswith("aten::") and parent.name[6:] not in WITHOUT_KERNEL
        ):
            return False
        parent = parent.cpu_parent
    return True


def usual(rule: Any, leaves: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return gradients, and what else a step of a rule takes."""
    grads, params = ([torch.ones(8, 4 + number % 10) for number in range(leaves)] for _ in range(2))
    needs = getattr(getattr(rule, "limit", None), "needs", ())
    given = {"params": params} if "params" in needs else {}
    return grads, given | ({"loss": torch.ones(())} if "loss" in needs else {})


def launches(rule: Any, leaves: int, started: list[str]) -> tuple[int, int]:
    """Return how many kernels of Triton, and of PyTorch, a step in place starts."""
    grads, given = usual(rule, leaves)
    step = partial(rule.update, in_place=True, **given)
    with elsewhere():
        _, state, _ = step(grads, rule.init(grads))
        started.clear()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step(grads, state)

    return len(started), len([event for event in profiled.events() if starts_kernel(event)])


LAUNCHES = json.loads((ROOT / "docs" / "launches.json").read_text(encoding="utf-8"))
"""How many kernels of Triton and of PyTorch a step of a rule starts, for the documentation."""
IN_DOCS = {
    "global": "by_global_norm",
    "skip": "by_global_norm, nonfinite='skip'",
    "skip_above": "by_global_norm, skip_above",
    "norm": "by_norm",
    "rows": "by_norm",
    "value": "by_value",
    "rms": "by_block_rms",
}
"""What the documentation calls rules that have other names here."""


def test_launches_are_counted() -> None:
    """The documentation has the number of launches of each of these rules."""
    assert LAUNCHES.keys() == {IN_DOCS.get(name, name) for name in MANY}


@pytest.mark.parametrize("name", MANY)
def test_launches(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As many kernels start for 148 and 1,000 leaves as for two.

    They are only noted: the interpreter takes long for so many leaves.
    """
    started: list[str] = []
    note = lambda kernel, *args, **options: started.append(kernel.fn.__name__)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", note)
    few, more, many = (launches(MANY[name], leaves, started) for leaves in (2, 148, 1000))
    assert few[0] > 0
    assert few == more == many
    assert list(many) == LAUNCHES[IN_DOCS.get(name, name)]


CALLS_A_LEAF = 25
"""The most calls of functions, for each of 148 leaves, that a step may take."""


def host_calls(rule: Any, leaves: int) -> tuple[int, int]:
    """Return how many functions of Python, and others, a settled step of a clipper calls where
    kernels do nothing; those of the faked device are left out.
    """
    grads, given = usual(rule, leaves)
    clipper = uc.Clipper(rule)
    counts = {"call": 0, "c_call": 0}

    def listen(frame: Any, event: str, arg: Any) -> None:
        inlined = event == "call" and frame.f_code.co_name in INLINED
        if event in counts and not (inlined or frame.f_code.co_filename == FAKED):
            counts[event] += 1

    with elsewhere():
        for _ in range(3):
            clipper.clip_(grads, **given)
        gc.disable()  # a collection calls functions, too
        sys.setprofile(listen)
        try:
            clipper.clip_(grads, **given)
        finally:
            sys.setprofile(None)
            gc.enable()
    return counts["call"], counts["c_call"] - 1  # but for the end of the count


@pytest.mark.parametrize("name", MANY)
def test_calls_of_the_host(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A step calls as many functions as were recorded, for 148 leaves as for four: they are asked
    by functions that run no code of Python for each.
    """
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda kernel, *args, **options: None)
    # Two groups of one leaf each would have no sums to join.
    few, many = (host_calls(MANY[name], leaves) for leaves in (4, 148))
    assert many == few
    assert sum(many) <= CALLS_A_LEAF * 148
    judge("on a device", name, many)


def drawn(least: float, most: float) -> Callable[[int], np.ndarray]:
    """Return a function that draws so many numbers between two bounds, always the same."""
    return lambda count: np.random.default_rng(count).uniform(least, most, count)


def one_among_zeros(value: float) -> Callable[[int], np.ndarray]:
    """Return a function that makes so many zeros, but for one element."""
    return lambda count: np.where(np.arange(count) == count // 2, value, 0.0)


ELEMENTS: dict[str, Callable[[int], np.ndarray]] = {
    "random": drawn(-1, 1),
    "equal": lambda count: np.full(count, 0.1),
    "alternating": lambda count: np.where(np.arange(count) % 2, 1e6, -1e-6),
    "all sizes": lambda count: 10.0 ** drawn(-37, 37)(count),
    "tiny": drawn(1e-30, 2e-30),
    "subnormal": drawn(1e-40, 2e-40),
    "huge": drawn(1e30, 2e30),
    "with subnormal squares": lambda count: 2.0 ** drawn(-70, -60)(count),
    "about the lower bound": lambda count: 2.0 ** drawn(-75, -40)(count),
    "about the upper bound": lambda count: 2.0 ** drawn(47, 66)(count),
    "zero": np.zeros,
    "one among zeros": one_among_zeros(1.0),
    "one tiny among zeros": one_among_zeros(1e-36),
    "one huge among zeros": one_among_zeros(3e38),
}
"""Elements of all sizes: squares in float32 are in range, or need another power of two."""
ERRORS = {"float32": 5e-7, "bfloat16": 2e-6, "float16": 2e-6}


def elements(kind: str, count: int, dtype: str, offset: int = 0) -> torch.Tensor:
    """Return a vector of a kind of elements, so many elements behind an aligned address."""
    values = torch.from_numpy(ELEMENTS[kind](count))
    if dtype == "float16":
        values = values.clamp(-6e4, 6e4)
    if dtype == "bfloat16":
        # The interpreter makes subnormal numbers 0.
        values = torch.where(values.abs() < 1.2e-38, 0.0, values)
    memory = torch.empty(count + offset, dtype=getattr(torch, dtype))
    memory[offset:] = values
    return memory[offset:]


def exact_norm(leaf: torch.Tensor) -> np.ndarray:
    """Return the norms along the last axis."""
    squares = leaf.double().numpy().astype(np.longdouble) ** 2
    return np.sqrt(squares.sum(-1)).astype(np.float64)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("kind", ELEMENTS)
def test_accuracy(started: list[str], kind: str, dtype: str) -> None:
    """Norms are those of float64, and have the same bits at each alignment."""
    for count in (1, 15, 4_097, 2**14, 40_003, 40_016):
        whole = elements(kind, count, dtype)
        wanted = exact_norm(whole)
        norms = []
        for offset in (0, 1, 8):
            leaf = torch.empty(count + offset, dtype=whole.dtype)[offset:].copy_(whole)
            norms.append(float(clip_([leaf], uc.by_global_norm(3.4e38)).norms))
        assert len(set(norms)) == 1
        np.testing.assert_allclose(norms[0], wanted, rtol=ERRORS[dtype], atol=1e-45)
    assert set(started) == {"sum_chunks", "find_factor", "scale_chunks"}


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("width", [1, 2, 16, 127, 768, 1025, 8192, 8193, 16_384])
def test_accuracy_of_rows(started: list[str], width: int, dtype: str) -> None:
    """The norm of a row is that of float64, whatever the rows beside it are, and has the same bits
    at each alignment.
    """
    whole = torch.stack([elements(kind, width, dtype) for kind in ELEMENTS])
    rule = uc.Rule(3.4e38, scope=uc.scopes.unit(0))
    norms = []
    for offset in (0, 1, 8):
        memory = torch.empty(whole.numel() + offset, dtype=whole.dtype)
        leaf = memory[offset:].view(whole.shape).copy_(whole)
        norms.append(clip_([leaf], rule).norms[0].double().numpy())
    np.testing.assert_array_equal(norms[1:], [norms[0]] * 2)
    np.testing.assert_allclose(norms[0], exact_norm(whole), rtol=ERRORS[dtype], atol=1e-45)
    assert "sum_rows" in started or width > 8192


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-38])
def test_range(started: list[str], scale: float) -> None:
    """No square leaves the range."""
    leaf = [torch.full((20_000,), scale)]
    norm = float(clip_(leaf, uc.by_global_norm(1e38)).norms)
    assert started
    assert abs(float(norm) / (scale * 20_000**0.5) - 1) < 1e-5
    assert len(np.unique(leaf[0].numpy())) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite(started: list[str], bad: float) -> None:
    """NaN and ∞ spread over all leaves, make all leaves 0, or stay where they are by value."""

    def leaves() -> list[Any]:
        return [torch.ones(70), torch.tensor([bad, 1.0]), torch.ones(3, dtype=torch.bfloat16)]

    spread, skipped, bounded = leaves(), leaves(), leaves()
    clip_(spread, uc.by_global_norm(1.0))
    assert all(np.isnan(leaf.double().numpy()).all() for leaf in spread)
    clip_(skipped, uc.by_global_norm(1.0, nonfinite="skip"))
    assert all((leaf.double().numpy() == 0).all() for leaf in skipped)
    clip_(bounded, uc.by_value(-0.5, 0.5))
    np.testing.assert_array_equal(bounded[0].double().numpy(), 0.5)
    np.testing.assert_array_equal(bounded[1].double().numpy(), [np.clip(bad, -0.5, 0.5), 0.5])
    assert {"find_factor", "scale_chunks", "bound_chunks"} <= set(started)


def test_order_of_memory(started: list[str]) -> None:
    """Tensors of any memory order and alignment are clipped completely, and autograd is told."""
    base = torch.ones(2 * 2**14 + 3)
    leaves = [
        base[1:],
        torch.ones(7, 9).t(),
        torch.ones(2, 8, 6, 6).to(memory_format=torch.channels_last),
    ]
    versions = [leaf._version for leaf in leaves]
    norm = clip_(leaves, uc.by_global_norm(1.0)).norms
    count = sum(leaf.numel() for leaf in leaves)
    assert started
    assert float(norm.double().numpy()) == pytest.approx(count**0.5, rel=1e-6)
    for leaf in leaves:
        np.testing.assert_allclose(leaf.double().numpy(), count**-0.5, rtol=1e-6)
    assert all(leaf._version > before for leaf, before in zip(leaves, versions, strict=True))
    assert base.double().numpy()[0] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_edges_of_chunks(started: list[str], offset: int, dtype: str) -> None:
    """Each element of a tensor of any length is measured and changed once, and no others are."""
    kind = getattr(torch, dtype)
    for length in (1, 4095, 2**14 - 1, 2**14, 2**14 + 1, 2**15 + 16):
        memory = torch.ones(length + offset + 32, dtype=kind)
        leaf = memory[offset : offset + length]
        norm = float(clip_([leaf], uc.by_global_norm(0.5)).norms)
        values = memory.double().numpy()
        assert float(norm) == pytest.approx(length**0.5, rel=1e-6)
        np.testing.assert_allclose(
            values[offset : offset + length], 0.5 / length**0.5, rtol=TOLERANCES[dtype]
        )
        assert (values[:offset] == 1).all()
        assert (values[offset + length :] == 1).all()
    assert "scale_chunks" in started


@pytest.mark.parametrize("width", [1, 16, 255, 256, 257, 8192, 8193])
def test_edges_of_rows(started: list[str], width: int) -> None:
    """Rows of any length have their own norms, and nothing else changes."""
    memory = torch.ones(9 * width + 32)
    leaf = memory[16 : 16 + 9 * width].view(9, width)
    leaf.mul_(torch.arange(9.0).unsqueeze(1))
    clip_([leaf], uc.Rule(2.0, scope=uc.scopes.unit(0)))
    norms = np.arange(9) * width**0.5
    clipped = np.minimum(norms, 2.0) / np.maximum(width**0.5, 1)
    np.testing.assert_allclose(
        leaf.double().numpy(), np.repeat(clipped[:, None], width, 1), rtol=1e-5
    )
    values = memory.double().numpy()
    assert (values[:16] == 1).all()
    assert (values[16 + 9 * width :] == 1).all()
    assert started


def test_unchanged_bits(started: list[str]) -> None:
    """Below the limit all bits stay, including signed zeros, and NaN by value."""
    leaf = torch.tensor([-0.0, 1e-42, 3.0])
    bits = leaf.view(torch.int32).clone()
    clip_([leaf], uc.by_global_norm(10.0))
    clip_([leaf], uc.by_value(-5.0, 5.0))
    assert "bound_chunks" in started
    np.testing.assert_array_equal(leaf.view(torch.int32), bits)


def test_same_bits(started: list[str]) -> None:
    """The same input gives the same bits."""
    grads = torch.from_numpy(np.random.default_rng(0).normal(size=50_000)).float()
    with elsewhere():
        found = [uc.global_norm([grads.clone()]) for _ in range(3)]
    norms = {float(norm) for norm in found}
    assert started
    assert len(norms) == 1


def test_new_addresses(started: list[str]) -> None:
    """Steps with new addresses are right, and the cache of addresses is bounded."""
    kept = []

    def tables() -> int:
        gc.collect()
        return len(
            [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype is torch.int64]
        )

    for number in range(200):
        kept.append([torch.full((8,), 1.0 + number), torch.full((3,), 1.0)])
        clip_(kept[-1], uc.by_global_norm(1.0))
        if number == 100:
            before = tables()
    assert tables() <= before + 70
    assert len(started) == 600
    for leaves in kept:
        total = sum((leaf.double().numpy() ** 2).sum() for leaf in leaves)
        assert total == pytest.approx(1, rel=1e-5)


def test_inference_mode(started: list[str]) -> None:
    """Inference tensors, which have no version, are clipped."""
    with torch.inference_mode():
        leaf = torch.full((8,), 3.0)
        clip_([leaf], uc.by_norm(1.0))
        assert started
        np.testing.assert_allclose(leaf.double().numpy(), 8**-0.5, rtol=1e-6)


class Subclass(torch.Tensor):
    """A tensor subclass, whose data may be anything."""


class Sees(TorchDispatchMode):
    """A mode that records the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def with_mode(clip: Callable[..., Any], leaf: torch.Tensor) -> Any:
    """Clip inside a mode, which must see a product."""
    with Sees() as mode:
        made = clip([leaf])
    assert any("mul" in name for name in mode.names)
    return made


WAYS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "derivatives": lambda clip, leaf: [clip([leaf.requires_grad_()])[0].detach()],
    "a subclass": lambda clip, leaf: [
        x.as_subclass(torch.Tensor) for x in clip([leaf.as_subclass(Subclass)])
    ],
    "vmap": lambda clip, leaf: [torch.func.vmap(lambda x: clip([x])[0])(leaf.unsqueeze(0))[0]],
    "a dispatch mode": with_mode,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["global", "norm"])
def test_old_ways(started: list[str], name: str, way: str) -> None:
    """No kernel starts under a mode, for a subclass, or while a graph is recorded."""
    leaf = torch.full((8,), 3.0)
    with elsewhere():
        made = WAYS[way](lambda leaves: uc.clip(leaves, RULES[name])[0], leaf)
    assert started == []
    np.testing.assert_allclose(
        made[0].double().numpy(), RULES[name].limit.value * 8**-0.5, rtol=1e-6
    )


def test_turned_off(started: list[str]) -> None:
    """``UNICLIP_TRITON=0`` disables the kernels from the next step on."""
    leaf = torch.full((8,), 3.0)
    with mock.patch.dict(os.environ, UNICLIP_TRITON="0"):
        clip_([leaf], uc.by_global_norm(1.0))
    assert started == []
    np.testing.assert_allclose(leaf.double().numpy(), 8**-0.5, rtol=1e-6)
    clip_([leaf], uc.by_global_norm(0.5))
    assert len(started) == 3


def run(program: str, **environment: str) -> str:
    """Return the output of a program in a process of its own, without Triton at first."""
    others = {
        key: value
        for key, value in os.environ.items()
        if key not in {"TRITON_INTERPRET", "UNICLIP_TRITON"}
    }
    lines = f"import sys\nsys.path.insert(0, {str(HERE)!r})\n{program}"
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", lines],
        env=others | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_beside_tensorflow() -> None:
    """A process with TensorFlow does not import Triton, and logs one line about it."""
    out = run(
        """
import types, torch, uniclip as uc
from kit.devices import Device, as_nvidia
sys.modules["tensorflow"] = types.ModuleType("tensorflow")
with as_nvidia((9, 0), Device()):
    for _ in range(2):
        leaf = torch.full((8,), 3.0)
        uc.clip_([leaf], uc.by_global_norm(1.0))
assert "triton" not in sys.modules
assert abs(float(leaf.norm()) - 1) < 1e-6
"""
    )
    assert out.count("import TensorFlow in another process") == 1


def test_where_they_are_used() -> None:
    """Triton is imported for NVIDIA GPUs, with one warning if it fails."""
    run(
        """
import os, warnings, torch, uniclip as uc
from unittest import mock
from kit.devices import Device, as_nvidia
numbers = iter(range(100))
def loaded(capability=(9, 0), type="cuda", wish=None, hip=None):
    environment = {} if wish is None else {"UNICLIP_TRITON": wish}
    with mock.patch.dict(os.environ, environment), mock.patch("torch.version.hip", hip):
        with as_nvidia(capability, Device(type, next(numbers))):
            leaf = torch.full((8,), 3.0)
            uc.clip_([leaf], uc.by_global_norm(1.0))
    assert abs(float(leaf.norm()) - 1) < 1e-6
    return "triton" in sys.modules
assert not loaded((9, 4), hip="6.4")  # AMD
assert not loaded(type="xpu")
assert not loaded(type="mps", wish="1")
assert not loaded(wish="0")
try:
    loaded(wish="on")
except ValueError as error:
    assert "UNICLIP_TRITON must be" in str(error) and "got 'on'" in str(error)
else:
    raise AssertionError("a setting that means nothing was taken")
import types
with mock.patch.dict(sys.modules, triton=None):  # Windows
    loaded()
with mock.patch.dict(sys.modules, triton=types.ModuleType("triton")):  # a folder of that name
    loaded()
    loaded(wish="1")
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    assert loaded((7, 0))  # and there is no GPU to compile for
    assert loaded((7, 5))
    assert loaded((9, 4), hip="6.4", wish="1")
assert len(seen) == 1, seen
assert "Triton kernels cannot be used" in str(seen[0].message)
assert "UNICLIP_TRITON=0" in str(seen[0].message)
"""
    )


@pytest.mark.parametrize(
    ("version", "capability", "reason"),
    [
        (
            "99.0.0",
            (9, 0),
            "Triton 99.0.0 is not tested; install PyTorch 2.7 or later with Triton 3",
        ),
        ("3.2.0", (8, 6), "is not tested; install PyTorch 2.7 or later with Triton 3.3 to 3.8, or"),
        (
            "3.3.1",
            (10, 3),
            "of compute capability 10.3; install a version of PyTorch with Triton 3",
        ),
        ("3.6.0", (11, 0), "Triton 3.6.0 is too old for GPUs of compute capability 11.0; install"),
        (
            "3.8.0",
            (99, 0),
            "GPUs of compute capability 99.0 are not tested; UNICLIP_TRITON=1",
        ),
        ("3.8.0", (6, 1), "GPUs of compute capability 6.1 are not tested; UNICLIP_TRITON=1"),
        (
            None,
            (8, 9),
            "Triton is not installed; install a version from 3.3 to 3.8; UNICLIP_TRITON",
        ),
    ],
)
def test_told_once(version: str | None, capability: tuple[int, int], reason: str) -> None:
    """A version of Triton that is untested, or too old for a GPU, where it could end the process,
    is not even tried. A log line says why, and what to change, once for several GPUs.
    """
    out = run(
        f"""
import torch, uniclip as uc
import triton
from kit.devices import Device, as_nvidia
triton.__version__ = {version!r}
if {version!r} is None:
    sys.modules["triton"] = None
for index in range(3):
    with as_nvidia({capability}, Device("cuda", index)):
        leaf = torch.full((8,), 3.0)
        uc.clip_([leaf], uc.by_global_norm(1.0))
    assert abs(float(leaf.norm()) - 1) < 1e-6
assert not [name for name in sys.modules if name.endswith("torch.triton")]
"""
    )
    assert out.count("uniclip's Triton kernels are not used") == 1
    assert reason in out
    assert out.strip().endswith("UNICLIP_TRITON=0 turns this message off")


@pytest.mark.parametrize(
    ("version", "capability", "setting"),
    [("3.3.0", (7, 0), ""), ("3.6.0", (12, 1), ""), ("3.2.0", (99, 0), "1")],
)
def test_tried_versions(version: str, capability: tuple[int, int], setting: str) -> None:
    """A version that compiles for a GPU is used, and others if the user asks for that: here it
    fails, as there is none to compile for.
    """
    out = run(
        f"""
import warnings, torch, uniclip as uc
import triton
from kit.devices import Device, as_nvidia
triton.__version__ = {version!r}
warnings.simplefilter("always")
with as_nvidia({capability}, Device()):
    leaf = torch.full((8,), 3.0)
    uc.clip_([leaf], uc.by_global_norm(1.0))
assert abs(float(leaf.norm()) - 1) < 1e-6
""",
        UNICLIP_TRITON=setting,
    )
    assert "Triton kernels cannot be used" in out


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["by_global_norm", "by_norm", "agc"])
def test_no_compiler(name: str, dtype: str) -> None:
    """If the last kernel of a step cannot be compiled, only PyTorch itself writes."""
    run(
        f"""
import warnings, torch, uniclip as uc
import triton.runtime.interpreter as interpreter
from kit.devices import elsewhere
compile = interpreter.InterpretedFunction.run
def fail(kernel, *args, grid, warmup, **options):
    if warmup and "scale" in kernel.fn.__name__ and options["DTYPE"].name == {dtype!r}:
        raise RuntimeError("Failed to find C compiler")
    return compile(kernel, *args, grid=grid, warmup=warmup, **options)
interpreter.InterpretedFunction.run = fail
started = []
start = interpreter.GridExecutor.__call__
def note(kernel, *args, **options):
    started.append(kernel.fn.__name__)
    return start(kernel, *args, **options)
interpreter.GridExecutor.__call__ = note
def make():
    return [torch.full((7, 4), 3.0), torch.full((7, 5), 3.0, dtype=torch.bfloat16)]
rule = uc.{name}(0.5)
params = {{"params": make()}} if rule.limit.needs else {{}}
expected, _ = uc.clip(make(), rule, **params)
with warnings.catch_warnings(record=True) as seen, elsewhere():
    warnings.simplefilter("always", UserWarning)
    for _ in range(3):
        leaves = make()
        uc.clip_(leaves, rule, **params)
assert len([x for x in seen if "Failed to find C compiler" in str(x.message)]) == 1, seen
assert not [kernel for kernel in started if "scale" in kernel], started
for leaf, wanted in zip(leaves, expected):
    torch.testing.assert_close(leaf, wanted)
""",
        TRITON_INTERPRET="1",
        UNICLIP_TRITON="1",
    )


def test_distributed_tensors() -> None:
    """The kernels clip the local tensors of distributed ones."""
    run(
        """
import torch, uniclip as uc
import triton.runtime.interpreter as interpreter
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from kit.devices import elsewhere
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
started = []
start = interpreter.GridExecutor.__call__
def note(kernel, *args, **options):
    started.append(kernel.fn.__name__)
    return start(kernel, *args, **options)
interpreter.GridExecutor.__call__ = note
grads = [distribute_tensor(torch.full(shape, 3.0), mesh, [Shard(0)]) for shape in ((8, 4), (4,))]
with elsewhere():
    uc.clip_(grads, uc.by_global_norm(1.0))
assert started == ["sum_chunks", "join_sums", "scale_chunks"], started
for grad in grads:
    torch.testing.assert_close(grad.to_local(), torch.full(grad.shape, 1 / 6))
torch.distributed.destroy_process_group()
""",
        TRITON_INTERPRET="1",
        UNICLIP_TRITON="1",
    )


def test_compiled() -> None:
    """All kernels compile, from Turing to Blackwell, load 16 bytes at a time, and compute little in
    float64.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = HERE / "kit" / "compiled.py"
    subprocess.run(
        [sys.executable, str(script), "75", "80", "90", "100"],
        check=True,
        timeout=600,
        env=environment,
    )
