# SPDX-License-Identifier: Apache-2.0
"""Floats that travel as bfloat16: every path rounds to nearest, half to even; a pass of them is that of the rounded values."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from block_passes import agree, by_shape, drawn, key_of, laid_out, same, vectors, with_native
from byteback import ops
from byteback.ops.backends.reference import block
from byteback.ops.contract.bfloat16 import to_bfloat16

BF16 = torch.bfloat16
WANTS: dict[str, Any] = {"want_int8": True, "want_float": True, "want_mask": True, "keep": "int8"}


def by_integers(x: Tensor) -> np.ndarray:
    """The bits of x as bfloat16, by the definition."""
    bits = x.contiguous().numpy().view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x.numpy()), 0x7FC0, rounded).astype(np.uint16)


def patterns() -> Tensor:
    """For every upper half the lower halves around its middle: all signs, exponents, subnormal numbers, Inf and NaN."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    return torch.from_numpy((upper | lower).view(np.float32))


@with_native
def test_every_path_rounds_by_the_definition() -> None:
    x = patterns()
    assert np.array_equal(to_bfloat16(x).view(torch.int16).numpy().view(np.uint16), by_integers(x))
    kept = agree(lambda: ops.pack_norm(x, None, None, None, "bfloat16"))
    assert np.array_equal(kept.view(torch.int16).numpy().view(np.uint16), by_integers(x))


def norm_of(channels: int, seed: int) -> ops.BatchNorm:
    gamma, beta, bias, mean = vectors(channels, 4, seed)
    return ops.BatchNorm(gamma, beta, bias, 1e-5, (mean, mean.abs()), 0.1)


@with_native
@by_shape
@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
def test_statistics_are_those_of_the_rounded_values(shape: tuple[int, ...], special: bool) -> None:
    x = to_bfloat16(drawn(shape, 1, special))
    assert same(agree(lambda: ops.channel_stats(x)), ops.channel_stats(x.float()))


@with_native
@by_shape
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_a_pass_is_that_of_the_rounded_values(shape: tuple[int, ...], activation: str) -> None:
    x, a, b = to_bfloat16(drawn(shape, 3)), *vectors(shape[1], 2, 5)
    for residual in (None, drawn(shape, 4), to_bfloat16(drawn(shape, 5))):
        wide = None if residual is None else residual.float()
        peak = agree(lambda r=residual: ops.normalize_peak(x, a, b, r, activation))
        assert same(peak, ops.normalize_peak(x.float(), a, b, wide, activation))
        for clip, want_float in ((torch.tensor(1.5), True), (torch.tensor(1.5), False), (None, True)):
            made = agree(
                lambda r=residual, c=clip, f=want_float: ops.normalize(x, a, b, r, activation, c, want_float=f, want_mask=True)
            )
            expected = ops.normalize(x.float(), a, b, wide, activation, clip, want_float=want_float, want_mask=True)
            assert same(made, expected)


