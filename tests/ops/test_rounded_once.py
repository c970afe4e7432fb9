# SPDX-License-Identifier: Apache-2.0
"""Quotients and square roots are the floats nearest to the truth, on every path. The truth is computed with Python's integers.

The hardest roots lie next to the middle between two floats. They are made here by solving y² = M · 2^k + c for a small c: y is
such a middle, and M a float whose root misses it by as little as a float's root can.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

import byteback
from byteback import ops
from byteback.ops.backends import paths
from byteback.ops.contract.rounded_once import _nearest_root, divided_by, inverse, square_root
from byteback.ops.magnitude import sigma


def nearest_root(x: float) -> float:
    """The float nearest to the root of x > 0."""
    fraction, exponent = math.frexp(x)
    m, exponent = int(fraction * 2.0**53), exponent - 53
    m, exponent = (m << 1, exponent - 1) if exponent % 2 else (m, exponent)
    m, exponent = m << 64, exponent - 64
    root = math.isqrt(m)
    # A root that is not whole is marked by one more bit, so that its rounding to 53 bits sees which side it is on.
    return math.ldexp(float(root << 1 | (root * root != m)), exponent // 2 - 1)


def hardest(bits: int, residues: range) -> Iterator[float]:
    """Numbers in [1, 2) for 54 bits, in [2, 4) for 55, whose roots are nearest to the middle between two floats."""
    for c in residues:
        if c % 8 != 1:
            continue  # not an odd square modulo a power of two
        y = 1
        for k in range(3, bits):  # from y² = c modulo 2^k to 2^(k + 1)
            y += (1 << (k - 1)) * ((y * y - c) >> k & 1)
        modulus = 1 << bits
        for middle in {s * y + t * modulus // 2 + u * modulus for s in (1, -1) for t in (0, 1) for u in range(-1, 3)}:
            m, rest = divmod(middle * middle - c, modulus)
            if 2**53 < middle < 2**54 and rest == 0 and 2**52 <= m < 2**53:
                yield m * 2.0 ** (1 - 53 + (bits - 54))


def near_middles(rng: random.Random, count: int) -> Iterator[float]:
    """The two floats next to the square of a middle between two floats, in [1, 4)."""
    for _ in range(count):
        middle = 2 * rng.randrange(2**52, 2**53) + 1  # in units of 2^-53
        square = middle * middle  # in units of 2^-106
        unit = 1 << (square.bit_length() - 53)
        for m in (square // unit, square // unit + 1):
            yield float(m) * (unit * 2.0**-106)


def drawn(rng: random.Random, count: int) -> Iterator[float]:
    for _ in range(count):
        yield math.ldexp(rng.random() + 0.5, rng.randrange(-1021, 1024))
        yield 1.0 + 3.0 * rng.random()


HARD = [*hardest(54, range(-4001, 4001)), *hardest(55, range(-4001, 4001))]
SUBNORMAL = [math.ldexp(m, -1074) for m in (1, 2, 3, 5, 1023, 2**51 + 1, 2**52 - 1, 2**52, 2**52 + 1)]
EDGES = [1.0, 4.0, 0.25, 9.0, 1.0 + 2.0**-52, 4.0 - 2.0**-51, 2.0 - 2.0**-52, 2.0, 1.7976931348623157e308, 2.0**-1022]
SQUARES = [float(n * n) for n in range(1, 2000)] + [(2.0**26 + n) ** 2 for n in range(500)]


def of(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_hardest_numbers_are_hard() -> None:
    """Their roots miss a middle by less than 2^-40 units in the last place, and there are many."""
    assert len(HARD) > 1000
    for x in HARD[::50]:
        root = nearest_root(x)
        misses = [abs(Fraction(x) - (Fraction(root) + side * Fraction(2) ** -53) ** 2) for side in (1, -1)]
        assert min(misses) / (2 * Fraction(root)) < Fraction(2) ** (-52 - 40)


def test_square_roots_are_nearest_to_the_truth() -> None:
    rng = random.Random(0)
    values = [*drawn(rng, 50_000), *near_middles(rng, 50_000), *HARD, *SUBNORMAL, *EDGES, *SQUARES]
    assert square_root(of(values)).tolist() == [nearest_root(x) for x in values]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_millions_of_square_roots_are_nearest_to_the_truth(seed: int) -> None:
    rng = random.Random(seed)
    values = [*drawn(rng, 150_000), *near_middles(rng, 100_000)]
    assert square_root(of(values)).tolist() == [nearest_root(x) for x in values]


@pytest.mark.parametrize("error", [0.0, 2.0**-52, -(2.0**-52), 2.0**-51, 2.0**-28, -(2.0**-28)])
def test_square_roots_do_not_depend_on_how_good_the_device_is(error: float) -> None:
    rng = random.Random(1)
    values = [*near_middles(rng, 20_000), *HARD, *(1.0 + 3.0 * rng.random() for _ in range(20_000)), 1.0, 4.0 - 2.0**-51]
    m, expected = of(values), of([nearest_root(x) for x in values])
    assert torch.equal(_nearest_root(m, expected * (1.0 + error)), expected)


def test_square_roots_of_special_numbers() -> None:
    made = square_root(of([0.0, -0.0, math.inf, math.nan, -1.0, -math.inf, -5e-324]))
    assert made[:3].tolist() == [0.0, 0.0, math.inf] and made[3:].isnan().all()
    assert math.copysign(1.0, made[1].item()) == -1.0
    assert square_root(torch.empty(0, 3, dtype=torch.float64)).shape == (0, 3)
    strided = of([2.0, 3.0, 5.0, 7.0]).reshape(2, 2).t()
    assert square_root(strided).tolist() == [[math.sqrt(2.0), math.sqrt(5.0)], [math.sqrt(3.0), math.sqrt(7.0)]]


def test_pythons_own_square_root_is_nearest_to_the_truth() -> None:
    """quantize.deviation_of and the recipes use it."""
    values = [*drawn(random.Random(2), 20_000), *near_middles(random.Random(2), 20_000), *HARD, *SUBNORMAL, *EDGES]
    assert [math.sqrt(x) for x in values] == [nearest_root(x) for x in values]


def numbers(dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, count, generator=generator, dtype=dtype)
    return a, torch.where(b == 0.0, 1.0, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_divisions_are_nearest_to_the_truth(dtype: torch.dtype) -> None:
    """Between tensors, by a number, of one: as every IEEE division, so NumPy's, which the bulk of them is compared with."""
    a, b = numbers(dtype, 1_000_000)
    one = np.ones(1, dtype=a.numpy().dtype)
    for made, expected in (
        (a / b, a.numpy() / b.numpy()),
        (divided_by(a, 133_144), a.numpy() / (one * 133_144)),
        (divided_by(a, 3.0), a.numpy() / (one * 3)),
        (inverse(b), one / b.numpy()),
    ):
        assert torch.equal(made, torch.from_numpy(expected))
    narrow = np.float32 if dtype is torch.float32 else float
    for x, y, quotient in zip(a[:5000].tolist(), b[:5000].tolist(), (a / b)[:5000].tolist(), strict=True):
        true = Fraction(x) / Fraction(y)
        neighbours = [float(np.nextafter(narrow(quotient), narrow(side))) for side in (-math.inf, math.inf)]
        assert all(abs(Fraction(quotient) - true) < abs(Fraction(other) - true) for other in neighbours)


