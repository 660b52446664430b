"""Guarantees that cannot be traced: errors, object identity, writes in place, files, processes."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.contract_programs import close_leaves, same_bits, tree
from kit.frameworks import Framework, Strict
from kit.trees import close, leaves, mapped

KERNELS = ("Haswell", "Nehalem")
PROGRAM = """
import json
from threadpoolctl import threadpool_info
import uniclip
from kit.contract_programs import Accurate, AlongAxes, EqualEntries
from kit.frameworks import Framework
from kit.promise import run_eagerly
Accurate.size = 2_000_000
for program in (Accurate(), AlongAxes(), EqualEntries()):
    run_eagerly(Framework(), uniclip, program)
blas = [lib for lib in threadpool_info() if lib["internal_api"] == "openblas"]
print(json.dumps([lib["architecture"] for lib in blas]))
"""


def accurate_on_other_processors(fw: Framework, uc: Any) -> None:
    """Check the norms with several OpenBLAS kernels, each in a process of its own."""
    path = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    for kernel in KERNELS:
        env = os.environ | {"OPENBLAS_CORETYPE": kernel, "PYTHONPATH": path}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{kernel}: {done.stderr}"
        # OpenBLAS has these kernels for x86-64 only.
        if platform.machine() in {"x86_64", "AMD64"}:
            assert json.loads(done.stdout) in ([], [kernel])


def under_a_debugger(fw: Framework, uc: Any) -> None:
    """Check that finite gradients, some always zero, pass the framework's NaN debugger."""
    drawn = np.random.default_rng(0).standard_normal((4, 3))
    params, rules = (
        {"w": fw.array(drawn), "b": [fw.array(drawn[0]), None], "z": fw.array([0.0, 0.0])},
        [],
    )
    rules += [
        uc.by_global_norm(1.0),
        uc.by_norm(1.0, axis=-1),
        uc.agc(0.1),
        uc.by_global_norm(math.inf),
    ]
    rules += [
        uc.zclip(warmup=2),
        uc.adagc(warmup=1),
        uc.autoclip(window=3),
        uc.skip_spikes(window=3, warmup=2),
    ]
    for rule in rules:
        with fw.debugged():
            state = rule.init(params)
            for by in (1.0, 0.0, 100.0):
                grads = mapped(lambda leaf, by=by: fw.array(by * fw.numpy(leaf)), params)
                clipped, state, report = rule.update(grads, state, params, loss=fw.array(2.0))
                for array in leaves([clipped, state, list(report), report.scalars()]):
                    assert np.isfinite(fw.numpy(array)).all(), rule


def bad_limits(fw: Framework, uc: Any) -> None:
    """Check that invalid limits raise, both numbers and readable arrays."""
    for limit in (-1.0, math.nan):
        with pytest.raises(ValueError, match=rf"max_norm .*{limit}"):
            uc.clip_by_global_norm(tree(fw), limit)
        for make in (uc.Rule, uc.by_norm, uc.by_average_norm, uc.by_block_rms, uc.to_global_norm):
            with pytest.raises(ValueError, match=f"{limit}"):
                make(limit)
        if fw.raises:
            with pytest.raises(ValueError, match=f"{limit}"):
                uc.clip_by_norm(tree(fw), fw.array(limit))


def raises(fw: Framework, uc: Any) -> None:
    """Check that non-finite gradients raise, and finite ones whose norm overflows."""
    rule = uc.by_global_norm(1.0, nonfinite="raise")
    close(fw, uc.clip({"w": fw.array([3.0, 4.0]), "b": [None]}, rule)[0]["w"], [0.6, 0.8])
    bad = {"w": fw.array([3.0, 4.0]), "b": [fw.array([1.0, math.nan]), fw.array([math.inf])]}
    with pytest.raises(FloatingPointError, match=r"grads\['b'\]\[0\].*grads\['b'\]\[1\]") as caught:
        uc.clip(bad, rule)
    assert "grads['w']" not in str(caught.value)
    with pytest.raises(FloatingPointError, match="range"):
        uc.clip(fw.array([3e38, 3e38]), rule)


