# SPDX-License-Identifier: Apache-2.0
"""Proves that the three int8 products are exact: every bit equals an int64 oracle that shares no code with src.

Sizes are those that break kernels (around 16 and 32, one of everything, deep, shallow, narrow); operands include full
amplitude of both signs; layouts include every kind of stride. The oracle is in tests/oracles/products.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from byteback import ops

PATTERNS = ["random", "all_plus_127", "all_minus_127", "alternating", "one_hot"]
LAYOUTS = ["contiguous", "channels_last", "permuted", "sliced", "expanded"]

# id: (input size, weight size, stride, padding, dilation, groups)
CONVOLUTIONS: dict[str, tuple[Any, ...]] = {
    "one_of_everything": ([1, 1, 1, 1], [1, 1, 1, 1], [1, 1], [0, 0], [1, 1], 1),
    "one_pixel_image_padded": ([2, 3, 1, 1], [4, 3, 3, 3], [1, 1], [1, 1], [1, 1], 1),
    "pointwise": ([2, 17, 6, 5], [15, 17, 1, 1], [1, 1], [0, 0], [1, 1], 1),
    "pointwise_strided": ([2, 9, 7, 8], [10, 9, 1, 1], [2, 2], [0, 0], [1, 1], 1),
    "three_by_three": ([2, 5, 8, 7], [6, 5, 3, 3], [1, 1], [1, 1], [1, 1], 1),
    "strided_with_leftover_pixels": ([2, 4, 10, 9], [5, 4, 3, 3], [2, 3], [0, 1], [1, 1], 1),
    "stride_beyond_the_kernel": ([2, 3, 10, 10], [4, 3, 2, 2], [4, 5], [0, 0], [1, 1], 1),
    "padding_beyond_the_kernel": ([1, 2, 3, 3], [3, 2, 2, 2], [1, 1], [3, 2], [1, 1], 1),
    "dilated": ([2, 3, 9, 10], [4, 3, 3, 3], [1, 1], [2, 1], [2, 3], 1),
    "dilated_and_strided": ([2, 4, 15, 16], [4, 4, 3, 2], [2, 3], [3, 2], [3, 2], 1),
    "two_groups": ([2, 6, 6, 6], [8, 3, 3, 3], [1, 1], [1, 1], [1, 1], 2),
    "three_groups_strided_dilated": ([2, 9, 9, 9], [6, 3, 3, 3], [2, 1], [1, 2], [2, 2], 3),
    "depthwise": ([2, 8, 7, 7], [8, 1, 3, 3], [1, 1], [1, 1], [1, 1], 8),
    "depthwise_strided": ([2, 17, 8, 8], [17, 1, 5, 5], [2, 2], [2, 2], [1, 1], 17),
    "depthwise_with_multiplier": ([1, 5, 6, 6], [15, 1, 3, 3], [1, 1], [0, 0], [2, 2], 5),
    "rectangular_kernel": ([2, 3, 7, 12], [4, 3, 1, 7], [1, 2], [0, 3], [1, 1], 1),
    "kernel_as_large_as_the_image": ([3, 4, 5, 6], [7, 4, 5, 6], [1, 1], [0, 0], [1, 1], 1),
    "narrow_image": ([2, 3, 33, 1], [4, 3, 3, 1], [1, 1], [1, 0], [1, 1], 1),
    "deep_and_tiny": ([1, 300, 3, 3], [2, 300, 3, 3], [1, 1], [1, 1], [1, 1], 1),
    "many_filters": ([1, 2, 3, 3], [300, 2, 3, 3], [1, 1], [1, 1], [1, 1], 1),
    "deep_groups": ([1, 260, 3, 3], [4, 130, 3, 3], [1, 1], [1, 1], [1, 1], 2),
    "large_map": ([2, 2, 33, 32], [3, 2, 3, 3], [1, 1], [1, 1], [1, 1], 1),
    "one_dimension": ([2, 5, 17], [4, 5, 3], [1], [1], [1], 1),
    "one_dimension_strided_dilated_grouped": ([3, 6, 33], [4, 3, 5], [3], [4], [2], 2),
    "one_dimension_depthwise": ([2, 7, 10], [7, 1, 3], [1], [2], [2], 7),
    "one_dimension_deep": ([1, 600, 5], [3, 600, 2], [1], [0], [1], 1),
    "three_dimensions": ([2, 3, 4, 5, 6], [4, 3, 3, 3, 3], [1, 1, 1], [1, 1, 1], [1, 1, 1], 1),
    "clips_of_whole_tiles": ([2, 5, 4, 8, 8], [6, 5, 3, 3, 3], [1, 1, 1], [1, 1, 1], [1, 1, 1], 1),
    "one_frame_padded_in_time": ([3, 17, 1, 7, 12], [20, 17, 3, 3, 3], [1, 1, 1], [1, 1, 1], [1, 1, 1], 1),
    "clips_without_padding": ([2, 3, 6, 9, 10], [7, 3, 3, 3, 3], [1, 1, 1], [0, 0, 0], [1, 1, 1], 1),
    "time_padded_beyond_the_kernel": ([1, 4, 2, 8, 7], [5, 4, 2, 3, 3], [1, 1, 1], [3, 2, 1], [1, 1, 1], 1),
    "deep_clips": ([1, 160, 2, 8, 8], [3, 160, 3, 3, 3], [1, 1, 1], [1, 1, 1], [1, 1, 1], 1),
    "clips_strided_in_time": ([2, 5, 6, 8, 8], [6, 5, 3, 3, 3], [2, 1, 1], [1, 1, 1], [1, 1, 1], 1),
    "three_dimensions_mixed": ([1, 4, 7, 6, 5], [6, 2, 3, 2, 1], [2, 1, 3], [2, 1, 0], [2, 3, 1], 2),
    "three_dimensions_depthwise": ([2, 3, 4, 4, 4], [3, 1, 2, 2, 2], [1, 1, 1], [0, 1, 0], [1, 1, 2], 3),
}
by_name = pytest.mark.parametrize("name", list(CONVOLUTIONS))
SOME = ["three_by_three", "dilated_and_strided", "two_groups", "depthwise", "one_dimension", "three_dimensions_mixed"]


@by_name
@pytest.mark.parametrize("pattern", PATTERNS)
def test_three_products_equal_the_integer_oracle(oracle: Any, name: str, pattern: str) -> None:
    input_size, weight_size, *geometry = CONVOLUTIONS[name]
    oracle.assert_products(*oracle.triple(input_size, weight_size, geometry, [pattern] * 3), geometry)


@pytest.mark.parametrize("patterns", list(itertools.permutations(["all_plus_127", "all_minus_127", "one_hot"])))
def test_operands_of_mixed_patterns_equal_the_integer_oracle(oracle: Any, patterns: tuple[str, ...]) -> None:
    input_size, weight_size, *geometry = CONVOLUTIONS["strided_with_leftover_pixels"]
    oracle.assert_products(*oracle.triple(input_size, weight_size, geometry, patterns), geometry)


@pytest.mark.parametrize("channels", [*range(1, 11), 15, 16, 17, 31, 32, 33])
def test_every_adversarial_channel_count_is_exact(oracle: Any, channels: int) -> None:
    geometry = ([1, 1], [1, 1], [1, 1], 1)
    x, w, g = oracle.triple([2, channels, 4, 5], [34 - channels, channels, 3, 3], geometry, ["random"] * 3)
    oracle.assert_products(x, w, g, geometry)


@pytest.mark.parametrize("size", [*range(1, 11), 15, 16, 17, 31, 32, 33])
def test_every_adversarial_image_size_is_exact(oracle: Any, size: int) -> None:
    geometry = ([2, 1], [1, 2], [1, 2], 1)
    x, w, g = oracle.triple([2, 3, size, 34 - size], [4, 3, 3, 2], geometry, ["random"] * 3)
    oracle.assert_products(x, w, g, geometry)


@pytest.mark.parametrize("batch", [*range(1, 11), 15, 16, 17, 31, 32, 33])
def test_every_adversarial_batch_is_exact(oracle: Any, batch: int) -> None:
    geometry = ([1, 1], [0, 1], [1, 1], 2)
    x, w, g = oracle.triple([batch, 4, 3, 5], [6, 2, 2, 3], geometry, ["random"] * 3)
    oracle.assert_products(x, w, g, geometry)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("layouts", [(a, b, c) for a in LAYOUTS for b, c in [(a, a), ("contiguous", "permuted")]])
def test_no_layout_changes_the_result(oracle: Any, name: str, layouts: tuple[str, str, str]) -> None:
    input_size, weight_size, *geometry = CONVOLUTIONS[name]
    operands = oracle.triple(input_size, weight_size, geometry, ["random"] * 3)
    x, w, g = (oracle.laid_out(operand, layout) for operand, layout in zip(operands, layouts, strict=True))
    oracle.assert_products(x, w, g, geometry)


def test_mixed_layouts_include_tensors_that_are_not_dense(oracle: Any) -> None:
    x = oracle.operand([2, 3, 4, 5])
    assert not oracle.laid_out(x, "sliced").is_contiguous()
    assert not oracle.laid_out(x, "permuted").is_contiguous(memory_format=torch.channels_last)
    assert oracle.laid_out(x, "expanded").stride(0) == 0


@pytest.mark.parametrize("name", SOME)
def test_an_empty_batch_gives_an_empty_output_and_a_zero_weight_gradient(oracle: Any, name: str) -> None:
    input_size, weight_size, *geometry = CONVOLUTIONS[name]
    oracle.assert_products(*oracle.triple([0, *input_size[1:]], weight_size, geometry, ["random"] * 3), geometry)


def test_an_input_without_channels_gives_zeros_of_the_output_shape(oracle: Any) -> None:
    geometry = ([1, 1], [1, 1], [1, 1], 1)
    x, w, g = oracle.triple([2, 0, 4, 4], [3, 0, 3, 3], geometry, ["random"] * 3)
    oracle.assert_products(x, w, g, geometry)


@pytest.mark.parametrize("size", [1, 33])
@pytest.mark.parametrize("depth", [1, 2, 15, 16, 17, 1040, 1041])
def test_matmul_equals_the_integer_oracle(oracle: Any, size: int, depth: int) -> None:
    a, b, one = oracle.operand([size, depth]), oracle.operand([depth, 34 - size], seed=1), torch.ones(1, 1)
    acc = oracle.ints(a) @ oracle.ints(b)
    oracle.assert_bits(ops.matmul_int8(a, one, b, one), acc)
    oracle.assert_bits(ops.matmul_int8(a.t().contiguous().t(), one, oracle.laid_out(b, "sliced"), one), acc)


def test_matmul_without_terms_is_zero(oracle: Any) -> None:
    a, b, one = oracle.operand([2, 0]), oracle.operand([0, 3]), torch.ones(1, 1)
    oracle.assert_bits(ops.matmul_int8(a, one, b, one), np.zeros((2, 3), dtype=np.int64))


# ---- scales ----------------------------------------------------------------------------------------------------------


def scales(shape: list[int], axis: int | None, seed: int) -> torch.Tensor:
    """One positive scale for all (axis None) or one for each index of `axis`; no round numbers."""
    sizes = [n if dim == axis else 1 for dim, n in enumerate(shape)]
    return torch.rand(sizes, generator=torch.Generator().manual_seed(seed)) * 0.01 + 1e-4


def spread(scale: torch.Tensor, index: int, axis: int | None) -> np.float32:
    """The scale that belongs to one index of the axis."""
    flat = scale.numpy().reshape(-1)
    return flat[0 if axis is None else index]


GROUPED = pytest.mark.parametrize("groups", [1, 2, 6], ids=lambda groups: f"{groups}_groups")
RANKED = pytest.mark.parametrize("rank", [3, 4, 5], ids=lambda rank: f"{rank - 2}d")
AXES = pytest.mark.parametrize("first_varies", [False, True], ids=["first_per_tensor", "first_per_index"])
OTHER = pytest.mark.parametrize("second_varies", [False, True], ids=["second_per_tensor", "second_per_index"])


def scaled_case(oracle: Any, rank: int, groups: int) -> tuple[Any, ...]:
    spatial = rank - 2
    geometry = ([1] * spatial, [1] * spatial, [1] * spatial, groups)
    sizes = [3, 6, *[4, 5, 3][:spatial]], [12, 6 // groups, *[3, 2, 2][:spatial]]
    return (*oracle.triple(*sizes, geometry, ["random"] * 3), geometry)


@RANKED
@GROUPED
@AXES
@OTHER
def test_output_scales_vary_along_n_of_input_and_k_of_weight(
    oracle: Any, rank: int, groups: int, first_varies: bool, second_varies: bool
) -> None:
    x, w, _, geometry = scaled_case(oracle, rank, groups)
    n_axis, k_axis = (0 if first_varies else None), (0 if second_varies else None)
    xs, ws = scales(list(x.shape), n_axis, 1), scales(list(w.shape), k_axis, 2)
    factor = np.array([[spread(xs, n, n_axis) * spread(ws, k, k_axis) for k in range(12)] for n in range(3)])
    assert factor.dtype == np.float32
    result = ops.conv_int8(x, xs, w, ws, *geometry)
    oracle.assert_bits(result, oracle.conv(x, w, geometry), factor.reshape(3, 12, *[1] * (rank - 2)))


@RANKED
@GROUPED
@AXES
@OTHER
def test_grad_input_scales_vary_along_n_of_grad_output_and_c_of_weight(
    oracle: Any, rank: int, groups: int, first_varies: bool, second_varies: bool
) -> None:
    x, w, g, geometry = scaled_case(oracle, rank, groups)
    n_axis, c_axis = (0 if first_varies else None), (1 if second_varies else None)
    gs, ws = scales(list(g.shape), n_axis, 3), scales(list(w.shape), c_axis, 4)
    # Channel c of the input is channel c mod (C / groups) of its group's weights.
    rows = [[spread(gs, n, n_axis) * spread(ws, c % (6 // groups), c_axis) for c in range(6)] for n in range(3)]
    factor = np.array(rows).reshape(3, 6, *[1] * (rank - 2))
    result = ops.conv_int8_grad_input(g, gs, w, ws, list(x.shape), *geometry)
    oracle.assert_bits(result, oracle.grad_input(g, w, x.shape, geometry), factor)


@RANKED
@GROUPED
@AXES
@OTHER
def test_grad_weight_scales_vary_along_k_of_grad_output_and_c_of_input(
    oracle: Any, rank: int, groups: int, first_varies: bool, second_varies: bool
) -> None:
    x, w, g, geometry = scaled_case(oracle, rank, groups)
    k_axis, c_axis = (1 if first_varies else None), (1 if second_varies else None)
    gs, xs = scales(list(g.shape), k_axis, 5), scales(list(x.shape), c_axis, 6)
    # Filter k belongs to group k // (K / groups); its weight c reads input channel group * (C / groups) + c.
    per_group = 6 // groups
    rows = [
        [spread(gs, k, k_axis) * spread(xs, k // (12 // groups) * per_group + c, c_axis) for c in range(per_group)]
        for k in range(12)
    ]
    factor = np.array(rows).reshape(12, per_group, *[1] * (rank - 2))
    result = ops.conv_int8_grad_weight(g, gs, x, xs, list(w.shape), *geometry)
    oracle.assert_bits(result, oracle.grad_weight(g, x, w.shape, geometry), factor)


@AXES
@OTHER
def test_matmul_scales_vary_along_rows_of_a_and_columns_of_b(oracle: Any, first_varies: bool, second_varies: bool) -> None:
    a, b = oracle.operand([5, 40]), oracle.operand([40, 7], seed=1)
    rows, columns = (0 if first_varies else None), (1 if second_varies else None)
    a_scale, b_scale = scales([5, 40], rows, 7), scales([40, 7], columns, 8)
    factor = np.array([[spread(a_scale, i, rows) * spread(b_scale, j, columns) for j in range(7)] for i in range(5)])
    oracle.assert_bits(ops.matmul_int8(a, a_scale, b, b_scale), oracle.ints(a) @ oracle.ints(b), factor)


def test_scales_multiply_each_other_first_and_the_sum_afterwards(oracle: Any) -> None:
    # 7 · (0.1 · 0.7) and (7 · 0.1) · 0.7 differ in float32; the contract's expression is the first.
    x, w = torch.full((1, 1, 1), 7, dtype=torch.int8), torch.ones(1, 1, 1, dtype=torch.int8)
    xs, ws = torch.full((1, 1, 1), 0.1), torch.full((1, 1, 1), 0.7)
    acc, a, b = np.float32(7), np.float32(0.1), np.float32(0.7)
    assert acc * (a * b) != (acc * a) * b
    assert ops.conv_int8(x, xs, w, ws, [1], [0], [1], 1).item() == acc * (a * b)
