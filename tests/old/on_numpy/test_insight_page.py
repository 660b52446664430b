"""Pages about recorded runs."""

from __future__ import annotations

import re
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

import recorded
from uniclip.insight.advice import suggest
from uniclip.insight.page import COMPARE, MOST, page
from uniclip.insight.spikes import spikes

VOID = {"meta", "br", "hr", "img", "link", "input"}
ODD = {
    "empty": recorded.nothing(),
    "one step": recorded.run(1),
    "all broken": recorded.run(60, 2, broken=range(1, 61)),
    "no limit": recorded.run(60, limits=np.full(60, np.inf), factors=np.ones(60), shares=np.zeros(60)),
}


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
        assert len(dict(attrs)) == len(attrs), (tag, attrs)
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

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements of a kind."""
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def text() -> str:
    """Return the page of a run that has everything."""
    return page(recorded.run(2000, leaves=5, spikes=[500, 900, 1500], broken=[700]))


def test_long_runs_are_quick_and_small() -> None:
    """The page of 100,000 steps and 40 leaves is below 1 MB, and made in seconds."""
    record = recorded.run(100_000, leaves=40, spikes=range(500, 100_000, 500), broken=[777])
    begun = time.process_time()
    made = page(record)
    assert time.process_time() - begun < 20
    assert len(made.encode()) < 1_000_000


@pytest.mark.parametrize("record", [recorded.run(2000, leaves=5, spikes=[500]), *ODD.values()], ids=["whole", *ODD])
def test_html(record: Any) -> None:
    """Elements are closed in order, ids are unique and those referred to are there; so it is for odd runs."""
    made = page(record)
    assert made.startswith("<!DOCTYPE html>\n<html lang=")
    elements = Elements(made)
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', made)) <= set(ids)
    assert not re.search(r"\bnan\b|\binf\b", " ".join(elements.words))


def test_no_script_and_no_network(text: str) -> None:
    """Nothing runs and nothing is fetched: what the page refers to is inside of it."""
    elements = Elements(text)
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in elements.found}
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    references = [attributes.get(name) for _, attributes in elements.found for name in ("href", "xlink:href", "src")]
    assert all(one.startswith(("#", "data:image/png;base64,")) for one in references if one)
    assert not re.search(r"https?:|//\w|@import", re.sub(r"base64,[^\"]+", "", text))


def test_pictures(text: str) -> None:
    """Pictures are inline, have names, text that is text, and the color of the page's text; only the map is raster."""
    elements = Elements(text)
    svgs = elements.all("svg")
    assert [svg["aria-label"] for svg in svgs] == [
        "Norm at each step",
        "How large the norms were",
        "Loss at each step",
        "Norms of the leaves",
    ]
    assert all(svg["role"] == "img" and "width" not in svg for svg in svgs)
    assert text.count("<figcaption>") == len(svgs)
    assert len(elements.all("image")) == 2  # the map and its colors
    assert {"step", "norm", "loss", "layers.3.weight"} <= set(elements.words)
    assert "currentColor" in text
    assert "#010203" not in text
    assert "@media (prefers-color-scheme:dark)" in text


