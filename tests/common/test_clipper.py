"""`Clipper`: it does what the pure loop does, and its memory survives copies, files and other frameworks."""

from __future__ import annotations

import copy
import json
import math
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import optree
import pytest

import uniclip as uc
from frameworks import CHOSEN, KNOWN, Framework

NUMPY = KNOWN["numpy"]()


def falling(step: Any) -> Any:
    """Return the limit of a step, for `Schedule`; it has a name, so that the rule can be pickled."""
    return 3.0 / (1.0 + step)


def weight(path: Any, leaf: Any) -> bool:
    """Whether a leaf is a weight."""
    return path[0] == "w"


def first_key(path: Any, leaf: Any) -> Any:
    """Return the label of a leaf."""
    return path[0]


@dataclass(frozen=True)
class Largest(uc.Limit):
    """A limit of one's own: half the largest norm so far; its state is a dict."""

    memory: ClassVar[bool] = True

    def init(self, norms: list[Any], given: uc.Given) -> Any:
        return {"largest": [0 * norm for norm in norms]}

    def __call__(self, norms: list[Any], state: Any, given: uc.Given) -> Any:
        xp = given.xp
        largest = [xp.where(n > old, n, old) for n, old in zip(norms, state["largest"], strict=True)]
        return [0.5 * n for n in largest], {"largest": largest}


RULES = {
    "schedule": uc.by_global_norm(uc.Schedule(falling)),
    "autoclip": uc.autoclip(50, window=4),
    "autoclip-all": uc.autoclip(50, window=None),
    "percentile": uc.percentile(50, window=3),
    "zclip": uc.chain(uc.zclip(z=1.0, warmup=2), uc.by_global_norm(5.0)),
    "log_zscore": uc.log_zscore(z=1.0),
    "adagc": uc.adagc(warmup=2),
    "norm_growth": uc.norm_growth(),
    "skip_spikes": uc.skip_spikes(z=1.0, window=4, warmup=2),
    "spam": uc.spam(factor=2.0, decay=0.5, warmup=1),
    "adagn": uc.adagn(),
    "quantile": uc.by_example_quantile(),
    "per_group": uc.Rule(uc.PerGroup({"b": uc.Ema(1.05, 0.98), "w": 1.0}), scope=uc.groups(first_key)),
    "masked": uc.masked(uc.chain(np.negative, uc.autoclip(50, window=4)), weight),
    "own": uc.Rule(Largest(), scope=uc.unit(0)),
    "no memory": uc.by_norm(1.0),
}
SOME = ["autoclip", "zclip", "spam", "own"]


@pytest.fixture(params=[one for one in CHOSEN if one.family != "Dask"] or CHOSEN, ids=lambda one: one.name)
def fw(request: pytest.FixtureRequest) -> Iterator[Framework]:
    """Each framework this run is for, but Dask if others are, too: it takes long, and the tests of rules have it."""
    with request.param.context():
        yield request.param


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> Any:
    """Each rule; `skip_spikes` looks at a loss that it gets, the others take it and do not."""
    return RULES[request.param]


def negated(rule: Any, fw: Framework) -> Any:
    """Return the rule; a function of arrays inside is one that every framework runs."""
    return uc.masked(uc.chain(negative, uc.autoclip(50, window=4)), weight) if isinstance(rule, uc.Masked) else rule


def negative(array: Any) -> Any:
    """Return an array with the other sign."""
    return -array


def steps_of(fw: Framework) -> list[Any]:
    """Return the gradients of some steps; their norms vary by a factor of a hundred."""
    rng, count = np.random.default_rng(3), 5 if fw.family == "Dask" else 8  # which takes long
    return [
        {"b": fw.array(size * rng.standard_normal(3)), "none": None, "w": fw.array(size * rng.standard_normal((3, 2)))}
        for size in 10 ** rng.uniform(-1, 1, 8)[:count]
    ]


def values(fw: Framework, tree: Any) -> list[np.ndarray]:
    """Return the leaves of a tree as NumPy's."""
    return [fw.numpy(leaf) for leaf in optree.tree_leaves(tree)]


def computed(state: Any) -> Any:
    """Return a state with its values: in Dask's arrays, which are lazy, all steps before would be done again."""
    return optree.tree_map(lambda array: array.persist() if hasattr(array, "persist") else array, state)


def same(fw: Framework, one: Any, other: Any, like: Framework | None = None, rtol: float = 0.0) -> None:
    """Compare two trees, bit by bit unless they are of two frameworks."""
    pairs = zip(values(fw, one), values(like or fw, other), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol, strict=not rtol)


