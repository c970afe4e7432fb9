# SPDX-License-Identifier: Apache-2.0
"""Unified INT8: direction deviation, the search for its clip (DSGC), and the learning-rate factor (DCLRS).

Spec A5, A6 and the values of part D. Four-element tensors carry their arithmetic; samples are seeded, so nothing here
can fail by chance.
"""

import dataclasses
import itertools
import math

import pytest
import torch

from byteback import DeviationCounteractive, DirectionSensitive, Memory, TensorRule, ops
from byteback.quantize import deviation_of
from byteback.recipes import direction_search

SAMPLES = 100_000


def sample(name):
    """A seeded sample as a (1, C, ...) tensor."""
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(SAMPLES, generator=generator, dtype=torch.float64)
    uniform = torch.rand(SAMPLES, generator=generator, dtype=torch.float64)
    if name.startswith("t"):
        freedom = int(name[1:])
        chi = torch.randn(SAMPLES, freedom, generator=generator, dtype=torch.float64).square().sum(1)
        x = normal / (chi / freedom).sqrt()
    elif name == "laplace":
        x = -(uniform - 0.5).sign() * torch.log1p(-2.0 * (uniform - 0.5).abs())
    else:
        x = normal
    return x.float().reshape(1, 4, -1)


def deviation(x, clip):
    """d_c with nearest rounding, from its definition, in float64 throughout."""
    g = x.double()
    q = (g * (127.0 / clip)).clamp(-127, 127).round()
    return float(1.0 - (g * q).sum() / (g.norm() * q.norm()))


def expected_deviation(x, clip):
    """d_c as stochastic rounding gives it on average, from its definition, in float64 throughout."""
    g = x.double()
    y = (g * (127.0 / clip)).clamp(-127, 127)
    f = y - y.floor()
    return float(1.0 - (g * y).sum() / (g.norm() * (y * y + f * (1.0 - f)).sum().sqrt()))


def memory(clip=0.0, initialized=False, updated_at=0, iteration=0, ratio=1.0, stochastic=False):
    return Memory(torch.tensor([ratio, clip]), initialized, updated_at, iteration, stochastic)


def searched(rule, x):
    choice = rule.choose(x, -1, memory())
    assert choice.searched
    return choice.clip.item()


# ---- phi -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deviation", "factor"), [(0.0, 1.0), (0.01, 0.8187), (0.05, 0.3679), (0.1151, 0.1), (0.2, 0.1), (1.0, 0.1)]
)
def test_phi(deviation, factor):
    assert DeviationCounteractive().factor(deviation) == pytest.approx(factor, abs=1e-4)


def test_phi_reaches_its_floor_at_ln_ten_over_twenty():
    rule = DeviationCounteractive()
    floor = math.log(10.0) / 20.0
    assert rule.factor(floor + 1e-9) == 0.1 and rule.factor(floor - 1e-4) > 0.1


def test_phi_with_other_constants():
    # exp(-2 * 0.25) = 0.60653, floor 0.7
    assert DeviationCounteractive(alpha=2.0, beta=0.5).factor(0.25) == pytest.approx(0.606531, abs=1e-6)
    assert DeviationCounteractive(alpha=2.0, beta=0.7).factor(0.25) == 0.7


@pytest.mark.parametrize("fields", [{"alpha": -1.0}, {"beta": 0.0}, {"beta": 1.5}], ids=str)
def test_phi_refuses_bad_constants(fields):
    with pytest.raises(ValueError, match=r"DeviationCounteractive: alpha is .* and beta"):
        DeviationCounteractive(**fields)


# ---- the deviation ---------------------------------------------------------------------------------------------------


def test_deviation_of_four_elements_by_hand():
    # g = (127, 64.5, -3, 0.4), c = 127: scale 1, half to even: q = (127, 64, -3, 0).
    # g·q = 16129 + 4128 + 9 = 20266;  q·q = 16129 + 4096 + 9 = 20234;  g·g = 16129 + 4160.25 + 9 + 0.16 = 20298.41
    # d = 1 - 20266 / sqrt(20234 * 20298.41)
    g = torch.tensor([[127.0, 64.5, -3.0, 0.4]])
    terms = ops.cosine_terms(g, torch.tensor([127.0]))
    assert terms[0].tolist() == pytest.approx([20266.0, 20234.0, 20298.41], rel=1e-7)
    expected = 1.0 - 20266.0 / math.sqrt(20234.0 * 20298.41)
    assert deviation_of(*terms[0].tolist()) == pytest.approx(expected, abs=1e-9)


