# SPDX-License-Identifier: MIT
"""Time uniclip on a GPU next to the clipping of PyTorch and timm, and to CuPy by hand.

A row is one operation on one tree of gradients, clipped at each call or not. The functions of a
row take turns in a random order, and each call starts from the same gradients and the same state.
Before it is timed, each result is compared with that of uniclip in float64.

On a CPU, the trees are small, the GPU time is that of the host, and neither kernels nor memory are
measured: this only shows that the script runs.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple, cast

import numpy as np
import optree
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
from timing import NATIVE, quartiles
from torch import Tensor

import uniclip as uc
from uniclip.integrations.torch import attach, clip_grad_norm_

Arrays = Sequence[Any]
Shapes = list[tuple[int, ...]]
Row = dict[str, Any]
OURS = "uniclip"
WITHOUT = "without_triton"
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2}
"""How far a result may be from that in float64, as a share of its norm."""
SPIN = 8_000_000
"""The clock cycles for which the GPU is busy before a call, so that the host is ahead as in
training."""
SMALL, LARGE = 1e-2, 1e9
"""The limits that clip all gradients, and none."""
HISTORY = (0.9, 1.1, 1.0, 0.95, 1.05, 1.0)
"""The scales of the gradients that a stateful rule has seen."""
WITHIN, ABOVE = 0.5, 100.0
"""The scales of gradients that a stateful rule then leaves as they are, and clips."""
STATELESS: dict[str, Callable[[float], Any]] = {
    "nonfinite='skip'": partial(uc.by_global_norm, nonfinite="skip"),
    "skip_above": partial(uc.by_global_norm, skip_above=1e12),
    "by_norm": uc.by_norm,
    "by_block_rms": uc.by_block_rms,
    "by_value": lambda limit: uc.by_value(-limit, limit),
    "agc": uc.agc,
}
"""Stateless rules, as functions of their limit."""
STATEFUL = {
    "zclip": uc.zclip(warmup=2),
    "autoclip": uc.autoclip(),
    "percentile_clipping": uc.percentile_clipping(),
    "adagc": uc.adagc(warmup=1, warmup_norm=LARGE),
    "skip_spikes": uc.skip_spikes(warmup=2),
}
"""Stateful rules, with a warm-up that is shorter than `HISTORY`."""


# Gradients.


class Model(NamedTuple):
    """Parameters, and their gradients."""

    params: list[torch.nn.Parameter]
    grads: list[Tensor]


def gpt(layers: int, width: int, words: int = 50257) -> Shapes:
    """Return the shapes of the parameters of a GPT-2."""
    block: Shapes = [(width,), (width,), (3 * width, width), (3 * width,), (width, width)]
    block += [(width,), (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width)]
    block += [(width,)]
    return [(words, width), (1024, width), *block * layers, (width,), (width,)]


def trees() -> dict[str, Shapes]:
    """Return the trees to time; all rules are timed on the first."""
    small: dict[str, Shapes] = {"MLP of ten": [(64, 64), (64,)] * 5}
    if not HAS_GPU:
        return {"GPT-2 of width 8": gpt(1, 8, words=100), **small}
    return {
        "GPT-2": gpt(12, 768),
        "1.3 B parameters": gpt(24, 2048),
        **small,
        "50 of 16 k": [(128, 136), (136,)] * 25,
    }


def model_of(tree: str, dtype: str, scale: float = 1.0) -> Model:
    """Return random parameters and gradients."""
    params = parameters(trees()[tree], DTYPES[dtype])
    grads = [param.grad for param in params if param.grad is not None]
    for grad in grads:
        grad.mul_(scale)
    return Model(params, grads)


# Functions to time.


@dataclass
class Way:
    """A function to time. It returns the clipped arrays: new ones, or those that it has changed."""

    call: Callable[[], Arrays]
    prepare: Callable[[], Any] = lambda: None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


class ByRule:
    """Clipping by a rule, whose state is the same before each call."""

    def __init__(self, rule: Any, model: Model, scale: float = 1.0) -> None:
        self.clipper = uc.Clipper(rule)
        self.grads = model.grads
        self.given: dict[str, Any] = {}
        if "params" in needs(rule):
            self.given["params"] = [param.detach() for param in model.params]
        if "loss" in needs(rule):
            self.given["loss"] = torch.ones((), device=DEVICE)

        # The gradients have the scale of the timed step already.
        if self.clipper.rule.stateful:
            for past in HISTORY:
                self.clipper([grad * (past / scale) for grad in self.grads], **self.given)
        self.state = self.clipper.state

    def in_place(self) -> Way:
        """Return what changes the gradients."""

        def call() -> Arrays:
            self.clipper.clip_(self.grads, **self.given)
            return self.grads

        return Way(call, self._restore)

    def to_new(self) -> Way:
        """Return what makes new gradients."""

        def call() -> Arrays:
            return cast("Arrays", self.clipper(self.grads, **self.given))

        return Way(call, self._restore)

    def _restore(self) -> None:
        self.clipper.state = optree.tree_map(torch.clone, self.state)


def on_params(function: Callable[..., Any], model: Model, *args: float) -> Way:
    """Return a function that changes the gradients of parameters."""

    def call() -> Arrays:
        function(model.params, *args)
        return model.grads

    return Way(call)


def foreach_global(model: Model, limit: float) -> Way:
    """Return clipping by global norm to new tensors, by hand."""

    def call() -> Arrays:
        norm = torch.nn.utils.get_total_norm(model.grads)
        factor = (limit / norm).clamp(max=1.0)
        return cast("Arrays", torch._foreach_mul(model.grads, factor))  # noqa: SLF001

    return Way(call)


def foreach_each(model: Model, limit: float) -> Way:
    """Return clipping of each tensor by its norm, by hand."""

    def call() -> Arrays:
        norms = torch.stack(torch._foreach_norm(model.grads))  # noqa: SLF001
        factors = (limit / norms).clamp(max=1.0)
        torch._foreach_mul_(model.grads, list(factors.unbind()))
        return model.grads

    return Way(call)


def timm_agc() -> tuple[str, Callable[..., Any]]:
    """Return timm's adaptive gradient clipping and its name, or the same by its formula."""
    try:
        from timm.utils.agc import adaptive_clip_grad
    except ImportError:
        return "timm's formula", agc_of_timm
    return "timm", cast("Callable[..., Any]", adaptive_clip_grad)


