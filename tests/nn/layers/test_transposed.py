# SPDX-License-Identifier: Apache-2.0
"""Int8ConvTranspose1d, 2d, 3d against their oracle (see conftest.py), in models, and on all paths."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import byteback
from byteback import Int8ConvTranspose1d, Int8ConvTranspose2d, Int8ConvTranspose3d
from byteback.ops.backends import paths

RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]
CLASSES = {1: Int8ConvTranspose1d, 2: Int8ConvTranspose2d, 3: Int8ConvTranspose3d}
IMAGE = {1: (9,), 2: (5, 6), 3: (3, 4, 5)}
OPTIONS: dict[str, dict[str, Any]] = {
    "up2": {"kernel_size": 2, "stride": 2},
    "gan": {"kernel_size": 4, "stride": 2, "padding": 1},
    "output-padding": {"stride": 2, "padding": 1, "output_padding": 1},
    "stride-over-kernel": {"kernel_size": 2, "stride": 3},
    "padding2": {"padding": 2},
    "dilation2": {"dilation": 2, "stride": 2},
    "groups2": {"groups": 2, "stride": 2},
    "depthwise": {"groups": 4, "out_channels": 4, "stride": 2},
    "no-bias": {"bias": False},
    "kernel1": {"kernel_size": 1},
}


def image(dims: int, channels: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(2, channels, *IMAGE[dims], generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dims", [1, 2, 3], ids=["1d", "2d", "3d"])
def test_three_products_are_those_of_the_operands(dims: int, recipe: str, fresh: Any, check_against_oracle: Any) -> None:
    layer = fresh(CLASSES[dims], 4, 6, 3, stride=2, padding=1, recipe=recipe)
    for seed in range(4):  # clips are also held and averaged
        check_against_oracle(layer, image(dims, seed=seed) * (1.0 + seed))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dims", [1, 2, 3], ids=["1d", "2d", "3d"])
def test_constructor_option(dims: int, options: dict[str, Any], fresh: Any, check_against_oracle: Any) -> None:
    options = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **options}
    layer = fresh(CLASSES[dims], recipe="distribution-adaptive-int8", **options)
    check_against_oracle(layer, image(dims))
    assert layer(image(dims)).shape == getattr(nn, f"ConvTranspose{dims}d")(**options)(image(dims)).shape


def test_pixels_beyond_the_reach_of_the_kernel_are_the_bias(fresh: Any) -> None:
    """torch allows an output padding below the dilation. The convolution from output to input has no such pixels."""
    one, two = (fresh(Int8ConvTranspose2d, 4, 6, 3, stride=2, dilation=3, output_padding=more) for more in (1, 2))
    x = image(2).requires_grad_()
    small, large = one(x), two(x)
    g = torch.randn(large.shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(large[..., :-1, :-1], small)
    assert torch.equal(large[..., -1, :], two.bias[None, :, None].expand(2, 6, large.shape[3]))
    calls = (small, one.weight, g[..., :-1, :-1]), (large, two.weight, g)
    grads = [torch.autograd.grad(output, [x, weight], part) for output, weight, part in calls]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("size", [(10, 12), (11, 13), (2, 4, 11, 12)])
def test_an_output_size_is_that_of_torch(size: tuple[int, ...], fresh: Any) -> None:
    layer, x = fresh(Int8ConvTranspose2d, 4, 4, 2, stride=2, recipe="plain-int8"), image(2)
    twin = byteback.restore(copy.deepcopy(nn.Sequential(layer)))[0]
    output, expected = layer(x, size), twin(x, size)
    size = size[-2:]
    assert output.shape == expected.shape == (2, 4, *size) and (output - expected).norm() <= 0.05 * expected.norm()
    one = layer(x[0], list(size))
    assert one.shape == (4, *size)
    with pytest.raises(ValueError, match="requested an output size"):
        layer(x, (20, 20))


def test_without_a_batch_axis_and_what_is_refused(fresh: Any) -> None:
    layer = fresh(Int8ConvTranspose2d, 4, 6, 3, recipe="plain-int8").eval()
    assert torch.equal(layer(image(2)[0]), layer(image(2)[:1])[0])
    with pytest.raises(ValueError, match="expected input of shape"):
        layer(torch.randn(2, 5, 4, 4))
    with pytest.raises(ValueError, match=r"would have \[-1, -1\] pixels"):
        fresh(Int8ConvTranspose2d, 4, 6, 3, padding=2, recipe="plain-int8")(torch.randn(1, 4, 1, 1))
    per_channel = byteback.Recipe(weight=byteback.TensorRule(per="K"), grad_output=byteback.TensorRule(), grad_input=False)
    with pytest.raises(ValueError, match="has one scale"):
        Int8ConvTranspose2d(4, 4, 3, recipe=per_channel)
    model = byteback.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3)), per_channel)
    assert type(model[2]) is nn.ConvTranspose2d and "one scale per channel" in byteback.summary(model)[2].note


def test_the_bits_are_the_same_on_every_path_and_in_every_layout(fresh: Any) -> None:
    results = []
    for path in paths.available():
        for last in (False, True):
            layer = fresh(Int8ConvTranspose2d, 20, 35, 4, stride=2, padding=1, recipe="unified-int8")
            x = image(2, 20).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
            x.requires_grad_()
            with paths.path(path):
                output = layer(x)
                (output * torch.linspace(-1, 1, 12)).sum().backward()
            results.append([output, x.grad, layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("product", ["output", "grad_input", "grad_weight"])
def test_a_product_in_float_is_that_of_torch(product: str, fresh: Any) -> None:
    recipe = byteback.PlainInt8(**{product: False})
    layer = fresh(Int8ConvTranspose2d, 4, 6, 3, stride=2, groups=2, output_padding=1, recipe=recipe)
    twin = byteback.restore(copy.deepcopy(nn.Sequential(layer)))[0]
    results = []
    for one in (layer, twin):
        x = image(2).requires_grad_()
        output = one(x)
        output.backward(torch.ones_like(output))
        results.append({"output": output, "grad_input": x.grad, "grad_weight": one.weight.grad})
    torch.testing.assert_close(results[0][product], results[1][product])


class UNet(nn.Module):
    """One level; the second upsampling is told its size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, 2, 1, bias=False)
        self.norm, self.up = nn.BatchNorm2d(64), nn.ConvTranspose2d(64, 32, 2, 2)
        self.again, self.head = nn.ConvTranspose2d(64, 32, 3, 2, 1), nn.Conv2d(64, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        inner = self.norm(self.down(x)).relu()
        out: Tensor = self.head(torch.cat([self.up(inner) + self.again(inner, x.shape[2:]), x], 1))
        return out


def test_a_u_net_is_prepared_frozen_copied_traced_and_restored() -> None:
    torch.manual_seed(0)
    model = UNet()
    twin, x = copy.deepcopy(model), torch.randn(2, 3, 12, 12)
    byteback.prepare(model, "unified-int8")
    rows = {row.name: row for row in byteback.summary(model)}
    assert rows["up"].kind == "Int8ConvTranspose2d" and rows["up"].output == rows["again"].grad_weight == "int8"
    assert "not fused: a transposed convolution" in rows["up"].note and rows["down"].block == "conv + norm + relu"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    byteback.scale_learning_rates(optimizer, model)
    output, expected = model(x), twin(x)
    assert (output - expected).norm() <= 0.05 * expected.norm()
    output.square().mean().backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        expected = model(x)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), byteback.freeze(copy.deepcopy(model))):
            assert torch.equal(other(x), expected)
        assert torch.equal(torch.compile(model, backend="eager")(x), expected)
    graph = fx.symbolic_trace(nn.Sequential(Int8ConvTranspose2d(4, 4, 2)))
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "output"]
    byteback.restore(model)
    assert type(model.up) is nn.ConvTranspose2d and model.state_dict().keys() == twin.state_dict().keys()
