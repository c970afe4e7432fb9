# SPDX-License-Identifier: Apache-2.0
"""A held clip and its search by a grid (recipes/unified.py, recipes/direction_search.py) in device memory.

    quantize with the held clip ─ refit ─ quantize if refitted ─ decide ─ three grids ─ quantize if searched

Every kernel is launched in every step. One that is not needed reads its flag and ends: nine of ten steps search nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.ops.backends.triton import block_grad, packing
from byteback.ops.backends.triton.block import empty_last
from byteback.ops.backends.triton.constants import float64
from byteback.ops.backends.triton.kernels import ledger
from byteback.ops.backends.triton.kernels import search as kernels
from byteback.ops.backends.triton.launch import launch
from byteback.ops.backends.triton.quantize import absmax, laid, new_counts, quantize_into
from byteback.ops.backends.triton.statistics import cosines, fold_channels
from byteback.ops.contract.limits import QMAX
from byteback.ops.contract.rounded_once import divided_by
from byteback.ops.programs import Held
from byteback.ops.quantizer import BlockGradient, Gradient, Moment, State
from byteback.ops.types import QTensor

KNOWN, SEARCHES, OBSERVES, CHANGES, AGAIN, NEAR, COARSE, READS = range(8)
"""Numbers of a schedule: int32, 0 or 1."""

_COARSE, _FINE = 0.65, 8  # as in recipes/direction_search.py, which a test compares
_NEAR = (0.7, 0.84, 1.0, 1.2, 1.43)


class Made(NamedTuple):
    """A quantized tensor, the clip used, what its rule remembers, the schedule, and the float tensor if it may be measured."""

    q: QTensor
    clip: Tensor
    remembered: Tensor
    flags: Tensor
    floats: Callable[[], Tensor] | None
    own: Any = None  # a diagnostic of the rule, in device memory


def schedule(state: State, settings: Any, moment: Moment, period: int, holds: bool = False) -> Tensor:
    """Returns what this step does, in device memory. Without `holds` nothing is searched and the memory is written."""
    flags = torch.empty(8, dtype=torch.int32, device=state.clip.device)
    arguments = (state.initialized, state.updated_at, moment.iteration, flags, moment.slot, period, settings.observe_every)
    launch(ledger.due, (1,), *arguments, HOLDS=holds, warps=1)
    return flags


def runs(rule: Any, axis: int) -> bool:
    """Whether the kernels can search for this rule: by a grid that fits, and per channel only by ratios."""
    return rule.solver == "grid" and len(_coarse(rule.lowest)) <= 8 and (axis == -1 or rule.hold == "ratio")


def _coarse(lowest: float) -> list[float]:
    ratios = [1.0]
    while ratios[-1] * _COARSE > lowest:
        ratios.append(ratios[-1] * _COARSE)
    return ratios


@functools.lru_cache(maxsize=256)
def _list(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Returns up to 16 float64 numbers in device memory, filled up with 0."""
    return torch.tensor((*values, *(0.0,) * (16 - len(values))), dtype=torch.float64, device=device)


class _Pass:
    """Quantizes a gradient again and again into the same tensors. The clip and the counts are in device memory."""

    def __init__(self, x: Gradient, axis: int, used: Tensor, key: Tensor | None, packs: bool) -> None:
        self.x, self.axis, self.key = x, axis, key
        like = x.parts.g if isinstance(x, BlockGradient) else x
        shape = [like.shape[dim] if dim == axis else 1 for dim in range(like.dim())]
        self.used = used.reshape(shape).contiguous()
        self.scale = torch.empty_like(self.used)
        self.counts, self.peak = new_counts(like)
        self.source = None if isinstance(x, BlockGradient) else laid(x, packs)
        self.packed = packing.new_packed(like, packs) if self.source is None else self.source.packed
        self.values = empty_last(like, torch.int8) if self.source is None else torch.empty_like(self.source.x, dtype=torch.int8)

    def run(self, when: Tensor | None = None) -> None:
        if self.source is None:
            copy = self.values, self.used, self.scale, self.counts
            which: dict[str, Any] = {"one" if self.axis == -1 else "each": copy}
            which |= {"peak": self.peak, "key": self.key, "when": when, "packed": self.packed}
            block_grad.run_gradient(self.x.parts, **which)  # type: ignore[union-attr]
        else:
            by = 0 if self.axis == -1 else 1
            quantize_into(self.source, self.used, by, self.key, self.values, self.scale, self.counts, self.peak, when)

    def floats(self, when: Tensor) -> Tensor:
        """Returns the float tensor; if the number `when` is 0, that of a block has no values."""
        if self.source is not None:
            return self.source.x
        out = empty_last(self.values, torch.float32)
        block_grad.run_gradient(self.x.parts, out=out, when=when)  # type: ignore[union-attr]
        return out

    def made(self) -> QTensor:
        made = QTensor(self.values, self.scale, self.counts, self.peak.view(torch.float32))
        return packing.with_packed(made, self.packed)


