# SPDX-License-Identifier: MIT
"""Run ``python -m uniclip``: the command ``uniclip``, defined in `uniclip.insight.command`."""

import sys

from uniclip.insight.command import main

if __name__ == "__main__":
    sys.exit(main())
