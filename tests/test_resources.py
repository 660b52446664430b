"""Resource use: memory, calls, and reads by the host, which must wait for an accelerator."""

from __future__ import annotations

import gc
import math
import sys
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

import uniclip as uc
from kit import rules
from kit.devices import DEVICES, SENT, elsewhere, on_torch, patched
from kit.frameworks import EAGER, Framework
from kit.trees import leaves, mapped, walk

MIB = 2**20

# Memory


def on_the_host(call: Callable[[], Any]) -> int:
    """Return the peak of additional bytes of Python and NumPy while a function runs."""
    tracemalloc.start()
    result = call()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del result
    return most


def in_torch(call: Callable[[], Any]) -> int:
    """Return the peak of additional bytes of PyTorch and the host while a function runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        host = on_the_host(call)
    events = [
        event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = np.cumsum(
        [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    )
    return host + max(held, default=0)


@pytest.mark.needs("torch")
def test_the_peak_of_torch() -> None:
    """The peak does not count freed memory twice, and counts all live memory."""
    import torch

    assert 12 * MIB <= in_torch(lambda: [torch.zeros(MIB) for _ in range(3)]) < 13 * MIB
    assert 4 * MIB <= in_torch(lambda: [float(torch.zeros(MIB).sum()) for _ in range(4)]) < 5 * MIB


@pytest.mark.cpu_only("it counts the host's memory")
@pytest.mark.only("numpy", "torch", "tensorflow")
@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64"])
def test_memory(framework: Framework, dtype: str) -> None:
    """Measuring, clipping below the limit, and clipping in place allocate little.

    Above the limit there is one copy, of the same dtype.
    """
    peak = in_torch if framework.name == "torch" else on_the_host
    little, size = (
        {"complex64": 2, "float16": 1.5}.get(dtype, 1) * MIB,
        4_000_001 * np.dtype(dtype).itemsize,
    )
    assert size > 5 * little
    # TensorFlow's own allocator is not traced.
    held = 0 if framework.name == "tensorflow" else size

    def grads(nan: bool = False) -> list[Any]:
        values = np.full(2_000_001, 0.25)
        values[7] = np.nan if nan else 0.25
        return [
            framework.array(values, dtype),
            *(framework.array(values[8:200_008], dtype) for _ in range(10)),
        ]

    # The first call imports some modules.
    uc.clip(framework.array(np.ones((9, 9)), dtype), uc.by_norm(1.0))
    for make in (uc.by_global_norm, uc.by_norm):
        given, below, above = grads(), make(1e9), make(1e-3)
        found = {
            "norm": peak(lambda: uc.global_norm(given)),
            "below": peak(lambda: uc.clip(given, below)),
        }
        assert held <= peak(lambda: uc.clip(given, above)) < held + little
        if framework.writes:
            found |= {
                f"{rule}, in place": peak(lambda: uc.clip_(given, rule)) for rule in (below, above)
            }
            given, zero = grads(nan=True), make(1e-3, nonfinite="zero")
            # NaN is replaced beforehand, since errors come before writes.
            assert peak(lambda: uc.clip_(given, zero)) < 2 * size + 3 * little
        assert {name: most for name, most in found.items() if most >= little} == {}


@pytest.mark.cpu_only("it counts the host's memory")
@pytest.mark.only("numpy", "torch", "tensorflow", "jax")
@pytest.mark.parametrize("scope", ["leaves", "rows"])
def test_zeros_are_not_added_again(framework: Framework, scope: str) -> None:
    """A sum of 0 is recognized by its bits, without a copy in float64 as for underflow."""
    peak, shape = (in_torch if framework.name == "torch" else on_the_host), (100, 20_000)
    rule = uc.by_norm(1e9, axis=None if scope == "leaves" else -1)
    values = np.random.default_rng(0).standard_normal(shape)

    def grads(scale: float) -> list[Any]:
        some, other = np.array(values), np.array(values)
        some[40:50], other[:] = scale * some[40:50], scale * other
        return [framework.array(some), *([framework.array(other)] if scope == "leaves" else [])]

    healthy, zero, tiny = (
        min(peak(lambda: uc.clip(given, rule)) for _ in range(2))
        for given in map(grads, (1.0, 0.0, 1e-30))
    )
    # The rows of zeros, to look at their bits.
    copied = 10 * shape[1] * 4 if scope == "rows" else 0
    assert zero < healthy + copied + 2**18
    assert tiny > healthy + copied + 2**19


@pytest.mark.needs("jax")
@pytest.mark.parametrize("donate", [False, True])
def test_memory_in_jit(donate: bool) -> None:
    """Compiled code allocates little besides the result, and none for it with donated gradients."""
    import jax

    leaf = jax.ShapeDtypeStruct((3_000_001,), "float32")
    for clip in (lambda g, c: uc.clip_by_global_norm(g, c)[0], uc.clip_by_norm):
        program = jax.jit(clip, donate_argnums=[0] if donate else []).lower([leaf], 1.0).compile()
        used = program.memory_analysis()
        assert used.temp_size_in_bytes < MIB
        assert used.alias_size_in_bytes == (4 * leaf.size if donate else 0)


def rule_and_arrays(framework: Framework, name: str) -> tuple[Any, Any, list[Any]]:
    """Return a rule, parameters, and gradients: usual ones, a spike, NaN, zeros."""
    arrays = partial(mapped, partial(framework.array, dtype=framework.default_float))
    made = rules.steps()
    return (
        rules.every_rule(uc)[name],
        arrays(rules.params()),
        [arrays(made[step]) for step in (0, 1, 6, 8, 9)],
    )


@pytest.mark.only("numpy", "torch", "tensorflow", "jax")
@pytest.mark.parametrize(
    "name", ["by_global_norm", "by_norm", "by_value", "zclip", "adagc", "chain", "agc", "skip"]
)
def test_gradients_die(framework: Framework, name: str) -> None:
    """Rule, clipper, state and report keep no reference to gradients or results."""
    rule, params, steps = rule_and_arrays(framework, name)
    clipper, kept = uc.Clipper(rule), []
    while len(steps) > 3:
        grads = steps.pop()
        alive = [weakref.ref(leaf) for leaf in leaves(grads)]
        clipped = clipper(grads, params, loss=1.0)
        kept.append(clipper.report)
        if framework.writes:
            kept.append(uc.clip_(grads, uc.by_global_norm(0.1)))
        alive += [weakref.ref(leaf) for leaf in leaves(clipped)]
        del grads, clipped
        if any(leaf() is not None for leaf in alive):
            # A cycle may delay the release.
            gc.collect()
        assert [number for number, leaf in enumerate(alive) if leaf() is not None] == []


# Work that grows with the number of leaves, in calls, which are the same on every machine


def calls(function: Callable[[], Any]) -> int:
    """Return the number of function calls, Python's and others', during a call."""
    count = 0

    def listen(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    # The first call imports and compiles.
    function()
    sys.setprofile(listen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def operations(framework: Framework, function: Callable[[], Any]) -> int:
    """Return the number of calls, or of operations in a traced program."""
    if framework.name == "jax":
        import jax

        return str(jax.make_jaxpr(function)()).count(" = ")
    if framework.name == "tensorflow":
        import tensorflow as tf

        graph = tf.function(function, autograph=False).get_concrete_function().graph
        return sum(
            len(g.get_operations())
            for g in [graph, *graph._functions.values()]
            if hasattr(g, "get_operations")
        )
    return calls(function)


LINEAR = {
    "above": uc.by_global_norm(1e-3),
    "below": uc.by_global_norm(1e9),
    "leaf": uc.by_norm(1e-3),
    "zero": uc.by_global_norm(1e-3, nonfinite="zero"),
    "L3": uc.by_global_norm(1e-3, ord=3),
    "axes": uc.Rule(1e-3, scope=uc.scopes.axes(-1)),
    "groups": uc.Rule(1e-3, scope=uc.scopes.groups(lambda path, leaf: path[0] % 2)),
    "value": uc.by_value(-1e-3, 1e-3),
    "adagc": uc.adagc(),
}


@pytest.mark.only("numpy", "torch", "tensorflow", "jax")
@pytest.mark.parametrize("name", LINEAR)
def test_linear(framework: Framework, name: str) -> None:
    """Four times as many leaves take at most four times as much work.

    This applies eagerly, in place, and in a trace.
    """
    rule, many = LINEAR[name], 40 if framework.name in {"numpy", "torch"} else 4

    def work(count: int) -> int:
        def clip() -> Any:
            made = [framework.array(np.ones(3)) for _ in range(count)]
            clipped, _, report = rule.update(made, rule.init(made), in_place=framework.writes)
            return clipped, leaves(report.norms)

        return operations(framework, clip)

    few, some, most = (work(many * times) for times in (1, 4, 16))
    assert most - some <= 1.2 * 4 * (some - few)


# Reads: no device is needed, since arrays only report one


@pytest.mark.only("torch", "tensorflow", "jax")
def test_the_device_refuses(framework: Framework) -> None:
    """The simulated accelerator refuses each way to read an array."""
    for read in (
        bool,
        float,
        int,
        lambda array: np.asarray(array),
        lambda array: (array > 0) and array,
    ):
        with pytest.raises(AssertionError, match="the host reads"), DEVICES[framework.name]():
            read(framework.array(1.0))


NOT_FINITE = 3
"""The step whose limit is not compared: frameworks sort NaN differently in a percentile."""


def stepped(
    framework: Framework, name: str, place: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Any:
    """Return the results of some steps, functional and in place, on a possibly simulated device."""
    rule, params, steps = rule_and_arrays(framework, name)
    before, kept = [mapped(lambda leaf: leaf + 0, step) for step in steps], []
    with place():
        state = rule.init(params)
        for grads, again in zip(steps, before, strict=True):
            results = rule.update(grads, state, params, loss=1.0)
            if framework.writes:
                rule.update(again, state, params, loss=1.0, in_place=True)
                kept.append(again)
            clipped, state, report = results
            kept += [clipped, tuple(state), report.norms, report.factors]
            if grads is not steps[NOT_FINITE]:
                kept.append(report.limits)
    return kept


def check_no_reads(framework: Framework, name: str) -> None:
    """Require the results of the CPU, without a read."""
    wanted = stepped(framework, name)
    found = stepped(framework, name, DEVICES[framework.name])
    for (path, one), (_, other) in zip(walk(found), walk(wanted), strict=True):
        values = [
            np.asarray(x) if isinstance(x, (bool, int, float)) else framework.numpy(x)
            for x in (one, other)
        ]
        np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-7, err_msg=str(path))


@pytest.mark.only("torch", "tensorflow")
@pytest.mark.parametrize("name", rules.every_rule(uc))
def test_no_reads(framework: Framework, name: str) -> None:
    """On an accelerator no rule reads an array, and the results are those of the CPU."""
    check_no_reads(framework, name)


NEW_AT_EACH_STEP = {"cowclip"}
"""Rules with an array that users change at each step."""


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", rules.every_rule(uc))
def test_nothing_is_sent_again(name: str) -> None:
    """Once a rule has run, a step sends nothing to an accelerator, and so can be captured in a CUDA
    graph: constants are there.
    """
    framework = EAGER["torch"][0]()
    rule, params, steps = rule_and_arrays(framework, name)
    with DEVICES["torch"]():
        _, state, _ = rule.update(steps[0], rule.init(params), params, loss=1.0)
        SENT.clear()
        rule.update(steps[1], state, params, loss=1.0, in_place=True)
        assert not SENT or name in NEW_AT_EACH_STEP
    with on_torch(capturing=True):
        rule.update(steps[2], state, params, loss=1.0, in_place=True)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtypes", [["float16"], ["bfloat16"], ["bfloat16", "float32", "float64"]])
@pytest.mark.parametrize("name", ["by_global_norm", "skip", "zclip"])
def test_half_precision_on_a_device(name: str, dtypes: list[str], in_place: bool) -> None:
    """No kernel is started for a single leaf of half precision, and the factor is float32."""
    import torch

    limit = uc.by_global_norm(0.5, nonfinite="skip" if name == "skip" else "propagate")
    rule = uc.zclip(z=0.5) if name == "zclip" else limit
    torch.manual_seed(0)
    kinds = [getattr(torch, dtype) for dtype in dtypes]
    grads = [torch.randn(n % 9, n % 3).to(kinds[n % len(kinds)]) for n in range(40)]
    grads.append(torch.tensor(3.0, dtype=kinds[0]))
    clipper = uc.Clipper(rule)
    for scale in [1.0] * 30 + [10.0]:
        given = [grad * scale for grad in grads]
        before = [grad.clone() for grad in given]
        # `on_torch` refuses a product that would start a kernel for each tensor.
        with on_torch():
            clipped = (clipper.clip_ if in_place else clipper)(given)
    factor = float(clipper.report.factors)
    assert factor < 0.9
    for new, grad in zip(given if in_place else clipped, before, strict=True):
        wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
        wanted = (grad.to(wide) * torch.tensor(factor, dtype=wide)).to(grad.dtype)
        torch.testing.assert_close(new, wanted, rtol=0 if wide is torch.float32 else 1e-7, atol=0)
    if not in_place:
        torch.testing.assert_close(given, before, rtol=0, atol=0)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("in_place", [True, False])
def test_many_elements_of_half_precision_on_a_device(in_place: bool) -> None:
    """Tensors that are multiplied in batches are those that are multiplied one by one."""
    import torch

    lengths = [7, 2**25 + 1, 2**24, 2**24 + 1, 3, 5]
    given = [torch.full((length,), 0.1, dtype=torch.bfloat16) for length in lengths]
    clipper = uc.Clipper(uc.by_global_norm(1.0))
    with on_torch():
        clipped = (clipper.clip_ if in_place else clipper)(given)
    wanted = (torch.tensor(0.1).bfloat16().float() * clipper.report.factors).bfloat16()
    for new in given if in_place else clipped:
        assert bool((new == wanted).all())


@pytest.mark.needs("torch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", [uc.by_global_norm(1.0), uc.by_norm(1.0)], ids=["global", "norm"])
def test_autograd_sees_what_is_written(
    monkeypatch: pytest.MonkeyPatch, rule: uc.Rule, dtype: str
) -> None:
    """A tensor that autograd has saved cannot be changed unseen on an accelerator."""
    import torch

    monkeypatch.setenv("UNICLIP_TRITON", "0")
    weight = torch.ones(5, requires_grad=True)
    grad = torch.full((5,), 3.0, dtype=getattr(torch, dtype))
    loss = (weight * grad).sum()
    with elsewhere():
        uc.clip_([grad], rule)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.needs("torch")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [1e-25, 1e-6, 1.0, 6e4, 1e25])
def test_range_of_half_precision_on_a_device(size: float, dtype: str) -> None:
    """Norms of half precision are right in its whole range, without Triton, too."""
    import torch

    leaf = torch.full((5_000,), min(size, 6e4) if dtype == "float16" else size)
    leaf = leaf.to(getattr(torch, dtype))
    wanted = float(leaf.double().norm())
    with on_torch():
        _, report = uc.clip([leaf], uc.by_global_norm(1.0))
        measured = report.norms
    assert float(measured) == pytest.approx(wanted, rel=2e-6)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("count", [3, 300])
def test_long_windows_in_a_graph(count: int) -> None:
    """Windows, sizes and limits of more than 256 numbers are captured, too."""
    import torch

    grads = [torch.ones(2 + number % 3) for number in range(count)]
    limits = dict.fromkeys(range(count), 1.0)
    some = [
        uc.autoclip(),
        uc.percentile_clipping(),
        uc.skip_spikes(window=500),
        uc.by_block_rms(0.1),
        uc.by_average_norm(0.1),
        uc.by_group_norm(limits, lambda path, leaf: path[0]),
    ]
    for rule in some:
        with DEVICES["torch"]():
            _, state, _ = rule.update(grads, rule.init(grads))
        with on_torch(capturing=True):
            rule.update(grads, state, in_place=True)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", rules.learning(uc) | rules.learning_more(uc))
def test_a_graph_goes_on_from_its_last_run(name: str) -> None:
    """In the capture of a CUDA graph a clipper writes what it learns into the memory that it had,
    as each replay reads that.
    """
    framework = EAGER["torch"][0]()
    rule, params, steps = rule_and_arrays(framework, name)
    captured, usual = uc.Clipper(rule), uc.Clipper(rule)
    for number, grads in enumerate(steps[:3]):
        given = mapped(lambda leaf: leaf + 0, grads)
        with on_torch():
            usual.clip_(given, params, loss=1.0)
        given = mapped(lambda leaf: leaf + 0, grads)
        before = leaves(captured.state)
        with on_torch(capturing=number > 0):
            captured.clip_(given, params, loss=1.0)
        if number > 0:
            pairs = zip(before, leaves(captured.state), strict=True)
            assert all(array is now for array, now in pairs)
    assert captured.state_dict() == usual.state_dict()


@pytest.mark.needs("torch")
def test_logs_that_are_not_read() -> None:
    """After 200 steps without a call of `logs`, one step reads the numbers of all."""
    import torch

    clipper, grads = uc.Clipper(uc.by_global_norm(1.0)), [torch.ones(2)]
    clipper.logs()
    with DEVICES["torch"]():
        for _ in range(199):
            clipper.clip_(grads)
        with pytest.raises(AssertionError, match="the host reads"):
            clipper.clip_(grads)


@pytest.mark.needs("torch")
def test_what_waits_is_found() -> None:
    """The faked accelerator refuses copies that wait, and tensors of two devices."""
    waits = {
        "copies from pageable memory": "torch.as_tensor(np.ones(3), device=x.device)",
        "copies from the host": "torch.zeros(3).to(x.device, non_blocking=True)",
        "copies from pageable": "torch.tensor(1.0, device=x.device)",
        "of two devices": "x + torch.ones(3)",
    }
    import torch

    names: dict[str, Any] = {"__name__": "uniclip", "torch": torch, "np": np}
    names["x"] = torch.ones(3)
    for message, expression in waits.items():
        with pytest.raises(AssertionError, match=message), DEVICES["torch"]():
            eval(expression, names)
    sent = "torch.zeros(3).pin_memory().to(x.device, non_blocking=True) + x + torch.tensor(1.0)"
    with DEVICES["torch"]():
        eval(sent, names)


@pytest.mark.only("jax")
@pytest.mark.parametrize(
    "name", ["by_global_norm", "by_norm", "agc", "adagc", "zclip", "skip", "zero", "autoclip"]
)
def test_no_reads_in_jax(framework: Framework, name: str) -> None:
    """Outside of jit no rule reads an array of JAX; fewer rules, since operations are compiled."""
    check_no_reads(framework, name)


@contextmanager
def counted_in_jax() -> Iterator[Counter[str]]:
    """Let arrays of JAX say that they are elsewhere, and count operations by name, and the flags
    that the host reads.
    """
    import jax
    from jax.extend.core import Primitive

    counts: Counter[str] = Counter()
    kind = type(jax.numpy.ones(1))
    bind, is_true, value = Primitive.bind, kind.__bool__, kind._value

    def counting_bind(primitive: Any, *args: Any, **params: Any) -> Any:
        counts[primitive.name] += 1
        return bind(primitive, *args, **params)

    def counting_read(array: Any) -> bool:
        counts["flags"] += 1
        with patched(kind, _value=value):
            return bool(is_true(array))

    # Compiled functions of one operation would start it without Python.
    with (
        DEVICES["jax"](),
        jax.disable_jit(),
        patched(Primitive, bind=counting_bind),
        patched(kind, __bool__=counting_read),
    ):
        yield counts


@pytest.mark.needs("jax")
@pytest.mark.parametrize("rule", [uc.by_global_norm(1.0), uc.by_norm(1.0), uc.agc(0.1)])
def test_one_branch_outside_of_jit(rule: Any) -> None:
    """On an accelerator float64 sums that are in range are not made again: one flag says so."""
    import jax
    import jax.numpy as jnp

    def operations(scale: float) -> Counter[str]:
        grads = [scale * jnp.ones((3, 4)), scale * jnp.ones(5)]
        state = rule.init(grads)
        with counted_in_jax() as counts:
            rule.update(grads, state, grads)
        return counts

    with jax.enable_x64(True):
        usual, rare = operations(1.0), operations(1e-200)
    assert usual["flags"] == rare["flags"] == 1
    # The largest moduli are the unit in which sums are made again.
    assert usual["reduce_max"] == 0
    assert rare["reduce_max"] > 0


def clip_params(way: str, rule: Any, params: list[Any]) -> tuple[list[Any], list[Any]]:
    """Clip the gradients of parameters as PyTorch's users do.

    Return the gradients, and the norms in the report.
    """
    from torch.optim import SGD

    from uniclip.integrations.torch import attach, clip_grad_norm_

    grads = [param.grad for param in params]
    if way == "drop-in":
        return [grad for grad in grads if grad is not None], [
            clip_grad_norm_(params, rule.limit.value)
        ]
    if way == "attach":
        handle = attach(SGD(params, lr=0.0), rule)
        handle.optimizer.step()
        report = handle.report
    elif way == "clip_":
        report = uc.clip_(grads, rule)
    else:
        grads, report = uc.clip(grads, rule)
    assert grads[1] is None
    fields = [getattr(report, name) for name in ("norms", "limits", "factors", "clipped", "finite")]
    return [grad for grad in grads if grad is not None], fields


@pytest.mark.needs("torch")
@pytest.mark.parametrize("limit", [1.0, 100.0, math.inf, 0.0])
@pytest.mark.parametrize("values", [[3.0, 4.0], [0.0, 0.0], [3.0, math.nan], [math.inf, 4.0]])
@pytest.mark.parametrize("way", ["clip", "clip_", "drop-in", "attach"])
def test_no_reads_of_one_norm(way: str, values: list[float], limit: float) -> None:
    """No usual way to clip by one norm reads it, and the results are those of the CPU."""
    import torch

    def made() -> list[Any]:
        params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
        for param, value in zip(params[::2], values, strict=True):
            param.grad = torch.tensor([value])
        return params

    rule, params = uc.by_global_norm(limit), made()
    wanted = clip_params(way, rule, made())
    with DEVICES["torch"]():
        found = clip_params(way, rule, params)
    for one, other in zip([*found[0], *found[1]], [*wanted[0], *wanted[1]], strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-6)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", rules.every_rule(uc))
def test_meta(name: str) -> None:
    """Tensors without values pass every rule, in place too, and keep shapes and dtypes."""
    import torch

    torch_here = EAGER["torch"][0]()
    rule, params, steps = rule_and_arrays(torch_here, name)
    to_meta = lambda tree: mapped(lambda leaf: leaf.to("meta"), tree)
    kinds = lambda tree: [
        (leaf.shape, leaf.dtype, leaf.device.type) for leaf in leaves(tree) if is_tensor(leaf)
    ]
    is_tensor = lambda leaf: isinstance(leaf, torch.Tensor)
    state, grads = rule.init(to_meta(params)), to_meta(steps[0])
    clipped, after, report = rule.update(grads, state, to_meta(params), loss=1.0)
    rule.update(grads, after, to_meta(params), loss=1.0, in_place=True)
    assert kinds(clipped) == kinds(grads)
    assert kinds(after) == kinds(state)
    assert {device for *_, device in kinds([clipped, after, report.norms])} == {"meta"}


@pytest.mark.needs("torch")
def test_a_device_inside_of_the_device_of_a_step() -> None:
    """A curve runs on the device of the gradients, and may set its own."""
    import torch

    def curve(xp: Any, norm: Any, limit: Any) -> Any:
        with torch.device("cpu"):
            devices.append(torch.zeros(()).device.type)
        devices.append(torch.zeros(()).device.type)
        return limit / norm

    devices: list[str] = []
    [clipped], _ = uc.clip([torch.ones(2, device="meta")], uc.Rule(1.0, curve=curve))
    assert (devices, clipped.device.type) == (["cpu", "meta"], "meta")
    assert torch.zeros(()).device.type == "cpu"


@contextmanager
def default(dtype: Any = None, device: Any = None) -> Iterator[None]:
    """Set the default dtype and device of all code."""
    import torch

    torch.set_default_dtype(dtype or torch.float32)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.only("torch")
@pytest.mark.parametrize("name", rules.every_rule(uc))
def test_defaults(framework: Framework, name: str) -> None:
    """The user's default device and dtype change no bit and no dtype."""
    import torch

    wanted = stepped(framework, name)
    for options in ({"device": "meta"}, {"dtype": torch.float64}, {"dtype": torch.bfloat16}):
        found = stepped(framework, name, partial(default, **options))
        for (path, one), (_, other) in zip(walk(found), walk(wanted), strict=True):
            assert type(one) is type(other)
            if isinstance(one, torch.Tensor):
                assert (one.dtype, one.device) == (other.dtype, other.device), path
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
