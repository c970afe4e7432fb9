# SPDX-License-Identifier: Apache-2.0
"""Int8Conv1d, 2d, 3d against their oracle (see conftest.py): constructor options, shapes, memory formats."""

import warnings

import pytest
import torch
from torch import nn

from byteback import Int8Conv1d, Int8Conv2d, Int8Conv3d, Recipe, TensorRule

RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]
CLASSES = {1: (Int8Conv1d, nn.Conv1d), 2: (Int8Conv2d, nn.Conv2d), 3: (Int8Conv3d, nn.Conv3d)}
IMAGE = {1: (17,), 2: (7, 8), 3: (5, 4, 6)}


def image(dims, channels=4, batch=2, seed=0):
    return torch.randn(batch, channels, *IMAGE[dims], generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dims", [1, 2, 3], ids=["1d", "2d", "3d"])
def test_three_products_are_those_of_the_quantized_operands(dims, recipe, fresh, check_against_oracle):
    """Four steps, so that clips are also held and averaged, not only searched."""
    layer = fresh(CLASSES[dims][0], 4, 6, 3, padding=1, recipe=recipe)
    for seed in range(4):
        check_against_oracle(layer, image(dims, seed=seed) * (1.0 + seed))


OPTIONS = {
    "stride2": {"stride": 2},
    "stride-leaves-a-border": {"stride": 3, "padding": 1},
    "padding2": {"padding": 2},
    "padding-same": {"padding": "same"},
    "padding-same-even-kernel": {"padding": "same", "kernel_size": 2},
    "padding-same-dilated": {"padding": "same", "dilation": 2},
    "padding-valid": {"padding": "valid"},
    "dilation2": {"dilation": 2, "padding": 2},
    "groups2": {"groups": 2},
    "depthwise": {"groups": 4, "out_channels": 4},
    "depthwise-multiplier": {"groups": 4, "out_channels": 8, "stride": 2},
    "no-bias": {"bias": False},
    "kernel1": {"kernel_size": 1},
    "one-channel-out": {"out_channels": 1},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "replicate": {"padding": 2, "padding_mode": "replicate"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "reflect-same-even": {"padding": "same", "padding_mode": "reflect", "kernel_size": 2},
    "circular-same-stride1": {"padding": "same", "padding_mode": "circular", "kernel_size": 3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dims", [1, 2, 3], ids=["1d", "2d", "3d"])
def test_constructor_option(dims, options, fresh, check_against_oracle):
    options = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **options}
    layer = fresh(CLASSES[dims][0], recipe="distribution-adaptive-int8", **options)
    x = image(dims)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own word on 'same' with even kernels
        check_against_oracle(layer, x)
        plain = CLASSES[dims][1](**options)
        assert layer(x).shape == plain(x).shape


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": (2, 3), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)},
        {"kernel_size": (1, 4), "padding": "same"},
        {"kernel_size": (3, 2), "padding": (0, 2), "padding_mode": "circular", "groups": 2},
    ],
    ids=["all-uneven", "same-1x4", "circular-3x2"],
)
def test_uneven_geometry(options, fresh, check_against_oracle):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_against_oracle(fresh(Int8Conv2d, 4, 6, recipe="unified-int8", **options), image(2))


@pytest.mark.parametrize("groups", [1, 2, 4], ids=["groups1", "groups2", "depthwise"])
def test_scale_per_input_channel_reaches_its_own_weights(groups, fresh):
    """Channels differ by powers of ten, so a scale that met the wrong channel's integers would be off by as much."""
    recipe = Recipe(input=TensorRule(per="C"), grad_output=TensorRule(), output=False)
    layer = fresh(Int8Conv2d, 4, 8, 3, groups=groups, bias=False, recipe=recipe)
    x = image(2) * torch.tensor([1e-3, 1.0, 1e2, 1e4]).reshape(1, 4, 1, 1)
    output = layer(x)
    g = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(g)
    exact = nn.grad.conv2d_weight(x, layer.weight.shape, g, groups=groups)
    error = (layer.weight.grad - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3))
    assert error.max() < 0.05


def test_bias_gradient_is_the_plain_sum(fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3)
    output = layer(image(2))
    g = torch.randn(output.shape)
    output.backward(g)
    assert torch.equal(layer.bias.grad, g.sum(dim=(0, 2, 3)))


