# SPDX-License-Identifier: MIT
"""The installed version."""


def version() -> str:
    """Return the installed version; a copy inside another package has none."""
    from importlib import metadata  # noqa: PLC0415 - takes a third of uniclip's import time

    try:
        # Some Pythons return None for broken metadata.
        return metadata.version("uniclip-gradients") or "0+unknown"
    except (ImportError, KeyError):
        return "0+unknown"