def saved_states(fw: Framework, uc: Any) -> None:
    """Check that a run resumed from a saved state continues without a difference.

    A state of other leaves, or of another rule, is refused as a whole.
    """
    steps = [
        {"a": fw.array([3.0 * by, 4.0 * by]), "b": fw.array([by])} for by in (1.0, 1.2, 0.9, 5.0)
    ]
    for rule in (uc.adagc(warmup=1), uc.percentile_clipping(50, 3), uc.zclip(warmup=2)):
        clipper, anew, other = uc.Clipper(rule), uc.Clipper(rule), uc.Clipper(uc.log_zscore())
        for grads in steps[:3]:
            clipper(grads)
        saved = json.loads(json.dumps(clipper.state_dict()))
        anew.load_state_dict(saved)
        other(steps[0])
        before = other.state_dict()
        with pytest.raises(ValueError, match="rule"):
            other.load_state_dict(saved)
        assert other.state_dict() == before
        same_bits(fw, anew(steps[3]), clipper(steps[3]))
        assert anew.state_dict() == clipper.state_dict()
        if rule.scope.label is None:
            with pytest.raises(ValueError, match=r"grads\['b'\].*grads\['c'\]"):
                anew({"a": steps[0]["a"], "c": steps[0]["b"]})


def empty_trees(fw: Framework, uc: Any) -> None:
    """Check that trees without leaves come back."""
    for empty in ([], {}, (), None, {"a": None, "b": [None]}):
        clipped, norm = uc.clip_by_global_norm(empty, 1.0)
        assert (clipped, float(norm)) == (empty, 0.0)
        assert uc.clip_by_value(empty, -1, 1) == empty
        assert uc.clip_by_norm(empty, 1.0) == empty


def wrong_leaves(fw: Framework, uc: Any) -> None:
    """Check that a number in place of an array raises, and so do arrays of two frameworks."""
    stranger = (Strict if fw.family == "NumPy" else Framework)().array([2.0])
    calls = (
        lambda g: uc.clip_by_global_norm(g, 1.0),
        lambda g: uc.clip_by_value(g, -1, 1),
        uc.global_norm,
    )
    for call in calls:
        with pytest.raises(TypeError, match=r"grads\['w'\]\[1\] is a float.*array"):
            call({"w": [fw.array([1.0]), 2.0]})
        with pytest.raises(TypeError, match=r"grads\[1\] is an? .*grads\[0\] is an? "):
            call([fw.array([1.0]), stranger])


def nothing_changes_before_an_error(fw: Framework, uc: Any) -> None:
    """Check that no array is written if the last leaf, or the rule, is invalid.

    The first leaf is above every limit, and errors are short.
    """
    many = np.linspace(0.12345, 1, 3000)
    half = lambda grad: grad * 0.5 if tuple(grad.shape) == (2,) else None
    cases: list[tuple[Any, Any]] = [
        (fw.array(1j * many, "complex64"), uc.by_value(-1.0, 1.0)),
        (fw.array(many), uc.by_value(fw.array([0.0, 0.0]), fw.array([1.0, 1.0]))),
        (fw.array(many), half),
        (fw.array(many), uc.by_global_norm(1.0, nonfinite="raise")),
        (fw.array([1, 2], "int32"), uc.by_global_norm(1.0)),
        (fw.array(5.0), uc.by_norm(1.0, axis=0)),
        (fw.array(many), uc.agc()),
        (fw.array(many), uc.by_norm(fw.array(many))),
        (fw.array(many), [fw.array(many)]),
        ("text", uc.by_norm(1.0)),
    ]
    for last, rule in cases:
        grads = [fw.array([3.0, math.nan]), last]
        with pytest.raises((TypeError, ValueError, FloatingPointError)) as caught:
            uc.clip_(grads, rule)
        assert 10 < len(str(caught.value)) < 600, str(caught.value)[:600]
        np.testing.assert_array_equal(fw.numpy(grads[0]), [3.0, math.nan])


