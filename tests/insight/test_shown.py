"""Pictures and pages of recorded runs, and the command that shows them."""

from __future__ import annotations

import os
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

from insight import recorded
from uniclip.insight import page, plot, read, spikes, suggest

COMMANDS = ["report", "suggest", "spikes"]
ODD = {
    "empty": recorded.nothing(),
    "one step": recorded.run(1),
    "all broken": recorded.run(60, 2, broken=range(1, 61)),
    "all 0": recorded.run(60, norms=np.zeros(60)),
    "no limit": recorded.run(60, limits=np.full(60, np.inf), factors=np.ones(60), shares=np.zeros(60)),
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
        with pytest.raises(SystemExit) as left:
            runpy.run_module("uniclip", run_name="__main__")
        return int(left.value.code or 0)

    return call


def lines(ax: Any) -> dict[str, Any]:
    """Return the lines of a panel by their labels."""
    return {line.get_label(): line for line in ax.get_lines()}


def contrast(first: Any, second: Any) -> float:
    """Return the contrast of two colors by WCAG 2, from 1 to 21."""
    parts = [[p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in to_rgb(c)] for c in (first, second)]
    low, high = sorted(float(np.dot(some, [0.2126, 0.7152, 0.0722])) for some in parts)
    return (high + 0.05) / (low + 0.05)


def test_no_spike_is_lost_in_a_long_run() -> None:
    """Of 100,000 steps the picture shows the largest norm, near its step, and the smallest."""
    record = recorded.run(100_000)
    record.norms[777], record.norms[10] = 1e4, 1e-4
    ax = plot(record, Figure().subplots())
    points = ax.collections[0].get_paths()[0].vertices
    assert (points[:, 1].max(), points[:, 1].min()) == (1e4, 1e-4)
    assert abs(points[points[:, 1].argmax(), 0] - 778) <= 100_000 / lines(ax)["norm: median"].get_xdata().size


def test_steps_are_marked() -> None:
    """Clipped, skipped and broken steps have markers of their own, and the limit is a line."""
    record = recorded.run(150, spikes=[100, 120], broken=[60, 61])
    record.skipped[119] = True
    drawn = lines(plot(record, Figure().subplots()))
    at = {name: list(drawn[name].get_xdata()) for name in ("clipped", "skipped", "not finite")}
    assert at["clipped"] == list(record.steps[(record.norms > 1) & ~record.skipped])
    assert at["skipped"] == [120]
    assert at["not finite"] == [60, 61]
    assert len({drawn[name].get_marker() for name in at}) == 3
    assert set(drawn["limit"].get_ydata()) == {1.0}


def test_in_given_axes() -> None:
    """With ``ax`` pyplot and the settings of matplotlib are left alone."""
    ax, before = Figure().subplots(), dict(mpl.rcParams)
    assert plot(recorded.run(50, leaves=3), ax) is ax
    assert ax.figure.axes == [ax]
    assert plt.get_fignums() == []
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(("style", "paper"), [("default", "white"), ("dark_background", "black")])
def test_light_and_dark(style: str, paper: str) -> None:
    """All that is drawn, and all text, has a contrast of 3 at least."""
    record = recorded.run(200, leaves=3, broken=[20], skipped=np.arange(200) == 150)
    with plt.style.context(style):
        ax = plot(record)
        texts = [text for one in ax.figure.axes for text in (one.xaxis.label, one.yaxis.label)]
        colors = [one.get_color() for one in (*ax.get_lines(), *texts, *ax.get_legend().get_texts())]
    assert min(contrast(color, paper) for color in colors) >= 3


@pytest.mark.parametrize("record", ODD.values(), ids=ODD)
def test_odd_runs(record: Any) -> None:
    """A run of which there is little to show is drawn and has a page all the same."""
    plot(record).figure.canvas.draw()
    assert not re.search(r"\bnan\b|\binf\b", " ".join(Elements(page(record)).words))


@pytest.mark.parametrize("arguments", [({"norm": [1.0]},), (recorded.run(5), 3)])
def test_wrong_arguments(arguments: Any) -> None:
    """What is no record or no axes is named."""
    with pytest.raises(TypeError, match=r"^(record|ax) must be "):
        plot(*arguments)


def test_matplotlib_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib the error says how to install it."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[insight\]"):
        plot(recorded.run(5))


