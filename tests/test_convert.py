# SPDX-License-Identifier: Apache-2.0
"""prepare, restore, enabled and float_state_dict: the user's model stays the user's model.

Same object, same parameters under the same names, same hooks, same checkpoints; what stays float says why; restore leaves
nothing behind; a saved run goes on bit for bit.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import byteback
from byteback import models
from byteback.convert import first_convolution
from byteback.nn import Int8Conv1d, Int8Conv2d, Int8Conv3d, Int8Layer, Int8Linear

RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]


def small() -> nn.Sequential:
    """Convolutions 0, 2 and 4, then a Linear."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 4, 1),
        nn.Flatten(),
        nn.Linear(4 * 6 * 6, 5),
    )


def images() -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(7))


def kinds(model: nn.Module) -> dict[str, str]:
    wanted = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.ConvTranspose2d)
    return {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, wanted)}


def notes(model: nn.Module) -> dict[str, str]:
    return {row.name: row.note for row in byteback.summary(model)}


# ---- in place ----


def test_prepare_returns_the_same_object_with_the_same_parameters() -> None:
    model = small()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    assert byteback.prepare(model, "plain-int8") is model
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(model.get_submodule(name) is module for name, module in modules.items())


@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        pytest.param(nn.Conv1d(2, 2, 3), Int8Conv1d, id="conv1d"),
        pytest.param(nn.Conv2d(2, 2, 3), Int8Conv2d, id="conv2d"),
        pytest.param(nn.Conv3d(2, 2, 3), Int8Conv3d, id="conv3d"),
        pytest.param(nn.Linear(2, 2), Int8Linear, id="linear"),
    ],
)
def test_isinstance_of_the_torch_class_stays_true(layer: nn.Module, wanted: type[nn.Module]) -> None:
    original = type(layer)
    byteback.prepare(layer, byteback.PlainInt8(first_conv=True, linear=True))
    assert type(layer) is wanted
    assert isinstance(layer, original)


def test_an_optimizer_built_before_prepare_still_trains_the_model() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    byteback.prepare(model, "plain-int8")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(images()).square().mean().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            assert not torch.equal(parameter, before[name]), name


def test_hooks_on_a_convolution_survive_prepare_and_restore() -> None:
    model, seen = small(), []
    model[2].register_forward_hook(lambda *_: seen.append("forward"))
    model[2].register_forward_pre_hook(lambda *_: seen.append("before"))
    model[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    for change in (lambda: byteback.prepare(model, "plain-int8"), lambda: byteback.restore(model)):
        change()
        seen.clear()
        model(images()).sum().backward()
        assert seen == ["before", "forward", "backward"]


def test_attributes_a_user_put_on_a_convolution_survive_prepare_and_restore() -> None:
    model = small()
    model[2].name, model[2].calls = "the second", 12
    byteback.prepare(model, "plain-int8")
    model(images())
    byteback.restore(model)
    assert getattr(model[2], "name", None) == "the second"
    assert getattr(model[2], "calls", None) == 12


def test_training_mode_is_left_as_it_was() -> None:
    model = small().eval()
    byteback.prepare(model, "plain-int8")
    assert not any(module.training for module in model if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)))


# ---- the first convolution ----


class OutOfOrder(nn.Module):
    """Registers its last convolution first; runs stem, body, head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(4, 4, 1)
        self.body = nn.Conv2d(4, 4, 3)
        self.stem = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)))


class OutOfOrderUntraceable(OutOfOrder):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # a branch on data, which no tracer can follow
            x = x + 1
        return super().forward(x)


class Keeping(OutOfOrder):
    """Writes to itself while it runs: attributes, lists and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = []
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.last_input = x
        self.history.append(x)
        return super().forward(x)


class Counting(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        self.runs.add_(1)
        return super().forward(x)


class Noisy(OutOfOrder):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(1))


class OwnConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_the_first_convolution_in_execution_order_stays_float() -> None:
    model = byteback.prepare(OutOfOrder(), "plain-int8")
    assert kinds(model) == {"head": "Int8Conv2d", "body": "Int8Conv2d", "stem": "Conv2d"}
    assert "first convolution" in notes(model)["stem"]


def test_an_untraceable_model_falls_back_to_registration_order() -> None:
    model = byteback.prepare(OutOfOrderUntraceable(), "plain-int8")
    assert kinds(model) == {"head": "Conv2d", "body": "Int8Conv2d", "stem": "Int8Conv2d"}
    assert model(torch.randn(1, 3, 8, 8)).shape == (1, 4, 4, 4)


