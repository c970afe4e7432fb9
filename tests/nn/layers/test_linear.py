# SPDX-License-Identifier: Apache-2.0
"""Int8Linear against its oracle, with any number of leading axes."""

import pytest
import torch
from torch import nn

from byteback import Int8Linear, Recipe, TensorRule


def rows(*shape, seed=0):
    return torch.randn(*shape, 12, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("recipe", ["plain-int8", "unified-int8", "distribution-adaptive-int8"])
def test_three_products_are_those_of_the_quantized_operands(recipe, fresh, check_against_oracle):
    layer = fresh(Int8Linear, 12, 7, recipe=recipe)
    for seed in range(4):
        check_against_oracle(layer, rows(9, seed=seed) * (1.0 + seed))


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_leading_axes(shape, bias, fresh, check_against_oracle):
    layer = fresh(Int8Linear, 12, 7, bias=bias, recipe="unified-int8")
    check_against_oracle(layer, rows(*shape))
    assert layer(rows(*shape)).shape == nn.Linear(12, 7)(rows(*shape)).shape


def test_deep_sum_stays_exact(fresh, check_against_oracle):
    """Deeper than float32 can hold exactly (1040 products of 127²)."""
    layer = fresh(Int8Linear, 1100, 3)
    x = torch.randn(1100, 1100, generator=torch.Generator().manual_seed(0))
    check_against_oracle(layer, x)


def test_strides_do_not_matter(fresh):
    x = rows(6, 4)
    grads = []
    for value in (x.transpose(0, 1), x.transpose(0, 1).contiguous()):
        layer = fresh(Int8Linear, 12, 7, recipe="distribution-adaptive-int8")
        leaf = value.detach().requires_grad_()
        layer(leaf).square().sum().backward()
        grads.append((leaf.grad, layer.weight.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


@pytest.mark.parametrize("recipe", ["plain-int8", "unified-int8", "distribution-adaptive-int8"])
def test_empty_batch(recipe, fresh):
    layer = fresh(Int8Linear, 12, 7, recipe=recipe)
    x = torch.zeros(0, 12, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (0, 12) and not layer.weight.grad.any()


def test_one_scale_per_row(fresh):
    """per="N" of a Linear: rows of very different size keep their precision each."""
    layer = fresh(Int8Linear, 12, 7, bias=False, recipe=Recipe(input=TensorRule(per="N"), grad_weight=False))
    x = rows(4) * torch.tensor([1e-4, 1.0, 1e2, 1e4]).reshape(4, 1)
    exact = x @ layer.weight.t()
    assert ((layer(x) - exact).norm(dim=1) / exact.norm(dim=1)).max() < 0.02


@pytest.mark.parametrize("shape", [(3, 11), (12, 3), ()], ids=str)
def test_wrong_shape_names_the_layer(shape, fresh):
    layer = fresh(Int8Linear, 12, 7, name="head.fc")
    with pytest.raises(ValueError, match=r"^head\.fc: expected input of shape \(\.\.\., 12\), but got \("):
        layer(torch.zeros(shape))


def test_switched_off_it_is_the_float_layer(fresh):
    layer, plain = fresh(Int8Linear, 12, 7), nn.Linear(12, 7)
    plain.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    layer.enabled = False
    assert isinstance(layer, nn.Linear) and torch.equal(layer(rows(3)), plain(rows(3)))
