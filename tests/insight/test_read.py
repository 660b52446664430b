"""Reading the file of a recorder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from uniclip.insight import read

HEADER = {"uniclip": 1, "rule": "uc.Rule(1.0)"}
LINES = [
    {"step": 1, "norm": 13.0, "limit": 1.0, "factor": 0.0769, "share": 1.0, "loss": 2.3, "lr": 0.1},
    {
        "step": 2,
        "norm": 0.5,
        "limit": None,
        "factor": 1.0,
        "share": 0.0,
        "threshold": 3.0,
        "skipped": False,
    },
    {
        "step": 3,
        "norm": None,
        "finite": False,
        "limit": None,
        "factor": None,
        "share": 1.0,
        "skipped": True,
    },
    {"step": 4, "loss": None},
]


def file(path: Path, *lines: Any, end: str = "\n") -> Path:
    """Write lines, as JSON unless they are text."""
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end,
        "utf-8",
    )
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a file that may be written."""
    return tmp_path / "run.jsonl"


def same(array: Any, values: list[Any], dtype: Any = np.float64) -> bool:
    """Return whether an array has these values and the dtype; NaN equals NaN."""
    wanted = np.asarray(values, dtype)
    return array.dtype == dtype and np.array_equal(array, wanted, equal_nan=dtype is np.float64)


def test_columns(path: Path) -> None:
    """Each key is a column.

    A missing value is NaN. The limit of an unclipped step, and the loss of a step without one, are
    ∞.
    """
    record = read(str(file(path, HEADER, *LINES)))
    nan, inf = math.nan, math.inf
    assert same(record.steps, [1, 2, 3, 4], np.int64)
    assert same(record.norms, [13.0, 0.5, nan, nan])
    assert same(record.limits, [1.0, inf, inf, nan])
    assert same(record.factors, [0.0769, 1.0, nan, nan])
    assert same(record.shares, [1.0, 0.0, 1.0, nan])
    assert same(record.finite, [True, True, False, True], bool)
    assert same(record.skipped, [False, False, True, False], bool)
    assert same(record.thresholds, [nan, 3.0, nan, nan])
    assert same(record.losses, [2.3, nan, nan, inf])
    assert list(record.extra) == ["lr"]
    assert same(record.extra["lr"], [0.1, nan, nan, nan])
    assert (record.rule, record.labels) == ("uc.Rule(1.0)", [])
    assert record.leaves.shape == (0, 0)
    assert record.leaf_steps.shape == (0,)


def test_leaves(path: Path) -> None:
    """Norms of leaves are at the steps where they were recorded, under any name."""
    labels = ["a\u2028b", "c\u0085d\u2029"]
    rows = [
        {"step": 1, "leaves": {labels[0]: 3.0, labels[1]: None}},
        {"step": 2},
        {"step": 3, "leaves": {labels[1]: 1}},
    ]
    record = read(file(path, HEADER, *[json.dumps(row, ensure_ascii=False) for row in rows]))
    assert record.labels == labels
    assert same(record.leaves, [[3.0, math.nan], [math.nan, 1.0]])
    assert same(record.leaf_steps, [1, 3], np.int64)


@pytest.mark.parametrize("end", [b'{"step": 5, "no', b"\0\0", b'{"step": 6, "\xc3', b"\n\r\n"])
def test_torn(path: Path, end: bytes) -> None:
    """A truncated last line is ignored, whatever it ends with."""
    file(path, HEADER, *LINES)
    path.write_bytes(path.read_bytes() + end)
    assert read(path).steps.tolist() == [1, 2, 3, 4]


def test_a_later_header(path: Path) -> None:
    """A run that is resumed with another rule has the name of that rule."""
    assert (
        read(file(path, HEADER, LINES[0], {"uniclip": 1, "rule": "uc.zclip()"}, LINES[1])).rule
        == "uc.zclip()"
    )


@pytest.mark.parametrize("text", ['{"uniclip": 1}\n', '{"uniclip": 1, "ru'])
def test_empty(path: Path, text: str) -> None:
    """A run without a step is an empty record, also if it was killed in its first line."""
    path.write_text(text)
    record = read(path)
    assert record.steps.shape == record.norms.shape == record.finite.shape == (0,)
    assert record.leaves.shape == (0, 0)
    assert record.extra == {}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "isn't a recorded run"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "isn't a recorded run"),
        (b'{"log_history": []}', "isn't a recorded run"),
        (b'{"uniclip": 2}\n{"step": 1}\n', "has format 2, .*update"),
        (b'{"uniclip": 1}\n{"step": 1, "no\n{"step": 2}\n', "is damaged"),
        (b'{"uniclip": 1}\n12\n{"step": 2}\n', "is damaged"),
        (b'{"uniclip": 1}\n{"norm": 1.0}\n', "is damaged"),
        (b'{"uniclip": 1}\n{"step": 2, "norm": "big"}\n', "is damaged"),
    ],
)
def test_refused(path: Path, content: bytes, what: str) -> None:
    """Files of another format, a newer version, or with damage are refused by name."""
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"run\.jsonl {what}"):
        read(path)


def test_between(path: Path) -> None:
    """A part of a run has all columns of its steps, in plain numbers."""
    rows = [
        {"step": step, "norm": 1.0 * step, "loss": 2.0 * step, "lr": 0.1 * step, **leaves}
        for step in (1, 2, 3, 4)
        for leaves in [{"leaves": {"w": 5.0 * step}} if step != 2 else {}]
    ]
    record = read(file(path, {"uniclip": 1, "rule": "a rule"}, *rows))
    part = record.between(2, 3)
    assert same(part.steps, [2, 3], np.int64)
    assert same(part.norms, [2.0, 3.0])
    assert same(part.losses, [4.0, 6.0])
    assert same(part.finite, [True, True], bool)
    np.testing.assert_allclose(part.extra["lr"], [0.2, 0.3])
    assert same(part.leaf_steps, [3], np.int64)
    assert same(part.leaves[:, 0], [15.0])
    assert (part.rule, part.labels) == ("a rule", ["w"])

    # All arrays with a value for each step are cut.
    lengths = {len(value) for value in part if isinstance(value, np.ndarray)}
    assert lengths == {2, 1}
    with pytest.raises(ValueError, match=r"no step from 5 to 9 .* are 1 to 4"):
        record.between(5, 9)
