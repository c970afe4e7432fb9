# SPDX-License-Identifier: Apache-2.0
"""A convolution with its epilogue has the bits of the convolution and of `normalize` after it, whatever kernel serves it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from byteback import ops
from byteback.ops.backends import paths

NATIVE = [path for path in paths.available() if path != "reference"]


class Case(NamedTuple):
    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1


CASES = {
    "pointwise, whole panels": Case((2, 32, 7, 9), (48, 32, 1, 1)),
    "pointwise, few channels": Case((1, 5, 6, 6), (7, 5, 1, 1)),
    "deep: several blocks": Case((1, 400, 5, 5), (33, 400, 3, 3), stride=2, padding=1),
    "large result": Case((2, 16, 33, 40), (64, 16, 1, 1)),
    "winograd": Case((2, 24, 13, 10), (40, 24, 3, 3), padding=1),
    "winograd, odd channels": Case((1, 3, 9, 9), (19, 3, 3, 3), padding=2),
    "groups": Case((2, 12, 8, 8), (18, 4, 3, 3), padding=1, groups=3),
    "depthwise": Case((2, 40, 11, 13), (40, 1, 3, 3), padding=1, groups=40),
    "depthwise, stride": Case((2, 21, 12, 9), (21, 1, 3, 3), stride=2, padding=1, groups=21),
    "depthwise 5x5": Case((1, 16, 9, 14), (16, 1, 5, 5), padding=2, groups=16),
    "depthwise 7x7, stride": Case((1, 24, 16, 16), (24, 1, 7, 7), stride=2, padding=3, groups=24),
    "depthwise, dilated": Case((1, 10, 9, 9), (10, 1, 3, 3), dilation=2, groups=10),
    "1-D": Case((2, 8, 21), (12, 8, 3), padding=1),
    "3-D": Case((1, 4, 4, 6, 5), (9, 4, 3, 3, 3), padding=1),
    "one pixel": Case((3, 64, 1, 1), (10, 64, 1, 1)),
}


@pytest.fixture(autouse=True)
def _threads(restore_threads: None) -> Iterator[None]:
    yield


def integers(shape: tuple[int, ...], seed: int, last: bool, least: int = -127) -> Tensor:
    x = torch.randint(least, 128, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x


def bits(made: Any) -> list[Any]:
    fields = (*(made.q or (None,) * 4), made.output)
    return [f if f is None or f.dtype != torch.float32 else f.contiguous().view(torch.int32) for f in fields]


def equal(one: Any, other: Any) -> bool:
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


@pytest.mark.skipif(not NATIVE, reason="this build has no native library")
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_both_steps(name: str) -> None:
    case = CASES[name]
    spatial, k = len(case.x) - 2, case.w[0]
    geometry = (*((option,) * spatial for option in (case.stride, case.padding, case.dilation)), case.groups)
    ones = (1,) * (spatial + 2)
    draw = torch.Generator().manual_seed(5)
    a, b = torch.randn(k, generator=draw), torch.randn(k, generator=draw)
    for seed, (last, least, per_sample) in enumerate([(True, -127, False), (False, 0, False), (True, 0, True)]):
        x, w = integers(case.x, seed, last, least), integers(case.w, seed + 10, last)
        x_scale = torch.rand(case.x[0], *ones[1:], generator=draw) * 1e-3 if per_sample else torch.full(ones, 3e-3)
        w_scale = torch.full(ones, 2e-3)
        with paths.path("reference"):
            y = ops.conv_int8(x, x_scale, w, w_scale, *geometry)
        residual = torch.randn(y.shape, generator=draw)
        coarse = integers(tuple(y.shape), seed, True), torch.full(ones, 0.01)
        options = [("relu", residual), ("none", None), ("relu6", coarse), ("hardswish", None), ("silu", None), ("gelu", None)]
        for (activation, added), clip, want_float in itertools.product(options, (torch.tensor(1.5), None), (True, False)):
            if clip is None and not want_float:
                continue
            with paths.path("reference"):
                expected = ops.normalize(y, a, b, added, activation, clip, want_float=want_float, want_mask=False)
            for path, threads in itertools.product(("reference", *NATIVE), (1, 3)):
                torch.set_num_threads(threads)
                with paths.path(path):
                    made = ops.conv_normalize(
                        x, x_scale, w, w_scale, geometry, a, b, added, activation, clip, want_float=want_float
                    )
                assert equal(made, expected), (path, threads, activation, paths.last_kernel())


@pytest.mark.skipif(not NATIVE, reason="this build has no native library")
@pytest.mark.parametrize("name", ["pointwise, whole panels", "winograd", "depthwise"])
def test_it_writes_into_a_part_of_a_wider_tensor_and_counts_what_is_not_finite(name: str) -> None:
    case = CASES[name]
    k = case.w[0]
    geometry = (*((option,) * 2 for option in (case.stride, case.padding, case.dilation)), case.groups)
    x, w, one = integers(case.x, 0, True), integers(case.w, 1, True), torch.full((1, 1, 1, 1), 1e-3)
    a, b = torch.ones(k), torch.zeros(k)
    b[3], b[5] = float("nan"), float("inf")
    y = ops.conv_int8(x, one, w, one, *geometry)
    expected = ops.normalize(y, a, b, None, "relu", torch.tensor(0.5), want_float=True, want_mask=False)
    assert int(expected.q.counts[1]) == 2 * y.numel() // k  # type: ignore[index]
    for path in NATIVE:
        wide = (y.shape[0], *y.shape[2:], k + 7)
        values, output = torch.full(wide, 99, dtype=torch.int8).movedim(-1, 1), torch.full(wide, 99.0).movedim(-1, 1)
        into = ops.Into(values[:, 4 : 4 + k], output[:, 4 : 4 + k], k + 7)
        with paths.path(path):
            made = ops.conv_normalize(
                x, one, w, one, geometry, a, b, None, "relu", torch.tensor(0.5), want_float=True, into=into
            )
        assert torch.equal(made.q.counts, expected.q.counts)  # type: ignore
        assert torch.equal(values[:, 4 : 4 + k], expected.q.values)  # type: ignore
        torch.testing.assert_close(output[:, 4 : 4 + k], expected.output, rtol=0, atol=0, equal_nan=True)
        for tensor in (values, output):
            assert (tensor[:, :4] == 99).all() and (tensor[:, 4 + k :] == 99).all()
