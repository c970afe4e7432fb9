# SPDX-License-Identifier: Apache-2.0
"""freeze: predictions keep the int8 weights and have the same bits; a frozen model neither trains nor loads weights."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import byteback
from byteback.nn import quantizing
from byteback.nn.layers import weights
from small_blocks import Net

X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are tiny; a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(recipe: byteback.Recipe | None = None, seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    model = byteback.prepare(Net(), recipe or byteback.PlainInt8(strict=True))
    for _ in range(2):
        model(torch.randn(4, 3, 12, 12)).square().sum().backward()
    return model.eval()


@torch.no_grad()
def predict(model: nn.Module) -> Tensor:
    return model(X) + 0.0


def quantized_weights(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers whose weights are quantized from here on."""
    names: list[str] = []
    original = quantizing.fresh_weight

    def noting(layer: byteback.Int8Conv2d, weight: Tensor) -> byteback.QTensor:
        names.append(layer.int8_name)
        return original(layer, weight)

    monkeypatch.setattr(quantizing, "fresh_weight", noting)
    return names


# ---- what it is for --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["reference", None])
@pytest.mark.parametrize("recipe", ["plain-int8", "unified-int8", "distribution-adaptive-int8"])
def test_predictions_have_the_same_bits(recipe: str, path: str | None) -> None:
    model = trained(byteback.recipes.resolve(recipe))
    with byteback.path(path) if path else contextlib.nullcontext():
        with torch.no_grad():
            before = model(X) + 0.0
        with torch.inference_mode():
            quick = model(X) + 0.0
        byteback.freeze(model)
        for _ in range(2):
            assert torch.equal(predict(model), before)
            with torch.inference_mode():
                assert torch.equal(model(X) + 0.0, quick)
        assert torch.equal(predict(byteback.unfreeze(model)), before)


def test_a_frozen_model_quantizes_no_weight_and_folds_no_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained()
    names = quantized_weights(monkeypatch)
    byteback.freeze(model)
    assert sorted(names) == ["down", "first.conv1", "first.conv2", "second.conv1", "second.conv2"]
    names.clear()
    predict(model)
    folded: list[int] = []
    monkeypatch.setattr(weights, "given_coefficients", lambda *args: folded.append(1))
    predict(model)
    assert not names and not folded
    byteback.unfreeze(model)
    monkeypatch.undo()
    names = quantized_weights(monkeypatch)
    predict(model)
    assert len(names) == 5


def test_gradients_of_the_input_are_those_of_before() -> None:
    model, grads = trained(), []
    model.requires_grad_(False)
    for prepare in (byteback.unfreeze, byteback.freeze):
        prepare(model)
        x = X.clone().requires_grad_()
        for layer in model.modules():
            if isinstance(layer, byteback.Int8Conv2d):
                layer.quantizers.count.zero_()  # the noise of the gradient
        model(x).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_a_weight_kept_in_inference_mode_serves_gradients_too() -> None:
    model = trained()
    byteback.freeze(model)
    model.to(memory_format=torch.channels_last)  # what was kept is made anew, in inference mode
    with torch.inference_mode():
        model(X)
    model.requires_grad_(False)
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None and bool(x.grad.any())


# ---- it does not train -----------------------------------------------------------------------------------------------


def state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_untouched(model: nn.Module, before: dict[str, Tensor]) -> None:
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
    assert not changed


def test_a_forward_in_training_mode_is_refused_before_anything_moves() -> None:
    model = byteback.freeze(trained())
    before = state(model)
    with pytest.raises(RuntimeError, match=r"in training mode, but .* frozen .*byteback\.unfreeze\(model\)"):
        model.train()(X)
    assert_untouched(model, before)
    with pytest.raises(RuntimeError, match=r"first\.conv1: .*frozen"):
        model.first.conv1(torch.randn(1, 12, 4, 4))
    assert_untouched(model, before)
    byteback.unfreeze(model)(X).sum().backward()


def test_a_gradient_of_a_frozen_weight_is_refused() -> None:
    model = byteback.freeze(trained())
    model.zero_grad()
    expected = predict(model)
    output = model(X)
    assert torch.equal(output.detach(), expected), "a prediction without no_grad is one all the same"
    with pytest.raises(RuntimeError, match=r"second.conv2: a gradient of its weight was requested, but .* frozen"):
        output.sum().backward()
    assert model.first.conv1.weight.grad is None


