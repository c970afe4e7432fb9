# SPDX-License-Identifier: Apache-2.0
"""A convolution that counts its output on the way to memory: the bits of conv_int8 and of normalize_batch after it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from byteback import ops
from byteback.ops import BatchNorm, conv_normalize_batch, dispatch, normalize_batch
from byteback.ops.backends import paths

NATIVE = [path for path in paths.available() if path != "reference"]
LARGE = 8 << 20  # kCountedBytes of csrc/conv/conv.cpp


class Case(NamedTuple):
    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    groups: int = 1
    dilation: int = 1


COUNTED = {  # outputs above LARGE, by every kernel that hands over whole rows
    "whole panels": Case((2, 16, 64, 70), (256, 16, 1, 1)),
    "ragged panels": Case((1, 24, 61, 67), (515, 24, 1, 1)),
    "several blocks of depth": Case((3, 1400, 29, 31), (800, 1400, 1, 1)),
    "strided": Case((2, 16, 131, 129), (272, 16, 3, 3), stride=2, padding=1),
    "depthwise": Case((2, 96, 113, 111), (96, 1, 3, 3), padding=1, groups=96),
    "depthwise, stride": Case((4, 192, 117, 113), (192, 1, 3, 3), stride=2, padding=1, groups=192),
    "depthwise, few channels": Case((2, 90, 113, 111), (90, 1, 3, 3), padding=1, groups=90),
    "depthwise 5x5": Case((2, 96, 113, 111), (96, 1, 5, 5), padding=2, groups=96),
    "depthwise, dilated": Case((1, 200, 113, 113), (200, 1, 3, 3), groups=200, dilation=2),
}
PLAIN = {  # small ones, and those of kernels that do not
    "small": Case((2, 16, 9, 7), (24, 16, 1, 1)),
    "winograd": Case((2, 24, 13, 10), (40, 24, 3, 3), padding=1),
    "winograd, large": Case((2, 16, 128, 130), (72, 16, 3, 3), padding=1),
    "groups": Case((2, 12, 8, 8), (18, 4, 3, 3), padding=1, groups=3),
    "1-D": Case((2, 8, 21), (12, 8, 3), padding=1),
    "3-D": Case((1, 4, 4, 6, 5), (9, 4, 3, 3, 3), padding=1),
}


def integers(shape: tuple[int, ...], seed: int, last: bool) -> Tensor:
    x = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x


def arguments(case: Case, last: bool, scale: float = 3e-3) -> tuple[Any, ...]:
    spatial = len(case.x) - 2
    ones = (1,) * (spatial + 2)
    geometry = (*((option,) * spatial for option in (case.stride, case.padding, case.dilation)), case.groups)
    x, w = integers(case.x, 1, last), integers(case.w, 2, last)
    return x, torch.full(ones, scale), w, torch.full(ones, 2e-3), geometry


def norm_of(channels: int) -> BatchNorm:
    draw = torch.Generator().manual_seed(channels)
    gamma, beta, bias, mean = (torch.randn(channels, generator=draw) for _ in range(4))
    return BatchNorm(gamma, beta, bias, 1e-5, (mean, torch.rand(channels, generator=draw) + 0.5), 0.1)


def both_steps(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, geometry: Any, norm: BatchNorm, **wants: Any) -> Any:
    y = ops.conv_int8(x, x_scale, w, w_scale, *geometry)
    y = y.movedim(1, -1).contiguous().movedim(-1, 1)
    return y, normalize_batch(y, norm, None, "relu6", **wants)


def flat(y: Tensor, made: Any, norm: BatchNorm) -> list[Tensor | None]:
    kept = made.kept or ()
    assert norm.running is not None
    return [y, *made.norm, *(made.q or (None,) * 3)[:3], *made[1:3], *kept, *norm.running]


def check_equal(one: list[Tensor | None], other: list[Tensor | None]) -> None:
    for a, b in zip(one, other, strict=True):
        if a is None or b is None:
            assert a is b
        else:
            assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


WANTS = {"want_int8": True, "want_float": False, "want_mask": True, "keep": "int8"}


@pytest.mark.skipif(not NATIVE, reason="this build has no native library")
@pytest.mark.parametrize("name", [*COUNTED, *PLAIN])
def test_the_bits_are_those_of_both_steps(name: str, restore_threads: None) -> None:
    case = COUNTED.get(name) or PLAIN[name]
    given = arguments(case, last=True)
    norm = norm_of(case.w[0])
    expected = flat(*both_steps(*given, norm, **WANTS), norm)
    assert name not in COUNTED or expected[0] is None or expected[0].numel() * 4 >= LARGE
    for path in NATIVE:
        if path == "generic" and name in COUNTED:
            continue  # it counts nothing on the way, and would take a minute
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            fresh = norm_of(case.w[0])
            with paths.path(path):
                y, made = conv_normalize_batch(*given, fresh, None, "relu6", **WANTS)
            check_equal(flat(y, made, fresh), expected)


@pytest.mark.skipif(not NATIVE, reason="this build has no native library")
def test_any_memory_format_and_any_scales() -> None:
    case = Case((3, 16, 64, 70), (256, 16, 1, 1))
    x, _, w, w_scale, geometry = arguments(case, last=False)
    x_scale = torch.tensor([1e-3, 2e-3, 3e-3]).reshape(3, 1, 1, 1)  # one for each sample
    norm, fresh = norm_of(256), norm_of(256)
    expected = flat(*both_steps(x, x_scale, w, w_scale, geometry, norm, **WANTS), norm)
    made = conv_normalize_batch(x, x_scale, w, w_scale, geometry, fresh, None, "relu6", **WANTS)
    assert made[0].movedim(1, -1).is_contiguous()
    check_equal(flat(*made, fresh), expected)


@pytest.mark.skipif(not NATIVE, reason="this build has no native library")
def test_a_scale_that_is_nan_is_seen() -> None:
    given = arguments(COUNTED["whole panels"], last=True, scale=float("nan"))
    norm = norm_of(256)._replace(running=None)
    _, expected = both_steps(*given, norm, **WANTS)
    _, made = conv_normalize_batch(*given, norm, None, "relu6", **WANTS)
    assert made.norm.peak.isnan() and expected.norm.peak.isnan()
    assert made.norm.mean.isnan().all() and torch.equal(made.q.counts, expected.q.counts)  # type: ignore[arg-type]


def test_the_reference_and_an_empty_batch() -> None:
    given = arguments(PLAIN["small"], last=True)
    norm, fresh = norm_of(24), norm_of(24)
    with paths.path("reference"):
        expected = flat(*both_steps(*given, norm, **WANTS), norm)
        check_equal(flat(*conv_normalize_batch(*given, fresh, None, "relu6", **WANTS), fresh), expected)
    empty = (given[0][:0], *given[1:])
    y, _ = conv_normalize_batch(*empty, norm_of(24)._replace(running=None), None, "relu6", **WANTS)
    assert y.shape == (0, 24, 9, 7)


def test_who_watches_operators_sees_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(dispatch, "is_plain", lambda arguments: seen.append(len(arguments)) or False)
    given = arguments(PLAIN["small"], last=True)
    conv_normalize_batch(*given, norm_of(24), None, "relu6", **WANTS)
    assert seen == [4, 8]  # asked here, and again by conv_int8, which then goes through the dispatcher
