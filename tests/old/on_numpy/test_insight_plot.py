"""Pictures of recorded runs."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import recorded
from uniclip.insight import panels
from uniclip.insight.plot import plot


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


def lines(ax: Any) -> dict[str, Any]:
    """Return the lines of a panel by their labels."""
    return {line.get_label(): line for line in ax.get_lines()}


def texts(ax: Any) -> list[str]:
    """Return what is written inside a panel."""
    return [text.get_text() for text in ax.texts]


def luminance(color: Any) -> float:
    """Return the relative luminance of WCAG 2."""
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
    return float(np.dot(parts, [0.2126, 0.7152, 0.0722]))


def contrast(first: Any, second: Any) -> float:
    """Return the contrast of two colors, from 1 to 21."""
    low, high = sorted([luminance(first), luminance(second)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("spike", [1, 777, 50_000, 99_999, 100_000])
def test_no_spike_is_lost_in_a_long_run(spike: int) -> None:
    """Of 100,000 steps the columns show the largest norm, at its step, and the smallest, in seconds."""
    record = recorded.run(100_000, leaves=20)
    record.norms[spike - 1] = 1e4
    record.norms[0 if spike > 5 else 10] = 1e-4
    begun = time.process_time()
    ax = plot(record)
    ax.figure.canvas.draw()
    assert time.process_time() - begun < 10
    (band,) = ax.collections
    points = band.get_paths()[0].vertices
    assert points[:, 1].max() == 1e4
    assert points[:, 1].min() == 1e-4
    assert abs(points[points[:, 1].argmax(), 0] - spike) <= 100_000 / panels.COLUMNS
    assert lines(ax)["norm: median"].get_xdata().size == panels.COLUMNS


def test_columns() -> None:
    """The columns hold the smallest, median and largest of each part, the last and shorter ones too."""
    values = np.random.default_rng(1).permutation(1003).astype(float)
    at, low, middle, high = panels.columns(np.arange(1003), values, 10)
    parts = np.split(values, (np.linspace(0, 1003, 11).astype(int))[1:-1])
    np.testing.assert_array_equal(low, [part.min() for part in parts])
    np.testing.assert_array_equal(middle, [np.median(part) for part in parts])
    np.testing.assert_array_equal(high, [part.max() for part in parts])
    assert np.all(np.diff(at) > 0)


def test_steps_are_marked() -> None:
    """Clipped, skipped and broken steps have markers of their own, and the limit is a line."""
    record = recorded.run(150, spikes=[100, 120], broken=[60, 61])
    record.skipped[119] = True
    drawn = lines(plot(record, Figure().subplots()))
    at = {name: list(drawn[name].get_xdata()) for name in ("clipped", "skipped", "not finite")}
    expected = record.steps[(record.norms > 1) & ~record.skipped]
    assert at["clipped"] == list(expected)
    assert list(drawn["clipped"].get_ydata()) == list(record.norms[expected - 1])
    assert at["skipped"] == [120]
    assert at["not finite"] == [60, 61]
    assert len({drawn[name].get_marker() for name in at}) == 3
    assert set(drawn["limit"].get_ydata()) == {1.0}
    assert drawn["norm"].get_xdata().size == 148


def test_markers_of_a_normalizer() -> None:
    """Where thousands of steps are clipped, the largest of each of some columns are marked, spikes among them."""
    record = recorded.run(20_000, spikes=[5000, 19_999])
    drawn = lines(plot(record._replace(shares=np.ones(20_000)), Figure().subplots()))["clipped"]
    assert panels.MARKS / 2 < drawn.get_xdata().size <= panels.MARKS
    assert {5000, 19_999} <= set(drawn.get_xdata())


def test_a_threshold_is_shown_instead_of_the_limit() -> None:
    """Rules that clip to less than they compare with are shown with the threshold."""
    drawn = lines(plot(recorded.run(50, thresholds=np.full(50, 3.0)), Figure().subplots()))
    assert set(drawn["threshold"].get_ydata()) == {3.0}
    assert "limit" not in drawn


def test_what_is_unknown_is_not_marked() -> None:
    """A log of norms alone has no limit, and no clipped steps."""
    unknown = np.full(50, np.nan)
    drawn = lines(plot(recorded.run(50, limits=unknown, factors=unknown, shares=unknown), Figure().subplots()))
    assert list(drawn) == ["norm"]


def test_one_panel_in_given_axes() -> None:
    """With ``ax`` pyplot is left alone, and nothing else is drawn."""
    ax = Figure().subplots()
    assert plot(recorded.run(50, leaves=3), ax) is ax
    assert ax.figure.axes == [ax]
    assert plt.get_fignums() == []


@pytest.mark.parametrize(("leaves", "losses", "panels_"), [(0, False, 2), (0, True, 3), (4, False, 3), (4, True, 4)])
def test_panels_that_apply(leaves: int, losses: bool, panels_: int) -> None:
    """A figure of pyplot has the panels of what was recorded, on the same steps and norms."""
    record = recorded.run(200, leaves)
    record = record if losses else record._replace(losses=np.full(200, np.nan))
    ax = plot(record)
    assert plt.get_fignums() == [ax.figure.number]
    twin = 1  # the axis of the survival
    assert len(ax.figure.axes) == panels_ + twin
    assert ax.get_ylabel() == "norm"
    assert ax.get_yscale() == "log"


def test_survival() -> None:
    """The falling line is the share of the steps above a norm."""
    record = recorded.run(500)
    figure = Figure()
    panels.spread(figure.subplots(), record)
    above, norm = figure.axes[1].get_lines()[0].get_data()
    np.testing.assert_allclose(above, [100 * np.mean(record.norms > one) for one in norm])
    assert sum(patch.get_width() for patch in figure.axes[0].patches) == 500


def test_leaves() -> None:
    """The map has a row for each leaf and loses no spike of one of them; labels are shown as they are."""
    record = recorded.run(50_000, leaves=3, spikes=[23_456], labels=["$a_1$", "<b>", "c" * 60])
    record.leaves[list(record.leaf_steps).index(23_456), 1] = 1e5
    ax = Figure().subplots()
    panels.leaves(ax, record)
    cells = ax.collections[0].get_array()
    assert cells.shape == (3, panels.COLUMNS)
    assert cells[1, 23_455 * panels.COLUMNS // 50_000] == 1e5
    assert (cells[[0, 2]] < 1e5).all()
    shown = ax.get_yticklabels()
    assert [text.get_text() for text in shown[:2]] == ["$a_1$", "<b>"]
    assert not any(text.get_parse_math() for text in shown)
    assert len(shown[2].get_text()) < 30


def test_a_map_of_few_records_shows_the_nearest() -> None:
    """Between records the map shows the nearest one."""
    record = recorded.run(100, leaf_steps=np.asarray([1, 51]), leaves=1)
    record = record._replace(leaves=np.asarray([[2.0], [3.0]]))
    ax = Figure().subplots()
    panels.leaves(ax, record)
    assert ax.collections[0].get_array().ravel().tolist() == [2.0] * 26 + [3.0] * 74


def test_labels_of_other_scripts() -> None:
    """What the fonts lack is drawn as a mark, without a warning; what they have is kept."""
    labels = ["层.weight", "a\x1bb", "Ωµ", "w"]
    ax = plot(recorded.run(100, leaves=4, labels=labels))
    ax.figure.savefig(io.BytesIO())
    drawn = next(one for one in ax.figure.axes if one.child_axes)  # the colors are beside it
    shown = [text.get_text() for text in drawn.get_yticklabels()]
    assert shown == ["\ufffd.weight", "a\ufffdb", "Ωµ", "w"]


@pytest.mark.parametrize(("style", "paper"), [("default", "white"), ("dark_background", "black")])
def test_light_and_dark(style: str, paper: str) -> None:
    """Text has the style's color; all that is drawn has a contrast of 3 at least."""
    record = recorded.run(200, leaves=3, broken=[20], skipped=np.arange(200) == 150)
    with plt.style.context(style):
        ax = plot(record)
        assert to_rgb(ax.get_facecolor()) == to_rgb(paper)
        assert ax.yaxis.label.get_color() == mpl.rcParams["axes.labelcolor"]
        legend = ax.get_legend().get_texts()
        assert {text.get_color() for text in legend} == {mpl.rcParams["text.color"]}
    assert len(legend) == 5
    for line in ax.get_lines():
        assert contrast(line.get_color(), paper) >= 3, line
    figure_texts = [text for one in ax.figure.axes for text in (one.xaxis.label, one.yaxis.label)]
    assert all(contrast(text.get_color(), paper) >= 3 for text in figure_texts)


