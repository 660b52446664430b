# SPDX-License-Identifier: MIT
"""Errors about arguments of the wrong kind, which say what to write instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from uniclip._repr import holds_arrays, short
from uniclip.backends import compiling

_RULE = "such as uc.by_global_norm(1.0), or a function of one array"
_ELSEWHERE = {
    "ClipGradients": "uniclip.integrations.lightning, and another in uniclip.integrations.transformers",
    "ClippedOptimizer": "uniclip.integrations.keras, and another in uniclip.integrations.tensorflow for TensorFlow 1",
    "LogClipping": "uniclip.integrations.keras",
    "attach": "uniclip.integrations.torch",
    "clip_grad_norm_": "uniclip.integrations.torch",
    "clip_grad_value_": "uniclip.integrations.torch",
    "clip_gradients_by_norm": "uniclip.integrations.tensorflow",
    "clip_grads_with_norm_": "uniclip.integrations.torch",
    "get_total_norm": "uniclip.integrations.torch",
    "to_optax": "uniclip.integrations.optax",
}
_ADAPTERS = {"keras", "lightning", "optax", "tensorflow", "torch", "transformers"}
_OTHER_NAMES = {
    "ByValue": "by_value",
    "Chain": "chain",
    "Masked": "masked",
    "adaptive_grad_clip": "agc",
    "clip_by_block_rms": "by_block_rms",
    "clip_grad_norm": "clip_by_global_norm",
    "normalized": "to_global_norm",
    "percentile": "percentile_clipping",
    "AVERAGE": "Norm(2, size_power=1)",
    "clip_and_mean": "clip_and_sum, whose result you divide by the number of examples",
    "skip": "curves.reject",
}
"""Names that people may look for, and what they are called here."""
_F = TypeVar("_F", bound=Callable[..., Any])
_CHOICES = {
    "limits": "a limit is only one of its choices: uc.Rule(limit)",
    "scopes": "a scope is only one of its choices: uc.Rule(1.0, scope=scope)",
    "norms": "a norm is only one of its choices: uc.Rule(1.0, norm=norm)",
    "curves": "a curve is only one of its choices: uc.Rule(1.0, curve=curve)",
    "clipper": "a uc.Clipper has one, clipper.rule; it clips by itself, clipped = clipper(grads)",
}


def home_of(name: str) -> str:
    """Return where a name that the package lacks is, or what it is called here; an empty text if unknown."""
    if name == "integrations" or name in _ADAPTERS:
        return f": write from uniclip.integrations.{name if name in _ADAPTERS else 'torch'} import ..."
    if name in _ELSEWHERE:
        return f": it is in {_ELSEWHERE[name]}"
    if name in _OTHER_NAMES:
        return f": it is called uniclip.{_OTHER_NAMES[name]}"
    known = {home: getattr(sys.modules.get(f"uniclip.{home}"), "__all__", ()) for home in _CHOICES}
    homes = [home for home, names in known.items() if name in names]
    return f": it is uniclip.{homes[0]}.{name}" if homes else ""


def hints(module: str) -> Callable[[str], NoReturn]:
    """Return a module ``__getattr__`` (PEP 562) whose errors say where a missing name is, or what it is called."""

    def refuse(name: str) -> NoReturn:
        msg = f"module {module!r} has no attribute {name!r}{home_of(name)}"
        raise AttributeError(msg, name=name, obj=sys.modules[module])

    return refuse


def keywords_known(function: _F) -> _F:
    """Refuse an unknown keyword by an error that lists the known ones."""
    known = signature(function).parameters

    @wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        if not named.keys() <= known.keys():
            wrong = ", ".join([repr(name) for name in named if name not in known])
            msg = f"{function.__name__}() has no argument {wrong}: its arguments are {', '.join(known)}"
            raise TypeError(msg)
        return function(*args, **named)

    return checked  # type: ignore[return-value]  # it has the signature of the function


def is_rule(value: Any) -> bool:
    """Whether a value has the interface of a rule."""
    return hasattr(value, "memory") and hasattr(value, "update") and not isinstance(value, type)


def own_module(value: Any) -> str:
    """Return the name of the uniclip module that a function, class or object is from, else an empty text."""
    if isinstance(value, ModuleType) or compiling():  # a compiler does not know the modules of builtin functions
        return ""
    known = value if hasattr(value, "__qualname__") else type(value)
    homes = [getattr(one, "__module__", None) or "" for one in getattr(known, "__mro__", (known,))]
    return next((home.partition(".")[2] for home in homes if home.partition(".")[0] == "uniclip"), "")


def refuse_as_rule(value: Any) -> NoReturn:
    """Raise a ``TypeError`` that says what to write instead of an object that is not a rule."""
    module = own_module(value).partition(".")[0]
    if module in _CHOICES:
        advice = f"and {_CHOICES[module]}"
    elif module in {"presets", "rules", "combine"}:
        advice = f"and uc.{value.__name__} makes one: call it, uc.{value.__name__}(...), as in uc.by_global_norm(1.0)"
    elif module == "verbs":
        advice = f"and uc.{value.__name__} is a function of all gradients: give it a rule {_RULE}"
    else:
        advice = _RULE
    hint = "; gradients are clipped by uc.clip(grads, rule), or by uc.Clipper(rule)(grads)"
    msg = f"rule must be a rule, {advice}, got {short(value)}{hint if holds_arrays(value) else ''}"
    raise TypeError(msg)


def refuse_swapped(grads: Any, rule: Any, call: str) -> None:
    """Refuse a rule in the place of the gradients."""
    if is_rule(grads):
        msg = f"grads and rule are swapped, got {short(grads)} and {short(rule)}: write {call}"
        raise TypeError(msg)


def refuse_as_transformation(rule: Any) -> None:
    """Refuse calls by libraries of transformations, which accept any object with ``init`` and ``update``."""
    caller = "" if compiling() else sys._getframe(2).f_globals.get("__name__", "")  # noqa: SLF001 - who asks
    if caller.partition(".")[0] in {"optax", "flax"}:
        msg = (
            f"a rule is no transformation of optax, its update returns a report, too: write to_optax({short(rule)}), "
            "from uniclip.integrations.optax"
        )
        raise TypeError(msg)


def _is_own(value: Any) -> bool:
    """Whether a value is a rule or a state; compilers do not know the modules of builtin classes."""
    known = hasattr(value, "_fields") or hasattr(value, "memory") or hasattr(value, "state_dict")
    return known and type(value).__module__.startswith("uniclip.")


def refuse_as_grads(value: Any, name: str) -> None:
    """Refuse a rule, or its state, in the place of gradients; a state is a tree of arrays too."""
    first = value[0] if isinstance(value, (tuple, list)) and value else None  # a chain's state is a tuple of states
    if _is_own(value) or _is_own(first):
        msg = f"{name} must be gradients, got {short(value)}: write rule.update(grads, state), or uc.clip(grads, rule)"
        raise TypeError(msg)
