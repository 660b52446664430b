"""Guarantees about values.

Each program computes arrays, and runs eagerly or in one traced program with the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from kit.frameworks import Framework
from kit.promise import Program, Repeated, is_sparse
from kit.trees import EPS, close, leaves, mapped

Grads = dict[str, Any]


def p_norm(arrays: Sequence[Any], p: float = 2) -> float:
    """Return (Σ|x|ᵖ)^(1/p) of all elements in float64, without overflow."""
    sizes = np.concatenate([np.abs(np.asarray(array, complex)).ravel() for array in arrays])
    top = max(sizes, default=0.0)
    return top if top == 0 or math.isinf(p) else top * math.fsum((sizes / top) ** p) ** (1 / p)


def by_hand(arrays: Sequence[Any], limit: float, p: float = 2) -> list[np.ndarray]:
    """Return arrays clipped to a limit by their joint norm, in float64."""
    norm = p_norm(arrays, p)
    factor = 1.0 if norm <= limit else limit / norm
    return [np.asarray(array).astype(complex) * factor for array in arrays]


def along(axis: int) -> Callable[[list[Any], float], list[np.ndarray]]:
    """Return a function that clips each slice along an axis by its own norm, in float64."""

    def clipped(array: np.ndarray, limit: float) -> np.ndarray:
        turned = np.moveaxis(array, axis, -1)
        slices = [by_hand([one], limit)[0] for one in turned.reshape(-1, turned.shape[-1])]
        return np.moveaxis(np.reshape(slices, turned.shape), -1, axis)

    return lambda arrays, limit: [clipped(array, limit) for array in arrays]


def per_array(p: float = 2, power: float = 0.0) -> Callable[[list[Any], float], list[np.ndarray]]:
    """Return a function that clips each array by its own norm, in float64.

    Limits grow with a power of the size.
    """
    return lambda arrays, limit: [
        by_hand([array], limit * array.size**power, p)[0] for array in arrays
    ]


RULES: dict[
    str, tuple[Callable[[Any, Any], Any], Callable[[list[Any], float], list[np.ndarray]]]
] = {
    "global": (lambda uc, limit: uc.by_global_norm(limit), by_hand),
    "leaf": (lambda uc, limit: uc.by_norm(limit), per_array()),
    "rows": (lambda uc, limit: uc.by_norm(limit, axis=-1), along(-1)),
    "columns": (lambda uc, limit: uc.by_norm(limit, axis=0), along(0)),
    "L1": (lambda uc, limit: uc.by_global_norm(limit, ord=1), partial(by_hand, p=1)),
    "L3": (lambda uc, limit: uc.by_norm(limit, ord=3), per_array(3)),
    "Linf": (
        lambda uc, limit: uc.by_global_norm(limit, ord=math.inf),
        partial(by_hand, p=math.inf),
    ),
    "average": (lambda uc, limit: uc.by_average_norm(limit), per_array(power=1.0)),
    "rms": (lambda uc, limit: uc.by_block_rms(limit), per_array(power=0.5)),
}
"""Rules of each scope and norm, with their reference in float64."""


def norm_rules(uc: Any) -> dict[str, Callable[[Any], Any]]:
    """Return functions that make each rule from a limit."""
    return {name: partial(rule, uc) for name, (rule, _) in RULES.items()}


def floats(fw: Framework) -> list[str]:
    """Return the floating-point dtypes of a framework, complex ones included."""
    return [name for name in fw.dtypes if not name.startswith("int")]


def wide(dtype: str) -> str:
    """Return the dtype of a norm of gradients of a dtype."""
    return "float64" if dtype in {"float64", "complex128"} else "float32"


def tree(fw: Framework, dtype: str = "float32", by: float = 1.0) -> Grads:
    """Return a small tree of gradients of global norm 13·by."""
    return {
        "w": fw.array([[3.0 * by, -4.0 * by]], dtype),
        "b": [fw.array([12.0 * by, 0.0], dtype), None],
    }


def numbers(fw: Framework, grads: Any) -> list[np.ndarray]:
    """Return the leaves as NumPy arrays."""
    return [fw.dense(leaf) if is_sparse(leaf) else fw.numpy(leaf) for leaf in leaves(grads)]


def close_leaves(
    fw: Framework, found: Any, wanted: list[Any], dtype: str = "float32", ulps: float = 4
) -> None:
    """Require the leaves to equal NumPy's to a few units in the last place of a dtype."""
    for new, array in zip(leaves(found), wanted, strict=True):
        close(fw, new, array, dtype, ulps)


def same_bits(fw: Framework, found: Any, wanted: Any) -> None:
    """Require two trees to have the same dtypes, shapes and values; NaN equals NaN."""
    for new, array in zip(numbers(fw, found), numbers(fw, wanted), strict=True):
        np.testing.assert_array_equal(new, array, strict=True)


