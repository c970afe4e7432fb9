# SPDX-License-Identifier: Apache-2.0
"""What every test shares: hypothesis draws the same examples each time, and no test asserts a time."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("byteback", derandomize=True, deadline=None)
settings.load_profile("byteback")
