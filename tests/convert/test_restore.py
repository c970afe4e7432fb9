# SPDX-License-Identifier: Apache-2.0
"""restore leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

import byteback
from small_convnet import RECIPES, anatomy, images, small


@pytest.mark.parametrize("slug", RECIPES)
def test_restore_leaves_nothing_behind(slug: str) -> None:
    model = small()
    before = anatomy(model)
    byteback.prepare(model, slug, keep_float=["4"])
    model(images()).sum().backward()
    assert anatomy(model) != before
    assert byteback.restore(model) is model
    assert anatomy(model) == before


def test_restore_gives_the_float_outputs_back() -> None:
    model = small().eval()
    float_output = model(images())
    byteback.prepare(model, "plain-int8")
    assert not torch.equal(model(images()), float_output)
    byteback.restore(model)
    assert torch.equal(model(images()), float_output)


def test_a_restored_model_can_be_prepared_again() -> None:
    model = byteback.restore(byteback.prepare(small(), "plain-int8"))
    byteback.prepare(model, "distribution-adaptive-int8")
    assert model[2].recipe == byteback.DistributionAdaptiveInt8()
    assert int(model[2].quantizers.count) == 0


def test_restore_frees_the_optimizer_too() -> None:
    """Warm up in int8, finish in float, with the same optimizer: its hooks must not look for int8 layers any more."""
    model = byteback.prepare(small(), "unified-int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)
    byteback.restore(model)
    model(images()).square().mean().backward()
    before = model[2].weight.detach().clone()
    expected = before - 0.1 * model[2].weight.grad
    optimizer.step()
    assert torch.allclose(model[2].weight, expected, rtol=0, atol=1e-7)
