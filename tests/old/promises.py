"""What uniclip promises, once: the tests run each check, and the docs print the table."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import optree
import pytest

import oracle
import uniclip as uc
from frameworks import ALL_DTYPES, KNOWN, Framework
from healthy import PARAMS, STEPS, arrays_of
from uniclip.backends.base import PIECE

EPS = {
    "float16": 2**-10,
    "bfloat16": 2**-7,
    "float32": 2**-23,
    "float64": 2**-52,
    "complex64": 2**-23,
    "complex128": 2**-52,
}
NORM_RULES = {
    "global": uc.by_global_norm,
    "leaf": uc.by_norm,
    "rows": lambda c: uc.by_norm(c, axis=-1),
    "L1": lambda c: uc.by_global_norm(c, ord=1),
    "L3": lambda c: uc.by_norm(c, ord=3),
    "Linf": lambda c: uc.by_global_norm(c, ord=math.inf),
    "average": uc.by_average_norm,
    "rms": uc.by_block_rms,
}


class Norms(NamedTuple):
    """The state of `Last`."""

    norm: Any


class Last(uc.Limit):
    """Allow the norm of the step before."""

    memory = True

    def init(self, norms: Any, context: uc.limits.Context) -> Norms:
        return Norms(norms)

    def __call__(self, norms: Any, state: Norms, context: uc.limits.Context) -> tuple[Any, Norms]:
        return state.norm, Norms(norms)


@dataclass(frozen=True)
class Promise:
    """A case, what happens, and a check that fails if it does not."""

    case: str
    what: str
    check: Callable[[Framework], None]
    exceptions: dict[str, str] = field(default_factory=dict)
    """The reason why it cannot hold, by framework or family."""

    def reason(self, framework: Framework | type[Framework]) -> str | None:
        """Return why the promise cannot hold there, ``None`` where it does."""
        return self.exceptions.get(framework.name) or self.exceptions.get(framework.family)


def tree(fw: Framework, dtype: str = "float32", by: float = 1.0) -> dict[str, Any]:
    """Return a small tree of gradients of global norm 13·by."""
    return {"w": fw.array([[3.0 * by, -4.0 * by]], dtype), "b": [fw.array([12.0 * by, 0.0], dtype), None]}


def leaves(grads: dict[str, Any]) -> list[Any]:
    """Return the arrays of such a tree."""
    return [grads["w"], grads["b"][0]]


def floats(fw: Framework) -> list[str]:
    """Return the floating dtypes of a framework, complex ones too."""
    return [name for name in fw.dtypes if not name.startswith("int")]


def close(fw: Framework, array: Any, wanted: Any, dtype: str, ulps: float = 4) -> None:
    """Assert equality to a few units in the last place of ``dtype``."""
    np.testing.assert_allclose(
        fw.numpy(array).astype(complex), np.asarray(wanted).astype(complex), rtol=ulps * EPS[dtype]
    )


def below(fw: Framework) -> None:
    few = [NORM_RULES["global"], NORM_RULES["rows"]]

    def all_of(every: dict[str, Any]) -> dict[str, Any]:
        rules = {dtype: NORM_RULES.values() if dtype == "float32" else few for dtype in every}
        results = {dtype: [uc.clip(grads, rule(100.0)) for rule in rules[dtype]] for dtype, grads in every.items()}
        return {dtype: [(new, report.clipped) for new, report in some] for dtype, some in results.items()}

    every = {dtype: tree(fw, dtype) for dtype in floats(fw)}
    for dtype, results in fw.run(all_of, every).items():
        for clipped, changed in results:
            for old, new in zip(leaves(every[dtype]), leaves(clipped), strict=True):
                np.testing.assert_array_equal(fw.numpy(old), fw.numpy(new), strict=True)
                assert new is old or not fw.same_objects
            assert not fw.numpy(changed)


def above(fw: Framework) -> None:
    both = lambda grads: (uc.clip_by_global_norm(grads, 1.0), uc.clip_by_norm(grads, 2.0))
    every = {dtype: tree(fw, dtype) for dtype in floats(fw)}
    found = fw.run(lambda every: {dtype: both(grads) for dtype, grads in every.items()}, every)
    for dtype, ((clipped, norm), each) in found.items():
        old = leaves(tree(KNOWN["numpy"](), "float64"))
        for new, wanted in zip(leaves(clipped), oracle.clip_global(old, 1.0), strict=True):
            close(fw, new, wanted, dtype)
        close(fw, norm, 13.0, "float32")
        for old_leaf, new in zip(old, leaves(each), strict=True):
            close(fw, new, oracle.clip_leaf(old_leaf, 2.0), dtype)


def keeps(fw: Framework) -> None:
    call = fw.compiled(uc.clip_by_global_norm)
    for dtype in floats(fw):
        grads = tree(fw, dtype)
        for clipped, norm in [call(grads, fw.array(limit)) for limit in (1.0, 100.0)]:
            assert sorted(clipped) == sorted(grads)
            assert clipped["b"][1] is None
            for old, new in zip(leaves(grads), leaves(clipped), strict=True):
                assert fw.owns(new)
                assert fw.dtype(new) == dtype
                assert tuple(new.shape) == tuple(old.shape)
            assert fw.dtype(norm) == ("float64" if dtype in ("float64", "complex128") else "float32")


def accurate_to(fw: Framework, bound: float, norm: Any, true: float) -> None:
    """Assert that a norm is off by a share of ``bound`` at most; a failure prints both."""
    off = abs(float(fw.numpy(norm)) / true - 1)
    assert off <= bound, f"{fw.name}: the relative error of the norm is {off:.2e}, allowed are {bound:.1e}"


def accurate(fw: Framework) -> None:
    values = np.random.default_rng(0).standard_normal(25_000_000, dtype="float32")
    true = math.sqrt(np.sum(values.astype("float64") ** 2))
    accurate_to(fw, 5e-7, fw.run(uc.global_norm, [fw.array(values)]), true)
    pieces = [fw.array(piece) for piece in np.split(values[:1_000_000], 50)]
    true = math.sqrt(np.sum(values[:1_000_000].astype("float64") ** 2))
    accurate_to(fw, 5e-7, fw.run(uc.global_norm, pieces), true)
    for dtype in {"float16", "bfloat16"} & set(fw.dtypes):
        low = fw.array(values[:1_000_000], dtype)
        true = math.sqrt(np.sum(fw.numpy(low).astype("float64") ** 2))
        accurate_to(fw, 2e-6, fw.run(uc.global_norm, [low]), true)


def accurate_for_equal_entries(fw: Framework) -> None:
    graph = 1.5e-6 if fw.name in {"tf.function", "tensorflow-graph"} else 5e-7
    size, values = 3_000_000, np.asarray([0.1, 0.3, 0.7, 1.7], "float32")
    bounds = {2: graph, 1: 5e-7, 3: 5e-7}
    grads = [fw.array(np.full(size, value)) for value in values]
    found = fw.run(lambda g: [[uc.global_norm(leaf, ord=p) for leaf in g] for p in bounds], grads)
    for (p, bound), norms in zip(bounds.items(), found, strict=True):
        for norm, value in zip(norms, values, strict=True):
            accurate_to(fw, bound, norm, size ** (1 / p) * float(value))


def in_pieces(fw: Framework) -> None:
    rules = [uc.by_global_norm(1.0), uc.by_norm(1.0, axis=0), uc.by_norm(1.0, axis=1), uc.by_global_norm(1.0, ord=3)]
    for dtype in {"float16", "bfloat16"} & set(fw.dtypes):
        grads = fw.array(np.full((1000, 600), 2.0), dtype)
        with mock.patch.object(uc.Norm, "total", autospec=True, side_effect=uc.Norm.total) as total:
            fw.run(lambda g: [uc.clip(g, rule)[1].norms for rule in rules], grads)
        sizes = [math.prod(call.args[2].shape) for call in total.call_args_list]
        assert sum(sizes) >= 600_000 * len(rules)
        assert max(sizes) <= PIECE


def split(fw: Framework) -> None:
    values = np.random.default_rng(0).standard_normal(fw.many, dtype="float32")
    true = math.sqrt(np.sum(values.astype("float64") ** 2))
    for dtype in {"float16", "bfloat16", "float32"} & set(fw.dtypes):
        pieces = {n: [fw.array(piece, dtype) for piece in np.split(values, n)] for n in (1, 10, fw.many)}
        norms = fw.run(lambda every: {n: uc.global_norm(some) for n, some in every.items()}, pieces)
        for number, norm in norms.items():
            if number == 1:
                whole = norm
                accurate_to(fw, 5e-7 if dtype == "float32" else 1e-3, whole, true)  # of the numbers before rounding
            accurate_to(fw, 1e-6, norm, float(fw.numpy(whole)))


def accurate_along_axes(fw: Framework) -> None:
    tall = np.random.default_rng(0).standard_normal((2_000_000, 2), dtype="float32")
    rule = uc.Rule(1.0, scope=uc.scopes.axes(0))
    columns = fw.run(lambda g: uc.clip(g, rule)[1].norms, fw.array(tall))
    np.testing.assert_allclose(fw.numpy(columns), np.sqrt(np.sum(tall.astype("float64") ** 2, axis=0)), rtol=5e-7)


def in_range(fw: Framework) -> None:
    cases = [("float32", [1e30, -1.0, 2e30]), ("float32", [1e-30, 2e-30, 0.0]), ("float32", [2e38, 1.0, 1.0])]
    cases += [("float64", [1e200, 3e200, 1.0]), ("float64", [1e-200, 3e-200, 0.0]), ("float16", [300.0, -400.0, 1.0])]
    orders = (2, 3, math.inf) if fw.traced else (1.5, 2, 3, 10, math.inf)  # in a graph 3 is a number, as 10 is
    call = fw.compiled(lambda g, c: [uc.clip_by_global_norm(g, c[i], ord=p) for i, p in enumerate(orders)])
    for dtype, values in cases:
        if dtype in fw.dtypes:
            grads = [fw.array(values, dtype), fw.array(values[:1], dtype)]
            entries = [float(x) for leaf in grads for x in fw.numpy(leaf)]
            limits = {p: oracle.norm(entries, p) / 4 for p in orders}
            wide = "float64" if dtype == "float64" else "float32"
            results = call(grads, [fw.array(limit, wide) for limit in limits.values()])
            for (p, limit), (clipped, norm) in zip(limits.items(), results, strict=True):
                close(fw, norm, 4 * limit, "float32" if dtype == "float16" else dtype, ulps=8)
                wanted = oracle.clip_global([fw.numpy(leaf) for leaf in grads], limit, p)
                for new, expected in zip(clipped, wanted, strict=True):
                    close(fw, new, expected, dtype, ulps=8)
    if "float16" in fw.dtypes:
        mixed = [fw.array([300.0], "float16"), fw.array([1e30])]
        close(fw, fw.run(lambda g: uc.clip_by_global_norm(g, 1.0), mixed)[0][1], [1.0], "float32")


def far_apart(fw: Framework) -> None:
    curves = {
        curve.__name__: curve
        for curve in (uc.curves.normalize, uc.curves.hard, uc.curves.soft, uc.curves.smooth, uc.curves.tanh)
    }
    rules = {name: partial(uc.Rule, curve=curve) for name, curve in curves.items()} | {"leaf": uc.by_norm}
    names = list(rules)[:2] if fw.cost > 20 else list(rules)
    for dtype, large, small in (("float32", 1e30, 1e-20), ("float64", 1e250, 1e-200)):
        for norm, limit in ((large, small), (small, large)) if dtype in fw.dtypes else ():
            grads = [fw.array([norm * 0.6, 0.0], dtype), fw.array([-norm * 0.8], dtype)]
            found = fw.run(lambda g, c=limit: [uc.clip(g, rules[name](c))[0] for name in names], grads)
            for name, clipped in zip(names, found, strict=True):
                to = limit if name == "normalize" else min(limit, norm)
                both = (min(0.6 * norm, to), min(0.8 * norm, to)) if name == "leaf" else (0.6 * to, 0.8 * to)
                close(fw, clipped[0], [both[0], 0.0], dtype, ulps=8)
                close(fw, clipped[1], [-both[1]], dtype, ulps=8)
    tiny = [fw.array([3e-40, 4e-40]), fw.array([0.0])]
    clipped, report = fw.run(lambda g: uc.clip(g, uc.to_global_norm(1.0)), tiny)
    assert np.isfinite(fw.numpy(report.factors))
    if fw.family not in {"TensorFlow", "JAX"}:  # whose kernels take subnormal numbers for 0
        assert fw.numpy(report.factors) > 1e38
        np.testing.assert_allclose(fw.numpy(clipped[0]), [0.6, 0.8], rtol=1e-4)
    beyond = [fw.array([math.nan, 1.0]), fw.array([2.0])]
    for leaf in fw.run(lambda g: uc.clip(g, uc.by_global_norm(1e39))[0], beyond):
        assert np.isnan(fw.numpy(leaf)).all()


def debugged(fw: Framework) -> None:
    rules = [uc.by_global_norm(1.0), uc.agc(0.1)]
    if fw.cost <= 20:
        rules += [uc.by_norm(1.0, axis=-1), uc.zclip(warmup=2)]
    if fw.cost < 5:
        rules += [uc.by_norm(1.0, ord=3), uc.by_global_norm(math.inf), uc.adagc(warmup=1), uc.autoclip(window=3)]
        rules += [uc.skip_spikes(window=3, warmup=2)]
    params, states = arrays_of(fw.array, PARAMS), [rule.init(arrays_of(fw.array, PARAMS)) for rule in rules]

    def step(grads: Any, states: list[Any], params: Any, loss: Any) -> list[Any]:
        results = [rule.update(grads, one, params, loss=loss) for rule, one in zip(rules, states, strict=True)]
        return [(clipped, state, tuple(report), report.scalars()) for clipped, state, report in results]

    with fw.debugged():
        run = fw.compiled(step)
        for grads in STEPS[1:4]:
            found = run(arrays_of(fw.array, grads), states, params, fw.array(2.0))
            states = [result[1] for result in found]
            for array in optree.tree_leaves(found):
                assert np.isfinite(fw.numpy(array)).all()


KERNELS = ("Haswell", "Nehalem", "SkylakeX")
PROGRAM = """
import json
from threadpoolctl import threadpool_info
from frameworks import KNOWN
from promises import accurate, accurate_along_axes, accurate_for_equal_entries, split
for check in (accurate, accurate_along_axes, accurate_for_equal_entries, split):
    check(KNOWN["numpy"]())
