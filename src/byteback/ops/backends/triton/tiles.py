# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the products by shape and device: a small fixed table. Nothing is timed at run time.

A program computes a tile of rows · columns of the result, and reads `depth` terms of the sum at once. Large tiles read each
operand less often; small ones give a small product enough programs for all multiprocessors.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

MULTIPROCESSORS = 108
"""Assumed for a device that is not a GPU, such as the interpreter."""


def height(rows: int, width: int, device: torch.device, share: int = 1) -> int:
    """Returns how many rows of this width a program of a pass takes; 1 / share of them if it keeps more for each.

    The interpreter takes many rows at once, but no more than there are: it needs few programs and few elements to be fast.
    """
    if device.type != "cpu":
        return max(1024 // share // width, 1)
    return min(8192 // width, 1 << (rows - 1).bit_length())


@functools.cache
def multiplies_int8(device: torch.device) -> bool:
    """Whether Triton compiles int8 products for a device. It does not for NVIDIA GPUs before Ampere."""
    return device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


class Tile(NamedTuple):
    """Rows, columns and depth of a tile; warps of a program, stages of the pipeline that loads the operands; the reason."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    why: str


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Returns how many programs a device runs at once, at one for each multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS


def choose(rows: int, columns: int, depth: int, processors: int) -> Tile:
    """Returns the tile of a product with this many rows, columns and terms per tap.

    >>> choose(100_000, 256, 256, 108).why
    '128 x 128: enough tiles for 108 multiprocessors'
    >>> choose(64, 10, 16, 108)[:3]
    (64, 16, 32)
    """
    terms = 64 if depth > 32 else 32
    for height, width, warps in ((128, 128, 8), (128, 64, 8), (64, 64, 4)):
        if width > max(columns, 16) * 2 - 1:
            continue
        if -(-rows // height) * -(-columns // width) >= processors:
            return Tile(height, width, terms, warps, 3, f"{height} x {width}: enough tiles for {processors} multiprocessors")
    width = 64 if columns > 32 else 32 if columns > 16 else 16
    return Tile(64, width, terms, 4, 4, f"64 x {width}: a small product, the smallest tiles give the most programs")
