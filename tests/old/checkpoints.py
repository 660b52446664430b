"""The rules whose states go through files of every framework, and the files of JAX's libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import uniclip as uc

RULES = [
    uc.chain(uc.zclip(z=1.0, warmup=2), uc.by_global_norm(5.0)),
    uc.autoclip(50, window=6),
    uc.adagc(warmup=2),
    uc.spam(factor=2.0, decay=0.5, warmup=1),
]


def by_flax(state: Any, like: Any, folder: Path) -> Any:
    """Write and read a state with flax."""
    from flax import serialization

    (folder / "state.msgpack").write_bytes(serialization.to_bytes(state))
    return serialization.from_bytes(like, (folder / "state.msgpack").read_bytes())


def by_orbax(state: Any, like: Any, folder: Path) -> Any:
    """Write and read a state with orbax."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", like)
