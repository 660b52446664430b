"""Compare the results of one step with the oracle's."""
# ruff: noqa: EM101, TRY003, N818 - a mismatch is caught and counted; reports have many parts

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kit.frameworks import Framework
from kit.oracle import LONG, Leaf, Machine, Outcome, Plan, Precision, Span
from kit.trees import walk

SUBNORMAL = 1.2e-38
"""Float32 numbers below this may be flushed to 0."""


class Mismatch(AssertionError):
    """A result that the oracle does not allow."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class View(NamedTuple):
    """The values that a report contains for one rule, as lists of NumPy arrays.

    ``None`` for a rule that measures nothing.
    """

    norms: list[np.ndarray] | None
    limits: list[np.ndarray] | None
    factors: list[np.ndarray] | None
    thresholds: list[np.ndarray] | None


def views_of(plan: Plan, report: Any, fw: Framework) -> list[View]:
    """Return the values in a report; for a chain, those of each of its rules."""
    fields = [report.norms, report.limits, report.factors, report.thresholds]
    if plan.kind != "chain":
        return [View(*(None if one is None else list(arrays_of(one, fw)) for one in fields))]
    count = len(plan.parts)
    rows = zip(*[[None] * count if one is None else one for one in fields], strict=True)
    return [
        View(*(None if one is None else list(arrays_of(one, fw)) for one in row)) for row in rows
    ]


def reported_of(plan: Plan, report: Any, fw: Framework) -> Any:
    """Return the limits and factors of a report as lists of arrays, for each rule of a chain."""
    pairs = [
        None if view.limits is None else [view.limits, view.factors]
        for view in views_of(plan, report, fw)
    ]
    return pairs if plan.kind == "chain" else pairs[0]


def numpy_of(array: Any, fw: Framework) -> np.ndarray:
    """Return the values of an array; the arrays of a step without gradients are NumPy's."""
    return np.asarray(array if isinstance(array, (np.ndarray, np.generic)) else fw.numpy(array))


def arrays_of(values: Any, fw: Framework) -> Iterator[np.ndarray]:
    """Yield the values of a report's field in the order of the oracle's groups."""
    if isinstance(values, dict):
        values = {repr(key): value for key, value in values.items()}
    for _, array in walk(values):
        yield numpy_of(array, fw)


def same_tree(old: Any, new: Any) -> None:
    """Require the same containers, keys in their order, and ``None`` in the same places."""
    if isinstance(old, (dict, list, tuple)):
        if (
            type(old) is not type(new)
            or len(old) != len(new)
            or (isinstance(old, dict) and list(old) != list(new))
        ):
            raise Mismatch("tree", f"{old} became {new}")
        for one, other in zip(
            *([x.values() if isinstance(x, dict) else x for x in (old, new)]), strict=True
        ):
            same_tree(one, other)
    elif (old is None) is not (new is None):
        raise Mismatch("tree", f"{old} became {new}")


def check_leaves(
    wanted: list[Leaf], inputs: list[np.ndarray], new: list[Any], fw: Framework, machine: Machine
) -> None:
    """Require the dtype, shape and values, and unchanged bits where nothing was clipped."""
    if len(wanted) != len(new):
        raise Mismatch("tree", f"{len(wanted)} leaves became {len(new)}")
    for leaf, old, array in zip(wanted, inputs, new, strict=True):
        dtype = str(array.dtype) if isinstance(array, np.ndarray) else fw.dtype(array)
        if dtype != (leaf.integer or leaf.dtype):
            raise Mismatch("dtype", f"{leaf.path}: {dtype} instead of {leaf.integer or leaf.dtype}")
        values = numpy_of(array, fw)
        if values.shape != leaf.shape:
            raise Mismatch("shape", f"{leaf.path}: {leaf.shape} became {values.shape}")
        same = np.broadcast_to(leaf.same, leaf.shape)
        if same.any():
            _check_bits(leaf, old, values, same, machine)
        if not same.all():
            _check_values(leaf, values, same)


def _check_bits(
    leaf: Leaf, old: np.ndarray, new: np.ndarray, same: np.ndarray, machine: Machine
) -> None:
    pairs = ((old.real, new.real), (old.imag, new.imag)) if np.iscomplexobj(old) else ((old, new),)
    for pair in pairs:
        one, other = (x.astype(np.float64) for x in pair)
        equal = (one == other) & (np.signbit(one) == np.signbit(other)) | (
            np.isnan(one) & np.isnan(other)
        )
        if machine.flush:
            tiny = leaf.parts.precision.tiny
            equal |= (np.abs(one) < tiny) & (np.abs(other) < tiny)
        if not equal[same].all():
            raise Mismatch(
                "bits", f"{leaf.path}: {one[~equal & same][0]!r} became {other[~equal & same][0]!r}"
            )


