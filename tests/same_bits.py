# SPDX-License-Identifier: Apache-2.0
"""Drawn tensors, and a comparison by bits in which only NaN equals NaN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback.ops.contract import layout

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors_in(results: Any) -> list[Tensor]:
    """All tensors of nested tuples, in order."""
    if isinstance(results, Tensor):
        return [results]
    return [] if not isinstance(results, (tuple, list)) else [each for part in results for each in tensors_in(part)]


def assert_same_bits(found: Any, expected: Any) -> None:
    pairs = list(zip(tensors_in(found), tensors_in(expected), strict=True))
    assert pairs
    for index, (one, other) in enumerate(pairs):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), index
        same = one == other
        if one.is_floating_point():
            bits = _BITS[one.element_size()]
            same = (one.contiguous().view(bits) == other.contiguous().view(bits)) | (one.isnan() & other.isnan())
        assert bool(same.all()), f"tensor {index}: {one[~same][:3]} instead of {other[~same][:3]}"


def drawn(shape: tuple[int, ...], draw: torch.Generator, *, last: bool = True, bad: bool = False) -> Tensor:
    """Floats of many magnitudes with -0 and a subnormal number; with NaN and -Inf if `bad`."""
    x = torch.randn(shape, generator=draw) * torch.exp(torch.randn(shape, generator=draw) * 2)
    x.view(-1)[3:5] = torch.tensor([1e-42, -0.0])
    if bad:
        x.view(-1)[5:7] = torch.tensor([float("nan"), -float("inf")])
    return layout.channels_last(x) if last else x


def integers(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    return torch.randint(-127, 128, shape, generator=draw).to(torch.int8)
