"""Compare what uniclip returned with what the oracle says, for one step."""
# ruff: noqa: EM101, TRY003, N818, C901, PLR0912 - a mismatch is caught and counted; reports have many parts

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from frameworks import Framework
from fuzz_cases import walk
from fuzz_oracle import LARGEST, Leaf, Machine, Outcome, Plan
from fuzz_spans import LONG, Span


class Mismatch(AssertionError):
    """A result that is none of those the oracle allows."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def seen_of(plan: Plan, report: Any, fw: Framework, number: int | None = None) -> Any:
    """Return the limits and factors of a report as lists of arrays, for each rule of a chain."""
    limits, factors = (part if number is None else part[number] for part in (report.limits, report.factors))
    if plan.kind == "chain":
        return None if limits is None else [seen_of(part, report, fw, n) for n, part in enumerate(plan.parts)]
    if plan.kind == "masked":
        return seen_of(plan.parts[0], report, fw, number)
    return None if limits is None else [list(arrays_of(some, fw)) for some in (limits, factors)]


def numpy_of(array: Any, fw: Framework) -> np.ndarray:
    """Return the values of an array; those of a step without gradients are NumPy's."""
    return np.asarray(array if isinstance(array, (np.ndarray, np.generic)) else fw.numpy(array))


def arrays_of(values: Any, fw: Framework) -> Iterator[np.ndarray]:
    """Yield the values of a report's field in the order of the oracle's groups."""
    if isinstance(values, dict):
        values = {repr(key): value for key, value in values.items()}
    for _, array in walk(values):
        yield numpy_of(array, fw)


def same_tree(old: Any, new: Any, *, ordered: bool) -> None:
    """Require the same containers, and ``None`` in the same places."""
    if isinstance(old, dict):
        if type(old) is not type(new) or (list(old) != list(new) if ordered else set(old) != set(new)):
            raise Mismatch("tree", f"{old} became {new}")
        for key in old:
            same_tree(old[key], new[key], ordered=ordered)
    elif isinstance(old, (list, tuple)):
        if type(old) is not type(new) or len(old) != len(new):
            raise Mismatch("tree", f"{type(old)} of {len(old)} became {type(new)}")
        for one, other in zip(old, new, strict=True):
            same_tree(one, other, ordered=ordered)
    elif (old is None) is not (new is None):
        raise Mismatch("tree", f"{old} became {new}")


def check_leaves(wanted: list[Leaf], given: list[np.ndarray], new: list[Any], fw: Framework, machine: Machine) -> None:
    """Require dtype, shape, values and, where nothing was to be changed, the same bits."""
    if len(wanted) != len(new):
        raise Mismatch("tree", f"{len(wanted)} leaves became {len(new)}")
    for leaf, old, array in zip(wanted, given, new, strict=True):
        if fw.dtype(array) != (leaf.integer or leaf.dtype):
            raise Mismatch("dtype", f"{leaf.path}: {fw.dtype(array)} instead of {leaf.integer or leaf.dtype}")
        values = np.asarray(fw.numpy(array))
        if values.shape != leaf.shape:
            raise Mismatch("shape", f"{leaf.path}: {leaf.shape} became {values.shape}")
        _check_bits(leaf, old, values, machine)
        _check_values(leaf, values, machine)


def _check_bits(leaf: Leaf, old: np.ndarray, new: np.ndarray, machine: Machine) -> None:
    same = np.broadcast_to(leaf.same, leaf.shape)
    if not same.any():
        return
    pairs = ((old.real, new.real), (old.imag, new.imag)) if np.iscomplexobj(old) else ((old, new),)
    for pair in pairs:
        one, other = (x.astype(np.float64) for x in pair)
        equal = (one == other) & (np.signbit(one) == np.signbit(other)) | (np.isnan(one) & np.isnan(other))
        if machine.flush:
            tiny = leaf.parts.precision.tiny
            equal |= (np.abs(one) < tiny) & (np.abs(other) < tiny)
        if not equal[same].all():
            raise Mismatch("bits", f"{leaf.path}: {one[~equal & same][0]!r} became {other[~equal & same][0]!r}")


