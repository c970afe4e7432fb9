# SPDX-License-Identifier: Apache-2.0
"""Above the backends no code looks at a tensor's numbers in a training step: on a GPU each look would wait for all work so far.

Every way from a tensor to a Python number is watched, and the file that takes it is named. A backend may look inside its own
operation, where that is free; so may a clip rule that a backend calls.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import byteback
from small_blocks import Net
from watched_looks import watched

RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]
STEPS = 12  # a search at 0 and at 10, measurements at 0 and 10


def connected(recipe: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = byteback.prepare(Net(), recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    byteback.scale_learning_rates(optimizer, model)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, device: str = "cpu") -> None:
    for step in range(steps):
        x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        F.mse_loss(model(x), torch.zeros((), device=device)).backward()
        optimizer.step()


@pytest.mark.parametrize("path", ["reference", None])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_looks_at_nothing_above_the_backends(recipe: str, path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = connected(recipe)
    with watched(monkeypatch) as seen:
        if path is None:
            train(model, optimizer, STEPS)
        else:
            with byteback.path(path):
                train(model, optimizer, STEPS)
    assert not seen, "\n" + "\n".join(f"{count:4} {where}" for where, count in seen.most_common())


@pytest.mark.parametrize("frozen", [False, True], ids=["as it is", "frozen"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_prediction_looks_at_nothing_above_the_backends(recipe: str, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = connected(recipe)
    train(model, optimizer, 2)
    model.eval()
    if frozen:
        byteback.freeze(model)
    with watched(monkeypatch) as seen, torch.no_grad():
        for _ in range(2):
            model(torch.randn(4, 3, 12, 12))
    assert not seen, "\n" + "\n".join(f"{count:4} {where}" for where, count in seen.most_common())


def test_a_look_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch itself: `health` looks, and says so in numbers."""
    model, optimizer = connected("unified-int8")
    train(model, optimizer, 1)
    with watched(monkeypatch) as seen:
        byteback.health(model)
    assert seen


@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_whole_step_runs_where_every_look_is_an_error(recipe: str, fuse: bool) -> None:
    """Meta tensors have shapes and no numbers: what runs on them runs on a GPU without waiting for it."""
    torch.manual_seed(0)
    model = byteback.prepare(Net(), recipe, fuse=fuse).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    byteback.scale_learning_rates(optimizer, model)
    train(model, optimizer, 2, device="meta")
    assert all(parameter.grad is not None for parameter in model.parameters())
