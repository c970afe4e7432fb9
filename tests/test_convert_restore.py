# SPDX-License-Identifier: Apache-2.0
"""restore leaves nothing behind, and enabled switches a whole model to float and back."""

from __future__ import annotations

import copy

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


def test_enabled_false_is_the_float_model_exactly_and_true_brings_int8_back() -> None:
    plain = small()
    model = byteback.prepare(copy.deepcopy(plain), "plain-int8")
    int8 = model(images())
    model[1].load_state_dict(plain[1].state_dict())  # BatchNorm's averages moved with that forward
    assert byteback.enabled(model, False) is model

    expected, output = plain(images()), model(images())
    assert torch.equal(output, expected)
    expected.square().sum().backward()
    output.square().sum().backward()
    for (name, parameter), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(parameter.grad, wanted.grad), name
    assert not bool(model[2].quantizers.grad_output.initialized.any()), "float steps must not touch quantizer state"

    byteback.enabled(model)
    assert torch.equal(model(images()), int8)
    assert not torch.equal(int8, expected)
