"""Recorded runs are read from the recorder's file, and from the logs of trainers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from uniclip.insight import read

HEADER = {"uniclip": 1, "rule": "uc.Rule(1.0)", "scope": "all_leaves", "ord": 2, "every": 2}
LEAVES = {**HEADER, "leaves": ["['b']", "['w']"], "sizes": [10, 1000]}
LINES = [
    {"step": 1, "norm": 13.0, "limit": 1.0, "factor": 0.0769, "share": 1.0, "loss": 2.3, "lr": 0.1},
    {"step": 2, "norm": 0.5, "limit": None, "factor": 1.0, "share": 0.0, "threshold": 3.0, "skipped": False},
    {"step": 3, "norm": None, "finite": False, "limit": None, "factor": None, "share": 1.0, "skipped": True},
    {"step": 4},
]
TRAINER_STATE = """{
  "best_global_step": null,
  "epoch": 0.75,
  "global_step": 6,
  "log_history": [
    {"epoch": 0.25, "grad_norm": 24.395355224609375, "learning_rate": 4.17e-05, "loss": 37.677833557128906, "step": 2},
    {"epoch": 0.375, "eval_loss": 28.53981590270996, "eval_runtime": 0.0007, "step": 3},
    {"epoch": 0.5, "grad_norm": NaN, "learning_rate": 2.5e-05, "loss": 23.13677978515625, "step": 4},
    {"epoch": 0.75, "grad_norm": 10.597294807434082, "learning_rate": 8.3e-06, "loss": 27.20632553100586, "step": 6},
    {"epoch": 0.75, "eval_loss": 28.53901481628418, "step": 6}
  ],
  "logging_steps": 2
}
"""
METRICS = """\
clip/factor,clip/limit,clip/norm,clip/norm_max,clip/share,epoch,step,train_loss_epoch,train_loss_step,val_loss
0.06840427219867706,1.0,14.618969917297363,,,0,0,,36.93842697143555,
0.05547193065285683,1.0,18.027135848999023,,,0,1,,42.91156768798828,
,,,,,0,1,,,40.791839599609375
,,,18.027135848999023,1.0,0,1,41.10397720336914,,
0.06887304782867432,1.0,14.5194673538208,,,1,2,,36.4947395324707,
nan,1.0,inf,,,1,3,,nan,
"""


def file(path: Path, *lines: Any, end: str = "\n") -> Path:
    """Write lines, as JSON unless they are text."""
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end, "utf-8")
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where a file may be written."""
    return tmp_path / "run.jsonl"


def same(array: Any, values: list[Any], dtype: Any = np.float64) -> bool:
    """Whether an array has these values, NaN equal to NaN, and the dtype."""
    wanted = np.asarray(values, dtype)
    return array.dtype == dtype and np.array_equal(array, wanted, equal_nan=dtype is np.float64)


def test_columns(path: Path) -> None:
    """Each key is a column; what a line lacks is NaN, a limit that nothing reaches ∞."""
    record = read(file(path, HEADER, *LINES))
    nan, inf = math.nan, math.inf
    assert same(record.steps, [1, 2, 3, 4], np.int64)
    assert same(record.norms, [13.0, 0.5, nan, nan])
    assert same(record.limits, [1.0, inf, nan, nan])
    assert same(record.factors, [0.0769, 1.0, nan, nan])
    assert same(record.shares, [1.0, 0.0, 1.0, nan])
    assert same(record.finite, [True, True, False, True], bool)
    assert same(record.skipped, [False, False, True, False], bool)
    assert same(record.thresholds, [nan, 3.0, nan, nan])
    assert same(record.losses, [2.3, nan, nan, nan])
    assert list(record.extra) == ["lr"]
    assert same(record.extra["lr"], [0.1, nan, nan, nan])
    assert (record.rule, record.scope, record.ord, record.labels) == ("uc.Rule(1.0)", "all_leaves", 2.0, [])
    assert record.leaves.shape == (0, 0)
    assert record.leaf_steps.shape == record.sizes.shape == (0,)