@pytest.mark.parametrize("path", paths.available())
def test_a_norm_divides_by_the_nearest_deviation(path: str) -> None:
    """Also over many channels: where one in eighty was a unit off, small layers could pass."""
    rng = random.Random(4)
    values = [*near_middles(rng, 5_000), *HARD, *(rng.random() * 10.0 for _ in range(20_000)), *SUBNORMAL, 2.0**-1000, 1e300]
    squares, zeros = of(values), torch.zeros(len(values))
    with byteback.path(path):
        made = ops.norm_coefficients((zeros.double(), squares, zeros, zeros), 1, None, None, None, 0.0, None, 0.1, "none")
    assert made.invstd.tolist() == [1.0 / nearest_root(x) for x in values]


@pytest.mark.parametrize("path", paths.available())
def test_a_norm_with_given_statistics_divides_by_the_nearest_deviation(path: str) -> None:
    var, eps = torch.rand(30_000, generator=torch.Generator().manual_seed(5)) * 4.0, 1e-5
    expected = [1.0 / nearest_root(v + eps) for v in var.double().tolist()]
    with byteback.path(path):
        assert ops.norm_invstd(var, eps).tolist() == expected
        a, _ = ops.norm_folded(torch.zeros_like(var), var, None, None, None, eps)
    assert torch.equal(a, of(expected).float())


def test_the_deviation_of_a_gradient_is_the_nearest() -> None:
    squares = of([*near_middles(random.Random(6), 5_000), *HARD])
    expected = of([nearest_root(x) for x in squares.tolist()]).float()
    assert torch.equal(sigma(torch.zeros_like(squares), squares, 1), expected)