def agc_of_timm(params: list[torch.nn.Parameter], clip_factor: float) -> None:
    """Clip as timm's ``adaptive_clip_grad`` does."""

    def unit_norm(x: Tensor) -> Tensor:
        if x.ndim <= 1:
            return x.norm(2.0)
        return x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True)

    for param in params:
        grad = cast("Tensor", param.grad)
        most = unit_norm(param.detach()).clamp_(min=1e-3).mul_(clip_factor)
        norm = unit_norm(grad)
        clipped = grad * (most / norm.clamp(min=1e-6))
        grad.copy_(torch.where(norm < most, grad, clipped))


# Cases.


class About(NamedTuple):
    """What a row says of itself."""

    what: str
    tree: str
    dtype: str
    clipped: bool
    peer: str

    @property
    def limit(self) -> float:
        """Return the limit of a stateless rule."""
        return SMALL if self.clipped else LARGE

    def row(self) -> Row:
        """Return the row without its measurements."""
        what = f"{self.what}, {self.tree}"
        return {"what": what, "dtype": self.dtype, "clipped": self.clipped, "peer": self.peer}


@dataclass
class Case:
    """The functions of a row, the arrays that they start from, and the right result."""

    about: About
    native: Way
    ours: Way
    restore: Callable[[], Any]
    before: Arrays
    expected: Arrays

    def ways(self) -> dict[str, Way]:
        """Return the functions to time, on a GPU also without the Triton kernels."""
        ways = {NATIVE: self.native, OURS: self.ours}
        if HAS_GPU and self.about.peer != CUPY:
            ways[WITHOUT] = replace(self.ours, context=partial(with_kernels, triton=False))
        return ways


