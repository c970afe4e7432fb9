# SPDX-License-Identifier: Apache-2.0
"""Proves the bits of the float statistics: equal to pure Python that follows the defined order of additions.

The order: rows (pixels in N, (D,) H, W order) in blocks of 64, one after the other; blocks as a halving tree; then the
channels by the same tree. Python floats are float64, so `==` compares every bit but the sign of zero.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from byteback import ops

# Around the block of 64 rows and the powers of two of the tree; channels around powers of two.
SHAPES = [(1, 1), (5, 3), (63, 2), (64, 1), (65, 3), (129, 5), (2, 4, 33), (3, 7, 5, 9), (2, 5, 16, 17), (1, 17, 8, 8),
          (2, 3, 5, 4, 7)]  # fmt: skip
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
by_layout = pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted", "sliced", "expanded"])
# In float32, 127 / 1.5 is not 127 · (1 / 1.5), while 0.5 and 0.7 do not tell the two apart.
by_clip = pytest.mark.parametrize("clip", [0.5, 0.7, 1.5], ids=lambda clip: f"clip_{clip}")


def wild(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Values over so many magnitudes that a float64 sum rounds, and another order of additions gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    exponent = (12 * torch.randn(shape, generator=generator)).clamp(-30, 30)
    return torch.randn(shape, generator=generator) * torch.exp(exponent)


def columns(x: Tensor) -> list[list[Any]]:
    """Each channel's values, rows in N, (D,) H, W order, as Python numbers."""
    n, c, *spatial = x.shape
    return [[x[(i, k, *at)].item() for i in range(n) for at in itertools.product(*map(range, spatial))] for k in range(c)]


def tree(values: list[float]) -> float:
    """Block i with block i + n/2, n a power of two, missing ones are 0."""
    n = 1
    while n < len(values):
        n *= 2
    values = values + [0.0] * (n - len(values))
    while n > 1:
        n //= 2
        values = [values[i] + values[i + n] for i in range(n)]
    return values[0]


def column_sum(values: list[float]) -> float:
    blocks = []
    for start in range(0, len(values), 64):
        total = 0.0
        for value in values[start : start + 64]:
            total += value
        blocks.append(total)
    return tree(blocks) if blocks else 0.0


def total(products: list[list[float]]) -> float:
    return tree([column_sum(column) for column in products])


def column_dot(a: list[float], b: list[float]) -> float:
    return column_sum([p * q for p, q in zip(a, b, strict=True)])


def dot(a: list[list[float]], b: list[list[float]]) -> float:
    return total([[p * q for p, q in zip(left, right, strict=True)] for left, right in zip(a, b, strict=True)])


def test_the_data_can_tell_orders_of_addition_apart() -> None:
    x = wild((2, 5, 16, 17))
    for column in columns(x):
        backwards, plain = column_sum(column[::-1]), sum(column[1:], column[0])
        assert len({column_sum(column), backwards, plain, tree(column)}) >= 3
    sums = [column_sum(column) for column in columns(wild((3, 65)))]
    assert tree(sums) != sum(sums[1:], sums[0])


@by_shape
def test_moments_equal_the_defined_order_of_additions(shape: tuple[int, ...]) -> None:
    x = wild(shape)
    peak, first, second = ops.moments(x)
    kept = (1, shape[1], *[1] * (len(shape) - 2))
    assert (peak.shape, first.shape, second.shape) == (kept, kept, kept)
    assert (peak.dtype, first.dtype, second.dtype) == (torch.float32, torch.float64, torch.float64)
    assert peak.flatten().tolist() == [max(map(abs, column)) for column in columns(x)]
    assert first.flatten().tolist() == [column_sum(column) for column in columns(x)]
    assert second.flatten().tolist() == [column_sum([v * v for v in column]) for column in columns(x)]


@pytest.mark.parametrize("channels", [1, 2, 3, 7, 8, 9, 64, 65, 100])
def test_sum_channels_is_the_halving_tree(channels: int) -> None:
    x = wild((1, channels, 1, 1)).double()
    result = ops.sum_channels(x)
    assert result.shape == (1, 1, 1, 1) and result.dtype == torch.float64
    assert result.item() == tree(x.flatten().tolist())


