# SPDX-License-Identifier: Apache-2.0
"""Proves the three int8 products on convolutions that nobody thought of: hypothesis draws them, int64 decides.

Each example draws rank, sizes, stride, padding, dilation, groups, operand patterns and layouts.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from byteback import ops

PATTERNS = ["random", "random", "all_plus_127", "all_minus_127", "alternating", "one_hot"]
LAYOUTS = ["contiguous", "channels_last", "permuted", "sliced", "expanded"]
Drawn = tuple[list[int], list[int], tuple[list[int], list[int], list[int], int], list[str], list[str]]
drawing = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def convolutions(draw: st.DrawFn) -> Drawn:
    """Input size, weight size, geometry, three patterns, three layouts; the kernel always fits."""
    spatial = draw(st.sampled_from([1, 2, 2, 3]))
    groups = draw(st.sampled_from([1, 1, 2, 3, 5]))
    per_group, filters = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    kernel = [draw(st.integers(1, 4)) for _ in range(spatial)]
    dilation = [draw(st.integers(1, 3)) for _ in range(spatial)]
    stride = [draw(st.integers(1, 4)) for _ in range(spatial)]
    if spatial == 3 and draw(st.booleans()):  # what Winograd serves: 3x3 in space, any number of time taps
        groups, kernel, dilation, stride = 1, [kernel[0], 3, 3], [1] * 3, [1] * 3
    padding = [draw(st.integers(0, 4)) for _ in range(spatial)]
    longest = {1: 40, 2: 14, 3: 7}[spatial]
    size = []
    for r, d, p in zip(kernel, dilation, padding, strict=True):
        least = max(d * (r - 1) + 1 - 2 * p, 1)
        size.append(draw(st.integers(least, max(least, longest))))
    patterns = [draw(st.sampled_from(PATTERNS)) for _ in range(3)]
    layouts = [draw(st.sampled_from(LAYOUTS)) for _ in range(3)]
    batch = draw(st.integers(1, 4))
    geometry = (stride, padding, dilation, groups)
    return [batch, per_group * groups, *size], [filters * groups, per_group, *kernel], geometry, patterns, layouts


def built(oracle: Any, drawn: Drawn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any, torch.Tensor]:
    input_size, weight_size, geometry, patterns, layouts = drawn
    operands = oracle.triple(input_size, weight_size, geometry, patterns)
    x, w, g = (oracle.laid_out(operand, layout) for operand, layout in zip(operands, layouts, strict=True))
    return x, w, g, geometry, torch.ones((1,) * x.dim())


@drawing
@given(drawn=convolutions())
def test_any_drawn_output_equals_the_integer_oracle(oracle: Any, drawn: Drawn) -> None:
    x, w, _, geometry, one = built(oracle, drawn)
    oracle.assert_bits(ops.conv_int8(x, one, w, one, *geometry), oracle.conv(x, w, geometry))


@drawing
@given(drawn=convolutions())
def test_any_drawn_grad_input_equals_the_integer_oracle(oracle: Any, drawn: Drawn) -> None:
    x, w, g, geometry, one = built(oracle, drawn)
    result = ops.conv_int8_grad_input(g, one, w, one, list(x.shape), *geometry)
    oracle.assert_bits(result, oracle.grad_input(g, w, x.shape, geometry))


@drawing
@given(drawn=convolutions())
def test_any_drawn_grad_weight_equals_the_integer_oracle(oracle: Any, drawn: Drawn) -> None:
    x, w, g, geometry, one = built(oracle, drawn)
    result = ops.conv_int8_grad_weight(g, one, x, one, list(w.shape), *geometry)
    oracle.assert_bits(result, oracle.grad_weight(g, x, w.shape, geometry))
