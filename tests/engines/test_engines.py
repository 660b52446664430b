"""Engines that shard gradients into flat buffers train the weights of one process.

Two processes run all cases of an engine one after the other, and write what they find.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.overrides import TorchFunctionMode

import uniclip as uc
from uniclip.integrations.torch import attach

RANKS, STEPS, CLOSE = 2, 5, 1e-6
RULES: dict[str, Callable[[], Any]] = {
    "global": lambda: uc.by_global_norm(0.3),
    "zclip": lambda: uc.zclip(z=1.0, decay=0.5, warmup=2),
    "skip": lambda: uc.by_global_norm(0.3, skip_above=8.0),
    "groups": lambda: uc.by_group_norm({"0": 0.05, "2": 0.2, "4": 0.1}, lambda path, _: path[1][0]),
    "leaf": lambda: uc.by_norm(0.05),
    "adagc": lambda: uc.adagc(warmup=2),
}
ZERO = [(stage, dtype) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")]
MEGATRON = [
    (dtype, sharded) for dtype in ("fp32", "bf16") for sharded in ("whole", "sharded", "experts")
]


def net() -> nn.Sequential:
    """Return a model whose weights bfloat16 can hold."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 37), nn.Tanh(), nn.Linear(37, 29), nn.Tanh(), nn.Linear(29, 3)
    )
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    return model


def loss_of(model: Any, step: int, rank: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return the loss of a process; the fourth is a spike."""
    x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return ((model(x.to(dtype)).float() - y[:, :3] * (20 if step == 3 else 1)) ** 2).mean()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups of named parameters."""
    named = list(model.named_parameters())
    return [
        {"params": [(key, p) for key, p in named if (p.ndim > 1) is matrices]}
        for matrices in (True, False)
    ]


def flat(tensors: Any) -> torch.Tensor:
    """Return tensors as one vector."""
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors]).clone()


def with_zero(rank: int, stage: int, dtype: str, rule: str) -> float:
    """Return how far weights are from those of a plain optimizer with the same gradients."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    model, plain = net(), net()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": dtype == "bf16"},
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(groups(model), lr=0.1, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    handle = attach(engine, RULES[rule]())
    beside = torch.optim.SGD(groups(plain), lr=0.1, momentum=0.9)
    attach(beside, RULES[rule]())

    low = torch.bfloat16 if dtype == "bf16" else torch.float32
    worst = 0.0
    for step in range(STEPS):
        engine.backward(loss_of(engine, step, rank, low))
        for q, p in zip(plain.parameters(), engine.module.parameters(), strict=True):
            q.grad = safe_get_full_grad(p).detach().float().reshape(q.shape).clone()
        engine.step()
        beside.step()
        if stage:
            found = flat(map(safe_get_full_fp32_param, engine.module.parameters()))
            worst = max(worst, (found - flat(plain.parameters())).abs().max().item())
    if not stage:
        # The model has rounded weights in 16 bits.
        rounded = [q.to(low) for q in plain.parameters()]
        worst = (flat(engine.module.parameters()) - flat(rounded)).abs().max().item()
    handle.remove()
    return worst


class CudaIsCpu(TorchFunctionMode):
    """Make tensors for "cuda" on the CPU, and say that they are CUDA's, as Megatron asks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch."""
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1:
            return result.replace("torch.", "torch.cuda.")
        return result


def with_megatron(rank: int, dtype: str, layout: str, rule: str) -> float:
    """Return how far the float32 weights are from those of a plain optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        torch.cuda.current_device = lambda: "cpu"
        parallel_state.initialize_model_parallel()
    sharded, bf16 = layout != "whole", dtype == "bf16"
    low = torch.bfloat16 if bf16 else torch.float32
    module, plain = net().to(low), net()
    if layout == "experts":
        for p in module[4].parameters():
            p.allreduce = False
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=sharded
    )
    shape = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=bf16)
    ddp = DistributedDataParallel(shape, options, module)
    config = OptimizerConfig(
        lr=0.01,
        weight_decay=0.0,
        bf16=bf16,
        params_dtype=low,
        clip_grad=0.0,
        use_distributed_optimizer=sharded,
    )
    optimizer = get_megatron_optimizer(config, [ddp])
    handle = attach(optimizer, RULES[rule](), names=module)
    beside = torch.optim.AdamW(
        plain.named_parameters(), lr=0.01, weight_decay=0.0, betas=(0.9, 0.999)
    )
    attach(beside, RULES[rule]())

    for step in range(STEPS):
        ddp.zero_grad_buffer()
        beside.zero_grad()
        (loss_of(plain, step, 0) + loss_of(plain, step, 1)).backward()
        # Each process has the sum over both; the average is the same.
        for q, p in zip(plain.parameters(), module.parameters(), strict=True):
            p.main_grad.copy_(q.grad)
        ddp.finish_grad_sync()
        optimizer.step()
        beside.step()
    handle.remove()
    rounded = [q.to(low) for q in plain.parameters()]
    return (flat(module.parameters()) - flat(rounded)).abs().max().item()


RUNS = {"deepspeed": (with_zero, ZERO), "megatron": (with_megatron, MEGATRON)}


def work(rank: int, engine: str, port: int, path: str) -> None:
    """Run all cases of an engine in one process."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    run, cases = RUNS[engine]
    found = {}
    with CudaIsCpu() if engine == "megatron" else no_mode():
        for case in cases:
            for rule in RULES:
                found[f"{case} {rule}"] = run(rank, *case, rule)
    Path(f"{path}.{rank}").write_text(json.dumps(found))
    # DeepSpeed aborts when Python ends.
    os._exit(0)


@contextmanager
def no_mode() -> Iterator[None]:
    """Do nothing."""
    yield


@pytest.fixture(scope="module", params=RUNS)
def found(
    request: pytest.FixtureRequest, tmp_path_factory: Any
) -> tuple[str, list[dict[str, float]]]:
    """Return an engine, and what each process has found."""
    pytest.importorskip(request.param)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = str(tmp_path_factory.mktemp(request.param) / "found")
    multiprocessing.start_processes(
        work, (request.param, port, path), nprocs=RANKS, start_method="spawn"
    )
    return request.param, [json.loads(Path(f"{path}.{r}").read_text()) for r in range(RANKS)]


@pytest.mark.parametrize("rule", RULES)
def test_weights(found: tuple[str, list[dict[str, float]]], rule: str) -> None:
    """In every stage, dtype and layout, all processes have the weights of one process."""
    engine, of_processes = found
    for case in RUNS[engine][1]:
        for of_process in of_processes:
            assert of_process[f"{case} {rule}"] < CLOSE, case
