# SPDX-License-Identifier: Apache-2.0
"""Guarded calls of the fused block's passes, of the arithmetic between them, and of a detector's operators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from byteback.ops.backends.cpu import library as native_library
from guard.calls_products import batch_numbers
from guard.memory import Arena
from guard.shapes import ROWS

library: Any = native_library.native
int8, int64, uint8, float64 = torch.int8, torch.int64, torch.uint8, torch.float64
RULE = (0.3, 1.0 - 0.8, 0.8)


def _residuals(arena: Arena, count: int) -> Iterator[tuple[int, int]]:
    yield 0, 0
    yield arena.floats(count), 0
    yield arena.int8(count), arena.positive(1)


def channel_stats(arena: Arena, path: int, threads: int) -> None:
    for rows, channels in ROWS:
        to = arena.room(channels, float64), arena.room(channels, float64), arena.room(channels), arena.room(channels)
        library.channel_stats(path, rows, channels, arena.floats(rows * channels), *to, threads)


def normalize_peak(arena: Arena, path: int, threads: int) -> None:
    for rows, channels in ROWS:
        for activation, residual in itertools.product(range(5), _residuals(arena, rows * channels)):
            given = arena.floats(rows * channels), arena.floats(channels), arena.floats(channels)
            library.normalize_peak(path, rows, channels, *given, *residual, activation, arena.room(1), threads)


def normalize(arena: Arena, path: int, threads: int) -> None:
    for number, ((rows, channels), activation, kind) in enumerate(itertools.product(ROWS, range(5), range(3))):
        count = rows * channels
        residual = list(_residuals(arena, count))[number % 7 % 3]
        wider = channels + (5 if number % 4 == 0 else 0)
        there = (rows - 1) * wider + channels
        given = arena.floats(count), arena.floats(channels), arena.floats(channels)
        mask = 0 if activation > 2 else arena.room(rows * math.ceil(channels / 8), uint8)
        to = arena.room(there, int8), arena.room(1), arena.room(2, int64), arena.room(there), mask
        kept = _room_for(arena, count, channels, kind)
        library.normalize(path, rows, channels, *given, *residual, activation, arena.positive(1), *to, *kept, wider, threads)


def _room_for(arena: Arena, count: int, channels: int, kind: int) -> tuple[int, int, int, int]:
    """Where x is kept: nowhere, as bfloat16, as int8 by a step and a centre."""
    if kind == 0:
        return 0, 0, 0, 0
    if kind == 1:
        return arena.room(count, torch.bfloat16), 1, 0, 0
    return arena.room(count, int8), 2, arena.positive(channels), arena.floats(channels)


def pack_norm(arena: Arena, path: int, threads: int) -> None:
    for (rows, channels), kind in itertools.product(ROWS, (1, 2)):
        kept = _room_for(arena, rows * channels, channels, kind)
        library.pack_norm(path, rows, channels, arena.floats(rows * channels), *kept, threads)


def normalize_batch(arena: Arena, path: int, threads: int) -> None:
    for number, (rows, channels) in enumerate(ROWS * 5):
        given = batch_numbers(arena, rows, channels, arena.floats(rows * channels), number)
        library.normalize_batch(path, *given, threads)


def _backwards(arena: Arena) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """BackwardNumbers of csrc/norm_numbers.h with rows and channels: every gate, and every kind of x by turns."""
    for number, ((rows, channels), gate) in enumerate(itertools.product(ROWS, range(6))):
        kind = (number + number // 6) % 3
        count = rows * channels
        x = arena.int8(count) if kind == 2 else arena.floats(count, dtype=torch.bfloat16 if kind else torch.float32)
        step, centre = (arena.positive(channels), arena.floats(channels)) if kind == 2 else (0, 0)
        mask = arena.bytes_(rows * math.ceil(channels / 8)) if gate == 1 else 0
        a, b, p, q, r = (arena.floats(channels) for _ in range(5))
        yield (rows, channels, arena.floats(count), x, kind, step, centre, a, b, mask, gate, p, q, r), rows, channels


def normalize_grad_sums(arena: Arena, path: int, threads: int) -> None:
    for numbers, rows, channels in _backwards(arena):
        to = (arena.room(channels, float64) for _ in range(3))
        library.normalize_grad_sums(path, numbers, *to, arena.room(rows * channels), threads)


def normalize_grad(arena: Arena, path: int, threads: int) -> None:
    for numbers, rows, channels in _backwards(arena):
        library.normalize_grad(path, numbers, arena.room(rows * channels), threads)


def normalize_grad_quantize(arena: Arena, path: int, threads: int) -> None:
    for numbers, rows, channels in _backwards(arena):
        to = arena.room(rows * channels, int8), arena.room(1), arena.room(2, int64), arena.room(1)
        library.normalize_grad_quantize(path, numbers, arena.positive(1), arena.key(), *to, threads)


def normalize_grad_batch(arena: Arena, path: int, threads: int) -> None:
    for numbers, rows, channels in _backwards(arena):
        norm = arena.floats(channels), arena.wide(channels), arena.wide(channels)
        to = [*(arena.room(channels) for _ in range(4)), arena.room(rows * channels)]
        to += [arena.room(channels, float64), arena.room(channels, float64)]
        library.normalize_grad_batch(path, numbers, norm, 1e-5, to, threads)


def normalize_grad_tails(arena: Arena, path: int, threads: int) -> None:
    for numbers, _, channels in _backwards(arena):
        to = arena.room(channels), arena.room(channels, int64), arena.room(channels, int64)
        library.normalize_grad_tails(path, numbers, arena.positive(channels), arena.positive(1), *to, threads)


def tail_count_pair(arena: Arena, path: int, threads: int) -> None:
    for rows, channels in ROWS:
        given = arena.floats(rows * channels), arena.positive(channels), arena.positive(1)
        to = arena.room(channels, int64), arena.room(channels, int64)
        library.tail_count_pair(path, rows, channels, *given, *to, threads)


def _pair_rooms(arena: Arena, count: int, channels: int) -> tuple[tuple[int, int], ...]:
    values = arena.room(count, int8), arena.room(count, int8)
    counts, peaks = (arena.room(2, int64), arena.room(2, int64)), (arena.room(1), arena.room(1))
    return values, (arena.room(1), arena.room(channels)), counts, peaks


def quantize_pair(arena: Arena, path: int, threads: int) -> None:
    for (rows, channels), noisy in itertools.product(ROWS, (False, True)):
        given = arena.floats(rows * channels), arena.positive(1), arena.positive(channels), arena.key() if noisy else 0
        library.quantize_pair(path, rows, channels, *given, *_pair_rooms(arena, rows * channels, channels), threads)


def normalize_grad_quantize_pair(arena: Arena, path: int, threads: int) -> None:
    for numbers, rows, channels in _backwards(arena):
        given = arena.positive(1), arena.positive(channels), arena.key()
        library.normalize_grad_quantize_pair(path, numbers, *given, *_pair_rooms(arena, rows * channels, channels), threads)


def magnitude_clips(arena: Arena, path: int, threads: int) -> None:
    for (rows, channels), first in itertools.product(ROWS, (True, False)):
        moments = arena.positive(channels), arena.wide(channels), arena.wide(channels)
        before = (0, 0) if first else (arena.positive(1), arena.positive(channels))
        clips = arena.room(1), arena.room(channels)
        library.magnitude_clips(path, rows, channels, arena.floats(rows * channels), moments, before, RULE, clips, threads)


def gradient_pair(arena: Arena, path: int, threads: int) -> None:
    for number, (numbers, rows, channels) in enumerate(_backwards(arena)):
        before = (0, 0) if number % 2 else (arena.positive(1), arena.positive(channels))
        (one, each), (scale, scales), *_ = _pair_rooms(arena, rows * channels, channels)
        clips, wanted = (arena.room(1), arena.room(channels)), number % 3 > 0
        sums = arena.wide(channels), arena.wide(channels)
        values, made = (one if wanted else 0, each), (scale if wanted else 0, scales)
        library.gradient_pair(path, numbers, sums, before, RULE, arena.key(), clips, values, made, threads)


def normalize_grad_quantize_by_ratio(arena: Arena, path: int, threads: int) -> None:
    for number, (numbers, rows, channels) in enumerate(_backwards(arena)):
        to = arena.room(channels), arena.room(rows * channels, int8), arena.room(channels), arena.room(2, int64), arena.room(1)
        library.normalize_grad_quantize_by_ratio(path, numbers, 0.5, arena.key() if number % 2 else 0, *to, threads)


def norm_invstd(arena: Arena, path: int, threads: int) -> None:
    for _, channels in ROWS:
        library.norm_invstd(channels, arena.positive(channels), 1e-5, arena.room(channels, float64))


def norm_coefficients(arena: Arena, path: int, threads: int) -> None:
    for _, channels in ROWS:
        sums = arena.wide(channels), arena.wide(channels)
        given = (channels, 9, *sums, *(arena.floats(channels) for _ in range(6)), arena.positive(channels))
        to = [arena.room(channels), arena.room(channels), arena.room(channels, float64), arena.room(channels, float64)]
        library.norm_coefficients(given, 1e-5, 0.1, True, 6.0, [*to, arena.room(1)])


def norm_folded(arena: Arena, path: int, threads: int) -> None:
    for _, channels in ROWS:
        given = (channels, arena.floats(channels), arena.positive(channels), *(arena.floats(channels) for _ in range(3)))
        library.norm_folded(given, 1e-5, arena.room(channels), arena.room(channels))


def norm_gradient(arena: Arena, path: int, threads: int) -> None:
    for _, channels in ROWS:
        given = (channels, 9, arena.floats(channels), *(arena.wide(channels) for _ in range(4)))
        library.norm_gradient(given, [arena.room(channels) for _ in range(4)])


def gradient_sums(arena: Arena, path: int, threads: int) -> None:
    for _, channels in ROWS:
        wide = (arena.wide(channels) for _ in range(5))
        given = (channels, 9, arena.floats(channels), *wide, arena.floats(channels), arena.floats(channels))
        library.gradient_sums(given, 1e-5, arena.room(channels, float64), arena.room(channels, float64))


def nms(arena: Arena, path: int, threads: int) -> None:
    for count in (1, 7, 65):
        corner = torch.rand(count, 2, generator=torch.Generator().manual_seed(count)) * 9
        library.nms(count, arena.put(torch.cat([corner, corner + 4], 1)), 0.5, arena.room(count, uint8))


def _rois(channels: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """A map of 2 images, 7 x 9, and boxes within it, across its edges, outside of it and of no size."""
    boxes = [(0, 1, 1, 5, 6), (1, -3, -2, 4, 3), (0, 6, 5, 12, 11), (1, 20, 20, 30, 30), (1, 3, 3, 3, 3), (0, 8, 6, 9, 7)]
    rows = torch.tensor(boxes, dtype=torch.float32)
    return (2, 7, 9, channels, len(boxes), 3, 5), rows


def roi_align(arena: Arena, path: int, threads: int) -> None:
    for channels, samples, aligned in itertools.product((1, 5, 33), (0, 2), (False, True)):
        numbers, boxes = _rois(channels)
        to = arena.room(len(boxes) * 3 * 5 * channels)
        library.roi_align((*numbers, samples), 0.9, aligned, arena.floats(2 * 7 * 9 * channels), arena.put(boxes), to, threads)


def roi_align_grad(arena: Arena, path: int, threads: int) -> None:
    for channels, samples, aligned in itertools.product((1, 5, 33), (0, 2), (False, True)):
        numbers, boxes = _rois(channels)
        given = arena.floats(len(boxes) * 3 * 5 * channels), arena.put(boxes)
        library.roi_align_grad((*numbers, samples), 0.9, aligned, *given, arena.room(2 * 7 * 9 * channels), threads)


CALLS = [
    channel_stats,
    normalize_peak,
    normalize,
    pack_norm,
    normalize_batch,
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
