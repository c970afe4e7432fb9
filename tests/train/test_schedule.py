# SPDX-License-Identifier: Apache-2.0
"""The learning rate of every step."""

from __future__ import annotations

import pytest

from byteback.train import schedule


def test_schedules_by_hand() -> None:
    # 10 steps, 2 of them warm-up: 1/2, 1, then a cosine over 8 steps that starts at 1.
    rates = [schedule.factor("cosine", step, 10, warmup=2) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[6] == pytest.approx(0.5) and 0.0 < rates[9] < 0.05
    assert [schedule.factor("step", step, 6, every=2, gamma=0.5) for step in range(6)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert [schedule.factor("constant", step, 3) for step in range(3)] == [1, 1, 1]
