# SPDX-License-Identifier: Apache-2.0
"""The int8 weight that predictions keep: used again while the weight is the same, never after it changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import byteback
from byteback.ops import native

pytestmark = pytest.mark.skipif(native.library is None, reason="without the native library nothing is kept")


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 3))
    return byteback.prepare(model, byteback.PlainInt8(strict=True)).eval()


X = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(3))


def predict(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(X) + 0.0


def test_a_second_prediction_quantizes_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    first = predict(model)
    kept = model[2].int8_kept
    assert kept is not None
    assert torch.equal(predict(model), first)
    assert model[2].int8_kept is kept


def by_optimizer(weight: nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()


def by_data(weight: nn.Parameter) -> None:
    weight.data.mul_(-0.5)


def by_other_memory(weight: nn.Parameter) -> None:
    weight.data = torch.ones_like(weight)


@pytest.mark.parametrize("change", [by_optimizer, by_data, by_other_memory])
def test_a_changed_weight_is_seen(change: object) -> None:
    model = network()
    predict(model)
    change(model[2].weight)  # type: ignore[operator]
    fresh = network()
    fresh.load_state_dict(model.state_dict())
    fresh[2].int8_kept = None
    assert torch.equal(predict(model), predict(fresh))


def test_training_copies_and_restore_let_go_of_it() -> None:
    model = network()
    predict(model)
    assert copy.deepcopy(model)[2].int8_kept is None
    model.train()(X).sum().backward()
    assert model[2].int8_kept is None
    predict(model.eval())
    assert "int8_kept" not in vars(byteback.restore(model)[2])
