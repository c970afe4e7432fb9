# SPDX-License-Identifier: Apache-2.0
"""Distribution Adaptive INT8: Gaussian or inverted T, the damped average (MCS), two gradient copies (GVQ).

Spec B3 to B6 and part D, 5, 6 and 8. Samples are seeded, so nothing here can fail by chance.
"""

import dataclasses

import pytest
import torch

from byteback import Choice, ClipRule, DistributionAdaptiveInt8, Int8Conv2d, MagnitudeAware, Memory, TensorRule, ops


def first(entries=1):
    return Memory(torch.zeros(entries), False, 0, 0)


def after(*clips):
    return Memory(torch.tensor(clips), True, 0, 1)


def sample(name, count=40_000):
    generator = torch.Generator().manual_seed(11)
    u = torch.rand(count, generator=generator)
    return {
        "gauss": lambda: torch.randn(count, generator=generator),
        "laplace": lambda: -(u - 0.5).sign() * torch.log1p(-2.0 * (u - 0.5).abs()),
        "uniform": lambda: 2.0 * u - 1.0,
    }[name]()


# ---- the test of the distribution ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "share", "gaussian"), [("gauss", 0.3173, True), ("laplace", 0.2431, False), ("uniform", 0.4226, True)]
)
def test_tail_share_and_class(name, share, gaussian):
    """At 40 000 elements the share's standard error is 0.0023; the seeded sample lies within three of it."""
    x = sample(name).reshape(1, 1, -1)
    assert (ops.tail_count(x, x.std(correction=0).reshape(1, 1, 1)).item() / x.numel()) == pytest.approx(share, abs=0.007)
    choice = MagnitudeAware().choose(x, -1, after(0.5))
    assert choice.diagnostics[0] == float(gaussian)
    peak = x.abs().max().item()
    assert choice.clip.item() == pytest.approx(peak if gaussian else 0.2 * 0.5 + 0.8 * peak, rel=1e-6)


def test_each_channel_is_classified_for_itself():
    x = torch.stack([sample("gauss"), sample("laplace"), sample("uniform"), sample("laplace") * 5]).unsqueeze(0)
    choice = MagnitudeAware().choose(x, 1, after(1.0, 1.0, 1.0, 1.0))
    peaks = x.abs().amax(dim=(0, 2))
    expected = torch.stack([peaks[0], 0.2 + 0.8 * peaks[1], peaks[2], 0.2 + 0.8 * peaks[3]])
    assert choice.clip.shape == (1, 4, 1)
    assert torch.allclose(choice.clip.flatten(), expected, rtol=1e-6)
    assert choice.diagnostics[0] == 0.5


def test_four_elements_by_hand():
    # g = (3, 1, -1, -1): mean 0.5, mean square 12/4 = 3, σ² = 3 - 0.25 = 2.75, σ = 1.658.
    # |g| > σ for one of four: 0.25 <= 0.3, so inverted T: clip = 0.2 * 1 + 0.8 * 3 = 2.6
    g = torch.tensor([[3.0], [1.0], [-1.0], [-1.0]])
    choice = MagnitudeAware().choose(g, 1, after(1.0))
    assert choice.diagnostics[0] == 0.0 and choice.clip.item() == pytest.approx(2.6, rel=1e-6)
    # σ is about the mean. g = (3, 1.75, -1, -1): mean 0.6875, mean square 3.515625, σ² = 3.042969,
    # σ = 1.7444 < 1.75 (about zero it would be 1.875): two of four, 0.5 > 0.3, Gaussian: clip = 3.
    g = torch.tensor([[3.0], [1.75], [-1.0], [-1.0]])
    choice = MagnitudeAware().choose(g, 1, after(1.0))
    assert choice.diagnostics[0] == 1.0 and choice.clip.item() == 3.0


def test_share_equal_to_the_threshold_is_inverted_t():
    # P(|g| > σ) = 0.25 exactly; "> λ" is Gaussian, "<= λ" is not (spec B4).
    g = torch.tensor([[3.0], [1.0], [-1.0], [-1.0]])
    assert MagnitudeAware(threshold=0.25).choose(g, 1, first()).diagnostics[0] == 0.0
    assert MagnitudeAware(threshold=0.2499).choose(g, 1, first()).diagnostics[0] == 1.0


def test_global_statistics_are_those_of_the_whole_tensor():
    x = torch.stack([sample("laplace"), sample("laplace") * 0.01]).unsqueeze(0)
    choice = MagnitudeAware().choose(x, -1, after(1.0))
    assert choice.clip.shape == (1, 1, 1)
    assert choice.clip.item() == pytest.approx(0.2 + 0.8 * x.abs().max().item(), rel=1e-6)


# ---- the average -----------------------------------------------------------------------------------------------------


def inverted_t(peak):
    """Forty elements, one of them big: surely inverted T."""
    g = torch.full((40, 1), 0.01 * peak)
    g[7] = peak
    return g


def test_average_goes_1_to_1_8_to_1_96_and_on_to_2():
    rule, clip, seen = MagnitudeAware(), 1.0, []
    for _ in range(12):
        clip = rule.choose(inverted_t(2.0), 1, after(clip)).clip.item()
        seen.append(clip)
    assert seen[:2] == pytest.approx([1.8, 1.96], rel=1e-6)
    assert seen[-1] == pytest.approx(2.0, rel=1e-6)