def accurate_to(fw: Framework, bound: float, norm: Any, true: float) -> None:
    """Require a relative error of ``bound`` at most."""
    off = abs(float(fw.numpy(norm)) / true - 1)
    assert off <= bound, f"the relative error of the norm is {off:.2e}, allowed are {bound:.1e}"


class Below(Program):
    """At or below the limit, gradients of every dtype come back bit for bit."""

    def arrays(self, fw: Framework) -> Any:
        return {dtype: tree(fw, dtype) for dtype in floats(fw)}

    def run(self, uc: Any, inputs: Any) -> Any:
        def unclipped(dtype: str, grads: Any) -> Any:
            rules = norm_rules(uc)
            some = rules.values() if dtype == "float32" else [rules["rows"]]
            results = [uc.clip(grads, rule(100.0)) for rule in some] + [
                uc.clip(grads, uc.by_global_norm(13.0))
            ]
            return [[clipped, report.clipped] for clipped, report in results]

        return {dtype: unclipped(dtype, grads) for dtype, grads in inputs.items()}

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        for dtype, grads in inputs.items():
            for clipped, changed in found[dtype]:
                same_bits(fw, clipped, grads)
                assert not fw.numpy(changed)
                pairs = zip(leaves(grads), leaves(clipped), strict=True)
                assert all(new is old for old, new in pairs) or not fw.same_objects


class Above(Program):
    """Above the limit, gradients keep their direction, and the scope decides which share a norm."""

    limit = 0.5

    def arrays(self, fw: Framework) -> Any:
        drawn = 2 * np.random.default_rng(0).standard_normal((3, 2))
        return {
            dtype: {"drawn": fw.array(drawn, dtype), **tree(fw, dtype, by=0.1)}
            for dtype in floats(fw)
        }

    def run(self, uc: Any, inputs: Any) -> Any:
        def clipped(dtype: str, grads: Any) -> Any:
            rules = norm_rules(uc)
            names = list(rules) if dtype == "float32" else ["global", "rows"]
            return {name: uc.clip(grads, rules[name](self.limit))[0] for name in names}

        found = {dtype: clipped(dtype, grads) for dtype, grads in inputs.items()}
        return [
            found,
            {
                dtype: uc.clip_by_global_norm(grads, self.limit)[1]
                for dtype, grads in inputs.items()
            },
        ]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        clipped, norms = found
        for dtype, grads in inputs.items():
            arrays = numbers(fw, grads)
            close(fw, norms[dtype], p_norm(arrays), wide(dtype))
            for name, result in clipped[dtype].items():
                close_leaves(fw, result, RULES[name][1](arrays, self.limit), dtype)


class ToTheLimit(Program):
    """The norm of clipped gradients is the limit to a few ulp, for any values."""

    def arrays(self, fw: Framework) -> Any:
        return fw.array(100 * np.random.default_rng(1).standard_normal((200, 7)))

    def run(self, uc: Any, inputs: Any) -> Any:
        return uc.clip_by_norm(inputs, 1.0, axis=1)

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        norms = np.linalg.norm(fw.numpy(found).astype("float64"), axis=1)
        np.testing.assert_allclose(norms, 1.0, rtol=4 * 2**-23)


class Keeps(Program):
    """Each leaf keeps its dtype and shape, also next to others; the norm is float32 or wider."""

    def arrays(self, fw: Framework) -> Any:
        return [{dtype: tree(fw, dtype) for dtype in floats(fw)}, fw.array(1.0)]

    def run(self, uc: Any, inputs: Any) -> Any:
        trees, limit = inputs
        alone = {
            dtype: list(uc.clip_by_global_norm(grads, limit)) for dtype, grads in trees.items()
        }
        mixed = [
            uc.clip_by_norm(trees, 1.0),
            uc.clip_by_global_norm(trees, 1.0)[0],
            uc.clip_by_norm(trees, 100.0),
        ]
        return [alone, mixed]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        alone, mixed = found
        for dtype, grads in inputs[0].items():
            assert fw.dtype(alone[dtype][1]) == wide(dtype)
            for clipped in (alone[dtype][0], *(result[dtype] for result in mixed)):
                assert sorted(clipped) == sorted(grads)
                assert clipped["b"][1] is None
                for old, new in zip(leaves(grads), leaves(clipped), strict=True):
                    assert fw.owns(new)
                    assert (fw.dtype(new), tuple(new.shape)) == (dtype, tuple(old.shape))


