# SPDX-License-Identifier: MIT
"""The parts of a step. Private: everything public is in `uniclip`."""
