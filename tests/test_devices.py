"""Arrays that NumPy cannot read, of libraries without a test file of their own, on any device."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import numpy as np
import pytest

import uniclip as uc
from kit import cupy_like
from kit.cupy_like import COUNTS, Device
from kit.rules import LOSSES, every_rule, kinds, params, steps
from kit.spine import without_spine
from kit.trees import leaves, mapped
from uniclip import insight

pytestmark = pytest.mark.needs("strict")
RULES = every_rule(uc)
KINDS = kinds(uc)


class Place(NamedTuple):
    """A device, with functions that put arrays there and read them."""

    device: Any
    put: Callable[[np.ndarray, Any], Any]
    values: Callable[[Any], np.ndarray]

    def __call__(self, values: Any, dtype: str = "float32") -> Any:
        """Return an array on the device."""
        return self.put(np.array(values, dtype), self.device)

    def found(self, arrays: list[Any]) -> list[Any]:
        """Return the values of arrays."""
        return [np.asarray(self.values(array), "float64").round(5).tolist() for array in arrays]


def strict(name: str) -> Place:
    """Return a device of array-api-strict."""
    import array_api_strict as xp

    host = xp.Device("CPU_DEVICE")
    return Place(
        xp.Device(name),
        lambda values, device: xp.asarray(values, device=device),
        lambda array: np.asarray(array.to_device(host)),
    )


def accelerator(number: int) -> Place:
    """Return a device of the stand-in for CuPy; the third one has no float64."""
    return Place(
        Device(number),
        lambda values, device: cupy_like.asarray(values, device=device),
        lambda array: array.get(),
    )


LIBRARIES: dict[str, Callable[[], list[Place]]] = {
    "strict": lambda: [strict(name) for name in ("device1", "device2", "CPU_DEVICE", "no_float64")],
    "cupy-like": lambda: [accelerator(number) for number in (1, 0, 2)],
}
"""Devices of a library; the first is neither the default nor the current one."""
WITHOUT_FLOAT64: dict[str, Callable[[], Place]] = {
    "strict": lambda: strict("no_float64"),
    "cupy-like": lambda: accelerator(2),
}


@pytest.fixture(params=LIBRARIES)
def places(request: pytest.FixtureRequest) -> list[Place]:
    """Return devices of each library."""
    return LIBRARIES[request.param]()


# --- Every array is created on the device of the gradients


def run_steps(rule: Any, put: Callable[[Any], Any]) -> tuple[uc.Clipper, list[Any]]:
    """Return a clipper after some steps, and the results of the steps."""
    clipper = uc.Clipper(rule)
    clipper.logs()
    needed = any("params" in getattr(inner, "needs", ()) for inner in limits_of(rule))
    given = mapped(put, params("float32")) if needed else None
    returned = [
        clipper(mapped(put, grads), given, loss=put(np.float32(loss)))
        for grads, loss in zip(steps("float32"), LOSSES, strict=False)
    ]
    return clipper, returned


def limits_of(rule: Any) -> list[Any]:
    """Return the limits of a rule, and of the rules inside it."""
    inner = getattr(rule, "rules", None) or [getattr(rule, "rule", None)]
    found = [limit for one in inner if one is not None for limit in limits_of(one)]
    return [*found, rule.limit] if hasattr(rule, "limit") else found


@pytest.mark.parametrize("name", RULES)
def test_results_logs_and_states_are_numpys(places: list[Place], name: str) -> None:
    """Clipped gradients, logs and saved states equal NumPy's up to rounding."""
    place = places[0]
    # Other libraries have no spine, on which a chain measures once: limits would be ties there.
    with without_spine():
        on_numpy, wanted = run_steps(RULES[name], lambda array: array)
    clipper, returned = run_steps(RULES[name], place)
    for array in leaves(returned):
        assert array.device == place.device
    for array, there in zip(leaves(wanted), leaves(returned), strict=True):
        np.testing.assert_allclose(place.values(there), array, rtol=2e-6, atol=1e-7)
    logs, logs_there = on_numpy.logs(), clipper.logs()
    assert logs.keys() == logs_there.keys()
    np.testing.assert_allclose(list(logs_there.values()), list(logs.values()), rtol=2e-6)
    saved, saved_there = (json.loads(json.dumps(c.state_dict())) for c in (on_numpy, clipper))
    assert_alike(saved_there, saved)
    assert str(clipper.report) == str(on_numpy.report)


