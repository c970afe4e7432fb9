# SPDX-License-Identifier: Apache-2.0
"""Quantizer: what it remembers, in which slot, what it writes down, and what it does with NaN and Inf.

Clip rules here are small ones of the test's own, so that each clip is known beforehand.
"""

import copy
import dataclasses
from typing import NamedTuple

import pytest
import torch

from byteback import Choice, ClipRule, DirectionSensitive, MagnitudeAware, MaxAbs, NonFiniteError, TensorRule
from byteback.quantize import (
    CALL_SLOTS,
    CLIP,
    DEVIATION,
    GAUSSIAN,
    SATURATED,
    Quantizer,
    Settings,
    direction_deviation,
    quantize_fresh,
    register,
)

NAN, INF = float("nan"), float("inf")
NOW = torch.tensor(7)  # an iteration


def settings(rule=None, role="input", on_nonfinite="raise", observe_every=10, momentum=0.1):
    return register(Settings(rule or TensorRule(), role, "block.conv", on_nonfinite, observe_every, momentum))


class Bench(NamedTuple):
    """One quantizer with what a layer would hand to it."""

    quantizer: Quantizer
    handle: int
    nonfinite: torch.Tensor

    def __call__(self, x, iteration=0, **options):
        return self.quantizer.quantize(x, self.handle, torch.tensor(iteration), self.nonfinite, **options)


def bench(rule=None, channels=1, tracks=True, **options):
    return Bench(Quantizer(channels, tracks), settings(rule, **options), torch.tensor(0))


def state(quantizer):
    return {name: buffer.clone() for name, buffer in quantizer.named_buffers()}


def assert_untouched(quantizer, before):
    for name, buffer in quantizer.named_buffers():
        assert torch.equal(buffer, before[name]), name


# ---- the step by hand ------------------------------------------------------------------------------------------------


def test_four_elements_by_hand():
    # max|x| = 2, scale = 2/127; x * 127/2 = (127, -63.5, 31.75, 0) -> half to even: (127, -64, 32, 0)
    values, scale = bench()(torch.tensor([[2.0, -1.0, 0.5, 0.0]]))
    assert values.tolist() == [[127, -64, 32, 0]] and values.dtype == torch.int8
    assert scale.tolist() == [[pytest.approx(2.0 / 127.0)]] and scale.dtype == torch.float32


def test_direction_deviation_of_rows():
    # cos = 24 / (5 * 5) = 0.96; a zero tensor deviates by nothing; one that became all zeros by everything
    terms = torch.tensor([[24.0, 25.0, 25.0], [0.0, 0.0, 0.0], [0.0, 0.0, 4.0], [25.0, 25.0, 25.0]], dtype=torch.float64)
    assert direction_deviation(terms).tolist() == pytest.approx([0.04, 0.0, 1.0, 0.0], abs=1e-15)


def test_deviation_is_never_below_zero():
    terms = torch.tensor([[1.0 + 1e-15, 1.0, 1.0]], dtype=torch.float64)
    assert direction_deviation(terms).item() == 0.0


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_fixed_shape_buffers_from_the_start():
    quantizer = Quantizer(5, tracks=True)
    shapes = {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in quantizer.named_buffers()}
    assert shapes["clip"] == ((CALL_SLOTS, 5), torch.float32)
    assert shapes["tracked"] == ((CALL_SLOTS, 5), torch.float32)
    assert shapes["updated_at"] == ((CALL_SLOTS,), torch.int64)
    assert shapes["observed"] == ((CALL_SLOTS, max(SATURATED, DEVIATION, GAUSSIAN, CLIP) + 1), torch.float32)
    assert CALL_SLOTS == 8
    assert "tracked" not in Quantizer(5, tracks=False).state_dict()


def test_clip_is_remembered_in_its_own_slot():
    step = bench()
    step(torch.tensor([[2.0]]), slot=0)
    step(torch.tensor([[5.0]]), slot=3)
    assert step.quantizer.clip.flatten().tolist() == [2.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0]
    assert step.quantizer.initialized.bool().tolist() == [True, False, False, True, False, False, False, False]