def test_average_with_other_constants():
    # k = 0.5, A = 0.6: (1 - 0.3) * 1 + 0.6 * 2 = 1.9; the fixed point is |g|max / k
    assert MagnitudeAware(k=0.5, a=0.6).choose(inverted_t(2.0), 1, after(1.0)).clip.item() == pytest.approx(1.9, rel=1e-6)


def test_first_gradient_gives_its_maximum():
    choice = MagnitudeAware().choose(inverted_t(2.0), 1, first())
    assert choice.clip.item() == 2.0 and choice.remember.item() == 2.0 and choice.diagnostics[0] == 0.0


def test_gaussian_channel_hands_its_maximum_on():
    x = sample("gauss", 4000).reshape(1, 1, -1)
    choice = MagnitudeAware().choose(x, 1, after(100.0))
    assert choice.remember.item() == x.abs().max().item()


def test_zero_channel_has_clip_zero_and_harms_no_other():
    x = torch.zeros(40, 2)
    x[:, 1:] = inverted_t(2.0)
    choice = MagnitudeAware().choose(x, 1, first(2))
    assert choice.clip.flatten().tolist() == [0.0, 2.0]


@pytest.mark.parametrize("axis", [-1, 1], ids=["tensor", "channel"])
def test_empty_gradient(axis):
    """An empty batch is legal in torch; the clip is 0 and nothing breaks."""
    choice = MagnitudeAware().choose(torch.zeros(0, 3, 2, 2), axis, first(1 if axis == -1 else 3))
    assert choice.clip.shape == ((1, 3, 1, 1) if axis == 1 else (1, 1, 1, 1)) and not choice.clip.any()


@pytest.mark.parametrize("fields", [{"threshold": 1.5}, {"threshold": -0.1}, {"a": 0.0}, {"k": 2.0}, {"k": -1.0}], ids=str)
def test_bad_constants_are_refused(fields):
    with pytest.raises(ValueError, match=f"^MagnitudeAware: .*{next(iter(fields.values()))}"):
        MagnitudeAware(**fields)


def test_one_clip_per_sample_is_refused():
    with pytest.raises(ValueError, match="per is 'N', but MagnitudeAware chooses clips only per tensor"):
        TensorRule(clip=MagnitudeAware(), per="N")


# ---- GVQ -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fixed(ClipRule):
    """The same clip for every scale."""

    bound: float = 0.7

    def choose(self, x, axis, memory):
        shape = [x.shape[dim] if dim == axis else 1 for dim in range(x.dim())]
        return Choice(torch.full(shape, self.bound))


def gradients(recipe, backwards=1, groups=1):
    """grad_input and grad_weight of one layer under equal noise."""
    generator = torch.Generator().manual_seed(5)
    layer = Int8Conv2d(4, 6, 3, padding=1, groups=groups, bias=False, recipe=recipe)
    layer.attach(recipe, seed=1, layer=2, name="conv")
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
    for _ in range(backwards):
        x = torch.randn(3, 4, 5, 5, generator=generator).requires_grad_()
        layer.weight.grad = None
        layer(x).backward(torch.randn(3, 6, 5, 5, generator=generator) * torch.arange(1.0, 7.0).reshape(1, 6, 1, 1))
    return x.grad, layer.weight.grad


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("groups", [1, 2], ids=["groups1", "groups2"])
def test_equal_channel_scales_give_the_global_grad_weight_bit_for_bit(rounding, groups):
    whole = TensorRule(Fixed(), rounding)
    recipe = DistributionAdaptiveInt8(grad_output=whole, grad_output_for_weight=None)
    vectorized = dataclasses.replace(recipe, grad_output_for_weight=TensorRule(Fixed(), rounding, "K"))
    _, expected = gradients(recipe, groups=groups)
    _, actual = gradients(vectorized, groups=groups)
    assert expected.abs().max() > 0 and torch.equal(actual, expected)


def test_grad_input_does_not_change_when_gvq_is_toggled():
    recipe = DistributionAdaptiveInt8()
    with_gvq, weight_with = gradients(recipe, backwards=3)
    without, weight_without = gradients(dataclasses.replace(recipe, grad_output_for_weight=None), backwards=3)
    assert torch.equal(with_gvq, without)
    assert not torch.equal(weight_with, weight_without)


def test_gvq_brings_grad_weight_of_weak_channels_closer():
    """Channels differ by a factor of 1000: one scale for all wipes the weak ones out, one per channel does not."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(2, 3, 6, 6, generator=generator)
    g = torch.randn(2, 2, 4, 4, generator=generator) * torch.tensor([1.0, 1e-3]).reshape(1, 2, 1, 1)
    errors = []
    for own in (DistributionAdaptiveInt8().grad_output_for_weight, None):
        layer = Int8Conv2d(3, 2, 3, bias=False, recipe=DistributionAdaptiveInt8(grad_output_for_weight=own))
        layer(x).backward(g)
        exact = torch.nn.grad.conv2d_weight(x, layer.weight.shape, g)
        errors.append(((layer.weight.grad - exact)[1].norm() / exact[1].norm()).item())
    assert errors[0] < 0.05 < 0.5 < errors[1]
