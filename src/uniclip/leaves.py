# SPDX-License-Identifier: MIT
"""The norms of all leaves of a tree as one array, for recorders."""

from __future__ import annotations

from typing import Any

import numpy as np

from uniclip.backends.arrays import cast, together
from uniclip.layout import Layout, Opened, layout_of
from uniclip.measure import measure
from uniclip.norms import Norm
from uniclip.processes import Joint
from uniclip.ruler import Ruler
from uniclip.scopes import each_leaf


def row_of(given: Opened, norm: Norm, joint: Joint | None, every: list[Any] | None = None) -> Any:
    """Return the norms of all leaves, see `as_row`; if ``every`` leaf is given, with 0 for ``None``."""
    layout = layout_of(given, each_leaf)
    row = as_row(given, layout, measure([Ruler(given, layout, norm, joint)]).norms[0].blocks)
    if every is None or len(every) == len(given.arrays):
        return row
    xp = np if isinstance(row, np.ndarray) else given.backend.xp
    padded = xp.concat([row, xp.zeros_like(row[:1]) if given.arrays else xp.zeros(1)], axis=0)
    places = np.cumsum([leaf is not None for leaf in every]) - 1
    order = np.where([leaf is None for leaf in every], len(given.arrays), places)
    return xp.take(padded, order if xp is np else given.own(order), axis=0)


def as_row(given: Opened, layout: Layout, blocks: list[Any]) -> Any:
    """Return the norms of all leaves that are present, ``(k,)``, in the order of the tree."""
    if len(blocks) == 1:  # of one dtype and one device
        return blocks[0]
    if not blocks:
        return np.zeros(0, np.float32)
    own, blocks = given.backend, together(given.backend, blocks)
    order = np.argsort([layout.groups[group][0] for block in layout.blocks for group in block.groups])
    xp = np if isinstance(blocks[0], np.ndarray) else own.xp
    blocks = blocks if xp is np else [own.to_device_of(blocks[0], block) for block in blocks]
    dtype = xp.result_type(*[block.dtype for block in blocks])
    row = xp.concat([cast(xp, block, dtype) for block in blocks], axis=0)
    return xp.take(row, order if xp is np else given.own(order), axis=0)


def norm_of_row(given: Opened, row: Any, norm: Norm) -> Any:
    """Return the norm of all entries from the norms of leaves, computed in units of the largest."""
    xp = np if isinstance(row, np.ndarray) else given.backend.xp
    if not given.arrays:
        return xp.sum(row)
    top = xp.max(row)
    if norm.op == "max":
        return top
    usable = (top > 0) & xp.isfinite(top)
    parts = row / xp.where(usable, top, xp.ones_like(top))
    total = xp.sum(xp.where(usable, parts, xp.zeros_like(parts)) ** norm.ord)
    return xp.where(usable, top * total ** (1 / norm.ord), top)