def test_deviation_of_a_clipped_tensor_by_hand():
    # g = (4, 3, 0, 0), c = 3: q = (127, 127, 0, 0), so cos = 7 / (5 * sqrt 2) = 0.98995 and d = 0.0100505
    terms = ops.cosine_terms(torch.tensor([[4.0, 3.0, 0.0, 0.0]]), torch.tensor([3.0]))
    assert deviation_of(*terms[0].tolist()) == pytest.approx(1.0 - 7.0 / (5.0 * math.sqrt(2.0)), abs=1e-12)


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**30, 3.7e-6], ids=["2^-20", "2^30", "3.7e-6"])
def test_deviation_does_not_change_when_gradient_and_clip_scale_together(factor):
    x = sample("t3")
    clip = 0.7 * x.abs().max()
    here = deviation_of(*ops.cosine_terms(x, clip.reshape(1))[0].tolist())
    there = deviation_of(*ops.cosine_terms(x * factor, (clip * factor).reshape(1))[0].tolist())
    assert there == pytest.approx(here, rel=1e-4)


@pytest.mark.parametrize(("rounding", "divisor"), [("nearest", 24), ("stochastic", 12)])
def test_gaussian_deviation_without_saturation(rounding, divisor):
    """(c / 127σ)² / 24 nearest, / 12 stochastic, within 3%. Measured spread over seeds: below 1%."""
    x = torch.randn(1, 4, 50_000, generator=torch.Generator().manual_seed(1)) * 0.3
    clip = x.abs().max().reshape(1, 1, 1)
    key = ops.noise_key(torch.tensor(3), torch.tensor(0), torch.tensor(0)) if rounding == "stochastic" else None
    values, scale, counts, _ = ops.quantize(x, clip, key)
    assert counts[0] == 0
    measured = deviation_of(*ops.dot_terms(x, values, scale).tolist())
    expected = (clip.item() / (127 * 0.3)) ** 2 / divisor
    assert measured == pytest.approx(expected, rel=0.03)


# ---- the search ------------------------------------------------------------------------------------------------------

# The distributions of spec table A5. A long tail's optimum depends on the sample, so the grid is the judge.
DISTRIBUTIONS = ["t3", "t2", "laplace", "gauss"]


@pytest.fixture(scope="module")
def grid():
    """Per distribution: the sample and the least d_c of a 96-point grid over γ in [0.05, 1]."""
    found = {}
    for name in DISTRIBUTIONS:
        x = sample(name)
        peak = x.abs().max().item()
        found[name] = x, min(deviation(x, peak * (0.05 + 0.01 * i)) for i in range(96))
    return found


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("tie", [1e-6, None], ids=["tie", "literal"])
@pytest.mark.parametrize("solver", ["grid", "golden"])
def test_a_search_agrees_with_a_grid_of_96(name, tie, solver, grid):
    x, least = grid[name]
    clip = searched(DirectionSensitive(solver=solver, tie=tie), x)
    assert clip <= x.abs().max().item()
    assert deviation(x, clip) <= 1.01 * least + (tie or 0.0)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("solver", ["grid", "golden"])
def test_a_search_for_stochastic_rounding_finds_its_best_clip(name, solver):
    """The expected deviation is smooth, so the clip found is within 0.1 % of the least on a fine grid."""
    x = sample(name)
    peak = x.abs().max().item()
    least = min(expected_deviation(x, peak * (0.05 + 0.005 * i)) for i in range(191))
    clip = DirectionSensitive(solver=solver, tie=None).choose(x, -1, memory(stochastic=True)).clip.item()
    assert expected_deviation(x, clip) <= 1.001 * least


