# SPDX-License-Identifier: Apache-2.0
"""What a quantizer writes down after each tensor: one row of its buffers, for one call slot.

In PyTorch these are a dozen operations on tensors of a few numbers, more time than the kernel of a small layer takes; the
native library does the same in one call where the buffers are dense, on the CPU, and of the dtypes that they were made with.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.ops.backends import paths
from byteback.ops.backends.cpu import library
from byteback.ops.backends.cpu.addresses import flat, is_flat, known
from byteback.ops.dispatch import is_plain

SATURATED, DEVIATION, GAUSSIAN, CLIP, WORST_CHANNEL = range(5)  # columns of `observed`
XQ, QQ, XX, MEASURED, NONFINITE = range(5)  # columns of `unshared`

_COLUMNS = 5

_library: Any = library.native
_float32, _int64 = torch.float32, torch.int64


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
    plain = is_plain((clip,) if kept is clip else (clip, kept)) and clip.dtype is _float32 and kept.dtype is _float32
    if paths.number() is None or not plain or not _is_ready(buffers, slot):
        _write(buffers, slot, entry)
        return
    clip = clip.contiguous()
    kept = clip if remember is None else kept.contiguous()
    counts = clip.numel(), kept.numel()
    _library.write_ledger(
        _rows(buffers, slot, remember is not None, searched),
        (flat(clip, _float32, counts[0]), counts[0], flat(kept, _float32, counts[1]), counts[1], iteration),
        columns,
        momentum,
    )


def write_terms(buffers: Buffers, slot: int, terms: list[float]) -> None:
    """Notes x·x̂, x̂·x̂ and x·x of a tensor, which several ranks add up before their optimizers step."""
    buffers.unshared[slot, :NONFINITE].copy_(torch.tensor([*terms, 1.0], dtype=torch.float64, device=buffers.unshared.device))


def write_nonfinite(buffers: Buffers) -> None:
    """Notes a tensor with NaN or Inf."""
    buffers.nonfinite.add_(1)
    buffers.unshared[0, NONFINITE] += 1.0


def _is_ready(buffers: Buffers, slot: int) -> bool:
    """Whether the native library can write to row `slot`: load_state_dict(assign=True) may have put other tensors there."""
    clip, initialized, updated_at, observed, seen, tracked, *_ = buffers
    slots, channels = clip.shape
    return (
        0 <= slot < slots
        and is_flat(clip, _float32, slots * channels)
        and is_flat(initialized, _float32, slots)
        and is_flat(updated_at, _int64, slots)
        and is_flat(observed, _float32, slots * _COLUMNS)
        and is_flat(seen, _float32, slots)
        and (tracked is None or is_flat(tracked, _float32, slots * channels))
    )


def _rows(buffers: Buffers, slot: int, remembers: bool, searched: bool) -> tuple[int, ...]:
    """The addresses of the slot's numbers, 0 for those that stay as they are."""
    clip, initialized, updated_at, observed, seen, tracked, *_ = buffers
    channels = clip.shape[1]
    row, byte = slot * channels * 4, slot * 4
    return (
        known(clip) + row if remembers else 0,
        known(initialized) + byte,
        known(updated_at) + 2 * byte if searched else 0,
        known(observed) + _COLUMNS * byte,
        0 if tracked is None else known(tracked) + row,
        known(seen) + byte,
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
    buffers.observed[slot].copy_(torch.tensor(columns, dtype=torch.float32, device=buffers.observed.device))
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
