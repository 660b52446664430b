# SPDX-License-Identifier: MIT
"""The command ``uniclip``, as ``python -m uniclip``."""

from __future__ import annotations

import sys

from uniclip.insight.command import main

if __name__ == "__main__":
    sys.exit(main())