class Reported(Program):
    """The report contains the norms before clipping, the limits, factors and clipped shares."""

    def arrays(self, fw: Framework) -> Any:
        return tree(fw)

    def run(self, uc: Any, inputs: Any) -> Any:
        fields = lambda report: [
            report.norms,
            report.limits,
            report.factors,
            report.clipped,
            report.finite,
        ]
        reports = [uc.clip(inputs, rule)[1] for rule in (uc.by_global_norm(6.5), uc.by_norm(6.0))]
        return [[fields(report), report.scalars()] for report in reports]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        (joint, scalars), (each, of_leaves) = found
        close_leaves(fw, joint, [13.0, 6.5, 0.5, 1, 1])
        close_leaves(fw, each, [12.0, 5.0, 6.0, 6.0, 0.5, 1.0, 1, 1])
        names = ("clip/norm", "clip/limit", "clip/factor", "clip/share")
        close_leaves(fw, [scalars[name] for name in names], [13.0, 6.5, 0.5, 1.0])
        close_leaves(fw, [of_leaves[name] for name in names], [12.0, 6.0, 0.5, 0.5])


class Accurate(Program):
    """Norms of millions of elements are accurate, in one leaf or many, in each precision."""

    large = True
    size = 25_000_000

    def arrays(self, fw: Framework) -> Any:
        drawn = np.random.default_rng(0).standard_normal(self.size, dtype="float32")
        half = [dtype for dtype in ("float16", "bfloat16") if dtype in fw.dtypes]
        pieces = [fw.array(piece) for piece in np.split(drawn[:1_000_000], 50)]
        return {"one": [fw.array(drawn)], "many": pieces} | {
            d: [fw.array(drawn[:1_000_000], d)] for d in half
        }

    def run(self, uc: Any, inputs: Any) -> Any:
        return {name: uc.global_norm(grads) for name, grads in inputs.items()}

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        for name, grads in inputs.items():
            true = math.sqrt(sum(np.sum(fw.numpy(leaf).astype("float64") ** 2) for leaf in grads))
            accurate_to(fw, 2e-6 if "float" in name else 5e-7, found[name], true)


class EqualEntries(Repeated):
    """The norm of equal elements is accurate, although their rounding errors have one sign."""

    large = True
    entries = (0.1, 0.7)
    size = 3_000_000

    def arrays(self, fw: Framework) -> Any:
        return [fw.array(np.full(self.size, value)) for value in self.entries]

    def run_one(self, uc: Any, one: Any) -> Any:
        return [uc.global_norm(one, ord=p) for p in (1, 2, 3)]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        for norms, value in zip(found, np.asarray(self.entries, "float32"), strict=True):
            for p, norm in zip((1, 2, 3), norms, strict=True):
                in_a_graph = p == 2 and fw.name in {"tf.function", "tensorflow-graph"}
                accurate_to(
                    fw, 1.5e-6 if in_a_graph else 5e-7, norm, self.size ** (1 / p) * float(value)
                )


class AlongAxes(Program):
    """The norms of long columns and long rows are accurate.

    The number of elements is prime, and those of the second row are equal.
    """

    large = True

    def arrays(self, fw: Framework) -> Any:
        columns, rows = (
            np.random.default_rng(0).standard_normal(shape, dtype="float32")
            for shape in [(2_000_000, 2), (2, 2_000_003)]
        )
        rows[1] = 0.1
        return [fw.array(columns), fw.array(rows)]

    def run(self, uc: Any, inputs: Any) -> Any:
        return [
            uc.clip(leaf, uc.by_norm(1.0, axis=axis))[1].norms for axis, leaf in enumerate(inputs)
        ]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        for axis, (leaf, norms) in enumerate(zip(inputs, found, strict=True)):
            true = np.linalg.norm(fw.numpy(leaf).astype("float64"), axis=axis)
            np.testing.assert_allclose(fw.numpy(norms), true, rtol=5e-7)


class Split(Program):
    """One array and its split into many leaves have the same norm, in any order and any run."""

    def arrays(self, fw: Framework) -> Any:
        drawn = np.random.default_rng(0).standard_normal(1200, dtype="float32")
        some = [dtype for dtype in ("bfloat16", "float32", "float64") if dtype in fw.dtypes]
        split = lambda dtype, number: [fw.array(piece, dtype) for piece in np.split(drawn, number)]
        return {
            dtype: {"1": split(dtype, 1), "3": split(dtype, 3), "40": split(dtype, 40)}
            for dtype in some
        }

    def run(self, uc: Any, inputs: Any) -> Any:
        def norms(splits: Any) -> Any:
            orders = [
                splits["1"],
                splits["3"],
                splits["40"],
                splits["40"][::-1],
                splits["40"][7:] + splits["40"][:7],
            ]
            return [*(uc.global_norm(grads) for grads in orders), uc.global_norm(splits["40"])]

        return {dtype: norms(splits) for dtype, splits in inputs.items()}

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        for dtype, norms in found.items():
            true = p_norm(numbers(fw, inputs[dtype]["1"]))
            for norm in norms:
                accurate_to(fw, 1e-15 if dtype == "float64" else 5e-7, norm, true)
            same_bits(fw, norms[2], norms[-1])


