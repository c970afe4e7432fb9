# SPDX-License-Identifier: Apache-2.0
"""Proves that sums are exact however deep they are: at, just past and far past the bounds of float32 and int32.

1040 products of full amplitude are the most that float32 adds exactly; 133 144 the most that an int32 holds. A sum of
odd total exposes a lost unit: 127·127 is odd, so an odd number of terms has an odd sum, which no wide float can fake.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from byteback import ops
from byteback.ops.contract.limits import MAX_FLOAT32_DEPTH, MAX_INT32_DEPTH

FLOAT32_DEPTHS = [1039, 1040, 1041, 2080, 2081]
INT32_DEPTHS = [133_144, 133_145, 300_001]
SIGNS = pytest.mark.parametrize("sign", [1, -1], ids=["all_positive", "all_negative"])


def full(*shape: int, value: int = 127) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.int8)


def ones(rank: int) -> torch.Tensor:
    return torch.ones((1,) * rank)


def expected(depth: int, sign: int) -> float:
    """sign · depth · 127², rounded once to float32."""
    return torch.tensor(sign * depth * 127 * 127, dtype=torch.int64).to(torch.float32).item()


def test_the_bounds_are_those_of_full_amplitude() -> None:
    assert MAX_FLOAT32_DEPTH == 1040 and 1040 * 127**2 <= 2**24 < 1041 * 127**2
    assert MAX_INT32_DEPTH == 133_144 and 133_144 * 127**2 < 2**31 <= 133_145 * 127**2


@SIGNS
@pytest.mark.parametrize("depth", [*FLOAT32_DEPTHS, *INT32_DEPTHS])
def test_output_is_exact_at_this_depth(depth: int, sign: int) -> None:
    x, w = full(1, depth, 2), full(1, depth, 1, value=127 * sign)
    assert ops.conv_int8(x, ones(3), w, ones(3), [1], [0], [1], 1).flatten().tolist() == [expected(depth, sign)] * 2


@SIGNS
@pytest.mark.parametrize("depth", [*FLOAT32_DEPTHS, *INT32_DEPTHS])
def test_grad_input_is_exact_at_this_depth(depth: int, sign: int) -> None:
    g, w = full(1, depth, 2), full(depth, 1, 1, value=127 * sign)
    result = ops.conv_int8_grad_input(g, ones(3), w, ones(3), [1, 1, 2], [1], [0], [1], 1)
    assert result.flatten().tolist() == [expected(depth, sign)] * 2


@SIGNS
@pytest.mark.parametrize("depth", [*FLOAT32_DEPTHS, *INT32_DEPTHS])
def test_grad_weight_over_a_batch_is_exact_at_this_depth(depth: int, sign: int) -> None:
    g, x = full(depth, 1, 1, 1), full(depth, 1, 1, 1, value=127 * sign)
    result = ops.conv_int8_grad_weight(g, ones(4), x, ones(4), [1, 1, 1, 1], [1, 1], [0, 0], [1, 1], 1)
    assert result.item() == expected(depth, sign)


@SIGNS
@pytest.mark.parametrize("depth", [*FLOAT32_DEPTHS, *INT32_DEPTHS])
def test_grad_weight_over_one_long_image_is_exact_at_this_depth(depth: int, sign: int) -> None:
    g, x = full(1, 1, depth), full(1, 1, depth + 1, value=127 * sign)
    result = ops.conv_int8_grad_weight(g, ones(3), x, ones(3), [1, 1, 2], [1], [0], [1], 1)
    assert result.flatten().tolist() == [expected(depth, sign)] * 2


@SIGNS
@pytest.mark.parametrize("depth", [*FLOAT32_DEPTHS, *INT32_DEPTHS])
def test_matmul_is_exact_at_this_depth(depth: int, sign: int) -> None:
    result = ops.matmul_int8(full(1, depth), ones(2), full(depth, 2, value=127 * sign), ones(2))
    assert result.flatten().tolist() == [expected(depth, sign)] * 2


def test_grad_weight_of_batch_11_on_a_112_map_passes_the_int32_bound() -> None:
    # 11 · 110 · 110 = 133 100 for the 3x3 kernel without padding is within; with padding it is 11 · 112 · 112 = 137 984.
    g, x = full(11, 1, 112, 112), full(11, 1, 112, 112)
    result = ops.conv_int8_grad_weight(g, ones(4), x, ones(4), [1, 1, 3, 3], [1, 1], [1, 1], [1, 1], 1)
    corner, edge, centre = 11 * 111 * 111, 11 * 111 * 112, 11 * 112 * 112
    rows = [[corner, edge, corner], [edge, centre, edge], [corner, edge, corner]]
    assert result[0, 0].tolist() == [[expected(depth, 1) for depth in row] for row in rows]


@pytest.mark.parametrize("groups", [1, 2], ids=["one_group", "two_groups"])
@pytest.mark.parametrize("kernel", [(3, 3), (33, 32)], ids=["sliced_along_channels", "kernel_alone_beyond_float32"])
def test_deep_random_products_equal_the_integer_oracle(oracle: Any, groups: int, kernel: tuple[int, int]) -> None:
    per_group = 231 if kernel == (3, 3) else 2
    geometry = ([1, 1], [1, 1], [1, 1], groups)
    input_size, weight_size = [2, per_group * groups, 33, 32], [per_group * groups, per_group, *kernel]
    if kernel == (3, 3):
        input_size[2:] = [3, 2]
    x, w, g = oracle.triple(input_size, weight_size, geometry, ["random"] * 3)
    oracle.assert_products(x, w, g, geometry)


@pytest.mark.parametrize("pixels", [(26, 40), (3, 347), (1, 1041)], ids=lambda p: f"{p[0] * p[1]}_pixels")
def test_grad_weight_around_the_float32_bound_equals_the_integer_oracle(oracle: Any, pixels: tuple[int, int]) -> None:
    geometry = ([1, 1], [0, 0], [1, 1], 1)
    for pattern in ("random", "all_minus_127"):
        x, _, g = oracle.triple([3, 2, *pixels], [3, 2, 1, 1], geometry, [pattern] * 3)
        result = ops.conv_int8_grad_weight(g, ones(4), x, ones(4), [3, 2, 1, 1], *geometry)
        oracle.assert_bits(result, oracle.grad_weight(g, x, [3, 2, 1, 1], geometry))


def test_deep_sums_that_cancel_leave_exactly_the_last_term() -> None:
    # +127² and -127² in turn, then one more +1: any rounding on the way would show.
    depth = 133_145
    a = full(1, depth)
    b = (127 - 254 * (torch.arange(depth) % 2)).to(torch.int8).reshape(depth, 1)
    a[0, -1], b[-1, 0] = 1, 1
    assert ops.matmul_int8(a, ones(2), b, ones(2)).item() == 1.0
    result = ops.conv_int8_grad_weight(
        a.reshape(depth, 1, 1), ones(3), b.reshape(depth, 1, 1), ones(3), [1, 1, 1], [1], [0], [1], 1
    )
    assert result.item() == 1.0
    halves = torch.cat([full(1, 70_000), full(1, 70_000, value=-127), full(1, 1, value=1)], dim=1)
    assert ops.matmul_int8(halves, ones(2), full(140_001, 1), ones(2)).item() == 127.0


@pytest.mark.parametrize("depth", [1041, 2081, 4001, 133_145])
def test_a_deep_sum_is_rounded_to_float32_before_it_meets_the_scale(oracle: Any, depth: int) -> None:
    # float(acc) * scale rounds twice; a product in float64 would round once and differ for some of these scales.
    scale = torch.rand(1, 64, generator=torch.Generator().manual_seed(0))
    acc = oracle.ints(full(1, depth)) @ oracle.ints(full(depth, 64))
    once = (acc.astype(float) * scale.numpy().astype(float)).astype("float32")
    assert (once != acc.astype("float32") * scale.numpy()).any()
    oracle.assert_bits(ops.matmul_int8(full(1, depth), ones(2), full(depth, 64), scale), acc, scale.numpy())
    x, w = full(1, depth, 1), full(64, depth, 1)
    result = ops.conv_int8(x, ones(3), w, scale.reshape(64, 1, 1), [1], [0], [1], 1)
    oracle.assert_bits(result, acc.reshape(1, 64, 1), scale.numpy().reshape(1, 64, 1))
