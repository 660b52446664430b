"""Calls that are to be refused, for the fuzz: the error has to be ours, and no array may change before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

import uniclip as uc
from frameworks import Framework
from fuzz_cases import Rng, by_depth, chance, one_of

Grads: TypeAlias = dict[str, Any]
Call: TypeAlias = Callable[[Grads, Framework], Any]
LONGEST = 2000
"""How many characters an error may have: it shows no array."""


def clipped(rule: Callable[[], Any], params: Any = None) -> Call:
    """Return the call that makes a rule and clips by it."""
    return lambda grads, fw: uc.clip(grads, rule(), params)


def _other_state(grads: Grads, fw: Framework) -> Any:
    rule = uc.norm_growth()
    return rule.update(grads, rule.init(grads["a"]))


def _not_finite(grads: Grads, fw: Framework) -> Any:
    return uc.clip([*grads.values(), fw.array([math.nan])], uc.by_global_norm(1.0, nonfinite="raise"))


MISTAKES: dict[str, tuple[type[Exception], Call]] = {
    "a negative limit": (ValueError, clipped(lambda: uc.by_global_norm(-1.0))),
    "a limit of NaN": (ValueError, clipped(lambda: uc.by_norm(math.nan))),
    "a limit of text": (TypeError, clipped(lambda: uc.by_norm("1"))),
    "an order below 1": (ValueError, clipped(lambda: uc.by_norm(1.0, ord=0.5))),
    "a power that is NaN": (ValueError, clipped(lambda: uc.Rule(1.0, norm=uc.Norm(math.nan)))),
    "an unknown policy": (ValueError, clipped(lambda: uc.Rule(1.0, nonfinite="ignore"))),
    "no parameters": (ValueError, clipped(uc.agc)),
    "a parameter is missing": (ValueError, lambda grads, fw: uc.clip(grads, uc.agc(), {"a": grads["a"]})),
    "another shape": (ValueError, lambda grads, fw: uc.clip(grads, uc.larc(0.1), {"a": grads["b"], "b": grads["a"]})),
    "an axis that is not there": (ValueError, clipped(lambda: uc.by_norm(1.0, axis=5))),
    "memory in a function": (ValueError, clipped(uc.autoclip)),
    "a leaf that is text": (TypeError, lambda grads, fw: uc.clip({**grads, "c": "text"}, uc.by_norm(1.0))),
    "a leaf that is a number": (TypeError, lambda grads, fw: uc.clip({**grads, "c": 1.0}, uc.by_global_norm(1.0))),
    "percentile above 100": (ValueError, clipped(lambda: uc.autoclip(101))),
    "a decay of 1": (ValueError, clipped(lambda: uc.zclip(decay=1.0))),
    "a warm-up below 0": (ValueError, clipped(lambda: uc.adagc(warmup=-1))),
    "an empty window": (ValueError, clipped(lambda: uc.autoclip(window=0))),
    "bounds the wrong way round": (ValueError, clipped(lambda: uc.by_value(1.0, -1.0))),
    "a bound of NaN": (ValueError, clipped(lambda: uc.by_value(math.nan, 1.0))),
    "a group without a limit": (ValueError, clipped(lambda: uc.by_group_norm({7: 1.0}, by_depth))),
    "an example without dimensions": (ValueError, lambda grads, fw: uc.clip(fw.array(1.0), uc.by_example_norm(1.0))),
    "another number of examples": (ValueError, clipped(lambda: uc.by_example_norm(1.0))),
    "a sum of what is not by example": (ValueError, lambda grads, fw: uc.clip_and_sum(grads, uc.by_norm(1.0))),
    "a sum by a rule without a norm": (TypeError, lambda grads, fw: uc.clip_and_sum(grads, uc.by_value(-1.0, 1.0))),
    "a state for other gradients": (ValueError, _other_state),
    "no state": (TypeError, lambda grads, fw: uc.norm_growth().update(grads, None)),
    "no rule": (TypeError, lambda grads, fw: uc.clip(grads, 1.0)),
    "a limit for a rule": (TypeError, lambda grads, fw: uc.clip(grads, uc.limits.Constant(1.0))),
    "complex numbers by value": (TypeError, lambda grads, fw: uc.clip_by_value(fw.array([1j], "complex64"), -1, 1)),
    "half a bound for integers": (TypeError, lambda grads, fw: uc.clip(fw.array([1], "int32"), uc.by_value(-0.5, 0.5))),
    "integers in place": (TypeError, lambda grads, fw: uc.clip_(fw.array([1], "int32"), uc.by_norm(0.5))),
    "what is not finite": (FloatingPointError, _not_finite),
    "a spent iterator": (ValueError, lambda grads, fw: uc.clip(iter(()), uc.by_norm(1.0))),
    "two frameworks": (TypeError, lambda grads, fw: uc.clip([grads["a"], Stranger()], uc.by_norm(1.0))),
    "a function that returns no array": (TypeError, lambda grads, fw: uc.clip(grads, lambda array: "text")),
    "counts of another shape": (ValueError, lambda grads, fw: uc.clip(grads, uc.cowclip(np.ones(9)), params=grads)),
}  # fmt: skip
"""What is wrong, the error it has to be, and the call."""


class Stranger:
    """Something with a dtype and a shape that is no array."""

    dtype, shape = "float32", (2,)


def refuse(fw: Framework, rng: Rng) -> str | None:
    """Make a mistake; return what is wrong with the answer, ``None`` if nothing is."""
    name = one_of(rng, *MISTAKES)
    wanted, call = MISTAKES[name]
    dtype = one_of(rng, *[one for one in fw.dtypes if one.startswith(("float", "bfloat"))])
    rows = int(rng.integers(1, 4))
    values = {"a": rng.standard_normal(rows), "b": rng.standard_normal((rows + 1, 2))}
    grads: Grads = {key: fw.array(one, dtype) for key, one in values.items()}
    grads |= {"empty": None} if chance(rng, 0.5) else {}
    old = {key: np.array(fw.numpy(one)) for key, one in grads.items() if one is not None}
    try:
        call(grads, fw)
    except Exception as error:  # noqa: BLE001 - what a fuzz looks for
        text = str(error)
        if type(error) is not wanted:
            return f"{name}: {type(error).__name__} instead of {wanted.__name__}: {text[:200]}"
        if not 10 < len(text) < LONGEST:
            return f"{name}: an error of {len(text)} characters"
    else:
        return f"{name}: no error"
    changed = [key for key, one in old.items() if not np.array_equal(one, fw.numpy(grads[key]))]
    return f"{name}: {changed} changed" if changed else None
