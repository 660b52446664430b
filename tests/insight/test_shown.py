"""Figures and pages of recorded runs, and the command that shows them."""

from __future__ import annotations

import io
import itertools
import math
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

import uniclip as uc
from insight import recorded
from uniclip.insight import Recorder, leaf_norms, plot, read, spikes, summary

ODD = {
    "empty": recorded.nothing(),
    "one step": recorded.run(1),
    "all broken": recorded.run(60, 2, broken=range(1, 61)),
    "all 0": recorded.run(60, norms=np.zeros(60)),
    "no limit": recorded.run(
        60, limits=np.full(60, np.inf), factors=np.ones(60), shares=np.zeros(60)
    ),
}
VOID = {"meta", "br", "hr", "img", "link", "input"}


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Close all figures."""
    yield
    plt.close("all")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the file of a run with spikes."""
    return recorded.write(recorded.run(1000, spikes=[300, 600, 900]), tmp_path / "run.jsonl")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the command as a function of its arguments; it returns the exit status."""

    def call(*arguments: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["uniclip", *map(str, arguments)])
        # An imported module would make `runpy` warn.
        monkeypatch.delitem(sys.modules, f"{uc.__name__}.__main__", raising=False)
        with pytest.raises(SystemExit) as left:
            runpy.run_module("uniclip", run_name="__main__")
        return int(left.value.code or 0)

    return call


def lines(ax: Any) -> dict[str, Any]:
    """Return the lines of a panel by their labels."""
    return {line.get_label(): line for line in ax.get_lines()}


def contrast(first: Any, second: Any) -> float:
    """Return the contrast of two colors by WCAG 2, from 1 to 21."""
    parts = [
        [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in to_rgb(c)]
        for c in (first, second)
    ]
    low, high = sorted(float(np.dot(some, [0.2126, 0.7152, 0.0722])) for some in parts)
    return (high + 0.05) / (low + 0.05)


def texts(ax: Any) -> list[str]:
    """Return the labels of points in a panel."""
    return [text.get_text().strip() for text in ax.texts if text.get_transform() != ax.transAxes]


def strips(ax: Any) -> dict[str, Any]:
    """Return the drawn share of each strip in each column, by its label."""
    (strip,) = [child for child in ax.child_axes if child.images]
    names = [label.get_text() for label in strip.get_yticklabels()]
    return dict(zip(names, strip.images[0].get_array()[..., 3], strict=True))


def test_no_spike_is_lost_in_a_long_run() -> None:
    """The figure of 100,000 steps shows the largest and smallest norms, and labels the spike."""
    record = recorded.run(100_000)
    record.norms[777], record.norms[10] = 1e4, 1e-4
    ax = plot(record, Figure().subplots())
    points = ax.collections[0].get_paths()[0].vertices
    assert (points[:, 1].max(), points[:, 1].min()) == (1e4, 1e-4)
    assert (
        abs(points[points[:, 1].argmax(), 0] - 778) <= 100_000 / lines(ax)["norm"].get_xdata().size
    )
    assert "step 778" in texts(ax)


def test_steps_are_shown() -> None:
    """Clipped, skipped and broken steps have strips of their own.

    The limit is a line, and spikes are labeled with step and leaf.
    """
    record = recorded.run(150, 3, spikes=[100, 120], broken=[60, 61])
    record.skipped[119] = True
    ax = plot(record, Figure().subplots())
    found = {name: list(record.steps[drawn > 0]) for name, drawn in strips(ax).items()}
    assert found["clipped"] == list(record.steps[(record.norms > 1) & ~record.skipped])
    assert found["skipped"] == [120]
    assert found["non-finite"] == [60, 61]
    assert set(lines(ax)["limit"].get_ydata()) == {1.0}
    (loss,) = [line for child in ax.child_axes for line in child.get_lines()]
    assert list(loss.get_ydata()) == list(record.losses)
    first = {
        spike.step: spike.leaves[0][0] for spike in spikes(record) if math.isfinite(spike.ratio)
    }
    assert {"step 100", "step 120"} <= {text.split(":")[0] for text in texts(ax)}
    assert set(texts(ax)) == {f"step {step}: {leaf}" for step, leaf in first.items()}


def test_lines_are_named_beside_their_ends() -> None:
    """Lines are labeled beside their ends: norm, limit or threshold, and the bound of skipping."""
    skipping = recorded.run(
        60, skipped=np.arange(60) == 30, rule="uc.by_global_norm(1.0, skip_above=4.0)"
    )
    for record, names in [
        (recorded.run(60), ["norm", "limit"]),
        (skipping, ["norm", "limit", "skip threshold"]),
    ]:
        ax = plot(record, Figure().subplots())
        written = [text for text in ax.texts if text.get_transform() == ax.transAxes]
        assert sorted(text.get_text() for text in written) == sorted(names)
        heights = sorted(text.get_position()[1] for text in written)
        assert all(high - low > 0.06 for low, high in itertools.pairwise(heights))
    assert set(lines(ax)["skip threshold"].get_ydata()) == {4.0}


def test_lines_that_end_at_one_place() -> None:
    """Labels are distinct where lines end at one place, such as norm and limit."""
    record = recorded.run(3, norms=np.asarray([0.5, 2.0, 1.0]))
    assert {"norm", "limit"} <= lines(plot(record, Figure().subplots())).keys()


def test_names_of_spikes_cross_no_other() -> None:
    """Labels of nearby spikes are stacked in rows."""
    record = recorded.run(1000, 3, spikes=[500, 520, 540, 900, 990])
    ax = plot(record, Figure(figsize=(9, 4)).subplots())
    named = [text for text in ax.texts if text.get_transform() != ax.transAxes]
    ax.figure.savefig(io.BytesIO())
    # Without their connecting lines.
    boxes = [Text.get_window_extent(text) for text in named]
    assert len(boxes) == 5
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_nothing_is_cut() -> None:
    """The whole line of the loss is in the picture, also above three strips."""
    steps = np.arange(40)
    record = recorded.run(
        40, losses=40.0 - steps, finite=steps != 10, skipped=steps == 10, shares=(steps > 20) * 1.0
    )
    ax = plot(record)
    ax.figure.savefig(io.BytesIO(), format="svg")
    [panel] = [child for child in ax.child_axes if child.get_ylabel() == "loss"]
    [line] = panel.lines
    heights = line.get_transform().transform(line.get_xydata())[:, 1]
    assert heights.max() <= ax.figure.bbox.y1


def test_in_given_axes() -> None:
    """With ``ax``, neither pyplot nor the settings of matplotlib change."""
    ax, before = Figure().subplots(), dict(mpl.rcParams)
    assert plot(recorded.run(50), ax) is ax
    assert ax.figure.axes == [ax]
    assert plt.get_fignums() == []
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(("style", "paper"), [("default", "white"), ("dark_background", "black")])
def test_light_and_dark(style: str, paper: str) -> None:
    """All lines and texts have a contrast of at least 3."""
    record = recorded.run(200, leaves=3, broken=[20], skipped=np.arange(200) == 150)
    with plt.style.context(style):
        ax = plot(record)
        texts = [text for one in ax.figure.axes for text in (one.xaxis.label, one.yaxis.label)]
        colors = [one.get_color() for one in (*ax.get_lines(), *texts, *ax.texts)]
    assert min(contrast(color, paper) for color in colors) >= 3


@pytest.mark.parametrize("record", ODD.values(), ids=ODD)
def test_odd_runs(
    record: Any, tmp_path: Path, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with little to show still has a figure, a summary and a page."""
    plot(record).figure.canvas.draw()
    file, page = recorded.write(record, tmp_path / "run.jsonl"), tmp_path / "run.html"
    assert command(file, "-o", page) == 0
    words = " ".join(Elements(page.read_text(encoding="utf-8")).words) + capsys.readouterr().out
    assert not re.search(r"\bnan\b|\binf\b", words)


