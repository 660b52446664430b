# SPDX-License-Identifier: MIT
"""What is timed: what users write without uniclip, uniclip, and one plain read, in each way of calling them."""

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
OURS, OURS_IN_PLACE, DROP_IN = "uniclip", "uniclip in place", "uniclip drop-in"
ALL_OURS = [OURS, OURS_IN_PLACE, DROP_IN]
EAGER = "eager"
GLOBAL, BY_NORM, AGC = "by_global_norm", "by_norm", "agc"
RATIO, EPS = 0.01, 1e-3  # of adaptive gradient clipping, as in the paper, timm and optax
RULES: dict[str, Callable[[float], uc.Rule]] = {
    GLOBAL: uc.by_global_norm,
    BY_NORM: uc.by_norm,
    AGC: lambda _: uc.agc(RATIO, EPS),
}
Leaves = list[Any]
Call = Callable[[Leaves, Any], Any]
"""A function of gradients and parameters, these ``None`` where the rule needs none."""


class Contender(NamedTuple):
    """A call on the leaves that returns the clipped ones, or changes those it gets."""

    call: Callable[[Leaves], Any]
    in_place: bool = False


def native_of(name: str, names: Any) -> str:
    """Return what a contender is compared with: the native function in place, if it is in place and there is one."""
    return NATIVE_IN_PLACE if name == OURS_IN_PLACE and NATIVE_IN_PLACE in names else NATIVE


def ours(rule: str, c: float) -> Call:
    """Return uniclip's function for a rule."""
    agc = RULES[AGC](c)
    calls: dict[str, Call] = {
        GLOBAL: lambda leaves, _: uc.clip_by_global_norm(leaves, c)[0],
        BY_NORM: lambda leaves, _: uc.clip_by_norm(leaves, c),
        AGC: lambda leaves, params: uc.clip(leaves, agc, params)[0],
    }
    return calls[rule]


def ours_in_place(rule: str, c: float) -> Call:
    """Return uniclip's function in place for a rule."""
    made = RULES[rule](c)
    return lambda leaves, params: uc.clip_(leaves, made, params)


