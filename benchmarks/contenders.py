# SPDX-License-Identifier: MIT
"""What is timed: each framework's own function, uniclip, and one plain read, in each way of calling them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import distributions
from typing import Any, ClassVar, NamedTuple

import numpy as np

import memory
import uniclip as uc

NATIVE, NATIVE_IN_PLACE, READ = "native", "native in place", "plain read"
OURS, OURS_IN_PLACE = "uniclip", "uniclip in place"
EAGER = "eager"
Leaves = list[Any]


class Contender(NamedTuple):
    """A call on the leaves that returns the clipped ones, or changes those it gets."""

    call: Callable[[Leaves], Any]
    in_place: bool = False


def native_of(name: str, names: Any) -> str:
    """Return what a contender is compared with: the native function in place, if it is in place and there is one."""
    return NATIVE_IN_PLACE if name == OURS_IN_PLACE and NATIVE_IN_PLACE in names else NATIVE


class Library:
    """NumPy, by lines written by hand, and what the frameworks override."""

    name = "numpy"
    packages: ClassVar = ["numpy"]
    half = "float16"
    ways: ClassVar[list[str]] = [EAGER]

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that are installed."""
        return {package: d.version for package in self.packages for d in distributions(name=package)}

    def array(self, values: np.ndarray, dtype: str) -> Any:
        """Return an array of the framework."""
        return values.astype(dtype)

    def numpy(self, array: Any) -> np.ndarray:
        """Return the values in float32."""
        return np.asarray(array).astype("float32", copy=False)

    def ready(self, way: str, leaves: Leaves, saved: Leaves) -> Leaves:
        """Return gradients for one call, the saved ones."""
        for leaf, values in zip(leaves, saved, strict=True):
            np.copyto(leaf, values)
        return leaves

    def contenders(self, way: str, leaves: Leaves, c: float) -> dict[str, Contender]:
        """Return everything to be timed, clipping to ``c``; leaves that change are always these."""
        rule = uc.by_global_norm(c)

        def native(leaves: Leaves) -> Leaves:
            norm = np.sqrt(sum(np.vdot(g, g) for g in leaves))
            if norm <= c:
                return leaves
            f = c / norm
            return [g * f for g in leaves]

        def native_in_place(leaves: Leaves) -> None:
            norm = np.sqrt(sum(np.vdot(g, g) for g in leaves))
            if norm > c:
                f = c / norm
                for g in leaves:
                    g *= f  # noqa: PLW2901 - in place

        return {
            NATIVE: Contender(native),
            NATIVE_IN_PLACE: Contender(native_in_place, in_place=True),
            OURS: Contender(lambda leaves: uc.clip_by_global_norm(leaves, c)[0]),
            OURS_IN_PLACE: Contender(lambda leaves: uc.clip_(leaves, rule), in_place=True),
            READ: Contender(lambda leaves: [np.sum(g) for g in leaves]),
        }

    def extra_memory(self, call: Callable[[Leaves], Any], ready: Callable[[], Leaves]) -> int | None:
        """Return the bytes a call takes at its peak beyond those before, or None if they are not counted."""
        return memory.peak(call, ready)


class Torch(Library):
    """PyTorch, whose own function changes the ``.grad`` of parameters."""

    name = "torch"
    packages: ClassVar = ["torch"]
    half = "bfloat16"
    ways: ClassVar = [EAGER, "torch.compile"]

    def array(self, values: np.ndarray, dtype: str) -> Any:
        """Copy the values."""
        import torch

        return torch.tensor(values, dtype=getattr(torch, dtype))

    def numpy(self, array: Any) -> np.ndarray:
        """Return the values in float32."""
        return array.float().numpy()

    def ready(self, way: str, leaves: Leaves, saved: Leaves) -> Leaves:
        """Write the saved values."""
        for leaf, values in zip(leaves, saved, strict=True):
            leaf.copy_(values)
        return leaves

    def contenders(self, way: str, leaves: Leaves, c: float) -> dict[str, Contender]:
        """Give the gradients to parameters."""
        import torch

        rule = uc.by_global_norm(c)
        params = [torch.nn.Parameter(torch.empty_like(g)) for g in leaves]
        for param, grad in zip(params, leaves, strict=True):
            param.grad = grad
        torch.compiler.reset()
        run = partial(torch.compile, fullgraph=True, dynamic=False) if way != EAGER else _same
        native = run(lambda params: torch.nn.utils.clip_grad_norm_(params, c))
        return {
            NATIVE: Contender(lambda _: native(params), in_place=True),
            OURS: Contender(run(lambda leaves: uc.clip_by_global_norm(leaves, c)[0])),
            OURS_IN_PLACE: Contender(run(lambda leaves: uc.clip_(leaves, rule)), in_place=True),
            READ: Contender(run(lambda leaves: [torch.sum(g) for g in leaves])),
        }