print(json.dumps([lib["architecture"] for lib in threadpool_info() if lib["internal_api"] == "openblas"]))
"""


def on_other_processors(fw: Framework) -> None:
    """Each kernel of OpenBLAS in a process of its own."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    for kernel in KERNELS:
        env = os.environ | {"OPENBLAS_CORETYPE": kernel, "PYTHONPATH": path}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, f"{kernel}: {done.stderr}"
        if platform.machine() in {"x86_64", "AMD64"}:  # where OpenBLAS has these kernels
            assert json.loads(done.stdout) in ([], [kernel])


def traced_with_an_example(fw: Framework) -> None:
    rules = [
        uc.by_global_norm(6.5),
        uc.by_norm(6.0),
        uc.by_norm(2.0, axis=-1),
        uc.by_global_norm(6.5, nonfinite="zero"),
    ]
    some = rules[:1] if fw.cost > 20 else rules
    flat = lambda a, b: [leaf for rule in some for leaf in uc.clip([a, b], rule)[0]]
    values = [[3.0, -4.0], [12.0, 0.0]]
    for name, trace in fw.tracers().items():
        traced = trace(flat, [fw.array(value) for value in values])
        for by in (0.1, 1.0, 3.0, 1e25):
            leaves = [by * np.asarray(value) for value in values]
            wanted = [leaf for rule in some for leaf in uc.clip([np.asarray(x, "float32") for x in leaves], rule)[0]]
            for new, expected in zip(traced(*map(fw.array, leaves)), wanted, strict=True):
                np.testing.assert_allclose(fw.numpy(new), expected, rtol=1e-6, err_msg=name)


