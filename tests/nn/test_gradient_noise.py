# SPDX-License-Identifier: Apache-2.0
"""Which noise a gradient gets, and which copies of it are made, over several forwards and backwards."""

import pytest
import torch
from torch import nn

from byteback import DistributionAdaptiveInt8, Int8Conv2d, ops, prepare
from byteback.ops import magnitude
from small_layers import conv, image, recipes


def test_micro_batches_get_other_noise_each(fresh):
    layer = conv(fresh)
    grads = []
    for _ in range(3):
        layer.weight.grad = None
        layer(image()).backward(torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(9)))
        grads.append(layer.weight.grad)
    assert int(layer.quantizers.count) == 3
    assert not torch.equal(grads[0], grads[1]) and not torch.equal(grads[1], grads[2])
    assert torch.allclose(grads[0], grads[1], atol=0.1 * grads[0].abs().max().item())


def test_gradients_accumulate(fresh):
    once, separately = conv(fresh), conv(fresh)
    parts = []
    for seed in (0, 1):
        once(image(seed)).square().sum().backward()
        separately.weight.grad = None
        separately(image(seed)).square().sum().backward()
        parts.append(separately.weight.grad)
    assert torch.equal(once.weight.grad, parts[0] + parts[1])


@recipes
def test_two_forwards_before_one_backward(recipe, fresh):
    """Each forward keeps its own integers and scales, though both wrote the same buffers."""
    g = torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(2))
    layer, alone = conv(fresh, recipe), conv(fresh, recipe)
    x1, x2 = image(1).requires_grad_(), (100.0 * image(2)).requires_grad_()
    y1, y2 = layer(x1), layer(x2)
    (y1 * g).sum().backward()
    first = layer.weight.grad.clone()
    (y2 * g).sum().backward()
    (alone(image(1)) * g).sum().backward()
    assert torch.equal(first, alone.weight.grad)
    exact = nn.grad.conv2d_weight(x2, layer.weight.shape, g)
    assert torch.allclose(layer.weight.grad - first, exact, atol=0.05 * exact.abs().max().item())


def test_sum_of_two_forwards_in_one_backward(fresh):
    layer = conv(fresh)
    (layer(image(1)) + layer(image(2))).square().sum().backward()
    assert int(layer.quantizers.count) == 2 and layer.weight.grad.abs().max() > 0


def test_retain_graph_twice_gives_new_noise_and_the_same_clip(fresh):
    layer = conv(fresh, "unified-int8")
    output = layer(image())
    g = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    output.backward(g, retain_graph=True)
    first, clip = layer.weight.grad.clone(), layer.quantizers.grad_output.clip[0].tolist()
    layer.weight.grad = None
    output.backward(g)
    assert not torch.equal(first, layer.weight.grad)
    assert torch.allclose(first, layer.weight.grad, atol=0.1 * first.abs().max().item())
    assert int(layer.quantizers.count) == 2
    assert layer.quantizers.grad_output.clip[0].tolist() == clip and int(layer.quantizers.grad_output.updated_at[0]) == 0


def grad_weight(layer):
    layer.weight.grad = None
    layer(image()).backward(torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(4)))
    return layer.weight.grad


def test_equal_seed_and_number_give_equal_noise(fresh):
    assert torch.equal(grad_weight(conv(fresh)), grad_weight(conv(fresh)))


@pytest.mark.parametrize("other", [{"seed": 1}, {"number": 1}, {"seed": -1}, {"seed": 2**63}], ids=str)
def test_noise_differs_between_seeds_and_layers(other, fresh):
    assert not torch.equal(grad_weight(conv(fresh)), grad_weight(conv(fresh, **other)))