@pytest.mark.parametrize("model_class", [Keeping, Counting], ids=["attributes", "buffer"])
def test_tracing_leaves_no_trace_on_the_model(model_class: type[Keeping]) -> None:
    model = model_class()
    keys = set(vars(model))
    assert first_convolution(model) is model.stem, "not traced at all, so this test would prove nothing"
    assert set(vars(model)) == keys
    assert model.history == []
    assert int(model.runs) == 0


def test_tracing_draws_no_random_number() -> None:
    model = Noisy()
    before = torch.get_rng_state()
    assert first_convolution(model) is model.stem
    assert torch.equal(torch.get_rng_state(), before)


def test_a_first_convolution_of_ones_own_class_counts_as_the_first() -> None:
    """It stays float anyway, so the second one need not."""
    model = nn.Sequential(OwnConv(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    byteback.prepare(model, "plain-int8")
    assert kinds(model) == {"0": "OwnConv", "1": "Int8Conv2d", "2": "Int8Conv2d"}


def test_recipe_first_conv_converts_it_too() -> None:
    model = byteback.prepare(OutOfOrder(), byteback.PlainInt8(first_conv=True))
    assert set(kinds(model).values()) == {"Int8Conv2d"}


def test_one_convolution_under_two_names_is_one_layer() -> None:
    stem, shared = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
    model = byteback.prepare(nn.Sequential(stem, shared, nn.ReLU(), shared), "plain-int8")
    assert model[1] is model[3]
    model(images()).sum().backward()
    assert shared.quantizers.input.initialized.bool().tolist() == [True, True] + [False] * 6
    assert [row.name for row in byteback.summary(model)] == ["0", "1"]


# ---- what stays float ----


def test_linear_stays_float_unless_the_recipe_says_so() -> None:
    assert kinds(byteback.prepare(small(), "plain-int8"))["6"] == "Linear"
    assert kinds(byteback.prepare(small(), byteback.PlainInt8(linear=True)))["6"] == "Int8Linear"


BLOCKS = [f"layer{stage}.0.conv{number}" for stage in (1, 2, 3) for number in (1, 2)]


@pytest.mark.parametrize(
    ("keep_float", "kept"),
    [
        pytest.param(["layer1.0.conv1"], ["layer1.0.conv1"], id="one-layer"),
        pytest.param(["layer1"], ["layer1.0.conv1", "layer1.0.conv2"], id="a-container"),
        pytest.param(["layer[13].0"], [name for name in BLOCKS if "layer2" not in name], id="nested-containers"),
        pytest.param(["*.conv2"], [name for name in BLOCKS if "conv2" in name], id="a-wildcard"),
        pytest.param(("layer1", "*.conv2"), [name for name in BLOCKS if name[5] == "1" or "conv2" in name], id="both"),
    ],
)
def test_keep_float_takes_wildcards_of_layers_and_of_containers(keep_float: Any, kept: list[str]) -> None:
    model = byteback.prepare(models.build("resnet8", image_size=8), "plain-int8", keep_float=keep_float)
    converted = [name for name, kind in kinds(model).items() if kind == "Int8Conv2d"]
    assert converted == [name for name in BLOCKS if name not in kept]


def test_keep_float_does_not_match_a_mere_prefix() -> None:
    model = nn.ModuleDict({"conv1": nn.Conv2d(3, 3, 1), "conv10": nn.Conv2d(3, 3, 1), "conv11": nn.Conv2d(3, 3, 1)})
    byteback.prepare(model, byteback.PlainInt8(first_conv=True), keep_float=["conv1"])
    assert kinds(model) == {"conv1": "Conv2d", "conv10": "Int8Conv2d", "conv11": "Int8Conv2d"}


def test_keep_float_says_which_wildcard_kept_a_layer() -> None:
    assert "'2'" in notes(byteback.prepare(small(), "plain-int8", keep_float=["2"]))["2"]


def _weight_norm() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        pytest.param(lambda: nn.ConvTranspose2d(4, 4, 3), "transposed", id="transposed"),
        pytest.param(lambda: OwnConv(4, 4, 3), "OwnConv", id="subclass"),
        pytest.param(_weight_norm, "ParametrizedConv2d", id="weight-norm"),
        pytest.param(lambda: nn.Conv2d(4, 4, 3).double(), "float64", id="float64"),
        pytest.param(lambda: nn.Linear(4, 4), "Linear", id="linear"),
    ],
)
def test_a_layer_that_int8_cannot_serve_stays_float_and_the_summary_says_why(odd: Callable[[], nn.Module], why: str) -> None:
    layer = odd()
    original = type(layer)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), layer)
    byteback.prepare(model, "plain-int8")
    assert type(model[2]) is original
    row = byteback.summary(model)[2]
    assert (row.name, row.output, row.grad_input, row.grad_weight) == ("2", "float", "float", "float")
    assert why in row.note


# ---- restore ----


