"""Engines that keep gradients in flat buffers train the weights of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.engine_cases import CLOSE, INSIDE, RULES, WEIGHTS
from kit.engines import Failed, run_cases

NAMES = [f"{engine}-{name}" for engine, cases in INSIDE.items() for name in cases]


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> dict[str, list[dict[str, Any]]]:
    """Return for each engine what each process has found."""
    folder: Path = tmp_path_factory.mktemp("engines")
    return {
        engine: run_cases(engine, WEIGHTS[engine] | INSIDE[engine], folder) for engine in WEIGHTS
    }


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("engine", WEIGHTS)
def test_weights(found: dict[str, list[dict[str, Any]]], engine: str, rule: str) -> None:
    """In every stage, dtype and layout, all processes have the weights of one process."""
    of_rule = [name for name in WEIGHTS[engine] if name.endswith(f" {rule}")]
    for of_process in found[engine]:
        for name in of_rule:
            assert not isinstance(of_process[name], Failed), of_process[name]
            assert of_process[name] < CLOSE, name


@pytest.mark.parametrize("name", NAMES)
def test_inside(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    """A case holds in all processes."""
    engine, _, case = name.partition("-")
    for of_process in found[engine]:
        if isinstance(of_process[case], Failed):
            pytest.fail(of_process[case], pytrace=False)