class InRange(Program):
    """Norms whose squares overflow or underflow are right."""

    cases: ClassVar[dict[str, tuple[str, list[float]]]] = {
        "1e30": ("float32", [1e30, -1.0, 2e30]),
        "1e-30": ("float32", [1e-30, 2e-30, 0.0]),
        "2e38": ("float32", [2e38, 1.0, 1.0]),
        "1e200": ("float64", [1e200, 3e200, 1.0]),
        "1e-200": ("float64", [1e-200, 3e-200, 0.0]),
        "300": ("float16", [300.0, -400.0, 1.0]),
        "1e-4": ("float16", [1e-4, 1e-5, 0.0]),
    }

    def orders(self, name: str) -> tuple[float, ...]:
        """Return the orders of the norms that a case is measured with."""
        return (2, 1.5, 3, 10, math.inf) if name in {"1e30", "1e-30"} else (2,)

    def arrays(self, fw: Framework) -> Any:
        def case(name: str, dtype: str, values: list[float]) -> Any:
            grads = [fw.array(values, dtype), fw.array(values[:1], dtype)]
            limits = [p_norm(numbers(fw, grads), order) / 4 for order in self.orders(name)]
            return [grads, [fw.array(limit, wide(dtype)) for limit in limits]]

        return {name: case(name, *one) for name, one in self.cases.items() if one[0] in fw.dtypes}

    def run(self, uc: Any, inputs: Any) -> Any:
        def clipped(name: str, grads: Any, limits: Any) -> Any:
            both = zip(self.orders(name), limits, strict=True)
            return [list(uc.clip_by_global_norm(grads, limit, ord=order)) for order, limit in both]

        return {name: clipped(name, *case) for name, case in inputs.items()}

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        for name, (grads, _) in inputs.items():
            dtype, arrays = self.cases[name][0], numbers(fw, grads)
            # The smallest number of float16 is subnormal.
            tiny = 6e-8 if dtype == "float16" else 0.0
            for p, (clipped, norm) in zip(self.orders(name), found[name], strict=True):
                true = p_norm(arrays, p)
                close(fw, norm, true, wide(dtype), ulps=8)
                for new, array in zip(clipped, by_hand(arrays, true / 4, p), strict=True):
                    np.testing.assert_allclose(
                        fw.numpy(new).astype(float), array.real, rtol=8 * EPS[dtype], atol=tiny
                    )


class FactorsOutOfRange(Program):
    """A factor beyond its dtype is clamped, and zeros stay 0."""

    limits: ClassVar[dict[str, tuple[float, float, float]]] = {
        "float32": (1e-30, 1e30, float(np.finfo(np.float32).max)),
        "float64": (1e-200, 1e200, float(np.finfo(np.float64).max)),
    }

    def arrays(self, fw: Framework) -> Any:
        leaf = lambda size, dtype: [fw.array([0.0, size], dtype)]
        return {
            dtype: [leaf(far / 8, dtype), leaf(near * 8, dtype)]
            for dtype, (near, far, _) in self.limits.items()
            if dtype in fw.dtypes
        }

    def run(self, uc: Any, inputs: Any) -> Any:
        curves, found = uc.curves, {}
        for dtype, (huge, small) in inputs.items():
            near, far, _ = self.limits[dtype]
            down = [
                uc.Rule(near, curve=one)
                for one in (curves.hard, curves.soft, curves.smooth, curves.tanh)
            ]
            up = [uc.to_global_norm(far), uc.Rule(far, curve=curves.Regularized(near))]
            results = [uc.clip(huge, rule) for rule in down], [uc.clip(small, rule) for rule in up]
            found[dtype] = [[[new[0], report.factors] for new, report in some] for some in results]
        return found

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        for dtype, (down, up) in found.items():
            *_, largest = self.limits[dtype]
            assert not any(array.any() for array in numbers(fw, down)), down
            wanted = [0.0, float(fw.numpy(inputs[dtype][1][0])[1]) * largest]
            for new, factor in up:
                assert float(fw.numpy(factor)) == largest, factor
                close(fw, new, wanted, dtype)


class OnlyMeasures(Repeated):
    """An infinite limit changes nothing."""

    def arrays(self, fw: Framework) -> Any:
        infinite = {"w": fw.array([[math.inf, -1.0]]), "b": [fw.array([0.0, 1.0]), None]}
        return [tree(fw), tree(fw, by=1e36), infinite]

    def run_one(self, uc: Any, one: Any) -> Any:
        return list(uc.clip_by_global_norm(one, math.inf))

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        for grads, (clipped, _) in zip(inputs, found, strict=True):
            same_bits(fw, clipped, grads)
        close_leaves(fw, [norm for _, norm in found[:2]], [13.0, 13e36])