def _anatomy(model: nn.Module) -> dict[str, Any]:
    """Everything restore must bring back: types, attributes, hooks and keys."""
    found: dict[str, Any] = {"state": list(model.state_dict())}
    for name, module in model.named_modules():
        hooks = {key: list(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        children, buffers = list(module._modules), list(module._buffers)
        found[f"module {name}"] = (type(module), sorted(vars(module)), hooks, children, buffers)
    return found


@pytest.mark.parametrize("slug", RECIPES)
def test_restore_leaves_nothing_behind(slug: str) -> None:
    model = small()
    before = _anatomy(model)
    byteback.prepare(model, slug, keep_float=["4"])
    model(images()).sum().backward()
    assert _anatomy(model) != before
    assert byteback.restore(model) is model
    assert _anatomy(model) == before


def test_restore_gives_the_float_outputs_back() -> None:
    model = small().eval()
    float_output = model(images())
    byteback.prepare(model, "plain-int8")
    assert not torch.equal(model(images()), float_output)
    byteback.restore(model)
    assert torch.equal(model(images()), float_output)


def test_a_restored_model_can_be_prepared_again() -> None:
    model = byteback.restore(byteback.prepare(small(), "plain-int8"))
    byteback.prepare(model, "distribution-adaptive-int8")
    assert model[2].recipe == byteback.DistributionAdaptiveInt8()
    assert int(model[2].quantizers.count) == 0


def test_restore_frees_the_optimizer_too() -> None:
    """Warm up in int8, finish in float, with the same optimizer: its hooks must not look for int8 layers any more."""
    model = byteback.prepare(small(), "unified-int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)
    byteback.restore(model)
    model(images()).square().mean().backward()
    before = model[2].weight.detach().clone()
    expected = before - 0.1 * model[2].weight.grad
    optimizer.step()
    assert torch.allclose(model[2].weight, expected, rtol=0, atol=1e-7)


# ---- enabled ----


def test_enabled_false_is_the_float_model_exactly_and_true_brings_int8_back() -> None:
    plain = small()
    model = byteback.prepare(copy.deepcopy(plain), "plain-int8")
    int8 = model(images())
    model[1].load_state_dict(plain[1].state_dict())  # BatchNorm's averages moved with that forward
    assert byteback.enabled(model, False) is model

    expected, output = plain(images()), model(images())
    assert torch.equal(output, expected)
    expected.square().sum().backward()
    output.square().sum().backward()
    for (name, parameter), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(parameter.grad, wanted.grad), name
    assert not bool(model[2].quantizers.grad_output.initialized.any()), "float steps must not touch quantizer state"

    byteback.enabled(model)
    assert torch.equal(model(images()), int8)
    assert not torch.equal(int8, expected)


# ---- checkpoints ----


def test_a_float_checkpoint_loads_strictly_before_and_after_prepare() -> None:
    checkpoint = {
        key: torch.randn_like(value) if value.is_floating_point() else value for key, value in small().state_dict().items()
    }
    for model in (small(), byteback.prepare(small(), "unified-int8")):
        model.load_state_dict(checkpoint, strict=True)
        for key, value in checkpoint.items():
            assert torch.equal(model.state_dict()[key], value), key


def test_a_float_checkpoint_resets_the_quantizers() -> None:
    model = byteback.prepare(small(), "unified-int8")
    model(images()).square().sum().backward()
    assert int(model[2].quantizers.count) == 1
    model.load_state_dict(small().state_dict(), strict=True)
    assert int(model[2].quantizers.count) == 1, "noise is never used twice"
    assert not bool(model[2].quantizers.grad_output.initialized.any())


def test_half_a_quantizer_state_is_an_error() -> None:
    model = byteback.prepare(small(), "unified-int8")
    state = model.state_dict()
    del state["2.quantizers.grad_output.clip"]
    with pytest.raises(RuntimeError, match=r"2\.quantizers\.grad_output\.clip"):
        model.load_state_dict(state)


@pytest.mark.parametrize("slug", RECIPES)
def test_float_state_dict_loads_strictly_into_the_original(slug: str) -> None:
    model = byteback.prepare(small(), byteback.recipes.resolve(slug))
    model(images()).sum().backward()
    state = byteback.float_state_dict(model)
    plain = small()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    plain.load_state_dict(state, strict=True)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in plain.state_dict().items())
    assert len(model.state_dict()) > len(state), "a prepared model saves its quantizers too"


def test_float_state_dict_of_a_model_that_is_itself_one_layer() -> None:
    layer = byteback.prepare(nn.Conv2d(3, 3, 3), byteback.PlainInt8(first_conv=True))
    assert sorted(byteback.float_state_dict(layer)) == ["bias", "weight"]


def _start(slug: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = byteback.prepare(models.build("resnet8", image_size=8, in_channels=1), slug)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    byteback.scale_learning_rates(optimizer, model)
    return model, optimizer


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 1, 8, 8, generator=draw), torch.randint(10, (8,), generator=draw)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("slug", RECIPES)
def test_a_saved_run_goes_on_bit_for_bit(slug: str) -> None:
    model, optimizer = _start(slug, seed=0)
    _train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    losses = _train(model, optimizer, range(3, 7))

    resumed, its_optimizer = _start(slug, seed=1)  # other weights, another noise seed: all must come from the file
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved["model"])
    its_optimizer.load_state_dict(saved["optimizer"])
    assert _train(resumed, its_optimizer, range(3, 7)) == losses

    for key, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value), key
    for index, state in optimizer.state_dict()["state"].items():
        buffer = its_optimizer.state_dict()["state"][index]["momentum_buffer"]
        assert torch.equal(buffer, state["momentum_buffer"]), f"momentum of parameter {index}"


