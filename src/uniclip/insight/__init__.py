# SPDX-License-Identifier: MIT
"""See what clipping does: record a run, read it, replay other rules on it, and choose a limit.

``import uniclip`` does not import it, and matplotlib is imported only for drawing.
"""

from __future__ import annotations

from uniclip.insight.advice import Advice, suggest
from uniclip.insight.page import page
from uniclip.insight.plot import plot
from uniclip.insight.reading import read
from uniclip.insight.record import Record
from uniclip.insight.recorder import Recorder
from uniclip.insight.replay import Replay, WhatIf, replay, what_if
from uniclip.insight.spikes import Spike, spikes
from uniclip.rules import leaf_norms

__all__ = [
    "Advice",
    "Record",
    "Recorder",
    "Replay",
    "Spike",
    "WhatIf",
    "leaf_norms",
    "page",
    "plot",
    "read",
    "replay",
    "spikes",
    "suggest",
    "what_if",
]
