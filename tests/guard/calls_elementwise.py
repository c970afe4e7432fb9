# SPDX-License-Identifier: Apache-2.0
"""Guarded calls of quantization, statistics and what else goes element by element."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from byteback.ops.backends.cpu import allocator
from byteback.ops.backends.cpu import library as native_library
from guard.memory import Arena
from guard.shapes import ROWS, WINDOWS

library: Any = native_library.native
int8, int64, uint8, float64 = torch.int8, torch.int64, torch.uint8, torch.float64


def layouts() -> Iterator[tuple[tuple[int, ...], int, int]]:
    """csrc/elementwise.h's Rows with the number of samples and of elements: channels last, per sample, NCHW."""
    for rows, channels in ROWS:
        yield (1, rows, channels, 0, channels, 1), 1, rows * channels
        yield (2, rows, channels, rows * channels, channels, 1), 2, 2 * rows * channels
        yield (2, rows, channels, rows * channels, 1, rows), 2, 2 * rows * channels


def quantize(arena: Arena, path: int, threads: int) -> None:
    for rows, samples, count in layouts():
        channels = rows[2]
        for clips, outer, channel in ((1, 0, 0), (channels, 0, 1), (samples, 1, 0), (samples * channels, channels, 1)):
            key = arena.key() if rows[1] % 2 else 0
            to = arena.room(count, int8), arena.room(clips), arena.room(2, int64), arena.room(1)
            library.quantize(path, rows, arena.floats(count), arena.positive(clips), outer, channel, clips, key, *to, threads)


def quantize_max(arena: Arena, path: int, threads: int) -> None:
    for rows, samples, count in layouts():
        for axis, clips in ((-1, 1), (0, samples), (1, rows[2])):
            if axis == 0 and rows[0] == 1 and samples > 1:
                continue
            sizes = (count,), (1,), (clips,), (1,)
            made = library.quantize_max(path, rows, arena.floats(count), axis, arena.key(), *sizes, allocator.limit, threads)
            arena.results += [allocator.tensor_of(part) for part in made]


def absmax(arena: Arena, path: int, threads: int) -> None:
    for rows, samples, count in layouts():
        for axis, clips in ((-1, 1), (0, samples), (1, rows[2])):
            library.absmax(path, rows, arena.floats(count), arena.room(clips), axis, threads)


def transpose(arena: Arena, path: int, threads: int) -> None:
    for batch, rows, columns in ((1, 1, 1), (2, 3, 5), (1, 17, 33), (2, 16, 16), (1, 65, 15), (3, 31, 64), (2, 150, 131)):
        count = batch * rows * columns
        library.transpose(path, batch, rows, columns, 1, arena.int8(count), arena.room(count, int8), threads)
        library.transpose(path, batch, rows, columns, 4, arena.floats(count), arena.room(count), threads)


def moments(arena: Arena, path: int, threads: int) -> None:
    for rows, _, count in layouts():
        channels = rows[2]
        to = arena.room(channels), arena.room(channels, float64), arena.room(channels, float64)
        library.moments(path, rows, arena.floats(count), *to, threads)


def tail_count(arena: Arena, path: int, threads: int) -> None:
    for rows, _, count in layouts():
        for thresholds, channel in ((1, 0), (rows[2], 1)):
            given = arena.floats(count), arena.positive(thresholds)
            library.tail_count(path, rows, *given, channel, arena.room(rows[2], int64), threads)


def cosine_terms(arena: Arena, path: int, threads: int) -> None:
    for rows, _, count in layouts():
        for clips in (1, 3, 11):
            for each, stochastic in itertools.product((1, rows[2]), (False, True)):
                given = arena.floats(count), arena.positive(clips * each), clips, each > 1, stochastic
                library.cosine_terms(path, rows, *given, arena.room(3 * clips * each, float64), threads)


def cosine_slope_terms(arena: Arena, path: int, threads: int) -> None:
    for rows, _, count in layouts():
        library.cosine_slope_terms(path, rows, arena.floats(count), 1.5, arena.room(5, float64), threads)


def dot_terms(arena: Arena, path: int, threads: int) -> None:
    for rows, samples, count in layouts():
        channels = rows[2]
        for scales, outer, channel in ((1, 0, 0), (channels, 0, 1), (samples, 1, 0), (samples * channels, channels, 1)):
            given = arena.floats(count), arena.int8(count), arena.positive(scales)
            library.dot_terms(path, rows, *given, outer, channel, arena.room(3, float64), threads)


def noise_key(arena: Arena, path: int, threads: int) -> None:
    library.noise_key(arena.longs([7]), arena.longs([3]), arena.longs([2**40]), 2, arena.room(2, int64))


def write_ledger(arena: Arena, path: int, threads: int) -> None:
    for channels, clips in ((1, 1), (5, 5), (1, 7), (5, 1)):
        rows = arena.room(channels), arena.room(1), arena.room(1, int64), arena.room(4), arena.room(channels), arena.room(1)
        given = (arena.positive(clips), clips, arena.positive(channels), channels, 41)
        library.write_ledger((*rows, channels), given, (0.1, float("nan"), 0.3), 0.1)


def take_pixels(arena: Arena, path: int, threads: int) -> None:
    for batch, height, width, channels, *_ in WINDOWS:
        for stride in (2, 3):
            numbers = (batch, height, width, channels, stride, stride, (height - 1) // stride + 1, (width - 1) // stride + 1)
            y = arena.room(batch * channels * numbers[6] * numbers[7])
            library.take_pixels(numbers, arena.floats(batch * height * width * channels), y, threads)


def spread_pixels(arena: Arena, path: int, threads: int) -> None:
    for batch, height, width, channels, *_ in WINDOWS:
        for stride in (2, 3):
            numbers = (batch, height, width, channels, stride, stride, (height - 1) // stride + 1, (width - 1) // stride + 1)
            y = arena.floats(batch * channels * numbers[6] * numbers[7])
            library.spread_pixels(numbers, y, arena.room(batch * height * width * channels), threads)


def _windows() -> Iterator[tuple[tuple[int, ...], int, int, int]]:
    for batch, height, width, channels, *axes in WINDOWS:
        kernel, stride, padding, dilation = axes
        sizes = zip((height, width), kernel, stride, padding, dilation, strict=True)
        out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]
        numbers = (batch, height, width, channels, *kernel, *stride, *padding, *dilation, *out)
        yield numbers, batch * height * width * channels, batch * out[0] * out[1] * channels, kernel[0] * kernel[1]


def max_pool(arena: Arena, path: int, threads: int) -> None:
    for numbers, count, made, _ in _windows():
        library.max_pool(path, numbers, arena.floats(count), arena.room(made), arena.room(made, uint8), threads)


def max_pool_grad(arena: Arena, path: int, threads: int) -> None:
    for numbers, count, made, taps in _windows():
        which = arena.put((torch.arange(made) % taps).to(torch.uint8))
        library.max_pool_grad(path, numbers, arena.floats(made), which, arena.room(count), threads)


CALLS = [
    quantize,
    quantize_max,
    absmax,
    transpose,
    moments,
    tail_count,
    cosine_terms,
    cosine_slope_terms,
    dot_terms,
    noise_key,
    write_ledger,
    take_pixels,
    spread_pixels,
    max_pool,
    max_pool_grad,
]
