# SPDX-License-Identifier: Apache-2.0
"""Proves the fused block's forward passes: every path gives the reference's bits, and they are BatchNorm's mathematics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from block_passes import NATIVE, agree, by_activation, by_shape, drawn, key_of, laid_out, same, vectors, with_native
from byteback import ops
from byteback.ops.activations import TABLE
from byteback.ops.backends import paths
from byteback.ops.backends.reference import block_grad
from byteback.ops.contract.exponential import exponential_float32


@pytest.fixture(autouse=True)
def _threads(restore_threads: None) -> Iterator[None]:
    yield


# ---- every path gives the reference's bits ---------------------------------------------------------------------------


@with_native
@by_shape
@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
def test_channel_stats_agree(shape: tuple[int, ...], special: bool) -> None:
    for seed in (0, 1):
        x = drawn(shape, seed, special)
        total, squares, low, high = agree(lambda x=x: ops.channel_stats(x))
        peak, moment, second = ops.moments(x)
        assert same(total, moment.flatten()) and same(squares, second.flatten())
        assert same(torch.maximum(low.abs(), high.abs()), peak.flatten())


@with_native
@by_shape
@by_activation
def test_forward_agrees(shape: tuple[int, ...], activation: str) -> None:
    for seed, with_residual in itertools.product((0, 1), (False, True)):
        x = drawn(shape, seed)
        residual = drawn(shape, seed + 11) if with_residual else None
        a, b = vectors(shape[1], 2, seed)
        peak = agree(lambda args=(x, a, b, residual, activation): ops.normalize_peak(*args))
        clips = [None, torch.tensor(1.5), torch.tensor([0.0]), peak]
        for clip, (want_float, want_mask) in zip(clips, itertools.product((True, False), (True, False)), strict=True):
            args = (x, a, b, residual, activation, clip)
            result = agree(lambda args=args, f=want_float, m=want_mask: ops.normalize(*args, want_float=f, want_mask=m))
            assert (result.output is not None) == want_float
            assert (result.mask is not None) == (want_mask and activation in ("none", "relu", "relu6"))
            assert (result.q is None) == (clip is None)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4), (0, 5), (2, 0, 4, 4)], ids=str)
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    x, vector = torch.zeros(shape), torch.ones(shape[1])
    for result in agree(lambda: ops.channel_stats(x)):
        assert result.tolist() == [0.0] * shape[1]
    assert agree(lambda: ops.normalize_peak(x, vector, vector, None, "relu")).item() == 0.0
    clip = torch.tensor(2.0)
    result = agree(lambda: ops.normalize(x, vector, vector, x, "relu", clip, want_float=True, want_mask=True))
    assert result.q.values.shape == result.output.shape == shape and result.q.counts.tolist() == [0, 0]
    total, dot, _, masked = agree(lambda: ops.normalize_grad_sums(x, x, vector, vector, result.mask, "relu", want_masked=True))
    assert total.tolist() == dot.tolist() == [0.0] * shape[1] and masked.shape == shape
    full = ops.GradientParts(x, x, vector, vector, None, "silu", vector, vector, vector)
    assert agree(lambda: ops.normalize_grad(full)).shape == shape
    values, _, counts, peak = agree(lambda: ops.normalize_grad_quantize(full, clip, key_of(3)))
    assert values.shape == shape and counts.tolist() == [0, 0] and peak.item() == 0.0


# ---- what is kept for backward ---------------------------------------------------------------------------------------


# ---- a residual in int8, and results that are part of a wider tensor --------------------------------------------------


@with_native
@by_shape
@by_activation
def test_an_int8_residual_is_its_values_times_its_scale(shape: tuple[int, ...], activation: str) -> None:
    for seed in (0, 1):
        x = drawn(shape, seed)
        a, b = vectors(shape[1], 2, seed)
        values = laid_out(torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8), True)
        scale = torch.full([1] * x.dim(), 0.37)
        floats = values.float() * scale
        peak = agree(lambda x=x, r=(values, scale), k=(a, b): ops.normalize_peak(x, *k, r, activation))
        assert same(peak, ops.normalize_peak(x, a, b, floats, activation))
        options = {"want_float": True, "want_mask": True}
        args = (activation, torch.tensor(2.0))
        every = (x, a, b, (values, scale), *args)
        made = agree(lambda every=every, options=options: ops.normalize(*every, **options))
        assert same(made, ops.normalize(x, a, b, floats, *args, **options))


@with_native
@by_shape
@by_activation
def test_a_part_of_a_wider_tensor_has_the_same_bits_and_nothing_else_is_touched(
    shape: tuple[int, ...], activation: str
) -> None:
    channels, before, after = shape[1], 5, 3
    width = before + channels + after
    wide = (shape[0], *shape[2:], width)
    for seed in (0, 1):
        x, residual = drawn(shape, seed), drawn(shape, seed + 3, special=False)
        a, b = vectors(channels, 2, seed)
        args = (x, a, b, residual, activation, torch.tensor(2.0))
        expected = ops.normalize(*args, want_float=True, want_mask=True, keep="bfloat16")
        for path in ("reference", *NATIVE):
            values = torch.full(wide, 99, dtype=torch.int8).movedim(-1, 1)
            output = torch.full(wide, 99.0).movedim(-1, 1)
            inner = slice(before, before + channels)
            into = ops.Into(values[:, inner], output[:, inner], width)
            with paths.path(path):
                made = ops.normalize(*args, want_float=True, want_mask=True, keep="bfloat16", into=into)
            assert same(made, expected)
            for tensor, own in ((values, expected.q.values), (output, expected.output)):
                assert same(tensor[:, inner].contiguous(), own.contiguous())  # type: ignore[union-attr]
                assert (tensor[:, :before] == 99).all() and (tensor[:, before + channels :] == 99).all()


def test_a_place_that_does_not_fit_is_refused() -> None:
    x, one = torch.randn(2, 8, 3, 3), torch.ones(8)
    args = (x, one, one, None, "relu", None)
    with pytest.raises(ValueError, match=r"into\.output"):
        ops.normalize(*args, want_float=True, want_mask=False, into=ops.Into(None, None, 16))
    with pytest.raises(TypeError, match="residual"):
        ops.normalize(x, one, one, (x, one[0]), "relu", None, want_float=True, want_mask=False)


def test_int8_keeps_to_half_a_step_and_bfloat16_rounds_to_even() -> None:
    x = torch.randn(4, 9, 8, 8)
    low, high = x.amin([0, 2, 3]), x.amax([0, 2, 3])
    values, step, centre = ops.pack_norm(x, low, high, x.mean([0, 2, 3]), "int8")
    back = block_grad.kept_value((values, step, centre))
    assert values.abs().max() == 127
    assert ((back - x).abs() <= 0.5001 * step.reshape(1, -1, 1, 1)).all()
    assert same(ops.pack_norm(x, None, None, None, "bfloat16"), x.to(torch.bfloat16))


def test_a_channel_of_one_value_is_kept_as_its_mean() -> None:
    x = torch.full((2, 1, 3, 3), 5.0)
    values, step, centre = ops.pack_norm(x, torch.tensor([5.0]), torch.tensor([5.0]), torch.tensor([5.0]), "int8")
    assert step.tolist() == [1.0] and not values.any()
    assert same(block_grad.kept_value((values, step, centre)), x)


# ---- the reference is what it says -----------------------------------------------------------------------------------


def test_exponential_is_accurate_and_saturates() -> None:
    t = torch.cat([torch.linspace(-87, 88.37, 200_001), torch.linspace(-1e-3, 1e-3, 1001)])
    exact = t.double().exp()
    assert ((exponential_float32(t).double() - exact).abs() / exact).max() < 2e-7
    ends = torch.tensor([-1e30, -math.inf, 89.0, 1e30, math.inf, math.nan])
    low, lower, *high, nan = exponential_float32(ends).tolist()
    assert 0 <= low == lower < 1e-37 and high == [math.inf] * 3 and math.isnan(nan)


@by_activation
def test_activations_are_pytorchs(activation: str) -> None:
    z = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([-1e4, 1e4, 88.0, -88.0, 95.0, -95.0])])
    z = z[(z - 3).abs() > 1e-6]  # at the kink PyTorch's hardswish takes the other derivative
    z = z[(z + 3).abs() > 1e-6].requires_grad_()
    theirs = z * 1 if activation == "none" else getattr(F, activation)(z)
    theirs.sum().backward()
    one, zero = torch.ones(1), torch.zeros(1)
    x = z.detach().reshape(-1, 1)
    y = ops.normalize(x, one, zero, None, activation, None, want_float=True, want_mask=False).output
    assert y is not None and z.grad is not None
    torch.testing.assert_close(y.flatten(), theirs.detach(), rtol=1e-6, atol=1e-6)
    gm = ops.normalize_grad_sums(torch.ones_like(x), x, one, zero, None, activation, want_masked=True).masked
    torch.testing.assert_close(gm.flatten(), z.grad, rtol=1e-5, atol=2e-6)


def test_gelu_is_accurate_and_has_its_limits() -> None:
    z = torch.cat([torch.linspace(-10, 10, 400_001), torch.logspace(-30, 1, 1001), -torch.logspace(-30, 1, 1001)])
    exact, row = z.double().requires_grad_(), TABLE["gelu"]
    F.gelu(exact).sum().backward()
    assert exact.grad is not None
    assert float((row.value(z) - F.gelu(exact.detach())).abs().max()) < 3e-7
    assert float((row.derivative(z) - exact.grad).abs().max()) < 3e-7
    ends = torch.tensor([-math.inf, -3e38, -12.5, 12.5, 3e38, math.inf, math.nan])
    torch.testing.assert_close(row.value(ends), ends.clamp_min(0.0), rtol=0.0, atol=1e-30, equal_nan=True)
    slopes = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, math.nan])
    torch.testing.assert_close(row.derivative(ends), slopes, rtol=0.0, atol=1e-30, equal_nan=True)
    assert row.value(torch.tensor([0.0, -0.0])).view(torch.int32).tolist() == [0, 0]


def test_special_values_of_relu() -> None:
    x = torch.tensor([[math.nan], [-0.0], [-1.0], [math.inf], [-math.inf]])
    y = ops.normalize(x, torch.ones(1), torch.full((1,), -0.0), None, "relu", None, want_float=True, want_mask=True)
    assert y.output is not None and y.mask is not None
    assert same(y.output, torch.tensor([[math.nan], [0.0], [0.0], [math.inf], [0.0]]))
    assert y.mask.flatten().tolist() == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("shape", [(4, 3, 5, 7), (2, 24, 6, 6)], ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "relu6"])
def test_values_are_those_of_quantize(shape: tuple[int, ...], activation: str) -> None:
    x, residual = drawn(shape, 1), drawn(shape, 2)
    a, b = vectors(shape[1], 2, 0)
    for clip in (torch.tensor(3.0), torch.tensor(2.0**-101), torch.tensor(math.inf), torch.tensor(math.nan)):
        result = ops.normalize(x, a, b, residual, activation, clip, want_float=True, want_mask=False)
        values, scale, counts, _ = ops.quantize(result.output, clip.reshape(1, 1, 1, 1))
        assert same((result.q.values, result.q.scale, result.q.counts), (values, scale, counts))


@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
def test_a_block_is_batch_norm_relu_and_their_gradients(with_residual: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 24, 9, 9).contiguous(memory_format=torch.channels_last).requires_grad_()
    residual = torch.randn(4, 24, 9, 9).requires_grad_()
    weight, bias = torch.randn(24).requires_grad_(), torch.randn(24).requires_grad_()
    g = torch.randn(4, 24, 9, 9)
    y = F.batch_norm(x, None, None, weight, bias, training=True, eps=1e-5)
    y = F.relu(y + residual if with_residual else y)
    y.backward(g)
    with torch.no_grad():
        count = x.numel() / 24
        total, squares, _, _ = ops.channel_stats(x)
        mean = total / count
        rstd = 1 / torch.sqrt(squares / count - mean * mean + 1e-5)
        a, b = (weight * rstd).float(), (bias - weight * rstd * mean).float()
        extra = residual if with_residual else None
        ours = ops.normalize(x, a, b, extra, "relu", None, want_float=True, want_mask=True)
        torch.testing.assert_close(ours.output, y)
        total, dot, _, masked = ops.normalize_grad_sums(g, x, a, b, ours.mask, "relu", want_masked=True)
        grad_weight = (dot - mean * total) * rstd
        p, q = a, -(a * rstd * grad_weight / count).float()
        r = (a * (rstd * mean * grad_weight - total) / count).float()
        dx = ops.normalize_grad(ops.GradientParts(g, x, a, b, ours.mask, "relu", p, q, r))
        torch.testing.assert_close(dx, x.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grad_weight.float(), weight.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(total.float(), bias.grad, rtol=1e-4, atol=1e-4)
        if with_residual:
            torch.testing.assert_close(masked, residual.grad)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused() -> None:
    x, v = torch.zeros(2, 3, 4, 4), torch.zeros(3)
    keywords = {"want_float": True, "want_mask": False}
    with pytest.raises(TypeError, match=r"x has dtype torch.float64"):
        ops.channel_stats(x.double())
    with pytest.raises(ValueError, match="needs an N and a C axis"):
        ops.channel_stats(v)
    with pytest.raises(ValueError, match=r"a has shape \(4,\), but there are 3 channels"):
        ops.normalize_peak(x, torch.zeros(4), v, None, "relu")
    with pytest.raises(ValueError, match="unknown activation 'mish'"):
        ops.normalize_peak(x, v, v, None, "mish")
    with pytest.raises(ValueError, match="residual has shape"):
        ops.normalize(x, v, v, x[:1], "relu", None, **keywords)
    with pytest.raises(ValueError, match="clip has shape"):
        ops.normalize(x, v, v, None, "relu", torch.ones(1, 3, 1, 1), **keywords)
    with pytest.raises(ValueError, match="mask has shape"):
        ops.normalize_grad_sums(x, x, v, v, torch.zeros(3, 1, dtype=torch.uint8), "relu", want_masked=False)
    with pytest.raises(TypeError, match="a is None"):
        ops.normalize_grad_sums(x, x, None, v, None, "relu", want_masked=False)
    with pytest.raises(ValueError, match="cannot be saved as 'int4'"):
        ops.pack_norm(x, v, v, v, "int4")
    with pytest.raises(TypeError, match="int8 needs low, high and mean"):
        ops.normalize(x, v, v, None, "relu", None, **keywords, keep="int8")
    with pytest.raises(TypeError, match=r"x has dtype torch\.float16"):
        ops.normalize_grad_sums(x, x.half(), v, v, None, "relu", want_masked=False)
    with pytest.raises(ValueError, match="key has shape"):
        ops.quantize_pair(x, torch.ones(()), torch.ones(1, 3, 1, 1), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"is on cpu, but .* is on meta"):  # not the address of a tensor without memory
        ops.normalize_peak(x, v.to("meta"), v, None, "relu")
    with pytest.raises(ValueError, match="clip_per_channel has shape"):
        ops.quantize_pair(x, torch.ones(()), v, None)
