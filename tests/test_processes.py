"""Several processes find the same as one: layouts, agreement between processes, and refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.joined import CHECKED, COUNTED, DERIVED, KEPT, LEARNS, REFUSALS, SAVED
from kit.layouts import LAYOUTS, table
from kit.pool import Pool, launched
from kit.sharded import LAYOUTS as SHARDED
from kit.sharded import RULES as ONE_NORM

pytestmark = pytest.mark.xdist_group("processes")
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "use-it-on-many-processes.md"
SAVING = (2, 4, 1)
"""The numbers of processes that continue a training one after the other."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Return processes that run checks together."""
    made = Pool()
    yield made
    made.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_rules(pool: Pool, layout: str) -> None:
    """In any layout, rules find the same as in one process, with NaN, ∞ or no gradient in one."""
    pool.run("layout", name=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attached(pool: Pool, layout: str) -> None:
    """An attached rule trains the weights of one process."""
    pool.run("attached", name=layout)


@pytest.mark.parametrize("layout", [name for name, one in LAYOUTS.items() if one.refused])
def test_refused_layouts(pool: Pool, layout: str) -> None:
    """All processes refuse a rule that a layout cannot have."""
    pool.run("refused", name=layout)


@pytest.mark.parametrize("spoilt", [None, float("nan")], ids=str)
def test_placements(pool: Pool, spoilt: float | None) -> None:
    """Distributed tensors are clipped like full ones, however they are sharded."""
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
        "odd_locals",
        "offloaded",
        "ranges",
        "raises",
        "losses_in_row",
        "mixed_up",
        "skips_as_in_one",
        "steps_in_backward",
    ],
)
def test_in_two(pool: Pool, check: str) -> None:
    """Two processes find the same as one."""
    pool.run(check, ranks=2)


@pytest.mark.parametrize("rule", ONE_NORM)
@pytest.mark.parametrize("layout", SHARDED)
def test_one_norm(pool: Pool, layout: str, rule: str) -> None:
    """One norm over local shards is that of one process, with few collectives."""
    pool.run("one_norm", layout=layout, name=rule)


@pytest.mark.parametrize("rule", ["constant", "skip", "zclip", "spikes"])
@pytest.mark.parametrize("layout", SHARDED)
def test_two_paths(pool: Pool, layout: str, rule: str) -> None:
    """A process on the spine and one on the general path send the same."""
    pool.run("two_paths", layout=layout, name=rule)


@pytest.mark.parametrize("rule", ["constant", "skip", "autoclip", "zclip", "spikes"])
@pytest.mark.parametrize("layout", SHARDED)
def test_unread(pool: Pool, layout: str, rule: str) -> None:
    """On an accelerator the host reads nothing."""
    pool.run("unread", layout=layout, name=rule)


@pytest.mark.parametrize("original", [False, True])
def test_fsdp1_of_whole_parameters(pool: Pool, original: bool) -> None:
    """Whole parameters of FSDP1 count once."""
    pool.run("known_whole", ranks=2, original=original)


@pytest.mark.parametrize("rule", ["label", "state"])
def test_attached_before_sharding(pool: Pool, rule: str) -> None:
    """Names stay with parameters that FSDP2 replaces, and the model can be converted."""
    pool.run("attached_before_sharding", ranks=2, name=rule)


@pytest.mark.parametrize("whole_round", [False, True])
def test_changed_between_steps_of_a_list(pool: Pool, whole_round: bool) -> None:
    """Gradients that change between the steps of a list are noticed under FSDP2, too."""
    pool.run("changed_between_steps", ranks=2, whole_round=whole_round)


@pytest.mark.parametrize("rule", ["constant", "skip"])
def test_averaged_in_a_hook(pool: Pool, rule: str) -> None:
    """A hook that averages gradients comes before the rule, and no process waits."""
    pool.run("averaged_in_a_hook", ranks=2, name=rule)


