"""Trainings inside of DeepSpeed and Megatron, beside the same training by a plain optimizer.

Several processes run a list of cases one after the other, and write what each has found.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn
from torch.overrides import TorchFunctionMode

from uniclip.integrations.torch import attach

STEPS = 5
RANKS = 2
SPIKE = 3
"""The step with a large loss."""
Case = Callable[[int], Any]
"""A function of the rank of a process; what it returns can be pickled."""


def net() -> nn.Sequential:
    """Return a model whose weights bfloat16 can hold, of sizes that two processes divide badly."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 37), nn.Tanh(), nn.Linear(37, 29), nn.Tanh(), nn.Linear(29, 3)
    )
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    return model


def loss_of(model: Any, step: int, rank: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return the loss of a process."""
    x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    scale = 20 if step == SPIKE else 1
    return ((model(x.to(dtype)).float() - y[:, :3] * scale) ** 2).mean()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups of named parameters."""
    named = list(model.named_parameters())
    return [
        {"params": [(key, p) for key, p in named if (p.ndim > 1) is matrices]}
        for matrices in (True, False)
    ]


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Return an optimizer of two groups."""
    return torch.optim.SGD(groups(model), lr=0.1, momentum=0.9)


def flat(tensors: Any) -> torch.Tensor:
    """Return tensors as one vector."""
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors]).clone()


def distance(one: Any, other: Any) -> float:
    """Return the largest difference between two lists of tensors."""
    return float((flat(one) - flat(other)).abs().max())


# DeepSpeed


def zero_config(stage: int, dtype: str = "fp32", **changes: Any) -> dict[str, Any]:
    """Return a config of DeepSpeed without clipping of its own."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero | changes.pop("zero", {}),
        "bf16": {"enabled": dtype == "bf16"},
        "gradient_clipping": 0.0,
    }
    return config | changes


def zero_engine(config: dict[str, Any], model: nn.Module | None = None) -> Any:
    """Return an engine of DeepSpeed."""
    import deepspeed

    model = net() if model is None else model
    return deepspeed.initialize(model=model, optimizer=sgd(model), config=config)[0]


def zero_weights(engine: Any) -> list[torch.Tensor]:
    """Return the float32 weights of an engine with ZeRO, gathered from all processes."""
    from deepspeed.utils import safe_get_full_fp32_param

    return [safe_get_full_fp32_param(p) for p in engine.module.parameters()]


def train_beside(
    rank: int,
    engine: Any,
    rule: Any,
    *,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    loss: Callable[..., Any] = loss_of,
) -> tuple[float, Any, Any]:
    """Train an engine, and a plain optimizer with the same gradients and rule; return how far the
    float32 weights were from each other in any step, and both handles.
    """
    from deepspeed.utils import safe_get_full_grad

    plain = net()
    beside = sgd(plain)
    handle = attach(engine, rule)
    plain_handle = attach(beside, rule)
    rounds = engine.gradient_accumulation_steps()
    worst = 0.0
    skipped = 0
    for step in range(steps):
        numbers = range(rounds * step, rounds * (step + 1))
        beside.zero_grad()
        if dtype is torch.float32:
            losses = [loss(plain, number, r, dtype) for number in numbers for r in range(RANKS)]
            (sum(losses) / len(losses)).backward()
        for number in numbers:
            engine.backward(loss(engine, number, rank, dtype))
            if dtype is not torch.float32 and number == numbers[-1]:
                # In 16 bits each process rounds its gradients: only the engine knows their sum.
                for q, p in zip(plain.parameters(), engine.module.parameters(), strict=True):
                    q.grad = safe_get_full_grad(p).detach().float().reshape(q.shape).clone()
            engine.step()
        # The engine makes zeros for a parameter without a gradient.
        for q in plain.parameters():
            q.grad = torch.zeros_like(q) if q.grad is None else q.grad
        beside.step()
        skipped += bool(plain_handle.report.skipped)
        if engine.zero_optimization_stage():
            worst = max(worst, distance(zero_weights(engine), plain.parameters()))
    if not engine.zero_optimization_stage():
        # The model has rounded weights in 16 bits.
        rounded = [q.to(dtype) for q in plain.parameters()]
        worst = distance(engine.module.parameters(), rounded)
    if type(engine.optimizer) is not torch.optim.SGD:
        assert engine.skipped_steps == skipped
    return worst, handle, plain_handle


# Megatron


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


def start_megatron(tensor_parallel: int = 1) -> None:
    """Divide the processes as Megatron does."""
    from megatron.core import parallel_state

    torch.cuda.current_device = lambda: "cpu"
    if parallel_state.model_parallel_is_initialized():
        if parallel_state.get_tensor_model_parallel_world_size() == tensor_parallel:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)


def megatron_optimizer(
    module: nn.Module,
    dtype: str = "fp32",
    *,
    sharded: bool = True,
    experts: Callable[[nn.Module], Any] | None = None,
    **changes: Any,
) -> tuple[Any, Any]:
    """Return a wrapped model and Megatron's optimizer, without clipping of its own. ``experts``
    returns the part of the model that has an optimizer of its own in the chain.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    for p in experts(module).parameters() if experts else ():
        p.allreduce = False
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=sharded
    )
    low = {"bf16": {"bf16": True}, "fp16": {"fp16": True}}.get(dtype, {})
    shape = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **low)
    ddp = DistributedDataParallel(shape, options, module)
    config = {
        "lr": 0.01,
        "weight_decay": 0.0,
        "params_dtype": next(module.parameters()).dtype,
        "clip_grad": 0.0,
        "use_distributed_optimizer": sharded,
        **low,
    }
    return ddp, get_megatron_optimizer(OptimizerConfig(**config | changes), [ddp])


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer that Megatron makes."""
    return torch.optim.AdamW(
        model.named_parameters(), lr=0.01, weight_decay=0.0, betas=(0.9, 0.999)
    )


def grads_of_both(plain: nn.Module, step: int) -> None:
    """Compute the sum of the gradients of two processes."""
    plain.zero_grad()
    (loss_of(plain, step, 0) + loss_of(plain, step, 1)).backward()


# Processes


def run_cases(engine: str, cases: Mapping[str, Case], folder: Path) -> list[Any]:
    """Return for each process what each case has returned, or the traceback of its error, which is
    the last that it runs.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = str(folder / engine)
    multiprocessing.start_processes(
        _work, (engine, cases, port, path), nprocs=RANKS, start_method="spawn"
    )
    found = [pickle.loads(Path(f"{path}.{rank}").read_bytes()) for rank in range(RANKS)]
    not_run = dict.fromkeys(cases, Failed("not run, because a case before it failed"))
    return [not_run | of_process for of_process in found]


def _work(rank: int, engine: str, cases: Mapping[str, Case], port: int, path: str) -> None:
    """Run all cases in one process."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {}
    with CudaIsCpu() if engine == "megatron" else contextlib.nullcontext():
        for name, case in cases.items():
            with _traceback_to(found, name):
                found[name] = case(rank)
            # The other processes may be elsewhere now, and would wait.
            if isinstance(found[name], Failed):
                break
    Path(f"{path}.{rank}").write_bytes(pickle.dumps(found))
    # DeepSpeed aborts when Python ends.
    os._exit(0)


@contextlib.contextmanager
def _traceback_to(found: dict[str, Any], name: str) -> Iterator[None]:
    """Keep the traceback of an error, which the test of the case shows."""
    try:
        yield
    except Exception:  # noqa: BLE001 - the test shows it
        found[name] = Failed(traceback.format_exc())


class Failed(str):
    """The traceback of a case that failed."""

    __slots__ = ()
