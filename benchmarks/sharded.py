# SPDX-License-Identifier: MIT
# ruff: noqa: PLC0415 - a process imports what it was started for
"""Clip gradients that are sharded over two processes, or two devices in JAX, with each library that knows of shards."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from feature_calls_around import SHARDED
from features import NO, YES, run

import native_functions  # noqa: F401 - the tests' modules are found after this

GRADIENT, CLIPPED = [3.0, 4.0, 0.0, 12.0], [1.5, 2.0, 0.0, 6.0]  # of norm 13, to 6.5
TORCH, JAX, MLX = ("uniclip", "PyTorch", "timm", "deepmd-kit"), ("optax",), ("MLX",)


def in_torch(name: str) -> bool:
    """Run in one of two processes; return whether the shards are right."""
    import torch
    from other_libraries import OTHERS
    from torch.distributed import init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    params = [torch.nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))]
    params[0].grad = distribute_tensor(torch.tensor(GRADIENT), mesh, [Shard(0)])
    modules = next((library.modules for library in OTHERS if library.name == name), {"torch": torch})
    run(SHARDED[name], modules | {"params": params, "grads": [params[0].grad]})
    return torch.allclose(params[0].grad.full_tensor(), torch.tensor(CLIPPED))


def in_jax(name: str) -> bool:
    """Run in one process with two devices."""
    import jax
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((2,), ("x",))
    grads = [jax.device_put(jax.numpy.asarray(GRADIENT), NamedSharding(mesh, PartitionSpec("x")))]
    out = run(SHARDED[name], {"jax": jax, "optax": optax, "grads": grads})
    return bool(jax.numpy.allclose(out, jax.numpy.asarray(CLIPPED)))


def in_mlx(name: str) -> bool:
    """Run in one of two processes."""
    import mlx.core as mx
    from mlx import nn

    group = mx.distributed.init(strict=True, backend="ring")
    own = slice(2 * group.rank(), 2 * group.rank() + 2)
    out = run(SHARDED[name], {"nn": nn, "grads": [mx.array(GRADIENT[own])]})
    return group.size() == 2 and bool(mx.allclose(out, mx.array(CLIPPED[own])))  # noqa: PLR2004 - both


def marks() -> dict[str, str]:
    """Return whether each library is right, found in processes of their own."""
    devices = [{"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}]
    found = {name: started("in_torch", name, torch_processes()) for name in TORCH}
    found |= {name: started("in_jax", name, devices) for name in JAX}
    with TemporaryDirectory() as folder:
        return found | {name: started("in_mlx", name, mlx_processes(Path(folder) / "hosts.json")) for name in MLX}


def torch_processes() -> list[dict[str, str]]:
    """Return what tells two processes of PyTorch of each other."""
    port = str(free_port())
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    return [{**place, "RANK": str(rank)} for rank in range(2)]


def mlx_processes(hosts: Path) -> list[dict[str, str]]:
    """Return what tells two processes of MLX of each other."""
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(2)]), encoding="utf-8")
    return [{"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)} for rank in range(2)]


def started(function: str, name: str, environments: list[dict[str, str]]) -> str:
    """Run a function of this module in a process for each environment; all have to be right."""
    command = [sys.executable, __file__, function, name]
    running = [
        subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603
        for own in environments
    ]
    said = [process.communicate(timeout=300) for process in running]
    for _, errors in said:
        if "Error" in errors:
            print(name, errors[-300:], file=sys.stderr)
    return YES if all(out.strip().endswith("True") for out, _ in said) else NO


def free_port() -> int:
    """Return a port that nobody listens to."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    print(globals()[sys.argv[1]](sys.argv[2]) if len(sys.argv) > 1 else marks())
