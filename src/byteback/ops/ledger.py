# SPDX-License-Identifier: Apache-2.0
"""What a quantizer writes down after each tensor: one row of its buffers, for one call slot.

In PyTorch these are a dozen operations on tensors of a few numbers, more time than the kernel of a small layer takes; the
native library does the same in one call where the buffers lie on the CPU.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.ops import eager, native

SATURATED, DEVIATION, GAUSSIAN, CLIP, WORST_CHANNEL = range(5)  # columns of `observed`
XQ, QQ, XX, MEASURED, NONFINITE = range(5)  # columns of `unshared`

_library: Any = native.library


class Buffers(NamedTuple):
    """The tensors that a quantizer step may write to; see quantize/quantizer.py. One row for each call slot."""

    clip: Tensor
    initialized: Tensor
    updated_at: Tensor
    observed: Tensor
    seen: Tensor
    tracked: Tensor | None
    nonfinite: Tensor
    unshared: Tensor


class Entry(NamedTuple):
    """How one tensor was quantized; NaN for a share that was not measured."""

    clip: Tensor
    remember: Tensor | None  # the clip rule's memory for the next step
    searched: bool
    iteration: int
    saturated: float
    deviation: float
    gaussian: float
    momentum: float  # of the tracked clip


def write(buffers: Buffers, slot: int, entry: Entry) -> None:
    """Writes one entry into row `slot`."""
    clip, remember, searched, iteration, *columns, momentum = entry
    kept = clip if remember is None else remember
    known = (buffers.clip, buffers.observed, clip) if kept is clip else (buffers.clip, buffers.observed, clip, kept)
    plain = native.number() is not None and eager.is_plain(known)
    if not plain or clip.dtype is not torch.float32 or kept.dtype is not torch.float32:
        _write(buffers, slot, entry)
        return
    dense = clip.contiguous()
    kept = dense if kept is clip else kept.contiguous()
    _library.write_ledger(
        _rows(buffers, slot, remember is not None, searched),
        (dense.data_ptr(), dense.numel(), kept.data_ptr(), kept.numel(), iteration),
        columns,
        momentum,
    )


def write_terms(buffers: Buffers, slot: int, terms: list[float]) -> None:
    """Notes x·x̂, x̂·x̂ and x·x of a tensor, which several ranks add up before their optimizers step."""
    buffers.unshared[slot, :NONFINITE].copy_(torch.tensor([*terms, 1.0], dtype=torch.float64))


def write_nonfinite(buffers: Buffers) -> None:
    """Notes a tensor with NaN or Inf."""
    buffers.nonfinite.add_(1)
    buffers.unshared[0, NONFINITE] += 1.0


def _rows(buffers: Buffers, slot: int, remembers: bool, searched: bool) -> tuple[int, ...]:
    """The addresses of the slot's numbers, 0 for those that stay as they are. The buffers are dense by construction."""
    clip, initialized, updated_at, observed, seen, tracked, *_ = buffers
    channels = clip.shape[1]
    row, byte = slot * channels * 4, slot * 4
    return (
        clip.data_ptr() + row if remembers else 0,
        initialized.data_ptr() + byte,
        updated_at.data_ptr() + 2 * byte if searched else 0,
        observed.data_ptr() + observed.shape[1] * byte,
        0 if tracked is None else tracked.data_ptr() + row,
        seen.data_ptr() + byte,
        channels,
    )


def _write(buffers: Buffers, slot: int, entry: Entry) -> None:
    if entry.remember is not None:
        row = buffers.clip[slot]
        row.copy_(_fitting(entry.remember, row))
        buffers.initialized[slot] = 1.0
    if entry.searched:
        buffers.updated_at[slot] = entry.iteration
    columns = buffers.observed[slot].tolist()
    for column, value in ((SATURATED, entry.saturated), (DEVIATION, entry.deviation), (GAUSSIAN, entry.gaussian)):
        if not math.isnan(value):
            columns[column] = value
    columns[CLIP] = float(entry.clip.amax())
    buffers.observed[slot].copy_(torch.tensor(columns, dtype=torch.float32))
    if buffers.tracked is not None:
        _track(buffers.tracked[slot], entry.clip, bool(buffers.seen[slot]), entry.momentum)
    buffers.seen[slot] = 1.0


def _track(tracked: Tensor, clip: Tensor, seen: bool, momentum: float) -> None:
    """Exponential average of the clips seen in training, for eval."""
    entries = _fitting(clip, tracked)
    if seen:
        tracked.mul_(1.0 - momentum).add_(entries * momentum)
    else:
        tracked.copy_(entries)


def _fitting(clip: Tensor, row: Tensor) -> Tensor:
    """Scales per sample have no fixed shape: of those the largest clip is kept."""
    entries = clip.reshape(-1)
    return entries if entries.numel() == row.numel() else entries.amax()
