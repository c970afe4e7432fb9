# SPDX-License-Identifier: Apache-2.0
"""The float products are autograd's own, in every geometry: they serve what a recipe keeps in float."""

import pytest
import torch
from torch.nn import functional as F

from byteback.nn.autograd import ConvProducts, LinearProducts

GEOMETRIES = {
    "1d": ((2, 4, 9), (6, 4, 3), ((2,), (1,), (1,), 1)),
    "2d": ((2, 4, 7, 8), (6, 2, 3, 2), ((1, 2), (1, 0), (2, 1), 2)),
    "3d": ((1, 4, 5, 4, 6), (4, 1, 3, 2, 1), ((1, 1, 1), (1, 1, 0), (1, 1, 1), 4)),
}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("x_shape", "w_shape", "geometry"), GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_float_convolution(x_shape, w_shape, geometry):
    x, w = random(*x_shape).requires_grad_(), random(*w_shape, seed=1).requires_grad_()
    stride, padding, dilation, groups = geometry
    conv = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
    expected = conv(x, w, None, stride, padding, dilation, groups)
    g = random(*expected.shape, seed=2)
    grad_input, grad_weight = torch.autograd.grad(expected, (x, w), g)
    products = ConvProducts(*geometry)
    with torch.no_grad():
        assert torch.equal(products.float_output(x, w), expected)
        assert torch.equal(products.float_grad_input(g, w, list(x_shape)), grad_input)
        assert torch.equal(products.float_grad_weight(g, x, list(w_shape)), grad_weight)


def test_float_linear():
    x, w = random(5, 4).requires_grad_(), random(3, 4, seed=1).requires_grad_()
    expected = F.linear(x, w)
    g = random(5, 3, seed=2)
    grad_input, grad_weight = torch.autograd.grad(expected, (x, w), g)
    products = LinearProducts()
    with torch.no_grad():
        assert torch.allclose(products.float_output(x, w), expected, rtol=1e-6, atol=1e-6)
        assert torch.allclose(products.float_grad_input(g, w, [5, 4]), grad_input, rtol=1e-6, atol=1e-6)
        assert torch.allclose(products.float_grad_weight(g, x, [3, 4]), grad_weight, rtol=1e-6, atol=1e-6)
