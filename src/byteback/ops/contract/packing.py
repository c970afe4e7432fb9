# SPDX-License-Identifier: Apache-2.0
"""int8 tensors packed by 16 images: (N, C, ...) is stored as (N / 16, ..., C, 16), so it has one more axis.

16 neighbouring bytes are one pixel and channel of 16 images. grad_weight sums over images, and tensor cores of GPUs want the
terms of a sum side by side in memory (docs/13-gpus.md). Images that are missing in the last group are zeros, so the sum does
not change, and the number of images need not be known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from byteback.ops.contract.layout import channels_last, last_strides

GROUP = 16


def packed_size(size: Sequence[int]) -> tuple[int, ...]:
    """Returns the size of a packed tensor.

    >>> packed_size((20, 3, 5, 7))
    (2, 5, 7, 3, 16)
    """
    return (-(-size[0] // GROUP), *size[2:], size[1], GROUP)


def packed(x: Tensor) -> Tensor:
    """Returns x packed by 16 images."""
    missing = -x.shape[0] % GROUP
    rows = F.pad(x.movedim(1, -1), (0, 0) * (x.dim() - 1) + (0, missing))
    return rows.reshape(-1, GROUP, *rows.shape[1:]).movedim(1, -1).contiguous()


def unpacked(x: Tensor, images: int) -> Tensor:
    """Returns the first images of a packed tensor, channels last."""
    return channels_last(x.movedim(-1, 1).flatten(0, 1)[:images].movedim(-1, 1))


def is_packed(x: Tensor, rank: int) -> bool:
    """Whether x is packed, if a tensor that is not has this rank."""
    return x.dim() == rank + 1 and x.shape[-1] == GROUP


def images_of(rank: int, *operands: Tensor) -> int:
    """Returns how many images the operands of a product have: if all are packed, those that are missing count too."""
    plain = [x.shape[0] for x in operands if x.dim() and not is_packed(x, rank)]
    return plain[0] if plain else GROUP * operands[0].shape[0]


def stand_in(op: str, x: Tensor, rank: int, images: int, device: torch.device) -> Tensor:
    """Returns x, or for a packed tensor an empty one on `device` that has the size, strides and dtype of `unpacked`."""
    if not is_packed(x, rank):
        return x
    if x.shape[0] != -(-images // GROUP):
        raise ValueError(
            f"{op}: a packed operand has shape {tuple(x.shape)}, so {x.shape[0]} groups of {GROUP} images, but the other "
            f"operand has {images} images. Pack the tensors of one batch."
        )
    size = images, x.shape[-2], *x.shape[1:-2]
    return torch.empty_strided(size, last_strides(size), dtype=x.dtype, device=device)
