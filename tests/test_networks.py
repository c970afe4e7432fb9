# SPDX-License-Identifier: Apache-2.0
"""The papers' networks, and one for video, take a training step in int8: whole, and layer by layer.

Whole: from the same weights on the same images the loss is within 5 percent of float's, and every int8 layer gets a finite
gradient. Layer by layer: fed exactly what the float run fed it, each of a layer's three products points where the float
product points (cosine > 0.99), so no error of an earlier layer can hide or excuse one here.

Images are as small as leaves BatchNorm enough values to average; Inception's auxiliary head needs the full 299 pixels.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import byteback
from byteback.nn import Int8Layer
from byteback.torchvision_compat import load

RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]
LOSS_TOLERANCE = 0.05
COSINE = 0.99


def torchvision_models() -> ModuleType:
    try:
        return load().models
    except ImportError:
        pytest.skip("torchvision is not installed")


@dataclass(frozen=True)
class Network:
    build: Callable[[ModuleType], nn.Module]
    images: tuple[int, ...]
    int8_layers: int


NETWORKS = {
    "resnet18": Network(lambda m: m.resnet18(num_classes=10), (8, 3, 64, 64), 19),
    "mobilenet_v2": Network(lambda m: m.mobilenet_v2(num_classes=10), (8, 3, 64, 64), 51),
    "vgg16": Network(lambda m: m.vgg16(num_classes=10), (2, 3, 32, 32), 12),
    "alexnet": Network(lambda m: m.alexnet(num_classes=10), (4, 3, 64, 64), 4),
    "r3d_18": Network(lambda m: m.video.r3d_18(num_classes=10), (4, 3, 8, 32, 32), 19),
    "inception_v3": Network(
        lambda m: m.inception_v3(num_classes=10, aux_logits=True, transform_input=False, init_weights=False),
        (4, 3, 299, 299),
        95,
    ),
}
# Inception at 299 pixels costs ten seconds a step on one core, so the unit floor takes one recipe through it.
CASES = [
    pytest.param(name, slug, marks=[pytest.mark.slow] if name == "inception_v3" and slug != "unified-int8" else [])
    for name in NETWORKS
    for slug in RECIPES
]


@dataclass(frozen=True)
class FloatRun:
    """What one float training step did, for every int8 layer to be compared with."""

    name: str
    model: nn.Module  # untouched by the step: weights and BatchNorm statistics from before it
    images: Tensor
    labels: Tensor
    loss: float
    inputs: dict[str, Tensor]
    grad_outputs: dict[str, Tensor]


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    output = model(images)
    if isinstance(output, tuple):  # Inception: (logits, auxiliary logits), weighted as in its paper
        return F.cross_entropy(output[0], labels) + 0.4 * F.cross_entropy(output[1], labels)
    return F.cross_entropy(output, labels)


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest) -> FloatRun:
    """One network at a time: pytest orders the tests by it, so that six networks never fill the memory together."""
    return float_run(request.param)


@functools.lru_cache(maxsize=1)
def float_run(name: str) -> FloatRun:
    network = NETWORKS[name]
    torch.manual_seed(0)
    model = network.build(torchvision_models())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # its mask would differ between the two runs
    images, labels = torch.randn(network.images), torch.arange(network.images[0]) % 10
    running = copy.deepcopy(model)
    inputs: dict[str, Tensor] = {}
    grad_outputs: dict[str, Tensor] = {}
    for key, module in running.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            module.register_forward_hook(functools.partial(_keep, inputs, grad_outputs, key))
    loss = loss_of(running, images, labels)
    loss.backward()
    return FloatRun(name, model, images, labels, loss.item(), inputs, grad_outputs)


def _keep(inputs: dict, grad_outputs: dict, key: str, module: nn.Module, args: tuple, output: Tensor) -> None:
    # Clones: the ReLU that follows may overwrite either in place.
    inputs[key] = args[0].detach().clone()
    output.register_hook(lambda gradient: grad_outputs.__setitem__(key, gradient.detach().clone()))


def cosine(one: Tensor, other: Tensor) -> float:
    a, b = one.detach().double().flatten(), other.detach().double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def products(layer: nn.Module, x: Tensor, grad_output: Tensor) -> dict[str, Tensor]:
    """output (without bias), grad_input and grad_weight of one layer."""
    x = x.clone().requires_grad_()
    output = layer(x)
    grad_input, grad_weight = torch.autograd.grad(output, (x, layer.weight), grad_output)
    bias = 0.0 if layer.bias is None else layer.bias.reshape(-1, *(1,) * (x.dim() - 2))
    return {"output": output - bias, "grad_input": grad_input, "grad_weight": grad_weight}


@pytest.mark.parametrize(("run", "slug"), CASES, indirect=["run"])
def test_a_training_step_stays_close_to_float(run: FloatRun, slug: str) -> None:
    model = byteback.prepare(copy.deepcopy(run.model), slug)
    layers = {key: module for key, module in model.named_modules() if isinstance(module, Int8Layer)}
    assert len(layers) == NETWORKS[run.name].int8_layers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    byteback.scale_learning_rates(optimizer, model)
    before = {key: layer.weight.detach().clone() for key, layer in layers.items()}

    loss = loss_of(model, run.images, run.labels)
    loss.backward()
    optimizer.step()

    assert abs(loss.item() - run.loss) <= LOSS_TOLERANCE * run.loss, f"int8 loss {loss.item()}, float loss {run.loss}"
    for key, layer in layers.items():
        assert layer.weight.grad is not None, f"{key} got no gradient"
        assert bool(layer.weight.grad.isfinite().all()), f"{key} got a non-finite gradient"
        assert bool(layer.weight.grad.any()), f"{key} got a gradient of zeros"
        assert not torch.equal(layer.weight, before[key]), f"the step left {key} where it was"
        assert int(layer.quantizers.count) == 1, f"{key} quantized {int(layer.quantizers.count)} gradients"


@pytest.mark.parametrize(("run", "slug"), CASES, indirect=["run"])
def test_every_product_points_where_floats_points(run: FloatRun, slug: str) -> None:
    model = byteback.prepare(copy.deepcopy(run.model), slug)
    worse = []
    compared = 0
    for key, layer in model.named_modules():
        if not isinstance(layer, Int8Layer):
            continue
        exact = products(run.model.get_submodule(key), run.inputs[key], run.grad_outputs[key])
        for product, value in products(layer, run.inputs[key], run.grad_outputs[key]).items():
            compared += 1
            similarity = cosine(value, exact[product])
            if not similarity > COSINE:
                worse.append(f"{key} {product} {tuple(exact[product].shape)}: cosine {similarity:.5f}")
    assert compared == 3 * NETWORKS[run.name].int8_layers
    assert not worse, f"{len(worse)} of {compared} products of {run.name} under {slug}:\n" + "\n".join(worse)
