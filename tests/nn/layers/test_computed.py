# SPDX-License-Identifier: Apache-2.0
"""Layers whose weight is computed in each call: products, gradients of what it is computed from, prepare to restore."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import byteback
from byteback.nn.layers.computed import convolutions_of, weight_parameters

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of the older weight_norm


class Plain(nn.Conv2d):
    """Overrides forward and computes what nn.Conv2d computes."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Standardized(nn.Conv2d):
    """As timm's ScaledStdConv2d."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def forward(self, input: Tensor) -> Tensor:
        flat, scale = self.weight.reshape(1, self.out_channels, -1), self.weight[0].numel() ** -0.5
        weight = F.batch_norm(flat, None, None, weight=(self.gain * scale).view(-1), training=True, momentum=0.0, eps=1e-6)
        weight = weight.reshape_as(self.weight)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Same(nn.Conv2d):
    """As timm's Conv2dSame: pads more on the right."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(F.pad(input, (0, 1, 0, 1)), self.weight, self.bias, self.stride, (0, 0), self.dilation, self.groups)


class Doubled(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Inner(nn.Conv2d):
    """Overrides what nn.Conv2d.forward calls."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight * 0.5, bias)


def conv(cls: type[nn.Conv2d] = nn.Conv2d, **options: Any) -> nn.Module:
    return cls(16, 16, 3, **{"padding": 1, "bias": False, **options})


CASES: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(conv()),
    "spectral_norm": lambda: parametrizations.spectral_norm(conv()),
    "old weight_norm": lambda: nn.utils.weight_norm(conv()),
    "old spectral_norm": lambda: nn.utils.spectral_norm(conv()),
    "standardized": lambda: conv(Standardized),
    "same": lambda: conv(Same, stride=2, padding=0),
    "inner": lambda: conv(Inner, bias=True),
    "doubled": lambda: conv(Doubled),
}
UNFUSED = ("old weight_norm", "old spectral_norm", "doubled")


def network(middle: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    tail = nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), middle(), *tail)


def prepared(middle: Callable[[], nn.Module], **options: Any) -> nn.Sequential:
    model = network(middle)
    torch.manual_seed(5)
    byteback.prepare(model, byteback.UnifiedInt8(strict=True), **options)
    return model


def images() -> Tensor:
    return torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(3))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters())]  # type: ignore[misc]


@pytest.mark.parametrize("name", CASES)
def test_all_products_run_in_int8_and_gradients_reach_the_parameters(name: str) -> None:
    model, twin, x = prepared(CASES[name]), network(CASES[name]), images()
    row = byteback.summary(model)[1]
    assert (row.output, row.grad_input, row.grad_weight) == ("int8",) * 3
    assert row.block == ("" if name in UNFUSED else "conv + norm + relu")
    output, expected = model(x), twin(x)
    assert 0 < (output - expected).norm() <= 0.05 * expected.norm()
    output.square().mean().backward(), expected.square().mean().backward()
    own, theirs = weight_parameters(model[1])[-1], weight_parameters(twin[1])[-1]
    if name == "standardized":  # the gradient of a gain before a norm is 0
        own, theirs = model[1].weight, twin[1].weight
    assert F.cosine_similarity(own.grad.flatten(), theirs.grad.flatten(), 0) > 0.98
    for key, buffer in twin.named_buffers():  # spectral_norm has iterated as often as in float
        if key.startswith("1."):
            assert torch.equal(dict(model.named_buffers())[key], buffer)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("way", ["subclass", "parametrization"])
def test_the_bits_are_those_of_a_plain_layer(way: str, fuse: bool) -> None:
    def same() -> nn.Module:
        if way == "subclass":
            return conv(Plain)
        layer = conv()
        parametrize.register_parametrization(layer, "weight", nn.Identity())
        return layer

    results = [gradients(prepared(middle, fuse=fuse), images()) for middle in (conv, same)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_restoring_copying_freezing_and_connecting(name: str) -> None:
    model, x = prepared(CASES[name]), images()
    before, keys = type(network(CASES[name])[1]).__name__, network(CASES[name]).state_dict().keys()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9)
    scaling = byteback.scale_learning_rates(optimizer, model)
    assert list(scaling.layers) == ["1", "4"]
    gradients(model, x)
    optimizer.step()
    assert int(model[1].quantizers.iteration) == 1
    model.eval()
    with torch.no_grad():
        expected = model(x)
        if not name.startswith("old"):  # torch cannot copy these
            assert torch.equal(copy.deepcopy(model)(x), expected)
        assert torch.equal(byteback.freeze(model)(x), expected)
        byteback.unfreeze(model)
        assert byteback.float_state_dict(model).keys() == keys
        byteback.restore(model)
        assert type(model[1]).__name__ == before and (model(x) - expected).norm() <= 0.05 * expected.norm()


def test_learning_rate_factors_scale_all_that_a_weight_is_computed_from() -> None:
    model = prepared(CASES["standardized"])
    scaling = byteback.scale_learning_rates(torch.optim.SGD(model.parameters(), lr=0.1), model)
    found = [id(weight) for weight, *_ in scaling._by_weight()]
    assert found == [id(model[1].weight), id(model[1].gain), id(model[4].weight)]


def test_a_parametrization_is_removed_or_added_after_prepare() -> None:
    model = prepared(CASES["weight_norm"])
    parametrize.register_parametrization(model[1], "weight", nn.Identity())
    parametrize.remove_parametrizations(model[1], "weight")
    assert type(model[1]) is byteback.Int8Conv2d and model(images()).isfinite().all()
    model = prepared(lambda: parametrizations.weight_norm(conv(bias=True)))
    parametrize.register_parametrization(model[1], "bias", nn.Identity())
    with pytest.raises(ValueError, match="got a parametrization after prepare"):
        byteback.restore(model)


class Twice(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + super().forward(input)


class Other(nn.Conv2d):
    """Another geometry than the layer says."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight, self.bias, 2)


class Fails(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        raise KeyError("a mask")


def test_what_a_forward_does() -> None:
    found = {
        cls.__name__: convolutions_of(conv(cls)) for cls in (Plain, Same, Standardized, Inner, Doubled, Twice, Other, Fails)
    }
    last = dict.fromkeys(("Plain", "Same", "Standardized", "Inner"), "last")
    assert found == {**last, "Doubled": "inside", "Twice": "none", "Other": "none", "Fails": "none"}
