"""Trees of gradients: containers, iterators, paths in errors."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import types
from typing import Any, NamedTuple

import numpy as np
import pytest

import uniclip as uc
from frameworks import EAGER, Framework

pytestmark = pytest.mark.ways(*EAGER)


class Pair(NamedTuple):
    """A namedtuple of gradients."""

    w: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Layer:
    """A frozen dataclass of gradients, with a field that __init__ does not take."""

    w: Any
    b: Any = None
    cache: Any = dataclasses.field(default=None, init=False)


class Parameters(list):
    """A list of one's own, as frameworks have them."""


def itself(x: Any) -> Any:
    """Return the argument."""
    return x


def values(fw: Framework, tree: Any) -> list[float]:
    """Return the first entry of each leaf of a flat container."""
    return [round(float(fw.numpy(leaf)[0]), 6) for leaf in tree]


def pair(fw: Framework) -> tuple[Any, Any]:
    """Return two gradients of joint norm 5."""
    return fw.array([3.0]), fw.array([4.0])


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: [a, b],
        lambda a, b: (a, b),
        lambda a, b: collections.deque([a, b]),
        lambda a, b: Pair(a, b),
        lambda a, b: Parameters([a, b]),
        lambda a, b: (x for x in (a, b)),
        lambda a, b: filter(lambda x: x is not None, [a, None, b]),
        lambda a, b: map(itself, [a, b]),
        lambda a, b: itertools.chain([a], [b]),
        lambda a, b: {"a": a, "b": b}.values(),
    ],
    ids=["list", "tuple", "deque", "namedtuple", "list subclass", "generator", "filter", "map", "chain", "dict values"],
)
def test_sequences(fw: Framework, make: Any) -> None:
    """Sequences keep their kind; iterators and views come back as lists, in order."""
    grads = make(*pair(fw))
    clipped, norm = uc.clip_by_global_norm(grads, 1.0)
    assert values(fw, clipped) == [0.6, 0.8]
    assert float(fw.numpy(norm)) == pytest.approx(5)
    lasting = isinstance(grads, (tuple, collections.deque)) or type(grads) is list
    assert type(clipped) is (type(grads) if lasting else list)


@pytest.mark.parametrize(
    "make",
    [
        dict,
        collections.OrderedDict,
        lambda d: collections.defaultdict(list, d),
        collections.UserDict,
        types.MappingProxyType,
    ],
    ids=["dict", "OrderedDict", "defaultdict", "UserDict", "mapping"],
)
def test_mappings(fw: Framework, make: Any) -> None:
    """Mappings keep their keys and the order of them."""
    a, b = pair(fw)
    clipped = uc.clip_by_global_norm(make({"z": a, "a": b, "none": None}), 1.0)[0]
    assert list(clipped) == ["z", "a", "none"]
    assert clipped["none"] is None
    assert values(fw, [clipped["z"], clipped["a"]]) == [0.6, 0.8]


def test_keys_of_two_kinds(fw: Framework) -> None:
    """Keys need not compare with one another."""
    a, b = pair(fw)
    clipped = uc.clip_by_global_norm({1: a, "x": b, (0,): None}, 1.0)[0]
    assert values(fw, [clipped[1], clipped["x"]]) == [0.6, 0.8]


def test_dataclass(fw: Framework) -> None:
    """A dataclass comes back as one, a frozen one too, and the given one is not changed."""
    a, b = pair(fw)
    grads = {"layer": Layer(a, {"deep": [b]})}
    clipped = uc.clip_by_global_norm(grads, 1.0)[0]
    assert isinstance(clipped["layer"], Layer)
    assert clipped["layer"].cache is None
    assert values(fw, [clipped["layer"].w, clipped["layer"].b["deep"][0]]) == [0.6, 0.8]
    assert grads["layer"].w is a


def test_nested_iterator(fw: Framework) -> None:
    """An iterator within a tree is read once, where it stands."""
    a, b = pair(fw)
    clipped = uc.clip_by_global_norm({"x": iter([a]), "y": [b]}, 1.0)[0]
    assert values(fw, [clipped["x"][0], clipped["y"][0]]) == [0.6, 0.8]


@pytest.mark.parametrize("function", [lambda g: uc.clip_by_global_norm(g, 1.0), lambda g: uc.clip_by_value(g, -1, 1)])
def test_spent_iterator(fw: Framework, function: Any) -> None:
    """An iterator that was consumed before is an error, not a clip of nothing."""
    for grads in ((x for x in pair(fw)), filter(None, []), map(abs, []), itertools.chain()):
        list(grads)
        with pytest.raises(ValueError, match="grads is an iterator with nothing left"):
            function(grads)


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (1.0, "float"),
        ("w", "str"),
        (object(), "object"),
        (np.ma.masked_array([1.0], [True]), r"numpy\.ma.*MaskedArray of dtype float64 and shape \(1,\)"),
        (np.asarray(["x"]), r"numpy.ndarray of dtype <U1 and shape \(1,\)"),
        (np.asarray([True]), r"numpy.ndarray of dtype bool and shape \(1,\)"),
        (np.asarray([None]), r"numpy.ndarray of dtype object and shape \(1,\)"),
        ({1.0}, "set"),
        (Layer, "type"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",  # no addresses: workers compare the names
)
def test_wrong_leaf(leaf: Any, kind: str) -> None:
    """What is no numeric array is refused by its path and its type."""
    with pytest.raises(TypeError, match=rf"grads\['layers'\]\[1\]\['w'\] is a {kind}, not an array of numbers: pass"):
        uc.clip_by_global_norm({"layers": [None, {"w": leaf}]}, 1.0)


def test_flags_are_no_gradients(fw: Framework) -> None:
    """Booleans are no numbers to clip."""
    with pytest.raises(TypeError, match=r"grads\[0\] is a .*, not an array of numbers"):
        uc.clip_by_norm([fw.array([1.0]) > 0], 1.0)


def test_path_through_a_dataclass(fw: Framework) -> None:
    """The path goes through containers that are no lists or dicts."""
    with pytest.raises(TypeError, match=r"grads\['layer'\]\['w'\]"):
        uc.global_norm({"layer": Layer(2.0), "x": pair(fw)[0]})


def test_a_list_of_numbers_is_no_gradient() -> None:
    """The error says to pass the numbers as one array."""
    with pytest.raises(TypeError, match="numbers as one array"):
        uc.clip_by_norm([1, 1, 3, 4], 5)


def test_nothing_is_changed(fw: Framework) -> None:
    """The given tree and its arrays are what they were."""
    a, b = pair(fw)
    grads = {"a": a, "l": [b, None]}
    uc.clip_by_global_norm(grads, 1.0)
    uc.clip_by_value(grads, -1, 1)
    assert grads["a"] is a
    assert grads["l"][0] is b
    assert values(fw, [a, b]) == [3.0, 4.0]