def assert_alike(found: Any, wanted: Any) -> None:
    """Require plain data to be equal up to the rounding of numbers."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_alike(found[key], value)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for pair in zip(found, wanted, strict=True):
            assert_alike(*pair)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=2e-6, abs=1e-7, nan_ok=True)
    else:
        assert found == wanted


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "a limit": lambda here, there: uc.clip([here([3.0, 4.0])], uc.by_global_norm(there(1.0)))[0],
    "a bound": lambda here, there: uc.clip(
        [here([-3.0, 4.0])], uc.by_value(-2.0, there([0.6, 0.8]))
    )[0],
    "a norm": lambda here, there: uc.clip_by_global_norm([here([3.0, 4.0])], 1.0, norm=there(5.0))[
        0
    ],
    "parameters": lambda here, there: uc.clip(
        [here([3.0, 4.0])], uc.agc(0.1), [there([0.0, 10.0])]
    )[0],
    "a loss": lambda here, there: uc.Clipper(uc.skip_spikes())([here([0.6, 0.8])], loss=there(1.0)),
    "other leaves": lambda here, there: uc.clip(
        [here([9.0, 12.0]), there(8.0)], uc.by_global_norm(17 / 15)
    )[0][:1],
}


@pytest.mark.parametrize("what", CALLS)
def test_from_elsewhere(places: list[Place], what: str) -> None:
    """Limits, bounds, norms, parameters, losses and other leaves may be on another device."""
    here = places[0]
    for there in places:
        [array] = CALLS[what](here, there)
        assert array.device == here.device
        assert here.found([array]) == [[-2.0, 0.8] if what == "a bound" else [0.6, 0.8]]


def test_nothing_but_what_is_beside(places: list[Place]) -> None:
    """Limits, norms and losses may be arrays on a device even if all gradients are absent."""
    place = places[0]
    for curve in (uc.curves.hard, uc.curves.reject):
        clipped, report = uc.clip([None, None], uc.Rule(place(1.0), curve=curve))
        assert clipped == [None, None]
        assert report.norms == 0
    assert uc.clip_by_global_norm([None], 1.0, norm=place(0.0)) == ([None], 0.0)
    assert uc.Clipper(uc.skip_spikes())([None], loss=place(1.0)) == [None]
    rule = uc.Rule(uc.limits.Relative(0.1), scope=uc.scopes.all_leaves)
    assert uc.clip([None], rule, [place([3.0, 4.0])])[0] == [None]


@pytest.mark.parametrize("library", WITHOUT_FLOAT64)
@pytest.mark.parametrize("what", CALLS)
def test_float64_from_elsewhere(what: str, library: str) -> None:
    """If the gradients' device has no float64, float64 arrays of another one are narrowed."""
    here, wide = WITHOUT_FLOAT64[library](), LIBRARIES[library]()[0]
    [array] = CALLS[what](here, lambda values: wide(values, "float64"))
    assert array.device == here.device
    assert here.found([array]) == [[-2.0, 0.8] if what == "a bound" else [0.6, 0.8]]


@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "zero"])
def test_each_leaf_stays(places: list[Place], nonfinite: str) -> None:
    """Leaves of several devices stay there, also when they are written in place.

    Norms are on the device of the first leaf.
    """
    some, rule = places[:3], uc.by_global_norm(8.5, nonfinite=nonfinite)
    grads = [place(g) for place, g in zip(some, ([3.0, 4.0], [12.0], [84.0]), strict=True)]
    clipped, report = uc.clip(grads, rule)
    uc.clip_(grads, rule)
    for place, array, written in zip(some, clipped, grads, strict=True):
        assert array.device == written.device == place.device
    wanted = [[0.3, 0.4], [1.2], [8.4]]
    assert some[0].found(clipped) == some[0].found(grads) == wanted
    for value in [*report.scalars().values(), report.norms, report.limits]:
        assert value.device == some[0].device


# --- In place, for arrays that can be written


