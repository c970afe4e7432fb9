# SPDX-License-Identifier: Apache-2.0
"""grad_weight by quads of pixels (csrc/conv/direct/direct_grad_weight.h), where the plan chooses it: equal to the int64 oracle.

Cases: rows that end inside a quad, bands of a large image, strides with unused rows, every number of columns that the kernel
takes, batches that threads share unevenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import byteback
from byteback import ops
from byteback.ops.backends import paths

pytestmark = pytest.mark.skipif("avx512vnni" not in paths.available(), reason="the kernel is the AVX-512 VNNI path's")

# id: (batch, channels, filters, image, kernel, stride, padding, dilation)
CASES: dict[str, tuple[Any, ...]] = {
    "stride 2": (5, 16, 32, (32, 32), (3, 3), (2, 2), (1, 1), (1, 1)),
    "row of 7 pixels": (9, 32, 48, (14, 14), (3, 3), (2, 2), (1, 1), (1, 1)),
    "row of 9 pixels": (8, 16, 16, (9, 9), (5, 5), (1, 1), (2, 2), (1, 1)),
    "one row": (40, 16, 48, (1, 19), (1, 3), (1, 1), (0, 1), (1, 1)),
    "instead of Winograd": (5, 16, 32, (17, 18), (3, 3), (1, 1), (1, 1), (1, 1)),
    "1x1": (3, 16, 16, (9, 11), (1, 1), (1, 1), (0, 0), (1, 1)),
    "1x1 with stride": (3, 32, 32, (13, 12), (1, 1), (3, 2), (0, 0), (1, 1)),
    "1x1, 4 columns": (3, 64, 48, (20, 16), (1, 1), (1, 1), (0, 0), (1, 1)),
    "1x7": (3, 48, 32, (6, 17), (1, 7), (1, 1), (0, 3), (1, 1)),
    "7x1, 21 columns": (3, 48, 32, (17, 8), (7, 1), (1, 1), (3, 0), (1, 1)),
    "4 columns": (3, 16, 80, (12, 12), (2, 2), (1, 1), (0, 0), (1, 1)),
    "dilation": (3, 16, 32, (19, 20), (3, 3), (2, 1), (3, 2), (3, 2)),
    "stride beyond the kernel": (3, 32, 16, (40, 44), (2, 2), (5, 4), (0, 0), (1, 1)),
    "padding beyond the kernel": (3, 16, 16, (5, 6), (2, 2), (1, 1), (4, 5), (1, 1)),
    "bands of rows": (2, 32, 48, (90, 91), (5, 5), (1, 1), (2, 2), (1, 1)),
    "bands with stride": (1, 64, 16, (150, 151), (3, 3), (2, 2), (0, 1), (1, 1)),
    "frames": (2, 16, 32, (3, 12, 13), (1, 3, 5), (1, 1, 1), (0, 1, 2), (1, 1, 1)),
    "a line": (3, 16, 16, (203,), (5,), (2,), (2,), (1,)),
}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def operands(case: tuple[Any, ...], full: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """g, x, an empty weight, and the geometry; `full`: no value but -127 and 127."""
    batch, channels, filters, image, kernel, stride, padding, dilation = case
    axes = zip(image, kernel, stride, padding, dilation, strict=True)
    out = [(n + 2 * p - d * (r - 1) - 1) // s + 1 for n, r, s, p, d in axes]
    generator = torch.Generator().manual_seed(1)

    def integers(*shape: int) -> torch.Tensor:
        values = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
        values = torch.where(values < 0, -127, 127).to(torch.int8) if full else values
        return values.contiguous(memory_format=torch.channels_last) if values.dim() == 4 else values

    weight = torch.empty(filters, channels, *kernel)
    return integers(batch, filters, *out), integers(batch, channels, *image), weight, (stride, padding, dilation, 1)


def run(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: tuple[Any, ...], **scales: torch.Tensor
) -> torch.Tensor:
    one = torch.ones((1,) * x.dim())
    with byteback.path("avx512vnni"):
        result = ops.conv_int8_grad_weight(g, scales.get("gs", one), x, scales.get("xs", one), list(weight.shape), *geometry)
    assert paths.last_kernel() == "avx512vnni/direct"
    return result


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("full", [False, True], ids=["drawn", "full_amplitude"])
def test_every_number_of_threads_gives_the_integers_of_the_oracle(oracle: Any, name: str, full: bool) -> None:
    g, x, weight, geometry = operands(CASES[name], full)
    expected = oracle.grad_weight(g, x, weight.shape, geometry)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        oracle.assert_bits(run(g, x, weight, geometry), expected)


def test_scales_of_filters_and_of_channels(oracle: Any) -> None:
    g, x, weight, geometry = operands(CASES["row of 7 pixels"], False)
    generator = torch.Generator().manual_seed(2)
    scales = {
        "gs": torch.rand(1, 48, 1, 1, generator=generator) + 0.1,
        "xs": torch.rand(1, 32, 1, 1, generator=generator) + 0.1,
    }
    factor = (scales["gs"].reshape(48, 1) * scales["xs"].reshape(1, 32)).numpy().reshape(48, 32, 1, 1)
    acc = oracle.grad_weight(g, x, weight.shape, geometry)
    oracle.assert_bits(run(g, x, weight, geometry, **scales), acc, factor)
    oracle.assert_bits(run(g, x, weight, geometry, gs=scales["gs"]), acc, scales["gs"].reshape(48, 1, 1, 1).numpy())
    oracle.assert_bits(run(g, x, weight, geometry, xs=scales["xs"]), acc, scales["xs"].reshape(1, 32, 1, 1).numpy())


@pytest.mark.parametrize(("a", "b"), [(-127, 127), (127, -127), (127, 127)])
@pytest.mark.parametrize("threads", [1, 2])
def test_sums_of_a_thread_that_an_int32_does_not_hold(a: int, b: int, threads: int) -> None:
    # 9 images of 125 x 127 outputs are 142 875 products: one thread moves its sums once.
    torch.set_num_threads(threads)
    for batch in (8, 9, 25):
        g, x = torch.full((batch, 16, 125, 127), a, dtype=torch.int8), torch.full((batch, 16, 125, 127), b, dtype=torch.int8)
        result = run(g, x, torch.empty(16, 16, 1, 1), ((1, 1), (0, 0), (1, 1), 1))
        assert np.array_equal(result.numpy(), np.full((16, 16, 1, 1), batch * 125 * 127 * a * b).astype(np.float32))
