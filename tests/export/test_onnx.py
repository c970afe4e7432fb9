# SPDX-License-Identifier: Apache-2.0
"""An exported file computes what the model computes: every integer in the exact form, all but a few in the Q/DQ form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import byteback
import small_norm_act
from byteback.export import check, onnx_bytes
from byteback.export.comparing import Check, session

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Net(nn.Module):
    """A residual block, a concatenation, a pool, a ReLU6, a layer that is called twice, and negative inputs of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm0 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.a, self.norm_a = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.b, self.norm_b = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.six, self.norm_six = nn.Conv2d(16, 24, 1), nn.BatchNorm2d(24)
        self.deep, self.norm_deep = nn.Conv2d(24, 24, 3, stride=2, padding=1, groups=24), nn.BatchNorm2d(24)
        self.signed = nn.Conv2d(24, 16, 1)
        self.twice = nn.Conv2d(16, 16, (1, 3), padding=(0, 1), dilation=(1, 1))
        self.joined = nn.Conv2d(32, 16, 3, padding="same")
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm0(self.first(x)))
        x = F.relu(self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))) + x)
        x = F.max_pool2d(x, 2)
        x = F.relu6(self.norm_six(self.six(x)))
        x = self.signed(F.relu6(self.norm_deep(self.deep(x))))
        x = self.twice(F.relu(self.twice(x)))
        x = F.relu(self.joined(torch.cat([x, F.relu(x)], 1)))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


UNIFIED = byteback.UnifiedInt8(strict=True)


def trained(model: nn.Module, recipe: byteback.Recipe = UNIFIED, size: int = 16) -> nn.Module:
    torch.manual_seed(0)
    byteback.prepare(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    byteback.scale_learning_rates(optimizer, model)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 3, size, size)), torch.arange(8) % 5).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(1)
    net = trained(Net())
    with torch.no_grad():  # factors that a file cannot hold as scales
        net.norm_a.weight[0], net.norm_a.weight[1] = -0.7, 0.0
    return net


@pytest.fixture(scope="module")
def files(model: nn.Module) -> dict[bool, bytes]:
    return {exact: onnx_bytes(model, torch.zeros(2, 3, 16, 16), exact=exact) for exact in (False, True)}


def images(count: int, number: int = 0) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(7 + number))


@pytest.mark.parametrize("exact", [True, False])
def test_the_integers_are_those_of_the_model(model: nn.Module, files: dict[bool, bytes], exact: bool) -> None:
    found = check(model, files[exact], [images(16), images(16, 1)], exact=exact)
    assert found.layers.compared > 200_000 and found.layers.by_more == 0
    assert found.behind_float.equal > 0.9999
    if exact:
        assert found.layers.by_one == 0
    else:
        assert found.layers.equal > 0.999


def test_without_float_convolutions_no_integer_is_behind_float_sums() -> None:
    """docs/11-deploying.md: the first convolution is float unless the recipe has first_conv=True."""

    def net(recipe: byteback.Recipe) -> nn.Module:
        layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16 * 16, 5)]
        return trained(nn.Sequential(*layers), recipe, size=8)

    given = torch.randn(8, 3, 8, 8)
    first = byteback.UnifiedInt8(first_conv=True, strict=True)
    for model, behind in ((net(UNIFIED), 8 * 16 * 36), (net(first), 0)):
        found = check(model, onnx_bytes(model, given, exact=True), [given], exact=True)
        assert found.behind_float.compared == behind
        assert found.layers.by_one + found.layers.by_more == 0
    assert found.layers.compared == 8 * (3 * 64 + 16 * 36)


def test_a_clip_that_cuts_saturates_at_127(model: nn.Module, files: dict[bool, bytes]) -> None:
    bright = 8.0 * images(4)  # far beyond what the clips were tracked on
    for exact in (True, False):
        found = check(model, files[exact], [bright], exact=exact)
        assert found.layers.by_more == 0 and found.layers.equal > 0.999


def test_the_check_sees_a_wrong_scale(model: nn.Module, files: dict[bool, bytes]) -> None:
    proto = onnx.load_from_string(files[True])
    scale = next(tensor for tensor in proto.graph.initializer if tensor.name.endswith("six.scale_0"))
    scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * np.float32(1.01), scale.name))
    found = check(model, proto.SerializeToString(), [images(4)], exact=True)
    assert found.failures() and "integers differ" in found.failures()[0] and found.worst[1] < 1.0


def test_any_batch_size_and_standard_operators_only(model: nn.Module, files: dict[bool, bytes]) -> None:
    for data in files.values():
        run = session(data)
        for count in (1, 3):
            output = run.run(None, {"input": images(count).numpy()})[0]
            assert output.shape == (count, 5)
            with torch.no_grad():
                np.testing.assert_allclose(output, model(images(count)).numpy(), atol=0.1)
        proto = onnx.load_from_string(data)
        assert {opset.domain for opset in proto.opset_import} == {""} and proto.opset_import[0].version == 18
        onnx.checker.check_model(proto)


