"""Many processes do what one does: layouts of a run, what they agree on,
what all of them refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.joined import CHECKED, COUNTED, DERIVED, KEPT, LEARNS, REFUSALS, SAVED
from kit.layouts import LAYOUTS, table
from kit.pool import Pool, launched

pytestmark = pytest.mark.xdist_group("processes")
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "use-it-on-many-processes.md"
SAVING = (2, 4, 1)
"""How many processes take one part of a training after the other."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Return processes that run checks together."""
    made = Pool()
    yield made
    made.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_rules(pool: Pool, layout: str) -> None:
    """Whatever the layout, all rules find what one process would, with NaN,
    with ∞ and with nothing in one of them.
    """
    pool.run("layout", name=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attached(pool: Pool, layout: str) -> None:
    """An attached rule trains the weights of one process."""
    pool.run("attached", name=layout)


@pytest.mark.parametrize("layout", [name for name, one in LAYOUTS.items() if one.refused])
def test_refused_layouts(pool: Pool, layout: str) -> None:
    """What a layout cannot have is refused in all processes."""
    pool.run("refused", name=layout)


@pytest.mark.parametrize("spoilt", [None, float("nan")], ids=str)
def test_placements(pool: Pool, spoilt: float | None) -> None:
    """Distributed tensors are clipped as whole ones, however they are divided."""
    pool.run("placements", ranks=2, spoilt=spoilt)


@pytest.mark.parametrize(
    "check",
    [
        "other_values",
        "odd_parts",
        "sums_of_examples",
        "drop_ins",
        "drop_in_of_parts",
        "drop_in_without_a_gradient",
        "layout_refused",
        "derived_of_addends",
    ],
)
def test_in_two(pool: Pool, check: str) -> None:
    """Two processes do together what one does."""
    pool.run(check, ranks=2)


@pytest.mark.parametrize("case", COUNTED)
def test_collectives(pool: Pool, case: str) -> None:
    """A step sends once for each dimension of a mesh and once for a group,
    and the first one of a group once more.
    """
    pool.run("counted", ranks=4 if case.startswith("two") else 2, name=case)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "case",
    ["a group: global", "a group: skip", "a group: relative", "FSDP2: global", "FSDP2: rows"],
)
def test_compiled(pool: Pool, case: str) -> None:
    """A joined step is compiled as one graph."""
    pool.run("compiled", ranks=2, name=case)


@pytest.mark.parametrize(
    ("rule", "group"),
    [(rule, group) for rule in DERIVED for group in (False, True) if not (group and rule in KEPT)],
)
def test_derivatives(pool: Pool, rule: str, group: bool) -> None:
    """Derivatives go through the join, to second order."""
    pool.run("derived", ranks=2, name=rule, group=group)


def test_one_has_nothing(pool: Pool) -> None:
    """A process that has no gradients, or no leaves, takes part, and reports what the others do."""
    pool.run("one_has_nothing", ranks=2, names=["global", "largest", "groups", "zclip", "skip"])


@pytest.mark.parametrize("divided", [False, True], ids=["a group", "FSDP2"])
@pytest.mark.parametrize("rule", LEARNS)
def test_remembered(pool: Pool, rule: str, divided: bool) -> None:
    """What is remembered is the same bits in all processes, whatever one of them has."""
    pool.run("remembered", name=rule, divided=divided)


def test_losses(pool: Pool) -> None:
    """Four processes decide by the mean of their losses."""
    pool.run("losses")


@pytest.mark.parametrize("alone", [False, True])
def test_fsdp1(pool: Pool, alone: bool) -> None:
    """FSDP1 without all_reduce= is refused, but in one process."""
    pool.run("fsdp1", ranks=1 if alone else 2, alone=alone)


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_in_all(pool: Pool, case: str) -> None:
    """What one process does wrong is an error in both, and no process waits."""
    pool.run("refusal", ranks=2, name=case)


@pytest.mark.parametrize("case", CHECKED)
def test_check_layout(pool: Pool, case: str) -> None:
    """It tells whether the norm is that of one process, what each process finds, and its share."""
    pool.run("layout_checked", ranks=2, name=case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_check_layout_of_a_run(pool: Pool, layout: str) -> None:
    """Layouts as the page says are right; those that need all_reduce= are wrong without it."""
    pool.run("layout_of_a_run", name=layout)


@pytest.mark.parametrize("rule", SAVED)
def test_saved_in_parts(pool: Pool, rule: str, tmp_path: Path) -> None:
    """Two processes save, four go on and save, one goes on:
    the weights and the memory are those of one process.
    """
    for number, ranks in enumerate(SAVING):
        pool.run("saved_in_parts", ranks=ranks, name=rule, number=number, folder=str(tmp_path))


def test_the_page_has_the_table() -> None:
    """What is tried here is what the page says."""
    assert table() in PAGE.read_text(encoding="utf-8")


def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    """The page's first example runs as users run it, on two processes, and ends."""
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("".join(text for kind, text in blocks if kind == "python"), encoding="utf-8")
    # PyTorch's optimizers import its compiler. Imported after the process group is made, it holds
    # the group until the process ends, which then sometimes aborts, whether there is a rule or not
    # (PyTorch 2.13).
    run = "import runpy, sys, torch._dynamo; runpy.run_path(sys.argv[1], run_name='__main__')"
    printed = launched("-c", run, str(script), OMP_NUM_THREADS="1")
    assert printed == ["".join(text for kind, text in blocks if kind == "text"), ""]


def test_the_example_has_the_losses_of_one_process(pool: Pool) -> None:
    """A pipeline of FSDP2 stages compares its losses with those of one process by itself."""
    pool.run("example", path=str(ROOT / "examples" / "pipeline_fsdp2.py"))
