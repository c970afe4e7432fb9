# SPDX-License-Identifier: Apache-2.0
"""Where the three products meet: what runs and what is saved, which noise and state, for every way to use autograd."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from byteback import (
    DirectionSensitive,
    DistributionAdaptiveInt8,
    Int8Conv2d,
    Int8Linear,
    MagnitudeAware,
    NonFiniteError,
    PlainInt8,
    Recipe,
    TensorRule,
    UnifiedInt8,
    ops,
    prepare,
)
from byteback.ops import magnitude

RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]
recipes = pytest.mark.parametrize("recipe", RECIPES)
NAN = float("nan")


def image(seed=0, batch=2, channels=4):
    return torch.randn(batch, channels, 6, 6, generator=torch.Generator().manual_seed(seed))


def conv(fresh, recipe="plain-int8", **options):
    return fresh(Int8Conv2d, 4, 6, 3, recipe=recipe, bias=False, **options)


def saved_by(run):
    """Every tensor that autograd keeps while `run` goes forward, and what `run` gave."""
    kept = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = run()
    return kept, output


def forbid(monkeypatch, *names):
    for name in names:

        def refuse(*args, name=name, **kwargs):
            raise AssertionError(f"{name} must not run here")

        monkeypatch.setattr(ops, name, refuse)


# ---- what is saved ---------------------------------------------------------------------------------------------------


@recipes
def test_only_int8_tensors_and_their_scales_are_saved(recipe, fresh):
    layer = conv(fresh, recipe)
    x = image().requires_grad_()
    kept, _ = saved_by(lambda: layer(x))
    big = [tensor for tensor in kept if tensor.numel() > 1]
    small = [tensor for tensor in kept if tensor.numel() == 1]
    assert sorted(tuple(tensor.shape) for tensor in big) == sorted([tuple(x.shape), tuple(layer.weight.shape)])
    assert all(tensor.dtype == torch.int8 for tensor in big)
    assert len(small) == 2 and all(tensor.dtype == torch.float32 for tensor in small)


def test_saved_scales_are_no_buffers(fresh):
    layer = conv(fresh)
    kept, _ = saved_by(lambda: layer(image().requires_grad_()))
    buffers = {buffer.untyped_storage().data_ptr() for buffer in layer.buffers()}
    assert kept and not buffers & {tensor.untyped_storage().data_ptr() for tensor in kept}


def test_hooks_that_pack_into_something_else_work(fresh):
    grads = []
    for packed in (False, True):
        layer, x = conv(fresh), image().requires_grad_()
        if packed:
            with saved_tensors_hooks(lambda tensor: tensor.numpy().copy(), torch.from_numpy):
                output = layer(x)
        else:
            output = layer(x)
        output.square().sum().backward()
        grads.append((x.grad, layer.weight.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


@recipes
def test_frozen_weight_saves_no_input_and_computes_no_grad_weight(recipe, fresh, monkeypatch):
    layer = conv(fresh, recipe)
    layer.weight.requires_grad_(False)
    x = image().requires_grad_()
    forbid(monkeypatch, "conv_int8_grad_weight")
    kept, output = saved_by(lambda: layer(x))
    assert {tuple(tensor.shape) for tensor in kept if tensor.numel() > 1} == {tuple(layer.weight.shape)}
    output.sum().backward()
    assert x.grad.abs().max() > 0 and layer.weight.grad is None


@recipes
def test_input_without_grad_saves_no_weight_and_computes_no_grad_input(recipe, fresh, monkeypatch):
    layer, x = conv(fresh, recipe), image()
    forbid(monkeypatch, "conv_int8_grad_input")
    kept, output = saved_by(lambda: layer(x))
    assert {tuple(tensor.shape) for tensor in kept if tensor.numel() > 1} == {tuple(x.shape)}
    output.sum().backward()
    assert layer.weight.grad.abs().max() > 0


def test_second_copy_is_not_made_for_a_frozen_weight(fresh):
    layer = conv(fresh, "distribution-adaptive-int8")
    layer.weight.requires_grad_(False)
    layer(image().requires_grad_()).sum().backward()
    assert layer.quantizers.grad_output.initialized[0]
    assert not layer.quantizers.grad_output_for_weight.initialized.any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_without_autograd_nothing_is_saved_and_the_output_is_the_same(mode, training, fresh):
    expected, layer = conv(fresh), conv(fresh)
    (
        expected(image()),
        layer(image()),
    )  # untracked, eval would quantize per sample here but not where a gradient may follow
    expected = expected.train(training)(image())
    layer.train(training)
    with mode():
        kept, output = saved_by(lambda: layer(image()))
    assert kept == [] and not output.requires_grad
    assert torch.equal(output, expected)


def test_layer_trains_on_after_inference_mode(fresh):
    """Buffers written in inference mode must still serve autograd afterwards."""
    layer = conv(fresh)
    with torch.inference_mode():
        layer(image())
    layer(image().requires_grad_()).sum().backward()
    assert layer.weight.grad.abs().max() > 0


# ---- products kept in float ------------------------------------------------------------------------------------------


def float_and_ours(fresh, cls, **fields):
    """(output, grad_input, grad_weight) of torch's layer and of ours with some products in float."""
    ours = fresh(cls, 4, 6, *(() if cls is Int8Linear else (3,)), bias=False, recipe=PlainInt8(**fields))
    theirs = nn.Linear(4, 6, bias=False) if cls is Int8Linear else nn.Conv2d(4, 6, 3, bias=False)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
    found, saved = [], []
    for layer in (theirs, ours):
        x = (image()[:, :, 0, 0] if cls is Int8Linear else image()).requires_grad_()
        kept, output = saved_by(lambda layer=layer, x=x: layer(x))
        output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(1)))
        found.append((output.detach(), x.grad, layer.weight.grad))
        saved.append({(tuple(tensor.shape), tensor.dtype) for tensor in kept if tensor.numel() > 1})
    return *found, saved[1], tuple(x.shape), tuple(ours.weight.shape)


