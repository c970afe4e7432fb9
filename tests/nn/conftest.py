# SPDX-License-Identifier: Apache-2.0
"""The oracle of every int8 layer: a fake-quantized float64 product, built from copies of the layer's own quantizers.

Its bound is principled. The layer sums integers exactly and leaves them with `float(acc) * (scale * scale)`: three
roundings to float32, together less than 2^-22 of the result. The oracle's own float64 sum is off by less than 2^-45 of
the sum of absolute terms. Nothing else may differ.
"""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from byteback import ops
from byteback.quantize import Moment, quantize_fresh

FLOAT32, FLOAT64 = 2.0**-22, 2.0**-45


class Product(NamedTuple):
    value: torch.Tensor
    bound: torch.Tensor


def _products(layer, x, w, g_for_input, g_for_weight):
    """The three float64 products of already padded operands."""

    def product(x, w):
        if isinstance(layer, nn.Linear):
            return x @ w.t()
        if layer.transposed:
            conv = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[len(layer.kernel_size)]
            return conv(x, w, None, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
        conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(layer.kernel_size)]
        return conv(x, w, None, layer.stride, 0, layer.dilation, layer.groups)

    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    output = product(x, w)
    (grad_input,) = torch.autograd.grad(output, x, g_for_input, retain_graph=True)
    (grad_weight,) = torch.autograd.grad(output, w, g_for_weight)
    return output.detach(), grad_input, grad_weight


def _oracle(layer, x, grad_output):
    """{product: (value, bound)} in float64 for a layer that has not seen x yet; the layer is left alone."""
    numerics = copy.deepcopy(layer.quantizers)
    leaf = x.detach().requires_grad_()
    if isinstance(layer, nn.Linear):
        shape, padded = x.shape, leaf.reshape(-1, layer.in_features)
        grad_output = grad_output.reshape(-1, layer.out_features)
    else:
        mode = {"zeros": "constant"}.get(layer.padding_mode, layer.padding_mode)
        border = [0, 0] * len(layer.kernel_size) if layer.transposed else layer._reversed_padding_repeated_twice
        padded = F.pad(leaf, border, mode=mode)
        shape = None
    moment = Moment(numerics.iteration, 0, True)
    with torch.no_grad():
        x_q = numerics.input.quantize(padded, numerics.handles["input"], moment, numerics.nonfinite)
        w_q = quantize_fresh(layer.weight, numerics.handles["weight"], numerics.iteration)
        key = ops.noise_key(numerics.seed, numerics.layer, numerics.count)
        copies = []
        for field in ("grad_output", "grad_output_for_weight"):
            quantizer = getattr(numerics, field)
            if quantizer is None:
                copies.append(copies[0])
                continue
            noise = key if numerics.settings[field].rule.rounding == "stochastic" else None
            copies.append(quantizer.quantize(grad_output, numerics.handles[field], moment, numerics.nonfinite, noise))
        if layer.shares_gradient():
            copies[0] = copies[1]
    operands = [q.values.double() * q.scale.double() for q in (x_q, w_q, *copies)]
    values = _products(layer, *operands)
    sizes = _products(layer, *(operand.abs() for operand in operands))
    found = {}
    for name, value, size in zip(("output", "grad_input", "grad_weight"), values, sizes, strict=True):
        bound = FLOAT32 * value.abs() + FLOAT64 * size
        if name == "grad_input":  # back through the padding, whose backward adds float32 numbers
            double = leaf.detach().double().requires_grad_()
            if shape is None:
                again = F.pad(double, border, mode=mode)
                back = [torch.autograd.grad(again, double, part, retain_graph=True)[0] for part in (value, size)]
            else:
                back = [part.reshape(shape) for part in (value, size)]
            value = back[0]
            zeros = shape is not None or layer.padding_mode == "zeros"
            bound = FLOAT32 * value.abs() + FLOAT64 * back[1] if zeros else FLOAT32 * back[1]
        elif name == "output":
            if layer.bias is not None:
                bias = layer.bias.detach().double()
                bias = bias if shape is not None else bias.reshape(1, -1, *(1,) * (x.dim() - 2))
                value, bound = value + bias, bound + FLOAT32 * (value.abs() + bias.abs())
            if shape is not None:
                value, bound = (t.reshape(*shape[:-1], layer.out_features) for t in (value, bound))
        found[name] = Product(value, bound)
    return found


def _output_like(layer, x, seed=1):
    """A seeded gradient for the layer's output: normal, with a few large values, as gradients are."""
    twin = copy.deepcopy(layer)
    twin.enabled = False
    with torch.no_grad():
        shape = twin(x).shape
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(shape, generator=generator)
    return g * (1.0 + 5.0 * (torch.rand(shape, generator=generator) < 0.02))


def _check(layer, x, grad_output=None):
    """Runs the layer forward and back on x and compares each product with the oracle."""
    grad_output = _output_like(layer, x) if grad_output is None else grad_output
    expected = _oracle(layer, x, grad_output)
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    layer.weight.grad = None
    output = layer(leaf)
    output.backward(grad_output)
    actual = {"output": output.detach(), "grad_input": leaf.grad, "grad_weight": layer.weight.grad}
    for name, (value, bound) in expected.items():
        assert actual[name].shape == value.shape, name
        assert actual[name].dtype == torch.float32, name
        assert value.abs().max() > 0, f"{name}: an oracle of zeros proves nothing"
        worst = ((actual[name].double() - value).abs() - bound).max().item()
        assert worst <= 0.0, f"{name}: off by {worst} more than rounding explains"


def _fresh(cls, *args, recipe="plain-int8", seed=0, number=0, weights=0, name="conv", **kwargs):
    """A layer whose weights and noise depend on nothing but these arguments."""
    torch.manual_seed(weights)
    layer = cls(*args, recipe=recipe, **kwargs)
    layer.attach(recipe, seed=seed, layer=number, name=name)
    return layer


@pytest.fixture(scope="package", autouse=True)
def _one_thread():
    """Tensors here are tiny; a second thread only waits, and longest where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def check_against_oracle():
    return _check


@pytest.fixture(scope="session")
def output_like():
    return _output_like


@pytest.fixture(scope="session")
def fresh():
    return _fresh


def _state(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _same_state(a, b):
    """The names of buffers that differ."""
    one, two = dict(a.named_buffers()), dict(b.named_buffers())
    assert one.keys() == two.keys()
    return [name for name in one if not torch.equal(one[name], two[name])]


@pytest.fixture(scope="session")
def state_of():
    return _state


@pytest.fixture(scope="session")
def differing():
    return _same_state