GLOBAL = "torch.nn.utils, global norm"
"""What a rule is compared with for which no other library has a function."""
CUPY = "CuPy by hand"
CUPY_ARRAYS = 40
CUPY_SIZE = 2_400_000


Recipe = tuple[About, Callable[[About], Case]]
"""What a row says of itself, and the function that makes its case from that."""


def all_cases() -> Iterator[Recipe]:
    """Yield the cases of PyTorch before they are made, so that one at a time is in memory."""
    first = next(iter(trees()))
    yield from cases_of(drop_in_case, "global norm", [*trees()], "torch.nn.utils")
    yield from cases_of(new_case, "global norm to new tensors", [first], "foreach functions")
    step = "whole step of fused AdamW"
    yield from cases_of(step_case, step, [first], "torch.nn.utils", dtypes=["float32"])
    peers = {
        "by_norm": "foreach functions",
        "by_value": "torch.nn.utils",
        "agc": timm_agc()[0],
    }
    for name in STATELESS:
        yield from cases_of(stateless_case, name, [first], peers.get(name, GLOBAL))
    for name in STATEFUL:
        yield from cases_of(stateful_case, name, [first], GLOBAL)


def cases_of(
    make: Callable[[About], Case],
    what: str,
    trees: Sequence[str],
    peer: str,
    dtypes: Sequence[str] = tuple(TOLERANCES),
) -> Iterator[Recipe]:
    """Yield the cases of an operation: not clipped and clipped, in each dtype, on each tree."""
    for tree, dtype, clipped in product(trees, dtypes, (False, True)):
        yield About(what, tree, dtype, clipped, peer), make


def grad_case(about: About, model: Model, native: Way, ours: Way, expected: Arrays) -> Case:
    """Return a case that starts from the gradients of a model."""
    kept = [grad.clone() for grad in model.grads]
    restore = partial(torch._foreach_copy_, model.grads, kept)
    return Case(about, native, ours, restore, kept, expected)


def in_float64(rule: Any, model: Model, scale: float = 1.0) -> Arrays:
    """Return the result of a rule in float64."""
    used = model.params if "params" in needs(rule) else []
    params = [torch.nn.Parameter(param.detach().double()) for param in used]
    doubles = Model(params, [grad.double() for grad in model.grads])
    return ByRule(rule, doubles, scale).to_new().call()


def drop_in_case(about: About) -> Case:
    """Return the drop-in next to PyTorch's function."""
    model = model_of(about.tree, about.dtype)
    native = on_params(torch.nn.utils.clip_grad_norm_, model, about.limit)
    ours = on_params(clip_grad_norm_, model, about.limit)
    return grad_case(about, model, native, ours, in_float64(uc.by_global_norm(about.limit), model))


def new_case(about: About) -> Case:
    """Return clipping to new tensors, next to the same by hand."""
    model = model_of(about.tree, about.dtype)
    rule = uc.by_global_norm(about.limit)
    native = foreach_global(model, about.limit)
    return grad_case(about, model, native, ByRule(rule, model).to_new(), in_float64(rule, model))


def stateless_case(about: About) -> Case:
    """Return a stateless rule next to a function of the same formula, or to the global norm."""
    model = model_of(about.tree, about.dtype)
    rule = STATELESS[about.what](about.limit)
    if about.what == "by_norm":
        native = foreach_each(model, about.limit)
    else:
        functions = {"by_value": torch.nn.utils.clip_grad_value_, "agc": timm_agc()[1]}
        function = functions.get(about.what, torch.nn.utils.clip_grad_norm_)
        native = on_params(function, model, about.limit)
    return grad_case(about, model, native, ByRule(rule, model).in_place(), in_float64(rule, model))


def stateful_case(about: About) -> Case:
    """Return a stateful rule next to PyTorch's clipping by global norm."""
    scale = ABOVE if about.clipped else WITHIN
    model = model_of(about.tree, about.dtype, scale)
    rule = STATEFUL[about.what]
    native = on_params(torch.nn.utils.clip_grad_norm_, model, about.limit)
    ours = ByRule(rule, model, scale).in_place()
    return grad_case(about, model, native, ours, in_float64(rule, model, scale))