@pytest.mark.parametrize(
    ("show", "arguments"),
    [(plot, ({"norm": [1.0]},)), (summary, ({"norm": [1.0]},)), (plot, (recorded.run(5), 3))],
)
def test_wrong_arguments(show: Any, arguments: Any) -> None:
    """Arguments that are no record or no axes are refused by name."""
    with pytest.raises(TypeError, match=r"^(record|ax) must be "):
        show(*arguments)


def test_matplotlib_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib, the error explains how to install it."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[insight\]"):
        plot(recorded.run(5))


class Elements(HTMLParser):
    """The elements of a page; refuses unclosed or wrongly nested ones."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def test_a_page_needs_nothing_else(tmp_path: Path, command: Any) -> None:
    """A page runs and fetches nothing, escapes labels, and stays small for long runs."""
    labels = ['<script>alert("1")</script>', 'a" id="b', "$\\frac{$ & <i>"]
    rule = uc.by_global_norm(1.0, curve=uc.curves.Regularized(0.5))
    path, page = tmp_path / "run.jsonl", tmp_path / "run.html"
    with Recorder(path, leaves=True, rule=rule) as record:
        for step in range(1, 5000):
            grads = {
                label: np.asarray([0.1 + 9.0 * (step == 300 + number)])
                for number, label in enumerate(labels)
            }
            record(uc.clip(grads, rule)[1], leaves=leaf_norms(grads))
    assert command(path, "-o", page) == 0
    made = page.read_text(encoding="utf-8")
    assert made.startswith("<!DOCTYPE html>\n<html lang=")
    assert len(made.encode()) < 500_000
    elements = Elements(made)
    assert not {"script", "link", "iframe", "object", "base", "b", "i"} & {
        tag for tag, _ in elements.found
    }
    assert not [
        name for _, attributes in elements.found for name in attributes if name.startswith("on")
    ]
    references = [
        attributes.get(name)
        for _, attributes in elements.found
        for name in ("href", "xlink:href", "src")
    ]
    assert all(one.startswith(("#", "data:image/png;base64,")) for one in references if one)
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    words = "".join(elements.words)
    assert all(label in words for label in labels)
    assert repr(rule) in words


def test_the_module_is_a_command(file: Path) -> None:
    """``python -m uniclip`` prints the summary of a run, and its usage without one."""
    line = [sys.executable, "-m", "uniclip"]
    done = subprocess.run([*line, str(file)], check=True, capture_output=True, text=True)
    assert done.stdout == summary(read(file)) + "\n"
    done = subprocess.run(line, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: uniclip ")


def test_a_summary() -> None:
    """The summary has the numbers of the record, and limits that scale with the norms."""
    record = recorded.run(400, 2, spikes=[300], broken=[100])
    text = summary(record)
    finite = np.isfinite(record.norms)
    above = np.mean(record.norms[finite] > 0.25)
    median = np.median(record.norms[finite])
    assert "400 steps" in text
    assert "1 non-finite (first at step 100)" in text
    assert f"p50 {median:.3g}" in text
    assert f"0.25: {100 * above:.2g}%" in text
    assert "step 300: " in text
    assert "largest change in layers." in text
    for power in (-3, 0, 3):
        other = record._replace(norms=record.norms * 4.0**power)
        wanted = [4.0 ** round(math.log(median, 4) + power) * part for part in (0.25, 1, 4)]
        assert "{:g}, {:g}, and {:g}".format(*wanted) in summary(other)


FIRST = {
    (
        "82 of 85 steps skipped, the last 82 in a row: "
        "the skip threshold 2 is below the median norm 3.6"
    ): recorded.run(
        85,
        norms=np.full(85, 3.6),
        skipped=np.arange(85) > 2,
        rule="uc.by_global_norm(1.0, skip_above=2.0)",
    ),
    "30 of 200 steps skipped, the last 30 in a row": recorded.run(
        200, skipped=np.arange(200) >= 170
    ),
    "non-finite from step 31 to the end, 30 steps in a row": recorded.run(60, broken=range(31, 61)),
    "many norms are 0.6 and none is larger: something else seems to clip first": recorded.run(
        60, norms=np.minimum(recorded.run(60).norms, 0.6), limits=np.ones(60), shares=np.zeros(60)
    ),
    # A maximum that is reached often, among few different norms.
    "never clipped: the largest norm is 0.1 times the limit": recorded.run(
        60, norms=np.arange(60) % 3 / 2, limits=np.full(60, 10.0), shares=np.zeros(60)
    ),
    "50 of 60 steps skipped, the last 50 in a row": recorded.run(  # skipped as non-finite
        60,
        norms=np.full(60, 5.0),
        limits=np.ones(60),
        broken=range(11, 61),
        skipped=np.arange(60) > 9,
    ),
    "all gradients are 0": recorded.run(
        60, norms=np.zeros(60), limits=np.ones(60), shares=np.zeros(60)
    ),
    "31 of 60 steps skipped": recorded.run(
        60, skipped=np.arange(60) % 2 + (np.arange(60) == 58) > 0
    ),
    "100% of steps clipped: the limit acts as a normalizer": recorded.run(
        60, limits=np.full(60, 1e-3), shares=np.ones(60)
    ),
    "25% of steps clipped: the limit acts as a step-size limiter": recorded.run(
        60, shares=np.arange(60) % 4 == 0
    ),
    "5% of steps clipped: the limit acts as a safety net": recorded.run(
        60, shares=np.arange(60) % 20 == 0
    ),
    "never clipped: the largest norm is 0.05 times the limit": recorded.run(
        60, norms=np.full(60, 5.0), limits=np.full(60, 100.0), shares=np.zeros(60)
    ),
    "many norms are 0.5 and none is larger: something else seems to clip first": recorded.run(
        60,
        norms=np.minimum(recorded.run(60).norms, 0.5),
        limits=np.full(60, 0.5),
        shares=np.zeros(60),
    ),
}


@pytest.mark.parametrize("line", FIRST)
def test_a_summary_begins_with_what_stands_out(line: str) -> None:
    """The summary begins with the fault of a run, else with the effect of the limit."""
    assert summary(FIRST[line]).splitlines()[0] == line


def test_what_a_summary_advises() -> None:
    """The summary suggests three limits, and 1 if that would clip.

    It suggests another bound for a run that skips its steps, and nothing for an adaptive limit.
    """
    record = recorded.run(60, norms=np.full(60, 0.3), limits=np.ones(60), shares=np.zeros(60))
    assert (
        summary(record).splitlines()[-2]
        == "Norms alone don't determine the best limit: compare 0.0625, 0.25, and 1"
    )
    assert ": try 1, or compare " in summary(record._replace(norms=np.linspace(0.3, 2.0, 60)))
    dead = summary(record._replace(skipped=np.arange(60) > 9))
    assert dead.endswith(
        "\nRaise the skip threshold, or lower the learning rate, and record again."
    )
    assert "best limit" not in dead
    nan = summary(record._replace(skipped=np.arange(60) > 9, finite=np.arange(60) <= 9))
    assert nan.endswith(
        "\nFind the cause of the non-finite gradients, or lower the learning rate, "
        "and record again."
    )
    assert "best limit" not in summary(record._replace(limits=np.linspace(1.0, 2.0, 60)))
    broken = summary(recorded.run(60, broken=range(31, 61)))
    assert "the limit acts" not in broken


def test_a_row_of_spikes_is_one() -> None:
    """Consecutive spikes are listed once.

    These are the first step of a new level, the largest step of a growing spike, and NaN.
    """
    level = np.where(np.arange(200) < 120, 1.0, 900.0)
    assert "1 spike:\n  step 121: 900 times the median\n" in summary(recorded.run(200, norms=level))
    growing = np.ones(200)
    growing[120:123] = 6.0, 900.0, 800.0
    assert "1 spike:\n  step 122: 900 times the median\n" in summary(
        recorded.run(200, norms=growing)
    )
    growing[121] = np.nan
    text = summary(recorded.run(200, norms=growing, broken=[122]))
    assert (
        "3 spikes:\n  step 122: non-finite\n  step 123: 800 times the median\n  step 121: 6 "
        "times the median\n"
    ) in text


def test_a_rule_that_is_not_known() -> None:
    """Without a known rule, the summary names the limit, if there is one."""
    record = recorded.run(20, rule="", limits=np.full(20, 0.5))
    assert ", unknown rule with limit 0.5: " in summary(record)
    assert ", unknown rule: " in summary(record._replace(limits=np.arange(1.0, 21.0)))


def test_bounds_of_runs_that_skip() -> None:
    """Bounds of skipping are in the text of the rule.

    They have no line of their own where they are the limits or thresholds.
    """
    skipped, levels = np.arange(60) == 30, np.full(60, 3.0)
    for rule, bounds in {
        "uc.by_global_norm(1.0, skip_above=2.5e-3)": {2.5e-3},
        "uc.Rule(1.0, curve=uc.curves.RejectAbove(40))": {40.0},
        "uc.Rule(1.0, curve=uc.curves.reject)": set(),
    }.items():
        ax = plot(recorded.run(60, skipped=skipped, rule=rule), Figure().subplots())
        assert {
            value
            for line in ax.get_lines()
            if line.get_label() == "skip threshold"
            for value in line.get_ydata()
        } == bounds
    assert "skip threshold" not in lines(
        plot(recorded.run(60, skipped=skipped, thresholds=levels), Figure().subplots())
    )
    text = summary(recorded.run(60, skipped=np.arange(60) > 20, thresholds=np.full(60, 0.01)))
    assert text.startswith(
        "39 of 60 steps skipped, the last 39 in a row: "
        "the skip threshold 0.01 is below the median norm 0."
    )


def test_steps_in_a_row_that_are_not_finite() -> None:
    """Only the first of consecutive non-finite steps is listed, after the spike before it."""
    text = summary(recorded.run(200, spikes=[95], broken=range(101, 201)))
    assert [line.split(":")[0] for line in text.splitlines() if line.startswith("  ")] == [
        "  step 101",
        "  step 95",
    ]


def test_what_a_summary_counts_as_clipped() -> None:
    """Skipped and non-finite steps do not count as clipped.

    For several norms the summary also states the clipped share of them.
    """
    skipped, shares = np.arange(20) < 12, np.where(np.arange(20) < 12, 1.0, 0.0)
    record = recorded.run(
        20, norms=np.full(20, 0.5), skipped=skipped, shares=shares, factors=1 - shares
    )
    assert ": 12 skipped, 0% of the others clipped, 0 non-finite\n" in summary(record)
    record = recorded.run(20, norms=np.full(20, 5.0), shares=np.full(20, 0.25))
    assert ": 100% clipped (25% of the norms), 0 skipped" in summary(record)


@pytest.mark.parametrize("name", ["run.html", "run.svg", "run.png", "run.pdf"])
def test_what_is_written(name: str, file: Path, tmp_path: Path, command: Any) -> None:
    """The suffix of a name determines the format, and an existing file is replaced."""
    beginnings = {".html": b"<!DOCTYPE", ".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}
    path = tmp_path / name
    path.write_text("old")
    assert command(file, "-o", path) == 0
    assert path.read_bytes().startswith(beginnings[path.suffix])


def test_steps_around_one(
    file: Path, tmp_path: Path, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command shows some steps only, if there are any."""
    part = read(file).between(2, 5)
    assert command(file, "--steps", "2:5", "-o", tmp_path / "part.svg") == 0
    assert capsys.readouterr().out == summary(part) + "\n"
    assert command(file, "--steps", "1000000:1000001") == 2
    assert "no step from 1000000 to 1000001" in capsys.readouterr().err
    assert command(file, "--steps", "5") == 2
    assert "such as 800:830, got '5'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [None, "", "no record\n", '{"uniclip": 1}\n{"step": 1, "no\n{"step": 2}\n']
)
def test_a_file_that_is_no_record(
    content: str | None, tmp_path: Path, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing or damaged file is named in one line, with exit status 2."""
    path = tmp_path / "other.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert command(path) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert "other.jsonl" in shown.err


@pytest.mark.parametrize("page", ["none/run.html", "run.jsonl", "run"])
def test_a_file_that_cannot_be_written(
    page: str, file: Path, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that cannot be written is named, with exit status 2, and the run is unchanged."""
    before = file.read_bytes()
    assert command(file, "-o", file.parent / page) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert page in shown.err
    assert file.read_bytes() == before


def test_control_characters(
    tmp_path: Path, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters of a file do not reach the terminal."""
    header = '{"uniclip": 1, "rule": "\\u001b[31mred\\u202e"}'
    rows = [
        f'{{"step": {step}, "norm": 1.0, "leaves": {{"\\u001b]0;x": 1}}}}' for step in range(1, 60)
    ]
    path = tmp_path / "run.jsonl"
    rows.append('{"step": 60, "norm": 99.0, "leaves": {"\\u001b]0;x": 99}}')
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    assert command(path) == 0
    shown = capsys.readouterr().out
    assert "\ufffd[31mred\ufffd" in shown
    assert "\ufffd]0;x" in shown
    assert all(one.isprintable() for one in shown.replace("\n", ""))