@pytest.mark.parametrize("cls", [Int8Conv2d, Int8Linear], ids=["conv", "linear"])
@pytest.mark.parametrize("product", [0, 1, 2], ids=["output", "grad_input", "grad_weight"])
def test_product_kept_in_float_is_torch_s(cls, product, fresh):
    field = ("output", "grad_input", "grad_weight")[product]
    theirs, ours, saved, x_shape, w_shape = float_and_ours(fresh, cls, **{field: False})
    for which in range(3):
        assert torch.equal(theirs[which], ours[which]) is (which == product)
        assert torch.allclose(theirs[which], ours[which], atol=0.05 * theirs[which].abs().max().item())
    # output=False changes nothing that backward needs; a float gradient needs its operand unquantized
    x_dtype = torch.float32 if field == "grad_weight" else torch.int8
    w_dtype = torch.float32 if field == "grad_input" else torch.int8
    assert saved == {(x_shape, x_dtype), (w_shape, w_dtype)}


def test_all_products_in_float_is_torch_s_layer(fresh, monkeypatch):
    forbid(monkeypatch, "quantize", "conv_int8")
    theirs, ours, *_ = float_and_ours(fresh, Int8Conv2d, output=False, grad_input=False, grad_weight=False)
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


def test_float_gradients_quantize_nothing_and_count_nothing(fresh):
    layer = conv(fresh, PlainInt8(grad_input=False, grad_weight=False))
    layer(image().requires_grad_()).sum().backward()
    assert int(layer.quantizers.count) == 0 and not layer.quantizers.grad_output.initialized.any()


# ---- noise and state over several forwards and backwards -------------------------------------------------------------


def test_micro_batches_get_other_noise_each(fresh):
    layer = conv(fresh)
    grads = []
    for _ in range(3):
        layer.weight.grad = None
        layer(image()).backward(torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(9)))
        grads.append(layer.weight.grad)
    assert int(layer.quantizers.count) == 3
    assert not torch.equal(grads[0], grads[1]) and not torch.equal(grads[1], grads[2])
    assert torch.allclose(grads[0], grads[1], atol=0.1 * grads[0].abs().max().item())


def test_gradients_accumulate(fresh):
    once, separately = conv(fresh), conv(fresh)
    parts = []
    for seed in (0, 1):
        once(image(seed)).square().sum().backward()
        separately.weight.grad = None
        separately(image(seed)).square().sum().backward()
        parts.append(separately.weight.grad)
    assert torch.equal(once.weight.grad, parts[0] + parts[1])


