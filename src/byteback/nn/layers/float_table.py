# SPDX-License-Identifier: Apache-2.0
"""The table of layers that fall back to float because int8 would be slower. Nothing is timed at run time.

The table depends only on the geometry of a layer, not on the batch, the image size, the path or the machine. So `summary` can
print the result before the first step, a prediction does not depend on its batch, and every path gives the same bits.
`strict=True` in a recipe and `with byteback.path(...)` disable the table.

A rule applies to all three products of a layer. We also measured single products, which is rarely faster: their operands are
quantized for the other products anyway, and PyTorch computes both gradients together faster than separately.

The comment of each rule has its measurements: the time of PyTorch FP32 (limited to AVX2, the faster of contiguous and
channels_last) divided by the time of int8 with quantization. They are for all three products, on two cores, at image and batch
sizes that take milliseconds. Numbers in brackets are of similar layers that stay in int8. A rule is listed only if int8 is
clearly slower. A change of the table changes the results of training, so it requires a new NUMERICS_VERSION, which every
checkpoint stores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Geometry(NamedTuple):
    """The properties of a layer that the table uses. For a Linear layer `kernel` is empty."""

    in_channels: int
    out_channels: int
    groups: int = 1
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()

    @property
    def inputs(self) -> int:
        """Input channels of a group."""
        return self.in_channels // self.groups

    @property
    def outputs(self) -> int:
        """Output channels of a group."""
        return self.out_channels // self.groups

    @property
    def kind(self) -> str:
        """linear, depthwise, winograd, pointwise or gemm: the int8 algorithm that csrc/conv/plan.cpp would choose."""
        if not self.kernel:
            return "linear"
        if self.groups == self.in_channels == self.out_channels:
            return "depthwise"
        if self.groups == 1 and set(self.stride) == {1}:
            if set(self.kernel) == {1}:
                return "pointwise"
            if self.kernel[-2:] == (3, 3) and set(self.dilation) == {1}:  # with any number of time taps
                return "winograd"
        return "gemm"


class Rule(NamedTuple):
    """One rule of the table: layers of this kind for which `loses` returns True run in float."""

    kind: str
    loses: Callable[[Geometry], bool]
    why: str


RULES = (
    # 3x3 g32 with 2 channels per group: 0.15, 4: 0.23, 8: 0.24, 16: 0.64 (32: 1.06); g4 with 24: 0.69; 32→64 g32: 0.13.
    # Ungrouped 5x5, 8→16: 0.49, 16→16: 0.65, 24→24: 0.65 (32→32: 1.28); 3x3 s2, 16→16: 0.79 (16→32: 1.03).
    Rule("gemm", lambda g: max(g.inputs, g.outputs) < 32, "fewer than 32 channels per group"),
    # 3→64 7x7 s2: 0.70; 3→32 3x3 s2: 0.53; 3→96 4x4 s4: 0.72; 8→64 5x5: 0.83 (16→64: 1.25); 8→64 3x3 s2: 0.84;
    # 1→64, 80 taps: 0.59. 64→1 5x5: 0.76, 64→8: 0.88 (64→16: 1.29); 64→3 3x3 s2: 0.91; 32→8 1x7: 0.62.
    Rule("gemm", lambda g: min(g.inputs, g.outputs) <= 8, "at most 8 input or output channels per group"),
    # A contiguous 1-D tensor has to be transposed to channels last, which takes longer than int8 saves in a small product.
    # 3 taps, 32→32: 0.61; 9 taps, 16→16: 0.55; 2 taps, 64→64: 0.88 (3 taps, 64→64: 0.93; 5 taps: 1.08).
    Rule(
        "gemm",
        lambda g: len(g.kernel) == 1 and max(g.inputs, g.outputs) * g.kernel[0] < 192,
        "1-D with few channels and taps",
    ),
    # 3x3: 2→2: 0.37, 4→4: 0.45, 3→16: 0.64, 3→32: 0.73 (3→64: 1.12, 4→64: 1.52); as a first layer, 1→32: 0.41, 3→32: 0.52.
    # (3x3x3: 8→8: 1.20, 12→12: 2.48, 16→16: 3.03, 8→64: 1.91.)
    Rule("winograd", lambda g: g.inputs <= 4 and g.outputs <= 32, "3x3 with at most 4 input and 32 output channels"),
    # 3x3: 8→4: 0.57 (8→8: 0.81 to 1.04, 16→4: 0.93 to 1.42, 64→1: 1.95).
    Rule("winograd", lambda g: g.inputs <= 8 and g.outputs <= 4, "3x3 with at most 8 input and 4 output channels"),
    # 3x3 of 3 channels: 0.37, 8: 0.37, 12: 0.31; 11x11 of 3 channels: 0.09.
    Rule("depthwise", lambda g: g.in_channels < 16, "depthwise with fewer than 16 channels"),
    # 256 channels, 3 taps: 0.44, 5: 0.75, 7: 0.85, 9: 0.97 (15: 1.75, 31: 3.33).
    Rule("depthwise", lambda g: len(g.kernel) == 1 and g.kernel[0] < 9, "1-D depthwise with fewer than 9 taps"),
    # 3136 rows, 512→10: 0.58, 512→32: 0.79, 16→512: 0.62, 32→512: 0.76 (512→64: 1.06); 128 rows, 512→10: 0.26.
    Rule("linear", lambda g: min(g.inputs, g.outputs) < 64, "Linear with fewer than 64 inputs or outputs"),
)


def why_float(geometry: Geometry) -> str | None:
    """Returns why a layer runs in float; None if it runs in int8.

    >>> why_float(Geometry(128, 128, 32, (3, 3), (1, 1), (1, 1)))
    'fewer than 32 channels per group'
    >>> why_float(Geometry(64, 64, 1, (3, 3), (1, 1), (1, 1)))
    """
    kind = geometry.kind
    return next((rule.why for rule in RULES if rule.kind == kind and rule.loses(geometry)), None)
