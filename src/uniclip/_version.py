# SPDX-License-Identifier: MIT
"""The version that is installed."""


def version() -> str:
    """Return the installed version; a copy among the files of another package has none."""
    from importlib import metadata  # noqa: PLC0415 - takes a third of the time that uniclip takes to import

    try:
        return metadata.version("uniclip-gradients") or "0+unknown"  # some Pythons return None where metadata is broken
    except (ImportError, KeyError):
        return "0+unknown"