@recipes
def test_two_forwards_before_one_backward(recipe, fresh):
    """Each forward keeps its own integers and scales, though both wrote the same buffers."""
    g = torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(2))
    layer, alone = conv(fresh, recipe), conv(fresh, recipe)
    x1, x2 = image(1).requires_grad_(), (100.0 * image(2)).requires_grad_()
    y1, y2 = layer(x1), layer(x2)
    (y1 * g).sum().backward()
    first = layer.weight.grad.clone()
    (y2 * g).sum().backward()
    (alone(image(1)) * g).sum().backward()
    assert torch.equal(first, alone.weight.grad)
    exact = nn.grad.conv2d_weight(x2, layer.weight.shape, g)
    assert torch.allclose(layer.weight.grad - first, exact, atol=0.05 * exact.abs().max().item())


def test_sum_of_two_forwards_in_one_backward(fresh):
    layer = conv(fresh)
    (layer(image(1)) + layer(image(2))).square().sum().backward()
    assert int(layer.quantizers.count) == 2 and layer.weight.grad.abs().max() > 0


def test_retain_graph_twice_gives_new_noise_and_the_same_clip(fresh):
    layer = conv(fresh, "unified-int8")
    output = layer(image())
    g = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    output.backward(g, retain_graph=True)
    first, clip = layer.weight.grad.clone(), layer.quantizers.grad_output.clip[0].item()
    layer.weight.grad = None
    output.backward(g)
    assert not torch.equal(first, layer.weight.grad)
    assert torch.allclose(first, layer.weight.grad, atol=0.1 * first.abs().max().item())
    assert int(layer.quantizers.count) == 2
    assert layer.quantizers.grad_output.clip[0].item() == clip and int(layer.quantizers.grad_output.updated_at[0]) == 0


def grad_weight(layer):
    layer.weight.grad = None
    layer(image()).backward(torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(4)))
    return layer.weight.grad


def test_equal_seed_and_number_give_equal_noise(fresh):
    assert torch.equal(grad_weight(conv(fresh)), grad_weight(conv(fresh)))


@pytest.mark.parametrize("other", [{"seed": 1}, {"number": 1}, {"seed": -1}, {"seed": 2**63}], ids=str)
def test_noise_differs_between_seeds_and_layers(other, fresh):
    assert not torch.equal(grad_weight(conv(fresh)), grad_weight(conv(fresh, **other)))


def test_noise_differs_between_ranks(fresh, monkeypatch):
    alone = grad_weight(conv(fresh))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, same in ((0, True), (1, False)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        assert torch.equal(alone, grad_weight(conv(fresh))) is same


def test_both_copies_of_a_gradient_share_their_noise(fresh, monkeypatch):
    keys = []
    original = magnitude.quantize_pair
    monkeypatch.setattr(magnitude, "quantize_pair", lambda *args: keys.append(args[-1]) or original(*args))
    conv(fresh, "distribution-adaptive-int8")(image().requires_grad_()).sum().backward()
    assert len(keys) == 1 and keys[0] is not None


@pytest.mark.parametrize("fused", [False, True], ids=["alone", "block"])
def test_a_depthwise_layer_makes_one_copy_for_both_products(fresh, monkeypatch, fused):
    """Its K is summed by no product, so the copy per channel serves grad_input too, with a scale for each channel."""
    scales = {}
    for name in ("conv_int8_grad_input", "conv_int8_grad_weight"):
        original = getattr(ops, name)

        def listen(*args, name=name, original=original):
            scales[name] = args[1]
            return original(*args)

        monkeypatch.setattr(ops, name, listen)
    shape = (1, 4, 1, 1)
    for shares, expected in ((True, shape), (False, (1, 1, 1, 1))):
        recipe = DistributionAdaptiveInt8(depthwise_shares=shares, first_conv=True)
        layer = fresh(Int8Conv2d, 4, 4, 3, recipe=recipe, bias=False, groups=4, padding=1)
        x = image().requires_grad_()
        if fused:
            model = prepare(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), nn.ReLU()), recipe)
            layer, _ = model[0], model(x).square().sum().backward()
        else:
            layer(x).square().sum().backward()
        assert scales["conv_int8_grad_input"].shape == expected and scales["conv_int8_grad_weight"].shape == shape
        assert bool(layer.quantizers.grad_output.seen.any()) is not shares
        assert layer.quantizers.grad_output_for_weight.seen.any() and x.grad.abs().sum() > 0


