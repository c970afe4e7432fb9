# SPDX-License-Identifier: Apache-2.0
"""The float table: what it takes from int8 and what not, that a layer obeys it, and who may overrule it."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import byteback
from byteback import models, ops
from byteback.nn import Int8Conv2d, Int8Layer
from byteback.nn.layers.float_table import RULES, Geometry, why_float

pytestmark = pytest.mark.float_table


def conv(c: int, k: int, kernel: Any, stride: int = 1, dilation: int = 1, groups: int = 1) -> Geometry:
    kernel = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    return Geometry(c, k, groups, kernel, (stride,) * len(kernel), (dilation,) * len(kernel))


@pytest.mark.parametrize(
    ("geometry", "int8"),
    [
        pytest.param(conv(64, 64, 3), True, id="3x3"),
        pytest.param(conv(8, 8, 3), True, id="3x3 with 8 channels"),
        pytest.param(conv(3, 64, 3), True, id="3x3, few inputs, many outputs"),
        pytest.param(conv(64, 1, 3), True, id="3x3, few outputs, many inputs"),
        pytest.param(conv(16, 32, 3, 2), True, id="strided, of ResNet-20"),
        pytest.param(conv(16, 16, 1), True, id="1x1 is not in the table"),
        pytest.param(conv(192, 192, (1, 7)), True, id="1x7 of Inception"),
        pytest.param(conv(256, 256, 3, dilation=2), True, id="dilated"),
        pytest.param(conv(96, 96, 7, groups=96), True, id="depthwise 7x7"),
        pytest.param(conv(16, 16, 3, groups=16), True, id="depthwise with 16 channels"),
        pytest.param(conv(96, 256, 5, groups=2), True, id="two groups, of AlexNet"),
        pytest.param(conv(1024, 1024, 3, groups=32), True, id="32 channels per group"),
        pytest.param(conv(64, 64, (1, 3, 3)), True, id="a plane in 3-D"),
        pytest.param(conv(16, 16, (3, 3, 3)), True, id="3-D with 16 channels"),
        pytest.param(conv(64, 64, (3, 3, 3), groups=64), True, id="3-D depthwise"),
        pytest.param(conv(64, 64, (9,)), True, id="1-D with much to do"),
        pytest.param(conv(256, 256, (31,), groups=256), True, id="1-D depthwise, 31 taps"),
        pytest.param(Geometry(512, 100), True, id="Linear"),
        pytest.param(conv(128, 128, 3, groups=32), False, id="ResNeXt, 4 channels per group"),
        pytest.param(conv(992, 992, 3, groups=32), False, id="31 channels per group"),
        pytest.param(conv(32, 64, 3, groups=32), False, id="depthwise with two outputs each"),
        pytest.param(conv(3, 64, 7, 2), False, id="the first layer of ResNet"),
        pytest.param(conv(3, 768, 16, 16), False, id="patches"),
        pytest.param(conv(16, 16, 5), False, id="5x5 with 16 channels"),
        pytest.param(conv(64, 8, 5), False, id="5x5, few outputs"),
        pytest.param(conv(8, 8, 3, dilation=2), False, id="dilation keeps Winograd out"),
        pytest.param(conv(3, 32, 3), False, id="3x3, few inputs"),
        pytest.param(conv(8, 3, 3), False, id="3x3, few outputs"),
        pytest.param(conv(1, 1, 3), False, id="one channel"),
        pytest.param(conv(3, 3, 11, groups=3), False, id="depthwise with 3 channels"),
        pytest.param(conv(32, 32, (3,)), False, id="1-D with little to do"),
        pytest.param(conv(256, 256, (3,), groups=256), False, id="1-D depthwise, 3 taps"),
        pytest.param(Geometry(512, 10), False, id="a classifier"),
    ],
)
def test_what_the_table_takes(geometry: Geometry, int8: bool) -> None:
    assert (why_float(geometry) is None) == int8


def test_every_rule_says_why_in_a_few_words_and_names_a_known_kind() -> None:
    for rule in RULES:
        assert 2 <= len(rule.why.split()) <= 12
        assert rule.kind in {"linear", "depthwise", "winograd", "pointwise", "gemm"}


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "mobilenet_v2", "vgg16_bn"])
def test_the_papers_networks_run_in_int8_throughout(name: str) -> None:
    model = byteback.prepare(models.build(name), "unified-int8")
    layers = [module for module in model.modules() if isinstance(module, Int8Layer)]
    assert len(layers) > 10 and all(layer.runs_int8() for layer in layers)


# ---- a layer obeys ----


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """output, grad_input and grad_weight of one pass."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    output.backward(torch.linspace(-1, 1, output.numel()).reshape(output.shape))
    assert x.grad is not None and isinstance(layer.weight, nn.Parameter) and layer.weight.grad is not None
    return [output.detach(), x.grad, layer.weight.grad.clone()]


def int8_and_float(*args: Any, recipe: byteback.Recipe | None = None, **kwargs: Any) -> tuple[Int8Conv2d, nn.Conv2d]:
    torch.manual_seed(0)
    layer = Int8Conv2d(*args, recipe=recipe or byteback.PlainInt8(), bias=False, **kwargs)
    plain = nn.Conv2d(*args, bias=False, **kwargs)
    plain.load_state_dict({"weight": layer.weight.detach()})
    return layer, plain


