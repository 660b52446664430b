"""The norms of a step form arrays: how they are stacked, and which are absent, changes no result."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import optree
import pytest
from oracle_rules import AdaGC
from parts import together

import healthy
import oracle
import uniclip as uc
from frameworks import CHOSEN, EAGER, TRACED, Framework
from tracing import soft
from uniclip import layout

UNTRACED = pytest.mark.parametrize(
    "framework", [fw for fw in CHOSEN if not fw.traced and fw.name != "dask"], ids=lambda fw: fw.name
)
"""For what no compiler can change; Dask, whose graph grows with each step, has no way through the code of its own."""
RNG = np.random.default_rng(0)
SHAPES = {"a": (4, 3), "b": (5,), "c": (2, 3, 2), "d": (6, 2), "e": (1,)}
SCALES = [0.5, 3.0, 0.1, 40.0, 1.0, 0.0, 5.0]
STEPS = [
    {name: by * (1 + number) * RNG.standard_normal(shape) for number, (name, shape) in enumerate(SHAPES.items())}
    for by in SCALES
]


def units(leaf: np.ndarray) -> list[np.ndarray]:
    """Return the entries of each output unit, which the first axis counts; those of a vector are one unit."""
    return list(leaf) if leaf.ndim > 1 else [leaf]


SCOPES: dict[str, tuple[Any, Any]] = {
    "leaves": (lambda: uc.Scope(), lambda leaf: [leaf]),
    "units": (lambda: uc.scopes.unit(0), units),
    "entries": (lambda: uc.Scope(axes=()), lambda leaf: list(leaf.ravel())),
}


def arrays(fw: Framework, grads: dict[str, Any], wide: str | None = None) -> dict[str, Any]:
    """Return gradients of the framework; the leaf ``wide`` in double precision, if there is any."""
    dtype = "float32" if "float64" in fw.missing else "float64"
    return {
        name: None if leaf is None else fw.array(leaf, dtype if name == wide else "float32")
        for name, leaf in grads.items()
    }


def close(fw: Framework, found: dict[str, Any], wanted: dict[str, Any], **more: Any) -> None:
    """Assert that a tree of the framework has these values."""
    for name, leaf in wanted.items():
        if leaf is None:
            assert found[name] is None
        else:
            options = {"rtol": 3e-6, "atol": 1e-7, "err_msg": name} | more
            array = found[name] if isinstance(found[name], np.ndarray) else fw.numpy(found[name])
            np.testing.assert_allclose(array, leaf, **options)


def norms_of(grads: dict[str, Any], pieces: Any) -> list[float | None]:
    """Return every norm, leaf after leaf."""
    like = {name: pieces(np.zeros(shape)) for name, shape in SHAPES.items()}
    return [
        None if grads[name] is None else oracle.norm(np.asarray(piece).ravel().tolist())
        for name, each in like.items()
        for piece in (each if grads[name] is None else pieces(grads[name]))
    ]


def scaled(grads: dict[str, Any], factors: list[float], pieces: Any) -> dict[str, Any]:
    """Return the gradients, each piece multiplied by its factor."""
    left, out = iter(factors), {}
    for name, shape in SHAPES.items():
        own = [next(left) for _ in pieces(np.zeros(shape))]
        leaf = grads[name]
        whole = None if leaf is None else [np.asarray(p) * by for p, by in zip(pieces(leaf), own, strict=True)]
        out[name] = None if whole is None else np.reshape(np.concatenate([np.ravel(p) for p in whole]), shape)
    return out


def clipped_by(rule: uc.Rule, steps: list[Any], all_reduce: Any) -> list[Any]:
    """Return the clipped gradients of each step."""
    state, found = rule.init(steps[0]), []
    for grads in steps:
        clipped, state, _ = rule.update(grads, state, all_reduce=all_reduce)
        found.append(clipped)
    return found


@pytest.mark.parametrize("wide", [None, "c"], ids=["one dtype", "two dtypes"])
@pytest.mark.parametrize("name", SCOPES)
@UNTRACED
def test_a_warm_up_over_several_blocks(framework: Framework, name: str, wide: str | None) -> None:
    """AdaGC's warm-up scales all norms together, whatever arrays they form; then each has its own average."""
    scope, pieces = SCOPES[name]
    count = sum(len(pieces(np.zeros(shape))) for shape in SHAPES.values())
    with framework.context():
        rule = uc.Rule(uc.limits.Ema(1.05, 0.9, warmup=3, warmup_norm=0.7), scope=scope())
        state, expected = rule.init(arrays(framework, STEPS[0], wide)), AdaGC(count, 1.05, 0.9, 3, 0.7)
        for grads in STEPS:
            clipped, state, _ = rule.update(arrays(framework, grads, wide), state)
            close(framework, clipped, scaled(grads, expected.step(norms_of(grads, pieces)), pieces))


