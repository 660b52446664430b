# SPDX-License-Identifier: MIT
"""What a step is made of; private: everything public is in `uniclip`."""