def test_finer_steps_bring_a_depthwise_gradient_nearer(fresh):
    x, w = image(), torch.randn(4, 1, 3, 3, generator=torch.Generator().manual_seed(3))
    g = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(4)) * torch.tensor([1.0, 1e-1, 1e-2, 1e-3]).reshape(
        1, 4, 1, 1
    )
    exact = torch.nn.grad.conv2d_input(x.shape, w, g, padding=1, groups=4)
    errors = []
    for shares in (True, False):
        layer = fresh(
            Int8Conv2d, 4, 4, 3, recipe=DistributionAdaptiveInt8(depthwise_shares=shares), bias=False, groups=4, padding=1
        )
        with torch.no_grad():
            layer.weight.copy_(w)
        leaf = x.clone().requires_grad_()
        layer(leaf).backward(g)
        errors.append(((leaf.grad - exact)[:, 3].norm() / exact[:, 3].norm()).item())
    assert errors[0] < 0.05 < errors[1]


def test_forward_uses_no_noise(fresh):
    assert torch.equal(conv(fresh, seed=1)(image()), conv(fresh, seed=2)(image()))


def test_gradients_are_unbiased(fresh):
    """The mean over 60 noises lies near the gradient of the unrounded tensor.

    Each element of grad_weight sums 32 roundings of variance at most 1/4 step²; the mean's standard error is at most
    sqrt(32 / 4 / 60) = 0.37 steps times max|x|, and six of them bound all 216 elements: false alarms below 1e-6.
    """
    layer, x = conv(fresh), image()
    g = torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(5))
    mean = torch.zeros_like(layer.weight)
    for _ in range(60):
        layer.weight.grad = None
        layer(x).backward(g)
        mean += layer.weight.grad / 60
    x_hat = (x * (127 / x.abs().max())).round() * (x.abs().max() / 127)
    exact = nn.grad.conv2d_weight(x_hat, layer.weight.shape, g)
    step = g.abs().max() / 127
    assert (mean - exact).abs().max() < 6 * 0.37 * step * x.abs().max()


# ---- train and eval --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [True, False], ids=["tracked", "untracked"])
@pytest.mark.parametrize("cls", [Int8Conv2d, Int8Linear], ids=["conv", "linear"])
def test_prediction_does_not_depend_on_its_batch(trained, cls, fresh):
    layer = conv(fresh) if cls is Int8Conv2d else fresh(Int8Linear, 4, 6)
    x = image(batch=4) if cls is Int8Conv2d else image(batch=4)[:, :, 0, 0]
    x = x * torch.tensor([1.0, 10.0, 0.1, 3.0]).reshape(-1, *(1,) * (x.dim() - 1))
    if trained:
        layer(x * 0.5)
    layer.eval()
    with torch.no_grad():
        together = layer(x)
        assert all(torch.equal(together[i : i + 1], layer(x[i : i + 1])) for i in range(4))


def test_eval_clip_batch_takes_the_batch_s_own_maximum(fresh):
    layer = conv(fresh, PlainInt8(eval_clip="batch"))
    x = image()
    layer(x * 0.01)
    trained = conv(fresh)(x)
    layer.eval()
    assert torch.equal(layer(x), trained)
    assert not torch.equal(layer(torch.cat([x, 50 * x]))[:2], trained)


def test_eval_moves_no_state(fresh, state_of):
    for recipe in (PlainInt8(), PlainInt8(eval_clip="batch"), UnifiedInt8()):
        layer = conv(fresh, recipe)
        layer(image()).sum().backward()
        layer.eval()
        before = state_of(layer)
        with torch.no_grad():
            layer(3 * image(1))
        assert all(torch.equal(value, before[name]) for name, value in state_of(layer).items())


@recipes
def test_eval_mode_backward_counts_noise_but_moves_no_clip(recipe, fresh, state_of):
    """Fine-tuning with the model in eval mode: gradients flow, noise never repeats, statistics stay."""
    layer = conv(fresh, recipe)
    layer(image()).sum().backward()
    layer.eval()
    before = state_of(layer)
    x = (3 * image(1)).requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad.abs().max() > 0
    moved = [name for name, value in state_of(layer).items() if not torch.equal(value, before[name])]
    assert moved == ["quantizers.count"]


