# SPDX-License-Identifier: Apache-2.0
"""How kernels are launched: on the device of their tensors, without fused multiply-add."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

MOST_ELEMENTS = 2**31 - 1
"""Kernels compute offsets in int32. Larger tensors run on the reference."""

on_launch: Callable[..., None] | None = None
"""If set, it is called instead of a kernel: a check without a GPU records or compiles what would run."""


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, warps: int = 4, stages: int = 3, **constants: Any) -> None:
    """Runs a kernel on the current stream of the device of its first argument."""
    if 0 in grid:
        return
    if on_launch is not None:
        on_launch(kernel, tuple(grid), arguments, constants, warps, stages)
        return
    with _on(arguments[0]):
        # A multiplication and an addition must round twice, as in the reference.
        kernel[tuple(grid)](*arguments, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=False)


def _on(tensor: Tensor) -> Any:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def fits(*tensors: Tensor) -> bool:
    """Whether the kernels can address every element of these tensors."""
    return all(0 < tensor.numel() <= MOST_ELEMENTS for tensor in tensors)


def blocks(count: int, size: int) -> int:
    """Returns how many blocks of a size cover `count` elements."""
    return -(-count // size)


def power_of_two(count: int, least: int, most: int) -> int:
    """Returns the smallest power of two that is not below `count`, within limits.

    >>> power_of_two(20, 16, 64), power_of_two(3, 16, 64), power_of_two(300, 16, 64)
    (32, 16, 64)
    """
    return max(least, min(most, 1 << max(count - 1, 0).bit_length()))
