# SPDX-License-Identifier: Apache-2.0
"""e^t by fixed operations: less than one unit in the last place from the truth, the same bits for numbers and tensors.

The truth is Python's decimal arithmetic with 60 digits.
"""

from __future__ import annotations

import decimal
import math
import random
import struct

import pytest
import torch

from byteback.ops.contract.exponential import HIGHEST, LOWEST, exponential, exponential_of

LN2 = math.log(2.0)


def drawn(count: int) -> list[float]:
    """Over the whole range, where learning-rate factors lie, around 0, and where one n ends and the next begins."""
    rng = random.Random(0)
    values = [rng.uniform(LOWEST, HIGHEST) for _ in range(count)] + [rng.uniform(-3.0, 0.0) for _ in range(2 * count)]
    values += [rng.choice((-1, 1)) * 2.0 ** rng.uniform(-60, 0) for _ in range(count)]
    values += [(n + 0.5) * LN2 * (1.0 + rng.uniform(-1e-12, 1e-12)) for n in range(-1020, 1022) for _ in range(3)]
    return [*values, 0.0, LOWEST, HIGHEST, -1e-300, 1e-300, 5e-324, -5e-324]


def units_off(t: float, made: float) -> float:
    """How far e^t is from `made`, in units in the last place of it."""
    with decimal.localcontext(decimal.Context(prec=60)):
        return float(abs(decimal.Decimal(t).exp() - decimal.Decimal(made)) / decimal.Decimal(math.ulp(made)))


def test_the_error_is_below_one_unit_in_the_last_place() -> None:
    worst = max((units_off(t, exponential(t)), t) for t in drawn(10_000))
    assert worst[0] < 0.95, worst


@pytest.mark.slow
def test_the_error_is_below_one_unit_in_the_last_place_for_a_million_numbers() -> None:
    worst = max((units_off(t, exponential(t)), t) for t in drawn(250_000))
    assert worst[0] < 0.95, worst


def test_a_tensor_has_the_bits_of_its_numbers() -> None:
    values = [*drawn(50_000), 1e9, -1e9, math.inf, -math.inf, math.nextafter(LOWEST, -1e9), math.nextafter(HIGHEST, 1e9)]
    assert exponential_of(torch.tensor(values, dtype=torch.float64)).tolist() == [exponential(t) for t in values]
    assert math.isnan(exponential(math.nan)) and exponential_of(torch.tensor([math.nan], dtype=torch.float64)).isnan().all()
    assert exponential_of(torch.empty(2, 0, dtype=torch.float64)).shape == (2, 0)


def test_known_values() -> None:
    assert exponential(0.0) == 1.0 and exponential(-0.0) == 1.0
    assert exponential(-math.inf) == 0.0 and exponential(math.inf) == math.inf
    assert [round(exponential(-20.0 * d), 4) for d in (0.0, 0.01, 0.05)] == [1.0, 0.8187, 0.3679]
    assert all(exponential(-d) <= 1.0 for d in (2.0**-k for k in range(80)))


def test_the_bits_are_these() -> None:
    """Of every machine: a change here changes what training computes, so it raises NUMERICS_VERSION."""
    expected = {-0.2: "3fea330ad6166159", -1.0: "3fd78b56362cef38", -2.302585092994046: "3fb9999999999998"}
    for t, bits in expected.items():
        assert struct.pack(">d", exponential(t)).hex() == bits, t