def held(x: Gradient, state: State, settings: Any, key: Tensor | None, moment: Moment, program: Held) -> Made:
    """Quantizes with the held clip, or searches one."""
    rule, axis, slot = settings.rule.clip, settings.axis(), moment.slot
    device, row = state.clip.device, state.clip[slot]
    flags = schedule(state, settings, moment, program.period, holds=True)
    peak = None
    if axis == 1:
        peak = block_grad.channel_peaks(x.parts) if isinstance(x, BlockGradient) else absmax(x, 1)
        passes = _Pass(x, axis, peak * row[0], key, settings.packs)
    else:
        passes = _Pass(x, axis, row[1:].clone(), key, settings.packs)
    passes.run()
    largest = passes.peak.view(torch.float32)
    peak = largest.reshape(1) if peak is None else peak.reshape(-1)
    remembered, counts, entries = row.clone(), passes.counts, state.clip.shape[1]
    if axis == -1 and program.band:
        band = _list((1.0 / program.band, program.band), device)
        arguments = (state.clip, passes.used, remembered, counts, largest, flags, band, slot, entries)
        launch(kernels.refit, (1,), *arguments, BANDED=True, warps=1)
        passes.run(flags[AGAIN:])
    work = torch.zeros(40, dtype=torch.float64, device=device)
    tried = torch.zeros(16, dtype=torch.float32, device=device)
    limits, numel = _list((program.saturated, rule.lowest), device), passes.values.numel()
    places = (state.clip, counts, largest, flags, work, tried, limits, _list(_NEAR, device))
    launch(kernels.decide, (1,), *places, slot, entries, numel, warps=1)
    floats = passes.floats(flags[READS:])
    _grids(floats, peak, flags, work, tried, rule, settings.rule.rounding == "stochastic")
    c = peak.numel()
    places = (flags, work, peak, largest, passes.used, remembered, counts, moment.iteration)
    size = 1 << (max(c, 2) - 1).bit_length()
    after_zero = bool(rule.search_after_zero)
    launch(kernels.accept, (1,), *places, settings.observe_every, c, AFTER_ZERO=after_zero, B=size, warps=1)
    passes.run(flags[AGAIN:])
    return Made(passes.made(), passes.used, remembered, flags, lambda: floats)


def _grids(x: Tensor, peak: Tensor, flags: Tensor, work: Tensor, tried: Tensor, rule: Any, stochastic: bool) -> None:
    """Tries the small grid around the last ratio, the coarse grid and the fine one, each if the one before requests it."""
    device = x.device
    tie, step, lowest = (float64(value, device) for value in (rule.tie or 0.0, _COARSE, rule.lowest))
    terms = _terms(x, peak, tried[: len(_NEAR)], stochastic, flags[NEAR:])
    coarse = _coarse(rule.lowest)
    launch(kernels.judge_near, (1,), terms, flags, work, tried, _list(tuple(coarse), device), tie, warps=1)
    terms = _terms(x, peak, tried[: len(coarse)], stochastic, flags[COARSE:])
    launch(kernels.judge_coarse, (1,), terms, flags, work, tried, tie, step, lowest, FINE=_FINE, warps=1)
    terms = _terms(x, peak, tried[:_FINE], stochastic, flags[COARSE:])
    launch(kernels.judge_fine, (1,), terms, flags, work, tie, warps=1)


def _terms(x: Tensor, peak: Tensor, ratios: Tensor, stochastic: bool, when: Tensor) -> Tensor:
    """Returns the terms of the cosine for each ratio, (ratios, 3) in a row (direction_search.py: Curve.deviations)."""
    clips = peak.reshape(1, -1) * ratios.reshape(-1, 1)
    own = cosines(x, clips, stochastic, when)
    if peak.numel() > 1:
        scale = divided_by(clips, float(QMAX)).double()
        own = own * torch.stack([scale, scale * scale, torch.ones_like(scale)], dim=1)
    return fold_channels(own.reshape(-1, x.shape[1]), when)
