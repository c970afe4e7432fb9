# SPDX-License-Identifier: Apache-2.0
"""Addresses of the buffers of a quantizer for the native library, which writes one row of them (csrc/quantizer/ledger.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from byteback.ops.backends.cpu.addresses import is_flat, known
from byteback.ops.quantizer import COLUMNS

_float32, _int64 = torch.float32, torch.int64

Buffers = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""clip, initialized, updated_at, observed, seen and tracked of a Quantizer, in this order."""


def is_ready(buffers: Buffers, slot: int) -> bool:
    """Whether the native library can write to row `slot`. load_state_dict(assign=True) may have replaced the buffers."""
    clip, initialized, updated_at, observed, seen, tracked = buffers
    slots, entries = clip.shape
    return (
        0 <= slot < slots
        and is_flat(clip, _float32, slots * entries)
        and is_flat(initialized, _float32, slots)
        and is_flat(updated_at, _int64, slots)
        and is_flat(observed, _float32, slots * COLUMNS)
        and is_flat(seen, _float32, slots)
        and (tracked is None or is_flat(tracked, _float32, slots * entries))
    )


def row(buffers: Buffers, slot: int) -> dict[str, int]:
    """Returns the addresses of row `slot`, and how many numbers its clip has."""
    clip, initialized, updated_at, observed, seen, tracked = buffers
    entries = clip.shape[1]
    first, number = slot * entries * 4, slot * 4
    return {
        "clip": known(clip) + first,
        "initialized": known(initialized) + number,
        "updated_at": known(updated_at) + 2 * number,
        "observed": known(observed) + COLUMNS * number,
        "tracked": 0 if tracked is None else known(tracked) + first,
        "seen": known(seen) + number,
        "entries": entries,
    }