def state_of_other_leaves(fw: Framework) -> None:
    grads = {"a": fw.array([3.0, 4.0]), "b": fw.array([1.0])}
    for rule in (uc.adagc(), uc.norm_growth(), uc.adagn(), uc.spam(), uc.percentile_clipping(50, 3)):
        clipper = uc.Clipper(rule)
        clipper(grads)
        saved = clipper.state_dict()
        other = uc.Clipper(rule)
        other.load_state_dict(saved)
        with pytest.raises(ValueError, match=r"grads\['b'\], which are not here, and none of grads\['c'\]"):
            other({"a": grads["a"], "c": grads["b"]})
        with pytest.raises(ValueError, match="that of another rule"):
            uc.Clipper(uc.autoclip()).load_state_dict(saved)
        other(grads)
    joint = uc.Clipper(uc.autoclip(50, window=3))
    joint(grads)
    again = uc.Clipper(joint.rule)
    again.load_state_dict(joint.state_dict())
    again({"a": grads["a"], "c": grads["b"]})  # which leaves share one norm is not remembered


def parts_of_one_tree(fw: Framework) -> None:
    """Act as one of two processes that are alike."""

    def joined(own: Any, op: str) -> Any:
        return own + own if op == "sum" else own

    grads, half = tree(fw), math.sqrt(0.5)
    clipped, report = fw.run(lambda g: uc.clip(g, uc.by_global_norm(1.0), all_reduce=joined), grads)
    close(fw, report.norms, 13.0 / half, "float32")
    close(fw, clipped["w"], np.asarray([[3.0, -4.0]]) * half / 13, "float32")
    nothing = {"w": None, "b": [None, None]}
    with pytest.raises(ValueError, match=r"all_reduce.*pass params="):
        uc.clip(nothing, uc.by_norm(1.0), all_reduce=joined)
    absent, report = fw.run(
        lambda p: uc.clip({"w": p["w"], "b": [None, None]}, uc.by_norm(1.0), p, all_reduce=joined), grads
    )
    assert absent["b"] == [None, None]
    close(fw, absent["w"], np.asarray([[0.6, -0.8]]) * half, "float32")


