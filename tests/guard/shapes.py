# SPDX-License-Identifier: Apache-2.0
"""Sizes for guarded calls: such that fill no vector, block, panel or tile, and some that keep several threads busy."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Convolution(NamedTuple):
    """Sizes as csrc/core/types.h's ConvShape has them: depth, height, width; `least` is the smallest value of the input."""

    batch: int
    channels: int
    filters: int
    groups: int
    size: tuple[int, int, int]
    kernel: tuple[int, int, int]
    stride: tuple[int, int, int] = (1, 1, 1)
    padding: tuple[int, int, int] = (0, 0, 0)
    dilation: tuple[int, int, int] = (1, 1, 1)
    least: int = -127

    @property
    def out(self) -> tuple[int, ...]:
        axes = zip(self.size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * p - d * (r - 1) - 1) // s + 1 for n, r, s, p, d in axes)

    @property
    def fields(self) -> dict[str, Any]:
        """What the library's ConvShape is made of."""
        counts = {"batch": self.batch, "in_channels": self.channels, "out_channels": self.filters, "groups": self.groups}
        sizes = {"input": self.size, "kernel": self.kernel, "output": self.out}
        return {**counts, **sizes, "stride": self.stride, "padding": self.padding, "dilation": self.dilation}

    @property
    def input_count(self) -> int:
        return self.batch * self.channels * math.prod(self.size)

    @property
    def weight_count(self) -> int:
        return self.filters * (self.channels // self.groups) * math.prod(self.kernel)

    @property
    def output_count(self) -> int:
        return self.batch * self.filters * math.prod(self.out)


def _flat(kernel: int, **rest: int) -> dict[str, tuple[int, int, int]]:
    made = {"kernel": (1, kernel, kernel)}
    for name, value in rest.items():
        made[name] = (0 if name == "padding" else 1, value, value)
    return made


CONVOLUTIONS = {
    "one pixel": Convolution(3, 65, 7, 1, (1, 1, 1), (1, 1, 1)),
    "pointwise": Convolution(2, 5, 19, 1, (1, 7, 9), (1, 1, 1)),
    "pointwise, nothing negative": Convolution(1, 37, 33, 1, (1, 5, 7), (1, 1, 1), least=0),
    "pointwise, stride": Convolution(2, 33, 17, 1, (1, 9, 7), **_flat(1, stride=2)),
    "deep": Convolution(1, 201, 9, 1, (1, 5, 3), **_flat(3, stride=2, padding=1)),
    "stride": Convolution(2, 7, 21, 1, (1, 11, 9), **_flat(3, stride=2, padding=1)),
    "direct": Convolution(2, 16, 40, 1, (1, 8, 12), **_flat(5, padding=2)),
    "direct, groups of 7": Convolution(2, 7, 50, 1, (1, 9, 14), **_flat(5, padding=3)),
    "direct, stride": Convolution(2, 21, 23, 1, (1, 15, 18), **_flat(3, stride=2, padding=1)),
    "direct, no padding, dilation": Convolution(3, 8, 33, 1, (1, 13, 17), **_flat(3, dilation=2)),
    "direct, padding beyond the image": Convolution(1, 5, 6, 1, (1, 3, 5), **_flat(5, padding=6)),
    "stride beyond the kernel": Convolution(1, 9, 5, 1, (1, 11, 13), **_flat(2, stride=3)),
    "dilation": Convolution(1, 3, 5, 1, (1, 9, 11), **_flat(3, dilation=2, padding=3)),
    "winograd": Convolution(2, 19, 23, 1, (1, 7, 9), **_flat(3, padding=1)),
    "winograd, few channels": Convolution(1, 3, 5, 1, (1, 6, 5), **_flat(3)),
    "winograd, many channels": Convolution(2, 70, 65, 1, (1, 13, 11), **_flat(3, padding=1)),
    "winograd in time": Convolution(1, 5, 7, 1, (4, 9, 7), (3, 3, 3), padding=(1, 1, 1)),
    "groups": Convolution(2, 15, 21, 3, (1, 7, 5), **_flat(3, padding=1)),
    "depthwise": Convolution(2, 35, 35, 35, (1, 9, 11), **_flat(3, padding=1)),
    "depthwise, whole vectors": Convolution(1, 32, 32, 32, (1, 9, 11), **_flat(3, padding=1)),
    "depthwise 5x5, whole vectors, stride": Convolution(1, 32, 32, 32, (1, 9, 11), **_flat(5, stride=2, padding=2)),
    "depthwise, whole vectors, dilation": Convolution(1, 32, 32, 32, (1, 9, 9), **_flat(3, dilation=2)),
    "depthwise, stride": Convolution(2, 21, 21, 21, (1, 12, 9), **_flat(3, stride=2, padding=1)),
    "depthwise 5x5": Convolution(1, 17, 17, 17, (1, 9, 13), **_flat(5, padding=2)),
    "depthwise 7x7, stride": Convolution(1, 9, 9, 9, (1, 15, 17), **_flat(7, stride=2, padding=3)),
    "depthwise, dilation": Convolution(1, 11, 11, 11, (1, 9, 9), **_flat(3, dilation=2)),
    "depthwise in time": Convolution(1, 19, 19, 19, (5, 7, 5), (3, 3, 3), padding=(1, 1, 1)),
    "direct, quads that end inside": Convolution(2, 16, 32, 1, (1, 19, 21), **_flat(3, stride=2, padding=1)),
    "direct, stride 1": Convolution(2, 32, 16, 1, (1, 10, 11), **_flat(3, padding=1)),
    "direct 1x1": Convolution(1, 32, 32, 1, (1, 7, 9), **_flat(1)),
    "direct 5x5": Convolution(3, 48, 16, 1, (1, 11, 10), **_flat(5, padding=2)),
    "1-D": Convolution(2, 9, 13, 1, (1, 1, 43), (1, 1, 5), padding=(0, 0, 2)),
    "3-D, stride": Convolution(1, 6, 9, 1, (5, 7, 6), (3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 1)),
    "several threads": Convolution(3, 33, 41, 1, (1, 17, 19), **_flat(3, stride=2, padding=1)),
}

# (rows, channels): around vectors of 8 and 16, blocks of 64 rows, tiles of 2048 channels; the last one keeps threads busy.
ROWS = [(1, 1), (3, 1), (1, 7), (5, 3), (64, 9), (67, 17), (9, 33), (3, 65), (1, 2051), (700, 33)]
WINDOWS = [  # batch, height, width, channels, kernel, stride, padding, dilation, each for height and width
    (1, 5, 7, 3, (2, 2), (2, 2), (0, 0), (1, 1)),
    (2, 9, 8, 33, (3, 3), (2, 2), (1, 1), (1, 1)),
    (1, 7, 9, 65, (3, 2), (1, 3), (1, 0), (2, 1)),
    (1, 4, 3, 32, (1, 3), (1, 1), (0, 1), (1, 1)),
]
