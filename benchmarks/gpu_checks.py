# SPDX-License-Identifier: MIT
"""Check what only a GPU can show: numbers of kernels, waits, graphs, and streams."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
from gpu_setup import (
    DEVICE,
    DTYPES,
    HAS_GPU,
    Run,
    needs,
    norm_of,
    parameters,
    refusing_waits,
    synchronize,
    with_kernels,
)
from torch import Tensor

import uniclip as uc
from uniclip.integrations.torch import attach, clip_grad_norm_

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
SIZES = {
    "equal": (0.1, 0.1),
    "tiny": (1e-30, 2e-30),
    "huge": (1e30, 2e30),
    "zero": (0.0, 0.0),
    "all sizes": (1e-30, 1e30),
}
"""The least and the largest element: sums in float32 are in range, or are computed again."""
ERRORS = {"float32": 5e-7, "bfloat16": 2e-6}
LENGTHS = (1, 8_193, 2**14, 25_000_000)
LAST_BITS = 2.0**-149
"""The smallest positive float32 number."""


# Numbers.


def compare(name: str, dtype: str, *, in_place: bool, triton: bool) -> None:
    """Require two steps of a rule to equal those in float64 on a CPU."""
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


def check_norm(name: str, dtype: str, *, triton: bool) -> None:
    """Require a norm to be that of float64, with the same bits at any address."""
    least, largest = SIZES[name]
    for length in LENGTHS if HAS_GPU else LENGTHS[:-1]:
        # On a CPU, so many powers take seconds.
        exponents = torch.linspace(0, 1, length, dtype=torch.float64, device=DEVICE)
        values = least * (largest / (least or 1.0)) ** exponents
        leaf = values.to(DTYPES[dtype])
        norms = []
        for offset in (0, 1, 8):
            memory = torch.empty(length + offset, dtype=leaf.dtype, device=DEVICE)
            with with_kernels(triton=triton):
                report = uc.clip_([memory[offset:].copy_(leaf)], uc.by_global_norm(1e38))
            norms.append(float(report.norms))
        if len(set(norms)) > 1:
            msg = f"norms of {length} elements depend on the address: {norms}"
            raise ValueError(msg)
        wanted = float(leaf.double().norm())
        torch.testing.assert_close(norms[0], wanted, rtol=ERRORS[dtype], atol=LAST_BITS)


def check_numbers(run: Run, *, triton: bool) -> None:
    """Compare all rules in all dtypes, and norms of elements of all sizes."""
    for name, dtype in product(SIZES, ERRORS):
        run.check(f"norm, {name}, {dtype}", partial(check_norm, name, dtype, triton=triton))
    for dtype in TOLERANCES:
        for name in RULES:
            for in_place in (True, False):
                where = "in place" if in_place else "new"
                run.check(
                    f"{name}, {dtype}, {where}",
                    lambda: compare(name, dtype, in_place=in_place, triton=triton),  # noqa: B023
                )


# Features of a GPU: waits, graphs, streams.


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
    """Return a CUDA graph of a function, after a warmup."""
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
    """Overwrite freed memory, so that a graph cannot read its addresses by luck."""
    gc.collect()
    torch.cuda.empty_cache()
    sizes = (2, 8, 16, 64, 148, 512, 4096, 65536, 1 << 20)
    made = [torch.full((size,), -1, dtype=torch.int64, device=DEVICE) for size in sizes * 4]
    return made + [torch.full((size,), -1, dtype=torch.int64).pin_memory() for size in sizes]


def replay_drop_in(dtype: torch.dtype) -> None:
    """Require a captured drop-in to clip the gradients that are present at a replay."""
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
    """Require a captured step of a fused optimizer to clip like a step without a graph."""
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
    """Require a stream not to read a table before another stream has sent it."""
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
    """Require right norms for more lists of tensors than the cache keeps."""
    lists = [
        [torch.full((1000,), n, device=DEVICE), torch.ones(30, device=DEVICE)] for n in range(200)
    ]
    norms = [uc.clip_(leaves, uc.by_global_norm(1e9)).norms for leaves in lists]
    for number, norm in enumerate(norms):
        torch.testing.assert_close(float(norm), (1000 * number**2 + 30) ** 0.5, rtol=1e-6, atol=0)


# Sections.


def check_waits(run: Run) -> None:
    """Require steps not to wait for the GPU, with and without the kernels."""
    for triton in (True, False):
        for name, rule in RULES.items():
            run.check(f"{name}, {triton=}", lambda: without_wait(rule, triton=triton))  # noqa: B023


def check_graphs(run: Run) -> None:
    """Require captured steps to go on like others."""
    for dtype in (torch.float32, torch.bfloat16):
        run.check(f"drop-in, {dtype}", lambda: replay_drop_in(dtype))  # noqa: B023
    for name, rule in (RULES | IN_GRAPHS).items():
        run.check(f"attached {name}", lambda: replay_attached(rule))  # noqa: B023


def check_streams(run: Run) -> None:
    """Require other streams and other tensors to get their own numbers."""
    run.check("side streams", on_streams)
    run.check("many lists", of_many_lists)
