# SPDX-License-Identifier: Apache-2.0
"""A small prepared network after some training steps: for the tests of reports (tests/inspect)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import byteback


def trained(slug: str | byteback.Recipe, steps: int = 3) -> nn.Module:
    torch.manual_seed(0)
    model = byteback.prepare(byteback.models.build("resnet8", image_size=8, in_channels=1), slug)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    byteback.scale_learning_rates(optimizer, model)
    for _ in range(steps):
        loss = F.cross_entropy(model(torch.randn(8, 1, 8, 8)), torch.arange(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model
