# SPDX-License-Identifier: Apache-2.0
"""torch.compile(fullgraph=True): the same losses, gradients and state as eager, also over a clip search.

Inductor compiles the float operators around ours, whose sums may differ in the last bits; the model for it has none but
ReLU and an elementwise loss, so that everything can be compared with ==.
"""

import shutil

import pytest
import torch
from torch import nn

from byteback import DirectionSensitive, TensorRule, UnifiedInt8, prepare

SEARCHING = UnifiedInt8(grad_output=TensorRule(DirectionSensitive(period=2), "stochastic"), learning_rate=None)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(recipe, shared=False):
    torch.manual_seed(0)
    middle = nn.Conv2d(4, 4, 3, padding=1, bias=False)
    layers = [nn.Conv2d(2, 4, 3, bias=False), nn.ReLU(), middle, nn.ReLU()]
    layers += [middle] if shared else [nn.Conv2d(4, 2, 3, bias=False)]
    return prepare(nn.Sequential(*layers), recipe)


def trained(model, forward, steps=4):
    """Losses and the gradients of the last step."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for seed in range(steps):
        optimizer.zero_grad()
        loss = forward(torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(seed))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.grad for parameter in model.parameters()]


def assert_same_run(recipe, backend, differing, shared=False):
    eager, compiled = build(recipe, shared), build(recipe, shared)
    losses, grads = trained(eager, eager)
    compiled_losses, compiled_grads = trained(compiled, torch.compile(compiled, fullgraph=True, backend=backend))
    assert losses == compiled_losses
    assert all(torch.equal(a, b) for a, b in zip(grads, compiled_grads, strict=True))
    assert differing(eager, compiled) == []
    measured = [
        [layer.quantizers.grad_output.unshared for layer in model[2:] if hasattr(layer, "quantizers")]
        for model in (eager, compiled)
    ]
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*measured, strict=True))
    assert int(compiled[2].quantizers.count) == (8 if shared else 4)


@pytest.mark.parametrize("recipe", [SEARCHING, "distribution-adaptive-int8"], ids=["unified", "adaptive"])
def test_aot_eager_runs_as_eager(recipe, differing):
    assert_same_run(recipe, "aot_eager", differing)


def test_aot_eager_keeps_call_slots_apart(differing):
    assert_same_run(SEARCHING, "aot_eager", differing, shared=True)


def test_aot_eager_eval(differing):
    model = build("plain-int8")
    trained(model, model, steps=1)
    model.eval()
    x = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_runs_as_eager(differing):
    assert_same_run(SEARCHING, "inductor", differing)
