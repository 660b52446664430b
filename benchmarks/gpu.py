"""Run uniclip on a GPU: first check numbers, waits, graphs and streams, then measure times.

Run it in a checkout, as ``python benchmarks/gpu.py [section ...]``; it takes about two minutes, and
``--minutes 5`` gives it more. On a machine without a GPU it runs the numbers in Triton's
interpreter, if Triton is installed, and names what it leaves out.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:  # is read when Triton is imported
    os.environ |= {"TRITON_INTERPRET": "1"}

import uniclip as uc  # noqa: E402 - from this checkout
from kit.devices import elsewhere  # noqa: E402
from uniclip.integrations.torch import (  # noqa: E402
    attach,
    clip_grad_norm_,
)

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3, "float64": 1e-10, "mixed": 1e-2}
SHAPES = {
    "matrix": (300, 70),
    "vector": (70,),
    "kernel": (8, 3, 5, 5),
    "number": (),
    "empty": (0, 4),
    "wide": (3, 9000),
    "row": (1, 50),
}
RULES: dict[str, Any] = {
    "global": uc.by_global_norm(1.0),
    "skip": uc.by_global_norm(1.0, nonfinite="skip"),
    "zero": uc.by_global_norm(1.0, nonfinite="zero"),
    "skip_above": uc.by_global_norm(1.0, skip_above=1e3),
    "by_norm": uc.by_norm(0.5),
    "by_block_rms": uc.by_block_rms(0.1),
    "by_value": uc.by_value(-0.3, 0.3),
    "agc": uc.agc(0.01),
    "zclip": uc.zclip(),
    "autoclip": uc.autoclip(),
    "adagc": uc.adagc(),
    "skip_spikes": uc.skip_spikes(),
    "percentile_clipping": uc.percentile_clipping(),
}
"""Rules that all checks take."""
IN_GRAPHS = {
    "zclip, warm": uc.zclip(warmup=2),
    "adagc, warm": uc.adagc(warmup=1),
    "skip_spikes, long": uc.skip_spikes(window=500, warmup=2),
    "norm_growth": uc.norm_growth(),
}
"""Rules that are captured, too: past their warm-up, and with a long window."""
WARM_UP = 3
"""How many steps run before a capture."""


class Run:
    """What was checked, and the time that is left."""

    def __init__(self, minutes: float, wanted: set[str]) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.wanted = wanted
        self.passed = 0
        self.failed: list[str] = []
        self.left_out: list[str] = []

    def section(self, name: str, *, needs_gpu: bool = True) -> bool:
        """Return whether to run a section."""
        if self.wanted and name not in self.wanted:
            return False
        if needs_gpu and not HAS_GPU:
            self.left_out.append(f"{name} (needs a GPU)")
            return False
        print(f"\n## {name}", flush=True)
        return True

    def has_time(self, name: str) -> bool:
        """Return whether there is time for one more part."""
        if time.monotonic() < self.end:
            return True
        self.left_out.append(f"{name} (no time)")
        return False

    def check(self, name: str, function: Callable[[], None]) -> None:
        """Run a check, and go on where it fails: a machine with a GPU is not always at hand."""
        if not self.has_time(name):
            return
        try:
            function()
        except Exception as error:  # noqa: BLE001 - all failures are printed
            self.failed.append(name)
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:260]
            print(f"FAILED {name}: {type(error).__name__} {text} ({place.name}:{place.lineno})")
        else:
            self.passed += 1


@contextmanager
def with_kernels(*, triton: bool) -> Iterator[None]:
    """Turn the Triton kernels on or off. On a CPU, let tensors say that they are elsewhere."""
    wish = "0" if not triton else "1" if not HAS_GPU else ""
    with (
        mock.patch.dict(os.environ, UNICLIP_TRITON=wish),
        nullcontext() if HAS_GPU else elsewhere(),
    ):
        yield


def needs(rule: Any) -> Any:
    """Return what the limit of a rule uses beside the norms."""
    return getattr(getattr(rule, "limit", None), "needs", ())


def synchronize() -> None:
    """Wait for the GPU."""
    if HAS_GPU:
        torch.cuda.synchronize()


def norm_of(arrays: list[Tensor]) -> float:
    """Return the joint norm in float64."""
    return float(torch.cat([array.detach().flatten().double() for array in arrays]).norm())


def parameters(
    shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    """Return parameters with gradients."""
    made = [torch.nn.Parameter(torch.randn(shape, device=DEVICE).to(dtype)) for shape in shapes]
    for param in made:
        param.grad = torch.randn_like(param)
    return made


# Numbers.


def compare(name: str, dtype: str, *, in_place: bool, triton: bool) -> None:
    """Require that two steps of a rule come to what they do in float64 on a CPU."""
    rule = RULES[name]
    kinds = {key: DTYPES.get(dtype, torch.float32) for key in SHAPES}
    if dtype == "mixed":
        kinds |= dict.fromkeys(("matrix", "vector"), torch.bfloat16)
    grads, params = (
        {key: torch.randn(shape).to(kinds[key]) for key, shape in SHAPES.items()} for _ in range(2)
    )
    loss = {"loss": 1.0} if "loss" in needs(rule) else {}
    given: dict[str, Any] = {"params": {key: leaf.to(DEVICE) for key, leaf in params.items()}}
    wanted: dict[str, Any] = {"params": {key: leaf.double() for key, leaf in params.items()}}
    if "params" not in needs(rule):
        given, wanted = {}, {}

    clipper, other = uc.Clipper(rule), uc.Clipper(rule)
    for step in (1, 2):
        leaves = {key: leaf.to(DEVICE) * step for key, leaf in grads.items()}
        with with_kernels(triton=triton):
            clipped = (clipper.clip_ if in_place else clipper)(leaves, **given, **loss)
        wide = {key: leaf.double() * step for key, leaf in grads.items()}
        expected = other(wide, **wanted, **loss)

    tolerance = TOLERANCES[dtype]
    for key, leaf in (leaves if in_place else clipped).items():
        if leaf.dtype is not kinds[key]:
            msg = f"{key} is {leaf.dtype}"
            raise TypeError(msg)
        largest = float(expected[key].abs().max()) if expected[key].numel() else 0.0
        torch.testing.assert_close(
            leaf.cpu().double(), expected[key], rtol=tolerance, atol=tolerance * largest + 1e-7
        )


def check_numbers(run: Run, *, triton: bool) -> None:
    """Compare all rules in all dtypes."""
    for dtype in TOLERANCES:
        for name in RULES:
            for in_place in (True, False):
                where = "in place" if in_place else "new"
                run.check(
                    f"{name}, {dtype}, {where}",
                    lambda: compare(name, dtype, in_place=in_place, triton=triton),  # noqa: B023
                )


# What a GPU alone has: waits, graphs, streams.


def without_wait(rule: Any, *, triton: bool) -> None:
    """Require that no step of an attached rule but the first waits."""
    params = parameters([(30, 70), (70,), (8, 3, 5, 5)])
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    handle = attach(optimizer, rule)
    closure = {"closure": lambda: torch.ones((), device=DEVICE)} if "loss" in needs(rule) else {}
    with with_kernels(triton=triton):
        for step in range(4):
            for param in params:
                param.grad = torch.randn_like(param)
            synchronize()
            with nullcontext() if step == 0 else refusing_waits():
                optimizer.step(**closure)
    handle.remove()


def warmed_up(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Return a graph of a function, which has run before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def fill_freed_memory() -> list[Tensor]:
    """Overwrite what was freed: addresses that a graph reads must not be there."""
    gc.collect()
    torch.cuda.empty_cache()
    sizes = (2, 8, 16, 64, 148, 512, 4096, 65536, 1 << 20)
    made = [torch.full((size,), -1, dtype=torch.int64, device=DEVICE) for size in sizes * 4]
    return made + [torch.full((size,), -1, dtype=torch.int64).pin_memory() for size in sizes]


def replay_drop_in(dtype: torch.dtype) -> None:
    """Require that a captured drop-in clips whatever lies in the gradients at a replay."""
    params = parameters([(50, 3), (7,), (400, 300)], dtype)
    norms = []
    graph = warmed_up(lambda: norms.append(clip_grad_norm_(params, 1.0)))
    for scale in (1.0, 5.0, 1e-5, 1.0):
        filled = fill_freed_memory()
        grads = [torch.randn_like(param) * scale for param in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad.copy_(grad)
        graph.replay()
        synchronize()
        norm = norm_of(grads)
        torch.testing.assert_close(float(norms[-1]), norm, rtol=1e-5, atol=0)
        clipped = norm_of([param.grad for param in params])
        torch.testing.assert_close(clipped, min(norm, 1.0), rtol=3e-3, atol=0)
        del filled


def replay_attached(rule: Any) -> None:
    """Require that a captured step of a fused optimizer clips as one without a graph does."""
    shapes: list[tuple[int, ...]] = [(50, 3), (7,), (400, 300)]
    params = parameters(shapes)
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    for param, other in zip(params, others, strict=True):
        other.grad = param.grad.clone()
    optimizers = [
        torch.optim.AdamW(group, lr=0.0, fused=True, capturable=True) for group in (params, others)
    ]
    handles = [attach(optimizer, rule) for optimizer in optimizers]
    closure = {"closure": lambda: torch.ones((), device=DEVICE)} if "loss" in needs(rule) else {}
    graph = warmed_up(lambda: optimizers[0].step(**closure))
    for _ in range(WARM_UP):
        optimizers[1].step(**closure)
    for scale in (1.0, 5.0, 0.01):
        filled = fill_freed_memory()
        for param, other in zip(params, others, strict=True):
            param.grad.copy_(torch.randn_like(param) * scale)
            other.grad.copy_(param.grad)
        graph.replay()
        optimizers[1].step(**closure)
        synchronize()
        for param, other in zip(params, others, strict=True):
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-5, atol=1e-7)
        del filled
    for handle in handles:
        handle.remove()


def on_streams() -> None:
    """Require that a stream does not read a table that another one has not sent yet."""
    grads = [torch.randn(1000, 1000, device=DEVICE) for _ in range(4)]
    norm = norm_of(grads)
    found = []
    for stream in [torch.cuda.Stream() for _ in range(4)]:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(3_000_000)  # noqa: SLF001 - PyTorch has no public one
            found.append(uc.clip_(grads, uc.by_global_norm(1e9)).norms)
    synchronize()
    for value in found:
        torch.testing.assert_close(float(value), norm, rtol=1e-6, atol=0)


def of_many_lists() -> None:
    """Require right norms of more lists of tensors than are remembered."""
    lists = [
        [torch.full((1000,), n, device=DEVICE), torch.ones(30, device=DEVICE)] for n in range(200)
    ]
    norms = [uc.clip_(leaves, uc.by_global_norm(1e9)).norms for leaves in lists]
    for number, norm in enumerate(norms):
        torch.testing.assert_close(float(norm), (1000 * number**2 + 30) ** 0.5, rtol=1e-6, atol=0)


# Times.


def gpt(layers: int, width: int) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a GPT-2."""
    shapes: list[tuple[int, ...]] = [(50257, width), (1024, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [
            (width,),
            (width,),
            (4 * width, width),
            (4 * width,),
            (width, 4 * width),
            (width,),
        ]
    return [*shapes, (width,), (width,)]


NETS = {
    "MLP of ten": [(64, 64), (64,)] * 5,
    "50 of 16 k": [(128, 136), (136,)] * 25,
    "GPT-2": gpt(12, 768),
    "1.3 B": gpt(24, 2048),
}


@contextmanager
def refusing_waits() -> Iterator[None]:
    """Let PyTorch raise an error where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def measure(function: Callable[[], Any], setup: Callable[[], Any], count: int = 7) -> str:
    """Return the median times of the GPU and of the host in µs, and the kernels of a call, which
    must not wait once it has run.
    """
    times = []
    for number in range(count + 2):
        setup()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        synchronize()
        torch.cuda._sleep(8_000_000)  # noqa: SLF001 - the host is ahead, as in a training
        start.record()
        begin = time.perf_counter()
        with nullcontext() if number == 0 else refusing_waits():
            function()
        host = time.perf_counter() - begin
        end.record()
        synchronize()
        if number > 1:  # the first compile
            times.append((start.elapsed_time(end) * 1e3, host * 1e6))
    gpu, host = (sorted(column)[count // 2] for column in zip(*times, strict=True))
    return f"{gpu:.0f}/{host:.0f}/{count_kernels(function)}"


def count_kernels(function: Callable[[], Any]) -> int:
    """Return how many kernels a call starts."""
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        function()
        synchronize()
    on_gpu = [
        event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return len([event for event in on_gpu if not event.name.startswith(("Memcpy", "Memset"))])


def without(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that runs without the Triton kernels."""

    def call() -> None:
        with with_kernels(triton=False):
            function()

    return call


def timm_agc(params: list[torch.nn.Parameter]) -> None:
    """Clip as timm's ``adaptive_clip_grad`` does."""

    def unit_norm(x: Tensor) -> Tensor:
        if x.ndim <= 1:
            return x.norm(2.0)
        return x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True)

    for param in params:
        most = unit_norm(param.detach()).clamp_(min=1e-3).mul_(0.01)
        norm = unit_norm(param.grad)
        clipped = param.grad * (most / norm.clamp(min=1e-6))
        param.grad.copy_(torch.where(norm < most, param.grad, clipped))


def time_row(run: Run, label: str, ways: dict[str, Callable[[], Any]], grads: list[Tensor]) -> None:
    """Print a row of times. Gradients are made anew before each call."""
    if not run.has_time(label):
        return
    kept = [grad.clone() for grad in grads]
    setup = lambda: torch._foreach_copy_(grads, kept)  # noqa: E731
    print(f"{label}: " + " | ".join(f"{name} {measure(f, setup)}" for name, f in ways.items()))


def time_global(run: Run, net: str, dtype: torch.dtype) -> None:
    """Print times of the plain global norm on one network."""
    params = parameters(NETS[net], dtype)
    grads = [param.grad for param in params]
    for label, limit in (("clipped", 1.0), ("within", 1e9)):
        rule = uc.by_global_norm(limit)
        drop_in = partial(clip_grad_norm_, params, limit)
        ways = {
            "native": partial(torch.nn.utils.clip_grad_norm_, params, limit),
            "drop-in": drop_in,
            "without Triton": without(drop_in),
            "clip": partial(uc.clip, grads, rule),
        }
        time_row(run, f"{net}, {str(dtype)[6:]}, {label}", ways, grads)


def time_rules(run: Run) -> None:
    """Print times of all rules on GPT-2, and of gradients at other addresses at each step."""
    native = torch.nn.utils
    for dtype in (torch.float32, torch.bfloat16):
        params = parameters(NETS["GPT-2"], dtype)
        grads = [param.grad for param in params]
        others: dict[str, Callable[[], Any]] = {
            "by_value": lambda: native.clip_grad_value_(params, 0.3),  # noqa: B023
            "agc": lambda: timm_agc(params),  # noqa: B023
        }
        for name, rule in RULES.items():
            clipper = uc.Clipper(rule)
            given = {"params": [param.detach() for param in params]}
            given = given if "params" in needs(rule) else {}
            loss = {"loss": 1.0} if "loss" in needs(rule) else {}
            ours = lambda: clipper.clip_(grads, **given, **loss)  # noqa: B023, E731
            ways = {"clip_": ours, "without Triton": without(ours)}
            if name in others:
                ways["native or timm"] = others[name]
            time_row(run, f"{name}, {str(dtype)[6:]}", ways, grads)

        def at_new_addresses() -> None:
            clip_grad_norm_(params, 1e9)  # noqa: B023
            for param in params:  # noqa: B023
                param.grad = param.grad.clone()

        def copied() -> None:
            for param in params:  # noqa: B023
                param.grad = param.grad.clone()

        ways = {"clip and copy": at_new_addresses, "copy alone": copied}
        time_row(run, f"new addresses, {str(dtype)[6:]}", ways, grads)


def print_memory() -> None:
    """Print the peak of memory above the gradients."""
    params = parameters(NETS["GPT-2"])
    grads = [param.grad for param in params]
    ways = {
        "native": lambda: torch.nn.utils.clip_grad_norm_(params, 1e-3),
        "drop-in": lambda: clip_grad_norm_(params, 1e-3),
        "by_norm": lambda: uc.clip_(grads, uc.by_norm(1.0)),
        "agc": lambda: uc.clip_(grads, uc.agc(0.01), params=params),
    }
    for name, function in ways.items():
        function()
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        synchronize()
        print(f"{name}: {(torch.cuda.max_memory_allocated() - before) / 1e6:.1f} MB")


def has_triton() -> bool:
    """Return whether Triton can be imported."""
    try:
        import triton
    except ImportError:
        return False
    print(f"Triton {triton.__version__}")
    return True


def run_on_gpu(run: Run) -> None:
    """Run the sections that need a GPU."""
    if run.section("waits"):
        for triton in (True, False):
            for name, rule in RULES.items():
                run.check(f"{name}, {triton=}", lambda: without_wait(rule, triton=triton))  # noqa: B023
    if run.section("graphs"):
        for dtype in (torch.float32, torch.bfloat16):
            run.check(f"drop-in, {dtype}", lambda: replay_drop_in(dtype))  # noqa: B023
        for name, rule in (RULES | IN_GRAPHS).items():
            run.check(f"attached {name}", lambda: replay_attached(rule))  # noqa: B023
    if run.section("streams"):
        run.check("side streams", on_streams)
        run.check("many lists", of_many_lists)
    if run.section("times"):
        print("time of the GPU in µs/time of the host in µs/kernels")
        for net, dtype in product(NETS, (torch.float32, torch.bfloat16)):
            time_global(run, net, dtype)
            gc.collect()
            torch.cuda.empty_cache()
        time_rules(run)
        print_memory()


def main() -> int:
    """Run the sections that were asked for, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", help="of kernels foreach waits graphs streams times")
    parser.add_argument("--minutes", type=float, default=2.0)
    options = parser.parse_args()
    run = Run(options.minutes, set(options.sections))
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name() if HAS_GPU else 'no GPU'}")

    if has_triton():
        if run.section("kernels", needs_gpu=False):
            check_numbers(run, triton=True)
    else:
        run.left_out.append("kernels (no Triton)")
    if run.section("foreach", needs_gpu=False):
        check_numbers(run, triton=False)
    run_on_gpu(run)

    print(f"\n{run.passed} passed, {len(run.failed)} failed: {', '.join(run.failed) or 'none'}")
    print(f"left out: {', '.join(run.left_out) or 'nothing'}")
    return bool(run.failed)


if __name__ == "__main__":
    sys.exit(main())