def errors_are_short(fw: Framework) -> None:
    grads = [fw.array(np.arange(3000.0)) for _ in range(3)]
    calls = [
        lambda: uc.clip(uc.by_global_norm(1.0), grads),
        lambda: uc.clip_by_global_norm(1.0, grads),
        lambda: uc.clip_by_norm(grads, grads),
        lambda: uc.Clipper(grads),
        lambda: uc.Rule(grads),
        lambda: uc.clip(grads, uc.by_global_norm),
        lambda: uc.clip(grads, uc.by_value(grads[0], grads[1][:7])),
    ]
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert len(str(caught.value)) < 600, str(caught.value)[:600]


def only_measures(fw: Framework) -> None:
    measure = fw.compiled(lambda g: uc.clip_by_global_norm(g, math.inf))
    for value in (1.0, 1e36, math.inf):
        grads = tree(fw, by=value)
        clipped, norm = measure(grads)
        for old, new in zip(leaves(grads), leaves(clipped), strict=True):
            np.testing.assert_array_equal(fw.numpy(old), fw.numpy(new))
        if math.isfinite(value):
            close(fw, norm, 13 * value, "float32")


def zero_limit(fw: Framework) -> None:
    each = fw.compiled(lambda g: [uc.clip(g, rule(0.0))[0] for rule in NORM_RULES.values()])
    for by in (1.0, 0.0):
        for clipped in each(tree(fw, by=by)):
            for new in leaves(clipped):
                assert not fw.numpy(new).any()
    for new in leaves(fw.run(lambda g: uc.clip_by_global_norm(g, 1.0), tree(fw, by=0.0))[0]):
        assert not fw.numpy(new).any()


def bad_limit(fw: Framework) -> None:
    for limit in (-1.0, math.nan):
        for function in (uc.clip_by_norm, uc.clip_by_global_norm, uc.clip_by_average_norm):
            with pytest.raises(ValueError, match=rf"max_norm .*{limit}"):
                function(tree(fw), limit)
        with pytest.raises(ValueError, match=rf"limit,? .*{limit}"):
            uc.Rule(limit)
        if fw.raises:
            with pytest.raises(ValueError, match=rf"limit,? .*{limit}"):
                uc.clip_by_norm(tree(fw), fw.array(limit))
    if not fw.raises:
        call = fw.compiled(lambda g, c: uc.clip_by_global_norm(g, c)[0])
        for limit in (-1.0, math.nan):
            assert all(np.isnan(fw.numpy(leaf)).all() for leaf in leaves(call(tree(fw), fw.array(limit))))
    with pytest.raises(ValueError, match="ord"):
        uc.clip_by_norm(tree(fw), 1.0, ord=0.5)
    with pytest.raises(ValueError, match=r"min=2.*max=1"):
        uc.clip_by_value(tree(fw), 2, 1)


def propagates(fw: Framework) -> None:
    def all_of(grads: Any) -> dict[str, Any]:
        results = {name: uc.clip(grads, rule(1.0)) for name, rule in NORM_RULES.items()}
        return {name: (clipped, report.finite) for name, (clipped, report) in results.items()}

    every = fw.compiled(all_of)
    for bad in (math.nan, math.inf):
        results = every([fw.array([1.0, bad]), fw.array([3.0, 4.0])])
        for clipped, finite in results.values():
            assert np.isnan(fw.numpy(clipped[0])).all()
            assert not fw.numpy(finite)
        assert np.isnan(fw.numpy(results["global"][0][1])).all()
        close(fw, results["leaf"][0][1], [0.6, 0.8], "float32")


def skips(fw: Framework) -> None:
    rules = [uc.by_global_norm(1.0, nonfinite="skip"), uc.by_norm(1.0, nonfinite="skip")]
    rules.append(uc.by_global_norm(math.inf, nonfinite="skip"))
    every = fw.compiled(lambda g: [uc.clip(g, rule) for rule in rules])
    for bad in (math.nan, math.inf, -math.inf):
        for clipped, report in every([fw.array([1.0, bad]), fw.array([3.0, 4.0])]):
            assert not any(fw.numpy(leaf).any() for leaf in clipped)
            assert not fw.numpy(report.finite)
            assert fw.numpy(report.clipped)
    clipped, report = every([fw.array([0.0, 0.0]), fw.array([3.0, 4.0])])[0]
    close(fw, clipped[1], [0.6, 0.8], "float32")
    assert fw.numpy(report.finite)