class ZeroLimit(Repeated):
    """A limit of 0 makes every element 0, those of zero gradients included."""

    def arrays(self, fw: Framework) -> Any:
        return [tree(fw), tree(fw, by=0.0)]

    def run_one(self, uc: Any, one: Any) -> Any:
        zeroed = [uc.clip(one, rule(0.0))[0] for rule in norm_rules(uc).values()]
        return [zeroed, uc.clip_by_global_norm(one, 1.0)[0]]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        (zeroed, _), of_zeros = found
        assert not any(array.any() for array in numbers(fw, [zeroed, of_zeros])), found


class BadLimit(Repeated):
    """An unreadable negative limit acts as 0, and a NaN limit makes the gradients NaN."""

    def applies(self, fw: Framework) -> bool:
        return not fw.raises

    def arrays(self, fw: Framework) -> Any:
        return [[tree(fw), fw.array(limit)] for limit in (-1.0, -math.inf, math.nan)]

    def run_one(self, uc: Any, one: Any) -> Any:
        grads, limit = one
        rules = uc.by_global_norm, partial(uc.by_norm, curve=uc.curves.soft)
        return [uc.clip(grads, rule(limit))[0] for rule in rules]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        *negative, not_a_number = found
        assert not any(array.any() for array in numbers(fw, negative)), negative
        assert all(np.isnan(array).all() for array in numbers(fw, not_a_number)), not_a_number


class Propagates(Repeated):
    """Gradients that share a norm with NaN or ∞ become NaN; the others are clipped as usual."""

    def arrays(self, fw: Framework) -> Any:
        return [[fw.array([1.0, bad]), fw.array([3.0, 4.0])] for bad in (math.nan, -math.inf)]

    def run_one(self, uc: Any, one: Any) -> Any:
        some = {name: rule for name, rule in norm_rules(uc).items() if name != "columns"}
        results = {name: uc.clip(one, rule(1.0)) for name, rule in some.items()}
        return {name: [new, report.finite] for name, (new, report) in results.items()}

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        for results in found:
            for name, (clipped, finite) in results.items():
                assert np.isnan(fw.numpy(clipped[0])).all()
                assert not fw.numpy(finite)
                if name in {"global", "L1", "Linf"}:
                    assert np.isnan(fw.numpy(clipped[1])).all()
                else:
                    close(fw, clipped[1], RULES[name][1]([np.asarray([3.0, 4.0])], 1.0)[0])


class Skips(Repeated):
    """A non-finite step becomes zeros and is reported as skipped."""

    def arrays(self, fw: Framework) -> Any:
        return [
            [fw.array([1.0, bad]), fw.array([3.0, 4.0])]
            for bad in (math.nan, math.inf, -math.inf, 0.0)
        ]

    def run_one(self, uc: Any, one: Any) -> Any:
        rules = [uc.by_global_norm(math.inf, nonfinite="skip"), uc.by_norm(1.0, nonfinite="skip")]
        results = [uc.clip(one, rule) for rule in rules]
        return [[new, [said.finite, said.clipped, said.skipped]] for new, said in results]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        for results in found[:3]:
            for clipped, flags in results:
                assert not any(array.any() for array in numbers(fw, clipped)), clipped
                assert [bool(flag) for flag in numbers(fw, flags)] == [False, True, True]
        (same, unclipped), (clipped, flags) = found[3]
        close_leaves(fw, [same, clipped], [[1.0, 0.0], [3.0, 4.0], [1.0, 0.0], [0.6, 0.8]])
        assert [bool(flag) for flag in numbers(fw, [unclipped, flags])] == [
            True,
            False,
            False,
            True,
            True,
            False,
        ]


class Zeroes(Repeated):
    """Non-finite elements become zeros, and the others are clipped as if next to zeros."""

    def arrays(self, fw: Framework) -> Any:
        return [
            [fw.array([3.0, bad, 4.0]), fw.array([bad, -12.0])]
            for bad in (math.nan, math.inf, -math.inf, 0.0)
        ]

    def run_one(self, uc: Any, one: Any) -> Any:
        rules = [uc.by_global_norm(6.5, nonfinite="zero"), uc.by_norm(1.0, nonfinite="zero")]
        results = [uc.clip(one, rule) for rule in rules]
        return [[clipped, report.finite] for clipped, report in results]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        for (joint, _), (each, _) in found:
            close_leaves(fw, joint, [[1.5, 0, 2], [0, -6]])
            close_leaves(fw, each, [[0.6, 0, 0.8], [0, -1]])
        *bad, good = [bool(fw.numpy(finite)) for (_, finite), _ in found]
        assert not any(bad)
        assert good


