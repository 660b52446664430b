"""What a recorder writes of a step, on every framework, and the norms of all leaves that it can be given."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest

import uniclip as uc
from frameworks import CHOSEN, TRACED, Framework
from uniclip import insight
from uniclip.backends import backend_of
from uniclip.backends.base import Backend
from uniclip.insight.recorder import Recorder
from uniclip.rules import seen
from uniclip.tree import flatten

EAGER = pytest.mark.parametrize("fw", [fw for fw in CHOSEN if not fw.traced], ids=lambda fw: fw.name, indirect=True)
SHAPES = {"a": (4, 3), "b": (), "c": (17,), "d": (2, 2, 2)}
RULES: dict[str, Any] = {
    "global": uc.by_global_norm(2.0),
    "not clipped": uc.by_global_norm(1e9),
    "only measures": uc.by_global_norm(math.inf),
    "order 1": uc.by_global_norm(2.0, ord=1),
    "order 3": uc.by_global_norm(2.0, ord=3),
    "largest": uc.by_global_norm(0.5, ord=math.inf),
    "zero": uc.by_global_norm(2.0, nonfinite="zero"),
    "skip": uc.by_global_norm(2.0, nonfinite="skip"),
    "each leaf": uc.by_norm(1.0),
    "units": uc.agc(0.01),
    "rms": uc.by_block_rms(0.5),
    "zclip": uc.zclip(warmup=2),
    "autoclip": uc.autoclip(50),
    "adagc": uc.adagc(warmup=1),
    "losses": uc.skip_spikes(warmup=2),
    "groups": uc.by_group_norm({2: 1.0, 1: 0.5}, lambda path, leaf: 2 if len(leaf.shape) > 1 else 1),
    "chain": uc.chain(uc.by_value(-0.5, 0.5), uc.zclip(warmup=2), uc.by_norm(0.1)),
    "masked": uc.masked(uc.by_norm(1.0), lambda path, leaf: len(leaf.shape) == 1),
    "value": uc.by_value(-0.5, 0.5),
}
NAMES = {
    "norm": "clip/norm",
    "limit": "clip/limit",
    "threshold": "clip/threshold",
    "factor": "clip/factor",
    "share": "clip/share",
    "skipped": "clip/skipped",
}
"""What a line calls what `uniclip.Report.scalars` calls otherwise."""


def gradients(fw: Framework, step: int) -> dict[str, Any]:
    """Return gradients: small ones, large ones at every third step, and NaN at the fifth."""
    rng = np.random.default_rng(step)
    values = {name: rng.normal(size=shape) * (10 if step % 3 == 2 else 0.3) for name, shape in SHAPES.items()}
    values["c"][:] = math.nan if step == 5 else values["c"]
    return {name: fw.array(value) for name, value in values.items()}


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file but for the header."""
    header, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert header["uniclip"] == 1
    return rows


def all_rules(fw: Framework, step: Callable[..., Any], names: Iterable[str] = RULES) -> Callable[..., Any]:
    """Return a function that takes a step by each rule, in one program where they are compiled."""
    return fw.compiled(lambda grads, states, *rest: {n: step(RULES[n], grads, states[n], *rest) for n in names})


@pytest.mark.ways(*TRACED)
def test_a_line_is_what_a_logger_shows(fw: Framework, tmp_path: Path) -> None:
    """Each line holds the scalars of its report, whatever the rule, eager or from compiled code."""
    names = ["global", "each leaf"] if fw.family == "Dask" else list(RULES)  # whose graph grows with what is remembered
    params = {key: fw.array(np.ones(shape)) for key, shape in SHAPES.items()}
    states, loss = {name: RULES[name].init(params) for name in names}, fw.array(np.asarray(1.5))
    take = lambda rule, grads, state, params, loss: rule.update(grads, state, params, loss=loss)[1:]
    update, files = all_rules(fw, take, names), {name: tmp_path / f"{name}.jsonl" for name in names}
    records = {name: Recorder(file, every=3, rule=RULES[name]) for name, file in files.items()}
    wanted: dict[str, list[Any]] = {name: [] for name in names}
    for step in range(8):
        for name, (state, report) in update(gradients(fw, step), states, params, loss).items():
            states[name] = state
            scalars = {name: float(fw.numpy(value)) for name, value in report.scalars().items()}
            wanted[name].append((scalars, report.finite is None or bool(fw.numpy(report.finite))))
            records[name](report, loss=loss, rate=0.5 * step)
    for name, record in records.items():
        record.close()
        as_shown(rows_of(files[name]), wanted[name], name)


