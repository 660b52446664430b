# SPDX-License-Identifier: MIT
"""Print a choice as the source that makes it."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from typing import Any


def source(value: object) -> str:
    """Return the name of a function or class, else what the value prints as."""
    return value.__qualname__ if hasattr(value, "__qualname__") else repr(value)


def _differs(value: Any, default: Any) -> bool:
    """Whether a field is not its default; an array is none, and its comparison no boolean."""
    return hasattr(value, "shape") or bool(value != default)


class Printed:
    """A frozen dataclass that prints as its name in its own module, else as the call that makes it."""

    def __repr__(self) -> str:
        """Return source text that evaluates to an equal object."""
        known = vars(sys.modules[type(self).__module__])
        for name, value in known.items():
            if type(value) is type(self) and value == self:
                return name
        return f"{type(self).__name__}({', '.join(self._arguments())})"

    def _arguments(self) -> list[str]:
        me: Any = self
        defaults = [(f.name, f.default if f.default_factory is MISSING else f.default_factory()) for f in fields(me)]
        return [
            source(getattr(self, name)) if default is MISSING else f"{name}={source(getattr(self, name))}"
            for name, default in defaults
            if default is MISSING or _differs(getattr(self, name), default)
        ]