class Library:
    """NumPy, by lines written by hand, and what the frameworks override."""

    name = "numpy"
    packages: ClassVar = ["numpy"]
    half = "float16"
    ways: ClassVar[list[str]] = [EAGER]
    outputs_last = True
    """Whether the last axis of a kernel is that of the output units, else the first one."""
    in_place: ClassVar = {NATIVE_IN_PLACE, OURS_IN_PLACE}

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

    def contenders(self, way: str, rule: str, leaves: Leaves, params: Any, c: float) -> dict[str, Contender]:
        """Return everything to be timed, clipping to ``c``; leaves that change are always these."""
        return {
            name: Contender(self.waiting(partial(_with, self.run(way, name, call), params)), name in self.in_place)
            for name, call in self.calls(way, rule, leaves, c).items()
        }

    def calls(self, way: str, rule: str, leaves: Leaves, c: float) -> dict[str, Call]:
        """Return the functions to be timed, by the names of the contenders."""

        def native_in_place(leaves: Leaves, _: Any) -> None:
            norm = np.sqrt(sum(np.vdot(g, g) for g in leaves))
            if norm > c:
                f = c / norm
                for g in leaves:
                    g *= f  # noqa: PLW2901 - in place

        return {
            NATIVE: self.native(rule, c),
            **({NATIVE_IN_PLACE: native_in_place} if rule == GLOBAL else {}),
            OURS: ours(rule, c),
            OURS_IN_PLACE: ours_in_place(rule, c),
            READ: lambda leaves, _: [np.sum(g) for g in leaves],
        }

    def native(self, rule: str, c: float) -> Call:
        """Return what users write without uniclip."""

        def by_global_norm(leaves: Leaves, _: Any) -> Leaves:
            norm = np.sqrt(sum(np.vdot(g, g) for g in leaves))
            if norm <= c:
                return leaves
            f = c / norm
            return [g * f for g in leaves]

        def by_norm(leaves: Leaves, _: Any) -> Leaves:
            norms = [np.sqrt(np.vdot(g, g)) for g in leaves]
            return [g * (c / n) if n > c else g for g, n in zip(leaves, norms, strict=True)]

        def unit_norm(x: Any) -> Any:
            return np.sqrt(np.sum(x * x, axis=tuple(range(x.ndim - 1)), keepdims=True))

        def agc(leaves: Leaves, params: Leaves) -> Leaves:
            out = []
            for g, w in zip(leaves, params, strict=True):
                limit, norm = RATIO * np.maximum(unit_norm(w), EPS), unit_norm(g)
                out.append(np.where(norm > limit, g * (limit / np.maximum(norm, 1e-6)), g))
            return out

        return {GLOBAL: by_global_norm, BY_NORM: by_norm, AGC: agc}[rule]

    def run(self, way: str, name: str, call: Call) -> Call:
        """Return the function as it is, or compiled."""
        return call

    def waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that returns when its results are there."""
        return call

    def extra_memory(self, call: Callable[[Leaves], Any], ready: Callable[[], Leaves]) -> int | None:
        """Return the bytes a call takes at its peak beyond those before, or None if they are not counted."""
        return memory.peak(call, ready)


class Torch(Library):
    """PyTorch, whose own function changes the ``.grad`` of parameters."""

    name = "torch"
    packages: ClassVar = ["torch"]
    half = "bfloat16"
    ways: ClassVar = [EAGER, "torch.compile"]
    outputs_last = False
    in_place: ClassVar = {NATIVE, OURS_IN_PLACE, DROP_IN}

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

    def contenders(self, way: str, rule: str, leaves: Leaves, params: Any, c: float) -> dict[str, Contender]:
        """Compile afresh."""
        import torch

        torch.compiler.reset()
        return super().contenders(way, rule, leaves, params, c)

    def calls(self, way: str, rule: str, leaves: Leaves, c: float) -> dict[str, Call]:
        """Give the gradients to parameters, for the functions that want those."""
        import torch

        from uniclip.integrations.torch import clip_grad_norm_

        owners = [torch.nn.Parameter(torch.empty_like(g)) for g in leaves]
        for owner, grad in zip(owners, leaves, strict=True):
            owner.grad = grad
        drop_in = {DROP_IN: lambda _, __: clip_grad_norm_(owners, c)} if (way, rule) == (EAGER, GLOBAL) else {}
        native: dict[str, Call] = {GLOBAL: lambda _, __: torch.nn.utils.clip_grad_norm_(owners, c)}
        return {
            NATIVE: native[rule] if rule in native else self.native(rule, c),
            OURS: ours(rule, c),
            OURS_IN_PLACE: ours_in_place(rule, c),
            **drop_in,
            READ: lambda leaves, _: [torch.sum(g) for g in leaves],
        }

    def native(self, rule: str, c: float) -> Call:
        """Return loops in place, that of ``agc`` from the formula of timm's ``adaptive_clip_grad``."""
        import torch

        def by_norm(leaves: Leaves, _: Any) -> None:
            for g in leaves:
                g.mul_((c / (torch.linalg.vector_norm(g) + 1e-6)).clamp(max=1.0))

        def unit_norm(x: Any) -> Any:
            return torch.linalg.vector_norm(x, dim=tuple(range(1, x.ndim)), keepdim=True)

        def agc(leaves: Leaves, params: Leaves) -> None:
            for g, w in zip(leaves, params, strict=True):
                limit, norm = unit_norm(w).clamp_(min=EPS).mul_(RATIO), unit_norm(g)
                g.copy_(torch.where(norm > limit, g * (limit / norm.clamp(min=1e-6)), g))

        return {BY_NORM: by_norm, AGC: agc}[rule]

    def run(self, way: str, name: str, call: Call) -> Call:
        """Compile into one graph."""
        import torch

        return torch.compile(call, fullgraph=True, dynamic=False) if way != EAGER else call


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

    def calls(self, way: str, rule: str, leaves: Leaves, c: float) -> dict[str, Call]:
        """Return every output, the norm too, as users do."""
        import tensorflow as tf

        with_norm: dict[str, Call] = {GLOBAL: lambda leaves, _: uc.clip_by_global_norm(leaves, c)}
        return {
            NATIVE: self.native(rule, c),
            OURS: with_norm.get(rule, ours(rule, c)),
            READ: lambda leaves, params: [tf.reduce_sum(g) for g in leaves],  # noqa: ARG005 - names nodes of the graph
        }

    def native(self, rule: str, c: float) -> Call:
        """Return TensorFlow's functions; it has none for ``agc``."""
        import tensorflow as tf

        def unit_norm(x: Any) -> Any:
            return tf.sqrt(tf.reduce_sum(x * x, axis=list(range(len(x.shape) - 1)), keepdims=True))

        def agc(leaves: Leaves, params: Leaves) -> Leaves:
            out = []
            for g, w in zip(leaves, params, strict=True):
                limit, norm = RATIO * tf.maximum(unit_norm(w), EPS), unit_norm(g)
                out.append(tf.where(norm > limit, g * (limit / tf.maximum(norm, 1e-6)), g))
            return out

        calls: dict[str, Call] = {
            GLOBAL: lambda leaves, _: tf.clip_by_global_norm(leaves, c),
            BY_NORM: lambda leaves, _: [tf.clip_by_norm(g, c) for g in leaves],
            AGC: agc,
        }
        return calls[rule]

    def run(self, way: str, name: str, call: Call) -> Call:
        """Make a graph, or a program of XLA."""
        import tensorflow as tf

        return call if way == EAGER else tf.function(call, jit_compile=way != "tf.function" or None)

    def waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Have TensorFlow wait."""
        import tensorflow as tf

        tf.config.experimental.set_synchronous_execution(True)
        return call

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
    """JAX, where the native functions are optax's."""

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

    def contenders(self, way: str, rule: str, leaves: Leaves, params: Any, c: float) -> dict[str, Contender]:
        """Compile afresh."""
        import jax

        jax.clear_caches()
        return super().contenders(way, rule, leaves, params, c)

    def calls(self, way: str, rule: str, leaves: Leaves, c: float) -> dict[str, Call]:
        """Return the clipped leaves alone, as optax does."""
        import jax.numpy as jnp

        return {
            NATIVE: self.native(rule, c),
            OURS: ours(rule, c),
            READ: lambda leaves, _: [jnp.sum(g) for g in leaves],
        }

    def native(self, rule: str, c: float) -> Call:
        """Return optax's functions; it has none for the norm of each leaf."""
        import jax.numpy as jnp
        import optax

        if rule == BY_NORM:
            return lambda leaves, _: [g * jnp.minimum(1.0, c / jnp.linalg.norm(g)) for g in leaves]
        clip = optax.clip_by_global_norm(c) if rule == GLOBAL else optax.adaptive_grad_clip(RATIO, EPS)
        return lambda leaves, params: clip.update(leaves, optax.EmptyState(), params)[0]

    def run(self, way: str, name: str, call: Call) -> Call:
        """Compile; a read takes nothing for its own."""
        import jax

        return call if way == EAGER else jax.jit(call, donate_argnums=0 if "donated" in way and name != READ else ())

    def waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wait for the arrays."""
        import jax

        return lambda *args: jax.block_until_ready(call(*args))


def _with(call: Call, params: Any, leaves: Leaves) -> Any:
    return call(leaves, params)


LIBRARIES: dict[str, Library] = {library.name: library for library in (Library(), Torch(), TensorFlow(), JAX())}
