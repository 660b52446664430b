"""Compiled and traced code does the same as NumPy: all rules and guarantees, in few programs."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest

import uniclip as uc
from conftest import BETWEEN_GRAPHS, chosen, quickly
from kit import rules
from kit.contract import PROMISES
from kit.frameworks import (
    COMPILED,
    Framework,
    JAXJit,
    JAXx64,
    TensorFlow,
    TensorFlowFunction,
    Torch,
    TorchCompile,
)
from kit.promise import Program, Repeated
from kit.trees import leaves, mapped, walk

NUMPY = Framework()
PARAMS, STEPS = rules.params("float32"), rules.steps("float32")
FIELDS = ("norms", "limits", "factors", "thresholds", "finite", "clipped", "skipped")
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: family(uc) for name, family in rules.FAMILIES.items()},
    "kinds": {name: kind.rule for name, kind in rules.kinds(uc).items()},
}
FAMILIES["relative"]["agc, units"] = FAMILIES["kinds"]["agc"] = uc.Rule(
    uc.limits.Relative(0.05), scope=uc.scopes.unit(0)
)
"""An explicit axis: the default depends on the convention of the framework."""
FAMILIES["every"] = {
    name: rule for family in rules.FAMILIES for name, rule in FAMILIES[family].items()
}
EVERY, KINDS = FAMILIES["every"], FAMILIES["kinds"]
PROGRAMS = {
    # Inductor compiles the adaptive ones.
    "torch.compile": ("relative",),
    "tf.function-xla": ("kinds",),
    "tensorflow-graph": tuple(rules.FAMILIES),
    "jax.jit": tuple(rules.FAMILIES),
}
"""The programs of each compiler, one for each family. Slow compilers get fewer."""
FEW = {
    "ToTheLimit",
    "OnlyMeasures",
    "ZeroLimit",
    "Propagates",
    "Skips",
    "Zeroes",
    "ZeroesComplex",
    "RemembersNoNaN",
    "InPlace",
}
PROMISED = {
    "torch.compile": {"Propagates", "Skips", "Zeroes", "ZeroesComplex"},
    "tf.function": FEW,
    "tf.function-xla": FEW,
    "jax.jit": None,
}
"""The programs of guarantees for a compiler, if not all of them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test by the compilers of this run and their programs.

    64-bit programs of JAX are only traced.
    """
    names = [name for name in COMPILED if name in chosen(metafunc.config)]
    ways = [(way(), pytest.mark.needs(name)) for name in names for way in COMPILED[name]]
    if "promised" in metafunc.fixturenames:
        some = [
            pytest.param(way, marks=mark, id=way.name) for way, mark in ways if way.name in PROMISED
        ]
        metafunc.parametrize(
            "promised", some or [pytest.param(None, marks=pytest.mark.needs("none"))]
        )
    if "program" in metafunc.fixturenames:
        cases = [
            pytest.param(way, program, marks=mark, id=f"{way.name}: {program}")
            for way, mark in ways
            for program in PROGRAMS.get(way.name, ())
        ]
        metafunc.parametrize(
            ("way", "program"),
            cases or [pytest.param(None, None, marks=pytest.mark.needs("none"))],
        )


def step_of(some: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that takes a step of some rules and returns results and reports."""

    def step(grads: Any, states: Any, params: Any, loss: Any) -> Any:
        found = {}
        for name, rule in some.items():
            clipped, state, report = rule.update(grads, states[name], params, loss=loss)
            shown = {field: getattr(report, field) for field in FIELDS}
            found[name] = {
                "clipped": clipped,
                "state": state,
                "report": shown,
                "scalars": report.scalars(),
            }
            if "example" in name and not rule.stateful:
                found[name]["sum"] = uc.clip_and_sum(grads, rule)[0]
        return found

    return step


def trained(
    fw: Framework, some: dict[str, Any], step: Callable[..., Any], steps: list[Any] = STEPS
) -> list[Any]:
    """Return the results and reports of each rule at each step."""
    params, found = mapped(fw.array, PARAMS), []
    states = {name: rule.init(params) for name, rule in some.items()}
    for grads, loss in zip(steps, rules.LOSSES[: len(steps)], strict=True):
        found.append(step(mapped(fw.array, grads), states, params, fw.array(loss)))
        states = {name: result["state"] for name, result in found[-1].items()}
    return found


@cache
def wanted(program: str) -> list[Any]:
    """Return NumPy's results at each step."""
    return trained(NUMPY, FAMILIES[program], step_of(FAMILIES[program]))


def alike(
    found: Any, plain: Any, dtype_of: Callable[[Any], str], where: str
) -> Iterator[tuple[Any, Any]]:
    """Yield the arrays of two results, which must have the same paths, shapes and floats."""
    there, here = dict(walk(found)), dict(walk(plain))
    assert list(there) == list(here), where
    for path, array in here.items():
        one = there[path]
        assert tuple(one.shape) == np.shape(array), f"{where}, {path}"
        assert "float" not in dtype_of(one) or dtype_of(one) == str(array.dtype), f"{where}, {path}"
        yield one, array


def agree(fw: Framework, found: list[Any], program: str) -> None:
    """Require the results of each step to equal NumPy's up to rounding."""
    for number, (result, plain) in enumerate(zip(found, wanted(program), strict=True)):
        known = (
            ["clipped", "state"]
            if math.isnan(rules.SIZES[number])
            else ["clipped", "state", "report", "scalars"]
        )
        for name in result:
            where = f"{name}, step {number}"
            parts = [*known, *(["sum"] if "sum" in plain[name] else [])]
            some, other = ({part: tree[name][part] for part in parts} for tree in (result, plain))
            for one, array in alike(some, other, fw.dtype, where):
                np.testing.assert_allclose(
                    fw.numpy(one), array, rtol=2e-5, atol=1e-7, err_msg=where
                )