def zeroes(fw: Framework) -> None:
    rules = [uc.by_global_norm(6.5, nonfinite="zero"), uc.by_norm(1.0, nonfinite="zero")]
    both = fw.compiled(lambda g: [uc.clip(g, rule) for rule in rules])
    for bad in (math.nan, math.inf, -math.inf):
        joint, each = both([fw.array([3.0, bad, 4.0]), fw.array([bad, -12.0])])
        for (clipped, report), wanted in ((joint, [[1.5, 0, 2], [0, -6]]), (each, [[0.6, 0, 0.8], [0, -1]])):
            for leaf, expected in zip(clipped, wanted, strict=True):
                close(fw, leaf, expected, "float32")
            assert not fw.numpy(report.finite)
        close(fw, joint[1].norms, 13.0, "float32")
    clipped, report = both([fw.array([3.0, 4.0, 0.0]), fw.array([0.0, 1.0])])[0]
    np.testing.assert_array_equal(fw.numpy(clipped[0]), [3.0, 4.0, 0.0])
    assert fw.numpy(report.finite)
    if "complex64" in fw.dtypes:
        bad = fw.array([3 + 4j, complex(0, math.nan), complex(math.inf, 1)], "complex64")
        close(fw, fw.run(lambda g: uc.clip(g, rules[1])[0], bad), [0.6 + 0.8j, 0, 0], "complex64")


def raises(fw: Framework) -> None:
    rule = uc.by_global_norm(1.0, nonfinite="raise")
    good = {"w": fw.array([3.0, 4.0]), "b": [None, fw.array([0.0])]}
    bad = {"w": fw.array([3.0, 4.0]), "b": [fw.array([1.0, math.nan]), fw.array([math.inf])]}
    if fw.traced:
        with pytest.raises(Exception, match="use 'propagate', 'skip' or 'zero'"):
            fw.run(lambda g: uc.clip(g, rule)[0], good)
        return
    close(fw, uc.clip(good, rule)[0]["w"], [0.6, 0.8], "float32")
    with pytest.raises(FloatingPointError, match=r"NaN or ∞ in grads\['b'\]\[0\], grads\['b'\]\[1\]$"):
        uc.clip(bad, rule)
    with pytest.raises(FloatingPointError, match="beyond the range"):
        uc.clip(fw.array([3e38, 3e38]), rule)


def state_is_kept(fw: Framework) -> None:
    rule = uc.Rule(Last(), nonfinite="propagate")

    def three_steps(grads: Any) -> Any:
        _, state, _ = rule.update([grads[0]], rule.init([grads[0]]))
        _, state, _ = rule.update([grads[1]], state)
        return rule.update([grads[0] * 10], state)

    clipped, state, report = fw.run(three_steps, [fw.array([3.0, 4.0]), fw.array([math.nan, 1.0])])
    close(fw, clipped[0], [3.0, 4.0], "float32")
    close(fw, report.limits, 5.0, "float32")
    close(fw, state.norm, 50.0, "float32")


def in_place(fw: Framework) -> None:
    rule = uc.by_global_norm(6.5)
    if not fw.writes:
        with pytest.raises(
            TypeError, match=r"grads\['b'\]\[0\].* cannot be changed in place: .*use clipped, report = uc\.clip"
        ):
            uc.clip_(tree(fw), rule)
        return
    for dtype in floats(fw):
        grads = tree(fw, dtype)
        old = leaves(grads)
        report = fw.run(lambda g: uc.clip_(g, rule), grads)
        assert all(a is b for a, b in zip(leaves(grads), old, strict=True))
        for new, wanted in zip(old, ([[1.5, -2.0]], [6.0, 0.0]), strict=True):
            close(fw, new, wanted, dtype)
            assert fw.dtype(new) == dtype
        close(fw, report.norms, 13.0, "float32")
    grads = tree(fw)
    others = [*(rule(1.0) for rule in NORM_RULES.values()), uc.by_value(-2.0, 2.0), abs]
    for other in others[:: 1 if fw.cost < 50 else 3]:  # each is compiled twice
        wanted = fw.run(lambda g, other=other: uc.clip(g, other)[0], grads)
        fw.run(lambda g, other=other: uc.clip_(g, other), grads)
        for new, expected in zip(leaves(grads), leaves(wanted), strict=True):
            np.testing.assert_array_equal(fw.numpy(new), fw.numpy(expected))
    with pytest.raises(TypeError, match=r"grads\[0\] holds integers"):
        uc.clip_([fw.array([3, 4], "int32")], rule)
    whole = fw.array([3, 4], "int32")
    fw.run(lambda g: uc.clip_(g, uc.by_value(-1, 3)), whole)
    np.testing.assert_array_equal(fw.numpy(whole), [3, 3])


def sparse(fw: Framework) -> None:
    grads = [fw.sparse((1000, 2), [7, 3, 7], [[1.0, 2.0], [0.0, 4.0], [2.0, 2.0]]), fw.array([12.0])]
    dense = np.zeros((1000, 2))
    dense[7], dense[3] = [3.0, 4.0], [0.0, 4.0]
    clipped, norm = fw.run(lambda g: uc.clip_by_global_norm(g, 1.0), grads)
    close(fw, norm, math.sqrt(185), "float32")
    np.testing.assert_allclose(fw.dense(clipped[0]), dense / math.sqrt(185), rtol=1e-6)
    [cancelled] = fw.run(lambda g: uc.clip_by_value(g, -1, 1), [fw.sparse((9, 1), [2, 2, 5], [[3.0], [-3.0], [8.0]])])
    np.testing.assert_array_equal(fw.dense(cancelled)[[2, 5], 0], [0.0, 1.0])
    [rms] = fw.run(lambda g: uc.clip(g, uc.by_block_rms(1.0))[0], [fw.sparse((4, 1), [1, 1], [[3.0], [3.0]])])
    np.testing.assert_allclose(fw.dense(rms)[:, 0], [0, 2, 0, 0], rtol=1e-6)


