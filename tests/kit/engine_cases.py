"""Cases that several processes run: weights, and what an engine refuses, saves and skips."""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed, nn

import uniclip as uc
from kit.engines import (
    SPIKE,
    STEPS,
    adamw,
    distance,
    flat,
    grads_of_both,
    loss_of,
    megatron_optimizer,
    net,
    sgd,
    start_megatron,
    train_beside,
    zero_config,
    zero_engine,
    zero_weights,
)
from uniclip.integrations.torch import attach, check_layout

CLOSE = 1e-6
RULES: dict[str, Callable[[], Any]] = {
    "global": lambda: uc.by_global_norm(0.3),
    "zclip": lambda: uc.zclip(z=1.0, decay=0.5, warmup=2),
    "skip": lambda: uc.by_global_norm(0.3, skip_above=8.0),
    "groups": lambda: uc.by_group_norm({"0": 0.05, "2": 0.2, "4": 0.1}, lambda path, _: path[1][0]),
    "leaf": lambda: uc.by_norm(0.05),
    "adagc": lambda: uc.adagc(warmup=2),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def with_zero(rank: int, stage: int, dtype: str, rule: str) -> float:
    """Return how far weights are from those of a plain optimizer with the same gradients."""
    engine = zero_engine(zero_config(stage, dtype))
    worst, handle, _ = train_beside(rank, engine, RULES[rule](), dtype=DTYPES[dtype])
    handle.remove()
    return worst


def with_megatron(rank: int, dtype: str, layout: str, rule: str) -> float:
    """Return how far the weights are from those of a plain optimizer."""
    start_megatron()
    module, plain = net().to(DTYPES[dtype]), net()
    experts = (lambda model: model[4]) if layout == "experts" else None
    ddp, optimizer = megatron_optimizer(module, dtype, sharded=layout != "whole", experts=experts)
    handle = attach(optimizer, RULES[rule](), names=module)
    beside = adamw(plain)
    attach(beside, RULES[rule]())

    for step in range(STEPS):
        ddp.zero_grad_buffer()
        grads_of_both(plain, step)
        # Each process has the sum over both; the average is the same.
        for q, p in zip(plain.parameters(), module.parameters(), strict=True):
            p.main_grad.copy_(q.grad)
        ddp.finish_grad_sync()
        optimizer.step()
        beside.step()
    handle.remove()
    rounded = [q.to(DTYPES[dtype]) for q in plain.parameters()]
    return distance(module.parameters(), rounded)


def message(kind: type[Exception], function: Callable[[], Any]) -> str:
    """Return the message of the error that a function raises."""
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def train(engine: Any, rank: int, steps: range = range(STEPS)) -> None:
    """Train an engine of DeepSpeed."""
    for step in steps:
        engine.backward(loss_of(engine, step, rank))
        engine.step()


def check_close(far: float) -> None:
    """Check that weights are those of a plain optimizer."""
    assert far < CLOSE, far


# DeepSpeed


def offloaded(rank: int, stage: int) -> None:
    """Offload the states of the optimizer, and with them the gradients."""
    for rounds in (1, 2):
        config = zero_config(
            stage,
            zero={"offload_optimizer": {"device": "cpu"}},
            gradient_accumulation_steps=rounds,
        )
        for rule in (uc.by_global_norm(0.3, skip_above=2.0), uc.adagc(warmup=2)):
            check_close(train_beside(rank, zero_engine(config), rule)[0])


def accumulated(rank: int, stage: int) -> None:
    """Accumulate: a rule sees the sum over all passes of a step."""
    config = zero_config(stage, gradient_accumulation_steps=2)
    engine = zero_engine(config)
    far, handle, beside = train_beside(rank, engine, uc.zclip(z=1.0, decay=0.5, warmup=2))
    check_close(far)
    torch.testing.assert_close(handle.report.norms, beside.report.norms)


def summed_in_float32(rank: int) -> None:
    """``BF16_Optimizer`` sums gradients in float32; the one that does not is refused."""
    config = zero_config(1, "bf16", data_types={"grad_accum_dtype": "fp32"})
    assert type(zero_engine(config).optimizer).__name__ == "BF16_Optimizer"
    for rule in (uc.by_global_norm(0.3, skip_above=8.0), uc.by_norm(0.05)):
        engine = zero_engine(config)
        far, handle, _ = train_beside(rank, engine, rule, dtype=torch.bfloat16)
        check_close(far)
        handle.remove()
    engine.optimizer.grad_acc_dtype = torch.bfloat16
    attached = message(ValueError, lambda: attach(engine, uc.by_norm(1.0)))
    assert '"grad_accum_dtype": "fp32"' in attached


def with_infinity(rank: int, stage: int) -> None:
    """Give one process a NaN: all skip the step; weights and the state stay."""
    engine = zero_engine(zero_config(stage))
    rule = uc.zclip(z=1.0, decay=0.5, warmup=2, nonfinite="skip")
    handle = attach(engine, rule)
    train(engine, rank, range(2))
    before, state = flat(zero_weights(engine)), handle.numbers()

    loss = loss_of(engine, 2, rank)
    engine.backward(loss * float("nan") if rank == 1 else loss)
    engine.step()
    assert bool(handle.report.skipped)
    assert torch.equal(flat(zero_weights(engine)), before)
    assert handle.numbers() == state
    assert engine.skipped_steps == 1

    train(engine, rank, range(3, 5))
    assert bool(flat(zero_weights(engine)).isfinite().all())
    assert not torch.equal(flat(zero_weights(engine)), before)


def overflow(rank: int, stage: int) -> None:
    """Overflow in 16 bits: the engine skips the step, and the rule does not see it."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    scale = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 1}
    config = zero_config(stage, fp16=scale)
    engine = zero_engine(config)
    handle = attach(engine, uc.zclip(z=1.0, decay=0.5, warmup=2))
    for step in range(2):
        engine.backward(loss_of(engine, step, rank, torch.float16))
        engine.step()
    # A norm of scaled gradients would be 256 times as large.
    assert float(handle.report.norms) < 10
    report, state = handle.report, handle.numbers()

    engine.backward(loss_of(engine, 2, rank, torch.float16) * 1e6)
    engine.step()
    assert engine.skipped_steps == 1
    assert handle.report is report
    assert handle.numbers() == state
    engine.backward(loss_of(engine, 2, rank, torch.float16))
    engine.step()
    assert handle.report is not report


def without_gradients(rank: int, stage: int) -> None:
    """Give a layer no gradients in some steps."""

    def loss(model: Any, step: int, rank: int, dtype: torch.dtype) -> Any:
        inner = getattr(model, "module", model)
        part = inner[:3] if step % 2 else inner
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        return (part(x) ** 2).mean()

    for rule in (uc.by_global_norm(0.03), uc.zclip(z=1.0, decay=0.5, warmup=2)):
        engine = zero_engine(zero_config(stage))
        far, _, _ = train_beside(rank, engine, rule, loss=loss)
        check_close(far)


def large_groups(rank: int) -> None:
    """Divide a group into several flat vectors: it is one group of the rule's paths."""
    config = zero_config(3, zero={"sub_group_size": 40})
    rule = uc.masked(uc.by_global_norm(0.05), lambda path, _: path[0] == 0)
    engine = zero_engine(config)
    assert len(engine.optimizer.fp16_groups) > 2
    check_close(train_beside(rank, engine, rule)[0])


def own_names(rank: int, stage: int) -> None:
    """Pass names of one's own: paths have these."""
    engine = zero_engine(zero_config(stage))
    pairs = [(f"mine.{name}", p) for name, p in engine.module.named_parameters()]
    handle = attach(engine, uc.adagc(), names=pairs)
    assert "mine.0.weight" in str(handle.numbers())


def mask_by_axes(rank: int, stage: int) -> None:
    """Mask by the number of axes: a part has as many as the parameter."""
    rule = uc.masked(uc.by_global_norm(0.1), lambda path, leaf: leaf.ndim > 1)
    far, handle, beside = train_beside(rank, zero_engine(zero_config(stage)), rule)
    check_close(far)
    torch.testing.assert_close(handle.report.norms, beside.report.norms)


def refused_rules(rank: int, stage: int) -> None:
    """Refuse what needs whole parameters, or reduces by itself, and change nothing."""
    engine = zero_engine(zero_config(stage, gradient_clipping=0.7))
    before = dict(vars(engine.optimizer))
    group = distributed.group.WORLD

    def by_shape(path: Any, leaf: Any) -> bool:
        return leaf.shape[0] > 3

    for rule, options, words in (
        (uc.agc(0.1), {}, "norms along axes"),
        (lambda grad: grad, {}, "function of one gradient"),
        (uc.masked(uc.by_norm(1.0), by_shape), {}, "looks at the shape of '"),
        (uc.by_norm(1.0), {"all_reduce": group}, "leave all_reduce= and shared= out"),
        (uc.by_norm(1.0), {"shared": by_shape}, "leave all_reduce= and shared= out"),
        (uc.by_norm(1.0), {"names": nn.Linear(2, 2)}, "none of the parameters"),
    ):
        assert words in message(ValueError, partial(attach, engine, rule, **options))
    assert "can't look into DeepSpeedZeroOptimizer" in message(
        ValueError, lambda: check_layout(engine, uc.by_norm(1.0))
    )
    beside = sgd(net())
    for several in ([engine, beside], [beside, engine.optimizer], {"inside": engine}):
        assert "attach to it alone" in message(ValueError, partial(attach, several, uc.by_norm(1)))
    assert vars(engine.optimizer) == before
    train(engine, rank)


def attached_twice(rank: int) -> None:
    """Refuse a second rule; `remove` gives the engine its step and its limit back."""
    engine = zero_engine(zero_config(2, gradient_clipping=0.7))
    with pytest.warns(UserWarning, match=r"to a norm of 0.7 is off .* uc.by_global_norm\(0.7\)"):
        handle = attach(engine, uc.zclip())
    assert engine.optimizer.clip_grad == 0
    for again in (engine, engine.optimizer):
        words = message(ValueError, partial(attach, again, uc.by_norm(1.0)))
        assert "clipped already, by uc.zclip()" in words

    handle.remove()
    assert engine.optimizer.clip_grad == 0.7
    assert "step" not in vars(engine.optimizer)
    assert not {"save_checkpoint", "load_checkpoint"} & set(vars(engine))
    handle.remove()

    # The engine clips by itself again.
    train(engine, rank, range(1))
    with pytest.warns(UserWarning, match=r"doesn't save the state of uc.zclip"):
        attach(engine.optimizer, uc.zclip())
    train(engine, rank, range(1))


def default_limit(rank: int, stage: int) -> None:
    """Without a limit in its config DeepSpeed clips to 1; a rule turns that off without a word."""
    config = zero_config(stage)
    del config["gradient_clipping"]
    engine = zero_engine(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        far, handle, beside = train_beside(rank, engine, uc.by_global_norm(2.0))
    check_close(far)
    torch.testing.assert_close(handle.report.norms, beside.report.norms)
    handle.remove()
    assert engine.gradient_clipping() == 1.0


def attached_inside(rank: int) -> None:
    """Raise in the first step of an optimizer inside of an engine, and name what to write."""
    engine = zero_engine(zero_config(2))
    attach(engine.optimizer.optimizer, uc.by_global_norm(1.0))
    words = message(RuntimeError, lambda: train(engine, rank))
    assert "inside of DeepSpeedZeroOptimizer" in words
    assert "attach(engine, rule)" in words

    import deepspeed

    model = net()
    optimizer = sgd(model)
    attach(optimizer, uc.by_global_norm(1.0))
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=zero_config(3))[0]
    assert "attach(engine, rule)" in message(RuntimeError, lambda: train(engine, rank))

    # Without ZeRO the optimizer is the user's, but the engine clips before it.
    engine = zero_engine(zero_config(0, gradient_clipping=0.5))
    handle = attach(engine.optimizer, uc.by_global_norm(1.0))
    assert "DeepSpeed clips to a norm of 0.5" in message(RuntimeError, lambda: train(engine, rank))
    handle.remove()
    engine = zero_engine(zero_config(0))
    attach(engine.optimizer, uc.by_global_norm(1.0))
    train(engine, rank)


def refused_engines(rank: int) -> None:
    """Options whose gradients lie elsewhere are refused, and so are unknown classes."""
    engine = zero_engine(zero_config(2))
    zero = engine.optimizer
    for attribute, words in (
        ("has_moe_layers", "experts"),
        ("swap_optimizer", "NVMe"),
        ("zenflow", "ZenFlow"),
        ("use_muon", "Muon"),
        ("torch_autocast_gradscaler", "torch_autocast"),
    ):
        before = getattr(zero, attribute, None)
        setattr(zero, attribute, True)
        assert words in message(ValueError, lambda: attach(engine, uc.by_norm(1.0)))
        setattr(zero, attribute, before)

    zero.model_parallel_group = distributed.group.WORLD
    assert "tensor parallelism" in message(ValueError, lambda: attach(engine, uc.by_norm(1.0)))
    zero.model_parallel_group = None
    zero.real_dp_process_group[1] = distributed.new_group([rank])
    assert "several groups of processes" in message(
        ValueError, lambda: attach(engine, uc.by_norm(1.0))
    )
    zero.real_dp_process_group[1] = zero.real_dp_process_group[0]

    zero.__class__ = type("SuperOffloadOptimizer", (type(zero),), {})
    words = message(TypeError, lambda: attach(engine, uc.by_norm(1.0)))
    assert "DeepSpeed's SuperOffloadOptimizer" in words
    pipeline = type("PipelineEngine", (type(engine),), {"__module__": "deepspeed.runtime.pipe"})
    engine.__class__ = pipeline
    assert "PipelineEngine" in message(ValueError, lambda: attach(engine, uc.by_norm(1.0)))


def checkpoints(rank: int, stage: int) -> None:
    """Save the state of a rule in the engine's checkpoints, beside what the user puts there."""
    folder = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(folder)
    rule = uc.zclip(z=1.0, decay=0.5, warmup=2)
    engine = zero_engine(zero_config(stage))
    handle = attach(engine, rule)
    train(engine, rank, range(3))
    saved = handle.numbers()
    engine.save_checkpoint(folder[0], client_state={"mine": 1})
    train(engine, rank, range(3, 6))
    weights = flat(zero_weights(engine) if stage else engine.module.parameters())
    handle.remove()
    engine.save_checkpoint(folder[0], tag="without")

    resumed = zero_engine(zero_config(stage))
    handle = attach(resumed, rule)
    _, client_state = resumed.load_checkpoint(folder[0], tag="global_step3")
    assert client_state["mine"] == 1
    assert handle.numbers() == saved
    train(resumed, rank, range(3, 6))
    after = flat(zero_weights(resumed) if stage else resumed.module.parameters())
    assert float((after - weights).abs().max()) < CLOSE

    # Another rule begins anew.
    other = zero_engine(zero_config(stage))
    handle = attach(other, uc.adagc(), resume=False)
    other.load_checkpoint(folder[0], tag="global_step3")
    train(other, rank, range(1))
    # A checkpoint of the weights alone leaves the state as it is.
    other = zero_engine(zero_config(stage))
    handle = attach(other, uc.adagc())
    before = handle.numbers()
    other.load_checkpoint(folder[0], tag="global_step3", load_module_only=True)
    assert handle.numbers() == before
    # A checkpoint without the state of the rule is told about.
    other = zero_engine(zero_config(stage))
    attach(other, rule)
    other.load_checkpoint(folder[0], tag="without")
    with pytest.warns(UserWarning, match="state"):
        train(other, rank, range(1))


def attached_again(rank: int, stage: int) -> None:
    """Attach a rule again: it goes on from its state."""
    through, again = zero_engine(zero_config(stage)), zero_engine(zero_config(stage))
    rule = uc.adagc(warmup=1)
    attach(through, rule)
    train(through, rank, range(4))

    handle = attach(again, rule)
    train(again, rank, range(2))
    saved = handle.state_dict()
    handle.remove()
    handle = attach(again, rule)
    handle.load_state_dict(saved)
    train(again, rank, range(2, 4))
    check_close(distance(zero_weights(again), zero_weights(through)))


# Megatron


def train_megatron(ddp: Any, optimizer: Any, steps: range = range(STEPS)) -> list[Any]:
    """Train a model with the gradients of both processes, and return what the steps return."""
    plain = net()
    results = []
    for step in steps:
        ddp.zero_grad_buffer()
        grads_of_both(plain, step)
        for q, p in zip(plain.parameters(), ddp.module.parameters(), strict=True):
            p.main_grad.copy_(q.grad)
        ddp.finish_grad_sync()
        results.append(optimizer.step())
    return results


def skipped(rank: int, *, sharded: bool) -> None:
    """Skip a step: it returns no success, so that a loop does not step its scheduler."""
    start_megatron()
    ddp, optimizer = megatron_optimizer(net(), sharded=sharded, clip_grad=0.5)
    inner = [one.config for one in getattr(optimizer, "chained_optimizers", [optimizer])]
    with pytest.warns(UserWarning, match="to a norm of 0.5 is off"):
        handle = attach(optimizer, uc.by_global_norm(0.3, skip_above=8.0), names=ddp)
    assert {config.clip_grad for config in inner} == {0}
    successes = [result[0] for result in train_megatron(ddp, optimizer)]
    assert successes == [step != SPIKE for step in range(STEPS)]
    handle.remove()
    assert {config.clip_grad for config in inner} == {0.5}
    assert "step_with_ready_grads" not in vars(optimizer)


def names_of_the_model(rank: int) -> None:
    """Names are those of the model, whatever wraps it; whole parameters need none."""
    start_megatron()
    ddp, optimizer = megatron_optimizer(net(), sharded=True)
    handle = attach(optimizer, uc.adagc(), names=ddp)
    assert ["0.weight" in str(handle.numbers()), "module." in str(handle.numbers())] == [
        True,
        False,
    ]
    handle.remove()
    for names in (None, nn.Linear(2, 2)):
        words = message(ValueError, partial(attach, optimizer, uc.by_norm(1.0), names=names))
        assert "names=model" in words
    ddp, optimizer = megatron_optimizer(net(), sharded=False)
    attach(optimizer, uc.by_global_norm(0.3))
    assert all(result[0] for result in train_megatron(ddp, optimizer))


def inside_of_megatron(rank: int) -> None:
    """Raise in the first step of an optimizer inside of a chain, and name what to write."""
    start_megatron()
    ddp, optimizer = megatron_optimizer(net(), sharded=True)
    attach(optimizer.chained_optimizers[0].optimizer, uc.by_global_norm(1.0))
    words = message(RuntimeError, lambda: train_megatron(ddp, optimizer))
    assert "inside of" in words
    assert "attach(engine, rule)" in words


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Any:
    """Replace an attribute."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


def refused_layouts(rank: int) -> None:
    """Layouts that were not tested are refused, and so are unknown classes."""
    start_megatron()
    state = sys.modules["megatron.core.parallel_state"]
    ddp, optimizer = megatron_optimizer(net(), sharded=True)
    for layout, words in (
        ("pipeline_model", "pipelines"),
        ("expert_model", "experts on several"),
        ("context", "context parallelism"),
    ):
        with replaced(state, f"get_{layout}_parallel_world_size", lambda: 2):
            assert words in message(ValueError, lambda: attach(optimizer, uc.by_norm(1.0)))
    assert "norms along axes" in message(
        ValueError, lambda: attach(optimizer, uc.agc(0.1), names=ddp)
    )

    [inner] = optimizer.chained_optimizers
    inner.__class__ = type("LayerWiseOptimizer", (type(inner),), {})
    words = message(TypeError, lambda: attach(optimizer, uc.by_norm(1.0)))
    assert "Megatron's LayerWiseOptimizer" in words


def tensor_parallel(rank: int, *, sharded: bool) -> None:
    """Parameters that tensor parallelism does not divide count once; the others are joined."""
    start_megatron(tensor_parallel=2)
    for rule in (uc.by_global_norm(0.3), uc.by_norm(0.05), uc.zclip(z=1.0, decay=0.5, warmup=2)):
        plain, module = net(), net()
        beside = adamw(plain)
        attach(beside, rule)
        # The first layer is divided by its rows, of which there are 37.
        rows = slice(0, 19) if rank == 0 else slice(19, 37)
        module[0] = nn.Linear(6, 19 if rank == 0 else 18)
        pieces = {f"0.{name}": rows for name in ("weight", "bias")}
        for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
            p.data.copy_(q.data[pieces.get(name, slice(None))])
            p.tensor_model_parallel = name in pieces
        ddp, optimizer = megatron_optimizer(module, sharded=sharded)
        handle = attach(optimizer, rule, names=module)
        for step in range(STEPS):
            ddp.zero_grad_buffer()
            grads_of_both(plain, step)
            for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
                p.main_grad.copy_(q.grad[pieces.get(name, slice(None))])
            ddp.finish_grad_sync()
            optimizer.step()
            beside.step()
        handle.remove()
        whole = [q[pieces.get(name, slice(None))] for name, q in plain.named_parameters()]
        check_close(distance(module.parameters(), whole))


def of_stages(case: Callable[..., None], *stages: int) -> dict[str, Callable[[int], None]]:
    """Return a case in several stages of ZeRO."""
    return {f"{case.__name__}[{stage}]": partial(case, stage=stage) for stage in stages}


WEIGHTS: dict[str, dict[str, Callable[[int], float]]] = {
    "deepspeed": {
        f"stage {stage}, {dtype}, {rule}": partial(with_zero, stage=stage, dtype=dtype, rule=rule)
        for stage in (0, 1, 2, 3)
        for dtype in DTYPES
        for rule in RULES
    },
    "megatron": {
        f"{layout}, {dtype}, {rule}": partial(with_megatron, dtype=dtype, layout=layout, rule=rule)
        for layout in ("whole", "sharded", "experts")
        for dtype in DTYPES
        for rule in RULES
    },
}
"""Cases that return how far weights are from those of a plain optimizer."""
INSIDE: dict[str, dict[str, Callable[[int], None]]] = {
    "deepspeed": {
        **of_stages(offloaded, 2, 3),
        **of_stages(accumulated, 0, 1, 2, 3),
        "summed_in_float32": summed_in_float32,
        **of_stages(with_infinity, 1, 2, 3),
        **of_stages(overflow, 1, 2, 3),
        **of_stages(without_gradients, 1, 2),
        "large_groups": large_groups,
        **of_stages(own_names, 2, 3),
        **of_stages(mask_by_axes, 1, 3),
        **of_stages(refused_rules, 1, 3),
        "attached_twice": attached_twice,
        **of_stages(default_limit, 0, 1, 3),
        "attached_inside": attached_inside,
        "refused_engines": refused_engines,
        **of_stages(checkpoints, 0, 2, 3),
        **of_stages(attached_again, 1, 3),
    },
    "megatron": {
        "skipped[whole]": partial(skipped, sharded=False),
        "skipped[sharded]": partial(skipped, sharded=True),
        "names_of_the_model": names_of_the_model,
        "inside_of_megatron": inside_of_megatron,
        "refused_layouts": refused_layouts,
        "tensor_parallel[whole]": partial(tensor_parallel, sharded=False),
        "tensor_parallel[sharded]": partial(tensor_parallel, sharded=True),
    },
}
