"""Reports: norms, limits, factors, thresholds, flags, scalars for loggers, and the summary line."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
import pytest

import uniclip as uc
from kit.frameworks import Framework
from kit.rules import double, every_rule, first_key
from kit.trees import leaves, mapped
from uniclip import insight


@dataclass
class Pair:
    """Two gradients."""

    one: Any
    other: Any


on_numpy = pytest.mark.needs("numpy")
FIELDS = ("norms", "limits", "factors", "clipped", "finite", "skipped", "thresholds")
GRADS = {"a": np.asarray([3.0, 4.0]), "b": [None, np.asarray([[0.25]])], "empty": np.zeros((0, 2))}
"""Gradients of norm 5.006246."""


def made(framework: Framework, tree: Any = GRADS) -> Any:
    """Return a tree of a framework, in arrays without other references."""
    return mapped(lambda leaf: framework.array(leaf.copy()), tree)


def numbers(framework: Framework, field: Any) -> Any:
    """Return a field of a report as rounded numbers and lists."""
    if isinstance(field, dict):
        return {key: numbers(framework, value) for key, value in field.items()}
    if isinstance(field, (list, tuple)):
        return [numbers(framework, value) for value in field]
    return None if field is None else np.round(framework.numpy(field).astype(float), 4).tolist()


SAID: dict[str, tuple[Any, dict[str, Any]]] = {
    "one norm": (uc.by_global_norm(1.0), {"norms": 5.0062, "limits": 1.0, "factors": 0.1998}),
    "each leaf": (
        uc.by_norm(1.0),
        {
            "norms": {"a": 5.0, "b": [None, 0.25], "empty": 0.0},
            "factors": {"a": 0.2, "b": [None, 1], "empty": 1},
        },
    ),
    ("an axis"): (
        uc.Rule(0.3, scope=uc.scopes.axes(-1)),
        {"norms": {"a": 5.0, "b": [None, [0.25]], "empty": []}},
    ),
    "groups": (
        uc.by_group_norm({"a": 1.0, "b": 0.5, "empty": 9.0}, first_key),
        {
            "norms": {"a": 5.0, "b": 0.25, "empty": 0.0},
            "limits": {"a": 1.0, "b": 0.5, "empty": 9.0},
        },
    ),
    "within": (
        uc.by_global_norm(9.0, nonfinite="skip"),
        {"clipped": False, "finite": True, "skipped": False},
    ),
    "rejected": (
        uc.by_global_norm(1.0, curve=uc.curves.reject),
        {"clipped": True, "finite": True, "skipped": True},
    ),
    "no norm": (uc.by_value(-1.0, 1.0), dict.fromkeys(FIELDS)),
    "a function": (double, dict.fromkeys(FIELDS)),
    "chain": (
        uc.chain(double, uc.by_global_norm(9.0), uc.by_global_norm(2.0)),
        {
            "norms": [None, 10.0125, 9.0],
            "limits": [None, 9.0, 2.0],
            "factors": [None, 0.8989, 0.2222],
            "clipped": 1.0,
        },
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_what_it_says(framework: Framework, name: str) -> None:
    """Fields are one array if all leaves share a norm, a dict by group, else a tree.

    Those of a chain are a tuple with an item for each rule.
    """
    rule, wanted = SAID[name]
    _, report = uc.clip(made(framework), rule)
    assert {field: numbers(framework, getattr(report, field)) for field in wanted} == wanted
    assert all(map(framework.owns, leaves([getattr(report, field) for field in FIELDS])))


SCALARS: dict[str, tuple[Any, list[float]]] = {
    "one norm": (uc.by_global_norm(1.0), [5.006246, 1.0, 0.19975, 1.0]),
    "a skip": (uc.by_global_norm(9.0, nonfinite="skip"), [5.006246, 9.0, 1.0, 0.0, 0.0]),
    "each leaf": (uc.by_norm(1.0), [5.0, 1.0, 0.2, 1 / 3]),
    "each entry": (uc.Rule(3.5, scope=uc.scopes.each_entry), [4.0, 3.5, 0.875, 1 / 3]),
    "value and norm": (
        uc.chain(uc.by_value(-1.0, 1.0), uc.by_norm(0.5)),
        [2**0.5, 0.5, 0.353553, 1 / 3],
    ),
    "two rules": (
        uc.chain(uc.by_global_norm(9.0), uc.by_global_norm(2.0)),
        [5.006246, 2.0, 0.399501, 1.0],
    ),
    "two that clip": (uc.chain(uc.by_norm(4.0), uc.by_global_norm(2.0)), [5.0, 2.0, 0.399220, 1.0]),
    "no norm": (uc.by_value(-1.0, 1.0), []),
}
"""Largest norm, smallest limit and factor, the share of factors other than 1, and the skip flag."""


@pytest.mark.parametrize("name", SCALARS)
def test_scalars(framework: Framework, name: str) -> None:
    """Scalars summarize a report for loggers: the same names for every rule, all 0-d arrays."""
    rule, wanted = SCALARS[name]
    scalars = uc.clip(made(framework), rule)[1].scalars()
    assert all(tuple(value.shape) == () and framework.owns(value) for value in scalars.values())
    found = {name: float(framework.numpy(value)) for name, value in scalars.items()}
    names = ("clip/norm", "clip/limit", "clip/factor", "clip/share", "clip/skipped")
    assert found == pytest.approx(dict(zip(names, wanted, strict=False)), rel=1e-5)


FIRST = math.exp(math.log(8) / 4 + math.log(8) * (3 / 16) ** 0.5)
THRESHOLDS: dict[str, tuple[Any, list[float], list[float]]] = {
    "zclip": (uc.zclip(z=2.0, warmup=2), [1.0, 3.0, 50.0], [math.inf, math.inf, 4.0]),
    "log_zscore": (uc.log_zscore(z=1.0), [1.0, 1.0, 1.0, 8.0], [1.0001, 1.0001, 1.0001, FIRST]),
    "skip_spikes": (
        uc.skip_spikes(z=2.0, warmup=2),
        [1.0, 3.0, 50.0],
        [math.inf, math.inf, 2 + 8**0.5],
    ),
    "in a group": (
        uc.by_group_norm({0: uc.limits.ZScore(2.0, 0.9, warmup=2)}, lambda path, leaf: 0),
        [1.0, 3.0, 50.0],
        [math.inf, math.inf, 4.0],
    ),
}


@pytest.mark.parametrize("name", THRESHOLDS)
def test_thresholds(framework: Framework, name: str) -> None:
    """Rules that clip only above a threshold report it, also at an unclipped step.

    The largest number stands for no threshold.
    """
    rule, norms, wanted = THRESHOLDS[name]
    state, found = rule.init([framework.array([0.0])]), []
    for norm in norms:
        _, state, report = rule.update([framework.array([norm])], state)
        found.append(float(framework.numpy(report.scalars()["clip/threshold"])))
        assert float(framework.numpy(leaves([report.thresholds])[0])) == found[-1]
    np.testing.assert_allclose(
        [math.inf if one > 1e38 else one for one in found], wanted, rtol=2e-4
    )
    report = uc.clip(framework.array([3.0]), uc.by_norm(1.0))[1]
    assert (report.thresholds, "clip/threshold" in report.scalars()) == (None, False)


LINES: dict[str, tuple[Any, list[Any], str]] = {
    "one norm": (uc.by_global_norm(1.0), [[3.0, 4.0]], "norm 5, limit 1, clipped, finite"),
    "not clipped": (uc.by_global_norm(6.0), [[3.0, 4.0]], "norm 5, limit 6, not clipped, finite"),
    "measured": (uc.by_global_norm(np.inf), [[3.0, 4.0]], "norm 5, not clipped, finite"),
    "many": (
        uc.by_norm(1.0, axis=1),
        [[[3.0, 4.0], [0.3, 0.4]]],
        "norm 5 (largest of 2), clipped 50%, finite",
    ),
    "none of many": (uc.by_norm(9.0), [[3.0], [4.0]], "norm 4 (largest of 2), clipped 0%, finite"),
    "few of many": (
        uc.by_norm(1.0, axis=1),
        [[[2.0]] + [[0.5]] * 999],
        "norm 2 (largest of 1,000), clipped <1%, finite",
    ),
    "a thousand": (
        uc.by_norm(0.5, axis=1),
        [[[1.0]] * 1024],
        "norm 1 (largest of 1,024), clipped 100%, finite",
    ),
    "not finite": (
        uc.by_norm(1.0, nonfinite="skip"),
        [[np.nan]],
        "norm nan, limit 1, skipped, non-finite",
    ),
    "two rules": (
        uc.chain(uc.by_global_norm(9.0), uc.by_norm(1.0)),
        [[3.0], [4.0]],
        "norm 5, limit 9, not clipped, finite | norm 4 (largest of 2), clipped 100%, finite",
    ),
    "no norm": (uc.by_value(-1.0, 1.0), [[3.0]], "no norm measured"),
}


@pytest.mark.parametrize("name", LINES)
def test_one_line(framework: Framework, name: str) -> None:
    """The summary line has the norm, and whether the step was clipped and finite."""
    rule, grads, wanted = LINES[name]
    report = uc.clip(list(map(framework.array, grads)), rule)[1]
    assert (str(report), repr(report)) == (wanted, f"<Report: {wanted}>")


@pytest.mark.only("tensorflow", "jax")
def test_one_line_of_what_has_no_values_yet(compiler: Framework) -> None:
    """In code that is being compiled, the summary line says that there are no values."""
    lines = []
    compiler.run(
        lambda grads: lines.append(str(uc.clip(grads, uc.by_norm(0.5))[1])) or grads,
        compiler.array([1.0]),
    )
    assert "traced" in lines[0]


@on_numpy
def test_a_report_can_be_copied() -> None:
    """A pickle, a copy and a mapped tree of a report have its values, also for a chain."""
    for rule in (uc.by_norm(1.0), uc.chain(uc.by_norm(2.0), uc.by_global_norm(1.0))):
        report = uc.clip([np.asarray([3.0, 4.0]), np.asarray([0.1])], rule)[1]
        for again in (
            pickle.loads(pickle.dumps(report)),
            copy.deepcopy(report),
            optree.tree_map(np.asarray, report),
        ):
            assert (str(again), again.scalars()) == (str(report), report.scalars())


EXAMPLES = {"b": np.asarray([[5.0], [12.0], [1.0]]), "w": np.arange(6.0).reshape(3, 2)}
RULES = {
    name: rule
    for name, rule in every_rule(uc).items()
    if not name.startswith(("cowclip", "masked"))
}


@pytest.mark.only("numpy", "torch")
@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("name", RULES)
def test_it_shows_the_values_of_its_step(framework: Framework, name: str, in_place: bool) -> None:
    """A report that is read late has the values of its step, even if arrays changed since."""

    def shown(*, late: bool) -> list[np.ndarray]:
        rule, grads, weights = RULES[name], made(framework, EXAMPLES), made(framework, EXAMPLES)
        state = rule.init(weights)
        _, state, _ = rule.update(made(framework, EXAMPLES), state, weights)
        clipped, new, report = rule.update(grads, state, weights, in_place=in_place)
        changed = optree.tree_leaves((grads, weights, clipped, state, new)) if late else []
        for array in changed:
            if not isinstance(array, np.generic):
                array[...] = 77
        return [
            framework.numpy(leaf) for field in FIELDS for leaf in leaves([getattr(report, field)])
        ]

    for late, early in zip(shown(late=True), shown(late=False), strict=True):
        np.testing.assert_array_equal(late, early)


@pytest.mark.only("numpy", "torch")
def test_a_limit_that_is_changed_later(framework: Framework) -> None:
    """A limit in an array is read at each step.

    A report keeps the value of its step.
    """
    for make in (uc.by_norm, uc.by_global_norm):
        limit = framework.array(2.0)
        rule = make(limit)
        _, before = uc.clip(made(framework, EXAMPLES), rule)
        limit[...] = 77
        _, after = uc.clip(made(framework, EXAMPLES), rule)
        for report, value in ((before, 2.0), (after, 77.0)):
            assert {framework.numpy(one).item() for one in leaves([report.limits])} == {value}


@pytest.mark.needs("jax")
def test_reports_of_jax_are_trees_of_one_kind() -> None:
    """Reports passed into a compiled program and created there have the same tree structure."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(grads: Any, most: uc.Report) -> uc.Report:
        return jax.tree.map(jnp.maximum, most, uc.clip(grads, uc.by_norm(1.0))[1])

    most = uc.clip({"a": jnp.asarray([5.0])}, uc.by_norm(1.0))[1]
    for norm in (2.0, 9.0):
        most = step({"a": jnp.asarray([norm])}, most)
        assert isinstance(most, uc.Report)
    assert (float(most.norms["a"]), bool(most.clipped), most.skipped) == (9.0, True, None)
    assert float(most.scalars()["clip/norm"]) == 9.0
    copied = jax.tree.map(jnp.minimum, most, copy.deepcopy(most))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(copied)]
    assert paths == [".norms['a']", ".limits['a']", ".factors['a']", ".clipped", ".finite"]
    jax.jit(clipper := uc.Clipper(uc.by_norm(1.0)))([jnp.ones(3)])
    assert (str(clipper.report), clipper.logs()) == (
        "traced: the values are known when the program runs",
        {},
    )


