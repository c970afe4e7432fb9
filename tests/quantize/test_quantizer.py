# SPDX-License-Identifier: Apache-2.0
"""Quantizer: what it remembers, in which slot, and what it writes down.

Clip rules here are small ones of the test's own, so that each clip is known beforehand.
"""

import pytest
import torch

from byteback import DirectionSensitive, MagnitudeAware, MaxAbs, TensorRule
from byteback.ops.quantizer import OWN
from byteback.quantize import (
    CALL_SLOTS,
    CLIP,
    DEVIATION,
    SATURATED,
    WORST_CHANNEL,
    Quantizer,
    deviation_of,
)
from quantizer_bench import Fixed, assert_untouched, bench, state


def test_four_elements_by_hand():
    # max|x| = 2, scale = 2/127; x * 127/2 = (127, -63.5, 31.75, 0) -> half to even: (127, -64, 32, 0)
    values, scale = bench()(torch.tensor([[2.0, -1.0, 0.5, 0.0]]))[:2]
    assert values.tolist() == [[127, -64, 32, 0]] and values.dtype == torch.int8
    assert scale.tolist() == [[pytest.approx(2.0 / 127.0)]] and scale.dtype == torch.float32


def test_deviation_of_known_products():
    # cos = 24 / (5 * 5) = 0.96; a zero tensor deviates by nothing; one that became all zeros by everything
    rows = ((24.0, 25.0, 25.0), (0.0, 0.0, 0.0), (0.0, 0.0, 4.0), (25.0, 25.0, 25.0))
    assert [deviation_of(*row) for row in rows] == pytest.approx([0.04, 0.0, 1.0, 0.0], abs=1e-15)


def test_deviation_is_never_below_zero():
    assert deviation_of(1.0 + 1e-15, 1.0, 1.0) == 0.0


def test_fixed_shape_buffers_from_the_start():
    quantizer = Quantizer(5, tracks=True)
    shapes = {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in quantizer.named_buffers()}
    assert shapes["clip"] == ((CALL_SLOTS, 5), torch.float32)
    assert shapes["tracked"] == ((CALL_SLOTS, 5), torch.float32)
    assert shapes["updated_at"] == ((CALL_SLOTS,), torch.int64)
    assert shapes["observed"] == ((CALL_SLOTS, max(SATURATED, DEVIATION, OWN, CLIP, WORST_CHANNEL) + 1), torch.float32)
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
    scale = step(2 * x, slot=0).scale
    assert scale.item() * 127 == pytest.approx(0.2 * 1.0 + 0.8 * 2.0, rel=1e-6)
    scale = step(2 * x, slot=1).scale
    assert scale.item() * 127 == pytest.approx(2.0, rel=1e-6)


def test_remember_false_writes_nothing():
    step = bench()
    step(torch.tensor([[2.0]]))
    before = state(step.quantizer)
    values = step(torch.tensor([[5.0, 1.0]]), iteration=7, remember=False).values
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
        clips.append(step.quantizer.clip[0, 1].item())
    assert dates == [0] * 10 + [10] * 10 + [20] * 5
    assert len(set(clips)) == 3


def test_zero_gradient_is_not_initialized_and_the_next_is_searched():
    step = bench(TensorRule(DirectionSensitive()), role="grad_output", tracks=False)
    step(torch.zeros(1, 2, 4), 0)
    assert not step.quantizer.initialized.any()
    scale = step(torch.tensor([[1.0, -1.0]]), 1).scale
    assert scale.item() * 127 == pytest.approx(1.0) and int(step.quantizer.updated_at[0]) == 1


def test_a_clip_that_cuts_off_too_much_is_searched_again_at_once():
    """The same maximum, but most values near it: far more than 1% saturate, and the ratio no longer fits."""
    step = bench(TensorRule(DirectionSensitive()), role="grad_output", tracks=False)
    x = torch.randn(2, 3, 40_000, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0] = 8.0  # one value far from the rest: not worth a larger clip
    step(x, 0)
    assert step.quantizer.clip[0, 0] < 0.9
    flat = torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.5, 1.0, -1.0) * x.abs().max()
    step(flat, 3)
    assert int(step.quantizer.updated_at[0]) == 3 and step.quantizer.clip[0, 0] == 1.0
    assert step.quantizer.observed[0, SATURATED] == 0.0


def test_a_sparse_gradient_that_grew_gets_a_fitting_clip_at_once():
    """As in a detector: a few values at the objects, nothing elsewhere, so that no share of the tensor saturates."""
    step = bench(TensorRule(DirectionSensitive()), role="grad_output", tracks=False)
    x = torch.zeros(2, 3, 400)
    x[0, 0, :4] = torch.tensor([1.0, -0.7, 0.4, 0.2])
    step(x, 0)
    scale = step(x * 20, 3).scale
    assert int(step.quantizer.updated_at[0]) == 0 and scale.item() * 127 == pytest.approx(20.0, rel=0.02)


@pytest.mark.parametrize("factor", [1.6, 3.0, 0.6, 0.05])
def test_a_held_clip_follows_a_gradient_out_of_its_band_without_a_search(factor):
    rule = DirectionSensitive(search_when_saturated=None)
    step = bench(TensorRule(rule), role="grad_output", tracks=False)
    x = torch.randn(2, 3, 400, generator=torch.Generator().manual_seed(0))
    step(x, 0)
    ratio, held = step.quantizer.clip[0].tolist()
    scale = step(x * factor, 3).scale
    assert scale.item() * 127 == pytest.approx(held * factor, rel=1e-5)
    assert step.quantizer.clip[0].tolist() == pytest.approx([ratio, held * factor], rel=1e-5)
    assert int(step.quantizer.updated_at[0]) == 0


def test_the_literal_paper_holds_a_clip_that_no_longer_fits():
    rule = DirectionSensitive(hold="clip", search_when_saturated=None)
    step = bench(TensorRule(rule), role="grad_output", tracks=False)
    x = torch.randn(2, 3, 400, generator=torch.Generator().manual_seed(0))
    step(x, 0)
    held = step.quantizer.clip[0, 1].item()
    for factor in (3.0, 0.05):
        scale = step(x * factor, 3).scale
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
    assert step.quantizer.observed[0, OWN].item() == 0.5


def test_empty_tensor_touches_nothing():
    step = bench()
    step(torch.tensor([[2.0]]))
    before = state(step.quantizer)
    values, scale = step(torch.zeros(0, 1), iteration=3)[:2]
    assert values.shape == (0, 1) and scale.shape == (1, 1) and scale.item() > 0
    assert_untouched(step.quantizer, before)


def test_per_channel_input_keeps_one_clip_for_each_channel():
    step = bench(TensorRule(per="C"), channels=3)
    values, scale = step(torch.tensor([[1.0, 20.0, 300.0], [0.5, -10.0, 150.0]]))[:2]
    assert values.tolist() == [[127, 127, 127], [64, -64, 64]]
    assert scale.shape == (1, 3)
    assert step.quantizer.clip[0].tolist() == [1.0, 20.0, 300.0]
    assert step.quantizer.tracked[0].tolist() == [1.0, 20.0, 300.0]


def test_per_sample_input_remembers_the_largest_clip():
    step = bench(TensorRule(per="N"))
    values, scale = step(torch.tensor([[1.0, 0.5], [20.0, -10.0]]))[:2]
    assert values.tolist() == [[127, 64], [127, -64]] and scale.shape == (2, 1)
    assert step.quantizer.clip[0].tolist() == [20.0] and step.quantizer.tracked[0].tolist() == [20.0]