@by_shape
def test_tail_count_counts_what_exceeds_the_threshold(shape: tuple[int, ...]) -> None:
    x = wild(shape)
    kept = (1, shape[1], *[1] * (len(shape) - 2))
    edge = x.abs().reshape(-1)[0].item()  # a threshold that one element equals: it does not exceed it
    for threshold in (torch.full((1,) * len(shape), edge), torch.linspace(0.1, 2, shape[1]).reshape(kept)):
        each = threshold.expand(kept).flatten().tolist()
        result = ops.tail_count(x, threshold)
        assert result.dtype == torch.int64 and result.shape == kept
        expected = [sum(abs(v) > t for v in column) for column, t in zip(columns(x), each, strict=True)]
        assert result.flatten().tolist() == expected


@by_shape
@pytest.mark.parametrize("per_channel", [False, True], ids=["per_tensor", "per_channel"])
def test_dot_terms_equal_the_defined_order_of_additions(oracle: Any, shape: tuple[int, ...], per_channel: bool) -> None:
    x, values = wild(shape), oracle.operand(shape)
    scale = torch.rand([1, shape[1] if per_channel else 1, *[1] * (len(shape) - 2)]) + 0.01
    each = scale.flatten().tolist() * (1 if per_channel else shape[1])
    a, q = columns(x), columns(values)
    products = [s * column_dot(u, v) for u, v, s in zip(a, q, each, strict=True)]
    squares = [s * s * column_dot(v, v) for v, s in zip(q, each, strict=True)]
    result = ops.dot_terms(x, values, scale)
    assert result.dtype == torch.float64
    assert result.tolist() == [tree(products), tree(squares), dot(a, a)]


@by_shape
def test_dot_terms_with_a_scale_for_each_sample(oracle: Any, shape: tuple[int, ...]) -> None:
    x, values = wild(shape), oracle.operand(shape)
    scale = torch.rand([shape[0], *[1] * (len(shape) - 1)]) + 0.01
    result = ops.dot_terms(x, values, scale)
    if shape[0] > 1:
        a, b = columns(x), columns(values.double() * scale.double())
        assert result.tolist() == [dot(a, b), dot(b, b), dot(a, a)]
    else:
        assert result.tolist() == ops.dot_terms(x, values, scale.reshape((1,) * x.dim())).tolist()


def python_nearest(x: Tensor, clip: float) -> tuple[np.ndarray, np.ndarray]:
    """y and q of round-to-nearest in numpy float32."""
    y = x.numpy() * (np.float32(127) / np.float32(clip))
    return y, np.rint(np.clip(y, np.float32(-127), np.float32(127)))


@by_shape
@by_clip
def test_cosine_terms_equal_the_defined_order_of_additions(shape: tuple[int, ...], clip: float) -> None:
    x = wild(shape) * 0.1
    a = columns(x)
    rows = []
    for candidate in (clip, 2 * clip):
        q = columns(torch.from_numpy(python_nearest(x, candidate)[1]))
        rows.append([dot(a, q), dot(q, q), dot(a, a)])
    result = ops.cosine_terms(x, torch.tensor([clip, 2 * clip]))
    assert result.dtype == torch.float64
    assert result.tolist() == rows