def test_slots_do_not_see_each_other_s_memory():
    step = bench(TensorRule(MagnitudeAware()), role="grad_output", tracks=False)
    x = torch.full((40, 1), 0.01)
    x[3] = 1.0
    step(x, slot=0)
    _, scale = step(2 * x, slot=0)
    assert scale.item() * 127 == pytest.approx(0.2 * 1.0 + 0.8 * 2.0, rel=1e-6)
    _, scale = step(2 * x, slot=1)
    assert scale.item() * 127 == pytest.approx(2.0, rel=1e-6)


def test_remember_false_writes_nothing():
    step = bench()
    step(torch.tensor([[2.0]]))
    before = state(step.quantizer)
    values, _ = step(torch.tensor([[5.0, 1.0]]), iteration=7, remember=False)
    assert values.tolist() == [[127, 25]]
    assert_untouched(step.quantizer, before)


def test_reset_forgets_everything():
    step = bench()
    step(torch.tensor([[2.0, 3.0]]), iteration=4)
    assert step.quantizer.clip.any() and step.quantizer.tracked.any()
    step.quantizer.reset()
    assert not any(buffer.any() for buffer in step.quantizer.buffers())


def test_search_is_dated_and_held():
    step = bench(TensorRule(DirectionSensitive(period=10)), role="grad_output", tracks=False)
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
    dates, clips = [], []
    for iteration in range(25):
        step(x * (1.0 + 0.001 * iteration), iteration)
        dates.append(int(step.quantizer.updated_at[0]))
        clips.append(step.quantizer.clip[0].item())
    assert dates == [0] * 10 + [10] * 10 + [20] * 5
    assert len(set(clips)) == 3


def test_zero_gradient_is_not_initialized_and_the_next_is_searched():
    step = bench(TensorRule(DirectionSensitive()), role="grad_output", tracks=False)
    step(torch.zeros(1, 2, 4), 0)
    assert not step.quantizer.initialized.any()
    _, scale = step(torch.tensor([[1.0, -1.0]]), 1)
    assert scale.item() * 127 == pytest.approx(1.0) and int(step.quantizer.updated_at[0]) == 1


@pytest.mark.parametrize(
    ("factor", "again"), [(1.0, False), (3.0, True), (0.2, False), (0.05, True)], ids=["same", "3x", "0.2x", "0.05x"]
)
def test_stale_clip_is_searched_again_at_once(factor, again):
    """Three times the gradient saturates far more than 1%; a twentieth is far below an eighth of the clip."""
    step = bench(TensorRule(DirectionSensitive()), role="grad_output", tracks=False)
    x = torch.randn(2, 3, 400, generator=torch.Generator().manual_seed(0))
    step(x, 0)
    held = step.quantizer.clip[0].item()
    _, scale = step(x * factor, 3)
    assert (int(step.quantizer.updated_at[0]) == 3) is again
    assert (scale.item() * 127 == pytest.approx(held, rel=1e-6)) is not again
    if again:
        assert scale.item() * 127 == pytest.approx(held * factor, rel=1e-4)
        assert step.quantizer.observed[0, SATURATED] < 0.01


def test_without_safeguards_a_wrong_clip_is_held():
    rule = DirectionSensitive(search_when_saturated=None, search_when_shrunk=None)
    step = bench(TensorRule(rule), role="grad_output", tracks=False)
    x = torch.randn(2, 3, 400, generator=torch.Generator().manual_seed(0))
    step(x, 0)
    held = step.quantizer.clip[0].item()
    for factor in (3.0, 0.05):
        _, scale = step(x * factor, 3)
        assert scale.item() * 127 == pytest.approx(held, rel=1e-6)