def test_memory_is_read_and_written_once(places: list[Place]) -> None:
    """Views of one storage are recognized even if NumPy cannot read it."""
    whole = places[0]([[3.0, 4.0], [0.0, 0.0]])
    with pytest.raises(ValueError, match=r"grads\[0\] and grads\[1\] may overlap"):
        uc.clip_([whole, whole[:1, ...]], uc.by_global_norm(1.0))
    uc.clip_([whole[:1, ...], whole[1:, ...]], uc.by_global_norm(1.0))
    assert places[0].found([whole]) == [[[0.6, 0.8], [0.0, 0.0]]]
    for twice in (places[0]([3.0, 4.0]), places[0](5.0)):
        uc.clip_([twice, twice, twice[...]], uc.by_norm(2.5))
        assert places[0].found([twice]) in ([[1.5, 2.0]], [2.5])


class Frozen(cupy_like.Array):
    """An immutable array, as are all results computed from it."""

    def made(self, values: Any) -> Frozen:
        return Frozen(np.asarray(values), self.device)

    def __setitem__(self, key: Any, value: Any) -> None:
        msg = "array is immutable"
        raise TypeError(msg)


class Copied(cupy_like.Array):
    """An array without an address, whose arithmetic creates new arrays, ``*=`` included."""

    def __imul__(self, other: Any) -> Any:
        return NotImplemented

    def __getattribute__(self, name: str) -> Any:
        if name == "__cuda_array_interface__":
            raise AttributeError(name)
        return super().__getattribute__(name)


def of_class(kind: type, values: Any) -> Any:
    """Return an array of a class."""
    return kind(np.array(values, "float32"), Device(0))


@pytest.mark.parametrize("rule", [uc.by_value(-1.0, 1.0), lambda g: g / 2])
def test_an_unknown_class_that_cannot_be_written(rule: Any) -> None:
    """The class raises its own error, and `uc.clip` works."""
    grads = [of_class(Frozen, [3.0]), of_class(Frozen, [4.0])]
    with pytest.raises(TypeError, match="array is immutable"):
        uc.clip_(grads, rule)
    assert [array.get().tolist() for array in grads] == [[3.0], [4.0]]
    clipped, _ = uc.clip(grads, uc.by_global_norm(1.0))
    np.testing.assert_allclose([array.get()[0] for array in clipped], [0.6, 0.8], rtol=1e-6)


def test_read_only_memory_is_refused_first() -> None:
    """Arrays over read-only memory are refused before others are written."""
    import array_api_strict as xp

    for shape in ((2,), ()):
        memory = np.full(shape, 4.0, "float32")
        memory.setflags(write=False)
        grads = [xp.asarray(np.array([3.0], "float32")), xp.asarray(memory, copy=False)]
        with pytest.raises(TypeError, match=r"grads\[1\].*cannot be changed in place.*read-only"):
            uc.clip_(grads, uc.by_global_norm(1.0))
        assert np.asarray(grads[0]).tolist() == [3.0]


@pytest.mark.needs("mlx")
def test_parts_that_are_copies() -> None:
    """A slice of an MLX array has values of its own, even if it reports the same memory."""
    import mlx.core as mx

    whole = mx.array([[3.0, 4.0], [0.0, 0.0]])
    part = whole[:1]
    uc.clip_([whole, part], uc.by_norm(2.5))
    assert whole.tolist() == [[1.5, 2.0], [0.0, 0.0]]
    assert part.tolist() == [[1.5, 2.0]]


def test_arrays_without_addresses() -> None:
    """One object in two places is written once, without addresses and without ``*=``."""
    twice, other = of_class(Copied, [3.0, 4.0]), of_class(Copied, [4.0, 3.0])
    uc.clip_([twice, other, twice], uc.by_norm(2.5))
    assert [array.get().tolist() for array in (twice, other)] == [[1.5, 2.0], [2.0, 1.5]]


# --- Few launches, and no wait


def count(name: str, place: Place, leaves_of: int, dtype: str, rows: int = 3) -> dict[str, int]:
    """Return the reads and launches of the second step of a rule on an accelerator, in place."""
    rule, loss = KINDS[name].rule, KINDS[name].loss
    with place.device:
        grads = [place(np.ones((rows, 4)), dtype) for _ in range(leaves_of)]
        value = place(1.0) if loss else None
    needed = grads if "params" in getattr(getattr(rule, "limit", None), "needs", ()) else None
    state = rule.init(grads)
    for _ in range(2):
        COUNTS.clear()
        _, state, _ = rule.update(grads, state, needed, loss=value, in_place=True)
    return dict(COUNTS)