def step_case(about: About) -> Case:
    """Return a step of an optimizer with `attach`, next to PyTorch's function before the step.

    Parameters start at zero, and ε is 1, so that a step shows how long the gradients are.
    """
    models = [model_of(about.tree, about.dtype) for _ in range(2)]
    kept = [grad.clone() for grad in models[0].grads]
    optimizers = [
        torch.optim.AdamW(model.params, lr=1.0, eps=1.0, weight_decay=0.0, fused=True)
        for model in models
    ]
    attach(optimizers[1], uc.by_global_norm(about.limit))

    def restore() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            for param, grad in zip(model.params, kept, strict=True):
                param.data.zero_()
                param.grad = grad.clone()
            for state in optimizer.state.values():
                torch._foreach_zero_(list(state.values()))

    def native() -> Arrays:
        torch.nn.utils.clip_grad_norm_(models[0].params, about.limit)
        optimizers[0].step()
        return [param.detach() for param in models[0].params]

    def ours() -> Arrays:
        optimizers[1].step()
        return [param.detach() for param in models[1].params]

    # AdamW's first step moves each parameter by g / (|g| + ε).
    clipped = uc.clip([grad.double() for grad in kept], uc.by_global_norm(about.limit))[0]
    expected = [-grad / (grad.abs() + 1) for grad in clipped]
    zeros = [torch.zeros_like(grad) for grad in kept]
    return Case(about, Way(native), Way(ours), restore, zeros, expected)


def cupy_case(about: About) -> Case:
    """Return clipping of CuPy's arrays by their global norm, next to the same by hand."""
    import cupy

    grads = [cupy.random.standard_normal(CUPY_SIZE, "float32") for _ in range(CUPY_ARRAYS)]
    kept = [grad.copy() for grad in grads]
    rule = uc.by_global_norm(about.limit)

    def restore() -> None:
        for grad, values in zip(grads, kept, strict=True):
            grad[...] = values

    def by_hand() -> Arrays:
        norm = cupy.sqrt(sum(cupy.vdot(grad, grad) for grad in grads))
        factor = cupy.minimum(about.limit / norm, 1)
        for grad in grads:
            cupy.multiply(grad, factor, out=grad)
        return grads

    def ours() -> Arrays:
        uc.clip_(grads, rule)
        return grads

    expected = uc.clip([torch.from_dlpack(grad).double() for grad in kept], rule)[0]
    return Case(about, Way(by_hand), Way(ours), restore, kept, expected)


# Measurements.


def check_case(case: Case) -> None:
    """Require right results, so that nothing is fast because it is wrong."""
    for name, way in case.ways().items():
        found = as_tensors(call_once(case, way))
        # A rule without a peer of the same formula stands next to another formula.
        if name == NATIVE and case.about.peer == GLOBAL:
            continue
        differences = [one.double() - two for one, two in zip(found, case.expected, strict=True)]
        apart = norm_of(differences)
        if not apart <= TOLERANCES[case.about.dtype] * norm_of(case.expected):
            msg = f"the result of {name} is {apart:.3g} from that in float64"
            raise AssertionError(msg)


def call_once(case: Case, way: Way) -> Arrays:
    """Return the result of a function after an untimed call."""
    case.restore()
    way.prepare()
    with way.context():
        return way.call()


def as_tensors(arrays: Arrays) -> list[Tensor]:
    """Return PyTorch's views of arrays on the GPU."""
    return [array if isinstance(array, Tensor) else torch.from_dlpack(array) for array in arrays]


def measure(case: Case, rounds: int) -> Row:
    """Return the row of a case."""
    check_case(case)
    ways = case.ways()
    order = list(ways)
    shuffle = random.Random(0).shuffle  # noqa: S311 - no secret
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(time_call(case, ways[name]))
    found = {name: np.array(pairs) for name, pairs in times.items()}
    ratios = found[NATIVE][:, 0] / found[OURS][:, 0]

    row: Row = {**case.about.row(), "speedup": quartiles(ratios)}
    for name, way in ways.items():
        gpu, host = np.median(found[name], axis=0).tolist()
        row[name] = {"gpu_us": gpu, "host_us": host, **count(case, way)}
    return row