# ---- memory formats --------------------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "permuted": lambda x: x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
    "every-second": lambda x: torch.stack([x, x + 1], dim=-1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
    "batch-of-one-expanded": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("channels_last_weight", [False, True], ids=["weight", "weight_cl"])
@pytest.mark.parametrize("change", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_memory_format_changes_strides_as_torch_does_and_no_bit(change, channels_last_weight, fresh, differing):
    x = change(image(2))
    flat = x.contiguous()
    results = []
    for value in (x, flat):
        layer = fresh(Int8Conv2d, 4, 6, 3, padding=1, recipe="distribution-adaptive-int8", bias=False)
        if channels_last_weight:
            layer = layer.to(memory_format=torch.channels_last)
        leaf = value.detach().requires_grad_()
        output = layer(leaf)
        output.backward(torch.randn(2, 6, 7, 8, generator=torch.Generator().manual_seed(3)))
        results.append((layer, output.detach(), leaf.grad, layer.weight.grad))
    (ours, output, *grads), (twin, flat_output, *flat_grads) = results
    assert torch.equal(output, flat_output)
    assert all(torch.equal(a, b) for a, b in zip(grads, flat_grads, strict=True))
    assert differing(ours, twin) == []
    plain = nn.Conv2d(4, 6, 3, padding=1, bias=False)
    plain = plain.to(memory_format=torch.channels_last) if channels_last_weight else plain
    assert output.stride() == plain(x).stride()


@pytest.mark.parametrize("dims", [1, 3], ids=["1d", "3d"])
def test_channel_innermost_input_in_one_and_three_dimensions(dims, fresh):
    ours, theirs = fresh(CLASSES[dims][0], 4, 6, 3), CLASSES[dims][1](4, 6, 3)
    x = image(dims).movedim(1, -1).contiguous().movedim(-1, 1)
    assert torch.equal(ours(x), fresh(CLASSES[dims][0], 4, 6, 3)(x.contiguous()))
    assert ours(x).stride() == theirs(x).stride()


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [1, 2, 3], ids=["1d", "2d", "3d"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_unbatched_input_is_a_batch_of_one(dims, training, fresh):
    x = image(dims, batch=1)
    outputs, grads = [], []
    for value in (x[0], x):
        layer = fresh(CLASSES[dims][0], 4, 6, 3, recipe="unified-int8").train(training)
        leaf = value.detach().requires_grad_()
        output = layer(leaf)
        output.square().sum().backward()
        outputs.append(output)
        grads.append((leaf.grad, layer.weight.grad))
    assert outputs[0].dim() == dims + 1 and torch.equal(outputs[0], outputs[1][0])
    assert torch.equal(grads[0][0], grads[1][0][0]) and torch.equal(grads[0][1], grads[1][1])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_empty_batch(recipe, training, fresh, state_of):
    """torch's layer takes it, gives an empty output and zero gradients; so does ours, and no clip moves."""
    layer = fresh(Int8Conv2d, 4, 6, 3, recipe=recipe).train(training)
    layer(image(2)).square().sum().backward()
    layer.weight.grad = None
    before = state_of(layer.quantizers)
    x = torch.zeros(0, 4, 7, 8, requires_grad=True)
    output = layer(x)
    assert output.shape == (0, 6, 5, 6)
    output.sum().backward()
    assert x.grad.shape == x.shape and not layer.weight.grad.any()
    moved = {name for name, value in state_of(layer.quantizers).items() if not torch.equal(value, before[name])}
    assert moved <= {"count", "iteration"}


@pytest.mark.parametrize(
    "shape", [(2, 3, 7, 8), (3, 7, 8), (4, 7), (1, 2, 4, 7, 8)], ids=["channels", "unbatched", "rank2", "rank5"]
)
def test_wrong_shape_names_the_layer_and_both_shapes(shape, fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3, name="layer1.0.conv2")
    with pytest.raises(ValueError, match=r"^layer1\.0\.conv2: expected input of shape \(N, 4, \.\.\.\).*but got \(") as error:
        layer(torch.zeros(shape))
    assert str(tuple(shape)) in str(error.value)


def test_image_smaller_than_the_kernel_names_the_layer(fresh):
    layer = fresh(Int8Conv2d, 4, 6, 5, name="layer1.0.conv2")
    with pytest.raises(ValueError, match=r"layer1\.0\.conv2"):
        layer(torch.zeros(1, 4, 3, 3))


def test_is_still_torch_s_layer_with_torch_s_parameters(fresh):
    for dims, (ours, theirs) in CLASSES.items():
        layer = fresh(ours, 4, 6, 3)
        assert isinstance(layer, theirs)
        assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
        assert len(layer.kernel_size) == dims


def test_switched_off_it_is_the_float_layer(fresh, state_of):
    layer, plain = fresh(Int8Conv2d, 4, 6, 3), nn.Conv2d(4, 6, 3)
    plain.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    before = state_of(layer)
    layer.enabled = False
    assert torch.equal(layer(image(2)), plain(image(2)))
    assert all(torch.equal(value, before[name]) for name, value in state_of(layer).items())


def test_standalone_layers_have_numbers_of_their_own():
    assert Int8Conv2d(1, 1, 1).quantizers.layer != Int8Conv2d(1, 1, 1).quantizers.layer