@with_native
@by_shape
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, torch.float32), (torch.float32, BF16)], ids=str)
def test_a_norm_of_its_batch_rounds_what_it_writes(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    (x_dtype, dtype), activation = dtypes, "relu"
    x = drawn(shape, 7).to(x_dtype)
    for residual in (None, drawn(shape, 8), to_bfloat16(drawn(shape, 9))):
        for wants in (WANTS, {**WANTS, "want_mask": False, "keep": "bfloat16"}, {**WANTS, "keep": None, "want_int8": False}):
            made = agree(
                lambda r=residual, w=wants: ops.normalize_batch(x, norm_of(shape[1], 2), r, activation, **w, output_dtype=dtype)
            )
            wide = None if residual is None else residual.float()
            expected = ops.normalize_batch(x.float(), norm_of(shape[1], 2), wide, activation, **wants)
            output = to_bfloat16(expected.output) if dtype is BF16 else expected.output
            assert same(made, expected._replace(output=output))


@with_native
@by_shape
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_a_gradient_in_bfloat16_is_read_as_its_floats(shape: tuple[int, ...], activation: str) -> None:
    g, x = to_bfloat16(drawn(shape, 1)), drawn(shape, 6)
    a, b, p, q, r = vectors(shape[1], 5, 3)
    pixels = (0, *range(2, x.dim()))
    kept = ops.pack_norm(x, x.amin(pixels), x.amax(pixels), a.double(), "int8")
    for saved, mask in itertools.product((x, to_bfloat16(x), kept), (None, block.pack_mask(drawn(shape, 3) > 0))):
        parts = ops.GradientParts(g, saved, a, b, mask, activation, p, q, r)
        assert _passes_are_equal(parts, parts._replace(g=g.float()))


def _passes_are_equal(parts: ops.GradientParts, wide: ops.GradientParts) -> bool:
    """Whether each path gives for the first what the reference gives for the second, whose g has the same values."""
    dim, channels = parts.g.dim(), parts.g.shape[1]
    clip, clips, key = torch.tensor(2.5), torch.full((1, channels, *(1,) * (dim - 2)), 1.5), key_of(7)
    sums = agree(lambda: ops.normalize_grad_sums(*parts[:6], want_masked=True, want_squares=True))
    assert sums.masked.dtype is (torch.float32 if parts.activation in ops.SMOOTH else BF16)
    passes: list[Any] = [
        ops.normalize_grad,
        lambda of: ops.normalize_grad_quantize(of, clip, key),
        lambda of: ops.normalize_grad_quantize_pair(of, clip, clips, key),
        lambda of: ops.normalize_grad_tails(of, clips.reshape(-1), clip),
    ]
    expected = ops.normalize_grad_sums(*wide[:6], want_masked=True, want_squares=True)
    assert same(sums._replace(masked=sums.masked.float()), expected)
    return all(same(agree(functools.partial(one, parts)), one(wide)) for one in passes)


@with_native
@by_shape
def test_a_gradient_that_waits_in_bfloat16_is_added_as_its_floats(shape: tuple[int, ...]) -> None:
    x, g = drawn(shape, 1), to_bfloat16(drawn(shape, 8))
    for mask in (None, block.pack_mask(drawn(shape, 3) > 0)):
        assert same(agree(lambda mask=mask: ops.add_waiting(x, g, mask)), ops.add_waiting(x, g.float(), mask))


CONVOLUTIONS = {
    "1x1": ((3, 16, 9, 7), (24, 16, 1, 1), (1, 1), (0, 0), 1),
    "winograd": ((2, 32, 12, 13), (40, 32, 3, 3), (1, 1), (1, 1), 1),
    "strided": ((2, 12, 9, 9), (17, 12, 3, 3), (2, 2), (1, 1), 1),
    "grouped": ((2, 16, 9, 9), (24, 4, 3, 3), (1, 1), (1, 1), 4),
    "depthwise": ((2, 24, 9, 9), (24, 1, 3, 3), (1, 1), (1, 1), 24),
    "counted while it is written": ((1, 3, 181, 183), (65, 3, 1, 1), (1, 1), (0, 0), 1),
    "whole lines, streamed": ((1, 2, 512, 416), (64, 2, 1, 1), (1, 1), (0, 0), 1),
    "depthwise, counted": ((1, 72, 173, 171), (72, 1, 3, 3), (1, 1), (1, 1), 72),
}


@with_native
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_the_output_of_a_convolution_is_rounded_on_its_way_to_memory(case: str) -> None:
    x_size, w_size, stride, padding, groups = CONVOLUTIONS[case]
    generator = torch.Generator().manual_seed(11)
    x, w = (torch.randint(-127, 128, size, dtype=torch.int8, generator=generator) for size in (x_size, w_size))
    scale, geometry = torch.full((1, 1, 1, 1), 0.0123), (stride, padding, (1, 1), groups)
    operands = laid_out(x, True), scale, laid_out(w, True), scale, geometry
    y = to_bfloat16(ops.conv_int8(operands[0], scale, operands[2], scale, *geometry))
    y = laid_out(y, True)
    expected = ops.normalize_batch(y, norm_of(w_size[0], 2), None, "relu", **WANTS, output_dtype=BF16)
    stored: dict[str, Any] = {"y_dtype": BF16, "output_dtype": BF16}
    got, made = agree(lambda: ops.conv_normalize_batch(*operands, norm_of(w_size[0], 2), None, "relu", **WANTS, **stored))
    assert same(got, y) and same(made, expected)


def test_other_dtypes_are_refused() -> None:
    x, norm = torch.ones(2, 3), norm_of(3, 1)
    with pytest.raises(ValueError, match=r"output_dtype is torch\.float16, but floats are stored as"):
        ops.normalize_batch(x, norm, None, "none", **WANTS, output_dtype=torch.float16)
    with pytest.raises(TypeError, match=r"x has dtype torch\.float16"):
        ops.normalize_batch(x.half(), norm, None, "none", **WANTS)