def test_stochastic_rounding_wants_a_smaller_clip_than_nearest():
    """Its error is twice as large inside the clip, so finer steps are worth more saturation."""
    x = sample("t3")
    rule = DirectionSensitive()
    nearest, stochastic = (rule.choose(x, -1, memory(stochastic=how)).clip.item() for how in (False, True))
    assert stochastic < 0.95 * nearest


@pytest.mark.parametrize("before", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_search_around_the_last_ratio_finds_the_same(name, before):
    x = sample(name)
    rule = DirectionSensitive()
    fresh = rule.choose(x, -1, memory(stochastic=True)).clip.item()
    again = rule.choose(x, -1, memory(1.0, True, 0, 10, ratio=before, stochastic=True)).clip.item()
    assert expected_deviation(x, again) <= 1.01 * expected_deviation(x, fresh) + 1e-6


def test_the_expected_deviation_is_that_of_many_draws():
    x = sample("t3")[:, :, :4000]
    clip = 0.6 * x.abs().max()
    terms = ops.cosine_terms(x, clip.reshape(1), stochastic=True)[0]
    drawn = torch.zeros(3, dtype=torch.float64)
    for count in range(100):
        key = ops.noise_key(torch.tensor(5), torch.tensor(0), torch.tensor(count))
        values, scale, _, _ = ops.quantize(x, clip.reshape(1, 1, 1), key)
        drawn += ops.dot_terms(x, values, torch.ones_like(scale)) / 100
    # 16,000 numbers and 100 draws: the relative error of both sums is far below 1e-3 (five standard deviations).
    assert drawn.tolist() == pytest.approx(terms.tolist(), rel=1e-3)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("tie", [1e-6, None], ids=["tie", "literal"])
def test_gradient_descent_comes_close_to_the_grid(name, tie, grid):
    x, least = grid[name]
    clip = searched(DirectionSensitive(solver="gradient-descent", tie=tie), x)
    assert deviation(x, clip) <= 1.04 * least + (tie or 0.0)


@pytest.mark.parametrize("solver", ["grid", "golden", "gradient-descent"])
def test_clipping_helps_sharp_gradients(solver, grid):
    """The point of DSGC: on a long tail, the found clip beats max|g| by far (spec A5: t(2) 6.0e-2 against 2.7e-2)."""
    x, _ = grid["t2"]
    clip = searched(DirectionSensitive(solver=solver), x)
    assert deviation(x, clip) < 0.8 * deviation(x, x.abs().max().item())


def test_best_ratio_of_a_gaussian_is_about_0_8():
    x = torch.randn(1, 4, 25_000, generator=torch.Generator().manual_seed(2))
    ratio = searched(DirectionSensitive(tie=None), x) / x.abs().max().item()
    assert 0.7 < ratio < 0.9


def test_search_is_free_of_the_gradient_s_magnitude():
    x = sample("t3")
    rule = DirectionSensitive()
    assert searched(rule, x * 2.0**-30) == searched(rule, x) * 2.0**-30


@pytest.fixture
def readings(monkeypatch):
    """The clips that each reading of the gradient tries."""
    seen = []
    original = ops.cosine_terms
    monkeypatch.setattr(ops, "cosine_terms", lambda x, clips, how: seen.append(clips.tolist()) or original(x, clips, how))
    return seen


def test_golden_section_spends_its_evaluations_and_one_for_the_end(readings):
    x = torch.randn(1, 2, 50)
    DirectionSensitive(solver="golden", evaluations=12).choose(x, -1, memory())
    evaluated = list(itertools.chain(*readings))
    assert len(evaluated) == 12 + 1 and max(evaluated) == x.abs().max().item()
    readings.clear()
    DirectionSensitive(solver="golden", evaluations=12, tie=None).choose(x, -1, memory())
    evaluated = list(itertools.chain(*readings))
    assert len(evaluated) == 12 and max(evaluated) < x.abs().max().item()
    assert min(evaluated) >= 0.05 * x.abs().max().item()


def test_a_grid_reads_the_gradient_twice_and_once_around_the_last_ratio(readings):
    x = sample("t3")
    first = DirectionSensitive().choose(x, -1, memory(stochastic=True))
    assert [len(clips) for clips in readings] == [7, 8]
    readings.clear()
    ratio = first.remember[0].item()
    DirectionSensitive().choose(x, -1, memory(1.0, True, 0, 10, ratio=ratio, stochastic=True))
    assert [len(clips) for clips in readings] == [5]


# ---- a clip per channel -----------------------------------------------------------------------------------------------


def test_clips_per_channel_are_one_ratio_of_each_maximum():
    x = sample("t3") * torch.tensor([1.0, 1e-3, 50.0, 0.0]).reshape(1, 4, 1)
    choice = DirectionSensitive().choose(x, 1, memory(stochastic=True))
    peaks = x.abs().amax(dim=(0, 2))
    assert choice.clip.shape == (1, 4, 1) and choice.searched
    assert torch.equal(choice.clip.flatten(), peaks * choice.remember[0])
    assert torch.equal(choice.remember[1:], choice.clip.flatten())


def test_between_searches_each_channel_follows_its_own_maximum():
    x = sample("gauss") * torch.tensor([1.0, 1e-3, 50.0, 0.0]).reshape(1, 4, 1)
    held = Memory(torch.tensor([0.5, 9.0, 9.0, 9.0, 9.0]), True, 0, 3, True)
    assert torch.equal(DirectionSensitive().choose(x, 1, held).clip.flatten(), x.abs().amax(dim=(0, 2)) * 0.5)
    assert DirectionSensitive().held(dataclasses.replace(held, axis=1)).ratio == 0.5
    assert DirectionSensitive(hold="clip").choose(x, 1, held).clip.flatten().tolist() == [9.0] * 4


def test_gradient_descent_knows_one_clip_only():
    rule = DirectionSensitive(solver="gradient-descent")
    assert rule.allows("tensor") and not rule.allows("K")
    with pytest.raises(ValueError, match=r"per is 'K', but DirectionSensitive chooses clips only per tensor"):
        TensorRule(clip=rule, rounding="stochastic", per="K")


@pytest.mark.parametrize("name", ["t3", "gauss"])
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.8, 0.95])
def test_slope_formula_is_the_derivative_of_the_rounded_tensor(name, ratio):
    """∂d_c/∂c by the product rule on float64 tensors, with the spec's straight-through ∂ĝ/∂c written out."""
    x = sample(name)
    peak = x.abs().max()
    clip = (peak * ratio).reshape(())
    xq, qq, xx, xd, qd = ops.cosine_slope_terms(x, clip).tolist()
    c = clip.item()
    slope = -(xd * qq - xq * qd) / (math.sqrt(xx) * qq**1.5) / c  # q and d in units of c/127 and 1/127: one c is left
    g = x.double().reshape(-1)
    y = g * 127.0 / c
    q = y.round().clamp(-127, 127)
    hat = q * c / 127.0
    dhat = torch.where(g.abs() > c, g.sign(), (q - y) / 127.0)
    ng, nh, u = g.norm(), hat.norm(), g @ hat
    expected = -((g @ dhat) / (ng * nh) - u * (hat @ dhat) / (ng * nh**3))
    assert slope == pytest.approx(expected.item(), rel=1e-3, abs=1e-9)


