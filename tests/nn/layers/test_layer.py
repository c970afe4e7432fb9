# SPDX-License-Identifier: Apache-2.0
"""Int8Layer: dtypes, autocast, call slots of shared modules, copies, learning-rate factor, missing-hook warning."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from byteback import DeviationCounteractive, Int8Conv2d, Int8Linear, PlainInt8, UnifiedInt8, prepare
from byteback.quantize import DEVIATION

RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]


def image(seed=0, batch=2, channels=4):
    return torch.randn(batch, channels, 6, 6, generator=torch.Generator().manual_seed(seed))


def step(layer, seed=0):
    """One forward and backward; gives (output, grad_input, grad_weight)."""
    layer.weight.grad = None
    x = image(seed).requires_grad_()
    output = layer(x)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(seed + 100)))
    return output.detach(), x.grad, layer.weight.grad


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- dtypes and devices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32-input", "bfloat16-input"])
@pytest.mark.parametrize("cls", [Int8Conv2d, Int8Linear], ids=["conv", "linear"])
def test_autocast_gives_the_float32_product_in_autocast_s_dtype(dtype, cls, fresh):
    args, x = ((4, 6, 3), image()) if cls is Int8Conv2d else ((4, 6), image()[:, :, 0, 0])
    x = x.to(dtype)
    layer, plain = fresh(cls, *args), fresh(cls, *args)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    expected = plain(x.float())
    assert output.dtype == torch.bfloat16
    assert torch.allclose(output.float(), expected, rtol=2**-7, atol=2**-7 * expected.abs().max().item())
    output.float().square().sum().backward()
    assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.abs().max() > 0
    assert layer.quantizers.input.clip[0].item() == x.float().abs().max().item()


def test_autocast_product_is_rounded_once(fresh):
    """Without bias the bfloat16 output is the rounded int8 product: autocast did not reach into the sum."""
    layer, plain = (fresh(Int8Conv2d, 4, 6, 3, bias=False) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(image())
    assert torch.equal(output, plain(image()).to(torch.bfloat16))


def test_input_gradient_under_autocast_has_the_input_s_dtype(fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3)
    x = image().to(torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    output.float().sum().backward()
    assert x.grad.dtype == torch.bfloat16 and x.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_that_are_not_float32_are_a_clear_error(dtype, fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3, name="layer1.conv").to(dtype)
    with pytest.raises(TypeError, match=rf"^layer1\.conv: weight is {dtype}.*float32.*torch\.autocast"):
        layer(image().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8], ids=str)
def test_input_that_is_not_float32_is_a_clear_error(dtype, fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3, name="layer1.conv")
    with pytest.raises(TypeError, match=rf"^layer1\.conv: input is {dtype}, but int8 layers expect float32.*\.float\(\)"):
        layer(image().to(dtype))


def test_integer_input_is_an_error_under_autocast_too(fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3, name="layer1.conv")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"^layer1\.conv: input is torch\.int64"):
        layer(image().long())


def test_other_device_is_a_clear_error(fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3, name="layer1.conv")
    with pytest.raises(RuntimeError, match=r"^layer1\.conv: input is on meta and weight on cpu.*\.to\('cpu'\)"):
        layer(image().to("meta"))


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_state_stays_exact_when_the_model_is_cast_and_cast_back(cast, fresh, state_of):
    layer = fresh(Int8Conv2d, 4, 6, 3, recipe="distribution-adaptive-int8")
    step(layer)
    before = state_of(layer)
    getattr(layer, cast)().float()
    assert all(torch.equal(value, before[name]) for name, value in state_of(layer).items())


# ---- a module with several call sites --------------------------------------------------------------------------------


class Shared(nn.Module):
    def __init__(self, calls):
        super().__init__()
        self.stem, self.conv, self.calls = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), calls

    def forward(self, x):
        x = self.stem(x)
        for i in range(self.calls):
            x = self.conv(x) * (2.0 + i)
        return x


def shared(calls, recipe="unified-int8"):
    torch.manual_seed(0)
    return prepare(Shared(calls), recipe)


@pytest.mark.parametrize("calls", [1, 2, 8])
def test_each_call_site_has_a_slot_of_its_own(calls):
    model = shared(calls)
    inputs = []
    model.conv.register_forward_pre_hook(lambda module, args: inputs.append(args[0].abs().max().item()))
    model(image()).square().mean().backward()
    numerics = model.conv.quantizers
    used = [slot < calls for slot in range(8)]
    assert numerics.input.initialized.bool().tolist() == used
    assert numerics.grad_output.initialized.bool().tolist() == used
    assert numerics.input.clip[:calls].flatten().tolist() == inputs and len(set(inputs)) == calls
    assert int(numerics.count) == calls


def test_more_than_eight_calls_share_the_last_slot():
    model = shared(10)
    inputs = []
    model.conv.register_forward_pre_hook(lambda module, args: inputs.append(args[0].abs().max().item()))
    model(image()).square().mean().backward()
    clips = model.conv.quantizers.input.clip.flatten().tolist()
    assert clips[:7] == inputs[:7] and clips[7] == inputs[9]
    assert int(model.conv.quantizers.count) == 10


def test_slots_start_again_with_every_forward():
    model = shared(2)
    for seed in range(3):
        model(image(seed)).square().mean().backward()
    assert model.conv.quantizers.input.initialized.bool().tolist() == [True, True] + [False] * 6


def test_gradient_clips_of_the_calls_are_kept_apart():
    """The gradient of the earlier call is the one that went back through the layer once more, so its clip differs."""
    model = shared(2, "distribution-adaptive-int8")
    grads = []
    model.conv.register_full_backward_hook(lambda module, grad_in, grad_out: grads.append(grad_out[0].abs().max().item()))
    model(image()).square().mean().backward()
    first, second = model.conv.quantizers.grad_output.clip[:2].flatten().tolist()
    assert [second, first] == grads  # backward meets the later call first


def test_eval_of_a_shared_module_reads_each_call_s_own_clip():
    model = shared(2, "plain-int8")
    trained = model(image()).detach()
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(image()), trained)


# ---- copies ----------------------------------------------------------------------------------------------------------


def saved_and_loaded(layer):
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("recipe", RECIPES)
def test_copy_goes_on_exactly_as_the_original(duplicate, recipe, fresh, differing):
    layer = fresh(Int8Conv2d, 4, 6, 3, recipe=recipe)
    step(layer, 0)
    twin = duplicate(layer)
    assert twin.recipe == layer.recipe and twin is not layer
    for seed in (1, 2):
        assert same(step(layer, seed), step(twin, seed))
    assert differing(layer, twin) == []


def test_copy_shares_no_state(fresh, state_of):
    layer = fresh(Int8Conv2d, 4, 6, 3)
    step(layer)
    twin = copy.deepcopy(layer)
    before = state_of(twin)
    step(layer, 1)
    assert all(torch.equal(value, before[name]) for name, value in state_of(twin).items())


def test_copy_has_no_optimizer_behind_it(fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3)
    layer.hooked = True
    assert not copy.deepcopy(layer).hooked and layer.hooked


@pytest.mark.parametrize("use_buffers", [False, True], ids=["parameters", "parameters-and-buffers"])
@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_averaged_model_predicts(use_buffers, kind):
    """torch's own weight averaging around a prepared model, in the two ways that it offers."""
    torch.manual_seed(0)
    model = prepare(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), "plain-int8")
    average = {"swa": None, "ema": get_ema_multi_avg_fn(0.9)}[kind]
    averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=use_buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for seed in range(4):
        optimizer.zero_grad()
        model(image(seed)).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
    averaged.eval()
    plain = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    plain.load_state_dict({key: value for key, value in averaged.module.state_dict().items() if "quantizers" not in key})
    with torch.no_grad():
        output, expected = averaged(image(9)), plain(image(9))
    assert torch.allclose(output, expected, atol=0.05 * expected.abs().max().item())
    # torch averages buffers or copies them: both know the clip
    assert averaged.module[2].quantizers.input.initialized[0]