def sparse_integers(fw: Framework) -> None:
    for dtype in {"int32", "int64"} & set(fw.dtypes):
        grads = fw.sparse((9, 1), [2, 5, 2], [[1], [4], [2]], dtype)
        clipped, same = fw.run(lambda g: (uc.clip_by_norm(g, 2.5), uc.clip_by_norm(g, 100.0)), grads)
        np.testing.assert_allclose(fw.dense(clipped)[[2, 5], 0], [1.5, 2.0], rtol=1e-6)
        np.testing.assert_array_equal(fw.dense(same)[[2, 5], 0], [3, 4])
        large = fw.sparse((9, 1), [2, 2], [[2**24], [1]], dtype)
        kept = fw.run(lambda g: uc.clip_by_value(g, -1, 2**24 + 1), large)
        assert fw.dense(kept)[2, 0] == 2**24 + 1
        assert fw.dtype(kept) == dtype


def integers(fw: Framework) -> None:
    for dtype in {"int32", "int64"} & set(fw.dtypes):
        integers_of(fw, dtype)


def integers_of(fw: Framework, dtype: str) -> None:
    t = fw.array([1, 1, 3, 4, 2, 2, 1, 4, 2, 3], dtype)
    clipped = fw.run(lambda g: uc.clip_by_norm(g, 5), t)
    assert fw.dtype(clipped) == fw.default_float
    close(fw, clipped, [0.62017367294604231 * x for x in fw.numpy(t)], fw.default_float)
    assert fw.dtype(fw.run(lambda g: uc.clip_by_norm(g, 50), t)) == fw.default_float
    kept = fw.run(lambda g: uc.clip_by_value(g, 2, 3.0), t)
    assert fw.dtype(kept) == dtype
    np.testing.assert_array_equal(fw.numpy(kept), [2, 2, 3, 3, 2, 2, 2, 3, 2, 3])
    np.testing.assert_array_equal(fw.numpy(uc.clip_by_value(t, -math.inf, 2)), np.minimum(fw.numpy(t), 2))
    np.testing.assert_array_equal(fw.numpy(uc.clip_by_value(t, -(2**40), 2**40)), fw.numpy(t))
    with pytest.raises(TypeError, match="whole"):
        uc.clip_by_value(t, -0.5, 0.5)


def complex_numbers(fw: Framework) -> None:
    z = fw.array([3 + 4j, 0, 12j], "complex64")
    clipped, norm = fw.run(lambda g: uc.clip_by_global_norm(g, 6.5), z)
    close(fw, norm, 13.0, "float32")
    close(fw, clipped, [1.5 + 2j, 0, 6j], "complex64")
    close(fw, fw.run(lambda g: uc.clip_by_norm(g, 6, ord=math.inf), z), [1.5 + 2j, 0, 6j], "complex64")
    with pytest.raises(TypeError, match="complex"):
        uc.clip_by_value(z, -1, 1)


def twice(fw: Framework) -> None:
    def shared(x: Any) -> Any:
        return uc.clip_by_global_norm({"a": x, "b": [x]}, 1.0)

    clipped, norm = fw.run(shared, fw.array([3.0, 4.0]))
    close(fw, norm, math.sqrt(50), "float32")
    for leaf in (clipped["a"], clipped["b"][0]):
        close(fw, leaf, np.asarray([3.0, 4.0]) / math.sqrt(50), "float32")


def nothing(fw: Framework) -> None:
    for empty in ([], {}, (), None, {"a": None, "b": [None]}):
        clipped, norm = uc.clip_by_global_norm(empty, 1.0)
        assert clipped == empty
        assert norm == 0
        assert uc.clip_by_value(empty, -1, 1) == empty
        assert uc.clip_by_norm(empty, 1.0) == empty
    for rule in NORM_RULES.values():
        clipped, report = fw.run(lambda g, rule=rule: uc.clip(g, rule(1.0)), [fw.array(np.zeros((2, 0)))])
        assert tuple(clipped[0].shape) == (2, 0)
        assert fw.numpy(report.finite)
        assert not fw.numpy(report.clipped)
    grads = [fw.array(np.zeros((0, 3))), fw.array(4.0), None]
    for clipped, norm in fw.run(lambda g: [uc.clip_by_global_norm(g, 2.0, ord=p) for p in (1, 2, 3, math.inf)], grads):
        assert tuple(clipped[0].shape) == (0, 3)
        assert clipped[2] is None
        close(fw, clipped[1], 2.0, "float32")
        close(fw, norm, 4.0, "float32")


def wrong_leaf(fw: Framework) -> None:
    other = KNOWN["array-api-strict" if fw.family == "NumPy" else "numpy"]()
    for call in (lambda g: uc.clip_by_global_norm(g, 1.0), lambda g: uc.clip_by_value(g, -1, 1), uc.global_norm):
        with pytest.raises(TypeError, match=r"grads\['w'\]\[1\] is a float, not an array.*plain numbers as one array"):
            call({"w": [fw.array([1.0]), 2.0]})
        with pytest.raises(TypeError, match=r"grads\[1\] is a .* but grads\[0\] is a .*one framework"):
            call([fw.array([1.0]), other.array([2.0])])


def derivative(fw: Framework) -> None:
    def total(x: Any) -> Any:
        clipped = uc.clip_by_global_norm(x, 1.0)[0]
        return clipped[0] + 2 * clipped[1]

    def wanted(x: list[float]) -> np.ndarray:
        a, b = x
        n = math.hypot(a, b)
        return np.asarray([1.0, 2.0]) / n - (a + 2 * b) * np.asarray([a, b]) / n**3

    slope = fw.derivative(total)
    for x in ([3.0, 4.0], [0.6, -2.0]):
        np.testing.assert_allclose(fw.numpy(slope(fw.array(x))), wanted(x), rtol=1e-5)
    for x in ([0.0, 0.0], [0.3, 0.4]):
        np.testing.assert_allclose(fw.numpy(slope(fw.array(x))), [1.0, 2.0], rtol=1e-6)
    slope = fw.derivative(uc.global_norm)
    np.testing.assert_allclose(fw.numpy(slope(fw.array([0.0, 0.0]))), [0.0, 0.0])
    np.testing.assert_allclose(fw.numpy(slope(fw.array([3e30, 4e30]))), [0.6, 0.8], rtol=1e-5)


