# SPDX-License-Identifier: Apache-2.0
"""A prediction uses the weight of this moment, however it was written to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import byteback

Change = Callable[[nn.Parameter], None]


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 8, 3))
    return byteback.prepare(model, byteback.PlainInt8(strict=True)).eval()


X = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(3))


def predict(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(X) + 0.0


def one_value_of(gradient: torch.Tensor) -> torch.Tensor:
    gradient[1, 2, 1, 1] = 30.0
    return gradient


def by_optimizer(weight: nn.Parameter, **options: bool) -> None:
    weight.grad = one_value_of(torch.zeros_like(weight))
    torch.optim.SGD([weight], lr=0.5, **options).step()


def by_fused_adam(weight: nn.Parameter) -> None:
    weight.grad = one_value_of(torch.zeros_like(weight))
    torch.optim.Adam([weight], lr=5.0, fused=True).step()


def by_a_hundred_values(weight: nn.Parameter) -> None:
    values = weight.detach().flatten().clone()
    values[1000:1100] = 2.0
    weight.data.copy_(values.view_as(weight))


def by_foreach(weight: nn.Parameter) -> None:
    torch._foreach_add_([weight.data], [one_value_of(torch.zeros_like(weight))])


def by_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[1, 2, 1, 1] = 30.0


CHANGES: dict[str, Change] = {
    "optimizer": by_optimizer,
    "fused optimizer": lambda weight: by_optimizer(weight, fused=True),
    "fused Adam": by_fused_adam,
    "all of data": lambda weight: weight.data.mul_(-0.5),
    "one value of data": lambda weight: one_value_of(weight.data),  # type: ignore[return-value, dict-item]
    "a hundred values of data": by_a_hundred_values,
    "foreach on data": by_foreach,
    "numpy": by_numpy,
    "other memory": lambda weight: setattr(weight, "data", torch.ones_like(weight)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_prediction_uses_the_changed_weight(change: Change) -> None:
    model = network()
    before = predict(model)
    change(model[2].weight)
    fresh = network()
    fresh.load_state_dict(model.state_dict())
    after = predict(model)
    assert torch.equal(after, predict(fresh))
    assert not torch.equal(after, before), "a change that changes nothing proves nothing"