def test_noise_differs_between_ranks(fresh, monkeypatch):
    alone = grad_weight(conv(fresh))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, same in ((0, True), (1, False)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        assert torch.equal(alone, grad_weight(conv(fresh))) is same


def test_both_copies_of_a_gradient_share_their_noise(fresh, monkeypatch):
    keys = []
    original = magnitude.quantize_pair
    monkeypatch.setattr(magnitude, "quantize_pair", lambda *args: keys.append(args[-1]) or original(*args))
    conv(fresh, "distribution-adaptive-int8")(image().requires_grad_()).sum().backward()
    assert len(keys) == 1 and keys[0] is not None


@pytest.mark.parametrize("fused", [False, True], ids=["alone", "block"])
def test_a_depthwise_layer_makes_one_copy_for_both_products(fresh, monkeypatch, fused):
    """Its K is summed by no product, so the copy per channel serves grad_input too, with a scale for each channel."""
    scales = {}
    for name in ("conv_int8_grad_input", "conv_int8_grad_weight"):
        original = getattr(ops, name)

        def listen(*args, name=name, original=original):
            scales[name] = args[1]
            return original(*args)

        monkeypatch.setattr(ops, name, listen)
    shape = (1, 4, 1, 1)
    for shares, expected in ((True, shape), (False, (1, 1, 1, 1))):
        recipe = DistributionAdaptiveInt8(depthwise_shares=shares, first_conv=True)
        layer = fresh(Int8Conv2d, 4, 4, 3, recipe=recipe, bias=False, groups=4, padding=1)
        x = image().requires_grad_()
        if fused:
            model = prepare(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), nn.ReLU()), recipe)
            layer, _ = model[0], model(x).square().sum().backward()
        else:
            layer(x).square().sum().backward()
        assert scales["conv_int8_grad_input"].shape == expected and scales["conv_int8_grad_weight"].shape == shape
        assert bool(layer.quantizers.grad_output.seen.any()) is not shares
        assert layer.quantizers.grad_output_for_weight.seen.any() and x.grad.abs().sum() > 0


def test_finer_steps_bring_a_depthwise_gradient_nearer(fresh):
    x, w = image(), torch.randn(4, 1, 3, 3, generator=torch.Generator().manual_seed(3))
    g = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(4)) * torch.tensor([1.0, 1e-1, 1e-2, 1e-3]).reshape(
        1, 4, 1, 1
    )
    exact = torch.nn.grad.conv2d_input(x.shape, w, g, padding=1, groups=4)
    errors = []
    for shares in (True, False):
        layer = fresh(
            Int8Conv2d, 4, 4, 3, recipe=DistributionAdaptiveInt8(depthwise_shares=shares), bias=False, groups=4, padding=1
        )
        with torch.no_grad():
            layer.weight.copy_(w)
        leaf = x.clone().requires_grad_()
        layer(leaf).backward(g)
        errors.append(((leaf.grad - exact)[:, 3].norm() / exact[:, 3].norm()).item())
    assert errors[0] < 0.05 < errors[1]


def test_forward_uses_no_noise(fresh):
    assert torch.equal(conv(fresh, seed=1)(image()), conv(fresh, seed=2)(image()))


def test_gradients_are_unbiased(fresh):
    """The mean over 60 noises lies near the gradient of the unrounded tensor.

    Each element of grad_weight sums 32 roundings of variance at most 1/4 step²; the mean's standard error is at most
    sqrt(32 / 4 / 60) = 0.37 steps times max|x|, and six of them bound all 216 elements: false alarms below 1e-6.
    """
    layer, x = conv(fresh), image()
    g = torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(5))
    mean = torch.zeros_like(layer.weight)
    for _ in range(60):
        layer.weight.grad = None
        layer(x).backward(g)
        mean += layer.weight.grad / 60
    x_hat = (x * (127 / x.abs().max())).round() * (x.abs().max() / 127)
    exact = nn.grad.conv2d_weight(x_hat, layer.weight.shape, g)
    step = g.abs().max() / 127
    assert (mean - exact).abs().max() < 6 * 0.37 * step * x.abs().max()
