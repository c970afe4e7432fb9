# SPDX-License-Identifier: Apache-2.0
"""Quantizer outside of an ordinary training step: eval, other dtypes, NaN and Inf, tensors without memory."""

import copy
import dataclasses

import pytest
import torch

from byteback import Choice, ClipRule, DirectionSensitive, MagnitudeAware, MaxAbs, NonFiniteError, TensorRule
from byteback.quantize import (
    Quantizer,
    quantize_fresh,
)
from quantizer_bench import INF, NAN, NOW, Fixed, assert_untouched, bench, settings, state


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
    values, scale = step.quantizer.quantize_tracked(x, step.handle, NOW, 0, per_sample)[:2]
    assert values.tolist() == [[64, 127], [32, -64]]
    assert scale.shape == ((2, 1) if per_sample else (1, 1)) and torch.allclose(scale * 127, torch.tensor(2.0))


def test_eval_without_a_tracked_clip_quantizes_per_sample():
    step = bench()
    x = torch.tensor([[1.0, 4.0], [0.5, -1.0]])
    values, scale = step.quantizer.quantize_tracked(x, step.handle, NOW, 0, True)[:2]
    assert values.tolist() == [[32, 127], [64, -127]] and scale.shape == (2, 1)
    assert not any(buffer.any() for buffer in step.quantizer.buffers())


def test_eval_reads_the_slot_of_the_call():
    step = bench()
    step(torch.tensor([[2.0]]), slot=0)
    step(torch.tensor([[8.0]]), slot=1)
    for slot, clip in ((0, 2.0), (1, 8.0)):
        scale = step.quantizer.quantize_tracked(torch.tensor([[1.0]]), step.handle, NOW, slot, False).scale
        assert scale.item() * 127 == pytest.approx(clip)


def test_clip_of_a_rule_without_memory_is_tracked_too():
    """Contract 12: training tracks each input clip, and eval uses it, whatever the rule remembers for itself."""
    step = bench(TensorRule(Fixed(3.0)))
    step(torch.tensor([[1.0, 10.0]]))
    assert step.quantizer.tracked[0].item() == pytest.approx(3.0)
    scale = step.quantizer.quantize_tracked(torch.tensor([[1.0, 10.0]]), step.handle, NOW, 0, False).scale
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
            values, scale = step(x, iteration)[:2]
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
    scale = step.quantizer.quantize_tracked(torch.tensor([[NAN, 1.0]]), step.handle, NOW, 0, True).scale
    assert scale.isnan().all()


def test_prediction_from_nan_raises_if_asked():
    step = bench()
    with pytest.raises(NonFiniteError, match=r"block\.conv: input holds 1 NaN"):
        step.quantizer.quantize_tracked(torch.tensor([[NAN, 1.0]]), step.handle, NOW, 0, True)


def test_fresh_by_hand():
    values, scale = quantize_fresh(torch.tensor([[1.0, -0.5], [4.0, 2.0]]), settings(TensorRule(per="K"), role="weight"), NOW)[
        :2
    ]
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


def test_equal_settings_share_a_handle_and_others_do_not():
    assert settings(TensorRule()) == settings(TensorRule())
    assert settings(TensorRule()) != settings(TensorRule(per="C"))
    assert settings(momentum=0.1) != settings(momentum=0.2)
