# SPDX-License-Identifier: Apache-2.0
"""Direct convolution on AVX-512 VNNI: the plan chooses it for these shapes, and it gives the reference's bits."""

from __future__ import annotations

import pytest
import torch

import byteback
from byteback import ops
from byteback.inspect.verify import Geometry
from byteback.ops.backends import paths

KERNEL = "avx512vnni/direct"
pytestmark = pytest.mark.skipif("avx512vnni" not in paths.available(), reason="needs AVX-512 VNNI")


def geometry(
    batch: int,
    channels: tuple[int, int],
    image: tuple[int, int],
    kernel: tuple[int, int],
    *,
    stride: int = 1,
    padding: tuple[int, int] | None = None,
    dilation: int = 1,
) -> Geometry:
    padding = padding or (kernel[0] // 2, kernel[1] // 2)
    return Geometry(batch, channels, 1, image, kernel, (stride,) * 2, padding, (dilation,) * 2)


CASES = {
    "groups of 4 pixels, one panel": geometry(2, (16, 16), (8, 8), (5, 5)),
    "groups of 4 pixels, two panels and a part": geometry(2, (48, 41), (12, 16), (5, 5)),
    "groups of 7 pixels": geometry(3, (18, 33), (7, 14), (1, 7)),
    "rows of 9": geometry(2, (20, 20), (9, 9), (7, 1)),
    "rows of 31": geometry(2, (33, 21), (5, 31), (3, 5)),
    "stride": geometry(2, (16, 32), (32, 32), (3, 3), stride=2),
    "stride, odd image": geometry(3, (6, 22), (17, 19), (3, 3), stride=2),
    "stride of 3": geometry(2, (5, 40), (30, 28), (7, 7), stride=3),
    "no padding": geometry(2, (24, 24), (13, 15), (4, 4), padding=(0, 0)),
    "more padding than kernel": geometry(2, (7, 9), (9, 9), (3, 3), padding=(5, 6), dilation=2),
    "dilation": geometry(1, (12, 17), (12, 12), (3, 3), padding=(4, 4), dilation=4),
    "one row": geometry(4, (9, 20), (1, 50), (1, 9)),
    "several bands": geometry(1, (40, 16), (64, 72), (5, 5)),
    "in place of Winograd": geometry(64, (32, 32), (18, 16), (3, 3)),
    "past the caches": geometry(2, (4, 32), (260, 272), (5, 5)),
}


@pytest.fixture(autouse=True)
def _threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("per_index", [False, True], ids=["one_scale", "a_scale_per_image_and_channel"])
@pytest.mark.parametrize("product", ["output", "grad_input"])
@pytest.mark.parametrize("name", CASES)
def test_direct_products_equal_the_reference(name: str, product: str, per_index: bool) -> None:
    case = CASES[name]
    n, (c, k) = case.batch, case.channels
    draw = torch.Generator().manual_seed(len(name))
    size = (n, c, *case.image) if product == "output" else (n, k, *case.out)
    a = torch.randint(-127, 128, size, generator=draw, dtype=torch.int8).contiguous(memory_format=torch.channels_last)
    w = torch.randint(-127, 128, (k, c, *case.kernel), generator=draw, dtype=torch.int8)
    a_scale = torch.rand((n if per_index else 1, 1, 1, 1), generator=draw) * 0.01
    w_scale = torch.rand(
        {"output": (k, 1, 1, 1), "grad_input": (1, c, 1, 1)}[product] if per_index else (1,) * 4, generator=draw
    )
    rest = (case.stride, case.padding, case.dilation, 1)

    def multiply() -> torch.Tensor:
        if product == "output":
            return ops.conv_int8(a, a_scale, w, w_scale, *rest)
        return ops.conv_int8_grad_input(a, a_scale, w, w_scale, [n, c, *case.image], *rest)

    with byteback.path("reference"):
        expected = multiply()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with byteback.path("avx512vnni"):
            result = multiply()
        assert paths.last_kernel() == KERNEL
        assert torch.equal(result, expected), f"{threads} threads"