def test_a_report_of_classes(framework: Framework) -> None:
    """The fields of a report have the structure of the gradients, also in a copy."""
    rows: list[dict[str, Any]] = []
    tree = Pair(framework.array([3.0]), framework.array([4.0]))
    for one in (report := uc.clip(tree, uc.by_norm(1.0))[1], copy.copy(report)):
        with insight.Recorder(rows.append) as record:
            record(one)
    assert isinstance(report.norms, Pair)
    assert [row["clip/norm"] for row in rows] == [4.0, 4.0]


@on_numpy
def test_a_report_of_a_class_of_ones_own() -> None:
    """A report of a custom class has its own fields, and loggers read them."""

    class Own(uc.Report):
        def __init__(self, norm: float) -> None:
            given = uc.Report(
                np.float64(norm), np.float64(1.0), np.float64(0.5), finite=np.bool_(True)
            )
            (
                self.norms,
                self.limits,
                self.factors,
                self.clipped,
                self.finite,
                self.skipped,
                self.thresholds,
            ) = given

    rows: list[dict[str, Any]] = []
    with insight.Recorder(rows.append) as record:
        record(Own(2.0))
    assert {name: rows[0][name] for name in ("clip/norm", "clip/factor")} == {
        "clip/norm": 2.0,
        "clip/factor": 0.5,
    }


def test_the_order_of_norms() -> None:
    """The norms of groups are sorted by label; those of leaves have the order of the gradients."""
    grads = {"w": np.ones(1), "b": np.ones(4), "a": {"z": np.ones(9), "c": np.zeros(2)}}
    limits = {"w": 1.0, "b": 2.0, "a": 3.0}
    _, report = uc.clip(grads, uc.by_group_norm(limits, lambda path, leaf: path[0]))
    assert [list(field.items()) for field in (report.norms, report.limits)] == [
        [("a", 3.0), ("b", 2.0), ("w", 1.0)],
        [("a", 3.0), ("b", 2.0), ("w", 1.0)],
    ]
    _, report = uc.clip(grads, uc.by_norm(1.0))
    assert (list(report.norms), list(report.norms["a"])) == (["w", "b", "a"], ["z", "c"])
