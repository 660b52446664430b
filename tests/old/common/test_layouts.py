"""What is the same at every step is worked out once for each tree, and ends with the scope it belongs to."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import uniclip as uc
from frameworks import CHOSEN, Framework

EAGER = pytest.mark.parametrize("framework", [fw for fw in CHOSEN if not fw.traced], ids=lambda fw: fw.name)
"""In code that is traced layouts are made afresh."""
CACHED = {"NumPy", "PyTorch", "TensorFlow", "JAX"}
"""The families of whose arrays a quick look is enough; those of others are opened one by one."""


class Model:
    """What a label may look at: which layer a parameter belongs to."""

    def __init__(self, weights: list[Any]) -> None:
        self.layers = {"a": 0, "b": 1, "c": 1}
        self.weights = weights
        self.asked = 0

    def label(self, path: Any, leaf: Any) -> int:
        """Return the layer of a leaf."""
        self.asked += 1
        return self.layers[path[0]]


def grads_of(fw: Framework, rows: int = 2) -> dict[str, Any]:
    """Return the gradients of a step."""
    return {name: fw.array(np.full((rows, 2), by)) for name, by in (("a", 1.0), ("b", 3.0), ("c", 4.0))}


WAYS: dict[str, Callable[[Any], Any]] = {
    "rule": lambda scope: uc.Rule(1.0, scope=scope),
    "learns": lambda scope: uc.Rule(uc.limits.Ema(1.05, 0.9, warmup=1), scope=scope),
    "limits": lambda scope: uc.Rule(uc.limits.PerGroup({0: 1.0, 1: uc.limits.Percentile(50, 3)}), scope=scope),
    "chain": lambda scope: uc.chain(uc.by_value(-0.5, 0.5), uc.Rule(1.0, scope=scope)),
    "masked": lambda scope: uc.masked(uc.Rule(1.0, scope=scope), lambda path, leaf: path[0] != "a"),
}


@pytest.mark.parametrize("way", WAYS)
@EAGER
def test_a_model_that_is_freed(framework: Framework, way: str) -> None:
    """A scope whose label knows the model keeps it no longer alive than the rule is: no cache outlives the scope."""
    with framework.context():
        model = Model([framework.array([1.0])])
        rule = WAYS[way](uc.scopes.groups(lambda path, leaf, model=model: model.label(path, leaf)))
        clipper, grads = uc.Clipper(rule), grads_of(framework)
        for _ in range(2):
            clipper(grads)
        report, alive = clipper.report, weakref.ref(model)
        del model
        gc.collect()
        assert alive() is not None
        del rule, clipper
        tuple(report)
        del report
        gc.collect()
        assert alive() is None


@EAGER
def test_labels_are_asked_once(framework: Framework) -> None:
    """A tree that was seen before asks for no label again; one of another structure or of other shapes does."""
    with framework.context():
        model = Model([])
        rule = uc.Rule(1.0, scope=uc.scopes.groups(model.label))
        asked = []
        for rows in (2, 2, 3, 2):
            uc.clip(grads_of(framework, rows), rule)
            asked.append(model.asked)
        uc.clip({"a": grads_of(framework)["a"]}, rule)
        assert [*asked, model.asked] == [3, 3, 6, 6, 7] or framework.family not in CACHED


@EAGER
def test_a_label_that_looks_at_shapes(framework: Framework) -> None:
    """Leaves that have changed in shape, or dtype, are in the groups of what they are now."""
    rule = uc.Rule(1.0, scope=uc.scopes.groups(lambda path, leaf: f"{len(leaf.shape)} {leaf.dtype}"))
    with framework.context():
        for shapes, dtype in (((3,), (2, 2)), "float32"), (((3,), (4,)), "float32"), (((1,), (2, 2)), "complex64"):
            grads = [framework.array(np.ones(shape), dtype) for shape in shapes]
            labels = {f"{len(leaf.shape)} {leaf.dtype}" for leaf in grads}
            assert set(uc.clip(grads, rule)[1].norms) == labels


@pytest.mark.parametrize("scope", [uc.scopes.each_row, uc.scopes.unit(0), uc.Scope(axes=(-1,))], ids=repr)
@EAGER
def test_shapes_that_change(framework: Framework, scope: uc.Scope) -> None:
    """Norms with axes that were stacked at one step are not where shapes differ at the next one."""
    rule = uc.Rule(1.0, scope=scope)
    with framework.context():
        for shapes in ([(4, 3), (4, 2)], [(4, 3), (5, 2)], [(4, 3), (4, 2, 2)], [(4, 3), (4, 2)]):
            grads = [framework.array(np.full(shape, 2.0)) for shape in shapes]
            clipped, report = uc.clip(grads, rule)
            for norms, leaf, new in zip(report.norms, grads, clipped, strict=True):
                axes = scope.covered(len(leaf.shape), 0)
                wanted = np.sqrt(np.sum(np.full(leaf.shape, 4.0), axis=axes))
                np.testing.assert_allclose(framework.numpy(norms), wanted, rtol=1e-6)
                after = np.sqrt(np.sum(framework.numpy(new) ** 2, axis=axes))
                np.testing.assert_allclose(after, np.ones_like(wanted), rtol=1e-6)


@EAGER
def test_they_hold_no_array_and_are_few(framework: Framework) -> None:
    """However many trees a scope has seen, it holds no gradient and a bounded number of layouts."""
    scope = uc.scopes.groups(lambda path, leaf: path[0])
    rule = uc.Rule(1.0, scope=scope)
    with framework.context():
        grads = grads_of(framework)
        alive = [weakref.ref(leaf) for leaf in grads.values()]
        uc.clip(grads, rule)
        del grads
        gc.collect()
        assert [reference() for reference in alive] == [None] * 3
        for number in range(80):
            uc.clip({number: framework.array([1.0])}, rule)
        assert len(scope.layouts) <= 64


@EAGER
def test_copies_have_their_own(framework: Framework) -> None:
    """Neither a copy nor a pickle takes layouts along, and they count in no comparison."""
    rule = uc.Rule(1.0, scope=uc.Scope(axes=(0,)))
    with framework.context():
        uc.clip(grads_of(framework), rule)
        for other in (copy.copy(rule.scope), copy.deepcopy(rule.scope), pickle.loads(pickle.dumps(rule.scope))):
            assert other.layouts == {}
            assert other == rule.scope
            assert hash(other) == hash(rule.scope)


def test_one_scope_in_two_frameworks(fw: Framework) -> None:
    """A scope that has seen NumPy's arrays serves those of other frameworks, which may have the same dtypes."""
    rules = [
        uc.Rule(1.0, scope=scope())
        for scope in (lambda: uc.Scope(), lambda: uc.scopes.each_row, lambda: uc.scopes.unit())
    ]
    for rule in rules:
        wanted, _ = uc.clip(grads_of(Framework()), rule)
        clipped = fw.run(lambda g, rule=rule: uc.clip(g, rule)[0], grads_of(fw))
        again, _ = uc.clip(grads_of(Framework()), rule)
        for name, leaf in clipped.items():
            assert fw.owns(leaf)
            np.testing.assert_array_equal(again[name], wanted[name])
            if rule.scope != uc.scopes.unit():  # which follows the framework
                np.testing.assert_allclose(fw.numpy(leaf), wanted[name], rtol=1e-6)