def test_slope_formula_against_finite_differences():
    """Spec A5: t(3), γ = 0.8: the straight-through slope and finite differences agree (4.999e-3 against 5.000e-3)."""
    x = sample("t3")
    peak = x.abs().max().item()

    def slope(ratio):
        xq, qq, xx, xd, qd = ops.cosine_slope_terms(x, torch.tensor(peak * ratio)).tolist()
        return -(xd * qq - xq * qd) / (math.sqrt(xx) * qq**1.5) / (peak * ratio)

    # A rounded tensor jumps at single points, so compare the mean slope over an interval with the rise across it:
    # below the optimum (the tail is cut, d_c falls) and above it (the steps are coarse, d_c rises).
    for low, sign in ((0.3, -1), (0.9, 1)):
        ratios = [low + 0.1 * (i + 0.5) / 20 for i in range(20)]
        mean = sum(slope(ratio) for ratio in ratios) / len(ratios)
        rise = (deviation(x, peak * (low + 0.1)) - deviation(x, peak * low)) / (0.1 * peak)
        assert rise * sign > 0 and mean == pytest.approx(rise, rel=0.05)


# ---- ties ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["grid", "golden", "gradient-descent"])
def test_equal_magnitudes_are_not_clipped(solver):
    # |g| is 2 everywhere: every clip gives the same direction, d_c = 0; the larger clip must win, so c = max|g|.
    g = torch.tensor([[2.0, -2.0, 2.0, 2.0]])
    assert searched(DirectionSensitive(solver=solver), g) == 2.0