def in_place(fw: Framework, uc: Any) -> None:
    """Check that in-place clipping writes into the arrays themselves, and once for shared memory.

    Unclipped arrays are not written, and read-only ones are refused.
    """
    grads = tree(fw)
    before = leaves(grads)
    if not fw.writes:
        with pytest.raises(TypeError, match=r"grads\['b'\]\[0\].*uc\.clip\("):
            uc.clip_(grads, uc.by_global_norm(1.0))
        close_leaves(fw, grads, [[12.0, 0.0], [[3.0, -4.0]]])
        return
    report = uc.clip_(grads, uc.by_global_norm(6.5))
    assert all(new is old for new, old in zip(leaves(grads), before, strict=True))
    close_leaves(fw, [grads, report.norms], [[6.0, 0.0], [[1.5, -2.0]], 13.0])
    once = fw.array([3.0, 4.0])
    for rule in (uc.by_global_norm(6.5), uc.by_norm(2.5), lambda grad: grad / 2):
        once = fw.array([3.0, 4.0])
        uc.clip_({"a": once, "b": [once, once[:], None], "c": fw.array([np.sqrt(94.0)])}, rule)
        close(fw, once, [1.5, 2.0])
    with pytest.raises(TypeError, match=r"grads\[0\].*integers"):
        uc.clip_([fw.array([3, 4], "int32")], uc.by_norm(1.0))
    below = fw.array([-0.0, 1e-310, 3.0], "float32" if "float64" in fw.missing else "float64")
    bits = fw.numpy(below).tobytes()
    assert not uc.clip_(below, uc.by_norm(6.5)).clipped
    assert fw.numpy(below).tobytes() == bits


def tensors_in_place(fw: Framework, uc: Any) -> None:
    """Check writes into sparse tensors, tensors with a graph, and inference tensors."""
    import torch

    for rule in (uc.by_global_norm(1.0), uc.by_value(-2.0, 2.0)):
        for sparse in (
            fw.sparse((10, 1), [7, 3, 7], [[1.0], [4.0], [2.0]]),
            torch.eye(3).mul(9).to_sparse_csr(),
        ):
            wanted = uc.clip(sparse, rule)[0].to_dense()
            uc.clip_([sparse], rule)
            assert torch.equal(sparse.to_dense(), wanted)
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    [grad] = torch.autograd.grad((x**2).sum(), x, create_graph=True)
    uc.clip_([grad], uc.by_global_norm(1.0))
    close(fw, grad, [0.6, 0.8])
    with torch.inference_mode():
        made = torch.tensor([3.0, 4.0])
        uc.clip_([made], uc.by_norm(2.5))
    other = torch.tensor([3.0, 4.0])
    with pytest.raises(TypeError, match=r"grads\[1\].*inference"):
        uc.clip_([other, made], uc.by_norm(1.0))
    close_leaves(fw, [made, other], [[1.5, 2.0], [3.0, 4.0]])


def slopes(fw: Framework, uc: Any) -> None:
    """Check derivatives above the limit, below it, and at zero, next to a leaf of zeros."""

    def total(x: Any) -> Any:
        clipped = uc.clip_by_global_norm([x, x * 0], 1.0)[0][0]
        return clipped[0] + 2 * clipped[1]

    slope, norm = fw.derivative(total), fw.derivative(uc.global_norm)
    # Above the limit: ([1, 2] - (a + 2b) · [a, b] / n²) / n with n = 5
    for x, wanted in (([3.0, 4.0], [-0.064, 0.048]), ([0.0, 0.0], [1, 2]), ([0.3, 0.4], [1, 2])):
        np.testing.assert_allclose(fw.numpy(slope(fw.array(x))), wanted, rtol=1e-5)
    for x, wanted in (([0.0, 0.0], [0, 0]), ([3e30, 4e30], [0.6, 0.8])):
        np.testing.assert_allclose(fw.numpy(norm(fw.array(x))), wanted, rtol=1e-5)


def strange_arrays(fw: Framework) -> tuple[list[Any], list[Any]]:
    """Return arrays with unusual strides, both random and fixed ones."""
    drawn = np.random.default_rng(0).standard_normal((6, 4)).astype("float32")
    if fw.family == "PyTorch":
        import torch

        whole = torch.from_numpy(drawn)
        last = whole.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
        odd = [whole.t(), last, torch.complex(whole, whole).conj(), torch._neg_view(whole.clone())]
        return odd, [torch.ones(1).expand(3), torch.ones(2, requires_grad=True)]
    frozen = np.ones(2)
    frozen.flags.writeable = False
    overlapping = np.lib.stride_tricks.as_strided(np.ones(4), (3, 2), (8, 8))
    odd = [
        np.asfortranarray(drawn),
        np.transpose(drawn.reshape(2, 3, 4), (2, 0, 1)),
        drawn.astype(">f4"),
    ]
    return odd, [frozen, np.broadcast_to(np.ones(2), (3, 2)), overlapping, np.float64(3)]