@contextmanager
def compiled_once(fw: Framework, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Compile a function, and require a single compilation for all of its calls."""
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return function(*args)

    if isinstance(fw, TorchCompile):
        from torch._dynamo.utils import counters

        counters.clear()
        yield fw.compiled(function)
        assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
    else:
        yield fw.compiled(counted)
        assert len(calls) == 1


@pytest.mark.compiled
@pytest.mark.usefixtures("_quickly")
def test_rules(way: Framework, program: str) -> None:
    """Gradients, states, reports and scalars of every step are NumPy's, and compiled once."""
    some = FAMILIES[program]
    with way.context(), compiled_once(way, step_of(some)) as step:
        agree(way, trained(way, some, step), program)


def failures(program: Program, *args: Any) -> list[AssertionError]:
    """Return the failed requirements of a program."""
    try:
        program.require(*args)
    except AssertionError as error:
        return [error]
    return []


def kept(fw: Framework, programs: list[tuple[str, Program]]) -> list[str]:
    """Return the broken guarantees when all their programs are traced as one.

    A repeated program is traced with one of its inputs, and called with each of them.
    """
    given = [program.arrays(fw) for _, program in programs]
    repeated = [isinstance(program, Repeated) for _, program in programs]

    def run(given: Any) -> Any:
        return [
            program.run_one(uc, arrays)
            if isinstance(program, Repeated)
            else program.run(uc, arrays)
            for (_, program), arrays in zip(programs, given, strict=True)
        ]

    compiled, calls = fw.compiled(run), []
    counts = [len(arrays) for arrays, many in zip(given, repeated, strict=True) if many]
    for number in range(max(counts, default=1)):
        taken = [
            arrays[number % len(arrays)] if many else arrays
            for arrays, many in zip(given, repeated, strict=True)
        ]
        calls.append(compiled(taken))

    found = [
        list(results[: len(arrays)]) if many else results[0]
        for results, arrays, many in zip(zip(*calls, strict=True), given, repeated, strict=True)
    ]
    return [
        f"{case}: {error}"
        for (case, program), arrays, result in zip(programs, given, found, strict=True)
        for error in failures(program, fw, arrays, result)
    ]


@pytest.mark.compiled
def test_promises(promised: Framework) -> None:
    """Every guarantee about values still applies when all programs are traced as one."""
    with promised.context():
        programs = [
            (promise.case, one) for promise in PROMISES for one in promise.programs_for(promised)
        ]
        if few := PROMISED[promised.name]:
            programs = [(case, one) for case, one in programs if type(one).__name__ in few]
        with quickly():
            broken = kept(promised, [(case, one) for case, one in programs if not one.large])
        if large := [(case, one) for case, one in programs if one.large]:
            broken += kept(promised, large)
    assert not broken


def test_limits(compiler: Framework) -> None:
    """One compiled program accepts values and limits of any size."""
    with compiled_once(compiler, lambda grads, limit: uc.clip_by_global_norm(grads, limit)) as clip:
        for by, limit in ((1.0, 1000.0), (1.0, 0.1), (0.0, 1.0), (1e30, 2e29), (1e-30, 2e-31)):
            grads = [
                np.asarray([3.0 * by, 4.0 * by], "float32"),
                np.asarray([[12.0 * by]], "float32"),
            ]
            plain = uc.clip_by_global_norm(grads, np.float32(limit))
            found = clip(mapped(compiler.array, grads), compiler.array(limit))
            for one, other in zip(leaves(found), leaves(plain), strict=True):
                np.testing.assert_allclose(compiler.numpy(one), other, rtol=1e-6)


# Unknown shapes, exported programs, batches

SOME = {
    "global": uc.by_global_norm(0.5),
    "each leaf": uc.by_norm(0.5),
    "first axis": uc.by_norm(0.5, axis=0),
    "agc": uc.agc(0.1, axis=-1),
    "adagc": uc.adagc(warmup=1),
}
State = type(SOME["adagc"].init(PARAMS))
"""A named tuple of arrays."""


def rows(by: float, count: int) -> list[np.ndarray]:
    """Return a matrix and a vector with some rows."""
    rng = np.random.default_rng(0)
    return [
        np.asarray(by * rng.standard_normal((4, *shape)), "float32")[:count] for shape in ((3,), ())
    ]


def first_state(fw: Framework) -> list[Any]:
    """Return the arrays of the first state of the adaptive rule."""
    w, b = map(fw.array, rows(1.0, 4))
    return list(SOME["adagc"].init({"w": w, "b": b}))


def some_step(w: Any, b: Any, *state: Any) -> list[Any]:
    """Take a step of some rules; the last results are the arrays of the next state."""
    grads, params = {"w": w, "b": b}, {"w": w * 0 + 0.5, "b": b * 0 + 0.5}
    states = {name: rule.init(grads) for name, rule in SOME.items()}
    states["adagc"] = State(*state)
    results = [rule.update(grads, states[name], params) for name, rule in SOME.items()]
    clipped = [leaf for new, _, _ in results for leaf in (new["w"], new["b"])]
    return [*clipped, *results[-1][1]]


def learns_any_rows(fw: Framework, step: Callable[..., Any]) -> None:
    """Require the state to follow NumPy's, for gradients with any number of rows."""
    known, plain = first_state(fw), first_state(NUMPY)
    for by, count in ((1.0, 4), (0.5, 2), (30.0, 3), (1.0, 4)):
        found, expected = (
            step(*map(fw.array, rows(by, count)), *known),
            some_step(*rows(by, count), *plain),
        )
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(fw.numpy(one), other, rtol=5e-6, err_msg=f"{count} rows")
        known, plain = list(found[2 * len(SOME) :]), expected[2 * len(SOME) :]


@pytest.mark.compiled
@pytest.mark.only("torch")
def test_torch_takes_any_rows(framework: Framework) -> None:
    """A rule compiled for dynamic shapes is one graph.

    An exported program, saved and loaded, does the same.
    """
    import torch
    from torch._dynamo.utils import counters

    # The export below makes the graph functional, as a later backend would.
    torch._dynamo.reset()
    counters.clear()
    learns_any_rows(
        framework, torch.compile(some_step, fullgraph=True, backend="eager", dynamic=True)
    )
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]

    class Step(torch.nn.Module):
        def forward(self, w: Any, b: Any, state: tuple[Any, ...]) -> Any:
            return some_step(w, b, *state)

    example = (*map(framework.array, rows(1.0, 4)), tuple(first_state(framework)))
    size, file = torch.export.Dim("rows", min=2, max=64), io.BytesIO()
    dynamic = {"w": {0: size}, "b": {0: size}, "state": tuple(None for _ in example[2])}
    torch.export.save(torch.export.export(Step(), example, dynamic_shapes=dynamic), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    learns_any_rows(framework, lambda w, b, *state: loaded(w, b, state))


@pytest.mark.compiled
@pytest.mark.only("tensorflow")
def test_tensorflow_takes_any_rows(framework: Framework, tmp_path: Path) -> None:
    """One trace accepts any number of rows, and so does its saved model.

    Rules without axes need no rank.
    """
    import tensorflow as tf

    kinds = [tf.TensorSpec(array.shape, array.dtype) for array in first_state(framework)]
    module = tf.Module()
    module.step = tf.function(
        some_step, input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([None]), *kinds]
    )
    learns_any_rows(framework, module.step)
    assert module.step.experimental_get_tracing_count() == 1
    tf.saved_model.save(module, str(tmp_path))
    learns_any_rows(framework, tf.saved_model.load(str(tmp_path)).step)

    def without_axes(w: Any, limit: Any) -> list[Any]:
        clipped = [
            uc.clip_by_norm(w, limit, ord=3),
            uc.clip_by_average_norm(w, limit),
            uc.clip_by_value(w, -limit, 1),
        ]
        return [*uc.clip_by_global_norm(w, limit), *clipped]

    clip = tf.function(without_axes, input_signature=[tf.TensorSpec(None), tf.TensorSpec([])])
    for array in (*rows(1.0, 4), np.ones((2, 1, 3), "float32"), np.zeros((0, 3), "float32")):
        for one, other in zip(clip(array, 0.5), without_axes(array, np.float32(0.5)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    assert clip.experimental_get_tracing_count() == 1


@pytest.mark.compiled
@pytest.mark.only("jax")
@pytest.mark.usefixtures("_quickly")
def test_jax_takes_any_rows(framework: Framework) -> None:
    """A function exported for a symbolic number of rows, and serialized, accepts any number."""
    import jax
    from jax import export

    [count] = export.symbolic_shape("rows")
    looks = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((count, 3), (count,))]
    looks += [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in first_state(framework)]
    loaded = export.deserialize(export.export(jax.jit(some_step))(*looks).serialize())
    learns_any_rows(framework, loaded.call)


@pytest.mark.compiled
@pytest.mark.only("torch", "tensorflow", "jax")
@pytest.mark.usefixtures("_quickly")
def test_batches(framework: Framework) -> None:
    """A batch of one leaf, next to a leaf without one, equals one call for each element."""
    single, state = framework.array(rows(1.0, 4)[1]), first_state(framework)
    each = [rows(by, 4)[0] for by in (0.1, 1.0, 20.0)]
    step = lambda w: some_step(w, single, *state)
    if framework.name == "torch":
        import torch

        batched = torch.func.vmap(step)
    elif framework.name == "jax":
        import jax

        batched = jax.jit(jax.vmap(step))
    else:
        import tensorflow as tf

        batched = lambda w: tf.vectorized_map(step, w)
    found = [framework.numpy(array) for array in batched(framework.array(np.stack(each)))]
    for number, w in enumerate(each):
        plain = some_step(w, rows(1.0, 4)[1], *first_state(NUMPY))
        for one, other in zip(found, plain, strict=True):
            np.testing.assert_allclose(
                one[number] if one.ndim > other.ndim else one, other, rtol=2e-6
            )


# PyTorch


class TorchInductor(TorchCompile):
    """PyTorch as users compile it, with Inductor."""

    name = "torch.compile, Inductor"

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import torch
        from torch._inductor import config

        torch._dynamo.reset()
        config.compile_threads, config.fx_graph_cache = 1, False
        return torch.compile(function, fullgraph=True, dynamic=False)


@pytest.mark.compiled
@pytest.mark.needs("torch")
def test_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor generates code for a rule of one norm, one of a norm for each leaf, and a chain."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    fw = TorchInductor()
    some = {name: KINDS[name] for name in ("by_global_norm", "adagc", "chain")}
    with compiled_once(fw, step_of(some)) as step:
        agree(fw, trained(fw, some, step), "kinds")


def recorded(trace: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of trees that is recorded at its first call by a tracer of flat arrays."""
    known: dict[str, Any] = {}

    def call(*args: Any) -> Any:
        arrays, given = optree.tree_flatten(args)

        def flat(*arrays: Any) -> tuple[Any, ...]:
            found, known["result"] = optree.tree_flatten(
                function(*optree.tree_unflatten(given, arrays))
            )
            return tuple(found)

        if not known:
            known["function"] = trace(flat, arrays)
        found = known["function"](*arrays)
        return optree.tree_unflatten(known["result"], found)

    return call


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["make_fx", "make_fx, symbolic", "jit.trace", "aot_function"])
def test_tracers(name: str) -> None:
    """The graph recorded at the first step is right at all others, so no value is baked in."""
    fw = Torch()
    agree(fw, trained(fw, KINDS, recorded(fw.tracers()[name], step_of(KINDS))), "kinds")


@pytest.mark.needs("torch")
def test_meta() -> None:
    """Every rule accepts tensors without values, and returns the right dtypes and shapes."""
    import torch

    class Meta(Torch):
        def array(self, values: Any, dtype: str = "float32") -> Any:
            return super().array(values, dtype).to("meta")

    found = trained(Meta(), EVERY, step_of(EVERY), STEPS[:2])
    for result, plain in zip(found, wanted("every"), strict=False):
        for name in EVERY:
            assert all(
                one.device.type == "meta"
                for one, _ in alike(result[name], plain[name], Torch().dtype, name)
            )
    # A default device must not matter.
    with torch.device("meta"):
        clipped, norm = uc.clip_by_global_norm(torch.tensor([3.0, 4.0], device="cpu"), 1.0)
    assert (clipped.tolist(), norm.item()) == (pytest.approx([0.6, 0.8]), 5)


@pytest.mark.needs("torch")
def test_tensors_that_a_graph_changes() -> None:
    """A graph recorded on tensors that it changes in place also changes its later arguments."""
    fw, example = Torch(), [Torch().array([0.3, 0.4]), Torch().array([[1.2]])]
    for name, trace in fw.tracers().items():
        graph = trace(
            lambda *given: uc.clip_(given, uc.by_global_norm(2.0)).norms,
            [leaf.clone() for leaf in example],
        )
        for by in (1.0, 10.0, 1e30, 0.0):
            given = [by * leaf for leaf in example]
            np.testing.assert_allclose(graph(*given), 1.3 * by, rtol=1e-6)
            np.testing.assert_allclose(
                given[1], 1.2 * by * min(1, 2 / (1.3 * by or 1)), rtol=2e-6, err_msg=name
            )


@pytest.mark.compiled
@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["all", "a group"])
def test_python_numbers_as_limits(name: str) -> None:
    """A Python number as limit is a constant at first, and an argument from its first change on."""
    import torch
    from torch._dynamo.utils import counters

    def clipped(grad: Any, limit: float) -> Any:
        if name == "all":
            return uc.clip_by_global_norm(grad, limit)[0]
        return uc.clip(
            {"w": grad, "b": grad}, uc.by_group_norm({"w": limit, "b": 0.1}, rules.first_key)
        )[0]["w"]

    fw = TorchCompile()
    counters.clear()
    torch._dynamo.reset()
    clip = torch.compile(clipped, fullgraph=True, backend="aot_eager")
    for limit in (0.5, 0.6, 0.7, 1000.0, 0.8):
        np.testing.assert_allclose(
            clip(fw.array([3.0, 4.0]), limit), np.asarray([3, 4]) * min(1, limit / 5), rtol=1e-6
        )
    assert counters["stats"]["unique_graphs"] == 2


# JAX


@pytest.mark.needs("jax")
def test_nothing_becomes_double() -> None:
    """With 64-bit types in JAX, gradients, states, reports and scalars stay in single precision."""
    fw = JAXx64()
    with fw.context():
        found = trained(fw, EVERY, lambda *args: fw.outline(step_of(EVERY), *args), STEPS[:2])
        for program in [program for promise in PROMISES for program in promise.programs_for(fw)]:
            arrays = program.arrays(fw)
            some = arrays[:1] if isinstance(program, Repeated) else arrays
            assert fw.outline(partial(program.run, uc), some) is not None
    for result, plain in zip(found, wanted("every"), strict=False):
        for name in EVERY:
            assert list(alike(result[name], plain[name], fw.dtype, name)), name


@pytest.mark.compiled
@pytest.mark.needs("jax")
@pytest.mark.usefixtures("_quickly")
def test_scan_with_donated_states() -> None:
    """States can be the carry of `jax.lax.scan` and can be donated: their arrays are distinct."""
    import jax
    import jax.numpy as jnp

    fw, some = JAXJit(), KINDS
    params = mapped(fw.array, PARAMS)
    steps = jax.tree.map(
        lambda *leaf: jnp.stack(leaf), *(mapped(fw.array, grads) for grads in STEPS)
    )

    def scanned(states: Any, steps: Any) -> Any:
        def one(states: Any, given: Any) -> Any:
            found = step_of(some)(given[0], states, params, given[1])
            return {name: result["state"] for name, result in found.items()}, found

        return jax.lax.scan(one, states, steps)

    states = {name: rule.init(params) for name, rule in some.items()}
    last, found = jax.jit(scanned, donate_argnums=0)(states, (steps, jnp.asarray(rules.LOSSES)))
    agree(fw, [jax.tree.map(lambda leaf, i=i: leaf[i], found) for i in range(len(STEPS))], "kinds")
    every = {name: rule.init(params) for name, rule in EVERY.items()}
    looks = jax.tree.map(lambda leaf: leaf.shape, every)
    assert (
        jax.tree.map(
            jnp.shape, jax.jit(lambda x: jax.tree.map(jnp.copy, x), donate_argnums=0)(every)
        )
        == looks
    )
    assert jax.tree.structure(last) == jax.tree.structure(states)


CONSTANTS = {
    "zclip": uc.zclip(z=1.0, warmup=2),
    "adagc": uc.adagc(warmup=1),
    "spam": uc.spam(warmup=1),
    "chain of agc": uc.chain(uc.agc(0.1, axis=-1), uc.autoclip(50, window=4)),
    "skip_spikes": uc.skip_spikes(z=1.0, window=4, warmup=2),
    "zero": uc.norm_growth(1.01, nonfinite="zero"),
}
"""Rules with a state of all norms, of the norms of leaves, and of those of elements.

Some are part of other rules; one reads the loss.
"""


@pytest.mark.compiled
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(TorchCompile(), marks=pytest.mark.needs("torch"), id="torch.compile"),
        pytest.param(TensorFlowFunction(), marks=pytest.mark.needs("tensorflow"), id="tf.function"),
        pytest.param(JAXJit(), marks=pytest.mark.needs("jax"), id="jax.jit"),
    ],
)
def test_gradients_that_are_constants(way: Framework) -> None:
    """Results are NumPy's if only the state, parameters, loss, limit or norm is traced."""
    values, sizes = (
        {"w": np.asarray([[3.0, 4.0], [0.0, 1.0]]), "b": np.asarray([0.5])},
        (1.0, 2.0, 30.0),
    )
    numpy = mapped(lambda leaf: np.asarray(leaf, np.float32), values)
    grads, params = mapped(way.array, values), mapped(lambda leaf: way.array(0.1 * leaf), values)

    def step(states: Any, loss: Any) -> Any:
        return {
            name: rule.update(grads, states[name], params, loss=loss)[:2]
            for name, rule in CONSTANTS.items()
        }

    run, states = way.compiled(step), {name: rule.init(grads) for name, rule in CONSTANTS.items()}
    plain = {name: rule.init(numpy) for name, rule in CONSTANTS.items()}
    weights = mapped(lambda leaf: 0.1 * leaf, numpy)
    for size in sizes:
        found = run(states, way.array(size))
        for name, rule in CONSTANTS.items():
            clipped, plain[name], _ = rule.update(numpy, plain[name], weights, loss=size)
            for one, other in zip(
                leaves([found[name], ()]), leaves([(clipped, plain[name]), ()]), strict=True
            ):
                np.testing.assert_allclose(way.numpy(one), other, rtol=2e-6, err_msg=name)
        states = {name: state for name, (_, state) in found.items()}

    def beside(weights: Any, limit: Any, norm: Any) -> Any:
        return (
            uc.clip(grads, uc.agc(0.1, axis=-1), weights)[0],
            uc.clip_by_global_norm(grads, limit)[0],
            uc.clip_by_norm(grads, limit),
            uc.clip_by_global_norm(grads, 1.0, norm=norm)[0],
            uc.clip(grads, uc.by_group_norm({"w": limit, "b": 0.1}, rules.first_key))[0],
        )

    found = way.compiled(beside)(params, way.array(2.0), way.array(10.0))
    plain = (
        uc.clip(numpy, uc.agc(0.1, axis=-1), weights)[0],
        uc.clip_by_global_norm(numpy, 2.0)[0],
        uc.clip_by_norm(numpy, 2.0),
        uc.clip_by_global_norm(numpy, 1.0, norm=10.0)[0],
        uc.clip(numpy, uc.by_group_norm({"w": 2.0, "b": 0.1}, rules.first_key))[0],
    )
    for one, other in zip(leaves(found), leaves(plain), strict=True):
        np.testing.assert_allclose(way.numpy(one), other, rtol=2e-6)


UNLIMITED = {
    "spam, in its warm-up": uc.spam(),
    "z-scores of rows": uc.Rule(uc.limits.ZScore(2.0, 0.5), scope=uc.scopes.axes(-1)),
    "a large limit": uc.by_norm(2e38, axis=-1),
    "a large limit of a group": uc.by_group_norm(
        {"ones": 2e38, "traced": uc.limits.Ema(1.05, 0.98)}, rules.first_key
    ),
}


@pytest.mark.compiled
@pytest.mark.needs("jax")
def test_a_constant_that_nothing_limits() -> None:
    """An unclipped constant stays unchanged next to traced gradients.

    XLA must not compute the reciprocal of a limit that is out of range.
    """
    way = JAXJit()
    ones, traced = way.array(np.ones((2, 2))), way.array([[3.0, 4.0], [6.0, 8.0]])
    first = {name: rule.init({"ones": ones, "traced": traced}) for name, rule in UNLIMITED.items()}

    def step(grad: Any, states: Any) -> Any:
        grads = {"ones": ones, "traced": grad}
        return {
            name: [rule.update(grads, state[name])[0] for state in (first, states)]
            for name, rule in UNLIMITED.items()
        }

    for name, pair in way.compiled(step)(traced, first).items():
        for clipped in pair:
            np.testing.assert_allclose(
                way.numpy(clipped["ones"]), np.ones((2, 2)), rtol=1e-6, err_msg=name
            )
            np.testing.assert_allclose(
                way.numpy(clipped["traced"]), way.numpy(traced), rtol=1e-6, err_msg=name
            )


@pytest.mark.needs("jax")
@pytest.mark.parametrize("name", [*CONSTANTS, "by_global_norm", "norm_growth"])
@pytest.mark.usefixtures("_quickly")
def test_a_branch_of_constants(name: str) -> None:
    """Conditionals outside of jit trace their branches, with known or absent gradients."""
    import jax

    rule = {**CONSTANTS, "by_global_norm": uc.by_global_norm(1.0), "norm_growth": uc.norm_growth()}[
        name
    ]
    fw = JAXJit()
    params = {
        "absent": fw.array([1.0]),
        "b": fw.array([0.5]),
        "w": fw.array([[3.0, 4.0], [0.0, 1.0]]),
    }
    grads = {**params, "absent": None}
    first = rule.init(params)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.lax.cond(True, lambda: rule.init(params), lambda: first),
        first,
    )
    _, state, _ = rule.update(grads, first, params, loss=1.0)
    spike = {key: leaf if leaf is None else 30 * leaf for key, leaf in grads.items()}

    def branch() -> Any:
        clipped, new, report = rule.update(spike, state, params, loss=1.0)
        return clipped, new, jax.lax.cond(True, lambda: report.norms, lambda: report.norms)

    clipped, new, norms = jax.lax.cond(True, branch, branch)
    wanted, after, report = rule.update(spike, state, params, loss=1.0)
    close = partial(np.testing.assert_allclose, rtol=2e-6)
    jax.tree.map(close, (clipped, new, norms), (wanted, after, report.norms))


@pytest.mark.needs("jax")
@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.usefixtures("_quickly")
def test_a_scan_over_constants(name: str) -> None:
    """A scan over constants has only the state as its carry.

    Duplicate elements of a sparse constant are summed in the program.
    """
    import jax
    import jax.numpy as jnp

    fw, rule = JAXJit(), CONSTANTS[name]
    grads = [fw.array([3.0, 4.0]), fw.array([[1.0]])]
    step = lambda state: rule.update(grads, state, grads, loss=1.0)[:2]
    state, _ = jax.lax.scan(lambda state, _: (step(state)[1], 0), rule.init(grads), None, length=3)
    wanted = rule.init(grads)
    for _ in range(3):
        wanted = step(wanted)[1]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), state, wanted)
    sparse = fw.sparse((3, 2), [1, 1], [[3.0, 0.0], [0.0, 4.0]])
    norm = jax.jit(lambda scale: scale * uc.clip_by_global_norm([sparse], 1.0)[1])(jnp.float32(2.0))
    assert norm == 10


