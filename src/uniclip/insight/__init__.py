# SPDX-License-Identifier: MIT
"""See what clipping does: record a run, read it, replay other rules on it, and choose a limit.

Nothing of it is imported by ``import uniclip``, and matplotlib only where something is drawn.
"""

from __future__ import annotations

from uniclip.insight.record import Record
from uniclip.insight.recorder import Recorder
from uniclip.rules import leaf_norms

__all__ = ["Record", "Recorder", "leaf_norms"]
