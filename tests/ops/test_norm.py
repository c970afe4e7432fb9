# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a norm: native against the reference with ==, and both against torch's own BatchNorm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import byteback
from byteback import ops
from byteback.ops.backends import paths


def made(path: str, x: torch.Tensor, norm: nn.BatchNorm2d, bias: torch.Tensor | None, activation: str) -> list[torch.Tensor]:
    running = norm.running_mean.clone(), norm.running_var.clone()
    with byteback.path(path):
        stats = ops.channel_stats(x)
        count = x.numel() // x.shape[1]
        gamma, beta = (norm.weight.detach(), norm.bias.detach()) if norm.affine else (None, None)
        forward = ops.norm_coefficients(stats, count, gamma, beta, bias, norm.eps, running, 0.3, activation)
        g = torch.linspace(-1.0, 2.0, x.numel()).reshape(x.shape)
        seen = ops.normalize_grad_sums(g, x, None, None, None, "none", want_masked=False, want_squares=True)
        total, dot, squares, _ = seen
        a, _, mean, invstd, _ = forward
        backward = ops.norm_gradient(a, mean, invstd, total, dot, count)
        sums = ops.gradient_sums(a, *backward[:2], mean, invstd, norm.eps, total, dot, squares, count)
    return [*forward, *running, *backward, *sums]


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu", "relu6"])
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_native_equals_reference(affine: bool, activation: str, offset: float) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(11, affine=affine)
    if affine:
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    x = torch.randn(3, 11, 5, 7) * 4.0 + offset
    bias = torch.randn(11)
    expected = made("reference", x, norm, bias, activation)
    for path in paths.available():
        for a, b in zip(made(path, x, norm, bias, activation), expected, strict=True):
            assert torch.equal(a, b), path


def test_against_batch_norm() -> None:
    torch.manual_seed(1)
    norm = nn.BatchNorm2d(6, momentum=0.3)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    x = torch.randn(4, 6, 5, 5, requires_grad=True)
    a, b, _, _, peak, mean, var, q, r, gamma, beta, total, squares = made("reference", x.detach(), norm, None, "relu")
    column = (1, -1, 1, 1)
    y = norm(x)
    torch.testing.assert_close(x.detach() * a.reshape(column) + b.reshape(column), y.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(peak, y.detach().relu().amax(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close((mean, var), (norm.running_mean, norm.running_var))
    g = torch.linspace(-1.0, 2.0, x.numel()).reshape(x.shape)
    y.backward(g)
    torch.testing.assert_close(g * a.reshape(column) + x.detach() * q.reshape(column) + r.reshape(column), x.grad)
    torch.testing.assert_close((gamma, beta), (norm.weight.grad, norm.bias.grad), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(squares.float(), (x.grad**2).sum([0, 2, 3]), rtol=1e-4, atol=0.0)
    torch.testing.assert_close(total.float(), x.grad.sum([0, 2, 3]), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("spread", [1.0, 1e-2, 3e-3, 1e-4])
def test_the_spread_of_a_gradient_is_known_also_where_eps_decides(spread: float) -> None:
    """sqrt(eps) is 3e-3: below it the norm hardly divides by the deviation any more."""
    torch.manual_seed(2)
    norm = nn.BatchNorm2d(5)
    x = torch.randn(4, 5, 6, 6) * spread + 0.3
    *_, total, squares = made("reference", x, norm, None, "none")
    leaf = x.double().requires_grad_()
    norm.double()(leaf).backward(torch.linspace(-1.0, 2.0, x.numel()).reshape(x.shape).double())
    torch.testing.assert_close(squares, (leaf.grad**2).sum([0, 2, 3]), rtol=1e-4, atol=0.0)
    assert (total.abs() <= 1e-5 * leaf.grad.abs().sum([0, 2, 3])).all()


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_norm_with_given_statistics(affine: bool, with_bias: bool) -> None:
    torch.manual_seed(2)
    mean, var, *others = torch.randn(5, 13)
    var = var.abs() * 10.0 ** torch.arange(-6.0, 7.0)
    var[3], others[0][4] = 0.0, float("nan")
    gamma, beta, bias = (v if wanted else None for v, wanted in zip(others, (affine, affine, with_bias), strict=True))
    results = {}
    for path in paths.available():
        with byteback.path(path):
            results[path] = ops.norm_folded(mean, var, gamma, beta, bias, 1e-5)
    for path, (a, b) in results.items():
        for made, expected in zip((a, b), results["reference"], strict=True):
            assert torch.equal(made.nan_to_num(7.0), expected.nan_to_num(7.0)), path
    x = torch.randn(4, 13, 2, 2)
    a, b = (vector.reshape(1, -1, 1, 1) for vector in results["reference"])
    shifted = x if bias is None else x + bias.reshape(1, -1, 1, 1)
    expected = torch.nn.functional.batch_norm(shifted, mean, var, gamma, beta, False, 0.0, 1e-5)
    torch.testing.assert_close(a * x + b, expected, rtol=1e-4, atol=1e-2, equal_nan=True)


def test_nan_reaches_the_peak() -> None:
    x = torch.randn(2, 3, 4, 4)
    x[1, 2, 0, 0] = float("nan")
    for path in paths.available():
        assert made(path, x, nn.BatchNorm2d(3), None, "relu")[4].isnan()
