# SPDX-License-Identifier: MIT
"""Clipping inside what people train with; each module imports its own library, and nothing here imports any."""