def test_the_step_of_a_connected_optimizer_is_refused() -> None:
    model = trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    byteback.scale_learning_rates(optimizer, model)
    byteback.freeze(model)
    before = state(model)
    with pytest.raises(RuntimeError, match=r"the optimizer takes a step, but .* frozen"):
        optimizer.step()
    assert_untouched(model, before)
    byteback.unfreeze(model)
    optimizer.step()


def test_a_frozen_part_serves_a_part_that_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(trained().requires_grad_(False), nn.Linear(5, 2)).train()
    model.zero_grad()
    byteback.freeze(model[0].eval())
    before = predict(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)
    head = model[1].weight.detach().clone()
    model(X).sum().backward()
    optimizer.step()
    assert torch.equal(predict(model[0]), before) and not torch.equal(model[1].weight, head)


def test_a_model_in_training_mode_cannot_be_frozen() -> None:
    model = trained().train()
    with pytest.raises(RuntimeError, match=r"'first\.conv1' is in training mode.*model\.eval\(\)"):
        byteback.freeze(model)
    model(X)


def test_a_weight_with_nan_leaves_the_model_as_it_was() -> None:
    model = trained()
    with torch.no_grad():
        model.second.conv1.weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(byteback.NonFiniteError, match=r"second\.conv1: weight"):
        byteback.freeze(model)
    assert not any(weights.is_frozen(layer) for layer in model.modules())


def test_a_float_model_has_nothing_to_freeze() -> None:
    for function in (byteback.freeze, byteback.unfreeze):
        with pytest.raises(ValueError, match="no int8 layer"):
            function(nn.Conv2d(3, 3, 3))


# ---- its weights do not change unseen ----------------------------------------------------------------------------------


def test_a_checkpoint_is_refused_before_anything_is_loaded() -> None:
    model, other = byteback.freeze(trained()), trained(seed=8)
    before, expected = state(model), predict(model)
    for checkpoint in (other.state_dict(), byteback.float_state_dict(other)):
        with pytest.raises(RuntimeError, match=r"first\.conv1: cannot load weights into a layer that is frozen"):
            model.load_state_dict(checkpoint)
        assert_untouched(model, before)
    with pytest.raises(RuntimeError, match="frozen"):
        model.first.conv1.load_state_dict(other.first.conv1.state_dict())
    assert torch.equal(predict(model), expected)
    byteback.unfreeze(model).load_state_dict(other.state_dict())
    assert torch.equal(predict(byteback.freeze(model)), predict(other))


def test_a_float_layer_of_a_frozen_model_may_be_loaded() -> None:
    model, other = byteback.freeze(trained()), trained(seed=8)
    model.head.load_state_dict(other.head.state_dict())
    byteback.unfreeze(other).head.load_state_dict(model.head.state_dict())
    expected = trained()
    expected.head.load_state_dict(other.head.state_dict())
    assert torch.equal(predict(model), predict(expected))


def by_hand(layer: nn.Module) -> None:
    with torch.no_grad():
        layer.weight.mul_(2.0)


def by_memory(layer: nn.Module) -> None:
    layer.weight.data = layer.weight.data * 2.0


def by_parameter(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 2.0)


@pytest.mark.parametrize("change", [by_hand, by_memory, by_parameter])
def test_a_change_that_can_be_seen_is_an_error(change: Callable[[nn.Module], None]) -> None:
    model = byteback.freeze(trained())
    change(model.first.conv2)
    with pytest.raises(RuntimeError, match=r"first\.conv2: the weight was changed or replaced while the layer is frozen"):
        predict(model)
    byteback.freeze(model)
    expected = trained()
    change(expected.first.conv2)
    assert torch.equal(predict(model), predict(expected))


def test_other_weights_by_functional_call_are_an_error() -> None:
    model = byteback.freeze(trained())
    doubled = {name: 2.0 * parameter.detach() for name, parameter in model.named_parameters()}
    with torch.no_grad(), pytest.raises(RuntimeError, match="changed or replaced while the layer is frozen"):
        torch.func.functional_call(model, doubled, (X,))