def test_scale_is_no_view_of_a_buffer():
    """Scales are saved for backward; a later step must not change them."""
    for rule, role in ((MaxAbs(), "input"), (DirectionSensitive(), "grad_output"), (MagnitudeAware(), "grad_output")):
        step = bench(TensorRule(rule), role=role)
        kept = []
        for iteration in range(3):
            kept.append(step(torch.tensor([[1.0 + iteration, 0.5]]), iteration).scale)
        copies = [scale.clone() for scale in kept]
        step.quantizer.reset()
        assert all(torch.equal(scale, before) for scale, before in zip(kept, copies, strict=True))


def test_input_itself_is_not_written_to():
    x = torch.randn(2, 3)
    before = x.clone()
    bench()(x)
    assert torch.equal(x, before)


# ---- observations ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fixed(ClipRule):
    """Always the same clip, and nothing to remember."""

    bound: float = 1.0

    def choose(self, x, axis, memory):
        shape = [x.shape[dim] if dim == axis else 1 for dim in range(x.dim())]
        return Choice(torch.full(shape, self.bound))


def test_saturated_share_and_deviation_are_written_down():
    # clip 1: of (4, 3, 0, 0) two exceed it, q = (127, 127, 0, 0), cos = 7/(5 sqrt 2), deviation 0.0100505
    step = bench(TensorRule(Fixed()))
    step(torch.tensor([[4.0, 3.0, 0.0, 0.0]]))
    assert step.quantizer.observed[0, SATURATED].item() == 0.5
    assert step.quantizer.observed[0, DEVIATION].item() == pytest.approx(0.0100505, abs=1e-7)


def test_deviation_is_measured_every_so_many_iterations():
    step = bench(TensorRule(Fixed()), observe_every=4)
    seen = []
    for iteration in range(9):
        step(torch.tensor([[4.0, 3.0 - 0.1 * iteration]]), iteration)
        seen.append(step.quantizer.observed[0, DEVIATION].item())
    assert seen[0] == seen[1] == seen[2] == seen[3] != seen[4] == seen[7] != seen[8]


def test_gaussian_share_is_written_down():
    step = bench(TensorRule(MagnitudeAware(), per="K"), channels=2, role="grad_output", tracks=False)
    x = torch.full((40, 2), 0.01)
    x[3, 0] = 1.0  # channel 0: inverted T; channel 1: equal values, all above their zero deviation: Gaussian branch
    step(x)
    assert step.quantizer.observed[0, GAUSSIAN].item() == 0.5


def test_empty_tensor_touches_nothing():
    step = bench()
    step(torch.tensor([[2.0]]))
    before = state(step.quantizer)
    values, scale = step(torch.zeros(0, 1), iteration=3)
    assert values.shape == (0, 1) and scale.shape == (1, 1) and scale.item() > 0
    assert_untouched(step.quantizer, before)


# ---- granularity -----------------------------------------------------------------------------------------------------


def test_per_channel_input_keeps_one_clip_for_each_channel():
    step = bench(TensorRule(per="C"), channels=3)
    values, scale = step(torch.tensor([[1.0, 20.0, 300.0], [0.5, -10.0, 150.0]]))
    assert values.tolist() == [[127, 127, 127], [64, -64, 64]]
    assert scale.shape == (1, 3)
    assert step.quantizer.clip[0].tolist() == [1.0, 20.0, 300.0]
    assert step.quantizer.tracked[0].tolist() == [1.0, 20.0, 300.0]


def test_per_sample_input_remembers_the_largest_clip():
    step = bench(TensorRule(per="N"))
    values, scale = step(torch.tensor([[1.0, 0.5], [20.0, -10.0]]))
    assert values.tolist() == [[127, 64], [127, -64]] and scale.shape == (2, 1)
    assert step.quantizer.clip[0].tolist() == [20.0] and step.quantizer.tracked[0].tolist() == [20.0]


# ---- the tracked clip and eval ---------------------------------------------------------------------------------------