def time_call(case: Case, way: Way) -> tuple[float, float]:
    """Return the times of the GPU and of the host for one call, in µs."""
    case.restore()
    way.prepare()
    synchronize()
    with way.context():
        gpu, host, result = time_on_gpu(way) if HAS_GPU else time_on_host(way)
    check_clipped(case, result)
    return gpu, host


def time_on_host(way: Way) -> tuple[float, float, Arrays]:
    """Return the time of a call twice, in µs, and its result."""
    begin = time.perf_counter()
    result = way.call()
    spent = (time.perf_counter() - begin) * 1e6
    return spent, spent, result


def time_on_gpu(way: Way) -> tuple[float, float, Arrays]:
    """Return the times of the GPU and of the host for one call, in µs, and its result.

    The call must not wait for the GPU.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN)  # noqa: SLF001 - PyTorch has no public one
    start.record()
    with refusing_waits():
        begin = time.perf_counter()
        result = way.call()
        host = (time.perf_counter() - begin) * 1e6
    end.record()
    synchronize()
    return start.elapsed_time(end) * 1e3, host, result


def check_clipped(case: Case, result: Arrays) -> None:
    """Require a call to change the gradients if its row is clipped, and only then."""
    if case.about.what.startswith("whole step"):
        return
    pairs = zip(as_tensors(result), as_tensors(case.before), strict=True)
    if all(torch.equal(*pair) for pair in pairs) is case.about.clipped:
        msg = (
            "the gradients of this call were " + ("not " if case.about.clipped else "") + "clipped"
        )
        raise AssertionError(msg)


def count(case: Case, way: Way) -> dict[str, float]:
    """Return how many kernels a call starts, and its peak of memory above the gradients, in MB."""
    if not HAS_GPU:
        return {}
    from torch.profiler import ProfilerActivity, profile

    call_once(case, way)
    case.restore()
    way.prepare()
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with way.context(), profile(activities=[ProfilerActivity.CUDA]) as profiled:
        way.call()
        synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 1e6
    kernels = [
        event
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
    counted: dict[str, float] = {"launches": len(kernels)}
    # CuPy has its own memory, of which PyTorch knows nothing.
    return counted if case.about.peer == CUPY else counted | {"peak_mb": peak}


def time_torch(run: Run, rounds: int) -> list[Row]:
    """Return the rows of PyTorch."""
    return time_cases(run, all_cases(), rounds)


def time_cupy(run: Run, rounds: int) -> list[Row]:
    """Return the rows of CuPy."""
    tree = f"{CUPY_ARRAYS} of {CUPY_SIZE / 1e6:g} M"
    cases = cases_of(cupy_case, "global norm, CuPy", [tree], CUPY, dtypes=["float32"])
    return time_cases(run, cases, rounds)


def time_cases(run: Run, cases: Iterator[Recipe], rounds: int) -> list[Row]:
    """Return the rows of cases, printed as they are measured, without those that fail."""
    rows: list[Row] = []
    for about, make in cases:
        label = f"{about.what}, {about.tree}, {about.dtype}"
        label += ", clipped" if about.clipped else ", not clipped"
        run.check(label, lambda: time_one(label, make(about), rounds, rows))  # noqa: B023
        if HAS_GPU:
            gc.collect()
            torch.cuda.empty_cache()
    return rows


def time_one(label: str, case: Case, rounds: int, rows: list[Row]) -> None:
    """Append the row of a case, and print it."""
    row = measure(case, rounds)
    rows.append(row)
    print(f"{label}: {line(row)}", flush=True)


def line(row: Row) -> str:
    """Return the measurements of a row as text."""
    low, ratio, high = row["speedup"]
    parts = [f"speedup {ratio:.2f} ({low:.2f}-{high:.2f}) over {row['peer']}"]
    for name in (NATIVE, OURS, WITHOUT):
        if name in row:
            values = ", ".join(f"{key} {value:.4g}" for key, value in row[name].items())
            parts.append(f"{name}: {values}")
    return "; ".join(parts)
