# SPDX-License-Identifier: Apache-2.0
"""Operands for tests of the fused block's passes, and `agree`: every path gives the reference's bits.

Bits are compared as integers, so +0.0 and -0.0 differ; only NaN counts as equal to NaN, whatever its payload.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from byteback import ops
from byteback.ops.backends import paths

NATIVE = [path for path in paths.available() if path != "reference"]
# Rows around blocks of 64 and the tree's powers of two; channels around vectors of 8 and 16, blocks of 32 and 64, and pairs.
SHAPES = [(1, 1), (5, 3), (65, 17), (64, 8), (3, 1000), (2, 4, 33), (2, 24, 9, 9), (3, 7, 5, 9), (1, 1, 13, 11),
          (2, 40, 16, 17), (1, 65, 8, 8), (4, 64, 33, 31), (2, 3, 5, 4, 7), (1, 16, 3, 8, 9), (2, 1030, 3, 3)]  # fmt: skip
SPECIAL = [math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0, -0.0, 1e-42, 6.0, 3.0, -3.0, 88.8, -88.8, 1e-30]
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
by_activation = pytest.mark.parametrize("activation", ops.ACTIVATIONS)
with_native = pytest.mark.skipif(not NATIVE, reason="this build has no native library")


def drawn(shape: tuple[int, ...], seed: int, special: bool = True, scale: float = 3.0) -> Tensor:
    """Random numbers of many magnitudes, some of them special; channels last for odd seeds."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * scale * torch.exp(torch.randn(shape, generator=generator))
    if special:
        flat = x.view(-1)
        at = torch.randint(0, flat.numel(), (max(flat.numel() // 50, 1),), generator=generator)
        flat[at] = torch.tensor(SPECIAL)[torch.arange(len(at)) % len(SPECIAL)]
    return laid_out(x, bool(seed % 2))


def laid_out(x: Tensor, last: bool) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x.contiguous()


def vectors(channels: int, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(channels, generator=generator) for _ in range(count)]


def same(actual: Any, expected: Any) -> bool:
    """The same bits, NaN for NaN; also for tuples and None."""
    if isinstance(expected, tuple):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    if expected is None or actual is None:
        return actual is expected
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if expected.is_floating_point():
        nan = torch.isnan(expected)
        if not torch.equal(torch.isnan(actual), nan):
            return False
        kind = {4: torch.int32, 8: torch.int64, 2: torch.int16}[expected.element_size()]
        actual, expected = (torch.where(nan, 1.0, t).contiguous().view(kind) for t in (actual, expected))
    return torch.equal(actual, expected)


def lies_channels_last(x: Tensor) -> bool:
    return x.movedim(1, -1).is_contiguous()


def agree(call: Any) -> Any:
    """Calls on every path with one and two threads; all results must be the reference's, which is returned."""
    with paths.path("reference"):
        expected = call()
    for path, threads in itertools.product(NATIVE, (1, 2)):
        torch.set_num_threads(threads)
        with paths.path(path):
            actual = call()
        assert same(actual, expected), f"{path} with {threads} threads differs from the reference"
        for tensor in actual if isinstance(actual, tuple) else ():
            if isinstance(tensor, Tensor) and tensor.dim() >= 3:
                assert lies_channels_last(tensor)
    return expected


def key_of(number: int) -> Tensor:
    return torch.tensor([number * 2654435761 % 2**32, number * 40503 % 2**32], dtype=torch.int64)


def column(vector: Tensor, x: Tensor) -> Tensor:
    """A vector over the channels, shaped to broadcast over x."""
    return vector.reshape(1, -1, *[1] * (x.dim() - 2))