def test_nothing_global_changes() -> None:
    """Drawing leaves the settings of matplotlib as they were."""
    before = dict(mpl.rcParams)
    plot(recorded.run(50, leaves=3))
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (recorded.nothing(), ["no finite norms"]),
        (recorded.run(1), []),
        (recorded.run(1, 2, broken=[1]), ["no finite norms"]),
        (recorded.run(60, 2, broken=range(1, 61)), ["no finite norms"]),
        (recorded.run(60, norms=np.zeros(60)), ["all norms are 0"]),
        (recorded.run(60, norms=np.full(60, 2.0), limits=np.zeros(60)), []),
        (recorded.run(3000, norms=np.full(3000, 2.0), limits=np.full(3000, np.inf)), []),
    ],
    ids=["empty", "one step", "one broken step", "all broken", "all 0", "limit 0", "no limit"],
)
def test_odd_runs(record: Any, said: list[str]) -> None:
    """A run of which there is little to show is drawn all the same, and says what it lacks."""
    ax = plot(record)
    ax.figure.canvas.draw()
    assert texts(ax) == said


@pytest.mark.parametrize(
    "arguments", [({"norm": [1.0]},), (recorded.run(5), np.empty(2, object)), (recorded.run(5), 3)]
)
def test_wrong_arguments(arguments: Any) -> None:
    """What is no record or no axes is named."""
    with pytest.raises(TypeError, match=r"^(record|ax) must be .*, got "):
        plot(*arguments)


def test_matplotlib_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib the error says how to install it."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(
        ModuleNotFoundError, match=r'pictures need matplotlib: pip install "uniclip-gradients\[insight\]"'
    ):
        plot(recorded.run(5))


def test_matplotlib_is_imported_late() -> None:
    """The modules of pictures and pages import nothing of matplotlib."""
    program = "import sys, uniclip.insight.command, uniclip.insight.plot; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