def _check_values(leaf: Leaf, new: np.ndarray, machine: Machine) -> None:
    same = np.broadcast_to(leaf.same, leaf.shape)
    wide = np.asarray(new, np.clongdouble if np.iscomplexobj(new) else LONG)
    parts = np.stack([wide.real, wide.imag], axis=-1) if np.iscomplexobj(wide) else wide[..., None]
    nan = ~np.isfinite(parts).all(axis=-1)
    bad = leaf.bad & ~same
    kept = np.isinf(parts[..., 0]) & (np.sign(parts[..., 0]) == leaf.signs) if parts.shape[-1] == 1 else np.bool_(False)
    if (missing := bad & ~np.isnan(parts).any(axis=-1) & ~kept).any():
        raise Mismatch("NaN is missing", f"{leaf.path}: {np.asarray(new)[missing][0]!r}")
    if (wrong := np.isnan(parts).any(axis=-1) & ~leaf.bad).any():
        raise Mismatch("NaN", f"{leaf.path}: NaN instead of {leaf.parts[wrong]}")
    check = ~leaf.bad & ~same
    largest = LARGEST.get(leaf.dtype, leaf.parts.precision.largest)
    lo, hi = leaf.parts.lo, leaf.parts.hi
    lo = np.where(lo > largest, largest, np.where(lo < -largest, -np.inf, lo))
    hi = np.where(hi < -largest, -largest, np.where(hi > largest, np.inf, hi))
    fits = ((parts >= lo) & (parts <= hi)).all(axis=-1) | ~check
    if not fits.all():
        wrong = ~fits
        kind = "infinite value" if nan[wrong].any() else "value"
        raise Mismatch(
            kind, f"{leaf.path}: {np.asarray(new)[wrong][0]!r}, not in {Span(lo, hi, leaf.parts.precision)[wrong][0]}"
        )


def check_report(out: Outcome, plan: Plan, report: Any, fw: Framework, number: int | None = None) -> None:
    """Require what a report has to say."""
    if plan.kind == "masked":
        if plan.parts[0].kind == "chain" and out.measured:
            for n, (part, inner) in enumerate(zip(out.parts, plan.parts[0].parts, strict=True)):
                check_report(part, inner, report, fw, n)
        else:
            check_report(out, plan.parts[0], report, fw, number)
        return
    norms, limits, factors = (
        (part if number is None else part[number] for part in tuple(report)[:3])
        if out.measured or number is None
        else (None,) * 3
    )
    if number is None:
        _check_flags(out, report, fw)
    if plan.kind == "chain":
        if out.measured:
            for n, (part, inner) in enumerate(zip(out.parts, plan.parts, strict=True)):
                check_report(part, inner, report, fw, n)
        return
    if not out.measured:
        if norms is not None:
            raise Mismatch("report", f"norms of a rule that measures none: {norms}")
        return
    if out.labels is not None and set(norms) != set(out.labels):
        raise Mismatch("labels", f"{set(norms)} instead of {set(out.labels)}")
    for name, values, spans in (
        ("norm", norms, out.norms),
        ("limit", limits, out.limits),
        ("factor", factors, out.factors),
    ):
        found = list(arrays_of(values, fw))
        if len(found) != len(spans):
            raise Mismatch("report", f"{len(found)} values for {name}, {len(spans)} groups")
        for n, (array, span) in enumerate(zip(found, spans, strict=True)):
            _check_number(name, array, span, out, n)


def _check_number(name: str, array: np.ndarray, span: Span, out: Outcome, number: int) -> None:
    n, bad = out.norms[number], out.broken[number]
    dtype = np.float64 if n.precision.ulp < 2**-30 else np.float32
    if array.dtype != dtype or (name == "norm" and array.shape != n.shape):
        raise Mismatch("report", f"{name} of {array.dtype} {array.shape} for {np.dtype(dtype)} {n.shape}")
    values = np.broadcast_to(array, n.shape).astype(LONG) if name != "norm" else array.astype(LONG)
    ulp, tiny, largest = n.precision
    if name == "norm" and (np.isfinite(values) == bad).any():
        raise Mismatch("norm", f"{values}, not finite: {bad}")
    nan = np.isnan(span.lo) if name == "factor" else bad
    if name == "factor" and (np.isnan(values) != nan).any():
        raise Mismatch("factor", f"{values}, NaN wanted: {nan}")
    lo, hi = (np.broadcast_to(np.where(nan, 0, end), n.shape) for end in (span.lo, span.hi))
    lo = np.where(lo > largest, largest, np.where(lo > 0, np.minimum(lo - tiny * (lo < tiny / ulp), largest), lo))
    hi = np.minimum(hi + tiny * ((hi > 0) & (hi < tiny / ulp)), np.inf if name == "norm" else largest)
    fits = ((values >= lo) & (values <= hi)) | nan | ((name == "limit") & (n.lo <= 0))
    if not fits.all():
        raise Mismatch(name, f"{np.asarray(values, float)[~fits][0]!r}, not in {Span(lo, hi, n.precision)[~fits][0]}")


def _check_flags(out: Outcome, report: Any, fw: Framework) -> None:
    if not out.measured:
        if any(part is not None for part in report):
            raise Mismatch("report", f"{report} of a rule that measures no norm")
        return
    for name, wanted in (
        ("clipped", out.clipped),
        ("finite", out.finite),
        ("skipped", out.skipped if out.skips else "absent"),
    ):
        found = getattr(report, name)
        if wanted == "absent":
            if found is not None:
                raise Mismatch(name, f"{found} of a rule that leaves out no step")
        elif found is None or (wanted is not None and bool(numpy_of(found, fw)) is not wanted):
            raise Mismatch(name, f"{found} instead of {wanted}")
