# SPDX-License-Identifier: Apache-2.0
"""NaN and Inf inside a layer: refused by name, skipped or handed on."""

import pytest
import torch

from byteback import NonFiniteError, PlainInt8
from small_layers import NAN, conv, image, with_nan


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