@pytest.mark.parametrize("name", SCOPES)
@UNTRACED
def test_a_warm_up_over_two_parts(framework: Framework, name: str) -> None:
    """Two processes, of which each has some of the leaves, warm up as one that has all of them.

    The fan-in of every unit is divided: then all norms are joined, and each process knows every one.
    """
    scope, pieces = SCOPES["leaves" if name == "entries" else name]
    count = sum(len(pieces(np.zeros(shape))) for shape in SHAPES.values())
    rule = uc.Rule(uc.limits.Ema(1.05, 0.9, warmup=3, warmup_norm=0.7), scope=scope())

    def run(part: int, all_reduce: Any) -> list[Any]:
        return clipped_by(rule, [halves(framework, grads)[part] for grads in STEPS], all_reduce)

    with framework.context():
        found, expected = together(framework, [0, 1], run), AdaGC(count, 1.05, 0.9, 3, 0.7)
        for number, grads in enumerate(STEPS):
            wanted = scaled(grads, expected.step(norms_of(grads, pieces)), pieces)
            close(framework, whole(*(part[number] for part in found)), wanted)


def halves(fw: Framework, grads: dict[str, Any]) -> list[dict[str, Any]]:
    """Return two parts of a tree, divided along the last axis of each leaf; the second may hold nothing of it."""
    cut = {name: (leaf.shape[-1] + 1) // 2 for name, leaf in grads.items()}
    return [
        arrays(fw, {name: leaf[..., : cut[name]] for name, leaf in grads.items()}),
        arrays(fw, {name: leaf[..., cut[name] :] for name, leaf in grads.items()}),
    ]


def whole(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tree whose parts these are."""
    return {name: np.concatenate([one[name], two[name]], axis=-1) for name in one}


def split_by(grads: dict[str, np.ndarray], *, by_size: bool) -> dict[str, Any]:
    """Return what splitting a total of 2 among the leaves makes of each unit."""
    fan_in = {name: units(leaf)[0].size for name, leaf in grads.items()}
    out = {}
    for name, leaf in grads.items():
        limit = 2 * math.sqrt(fan_in[name] / sum(fan_in.values()) if by_size else 1 / len(grads))
        out[name] = np.reshape(np.concatenate([oracle.clip_leaf(u, limit).ravel() for u in units(leaf)]), leaf.shape)
    return out


@pytest.mark.parametrize("by_size", [False, True])
@UNTRACED
def test_split_over_units(framework: Framework, by_size: bool) -> None:
    """A total is split among all leaves, though their units' norms form an array for each shape; in parts too."""
    rule = uc.Rule(uc.limits.Split(2.0, by_size=by_size), scope=uc.scopes.unit(0))
    with framework.context():
        for grads in STEPS[:2]:
            wanted = split_by(grads, by_size=by_size)
            close(framework, uc.clip(arrays(framework, grads), rule)[0], wanted)
            found = together(
                framework, halves(framework, grads), lambda part, join: uc.clip(part, rule, all_reduce=join)[0]
            )
            close(framework, whole(*found), wanted)


@UNTRACED
def test_limits_of_groups_over_units(framework: Framework) -> None:
    """Each group has a limit of its own, whatever the shape of its units' norms; in parts too."""
    limits = {
        "a": 0.5,
        "b": math.inf,
        "c": uc.limits.Ema(1.0, 0.0),
        "d": uc.limits.Schedule(lambda step: 1.0 + step),
        "e": 0.25,
    }
    rule = uc.Rule(
        uc.limits.PerGroup(limits), scope=uc.Scope(axes=uc.scopes.unit(0).axes, label=lambda path, leaf: path[0])
    )
    last = {"c": [math.inf] * 2}

    def wanted(number: int, grads: dict[str, np.ndarray]) -> dict[str, Any]:
        out = {}
        for name, leaf in grads.items():
            known = {"a": 0.5, "b": math.inf, "c": None, "d": 1.0 + number, "e": 0.25}[name]
            own = last["c"] if known is None else [known] * len(units(leaf))
            new = [oracle.clip_leaf(u, limit).ravel() for u, limit in zip(units(leaf), own, strict=True)]
            if known is None:
                last["c"] = [float(np.linalg.norm(u)) or limit for u, limit in zip(new, own, strict=True)]
            out[name] = np.reshape(np.concatenate(new), leaf.shape)
        return out

    def run(part: int | None, all_reduce: Any) -> list[Any]:
        steps = [arrays(framework, g) if part is None else halves(framework, g)[part] for g in STEPS[:5]]
        return clipped_by(rule, steps, all_reduce)

    with framework.context():
        alone, parts = run(None, None), together(framework, [0, 1], run)
        for number, grads in enumerate(STEPS[:5]):
            expected = wanted(number, grads)
            close(framework, alone[number], expected)
            close(framework, whole(*(part[number] for part in parts)), expected)


def one_by_one(made: Any) -> Any:
    """Return a function that makes a layout in which every norm is an array of its own."""

    def apart(*args: Any) -> layout.Layout:
        found = made(*args)
        blocks = [layout.Block((group,), block.dtype, block.kept) for block in found.blocks for group in block.groups]
        return found._replace(blocks=tuple(blocks))

    return apart


def trained(rule: Any, steps: list[Any], params: Any) -> Any:
    """Return what a rule does to the steps of a training, and what it shows of it."""
    *results, _ = healthy.train(copy.deepcopy(rule), steps, params)  # a copy has no layouts yet
    return [(clipped, tuple(report), scalars) for clipped, report, scalars in results]


@pytest.mark.parametrize("name", [name for name, rule in healthy.RULES.items() if isinstance(rule, uc.Rule)])
@UNTRACED
def test_stacking_changes_nothing(framework: Framework, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every preset does the same, to rounding, if every norm is an array by itself."""
    rule = healthy.RULES[name]
    with framework.context():
        steps = [healthy.arrays_of(framework.array, grads) for grads in healthy.STEPS]
        params = healthy.arrays_of(framework.array, healthy.PARAMS)
        found = trained(rule, steps, params)
        monkeypatch.setattr(layout, "_made", one_by_one(layout._made))
        apart = trained(rule, steps, params)
        for one, other in zip(optree.tree_leaves(found), optree.tree_leaves(apart), strict=True):
            assert framework.dtype(one) == framework.dtype(other)
            np.testing.assert_allclose(framework.numpy(one), framework.numpy(other), rtol=1e-6, atol=1e-7)


# Groups that vanish for a step.

MEMORY = {
    "adagc": uc.adagc(warmup=2),
    "units": uc.Rule(uc.limits.Ema(1.05, 0.9, warmup=2), scope=uc.scopes.unit(0)),
    "norm_growth": uc.norm_growth(),
    "percentile": uc.percentile_clipping(50, window=3),
    "spam": uc.spam(factor=2.0, warmup=1),
    "adagn": uc.adagn(),
    "z-scores": uc.Rule(uc.limits.ZScore(1.0, 0.9, warmup=2), scope=uc.scopes.each_leaf),
    "log z-scores": uc.Rule(uc.limits.LogZScore(1.5, 0.9), scope=uc.scopes.each_leaf),
    "rolling": uc.Rule(uc.limits.RollingZScore(2.0, 4, 2), scope=uc.scopes.each_leaf),
    "all of history": uc.Rule(uc.limits.PercentileOfAll(50), scope=uc.scopes.each_leaf),
    "groups": uc.Rule(
        uc.limits.PerGroup({n: uc.limits.Percentile(50, 3) for n in SHAPES}),
        scope=uc.scopes.groups(lambda p, leaf: p[0]),
    ),
    "autoclip": uc.autoclip(50, window=4),
    "zclip": uc.zclip(warmup=2),
    "log_zscore": uc.log_zscore(),
    "skip_spikes": uc.skip_spikes(window=4, warmup=2),
    "quantile": uc.by_example_quantile(),
    "schedule": uc.by_norm(uc.limits.Schedule(lambda step: 1.0 + 0.5**step)),
    "chain": uc.chain(uc.adagc(warmup=1), uc.zclip(warmup=2)),
    "masked": uc.masked(uc.norm_growth(), lambda path, leaf: path[0] != "a"),
}
SOME = ["adagc", "units", "percentile", "spam", "all of history", "groups", "chain", "masked"]
"""The rules that are compiled: one for each kind of memory, and those that hold others."""
LEARNT_BY_LEAF = ["norm_growth", "percentile", "spam", "adagn", "z-scores", "log z-scores", "rolling", "groups"]
"""The rules in which no leaf has to do with another one."""
EQUAL = {"a": (2, 3), "b": (2, 4), "c": (2, 3)}
"""As many examples in each."""
GONE = [set(), {"b"}, set(), {"a", "b"}, {"b"}, set()]
"""Which leaves are absent at each step."""
FULL = [
    {name: by * RNG.standard_normal(shape).astype("float32") for name, shape in EQUAL.items()}
    for by in (1.0, 2.0, 0.5, 8.0, 1.0, 20.0)
]
VANISHING = [
    {name: None if name in gone else leaf for name, leaf in grads.items()}
    for grads, gone in zip(FULL, GONE, strict=True)
]


def taken(fw: Framework, rules: dict[str, Any], steps: list[Any], compiled: Any = lambda f: f) -> list[Any]:
    """Return by name what each rule makes of each step, and its state then."""
    states = {name: rule.init(arrays(fw, FULL[0])) for name, rule in rules.items()}

    def step(grads: Any, states: Any) -> Any:
        results = {name: rule.update(grads, states[name]) for name, rule in rules.items()}
        return {name: result[0] for name, result in results.items()}, {name: r[1] for name, r in results.items()}

    run, found = compiled(step), []
    for grads in steps:
        clipped, states = run(arrays(fw, grads), states)
        found.append((clipped, states))
    return found


@pytest.fixture(scope="module")
def by_numpy() -> list[Any]:
    """Return what NumPy makes of groups that vanish."""
    return taken(Framework(), MEMORY, VANISHING)


@pytest.mark.ways(*EAGER, "tf.function", "jax.jit", without="Dask")  # the others would take long for what these show
def test_groups_that_vanish(fw: Framework, by_numpy: list[Any]) -> None:
    """Eager and compiled, in every framework, a group that is absent for some steps finds its memory again."""
    rules = {name: MEMORY[name] for name in SOME} if fw.traced else MEMORY
    steps = VANISHING[:3] if fw.traced else VANISHING  # each pattern of absence is compiled
    found = taken(fw, rules, steps, fw.compiled)
    for (clipped, states), (wanted, wanted_states) in zip(found, by_numpy, strict=False):
        for name in rules:
            close(fw, clipped[name], wanted[name], rtol=2e-5, atol=1e-6, err_msg=name)
            pairs = zip(*map(optree.tree_leaves, (states[name], wanted_states[name])), strict=True)
            for one, other in pairs:
                assert tuple(one.shape) == tuple(other.shape), name
                np.testing.assert_allclose(fw.numpy(one), other, rtol=2e-5, atol=1e-6, err_msg=name)


def test_a_group_that_vanishes_leaves_no_trace(by_numpy: list[Any]) -> None:
    """Where leaves have nothing to do with each other, each goes on as if there had been no step without it."""
    for leaf in EQUAL:
        steps = [{leaf: grads[leaf]} for grads in VANISHING if grads[leaf] is not None]
        rules = {
            name: uc.Rule(
                uc.limits.PerGroup({leaf: uc.limits.Percentile(50, 3)}), scope=uc.scopes.groups(lambda p, leaf: p[0])
            )
            if name == "groups"
            else MEMORY[name]
            for name in LEARNT_BY_LEAF
        }
        states = {name: rule.init(steps[0]) for name, rule in rules.items()}
        seen = [clipped for clipped, _ in by_numpy if clipped["adagn"][leaf] is not None]
        for grads, found in zip(steps, seen, strict=True):
            for name, rule in rules.items():
                alone, states[name], _ = rule.update(grads, states[name])
                np.testing.assert_allclose(found[name][leaf], alone[leaf], rtol=1e-6, err_msg=f"{name} {leaf}")


def test_the_oracle_of_a_group_that_vanishes(by_numpy: list[Any]) -> None:
    """In AdaGC's warm-up the others are scaled together without it, and the steps are counted for all."""
    for name, pieces in {"adagc": lambda leaf: [leaf], "units": units}.items():
        expected = AdaGC(3 if name == "adagc" else 6, *((1.05, 0.98) if name == "adagc" else (1.05, 0.9)), 2, 1.0)
        for number, ((clipped, _), grads) in enumerate(zip(by_numpy, VANISHING, strict=True)):
            norms = [
                None if grads[leaf] is None else float(np.linalg.norm(piece))
                for leaf in EQUAL
                for piece in pieces(FULL[number][leaf])
            ]
            factors = iter(expected.step(norms))
            for leaf, shape in EQUAL.items():
                own = [next(factors) for _ in pieces(FULL[number][leaf])]
                if grads[leaf] is None:
                    assert clipped[name][leaf] is None
                    continue
                wanted = np.stack([p * by for p, by in zip(pieces(grads[leaf]), own, strict=True)])
                np.testing.assert_allclose(
                    clipped[name][leaf], wanted.reshape(shape), rtol=2e-6, err_msg=f"{name} {leaf} {number}"
                )


@pytest.mark.ways(*EAGER, "tf.function", "jax.jit", without="Dask")
def test_many_norms_of_which_some_are_left_out(fw: Framework) -> None:
    """Compiled code works out the factors of many leaves once: one that is 0 or NaN changes no other."""
    values = [np.full(3, 2.0, "float32") for _ in range(40)]
    zero = np.ones(40, "float32")
    zero[1] = 0.0
    units = [np.full((2, 2), np.nan, "float32"), *[np.ones((2, 2), "float32")] * 39]
    cases: dict[str, tuple[Any, list[Any]]] = {
        "NaN": (lambda _: uc.by_norm(1.0), [np.asarray([np.nan, 1.0, 1.0], "float32"), *values[1:]]),
        "skipped": (
            lambda _: uc.Rule(1.0, scope=uc.scopes.each_leaf, curve=uc.curves.reject),
            [values[0], *[0.1 * one for one in values[1:]]],
        ),
        "a limit of 0": (lambda array: uc.Rule(array(zero), scope=uc.scopes.each_leaf), values),
        "units": (lambda _: uc.Rule(1.0, scope=uc.scopes.unit()), units),
    }
    rules = {title: rule for title, (rule, _) in cases.items()}
    clipped = fw.run(
        lambda every: {title: uc.clip(some, rules[title](fw.array))[0] for title, some in every.items()},
        {title: list(map(fw.array, grads)) for title, (_, grads) in cases.items()},
    )
    for title, (rule, grads) in cases.items():
        for one, two in zip(clipped[title], uc.clip(grads, rule(np.asarray))[0], strict=True):
            np.testing.assert_allclose(fw.numpy(one), two, rtol=1e-6, err_msg=title)


@pytest.mark.ways(*TRACED)
def test_leaves_without_axes_beside_others(fw: Framework) -> None:
    """A 0-d leaf may come first or last, and a leaf may be alone."""
    for shapes in ([(), (3, 4)], [(3, 4), ()], [(300, 4)]):
        grads = [np.ones(shape, "float32") for shape in shapes]
        rules = [uc.Rule(0.1, scope=uc.scopes.unit(-1), curve=curve) for curve in (uc.curves.hard, soft)]
        found_by = fw.run(lambda g, rules=rules: [uc.clip(g, rule)[0] for rule in rules], list(map(fw.array, grads)))
        for rule, found in zip(rules, found_by, strict=True):
            for one, two in zip(found, uc.clip(grads, rule)[0], strict=True):
                np.testing.assert_allclose(fw.numpy(one), two, rtol=1e-6)