# ---- the learning-rate factor ----------------------------------------------------------------------------------------


def test_factor_is_one_without_a_rule_before_a_search_and_when_switched_off(fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3, recipe="unified-int8")
    assert layer.learning_rate_factor() == 1.0
    step(layer)
    layer.quantizers.grad_output.observed[0, DEVIATION] = 0.05
    assert layer.learning_rate_factor() == pytest.approx(0.3679, abs=5e-5)
    layer.enabled = False
    assert layer.learning_rate_factor() == 1.0
    plain = fresh(Int8Conv2d, 4, 6, 3)
    step(plain)
    plain.quantizers.grad_output.observed[0, DEVIATION] = 0.05
    assert plain.learning_rate_factor() == 1.0


def test_factor_comes_from_the_worst_call(fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3, recipe="unified-int8")
    step(layer)
    layer.quantizers.grad_output.observed[:3, DEVIATION] = torch.tensor([0.01, 0.05, 0.0])
    assert layer.learning_rate_factor() == pytest.approx(0.3679, abs=5e-5)


def test_factor_of_a_search_is_phi_of_the_stochastic_tensor_in_use(fresh):
    """Spec A5: the deviation behind phi is that of the tensor in use, which stochastic rounding about doubles."""
    layer = fresh(Int8Conv2d, 4, 6, 3, recipe=UnifiedInt8(learning_rate=DeviationCounteractive(alpha=100.0)))
    g = torch.randn(8, 6, 4, 4, generator=torch.Generator().manual_seed(0))
    layer(image(batch=8)).backward(g)
    clip = layer.quantizers.grad_output.clip[0, 1].item()
    nearest = (g.double() * 127 / clip).round().clamp(-127, 127)
    deviation = 1 - (g.double() * nearest).sum() / (g.double().norm() * nearest.norm())
    measured = layer.quantizers.grad_output.observed[0, DEVIATION].item()
    assert 1.5 * deviation < measured < 2.5 * deviation
    assert layer.learning_rate_factor() == pytest.approx(torch.exp(torch.tensor(-100.0 * measured)).item(), rel=1e-5)


