# SPDX-License-Identifier: Apache-2.0
"""Networks whose depthwise or parallel branches amplify the noise of a gradient follow float step by step.

Two of timm's, on real images: for 30 steps the loss is within 10 % of float's and the norm of the gradient within a factor of
2. Plain INT8 does not: MobileOne's first gradient is 10^4 times that of float. Slow, and needs timm and CIFAR-10.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import byteback
from byteback.torchvision_compat import load

pytestmark = pytest.mark.slow
STEPS, BATCH, SIZE = 30, 64, 64
PLACES = [os.environ.get("BYTEBACK_DATA", "data"), str(Path(__file__).parents[2] / "shared" / "data" / "cifar10")]


def images() -> tuple[Tensor, Tensor]:
    """The first batches of CIFAR-10, enlarged, with mean 0 and deviation 1."""
    found = [Path(place) / "cifar-10-batches-py" / "data_batch_1" for place in PLACES]
    file = next((file for file in found if file.exists()), None)
    if file is None:
        pytest.skip("CIFAR-10 is not here; set BYTEBACK_DATA to the folder that holds cifar-10-batches-py")
    batch = pickle.loads(file.read_bytes(), encoding="bytes")
    x = torch.from_numpy(np.asarray(batch[b"data"][: STEPS * BATCH])).reshape(-1, 3, 32, 32).float()
    x = (x - x.mean()) / x.std()
    return F.interpolate(x, size=SIZE, mode="bilinear"), torch.tensor(batch[b"labels"][: STEPS * BATCH])


def trained(timm: Any, name: str, recipe: str | None) -> list[tuple[float, float]]:
    """The loss and the norm of the gradient in each step."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, num_classes=10).train()
    if recipe is not None:
        byteback.prepare(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    if recipe is not None:
        byteback.scale_learning_rates(optimizer, model)
    x, labels = images()
    seen = []
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        loss = F.cross_entropy(model(x[part]), labels[part])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    return seen


@pytest.mark.parametrize("name", ["mobileone_s0", "repvgg_a0"])
def test_both_papers_recipes_follow_float(name: str) -> None:
    load()  # torchvision, which timm imports
    timm = pytest.importorskip("timm")
    expected = trained(timm, name, None)
    for recipe in ("unified-int8", "distribution-adaptive-int8"):
        found = trained(timm, name, recipe)
        losses = [abs(loss / other - 1.0) for (loss, _), (other, _) in zip(found, expected, strict=True)]
        norms = [norm / other for (_, norm), (_, other) in zip(found, expected, strict=True)]
        print(f"{name} {recipe}: loss within {max(losses):.1%}, gradient norm {min(norms):.2f} to {max(norms):.2f} of float's")
        assert max(losses) <= 0.1 and min(norms) >= 0.5 and max(norms) <= 2.0
