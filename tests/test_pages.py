"""Every example of the documentation runs, and prints the output that it shows."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from pathlib import Path

import pytest

from kit.pages import Story, examples_of, modules, names, run_examples, stories

pytestmark = [
    pytest.mark.needs("torch", "tensorflow", "jax", "keras", "optax", "trainers"),
    pytest.mark.filterwarnings("default"),
]
STORIES = {f"{story.page} {story.group}": story for story in stories()}
PARTS = {
    part: list(some)
    for part, some in groupby(
        modules(), lambda name: name.removeprefix("uniclip.").partition(".")[0]
    )
}
"""The modules and packages of uniclip, each with the modules in it."""
QUIET = {
    "COLUMNS": "100",
    "MPLBACKEND": "agg",
    "MLFLOW_TRACKING_URI": "mlruns",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_SILENT": "true",
}
"""Variables that keep loggers off the network, and plots off the screen."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)

    # Inductor takes half a minute for a page; `test_inductor` runs what it compiles.
    import torch

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_pages(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page that belong together run one after the other."""
    logs = any("import wandb" in block.code for block in story.blocks)
    # Transformers warns that it is offline.
    monkeypatch.setenv("WANDB_MODE", "offline" if logs else "disabled")
    story.run()


@pytest.mark.parametrize("part", PARTS)
def test_docstrings(part: str) -> None:
    """The examples in docstrings run; those of `insight` read the recording of their page."""
    if part == "insight":
        STORIES["api/insight.md default"].run()
    for name in PARTS[part]:
        for test in examples_of(name):
            run_examples(test, names())
