# SPDX-License-Identifier: Apache-2.0
"""Guarded calls of the products, alone and with what follows them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from byteback.ops.activations import TABLE
from byteback.ops.backends.cpu import library as native_library
from guard.memory import Arena
from guard.shapes import CONVOLUTIONS, Convolution

library: Any = native_library.native
ACTIVATIONS = sorted(TABLE.values(), key=lambda row: row.number)
int8, int64, uint8, float64 = torch.int8, torch.int64, torch.uint8, torch.float64


def _scales(arena: Arena, rows: int, columns: int) -> Iterator[dict[str, int]]:
    """Both scales single, then a factor of its own for every row and column."""
    yield {"a_scale": arena.positive(1), "b_scale": arena.positive(1)}
    yield {"a_scale": arena.positive(rows * columns), "b_scale": 0, "row": columns, "column": 1}
    yield {"a_scale": arena.positive(rows), "b_scale": 0, "row": 1}
    yield {"a_scale": arena.positive(columns), "b_scale": 0, "column": 1}


def conv_output(arena: Arena, path: int, threads: int) -> None:
    for shape in CONVOLUTIONS.values():
        for scales in _scales(arena, shape.batch, shape.filters):
            a, b = arena.int8(shape.input_count, shape.least), arena.int8(shape.weight_count)
            given = {"a": a, "b": b, **scales, "result": arena.room(shape.output_count), "threads": threads}
            library.conv_output(path, library.ConvShape(**shape.fields), **given)


def conv_grad_input(arena: Arena, path: int, threads: int) -> None:
    for shape in CONVOLUTIONS.values():
        for scales in _scales(arena, shape.batch, shape.channels):
            a, b = arena.int8(shape.output_count), arena.int8(shape.weight_count)
            given = {"a": a, "b": b, **scales, "result": arena.room(shape.input_count), "threads": threads}
            library.conv_grad_input(path, library.ConvShape(**shape.fields), **given)


def conv_grad_weight(arena: Arena, path: int, threads: int) -> None:
    for shape in CONVOLUTIONS.values():
        for scales in _scales(arena, shape.filters, shape.channels // shape.groups):
            a, b = arena.int8(shape.output_count), arena.int8(shape.input_count, shape.least)
            given = {"a": a, "b": b, **scales, "result": arena.room(shape.weight_count), "threads": threads}
            library.conv_grad_weight(path, library.ConvShape(**shape.fields), **given)


STORED = (torch.float32, torch.bfloat16)
"""How floats may be stored, by the number of the kind."""


def residual_of(arena: Arena, count: int, number: int, stored: int = 0) -> dict[str, int]:
    """No residual, one of floats, one of integers by turns."""
    kind = number % 3
    values = (lambda: 0, lambda: arena.floats(count, STORED[stored]), lambda: arena.int8(count))[kind]()
    return {"residual": values, "residual_scale": arena.positive(1) if kind == 2 else 0}


def forward_pass(rows: int, channels: int, activation: int, **others: Any) -> Any:
    """The library's ForwardPass."""
    row = ACTIVATIONS[activation]
    fields = {"peak_is_known": False, "kept": 0, "pitch": channels, **others}
    return library.ForwardPass(
        rows=rows, channels=channels, activation=activation, floor=row.floor, ceiling=row.ceiling, **fields
    )


def conv_normalize(arena: Arena, path: int, threads: int) -> None:
    for number, shape in enumerate(CONVOLUTIONS.values()):
        scales = list(_scales(arena, shape.batch, shape.filters))[number % 2]
        a, b = arena.int8(shape.input_count, shape.least), arena.int8(shape.weight_count)
        wider = shape.filters + (3 if number % 4 == 0 else 0)
        rows = shape.output_count // shape.filters
        count = (rows - 1) * wider + shape.filters  # the last row of a part of wider rows ends before the row does
        library.conv_normalize(
            path,
            library.ConvShape(**shape.fields),
            forward_pass(rows, shape.filters, number % 5, pitch=wider, residual=number % 2),
            library.Operands(a=a, b=b, **scales),
            a=arena.floats(shape.filters),
            b=arena.floats(shape.filters),
            **residual_of(arena, shape.output_count, number, number % 2),
            clip=arena.positive(1),
            values=arena.room(count, int8),
            scale=arena.room(1),
            counts=arena.room(2, int64),
            output=arena.room(count),
            threads=threads,
        )


def batch_structs(arena: Arena, rows: int, channels: int, x: int, number: int, stored: int) -> tuple[Any, Any, Any]:
    """What normalize_batch is told after its path: the pass, what it reads, and what it writes. `stored`: how x is."""
    count, kind, output = rows * channels, number % 3, number // 2 % 2
    activation = (number + number // len(ACTIVATIONS)) % len(ACTIVATIONS)  # each of them meets every kind
    residual, is_smooth = residual_of(arena, count, number, stored), ACTIVATIONS[activation].is_smooth
    vectors = {name: arena.floats(channels) for name in ("gamma", "beta", "bias", "running_mean")}
    variance = arena.positive(channels)
    given = library.BatchGiven(x=x, **vectors, running_var=variance, **residual, eps=1e-5, momentum=0.1)
    made = library.BatchMade(
        a=arena.room(channels),
        b=arena.room(channels),
        mean=arena.room(channels, float64),
        invstd=arena.room(channels, float64),
        peak=arena.room(1),
        values=arena.room(count, int8),
        scale=arena.room(1),
        counts=arena.room(2, int64),
        output=arena.room(count, STORED[output]),
        mask=0 if is_smooth else arena.room(rows * math.ceil(channels / 8), uint8),
        kept=0 if kind == 0 else arena.room(count, torch.bfloat16 if kind == 1 else int8),
        step=arena.room(channels) if kind == 2 else 0,
        centre=arena.room(channels) if kind == 2 else 0,
    )
    is_known = residual["residual"] == 0 and ACTIVATIONS[activation].is_monotone
    kinds = {"x": stored, "residual": stored, "output": output}
    return forward_pass(rows, channels, activation, peak_is_known=is_known, kept=kind, **kinds), given, made


def conv_normalize_batch(arena: Arena, path: int, threads: int) -> None:
    # 8 MB of output are counted while they are written.
    large = (
        Convolution(1, 3, 17, 1, (1, 351, 353), (1, 1, 1)),
        Convolution(1, 3, 17, 1, (1, 351, 353), (1, 3, 3), padding=(0, 1, 1)),
        Convolution(1, 17, 17, 17, (1, 351, 353), (1, 3, 3), padding=(0, 1, 1)),
    )
    for number, shape in enumerate((*CONVOLUTIONS.values(), *large)):
        scales = list(_scales(arena, shape.batch, shape.filters))[number % 2]
        a, b = arena.int8(shape.input_count, shape.least), arena.int8(shape.weight_count)
        operands = library.Operands(a=a, b=b, **scales)
        for stored, dtype in enumerate(STORED):
            y = arena.room(shape.output_count, dtype)
            structs = batch_structs(arena, shape.output_count // shape.filters, shape.filters, y, number, stored)
            forward, given, made = structs
            library.conv_normalize_batch(path, library.ConvShape(**shape.fields), forward, operands, given, made, threads)


CALLS = [conv_output, conv_grad_input, conv_grad_weight, conv_normalize, conv_normalize_batch]