class ZeroesComplex(Program):
    """A complex element with a non-finite part becomes zero, and is reported."""

    def arrays(self, fw: Framework) -> Any:
        return [fw.array([3 + 4j, complex(0, math.nan), complex(math.inf, 1)], "complex64")]

    def run(self, uc: Any, inputs: Any) -> Any:
        clipped, report = uc.clip(inputs, uc.by_norm(1.0, nonfinite="zero"))
        return [clipped, report.finite]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        clipped, finite = found
        close_leaves(fw, clipped, [[0.6 + 0.8j, 0, 0]])
        assert not fw.numpy(finite)


class RemembersNoNaN(Repeated):
    """A non-finite step leaves the state unchanged, and later steps are not affected."""

    def arrays(self, fw: Framework) -> Any:
        steps = lambda bad: [[3.0, 4.0], [3.3, 4.4], [bad, 1.0], [30.0, 40.0]]
        return [[[fw.array(grad)] for grad in steps(bad)] for bad in (math.nan, math.inf)]

    def run_one(self, uc: Any, one: Any) -> Any:
        rules = [uc.norm_growth(1.2, nonfinite=policy) for policy in ("propagate", "skip", "zero")]
        rules += [
            uc.autoclip(50, window=3),
            uc.zclip(warmup=2),
            uc.adagc(warmup=1),
            uc.skip_spikes(window=4, warmup=2),
        ]
        return [self._steps(rule, one) for rule in rules]

    def _steps(self, rule: Any, steps: Any) -> Any:
        state, states = rule.init(steps[0]), []
        for grads in steps[:-1]:
            _, state, report = rule.update(grads, state)
            states.append([leaves(state), report.finite])
        clipped, _, _ = rule.update(steps[-1], state)
        _, (before, finite), (after, not_finite) = states
        return [before, after, [finite, not_finite], clipped]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        for results in found:
            for number, (before, after, (finite, not_finite), clipped) in enumerate(results):
                same_bits(fw, after, before)
                assert fw.numpy(finite)
                assert not fw.numpy(not_finite)
                if number < 3:
                    close_leaves(fw, clipped, [[1.2 * 3.3, 1.2 * 4.4]])


class Learns(Program):
    """Adaptive limits follow their formulas: a median of three, a z-score, a spike of the loss."""

    steps: ClassVar[dict[str, tuple[list[float], list[float]]]] = {
        "median": ([1.0, 5.0, 3.0, 9.0, 2.0], [1.0, 3.0, 3.0, 5.0, 2.0]),
        # After the warmup: mean 1.5 and deviation 0.5; a norm of 100 becomes mean + (2 · 0.5)² /
        # 98.5.
        "zscore": (
            [1.0, 2.0, 1.0, 2.0, 100.0, 2.0],
            [1.0, 2.0, 1.0, 2.0, 1.5 + (0.5 + 1e-6) / 49.25, 2.0],
        ),
        "loss": ([1.0] * 4, [1.0, 1.0, 1.0, 0.0]),
    }
    """Norms, and the norms after clipping."""
    losses = (1.0, 1.1, 0.9, 50.0)

    def arrays(self, fw: Framework) -> Any:
        steps = {
            name: [fw.array([norm]) for norm in norms] for name, (norms, _) in self.steps.items()
        }
        return [steps, [fw.array(loss) for loss in self.losses]]

    def run(self, uc: Any, inputs: Any) -> Any:
        rules = {
            "median": uc.autoclip(50, window=3),
            "zscore": uc.zclip(2.0, decay=0.5, warmup=4),
            "loss": uc.skip_spikes(z=3.0, window=4, warmup=2),
        }
        found: dict[str, list[Any]] = {name: [] for name in rules}
        for name, rule in rules.items():
            state, steps = rule.init(inputs[0][name][0]), inputs[0][name]
            for grads, loss in zip(
                steps, inputs[1] if name == "loss" else [None] * len(steps), strict=True
            ):
                clipped, state, report = rule.update(grads, state, loss=loss)
                found[name].append([clipped, report.thresholds, report.skipped])
        return found

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        for name, (_, wanted) in self.steps.items():
            close_leaves(
                fw, [clipped for clipped, *_ in found[name]], [[norm] for norm in wanted], ulps=16
            )
        assert [bool(fw.numpy(skipped)) for *_, skipped in found["loss"]] == [
            False,
            False,
            False,
            True,
        ]
        change = (0.5 + 1e-6) / 49.25
        mean, variance = 1.5 + 0.5 * change, 0.5 * (0.25 + 0.5 * change**2 * 0.5)
        thresholds = [threshold for _, threshold, _ in found["zscore"]]
        close(fw, thresholds[4], 1.5 + 2 * (0.5 + 1e-6), ulps=16)
        close(fw, thresholds[5], mean + 2 * (math.sqrt(variance) + 1e-6), ulps=64)


