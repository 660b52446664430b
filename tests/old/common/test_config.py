"""A rule as plain data: it comes back equal from JSON, and nothing that a config names is run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import uniclip as uc
from frameworks import EAGER, Framework
from tracing import Largest
from uniclip.config import from_config, to_config


def through_json(rule: Any, own: Any = None) -> Any:
    """Return what comes back of a rule."""
    return from_config(json.loads(json.dumps(to_config(rule, own), allow_nan=False)), own)


PRESETS: list[Any] = [
    uc.by_value(-1.0, 2.0), uc.by_value(-np.inf, np.inf),
    uc.by_norm(1.0, axis=0, ord=1, curve=uc.curves.soft), uc.by_average_norm(1.0),
    uc.by_global_norm(math.inf, ord=math.inf, nonfinite="zero"), uc.by_global_norm(1.0, curve=uc.curves.tanh),
    uc.by_block_rms(1.0), uc.by_example_norm(1.0), uc.by_example_layer_norm(1.0, by_size=True),
    uc.by_example_quantile(), uc.auto_s(), uc.psac(), uc.agc(), uc.larc(0.1), uc.autoclip(),
    uc.autoclip(window=None), uc.agc(0.1, axis=(0, 1)), uc.agc(ord=math.inf), uc.by_example_quantile(min=0.05, max=2.0),
    uc.zclip(clip_factor=0.7, skip_update_on_spike=True),
    uc.percentile_clipping(),
    uc.zclip(), uc.log_zscore(), uc.adagc(), uc.norm_growth(), uc.skip_spikes(), uc.spam(), uc.adagn(),
    uc.to_global_norm(),
    uc.chain(uc.by_value(-1.0, 1.0), uc.adagc()), uc.Rule(1.0, scope=uc.scopes.unit(1), norm=uc.norms.RMS),
]  # fmt: skip


@pytest.mark.parametrize("rule", PRESETS, ids=repr)
def test_presets(rule: Any) -> None:
    """Each preset comes back equal, without ∞ or NaN in it that JSON does not know."""
    again = through_json(rule)
    assert again == rule
    assert type(again) is type(rule)


CHOICES = [
    *(uc.Rule(1.0, scope=scope) for scope in (uc.scopes.each_entry, uc.scopes.each_row, uc.scopes.axes(0, -1))),
    *(uc.Rule(1.0, norm=getattr(uc.norms, name)) for name in uc.norms.__all__ if name != "Norm"),
    *(
        uc.Rule(1.0, curve=curve)
        for curve in (uc.curves.smooth, uc.curves.normalize, uc.curves.Regularized(0.1), uc.curves.NonMonotonic(0.2))
    ),
    *(
        uc.Rule(limit)
        for limit in (
            uc.limits.Relative(0.1),
            uc.limits.TrustRatio(0.1, 0.02, 0.0),
            uc.limits.LogZScore(2.0, 0.9),
            uc.limits.Split(2.0, by_size=True),
        )
    ),
]


@pytest.mark.parametrize("rule", CHOICES, ids=repr)
def test_choices(rule: Any) -> None:
    """So does each choice."""
    assert through_json(rule) == rule


def test_every_choice_has_its_public_name() -> None:
    """A config names what the four modules hold as users write it."""
    config = to_config(uc.Rule(uc.limits.Ema(2.0, 0.9), scope=uc.scopes.each_leaf, curve=uc.curves.soft))
    assert config["class"] == "uniclip.Rule"
    assert config["fields"]["limit"]["class"] == "uniclip.limits.Ema"
    assert config["fields"]["curve"] == {"name": "uniclip.curves.soft"}
    assert config["fields"]["scope"] == {"class": "uniclip.Scope", "fields": {"axes": None, "label": None}}


@pytest.mark.ways(*EAGER, without="Dask")
def test_arrays(fw: Framework) -> None:
    """A 0-d array becomes a number, another one comes back as NumPy's."""
    for dtype in ("float32", "bfloat16", "float16"):
        if dtype in fw.dtypes:
            assert from_config(to_config(uc.by_norm(fw.array(0.5, dtype)))) == uc.by_norm(0.5)
    rule = through_json(uc.by_value(fw.array([-1.0, -2.0]), np.asarray([1.0, np.inf])))
    assert rule.min.tolist() == [-1.0, -2.0]
    assert rule.max.tolist() == [1.0, math.inf]
    assert (rule.min.dtype, rule.max.dtype) == (np.float32, np.float64)


