"""Recorded results and files of the first version, see record.py: later versions reproduce them."""

from __future__ import annotations

import functools
import gzip
import json
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from record import DATA, DTYPES, FLAGS, SHOWN, STOP, Arrays, row, taken

import uniclip
from kit.rules import LOSSES, every_rule, params, steps
from kit.trees import EPS
from uniclip.saved import from_dict, to_dict

with np.load(DATA / "float64.npz") as _recorded:
    RULES = {name: every_rule(uniclip)[name] for name in _recorded}
REMEMBERED = [name for name, rule in RULES.items() if rule.stateful]
FIELDS = {"norms": 2.0, "limits": 2.0, "factors": 2.0, "thresholds": 2.0, "gradients": 4.0}
"""The tolerances of results in ulp: norms summed in float64 differ by up to 1.1 ulp from these."""
LEARNED = dict.fromkeys(("limits", "factors", "thresholds", "gradients"), 8.0)
"""Adaptive results accumulate the roundings of several norms.

If norms are summed in float64, they differ by up to 3.8 ulp.
"""
BINNED = 64.0
"""The median of all steps is the edge of a bin, a power of 2 whose rounding error is amplified.

It differs by 38 ulp.
"""
VARIANCES = 128.0
"""Variances of norms: small differences of norms amplify their roundings, and squares double them.

They differ by 80 ulp.
"""
STATES = 8.0


def ulps(rule: str, field: str) -> float:
    """Return the tolerance of a field in units in the last place."""
    if field.startswith("state"):
        return VARIANCES if field.endswith("variances") else STATES
    learned = LEARNED if rule in REMEMBERED else {}
    return (
        BINNED
        if field in learned and rule == "autoclip of all steps"
        else learned.get(field, FIELDS.get(field, 0))
    )


def compare(rule: str, dtype: str, rows: list[Arrays], first: int = 0) -> None:
    """Require the results of some steps to equal the recorded ones up to rounding.

    Flags and counts are equal.
    """
    with np.load(DATA / f"{dtype}.npz") as file:
        recorded = file[rule][first : first + len(rows)]
    for number, (now, then) in enumerate(zip(rows, recorded, strict=True), first):
        assert set(now) == set(then.dtype.names), f"step {number + 1}"
        for field in set(now) - (set() if number in SHOWN else {"gradients"}):
            bound, where = ulps(rule, field) * EPS[dtype], f"step {number + 1}: {field}"
            if now[field].dtype.kind == "f" and field not in FLAGS:
                np.testing.assert_allclose(now[field], then[field], rtol=bound, err_msg=where)
            else:
                np.testing.assert_array_equal(now[field], then[field], err_msg=where)


@functools.cache
def states() -> dict[str, Any]:
    """Return the saved states by dtype and rule."""
    return dict(json.loads(gzip.decompress((DATA / "states.json.gz").read_bytes())))


def check_goes_on(uc: ModuleType, rule: str, dtype: str, saved: dict[str, Any]) -> None:
    """Require a clipper with a loaded state to reproduce the rest of the recorded steps."""
    clipper, rows = uc.Clipper(every_rule(uc)[rule]), []
    clipper.load_state_dict(saved)
    for grads, loss in zip(steps(dtype)[STOP:], LOSSES[STOP:], strict=True):
        clipped = clipper(grads, params=params(dtype), loss=loss)
        rows.append(row(clipped, clipper.report, clipper.state_dict()))
    compare(rule, dtype, rows, STOP)


@pytest.mark.needs("numpy")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_does_what_it_did(rule: str, dtype: str) -> None:
    """Results and states of twelve steps equal the recorded ones."""
    compare(rule, dtype, taken(RULES[rule], dtype))


@pytest.mark.needs("numpy")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", REMEMBERED)
def test_a_saved_state_goes_on(rule: str, dtype: str) -> None:
    """A state saved halfway loads, saves unchanged, and continues as recorded."""
    saved, grads = states()[dtype][rule], steps(dtype)[0]
    # In this format leaves without a gradient had no name.
    with pytest.raises(ValueError, match="format 1"):
        from_dict(RULES[rule], saved, grads)
    saved |= {
        name: to_dict(RULES[rule], RULES[rule].init(grads), grads)[name]
        for name in ("format", "leaves")
    }
    assert to_dict(RULES[rule], from_dict(RULES[rule], saved, grads), grads) == saved
    check_goes_on(uniclip, rule, dtype, saved)
