# SPDX-License-Identifier: MIT
"""Inspect what clipping does: record a run, read it, find its spikes, replay other rules, plot it.

``import uniclip`` does not import this package, and only drawing imports matplotlib.
"""

from __future__ import annotations

from uniclip.insight.plot import plot
from uniclip.insight.record import Record, read
from uniclip.insight.recorder import Recorder, leaf_norms
from uniclip.insight.replay import Replay, replay
from uniclip.insight.spikes import Spike, spikes
from uniclip.insight.summary import summary

__all__ = [
    "Record",
    "Recorder",
    "Replay",
    "Spike",
    "leaf_norms",
    "plot",
    "read",
    "replay",
    "spikes",
    "summary",
]