class Elements(HTMLParser):
    """The elements of a page; refuses those that are not closed, or closed in another order."""

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


def test_a_page_needs_nothing_else() -> None:
    """Nothing runs and nothing is fetched, labels are shown as they are, and long runs have small pages."""
    labels = ['<script>alert("1")</script>', 'a" id="b', "$\\frac{$ & <i>"]
    record = recorded.run(20_000, 3, spikes=[300, 900], broken=[700], labels=labels, rule='masked("<b>&")')
    made = page(record)
    assert made.startswith("<!DOCTYPE html>\n<html lang=")
    assert len(made.encode()) < 1_000_000
    elements = Elements(made)
    assert not {"script", "link", "iframe", "object", "base", "b", "i"} & {tag for tag, _ in elements.found}
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    references = [attributes.get(name) for _, attributes in elements.found for name in ("href", "xlink:href", "src")]
    assert all(one.startswith(("#", "data:image/png;base64,")) for one in references if one)
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    words = "".join(elements.words)
    assert all(label[-20:] in words for label in labels)
    assert 'masked("<b>&")' in words


def test_a_page_is_written(tmp_path: Path) -> None:
    """It replaces what is there, but no recorded run."""
    assert page(recorded.run(50), tmp_path / "run.html") == tmp_path / "run.html"
    assert (tmp_path / "run.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    path = recorded.write(recorded.run(5), tmp_path / "run.jsonl")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"run\.jsonl is a recorded run"):
        page(recorded.run(5), path)
    assert path.read_bytes() == before


def test_the_module_is_a_command(file: Path) -> None:
    """``python -m uniclip`` prints the help and its version; where its reader has gone, it says nothing."""
    line = [sys.executable, "-m", "uniclip"]
    assert subprocess.run(line, check=True, capture_output=True, text=True).stdout.startswith("usage: uniclip ")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*line, "report", str(file)], check=False, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.stderr == ""


def test_the_command(file: Path, tmp_path: Path, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A report has the run, the advice and the spikes, and says where the page is."""
    assert command("report", file, "-o", tmp_path / "run.html") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert suggest(read(file)).verdict in shown.out
    assert str(tmp_path / "run.html") in shown.out
    assert (tmp_path / "run.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert command("spikes", file, "-z", "2", "--window", "30") == 0
    found = [str(spike.step) for spike in spikes(read(file), z=2.0, window=30)]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]] == found


@pytest.mark.parametrize("content", [None, "", "no record\n", '{"uniclip": 1}\n{"step": 1, "no\n{"step": 2}\n'])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_that_is_no_record(
    name: str, content: str | None, tmp_path: Path, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing or damaged file is named in one line, and the status is 2."""
    path = tmp_path / "other.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert command(name, path) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert "other.jsonl" in shown.err


@pytest.mark.parametrize("arguments", [["-z", "-1"], ["-z", "many"], ["--window", "1.5"], ["-o", "none/run.html"]])
def test_wrong_arguments_of_the_command(
    arguments: list[str], file: Path, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is named, and the status is 2."""
    assert command("report" if "-o" in arguments else "spikes", file, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert arguments["-o" in arguments] in shown.err


def test_control_characters(tmp_path: Path, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing in a file acts on the terminal."""
    header = '{"uniclip": 1, "rule": "\\u001b[31mred\\u202e", "leaves": ["\\u001b]0;x\\u0007"], "sizes": [1]}'
    rows = [f'{{"step": {step}, "norm": 1.0, "leaves": [{1 + step % 2}]}}' for step in range(1, 60)]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([header, *rows, '{"step": 60, "norm": 99.0, "leaves": [99.0]}']) + "\n", encoding="utf-8")
    assert command("report", path) == 0
    shown = capsys.readouterr().out
    assert "\ufffd[31mred\ufffd" in shown
    assert all(one.isprintable() for one in shown.replace("\n", ""))
