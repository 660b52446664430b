"""Many processes do what one does: layouts of a run, what they agree on, what all of them refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit import processes
from kit.layouts import LAYOUTS, table
from kit.pool import Pool

pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Return processes that run checks together."""
    made = Pool(tmp_path_factory.mktemp("pool"))
    yield made
    made.close()


@pytest.mark.parametrize("case", ["values", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_rules(pool: Pool, layout: str, case: str) -> None:
    """Whatever the layout, all rules find what one process would, with NaN, with ∞ and with nothing in one of them."""
    pool.run("layout", name=layout, case=case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attached(pool: Pool, layout: str) -> None:
    """An attached rule trains the weights of one process."""
    pool.run("attached", name=layout)


@pytest.mark.parametrize("layout", [name for name, one in LAYOUTS.items() if one.refused])
def test_refused_layouts(pool: Pool, layout: str) -> None:
    """What a layout cannot have is refused in all processes."""
    pool.run("refused", name=layout)
