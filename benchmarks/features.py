# SPDX-License-Identifier: MIT
"""What each library can do, found out by running it; the text that is shown is the text that runs."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from feature_calls_rules import BACK, RULES
from feature_calls_training import ARRAYS, TRAINING

import side_by_side
from how_others_behave import GROUPS
from kit.frameworks import Framework
from native_functions import LIBRARIES, UNICLIP, InPlace, Library, Optimizer

MISTAKES = (NameError, AttributeError, ImportError, SyntaxError, TypeError)
"""Errors of lines that are written wrongly: they stop the build, except where `Feature.refuses` says otherwise."""


@dataclass(frozen=True)
class Feature:
    """A question, and for each library the lines that answer it."""

    title: str
    case: str = ""
    """The title of a case that answers it for the libraries that are not in ``calls``."""
    grads: list[Any] = field(default_factory=lambda: [[3.0, 4.0]])
    params: list[Any] = field(default_factory=list)
    """The parameters of these gradients; otherwise zeros."""
    wanted: Any = True
    """What the last line returns; or an error's words, as a regular expression; ``None``: see `sharded`."""
    calls: dict[str, str] = field(default_factory=dict)
    refuses: dict[str, str] = field(default_factory=dict)
    """For libraries that answer with one of `MISTAKES` themselves, the words of it."""


CASES = {case.title: case for group in GROUPS for case in group.cases}


def made(entries: dict[str, Any]) -> list[Feature]:
    """Return features from titles with either the title of a case, or the parts of a feature."""
    return [Feature(title, case=e) if isinstance(e, str) else Feature(title, **of(e)) for title, e in entries.items()]


def of(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a feature; where a case is named, with its gradients and its right result."""
    if "case" not in parts:
        return parts
    case = CASES[parts["case"]]
    return parts | {"grads": case.grads, "wanted": (side_by_side.truth(case) or ([],))[0]}


FEATURES: dict[str, list[Feature]] = {
    "Rules": made(RULES),
    "What comes back": made(BACK),
    "Arrays": made(ARRAYS),
    "Around the clipping": made(TRAINING),
}
OURS = Library("uniclip", Framework(), UNICLIP)


def marks(library: Library) -> dict[str, str]:
    """Return the answer of a library to every question that takes one process."""
    everything = [feature for group in FEATURES.values() for feature in group]
    return {feature.title: mark(feature, library) for feature in everything if feature.wanted is not None}


def mark(feature: Feature, library: Library) -> str:
    """Say whether a library can do it: right, wrong, or it has nothing for it."""
    if library.name in feature.calls:
        return side_by_side.RIGHT if answer(feature, library)[0] else side_by_side.WRONG
    found = of_case(feature.case, library) if feature.case else side_by_side.NONE
    return found if found in {side_by_side.RIGHT, side_by_side.NONE} else side_by_side.WRONG


def of_case(title: str, library: Library) -> str:
    """Return the verdict on a library in one of the cases."""
    if library is OURS:
        return side_by_side.verdicts(CASES[title])["uniclip"].mark
    return side_by_side.alone(library, CASES[title]).mark


def answer(feature: Feature, library: Library) -> tuple[bool, str]:
    """Run the lines; return whether they give what is wanted, and what they gave."""
    lines, names = feature.calls[library.name], library.modules | places(feature, library)
    out = attempt(lines, names, feature.refuses.get(library.name, ""))
    if isinstance(out, Exception):
        said = isinstance(feature.wanted, str) and re.search(feature.wanted, str(out), re.IGNORECASE)
        return bool(said), f"{type(out).__name__}: {out}"
    if isinstance(feature.wanted, (bool, str)):
        return out is not None and bool(np.asarray(out) == np.True_) and feature.wanted is True, repr(out)
    outs = [library.numpy(x) for x in (out if isinstance(out, (list, tuple)) else [out])]
    wanted = [np.asarray(x) for x in feature.wanted]
    right = len(outs) == len(wanted) and all(map(np.allclose, outs, wanted))
    return right, repr(outs)


def attempt(text: str, names: dict[str, Any], refuses: str = "") -> Any:
    """Return what the last line gives, or the error of the library; a mistake in the lines is raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(text, names)
    except Exception as error:
        if isinstance(error, MISTAKES) and (not refuses or refuses not in str(error)):
            raise
        return error


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
    return eval(compile(ast.Expression(cast("ast.Expr", last).value), "<lines>", "eval"), names)  # noqa: S307 - our own text


def all_marks(measured: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the answers of uniclip and of each library, those that cannot be had here from what was measured."""
    found = {library.name: marks(library) for library in (OURS, *LIBRARIES)} | measured["features"]
    titles = [feature.title for group in FEATURES.values() for feature in group if feature.wanted is None]
    sharded = {name: dict.fromkeys(titles, measured["sharded"].get(name, side_by_side.NONE)) for name in found}
    return {name: found[name] | sharded[name] for name in found}