def python_expected(x: Tensor, clip: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """|y| in numpy float32, clamped, and E[q²] = y² + f (1 - f) in exact arithmetic, for a clip of each channel (axis 1)."""
    rate = (np.float32(127) / clip.astype(np.float32)).reshape(1, -1, *[1] * (x.dim() - 2))
    y = np.minimum(np.abs(x.numpy()) * rate, np.float32(127))
    squares = []
    for number in map(Fraction, y.flatten().tolist()):
        f = number - math.floor(number)
        squares.append(float(number * number + f * (1 - f)))  # has few bits: the conversion is exact
    return y, np.array(squares).reshape(y.shape)


@pytest.mark.parametrize("shape", [(3, 5), (2, 7, 9), (5, 17, 6, 7), (2, 3, 3, 4, 5)], ids=str)
def test_expected_terms_of_each_channel_equal_the_defined_order_of_additions(shape: tuple[int, ...]) -> None:
    x = wild(shape) * 0.1
    clips = torch.rand(3, shape[1], generator=torch.Generator().manual_seed(2)) * x.abs().max() + 1e-3
    a = columns(x.abs())
    result = ops.channel_cosine_terms(x, clips, stochastic=True)
    assert result.shape == (3, 3, shape[1]) and result.dtype == torch.float64
    for terms, clip in zip(result.tolist(), clips, strict=True):
        y, squares = (columns(torch.from_numpy(part)) for part in python_expected(x, clip.numpy()))
        ones = [[1.0] * len(column) for column in a]
        assert terms[0] == [column_dot(u, v) for u, v in zip(a, y, strict=True)]
        assert terms[1] == [column_dot(u, v) for u, v in zip(squares, ones, strict=True)]
        assert terms[2] == [column_dot(u, u) for u in a]


@pytest.mark.parametrize("stochastic", [False, True])
def test_terms_of_a_tensor_are_those_of_its_channels(stochastic: bool) -> None:
    x, clips = wild((3, 19, 8, 5)), torch.tensor([0.3, 2.0, 40.0])
    each = ops.channel_cosine_terms(x, clips.reshape(-1, 1).expand(-1, 19), stochastic)
    assert torch.equal(ops.cosine_terms(x, clips, stochastic), ops.sum_last(each))


def test_a_channel_whose_clip_counts_as_zero_has_no_quantized_part() -> None:
    x = torch.tensor([[3.0, 4.0], [-1.0, -2.0]])
    for stochastic in (False, True):
        terms = ops.channel_cosine_terms(x, torch.tensor([[0.0, 4.0]]), stochastic)[0]
        assert terms[:2, 0].tolist() == [0.0, 0.0] and terms[1, 1] > 0.0 and terms[2].tolist() == [10.0, 20.0]


@by_shape
@by_clip
def test_cosine_slope_terms_equal_the_defined_order_of_additions(shape: tuple[int, ...], clip: float) -> None:
    x = wild(shape) * 0.1
    a, q = columns(x), columns(torch.from_numpy(python_nearest(x, clip)[1]))
    bound = float(np.float32(clip))
    outer = [[v if abs(v) > bound else 0.0 for v in column] for column in a]
    xq, qq, xx, rate = dot(a, q), dot(q, q), dot(a, a), 127.0 / bound
    result = ops.cosine_slope_terms(x, torch.tensor(clip))
    assert result.tolist() == [xq, qq, xx, xq - rate * (xx - dot(outer, outer)), qq - rate * (xq - dot(outer, q))]


@by_clip
def test_cosine_slope_terms_are_those_of_the_slope(clip: float) -> None:
    """d from its definition, element by element: 127 sign(x) beyond the clip, else q - y."""
    x = torch.randn(7, 33, 9, generator=torch.Generator().manual_seed(1))
    q = torch.from_numpy(python_nearest(x, clip)[1]).double()
    wide, bound = x.double(), float(np.float32(clip))
    d = torch.where(wide.abs() > bound, 127 * wide.sign(), q - wide * 127 / bound)
    *_, xd, qd = ops.cosine_slope_terms(x, torch.tensor(clip)).tolist()
    assert xd == pytest.approx((wide * d).sum().item(), rel=1e-6) and qd == pytest.approx((q * d).sum().item(), rel=1e-6)


def test_cosine_slope_terms_on_four_numbers() -> None:
    # clip 127: y = x. q = (2, -2, 127, 0); d = q - y = (-0.5, 0.25, -, -0.25) and 127 for the value beyond the clip.
    x = torch.tensor([[2.5, -2.25], [300.0, 0.25]])
    xq, qq, xx = 2.5 * 2 + 2.25 * 2 + 300 * 127, 4 + 4 + 127 * 127, 2.5**2 + 2.25**2 + 300.0**2 + 0.25**2
    xd, qd = 2.5 * -0.5 + -2.25 * 0.25 + 300 * 127 + 0.25 * -0.25, 2 * -0.5 + -2 * 0.25 + 127 * 127
    assert ops.cosine_slope_terms(x, torch.tensor(127.0)).tolist() == [xq, qq, xx, xd, qd]


def test_cosine_terms_of_a_clip_that_counts_as_zero_have_no_quantized_part() -> None:
    x = torch.tensor([[3.0, -4.0]])
    assert ops.cosine_terms(x, torch.tensor([0.0, 2.0**-101])).tolist() == [[0.0, 0.0, 25.0]] * 2


def test_no_candidate_gives_no_row() -> None:
    assert ops.cosine_terms(torch.ones(2, 3), torch.ones(0)).shape == (0, 3)


# ---- absmax ----------------------------------------------------------------------------------------------------------


@by_shape
@by_layout
def test_absmax_is_the_largest_magnitude(oracle: Any, shape: tuple[int, ...], layout: str) -> None:
    x = oracle.laid_out(wild(shape), layout)
    assert ops.absmax(x).shape == (1,) * x.dim()
    assert ops.absmax(x).item() == max(abs(value) for column in columns(x) for value in column)
    assert ops.absmax(x, 1).flatten().tolist() == [max(map(abs, column)) for column in columns(x)]
    assert ops.absmax(x, 0).flatten().tolist() == [max(map(abs, image.flatten().tolist())) for image in x]
    assert ops.absmax(x, 1).shape == (1, shape[1], *[1] * (len(shape) - 2))


@pytest.mark.parametrize("position", [0, 31, 32, 5000, 39_999])
def test_nan_propagates_through_absmax_from_anywhere(position: int) -> None:
    x = torch.full((1, 4, 100, 100), math.inf)
    x.view(-1)[position] = math.nan
    assert math.isnan(ops.absmax(x).item())
    assert [math.isnan(v) for v in ops.absmax(x, 1).flatten().tolist()] == [c == position // 10_000 for c in range(4)]
    assert math.isnan(ops.moments(x)[0].flatten()[position // 10_000].item())
    assert math.isnan(ops.quantize(x, torch.ones(1, 1, 1, 1))[3].item())


def test_absmax_of_a_vector() -> None:
    x = torch.tensor([1.0, -3.0, 2.0])
    assert ops.absmax(x).tolist() == [3.0]
    assert ops.absmax(x, 0).tolist() == [1.0, 3.0, 2.0]


# ---- what must not matter --------------------------------------------------------------------------------------------


def everything(x: Tensor, values: Tensor) -> list[list[float]]:
    one = torch.full((1,) * x.dim(), 0.37)
    results = [*ops.moments(x), ops.tail_count(x, one), ops.dot_terms(x, values, one), ops.absmax(x), ops.absmax(x, 0)]
    results += [ops.cosine_terms(x, torch.tensor([0.5, 0.7])), ops.cosine_slope_terms(x, torch.tensor(0.7))]
    clips = torch.linspace(0.1, 3.0, 10 * x.shape[1]).reshape(10, x.shape[1])
    results += [ops.channel_cosine_terms(x, clips, stochastic) for stochastic in (False, True)]
    return [result.flatten().tolist() for result in results]


@pytest.mark.parametrize("shape", [(65, 3), (3, 7, 33), (4, 33, 31, 17), (2, 5, 7, 9, 11)], ids=str)
@by_layout
def test_layouts_and_threads_change_no_bit(oracle: Any, shape: tuple[int, ...], layout: str, restore_threads: None) -> None:
    x, values = oracle.laid_out(wild(shape), layout), oracle.laid_out(oracle.operand(shape), layout)
    torch.set_num_threads(1)
    expected = everything(x.contiguous(), values.contiguous())
    assert everything(x, values) == expected
    torch.set_num_threads(2)
    assert everything(x, values) == expected


# ---- empty tensors ---------------------------------------------------------------------------------------------------

EMPTY = pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4, 4), (2, 3, 0, 4), (2, 0, 4, 4)], ids=str)


@EMPTY
def test_moments_of_an_empty_tensor_are_zero(shape: tuple[int, ...]) -> None:
    for result in ops.moments(torch.zeros(shape)):
        assert result.shape == (1, shape[1], *[1] * (len(shape) - 2))
        assert result.flatten().tolist() == [0.0] * shape[1]


@EMPTY
def test_sums_over_an_empty_tensor_are_zero(shape: tuple[int, ...]) -> None:
    x, one = torch.zeros(shape), torch.ones((1,) * len(shape))
    assert ops.dot_terms(x, x.to(torch.int8), one).tolist() == [0.0] * 3
    assert ops.cosine_terms(x, torch.ones(2)).tolist() == [[0.0] * 3] * 2
    assert ops.channel_cosine_terms(x, torch.ones(2, shape[1])).tolist() == [[[0.0] * shape[1]] * 3] * 2
    assert ops.cosine_slope_terms(x, torch.tensor(1.0)).tolist() == [0.0] * 5


@EMPTY
def test_absmax_and_tail_count_of_an_empty_tensor_are_zero(shape: tuple[int, ...]) -> None:
    x, one = torch.zeros(shape), torch.ones((1,) * len(shape))
    assert ops.absmax(x).flatten().tolist() == [0.0]
    assert ops.absmax(x, 1).flatten().tolist() == [0.0] * shape[1]
    assert ops.tail_count(x, one).flatten().tolist() == [0] * shape[1]


def test_the_sum_over_no_channels_is_zero() -> None:
    assert ops.sum_channels(torch.zeros(1, 0, 1, 1, dtype=torch.float64)).tolist() == [[[[0.0]]]]