def test_parts_come_in_order(text: str) -> None:
    """The advice is first; it names the limits, and that one run is no measurement."""
    parts = ['class="advice"', "What these limits", ">Spikes<", ">Pictures<", ">The run<"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "One run is no measurement" in COMPARE
    advice = suggest(recorded.run(2000, leaves=5, spikes=[500, 900, 1500]))
    made = page(recorded.run(2000, leaves=5, spikes=[500, 900, 1500]))
    assert advice.limits
    assert COMPARE in made
    assert f"<strong>{advice.verdict}</strong>" in made
    assert all(f"<li>{limit:g}</li>" in made for limit in advice.limits)


def test_summary(text: str) -> None:
    """The page says what the run was, and how much of it was clipped, skipped and broken."""
    rows = dict(re.findall(r'<tr><th scope="row">([^<]*)</th><td>([^<]*)</td></tr>', text))
    record = recorded.run(2000, leaves=5, spikes=[500, 900, 1500], broken=[700])
    assert rows["rule"] == "uc.by_global_norm(1.0)"
    assert rows["steps"] == "2,000 (1 to 2000)"
    count = int((record.shares > 0).sum())
    assert rows["clipped"] == f"{100 * count / 1999:.1f} % ({count} steps)"
    assert rows["skipped"] == "no step"
    assert rows["not finite"] == "0.1 % (1 step)"


def test_many_spikes() -> None:
    """Of many spikes the largest are listed, and the page says how many there are."""
    record = recorded.run(20_000, spikes=range(150, 20_000, 150))
    found = spikes(record)
    assert len(found) > MOST
    made = page(record)
    assert f"{len(found):,} in all, the {MOST} largest are listed." in made
    listed = [int(step) for step in re.findall(r'<th scope="row">(\d+)</th>(?:<td>[^<]*</td>){5}</tr>', made)]
    largest = sorted(found, key=lambda spike: spike.ratio, reverse=True)[:MOST]
    assert listed == sorted(spike.step for spike in largest)


def test_labels_are_escaped() -> None:
    """Labels and rules are shown as they are, whatever they hold."""
    labels = ['<script>alert("1")</script>', 'a" id="b', "$\\frac{$ & <i>"]
    record = recorded.run(400, 3, spikes=[300], labels=labels, rule='masked("<b>&")')
    made = page(record)
    elements = Elements(made)
    assert not elements.all("script") + elements.all("b") + elements.all("i")
    words = "".join(elements.words)
    assert all(label[-20:] in words for label in labels)
    assert 'masked("<b>&")' in words


def test_own_settings_of_matplotlib_do_not_matter(text: str) -> None:
    """A page is the same in every style, and changes no setting and no figure of pyplot."""
    with plt.style.context("dark_background"), mpl.rc_context({"svg.fonttype": "path", "font.size": 30}):
        before = dict(mpl.rcParams)
        assert page(recorded.run(2000, leaves=5, spikes=[500, 900, 1500], broken=[700])) == text
        assert dict(mpl.rcParams) == before
    assert plt.get_fignums() == []


def test_file(tmp_path: Path) -> None:
    """With a path the page is written there, over what is there."""
    record = recorded.run(50)
    for name in (tmp_path / "run.html", str(tmp_path / "run.html")):
        assert page(record, name) == tmp_path / "run.html"
        assert (tmp_path / "run.html").read_text(encoding="utf-8") == page(record)


def test_wrong_arguments() -> None:
    """What is no record, or no path, is named."""
    with pytest.raises(TypeError, match=r"^record must be "):
        page("run.jsonl")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^path must be "):
        page(recorded.run(5), 3)  # type: ignore[call-overload]


def test_matplotlib_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib the error says how to install it."""
    monkeypatch.setitem(sys.modules, "uniclip.insight.pictures", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "uniclip-gradients\[insight\]"'):
        page(recorded.run(5))


def test_no_record_is_replaced(tmp_path: Path) -> None:
    """A page is not written over a recorded run."""
    path = recorded.write(recorded.run(5), tmp_path / "run.jsonl")
    before = path.read_bytes()
    for given in (path, str(path)):
        with pytest.raises(ValueError, match=r"run\.jsonl is a recorded run, which a page must not replace"):
            page(recorded.run(5), given)
    assert path.read_bytes() == before


def test_labels_of_other_scripts() -> None:
    """Labels of any script are in the page, without a warning; control characters are not."""
    labels = ["层.权重", "a\x00b\x1b[31m", "c\u2028d", "Ω"]
    text = page(recorded.run(100, 4, spikes=[50], labels=labels, rule="uc\x00rule"))
    assert "层.权重" in text
    assert "a\ufffdb\ufffd[31m" in text
    assert "c\ufffdd" in text
    assert all(one.isprintable() for one in text.replace("\n", ""))
