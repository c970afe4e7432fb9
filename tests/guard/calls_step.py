# SPDX-License-Identifier: Apache-2.0
"""Guarded calls of a fused block's training step: one for each direction, over every convolution and kind of clip rule;
and of its prediction."""

from __future__ import annotations

import math
from typing import Any

import torch

from byteback.ops.backends.cpu import allocator
from byteback.ops.backends.cpu import library as native_library
from guard.calls_products import ACTIVATIONS, STORED, forward_pass
from guard.memory import Arena
from guard.shapes import CONVOLUTIONS, Convolution

library: Any = native_library.native
_MASK_GATE = 1
_WITH_MASK = [number for number, row in enumerate(ACTIVATIONS) if not row.is_smooth]
HELD, RATIO, PAIR = range(3)


def _plan(shape: Convolution, number: int) -> tuple[Any, int, int]:
    """The library's BlockPlan, how x is kept, and the activation."""
    kind, activation = number % 3, _WITH_MASK[number % len(_WITH_MASK)]
    rows, taps, depth = shape.output_count // shape.filters, math.prod(shape.kernel), shape.channels // shape.groups
    is_last = number % 2 == 0
    weight = {"outer": 1, "inner": shape.filters * taps, "inner_stride": depth, "channel_stride": 1}
    if not is_last:
        weight = {"outer": shape.filters, "inner": taps, "inner_stride": 1, "channel_stride": taps}
    plan = library.BlockPlan(
        conv=library.ConvShape(**shape.fields),
        forward=forward_pass(rows, shape.filters, activation, peak_is_known=number % 5 != 0, kept=kind),
        gate=_MASK_GATE,
        weight=library.Rows(**weight, channels=depth, outer_stride=taps * depth),
        weight_is_last=is_last,
        int8=number % 4 != 3,
        floats=number % 4 != 1,
        mask=True,
        observe_every=10,
        eps=1e-5,
        output=((shape.output_count,), (1,)),
        weight_values=((shape.weight_count,), (1,)),
        grad_input=((shape.input_count,), (1,)),
        grad_weight=((shape.weight_count,), (1,)),
    )
    return plan, kind, activation


def _row(arena: Arena, clips: list[float], initialized: float = 1.0, tracks: bool = False) -> Any:
    return library.QuantizerRow(
        clip=arena.put(torch.tensor(clips)),
        initialized=arena.put(torch.tensor([initialized])),
        updated_at=arena.longs([3]),
        observed=arena.put(torch.zeros(5)),
        tracked=arena.positive(len(clips)) if tracks else 0,
        seen=arena.put(torch.ones(1)),
        entries=len(clips),
        momentum=0.1,
    )


def _keep(arena: Arena, capsules: list[Any]) -> None:
    made = (allocator.tensor_of(capsule) for capsule in capsules if capsule is not None)
    # As bytes, so that equal NaNs are equal.
    arena.results += [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in made]


def block_forward(arena: Arena, path: int, threads: int) -> None:
    for number, shape in enumerate(CONVOLUTIONS.values()):
        plan, *_ = _plan(shape, number)
        vectors = {name: arena.floats(shape.filters) for name in ("gamma", "beta", "running_mean")}
        tensors = library.ForwardTensors(
            weight=arena.floats(shape.weight_count),
            **vectors,
            running_var=arena.positive(shape.filters),
            input=_row(arena, [2.0], tracks=True),
            iteration=arena.longs([4]),
        )
        x = arena.int8(shape.input_count, shape.least), arena.positive(1), arena.positive(1), arena.longs([5, 0])
        residual = arena.floats(shape.output_count) if number % 5 == 0 else 0
        made = library.block_forward(path, plan, tensors, *x, residual, 0.1, allocator.limit, threads)
        assert made is not None
        _keep(arena, made[1])


def block_backward(arena: Arena, path: int, threads: int) -> None:
    for number, shape in enumerate([*CONVOLUTIONS.values()] * 2):
        plan, kind, _ = _plan(shape, number)
        depthwise = shape.groups == shape.channels == shape.filters > 1
        rule = (RATIO if depthwise else HELD, PAIR)[number >= len(CONVOLUTIONS)]
        rows, filters = shape.output_count // shape.filters, shape.filters
        gradient = library.GradientPlan(kind=rule, stochastic=True, observe_every=10, period=10, for_tensor=not depthwise)
        each = [0.5] * filters if rule == PAIR else [0.5, *[3.0] * filters] if depthwise else [0.5, 3.0]
        tensors = library.BackwardTensors(
            gradient=_row(arena, [2.0] if rule == PAIR else each),
            per_channel=_row(arena, each),
            **{name: arena.longs([value]) for name, value in (("seed", 7), ("layer", 3), ("count", 9), ("iteration", 5))},
        )
        kept = {0: arena.floats, 1: lambda count: arena.floats(count, torch.bfloat16), 2: arena.int8}[kind](shape.output_count)
        g_kind, waiting_kind, rounds = number // 2 % 2, number // 3 % 2, number % 5 < 2
        waiting = arena.floats(shape.input_count, STORED[waiting_kind]) if number % 2 else 0
        masks = shape.input_count // shape.channels * math.ceil(shape.channels / 8)
        waiting_mask = arena.bytes_(masks) if number % 4 == 1 else 0
        done, _, _, _, made = library.block_backward(
            path,
            plan,
            tensors,
            gradient,
            arena.floats(shape.output_count, STORED[g_kind]),
            g_kind,
            arena.int8(shape.input_count, shape.least),
            arena.positive(1),
            arena.int8(shape.weight_count),
            arena.positive(1),
            arena.bytes_(rows * math.ceil(filters / 8)),
            arena.positive(filters),
            arena.floats(filters),
            arena.wide(filters),
            arena.wide(filters),
            kept,
            arena.positive(filters) if kind == 2 else 0,
            arena.floats(filters) if kind == 2 else 0,
            waiting,
            waiting_mask,
            waiting_kind,
            rounds,
            number % 3 == 0,
            0,
            True,
            allocator.limit,
            threads,
        )
        assert done
        _keep(arena, made)


def predict_block(arena: Arena, path: int, threads: int) -> None:
    arena.room(1)  # a result also of the path that has no kernel for it
    for number, shape in enumerate(CONVOLUTIONS.values()):
        plan = library.PredictPlan(
            conv=library.ConvShape(**shape.fields),
            forward=forward_pass(shape.output_count // shape.filters, shape.filters, number % len(ACTIVATIONS)),
            output=((shape.output_count,), (1,)),
        )
        x = arena.int8(shape.input_count, shape.least), arena.positive(1)
        weight = arena.int8(shape.weight_count), arena.positive(1)
        norm = arena.positive(shape.filters), arena.floats(shape.filters)
        residual = (0, arena.floats(shape.output_count))[number % 2], 0
        clip = arena.positive(1) if number % 3 else 0
        floats = not clip or number % 4 == 0
        tensors = *x, *weight, *norm, *residual, clip
        made = library.predict_block(path, plan, *tensors, floats, allocator.limit, threads)
        if made is not None:
            _keep(arena, made[1:])


CALLS = [block_forward, block_backward, predict_block]
