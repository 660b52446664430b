# SPDX-License-Identifier: MIT
# ruff: noqa: PLC0415 - a process imports what it was started for
"""Clip gradients that are sharded over two devices, with each library that knows of shards."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from feature_calls_training import SHARDED
from features import attempt

from side_by_side import RIGHT, WRONG

GRADIENT, CLIPPED = [3.0, 4.0, 0.0, 12.0], [1.5, 2.0, 0.0, 6.0]  # of norm 13, to 6.5
TORCH, MLX = ("uniclip", "PyTorch", "timm", "smartclip", "deepmd-kit"), ("MLX",)


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
    names = {"params": params, "grads": [params[0].grad], "model": torch.nn.ParameterList(params)}
    if isinstance(attempt(SHARDED[name], modules | names), Exception):
        return False
    return torch.allclose(params[0].grad.full_tensor(), torch.tensor(CLIPPED))


def in_tensorflow(name: str) -> bool:
    """Run in one process with two devices."""
    import tensorflow as tf
    from tensorflow.experimental import dtensor

    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
    mesh = dtensor.create_mesh([("x", 2)], devices=["CPU:0", "CPU:1"])
    whole = dtensor.copy_to_mesh(tf.constant(GRADIENT), dtensor.Layout.replicated(mesh, rank=1))
    out = attempt(SHARDED[name], {"tf": tf, "grads": [dtensor.relayout(whole, dtensor.Layout(["x"], mesh))]})
    return not isinstance(out, Exception) and tf.concat(dtensor.unpack(out), 0).numpy().tolist() == CLIPPED


def on_jax() -> list[Any]:
    """Return the gradient, sharded over two devices of this process."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((2,), ("x",))
    return [jax.device_put(jax.numpy.asarray(GRADIENT), NamedSharding(mesh, PartitionSpec("x")))]


def in_jax(name: str) -> bool:
    """Run in one process with two devices."""
    import jax
    import optax

    out = attempt(SHARDED[name], {"jax": jax, "optax": optax, "grads": on_jax()})
    return not isinstance(out, Exception) and np.allclose(out, CLIPPED)


def in_keras(name: str) -> bool:
    """Run on JAX, in one process with two devices."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    names = {"keras": keras, "grads": on_jax(), "weights": [keras.Variable([0.0] * 4)]}
    out = attempt(SHARDED[name], names)
    return not isinstance(out, Exception) and np.allclose(out, CLIPPED)


def in_mlx(name: str) -> bool:
    """Run in one of two processes."""
    import mlx.core as mx
    from mlx import nn

    group = mx.distributed.init(strict=True, backend="ring")
    own = slice(2 * group.rank(), 2 * group.rank() + 2)
    out = attempt(SHARDED[name], {"nn": nn, "grads": [mx.array(GRADIENT[own])]})
    return not isinstance(out, Exception) and group.size() == 2 and np.allclose(out, CLIPPED[own])  # noqa: PLR2004 - both


def marks() -> dict[str, str]:
    """Return whether each library is right, found in processes of their own."""
    devices = [{"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}]
    found = {name: started("in_torch", name, torch_processes()) for name in TORCH}
    found |= {"TensorFlow": started("in_tensorflow", "TensorFlow", [{}])}
    found |= {"Keras": started("in_keras", "Keras", devices), "optax": started("in_jax", "optax", devices)}
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
    if any(process.returncode for process in running):
        msg = f"{name} could not be run on shards: {said[0][1][-1000:]}"
        raise RuntimeError(msg)
    return RIGHT if all(out.strip().endswith("True") for out, _ in said) else WRONG


def free_port() -> int:
    """Return a port that nobody listens to."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    print(globals()[sys.argv[1]](sys.argv[2]) if len(sys.argv) > 1 else marks())