def _check_values(leaf: Leaf, new: np.ndarray, same: np.ndarray) -> None:
    wide = np.asarray(new, np.clongdouble if np.iscomplexobj(new) else LONG)
    parts = np.stack([wide.real, wide.imag], axis=-1) if np.iscomplexobj(wide) else wide[..., None]
    nan = np.isnan(parts).any(axis=-1)
    kept = (
        np.isinf(parts[..., 0]) & (np.sign(parts[..., 0]) == leaf.signs)
        if parts.shape[-1] == 1
        else np.bool_(False)
    )
    if (missing := leaf.bad & ~same & ~nan & ~kept).any():
        raise Mismatch("NaN is missing", f"{leaf.path}: {np.asarray(new)[missing][0]!r}")
    if (wrong := nan & ~leaf.bad).any():
        raise Mismatch("NaN", f"{leaf.path}: NaN instead of {leaf.parts[wrong]}")
    largest, lo, hi = leaf.parts.precision.largest, leaf.parts.lo, leaf.parts.hi
    lo = np.where(lo > largest, largest, np.where(lo < -largest, -np.inf, lo))
    hi = np.where(hi < -largest, -largest, np.where(hi > largest, np.inf, hi))
    wrong = ~((parts >= lo) & (parts <= hi)).all(axis=-1) & ~leaf.bad & ~same
    if wrong.any():
        span = Span(lo, hi, leaf.parts.precision)[wrong][0]
        raise Mismatch("value", f"{leaf.path}: {np.asarray(new)[wrong][0]!r}, not in {span}")


FIELDS = ("norms", "limits", "factors", "clipped", "finite", "skipped", "thresholds")


def check_report(out: Outcome, plan: Plan, report: Any, fw: Framework) -> None:
    """Require a report that agrees with the oracle."""
    _check_flags(out, report, fw)
    if not out.measured:
        if report.scalars() or str(report) != "no norm measured":
            raise Mismatch("report", f"{report} of a rule that measures no norm")
        return
    views = views_of(plan, report, fw)
    for view, part in zip(views, out.parts or [out], strict=True):
        if part.measured:
            _check_view(view, part)
        elif view.norms is not None:
            raise Mismatch("report", f"norms of a rule that measures none: {view.norms}")
    labels = set(report.norms) if out.labels is not None else None
    if labels is not None and labels != set(out.labels):
        raise Mismatch("labels", f"{labels} instead of {set(out.labels)}")
    _check_scalars(views, report, fw)
    _check_text(views, out, report)


def _check_view(view: View, out: Outcome) -> None:
    thresholds = out.thresholds
    # The threshold of an absent group may be present or not.
    if out.labels is not None and view.thresholds is not None:
        thresholds = thresholds or out.limits
    if (thresholds is None) is not (view.thresholds is None):
        raise Mismatch("threshold", f"{view.thresholds} instead of {thresholds}")
    wanted = {
        "norm": out.norms,
        "limit": out.limits,
        "factor": out.factors,
        "threshold": thresholds,
    }
    for (name, spans), found in zip(wanted.items(), view, strict=True):
        if len(found or []) != len(spans or []):
            raise Mismatch("report", f"{len(found)} values for {name}, {len(spans)} groups")
        for n, (array, span) in enumerate(zip(found or [], spans or [], strict=True)):
            _check_number(name, array, span, out, n)


def _dtype(unit: Precision) -> Any:
    return np.dtype(np.float64 if unit.ulp < 2**-30 else np.float32)


