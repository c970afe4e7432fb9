# SPDX-License-Identifier: Apache-2.0
"""Guarded calls of the fused block's passes, of the arithmetic between them, and of a detector's operators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from byteback.ops.backends.cpu import library as native_library
from guard.calls_products import ACTIVATIONS, STORED, batch_structs, forward_pass, residual_of
from guard.memory import Arena
from guard.shapes import ROWS

library: Any = native_library.native
int8, int64, uint8, float64 = torch.int8, torch.int64, torch.uint8, torch.float64
RULE = {"threshold": 0.3, "keep": 1.0 - 0.8, "add": 0.8}


def channel_stats(arena: Arena, path: int, threads: int) -> None:
    for (rows, channels), kind in itertools.product(ROWS, range(2)):
        library.channel_stats(
            path,
            rows=rows,
            channels=channels,
            x=arena.floats(rows * channels, dtype=STORED[kind]),
            kind=kind,
            total=arena.room(channels, float64),
            squares=arena.room(channels, float64),
            low=arena.room(channels),
            high=arena.room(channels),
            threads=threads,
        )


GATES = 1 + max(row.gate for row in ACTIVATIONS)


def normalize_peak(arena: Arena, path: int, threads: int) -> None:
    for (rows, channels), activation, number in itertools.product(ROWS, range(len(ACTIVATIONS)), range(3)):
        library.normalize_peak(
            path,
            forward_pass(rows, channels, activation, x=(rows + activation) % 2),
            x=arena.floats(rows * channels, dtype=STORED[(rows + activation) % 2]),
            a=arena.floats(channels),
            b=arena.floats(channels),
            **residual_of(arena, rows * channels, number),
            peak=arena.room(1),
            threads=threads,
        )


def normalize(arena: Arena, path: int, threads: int) -> None:
    for number, ((rows, channels), activation, kind) in enumerate(itertools.product(ROWS, range(len(ACTIVATIONS)), range(3))):
        count = rows * channels
        wider = channels + (5 if number % 4 == 0 else 0)
        there = (rows - 1) * wider + channels
        library.normalize(
            path,
            forward_pass(rows, channels, activation, kept=kind, pitch=wider, x=number % 2, residual=number // 2 % 2),
            x=arena.floats(count, STORED[number % 2]),
            a=arena.floats(channels),
            b=arena.floats(channels),
            **residual_of(arena, count, number % 7, number // 2 % 2),
            clip=arena.positive(1),
            values=arena.room(there, int8),
            scale=arena.room(1),
            counts=arena.room(2, int64),
            output=arena.room(there),
            mask=0 if ACTIVATIONS[activation].is_smooth else arena.room(rows * math.ceil(channels / 8), uint8),
            **_room_for(arena, count, channels, kind),
            threads=threads,
        )


def _room_for(arena: Arena, count: int, channels: int, kind: int) -> dict[str, int]:
    """Where x is stored: nowhere, as bfloat16, as int8 by a step and a centre."""
    if kind == 0:
        return {"kept": 0, "step": 0, "centre": 0}
    if kind == 1:
        return {"kept": arena.room(count, torch.bfloat16), "step": 0, "centre": 0}
    return {"kept": arena.room(count, int8), "step": arena.positive(channels), "centre": arena.floats(channels)}


def pack_norm(arena: Arena, path: int, threads: int) -> None:
    for (rows, channels), kind in itertools.product(ROWS, (1, 2)):
        for stored, dtype in enumerate(STORED):
            count, forward = rows * channels, forward_pass(rows, channels, 0, kept=kind, x=stored)
            x = arena.floats(count, dtype=dtype)
            library.pack_norm(path, forward, x=x, **_room_for(arena, count, channels, kind), threads=threads)


def normalize_batch(arena: Arena, path: int, threads: int) -> None:
    for number, (rows, channels) in enumerate(ROWS * len(ACTIVATIONS)):
        stored = (number + number // 6) % 2
        structs = batch_structs(arena, rows, channels, arena.floats(rows * channels, STORED[stored]), number, stored)
        library.normalize_batch(path, *structs, threads)


def _backwards(arena: Arena) -> Iterator[tuple[Any, int, int, torch.dtype]]:
    """The library's Backward with rows, channels and how gm is stored: every gate, and every kind of x and g by turns."""
    for number, ((rows, channels), gate) in enumerate(itertools.product(ROWS, range(GATES))):
        kind = (number + number // 6) % 3
        count = rows * channels
        backward = library.Backward(
            rows=rows,
            channels=channels,
            gate=gate,
            kept=kind,
            g_kind=number % 2,
            g=arena.floats(count, STORED[number % 2]),
            x=arena.int8(count) if kind == 2 else arena.floats(count, dtype=torch.bfloat16 if kind else torch.float32),
            step=arena.positive(channels) if kind == 2 else 0,
            centre=arena.floats(channels) if kind == 2 else 0,
            mask=arena.bytes_(rows * math.ceil(channels / 8)) if gate == 1 else 0,
            **{name: arena.floats(channels) for name in ("a", "b", "p", "q", "r")},
        )
        # Of a mask gm has the dtype of g; a smooth gate, from 4 on, multiplies.
        yield backward, rows, channels, torch.float32 if gate >= 4 else STORED[number % 2]


def normalize_grad_sums(arena: Arena, path: int, threads: int) -> None:
    for backward, rows, channels, masked in _backwards(arena):
        to = {name: arena.room(channels, float64) for name in ("total", "dot", "squares")}
        library.normalize_grad_sums(path, backward, **to, masked=arena.room(rows * channels, masked), threads=threads)


def add_waiting(arena: Arena, path: int, threads: int) -> None:
    for (rows, channels), masked, kind in itertools.product(ROWS, (False, True), (0, 1)):
        count = rows * channels
        mask = arena.bytes_(rows * math.ceil(channels / 8)) if masked else 0
        given = {"g": arena.floats(count, STORED[kind]), "mask": mask, "x": arena.floats(count), "dx": arena.room(count)}
        library.add_waiting(path, rows=rows, channels=channels, g_kind=kind, **given, threads=threads)


def normalize_grad(arena: Arena, path: int, threads: int) -> None:
    for backward, rows, channels, _ in _backwards(arena):
        library.normalize_grad(path, backward, dx=arena.room(rows * channels), threads=threads)


def _rooms(arena: Arena, count: int, clips: int) -> dict[str, int]:
    """Where one int8 copy is written."""
    return {
        "values": arena.room(count, int8),
        "scale": arena.room(clips),
        "counts": arena.room(2, int64),
        "peak": arena.room(1),
    }


def normalize_grad_quantize(arena: Arena, path: int, threads: int) -> None:
    for backward, rows, channels, _ in _backwards(arena):
        to = _rooms(arena, rows * channels, 1)
        library.normalize_grad_quantize(path, backward, clip=arena.positive(1), key=arena.key(), **to, threads=threads)


def normalize_grad_batch(arena: Arena, path: int, threads: int) -> None:
    for backward, rows, channels, masked in _backwards(arena):
        library.normalize_grad_batch(
            path,
            backward,
            eps=1e-5,
            a=arena.floats(channels),
            mean=arena.wide(channels),
            invstd=arena.wide(channels),
            **{name: arena.room(channels) for name in ("q", "r", "grad_gamma", "grad_beta")},
            masked=arena.room(rows * channels, masked),
            dx_total=arena.room(channels, float64),
            dx_squares=arena.room(channels, float64),
            threads=threads,
        )


def normalize_grad_tails(arena: Arena, path: int, threads: int) -> None:
    for backward, _, channels, _ in _backwards(arena):
        given = {"each": arena.positive(channels), "all": arena.positive(1), "peak": arena.room(channels)}
        to = {"over_each": arena.room(channels, int64), "over_all": arena.room(channels, int64)}
        library.normalize_grad_tails(path, backward, **given, **to, threads=threads)


def tail_count_pair(arena: Arena, path: int, threads: int) -> None:
    for rows, channels in ROWS:
        given = {"x": arena.floats(rows * channels), "each": arena.positive(channels), "all": arena.positive(1)}
        to = {"over_each": arena.room(channels, int64), "over_all": arena.room(channels, int64)}
        library.tail_count_pair(path, rows=rows, channels=channels, **given, **to, threads=threads)


def _pair(arena: Arena, count: int, channels: int) -> tuple[Any, Any]:
    return library.QuantizedTo(**_rooms(arena, count, 1)), library.QuantizedTo(**_rooms(arena, count, channels))


def quantize_pair(arena: Arena, path: int, threads: int) -> None:
    for (rows, channels), noisy in itertools.product(ROWS, (False, True)):
        given = {"x": arena.floats(rows * channels), "clip": arena.positive(1), "clips": arena.positive(channels)}
        pair, key = _pair(arena, rows * channels, channels), arena.key() if noisy else 0
        library.quantize_pair(path, *pair, rows=rows, channels=channels, **given, key=key, threads=threads)


def normalize_grad_quantize_pair(arena: Arena, path: int, threads: int) -> None:
    for backward, rows, channels, _ in _backwards(arena):
        given = {"clip": arena.positive(1), "clips": arena.positive(channels), "key": arena.key()}
        pair = _pair(arena, rows * channels, channels)
        library.normalize_grad_quantize_pair(path, backward, *pair, **given, threads=threads)


def _rule(arena: Arena, channels: int, first: bool) -> Any:
    before_one, before_each = (0, 0) if first else (arena.positive(1), arena.positive(channels))
    return library.MagnitudeClips(**RULE, before_one=before_one, before_each=before_each)


def magnitude_clips(arena: Arena, path: int, threads: int) -> None:
    for (rows, channels), first in itertools.product(ROWS, (True, False)):
        library.magnitude_clips(
            path,
            _rule(arena, channels, first),
            rows=rows,
            channels=channels,
            x=arena.floats(rows * channels),
            peak=arena.positive(channels),
            total=arena.wide(channels),
            squares=arena.wide(channels),
            clip=arena.room(1),
            clips=arena.room(channels),
            threads=threads,
        )


def gradient_pair(arena: Arena, path: int, threads: int) -> None:
    for number, (backward, rows, channels, _) in enumerate(_backwards(arena)):
        is_wanted = number % 3 > 0
        library.gradient_pair(
            path,
            backward,
            _rule(arena, channels, number % 2 == 1),
            total=arena.wide(channels),
            squares=arena.wide(channels),
            key=arena.key(),
            clip=arena.room(1),
            clips=arena.room(channels),
            values=arena.room(rows * channels, int8) if is_wanted else 0,
            scale=arena.room(1) if is_wanted else 0,
            values_each=arena.room(rows * channels, int8),
            scale_each=arena.room(channels),
            threads=threads,
        )


def normalize_grad_quantize_by_ratio(arena: Arena, path: int, threads: int) -> None:
    for number, (backward, rows, channels, _) in enumerate(_backwards(arena)):
        to = library.QuantizedTo(**_rooms(arena, rows * channels, channels))
        key, clips = arena.key() if number % 2 else 0, arena.room(channels)
        library.normalize_grad_quantize_by_ratio(path, backward, to, ratio=0.5, key=key, clips=clips, threads=threads)


def norm_invstd(arena: Arena, path: int, threads: int) -> None:
    for _, channels in ROWS:
        invstd = arena.room(channels, float64)
        library.norm_invstd(channels=channels, eps=1e-5, var=arena.positive(channels), invstd=invstd)


def norm_coefficients(arena: Arena, path: int, threads: int) -> None:
    for _, channels in ROWS:
        library.norm_coefficients(
            channels=channels,
            count=9,
            eps=1e-5,
            momentum=0.1,
            floor=True,
            ceiling=6.0,
            total=arena.wide(channels),
            squares=arena.wide(channels),
            **{name: arena.floats(channels) for name in ("low", "high", "gamma", "beta", "bias", "running_mean")},
            running_var=arena.positive(channels),
            a=arena.room(channels),
            b=arena.room(channels),
            mean=arena.room(channels, float64),
            invstd=arena.room(channels, float64),
            peak=arena.room(1),
        )


def norm_folded(arena: Arena, path: int, threads: int) -> None:
    for _, channels in ROWS:
        given = {name: arena.floats(channels) for name in ("mean", "gamma", "beta", "bias")}
        to = {"a": arena.room(channels), "b": arena.room(channels)}
        library.norm_folded(channels=channels, eps=1e-5, var=arena.positive(channels), **given, **to)


def norm_gradient(arena: Arena, path: int, threads: int) -> None:
    for _, channels in ROWS:
        given = {name: arena.wide(channels) for name in ("mean", "invstd", "total", "dot")}
        to = {name: arena.room(channels) for name in ("q", "r", "grad_gamma", "grad_beta")}
        library.norm_gradient(channels=channels, count=9, a=arena.floats(channels), **given, **to)


def gradient_sums(arena: Arena, path: int, threads: int) -> None:
    for _, channels in ROWS:
        factors = {name: arena.floats(channels) for name in ("a", "q", "r")}
        wide = {name: arena.wide(channels) for name in ("mean", "invstd", "total", "dot", "squares")}
        to = {"dx_total": arena.room(channels, float64), "dx_squares": arena.room(channels, float64)}
        library.gradient_sums(channels=channels, count=9, eps=1e-5, **factors, **wide, **to)


def nms(arena: Arena, path: int, threads: int) -> None:
    for count in (1, 7, 65):
        corner = torch.rand(count, 2, generator=torch.Generator().manual_seed(count)) * 9
        boxes = arena.put(torch.cat([corner, corner + 4], 1))
        library.nms(count=count, boxes=boxes, threshold=0.5, kept=arena.room(count, uint8))


def _rois(channels: int, samples: int, aligned: bool) -> tuple[Any, torch.Tensor]:
    """A map of 2 images, 7 x 9, and boxes within it, across its edges, outside of it and of no size."""
    boxes = [(0, 1, 1, 5, 6), (1, -3, -2, 4, 3), (0, 6, 5, 12, 11), (1, 20, 20, 30, 30), (1, 3, 3, 3, 3), (0, 8, 6, 9, 7)]
    sizes = {"batch": 2, "channels": channels, "size": (7, 9), "rois": len(boxes), "bins": (3, 5)}
    shape = library.RoiShape(**sizes, scale=0.9, samples=samples, aligned=aligned)
    return shape, torch.tensor(boxes, dtype=torch.float32)


def roi_align(arena: Arena, path: int, threads: int) -> None:
    for channels, samples, aligned in itertools.product((1, 5, 33), (0, 2), (False, True)):
        shape, boxes = _rois(channels, samples, aligned)
        source, result = arena.floats(2 * 7 * 9 * channels), arena.room(len(boxes) * 3 * 5 * channels)
        library.roi_align(shape, source=source, rois=arena.put(boxes), result=result, threads=threads)


def roi_align_grad(arena: Arena, path: int, threads: int) -> None:
    for channels, samples, aligned in itertools.product((1, 5, 33), (0, 2), (False, True)):
        shape, boxes = _rois(channels, samples, aligned)
        source, result = arena.floats(len(boxes) * 3 * 5 * channels), arena.room(2 * 7 * 9 * channels)
        library.roi_align_grad(shape, source=source, rois=arena.put(boxes), result=result, threads=threads)


CALLS = [
    channel_stats,
    normalize_peak,
    normalize,
    pack_norm,
    normalize_batch,
    add_waiting,
    normalize_grad_sums,
    normalize_grad,
    normalize_grad_quantize,
    normalize_grad_batch,
    normalize_grad_tails,
    tail_count_pair,
    quantize_pair,
    normalize_grad_quantize_pair,
    magnitude_clips,
    gradient_pair,
    normalize_grad_quantize_by_ratio,
    norm_coefficients,
    norm_folded,
    norm_invstd,
    norm_gradient,
    gradient_sums,
    nms,
    roi_align,
    roi_align_grad,
]
