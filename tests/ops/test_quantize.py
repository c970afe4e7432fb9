# SPDX-License-Identifier: Apache-2.0
"""Proves the cast from float to int8: hand-computed values, the domain [-127, 127], counts, clips and layouts.

The contract: scale = clip / 127, y = x · (127 / clip), all float32 with one rounding each; y is clamped to ±127 before
noise or conversion; a clip below 2^-100 counts as zero. numpy float32 is the independent second opinion.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from byteback import ops
from byteback.ops.backends import paths

INF, NAN = math.inf, math.nan
KEY = torch.tensor([0xDEADBEEF, 0x01234567])
TINY = 2.0**-100
both_roundings = pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float32)


def nearest(x: Tensor, clip: Tensor) -> np.ndarray:
    """The contract in numpy float32; finite x and live clips only."""
    factor = np.float32(127) / clip.numpy()
    y = np.clip(x.numpy() * factor, np.float32(-127), np.float32(127))
    return np.rint(y).astype(np.int8)


def test_hand_computed_values() -> None:
    # clip 2: factor 63.5. -4 → -254 → -127; -2 → -127; -1 → -63.5 → -64 (even); 0.1 → 6.35 → 6; 1.5 → 95.25 → 95.
    values, scale, counts, peak = ops.quantize(row(-4.0, -2.0, -1.0, 0.0, 0.1, 1.5, 2.0), row(2.0))
    assert values.tolist() == [[-127, -127, -64, 0, 6, 95, 127]]
    assert values.dtype == torch.int8
    assert scale.item() == np.float32(2.0) / np.float32(127.0)
    assert scale.dtype == torch.float32 and scale.shape == (1, 1)
    assert counts.tolist() == [1, 0] and counts.dtype == torch.int64
    assert peak.item() == 4.0 and peak.shape == ()


def test_halves_round_to_even() -> None:
    halves = [i + 0.5 for i in range(-127, 127)]
    values, *_ = ops.quantize(row(*halves), row(127.0))
    assert values[0].tolist() == [round(h) for h in halves]  # Python rounds halves to even too
    assert ops.quantize(row(0.5, 1.5, 2.5, -0.5, -1.5, -2.5), row(127.0))[0].tolist() == [[0, 2, 2, 0, -2, -2]]


def test_the_factor_is_127_over_clip_with_a_single_rounding() -> None:
    # 127 · (1 / clip) rounds twice and differs from 127 / clip for a quarter of all clips. Every x below lies on a
    # tie under the right factor or within an ulp of one, so a factor that is one ulp off changes integers.
    clips = torch.rand(1, 4000, generator=torch.Generator().manual_seed(0)) * 10 + 1e-3
    factor = np.float32(127) / clips.numpy()
    ties = (np.arange(4000) % 126 + 0.5).astype(np.float32)
    x = torch.from_numpy((ties / factor).astype(np.float32))
    twice = np.float32(127) * (np.float32(1) / clips.numpy())
    assert (np.rint(x.numpy() * twice) != np.rint(x.numpy() * factor)).sum() > 100  # the data can tell them apart
    assert np.array_equal(ops.quantize(x, clips)[0].numpy(), nearest(x, clips))


def test_the_scale_is_clip_over_127_with_a_single_rounding() -> None:
    clips = torch.rand(1, 4000, generator=torch.Generator().manual_seed(1)) * 10 + 1e-3
    scale = ops.quantize(torch.zeros(1, 4000), clips)[1]
    assert np.array_equal(scale.numpy(), clips.numpy() / np.float32(127))


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    clip=st.floats(min_value=TINY, max_value=3.0000000054977558e38, width=32),
)
def test_any_drawn_values_and_clip_equal_the_contract_in_numpy(values: list[float], clip: float) -> None:
    x, c = row(*values), row(clip)
    q, scale, counts, peak = ops.quantize(x, c)
    with np.errstate(over="ignore", under="ignore"):
        assert np.array_equal(q.numpy(), nearest(x, c))
    assert scale.item() == np.float32(clip) / np.float32(127)
    assert counts.tolist() == [sum(abs(v) > clip for v in values), 0]
    assert peak.item() == max(abs(v) for v in values)


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=20),
    clip=st.floats(width=32),
    key=st.one_of(st.none(), st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))),
)
@example(values=[INF, -INF, NAN, 3e38, -3e38, 1e-45, -1e-45, -0.0], clip=1.0, key=None)
@example(values=[INF, -INF, NAN, 3e38, -3e38, 1e-45, -1e-45, -0.0], clip=TINY, key=(0, 0))
@example(values=[INF, -INF, NAN, 3e38, -3e38, 1e-45, -1e-45, -0.0], clip=INF, key=(0, 0))
@example(values=[INF, -INF, NAN, 1.0], clip=NAN, key=None)
@example(values=[INF, -INF, NAN, 1.0], clip=-1.0, key=None)
def test_minus_128_never_occurs(values: list[float], clip: float, key: tuple[int, int] | None) -> None:
    q, scale, counts, _ = ops.quantize(row(*values), row(clip), None if key is None else torch.tensor(key))
    assert q.min() >= -127
    assert q.dtype == torch.int8
    assert counts[1] == sum(not math.isfinite(v) for v in values)
    assert scale.item() > 0
    for value, integer in zip(values, q[0].tolist(), strict=True):
        assert not (math.isnan(value) and integer), "NaN becomes 0"
        assert integer == 0 or not math.isfinite(clip) or (integer > 0) == (value > 0), "no sign flips"


@both_roundings
def test_huge_and_infinite_values_saturate(key: Tensor | None) -> None:
    q, _, counts, peak = ops.quantize(row(INF, -INF, 3e38, -3e38, 1.0000001, -1.0000001), row(1.0), key)
    assert q.tolist() == [[127, -127, 127, -127, 127, -127]]
    assert counts.tolist() == [6, 2]
    assert peak.item() == INF


def test_values_are_clamped_before_noise_is_added() -> None:
    # With u up to 1 - 2^-17, floor(127.9 + u) would be 128 for most draws, and floor(-127.9 + u) -128 for some.
    x = torch.cat([torch.full((1, 500), 127.9), torch.full((1, 500), -127.9)], dim=1)
    q = ops.quantize(x, row(127.0), KEY)[0][0].tolist()
    assert q == [127] * 500 + [-127] * 500


@both_roundings
@pytest.mark.parametrize("clip", [0.0, 1e-45, TINY * (1 - 2**-24), -1.0, NAN])
def test_a_clip_that_counts_as_zero_gives_zeros_and_scale_one(clip: float, key: Tensor | None) -> None:
    q, scale, counts, peak = ops.quantize(row(1.0, -2.0, 0.0, 1e-45, INF), row(clip), key)
    assert q.tolist() == [[0] * 5]
    assert scale.item() == 1.0
    assert counts.tolist() == [0, 1]  # nothing saturates where nothing is quantized; inf is still seen
    assert peak.item() == INF


def test_the_smallest_live_clip_still_quantizes() -> None:
    q, scale, counts, _ = ops.quantize(row(TINY, -TINY / 2, 2 * TINY), row(TINY))
    assert q.tolist() == [[127, -64, 127]]
    assert scale.item() == np.float32(TINY) / np.float32(127)
    assert counts.tolist() == [1, 0]


@both_roundings
def test_zeros_stay_zero_under_any_rounding(key: Tensor | None) -> None:
    assert ops.quantize(torch.zeros(3, 5, 4, 4), torch.ones(1, 1, 1, 1), key)[0].count_nonzero() == 0


def test_saturated_counts_values_beyond_the_clip_not_at_it() -> None:
    x = row(2.0, -2.0, 2.0000002, -2.0000002, 1.0, NAN, INF, -INF)
    _, _, counts, peak = ops.quantize(x, row(2.0))
    assert counts.tolist() == [4, 3]
    assert math.isnan(peak.item())


@pytest.mark.parametrize("axis", [0, 1, 2, 3], ids=["per_sample", "per_channel", "per_row", "per_column"])
@both_roundings
def test_a_clip_per_index_equals_one_call_per_index(axis: int, key: Tensor | None) -> None:
    x = torch.randn(4, 5, 3, 6, generator=torch.Generator().manual_seed(2))
    shape = [n if dim == axis else 1 for dim, n in enumerate(x.shape)]
    clip = torch.linspace(0.2, 1.7, x.shape[axis]).reshape(shape)
    clip.view(-1)[1] = 0.0
    q, scale, counts, peak = ops.quantize(x, clip, key)
    assert scale.shape == clip.shape
    saturated = 0
    for index in range(x.shape[axis]):
        one = clip.reshape(-1)[index].reshape(1, 1, 1, 1)
        whole = ops.quantize(x, one, key)  # the whole tensor, so that the noise is the same
        assert torch.equal(q.select(axis, index), whole[0].select(axis, index))
        assert scale.reshape(-1)[index] == whole[1].item()
        saturated += int((x.select(axis, index).abs() > one.item()).sum()) if one >= TINY else 0
    assert counts.tolist() == [saturated, 0]
    assert peak == x.abs().max()


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted", "sliced", "expanded"])
@both_roundings
def test_layout_is_kept_and_changes_no_value(oracle: Any, rank: int, layout: str, key: Tensor | None) -> None:
    x = torch.randn([3, 5, 4, 2, 3][:rank], generator=torch.Generator().manual_seed(3))
    x = oracle.laid_out(x, layout)
    clip = torch.full((1,) * rank, 1.2)
    q, scale, counts, peak = ops.quantize(x, clip, key)
    plain = ops.quantize(x.contiguous(), clip, key)
    assert q.stride() == torch.empty_like(x, dtype=torch.int8).stride()
    if layout in ("channels_last", "permuted"):
        assert q.stride() == x.stride()
    assert torch.equal(q, plain[0]) and torch.equal(counts, plain[2]) and torch.equal(peak, plain[3])


def test_an_empty_tensor_gives_no_values_and_zero_counts() -> None:
    q, scale, counts, peak = ops.quantize(torch.zeros(0, 3, 4, 4), torch.full((1, 1, 1, 1), 127.0), KEY)
    assert q.shape == (0, 3, 4, 4) and q.dtype == torch.int8
    assert scale.item() == 1.0 and counts.tolist() == [0, 0] and peak.item() == 0.0


def test_the_result_carries_no_gradient() -> None:
    # An integer has no derivative; the layers define the straight-through gradient themselves.
    x = torch.randn(2, 3, requires_grad=True)
    assert [t.requires_grad for t in ops.quantize(x, row(1.0))] == [False] * 4


# ---- quantize_max: absmax and quantize in one call ---------------------------------------------------------------------


@both_roundings
@pytest.mark.parametrize("axis", [-1, 0, 1, 2])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted", "sliced", "expanded"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 1, 1, 1), (3, 17, 1, 1), (2, 64, 33, 31)], ids=str)
@pytest.mark.parametrize("path", paths.available())
def test_quantize_max_is_absmax_and_quantize(
    oracle: Any, path: str, shape: tuple[int, ...], layout: str, axis: int, key: Tensor | None
) -> None:
    x = oracle.laid_out(torch.randn(shape, generator=torch.Generator().manual_seed(5)), layout)
    with paths.path("reference"):
        clip = ops.absmax(x, axis)
        expected = ops.quantize(x, clip, key)
    with paths.path(path):
        values, scale, found, counts = ops.quantize_max(x, axis, key)
    assert torch.equal(values, expected[0]) and values.stride() == expected[0].stride()
    assert torch.equal(scale, expected[1]) and torch.equal(found, clip)
    assert torch.equal(counts, expected[2])


@pytest.mark.parametrize("path", paths.available())
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_quantize_max_of_something_non_finite_is_all_zero_and_counted(path: str, bad: float) -> None:
    with paths.path(path):
        values, scale, clip, counts = ops.quantize_max(row(1.0, bad, -3.0))
    assert values.tolist() == [[0, 0, 0]] and scale.item() == 1.0 and counts.tolist() == [0, 1]
    assert math.isnan(clip.item()) if math.isnan(bad) else clip.item() == INF


def test_quantize_max_refuses_what_it_cannot_serve() -> None:
    with pytest.raises(TypeError, match=r"quantize_max: x has dtype torch.float64"):
        ops.quantize_max(row(1.0).double())
    with pytest.raises(ValueError, match=r"quantize_max: axis is 2, but x has shape \(1, 1\)"):
        ops.quantize_max(row(1.0), 2)
    with pytest.raises(ValueError, match=r"quantize_max: key has shape \(1,\)"):
        ops.quantize_max(row(1.0), -1, torch.tensor([1]))
