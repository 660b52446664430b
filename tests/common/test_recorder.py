"""What a recorder writes of a step, on every framework, and the norms of all leaves that it can be given."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest

import uniclip as uc
from frameworks import CHOSEN, Framework
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


@pytest.mark.parametrize("name", RULES)
def test_a_line_is_what_a_logger_shows(fw: Framework, name: str, tmp_path: Path) -> None:
    """Each line holds the scalars of its report, whatever the rule, eager or from compiled code."""
    rule = RULES[name]
    params = {key: fw.array(np.ones(shape)) for key, shape in SHAPES.items()}
    state, wanted = rule.init(params), []
    loss = fw.array(np.asarray(1.5))
    update = fw.compiled(lambda grads, state, params, loss: rule.update(grads, state, params, loss=loss))
    with Recorder(tmp_path / "run.jsonl", every=3, rule=rule) as record:
        for step in range(8):
            _, state, report = update(gradients(fw, step), state, params, loss)
            scalars = {name: float(fw.numpy(value)) for name, value in report.scalars().items()}
            finite = report.finite is None or bool(fw.numpy(report.finite))
            wanted.append((scalars, finite))
            record(report, loss=loss, rate=0.5 * step)
    rows = rows_of(tmp_path / "run.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["rate"] for row in rows] == [0.5 * step for step in range(8)]
    assert {row["loss"] for row in rows} == {1.5}
    for row, (scalars, finite) in zip(rows, wanted, strict=True):
        assert row.get("finite", True) == finite
        for short, long in NAMES.items():
            value = scalars.get(long)
            if value is None or not math.isfinite(value) or (short in {"limit", "threshold"} and value >= 3e38):
                assert row.get(short) is None, (short, row)
            else:
                assert math.isclose(float(row[short]), value, rel_tol=1e-6), (short, value, row)


@pytest.mark.ways("eager")
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


@pytest.mark.parametrize("name", RULES)
def test_norms_of_leaves(fw: Framework, name: str) -> None:
    """The norms of all leaves are theirs; what the rule does with them is the same to rounding."""
    rule = RULES[name]
    params = {**{key: fw.array(np.ones(shape)) for key, shape in SHAPES.items()}, "none": None}
    state = rule.init(params)
    for step in range(3):
        grads = gradients(fw, step)
        wanted = [np.linalg.norm(np.ravel(fw.numpy(grad)).astype(float), _order(rule)) for grad in grads.values()]
        grads["none"] = None
        clipped, after, report, row = fw.run(partial(seen, rule), grads, state, params)
        np.testing.assert_allclose(fw.numpy(row) if not isinstance(row, np.ndarray) else row, wanted, rtol=1e-6)
        plain, state, other = fw.run(rule.update, grads, state, params)
        for one, two in zip(flatten(clipped).leaves, flatten(plain).leaves, strict=True):
            np.testing.assert_allclose(fw.numpy(one), fw.numpy(two), rtol=2e-6, atol=1e-12)
        assert set(report.scalars()) == set(other.scalars())
        for one, two in zip(optree.tree_leaves(tuple(report)), optree.tree_leaves(tuple(other)), strict=True):
            assert fw.dtype(one) == fw.dtype(two)
        for one, two in zip(optree.tree_leaves(after), optree.tree_leaves(state), strict=True):
            np.testing.assert_allclose(fw.numpy(one), fw.numpy(two), rtol=2e-6)


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

    def refused(*_: Any) -> None:
        msg = "read by itself"
        raise AssertionError(msg)

    with Recorder(tmp_path / "run.jsonl", every=4, rule=uc.by_global_norm(1.0)) as record:
        monkeypatch.setattr(backend, "fetched", counted)
        for step in range(1, 9):
            _, report = uc.clip(grads, uc.by_global_norm(1.0))
            fields = uc.Report(*report)  # as compiled code returns it: arrays of the framework
            with monkeypatch.context() as inside:
                inside.setattr(backend, "to_host", refused)
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


@pytest.mark.parametrize("name", ["global", "each leaf", "chain", "skip"])
def test_hooks_for_speed_change_nothing(
    fw: Framework, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays read together, and kept in copies, are written as those that are read one by one."""
    rule, found = RULES[name], []
    update = fw.compiled(rule.update)
    for number in range(2):
        path, state = tmp_path / f"{number}.jsonl", rule.init(gradients(fw, 0))
        with Recorder(path, every=4, rule=rule) as record, monkeypatch.context() as inside:
            if number:
                kind = type(backend_of(gradients(fw, 0)["a"]))
                inside.setattr(kind, "to_keep", Backend.to_keep)
                inside.setattr(kind, "fetched", Backend.fetched)
            for step in range(6):
                grads = gradients(fw, step)
                _, state, report = update(grads, state)
                record(report, loss=grads["b"])
        found.append(path.read_text())
    assert found[0] == found[1]
