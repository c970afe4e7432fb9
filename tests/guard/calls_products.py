# SPDX-License-Identifier: Apache-2.0
"""Guarded calls of the products, alone and with what follows them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from byteback.ops.backends.cpu import library as native_library
from guard.memory import Arena
from guard.shapes import CONVOLUTIONS, Convolution

library: Any = native_library.native
int8, int64, uint8, float64 = torch.int8, torch.int64, torch.uint8, torch.float64


def _scales(arena: Arena, rows: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Both scales single, then a factor of its own for every row and column: two addresses and two strides."""
    yield arena.positive(1), arena.positive(1), 0, 0
    yield arena.positive(rows * columns), 0, columns, 1
    yield arena.positive(rows), 0, 1, 0
    yield arena.positive(columns), 0, 0, 1


def conv_output(arena: Arena, path: int, threads: int) -> None:
    for shape in CONVOLUTIONS.values():
        for first, second, row, column in _scales(arena, shape.batch, shape.filters):
            operands = arena.int8(shape.input_count, shape.least), arena.int8(shape.weight_count)
            library.conv_output(
                path, shape.numbers, *operands, first, second, row, column, arena.room(shape.output_count), threads
            )


def conv_grad_input(arena: Arena, path: int, threads: int) -> None:
    for shape in CONVOLUTIONS.values():
        for first, second, row, column in _scales(arena, shape.batch, shape.channels):
            operands = arena.int8(shape.output_count), arena.int8(shape.weight_count)
            library.conv_grad_input(
                path, shape.numbers, *operands, first, second, row, column, arena.room(shape.input_count), threads
            )


def conv_grad_weight(arena: Arena, path: int, threads: int) -> None:
    for shape in CONVOLUTIONS.values():
        for first, second, row, column in _scales(arena, shape.filters, shape.channels // shape.groups):
            operands = arena.int8(shape.output_count), arena.int8(shape.input_count, shape.least)
            library.conv_grad_weight(
                path, shape.numbers, *operands, first, second, row, column, arena.room(shape.weight_count), threads
            )


def conv_normalize(arena: Arena, path: int, threads: int) -> None:
    for number, shape in enumerate(CONVOLUTIONS.values()):
        first, second, row, column = list(_scales(arena, shape.batch, shape.filters))[number % 2]
        operands = arena.int8(shape.input_count, shape.least), arena.int8(shape.weight_count)
        residual = [(0, 0), (arena.floats(shape.output_count), 0), (arena.int8(shape.output_count), arena.positive(1))][
            number % 3
        ]
        vectors = (arena.floats(shape.filters), arena.floats(shape.filters), *residual)
        wider = shape.filters + (3 if number % 4 == 0 else 0)
        # The last row of a part of wider rows ends before the row does.
        count = (shape.output_count // shape.filters - 1) * wider + shape.filters
        to = arena.room(count, int8), arena.room(1), arena.room(2, int64), arena.room(count)
        library.conv_normalize(
            path,
            shape.numbers,
            *operands,
            (first, second),
            (row, column),
            vectors,
            number % 5,
            arena.positive(1),
            *to,
            wider,
            threads,
        )


def batch_numbers(arena: Arena, rows: int, channels: int, x: int, number: int) -> tuple[Any, ...]:
    """What normalize_batch is told after its path: from where, the numbers of the norm, and where to."""
    residual = [(0, 0), (arena.floats(rows * channels), 0), (arena.int8(rows * channels), arena.positive(1))][number % 3]
    running = arena.floats(channels), arena.positive(channels)
    given = (rows, channels, x, *(arena.floats(channels) for _ in range(3)), *running, *residual)
    activation, kind = number % 5, number % 3
    smooth = activation > 2
    to: list[int] = [arena.room(channels), arena.room(channels), arena.room(channels, float64), arena.room(channels, float64)]
    to += [arena.room(1), arena.room(rows * channels, int8), arena.room(1), arena.room(2, int64), arena.room(rows * channels)]
    to.append(0 if smooth else arena.room(rows * math.ceil(channels / 8), uint8))
    if kind == 0:
        to += [0, 0, 0]
    else:
        to.append(arena.room(rows * channels, torch.bfloat16 if kind == 1 else int8))
        to += [0, 0] if kind == 1 else [arena.room(channels), arena.room(channels)]
    known = residual == (0, 0) and not smooth
    ceiling = 6.0 if activation == 2 else math.inf
    return given, 1e-5, 0.1, activation, activation != 0, ceiling, known, kind, to


def conv_normalize_batch(arena: Arena, path: int, threads: int) -> None:
    # 8 MB of output are counted on their way to memory.
    large = (
        Convolution(1, 3, 17, 1, (1, 351, 353), (1, 1, 1)),
        Convolution(1, 17, 17, 17, (1, 351, 353), (1, 3, 3), padding=(0, 1, 1)),
    )
    for number, shape in enumerate((*CONVOLUTIONS.values(), *large)):
        first, second, row, column = list(_scales(arena, shape.batch, shape.filters))[number % 2]
        operands = arena.int8(shape.input_count, shape.least), arena.int8(shape.weight_count)
        y = arena.room(shape.output_count)
        rest = batch_numbers(arena, shape.output_count // shape.filters, shape.filters, y, number)
        library.conv_normalize_batch(path, shape.numbers, *operands, (first, second), (row, column), *rest, threads)


CALLS = [conv_output, conv_grad_input, conv_grad_weight, conv_normalize, conv_normalize_batch]