def test_equal_magnitudes_shrink_in_the_literal_paper():
    g = torch.tensor([[2.0, -2.0, 2.0, 2.0]])
    assert searched(DirectionSensitive(solver="golden", tie=None), g) < 2.0


def test_of_two_deviations_within_the_tie_the_larger_clip_wins():
    tried = {0.5: 1.0e-5, 0.7: 1.09e-5, 0.9: 1.11e-5, 1.0: 2e-5}
    assert [direction_search._best(tried, tie) for tie in (1e-6, None, 1e-4)] == [0.7, 0.5, 1.0]


def test_the_vertex_of_a_parabola_is_found_exactly():
    # d = (γ - 0.52)²: through 0.4, 0.5 and 0.7 the parabola is d itself.
    tried = {ratio: (ratio - 0.52) ** 2 for ratio in (0.4, 0.5, 0.7)}
    assert direction_search._vertex(tried, 0.5) == pytest.approx(0.52)
    assert direction_search._vertex({0.5: 0.0, 0.7: 0.0, 1.0: 0.0}, 0.7) == 0.7
    assert direction_search._vertex({0.5: 0.1, 1.0: 0.0}, 1.0) == 1.0


# ---- the period ------------------------------------------------------------------------------------------------------


def run_of(rule, gradients):
    """What a layer's memory does with a rule: the choices for gradients at iterations 0, 1, 2, ..."""
    held, choices = memory(), []
    for iteration, g in enumerate(gradients):
        now = Memory(held.clip, held.initialized, held.updated_at, iteration)
        choice = rule.choose(g, -1, now)
        if not choice.searched:
            choice = rule.refit(choice, g.abs().max().item(), now) or choice
        choices.append(choice)
        if choice.remember is not None:
            updated_at = iteration if choice.searched else held.updated_at
            held = Memory(choice.remember.reshape(-1), True, updated_at, iteration)
    return choices


@pytest.mark.parametrize(("hold", "band"), [("clip", 1.25), ("ratio", 1.0), ("ratio", 1.05)])
def test_searched_at_0_10_20_and_held_between(hold, band):
    base = sample("t3")[:, :, :200]
    gradients = [base * (1.0 + 0.01 * iteration) for iteration in range(25)]
    choices = run_of(DirectionSensitive(period=10, hold=hold, band=band), gradients)
    assert [i for i, choice in enumerate(choices) if choice.searched] == [0, 10, 20]
    for i, choice in enumerate(choices):
        found = choices[i - i % 10].clip.item()
        # max|g| grows by 0.01 of the first per iteration
        fitting = found * (1.0 + 0.01 * i) / (1.0 + 0.01 * (i - i % 10))
        if hold == "clip":
            assert choice.clip.item() == found
        else:  # γ is held, so the clip follows max|g|, to within the band
            assert fitting / band * (1.0 - 1e-5) <= choice.clip.item() <= fitting * band * (1.0 + 1e-5)
    moved = sum(one.clip.item() != other.clip.item() for one, other in itertools.pairwise(choices[:10]))
    assert moved == {("clip", 1.25): 0, ("ratio", 1.0): 9, ("ratio", 1.05): 1}[hold, band]


def test_period_of_100_is_the_paper_s():
    gradients = [torch.randn(1, 2, 20, generator=torch.Generator().manual_seed(i)) for i in range(101)]
    choices = run_of(DirectionSensitive(period=100), gradients)
    assert [i for i, choice in enumerate(choices) if choice.searched] == [0, 100]