def train(clipper: uc.Clipper, steps: list[Any]) -> list[Any]:
    """Return the clipped gradients of some steps, each with a loss."""
    return [clipper(grads, loss=float(number % 3)) for number, grads in enumerate(steps)]


def test_a_clipper_is_the_pure_loop(fw: Framework, rule: Any) -> None:
    """At each step gradients, state and report are those of `rule.update`, and without memory those of `clip`."""
    rule = negated(rule, fw)
    clipper, steps = uc.Clipper(rule), steps_of(fw)
    assert clipper.rule is rule
    assert clipper.report is clipper.state is None
    state = rule.init(steps[0])
    for number, grads in enumerate(steps):
        wanted, state, report = rule.update(grads, computed(state), loss=float(number % 3))
        clipped = clipper(grads, loss=float(number % 3))
        assert all(fw.owns(leaf) for leaf in optree.tree_leaves(clipped))
        same(fw, clipped, wanted)
        same(fw, clipper.state, state)
        same(fw, clipper.report, report)
        assert isinstance(clipper.report, uc.Report)
    if not rule.memory:
        same(fw, clipped, uc.clip(steps[-1], rule)[0])


def test_it_prints_as_its_source() -> None:
    """What a clipper prints evaluates to a new one of an equal rule."""
    clipper = uc.Clipper(uc.zclip(z=3.0))
    assert repr(clipper) == "Clipper(Rule(ZScore(3.0, 0.97)))"
    assert eval(repr(clipper), vars(uc).copy()).rule == clipper.rule


@pytest.mark.parametrize("wrong", [1.0, None, uc.Rule, "zclip"], ids=repr)
def test_what_is_no_rule(wrong: Any) -> None:
    """Whatever is neither a rule nor a function is refused at once."""
    with pytest.raises(TypeError, match=r"rule must be a rule, .*uc.by_global_norm\(1.0\)"):
        uc.Clipper(wrong)


def test_functions_and_params(fw: Framework) -> None:
    """A function is a rule, too; parameters and a reduction over devices reach the rule."""
    clipper = uc.Clipper(negative)
    np.testing.assert_array_equal(fw.numpy(clipper(fw.array([1.0, -2.0]))), [-1.0, 2.0])
    assert clipper.report == uc.Report()
    grads, params = [fw.array([3.0, 4.0])], [fw.array([0.0, 10.0])]
    np.testing.assert_allclose(fw.numpy(uc.Clipper(uc.agc(0.1))(grads, params)[0]), fw.numpy(uc.clip(
        grads, uc.agc(0.1), params)[0][0]))  # fmt: skip
    with pytest.raises(ValueError, match="pass params="):
        uc.Clipper(uc.agc(0.1))(grads)
    doubled = uc.Clipper(uc.by_global_norm(1.0, ord=1))
    doubled(grads, all_reduce=lambda total, op: 2 * total)
    assert float(fw.numpy(doubled.report.norms)) == 14


def test_the_loss(fw: Framework) -> None:
    """A spike of the loss alone makes the gradients zero; without a loss nothing does."""
    losses = [1.0, 1.1, 0.9, 100.0, 1.0]
    with_loss, without = (uc.Clipper(uc.skip_spikes(window=8, warmup=3)) for _ in range(2))
    for loss in losses:
        grads = [fw.array([3.0, 4.0])]
        clipped = with_loss(grads, loss=fw.array(loss) if loss < 2 else loss)
        np.testing.assert_array_equal(fw.numpy(clipped[0]), [3.0, 4.0] if loss < 2 else [0.0, 0.0])
        np.testing.assert_array_equal(fw.numpy(without(grads)[0]), [3.0, 4.0])


@pytest.mark.parametrize("name", SOME)
def test_in_place(fw: Framework, name: str) -> None:
    """`clip_` changes the arrays themselves, and returns the report; where arrays never change it is an error."""
    rule = RULES[name]
    usual, in_place = uc.Clipper(rule), uc.Clipper(rule)
    for number, (grads, own) in enumerate(zip(steps_of(fw), steps_of(fw), strict=True)):
        if not fw.writes:
            with pytest.raises(TypeError, match=r"never change|read-only|use uc\.clip"):
                in_place.clip_(own, loss=float(number % 3))
            assert in_place.report is in_place.state is None
            continue
        wanted = usual(grads, loss=float(number % 3))
        report = in_place.clip_(own, loss=float(number % 3))
        same(fw, own, wanted)
        assert in_place.report is report
        same(fw, report, usual.report)
        same(fw, in_place.state, usual.state)