def memory(fw: Framework) -> None:
    values = np.arange(24.0).reshape(2, 3, 4)
    frozen = values.copy()
    frozen.flags.writeable = False
    strange = [
        np.asfortranarray(values),
        values[:, ::2],
        np.broadcast_to(values[:, :1], (2, 3, 4)),
        frozen,
        values[::-1],
    ]
    for array in strange:
        before = array.copy()
        clipped, norm = fw.run(lambda g: uc.clip_by_global_norm(g, 1.0), array)
        np.testing.assert_allclose(norm, np.linalg.norm(before))
        np.testing.assert_allclose(clipped, before / np.linalg.norm(before))
        np.testing.assert_array_equal(array, before)
    assert fw.run(lambda g: uc.clip_by_norm(g, 1.0), strange[0]).flags.f_contiguous


NO_DERIVATIVE = "the framework takes no derivatives of array API code"
NO_SPARSE = "the framework has no sparse arrays"
DERIVING = {"MLX", "PyTorch", "TensorFlow", "JAX"}
LAYOUTS = {"NumPy", "PyTorch"}
OTHERS = sorted({cls.family for cls in KNOWN.values()} - DERIVING)

PROMISES = [
    Promise(
        "norm ≤ limit",
        "the gradients come back bit for bit; in eager NumPy, PyTorch, TensorFlow and JAX on the CPU as the same "
        "arrays",
        below,
    ),
    Promise("norm > limit", "same direction, and the norm becomes the limit to a few units in the last place", above),
    Promise("dtype, shape, tree", "each leaf keeps its own; the norm is float32 or wider, never half precision", keeps),
    Promise(
        "accuracy",
        "relative error of the norm ≤ 5·10⁻⁷ for 25 million float32 entries, ≤ 2·10⁻⁶ for half precision",
        accurate,
    ),
    Promise(
        "accuracy for equal entries",
        "the same for 3 million equal entries, whose rounding errors all have one sign; ≤ 1.5·10⁻⁶ in TensorFlow "
        "graphs without XLA",
        accurate_for_equal_entries,
    ),
    Promise("accuracy along axes", "the same for the norms of 2 million rows", accurate_along_axes),
    Promise(
        "half precision",
        "measured piece by piece, without a float32 copy of a whole gradient",
        in_pieces,
        {
            "array-api-strict": "it has no half precision",
            **dict.fromkeys(["torch.compile", "jax.jit", "jax.jit-x64"], "the compiler converts and adds in one pass"),
        },
    ),
    Promise(
        "accuracy on other processors",
        "the same with the BLAS kernels for Haswell (and Zen), Nehalem and SkylakeX",
        on_other_processors,
        {
            **{family: "it adds with kernels of its own" for family in [*DERIVING, *OTHERS] if family != "NumPy"},
            "numpy-readonly": "arrays of one kind are enough",
        },
    ),
    Promise(
        "code that is traced with one example",
        "right for other inputs: no value of the example is baked in (`torch.compile`, `make_fx`, `torch.jit.trace`, "
        "`aot_function`, `jax.jit`, `tf.function`, TensorFlow 1 graphs)",
        traced_with_an_example,
    ),
    Promise("any split into leaves", "the same norm to 10⁻⁶: one leaf, ten, or a leaf for each entry", split),
    Promise(
        "finite, but squares leave the range",
        "right norm, right result: 1e30 and 1e-30 in float32, 300 in float16",
        in_range,
    ),
    Promise(
        "norm and limit so far apart that their ratio leaves the range",
        "right result, in two steps; ±∞ only where the result itself is beyond the dtype. TensorFlow and XLA take "
        "subnormal numbers (below 1.2e-38) for 0. On an accelerator, outside of compiled code, the factor stays within "
        "its dtype",
        far_apart,
    ),
    Promise(
        "finite gradients under a debugger",
        "no NaN and no ∞ on the way nor in reports and states: `tf.debugging.enable_check_numerics`, `jax_debug_nans`, "
        "`jax_debug_infs`, `checkify`, `detect_anomaly` let them pass; the limit of a norm that nothing limits is the "
        "largest number of its dtype",
        debugged,
        {"tf.function-xla": "XLA does not compile TensorFlow's check"},
    ),
    Promise("limit = ∞", "the norm is measured, and the gradients come back bit for bit", only_measures),
    Promise("limit = 0", "all gradients become 0, never NaN, also if they were 0", zero_limit),
    Promise(
        "limit < 0 or NaN",
        "`ValueError` with the argument and the value; NaN gradients where the limit is an array that cannot be read",
        bad_limit,
    ),
    Promise(
        "NaN or ∞ in a gradient",
        "all entries that share its norm become NaN; the others are clipped as usual",
        propagates,
    ),
    Promise('… and `nonfinite="skip"`', "all gradients become 0, and `report.finite` is false", skips),
    Promise('… and `nonfinite="zero"`', "the entries that are not finite become 0, the rest is clipped", zeroes),
    Promise(
        '… and `nonfinite="raise"`',
        "`FloatingPointError` that names the leaves; in traced code a `TypeError` that names the other policies",
        raises,
    ),
    Promise("… and a rule that remembers", "its state does not change, so later steps are not affected", state_is_kept),
    Promise(
        "… and its state is loaded for other leaves, or another rule",
        "`ValueError` that names the leaves or the rules, before anything is changed",
        state_of_other_leaves,
    ),
    Promise(
        "parts of one tree in several processes, `all_reduce=`",
        "all decide alike: NaN in one process reaches all, the loss is their mean, and a gradient that is absent in "
        "one process takes part or the error says what to pass",
        parts_of_one_tree,
    ),
    Promise(
        "sparse gradients",
        "stay sparse; rows that occur twice are summed before measuring",
        sparse,
        {**dict.fromkeys([*OTHERS, "MLX"], NO_SPARSE), "torch.compile": "`torch.compile` does not take sparse tensors"},
    ),
    Promise(
        "integers in sparse gradients",
        "the same as in dense ones, and sums of repeated rows are exact",
        sparse_integers,
        {**dict.fromkeys([*OTHERS, "MLX"], NO_SPARSE), "torch.compile": "`torch.compile` does not take sparse tensors"},
    ),
    Promise("integers", "`clip_by_value` keeps them; norm rules return the framework's default float", integers),
    Promise(
        "complex numbers",
        "norm of the modulus; `clip_by_value` raises `TypeError`",
        complex_numbers,
    ),
    Promise(
        "the same array in two places",
        "each place counts, as two gradients of equal values do; in `uc.clip_` one memory counts once",
        twice,
    ),
    Promise(
        "empty and 0-d leaves, None, an empty tree",
        "contribute 0 and keep their places; the norm of nothing is 0",
        nothing,
    ),
    Promise("any error", "says what to write instead, and prints no array", errors_are_short),
    Promise("leaves of two frameworks, or no array", "`TypeError` with the leaf's path and what to pass", wrong_leaf),
    Promise(
        "in place, `uc.clip_`",
        "writes into NumPy and PyTorch arrays the values that `uc.clip` returns; elsewhere `TypeError`",
        in_place,
    ),
    Promise(
        "derivative through the clip",
        "exact where the square of the norm is in range, and finite at zero",
        derivative,
        dict.fromkeys(OTHERS, NO_DERIVATIVE),
    ),
    Promise(
        "read-only, strided, Fortran-order, broadcast arrays",
        "right, never written to; the layout is kept",
        memory,
        {
            **{family: "its arrays have no such layouts" for family in [*DERIVING, *OTHERS] if family not in LAYOUTS},
            **dict.fromkeys(["torch", "torch.compile"], "expanded and channels-last tensors have tests of their own"),
        },
    ),
]