def as_shown(rows: list[dict[str, Any]], wanted: list[Any], rule: str) -> None:
    """Assert that lines hold these scalars, and say whether all was finite."""
    assert [row["step"] for row in rows] == list(range(1, 9)), rule
    assert [row["rate"] for row in rows] == [0.5 * step for step in range(8)], rule
    assert {row["loss"] for row in rows} == {1.5}, rule
    for row, (scalars, finite) in zip(rows, wanted, strict=True):
        assert row.get("finite", True) == finite, rule
        for short, long in NAMES.items():
            value = scalars.get(long)
            if value is None or not math.isfinite(value) or (short in {"limit", "threshold"} and value >= 3e38):
                assert row.get(short) is None, (rule, short, row)
            else:
                assert math.isclose(float(row[short]), value, rel_tol=1e-6), (rule, short, value, row)


@pytest.mark.ways("eager", without="Dask")
@pytest.mark.parametrize("name", RULES)
def test_scalars_are_as_good_as_a_report(fw: Framework, name: str, tmp_path: Path) -> None:
    """What an adapter without reports has, such as that of optax, is written as the report of the same step."""
    rule, found = RULES[name], []
    for scalars in (False, True):
        path, state = tmp_path / f"{scalars}.jsonl", rule.init(gradients(fw, 0))
        with Recorder(path, every=4, rule=rule) as record:
            for step in range(5):
                grads = gradients(fw, step)
                _, state, report = rule.update(grads, state, grads)
                record(report.scalars() if scalars else report, loss=grads["b"])
        found.append(rows_of(path))
    for one, two in zip(*found, strict=True):
        numbers = [{name: math.inf if value is None else value for name, value in row.items()} for row in (one, two)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-6)


@pytest.mark.ways(*TRACED, without="Dask")
def test_norms_of_leaves(fw: Framework) -> None:
    """The norms of all leaves are theirs; what the rule does with them is the same to rounding."""
    params = {**{key: fw.array(np.ones(shape)) for key, shape in SHAPES.items()}, "none": None}
    states = {name: rule.init(params) for name, rule in RULES.items()}
    watched, updated = all_rules(fw, seen), all_rules(fw, lambda rule, *args: rule.update(*args))
    for step in range(3):
        grads = gradients(fw, step)
        values = [np.ravel(fw.numpy(grad)).astype(float) for grad in grads.values()]
        grads["none"] = None
        found, usual = watched(grads, states, params), updated(grads, states, params)
        for name, (*result, row) in found.items():
            wanted = [np.linalg.norm(value, _order(RULES[name])) for value in values]
            np.testing.assert_allclose(
                fw.numpy(row) if not isinstance(row, np.ndarray) else row, wanted, rtol=1e-6, err_msg=name
            )
            as_usual(fw, result, usual[name], name)
            states[name] = usual[name][1]


def as_usual(fw: Framework, found: Any, usual: Any, name: str) -> None:
    """Assert that two steps are the same but for rounding: gradients, state, report."""
    (clipped, after, report), (plain, state, other) = found, usual
    for one, two in zip(flatten(clipped).leaves, flatten(plain).leaves, strict=True):
        np.testing.assert_allclose(fw.numpy(one), fw.numpy(two), rtol=2e-6, atol=1e-12, err_msg=name)
    assert set(report.scalars()) == set(other.scalars()), name
    for one, two in zip(optree.tree_leaves(tuple(report)), optree.tree_leaves(tuple(other)), strict=True):
        assert fw.dtype(one) == fw.dtype(two), name
    for one, two in zip(optree.tree_leaves(after), optree.tree_leaves(state), strict=True):
        np.testing.assert_allclose(fw.numpy(one), fw.numpy(two), rtol=2e-6, err_msg=name)


def _order(rule: Any) -> float:
    """Return the order of the norms of leaves."""
    norm = getattr(rule, "norm", uc.norms.L2)
    return 2 if norm.size_power or getattr(rule, "nonfinite", "") == "zero" else norm.ord


