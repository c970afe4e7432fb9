# SPDX-License-Identifier: Apache-2.0
"""Channels and memory format of batches and networks, for images and for clips."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of axes


def as_asked(batch: Tensor, channels: int, channels_last: bool) -> Tensor:
    """Converts images (N, C, H, W) or clips (N, C, T, H, W) to the channels and the memory format of a network."""
    if batch.shape[1] != channels:
        batch = batch.expand(-1, channels, *batch.shape[2:])
    return batch.contiguous(memory_format=_LAST[batch.dim()] if channels_last else torch.contiguous_format)


def lay_out(model: nn.Module, channels_last: bool) -> nn.Module:
    """Converts the weights of the convolutions to the memory format. `Module.to` can convert 2-D or 3-D ones, but not both."""
    if channels_last:
        for parameter in model.parameters():
            if parameter.dim() in _LAST:
                parameter.data = parameter.data.contiguous(memory_format=_LAST[parameter.dim()])
    return model