HEADINGS = {
    "norm ≤ limit": "Results",
    "accuracy": "Accuracy and range",
    "limit = ∞": "Unusual limits",
    "NaN or ∞ in a gradient": "NaN and infinity",
    "parts of one tree in several processes, `all_reduce=`": "Many processes",
    "sparse gradients": "Kinds of arrays",
    "any error": "Errors",
    "in place, `uc.clip_`": "In place, and derivatives",
}
"""Under which heading a case and those after it stand."""


def table() -> str:
    """Return the promises as Markdown tables, with the reason for every framework where one cannot hold."""
    lines = []
    for promise in PROMISES:
        if promise.case in HEADINGS:
            lines += ["", f"### {HEADINGS[promise.case]}", "", "| case | what happens |", "| :-- | :-- |"]
        said = [_capital(promise.what) + ".", *_except(promise.exceptions)]
        lines.append(f"| {_capital(promise.case)} | {' '.join(said)} |")
    return "\n".join(lines).lstrip() + "\n"


def dtypes() -> str:
    """Return the dtypes that each family of frameworks is tested with, and the reason for each that it is not."""
    lines = ["| framework | tested with |", "| :-- | :-- |"]
    for family, classes in _families().items():
        missing = [cls.missing for cls in classes]
        nowhere = {dtype: missing[0][dtype] for dtype in ALL_DTYPES if all(dtype in names for names in missing)}
        partly = {dtype: why for names in missing for dtype, why in names.items() if dtype not in nowhere}
        said = [f"all but {_listed(nowhere)}" if nowhere else "all"]
        said += [_listed(partly, "{} {}")] if partly else []
        lines.append(f"| {family} | {'; '.join(said)} |")
    return "\n".join(lines) + "\n"


def _families() -> dict[str, list[type[Framework]]]:
    families: dict[str, list[type[Framework]]] = {}
    for cls in KNOWN.values():
        families.setdefault(cls.family, []).append(cls)
    return families


def _capital(text: str) -> str:
    """Return the text with a capital at its beginning."""
    return text[0].upper() + text[1:]


def _listed(reasons: dict[str, str], form: str = "{} ({})") -> str:
    """Return the dtypes that have a reason, and the reason, for each of them."""
    together: dict[str, list[str]] = {}
    for dtype, why in reasons.items():
        together.setdefault(why, []).append(f"`{dtype}`")
    return ", ".join(form.format(", ".join(names), why) for why, names in together.items())


WAYS = {
    "numpy-readonly": "read-only arrays of NumPy",
    "jax.jit-x64": "`jax.jit` in 64 bits",
    "jax.jit": "`jax.jit`",
    "tf.function": "`tf.function`",
    "tf.function-xla": "`tf.function` with XLA",
    "tensorflow-graph": "graphs of TensorFlow 1",
    "torch.compile": "`torch.compile`",
}
"""What the ways of running are called in the table."""


def _except(reasons: dict[str, str]) -> list[str]:
    """Return sentences that say where a promise is not tested, and why."""
    where: dict[str, list[str]] = {}
    for family, classes in _families().items():
        ways = {cls.name: reasons.get(cls.name, reasons.get(family, "")) for cls in classes}
        if len(set(ways.values())) == 1:
            ways = {family: ways[classes[0].name]}
        for name, why in ways.items():
            if why:
                where.setdefault(why, []).append(WAYS.get(name, name))
    return [f"*Not on {', '.join(names)}: {why}.*" for why, names in where.items()]
