# SPDX-License-Identifier: Apache-2.0
"""Magnitude-aware clips: the native version gives the reference's bits, and both do what the rule says."""

from __future__ import annotations

import pytest
import torch

import byteback
from byteback import ops
from byteback.ops.backends import paths
from byteback.ops.magnitude import Clips, Paired, gradient_clips, gradient_pair, magnitude_clips
from byteback.ops.programs import Averaged

RULE = Averaged(0.3, 1.0 - 0.8, 0.8)


def gradient(channels: int, rows: int = 50) -> torch.Tensor:
    """Gaussian and long-tailed channels by turns, and one that is all zero."""
    x = torch.randn(rows, channels, generator=torch.Generator().manual_seed(channels))
    x[:, 1::2] = x[:, 1::2] ** 5
    x[:, 2:3] = 0.0
    return x.reshape(rows, channels, 1, 1).contiguous(memory_format=torch.channels_last)


def clips(x: torch.Tensor, before: torch.Tensor | None) -> Clips:
    one = None if before is None else before.max().reshape(1)
    return magnitude_clips(RULE, x, ops.moments(x), one, before)


@pytest.mark.parametrize("path", [path for path in paths.available() if path != "reference"])
@pytest.mark.parametrize("channels", [1, 2, 7, 16, 100])
@pytest.mark.parametrize("first", [True, False])
def test_paths_agree(path: str, channels: int, first: bool) -> None:
    x = gradient(channels)
    before = (
        None if first else torch.rand(channels, generator=torch.Generator().manual_seed(1)).index_fill_(0, torch.tensor(0), 0)
    )
    with byteback.path("reference"):
        expected = clips(x, before)
    with byteback.path(path):
        made = clips(x, before)
    assert torch.equal(made.one, expected.one) and torch.equal(made.each, expected.each)
    assert made[2:] == expected[2:]


def test_gaussian_channels_take_their_maximum_and_others_average() -> None:
    x = gradient(4)
    before = torch.full((4,), 2.0)
    made = clips(x, before).each.flatten()
    peak = x.abs().amax(dim=(0, 2, 3))
    assert made[0] == peak[0]
    assert made[1] == before[1] * torch.tensor(1.0 - 0.8) + peak[1] * 0.8
    assert clips(x, torch.zeros(4)).each.flatten()[1] == peak[1], "an average from nothing would start too small"


def test_nan_reaches_the_clip() -> None:
    x = gradient(3)
    x[0, 1] = torch.nan
    made = clips(x, torch.ones(3))
    assert made.one.isnan().all() and made.each[0, 1].isnan()


def block_gradient(channels: int) -> tuple[ops.GradientParts, tuple[torch.Tensor, torch.Tensor]]:
    """A gradient as a fused block has it: behind a ReLU and a norm, not written out; and its sums."""
    x, g = gradient(channels).flip(0), gradient(channels)
    a = torch.ones(channels)
    mean, var = x.double().mean([0, 2, 3]), x.double().var([0, 2, 3], unbiased=False)
    invstd = 1.0 / (var + 1e-5).sqrt()
    made = ops.normalize_grad_batch(g, x, a, a, None, "relu", mean, invstd, 1e-5, want_masked=False, want_sums=True)
    return ops.GradientParts(g, x, a, a, None, "relu", a, made.q, made.r), made.sums


KEY = torch.tensor([0x12345678, 0x9ABCDEF0])


@pytest.mark.parametrize("path", [path for path in paths.available() if path != "reference"])
@pytest.mark.parametrize("channels", [1, 2, 7, 16, 100])
@pytest.mark.parametrize("want_one", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_paths_agree_on_a_gradient_that_is_not_written(path: str, channels: int, want_one: bool, first: bool) -> None:
    before = None if first else torch.rand(channels, generator=torch.Generator().manual_seed(1))
    one = None if before is None else before.max().reshape(1)
    results: list[Paired] = []
    for name in ("reference", path):
        with byteback.path(name):
            results.append(gradient_pair(RULE, *block_gradient(channels), one, before, KEY, want_one=want_one))
    expected, made = results
    for clip, same in zip(made.clips[:2], expected.clips[:2], strict=True):
        assert torch.equal(clip, same)
    assert made.clips[2:] == expected.clips[2:] and made.saturated == expected.saturated and made.nonfinite == 0
    assert (made.one is None) is (expected.one is None) is not want_one
    for copy, same in zip((made.one, made.each), (expected.one, expected.each), strict=True):
        if copy is not None:
            assert torch.equal(copy.values, same.values) and torch.equal(copy.scale, same.scale)


@pytest.mark.parametrize("path", [path for path in paths.available() if path != "reference"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_counted_whichever_copies_are_made(path: str, bad: float) -> None:
    parts, sums = block_gradient(16)
    parts.g[3, 5] = bad
    parts = parts._replace(mask=None, activation="none")
    for want_one in (True, False):
        with byteback.path(path):
            assert gradient_pair(RULE, parts, sums, None, None, KEY, want_one=want_one).nonfinite == 1


def test_a_gradient_that_is_not_written_gets_the_clips_of_its_floats() -> None:
    """Its σ is that of exact arithmetic; here no channel is so near the threshold that rounding would decide."""
    parts, sums = block_gradient(16)
    dx = ops.normalize_grad(parts)
    _, total, squares = ops.moments(dx)
    torch.testing.assert_close(sums[1], squares.flatten(), rtol=1e-5, atol=1e-12)
    before = torch.rand(16, generator=torch.Generator().manual_seed(1))
    expected = clips(dx, before)
    made = gradient_clips(RULE, parts, sums, before.max().reshape(1), before)
    assert torch.equal(made.one, expected.one) and torch.equal(made.each, expected.each)
    assert made[2:] == expected[2:]