class TensorFlow(Library):
    """TensorFlow, where nothing is done in place."""

    name = "tensorflow"
    packages: ClassVar = ["tensorflow", "tensorflow-cpu"]
    half = "bfloat16"
    ways: ClassVar = [EAGER, "tf.function", "tf.function, XLA"]

    def array(self, values: np.ndarray, dtype: str) -> Any:
        """Copy the values."""
        import tensorflow as tf

        return tf.cast(tf.constant(values), dtype)

    def numpy(self, array: Any) -> np.ndarray:
        """Return the values in float32."""
        return super().numpy(array.numpy())

    def ready(self, way: str, leaves: Leaves, saved: Leaves) -> Leaves:
        """Return the saved ones themselves."""
        return saved

    def contenders(self, way: str, leaves: Leaves, c: float) -> dict[str, Contender]:
        """Return every output, the norm too, as users do."""
        import tensorflow as tf

        tf.config.experimental.set_synchronous_execution(True)

        def native(leaves: Leaves) -> Any:
            return tf.clip_by_global_norm(leaves, c)

        def ours(leaves: Leaves) -> Any:
            return uc.clip_by_global_norm(leaves, c)

        def read(leaves: Leaves) -> Leaves:
            return [tf.reduce_sum(g) for g in leaves]

        run = {EAGER: _same, "tf.function": tf.function}.get(way, partial(tf.function, jit_compile=True))
        native, ours, read = run(native), run(ours), run(read)
        return {
            NATIVE: Contender(lambda leaves: native(leaves)[0]),
            OURS: Contender(lambda leaves: ours(leaves)[0]),
            READ: Contender(read),
        }

    def extra_memory(self, call: Callable[[Leaves], Any], ready: Callable[[], Leaves]) -> int | None:
        """Ask TensorFlow, which keeps what is freed, so the kernel sees nothing; it counts in blocks."""
        import tensorflow as tf

        grads, count = ready(), tf.config.experimental
        with suppress(ValueError):  # there is no count if oneDNN is switched off
            count.reset_memory_stats("CPU:0")
            before = count.get_memory_info("CPU:0")["current"]
            call(grads)
            return int(count.get_memory_info("CPU:0")["peak"] - before)
        return None


class JAX(Library):
    """JAX, where the native function is optax's."""

    name = "jax"
    packages: ClassVar = ["jax", "optax"]
    half = "bfloat16"
    ways: ClassVar = [EAGER, "jax.jit", "jax.jit, donated"]

    def array(self, values: np.ndarray, dtype: str) -> Any:
        """Copy the values."""
        import jax.numpy as jnp

        return jnp.array(values, dtype=dtype)

    def ready(self, way: str, leaves: Leaves, saved: Leaves) -> Leaves:
        """Return the saved ones, or copies where the call takes them for its own."""
        import jax

        return jax.block_until_ready([g.copy() for g in saved]) if "donated" in way else saved

    def contenders(self, way: str, leaves: Leaves, c: float) -> dict[str, Contender]:
        """Return the clipped leaves alone, as optax does."""
        import jax
        import jax.numpy as jnp
        import optax

        clip = optax.clip_by_global_norm(c)
        donated = partial(jax.jit, donate_argnums=0)
        run = {EAGER: _same, "jax.jit": jax.jit}.get(way, donated)
        functions = {
            NATIVE: run(lambda leaves: clip.update(leaves, optax.EmptyState())[0]),
            OURS: run(lambda leaves: uc.clip_by_global_norm(leaves, c)[0]),
            READ: (_same if way == EAGER else jax.jit)(lambda leaves: [jnp.sum(g) for g in leaves]),
        }
        return {name: Contender(partial(_waited, function)) for name, function in functions.items()}


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _waited(function: Callable[..., Any], leaves: Leaves) -> Any:
    """Call a function of JAX, and wait for what it returns."""
    import jax

    return jax.block_until_ready(function(leaves))


LIBRARIES: dict[str, Library] = {library.name: library for library in (Library(), Torch(), TensorFlow(), JAX())}
