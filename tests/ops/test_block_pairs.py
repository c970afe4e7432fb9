# SPDX-License-Identifier: Apache-2.0
"""Proves the two answers from one reading: each half is the single operator, of floats and of the block's gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from block_passes import agree, by_shape, column, drawn, key_of, same, vectors, with_native
from byteback import ops


@pytest.fixture(autouse=True)
def _threads(restore_threads: None) -> Iterator[None]:
    yield


@with_native
@by_shape
def test_pairs_are_the_single_operators(shape: tuple[int, ...]) -> None:
    ones = [1] * (len(shape) - 2)
    for seed in (0, 1):
        x = drawn(shape, seed)
        each, one = vectors(shape[1], 1, seed)[0], torch.tensor(0.7)
        counts = agree(lambda x=x, each=each, one=one: ops.tail_count_pair(x, each, one))
        assert same(counts, (ops.tail_count(x, each.reshape(1, -1, *ones)), ops.tail_count(x, one.reshape(1, 1, *ones))))
        clips = (each.abs() + 0.1).reshape(1, -1, *ones)
        clips[0, 0] = 0.0
        for clip, key in itertools.product((torch.tensor(1.3), torch.tensor([0.0])), (None, key_of(5))):
            first, second = agree(lambda x=x, clips=clips, c=clip, k=key: ops.quantize_pair(x, c, clips, k))
            assert same(first, ops.quantize(x, clip.reshape(1, 1, *ones), key))
            assert same(second, ops.quantize(x, clips, key))


@with_native
@by_shape
@pytest.mark.parametrize("activation", ["none", "relu", "relu6", "silu", "gelu"])
def test_pairs_of_a_gradient_are_those_of_its_floats(shape: tuple[int, ...], activation: str) -> None:
    for seed in (0, 1):
        g, x = drawn(shape, seed), drawn(shape, seed + 7, special=False)
        parts = ops.GradientParts(g, x, *vectors(shape[1], 2, seed), None, activation, *vectors(shape[1], 3, seed + 1))
        dx, each, one = ops.normalize_grad(parts), vectors(shape[1], 1, seed)[0].abs(), torch.tensor(0.7)
        tails = agree(lambda parts=parts, each=each, one=one: ops.normalize_grad_tails(parts, each, one))
        assert same(tails, (ops.absmax(dx, 1), *ops.tail_count_pair(dx, each, one)))
        clips = column(each + 0.1, x)
        clips[0, 0] = 0.0
        for clip, key in itertools.product((torch.tensor(1.3), torch.tensor([0.0])), (None, key_of(5))):
            both = (clip, clips, key)
            pair = agree(lambda parts=parts, both=both: ops.normalize_grad_quantize_pair(parts, *both))
            assert same(pair, ops.quantize_pair(dx, *both))


@with_native
@by_shape
@pytest.mark.parametrize("activation", ["none", "relu", "silu", "gelu"])
def test_a_copy_by_a_ratio_of_each_maximum_is_that_of_its_floats(shape: tuple[int, ...], activation: str) -> None:
    for seed in (0, 1):
        g, x = drawn(shape, seed), drawn(shape, seed + 7, special=False)
        parts = ops.GradientParts(g, x, *vectors(shape[1], 2, seed), None, activation, *vectors(shape[1], 3, seed + 1))
        dx = ops.normalize_grad(parts)
        for ratio, key in itertools.product((1.0, 0.30000001192092896), (None, key_of(5))):
            clip, copy = agree(lambda parts=parts, r=ratio, k=key: ops.normalize_grad_quantize_by_ratio(parts, r, k))
            assert same(clip, ops.absmax(dx, 1) * ratio)
            assert same(copy, ops.quantize(dx, clip, key))


@with_native
@pytest.mark.parametrize("channels", [96, 40, 7])
def test_copies_that_no_cache_would_hold_are_the_same(channels: int) -> None:
    """From 12 MB on they are written past the caches, where their rows allow it; 7 channels do not."""
    x = torch.randn(13 * 2**20 // channels + 3, channels, generator=torch.Generator().manual_seed(1))
    one, nothing, key = torch.ones(channels), torch.zeros(channels), key_of(4)
    clips = (torch.tensor(2.0), torch.rand(1, channels, generator=torch.Generator().manual_seed(2)) + 1.0)
    expected = ops.quantize(x, clips[0].reshape(1, 1), key), ops.quantize(x, clips[1], key)
    assert same(ops.quantize_pair(x, *clips, key), expected)
    parts = ops.GradientParts(x, x, None, None, None, "none", one, nothing, nothing)
    assert same(ops.normalize_grad_quantize_pair(parts, *clips, key), expected)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4), (0, 5)], ids=str)
def test_empty_gradients(shape: tuple[int, ...]) -> None:
    x, vector = torch.zeros(shape), torch.ones(shape[1])
    parts = ops.GradientParts(x, x, vector, vector, None, "relu", vector, vector, vector)
    peak, *tails = agree(lambda: ops.normalize_grad_tails(parts, vector, torch.tensor(1.0)))
    assert not peak.any() and not any(tail.any() for tail in tails)
    clips = (torch.tensor(1.0), column(vector, x))
    for values, _, counts, _ in agree(lambda: ops.normalize_grad_quantize_pair(parts, *clips, None)):
        assert values.shape == shape and counts.tolist() == [0, 0]


def test_wrong_arguments_are_refused() -> None:
    x, v = torch.zeros(1, 3, 2, 2), torch.ones(3)
    parts = ops.GradientParts(x, x, v, v, None, "relu", v, v, v)
    with pytest.raises(ValueError, match="per_channel has shape"):
        ops.normalize_grad_tails(parts, torch.ones(4), torch.tensor(1.0))
    with pytest.raises(ValueError, match="clip_per_channel has shape"):
        ops.normalize_grad_quantize_pair(parts, torch.tensor(1.0), v, None)
    with pytest.raises(ValueError, match="one number per channel"):
        ops.normalize_grad_quantize_pair(parts._replace(p=torch.ones(2)), torch.tensor(1.0), column(v, x), None)