@pytest.mark.parametrize("name", KINDS)
def test_no_wait(name: str) -> None:
    """Float64 sums of float32 gradients read nothing; other rules read one flag."""
    rules = len(getattr(KINDS[name].rule, "rules", "1"))
    assert "reads" not in count(name, accelerator(1), 3, "float32")
    assert count(name, accelerator(1), 3, "float64").get("reads", 0) <= rules
    assert count(name, accelerator(2), 3, "float32").get("reads", 0) <= rules
    if name == "by_global_norm":
        assert count(name, accelerator(1), 3, "float64")["reads"] == 1


@pytest.mark.parametrize("name", KINDS)
def test_large_arrays_are_not_cut(name: str) -> None:
    """An accelerator gets an array of 2¹⁸ elements whole, and no constants of that size."""
    small, large = (count(name, accelerator(0), 2, "float32", rows) for rows in (3, 2**16))
    assert large["launches"] == small["launches"]
    assert large.get("constants", 0) < 2**17


def test_bounds_are_made_once() -> None:
    """`by_value` creates its bounds once for all leaves of a dtype, on their device."""
    two, twenty = (count("by_value", accelerator(0), number, "float32") for number in (2, 20))
    assert two["constants"] == twenty["constants"] == 2


def test_values_travel_together() -> None:
    """Logs of many steps are read in one transfer for each dtype."""
    place = accelerator(1)
    clipper = uc.Clipper(uc.by_global_norm(1.0, nonfinite="skip"))
    clipper.logs()
    for step in range(20):
        clipper([place([3.0 + step, 4.0])])
    COUNTS.clear()
    assert clipper.logs()["clip/norm"] == pytest.approx(math.hypot(22, 4))
    assert COUNTS["reads"] <= 2
    COUNTS.clear()
    assert str(clipper.report) == "norm 22.4, limit 1, clipped, finite"
    assert COUNTS["reads"] <= 2


def test_values_travel_to_a_device_that_numpy_reads() -> None:
    """Values of devices without `.get()` are moved to a device that NumPy reads."""
    place, moves = strict("device1"), []
    kind = type(place(0.0))
    move = kind.to_device

    def to_device(array: Any, device: Any, /, **options: Any) -> Any:
        moves.append(device)
        return move(array, device, **options)

    _, report = uc.clip([place([3.0, 4.0]), place([12.0])], uc.by_norm(1.0))
    with mock.patch.multiple(kind, to_device=to_device, __float__=None):
        assert str(report) == "norm 12 (largest of 2), clipped 100%, finite"
    # One move for numbers, and one for flags.
    assert len(moves) == 2


def test_a_recorder_reads_a_window_at_once(tmp_path: Path) -> None:
    """Norms, losses and leaf norms stay on their device, and are read together."""
    place = accelerator(1)
    recorder = insight.Recorder(tmp_path / "run.jsonl", leaves="all")
    clipper = uc.Clipper(uc.by_norm(1.0), recorder)
    COUNTS.clear()
    for step in range(20):
        clipper([place([3.0, 4.0]), None, place([1.0 + step])], loss=place(0.5 * step))
    kept = COUNTS["reads"]
    recorder.flush()
    assert kept == 0
    assert COUNTS["reads"] <= 2
    record = insight.read(tmp_path / "run.jsonl")
    assert record.norms.tolist() == [max(5.0, 1.0 + step) for step in range(20)]
    assert record.leaves[3].tolist() == [5.0, 0.0, 4.0]


# --- Sums without float64


@pytest.mark.parametrize("library", WITHOUT_FLOAT64)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_sums_without_float64(library: str, axis: int | None) -> None:
    """Sums of 4 million equal elements, rows and columns have the guaranteed accuracy."""
    place = WITHOUT_FLOAT64[library]()
    shape = (2, 2_000_000) if axis == 1 else (2_000_000, 2)
    array = np.full(shape, 0.1, "float32")
    rule = uc.by_norm(1.0, axis=axis)
    [norms] = uc.clip([place(array)], rule)[1].norms
    norms = place.values(norms)
    wanted = np.linalg.norm(array.astype("float64"), axis=axis)
    np.testing.assert_allclose(norms.ravel(), np.ravel(wanted), rtol=5e-7)


