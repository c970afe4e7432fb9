# SPDX-License-Identifier: Apache-2.0
"""Max-pools of activations: PyTorch's numbers whatever the layout, what is saved, and what is left to PyTorch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import byteback
from byteback.nn.fused.sources import LazyActivation, Poolable, source_of
from byteback.ops.backends import paths

pytestmark = pytest.mark.skipif(paths.number() is None, reason="the reference path leaves pools to PyTorch")


def network(pool: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(3)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), pool or nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3))
    return byteback.prepare(nn.Sequential(*layers), "plain-int8")


def images(last: bool = True) -> Tensor:
    x = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(5))
    return x.contiguous(memory_format=torch.channels_last) if last else x


def saved_by(run: Any) -> list[Tensor]:
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return seen


class TorchsPool(nn.Module):
    """A pool that the plan takes for nothing in particular, so that PyTorch serves it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.max_pool2d_with_indices(x + 0.0, [3, 3], [2, 2], [1, 1])[0]


@pytest.mark.parametrize("last", [True, False])
def test_a_network_has_the_numbers_that_pytorchs_pool_gives_it(last: bool) -> None:
    results = []
    for pool in (nn.MaxPool2d(3, 2, 1), TorchsPool()):
        model, x = network(pool), images(last).requires_grad_()
        output = model(x)
        output.square().sum().backward()
        results.append([output.detach(), x.grad, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("last", [True, False])
def test_the_pooled_activation_lies_as_pytorchs_would(last: bool) -> None:
    x = network()[:3](images(last))
    assert type(x) is Poolable
    pooled = F.max_pool2d(x, 3, 2, 1)
    assert type(pooled) is LazyActivation and pooled.shape == (2, 8, 6, 6)
    assert pooled.stride() == F.max_pool2d(x + 0.0, 3, 2, 1).stride()


OPTIONS = [(2,), ((2, 3), (1, 2)), ([3], [2], [1]), (3, (), 1, 2)]
CALLS = [*((pool, options) for pool in (F.max_pool2d, torch.max_pool2d) for options in OPTIONS), (F.max_pool2d, (2, None))]


@pytest.mark.parametrize(("pool", "options"), CALLS)
def test_every_way_to_call_it(pool: Any, options: tuple[Any, ...]) -> None:
    x = network()[:3](images())
    taps: list[Tensor] = []
    saved = saved_by(lambda: taps.append(pool(x, *options)))
    assert torch.equal(taps[0] + 0.0, pool(x + 0.0, *options))
    assert [tensor.dtype for tensor in saved] == [torch.uint8]


def test_what_it_does_not_know_is_pytorchs() -> None:
    x = network()[:3](images())
    values, where = F.max_pool2d(x, 2, return_indices=True)
    assert torch.equal(values + 0.0, F.max_pool2d(x + 0.0, 2)) and where.dtype is torch.int64
    for options in ((0,), ((1, 2, 3),), (2, 2, 2), (50,)):  # no window, three axes, too much padding, too large
        with pytest.raises(RuntimeError):
            F.max_pool2d(x, *options)
    with pytest.raises(TypeError):
        F.max_pool2d(x, "two")
    x[:, 0] = 3.0  # the floats are the only truth from here on
    assert source_of(x) is None and torch.equal(F.max_pool2d(x, 2), F.max_pool2d(x + 0.0, 2))


def test_without_gradients() -> None:
    model = network()
    expected = model(images())
    with torch.no_grad():
        assert torch.equal(model(images()), expected)
    with torch.inference_mode():
        assert torch.equal(model(images()), expected)


def test_two_backward_passes_but_no_second_derivative() -> None:
    model, x = network(), images().requires_grad_()
    output = model[:4](x)
    first = torch.autograd.grad(output.sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(output.sum(), x, retain_graph=True)[0])
    second = torch.autograd.grad((output + 0.0).square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiated a second time"):
        second.sum().backward()


def test_a_poolable_activation_can_be_copied_and_pickled() -> None:
    x = network()[:3](images()).detach()
    assert type(x) is Poolable
    for twin in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert type(twin) is Tensor and torch.equal(twin, x + 0.0)
    assert "tensor(" in repr(x)
