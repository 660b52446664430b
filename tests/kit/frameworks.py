"""The frameworks of the tests: how each creates arrays, and runs code eagerly or compiled."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

from kit import cupy_like

ALL_DTYPES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "int32",
    "int64",
)


class Framework:
    """NumPy, and the base class of the other frameworks."""

    name = "numpy"
    family = "NumPy"
    missing: Mapping[str, str] = MappingProxyType({})
    """The reason why arrays of a dtype do not exist, by dtype."""
    same_objects = True
    """True if unclipped gradients come back as the same objects."""
    adds_as_another = False
    """True if sums of millions of elements use the code of another framework of the suite."""
    default_float = "float64"
    raises = True
    """True if invalid values raise errors (traced arrays have no values to check)."""
    traced = False
    """True if arrays have no values while the code runs."""
    writes = True
    """True if arrays can be changed in place."""
    device = "cpu"
    """The device of the arrays, by the framework's name for it."""

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the framework's arrays."""
        return [dtype for dtype in ALL_DTYPES if dtype not in self.missing]

    def array(self, values: Any, dtype: str = "float32") -> Any:
        """Return an array of the framework."""
        # A copy, so that a test may write into it.
        return np.array(values, dtype=_numpy_dtype(dtype))

    def numpy(self, array: Any) -> np.ndarray:
        """Return the values as a NumPy array."""
        return np.asarray(array)

    def dtype(self, array: Any) -> str:
        """Return the name of the array's dtype."""
        return str(getattr(array.dtype, "name", array.dtype)).rpartition(".")[2]

    def owns(self, array: Any) -> bool:
        """Return whether the array belongs to the framework."""
        return isinstance(array, (np.ndarray, np.generic))

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as users of the framework prepare it for many calls.

        Arguments are trees of arrays.
        """
        return function

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the function once, as users of the framework do."""
        return self.compiled(function)(*args)

    def outline(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return dtypes and shapes of the results of a function.

        Nothing is compiled if there is a way.
        """
        return self.run(function, *args)

    def derivative(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the derivative of a scalar function in its first argument, for many calls."""
        raise NotImplementedError

    def gradient(self, function: Callable[[Any], Any], x: Any) -> Any:
        """Return the derivative of a scalar function at ``x``."""
        return self.derivative(function)(x)

    def sparse(
        self, shape: tuple[int, int], rows: list[int], values: Any, dtype: str = "float32"
    ) -> Any:
        """Return a sparse array of rows; duplicate rows are summed."""
        raise NotImplementedError

    def dense(self, leaf: Any) -> np.ndarray:
        """Return a sparse array of the framework as a dense NumPy array; fail for a dense one."""
        raise NotImplementedError

    @contextmanager
    def context(self) -> Iterator[None]:
        """Enter the modes that the framework needs for a test."""
        yield

    @contextmanager
    def debugged(self) -> Iterator[None]:
        """Enable the framework's NaN debugger, if it has one."""
        yield


def _numpy_dtype(name: str) -> Any:
    """Return a NumPy dtype by name; ``bfloat16`` comes from another package."""
    return np.dtype(
        getattr(importlib.import_module("ml_dtypes"), name) if name == "bfloat16" else name
    )


def _castable(values: Any, dtype: str) -> np.ndarray:
    """Return the values as a NumPy array that every framework can convert to the dtype."""
    return np.asarray(values, dtype="float32" if dtype == "bfloat16" else dtype)


class Strict(Framework):
    """The array API standard, strictly."""

    name = "array-api-strict"
    family = "array-api-strict"
    device = "CPU_DEVICE"
    missing = MappingProxyType(
        {
            "float16": "with the stand-in for CuPy only",
            "bfloat16": "not in the array API standard",
        }
    )
    same_objects = False
    raises = False

    def array(self, values: Any, dtype: str = "float32") -> Any:
        import array_api_strict as xp

        return xp.asarray(np.array(values, dtype=dtype), device=xp.Device(self.device))

    def numpy(self, array: Any) -> np.ndarray:
        import array_api_strict as xp

        return np.asarray(
            array.to_device(xp.Device("CPU_DEVICE")) if hasattr(array, "to_device") else array
        )

    def owns(self, array: Any) -> bool:
        import array_api_strict as xp

        return type(array).__module__.startswith("array_api_strict") and array.device == xp.Device(
            self.device
        )


class StrictDevice(Strict):
    """The standard on a device that NumPy cannot read.

    Its arrays cannot be mixed with those of another device.
    """

    name = "array-api-strict-device"
    adds_as_another = True
    device = "device1"


class StrictNoFloat64(StrictDevice):
    """The standard on a device without float64."""

    name = "array-api-strict-no-float64"
    adds_as_another = False
    device = "no_float64"
    default_float = "float32"
    missing = MappingProxyType(
        Strict.missing | dict.fromkeys(("float64", "complex128"), "on devices that have it only")
    )


class CuPyLike(Strict):
    """The stand-in for CuPy: see `kit.cupy_like`."""

    name = "cupy-like"
    family = "CuPy's stand-in"
    adds_as_another = True
    missing = MappingProxyType({"bfloat16": "not in the array API standard"})

    def array(self, values: Any, dtype: str = "float32") -> Any:
        return cupy_like.asarray(np.array(values, dtype=dtype))

    def numpy(self, array: Any) -> np.ndarray:
        return array.get() if isinstance(array, cupy_like.Array) else np.asarray(array)

    def owns(self, array: Any) -> bool:
        return isinstance(array, cupy_like.Array)


class MLX(Framework):
    """MLX on the CPU."""

    name = "mlx"
    family = "MLX"
    missing = MappingProxyType({"complex128": "MLX has none"})
    same_objects = False
    default_float = "float32"
    raises = False

    def array(self, values: Any, dtype: str = "float32") -> Any:
        import mlx.core as mx

        return mx.array(_castable(values, dtype), dtype=getattr(mx, dtype))

    def numpy(self, array: Any) -> np.ndarray:
        import mlx.core as mx

        return (
            np.asarray(array.astype(mx.float32))
            if array.dtype == mx.bfloat16
            else np.asarray(array)
        )

    def owns(self, array: Any) -> bool:
        return type(array).__module__.startswith("mlx")

    def derivative(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import mlx.core as mx

        return mx.grad(function)


class Torch(Framework):
    """PyTorch, eager."""

    name = "torch"
    family = "PyTorch"
    default_float = "float32"

    def array(self, values: Any, dtype: str = "float32") -> Any:
        import torch

        return torch.tensor(_castable(values, dtype)).to(self.device, getattr(torch, dtype))

    def numpy(self, array: Any) -> np.ndarray:
        import torch

        array = array.detach().cpu()
        return (array.float() if array.dtype is torch.bfloat16 else array).numpy()

    def owns(self, array: Any) -> bool:
        import torch

        return isinstance(array, torch.Tensor)

    def tracers(self) -> dict[str, Callable[[Callable[..., Any], list[Any]], Callable[..., Any]]]:
        """Return the tracers by name.

        Each records a function on example arrays, to call it with other values.
        """
        import torch
        from functorch.compile import aot_function, nop
        from torch.fx.experimental.proxy_tensor import make_fx

        def jit(function: Callable[..., Any], example: list[Any]) -> Callable[..., Any]:
            with warnings.catch_warnings():
                # The library compares shapes, which a trace records as constants.
                warnings.simplefilter("ignore", torch.jit.TracerWarning)
                return torch.jit.trace(function, tuple(example), check_trace=False)

        return {
            "eager": lambda function, example: function,
            "make_fx": lambda function, example: make_fx(function)(*example),
            "make_fx, symbolic": lambda function, example: make_fx(
                function, tracing_mode="symbolic"
            )(*example),
            "jit.trace": jit,
            "aot_function": lambda function, example: aot_function(function, nop),
        }

    @contextmanager
    def debugged(self) -> Iterator[None]:
        import torch

        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            yield

    def derivative(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        compiled = self.compiled(function)

        def slope(x: Any, *rest: Any) -> Any:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(compiled(x, *rest), x)[0]

        return slope

    def sparse(
        self, shape: tuple[int, int], rows: list[int], values: Any, dtype: str = "float32"
    ) -> Any:
        import torch

        indices = torch.tensor([rows], device=self.device)
        return torch.sparse_coo_tensor(
            indices, self.array(values, dtype), shape, check_invariants=True
        )

    def dense(self, leaf: Any) -> np.ndarray:
        assert leaf.is_sparse
        return leaf.to_dense().cpu().numpy()


class TorchCompile(Torch):
    """PyTorch under ``torch.compile(fullgraph=True)``: a graph break is an error."""

    name = "torch.compile"
    same_objects = False
    raises = False
    traced = True

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        torch._dynamo.reset()
        return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)


class TensorFlow(Framework):
    """TensorFlow, eager."""

    name = "tensorflow"
    family = "TensorFlow"
    writes = False
    default_float = "float32"

    def array(self, values: Any, dtype: str = "float32") -> Any:
        import tensorflow as tf

        return tf.cast(tf.constant(_castable(values, dtype)), dtype)

    def numpy(self, array: Any) -> np.ndarray:
        return array.numpy() if hasattr(array, "numpy") else np.asarray(array)

    def owns(self, array: Any) -> bool:
        import tensorflow as tf

        return tf.is_tensor(array)

    @contextmanager
    def debugged(self) -> Iterator[None]:
        import tensorflow as tf

        tf.debugging.enable_check_numerics()
        try:
            yield
        finally:
            tf.debugging.disable_check_numerics()

    def derivative(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import tensorflow as tf

        def slope(x: Any, *rest: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x, *rest)
            return tape.gradient(y, x)

        return self.compiled(slope)

    def sparse(
        self, shape: tuple[int, int], rows: list[int], values: Any, dtype: str = "float32"
    ) -> Any:
        import tensorflow as tf

        return tf.IndexedSlices(self.array(values, dtype), tf.constant(rows), tf.constant(shape))

    def dense(self, leaf: Any) -> np.ndarray:
        import tensorflow as tf

        assert isinstance(leaf, tf.IndexedSlices)
        out = np.zeros(leaf.dense_shape, dtype=np.asarray(leaf.values).dtype)
        np.add.at(out, np.asarray(leaf.indices), np.asarray(leaf.values))
        return out


class TensorFlowFunction(TensorFlow):
    """TensorFlow in ``tf.function``."""

    name = "tf.function"
    same_objects = False
    raises = False
    traced = True
    jit_compile = False

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import tensorflow as tf

        log, compiled = (
            logging.getLogger("tensorflow"),
            tf.function(function, jit_compile=self.jit_compile),
        )

        def call(*args: Any) -> Any:
            heard: list[str] = []
            listen = lambda record: bool(heard.append(record.getMessage())) or True
            log.addFilter(listen)
            result = compiled(*args)
            log.removeFilter(listen)
            assert not [line for line in heard if "AutoGraph could not transform" in line], heard
            return result

        return call


class TensorFlowXLA(TensorFlowFunction):
    """TensorFlow compiled by XLA."""

    name = "tf.function-xla"
    jit_compile = True


class TensorFlowGraph(TensorFlowFunction):
    """A TensorFlow 1 graph, run in a session."""

    name = "tensorflow-graph"

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import tensorflow as tf

        graphs: dict[str, Any] = {}

        def call(*args: Any) -> Any:
            values = [
                x if x is None else x.numpy() for x in tf.nest.flatten(args, expand_composites=True)
            ]
            key = str(tf.nest.map_structure(_kind, args))
            if key not in graphs:
                graphs[key] = self._graph(function, args)
            session, fed, result = graphs[key]
            parts = tf.nest.flatten(result, expand_composites=True)
            wanted = [x for x in parts if tf.is_tensor(x)]
            feed = {
                x: v
                for x, v in zip(fed, values, strict=True)
                if x is not None and x.op.type == "Placeholder"
            }
            computed = iter(session.run(wanted, feed) if wanted else [])
            ready = [tf.constant(next(computed)) if tf.is_tensor(x) else x for x in parts]
            return tf.nest.pack_sequence_as(result, ready, expand_composites=True)

        return call

    def _graph(self, function: Callable[..., Any], args: Any) -> tuple[Any, list[Any], Any]:
        """Return a session, its placeholders, and the symbolic result of a function."""
        import tensorflow as tf

        with tf.Graph().as_default() as graph:
            fed = tf.nest.map_structure(_fed, args)
            return (
                tf.compat.v1.Session(graph=graph),
                tf.nest.flatten(fed, expand_composites=True),
                function(*fed),
            )


def _kind(array: Any) -> Any:
    """Return the key of a graph: dtype and shapes of an array."""
    shape = getattr(array, "dense_shape", None)
    return (
        None
        if array is None
        else (array.dtype, array.shape, shape if shape is None else shape.numpy())
    )


def _fed(array: Any) -> Any:
    """Return a placeholder for an array.

    The shape of a sparse array is part of the graph.
    """
    import tensorflow as tf

    if isinstance(array, tf.IndexedSlices):
        return tf.IndexedSlices(
            _fed(array.values), _fed(array.indices), tf.constant(array.dense_shape.numpy())
        )
    return None if array is None else tf.compat.v1.placeholder(array.dtype, array.shape)


class JAX(Framework):
    """JAX outside of ``jit``."""

    name = "jax"
    family = "JAX"
    writes = False
    missing = MappingProxyType(
        dict.fromkeys(("float64", "complex128", "int64"), "with `jax_enable_x64` only")
    )
    default_float = "float32"

    def array(self, values: Any, dtype: str = "float32") -> Any:
        import jax
        import jax.numpy as jnp

        array = jnp.asarray(np.asarray(values, dtype=_numpy_dtype(dtype)))
        if self.device == "cpu":
            return array
        platform, _, index = self.device.partition(":")
        return jax.device_put(array, jax.devices(platform)[int(index or 0)])

    def owns(self, array: Any) -> bool:
        import jax

        return isinstance(array, jax.Array)

    def outline(self, function: Callable[..., Any], *args: Any) -> Any:
        import jax

        return jax.eval_shape(function, *args)

    @contextmanager
    def debugged(self) -> Iterator[None]:
        import jax

        with jax.debug_nans(True), jax.debug_infs(True):
            yield

    def derivative(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import jax

        return self.compiled(jax.grad(function))

    def sparse(
        self, shape: tuple[int, int], rows: list[int], values: Any, dtype: str = "float32"
    ) -> Any:
        from jax.experimental import sparse

        return sparse.BCOO((self.array(values, dtype), np.asarray(rows)[:, None]), shape=shape)

    def dense(self, leaf: Any) -> np.ndarray:
        from jax.experimental import sparse

        assert isinstance(leaf, sparse.BCOO)
        return np.asarray(leaf.todense())


class JAXJit(JAX):
    """JAX inside ``jit``."""

    name = "jax.jit"
    same_objects = False
    raises = False
    traced = True

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import jax

        return jax.jit(function)


class JAXx64(JAXJit):
    """JAX inside ``jit``, with 64-bit types."""

    name = "jax.jit-x64"
    missing = MappingProxyType({})
    default_float = "float64"

    @contextmanager
    def context(self) -> Iterator[None]:
        import jax

        with jax.enable_x64(True):
            yield


def put_on(device: str) -> None:
    """Put the arrays of PyTorch and JAX on a device from now on.

    A rule reads values on an accelerator only if it must. Unclipped gradients thus come back as new
    arrays, and invalid values raise no errors.
    """
    for framework in (Torch, JAX):
        framework.device = device
        framework.same_objects = False
        framework.raises = False


EAGER: dict[str, tuple[type[Framework], ...]] = {
    "numpy": (Framework,),
    "strict": (Strict, StrictDevice, StrictNoFloat64, CuPyLike),
    "mlx": (MLX,),
    "torch": (Torch,),
    "tensorflow": (TensorFlow,),
    "jax": (JAX,),
}
"""The frameworks by their ``--frameworks`` name, as they run eagerly."""
COMPILED: dict[str, tuple[type[Framework], ...]] = {
    "torch": (TorchCompile,),
    "tensorflow": (TensorFlowFunction, TensorFlowXLA, TensorFlowGraph),
    "jax": (JAXJit, JAXx64),
}
"""The compiled ways of running, by framework."""
