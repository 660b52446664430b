"""What a report holds: no gradient, and the values of its step, made when somebody looks."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
import pytest

import uniclip as uc
from frameworks import CHOSEN, EAGER, TRACED, Framework
from uniclip import step

UNTRACED = pytest.mark.parametrize("framework", [fw for fw in CHOSEN if not fw.traced], ids=lambda fw: fw.name)
"""A report that leaves code which is traced has its fields."""


@dataclass
class Pair:
    """A container that no library of trees knows."""

    a: Any
    b: Any


TREES: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda a, b: [a, b],
    "nested": lambda a, b: {"x": (a, None), "y": [b]},
    "own container": Pair,
    "generator": lambda a, b: iter([a, b]),
    "twice": lambda a, b: [a, b, a],
}
RULES: dict[str, Any] = {
    "global": uc.by_global_norm(1.0),
    "not clipped": uc.by_global_norm(1e9),
    "global, order 3": uc.by_global_norm(1.0, ord=3),
    "each leaf": uc.by_norm(1.0),
    "each leaf, not clipped": uc.by_norm(1e9),
    "rows": uc.by_norm(1.0, axis=-1),
    "each entry": uc.Rule(1.0, scope=uc.scopes.each_entry, norm=uc.norms.Linf),
    "soft": uc.by_norm(1.0, curve=uc.curves.soft),
    "skip": uc.by_norm(1.0, curve=uc.curves.reject, nonfinite="skip"),
    "zero": uc.by_global_norm(1.0, nonfinite="zero"),
    "raise": uc.by_norm(1.0, nonfinite="raise"),
    "agc": uc.agc(0.01),
    "adagc": uc.adagc(warmup=1),
    "autoclip": uc.autoclip(50, window=3),
    "spam": uc.spam(warmup=0),
    "groups": uc.by_group_norm(
        {2: 1.0, 1: uc.limits.Ema(1.05, 0.9)}, lambda path, leaf: 1 if leaf is None else len(leaf.shape)
    ),
    "chain": uc.chain(uc.by_value(-0.5, 0.5), uc.zclip(warmup=2), uc.by_norm(0.1)),
    "masked": uc.masked(uc.by_norm(1.0), lambda path, leaf: len(leaf.shape) == 2),
    "value": uc.by_value(-0.5, 0.5),
    "function": lambda grad: grad / 2,
}


def leaves_of(fw: Framework) -> list[Any]:
    """Return two gradients that nobody else holds; PyTorch's, too, are not views of NumPy's."""
    return [fw.array(np.asarray([[3.0, 4.0], [6.0, 8.0]])), fw.array(np.asarray([5.0, 12.0]))]


def living(references: list[Any]) -> list[Any]:
    """Return what is still alive."""
    if any(reference() is not None for reference in references):
        gc.collect()  # which takes long
    return [reference() for reference in references if reference() is not None]


def fields(fw: Framework, report: uc.Report) -> list[Any]:
    """Return copies of all that a report shows."""
    return [None if x is None else np.array(fw.numpy(x)) for x in optree.tree_leaves(tuple(report), none_is_leaf=True)]


def same(found: list[Any], wanted: list[Any]) -> None:
    """Assert that two reports have shown the same."""
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("name", RULES)
@UNTRACED
def test_it_keeps_no_gradient_alive(framework: Framework, name: str, tree: Any) -> None:
    """Gradients and parameters end with their last owner, though the report, the state and the rule live on."""
    with framework.context():
        clipper, leaves, params = uc.Clipper(RULES[name]), leaves_of(framework), leaves_of(framework)
        for _ in range(2):
            clipper(tree(*leaves), tree(*params))
        alive = [weakref.ref(leaf) for leaf in [*leaves, *params]]
        del leaves, params
        assert not living(alive)
        tuple(clipper.report)


@pytest.mark.parametrize("name", ["global", "each leaf", "rows", "adagc", "autoclip", "chain", "masked", "zero"])
def test_it_keeps_no_gradient_alive_in_place(fw: Framework, name: str) -> None:
    """Nor does it if they were changed in place."""
    if not fw.writes or fw.traced:
        return
    clipper, leaves = uc.Clipper(RULES[name]), leaves_of(fw)
    clipper.clip_([*leaves, leaves[0]])
    alive = [weakref.ref(leaf) for leaf in leaves]
    del leaves
    assert not living(alive)


class Returned(uc.Limit):
    """A limit that hands its own state out, and allows half as much at the next step."""

    memory = True
    host = True

    def init(self, norms: Any, context: uc.limits.Context) -> Any:
        return uc.limits.fixed.Counted(norms + 2)

    def __call__(self, norms: Any, state: Any, context: uc.limits.Context) -> Any:
        return state.count, uc.limits.fixed.Counted(state.count / 2)


def overwrite(fw: Framework, array: Any) -> None:
    """Change what an array holds."""
    if fw.family == "PyTorch":
        array.fill_(77)
    elif isinstance(array, np.ndarray):
        array[...] = 77


CHANGED = RULES | {"returns its state": uc.Rule(Returned(), scope=uc.scopes.each_leaf)}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", [name for name in CHANGED if name not in {"value", "function"}])
def test_it_shows_the_values_of_its_step(fw: Framework, name: str, in_place: bool) -> None:
    """A report that is read late shows what one shows that was read at once, whatever was changed in between."""
    if not fw.writes or fw.traced:
        return

    def shown(*, late: bool) -> list[Any]:
        rule, grads, params = CHANGED[name], leaves_of(fw), leaves_of(fw)
        _, state, _ = rule.update(leaves_of(fw), rule.init(grads), params)
        clipped, new, report = rule.update(grads, state, params, in_place=in_place)
        if late:
            for array in optree.tree_leaves((grads, clipped, state, new, params)):
                overwrite(fw, array)
        return fields(fw, report)

    same(shown(late=True), shown(late=False))


@pytest.mark.parametrize("name", ["global", "each leaf"])
def test_a_limit_that_is_changed_later(fw: Framework, name: str) -> None:
    """A limit that is an array is taken by value at the step; the next step sees another one."""
    if not fw.writes or fw.traced:
        return
    limit = fw.array(2.0)
    rule = uc.Rule(limit, scope=RULES[name].scope)
    _, report = uc.clip(leaves_of(fw), rule)
    overwrite(fw, limit)
    assert {fw.numpy(x).item() for x in optree.tree_leaves(report.limits)} == {2.0}
    assert {fw.numpy(x).item() for x in optree.tree_leaves(uc.clip(leaves_of(fw), rule)[1].limits)} == {77.0}


@pytest.mark.parametrize("name", [name for name in RULES if name not in {"value", "function", "chain", "masked"}])
@UNTRACED
def test_no_field_is_made_before_somebody_looks(
    framework: Framework, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step makes no field of its report; each is made once, when it is asked for."""
    made: list[str] = []
    several, single = step._Seen.field, step._OfOne.field
    monkeypatch.setattr(step._Seen, "field", lambda seen, field: made.append(field) or several(seen, field))
    monkeypatch.setattr(step._OfOne, "field", lambda seen, field: made.append(field) or single(seen, field))
    with framework.context():
        clipper = uc.Clipper(RULES[name])
        for _ in range(2):
            clipper(leaves_of(framework), leaves_of(framework))
        assert made == []
        report = clipper.report
        for _ in range(2):
            assert report.norms is report.norms
            assert made == ["norms"]
        tuple(report)
        report.scalars()
        assert sorted(made) == sorted(["norms", "limits", "factors", "clipped", "finite", "skipped", "thresholds"])


