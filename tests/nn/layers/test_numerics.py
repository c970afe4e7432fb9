# SPDX-License-Identifier: Apache-2.0
"""LayerNumerics: what a layer saves, that a resumed run has the same bits, and what a checkpoint may leave out."""

import io
import warnings

import pytest
import torch
from torch import nn

from byteback import Int8Conv2d, NonFiniteError, float_state_dict, prepare
from byteback.nn.layers.numerics import signed64
from byteback.ops.contract.limits import NUMERICS_VERSION

RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]


def image(seed):
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(seed))


def step(layer, seed):
    layer.weight.grad = None
    x = image(seed).requires_grad_()
    output = layer(x)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(seed + 50)))
    return output.detach(), x.grad, layer.weight.grad


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# ---- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("saved_after", [0, 3])
def test_resumed_run_continues_noise_and_clips_exactly(recipe, saved_after, fresh, differing):
    layer = fresh(Int8Conv2d, 4, 6, 3, recipe=recipe)
    for seed in range(saved_after):
        step(layer, seed)
    resumed = fresh(Int8Conv2d, 4, 6, 3, recipe=recipe, seed=99, number=7, weights=5)
    resumed.load_state_dict(through_a_file(layer.state_dict()))
    for seed in range(saved_after, saved_after + 12):  # over the next clip search
        for ours, theirs in zip(step(layer, seed), step(resumed, seed), strict=True):
            assert torch.equal(ours, theirs)
    assert differing(layer, resumed) == []


def test_count_and_iteration_rise_with_every_gradient(fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3)
    for seed in range(3):
        step(layer, seed)
    assert int(layer.quantizers.count) == 3 and int(layer.quantizers.iteration) == 3
    layer.hooked = True
    step(layer, 3)
    assert int(layer.quantizers.count) == 4 and int(layer.quantizers.iteration) == 3


def test_failed_backward_does_not_repeat_noise(fresh):
    """A gradient that raised still used its key: the next one gets another."""
    layer = fresh(Int8Conv2d, 4, 6, 3)
    output = layer(image(0))
    with pytest.raises(NonFiniteError):
        output.backward(torch.full_like(output, float("nan")))
    assert int(layer.quantizers.count) == 1


# ---- what is in the state --------------------------------------------------------------------------------------------


def test_names_and_dtypes_of_the_state(fresh):
    state = fresh(Int8Conv2d, 4, 6, 3, recipe="distribution-adaptive-int8").state_dict()
    scalars = {"numerics_version", "seed", "layer", "count", "iteration", "nonfinite"}
    for name in scalars:
        assert state[f"quantizers.{name}"].dtype == torch.int64 and state[f"quantizers.{name}"].shape == ()
    assert state["quantizers.grad_output.clip"].shape == (8, 1)
    assert state["quantizers.grad_output_for_weight.clip"].shape == (8, 6)
    assert state["quantizers.input.tracked"].shape == (8, 1)


@pytest.mark.parametrize(("seed", "held"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1), (-5, -5)])
def test_any_64_bit_seed_fits(seed, held):
    assert signed64(seed) == held


def test_reset_keeps_what_names_the_noise(fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3, seed=5, number=3, recipe="unified-int8")
    step(layer, 0)
    layer.quantizers.reset()
    state = layer.quantizers.state_dict()
    kept = {name: int(value) for name, value in state.items() if value.any()}
    assert kept == {"numerics_version": NUMERICS_VERSION, "seed": 5, "layer": 3, "count": 1}


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_float_checkpoint_loads_strictly_and_resets(fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3, recipe="unified-int8")
    step(layer, 0)
    assert layer.quantizers.input.tracked.any()
    plain = nn.Conv2d(4, 6, 3)
    checkpoint = plain.state_dict()
    assert layer.load_state_dict(checkpoint, strict=True) == ([], [])
    assert torch.equal(layer.weight, plain.weight)
    assert not layer.quantizers.input.tracked.any()
    assert int(layer.quantizers.count) == 1, "noise is never used twice"
    assert sorted(checkpoint) == ["bias", "weight"], "the caller's dict must not change"


def test_float_checkpoint_of_a_whole_model_loads_strictly():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    checkpoint = {key: value.clone() for key, value in plain.state_dict().items()}
    model = prepare(plain, "distribution-adaptive-int8")
    model(image(0)).sum().backward()
    model.load_state_dict(checkpoint, strict=True)
    assert not model[1].quantizers.grad_output_for_weight.clip.any()
    nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).load_state_dict(
        float_state_dict(model), strict=True
    )


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_float_checkpoint_with_assign(assign, fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3)
    layer.load_state_dict(nn.Conv2d(4, 6, 3).state_dict(), strict=True, assign=assign)
    step(layer, 0)
    assert int(layer.quantizers.count) == 1


@pytest.mark.parametrize(
    "missing",
    ["quantizers.count", "quantizers.input.tracked", "quantizers.grad_output.clip", "quantizers.numerics_version"],
)
def test_half_a_state_is_an_error(missing, fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3, recipe="unified-int8")
    state = layer.state_dict()
    del state[missing]
    with pytest.raises(RuntimeError, match=rf'Missing key.*"{missing}"'):
        fresh(Int8Conv2d, 4, 6, 3, recipe="unified-int8").load_state_dict(state)


def test_state_of_another_recipe_is_an_error(fresh):
    state = fresh(Int8Conv2d, 4, 6, 3, recipe="distribution-adaptive-int8").state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*grad_output_for_weight"):
        fresh(Int8Conv2d, 4, 6, 3, recipe="unified-int8").load_state_dict(state)


def test_other_numerics_version_warns_and_is_replaced(fresh):
    layer = fresh(Int8Conv2d, 4, 6, 3)
    state = layer.state_dict()
    state["quantizers.numerics_version"] = torch.tensor(NUMERICS_VERSION + 6)
    twin = fresh(Int8Conv2d, 4, 6, 3)
    with pytest.warns(UserWarning, match=rf"numerics version {NUMERICS_VERSION + 6}, but this build has {NUMERICS_VERSION}"):
        twin.load_state_dict(state)
    assert int(twin.quantizers.numerics_version) == NUMERICS_VERSION


def test_own_numerics_version_does_not_warn(fresh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh(Int8Conv2d, 4, 6, 3).load_state_dict(fresh(Int8Conv2d, 4, 6, 3).state_dict())