def test_leaves(path: Path) -> None:
    """Norms of leaves are there at the steps where they were recorded; the path may be text."""
    rows = [{"step": 1, "leaves": [3.0, None]}, {"step": 2}, {"step": 3, "leaves": [1, 2.5]}]
    record = read(str(file(path, LEAVES, *rows)))
    assert same(record.leaves, [[3.0, math.nan], [1.0, 2.5]])
    assert same(record.leaf_steps, [1, 3], np.int64)
    assert same(record.sizes, [10, 1000], np.int64)
    assert record.labels == ["['b']", "['w']"]
    without = {key: value for key, value in LEAVES.items() if key != "sizes"}
    assert same(read(file(path, without, *rows)).sizes, [0, 0], np.int64)


@pytest.mark.parametrize("end", [b'{"step": 5, "no', b"\0\0", b'{"step": 6, "\xc3'])
def test_torn(path: Path, end: bytes) -> None:
    """A torn last line is left out, whatever it ends with."""
    file(path, HEADER, *LINES)
    path.write_bytes(path.read_bytes() + end)
    assert read(path).steps.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("end", ["", "\n\n", "\r\n"])
def test_last_line(path: Path, end: str) -> None:
    """A whole last line is read, with a line break or without."""
    assert read(file(path, HEADER, *LINES, end=end)).steps.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("line", ['{"step": 3, "nor', "12", "[1, 2]", "", '{"step": 3}{"step": 4}'])
def test_damaged(path: Path, line: str) -> None:
    """A damaged line in the middle is refused by file and number."""
    with pytest.raises(ValueError, match=r"run\.jsonl, line 3: expected a JSON object"):
        read(file(path, HEADER, LINES[0], line, LINES[3]))


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"norm": 1.0}, "step must be a whole number"),
        ({"step": 9, "norm": "big"}, "norm must be a number"),
        ({"step": 9, "leaves": [1.0]}, "leaves must be 2 norms"),
        ({"uniclip": 2}, "format 2"),
    ],
)
def test_wrong_values(path: Path, row: Any, what: str) -> None:
    """A value of the wrong kind is refused by file and line."""
    with pytest.raises(ValueError, match=f"run.jsonl, line 3: .*{what}"):
        read(file(path, LEAVES, LINES[0], row, {"step": 10}))


def test_losses_that_are_not_finite(path: Path) -> None:
    """A loss that is null was not finite; it says nothing about the gradients."""
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "norm": 1.0, "loss": None}, {"step": 3, "norm": 1.0}]
    record = read(file(path, HEADER, *rows))
    assert same(record.losses, [1.0, math.inf, math.nan])
    assert record.finite.all()
    path.write_text('{"log_history": [{"step": 1, "grad_norm": 1.0, "loss": NaN}, {"step": 2, "grad_norm": 1.0}]}')
    assert same(read(path).losses, [math.inf, math.nan])


@pytest.mark.parametrize("mark", ["\ufeff", ""])
def test_characters(path: Path, mark: str) -> None:
    """Only line feeds end a line: labels may hold what else Python takes for that; a first mark is skipped."""
    labels = ["a\u2028b", "c\u0085d\u2029\x0b"]
    lines = [
        json.dumps({**LEAVES, "leaves": labels}, ensure_ascii=False),
        json.dumps({"step": 1, "leaves": [1.0, 2.0]}),
    ]
    path.write_bytes((mark + "\n".join(lines) + '\n{"step": 2, "ä').encode()[:-1])
    record = read(path)
    assert record.labels == labels
    assert record.steps.tolist() == [1]
    path.write_text(f"{mark}step,clip/norm\n1,2.0\n2,3.0\n", "utf-8")
    assert read(path).norms.tolist() == [2.0, 3.0]


