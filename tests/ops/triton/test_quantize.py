# SPDX-License-Identifier: Apache-2.0
"""Quantize, noise and statistics of the GPU's backend in Triton's interpreter: equal to the reference, bit by bit."""

from __future__ import annotations

import pytest
import torch

from byteback.ops.backends import reference, triton
from same_bits import assert_same_bits, drawn

KEY = reference.noise_key(torch.tensor(-5), torch.tensor(3), torch.tensor(2**33 + 1), 0)


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("shape", [(3, 7, 5, 6), pytest.param((2, 66, 3), marks=pytest.mark.slow), (4, 5)])
def test_quantize_equals_the_reference(shape: tuple[int, ...], axis: int) -> None:
    draw = torch.Generator().manual_seed(0)
    for last, bad, key in ((True, False, KEY), (True, True, None), (False, True, KEY)):
        x = drawn(shape, draw, last=last, bad=bad)
        assert_same_bits(triton.absmax(x, axis), reference.absmax(x, axis))
        clip = reference.absmax(torch.nan_to_num(x, 0.0, 2.0, -2.0), axis) * 0.6
        if axis == 1:
            clip[0, 1] = 1e-31
        found, expected = triton.quantize(x, clip, key), reference.quantize(x, clip, key)
        assert_same_bits(found, expected)
        assert found.values.stride() == expected.values.stride()


@pytest.mark.parametrize("rank", [0, 3])
def test_the_noise_key_equals_the_reference(rank: int) -> None:
    numbers = torch.tensor(-(2**40) - 7), torch.tensor(123456), torch.tensor(2**33 + 5)
    assert_same_bits(triton.noise_key(*numbers, rank), reference.noise_key(*numbers, rank))


@pytest.mark.parametrize("bad", [pytest.param(False, id="finite", marks=pytest.mark.slow), pytest.param(True, id="bad")])
@pytest.mark.parametrize(
    "shape", [(3, 7, 5, 6), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((1, 3, 2, 2), (7, 4), (3, 70, 13, 11)))]
)
def test_statistics_equal_the_reference(shape: tuple[int, ...], bad: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x = drawn(shape, draw, bad=bad)
    thresholds, rest = torch.rand(shape[1], generator=draw), [1] * (len(shape) - 2)
    one = thresholds[:1].reshape([1] * len(shape))
    q = reference.quantize(x, reference.absmax(torch.nan_to_num(x, 0.0, 2.0, -2.0), 1), None)
    clips = torch.rand(3, shape[1], generator=draw) * 2
    clips[0, 0] = 0.0
    for name, arguments in (
        ("channel_stats", (x,)),
        ("moments", (x,)),
        ("tail_count", (x, thresholds.reshape(1, -1, *rest))),
        ("tail_count_pair", (x, thresholds, one)),
        ("dot_terms", (x, q.values, q.scale)),
        ("channel_cosine_terms", (x, clips, False)),
        ("channel_cosine_terms", (x, clips, True)),
        ("cosine_terms", (x, clips[:, 1].contiguous(), True)),
    ):
        assert_same_bits(getattr(triton, name)(*arguments), getattr(reference, name)(*arguments))