def test_a_layer_that_float_serves_whole_is_torchs_own_to_the_bit() -> None:
    layer, plain = int8_and_float(32, 32, 3, groups=8)
    x = torch.randn(2, 32, 9, 9)
    assert all(map(torch.equal, gradients(layer, x), gradients(plain, x)))
    assert int(layer.quantizers.count) == 0 and not bool(layer.quantizers.input.seen.any())


@pytest.mark.parametrize("how", ["strict", "path"])
def test_strict_and_path_run_int8_all_the_same(how: str) -> None:
    x = torch.randn(2, 32, 9, 9)
    strict, plain = int8_and_float(32, 32, 3, groups=8, recipe=byteback.PlainInt8(strict=True))
    expected = gradients(strict, x)
    assert not torch.allclose(expected[0], gradients(plain, x)[0], rtol=1e-4, atol=1e-4)
    if how == "strict":
        q = [ops.quantize(t, ops.absmax(t))[:2] for t in (x, strict.weight.detach())]
        assert torch.equal(expected[0], ops.conv_int8(*q[0], *q[1], (1, 1), (0, 0), (1, 1), 8))
        return
    layer, _ = int8_and_float(32, 32, 3, groups=8)
    with byteback.path("reference"):
        assert layer.runs_int8()
        assert torch.equal(gradients(layer, x)[0], expected[0])
    assert not layer.runs_int8()


def test_backward_keeps_to_what_forward_did() -> None:
    """A path that opens or closes between the two changes nothing: backward runs on what forward saved."""
    for opens in (False, True):
        layer, _ = int8_and_float(64, 8, 5)
        x = torch.randn(2, 64, 9, 9, requires_grad=True)
        if opens:
            loss = layer(x).sum()
            with byteback.path("reference"):
                loss.backward()
        else:
            with byteback.path("reference"):
                loss = layer(x).sum()
            loss.backward()
        assert x.grad is not None and x.grad.isfinite().all()


def test_the_decision_travels_with_copies_and_leaves_with_restore() -> None:
    model = byteback.prepare(nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 8, 5)), "plain-int8")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not twin[1].runs_int8() and "output channels" in twin[1].faster_in_float
    byteback.restore(model)
    assert model[1].__dict__.keys() == nn.Conv2d(64, 8, 5).__dict__.keys()


def test_linear_obeys_too() -> None:
    model = byteback.prepare(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 10)), byteback.PlainInt8(linear=True))
    assert [layer.runs_int8() for layer in model] == [True, False]
    twin = byteback.restore(copy.deepcopy(model))
    x = torch.randn(4, 128)
    assert torch.equal(model[1](x), twin[1](x)) and not torch.equal(model[0](x), twin[0](x))


# ---- and says so ----


def test_summary_shows_the_float_layers_and_how_to_force_int8() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3, groups=16), nn.Conv2d(64, 64, 5))
    first, grouped, plain = byteback.summary(byteback.prepare(model, "plain-int8", fuse=False))
    assert "first convolution" in first.note
    assert (grouped.output, grouped.grad_input, grouped.grad_weight) == ("float",) * 3
    assert grouped.note == "float is faster here: fewer than 32 channels per group (Recipe.strict forces int8)"
    assert (plain.output, plain.grad_input, plain.grad_weight, plain.note) == (*["int8"] * 3, "")
    with byteback.path("reference"):
        row = byteback.summary(model)[1]
        assert (row.output, row.note) == ("int8", "")
    byteback.enabled(model, False)
    assert "byteback.enabled" in byteback.summary(model)[1].note


def test_health_is_silent_about_tensors_that_stay_float() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3, groups=16), nn.Conv2d(64, 64, 5))
    byteback.prepare(model, "plain-int8")
    model(torch.randn(2, 3, 12, 12)).sum().backward()
    assert {row.layer for row in byteback.health(model)} == {"2"}


def test_prepare_warns_where_float_serves_everything() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))

    with pytest.warns(UserWarning, match="strict=True"):
        byteback.prepare(model(), "plain-int8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        byteback.prepare(model(), byteback.PlainInt8(strict=True))


def test_strict_survives_json() -> None:
    recipe = byteback.UnifiedInt8(strict=True)
    assert byteback.Recipe.from_dict(recipe.to_dict()) == recipe != byteback.UnifiedInt8()
    assert '"strict": true' in recipe.to_json()


def test_compiled_layer_obeys_and_sees_a_path_open() -> None:
    layer, plain = int8_and_float(32, 32, 3, groups=8)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 32, 9, 9)
    torch.testing.assert_close(compiled(x), plain(x))
    with byteback.path("reference"):
        assert torch.equal(compiled(x), layer(x)) and not torch.allclose(layer(x), plain(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compiled(x), plain(x))


def test_bench_marks_what_float_serves_and_still_times_the_kernel() -> None:
    kernels = pytest.importorskip("byteback.bench.kernels")
    shapes = pytest.importorskip("byteback.bench.shapes")
    grouped = shapes.ConvCase(1, 16, 16, 6, 6, 3, 3, padding_h=1, padding_w=1, groups=4)
    plain = shapes.ConvCase(1, 8, 8, 6, 6, 3, 3, padding_h=1, padding_w=1)
    timings = kernels.measure("here", grouped, 1) + kernels.measure("here", plain, 1)
    assert [t.falls_back is not None for t in timings] == [True] * 3 + [False] * 3
    assert all(t.ratio > 0 for t in timings) and [t.user_ratio for t in timings[:3]] == [1.0] * 3
    summary = kernels.summarize(timings, {})
    assert (summary["float_serves"], summary["products"]) == (3, 6)