def test_generators(fw: Framework) -> None:
    """A generator can be read once: that is enough, at the first step, too."""
    for name in SOME:
        rule = RULES[name]
        one, other = uc.Clipper(rule), uc.Clipper(rule)
        for grads in steps_of(fw):
            leaves = [grads["w"], grads["b"]]
            same(fw, list(one(leaf for leaf in leaves)), other(leaves), rtol=1e-6)
        same(fw, one.state, other.state, rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "zero", "raise"])
def test_a_step_that_is_not_finite(fw: Framework, bad: float, nonfinite: Any) -> None:
    """It changes nothing that was learned; the report is of that step, unless it raised."""
    inner = uc.zclip(warmup=2, nonfinite=nonfinite)
    for rule in (inner, uc.chain(inner, uc.by_global_norm(5.0)), uc.autoclip(50, 4, nonfinite=nonfinite)):
        clipper, steps = uc.Clipper(rule), steps_of(fw)
        train(clipper, steps[:3])
        before, report = clipper.state_dict(), clipper.report
        wrong = {**steps[3], "b": fw.array([1.0, bad, 1.0])}
        if nonfinite == "raise":
            with pytest.raises(FloatingPointError, match=r"^NaN or ∞ in grads\['b'\]$"):
                clipper(wrong)
            assert clipper.report is report
        else:
            clipper(wrong)
            assert not bool(fw.numpy(clipper.report.finite))
        assert clipper.state_dict() == before
        other = uc.Clipper(rule)
        same(fw, train(clipper, steps[4:]), train(other, steps[:3] + steps[4:])[3:])
        first = uc.Clipper(rule)  # and the first step may be such a one
        if nonfinite != "raise":
            first(wrong)
            same(fw, first.state, rule.init(wrong))


