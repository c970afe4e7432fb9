# SPDX-License-Identifier: Apache-2.0
"""What the kernels of a product need to know of it, computed once for each call with the same shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from byteback.ops.contract.limits import MAX_INT32_DEPTH
from byteback.ops.types import Geometry, ProductCall


class Plan(NamedTuple):
    """What kernels need of a call: sizes (N, D, H, W), channels, (OD, OH, OW), stride, padding and dilation, taps (T, R, S)."""

    image: tuple[int, int, int, int]
    c: int
    k: int
    groups: int
    out: tuple[int, int, int]
    steps: tuple[int, ...]  # stride, padding, dilation: three numbers each
    taps: tuple[int, int, int]
    depthwise: bool
    strides: tuple[int, int, int]  # of the result: axis 0, axis 1, and from pixel (or tap) to pixel
    reference: bool  # the sum is too long for int32

    def constants(self) -> dict[str, int]:
        return dict(zip("TRS", self.taps, strict=True))

    def tap_count(self) -> int:
        return math.prod(self.taps)


def _three(values: Any, fill: int) -> tuple[int, ...]:
    """Returns the numbers of up to three spatial axes as those of three.

    >>> _three([5, 7], 1)
    (1, 5, 7)
    """
    return (fill,) * (3 - len(values)) + tuple(values)


def product_plan(call: ProductCall, a: Tensor, b: Tensor) -> Plan:
    strides = call.strides[0], call.strides[1], call.strides[-1]
    return plan_of(call.kind, call.x_size, call.w_size, call.out_size, call.geometry, strides)


def plan_of(
    kind: str,
    x_size: Sequence[int],
    w_size: Sequence[int],
    out_size: Sequence[int],
    geometry: Geometry,
    strides: tuple[int, int, int] = (0, 0, 0),
) -> Plan:
    """Returns the plan of a product of these sizes; strides are those of the result."""
    stride, padding, dilation, groups = geometry
    n, c = x_size[:2]
    k, taps = w_size[0], _three(w_size[2:], 1)
    sums = {"output": c // groups, "grad_input": k // groups}.get(kind, 0) * math.prod(taps)
    return Plan(
        (n, *_three(x_size[2:], 1)),  # type: ignore[arg-type]
        c,
        k,
        groups,
        _three(out_size[2:], 1),  # type: ignore[arg-type]
        (*_three(stride, 1), *_three(padding, 0), *_three(dilation, 1)),
        taps,  # type: ignore[arg-type]
        groups == c == k,
        strides,
        sums > MAX_INT32_DEPTH,
    )


def rows_of(x: Tensor) -> Tensor:
    """Returns (N, C, ...) stored densely as (N, ..., C)."""
    return x.movedim(1, -1).contiguous()


Scaled = tuple[Tensor, int, int]
"""The factor of the result, and its strides along axes 0 and 1."""