def test_training_in_no_grad_tracks_the_input(fresh):
    layer = conv(fresh)
    with torch.no_grad():
        layer(image())
    assert layer.quantizers.input.tracked[0].item() == image().abs().max().item()


# ---- NaN and Inf -----------------------------------------------------------------------------------------------------


def with_nan(x):
    x = x.clone()
    x.view(-1)[3] = NAN
    return x


def test_nan_input_raises_with_layer_role_and_iteration(fresh):
    layer = conv(fresh, name="layer2.0.conv1")
    for _ in range(3):
        layer(image()).sum().backward()
    with pytest.raises(NonFiniteError, match=r"^layer2\.0\.conv1: input holds 1 NaN or Inf values at iteration 3;"):
        layer(with_nan(image()))


def test_nan_gradient_raises_with_layer_role_and_iteration(fresh):
    layer = conv(fresh, name="layer2.0.conv1")
    for _ in range(2):
        layer(image()).sum().backward()
    output = layer(image())
    with pytest.raises(NonFiniteError, match=r"^layer2\.0\.conv1: grad_output holds 1 NaN or Inf values at iteration 2;"):
        output.backward(with_nan(torch.ones_like(output)))


@pytest.mark.parametrize("where", ["weight", "eval-input"])
def test_every_non_finite_error_names_the_iteration(where, fresh):
    """Contract 9: the error names layer, role and step, for each tensor that is quantized."""
    layer = conv(fresh)
    for _ in range(2):
        layer(image()).sum().backward()
    if where == "weight":
        with torch.no_grad():
            layer.weight[0, 0, 0, 0] = NAN
    else:
        layer.eval()
    with pytest.raises(NonFiniteError, match="at iteration 2;"):
        layer(image() if where == "weight" else with_nan(image()))


def test_propagate_hands_nan_on_for_a_grad_scaler(fresh):
    layer = conv(fresh, PlainInt8(on_nonfinite="propagate"))
    x = image().requires_grad_()
    output = layer(x)
    output.backward(with_nan(torch.ones_like(output)))
    assert x.grad.isnan().all() and layer.weight.grad.isnan().all()
    assert layer(with_nan(image())).isnan().all()


def test_skip_hands_finite_zeros_on_and_counts(fresh):
    layer = conv(fresh, PlainInt8(on_nonfinite="skip"))
    x = image().requires_grad_()
    output = layer(x)
    output.backward(with_nan(torch.ones_like(output)))
    assert not x.grad.any() and not layer.weight.grad.any() and int(layer.quantizers.nonfinite) == 1


@pytest.mark.parametrize("eval_clip", ["tracked", "batch"])
def test_skip_does_not_turn_a_prediction_from_nan_into_numbers(eval_clip, fresh):
    """Outside training there is no step to skip, so a prediction from NaN must not look like one from zeros."""
    layer = conv(fresh, PlainInt8(on_nonfinite="skip", eval_clip=eval_clip))
    layer(image())
    layer.eval()
    with torch.no_grad():
        assert layer(with_nan(image())).isnan().any()


@pytest.mark.parametrize("eval_clip", ["tracked", "batch"])
def test_nan_in_eval_does_not_skip_a_training_step(eval_clip, fresh):
    """The optimizer hook drops a step when this count rose; a bad validation image must not drop a good step."""
    layer = conv(fresh, PlainInt8(on_nonfinite="skip", eval_clip=eval_clip)).eval()
    with torch.no_grad():
        layer(with_nan(image()))
    assert int(layer.quantizers.nonfinite) == 0


# ---- double backward -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["quadratic", "linear", "relu"])
def test_double_backward_is_refused(loss, fresh):
    """Gradient penalties are the use: with a float layer the second derivative is there, so silence would be wrong."""
    layer = conv(fresh, name="critic.conv")
    x = image().requires_grad_()
    output = layer(x)
    total = {"quadratic": output.square(), "linear": output, "relu": output.relu()}[loss].sum()
    (grad,) = torch.autograd.grad(total, x, create_graph=True)
    assert grad.requires_grad, "a gradient cut from its graph would make a gradient penalty silently do nothing"
    with pytest.raises(RuntimeError, match=r"critic\.conv: its gradient was differentiated a second time.*create_graph"):
        grad.square().sum().backward()


