"""What people touch: the names, what they print, and what an error says of a name that is not there."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import uniclip as uc
from uniclip._mistakes import _ELSEWHERE

CHOICES = ("curves", "limits", "norms", "scopes")


def test_the_top_level_is_small() -> None:
    """At most 50 names, each of which exists, and no module of uniclip's own among them."""
    names = dir(uc)
    assert len(names) <= 50
    assert set(uc.__all__) <= set(names)
    for name in names:
        assert getattr(uc, name) is not None
    assert not {"layout", "measure", "scale", "step", "ask", "tree", "Any"} & set(names)


@pytest.mark.parametrize("name", CHOICES)
def test_the_four_choices_are_four_modules(name: str) -> None:
    """Each shows its choices and nothing else, and each choice prints as it is found."""
    module = getattr(uc, name)
    assert dir(module) == sorted(module.__all__)
    for choice in module.__all__:
        value = getattr(module, choice)
        where = {"Limit": uc.Limit, "Norm": uc.Norm, "Scope": uc.Scope}
        if choice in where:
            assert value is where[choice]
        elif not inspect.isroutine(value) and not inspect.isclass(value):
            assert repr(value) == f"uc.{name}.{choice}"


def test_the_package_says_what_there_is() -> None:
    """Its docstring, with which help(uc) begins, names everything."""
    text = uc.__doc__
    assert text is not None
    public = set(uc.__all__) - {"Limit", "Norm", "Report", "Scope"}
    assert not {name for name in public if name not in text}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tanh", "it is uniclip.curves.tanh"),
        ("each_leaf", "it is uniclip.scopes.each_leaf"),
        ("RMS", "it is uniclip.norms.RMS"),
        ("Percentile", "it is uniclip.limits.Percentile"),
        ("attach", "it is in uniclip.integrations.torch"),
        ("clip_grad_norm_", "it is in uniclip.integrations.torch"),
        ("to_optax", "it is in uniclip.integrations.optax"),
        ("ClippedOptimizer", "it is in uniclip.integrations.keras"),
        ("normalized", "it is called uniclip.to_global_norm"),
    ],
)
def test_a_name_that_is_elsewhere(name: str, hint: str) -> None:
    """The error says where it is, or what it is called."""
    with pytest.raises(AttributeError, match=f"has no attribute {name!r}: {hint}"):
        getattr(uc, name)


@pytest.mark.parametrize(
    ("home", "name", "hint"),
    [
        ("curves", "skip", "it is called uniclip.curves.reject"),
        ("scopes", "hard", "it is uniclip.curves.hard"),
        ("limits", "RMS", "it is uniclip.norms.RMS"),
        ("norms", "unit", "it is uniclip.scopes.unit"),
    ],
)
def test_a_choice_that_is_elsewhere(home: str, name: str, hint: str) -> None:
    """The four modules say so, too."""
    with pytest.raises(AttributeError, match=f"module 'uniclip.{home}' has no attribute {name!r}: {hint}"):
        getattr(getattr(uc, home), name)


def test_a_name_that_is_nowhere() -> None:
    """Python suggests a similar one where it shows the error."""
    done = subprocess.run(
        [sys.executable, "-c", "import uniclip as uc; uc.clip_by_globl_norm"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "AttributeError" in done.stderr
    assert "Did you mean: 'clip_by_global_norm'" in done.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: uc.by_global_norm(c=1), r"by_global_norm\(\) has no argument 'c': its arguments are max_norm, ord"),
        (lambda: uc.clip_by_global_norm([1.0], clip_norm=1), r"has no argument 'clip_norm': .* grads, max_norm"),
        (lambda: uc.autoclip(q=10), r"autoclip\(\) has no argument 'q': its arguments are percentile, window"),
    ],
)
def test_an_argument_of_another_name(call: Any, message: str) -> None:
    """The error says which arguments there are."""
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("name", [n for n in uc.__all__ if inspect.isfunction(getattr(uc, n))])
def test_signatures_are_seen(name: str) -> None:
    """Editors see the arguments of every function, and a docstring with an example."""
    function: Any = getattr(uc, name)
    assert not {p.kind for p in inspect.signature(function).parameters.values()} & {inspect.Parameter.VAR_KEYWORD}
    assert ">>>" in inspect.getdoc(function)


def test_hints_are_true() -> None:
    """The names that the hints say are in an adapter are defined or imported there."""
    root = Path(uc.__file__).parent / "integrations"
    for name, where in _ELSEWHERE.items():
        module = where.partition(",")[0].partition(" ")[0].rpartition(".")[2]
        files = [file for file in (root / f"{module}.py", root / module / "__init__.py") if file.exists()]
        assert re.search(rf"\b{name}\b", files[0].read_text(encoding="utf-8"))
