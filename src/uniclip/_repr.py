# SPDX-License-Identifier: MIT
"""Print a choice as the source that makes it."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from typing import Any


def _source(value: object) -> str:
    return value.__qualname__ if hasattr(value, "__qualname__") else repr(value)


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
            _source(getattr(self, name)) if default is MISSING else f"{name}={_source(getattr(self, name))}"
            for name, default in defaults
            if default is MISSING or getattr(self, name) != default
        ]
