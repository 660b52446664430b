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
        return [
            _source(getattr(self, f.name)) if f.default is MISSING else f"{f.name}={_source(getattr(self, f.name))}"
            for f in fields(me)
            if f.default is MISSING or getattr(self, f.name) != f.default
        ]
