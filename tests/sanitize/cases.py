# SPDX-License-Identifier: Apache-2.0
"""Drawn cases of the fuzz for the sanitized library. `make test` does not collect them: tests/fuzz/test_fixed.py has others."""

from __future__ import annotations

import pytest

from fuzz import harness

SEED, EACH = 2, 40
NATIVE = tuple(path for path in harness.PATHS if path != "reference")


@pytest.mark.parametrize("kind", harness.kinds())
@pytest.mark.parametrize("tenth", range(EACH // 10))
def test_drawn_cases(kind: str, tenth: int) -> None:
    for index in range(10 * tenth, 10 * tenth + 10):
        failure = harness.failure_of(harness.draw(SEED, index, (kind,)), NATIVE)
        assert failure is None, f"--seed {SEED} --kinds {kind} --index {index}: path {failure.path!r}: {failure.message}"