# --- States with flags, and gradients that move


class Flags(NamedTuple):
    """The state of `Once`."""

    above: Any


class Once(uc.Limit):
    """A limit once a norm was above 4; its state contains only flags."""

    stateful: ClassVar[bool] = True

    def init(self, norms: Any, context: uc.limits.Context) -> Flags:
        """Return the state before the first step."""
        return Flags(norms > 4)

    def __call__(self, norms: Any, state: Flags, context: uc.limits.Context) -> tuple[Any, Flags]:
        """Test whether a norm is above 4."""
        above = state.above | (norms > 4)
        xp = context.xp
        return xp.where(above, xp.asarray(np.asarray(1.0, "float32")), xp.asarray(10.0)), Flags(
            above
        )


def test_a_state_of_flags(places: list[Place]) -> None:
    """Flags are kept in a skipped step, saved, and loaded in another framework."""
    clipper = uc.Clipper(uc.Rule(Once(), scope=uc.scopes.each_leaf, nonfinite="skip"))
    COUNTS.clear()
    for norms in ([3.0, 3.0], [math.nan, 5.0], [5.0, 3.0], [3.0, 3.0]):
        clipped = clipper([places[0]([norm]) for norm in norms])
    assert "reads" not in COUNTS
    assert places[0].found(clipped) == [[1.0], [3.0]]
    saved = json.loads(json.dumps(clipper.state_dict()))
    assert saved["state"] == {"above": [True, False]}
    other = uc.Clipper(clipper.rule)
    other.load_state_dict(saved)
    assert [array.tolist() for array in other([np.ones(1), np.ones(1)])] == [[1.0], [1.0]]
    assert other.state_dict()["state"] == saved["state"]


@pytest.mark.parametrize("name", KINDS)
def test_gradients_move(places: list[Place], name: str) -> None:
    """The state of a clipper follows the gradients to another device, also in a skipped step."""
    rule, loss = KINDS[name]
    needed = "params" in getattr(getattr(rule, "limit", None), "needs", ())
    staying, moving = uc.Clipper(rule), uc.Clipper(rule)
    rng = np.random.default_rng(0)
    for step in range(2 * len(places) + 1):
        grads = rng.normal(size=(2, 3)).astype("float32")
        if step == len(places):
            grads[0, 0] = math.nan
        results = []
        for clipper, place in ((staying, places[0]), (moving, places[step % len(places)])):
            tree = {"w": place(grads[0]), "b": place(grads[1])}
            of_params = {"w": place([1.0, 2.0, 3.0]), "b": place([0.0, 1.0, 0.0])}
            clipped = clipper(
                tree, of_params if needed else None, loss=place(1.0 + step) if loss else None
            )
            assert clipped["w"].device == place.device
            results.append([place.values(clipped[key]) for key in "wb"])
        np.testing.assert_allclose(*results, rtol=1e-6)
    assert_alike(moving.state_dict(), staying.state_dict())


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
@pytest.mark.parametrize("library", WITHOUT_FLOAT64)
def test_one_norm_over_devices_with_and_without_float64(library: str, scale: float) -> None:
    """Squares may leave the range of float32, in any order, next to float64 gradients."""
    wide, narrow = LIBRARIES[library]()[0], WITHOUT_FLOAT64[library]()
    for dtype in ("float32", "float64"):
        grads = [wide([3.0 * scale], dtype), narrow([4.0 * scale])]
        for tree in (grads, grads[::-1]):
            clipped, report = uc.clip(tree, uc.by_global_norm(scale))
            first = wide if tree is grads else narrow
            assert report.norms.device == first.device
            assert float(first.values(report.norms)) == pytest.approx(5 * scale, rel=2e-7)
            values = sorted(float(wide.values(array)[0]) / scale for array in clipped)
            assert values == pytest.approx([0.6, 0.8], rel=3e-7)
            for array, given in zip(clipped, tree, strict=True):
                assert (array.dtype, array.device) == (given.dtype, given.device)