def _check_number(name: str, array: np.ndarray, span: Span, out: Outcome, number: int) -> None:
    n, bad = out.norms[number], out.broken[number]
    dtypes = (
        {_dtype(n.precision), _dtype(out.widest)}
        if name == "norm"
        else {_dtype(n.precision), np.dtype(float)}
    )
    if array.dtype not in dtypes or (name == "norm" and array.shape != n.shape):
        raise Mismatch(
            "report", f"{name} of {array.dtype} {array.shape} for {_dtype(n.precision)} {n.shape}"
        )
    values = np.broadcast_to(array, n.shape).astype(LONG) if name != "norm" else array.astype(LONG)
    tiny, largest = n.precision.tiny, n.precision.largest
    if name == "norm" and (np.isfinite(values) == bad).any():
        raise Mismatch("norm", f"{values}, not finite: {bad}")
    nan = np.isnan(span.lo) if name == "factor" else bad
    if name == "factor" and (np.isnan(values) != nan).any():
        raise Mismatch("factor", f"{values}, NaN wanted: {nan}")
    lo, hi = (np.broadcast_to(np.where(nan, 0, end), n.shape) for end in (span.lo, span.hi))
    lo = np.where(
        lo > largest, largest, np.where((lo > 0) & (lo < tiny / n.precision.ulp), lo - tiny, lo)
    )
    hi = hi + tiny * ((hi > 0) & (hi < tiny / n.precision.ulp))
    top = np.inf if name == "norm" else float(np.finfo(array.dtype).max)
    fits = (
        ((values >= lo) & (values <= np.minimum(hi, top))) | nan | ((name == "limit") & (n.lo <= 0))
    )
    if name == "factor":
        # A framework's tanh may round a factor just above 1.
        fits |= (hi == 1) & (lo < 1) & (values == 1 + 2 * n.precision.ulp)
    if not fits.all():
        raise Mismatch(
            name,
            (
                f"{np.asarray(values, float)[~fits][0]!r}, not in "
                f"{Span(lo, hi, n.precision)[~fits][0]}"
            ),
        )


def _check_flags(out: Outcome, report: Any, fw: Framework) -> None:
    if not out.measured:
        if any([getattr(report, name) is not None for name in FIELDS]):
            raise Mismatch("report", f"{report} of a rule that measures no norm")
        return
    for name, wanted in (
        ("clipped", out.clipped),
        ("finite", out.finite),
        ("skipped", out.skipped),
    ):
        found = getattr(report, name)
        if name == "skipped" and not out.skips:
            if found is not None:
                raise Mismatch(name, f"{found} of a rule that leaves out no step")
        elif found is None or (wanted is not None and bool(numpy_of(found, fw)) is not wanted):
            raise Mismatch(name, f"{found} instead of {wanted}")


def _check_scalars(views: list[View], report: Any, fw: Framework) -> None:
    """Require the scalars for a logger to agree with the fields."""
    columns: dict[str, list[Any]] = {}
    for view in views:
        flat = [
            None if some is None else [np.ravel(one).astype(LONG) for one in some if one.size]
            for some in view
        ]
        norms, limits, factors, thresholds = (
            np.concatenate(some) if some else None for some in flat
        )
        if norms is not None:
            # The product of factors in this dtype may overflow.
            dtype = np.result_type(*view.factors or [])
            row = {
                "norm": np.max(norms),
                "limit": np.min(limits),
                "factor": np.min(factors).astype(dtype),
            }
            row |= {"share": np.mean(factors != 1)} | (
                {} if thresholds is None else {"threshold": np.min(thresholds)}
            )
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
    join = {
        "norm": np.max,
        "limit": np.min,
        "factor": np.multiply.reduce,
        "share": np.max,
        "threshold": np.min,
    }
    wanted = {f"clip/{name}": join[name](values) for name, values in columns.items()}
    if wanted and report.skipped is not None:
        wanted["clip/skipped"] = float(bool(numpy_of(report.skipped, fw)))
    found = {name: float(numpy_of(value, fw)) for name, value in report.scalars().items()}
    exact = {name: 1e-5 if name in {"clip/share", "clip/factor"} else 0.0 for name in wanted}
    if set(found) != set(wanted) or not all(
        np.isclose(
            found[name],
            float(value),
            rtol=exact[name],
            atol=1e-37 if exact[name] else SUBNORMAL,
            equal_nan=True,
        )
        for name, value in wanted.items()
    ):
        raise Mismatch("scalars", f"{found} instead of {wanted}")


def _check_text(views: list[View], out: Outcome, report: Any) -> None:
    """Require a one-line summary with the largest norm of each rule."""
    text = str(report)
    flat = [[np.ravel(n) for n in view.norms or [] if n.size] for view in views]
    tops = [np.max(np.concatenate(some)) for some in flat if some]
    # XLA's maximum of subnormal numbers is 0.
    words = [
        f"norm {float(top):.3g}" for top in tops if math.isfinite(top) and not 0 < top < 1.2e-38
    ]
    words += ["non-finite"] if tops and not out.finite else []
    if repr(report) != f"<Report: {text}>" or not all(word in text for word in words):
        raise Mismatch("text", f"{text!r} without one of {words}")
