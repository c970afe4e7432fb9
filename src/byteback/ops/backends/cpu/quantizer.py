# SPDX-License-Identifier: Apache-2.0
"""The step of a quantizer in the native library: that of the reference, with fewer calls.

max|x|    clip and integers in one call
state     one call instead of a dozen operations on small tensors, unless the buffers were replaced
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback import ops
from byteback.ops.backends import paths
from byteback.ops.backends.cpu import ledger, library
from byteback.ops.backends.cpu.addresses import flat
from byteback.ops.backends.cpu.block_step import make_site
from byteback.ops.backends.cpu.prediction import make_prediction
from byteback.ops.backends.reference.quantizer import Entry, Made, Steps, made_of
from byteback.ops.block_step import BlockShape, PredictionShape
from byteback.ops.dispatch import is_plain
from byteback.ops.programs import Maximum
from byteback.ops.quantizer import Choice, Gradient, Memory, State, floats_of
from byteback.ops.types import QTensor

_library: Any = library.native
_float32 = torch.float32


class NativeSteps(Steps):
    """The steps of the reference with fewer calls."""

    def block_site(self, shape: BlockShape, settings: tuple[Any, ...], for_tensor: bool, slot: int) -> Any:
        return make_site(library.NUMBERS[paths.current()], shape, settings, for_tensor, slot)

    def block_prediction(self, shape: PredictionShape) -> Any:
        return make_prediction(library.NUMBERS[paths.current()], shape)

    def _memory(self, state: State, settings: Any, slot: int, now: int) -> Memory:
        rule = settings.rule
        # tolist() of eight numbers is faster than indexing one of them as a tensor.
        known = rule.clip.looks_back and bool(state.initialized.tolist()[slot])
        updated_at = state.updated_at.tolist()[slot] if known else 0
        return Memory(state.clip[slot], known, updated_at, now, rule.rounding == "stochastic", settings.axis())

    def _made(self, x: Gradient, settings: Any, memory: Memory, key: Tensor | None) -> Made:
        if type(settings.rule.clip.program()) is not Maximum:
            return super()._made(x, settings, memory, key)
        values, scale, peak, counts = ops.quantize_max(floats_of(x), settings.axis(), key)
        return made_of(QTensor(values, scale, counts, peak), Choice(peak, remember=peak), peak)

    def fresh(self, x: Tensor, iteration: Tensor, settings: Any, flags: Tensor | None = None) -> QTensor:
        if type(settings.rule.clip.program()) is Maximum:
            values, scale, peak, counts = ops.quantize_max(x, settings.axis(), None)
            if not counts.tolist()[1]:
                return QTensor(values, scale, counts, peak)
        return super().fresh(x, iteration, settings, flags)

    def write(self, state: State, slot: int, entry: Entry) -> None:
        clip, remember, searched, iteration, saturated, deviation, own, momentum = entry
        kept = clip if remember is None else remember
        plain = is_plain((clip,) if kept is clip else (clip, kept)) and clip.dtype is _float32 and kept.dtype is _float32
        if not plain or len(own) > 1 or not ledger.is_ready(state[:6], slot):
            super().write(state, slot, entry)
            return
        clip = clip.contiguous()
        kept = clip if remember is None else kept.contiguous()
        counts = clip.numel(), kept.numel()
        rows = ledger.row(state[:6], slot)
        if remember is None:
            rows["clip"] = 0
        if not searched:
            rows["updated_at"] = 0
        _library.write_ledger(
            **rows,
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


STEPS = NativeSteps()