@pytest.mark.ways("eager")
def test_leaf_norms_at_the_ends_of_the_range(fw: Framework) -> None:
    """They are right where squares leave the range, and of leaves of several dtypes."""
    grads = {"a": fw.array(np.full(3, 1e30)), "b": fw.array(np.full(4, 1e-30)), "c": fw.array(np.zeros(2))}
    row = insight.leaf_norms({**grads, "d": None})
    assert fw.owns(row)
    np.testing.assert_allclose(fw.numpy(row), [3**0.5 * 1e30, 2e-30, 0.0, 0.0], rtol=1e-6)  # None has norm 0
    rule = uc.by_global_norm(1.0)
    _, _, report, _ = seen(rule, grads, rule.init(grads))
    assert math.isclose(float(fw.numpy(report.norms)), 3**0.5 * 1e30, rel_tol=1e-6)
    if "bfloat16" in fw.dtypes:
        mixed = [fw.array([3.0, 4.0], "bfloat16"), fw.array([6.0, 8.0]), fw.array([9.0, 12.0], "bfloat16")]
        np.testing.assert_allclose(fw.numpy(insight.leaf_norms(mixed)), [5.0, 10.0, 15.0], rtol=1e-6)


@EAGER
def test_reads_nothing_within_a_window(fw: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No array is read before the window ends, and then all of them together."""
    grads = gradients(fw, 0)
    backend = type(backend_of(grads["a"]))
    reads: list[int] = []

    def counted(self: Any, arrays: list[Any]) -> list[Any]:
        reads.append(len(arrays))
        return [np.asarray(fw.numpy(array)) for array in arrays]

    with Recorder(tmp_path / "run.jsonl", every=4, rule=uc.by_global_norm(1.0)) as record:
        monkeypatch.setattr(backend, "to_host", counted)
        for step in range(1, 9):
            _, report = uc.clip(grads, uc.by_global_norm(1.0))
            fields = uc.Report(*report)  # as compiled code returns it: arrays of the framework
            record(fields, loss=grads["b"])
            assert len(reads) == (0 if fw.family == "NumPy" else step // 4)
    assert len(rows_of(tmp_path / "run.jsonl")) == 8


def test_inside_of_compiled_code(fw: Framework, tmp_path: Path) -> None:
    """What a compiler traces has no values to record, and is refused; other code may record anywhere."""
    with Recorder(tmp_path / "run.jsonl") as record:

        def step(grads: Any) -> Any:
            clipped, report = uc.clip(grads, uc.by_global_norm(1.0))
            record(report)
            return clipped

        if fw.traced:
            with pytest.raises(Exception, match="outside of compiled code"):
                fw.run(step, gradients(fw, 0))
        else:
            fw.run(step, gradients(fw, 0))
            record.close()
            assert len(rows_of(tmp_path / "run.jsonl")) == 1


@pytest.mark.ways(*TRACED, without="Dask")  # which has no such hooks
def test_hooks_for_speed_change_nothing(fw: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays read together, and kept in copies, are written as those that are read one by one."""
    names = ("global", "each leaf", "chain", "skip")
    update = all_rules(fw, lambda rule, grads, state: rule.update(grads, state)[1:], names)
    written: list[list[str]] = []
    for hooks in (True, False):
        states = {name: RULES[name].init(gradients(fw, 0)) for name in names}
        files = [tmp_path / f"{name} {hooks}.jsonl" for name in names]
        with ExitStack() as stack:
            inside = stack.enter_context(monkeypatch.context())
            if not hooks:
                kind = type(backend_of(gradients(fw, 0)["a"]))
                inside.setattr(kind, "to_keep", Backend.to_keep)
                inside.setattr(kind, "to_host", Backend.to_host)
            records = [
                stack.enter_context(Recorder(file, every=4, rule=RULES[name]))
                for name, file in zip(names, files, strict=True)
            ]
            for step in range(6):
                grads = gradients(fw, step)
                results = update(grads, states)
                states = {name: state for name, (state, _) in results.items()}
                for record, (_, report) in zip(records, results.values(), strict=True):
                    record(report, loss=grads["b"])
        written.append([file.read_text() for file in files])
    assert written[0] == written[1]
