# SPDX-License-Identifier: Apache-2.0
"""Recorders and transforms of PyTorch on a prepared model: each works, or says in a sentence what to do instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad

import byteback
from byteback.nn.fused.lazy import LazyConv
from byteback.torchvision_compat import load
from small_blocks import Net

X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
FUSE = pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])


def trained(fuse: bool = True, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = byteback.prepare(Net(), byteback.PlainInt8(strict=True, **options), fuse=fuse)
    model(torch.randn(4, 3, 12, 12)).sum().backward()
    model.zero_grad()
    return model.eval()


@torch.no_grad()
def predict(model: Callable[[Tensor], Tensor]) -> Tensor:
    return model(X) + 0.0


# ---- torch.jit -------------------------------------------------------------------------------------------------------


@FUSE
def test_jit_trace_says_what_to_do(fuse: bool) -> None:
    model = trained(fuse)
    with pytest.raises(RuntimeError, match=r"^first\.conv1: torch\.jit\.trace cannot .*byteback\.restore.*torch\.export\.$"):
        torch.jit.trace(model, X)
    plain = byteback.restore(copy.deepcopy(model))
    assert torch.equal(predict(torch.jit.trace(plain, X)), predict(plain))
    byteback.enabled(model, False)
    assert torch.equal(predict(torch.jit.trace(model, X)), predict(plain))


@FUSE
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_jit_script_says_what_to_do(fuse: bool) -> None:
    model = trained(fuse)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script cannot .*byteback\.restore.*torch\.export\.$"):
        torch.jit.script(model)
    plain = byteback.restore(model)
    assert torch.equal(predict(torch.jit.script(plain)), predict(plain))


# ---- torch.fx --------------------------------------------------------------------------------------------------------


@FUSE
def test_symbolic_trace_records_a_layer_as_one_module(fuse: bool) -> None:
    model = trained(fuse)
    traced = fx.symbolic_trace(model)
    called = {node.target for node in traced.graph.nodes if node.op == "call_module"}
    assert {"stem", "first.conv1", "first.conv2", "down", "second.conv1", "second.conv2"} <= called
    assert traced.first.conv1 is model.first.conv1
    assert torch.equal(predict(traced), predict(model))


@FUSE
def test_a_traced_model_trains_as_the_model_does(fuse: bool) -> None:
    one, two = trained(fuse).train(), trained(fuse).train()
    grads = []
    for model, run in ((one, one), (two, fx.symbolic_trace(two))):
        loss = run(X).square().sum()
        loss.backward()
        grads.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_prepared_part_and_a_linear_layer_are_recorded() -> None:
    torch.manual_seed(0)
    recipe = byteback.PlainInt8(strict=True, linear=True, first_conv=True)
    part = byteback.prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800, 4)), recipe)
    model = nn.Sequential(part, nn.ReLU()).eval()
    traced = fx.symbolic_trace(model)
    assert [str(node.target) for node in traced.graph.nodes][1:-1] == ["0.0", "0.1", "0.2", "0.3", "1"]
    assert torch.equal(predict(traced), predict(model))


def test_a_layer_by_itself_cannot_be_traced() -> None:
    layer = byteback.Int8Conv2d(3, 4, 3, recipe=byteback.PlainInt8(strict=True))
    with pytest.raises(RuntimeError, match=r"nn\.Sequential\(layer\)"):
        fx.symbolic_trace(layer)
    fx.symbolic_trace(nn.Sequential(layer))(X)


@FUSE
def test_torchvisions_feature_extractor(fuse: bool) -> None:
    try:
        torchvision = load()
    except ImportError:
        pytest.skip("torchvision is not installed")
    from torchvision.models.feature_extraction import create_feature_extractor

    torch.manual_seed(0)
    model = byteback.prepare(torchvision.models.resnet18(), "plain-int8", fuse=fuse).eval()
    extract = create_feature_extractor(model, {"layer1.0.conv1": "inside", "layer1": "low", "layer2": "high"})
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        found = extract(x)
        stem = model.maxpool(model.relu(model.bn1(model.conv1(x)))) + 0.0
        low = model.layer1(stem) + 0.0
        assert torch.equal(found["inside"] + 0.0, model.layer1[0].conv1(stem) + 0.0)
        assert torch.equal(found["low"] + 0.0, low)
        assert torch.equal(found["high"] + 0.0, model.layer2(low) + 0.0)


# ---- torch.func ------------------------------------------------------------------------------------------------------


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda run: torch.func.grad(lambda x: run(x).sum())(X),
    "vjp": lambda run: torch.func.vjp(run, X),
    "jvp": lambda run: torch.func.jvp(run, (X,), (X,)),
    "vmap": lambda run: torch.func.vmap(lambda x: run(x.unsqueeze(0)))(X),
    "jacrev": lambda run: torch.func.jacrev(lambda x: run(x).sum())(X),
    "functionalize": lambda run: torch.func.functionalize(run)(X),
}


@FUSE
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_say_what_to_do(name: str, fuse: bool) -> None:
    model = trained(fuse)
    with pytest.raises(
        RuntimeError, match=r"^first\.conv1: int8 layers do not support torch\.func .* byteback\.enabled\(model, False\)"
    ):
        TRANSFORMS[name](model)
    TRANSFORMS[name](byteback.enabled(model, False))


@FUSE
def test_per_sample_gradients_by_functional_call_say_what_to_do(fuse: bool) -> None:
    model = trained(fuse)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x.unsqueeze(0),)).sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    with pytest.raises(RuntimeError, match=r"loss\.backward"):
        gradients(parameters, X)
    byteback.enabled(model, False)
    assert gradients(parameters, X)["first.conv1.weight"].shape == (2, 12, 12, 3, 3)


@FUSE
def test_functional_call_alone_works(fuse: bool) -> None:
    model, other = trained(fuse), trained(fuse)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    parameters = {name: parameter.detach().requires_grad_() for name, parameter in other.named_parameters()}
    result = torch.func.functional_call(model, parameters, (X,))
    assert torch.equal(result.detach(), predict(other)) and not torch.equal(predict(model), predict(other))
    for net in (model, other):
        for layer in net.modules():
            if isinstance(layer, byteback.Int8Conv2d):
                layer.quantizers.count.zero_()
    result.sum().backward()
    other(X).sum().backward()
    assert all(torch.equal(parameters[name].grad, parameter.grad) for name, parameter in other.named_parameters())


def test_a_block_that_is_computed_later_has_the_weights_of_its_call() -> None:
    model, other = trained(), trained()
    with torch.no_grad():
        other.first.conv1.weight.mul_(1.5)
    x = torch.randn(2, 12, 6, 6)
    with torch.no_grad():
        later = torch.func.functional_call(model.first.conv1, {"weight": other.first.conv1.weight}, (x,))
        assert isinstance(later, LazyConv)
        assert torch.equal(later + 0.0, other.first.conv1(x) + 0.0)
        later = model.first.conv1(x)
        model.first.conv1.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match=r"first\.conv1: its weight or bias was modified in place after the call"):
            later + 0.0


@FUSE
def test_forward_mode_says_what_to_do(fuse: bool) -> None:
    model = trained(fuse)
    with forward_ad.dual_level():
        with pytest.raises(
            RuntimeError, match=r"^first\.conv1: int8 layers do not support forward-mode AD.* byteback\.enabled\(model, False\)"
        ):
            model(forward_ad.make_dual(X, X))
        assert torch.equal(model(X).detach(), predict(model)), "without a tangent it is an ordinary call"
        byteback.enabled(model, False)
        assert forward_ad.unpack_dual(model(forward_ad.make_dual(X, X))).tangent is not None


@FUSE
def test_a_derivative_of_the_gradient_by_its_factor_is_refused_too(fuse: bool) -> None:
    """torch.autograd.functional.jvp takes it; without an error its result would be 0."""
    with pytest.raises(RuntimeError, match="differentiated a second time"):
        torch.autograd.functional.jvp(trained(fuse), X, X)


# ---- torch.export -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_export_works(training: bool, strict: bool) -> None:
    model = trained(fuse=False, on_nonfinite="skip")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)
    exported = torch.export.export(model.train(training), (X,), strict=strict)
    graphs = [part.graph for part in exported.graph_module.modules() if isinstance(part, fx.GraphModule)]
    targets = [str(node.target) for graph in graphs for node in graph.nodes]
    assert sum("conv_int8" in target for target in targets) == 5
    if not training:
        assert torch.equal(predict(exported.module()), predict(model))
    model.train()
    before = model.norm.running_mean.clone()
    model(X * float("nan")).sum().backward()
    with pytest.warns(UserWarning, match="dropped"):
        optimizer.step()
    assert torch.equal(model.norm.running_mean, before), "exporting was no step"
