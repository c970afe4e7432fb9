# SPDX-License-Identifier: Apache-2.0
"""What a review of the whole house found, each as a test: the corners between layers, models, threads and optimizers."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import byteback


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3))


class Twice(nn.Module):
    """One convolution with two call sites whose inputs differ by a factor of 100."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(100.0 * self.conv(self.stem(x)))


def trained(model: nn.Module) -> nn.Module:
    for seed in range(3):
        model(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))).sum().backward()
    return model.eval()


def test_threads_that_share_a_model_do_not_shift_each_others_calls() -> None:
    model = trained(byteback.prepare(Twice(), "plain-int8"))
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = model(images)
    wrong = []

    def predict() -> None:
        with torch.no_grad():
            wrong.extend(i for i in range(60) if not torch.equal(model(images), expected))

    threads = [threading.Thread(target=predict) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_shared_layer_called_on_its_own_does_not_take_another_calls_clip() -> None:
    model = trained(byteback.prepare(Twice(), "plain-int8"))
    large = 100.0 * torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        result, exact = model.conv(large), nn.functional.conv2d(large, model.conv.weight, model.conv.bias, padding=1)
    assert torch.nn.functional.cosine_similarity(result.flatten(), exact.flatten(), dim=0) > 0.999


def test_a_skipped_step_drops_the_gradients_of_every_optimizer() -> None:
    model = byteback.prepare(small(), byteback.PlainInt8(on_nonfinite="skip"))
    int8 = torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1)
    rest = torch.optim.SGD(model[0].parameters(), lr=0.1)
    byteback.scale_learning_rates(int8, model)
    byteback.scale_learning_rates(rest, model)
    (model(torch.randn(2, 3, 8, 8)).sum() * float("nan")).backward()
    with pytest.warns(UserWarning, match="dropped"):
        rest.step()
    int8.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_weight_that_two_layers_share_is_shortened_once() -> None:
    model = small()
    model[4].weight = model[2].weight
    recipe = byteback.UnifiedInt8(learning_rate=byteback.DeviationCounteractive(alpha=1e9, beta=0.5))  # every factor is 0.5
    byteback.prepare(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    byteback.scale_learning_rates(optimizer, model)
    model(torch.randn(2, 3, 9, 9)).square().sum().backward()
    before, gradient = model[2].weight.detach().clone(), model[2].weight.grad.clone()
    optimizer.step()
    torch.testing.assert_close(before - model[2].weight, 0.5 * gradient)


def test_layers_of_different_models_draw_different_noise() -> None:
    models = [byteback.prepare(small(), "plain-int8") for _ in range(2)]
    assert len({int(layer.quantizers.layer) for model in models for layer in (model[2], model[4])}) == 4


def test_the_same_model_built_again_draws_the_same_noise() -> None:
    numbers = []
    for _ in range(2):
        torch.manual_seed(3)
        numbers.append(int(byteback.prepare(small(), "plain-int8")[2].quantizers.layer))
    assert numbers[0] == numbers[1]


def test_a_checkpoint_that_leaves_a_layer_out_leaves_its_state_alone() -> None:
    model = trained(byteback.prepare(small(), "plain-int8"))
    tracked = model[2].quantizers.input.tracked.clone()
    model.load_state_dict({"0.weight": model[0].weight.detach()}, strict=False)
    assert torch.equal(model[2].quantizers.input.tracked, tracked) and int(model[2].quantizers.count) == 3


class Channels(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(4, 4, 3)
        self.channels = 8


def _patched() -> nn.Conv2d:
    layer = nn.Conv2d(4, 4, 3)
    layer.forward = layer.forward  # as wrappers do that hook an object's forward
    return layer


@pytest.mark.parametrize(("odd", "why"), [(Channels, "an attribute 'channels'"), (_patched, "forward was replaced")])
def test_a_layer_that_cannot_be_swapped_safely_stays_float(odd: type, why: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), odd())
    byteback.prepare(model, "plain-int8")
    assert why in byteback.summary(model)[2].note
    assert model(torch.randn(1, 3, 9, 9)).shape == (1, 4, 3, 3)


def test_float_state_dict_knows_both_names_of_a_module() -> None:
    model = small()
    model.alias = model[2]
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    byteback.prepare(model, "plain-int8")
    assert byteback.float_state_dict(model).keys() == plain.keys()


def test_restoring_a_part_keeps_the_rest_connected() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1)), nn.Conv2d(4, 4, 1))
    byteback.prepare(model, "unified-int8")
    scaling = byteback.scale_learning_rates(torch.optim.SGD(model.parameters(), lr=0.1), model)
    byteback.restore(model[1])
    assert model[2].hooked and list(scaling.layers) == ["2"]


def test_restore_refuses_a_layer_whose_weight_is_parametrized() -> None:
    model = byteback.prepare(small(), "plain-int8")
    parametrize.register_parametrization(model[2], "weight", nn.Identity())
    with pytest.raises(ValueError, match="remove_parametrizations first"):
        byteback.restore(model)
    assert all(hasattr(model[index], "quantizers") for index in (2, 4)), "a refusal must leave the model as it was"
    assert model(torch.randn(1, 3, 8, 8)).isfinite().all()
    parametrize.remove_parametrizations(model[2], "weight")
    assert type(byteback.restore(model)[2]) is nn.Conv2d


def test_restore_between_forward_and_backward_is_a_clear_error() -> None:
    model = byteback.prepare(small(), "plain-int8")
    loss = model(torch.randn(2, 3, 8, 8)).sum()
    byteback.restore(model)
    with pytest.raises(RuntimeError, match="restored to float between forward and backward"):
        loss.backward()


@pytest.mark.parametrize("keep", [[None], [nn.Conv2d]])
def test_keep_float_takes_names(keep: list[object]) -> None:
    with pytest.raises(TypeError, match="wildcards of layer names"):
        byteback.prepare(small(), "plain-int8", keep_float=keep)