def test_micro_batches_of_one_iteration_do_not_search_again():
    rule = DirectionSensitive(period=1)
    g = sample("t3")[:, :, :100]
    assert not rule.choose(g, -1, memory(1.0, True, updated_at=4, iteration=4)).searched
    assert rule.choose(g, -1, memory(1.0, True, updated_at=4, iteration=5)).searched


def test_held_clip_is_a_copy_of_the_memory():
    """The scale is saved for backward, so it must not be a view of a buffer that the next step overwrites."""
    held = memory(1.0, True, updated_at=0, iteration=1)
    choice = DirectionSensitive().choose(sample("t3"), -1, held)
    held.clip.fill_(9.0)
    assert choice.clip.item() == 1.0


# ---- the three safeguards and the literal paper ----------------------------------------------------------------------


def test_zero_gradient_is_not_held():
    zero = torch.zeros(1, 2, 4)
    choice = DirectionSensitive().choose(zero, -1, memory())
    assert choice.clip.item() == 0.0 and choice.remember is None and not choice.searched


def test_zero_gradient_is_held_for_a_period_in_the_literal_paper():
    g = torch.ones(1, 2, 4)
    rule = DirectionSensitive(search_after_zero=None, hold="clip", period=3)
    choices = run_of(rule, [torch.zeros(1, 2, 4), g, g, g])
    assert [choice.clip.item() == 0.0 for choice in choices] == [True, True, True, False]
    assert not rule.is_stale(choices[1], 0.0, 1.0)


def stale(rule, clip, saturated, peak):
    choice = rule.choose(sample("gauss"), -1, memory(clip, True, updated_at=0, iteration=1))
    assert not choice.searched
    return rule.is_stale(choice, saturated, peak)


def test_held_clip_is_stale_when_more_than_one_percent_saturates():
    rule = DirectionSensitive()
    assert stale(rule, 1.0, 0.0101, 2.0) and not stale(rule, 1.0, 0.01, 2.0)
    assert not stale(DirectionSensitive(search_when_saturated=None), 1.0, 0.9, 2.0)


@pytest.mark.parametrize(("peak", "clip"), [(2.0, 1.0), (2.49, 1.0), (2.51, 1.255), (1.61, 1.0), (1.59, 0.795), (0.0, 1.0)])
def test_a_held_clip_that_leaves_the_band_becomes_the_ratio_of_the_maximum(peak, clip):
    # γ = 0.5 and c = 1: within a factor of 1.25 of 0.5 max|g| the clip stays. A zero gradient says nothing about the next one.
    held = memory(1.0, True, updated_at=0, iteration=1, ratio=0.5)
    rule = DirectionSensitive(band=1.25)
    choice = rule.choose(sample("gauss"), -1, held)
    other = rule.refit(choice, peak, held)
    assert (other or choice).clip.item() == pytest.approx(clip) and (other is None) == (clip == 1.0)
    assert other is None or other.remember.tolist() == pytest.approx([0.5, clip])
    assert DirectionSensitive(hold="clip").refit(choice, peak, held) is None


def test_a_clip_just_searched_is_never_stale():
    rule = DirectionSensitive()
    choice = rule.choose(sample("t2"), -1, memory())
    assert not rule.is_stale(choice, 0.5, 1e-9)


def test_nan_gradient_is_neither_searched_nor_remembered():
    g = torch.tensor([[1.0, float("nan")]])
    choice = DirectionSensitive().choose(g, -1, memory())
    assert choice.remember is None and not choice.searched


# ---- bad fields ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"hold": "gamma"},
        {"solver": "newton"},
        {"period": 0},
        {"evaluations": 1},
        {"steps": 0},
        {"lowest": 0.0},
        {"lowest": 1.0},
        {"band": 0.9},
    ],
    ids=str,
)
def test_bad_field_is_refused_with_its_value(fields):
    with pytest.raises(ValueError, match=f"^DirectionSensitive: .*{next(iter(fields.values()))}"):
        DirectionSensitive(**fields)
