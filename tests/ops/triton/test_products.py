# SPDX-License-Identifier: Apache-2.0
"""The integer products of the GPU's backend in Triton's interpreter: equal to the reference, bit by bit."""

from __future__ import annotations

import pytest
import torch

from byteback.ops.backends import reference, triton
from byteback.ops.backends.triton import gathered, tiles
from byteback.ops.backends.triton.products import _sliced
from byteback.ops.contract.limits import MAX_INT32_DEPTH
from byteback.ops.types import ProductCall
from gpu_check.against_reference import PRODUCTS, Shape, product, sum_of_slices
from same_bits import assert_same_bits, integers

ONE = [1, 1]
CASES = {
    "3x3": Shape((3, 5, 7, 6), (4, 5, 3, 3), ONE, ONE, ONE, 1, False),
    "stride and a deep batch": Shape((18, 20, 5, 4), (33, 20, 3, 3), [2, 2], ONE, ONE),
    "stride 3, dilation, groups": Shape((2, 6, 9, 8), (4, 3, 3, 2), [2, 3], [1, 0], [2, 1], 2),
    "1x1, stride 2": Shape((17, 64, 4, 4), (64, 64, 1, 1), [2, 2], [0, 0], ONE),
    "one axis": Shape((18, 8, 5), (8, 4, 3), [2], [1], [1], 2, False),
    "three axes": Shape((2, 4, 3, 4, 4), (6, 4, 2, 2, 2), [1, 2, 2], [1, 1, 0], [1, 1, 1]),
    "depthwise": Shape((2, 9, 7, 7), (9, 1, 3, 3), [2, 2], ONE, ONE, 9),
    "depthwise, three axes": Shape((2, 3, 3, 5, 4), (3, 1, 2, 3, 2), [2, 2, 1], [1, 1, 1], [1, 1, 2], 3, False),
}


SLOW = ("3x3", "three axes", "depthwise, three axes", "stride 3, dilation, groups")  # many taps take the interpreter seconds


@pytest.mark.parametrize(
    ("case", "varies"),
    [*(pytest.param(case, True, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES), ("3x3", False)],
)
def test_products_equal_the_reference(case: str, varies: bool) -> None:
    for kind in PRODUCTS:
        product(kind, CASES[case], varies)


@pytest.mark.parametrize(
    ("case", "bytes_"),
    [
        ("stride 3, dilation, groups", 3000),
        *(pytest.param(case, 2**27, marks=pytest.mark.slow) for case in CASES),
        pytest.param("stride and a deep batch", 3000, marks=pytest.mark.slow),
    ],
)
def test_products_of_gathered_rows_equal_the_reference(case: str, bytes_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Turing runs, for all images at once and in parts."""
    monkeypatch.setattr(tiles, "multiplies_int8", lambda _: False)
    monkeypatch.setattr(gathered, "MOST_BYTES", bytes_)
    for kind in PRODUCTS:
        product(kind, CASES[case], True)
    test_matmul_equals_the_reference()


def test_the_sum_of_slices_is_wider_than_int32() -> None:
    sum_of_slices()


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
