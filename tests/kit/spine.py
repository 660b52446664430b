"""Turn the spine off, so that steps take the general path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uniclip as uc


def _store(rule: object, value: object) -> None:
    """Set the attribute of a rule for later, when the spine is on again."""
    vars(rule)["on_spine"] = value


@contextmanager
def without_spine() -> Iterator[None]:
    """Take the general path in every step, also by rules that exist already."""
    # An attribute of the class comes before those of its instances.
    off = property(lambda rule: False, _store)
    chain: Any = type(uc.chain(uc.by_norm(1.0)))
    rule: Any = uc.Rule
    chain.on_spine = rule.on_spine = off
    try:
        yield
    finally:
        del chain.on_spine, rule.on_spine