def test_tracked_clip_is_an_average_of_momentum_0_1():
    # 2; 0.9 * 2 + 0.1 * 4 = 2.2; 0.9 * 2.2 + 0.1 * 1 = 2.08
    step, seen = bench(), []
    for peak in (2.0, 4.0, 1.0):
        step(torch.tensor([[peak, 0.1]]))
        seen.append(step.quantizer.tracked[0].item())
    assert seen == pytest.approx([2.0, 2.2, 2.08], rel=1e-6)


def test_tracked_clip_takes_the_recipe_s_momentum():
    step = bench(momentum=0.5)
    for peak in (2.0, 4.0):
        step(torch.tensor([[peak, 0.1]]))
    assert step.quantizer.tracked[0].item() == pytest.approx(3.0)


@pytest.mark.parametrize("per_sample", [True, False], ids=["per-sample", "whole"])
def test_eval_uses_the_tracked_clip(per_sample):
    step = bench()
    step(torch.tensor([[2.0]]))
    x = torch.tensor([[1.0, 4.0], [0.5, -1.0]])
    values, scale = step.quantizer.quantize_tracked(x, step.handle, NOW, 0, per_sample)
    assert values.tolist() == [[64, 127], [32, -64]]
    assert scale.shape == ((2, 1) if per_sample else (1, 1)) and torch.allclose(scale * 127, torch.tensor(2.0))


def test_eval_without_a_tracked_clip_quantizes_per_sample():
    step = bench()
    x = torch.tensor([[1.0, 4.0], [0.5, -1.0]])
    values, scale = step.quantizer.quantize_tracked(x, step.handle, NOW, 0, True)
    assert values.tolist() == [[32, 127], [64, -127]] and scale.shape == (2, 1)
    assert not any(buffer.any() for buffer in step.quantizer.buffers())


def test_eval_reads_the_slot_of_the_call():
    step = bench()
    step(torch.tensor([[2.0]]), slot=0)
    step(torch.tensor([[8.0]]), slot=1)
    for slot, clip in ((0, 2.0), (1, 8.0)):
        _, scale = step.quantizer.quantize_tracked(torch.tensor([[1.0]]), step.handle, NOW, slot, False)
        assert scale.item() * 127 == pytest.approx(clip)


def test_clip_of_a_rule_without_memory_is_tracked_too():
    """Contract 12: training tracks each input clip, and eval uses it, whatever the rule remembers for itself."""
    step = bench(TensorRule(Fixed(3.0)))
    step(torch.tensor([[1.0, 10.0]]))
    assert step.quantizer.tracked[0].item() == pytest.approx(3.0)
    _, scale = step.quantizer.quantize_tracked(torch.tensor([[1.0, 10.0]]), step.handle, NOW, 0, False)
    assert scale.item() * 127 == pytest.approx(3.0)


def test_clip_of_a_rule_without_memory_is_averaged_too():
    step = bench(TensorRule(HalvedMax()))
    for peak in (2.0, 4.0):
        step(torch.tensor([[peak, 0.1]]))
    assert step.quantizer.tracked[0].item() == pytest.approx(0.9 * 1.0 + 0.1 * 2.0)


@dataclasses.dataclass(frozen=True)
class HalvedMax(ClipRule):
    def choose(self, x, axis, memory):
        return Choice(x.abs().amax().reshape((1,) * x.dim()) / 2)


# ---- dtype and device ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_buffers_keep_their_dtype(cast):
    step = bench()
    step(torch.tensor([[1.0 + 2.0**-20]]))  # not a float16 number: a cast there and back would lose it
    before, dtypes = state(step.quantizer), {name: b.dtype for name, b in step.quantizer.named_buffers()}
    getattr(torch.nn.Sequential(step.quantizer), cast)()
    assert {name: b.dtype for name, b in step.quantizer.named_buffers()} == dtypes
    assert_untouched(step.quantizer, before)


def test_buffers_move_with_the_model():
    quantizer = torch.nn.Sequential(Quantizer(2, tracks=True)).to("meta")[0]
    assert {buffer.device.type for buffer in quantizer.buffers()} == {"meta"}