class Parts(Program):
    """Two processes with equal shards, joined by ``all_reduce``, find the norm of both."""

    def arrays(self, fw: Framework) -> Any:
        return tree(fw)

    def run(self, uc: Any, inputs: Any) -> Any:
        joined = lambda own, op: own + own if op == "sum" else own
        clipped, report = uc.clip(inputs, uc.by_global_norm(1.0), all_reduce=joined)
        return [report.norms, clipped]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        norm, clipped = found
        b, w = numbers(fw, inputs)
        close(fw, norm, 13 * math.sqrt(2))
        close_leaves(fw, clipped, [b / (13 * math.sqrt(2)), w / (13 * math.sqrt(2))])


class Sparse(Program):
    """Duplicate sparse rows are summed, and stay summed if clipped, also among dense leaves."""

    def arrays(self, fw: Framework) -> Any:
        weights = np.arange(2000.0).reshape(1000, 2) / 100
        return fw.array(weights), {
            "mixed": [
                fw.sparse((1000, 2), [7, 3, 7], [[1.0, 2.0], [0.0, 4.0], [2.0, 2.0]]),
                fw.array([12.0, 0.0]),
            ],
            "cancels": [
                fw.sparse((9, 1), [2, 2, 5], [[3.0], [-3.0], [8.0]]),
                fw.array([[3.0, 4.0]]),
            ],
            "double": [fw.sparse((4, 1), [1, 1], [[3.0], [3.0]])],
            "zeros": [fw.sparse((4, 1), [1, 3], [[0.0], [0.0]]), fw.array([3.0])],
        }

    def run(self, uc: Any, inputs: Any) -> Any:
        weights, trees = inputs
        by_value = {name: uc.clip_by_value(grads, -1, 1) for name, grads in trees.items()}
        joint = {name: list(uc.clip_by_global_norm(grads, 1.0)) for name, grads in trees.items()}
        below, apart = (
            uc.clip_by_global_norm(trees["mixed"], 100.0)[0],
            uc.clip_by_norm(trees["mixed"], 2.0),
        )
        rows = [
            uc.clip(trees["mixed"][0], uc.Rule(2.0, scope=scope))[0] for scope in self.scopes(uc)
        ]
        relative = uc.Rule(uc.limits.Relative(2.0), scope=uc.scopes.each_row)
        return [
            by_value,
            joint,
            below,
            apart,
            [*rows, uc.clip(trees["mixed"][0], relative, weights)[0]],
        ]

    def scopes(self, uc: Any) -> list[Any]:
        return [uc.scopes.each_row, uc.scopes.axes(1), uc.scopes.each_entry]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        (weights, trees), (by_value, joint, below, apart, rows) = inputs, found
        sums = numbers(fw, trees["mixed"])[0]  # [0, 4] in row 3, [3, 4] in row 7
        norms = np.linalg.norm(sums, axis=1, keepdims=True)
        sizes = np.linalg.norm(np.asarray(fw.numpy(weights), np.float64), axis=1, keepdims=True)
        limits = [2.0, 2.0, np.full(sums.shape, 2.0), 2 * sizes]
        for leaf, limit in zip(rows, limits, strict=True):
            size = abs(sums) if np.shape(limit) == sums.shape else norms
            np.testing.assert_allclose(
                numbers(fw, leaf)[0], sums * np.minimum(1, limit / np.maximum(size, 1)), rtol=1e-6
            )
        assert not fw.same_objects or below[0] is trees["mixed"][0]
        for name, grads in trees.items():
            arrays, (clipped, norm) = numbers(fw, grads), joint[name]
            assert [is_sparse(leaf) for leaf in clipped] == [is_sparse(leaf) for leaf in grads]
            close(fw, norm, p_norm(arrays))
            self._close(fw, clipped, by_hand(arrays, 1.0))
            self._close(fw, by_value[name], [np.clip(array, -1, 1) for array in arrays])
        mixed = numbers(fw, trees["mixed"])
        self._close(fw, below, mixed)
        self._close(fw, apart, per_array()(mixed, 2.0))

    def _close(self, fw: Framework, found: Any, wanted: list[Any]) -> None:
        for new, array in zip(numbers(fw, found), wanted, strict=True):
            np.testing.assert_allclose(new, array.real, rtol=1e-6)