def test_without_its_quantizer_state_a_run_goes_on_otherwise() -> None:
    """Guards the test above: the state that is saved does steer the losses."""
    model, optimizer = _start("unified-int8", seed=0)
    _train(model, optimizer, range(3))
    resumed, its_optimizer = copy.deepcopy((model, optimizer))
    resumed.load_state_dict(byteback.float_state_dict(model))
    its_optimizer = torch.optim.SGD(resumed.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    its_optimizer.load_state_dict(optimizer.state_dict())
    byteback.scale_learning_rates(its_optimizer, resumed)
    assert _train(resumed, its_optimizer, range(3, 7)) != _train(model, optimizer, range(3, 7))


def test_a_deep_copy_trains_on_its_own() -> None:
    model = byteback.prepare(small(), "plain-int8")
    twin = copy.deepcopy(model)
    twin(images()).sum().backward()
    assert int(twin[2].quantizers.count) == 1
    assert int(model[2].quantizers.count) == 0
    assert model[2].weight.grad is None


# ---- errors ----


def test_preparing_twice_names_the_layer_and_the_way_out() -> None:
    model = byteback.prepare(small(), "plain-int8")
    with pytest.raises(ValueError, match=r"'2' is an Int8Conv2d already.*restore"):
        byteback.prepare(model, "plain-int8")


def test_an_unknown_recipe_gets_a_near_match() -> None:
    with pytest.raises(ValueError, match=r"'unifed-int8' is unknown.*Did you mean 'unified-int8'"):
        byteback.prepare(small(), "unifed-int8")


def test_a_recipe_class_instead_of_an_instance_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"UnifiedInt8\(\)"):
        byteback.prepare(small(), byteback.UnifiedInt8)


def test_a_wildcard_that_matches_nothing_names_near_layers() -> None:
    model = models.build("resnet8", image_size=8)
    with pytest.raises(ValueError, match=r"'layer1\.0\.conv9'.*layer1\.0\.conv[12]"):
        byteback.prepare(model, "plain-int8", keep_float=["layer1.0.conv9"])
    assert not any(isinstance(module, Int8Layer) for module in model.modules()), "an error must change nothing"


def test_a_string_instead_of_a_list_is_a_type_error_that_shows_the_list() -> None:
    with pytest.raises(TypeError, match=r"\['layer1'\]"):
        byteback.prepare(small(), "plain-int8", keep_float="layer1")


def test_a_model_without_convolutions_is_an_error() -> None:
    with pytest.raises(ValueError, match="no convolution and no Linear"):
        byteback.prepare(nn.Sequential(nn.ReLU()), "plain-int8")


def test_a_model_of_linear_layers_is_told_about_recipe_linear() -> None:
    with pytest.raises(ValueError, match=r"no layer left for int8.*linear"):
        byteback.prepare(nn.Sequential(nn.Linear(3, 3)), "plain-int8")


def test_everything_kept_float_is_an_error_and_changes_nothing() -> None:
    model = small()
    before = _anatomy(model)
    with pytest.raises(ValueError, match="no layer left for int8"):
        byteback.prepare(model, "plain-int8", keep_float=["*"])
    assert _anatomy(model) == before


@pytest.mark.parametrize(
    "function",
    [byteback.restore, byteback.enabled, byteback.float_state_dict, byteback.summary, byteback.health],
    ids=lambda function: function.__name__,
)
def test_an_unprepared_model_is_an_error_that_names_prepare(function: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(ValueError, match=rf"{function.__name__}: .*no int8 layer.*prepare"):
        function(small())


def test_only_a_module_can_be_prepared() -> None:
    with pytest.raises(TypeError, match="dict"):
        byteback.prepare({"a": 1}, "plain-int8")
