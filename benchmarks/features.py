# SPDX-License-Identifier: MIT
"""What each library can do, found out by running it; the text that is shown is the text that runs."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from feature_calls import BACK, RULES
from feature_calls_around import AROUND, ARRAYS

import side_by_side
from frameworks import Framework
from how_others_behave import GROUPS
from native_functions import LIBRARIES, UNICLIP, InPlace, Library, Optimizer

YES, NO, NONE = "✓", "✗", "–"  # noqa: RUF001 - a dash


@dataclass(frozen=True)
class Feature:
    """A question, and for each library the lines that answer it."""

    title: str
    case: str = ""
    """The title of a case that answers it, instead of what follows."""
    grads: list[Any] = field(default_factory=lambda: [[3.0, 4.0]])
    params: list[Any] = field(default_factory=list)
    """The parameters of these gradients; otherwise zeros."""
    wanted: Any = True
    """What the last line returns; or words of an error; ``None`` where ``sharded.py`` runs the lines."""
    calls: dict[str, str] = field(default_factory=dict)


def made(entries: dict[str, Any]) -> list[Feature]:
    """Return features from titles with either the title of a case, or the parts of a feature."""
    return [Feature(title, case=e) if isinstance(e, str) else Feature(title, **e) for title, e in entries.items()]


FEATURES: dict[str, list[Feature]] = {
    "Rules": made(RULES),
    "What comes back": made(BACK),
    "Arrays": made(ARRAYS),
    "Around the clipping": made(AROUND),
}
CASES = {case.title: case for group in GROUPS for case in group.cases}
OURS = Library("uniclip", Framework(), UNICLIP)


def marks(library: Library) -> dict[str, str]:
    """Return the answer of a library to every question that takes one process."""
    everything = [feature for group in FEATURES.values() for feature in group]
    return {feature.title: mark(feature, library) for feature in everything if feature.wanted is not None}


def mark(feature: Feature, library: Library) -> str:
    """Say whether a library can do it: yes, no, or it has nothing for it."""
    if feature.case:
        found = of_case(feature.case, library)
        return {side_by_side.RIGHT: YES, side_by_side.NONE: NONE}.get(found, NO)
    if library.name not in feature.calls:
        return NONE
    return YES if answer(feature, library)[0] else NO


def of_case(title: str, library: Library) -> str:
    """Return the verdict on a library in one of the cases."""
    if library is OURS:
        return side_by_side.verdicts(CASES[title])["uniclip"].mark
    return side_by_side.alone(library, CASES[title]).mark


@cache
def _named(library: Library) -> dict[str, Any]:
    return library.modules


def answer(feature: Feature, library: Library) -> tuple[bool, str]:
    """Run the lines; return whether they give what is wanted, and what they gave."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = run(feature.calls[library.name], _named(library) | places(feature, library))
    except Exception as error:  # noqa: BLE001 - an error of any kind is an answer
        said = f"{type(error).__name__}: {error}"
        return isinstance(feature.wanted, str) and feature.wanted in said, said
    if isinstance(feature.wanted, (bool, str)):
        return out is not None and bool(np.asarray(out) == np.True_) and feature.wanted is True, repr(out)
    outs = [library.numpy(x) for x in (out if isinstance(out, (list, tuple)) else [out])]
    wanted = [np.asarray(x) for x in feature.wanted]
    right = len(outs) == len(wanted) and all(map(np.allclose, outs, wanted))
    return right, repr(outs)


def places(feature: Feature, library: Library) -> dict[str, Any]:
    """Return what the lines call the gradients and the parameters that have them."""
    zeros = feature.params or [np.zeros(np.shape(x)) for x in feature.grads]
    grads, weights = ([library.framework.array(x) for x in leaves] for leaves in (feature.grads, zeros))
    if isinstance(library, Optimizer):
        return {"grads": grads, "weights": [library.modules["keras"].Variable(w) for w in zeros]}
    if not isinstance(library, InPlace):
        return {"grads": grads, "params": weights}
    nn = library.modules["torch"].nn
    params = [nn.Parameter(w) for w in weights]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    return {"params": params, "grads": grads, "model": nn.ParameterList(params)}


def run(text: str, names: dict[str, Any]) -> Any:
    """Run lines of code, and return the value of the last one."""
    *before, last = ast.parse(text).body
    exec(compile(ast.Module(before, []), "<lines>", "exec"), names)  # noqa: S102 - our own text
    assert isinstance(last, ast.Expr)  # noqa: S101 - our own text
    return eval(compile(ast.Expression(last.value), "<lines>", "eval"), names)  # noqa: S307 - our own text


def all_marks(measured: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the answers of uniclip and of each library, those that cannot be had here from what was measured."""
    found = {library.name: marks(library) for library in (OURS, *LIBRARIES)} | measured["features"]
    titles = [feature.title for group in FEATURES.values() for feature in group if feature.wanted is None]
    sharded = {name: dict.fromkeys(titles, measured["sharded"].get(name, NONE)) for name in found}
    return {name: found[name] | sharded[name] for name in found}