COPIES: dict[str, Callable[[uc.Clipper], uc.Clipper]] = {
    "pickle": lambda clipper: pickle.loads(pickle.dumps(clipper)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def loaded(saved: dict[str, Any], rule: Any) -> uc.Clipper:
    """Return a new clipper that goes on from what was saved."""
    clipper = uc.Clipper(rule)
    clipper.load_state_dict(saved)
    return clipper


@pytest.mark.parametrize(("way", "name", "done"), [("json", name, 3) for name in RULES] + [
    (way, name, done) for way in (*COPIES, "json", "state") for name, done in (("zclip", 0), ("spam", 2))
])  # fmt: skip
def test_going_on(fw: Framework, name: str, way: str, done: int) -> None:
    """After any way through a copy or a file, all later steps are bitwise those of the clipper itself."""
    rule = negated(RULES[name], fw)
    clipper, steps = uc.Clipper(rule), steps_of(fw)
    train(clipper, steps[:done])
    before = clipper.state_dict()
    if way in COPIES:
        again = COPIES[way](clipper)
    elif way == "json":
        again = loaded(json.loads(json.dumps(before)), rule)
    else:
        again = uc.Clipper(rule)
        again.state = clipper.state
    assert again.rule == rule
    assert again.report is None
    assert again.state_dict() == before  # before its first step, too
    wanted = train(clipper, steps[done:])
    same(fw, train(again, steps[done:]), wanted)
    same(fw, again.state, clipper.state)
    same(fw, again.report, clipper.report)
    for mine, its in zip(optree.tree_leaves(again.state), optree.tree_leaves(clipper.state), strict=True):
        assert fw.owns(mine)
        assert fw.dtype(mine) == fw.dtype(its)


def test_copies_go_their_own_ways(fw: Framework) -> None:
    """What a copy sees later, and what is done to a dictionary, does not reach the clipper."""
    steps = steps_of(fw)
    for make in COPIES.values():
        clipper = uc.Clipper(RULES["autoclip"])
        train(clipper, steps[:3])
        before = clipper.state_dict()
        train(make(clipper), steps[3:])
        assert clipper.state_dict() == before
        clipper.state_dict().clear()
        assert clipper.state_dict() == before
        saved = clipper.state_dict()
        again = loaded(saved, clipper.rule)
        saved.clear()
        assert again.state_dict() == before


def plain(value: Any) -> bool:
    """Whether a value is made of Python's own numbers and lists."""
    return all(map(plain, value)) if type(value) is list else type(value) in {int, float, bool}


def test_state_dict(fw: Framework, rule: Any) -> None:
    """It is made of plain numbers, lists and names; without a step it is empty, without memory it stays so."""
    rule = negated(rule, fw)
    clipper = uc.Clipper(rule)
    assert clipper.state_dict() == {}
    train(clipper, steps_of(fw))
    saved = clipper.state_dict()
    assert type(saved) is dict
    assert bool(saved) == rule.memory
    assert all(type(name) is str and plain(value) for name, value in saved.items())
    assert json.loads(json.dumps(saved)) == saved


def test_names_in_a_state_dict(fw: Framework) -> None:
    """A name is the way to the array: the number of a rule in a chain, the field, the number of the norm."""
    clipper = uc.Clipper(uc.chain(uc.by_value(10.0), uc.adagc(warmup=0)))
    clipper([fw.array([3.0, 4.0]), fw.array([2.0])])
    assert clipper.state_dict() == {"1.averages.0": 5.0, "1.averages.1": 2.0, "1.count": 1}


@pytest.mark.parametrize("back", [False, True])
def test_from_one_framework_to_another(fw: Framework, rule: Any, back: bool) -> None:
    """What was saved on one framework goes on in NumPy, and the other way round, as it would have at home."""
    rule = negated(rule, fw)
    before, after = (NUMPY, fw) if back else (fw, NUMPY)
    clipper = uc.Clipper(rule)
    train(clipper, steps_of(before)[:3])
    again = loaded(json.loads(json.dumps(clipper.state_dict())), rule)
    wanted = train(clipper, steps_of(before)[3:5])
    clipped = train(again, steps_of(after)[3:5])
    same(after, clipped, wanted, like=before, rtol=1e-5)
    same(after, again.state, clipper.state, like=before, rtol=1e-5)
    assert all(after.owns(leaf) for leaf in optree.tree_leaves((clipped, again.state)))
    assert list(again.state_dict()) == list(clipper.state_dict())


def test_wrong_states(fw: Framework) -> None:
    """A state of another rule or of other shapes is refused at the step that needs it; the error says what to do."""
    grads = {"b": fw.array([1.0]), "w": fw.array([[3.0, 4.0]])}
    saved = {}
    for name, rule in {"zclip": uc.zclip(), "adagc": uc.adagc(), "window": uc.autoclip(window=3)}.items():
        clipper = uc.Clipper(rule)
        clipper(grads)
        saved[name] = clipper.state_dict()
    for rule, state, message in [
        (
            uc.adagc(),
            saved["zclip"],
            r"saved state, of \['count', 'means\.0', .* not one of Rule\(Ema\(.* a Clipper of",
        ),
        (uc.by_global_norm(1.0), saved["zclip"], r"saved state, of \['count', .*which has \[\]"),
        (uc.chain(uc.adagc()), saved["adagc"], r"which has \['0\.averages\.0', '0\.averages\.1', '0\.count'\]"),
        (uc.autoclip(window=4), saved["window"], r"the saved norms\.0 has shape \(3,\), but here it is \(4,\): load"),
        (uc.zclip(), {**saved["zclip"], "means.0": [1.0]}, r"the saved means\.0 has shape \(1,\), but here it is \(\)"),
    ]:
        clipper = loaded(state, rule)
        for _ in range(2):  # trying again does not help, and does not lose what was loaded
            with pytest.raises(ValueError, match=message):
                clipper(grads)
            with pytest.raises(ValueError, match=message):
                clipper.init(grads)
            assert clipper.state is clipper.report is None
            assert clipper.state_dict() == state
    with pytest.raises(ValueError, match=r"which has \['averages\.0', 'averages\.1', 'averages\.2', 'count'\]"):
        loaded(saved["adagc"], uc.adagc())({**grads, "more": fw.array([1.0])})
    spam = uc.Clipper(uc.spam())
    spam(grads)
    with pytest.raises(ValueError, match=r"the saved averages\.1 has shape \(1, 2\), but here it is \(2, 1\)"):
        loaded(spam.state_dict(), uc.spam())({**grads, "w": fw.array([[3.0], [4.0]])})
    for wrong in (None, [1.0], "count", saved["zclip"].items()):
        with pytest.raises(TypeError, match=r"^saved must be what state_dict\(\) returned, got "):
            clipper.load_state_dict(wrong)
        assert clipper.state_dict() == state


def test_loading_in_the_middle(fw: Framework) -> None:
    """Loading forgets what was learned since, and the report; an empty dictionary is a new beginning."""
    steps = steps_of(fw)
    for name in SOME:
        clipper = uc.Clipper(RULES[name])
        train(clipper, steps[:2])
        saved = clipper.state_dict()
        wanted = train(clipper, steps[2:4])
        clipper.load_state_dict(saved)
        assert clipper.report is clipper.state is None
        same(fw, train(clipper, steps[2:4]), wanted)
        clipper.load_state_dict({})
        same(fw, train(clipper, steps), train(uc.Clipper(RULES[name]), steps))


def test_init(fw: Framework) -> None:
    """The state can be made from parameters before the first step, from what was loaded, too."""
    steps = steps_of(fw)
    params = {"b": fw.array([7.0, 7.0, 7.0]), "none": None, "w": fw.array(np.ones((3, 2)))}
    for name in SOME:
        rule = RULES[name]
        clipper = uc.Clipper(rule)
        clipper.init(params)
        same(fw, clipper.state, rule.init(steps[0]))
        assert clipper.report is None
        train(clipper, steps[:3])
        again = loaded(clipper.state_dict(), rule)
        again.init(params)
        same(fw, again.state, clipper.state)
        same(fw, train(again, steps[3:]), train(clipper, steps[3:]))


def test_compiled_code(fw: Framework) -> None:
    """A clipper that remembers refuses code that is being compiled, and says what to use there; that works."""
    grads, rule = {"w": fw.array([3.0, 4.0])}, uc.norm_growth(1.5)
    clipper = uc.Clipper(rule)
    if fw.traced:
        clipper(grads)
        before = clipper.state
        for one in (clipper, uc.Clipper(rule)):
            with pytest.raises(
                Exception, match=r"would remember values of code .*rule\.update\(grads, state\)"
            ) as caught:
                fw.run(lambda grads: one(grads), grads)
            assert isinstance(caught.value, TypeError) or fw.name == "torch.compile"  # which wraps every error
        assert clipper.state is before
    else:
        fw.run(lambda grads: clipper(grads), grads)

    def two_steps(grads: Any) -> Any:
        clipped, state, _ = rule.update(grads, rule.init(grads))
        return clipped, rule.update({"w": 10 * clipped["w"]}, state)[0]

    first, second = fw.run(two_steps, grads)
    np.testing.assert_allclose(fw.numpy(first["w"]), [3, 4], rtol=1e-6)
    np.testing.assert_allclose(fw.numpy(second["w"]), [4.5, 6], rtol=1e-6)


@pytest.fixture
def busy() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def reading(look: Callable[[], None], work: Callable[[], None]) -> None:
    """Look again and again in a thread while the work is done in this one."""
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            look()

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(run)
        try:
            work()
        finally:
            done.set()
        reader.result()


def one_more(step: Any) -> Any:
    """Return the number of the step, from 1."""
    return step + 1.0


@pytest.mark.usefixtures("busy")
def test_a_thread_that_reads(fw: Framework) -> None:
    """While one thread clips, another one sees report and state of one step, and steps in order."""
    rule = uc.chain(uc.by_global_norm(uc.Schedule(one_more)), uc.by_global_norm(uc.Schedule(one_more)))
    clipper, seen, ones = uc.Clipper(rule), [], fw.array([1.0])
    clipper([ones])

    def look() -> None:
        seen.append((clipper.state, clipper.report, clipper.state))
        time.sleep(1e-4)

    def work() -> None:
        for step in range(2, 22):
            clipper([step * ones])

    reading(look, work)
    last = 1
    for before, report, after in seen[:: 1 + len(seen) // 50]:  # lazy arrays are computed in the thread they are of
        counts = [int(fw.numpy(one.count)) for one in (*before, *after)]
        norms, limits = ([int(fw.numpy(x)) for x in some] for some in (report.norms, report.limits))
        assert norms == limits  # the gradient of step n has the norm n, which is its limit, too
        assert last <= counts[0] == counts[1] <= norms[0] <= counts[2] == counts[3]
        last = counts[3]


@pytest.mark.usefixtures("busy")
def test_a_thread_that_saves(fw: Framework) -> None:
    """While one thread loads and clips, another one never saves a state that is lost or half one."""
    rule, ones = uc.norm_growth(), [fw.array([1.0])]
    clipper = uc.Clipper(rule)
    clipper(ones)
    saved = clipper.state_dict()

    def look() -> None:
        assert list(clipper.state_dict()) == list(saved)

    def work() -> None:
        for _ in range(20):
            clipper.load_state_dict(saved)
            if fw.family != "MLX":  # no thread but its own can compute its lazy arrays
                clipper(ones)

    reading(look, work)