def test_weights_are_stored_as_int8_and_no_path_of_this_machine_is(model: nn.Module, files: dict[bool, bytes]) -> None:
    layers = [layer for layer in model.modules() if isinstance(layer, byteback.Int8Conv2d)]
    weights = {tuple(layer.weight.shape) for layer in layers}
    for data in files.values():
        proto = onnx.load_from_string(data)
        int8 = [
            tensor for tensor in proto.graph.initializer if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) == 4
        ]
        assert {tuple(tensor.dims) for tensor in int8} == weights and len(int8) == len(layers)
        assert b"site-packages" not in data and str(Path(__file__).parent).encode() not in data


def test_exporting_leaves_the_model_as_it_was(model: nn.Module) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    with torch.no_grad():
        output = model(images(2))
        onnx_bytes(model, torch.zeros(1, 3, 16, 16))
        assert torch.equal(model(images(2)), output)
    assert kinds == [type(module) for module in model.modules()]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_other_recipes(tmp_path: Path) -> None:
    recipe = byteback.DistributionAdaptiveInt8(linear=True, first_conv=True, strict=True)
    net = trained(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 5)), recipe, size=8)
    path = tmp_path / "model.onnx"
    for exact in (True, False):
        byteback.export_onnx(net, path, torch.zeros(2, 3, 8, 8), exact=exact, opset=21)
        found = check(net, path.read_bytes(), [torch.randn(8, 3, 8, 8)], exact=exact)
        assert found.layers.compared and not [why for why in found.failures() if "integers" in why]
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


# ---- errors: one sentence each, and nothing is written ----


class Unsupported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        return x if x.sum().item() > 0.0 else -x


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("opset", "opset is 9, but the operators of the file need one from 18"),
        ("training", "in training mode"),
        ("example", "example is missing"),
        ("untrained", "a has no tracked clip for its input"),
        ("float", "export_onnx"),
        ("unsupported", "PyTorch cannot export this model: "),
        ("batch clips", "eval_clip='batch'"),
        ("int8 residuals", "residual_memory='int8'"),
        ("folder", "could not be written"),
    ],
)
def test_what_cannot_be_exported_is_said_in_a_sentence(model: nn.Module, tmp_path: Path, how: str, message: str) -> None:
    path, example, opset, net = tmp_path / "model.onnx", torch.zeros(2, 3, 16, 16), 18, model
    if how == "opset":
        opset = 9
    elif how == "example":
        example = None
    elif how == "folder":
        path = tmp_path / "absent" / "model.onnx"
    elif how == "training":
        net = byteback.prepare(Net()).train()
    elif how == "untrained":
        net = byteback.prepare(Net(), byteback.PlainInt8(strict=True)).eval()
    elif how == "float":
        net = Net().eval()
    elif how == "unsupported":
        net = byteback.prepare(Unsupported(), byteback.PlainInt8(strict=True))
        net(torch.randn(2, 3, 16, 16))
        net.eval()
    elif how == "batch clips":
        net = trained(Net(), byteback.UnifiedInt8(eval_clip="batch"))
    elif how == "int8 residuals":
        net = trained(Net(), byteback.UnifiedInt8(residual_memory="int8"))
    with pytest.raises((ValueError, OSError), match=message.replace("(", r"\(")) as caught:
        byteback.export_onnx(net, path, example, opset=opset)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_promises_of_a_check() -> None:
    found = Check(exact=False)
    found.layers.add(np.zeros(1000, np.int8), np.array([1, *[0] * 999], np.int8))
    assert not found.failures()
    found.layers.add(np.zeros(1000, np.int8), np.array([1, 1, *[0] * 998], np.int8))
    assert "less than 99.9%" in found.failures()[0]
    found.layers.add(np.zeros(1, np.int8), np.array([2], np.int8))
    assert "by more than one" in found.failures()[1]
    assert Check(exact=True, same_top1=0.99).failures() == ["99.00% of the predictions are the same, less than 99.5%"]


def test_a_norm_that_applies_an_activation() -> None:
    torch.manual_seed(1)
    small = trained(nn.Sequential(small_norm_act.Net(), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    data = onnx_bytes(small, torch.zeros(2, 3, 16, 16), exact=True)
    with torch.no_grad():
        expected = small(images(2)).numpy()
    session_ = session(data)
    made = session_.run(None, {session_.get_inputs()[0].name: images(2).numpy()})[0]
    assert np.abs(made - expected).max() <= 1e-4 * np.abs(expected).max()
