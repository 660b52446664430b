"""Faulty stand-ins for uniclip, each with one fault in a public function.

The contract must find every fault.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from kit.trees import leaves, mapped

Step = Callable[..., Any]
Make = Callable[[Any], dict[str, Any]]


class Fault(NamedTuple):
    """A fault, and the guarantee that it breaks."""

    what: str
    case: str
    """The case of the guarantee that the fault breaks."""
    make: Make
    """Returns the faulty functions by their public names."""

    def broken(self, uc: Any) -> Any:
        """Return a namespace with the public names of uniclip, some of them faulty."""
        return SimpleNamespace(**({name: getattr(uc, name) for name in uc.__all__} | self.make(uc)))


FAULTS: list[Fault] = []
SPARSE: list[Fault] = []
"""Faults that show in sparse arrays of PyTorch only."""


def fault(what: str, case: str, faults: list[Fault] = FAULTS) -> Callable[[Make], Make]:
    """Register a function that makes faulty functions."""

    def enter(make: Make) -> Make:
        faults.append(Fault(what, case, make))
        return make

    return enter


class Wrapped:
    """A rule with another ``update``."""

    def __init__(self, rule: Any, update: Step) -> None:
        self.rule, self._update = rule, update

    def init(self, grads: Any) -> Any:
        return self.rule.init(grads)

    def update(self, grads: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return self._update(self.rule, grads, state, *args, **kwargs)


def clipping(uc: Any, clip: Step) -> dict[str, Any]:
    """Return functions that clip once by ``clip(uc, grads, rule, *rest) -> clipped, report``."""

    def by_global_norm(grads: Any, max_norm: Any, **options: Any) -> Any:
        clipped, report = clip(uc, grads, uc.by_global_norm(max_norm, **options))
        return clipped, report.norms

    return {
        "clip": lambda grads, rule, *rest, **options: clip(uc, grads, rule, *rest, **options),
        "clip_by_global_norm": by_global_norm,
        "clip_by_norm": lambda grads, limit, **options: clip(
            uc, grads, uc.by_norm(limit, **options)
        )[0],
    }


def with_update(preset: Callable[..., Any], update: Step) -> Callable[..., Any]:
    """Return a preset whose rules have another ``update``."""
    return lambda *args, **options: Wrapped(preset(*args, **options), update)


def changed(report: Any, **fields: Any) -> Any:
    """Return a copy of a report with some fields replaced."""
    names = ("norms", "limits", "factors", "clipped", "finite", "skipped", "thresholds")
    return SimpleNamespace(
        **({name: getattr(report, name) for name in names} | fields), scalars=report.scalars
    )


@fault("a leaf is left out of the norm", "norm > limit")
def _(uc: Any) -> dict[str, Any]:
    def clip(uc: Any, grads: Any, rule: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(grads, dict) and "w" in grads:
            others, report = uc.clip({**grads, "w": None}, rule, *rest, **options)
            return {**others, "w": uc.clip(grads["w"], rule, *rest, **options)[0]}, report
        return uc.clip(grads, rule, *rest, **options)

    return clipping(uc, clip)


@fault(
    "a small number is added to the norm", "finite gradients whose squares overflow or underflow"
)
def _(uc: Any) -> dict[str, Any]:
    def clip_by_global_norm(grads: Any, max_norm: Any, **options: Any) -> Any:
        norm = uc.global_norm(grads, **options)
        return mapped(
            lambda grad: grad * np.minimum(1.0, max_norm / (norm + 1e-6)).astype(grad.dtype), grads
        ), norm

    return {"clip_by_global_norm": clip_by_global_norm}


@fault("the norm has the dtype of its leaf", "finite gradients whose squares overflow or underflow")
def _(uc: Any) -> dict[str, Any]:
    def global_norm(grads: Any, *, ord: float = 2) -> Any:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.sqrt(sum(np.sum(np.square(leaf)) for leaf in leaves(grads)))

    def clip_by_global_norm(grads: Any, max_norm: Any, **options: Any) -> Any:
        norm = global_norm(grads)
        return uc.clip_by_global_norm(grads, max_norm, **options)[0], norm

    return {"global_norm": global_norm, "clip_by_global_norm": clip_by_global_norm}


@fault("the input is changed", "norm > limit")
def _(uc: Any) -> dict[str, Any]:
    def clip(uc: Any, grads: Any, rule: Any, *rest: Any, **options: Any) -> Any:
        clipped, report = uc.clip(grads, rule, *rest, **options)
        for old, new in zip(leaves(grads), leaves(clipped), strict=True):
            old[...] = new
        return clipped, report

    return clipping(uc, clip)


@fault("what is below the limit is copied", "norm ≤ limit")
def _(uc: Any) -> dict[str, Any]:
    def clip(uc: Any, grads: Any, rule: Any, *rest: Any, **options: Any) -> Any:
        clipped, report = uc.clip(grads, rule, *rest, **options)
        return mapped(np.array, clipped), report

    return clipping(uc, clip)


@fault("a norm at the limit is above it", "norm ≤ limit")
def _(uc: Any) -> dict[str, Any]:
    def clip(uc: Any, grads: Any, rule: Any, *rest: Any, **options: Any) -> Any:
        clipped, report = uc.clip(grads, rule, *rest, **options)
        norms, limits = leaves(report.norms), leaves(report.limits)
        reached = [np.any(norm >= limit) for norm, limit in zip(norms, limits, strict=False)]
        return clipped, changed(report, clipped=any(reached))

    return clipping(uc, clip)


@fault("a window has one norm less", "an adaptive limit")
def _(uc: Any) -> dict[str, Any]:
    return {
        "autoclip": lambda percentile=10, window=10_000, **options: uc.autoclip(
            percentile, window - 1, **options
        )
    }


@fault("the warm-up takes one step more", "an adaptive limit")
def _(uc: Any) -> dict[str, Any]:
    return {
        "zclip": lambda *args, warmup=25, **options: uc.zclip(*args, warmup=warmup + 1, **options)
    }


@fault("a step that is not finite is learned", "… and a stateful rule")
def _(uc: Any) -> dict[str, Any]:
    spoiled = lambda array: 2 * array if array.dtype.kind == "f" else array

    def update(rule: Any, grads: Any, state: Any, *args: Any, **options: Any) -> Any:
        clipped, new, report = rule.update(grads, state, *args, **options)
        return clipped, (new if report.finite else type(new)(*map(spoiled, new))), report

    return {"adagc": with_update(uc.adagc, update)}


@fault("what is not clipped yet is learned", "an adaptive limit")
def _(uc: Any) -> dict[str, Any]:
    def update(rule: Any, grads: Any, state: Any, *args: Any, **options: Any) -> Any:
        clipped, new, report = rule.update(grads, state, *args, **options)
        # The running mean then contains the norm before clipping.
        if report.clipped and report.finite:
            norm = np.reshape(report.norms, new[0].shape)
            new = new._replace(**{new._fields[0]: state[0] + 0.5 * (norm - state[0])})
        return clipped, new, report

    return {"zclip": with_update(uc.zclip, update)}


@fault("a skipped step is multiplied by zero", '… and `nonfinite="skip"`')
def _(uc: Any) -> dict[str, Any]:
    def clip(uc: Any, grads: Any, rule: Any, *rest: Any, **options: Any) -> Any:
        clipped, report = uc.clip(grads, rule, *rest, **options)
        if report.skipped is not None and report.skipped:
            with np.errstate(invalid="ignore"):
                clipped = mapped(lambda grad: grad * 0, grads)
        return clipped, report

    return clipping(uc, clip)


@fault("the report is of what was clipped", "the report")
def _(uc: Any) -> dict[str, Any]:
    def clip(uc: Any, grads: Any, rule: Any, *rest: Any, **options: Any) -> Any:
        clipped, report = uc.clip(grads, rule, *rest, **options)
        after = uc.clip(clipped, rule, *rest, **options)[1].norms
        return clipped, changed(report, norms=after)

    return clipping(uc, clip)


@fault("the sizes are those of the first tree", "dtype, shape, tree")
def _(uc: Any) -> dict[str, Any]:
    sizes: dict[tuple[Any, ...], int] = {}

    def clip(uc: Any, grads: Any, rule: Any, *rest: Any, **options: Any) -> Any:
        clipped, report = uc.clip(grads, rule, *rest, **options)
        if isinstance(grads, dict) and list(grads) == ["w"]:
            first = sizes.setdefault(("w", repr(rule)), grads["w"].size)
            power = 1.0 if "average" in repr(rule) else 0.5
            scale = (grads["w"].size / first) ** power
            report = changed(report, norms=mapped(lambda norm: norm * scale, report.norms))
        return clipped, report

    return clipping(uc, clip)


@fault("all_reduce is ignored", "shards of one tree in several processes, `all_reduce=`")
def _(uc: Any) -> dict[str, Any]:
    def clip(uc: Any, grads: Any, rule: Any, *rest: Any, **options: Any) -> Any:
        return uc.clip(grads, rule, *rest, **(options | {"all_reduce": None}))

    return clipping(uc, clip)


@fault("the loss is ignored", "an adaptive limit")
def _(uc: Any) -> dict[str, Any]:
    def update(rule: Any, grads: Any, state: Any, *args: Any, **options: Any) -> Any:
        return rule.update(grads, state, *args, **(options | {"loss": None}))

    return {"skip_spikes": with_update(uc.skip_spikes, update)}


@fault("rows are taken for columns", "norm > limit")
def _(uc: Any) -> dict[str, Any]:
    turned = lambda axis: {0: -1, -1: 0}.get(axis, axis)
    return {
        "by_norm": lambda limit, axis=None, **options: uc.by_norm(
            limit, axis=turned(axis), **options
        )
    }


@fault("an array in two places counts once", "the same array in two places")
def _(uc: Any) -> dict[str, Any]:
    def clip_by_global_norm(grads: Any, max_norm: Any, **options: Any) -> Any:
        once = list({id(leaf): leaf for leaf in leaves(grads)}.values())
        return uc.clip_by_global_norm(
            grads, max_norm, norm=uc.global_norm(once, **options), **options
        )

    return {"clip_by_global_norm": clip_by_global_norm}


@fault("a state is not restored", "saved and loaded state")
def _(uc: Any) -> dict[str, Any]:
    class Clipper(uc.Clipper):
        def load_state_dict(self, saved: Any) -> None:
            uc.Clipper(self.rule).load_state_dict(saved)

    return {"Clipper": Clipper}


@fault("a threshold lies on the other side of the mean", "an adaptive limit")
def _(uc: Any) -> dict[str, Any]:
    def update(rule: Any, grads: Any, state: Any, *args: Any, **options: Any) -> Any:
        clipped, new, report = rule.update(grads, state, *args, **options)
        return clipped, new, changed(report, thresholds=2 * state[0] - report.thresholds)

    return {"zclip": with_update(uc.zclip, update)}


@fault("float64 is measured in float32", "norm > limit")
def _(uc: Any) -> dict[str, Any]:
    narrow = lambda grad: (
        grad.astype("float32").astype("float64") if grad.dtype == "float64" else grad
    )

    def clip(uc: Any, grads: Any, rule: Any, *rest: Any, **options: Any) -> Any:
        return uc.clip(mapped(narrow, grads), rule, *rest, **options)

    return clipping(uc, clip)


@fault("an error comes after the first array is changed", "any error")
def _(uc: Any) -> dict[str, Any]:
    def clip_(grads: Any, rule: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(grads, list) and isinstance(grads[0], np.ndarray):
            uc.clip_(grads[:1], uc.by_norm(1.0))
        return uc.clip_(grads, rule, *rest, **options)

    return {"clip_": clip_}


@fault("rows of a sparse gradient that occur twice are not summed", "sparse gradients", SPARSE)
def _(uc: Any) -> dict[str, Any]:
    def clip_by_global_norm(grads: Any, max_norm: Any, **options: Any) -> Any:
        stored = lambda grad: grad._values() if getattr(grad, "is_sparse", False) else grad
        norm = uc.global_norm(mapped(stored, grads), **options)
        return uc.clip_by_global_norm(grads, max_norm, norm=norm, **options)

    return {"clip_by_global_norm": clip_by_global_norm}