@dataclass(frozen=True)
class Half:
    """A curve as an object: larger norms are reduced to a share of the limit."""

    share: float = 0.5

    def __call__(self, xp: Any, norm: Any, limit: Any) -> Any:
        return xp.where(norm > limit, self.share * limit / norm, 1.0)


@pytest.mark.compiled
@pytest.mark.needs("torch")
def test_rules_made_in_compiled_code() -> None:
    """A rule can be created inside of compiled code without a graph break."""
    import torch

    makes = [
        lambda: uc.agc(0.1),
        uc.zclip,
        uc.autoclip,
        uc.adagc,
        uc.norm_growth,
        uc.spam,
        uc.adagn,
        uc.skip_spikes,
        lambda: uc.by_global_norm(1.0),
        lambda: uc.by_value(-1.0, 1.0),
        lambda: uc.larc(0.1),
        lambda: uc.Rule(1.0, curve=Half()),
    ]

    def clipped(x: Any) -> Any:
        return [
            rule.update([x], rule.init([x]), [x], loss=1.0)[0][0]
            for rule in [make() for make in makes]
        ]

    x = torch.tensor([3.0, 4.0])
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(clipped, fullgraph=True, backend="eager")(x), clipped(x)
    )


@pytest.mark.compiled
@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["clip", "clip_", "update in place", "a function", "drop-in"])
def test_one_program_for_all_tensors(name: str) -> None:
    """Tensors of the same dtypes and shapes, as each step brings them, compile nothing again."""
    import torch
    from torch._dynamo.testing import CompileCounter

    from uniclip.integrations.torch import clip_grad_norm_

    agc, by_global_norm = uc.agc(0.1), uc.by_global_norm(1.0)
    calls: dict[str, Callable[[list[Any], list[Any]], Any]] = {
        "clip": lambda grads, params: uc.clip(grads, agc, params)[0],
        "clip_": lambda grads, params: uc.clip_(grads, agc, params),
        "update in place": lambda grads, _: by_global_norm.update(grads, (), in_place=True)[0],
        "a function": lambda grads, _: uc.clip_(grads, abs),
        "drop-in": lambda _, params: clip_grad_norm_(params, 1.0),
    }
    torch._dynamo.reset()
    counter = CompileCounter()
    program = torch.compile(calls[name], backend=counter, fullgraph=True)
    for step in range(3):
        grads = [torch.full((2,), float(step + number)) for number in range(3)]
        params = [torch.nn.Parameter(torch.ones(2)) for _ in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        program(grads, params)
    assert counter.frame_count == 1


PARAMETERS = """
import torch
import uniclip as uc
rule, params = uc.agc(0.1), [torch.nn.Parameter(torch.ones(2))]
grads = [torch.full((2,), 4.0)]
torch.compile(lambda grads: uc.clip_(grads, rule, params), backend="eager", fullgraph=True)(grads)
print(grads[0].tolist())
"""


REFUSED = """
import functools, itertools
import numpy as np
import torch
import uniclip as uc
from uniclip.integrations.torch import clip_grad_norm_

leaves = [itertools.chain([]), zip([]), map(abs, []), functools.partial(abs), itertools.count()]
leaves += [object(), len, type]
for leaf in [*leaves, torch.nn.Linear(1, 1), torch.float32, np.ma.array([1.0]), {1.0}, 1.0, "w"]:
    try:
        uc.clip([leaf], uc.by_global_norm(1.0))
    except TypeError:
        continue
    raise AssertionError(leaf)
model = torch.nn.Linear(1, 1)
for param in model.parameters():
    param.grad = torch.full_like(param, 4.0)
def step():
    clip_grad_norm_(model.parameters(), 0.5**0.5)
torch.compile(step, backend="eager", fullgraph=True)()
print([param.grad.item() for param in model.parameters()])
"""


@pytest.mark.compiled
@pytest.mark.needs("torch")
@pytest.mark.parametrize(("source", "wanted"), [(PARAMETERS, 0.1), (REFUSED, 0.5)])
def test_parameters_that_compiled_code_meets_first(source: str, wanted: float) -> None:
    """A process whose first call is compiled needs no graph break for parameters.

    This applies after a refused tree, too.
    """
    done = subprocess.run(
        [sys.executable, "-c", source], check=False, capture_output=True, text=True
    )
    np.testing.assert_allclose(json.loads(done.stdout or done.stderr), [wanted, wanted], rtol=1e-6)


TO_ONE = [0.94, 0.92]
"""The weights after a step from 1 at the rate 0.1, for the gradient (3, 4) clipped to norm 1."""
TRAINED = {
    "clip": TO_ONE,
    "clip_": TO_ONE,
    "drop-in": TO_ONE,
    "attach": TO_ONE,
    "a rule made inside": TO_ONE,
    "labels": TO_ONE,
    "agc": [1 - 0.006 * 2**0.5, 1 - 0.008 * 2**0.5],
    "zclip": [0.7, 0.6],
}
"""The weights after a training step, by the way of clipping.

agc clips to a tenth of the norm of the weights; zclip does not clip at first.
"""


HOLDERS = ("clip_", "drop-in", "attach")
"""The ways that change gradients in place, which a backward pass in the same step has made."""
WAYS = [
    pytest.param(name, marks=[] if name in HOLDERS else pytest.mark.needs(BETWEEN_GRAPHS))
    for name in TRAINED
]
"""With a PyTorch that compiles rules in one graph, `test_rules` and others have the other ways."""


@pytest.mark.compiled
@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", WAYS)
def test_a_step_of_training_between_graphs(name: str) -> None:
    """With graph breaks, a whole training step compiles, even if PyTorch cannot compile uniclip."""
    import torch
    from array_api_compat import torch as compat

    from uniclip.integrations.torch import attach, clip_grad_norm_

    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_global_norm, agc, zclip = uc.by_global_norm(1.0), uc.agc(0.1), uc.zclip()
    labels = uc.by_group_norm({"w": 1.0}, lambda path, leaf: path[0])
    state = zclip.init([torch.zeros(1, 2)])
    handle = attach(optimizer, by_global_norm) if name == "attach" else None
    clips: dict[str, Callable[[list[Any]], Any]] = {
        "clip": lambda grads: uc.clip(grads, by_global_norm)[0],
        "clip_": lambda grads: uc.clip_(grads, by_global_norm),
        "drop-in": lambda _: clip_grad_norm_(model.parameters(), 1.0),
        "attach": lambda _: None,
        "a rule made inside": lambda grads: uc.clip_(grads, uc.by_norm(1.0)),
        "labels": lambda grads: uc.clip_({"w": grads[0]}, labels),
        "agc": lambda grads: uc.clip_(grads, agc, list(model.parameters())),
        "zclip": lambda grads: zclip.update(grads, state)[0],
    }
    clip = clips[name]

    def step(x: Any) -> None:
        model(x).sum().backward()
        clipped = clip([model.weight.grad])
        if isinstance(clipped, list):
            model.weight.grad = clipped[0]
        optimizer.step()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager")
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.init.ones_(model.weight)
        compiled(torch.tensor([[3.0, 4.0]]))
        np.testing.assert_allclose(model.weight.detach().numpy(), [TRAINED[name]], rtol=1e-6)
    assert handle is None or handle.report.clipped
    # Functions of the libraries below uniclip still compile.
    total = torch.compile(lambda x: compat.sum(x, axis=0), fullgraph=True, backend="eager")
    assert total(torch.tensor([3.0, 4.0])) == 7


FIRST = """
import sys
import torch
import uniclip as uc
rule = uc.by_global_norm(1.0)
if EAGER_FIRST:
    uc.clip_([torch.ones(2)], rule)
assert "torch._dynamo" not in sys.modules, "it takes seconds to import"

def step(x):
    grads = [x * 2, None, x * 0]
    uc.clip_(grads, rule)
    return grads[0] + 1

step = torch.compile(step, backend="eager")
print([step(torch.tensor([1.5, 2.0])).tolist() for _ in range(3)])
"""


@pytest.mark.compiled
@pytest.mark.needs("torch")
@pytest.mark.parametrize("eager_first", [False, True])
def test_a_process_between_graphs(eager_first: bool) -> None:
    """A step with graph breaks works in a process whose first call is compiled, or a later one."""
    code = FIRST.replace("EAGER_FIRST", str(eager_first))
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(json.loads(done.stdout), [[1.6, 1.8]] * 3, rtol=1e-6)


@pytest.mark.compiled
@pytest.mark.needs("jax")
@pytest.mark.usefixtures("_quickly")
def test_large_constants_in_jax() -> None:
    """A constant that a compiled function clips has the same norm as outside of it."""
    import jax
    import jax.numpy as jnp

    grads, rule = [jnp.full(shape, 0.5) for shape in [(600, 500), (3,)]], uc.by_global_norm(0.5)
    wanted, report = uc.clip(grads, rule)
    clipped, norm = jax.jit(lambda x: [(one := uc.clip(grads, rule))[0], one[1].norms + x])(0.0)
    np.testing.assert_allclose(norm, report.norms, rtol=1e-6)
    np.testing.assert_allclose(clipped[-1], wanted[-1], rtol=1e-6)


@pytest.mark.compiled
@pytest.mark.needs("jax")
@pytest.mark.usefixtures("_quickly")
def test_control_flow_of_jax() -> None:
    """Loops and branches can clip, and an equal rule as a static argument compiles nothing new."""
    import jax

    fw, traces = JAXJit(), []
    halve = lambda x: uc.clip_by_norm(x, uc.global_norm(x) / 2)
    ways = (lambda x: uc.clip_by_norm(x, 0.75), lambda x: uc.clip_by_value(x, -0.25, 0.25))

    @jax.jit
    def halved(x: Any) -> Any:
        x = jax.lax.while_loop(lambda x: uc.global_norm(x) > 1, halve, x)
        return jax.lax.cond(uc.global_norm(x) > 0.75, *ways, x)

    for x in ([30.0, 40.0], [0.3, 0.4], [24.0, 32.0]):
        plain = np.asarray(x, "float32")
        while uc.global_norm(plain) > 1:
            plain = halve(plain)
        np.testing.assert_allclose(
            halved(fw.array(x)), ways[int(uc.global_norm(plain) <= 0.75)](plain), rtol=1e-6
        )
    clip = jax.jit(lambda x, rule: traces.append(rule) or uc.clip(x, rule)[0], static_argnums=1)
    for limit in (0.5, 0.5, 2.0, 0.5):
        np.testing.assert_allclose(
            clip(fw.array([3.0, 4.0]), uc.by_norm(limit)), [0.6 * limit, 0.8 * limit], rtol=1e-6
        )
    assert traces == [uc.by_norm(0.5), uc.by_norm(2.0)]
    with jax.disable_jit():
        assert uc.clip_by_global_norm(fw.array([3.0, 4.0]), 10.0)[1] == 5


# TensorFlow


@pytest.mark.compiled
@pytest.mark.only("tensorflow")
def test_control_flow_of_tensorflow(framework: Framework) -> None:
    """AutoGraph converts loops and branches on tensors that clip and update states."""
    import tensorflow as tf

    rule = uc.zclip(z=1.0, warmup=2)

    def looped(grads: Any, state: Any) -> Any:
        clipped = grads
        for number in tf.range(5):
            clipped, state, _ = rule.update(grads * tf.cast(number, tf.float32) ** 3, state)
        return clipped, state

    def halved(x: Any) -> Any:
        while uc.global_norm(x) > 1.0:
            x = uc.clip_by_norm(x, uc.global_norm(x) / 2)
        if uc.global_norm(x) > 0.75:
            return uc.clip_by_norm(x, 0.75)
        return uc.clip_by_value(x, -0.25, 0.25)

    grads = framework.array([0.3, 0.4])
    found, wanted = tf.function(looped)(grads, rule.init(grads)), looped(grads, rule.init(grads))
    for one, other in zip(leaves(found), leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    for x in map(framework.array, ([30.0, 40.0], [0.3, 0.4], [24.0, 32.0])):
        np.testing.assert_allclose(tf.function(halved)(x), halved(x), rtol=1e-6)


TF1 = """
import numpy as np
import tensorflow as tf
import uniclip as uc
tf1 = tf.compat.v1
tf1.disable_v2_behavior()
x = tf1.placeholder(tf.float32, [None, 3])
w = tf1.get_variable("w", [3, 1], initializer=tf1.zeros_initializer())
table = tf1.get_variable("table", [5, 1], initializer=tf1.zeros_initializer())
loss = tf.reduce_mean((x @ w + tf.reduce_sum(tf.gather(table, [1, 1, 4])) - 4.0) ** 2)
opt = tf1.train.GradientDescentOptimizer(0.1)
grads, variables = zip(*opt.compute_gradients(loss))
clipped, norm = uc.clip_by_global_norm(grads, 1.0)
train = opt.apply_gradients(zip(clipped, variables))
native = tf.clip_by_norm(grads[0], 0.5), uc.clip_by_norm(grads[0], 0.5)
feed = {x: np.random.default_rng(0).standard_normal((8, 3))}
with tf1.Session() as session:
    session.run(tf1.global_variables_initializer())
    np.testing.assert_allclose(*session.run(native, feed), rtol=1e-6)
    np.testing.assert_allclose(session.run(uc.global_norm(clipped), feed), 1.0, rtol=1e-6)
    losses = [session.run([loss, train], feed)[0] for _ in range(50)]
print(losses[-1] < 0.1 * losses[0])
"""


@pytest.mark.compiled
@pytest.mark.needs("tensorflow")
def test_tensorflow_without_its_second_version() -> None:
    """A tutorial of TensorFlow 1 works where TensorFlow 2's behavior is disabled."""
    done = subprocess.run([sys.executable, "-c", TF1], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


# Debuggers that stop at NaN and ∞


def healthy(by: float) -> Any:
    """Return finite gradients; one leaf and one row are zeros."""
    w = np.asarray(by * np.random.default_rng(0).standard_normal((3, 2)), "float32")
    w[1] = 0
    return {"b": np.zeros(3, "float32"), "none": None, "w": w}


HEALTHY = [healthy(by) for by in (1.0, 0.0, 100.0)]


def train_healthily(fw: Framework, some: dict[str, Any], step: Callable[..., Any]) -> None:
    """Take steps of finite gradients with a zero parameter, and require finite results."""
    params = mapped(fw.array, {**PARAMS, "b": np.zeros(3)})
    states = {name: rule.init(params) for name, rule in some.items()}
    for grads in HEALTHY:
        found = step(mapped(fw.array, grads), states, params, fw.array(1.0))
        states = {name: result["state"] for name, result in found.items()}
        for path, array in walk(found):
            assert np.isfinite(fw.numpy(array)).all(), path


@pytest.mark.needs("torch")
def test_torch_detects_no_anomaly() -> None:
    """Derivatives through all rules pass PyTorch's anomaly detection."""
    fw, step = Torch(), step_of(EVERY)

    def derived(grads: Any, states: Any, params: Any, loss: Any) -> Any:
        for leaf in leaves(grads):
            leaf.requires_grad_()
        found = step(grads, states, params, loss)
        outputs = [
            leaf
            for result in found.values()
            for leaf in leaves([result["clipped"], result["report"]["norms"]])
        ]
        sum(leaf.sum() for leaf in outputs if leaf.requires_grad).backward()
        for leaf in leaves(grads):
            assert leaf.grad.isfinite().all()
        return found

    with fw.debugged():
        train_healthily(fw, EVERY, derived)


@pytest.mark.compiled
@pytest.mark.needs("tensorflow")
def test_tensorflow_checks_all_numbers() -> None:
    """No operation yields NaN or ∞: in all rules, in derivatives, and in a graph."""
    import tensorflow as tf

    fw = TensorFlow()

    def derived(grads: Any, *others: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(leaves(grads))
            found = step_of(KINDS)(grads, *others)
            total = sum(
                tf.reduce_sum(leaf**2)
                for result in found.values()
                for leaf in leaves(result["clipped"])
            )
        return {**found, "slopes": {"state": tape.gradient(total, leaves(grads))}}

    with fw.debugged():
        train_healthily(fw, KINDS, derived)
        train_healthily(fw, KINDS, tf.function(step_of(KINDS), autograph=False))


@pytest.mark.compiled
@pytest.mark.needs("jax")
@pytest.mark.usefixtures("_quickly")
def test_jax_finds_neither_nan_nor_infinity() -> None:
    """Compiled code returns neither NaN nor ∞, and `checkify` finds no NaN inside."""
    import jax
    from jax.experimental import checkify

    fw = JAXJit()
    with fw.debugged():
        some = FAMILIES["choices"] | FAMILIES["relative"] | KINDS
        train_healthily(fw, some, jax.jit(step_of(some)))
    some = {name: KINDS[name] for name in ("agc", "zclip", "adagc", "skip_spikes")}
    checked = jax.jit(checkify.checkify(step_of(some), errors=checkify.float_checks))

    def step(*args: Any) -> Any:
        error, found = checked(*args)
        error.throw()
        return found

    train_healthily(fw, some, step)


@pytest.mark.compiled
@pytest.mark.needs("torch")
@pytest.mark.parametrize("given", [False, True])
def test_torch_compiles_float64(given: bool) -> None:
    """Float64 compiles without a graph break, where sums may be recomputed or the norm is given."""
    import torch

    grads = torch.tensor([3e200, 4e200], dtype=torch.float64)
    norm = torch.tensor(5e200, dtype=torch.float64) if given else None
    clip = torch.compile(
        lambda x: uc.clip_by_global_norm([x], 1.0, norm=norm), fullgraph=True, backend="aot_eager"
    )
    [clipped], found = clip(grads)
    torch.testing.assert_close(
        [clipped, found], [grads / 5e200, torch.tensor(5e200, dtype=torch.float64)]
    )