def memory(fw: Framework, uc: Any) -> None:
    """Check arrays of any memory layout, also in place.

    Read-only arrays are refused before any array is written.
    """
    settled = lambda array: fw.numpy(
        array.resolve_conj().resolve_neg() if fw.family == "PyTorch" else array
    )
    for rule in (uc.by_global_norm(1.0), uc.by_norm(0.5, axis=-1), uc.by_norm(0.5, axis=0)):
        for array in strange_arrays(fw)[0]:
            wanted = uc.clip(np.array(settled(array), order="C"), rule)[0]
            clipped, _ = uc.clip(array, rule)
            uc.clip_(array, rule)
            for found in (clipped, array):
                np.testing.assert_allclose(settled(found), wanted, rtol=1e-6)
    for array in strange_arrays(fw)[1]:
        first = fw.array([30.0, 40.0])
        with pytest.raises(TypeError, match=r"grads\['b'\]"):
            uc.clip_({"a": first, "b": array}, uc.by_global_norm(1.0))
        assert fw.numpy(first).tolist() == [30.0, 40.0]


def overlaps(fw: Framework, uc: Any) -> None:
    """Check that adjacent views of one array are clipped in place.

    Views that overlap or interleave are refused.
    """
    whole = fw.array(np.zeros((4, 2)))
    upper, lower = whole[:2], whole[2:]
    upper[...], lower[...] = 3.0, 4.0
    report = uc.clip_([lower, upper, lower], uc.by_global_norm(5.0 * 82**0.5))
    close_leaves(fw, [report.norms, whole], [164**0.5, [[3.0, 3.0]] * 2 + [[4.0, 4.0]] * 2])
    report = uc.clip_([lower.T, upper.T], uc.by_global_norm(5.0))
    close_leaves(fw, [report.norms, whole], [10.0, [[1.5, 1.5]] * 2 + [[2.0, 2.0]] * 2])
    x = fw.array(np.arange(10.0))
    views = (
        [x, x[1:]],
        [x[:6], x[4:]],
        [x.reshape(2, 5), x.reshape(5, 2)],
        [x, x[::2]],
        [x.reshape(2, 5), x],
    )
    views += ([x[::2], x[1::2]], [x.reshape(5, 2)[:, 0], x.reshape(5, 2)[:, 1]])
    for some in views:
        with pytest.raises(ValueError, match=r"grads\[0\] and grads\[1\].*uc\.clip"):
            uc.clip_(some, uc.by_global_norm(1.0))
        assert fw.numpy(x).tolist() == list(range(10))


def takes_any_number(fw: Framework, uc: Any) -> None:
    """Check limits of every numeric type."""
    from decimal import Decimal
    from fractions import Fraction

    low, high = np.asarray([[3.0, 4.0], [0.3, 0.4]]), np.asarray([[1.5, 1.5], [0.3, 0.4]])
    grads, shrunk = [fw.array(low)], low * 1.5 / math.sqrt(25.25)
    for value in (
        Fraction(3, 2),
        Decimal("1.5"),
        np.float16(1.5),
        np.float32(1.5),
        np.asarray(1.5),
        fw.array(1.5),
    ):
        bounded, learning = (
            uc.clip_by_value(grads, -value, value),
            uc.Clipper(uc.zclip(value, warmup=2))(grads),
        )
        used = [
            uc.clip_by_global_norm(grads, value)[0],
            uc.clip_by_norm(grads, value),
            bounded,
            learning,
        ]
        close_leaves(fw, used, [shrunk, shrunk, high, low])


def complex_by_value(fw: Framework, uc: Any) -> None:
    """Check that complex numbers, which have no order, are refused where values are clipped."""
    with pytest.raises(TypeError, match="complex"):
        uc.clip_by_value(fw.array([3 + 4j, 0, 12j], "complex64"), -1, 1)
    with pytest.raises(TypeError, match="max"):
        uc.clip_by_value(fw.array([3.0]), -1, 1j)


def eight_bits(fw: Framework, uc: Any) -> None:
    """Check that 8-bit floats are clipped as float32 and rounded once, also in place."""
    import ml_dtypes

    whole = np.asarray([3.0, 4.0, -0.5], "float32")
    for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        for rule in (uc.by_global_norm(2.5), uc.by_norm(2.5, axis=-1), uc.by_value(-2, 2)):
            wanted = uc.clip(whole, rule)[0].astype(dtype)
            grad = whole.astype(dtype)
            clipped, _ = uc.clip(grad, rule)
            uc.clip_(grad, rule)
            for found in (clipped, grad):
                np.testing.assert_array_equal(found, wanted, strict=True)
