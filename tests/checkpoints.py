"""The rules whose states go through files of every framework."""

from __future__ import annotations

import uniclip as uc

RULES = [
    uc.chain(uc.zclip(z=1.0, warmup=2), uc.by_global_norm(5.0)),
    uc.autoclip(50, window=6),
    uc.adagc(warmup=2),
    uc.spam(factor=2.0, decay=0.5, warmup=1),
]