@UNTRACED
def test_rules_of_rules_make_none_either(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain asks whether a step is left out, which the next rule has to know, and nothing else."""
    made: list[str] = []
    for kind in (step._Seen, step._OfOne):
        field = kind.field
        monkeypatch.setattr(kind, "field", lambda seen, name, field=field: made.append(name) or field(seen, name))
    with framework.context():
        for rule in (uc.chain(uc.by_norm(1.0), uc.by_global_norm(0.5)), RULES["masked"]):
            _, report = uc.clip(leaves_of(framework), rule)
            assert set(made) <= {"skipped"}
            made.clear()
            assert framework.numpy(report.clipped)
            assert "clipped" in made
            made.clear()


def test_each_norm_has_its_own_dtype(fw: Framework) -> None:
    """A leaf in double precision is measured in it, one in half precision beside it in single."""
    dtypes = [dtype for dtype in ("float16", "bfloat16", "float32", "float64") if dtype in fw.dtypes]
    grads = {dtype: fw.array([3.0, 4.0], dtype) for dtype in dtypes}
    wanted = {dtype: "float64" if dtype == "float64" else "float32" for dtype in dtypes}
    rules = (uc.by_norm(1.0), uc.by_norm(9.0), uc.Rule(1.0, scope=uc.scopes.unit(), norm=uc.norms.RMS))
    for clipped, report in fw.run(lambda g: [uc.clip(g, rule) for rule in rules], grads):
        for field in (report.norms, report.limits, report.factors):
            assert {name: fw.dtype(array) for name, array in field.items()} == wanted
        assert {name: fw.dtype(array) for name, array in clipped.items()} == {dtype: dtype for dtype in dtypes}
    assert fw.dtype(fw.run(lambda g: uc.clip(g, uc.by_global_norm(1.0)), grads)[1].norms) == max(wanted.values())


LINES: dict[str, tuple[Any, list[Any], str]] = {
    "one norm": (uc.by_global_norm(1.0), [[3.0, 4.0]], "norm 5, limit 1, clipped, finite"),
    "not clipped": (uc.by_global_norm(6.0), [[3.0, 4.0]], "norm 5, limit 6, not clipped, finite"),
    "measured": (uc.by_global_norm(np.inf), [[3.0, 4.0]], "norm 5, not clipped, finite"),
    "many": (uc.by_norm(1.0, axis=1), [[[3.0, 4.0], [0.3, 0.4]]], "norm 5 (largest of 2), clipped 50 %, finite"),
    "not finite": (uc.by_norm(1.0, nonfinite="skip"), [[np.nan]], "norm nan, limit 1, clipped, not finite, skipped"),
    "chain": (uc.chain(abs, uc.by_norm(1.0)), [[3.0], [4.0]], "norm 4 (largest of 2), clipped 100 %, finite"),
    "two rules": (
        uc.chain(uc.by_global_norm(9.0), uc.by_norm(1.0)),
        [[3.0], [4.0]],
        "norm 5, limit 9, not clipped, finite | norm 4 (largest of 2), clipped 100 %, finite",
    ),
    "no norm": (uc.by_value(-1.0, 1.0), [[3.0]], "no norm measured"),
}


@UNTRACED
@pytest.mark.parametrize("case", LINES)
def test_a_report_prints_one_line(framework: Framework, case: str) -> None:
    """What a newcomer wants to know: the norm, whether it was clipped, and whether all was finite."""
    rule, grads, wanted = LINES[case]
    report = uc.clip(list(map(framework.array, grads)), rule)[1]
    assert str(report) == wanted
    assert repr(report) == f"<Report: {wanted}>"


@pytest.mark.ways(*EAGER, "tf.function", "jax.jit", without="Dask")  # torch.compile breaks its graph at what prints
def test_a_large_report_prints_one_line(fw: Framework) -> None:
    """A thousand norms take no more than one; what has no values yet, be it of two norms, says so."""
    grads, lines = [fw.array([1.0])] * (2 if fw.traced else 1024), []

    def clipped(some: Any) -> Any:
        new, report = uc.clip(some, uc.by_norm(0.5))
        lines.append(str(report))
        return new

    fw.run(clipped, grads)
    traced = "traced: the values are known when the program runs"
    assert lines[0] == (traced if fw.traced else "norm 1 (largest of 1,024), clipped 100 %, finite")


TRIGGERS: dict[str, tuple[Any, list[float], float]] = {
    "zclip": (uc.zclip(z=2.0, warmup=2), [1.0, 3.0, 2.0, 50.0], 4.0),
    "log_zscore": (uc.log_zscore(z=1.0), [1.0, 1.0, 1.0, 8.0], 8.0),
    "skip_spikes": (uc.skip_spikes(z=2.0, warmup=2), [1.0, 3.0, 50.0], 2 + 2 * 2**0.5),
    "in a group": (
        uc.by_group_norm({0: uc.limits.ZScore(2.0, 0.9, warmup=2)}, lambda path, leaf: 0),
        [1.0, 3.0, 50.0],
        4.0,
    ),
}


@pytest.mark.parametrize("case", TRIGGERS)
@pytest.mark.ways(*TRACED)
def test_thresholds(fw: Framework, case: str) -> None:
    """A rule that clips only above a threshold says it, at calm steps too, where its limit is the largest number."""
    rule, norms, wanted = TRIGGERS[case]
    state, update = rule.init([fw.array([0.0])]), fw.compiled(lambda g, s: rule.update(g, s))
    found = []
    for norm in norms:
        _, state, report = update([fw.array([norm])], state)
        found.append(float(fw.numpy(report.scalars()["clip/threshold"])))
    assert found[0] > 1e30 or case == "log_zscore"  # nothing is known yet
    assert all(value < 1e3 for value in found[2:]), found
    if case == "log_zscore":
        mean = np.log(8) / 4
        wanted = float(np.exp(mean + np.log(8) * (3 / 16) ** 0.5))
    elif case == "zclip":
        return  # its statistics have moved since
    np.testing.assert_allclose(found[-1], wanted, rtol=1e-4)


def test_rules_without_thresholds(fw: Framework) -> None:
    """Where the limit is the threshold, there is no other one."""
    _, report = fw.run(lambda g: uc.clip(g, uc.by_norm(1.0)), [fw.array([3.0])])
    assert report.thresholds is None
    assert "clip/threshold" not in report.scalars()


def test_a_report_can_be_copied() -> None:
    """A pickle or a copy has the fields; the report of a chain stays one."""
    for rule in (uc.by_norm(1.0), uc.chain(uc.by_norm(2.0), uc.by_global_norm(1.0))):
        report = uc.clip([np.asarray([3.0, 4.0]), np.asarray([0.1])], rule)[1]
        for again in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report), optree.tree_map(np.asarray, report)):
            assert str(again) == str(report)
            assert again.scalars() == report.scalars()


def test_a_threshold_of_another_shape() -> None:
    """What a limit says of its threshold is validated like its limits, at the step."""

    class Odd(uc.Limit):
        host = True

        def __call__(self, norms: Any, state: Any, context: Any) -> Any:
            context.threshold = np.ones(7)
            return 1.0, state

    with pytest.raises(ValueError, match=r"a threshold of shape \(7,\) does not fit norms of shape \(2,\)"):
        uc.clip([np.ones(2), np.ones(3)], uc.Rule(Odd(), scope=uc.scopes.each_leaf))