def test_copies_are_independent():
    step = bench()
    step(torch.tensor([[2.0]]))
    twin = copy.deepcopy(step.quantizer)
    step(torch.tensor([[5.0]]))
    assert twin.clip[0].item() == 2.0


# ---- NaN and Inf -----------------------------------------------------------------------------------------------------

BAD = pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=["nan", "inf", "-inf"])
RULES = pytest.mark.parametrize(
    "rule", [MaxAbs(), DirectionSensitive(), MagnitudeAware()], ids=lambda rule: type(rule).__name__
)


@BAD
@RULES
@pytest.mark.parametrize("policy", ["raise", "skip", "propagate"])
def test_state_does_not_move_on_a_non_finite_tensor(bad, rule, policy):
    step = bench(TensorRule(rule), role="grad_output", on_nonfinite=policy)
    good = torch.tensor([[1.0, -2.0, 0.5, 0.1]])
    step(good, 0)
    before = state(step.quantizer)
    x = good.clone()
    x[0, 2] = bad
    for iteration in (1, 10):  # held, and due for a search
        if policy == "raise":
            with pytest.raises(NonFiniteError):
                step(x, iteration)
        else:
            values, scale = step(x, iteration)
            assert not values.any()
            assert scale.isnan().all() if policy == "propagate" else (scale.isfinite().all() and (scale > 0).all())
    assert_untouched(step.quantizer, before)
    assert int(step.nonfinite) == 2


def test_error_names_layer_role_count_and_iteration():
    step = bench(role="grad_output")
    with pytest.raises(NonFiniteError) as error:
        step(torch.tensor([[1.0, NAN, INF]]), iteration=17)
    message = str(error.value)
    assert message.startswith("block.conv: grad_output holds 2 NaN or Inf values at iteration 17;")
    assert "Lower the learning rate" in message and 'on_nonfinite="skip"' in message
    assert isinstance(error.value, RuntimeError)


@pytest.mark.parametrize("policy", ["skip", "propagate"])
@pytest.mark.parametrize("trained", [True, False], ids=["tracked", "untracked"])
def test_prediction_from_nan_is_nan(policy, trained):
    step = bench(on_nonfinite=policy)
    if trained:
        step(torch.tensor([[1.0]]))
    _, scale = step.quantizer.quantize_tracked(torch.tensor([[NAN, 1.0]]), step.handle, NOW, 0, True)
    assert scale.isnan().all()


def test_prediction_from_nan_raises_if_asked():
    step = bench()
    with pytest.raises(NonFiniteError, match=r"block\.conv: input holds 1 NaN"):
        step.quantizer.quantize_tracked(torch.tensor([[NAN, 1.0]]), step.handle, NOW, 0, True)


# ---- tensors without memory ------------------------------------------------------------------------------------------


def test_fresh_by_hand():
    values, scale = quantize_fresh(torch.tensor([[1.0, -0.5], [4.0, 2.0]]), settings(TensorRule(per="K"), role="weight"), NOW)
    assert values.tolist() == [[127, -64], [127, 64]]
    assert torch.allclose(scale * 127, torch.tensor([[1.0], [4.0]]))


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_weight_with_nan_raises_since_skipping_never_mends_it(policy):
    with pytest.raises(NonFiniteError, match=r"block\.conv: weight holds 1 NaN or Inf"):
        quantize_fresh(torch.tensor([[1.0, NAN]]), settings(role="weight", on_nonfinite=policy), NOW)


def test_weight_with_nan_propagates_if_asked():
    assert (
        quantize_fresh(torch.tensor([[1.0, NAN]]), settings(role="weight", on_nonfinite="propagate"), NOW).scale.isnan().all()
    )


# ---- the registry ----------------------------------------------------------------------------------------------------


def test_equal_settings_share_a_handle_and_others_do_not():
    assert settings(TensorRule()) == settings(TensorRule())
    assert settings(TensorRule()) != settings(TensorRule(per="C"))
    assert settings(momentum=0.1) != settings(momentum=0.2)
