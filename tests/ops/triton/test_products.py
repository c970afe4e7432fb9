# SPDX-License-Identifier: Apache-2.0
"""The integer products of the GPU's backend in Triton's interpreter: equal to the reference, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from byteback.ops.backends import reference, triton
from byteback.ops.backends.triton.products import _sliced
from byteback.ops.contract import layout
from byteback.ops.contract.limits import MAX_INT32_DEPTH
from byteback.ops.products import _output_size
from byteback.ops.types import ProductCall
from same_bits import assert_same_bits, integers

ONE_TWO = [1, 1], [1, 1], [1, 1]
CASES = {
    "3x3": ((3, 5, 7, 6), (4, 5, 3, 3), *ONE_TWO, 1, False),
    "stride and a deep batch": ((18, 20, 5, 4), (33, 20, 3, 3), [2, 2], [1, 1], [1, 1], 1, True),
    "stride 3, dilation, groups": ((2, 6, 9, 8), (4, 3, 3, 2), [2, 3], [1, 0], [2, 1], 2, True),
    "1x1, stride 2": ((17, 64, 4, 4), (64, 64, 1, 1), [2, 2], [0, 0], [1, 1], 1, True),
    "one axis": ((18, 8, 5), (8, 4, 3), [2], [1], [1], 2, False),
    "three axes": ((2, 4, 3, 4, 4), (6, 4, 2, 2, 2), [1, 2, 2], [1, 1, 0], [1, 1, 1], 1, True),
    "depthwise": ((2, 9, 7, 7), (9, 1, 3, 3), [2, 2], [1, 1], [1, 1], 9, True),
    "depthwise, three axes": ((2, 3, 3, 5, 4), (3, 1, 2, 3, 2), [2, 2, 1], [1, 1, 1], [1, 1, 2], 3, False),
}


SLOW = ("three axes", "depthwise, three axes", "stride 3, dilation, groups")  # so many taps take the interpreter seconds


@pytest.mark.parametrize(
    ("case", "varies"),
    [*(pytest.param(case, True, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES), ("3x3", False)],
)
def test_products_equal_the_reference(case: str, varies: bool) -> None:
    x_size, w_size, stride, padding, dilation, groups, last = CASES[case]
    draw = torch.Generator().manual_seed(1)
    geometry = (stride, padding, dilation, groups)
    y_size = tuple(_output_size("test", x_size, w_size, geometry))
    x, w, g = (layout.channels_last(t) if last else t for t in (integers(size, draw) for size in (x_size, w_size, y_size)))

    def scale(tensor: Tensor, axis: int) -> Tensor:
        return (
            torch.rand([size if varies and dim == axis else 1 for dim, size in enumerate(tensor.shape)], generator=draw) + 0.01
        )

    for kind, size, a, b, first, second in (
        ("output", y_size, x, w, 0, 0),
        ("grad_input", x_size, g, w, 0, 1),
        ("grad_weight", w_size, g, x, 1, 1),
    ):
        scales = scale(a, first), scale(b, second)
        strides = layout.empty_like_product(list(size), a, b).stride()
        call = ProductCall(kind, size, strides, a, b, geometry, not varies)
        call.plan = triton.product_plan(call, a, b)
        found = triton.product(call, a, scales[0], b, scales[1])
        assert_same_bits(found, reference.product(call, a, scales[0], b, scales[1]))
        assert found.stride() == strides


def test_matmul_equals_the_reference() -> None:
    draw = torch.Generator().manual_seed(2)
    a, b = integers((9, 37), draw), integers((37, 21), draw)
    scales = torch.rand(9, 1, generator=draw), torch.rand(1, 21, generator=draw)
    assert_same_bits(triton.matmul_int8(a, scales[0], b, scales[1]), reference.matmul_int8(a, scales[0], b, scales[1]))


@pytest.mark.parametrize("steps", [1, 7, 4096, 10**6, 10**8])
@pytest.mark.parametrize("terms", [1, 16])
def test_no_slice_of_grad_weight_is_longer_than_int32_may_hold(steps: int, terms: int) -> None:
    per, slices = _sliced(steps, 4, 3, 108, terms)
    assert per * terms <= MAX_INT32_DEPTH and per % 4 == 0
    assert per * (slices - 1) < steps <= per * slices


def test_a_sum_beyond_int32_is_left_to_the_reference() -> None:
    x, w, one = (
        integers((1, 133_145, 1, 1), torch.Generator()),
        torch.full((1, 133_145, 1, 1), 127, dtype=torch.int8),
        torch.ones(1, 1, 1, 1),
    )
    x.fill_(127)
    call = ProductCall("output", (1, 1, 1, 1), (1, 1, 1, 1), x, w, ([1, 1], [0, 0], [1, 1], 1), True)
    call.plan = triton.product_plan(call, x, w)
    assert triton.product(call, x, one, w, one).item() == float(torch.tensor(133_145 * 127 * 127).float())
