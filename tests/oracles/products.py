# SPDX-License-Identifier: Apache-2.0
"""The three products in int64, and the operands and layouts that their tests share.

The oracle is numpy int64 arithmetic over explicit kernel taps: no float, no torch convolution, no line of src. What it
returns is compared bit by bit (so +0.0 and -0.0 differ), never with a tolerance.

Legend: N C H W input, K C R S weight, N K OH OW output, G groups; P stands for any number of spatial axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from byteback import ops

Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], int]  # stride, padding, dilation, groups
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Oracle:
    """Everything that more than one file needs; tests get it as the fixture `oracle`."""

    # ---- the three products in int64 ---------------------------------------------------------------------------------

    @staticmethod
    def ints(x: Tensor) -> np.ndarray:
        return x.numpy().astype(np.int64)

    @staticmethod
    def output_size(size: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> list[int]:
        stride, padding, dilation, _ = geometry
        return [
            (n + 2 * p - d * (r - 1) - 1) // s + 1
            for n, r, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
        ]

    @classmethod
    def _taps(
        cls, size: Sequence[int], kernel: Sequence[int], geometry: Geometry
    ) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Each tap of the kernel with the pixels of the padded image that it meets."""
        stride, _, dilation, _ = geometry
        out = cls.output_size(size, kernel, geometry)
        for tap in itertools.product(*map(range, kernel)):
            yield tap, tuple(slice(t * d, t * d + s * o, s) for t, d, s, o in zip(tap, dilation, stride, out, strict=True))

    @staticmethod
    def _padded(x: np.ndarray, padding: Sequence[int]) -> np.ndarray:
        return np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])

    @classmethod
    def conv(cls, x: Tensor, w: Tensor, geometry: Geometry) -> np.ndarray:
        n, c, *size = x.shape
        k, c_group, *kernel = w.shape
        groups, out = geometry[3], cls.output_size(size, kernel, geometry)
        image, weight = cls._padded(cls.ints(x), geometry[1]), cls.ints(w).reshape(groups, k // groups, c_group, *kernel)
        acc = np.zeros((n, groups, k // groups, *out), dtype=np.int64)
        for tap, pixels in cls._taps(size, kernel, geometry):
            seen = image[(slice(None), slice(None), *pixels)].reshape(n, groups, c_group, *out)
            acc += np.einsum("ngc...,gkc->ngk...", seen, weight[(..., *tap)])
        return acc.reshape(n, k, *out)

    @classmethod
    def grad_input(cls, g: Tensor, w: Tensor, input_size: Sequence[int], geometry: Geometry) -> np.ndarray:
        n, c, *size = input_size
        k, c_group, *kernel = w.shape
        padding, groups = geometry[1], geometry[3]
        grad = cls.ints(g).reshape(n, groups, k // groups, *g.shape[2:])
        weight = cls.ints(w).reshape(groups, k // groups, c_group, *kernel)
        acc = cls._padded(np.zeros((n, c, *size), dtype=np.int64), padding)
        for tap, pixels in cls._taps(size, kernel, geometry):
            term = np.einsum("ngk...,gkc->ngc...", grad, weight[(..., *tap)])
            acc[(slice(None), slice(None), *pixels)] += term.reshape(n, c, *g.shape[2:])
        inner = tuple(slice(p, p + length) for p, length in zip(padding, size, strict=True))
        return acc[(slice(None), slice(None), *inner)]

    @classmethod
    def grad_weight(cls, g: Tensor, x: Tensor, weight_size: Sequence[int], geometry: Geometry) -> np.ndarray:
        n, c, *size = x.shape
        k, c_group, *kernel = weight_size
        groups, pixel_count = geometry[3], int(np.prod(g.shape[2:]))
        image, grad = cls._padded(cls.ints(x), geometry[1]), cls.ints(g).reshape(n, groups, k // groups, pixel_count)
        acc = np.zeros((groups, k // groups, c_group, *kernel), dtype=np.int64)
        for tap, pixels in cls._taps(size, kernel, geometry):
            seen = image[(slice(None), slice(None), *pixels)].reshape(n, groups, c_group, pixel_count)
            acc[(..., *tap)] = np.einsum("ngkp,ngcp->gkc", grad, seen)
        return acc.reshape(k, c_group, *kernel)

    @staticmethod
    def factor(product: str, first: np.ndarray, second: np.ndarray, groups: int, channels: int) -> np.ndarray:
        """What each integer of a product is multiplied by: one float32 product of two scales, looked up index by index.

        `first` belongs to the input (output) or to grad_output, `second` to the other operand; `channels` is K.
        """
        ones = (1,) * (first.ndim - 2)
        if product == "output":  # N of input, K of weight
            return first.reshape(-1, 1, *ones) * second.reshape(1, -1, *ones)
        per_group = second.shape[1] if product == "grad_input" else second.shape[1] // groups
        if product == "grad_input":  # N (depthwise: K, which is C) of grad_output, C of weight: the same in every group
            columns = np.arange(groups * per_group if per_group > 1 else 1) % per_group
            return first * second.reshape(-1)[columns].reshape(1, -1, *ones)
        if second.size == 1 or per_group == 0:  # K of grad_output, C of input: the rows of group j read the channels of group j
            return first.reshape(-1, 1, *ones) * second.reshape(1, 1, *ones)
        rows = np.arange(channels)[:, None] // (channels // groups) * per_group + np.arange(per_group)
        return first.reshape(-1, 1, *ones) * second.reshape(-1)[rows].reshape(channels, per_group, *ones)

    # ---- comparison --------------------------------------------------------------------------------------------------

    @staticmethod
    def assert_bits(actual: Tensor, acc: np.ndarray, factor: np.ndarray | float = 1.0) -> None:
        """actual == float32(acc) * factor, bit by bit; `acc` int64, one rounding to float32, one product."""
        assert acc.dtype == np.int64
        expected = acc.astype(np.float32) * np.asarray(factor, dtype=np.float32)
        assert actual.dtype == torch.float32
        assert tuple(actual.shape) == expected.shape
        got = np.ascontiguousarray(actual.numpy()).view(np.int32)
        wrong = np.argwhere(got != np.ascontiguousarray(expected).view(np.int32))
        if len(wrong):
            at = tuple(wrong[0])
            pytest.fail(f"{len(wrong)} of {got.size} differ; at {at}: {actual[at].item()} is not {expected[at]}")

    @classmethod
    def assert_products(cls, x: Tensor, w: Tensor, g: Tensor, geometry: Geometry) -> None:
        """All three products of one convolution equal the integer oracle."""
        stride, padding, dilation, groups = geometry
        one, rest = torch.ones((1,) * x.dim()), (stride, padding, dilation, groups)
        cls.assert_bits(ops.conv_int8(x, one, w, one, *rest), cls.conv(x, w, geometry))
        cls.assert_bits(ops.conv_int8_grad_input(g, one, w, one, list(x.shape), *rest), cls.grad_input(g, w, x.shape, geometry))
        cls.assert_bits(
            ops.conv_int8_grad_weight(g, one, x, one, list(w.shape), *rest), cls.grad_weight(g, x, w.shape, geometry)
        )

    # ---- operands ----------------------------------------------------------------------------------------------------

    @staticmethod
    def operand(shape: Sequence[int], pattern: str = "random", seed: int = 0) -> Tensor:
        """int8 values of one pattern."""
        count = int(np.prod(shape))
        flat = torch.arange(count)
        if pattern == "random":
            values = torch.randint(-127, 128, (count,), generator=torch.Generator().manual_seed(seed))
        elif pattern == "alternating":
            values = 127 - 254 * (flat % 2)
        elif pattern == "one_hot":
            values = torch.where(flat == (seed * 7 + 3) % max(count, 1), -127, 0)
        else:
            values = torch.full((count,), {"all_plus_127": 127, "all_minus_127": -127}[pattern])
        return values.to(torch.int8).reshape(list(shape))

    @classmethod
    def triple(
        cls, input_size: Sequence[int], weight_size: Sequence[int], geometry: Geometry, patterns: Sequence[str]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """input, weight and grad_output of one convolution."""
        out = [input_size[0], weight_size[0], *cls.output_size(input_size[2:], weight_size[2:], geometry)]
        sizes = (input_size, weight_size, out)
        x, w, g = (cls.operand(s, p, i) for i, (s, p) in enumerate(zip(sizes, patterns, strict=True)))
        return x, w, g

    @staticmethod
    def laid_out(x: Tensor, name: str) -> Tensor:
        """The same values in another layout (`expanded` repeats the first index of N, so its values differ)."""
        if name == "channels_last":
            return x.contiguous(memory_format=CHANNELS_LAST[x.dim()]) if x.dim() in CHANNELS_LAST else x
        if name == "permuted":
            backwards = list(range(x.dim()))[::-1]
            return x.permute(backwards).contiguous().permute(backwards)
        if name == "sliced":
            wide = torch.zeros([*x.shape[:-1], 2 * x.shape[-1] + 1], dtype=x.dtype)
            wide[..., 1::2] = x
            return wide[..., 1::2]
        if name == "expanded":
            return x[:1].expand(x.shape)
        assert name == "contiguous"
        return x.contiguous()