def test_counts() -> None:
    """The counts of `cowclip`, an array, come back, too."""
    counts = np.asarray([2, 1], np.int32)
    again = through_json(uc.cowclip(counts))
    assert repr(again) == repr(uc.cowclip(counts))
    assert again.limit.counts.dtype == np.int32


def kernels(path: Any, leaf: Any) -> bool:
    """Whether a leaf is a kernel."""
    return path[-1] == "kernel"


def half(grad: Any) -> Any:
    """Return half of a gradient."""
    return grad / 2


@dataclass(frozen=True)
class Steep:
    """A curve of one's own."""

    power: float

    def __call__(self, xp: Any, norm: Any, limit: Any) -> Any:
        """Return the factor."""
        return uc.curves.hard(xp, norm, limit) ** self.power


OWN = {"kernels": kernels, "half": half, "Steep": Steep, "Largest": Largest}


def test_functions_and_classes_of_ones_own() -> None:
    """They are saved by names that are given, in each place where a rule can hold one; the code stays where it is."""
    rule = uc.chain(
        uc.masked(uc.by_norm(1.0), kernels),
        uc.by_group_norm({True: 1.0, False: 2.0}, kernels),
        uc.by_global_norm(uc.limits.Schedule(half)),
        uc.Rule(Largest(), curve=Steep(2.0)),
        half,
    )
    assert through_json(rule, OWN) == rule
    assert to_config(rule, OWN)["fields"]["rules"]["tuple"][-1]["fields"]["function"] == {"name": "half"}
    for missing in ("kernels", "half", "Steep", "Largest"):
        less = {name: value for name, value in OWN.items() if name != missing}
        with pytest.raises(TypeError, match=rf"{missing} is part of the rule, and has no name .*to_config\(rule, "):
            to_config(rule, less)
        with pytest.raises(ValueError, match=rf"names '{missing}', .* from_config\(config, {{'{missing}'"):
            from_config(to_config(rule, OWN), less)
    with pytest.raises(TypeError, match=r"<lambda> is part of the rule"):
        to_config(uc.masked(uc.by_norm(1.0), lambda path, leaf: True))


@pytest.mark.parametrize(
    "name", ["os.system", "eval", "__import__", "uniclip.Clipper", "uniclip.limits.Nope", "uniclip.config.re", ""]
)
def test_what_a_config_may_not_name(name: str) -> None:
    """A config from anywhere runs nothing: no module is imported, and no other name is looked up."""
    for config in ({"name": name}, {"class": name, "fields": {"command": "true"}}):
        with pytest.raises(ValueError, match=f"names {name!r}, which is nothing that uniclip makes rules of"):
            from_config(config)
        with pytest.raises(ValueError, match=f"the config names {name!r}"):
            from_config({"class": "uniclip.Rule", "fields": {"limit": config}})


@pytest.mark.parametrize(
    "config",
    [{}, {"clas": "uniclip.Rule"}, [1.0], {"class": "uniclip.Rule"}, {"other": 1}, {"number": 1.0}, b"", {"tuple": 1}],
    ids=repr,
)
def test_what_is_no_config(config: Any) -> None:
    """What `to_config` does not make is refused."""
    with pytest.raises(ValueError, match="is no part of the config of a rule"):
        from_config(config)


def test_a_function_is_not_called() -> None:
    """Fields are given to classes only."""
    with pytest.raises(ValueError, match=r"names 'uniclip\.scopes\.unit', which is nothing"):
        from_config({"class": "uniclip.scopes.unit", "fields": {"axis": 0}})
