"""The file of a recorder: when it is written, what is lost, and where a run goes on."""

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


def test_header_and_lines(tmp_path: Path) -> None:
    """The header says what the numbers are of; a line is short, and has no key without a value."""
    path = tmp_path / "run.jsonl"
    params = {"layers": [np.ones((2, 3)), np.ones(5)]}
    with Recorder(path, every=2, rule=uc.by_norm(1.0, ord=1), params=params) as record:
        record(report_of(3.0, uc.by_norm(1.0, ord=1)), loss=0.5)
    assert lines(path) == [
        {
            "uniclip": 1,
            "rule": "uc.Rule(1.0, scope=uc.scopes.each_leaf, norm=uc.norms.L1)",
            "scope": "each_leaf",
            "ord": 1,
            "every": 2,
        },
        {"step": 1, "norm": 3.0, "limit": 1.0, "factor": 1 / 3, "share": 1.0, "loss": 0.5},
    ]


@pytest.mark.parametrize(
    ("rule", "scope", "order"),
    [
        (uc.by_global_norm(1.0), "all_leaves", 2),
        (uc.by_global_norm(1.0, ord=math.inf), "all_leaves", "inf"),
        (uc.by_norm(1.0, ord=3), "each_leaf", 3),
        (uc.by_block_rms(1.0), "each_leaf", None),
        (uc.agc(), "other", 2),
        (uc.by_norm(1.0, axis=0), "other", 2),
        (uc.chain(uc.by_norm(1.0), uc.by_global_norm(1.0)), "other", None),
        (uc.by_value(-1.0, 1.0), "other", None),
        (None, "all_leaves", 2),
    ],
    ids=repr,
)
def test_what_norms_are_of(rule: Any, scope: str, order: Any, tmp_path: Path) -> None:
    """The header names the scope and the order of the norms of a rule."""
    with Recorder(tmp_path / "run.jsonl", rule=rule) as record:
        record(report_of(3.0))
    header = lines(tmp_path / "run.jsonl")[0]
    assert (header["scope"], header["ord"]) == (scope, order)


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
    """All is written when a program ends, also by an error, and once; one that is killed loses at most a window."""
    path = tmp_path / "run.jsonl"
    done = subprocess.run([sys.executable, "-c", TRAINING.format(end=end), str(path)], check=False, capture_output=True)
    expected = {"raise RuntimeError": 1, "sys.exit(3)": 3, "os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL}
    assert done.returncode == expected.get(end, 0), done.stderr
    assert steps(path) == list(range(1, last + 1))


def test_an_error_inside_of_with_is_not_hidden(tmp_path: Path) -> None:
    """What was recorded before it is written."""

    def train() -> None:
        with Recorder(tmp_path / "run.jsonl") as record:
            record(report_of(2.0))
            raise KeyError

    with pytest.raises(KeyError):
        train()
    assert steps(tmp_path / "run.jsonl") == [1]


def test_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Lines from the resumed step on are dropped, and so is a torn one at the end."""
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
    with Recorder(path, rule=uc.by_global_norm(2.0)) as record:  # another rule says so
        record(report_of(7.0), step=9)
    rules = [row["rule"] for row in lines(path) if "uniclip" in row]
    assert rules == ["uc.Rule(1.0)", "uc.Rule(2.0)"]
    assert not path.with_name("run.jsonl.old").exists()


def test_a_recorder_can_go_back(tmp_path: Path) -> None:
    """A run that is rolled back goes on at an earlier step."""
    path = tmp_path / "run.jsonl"
    with Recorder(path, every=2) as record:
        for norm in (1.0, 2.0, 3.0):
            record(report_of(norm))
        record.resume(1)
        record(report_of(4.0))
    assert [(row["step"], row["norm"]) for row in lines(path)[1:]] == [(1, 1.0), (2, 4.0)]


def test_a_new_run_keeps_the_old_one(tmp_path: Path) -> None:
    """Nothing of an earlier run is lost where another begins."""
    path = tmp_path / "run.jsonl"
    for norm in (2.0, 3.0):
        with Recorder(path) as record:
            record(report_of(norm))
    assert lines(path)[1]["norm"] == 3.0
    assert lines(tmp_path / "run.jsonl.old")[1]["norm"] == 2.0


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    """A file that is no recorded run, or one of other leaves, is not written into."""
    path = tmp_path / "run.jsonl"
    for text in ("hello\n", "", '{"a": 1}\n', "[1]\n", "\x00\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"run\.jsonl exists, and is no recorded run"):
            Recorder(path)
        assert path.read_text() == text
    path.unlink()
    with Recorder(path, leaves=True, params=dict.fromkeys("ab", np.ones(2))) as record:
        record(report_of(2.0), leaves=np.ones(2))
    before = path.read_bytes()
    other = Recorder(path, leaves=True, params=dict.fromkeys("ac", np.ones(2)))
    with pytest.raises(ValueError, match="a run of other leaves"):
        other.resume(1)
    assert path.read_bytes() == before


def test_three_runs_on_one_path(tmp_path: Path) -> None:
    """None of them is lost."""
    for norm in (1.0, 2.0, 3.0):
        with Recorder(tmp_path / "run.jsonl") as record:
            record(report_of(norm))
    norms = [lines(tmp_path / name)[1]["norm"] for name in ("run.jsonl.old", "run.jsonl.old2", "run.jsonl")]
    assert norms == [1.0, 2.0, 3.0]


def test_a_recorder_that_nobody_holds(tmp_path: Path) -> None:
    """What it has not written is written when the program ends."""
    top, rest = TRAINING.format(end="").strip().split("\n\n", 1)
    body = "\n    ".join(rest.splitlines())
    code = f"{top}\ndef train():\n    {body}\ntrain()\nimport gc; gc.collect()"
    path = tmp_path / "run.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert steps(path) == list(range(1, 36))


def test_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is that of when the recorder was made, and a file that is gone begins with a header again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    with Recorder("run.jsonl", every=2) as record:
        for step in range(4):
            record(report_of(2.0))
            if step == 1:
                monkeypatch.chdir(tmp_path / "sub")
        (tmp_path / "run.jsonl").unlink()
        record(report_of(3.0))
    assert [row.get("step", "header") for row in lines(tmp_path / "run.jsonl")] == ["header", 5]
    assert not list((tmp_path / "sub").iterdir())


def test_values_are_those_of_their_step(tmp_path: Path) -> None:
    """An array that is written over later has been copied."""
    total, rows = np.zeros(()), np.zeros(2)
    with Recorder(tmp_path / "run.jsonl", leaves="all") as record:
        for _ in range(3):
            total += 1
            rows += 1
            record(report_of(2.0), loss=total, leaves=rows, rate=total)
    assert [(row["loss"], row["rate"], row["leaves"]) for row in lines(tmp_path / "run.jsonl")[1:]] == [
        (number, number, [number, number]) for number in (1.0, 2.0, 3.0)
    ]


def test_a_refused_call_leaves_no_trace(tmp_path: Path) -> None:
    """It takes no number, and the loss waits for the next step."""
    with Recorder(tmp_path / "run.jsonl") as record:
        record.loss = 0.5
        for value in (1j, np.ones(2), "high", np.asarray("high"), 10**400, object()):
            with pytest.raises((TypeError, ValueError), match="value must be"):
                record(report_of(1.0), value=value)
        record(report_of(1.0), value=np.float16(2))
    assert lines(tmp_path / "run.jsonl")[1]["step"] == 1
    assert lines(tmp_path / "run.jsonl")[1]["loss"] == 0.5


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    """A training goes on without a record, and says so once; who asks to write is told."""
    (tmp_path / "sub").mkdir()
    record = Recorder(tmp_path / "sub" / "run.jsonl", every=2)
    (tmp_path / "sub").rmdir()
    record(report_of(1.0))
    with pytest.warns(UserWarning, match="recording stops: .*No such file"):
        record(report_of(1.0))
    record(report_of(1.0))
    other = Recorder(tmp_path / "run.jsonl")
    other.path = other._file.path = tmp_path / "sub" / "run.jsonl"
    other(report_of(1.0))
    with pytest.raises(OSError, match="No such file"):
        other.flush()


def test_texts_of_any_kind(tmp_path: Path) -> None:
    """Labels hold what Python takes for ends of lines, and a line is torn within a character: a run goes on."""
    path = tmp_path / "run.jsonl"
    names = {"a\u2028b": np.ones(2), "c\x85é": np.ones(3)}
    for first in (0, 2):
        with Recorder(path, leaves="all", params=names) as record:
            record.resume(first)
            for _ in range(2):
                record(report_of(2.0), leaves=np.ones(2), größe=1.0)
        if not first:
            path.write_bytes(path.read_bytes() + '{"step": 3, "grö'.encode()[:-1])
    assert insight.read(path).steps.tolist() == [1, 2, 3, 4]


def test_other_leaves_are_refused(tmp_path: Path) -> None:
    """The norms of all leaves are given at each step, those without a gradient too, and no gradients."""
    with Recorder(tmp_path / "run.jsonl", leaves="all") as record:
        record(report_of(1.0), leaves=insight.leaf_norms({"a": np.ones(2), "b": np.ones(3)}))
        record(report_of(1.0), leaves=insight.leaf_norms({"a": np.ones(2), "b": None}))
        for wrong in (np.ones(1), {"a": np.ones(2), "b": np.ones(3)}):
            with pytest.raises(ValueError, match="leaves must be"):
                record(report_of(1.0), leaves=wrong)
    assert [row["leaves"][1] for row in lines(tmp_path / "run.jsonl")[1:]] == [3**0.5, 0.0]
    assert insight.read(tmp_path / "run.jsonl").leaves.shape == (2, 2)


def test_spikes_after_a_checkpoint(tmp_path: Path) -> None:
    """The norms of leaves at a spike are written, too, where the norms before are those in the file."""
    path, rng = tmp_path / "run.jsonl", np.random.default_rng(0)
    for first in (0, 60):
        with Recorder(path, every=1000, leaves=True) as record:
            record.resume(first)
            for step in range(first + 1, first + 61):
                norm = rng.lognormal(0.0, 0.1) * (50 if step == 62 else 1)
                record(report_of(norm), leaves=np.asarray([norm, 0.0]))
    assert insight.read(path).leaf_steps.tolist() == [62]


def test_leaves(tmp_path: Path) -> None:
    """The norms of leaves are written at the end of each window, at spikes, and of those without a gradient null."""
    rng, params = np.random.default_rng(0), {"a": np.ones(4), "b": np.ones(9), "c": np.ones(2)}
    for leaves, wanted in ((True, [25, 37, 50, 75, 90, 100]), ("all", list(range(1, 101)))):
        path = tmp_path / f"{leaves}.jsonl"
        with Recorder(path, every=25, leaves=leaves, rule=RULE, params=params) as record:
            for step in range(1, 101):
                grads = {name: rng.normal(size=p.shape) for name, p in params.items()}
                if step == 37:
                    grads["b"] *= 100
                if step == 90:
                    grads["b"][0] = math.nan
                record(uc.clip(grads, RULE)[1], leaves=insight.leaf_norms(grads))
        assert lines(path)[0]["leaves"] == ["a", "b", "c"]
        assert lines(path)[0]["sizes"] == [4, 9, 2]
        rows = {row["step"]: row for row in lines(path)[1:]}
        assert [step for step, row in rows.items() if "leaves" in row] == wanted
        assert math.isclose(np.linalg.norm(rows[37]["leaves"]), rows[37]["norm"], rel_tol=1e-6)
        assert rows[90]["leaves"][1] is None
        assert rows[90]["norm"] is None
        assert rows[90]["finite"] is False
        assert "finite" not in rows[37]


def test_leaves_of_a_rule_with_a_norm_for_each(tmp_path: Path) -> None:
    """They are in its report: nothing else is to be given, and the paths name them."""
    rule, path = uc.by_norm(1.0), tmp_path / "run.jsonl"
    with Recorder(path, leaves="all", rule=rule) as record:
        record(uc.clip({"x": [np.asarray([3.0, 4.0])], "y": np.asarray([2.0])}, rule)[1])
    assert lines(path)[0]["leaves"] == ["x/0", "y"]
    assert lines(path)[1]["leaves"] == [5.0, 2.0]


def test_digits(tmp_path: Path) -> None:
    """A number has the digits of its dtype: float32 ones are short, and float64 ones exact."""
    value = 1 / 3
    for dtype in (np.float32, np.float64):
        path = tmp_path / f"{dtype.__name__}.jsonl"
        with Recorder(path) as record:
            record(uc.clip([np.asarray([value], dtype)], uc.by_global_norm(math.inf))[1])
        norm = lines(path)[1]["norm"]
        assert dtype(norm) == dtype(value)
        assert len(str(norm)) <= (12 if dtype is np.float32 else 18)
        assert lines(path)[1]["limit"] is None


def test_copies_write_nothing_twice(tmp_path: Path) -> None:
    """A copy, and what a pickle holds, has no steps that wait; it can record where the other does not."""
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
        threads = [threading.Thread(target=lambda: [record(report) for _ in range(200)]) for _ in range(4)]
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
        (lambda record: record(report_of(1.0), step=3), ValueError, "above the last one that was recorded, 3, got 3"),
        (lambda record: record(report_of(1.0), loss="low"), TypeError, "must be numbers or arrays"),
        (lambda record: record(report_of(1.0), loss=np.ones(3)), ValueError, "loss must be one number"),
        (lambda record: record(report_of(1.0), norm=1.0), ValueError, "writes 'norm' by itself"),
        (lambda record: record(report_of(1.0), leaves=np.ones(3)), TypeError, r"Recorder\(\.\.\., leaves=True\)"),
    ],
)
def test_wrong_arguments_of_a_call(call: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    """Each is refused by name; what was recorded before stays."""
    with Recorder(tmp_path / "run.jsonl") as record:
        record(report_of(1.0), step=3)
        with pytest.raises(error, match=message):
            call(record)
    assert steps(tmp_path / "run.jsonl") == [3]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"path": 3}, TypeError, "path must be the path of a file"),
        ({"every": 0}, ValueError, "every must be .* 1"),
        ({"every": 2.5}, TypeError, "every must be a whole number"),
        ({"leaves": "some"}, TypeError, 'leaves must be True, False or "all"'),
        ({"path": Path("nowhere", "run.jsonl")}, FileNotFoundError, "there is no folder '.*nowhere'"),
        ({"rule": 3}, TypeError, "rule must be"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    """Each is refused by name, before any step."""
    with pytest.raises(error, match=message):
        Recorder(**{"path": tmp_path / "run.jsonl", **arguments})


def test_leaves_have_to_be_given(tmp_path: Path) -> None:
    """A rule with one norm does not report those of leaves."""
    record = Recorder(tmp_path / "run.jsonl", leaves=True, rule=RULE)
    with pytest.raises(TypeError, match=r"leaves=insight\.leaf_norms\(grads\)"):
        record(report_of(1.0))


def test_read_while_it_is_recorded(tmp_path: Path) -> None:
    """The last steps, which wait to be written with others, are not missed."""
    path = tmp_path / "run.jsonl"
    recorder = insight.Recorder(path, every=100)
    for norm in (1.0, 2.0, 3.0):
        recorder(uc.clip([np.asarray([norm])], uc.by_global_norm(1.0))[1])
        assert len(insight.read(path).steps) == int(norm)
    recorder.close()
