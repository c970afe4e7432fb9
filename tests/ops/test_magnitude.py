# SPDX-License-Identifier: Apache-2.0
"""Magnitude-aware clips: the native version gives the reference's bits, and both do what the rule says."""

from __future__ import annotations

import pytest
import torch

import byteback
from byteback import ops
from byteback.ops import native
from byteback.ops.magnitude import Average, Clips, magnitude_clips

RULE = Average(0.3, 1.0 - 0.8, 0.8)


def gradient(channels: int, rows: int = 50) -> torch.Tensor:
    """Gaussian and long-tailed channels by turns, and one that is all zero."""
    x = torch.randn(rows, channels, generator=torch.Generator().manual_seed(channels))
    x[:, 1::2] = x[:, 1::2] ** 5
    x[:, 2:3] = 0.0
    return x.reshape(rows, channels, 1, 1).contiguous(memory_format=torch.channels_last)


def clips(x: torch.Tensor, before: torch.Tensor | None) -> Clips:
    one = None if before is None else before.max().reshape(1)
    return magnitude_clips(RULE, x, ops.moments(x), one, before)


@pytest.mark.parametrize("path", [path for path in native.available() if path != "reference"])
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