@pytest.mark.parametrize("case", COUNTED)
def test_collectives(pool: Pool, case: str) -> None:
    """A step sends once for each mesh dimension and group; the first step of a group, once more."""
    pool.run("counted", ranks=4 if case.startswith("two") else 2, name=case)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "case",
    ["a group: global", "a group: skip", "a group: relative", "FSDP2: global", "FSDP2: rows"],
)
def test_compiled(pool: Pool, case: str) -> None:
    """A collective step compiles into one graph."""
    pool.run("compiled", ranks=2, name=case)


@pytest.mark.parametrize(
    ("rule", "group"),
    [(rule, group) for rule in DERIVED for group in (False, True) if not (group and rule in KEPT)],
)
def test_derivatives(pool: Pool, rule: str, group: bool) -> None:
    """First and second derivatives go through the collectives."""
    pool.run("derived", ranks=2, name=rule, group=group)


def test_one_has_nothing(pool: Pool) -> None:
    """A process without gradients or leaves takes part, and has the report of the others."""
    pool.run("one_has_nothing", ranks=2, names=["global", "largest", "groups", "zclip", "skip"])


@pytest.mark.parametrize("divided", [False, True], ids=["a group", "FSDP2"])
@pytest.mark.parametrize("rule", LEARNS)
def test_remembered(pool: Pool, rule: str, divided: bool) -> None:
    """The state has the same bits in all processes."""
    pool.run("remembered", name=rule, divided=divided)


def test_losses(pool: Pool) -> None:
    """Four processes decide by the mean of their losses."""
    pool.run("losses")


@pytest.mark.parametrize("alone", [False, True])
def test_fsdp1(pool: Pool, alone: bool) -> None:
    """FSDP1 without all_reduce= is refused, except in one process."""
    pool.run("fsdp1", ranks=1 if alone else 2, alone=alone)


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_in_all(pool: Pool, case: str) -> None:
    """A mistake in one process is an error in both, and neither waits."""
    pool.run("refusal", ranks=2, name=case)


@pytest.mark.parametrize("case", CHECKED)
def test_check_layout(pool: Pool, case: str) -> None:
    """`check_layout` reports whether the norm is that of one process, and each one's share."""
    pool.run("layout_checked", ranks=2, name=case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_check_layout_of_a_run(pool: Pool, layout: str) -> None:
    """The layouts of the page are right; those that need all_reduce= are wrong without it."""
    pool.run("layout_of_a_run", name=layout)


@pytest.mark.parametrize("rule", SAVED)
def test_saved_in_parts(pool: Pool, rule: str, tmp_path: Path) -> None:
    """Two processes save, four resume and save, and one resumes.

    The weights and the state are those of one process.
    """
    for number, ranks in enumerate(SAVING):
        pool.run("saved_in_parts", ranks=ranks, name=rule, number=number, folder=str(tmp_path))


def test_the_page_has_the_table() -> None:
    """The page has the table of the tested layouts."""
    assert table() in PAGE.read_text(encoding="utf-8")


def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    """The first example of the page runs on two processes as users run it."""
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("".join(text for kind, text in blocks if kind == "python"), encoding="utf-8")
    # PyTorch's optimizers import its compiler. Imported after the process group is created, it
    # keeps a reference to the group until the process ends, which then sometimes aborts, with or
    # without a rule (PyTorch 2.13).
    run = "import runpy, sys, torch._dynamo; runpy.run_path(sys.argv[1], run_name='__main__')"
    printed = launched("-c", run, str(script), OMP_NUM_THREADS="1")
    assert printed == ["".join(text for kind, text in blocks if kind == "text"), ""]


def test_the_example_has_the_losses_of_one_process(pool: Pool) -> None:
    """The example of a pipeline with FSDP2 itself compares its losses with those of one process."""
    pool.run("example", path=str(ROOT / "examples" / "pipeline_fsdp2.py"))