class Integers(Program):
    """Clipping by value keeps integers; clipping by norm turns them into floats."""

    entries = (1, 1, 3, 4, 2, 2, 1, 4, 2, 3)

    def arrays(self, fw: Framework) -> Any:
        return {
            dtype: fw.array(self.entries, dtype)
            for dtype in ("int32", "int64")
            if dtype in fw.dtypes
        }

    def run(self, uc: Any, inputs: Any) -> Any:
        bounds = ((2, 3.0), (-math.inf, 2), (-(2**40), 2**40))
        by_norm = {
            dtype: [uc.clip_by_norm(leaf, limit) for limit in (5, 50)]
            for dtype, leaf in inputs.items()
        }
        return [
            by_norm,
            {
                dtype: [uc.clip_by_value(leaf, *pair) for pair in bounds]
                for dtype, leaf in inputs.items()
            },
        ]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        entries = np.asarray(self.entries)
        for dtype in inputs:
            clipped, same = found[0][dtype]
            assert fw.dtype(clipped) == fw.dtype(same) == fw.default_float
            close_leaves(
                fw, [clipped, same], [5 / math.sqrt(65) * entries, entries], fw.default_float
            )
            bounds = (np.clip(entries, 2, 3), np.minimum(entries, 2), entries)
            for bounded, array in zip(found[1][dtype], bounds, strict=True):
                assert fw.dtype(bounded) == dtype
                np.testing.assert_array_equal(fw.numpy(bounded), array)


class Complex(Program):
    """The norm of complex numbers is that of their moduli."""

    def arrays(self, fw: Framework) -> Any:
        return fw.array([3 + 4j, 0, 12j], "complex64")

    def run(self, uc: Any, inputs: Any) -> Any:
        return [*uc.clip_by_global_norm(inputs, 6.5), uc.clip_by_norm(inputs, 6, ord=math.inf)]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        close_leaves(fw, found, [[1.5 + 2j, 0, 6j], 13.0, [1.5 + 2j, 0, 6j]])


class Twice(Program):
    """An array in two places of the tree counts twice."""

    def arrays(self, fw: Framework) -> Any:
        return fw.array([3.0, 4.0])

    def run(self, uc: Any, inputs: Any) -> Any:
        return list(uc.clip_by_global_norm({"a": inputs, "b": [inputs]}, 1.0))

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        wanted = np.asarray([3.0, 4.0]) / math.sqrt(50)
        close_leaves(fw, found, [wanted, wanted, math.sqrt(50)])


class Empty(Program):
    """Leaves without elements contribute nothing; scalars do."""

    def arrays(self, fw: Framework) -> Any:
        return [fw.array(np.zeros((2, 0))), [fw.array(np.zeros((0, 3))), fw.array(4.0), None]]

    def run(self, uc: Any, inputs: Any) -> Any:
        empty, mixed = inputs
        results = [uc.clip(empty, rule(1.0)) for rule in norm_rules(uc).values()]
        alone = [[clipped, report.finite, report.clipped] for clipped, report in results]
        return [
            alone,
            [list(uc.clip_by_global_norm(mixed, 2.0, ord=p)) for p in (1, 2, 3, math.inf)],
        ]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        alone, together = found
        for clipped, finite, changed in alone:
            assert tuple(clipped.shape) == (2, 0)
            assert fw.numpy(finite)
            assert not fw.numpy(changed)
        for (empty, one, none), norm in together:
            assert tuple(empty.shape) == (0, 3)
            assert none is None
            close_leaves(fw, [one, norm], [2.0, 4.0])


class Shapes(Program):
    """Gradients with other shapes in the same tree are measured by their own sizes."""

    def arrays(self, fw: Framework) -> Any:
        return [{"w": fw.array(np.ones(size))} for size in (2, 3, 5, 3)]

    def run(self, uc: Any, inputs: Any) -> Any:
        rules = (uc.by_average_norm(0.1), uc.by_block_rms(0.1))
        return [[uc.clip(grads, rule)[1].norms for rule in rules] for grads in inputs]

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        for grads, norms in zip(inputs, found, strict=True):
            size = grads["w"].shape[0]
            close_leaves(fw, norms, [math.sqrt(size) / size, 1.0])


class InPlace(Program):
    """In-place clipping writes the same bits that `uc.clip` returns."""

    def applies(self, fw: Framework) -> bool:
        return fw.writes

    def arrays(self, fw: Framework) -> Any:
        return [{dtype: tree(fw, dtype) for dtype in floats(fw)}, fw.array([3, 4], "int32")]

    def run(self, uc: Any, inputs: Any) -> Any:
        trees, whole = inputs
        rules = [norm_rules(uc)[name](1.0) for name in ("leaf", "rows", "Linf", "rms")]
        rules += [
            uc.by_global_norm(100.0),
            uc.by_norm(1.0, nonfinite="zero"),
            uc.by_value(-2.0, 2.0),
            abs,
        ]
        some = [(trees["float32"], rule) for rule in rules]
        some += [(grads, uc.by_global_norm(6.5)) for grads in trees.values()] + [
            (whole, uc.by_value(-1, 3))
        ]
        return [[uc.clip(grads, rule)[0], self._written(uc, grads, rule)] for grads, rule in some]

    def _written(self, uc: Any, grads: Any, rule: Any) -> Any:
        copies = mapped(lambda leaf: leaf * 1, grads)
        uc.clip_(copies, rule)
        return copies

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        for wanted, written in found:
            same_bits(fw, written, wanted)
