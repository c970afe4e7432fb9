# SPDX-License-Identifier: Apache-2.0
"""Depthwise products on every native path equal the reference: borders, odd sizes, streams, extremes, scales of all kinds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import byteback
from byteback import ops
from byteback.ops.backends import paths

NATIVE = [path for path in paths.available() if path != "reference"]
pytestmark = pytest.mark.skipif(not NATIVE, reason="this build has no native library")
LAST = torch.channels_last


def assert_agree(x: Tensor, g_of: Any, w: Tensor, scales: tuple[Tensor, Tensor], stride: int, padding: list[int]) -> None:
    """Output and grad_input with one and two threads."""
    geometry = ([stride] * 2, padding, [1, 1], x.shape[1])
    with byteback.path("reference"):
        expected = ops.conv_int8(x, scales[0], w, scales[1], *geometry)
        g = g_of(expected.shape).contiguous(memory_format=LAST)
        back = ops.conv_int8_grad_input(g, scales[0], w, scales[1], x.shape, *geometry)
    for path, threads in itertools.product(NATIVE, (1, 2)):
        torch.set_num_threads(threads)
        with byteback.path(path):
            assert torch.equal(ops.conv_int8(x, scales[0], w, scales[1], *geometry), expected), (path, threads)
            result = ops.conv_int8_grad_input(g, scales[0], w, scales[1], x.shape, *geometry)
            assert torch.equal(result, back), (path, threads)


def one() -> Tensor:
    return torch.full((1, 1, 1, 1), 0.37)


@pytest.mark.parametrize("channels", [16, 48, 40, 32], ids=lambda c: f"{c}_channels")  # 40 is no multiple of 16
@pytest.mark.parametrize("stride", [1, 2], ids=["stride_1", "stride_2"])
def test_borders_of_small_images(oracle: Any, channels: int, stride: int, restore_threads: None) -> None:
    for height, width, rows, columns in itertools.product((1, 2, 5, 6), (1, 2, 3, 4, 7), (0, 1, 2, 3), (0, 1, 3)):
        if height + 2 * rows >= 3 and width + 2 * columns >= 3:
            x = oracle.operand((2, channels, height, width)).contiguous(memory_format=LAST)
            w = oracle.operand((channels, 1, 3, 3), seed=1)
            assert_agree(x, lambda size: oracle.operand(size, seed=2), w, (one(), one()), stride, [rows, columns])


@pytest.mark.parametrize("stride", [1, 2], ids=["stride_1", "stride_2"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums(stride: int, sign: int, restore_threads: None) -> None:
    x = torch.full((1, 16, 6, 7), 127, dtype=torch.int8).contiguous(memory_format=LAST)
    w = torch.full((16, 1, 3, 3), 127 * sign, dtype=torch.int8)
    assert_agree(x, lambda size: torch.full(size, -127, dtype=torch.int8), w, (one(), one()), stride, [1, 1])


@pytest.mark.parametrize("stride", [1, 2], ids=["stride_1", "stride_2"])
def test_scales_of_samples_and_channels(oracle: Any, stride: int, restore_threads: None) -> None:
    x = oracle.operand((3, 32, 7, 6)).contiguous(memory_format=LAST)
    w = oracle.operand((32, 1, 3, 3), seed=1)
    per_sample, per_channel = torch.rand(3, 1, 1, 1) + 0.1, torch.rand(32, 1, 1, 1) + 0.1
    geometry = ([stride] * 2, [1, 1], [1, 1], 32)
    with byteback.path("reference"):
        expected = ops.conv_int8(x, per_sample, w, per_channel, *geometry)
    for path in NATIVE:
        with byteback.path(path):
            assert torch.equal(ops.conv_int8(x, per_sample, w, per_channel, *geometry), expected), path


@pytest.mark.parametrize("stride", [1, 2], ids=["stride_1", "stride_2"])
def test_results_that_are_written_past_the_cache(oracle: Any, stride: int, restore_threads: None) -> None:
    size = (2, 64, 191, 190) if stride == 1 else (2, 64, 381, 380)  # 18 MB of results
    x = oracle.operand(size).contiguous(memory_format=LAST)
    assert_agree(x, lambda s: oracle.operand(s, seed=2), oracle.operand((64, 1, 3, 3), seed=1), (one(), one()), stride, [1, 1])
