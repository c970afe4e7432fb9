# SPDX-License-Identifier: Apache-2.0
"""The copy of integers packed by 16 images, which a pass over floats writes for grad_weight (kernels/packing.py)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from byteback.ops.backends.triton import tiles
from byteback.ops.backends.triton.launch import MOST_ELEMENTS, blocks, power_of_two
from byteback.ops.contract.packing import GROUP, packed_size
from byteback.ops.types import PackedQTensor, QTensor


def fits_packed(size: torch.Size) -> bool:
    """Whether the kernels can address every element of the packed copy of a tensor of this size."""
    return math.prod(packed_size(size)) <= MOST_ELEMENTS


def new_packed(like: Tensor, packs: bool) -> Tensor | None:
    """Returns empty memory for the packed copy of a tensor; None if it is not requested, not read here, or does not pay.

    A tile has 16 images, also if some are missing. With many missing, a packing kernel of its own is faster.
    """
    missing = -like.shape[0] % GROUP
    if not packs or like.dim() < 3 or 4 * missing > like.shape[0] or not fits_packed(like.shape):
        return None
    if not tiles.multiplies_int8(like.device):
        return None
    return torch.empty(packed_size(like.shape), dtype=torch.int8, device=like.device)


def height(pixels: int, width: int, device: torch.device) -> int:
    """Returns how many rows a tile of this width has: 16 images of a pixel, or of more pixels if there are few channels.

    A pixel of 64 channels is 1,024 bytes in a row in the packed copy. The interpreter takes many at once (tiles.height).
    """
    most = (1024 if device.type != "cpu" else 8192) // width // GROUP
    return GROUP * power_of_two(pixels, 1, max(most, 1))


def grid_of(images: int, pixels: int, rows: int, packs: bool) -> int:
    """Returns how many tiles of this many rows cover all pixels of all images."""
    return blocks(images, GROUP) * blocks(pixels, rows // GROUP) if packs else blocks(images * pixels, rows)


def with_packed(q: QTensor, packed: Tensor | None) -> QTensor:
    """Returns q with its packed copy, if there is one."""
    if packed is None:
        return q
    made = PackedQTensor(*q)
    made.packed = packed
    return made
