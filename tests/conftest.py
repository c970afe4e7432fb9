# SPDX-License-Identifier: Apache-2.0
"""What every test shares: hypothesis draws the same examples each time, no test asserts a time, and int8 serves.

Most layers in tests are so small that they would run in float (nn/layers/float_table.py), but tests are about int8. So the
table is empty in a test, unless the test is marked `float_table`.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: tests run kernels of GPUs on CPU tensors

import pytest
from hypothesis import settings

from byteback.nn.layers import float_table

collect_ignore = ["sanitize"]  # `make sanitize` runs pytest from there, with another build of the native library

settings.register_profile("byteback", derandomize=True, deadline=None)
settings.load_profile("byteback")


@pytest.fixture(autouse=True)
def int8_serves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "float_table" not in request.keywords:
        monkeypatch.setattr(float_table, "RULES", ())