def test_a_norm_that_changed_is_seen() -> None:
    model = byteback.freeze(trained())
    before = predict(model)
    for net in (model, expected := trained()):
        with torch.no_grad():
            net.first.norm1.running_mean.add_(1.0)
            net.second.norm2.weight.mul_(2.0)
    assert torch.equal(predict(model), predict(expected))
    assert not torch.equal(predict(model), before)


def test_a_parametrized_weight_is_computed_and_quantized_each_time() -> None:
    class Doubled(nn.Module):
        factor = 2.0

        def forward(self, weight: Tensor) -> Tensor:
            return weight * self.factor

    model = trained()
    double = Doubled()
    nn.utils.parametrize.register_parametrization(model.first.conv1, "weight", double)
    before = predict(model)
    byteback.freeze(model)
    assert torch.equal(predict(model), before)
    double.factor = 4.0
    assert torch.equal(predict(model), predict(byteback.unfreeze(model)))


# ---- what else is done with a model --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("cpu"),
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.share_memory(),
        lambda model: model.double().float(),
    ],
    ids=["cpu", "channels last", "shared memory", "double and back"],
)
def test_it_moves(move: Callable[[nn.Module], nn.Module]) -> None:
    model, ordinary = byteback.freeze(trained()), trained()
    predict(model)
    assert torch.equal(predict(move(model)), predict(move(ordinary)))
    assert weights.is_frozen(model.first.conv1)
    with pytest.raises(TypeError, match="float16"):
        model.half().first.conv1(torch.randn(1, 12, 4, 4))


def test_its_state_dict_is_that_of_any_model() -> None:
    model = trained()
    before = state(model)
    byteback.freeze(model)
    predict(model)
    assert state(model).keys() == before.keys()
    assert_untouched(model, before)
    trained(seed=8).load_state_dict(model.state_dict(), strict=True)


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_a_copy_is_frozen_and_keeps_weights_of_its_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = byteback.freeze(trained())
    before = predict(model)
    twin = copied(model)
    assert torch.equal(predict(twin), before)
    with pytest.raises(RuntimeError, match="frozen"):
        twin.load_state_dict(trained(seed=8).state_dict())
    with pytest.raises(RuntimeError, match="frozen"):
        twin.train()(X)
    byteback.unfreeze(twin)
    with torch.no_grad():
        twin.first.conv1.weight.mul_(3.0)
    assert torch.equal(predict(model), before)
    assert not torch.equal(predict(twin.eval()), before)


def test_float_and_back() -> None:
    model = trained()
    in_float = predict(byteback.enabled(model, False))
    byteback.freeze(model)
    assert torch.equal(predict(model), in_float)
    expected = predict(byteback.enabled(trained(), True))
    assert torch.equal(predict(byteback.enabled(model, True)), expected)


def test_restore_leaves_nothing_behind() -> None:
    model = byteback.restore(byteback.freeze(trained()))
    assert not model._load_state_dict_pre_hooks
    assert not any("int8_frozen" in vars(module) for module in model.modules())
    model.load_state_dict(byteback.restore(trained(seed=8)).state_dict())
    model.train()(X).sum().backward()


def test_prepare_refuses_it_as_any_prepared_model() -> None:
    with pytest.raises(ValueError, match="already"):
        byteback.prepare(byteback.freeze(trained()))


def test_freezing_again_keeps_the_weights_of_now() -> None:
    model = byteback.freeze(trained())
    model.first.conv1.weight.data[0] = 0.0
    byteback.freeze(model)
    assert len(model._load_state_dict_pre_hooks) == 1
    assert torch.equal(predict(model), predict(byteback.unfreeze(model)))


def test_one_layer_by_itself() -> None:
    layer = byteback.Int8Conv2d(16, 16, 3, recipe=byteback.PlainInt8(strict=True)).eval()
    x = torch.randn(1, 16, 6, 6)
    with torch.no_grad():
        before = layer(x)
        assert torch.equal(byteback.freeze(layer)(x), before)
    with pytest.raises(RuntimeError, match="frozen"):
        layer.load_state_dict(nn.Conv2d(16, 16, 3).state_dict())


def test_a_compiled_model_quantizes_in_its_graph() -> None:
    torch._dynamo.reset()
    model = byteback.freeze(trained())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        before = compiled(X)
        model.first.conv1.weight.data.mul_(2.0)
        changed = compiled(X)
    byteback.unfreeze(model)
    assert not torch.equal(changed, before)
    torch._dynamo.reset()