def test_resumed(path: Path) -> None:
    """A run that was resumed wins over what it does again, whatever its first part did later."""
    first = [{"step": step, "norm": 1.0} for step in range(1, 8)]
    again = [{"step": step, "norm": 2.0} for step in (4, 5, 5)]
    record = read(file(path, HEADER, *first, *again))
    assert record.steps.tolist() == [1, 2, 3, 4, 5]
    assert record.norms.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]


def test_later_header(path: Path) -> None:
    """A run that goes on with another rule has its name; norms of two kinds are of none."""
    later = {**HEADER, "rule": "uc.zclip()", "every": 5}
    record = read(file(path, LEAVES, LINES[0], later, {"step": 2, "leaves": [1.0, 2.0]}))
    assert (record.rule, record.scope, record.ord, record.labels) == ("uc.zclip()", "all_leaves", 2.0, LEAVES["leaves"])
    other = {**HEADER, "scope": "each_leaf", "ord": 3}
    record = read(file(path, HEADER, LINES[0], other))
    assert (record.scope, record.ord) == ("other", None)


def test_empty(path: Path) -> None:
    """A run without a step is an empty record, also if it was killed in its first line."""
    for text in (json.dumps(HEADER) + "\n", '{"uniclip": 1, "ru', '{"log_history": []}', "step,clip/norm\n"):
        path.write_text(text)
        record = read(path)
        assert record.steps.shape == record.norms.shape == record.finite.shape == (0,)
        assert record.leaves.shape == (0, 0)
        assert record.extra == {}


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\x89PNG\r\n\x1a\n\xff\xfe", b"[1, 2]", b"a,b\n1,2\n", b"{"])
def test_other_file(path: Path, content: bytes) -> None:
    """A file of another kind is refused, and it is said what is expected."""
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"run\.jsonl is no recorded run"):
        read(path)


@pytest.mark.parametrize(("version", "what"), [(2, "newer uniclip"), ("1", "must be the number"), (None, "must be")])
def test_version(path: Path, version: Any, what: str) -> None:
    """Only a format that is known is read."""
    with pytest.raises(ValueError, match=f"run.jsonl, line 1: .*{what}"):
        read(file(path, {**HEADER, "uniclip": version}))


def test_trainer_state(path: Path) -> None:
    """The log of a Trainer holds the joint norm at the steps that it logged."""
    path.write_text(TRAINER_STATE)
    record = read(path)
    assert same(record.steps, [2, 4, 6], np.int64)
    assert same(record.norms, [24.395355224609375, math.nan, 10.597294807434082])
    assert same(record.finite, [True, False, True], bool)
    assert same(record.losses, [37.677833557128906, 23.13677978515625, 27.20632553100586])
    assert np.isnan([record.limits, record.factors, record.shares, record.thresholds]).all()
    assert (record.scope, record.ord, record.rule) == ("all_leaves", 2.0, "")
    assert list(record.extra) == ["epoch", "learning_rate"]


def test_metrics(path: Path) -> None:
    """The table of a logger has several rows of a step, with empty cells."""
    path.write_text(METRICS)
    record = read(path)
    assert same(record.steps, [0, 1, 2, 3], np.int64)
    assert same(record.norms, [14.618969917297363, 18.027135848999023, 14.5194673538208, math.inf])
    assert same(record.finite, [True, True, True, False], bool)
    assert same(record.losses, [36.93842697143555, 42.91156768798828, 36.4947395324707, math.inf])
    assert same(record.shares, [math.nan, 1.0, math.nan, math.nan])
    assert list(record.extra) == ["epoch", "val_loss", "clip/norm_max", "train_loss_epoch"]
    path.write_text(METRICS + "0.05,1.0,17.93")
    assert read(path).steps.tolist() == [0, 1, 2, 3]
    path.write_text(METRICS.rstrip() + "9")  # its last number may be cut off
    assert read(path).steps.tolist() == [0, 1, 2]
