# SPDX-License-Identifier: Apache-2.0
"""A quantizer's step on the native library: the reference's, where a few calls take the place of many small ones.

max|x|              clip and integers in one call
what is written     a dozen operations on tensors of a few numbers are one call, where the buffers are as they were made
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback import ops
from byteback.ops.backends.cpu import library
from byteback.ops.backends.cpu.addresses import flat, is_flat, known
from byteback.ops.backends.reference.quantizer import Entry, Made, Steps
from byteback.ops.dispatch import is_plain
from byteback.ops.programs import Maximum
from byteback.ops.quantizer import COLUMNS, Choice, Gradient, Memory, State, floats_of

_library: Any = library.native
_float32, _int64 = torch.float32, torch.int64


class NativeSteps(Steps):
    """The reference's steps with fewer calls."""

    def _memory(self, state: State, settings: Any, slot: int, now: int) -> Memory:
        rule = settings.rule
        # tolist() of eight numbers is faster than taking one of them as a tensor.
        known = rule.clip.looks_back and bool(state.initialized.tolist()[slot])
        updated_at = state.updated_at.tolist()[slot] if known else 0
        return Memory(state.clip[slot], known, updated_at, now, rule.rounding == "stochastic", settings.axis())

    def _made(self, x: Gradient, settings: Any, memory: Memory, key: Tensor | None) -> Made:
        if type(settings.rule.clip.program()) is not Maximum:
            return super()._made(x, settings, memory, key)
        values, scale, peak, counts = ops.quantize_max(floats_of(x), settings.axis(), key)
        saturated, nonfinite = counts.tolist()
        return Made(values, scale, Choice(peak, remember=peak), peak, saturated / max(values.numel(), 1), nonfinite, peak)

    def write(self, state: State, slot: int, entry: Entry) -> None:
        clip, remember, searched, iteration, saturated, deviation, own, momentum = entry
        kept = clip if remember is None else remember
        plain = is_plain((clip,) if kept is clip else (clip, kept)) and clip.dtype is _float32 and kept.dtype is _float32
        if not plain or len(own) > 1 or not _is_ready(state, slot):
            super().write(state, slot, entry)
            return
        clip = clip.contiguous()
        kept = clip if remember is None else kept.contiguous()
        counts = clip.numel(), kept.numel()
        _library.write_ledger(
            **_rows(state, slot, remember is not None, searched),
            used=flat(clip, _float32, counts[0]),
            used_count=counts[0],
            remembered=flat(kept, _float32, counts[1]),
            remembered_count=counts[1],
            iteration=iteration,
            saturated=saturated,
            deviation=deviation,
            own=own[0] if own else _NOT_MEASURED,
            momentum=momentum,
        )


_NOT_MEASURED = float("nan")


def _is_ready(state: State, slot: int) -> bool:
    """Whether the native library can write to row `slot`: load_state_dict(assign=True) may have put other tensors there."""
    clip, initialized, updated_at, observed, seen, tracked, *_ = state
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


def _rows(state: State, slot: int, remembers: bool, searched: bool) -> dict[str, int]:
    """The addresses of the slot's numbers, 0 for those that stay as they are."""
    clip, initialized, updated_at, observed, seen, tracked, *_ = state
    entries = clip.shape[1]
    row, byte = slot * entries * 4, slot * 4
    return {
        "clip": known(clip) + row if remembers else 0,
        "initialized": known(initialized) + byte,
        "updated_at": known(updated_at) + 2 * byte if searched else 0,
        "observed": known(observed) + COLUMNS * byte,
        "tracked": 0 if tracked is None else known(tracked) + row,
        "seen": known(seen) + byte,
        "channels": entries,
    }


STEPS = NativeSteps()
