# SPDX-License-Identifier: Apache-2.0
"""A norm that applies its own activation, as timm's BatchNormAct2d does, and a network of such norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class NormAct(nn.BatchNorm2d):
    """The stages of timm's class: F.batch_norm, a drop module, an activation."""

    def __init__(self, channels: int, act: nn.Module | None = None, drop: nn.Module | None = None, **options: Any) -> None:
        super().__init__(channels, **options)
        self.drop, self.act = drop or nn.Identity(), act or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        average = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                average = 1.0 / float(self.num_batches_tracked)
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        uses = not self.training or self.track_running_stats
        running = (self.running_mean, self.running_var) if uses else (None, None)
        x = F.batch_norm(x, *running, self.weight, self.bias, by_batch, average, self.eps)
        return self.act(self.drop(x))


class Net(nn.Module):
    """A stem, a residual unit whose last norm has no activation, a norm with an activation that has no fused form."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, bias=False), NormAct(16, nn.ReLU6())
        self.conv1, self.norm1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), NormAct(16, nn.SiLU(inplace=True))
        self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), NormAct(16, momentum=None)
        self.conv3, self.norm3 = nn.Conv2d(16, 16, 1, bias=False), NormAct(16, nn.LeakyReLU(0.1, inplace=True))
        self.act, self.last = nn.ReLU(inplace=True), nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        x = self.act(self.norm2(self.conv2(self.norm1(self.conv1(x)))) + x)
        out: Tensor = self.last(self.norm3(self.conv3(x)))
        return out


BLOCKS = ["conv + norm + relu6", "conv + norm + silu", "conv + norm + add + relu", "conv + norm", ""]