# ---- the warning about a missing hook --------------------------------------------------------------------------------


def words(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught if "scale_learning_rates" in str(warning.message)]


def train(model, steps):
    for seed in range(steps):
        model(image(seed)).square().mean().backward()


def two_layers(recipe):
    return prepare(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)), recipe)


def test_one_warning_per_model_when_no_optimizer_is_connected():
    model = two_layers("unified-int8")
    assert words(lambda: train(model, 10)) == []  # one period: a user may connect the optimizer late
    said = words(lambda: train(model, 3))
    assert len(said) == 1
    assert "UnifiedInt8 needs the optimizer" in said[0] and "no optimizer is connected" in said[0]


def test_skip_without_a_hook_is_worth_a_warning_too():
    assert len(words(lambda: train(two_layers(PlainInt8(on_nonfinite="skip")), 5))) == 1


def test_no_warning_for_recipes_that_need_no_hook_in_eval_or_when_hooked():
    for recipe, training, hooked in (
        ("plain-int8", True, False),
        ("unified-int8", False, False),
        ("unified-int8", True, True),
    ):
        model = two_layers(recipe).train(training)
        for layer in model[1:]:
            layer.hooked = hooked
            layer.quantizers.backwards, layer.quantizers.stepped = 30, hooked
        assert words(lambda model=model: train(model, 1)) == []


def test_hook_that_never_sees_a_step_is_worth_a_warning():
    model = two_layers("unified-int8")
    for layer in model[1:]:
        layer.hooked = True
        layer.quantizers.backwards = 19  # two periods
    said = words(lambda: train(model, 4))
    assert len(said) == 1 and "no optimizer step was seen in 20 backward passes" in said[0]


# ---- attach and detach -----------------------------------------------------------------------------------------------


def test_detach_gives_torch_s_layer_back(fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3)
    layer.detach()
    assert type(layer) is nn.Conv2d and sorted(layer.state_dict()) == ["bias", "weight"]
    assert layer.__dict__.keys() == nn.Conv2d(4, 6, 3).__dict__.keys()
    assert layer(image()).shape == (2, 6, 4, 4)
