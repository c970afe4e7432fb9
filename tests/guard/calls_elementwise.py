# SPDX-License-Identifier: Apache-2.0
"""Guarded calls of quantization, statistics and what else goes element by element."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from byteback.ops.backends.cpu import allocator
from byteback.ops.backends.cpu import library as native_library
from guard.memory import Arena
from guard.shapes import ROWS, WINDOWS

library: Any = native_library.native
int8, int64, uint8, float64 = torch.int8, torch.int64, torch.uint8, torch.float64


class Layout(NamedTuple):
    """The library's Rows with the number of samples, channels and elements."""

    rows: Any
    samples: int
    channels: int
    count: int
    pixels: int


def layouts() -> Iterator[Layout]:
    """Channels last, per sample, NCHW."""
    for rows, channels in ROWS:
        all_of_them = rows * channels
        for outer, inner_stride, channel_stride in ((1, channels, 1), (2, channels, 1), (2, 1, rows)):
            sizes = {"outer": outer, "inner": rows, "channels": channels, "outer_stride": all_of_them}
            made = library.Rows(**sizes, inner_stride=inner_stride, channel_stride=channel_stride)
            yield Layout(made, outer, channels, outer * all_of_them, rows)


def quantize(arena: Arena, path: int, threads: int) -> None:
    for rows, samples, channels, count, pixels in layouts():
        for clips, outer, channel in ((1, 0, 0), (channels, 0, 1), (samples, 1, 0), (samples * channels, channels, 1)):
            given = {"x": arena.floats(count), "clip": arena.positive(clips), "key": arena.key() if pixels % 2 else 0}
            strides = {"clip_count": clips, "sample_stride": outer, "channel_stride": channel}
            to = {"values": arena.room(count, int8), "scale": arena.room(clips), "counts": arena.room(2, int64)}
            library.quantize(path, rows, **given, **strides, **to, peak=arena.room(1), threads=threads)


def quantize_max(arena: Arena, path: int, threads: int) -> None:
    for rows, samples, channels, count, _ in layouts():
        for axis, clips in ((-1, 1), (0, samples), (1, channels)):
            sizes = {"size": (count,), "strides": (1,), "clip_size": (clips,), "clip_strides": (1,)}
            plan = library.QuantizePlan(rows=rows, axis=axis, **sizes)
            given = {"x": arena.floats(count), "key": arena.key(), "limit": allocator.limit}
            made = library.quantize_max(path, plan, **given, threads=threads)
            arena.results += [allocator.tensor_of(part) for part in made]


def absmax(arena: Arena, path: int, threads: int) -> None:
    for rows, samples, channels, count, _ in layouts():
        for axis, clips in ((-1, 1), (0, samples), (1, channels)):
            library.absmax(path, rows, axis=axis, x=arena.floats(count), result=arena.room(clips), threads=threads)


def transpose(arena: Arena, path: int, threads: int) -> None:
    for batch, rows, columns in ((1, 1, 1), (2, 3, 5), (1, 17, 33), (2, 16, 16), (1, 65, 15), (3, 31, 64), (2, 150, 131)):
        count, sizes = batch * rows * columns, {"batch": batch, "rows": rows, "columns": columns}
        library.transpose(path, **sizes, bytes=1, source=arena.int8(count), result=arena.room(count, int8), threads=threads)
        library.transpose(path, **sizes, bytes=4, source=arena.floats(count), result=arena.room(count), threads=threads)


def moments(arena: Arena, path: int, threads: int) -> None:
    for rows, _, channels, count, _ in layouts():
        to = {"peak": arena.room(channels), "total": arena.room(channels, float64), "squares": arena.room(channels, float64)}
        library.moments(path, rows, x=arena.floats(count), **to, threads=threads)


def tail_count(arena: Arena, path: int, threads: int) -> None:
    for rows, _, channels, count, _ in layouts():
        for thresholds, stride in ((1, 0), (channels, 1)):
            given = {"x": arena.floats(count), "threshold": arena.positive(thresholds), "channel_stride": stride}
            library.tail_count(path, rows, **given, counts=arena.room(channels, int64), threads=threads)


def cosine_terms(arena: Arena, path: int, threads: int) -> None:
    for rows, _, channels, count, _ in layouts():
        for clips in (1, 3, 11):
            for each, stochastic in itertools.product((1, channels), (False, True)):
                given = {"x": arena.floats(count), "clips": arena.positive(clips * each), "count": clips}
                options = {"per_channel": each > 1, "stochastic": stochastic}
                terms = arena.room(3 * clips * each, float64)
                library.cosine_terms(path, rows, **given, **options, terms=terms, threads=threads)


