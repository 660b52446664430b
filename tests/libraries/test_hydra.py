"""Rules in configs of Hydra, as the page about configs has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import ConfigValueError

import uniclip as uc

PAGE = Path(__file__).parents[2] / "docs" / "api" / "saved.md"


def test_rules_in_lists() -> None:
    """The configs of the page make the rules that they name."""
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    config = OmegaConf.create(text)
    assert instantiate(config.rule) == uc.chain(uc.zclip(z=3.0), uc.by_global_norm(1.0))
    rules = instantiate(config.rules, _convert_="all")
    assert rules == {"body": uc.by_norm(1.0), "head": uc.agc()}
    assert instantiate(config.rules.body) == uc.by_norm(1.0)


def test_what_the_page_explains() -> None:
    """Without ``_convert_``, OmegaConf takes a rule in a list for a config, with this error."""
    rules = OmegaConf.create("[{_target_: uniclip.by_norm, max_norm: 1.0}]")
    with pytest.raises(ConfigValueError, match=r"limit: Union\[float, Array, Limit\]"):
        instantiate(rules)
    axes = "{_target_: uniclip.Scope, axes: [0, 1]}"
    assert instantiate(OmegaConf.create(axes), _convert_="all") == uc.Scope(axes=(0, 1))
