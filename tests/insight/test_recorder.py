"""The recorder: when it writes its file, what a crash loses, and where a run resumes."""

from __future__ import annotations

import copy
import json
import math
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import uniclip as uc
from kit import rules
from kit.frameworks import Framework
from kit.trees import mapped
from uniclip import insight
from uniclip.insight import Recorder

RULE = uc.by_global_norm(1.0)
TRAINING = """
import os, signal, sys
import numpy as np
import uniclip as uc
from uniclip import insight

record = insight.Recorder(sys.argv[1], every=10, rule=uc.by_global_norm(1.0))
for step in range(1, 36):
    _, report = uc.clip([np.asarray([float(step)])], uc.by_global_norm(1.0))
    record(report)
{end}
"""


def report_of(norm: float, rule: Any = RULE) -> uc.Report:
    """Return the report of a gradient with a norm."""
    return uc.clip([np.asarray([norm])], rule)[1]


def lines(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def steps(path: Path) -> list[int]:
    """Return the steps in a file."""
    return [row["step"] for row in lines(path) if "step" in row]


def test_each_clipper_has_its_header(tmp_path: Path) -> None:
    """The steps of two clippers, one after the other, are under the rules that clipped them."""
    path = tmp_path / "run.jsonl"
    with Recorder(path) as record:
        for rule in (RULE, uc.by_norm(2.0)):
            clipper = uc.Clipper(rule, record)
            clipper([np.ones(2)])
            clipper([np.ones(2)])
    rules = [row.get("rule", row.get("step")) for row in lines(path)]
    assert rules == [repr(RULE), 1, 2, "uc.by_norm(2.0)", 3, 4]


@pytest.mark.parametrize("given", [None, uc.by_norm(2.0)])
def test_a_clipper_names_its_rule(given: Any, tmp_path: Path) -> None:
    """The header has the rule of the clipper, whatever rule the recorder was given."""
    path = tmp_path / "run.jsonl"
    with Recorder(path, rule=given) as record:
        uc.Clipper(RULE, record)([np.ones(2)])
    assert insight.read(path).rule == repr(RULE)


def test_header_and_lines(tmp_path: Path) -> None:
    """The header names the rule; lines are short, and have no keys without a value."""
    path = tmp_path / "run.jsonl"
    with Recorder(path, every=2, rule=uc.by_norm(1.0, ord=1)) as record:
        record(report_of(3.0, uc.by_norm(1.0, ord=1)), loss=0.5)
    assert lines(path) == [
        {"uniclip": 1, "rule": "uc.by_norm(1.0, ord=1)"},
        {"step": 1, "norm": 3.0, "limit": 1.0, "factor": 1 / 3, "share": 1.0, "loss": 0.5},
    ]


def test_a_function_gets_the_rows() -> None:
    """A function gets the scalars in windows, with NaN where the file has null."""
    rows: list[dict[str, Any]] = []
    zero = np.zeros(())
    with Recorder(rows.append, every=2, leaves="all") as record:
        record(report_of(3.0), loss=0.5, leaves={"b": np.asarray(3.0), "a": zero}, rate=1)
        assert rows == []
        report = report_of(math.nan)
        record(report, leaves={"b": np.asarray(math.nan), "a": zero})
        assert [row["step"] for row in rows] == [1, 2]
        record(report_of(0.5), step=7, leaves={"b": zero, "a": zero})
    scalars = {name: float(value) for name, value in report_of(3.0).scalars().items()}
    assert rows[0] == {
        "step": 1,
        **scalars,
        "leaves": {"b": 3.0, "a": 0.0},
        "loss": 0.5,
        "rate": 1.0,
    }
    assert rows[1]["finite"] is False
    assert math.isnan(rows[1]["clip/norm"])
    assert rows[2]["step"] == 7


def test_a_function_gets_nan_for_no_limit() -> None:
    """Limits that do not exist yet, as in a warm-up, are gaps, as the file's null is."""
    rows: list[dict[str, Any]] = []
    clipper = uc.Clipper(uc.zclip(warmup=2), Recorder(rows.append, every=1))
    clipper([np.ones(3)])
    assert math.isnan(rows[0]["clip/limit"])


def test_is_written_once_for_a_window(tmp_path: Path) -> None:
    """The file changes at each window, and at flush and close."""
    path = tmp_path / "run.jsonl"
    record = Recorder(path, every=4)
    for step in range(1, 10):
        record(report_of(2.0))
        assert (steps(path) if path.exists() else []) == list(range(1, step // 4 * 4 + 1))
    record.flush()
    assert steps(path) == list(range(1, 10))
    record(report_of(2.0))
    record.close()
    record.close()
    assert steps(path) == list(range(1, 11))
    with pytest.raises(ValueError, match="closed"):
        record(report_of(2.0))


@pytest.mark.parametrize(
    ("end", "last"),
    [
        ("", 35),
        ("raise RuntimeError", 35),
        ("sys.exit(3)", 35),
        ("os.kill(os.getpid(), signal.SIGKILL)", 30),
        ("if os.fork() == 0: sys.exit()\nos.wait()", 35),
    ],
    ids=["end", "error", "exit", "kill", "fork"],
)
def test_what_is_lost(end: str, last: int, tmp_path: Path) -> None:
    """Everything is written once when a program ends, also by an error.

    A killed program loses at most a window.
    """
    path = tmp_path / "run.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", TRAINING.format(end=end), str(path)],
        check=False,
        capture_output=True,
    )
    expected = {
        "raise RuntimeError": 1,
        "sys.exit(3)": 3,
        "os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    }
    assert done.returncode == expected.get(end, 0), done.stderr
    assert steps(path) == list(range(1, last + 1))


def test_an_error_inside_of_with_is_not_hidden(tmp_path: Path) -> None:
    """An error inside of ``with`` passes, and the steps before it are written."""

    def train() -> None:
        with Recorder(tmp_path / "run.jsonl") as record:
            record(report_of(2.0))
            raise KeyError

    with pytest.raises(KeyError):
        train()
    assert steps(tmp_path / "run.jsonl") == [1]


def test_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """On resuming, lines from that step on are dropped, and so is a truncated last line."""
    path = tmp_path / "run.jsonl"
    with Recorder(path, rule=RULE) as record:
        for _ in range(9):
            record(report_of(2.0))
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 10, "no')
    with Recorder(path, rule=RULE) as record:
        record.resume(6)
        record(report_of(5.0))
        record(report_of(6.0))
    assert steps(path) == list(range(1, 9))
    assert [row["norm"] for row in lines(path)[1:]] == [2.0] * 6 + [5.0, 6.0]
    # The file must contain the new rule.
    with Recorder(path, rule=uc.by_global_norm(2.0)) as record:
        record(report_of(7.0), step=9)
    rules = [row["rule"] for row in lines(path) if "uniclip" in row]
    assert rules == ["uc.by_global_norm(1.0)", "uc.by_global_norm(2.0)"]
    assert not path.with_name("run.jsonl.old").exists()


@pytest.mark.parametrize(
    "text", ["hello\n", "", '{"a": 1}\n', '{"uniclip": 1}\n{"step": 1, "norm": 2.0}\n']
)
def test_other_files_are_kept(text: str, tmp_path: Path) -> None:
    """A new run first renames an existing file, whatever it contains."""
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    for number in ("", "2"):
        with Recorder(path) as record:
            record(report_of(2.0))
        assert steps(path) == [1]
        assert path.with_name(f"run.jsonl.old{number}").exists()
    assert path.with_name("run.jsonl.old").read_text() == text


def test_values_are_those_of_their_step(tmp_path: Path) -> None:
    """An array that is overwritten after recording has been copied."""
    total, rows = np.zeros(()), np.zeros(2)
    with Recorder(tmp_path / "run.jsonl", leaves="all") as record:
        for _ in range(3):
            total += 1
            rows += 1
            leaves = {"a": rows[0, ...], "b": rows[1, ...]}
            record(report_of(2.0), loss=total, leaves=leaves, rate=total)
    assert [
        (row["loss"], row["rate"], row["leaves"]) for row in lines(tmp_path / "run.jsonl")[1:]
    ] == [(number, number, {"a": number, "b": number}) for number in (1.0, 2.0, 3.0)]


def test_a_refused_call_leaves_no_trace(tmp_path: Path) -> None:
    """A refused call takes no step number, and keeps the loss for the next step."""
    with Recorder(tmp_path / "run.jsonl") as record:
        record.loss = 0.5
        for value in (1j, np.ones(2), "high", np.asarray("high"), 10**400, object()):
            with pytest.raises((TypeError, ValueError), match="value must be"):
                record(report_of(1.0), value=value)
        record(report_of(1.0), value=np.float16(2))
    assert lines(tmp_path / "run.jsonl")[1]["step"] == 1
    assert lines(tmp_path / "run.jsonl")[1]["loss"] == 0.5


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    """Training continues without a record if the folder is gone, after one warning.

    An explicit flush raises.
    """
    (tmp_path / "sub").mkdir()
    record = Recorder(tmp_path / "sub" / "run.jsonl", every=2)
    (tmp_path / "sub").rmdir()
    record(report_of(1.0))
    with pytest.warns(UserWarning, match="the recorder stopped: .*No such file") as seen:
        record(report_of(1.0))
    assert [one.filename for one in seen] == [__file__]
    record(report_of(1.0))


def test_leaves(tmp_path: Path) -> None:
    """The norms of leaves are written at the end of each window and at spikes, or at each step."""
    rng, params = np.random.default_rng(0), {"b": np.ones(9), "c": np.ones(2), "a": np.ones(4)}
    for leaves, wanted in ((True, [1, 25, 37, 50, 75, 90, 100]), ("all", list(range(1, 101)))):
        path = tmp_path / f"{leaves}.jsonl"
        with Recorder(path, every=25, leaves=leaves, rule=RULE) as record:
            for step in range(1, 101):
                grads = {name: rng.normal(size=p.shape) for name, p in params.items()}
                if step == 37:
                    grads["b"] *= 100
                if step == 90:
                    grads["b"][0] = math.nan
                record(uc.clip(grads, RULE)[1], leaves=insight.leaf_norms(grads))
        rows = {row["step"]: row for row in lines(path)[1:]}
        assert [step for step, row in rows.items() if "leaves" in row] == wanted
        assert list(rows[37]["leaves"]) == ["b", "c", "a"]
        assert math.isclose(
            np.linalg.norm([*rows[37]["leaves"].values()]), rows[37]["norm"], rel_tol=1e-6
        )
        assert rows[90]["leaves"]["b"] is None
        assert rows[90]["norm"] is None
        assert rows[90]["finite"] is False
        assert "finite" not in rows[37]


def test_copies_write_nothing_twice(tmp_path: Path) -> None:
    """A copy, and a pickle, contain no pending steps.

    They can record to the file after the original has ended.
    """
    record = Recorder(tmp_path / "run.jsonl", every=5, rule=RULE)
    record(report_of(2.0))
    for other in [copy.deepcopy(record), copy.copy(record), pickle.loads(pickle.dumps(record))]:
        other.flush()
        assert not (tmp_path / "run.jsonl").exists()
        assert (other.every, other.path) == (5, record.path)
        last = other
    last(report_of(3.0))
    last.close()
    assert [(row["step"], row["norm"]) for row in lines(tmp_path / "run.jsonl")[1:]] == [(2, 3.0)]


def test_threads(tmp_path: Path) -> None:
    """Threads record into one file, each step once."""
    path = tmp_path / "run.jsonl"
    report = report_of(2.0)
    with Recorder(path, every=7) as record:
        threads = [
            threading.Thread(target=lambda: [record(report) for _ in range(200)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert steps(path) == list(range(1, 801))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda record: record("report"), TypeError, "report must be a report"),
        (lambda record: record(None), TypeError, "report must be a report"),
        (lambda record: record(report_of(1.0), step=1.5), TypeError, "step must be a whole number"),
        (
            lambda record: record(report_of(1.0), step=3),
            ValueError,
            "above the last recorded step, 3, got 3",
        ),
        (
            lambda record: record(report_of(1.0), loss="low"),
            TypeError,
            "loss must be one real number",
        ),
        (
            lambda record: record(report_of(1.0), loss=np.ones(3)),
            TypeError,
            "loss must be one real number",
        ),
        (
            lambda record: record(report_of(1.0), norm=1.0),
            TypeError,
            "the name of a number must be none of .* got 'norm'",
        ),
        (
            lambda record: record(report_of(1.0), leaves=np.ones(3)),
            TypeError,
            r"Recorder\(\.\.\., leaves=True\)",
        ),
    ],
)
def test_wrong_arguments_of_a_call(
    call: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    """Wrong arguments are refused by name, and pending steps are kept."""
    with Recorder(tmp_path / "run.jsonl") as record:
        record(report_of(1.0), step=3)
        with pytest.raises(error, match=message):
            call(record)
    assert steps(tmp_path / "run.jsonl") == [3]


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        (None, r"needs the norms of the leaves at each step; pass leaves=insight.leaf_norms"),
        (np.ones(2), "leaves must be norms by name, as of insight.leaf_norms"),
        ({"w": 1.0}, "leaves must be 0-d arrays, as of insight.leaf_norms"),
        ({"w": np.ones(1)}, "leaves must be 0-d arrays, as of insight.leaf_norms"),
        ({"w": np.asarray(1j)}, "leaves must be norms"),
    ],
)
def test_wrong_norms_of_leaves(leaves: Any, message: str) -> None:
    """Norms of leaves that are missing, or have no names, are refused."""
    rows: list[dict[str, Any]] = []
    with Recorder(rows.append, leaves=True) as record:
        with pytest.raises(TypeError, match=message):
            record(report_of(1.0), leaves=leaves)
        record(report_of(1.0), leaves={"w": np.ones(())})
    assert [(row["step"], row["leaves"]) for row in rows] == [(1, {"w": 1.0})]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"to": 3}, TypeError, "to must be the path of a file"),
        ({"every": 0}, ValueError, "every must be .* 1"),
        ({"every": 2.5}, TypeError, "every must be a whole number"),
        ({"leaves": "some"}, TypeError, 'leaves must be True, False or "all"'),
        (
            {"to": Path("nowhere", "run.jsonl")},
            FileNotFoundError,
            "folder '.*nowhere' doesn't exist",
        ),
        ({"rule": 3}, TypeError, "rule must be"),
    ],
)
def test_wrong_arguments(
    arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    """Wrong arguments are refused by name, before any step."""
    with pytest.raises(error, match=message):
        Recorder(**{"to": tmp_path / "run.jsonl", **arguments})


NAMES = ("norm", "limit", "threshold", "factor", "share", "skipped")
"""The keys of a line, for the scalars ``clip/norm`` and so on of `uniclip.Report.scalars`."""


def test_a_line_is_what_a_logger_shows(framework: Framework, tmp_path: Path) -> None:
    """Each line contains the scalars of its report for every rule, or marks non-finite ones."""
    array = lambda tree: mapped(framework.array, tree)
    params = array(rules.params())
    some = {
        name: rules.kinds(uc)[name].rule for name in ("by_norm", "zclip", "skip_spikes", "chain")
    }
    states = {name: rule.init(params) for name, rule in some.items()}
    records = {
        name: Recorder(tmp_path / f"{name}.jsonl", every=5, rule=rule)
        for name, rule in some.items()
    }
    wanted: dict[str, list[Any]] = {name: [] for name in some}
    for grads, loss in zip(rules.steps(), rules.LOSSES, strict=True):
        for name, rule in some.items():
            _, states[name], report = rule.update(array(grads), states[name], params, loss=loss)
            wanted[name].append(
                {key: float(framework.numpy(value)) for key, value in report.scalars().items()}
            )
            records[name](report, loss=loss)
    for name, record in records.items():
        record.close()
        for row, scalars in zip(lines(record.path)[1:], wanted[name], strict=True):
            for key in NAMES:
                value = scalars.get(f"clip/{key}", math.nan)
                finite = math.isfinite(value) and value < 3e38
                assert row.get(key) == (pytest.approx(value, rel=1e-6) if finite else None), (
                    name,
                    key,
                    row,
                )


def test_norms_of_leaves(framework: Framework) -> None:
    """``leaf_norms`` returns the norm of each leaf, of any magnitude, and 0 for an absent one.

    The names are the paths, in the order of the tree, whose keys need not be sorted.
    """
    values = {"d": [3e30, 4e30], "b": [3.0, 4.0], "a": [3e-30, 4e-30]}
    grads: Any = {name: framework.array(value) for name, value in values.items()}
    found = insight.leaf_norms({"head": grads, "body": [grads["b"], None]})
    assert list(found) == ["head/d", "head/b", "head/a", "body/0", "body/1"]
    assert {tuple(norm.shape) for norm in found.values()} == {()}
    norms = [float(framework.numpy(norm)) for norm in found.values()]
    np.testing.assert_allclose(norms, [5e30, 5.0, 5e-30, 5.0, 0.0], rtol=1e-6)
    compiled = framework.compiled(insight.leaf_norms)(grads)
    found = {name: float(framework.numpy(norm)) for name, norm in compiled.items()}
    assert found == pytest.approx({"d": 5e30, "b": 5.0, "a": 5e-30})


def test_names_of_leaves() -> None:
    """A single array is named by a number, and paths that print alike get numbers."""
    one = np.ones(1)
    assert list(insight.leaf_norms(one)) == ["0"]
    alike = insight.leaf_norms({"a/b": one, "a": {"b": 2 * one}})
    assert alike == {"0: a/b": 1.0, "1: a/b": 2.0}
    assert insight.leaf_norms([]) == {}


@pytest.mark.only("jax")
def test_what_is_donated_later(framework: Framework, tmp_path: Path) -> None:
    """Scalars are copied, since the next step of compiled code may reuse their buffers."""
    import jax

    def step(last: Any, grads: Any) -> Any:
        return jax.tree.map(lambda old, new: new + 0 * old, last, uc.clip(grads, RULE)[1].scalars())

    donating = jax.jit(step, donate_argnums=0)
    last = jax.tree.map(
        framework.array,
        dict.fromkeys(("clip/norm", "clip/limit", "clip/factor", "clip/share"), 0.0),
    )
    with Recorder(tmp_path / "run.jsonl") as record:
        for norm in (1.0, 2.0, 3.0):
            before, last = last, donating(last, [framework.array([norm])])
            assert before["clip/norm"].is_deleted()
            record(last)
    assert insight.read(record.path).norms.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.needs("optax")
def test_a_state_that_is_donated(tmp_path: Path) -> None:
    """The scalars of an optimizer's state are recorded, although the next step donates it."""
    import jax
    import jax.numpy as jnp
    import optax

    from uniclip.integrations.optax import scalars, to_optax

    optimizer = optax.apply_if_finite(to_optax(uc.zclip(), optax.sgd(0.1)), 5)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    donating, params = jax.jit(step, donate_argnums=(0, 1)), jnp.ones(2)
    state = optimizer.init(params)
    with Recorder(tmp_path / "run.jsonl") as record:
        for norm in (1.0, 2.0, math.nan, 3.0):
            params, state = donating(params, state, jnp.asarray([norm, 0.0]))
            record(scalars(state))
    assert [row["norm"] for row in lines(record.path)[1:]] == [1.0, 2.0, 2.0, 3.0]


@pytest.mark.needs("torch")
def test_no_graph_is_held() -> None:
    """Pending steps keep no graph alive, so clipped gradients are freed at once."""
    import gc
    import weakref

    import torch

    weight = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad(weight.square().sum(), weight, create_graph=True)
    for rule in (RULE, uc.chain(RULE, uc.by_norm(0.5))):
        other = grad * 1
        with Recorder(lambda row: None) as record:
            record(uc.clip([other], rule)[1])
            gone = weakref.ref(other)
            del other
            gc.collect()
            assert gone() is None


@pytest.mark.needs("jax")
def test_reports_of_many_steps() -> None:
    """Reports of many steps are refused, and pending steps are kept."""
    import jax
    import jax.numpy as jnp

    _, reports = jax.lax.scan(
        lambda carry, grad: (carry, uc.clip([grad], RULE)[1]), 0, jnp.ones((4, 3))
    )
    rows: list[Any] = []
    with Recorder(rows.append) as record:
        record(report_of(2.0))
        with pytest.raises(TypeError, match="report must be of one step"):
            record(reports)
        record(jax.tree.map(lambda field: field[0], reports))
    assert [row["step"] for row in rows] == [1, 2]


def test_two_recorders_of_one_file(tmp_path: Path) -> None:
    """Two recorders of one file write ascending steps, and start again if it is deleted."""
    first, second = (Recorder(tmp_path / "run.jsonl", every=1) for _ in range(2))
    first(report_of(1.0))
    for step in (2, 3, 4):
        second(report_of(2.0), step=step)
    first(report_of(1.0), step=3)
    found = insight.read(first.path)
    assert (found.steps.tolist(), found.norms.tolist()) == ([1, 2, 3], [1.0, 2.0, 1.0])
    first.path.unlink()
    first(report_of(5.0))
    assert insight.read(first.path).norms.tolist() == [5.0]


@pytest.mark.needs("jax")
def test_steps_of_a_scan() -> None:
    """The stacked scalars of a scan are recorded as one step after the other."""
    import jax
    import jax.numpy as jnp

    rule = uc.zclip(warmup=2)

    def step(state: Any, norm: Any) -> Any:
        grads = {"w": jnp.reshape(norm, (1,)), "b": jnp.zeros(2)}
        _, state, report = rule.update(grads, state)
        return state, (report.scalars(), 2 * norm, insight.leaf_norms(grads))

    norms = jnp.asarray([1.0, 1.2, 30.0, 1.1])
    _, (scalars, losses, leaves) = jax.jit(lambda state: jax.lax.scan(step, state, norms))(
        rule.init({"w": norms[:1], "b": jnp.zeros(2)})
    )
    together: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []
    with Recorder(together.append, leaves="all") as record:
        record(scalars, loss=losses, leaves=leaves, rate=0.1 * losses)
    with Recorder(alone.append, leaves="all") as record:
        for number in range(4):
            one = {name: values[number] for name, values in scalars.items()}
            of_leaves = {name: values[number] for name, values in leaves.items()}
            record(one, loss=losses[number], leaves=of_leaves, rate=0.1 * losses[number])
    assert together == alone
    assert [row["step"] for row in together] == [1, 2, 3, 4]
    assert together[2]["clip/norm"] == 30.0
    assert together[2]["leaves"] == {"b": 0.0, "w": 30.0}
    with Recorder(together.append, leaves="all") as record:
        one_norm = {"w": jnp.ones(())}
        with pytest.raises(TypeError, match="w must be an array for all 4 steps"):
            record(scalars, leaves=one_norm)
    with Recorder(together.append) as record:
        record(scalars, step=11)
        with pytest.raises(TypeError, match="loss must be an array for all 4 steps"):
            record(scalars, loss=1.0)
    assert [row["step"] for row in together[4:]] == [11, 12, 13, 14]


def test_a_file_that_is_read_while_it_is_recorded(tmp_path: Path) -> None:
    """A reader sees all steps, since a recorder of the same program flushes first."""
    path = tmp_path / "run.jsonl"
    record = Recorder(path)
    for size in 1.0, 2.0, 3.0:
        record(uc.clip([np.asarray([size])], uc.by_norm(1.0))[1])
    found = insight.read(path)
    assert found.norms.tolist() == [1.0, 2.0, 3.0]
    assert repr(found) == "<Record: 3 steps, unknown rule>"
    with pytest.raises(TypeError, match="ravel those of nested scans"):
        record({"clip/norm": np.ones((2, 3))})
