# SPDX-License-Identifier: Apache-2.0
"""What the examples share: a small network and batches of handwritten digits. Replace both by your own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import byteback
from byteback.train import data


def network() -> nn.Module:
    """A small ResNet with the same weights in every process."""
    torch.manual_seed(0)
    return byteback.models.build("resnet8", image_size=8, num_classes=10, in_channels=1)


def batches(epoch: int, size: int = 64, rank: int = 0, ranks: int = 1) -> list[tuple[Tensor, Tensor]]:
    """The batches of one rank in an epoch. The order is a function of the epoch, so a resumed run sees the same."""
    digits = data.load("digits")
    order = torch.randperm(len(digits.train), generator=torch.Generator().manual_seed(epoch))
    chosen = [part[rank::ranks] for part in order.split(size * ranks)[:4]]  # only four, as this is an example
    return list(digits.train.batches(chosen, 0, epoch))
