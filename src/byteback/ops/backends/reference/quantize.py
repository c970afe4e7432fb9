# SPDX-License-Identifier: Apache-2.0
"""Defines `byteback.ops.quantize` and related operators in plain PyTorch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from byteback.ops.backends.reference import statistics
from byteback.ops.contract import noise
from byteback.ops.contract.limits import QMAX, ZERO_SCALE
from byteback.ops.contract.rounded_once import divided_by
from byteback.ops.types import QTensor


@torch.no_grad()
def quantize(x: Tensor, clip: Tensor, key: Tensor | None) -> QTensor:
    """Returns int8 values, their scale, (saturated, non-finite) counts and max|x|. See `byteback.ops.quantize`."""
    live = statistics.is_live(clip)
    safe = torch.where(live, clip, 1.0)
    y = (x * statistics.inverse_scale(safe)).clamp(-QMAX, QMAX)
    y = y.round() if key is None else torch.floor(y + noise.uniform_like(x, key))
    finite = torch.isfinite(x)
    values = torch.empty_like(x, dtype=torch.int8)
    values.copy_(torch.where(live & ~torch.isnan(x), y, 0.0))
    scale = torch.where(live, divided_by(safe, QMAX), ZERO_SCALE)
    saturated = ((x.abs() > clip) & live).sum()
    return QTensor(values, scale, torch.stack([saturated, (~finite).sum()]), statistics.absmax(x, -1).reshape(()))


def quantize_plan(x: Tensor, axis: int) -> tuple[()]:
    """Returns an empty plan."""
    return ()


@torch.no_grad()
def quantize_max(plan: tuple[()], x: Tensor, axis: int, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns int8 values, their scale, the clip max|x| and the counts. See `byteback.ops.quantize_max`."""
    clip = statistics.absmax(x, axis)
    values, scale, counts, _ = quantize(x, clip, key)
    assert counts is not None
    return values, scale, clip, counts


def noise_key(seed: Tensor, layer: Tensor, count: Tensor, rank: int) -> Tensor:
    """Returns (k0, k1) as int64. See contract/noise.py."""
    words = noise.key_words(int(seed), rank, int(layer), int(count))
    return torch.tensor(words, dtype=torch.int64, device=count.device)


def quantize_pair(x: Tensor, clip: Tensor, clip_per_channel: Tensor, key: Tensor | None) -> tuple[QTensor, QTensor]:
    """Quantizes x with one clip and with a clip per channel, (1, C, 1, ...), with the same noise."""
    return quantize(x, clip.reshape((1,) * x.dim()), key), quantize(x, clip_per_channel, key)
