# SPDX-License-Identifier: Apache-2.0
"""Where the three products meet: what runs, what is saved, and what a second derivative meets."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from byteback import DirectionSensitive, Int8Conv2d, Int8Linear, PlainInt8, TensorRule, UnifiedInt8, ops
from small_layers import conv, image, recipes


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


# ---- a search inside a layer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hold", ["clip", "ratio"])
def test_layer_searches_at_0_10_20(hold, fresh):
    rule = DirectionSensitive(period=10, hold=hold, search_when_saturated=None)
    layer = conv(fresh, UnifiedInt8(grad_output=TensorRule(rule, "stochastic"), learning_rate=None))
    dates = []
    for seed in range(21):
        layer(image(seed)).square().sum().backward()
        dates.append(int(layer.quantizers.grad_output.updated_at[0]))
    assert dates == [0] * 10 + [10] * 10 + [20]


def test_micro_batches_of_a_hooked_layer_do_not_search_again(fresh):
    rule = DirectionSensitive(period=1, search_when_saturated=None)
    layer = conv(fresh, UnifiedInt8(grad_output=TensorRule(rule, "stochastic")))
    layer.hooked = True  # the optimizer's hook counts iterations now
    clips = []
    for seed in range(4):
        if seed == 2:
            layer.quantizers.iteration.add_(1)
        layer(image(seed)).square().sum().backward()
        clips.append(layer.quantizers.grad_output.clip[0].tolist())
    assert clips[0] == clips[1] != clips[2] == clips[3]
    assert int(layer.quantizers.count) == 4 and int(layer.quantizers.iteration) == 1
