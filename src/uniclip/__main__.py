# SPDX-License-Identifier: MIT
"""Run the command ``uniclip``, which is in `uniclip.insight.command`: ``python -m uniclip``."""

import sys

from uniclip.insight.command import main

if __name__ == "__main__":
    sys.exit(main())
