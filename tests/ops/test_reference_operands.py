# SPDX-License-Identifier: Apache-2.0
"""The reference multiplies integers by PyTorch's float convolution: operands and zeros that would make it wrong.

A float product 0 · -3 is -0.0, but the contract is float(integer sum) · scale, and no integer is -0. And PyTorch's grouped
convolution of a channels_last input misreads a weight whose axis of size 1 has an unusual stride.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from byteback import ops
from byteback.ops.backends import paths

PATHS = pytest.mark.parametrize("path", paths.available())


@PATHS
@pytest.mark.parametrize(
    ("input_size", "weight_size", "groups"),
    [
        ((1, 1, 16, 16), (16, 1, 1, 1), 1),
        ((1, 1, 4), (16, 1, 1), 1),
        ((2, 4, 5, 5), (4, 1, 1, 1), 4),
        ((1, 1, 2, 3, 4), (2, 1, 1, 1, 1), 1),
    ],
    ids=str,
)
def test_sums_of_one_product_are_never_negative_zero(
    oracle: Any, path: str, input_size: tuple[int, ...], weight_size: tuple[int, ...], groups: int
) -> None:
    rank = len(input_size) - 2
    geometry = ([1] * rank, [0] * rank, [1] * rank, groups)
    x, w, g = oracle.triple(input_size, weight_size, geometry, ["random"] * 3)
    with paths.path(path):
        oracle.assert_products(x % 2, -w.abs(), -g.abs(), geometry)
        oracle.assert_products(-x.abs(), w % 2, g % 2, geometry)


@PATHS
def test_a_matrix_product_is_never_negative_zero(oracle: Any, path: str) -> None:
    one = torch.ones(1, 1)
    for rows, depth, columns in ((1, 1, 1), (5, 1, 7), (3, 2, 33), (33, 1041, 2)):
        a, b = oracle.operand((rows, depth)) % 2, -oracle.operand((depth, columns), seed=1).abs()
        with paths.path(path):
            oracle.assert_bits(ops.matmul_int8(a, one, b, one), oracle.ints(a) @ oracle.ints(b))
            oracle.assert_bits(ops.matmul_int8(0 * a, one, b, one), 0 * (oracle.ints(a) @ oracle.ints(b)))


# Shape and strides of an input, a weight and the geometry that PyTorch 2.13 computes wrongly.
MISREAD = [
    ((1, 32, 9, 4), (1152, 1, 128, 32), (8, 8, 1, 3), (24, 1, 8, 8), ([2, 1], [0, 0], [1, 1], 4)),
    ((2, 12, 9, 4), (432, 1, 48, 12), (32, 3, 3, 1), (9, 1, 3, 1), ([2, 2], [0, 0], [1, 1], 4)),
    ((2, 16, 9, 9, 9), (11664, 1, 1296, 144, 16), (4, 8, 1, 1, 3), (24, 1, 8, 8, 8), ([2, 1, 1], [0, 0, 0], [1, 1, 1], 2)),
]


def laid(values: Tensor, strides: tuple[int, ...]) -> Tensor:
    reach = sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True))
    return torch.zeros(reach + 1, dtype=values.dtype).as_strided(values.shape, strides).copy_(values)


@PATHS
@pytest.mark.parametrize("case", MISREAD, ids=str)
def test_strides_of_axes_of_size_one_do_not_count(oracle: Any, path: str, case: Any) -> None:
    input_size, input_strides, weight_size, weight_strides, geometry = case
    x, w, g = oracle.triple(input_size, weight_size, geometry, ["random"] * 3)
    with paths.path(path):
        oracle.assert_products(laid(x, input_strides), laid(w, weight_strides), g, geometry)


@pytest.mark.parametrize("seed", range(40))
def test_drawn_layouts_equal_the_integer_oracle(oracle: Any, seed: int) -> None:
    """Weights cut out of larger ones or permuted, as pruning and slicing leave them."""
    draw = random.Random(seed)
    rank, groups = draw.choice([1, 2, 2, 3]), draw.choice([2, 4, 8])
    per_group, filters = draw.choice([1, 3, 8]), draw.choice([1, 2, 8])
    kernel = [draw.choice([1, 1, 3]) for _ in range(rank)]
    size = [max(draw.choice([1, 4, 9]), reach) for reach in kernel]
    geometry = ([draw.choice([1, 2]) for _ in kernel], [0] * rank, [1] * rank, groups)
    input_size, weight_size = (draw.choice([1, 2]), per_group * groups, *size), (filters * groups, per_group, *kernel)
    operands = [drawn(draw, t) for t in oracle.triple(input_size, weight_size, geometry, ["random"] * 3)]
    with paths.path("reference"):
        oracle.assert_products(*operands, geometry)


def drawn(draw: random.Random, x: Tensor) -> Tensor:
    """The same values, channels last, cut out of something larger, or with any strides along axes of size 1."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    how = draw.choice(["last", "cut", "odd"])
    wide = torch.zeros([size + draw.choice([0, 2]) * (how == "cut") for size in x.shape], dtype=x.dtype)
    if x.dim() in formats:
        wide = wide.contiguous(memory_format=formats[x.dim()])
    x = wide[tuple(slice(size) for size in x.shape)].copy_(x)
    if how == "odd":
        strides = tuple(draw.choice([1, 3, 8, 100]) if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))
        return laid(x, strides)
    return x