def cosine_slope_terms(arena: Arena, path: int, threads: int) -> None:
    for rows, _, _, count, _ in layouts():
        given = {"x": arena.floats(count), "clip": 1.5, "terms": arena.room(5, float64)}
        library.cosine_slope_terms(path, rows, **given, threads=threads)


def dot_terms(arena: Arena, path: int, threads: int) -> None:
    for rows, samples, channels, count, _ in layouts():
        for scales, outer, channel in ((1, 0, 0), (channels, 0, 1), (samples, 1, 0), (samples * channels, channels, 1)):
            given = {"x": arena.floats(count), "values": arena.int8(count), "scale": arena.positive(scales)}
            strides = {"sample_stride": outer, "channel_stride": channel}
            library.dot_terms(path, rows, **given, **strides, terms=arena.room(3, float64), threads=threads)


def noise_key(arena: Arena, path: int, threads: int) -> None:
    counters = {"seed": arena.longs([7]), "layer": arena.longs([3]), "count": arena.longs([2**40])}
    library.noise_key(**counters, rank=2, key=arena.room(2, int64))


def write_ledger(arena: Arena, path: int, threads: int) -> None:
    for channels, clips in ((1, 1), (5, 5), (1, 7), (5, 1)):
        library.write_ledger(
            clip=arena.room(channels),
            initialized=arena.room(1),
            updated_at=arena.room(1, int64),
            observed=arena.room(4),
            tracked=arena.room(channels),
            seen=arena.room(1),
            entries=channels,
            used=arena.positive(clips),
            used_count=clips,
            remembered=arena.positive(channels),
            remembered_count=channels,
            iteration=41,
            saturated=0.1,
            deviation=float("nan"),
            own=0.3,
            momentum=0.1,
        )


def copy_all(arena: Arena, path: int, threads: int) -> None:
    from_ = [arena.floats(count) for count in (1, 5, 33)]
    to = [arena.room(count) for count in (1, 5, 33)]
    library.copy_all(library.CopyPlan(to=to, bytes=[4, 20, 132]), from_)


def _pixels() -> Iterator[tuple[Any, int, int]]:
    """The library's Pixels, and how many numbers an image and what is taken of it have."""
    for batch, height, width, channels, *_ in WINDOWS:
        for stride in (2, 3):
            count = (height - 1) // stride + 1, (width - 1) // stride + 1
            made = library.Pixels(batch=batch, channels=channels, size=(height, width), stride=(stride, stride), count=count)
            yield made, batch * height * width * channels, batch * channels * count[0] * count[1]


def take_pixels(arena: Arena, path: int, threads: int) -> None:
    for pixels, count, taken in _pixels():
        library.take_pixels(pixels, x=arena.floats(count), y=arena.room(taken), threads=threads)


def spread_pixels(arena: Arena, path: int, threads: int) -> None:
    for pixels, count, taken in _pixels():
        library.spread_pixels(pixels, y=arena.floats(taken), x=arena.room(count), threads=threads)


def _windows() -> Iterator[tuple[Any, int, int, int]]:
    for batch, height, width, channels, *axes in WINDOWS:
        kernel, stride, padding, dilation = axes
        sizes = zip((height, width), kernel, stride, padding, dilation, strict=True)
        out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]
        made = library.Windows(
            batch=batch,
            channels=channels,
            size=(height, width),
            kernel=kernel,
            stride=stride,
            padding=padding,
            dilation=dilation,
            count=out,
        )
        yield made, batch * height * width * channels, batch * out[0] * out[1] * channels, kernel[0] * kernel[1]


def max_pool(arena: Arena, path: int, threads: int) -> None:
    for windows, count, made, _ in _windows():
        to = {"y": arena.room(made), "taps": arena.room(made, uint8)}
        library.max_pool(path, windows, x=arena.floats(count), **to, threads=threads)


def max_pool_grad(arena: Arena, path: int, threads: int) -> None:
    for windows, count, made, taps in _windows():
        which = arena.put((torch.arange(made) % taps).to(torch.uint8))
        library.max_pool_grad(path, windows, g=arena.floats(made), taps=which, dx=arena.room(count), threads=threads)


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
    copy_all,
    take_pixels,
    spread_pixels,
    max_pool,
    max_pool_grad,
]