def test_create_graph_alone_does_no_harm(fresh):
    layer, plain = conv(fresh), conv(fresh)
    layer(image()).square().sum().backward(create_graph=True)
    plain(image()).square().sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)


# ---- activation checkpointing ----------------------------------------------------------------------------------------


class Net(nn.Module):
    """stem (float), then conv `calls` times, each time checkpointed or not."""

    def __init__(self, calls=1, how=None):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.calls, self.how = calls, how

    def forward(self, x):
        x = self.stem(x)
        for _ in range(self.calls):
            block = lambda x: self.conv(x).relu() + x  # noqa: E731
            x = block(x) if self.how is None else checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return x


def net(recipe, calls=1, how=None):
    torch.manual_seed(0)
    return prepare(Net(calls, how), recipe)


def trained(model, steps=2, policy_nan=False):
    """Gradients after a few steps without an optimizer."""
    for seed in range(steps):
        model.zero_grad()
        x = with_nan(image(seed)) if policy_nan else image(seed)
        model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@recipes
@pytest.mark.parametrize("how", ["non-reentrant", "reentrant"])
def test_checkpointing_changes_neither_gradients_nor_state(recipe, how, differing):
    plain, checkpointed = net(recipe), net(recipe, how=how)
    for a, b in zip(trained(plain), trained(checkpointed), strict=True):
        assert torch.equal(a, b)
    assert differing(plain, checkpointed) == []
    assert int(plain.conv.quantizers.count) == 2


@pytest.mark.parametrize("role", ["input", "weight"])
@pytest.mark.parametrize("rule", [MagnitudeAware(), DirectionSensitive()], ids=lambda rule: type(rule).__name__)
def test_rule_that_looks_back_is_refused_in_the_forward_pass(role, rule):
    """A recomputed forward would find its own clip in the memory and choose another one."""
    with pytest.raises(ValueError, match=rf"^Recipe: {role}\.clip is .*looks back.*Use it for gradients only"):
        Recipe(**{role: TensorRule(rule)})


@recipes
def test_non_reentrant_checkpointing_of_a_shared_layer(recipe, differing):
    plain, checkpointed = net(recipe, calls=3), net(recipe, calls=3, how="non-reentrant")
    for a, b in zip(trained(plain), trained(checkpointed), strict=True):
        assert torch.equal(a, b)
    assert differing(plain, checkpointed) == []


def test_reentrant_checkpointing_of_a_shared_layer_is_an_error():
    model = net("unified-int8", calls=2, how="reentrant")
    with pytest.raises(RuntimeError, match=r"conv: this layer is called 2 times.*use_reentrant=False"):
        trained(model, steps=1)


def test_recomputation_does_not_count_a_nan_twice():
    recipe = PlainInt8(on_nonfinite="skip")
    plain, checkpointed = net(recipe), net(recipe, how="non-reentrant")
    trained(plain, steps=1, policy_nan=True)
    trained(checkpointed, steps=1, policy_nan=True)
    assert int(checkpointed.conv.quantizers.nonfinite) == int(plain.conv.quantizers.nonfinite)


# ---- a search inside a layer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hold", ["clip", "ratio"])
def test_layer_searches_at_0_10_20(hold, fresh):
    rule = DirectionSensitive(period=10, hold=hold, search_when_saturated=None, search_when_shrunk=None)
    layer = conv(fresh, UnifiedInt8(grad_output=TensorRule(rule, "stochastic"), learning_rate=None))
    dates = []
    for seed in range(21):
        layer(image(seed)).square().sum().backward()
        dates.append(int(layer.quantizers.grad_output.updated_at[0]))
    assert dates == [0] * 10 + [10] * 10 + [20]


def test_micro_batches_of_a_hooked_layer_do_not_search_again(fresh):
    rule = DirectionSensitive(period=1, search_when_saturated=None, search_when_shrunk=None)
    layer = conv(fresh, UnifiedInt8(grad_output=TensorRule(rule, "stochastic")))
    layer.hooked = True  # the optimizer's hook counts iterations now
    clips = []
    for seed in range(4):
        if seed == 2:
            layer.quantizers.iteration.add_(1)
        layer(image(seed)).square().sum().backward()
        clips.append(layer.quantizers.grad_output.clip[0].item())
    assert clips[0] == clips[1] != clips[2] == clips[3]
    assert int(layer.quantizers.count) == 4 and int(layer.quantizers.iteration) == 1
