# SPDX-License-Identifier: Apache-2.0
"""The integer products on a GPU. Convolutions in one and two dimensions are three-dimensional ones with axes of size 1.

The reference runs empty tensors, tensors with 2^31 or more elements, and sums of more than 133,144 products in output and
grad_input, which int32 may not hold. (grad_weight adds its slices in int64.) On a GPU without int8 products in Triton,
gathered.py runs those that are not depthwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from byteback.ops.backends import reference
from byteback.ops.backends.reference.block import stored_as
from byteback.ops.backends.triton import gathered, tiles
from byteback.ops.backends.triton.kernels import conv_grad_input, conv_grad_weight, conv_output, depthwise
from byteback.ops.backends.triton.launch import MOST_ELEMENTS, blocks, fits, launch, power_of_two
from byteback.ops.backends.triton.packing import fits_packed
from byteback.ops.backends.triton.plan import Plan, Scaled, plan_of, rows_of
from byteback.ops.contract import packing
from byteback.ops.contract.limits import MAX_INT32_DEPTH
from byteback.ops.contract.scale_rule import combine_scales
from byteback.ops.types import Geometry, ProductCall

_G = conv_grad_weight.GROUP


def product(call: ProductCall, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    return product_as(torch.float32, call, a, a_scale, b, b_scale)


@torch.no_grad()
def product_as(dtype: torch.dtype, call: ProductCall, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """A product as float32, or rounded to bfloat16 when it is written."""
    plan: Plan = call.plan
    own = plan.depthwise or tiles.multiplies_int8(a.device)
    packs = own and not plan.depthwise and call.kind == "grad_weight"
    readable = (fits_packed(a.shape) and fits_packed(b.shape)) if packs else own or gathered.fits(plan)
    if plan.reference or not fits(a, b) or not 0 < math.prod(call.size) <= MOST_ELEMENTS or not readable:
        return stored_as(reference.product(call, a, a_scale, b, b_scale), dtype)
    writes = dtype is torch.float32 or (own and call.kind == "output" and not plan.depthwise)
    result = torch.empty_strided(call.size, call.strides, dtype=dtype if writes else torch.float32, device=a.device)
    scaled = _scaled(call, a_scale, b_scale)
    (_RUN if own else _GATHERED)[call.kind](plan, a, b, result, scaled)
    return result if writes else stored_as(result, dtype)


@torch.no_grad()
def grad_weight_packed(call: ProductCall, g: Tensor, g_scale: Tensor, x: Tensor, x_scale: Tensor) -> Tensor:
    """grad_weight of operands of which one or both are packed by 16 images."""
    plan: Plan = call.plan
    rank, images = len(call.size), plan.image[0]
    result = torch.empty_strided(call.size, call.strides, dtype=torch.float32, device=g.device)
    whole = [packing.is_packed(operand, rank) for operand in (g, x)]
    readable = all(is_whole or fits_packed(operand.shape) for operand, is_whole in zip((g, x), whole, strict=True))
    if plan.depthwise or not tiles.multiplies_int8(g.device) or not (fits(g, x, result) and readable):
        a, b = (packing.unpacked(one, images) if is_whole else one for one, is_whole in zip((g, x), whole, strict=True))
        return product(call, a, g_scale, b, x_scale)
    scaled = _scaled(call, g_scale, x_scale)
    gp, xp = (one if is_whole else pack(one) for one, is_whole in zip((g, x), whole, strict=True))
    _dense_grad_weight(plan, gp, xp, result, scaled)
    return result


def _scaled(call: ProductCall, a_scale: Tensor, b_scale: Tensor) -> Scaled:
    """Returns the combined scales and their distances along the first two axes of the result."""
    factor = combine_scales(call.kind, a_scale, b_scale, call.groups, call.channels).contiguous()
    f0, f1 = (factor.stride(axis) if factor.shape[axis] > 1 else 0 for axis in (0, 1))
    return factor, f0, f1


def _output(plan: Plan, x: Tensor, w: Tensor, y: Tensor, scaled: Scaled) -> None:
    factor, f0, f1 = scaled
    n, *_ = plan.image
    rows = n * math.prod(plan.out)
    y0, y1, pixel = plan.strides
    where = (y0, pixel, y1, f0, f1)
    if plan.depthwise:
        taps = w.reshape(plan.c, -1).t().contiguous()
        tensors = rows_of(x), taps, y, factor
        _depthwise(depthwise.output, plan, rows, tensors, where)
        return
    cg, kg = plan.c // plan.groups, plan.k // plan.groups
    tile, rounds = tiles.choose(rows, kg, cg, tiles.multiprocessors(x.device)), y.dtype is torch.bfloat16
    launch(
        conv_output.conv_output,
        (blocks(rows, tile.rows) * blocks(kg, tile.columns), plan.groups),
        *(rows_of(x), rows_of(w), y.view(torch.int16) if rounds else y, factor),
        *(*plan.image, plan.c, kg, cg, *plan.out, *plan.steps, *where),
        **plan.constants(),
        **_tile(tile),
        GROUP=8,
        IMAGES=f0 != 0,
        ROUNDS=rounds,
    )


def _grad_input(plan: Plan, g: Tensor, w: Tensor, dx: Tensor, scaled: Scaled) -> None:
    factor, f0, f1 = scaled
    n, d, h, width = plan.image
    x0, x1, pixel = plan.strides
    where = (x0, pixel, x1, f0, f1)
    if plan.depthwise:
        tensors = rows_of(g), w.reshape(plan.c, -1).t().contiguous(), dx, factor
        _depthwise(depthwise.grad_input, plan, n * d * h * width, tensors, where)
        return
    groups, (stride, dilation) = plan.groups, (plan.steps[:3], plan.steps[6:])
    cg, kg = plan.c // groups, plan.k // groups
    common = [math.gcd(s, step) for s, step in zip(stride, dilation, strict=True)]
    apart = [s // one for s, one in zip(stride, common, strict=True)]
    back = [step // one for step, one in zip(dilation, common, strict=True)]
    phases = math.prod(stride)
    rows = n * math.prod(blocks(size, s) for size, s in zip((d, h, width), stride, strict=True))  # of the largest phase
    tile = tiles.choose(rows * phases, cg, kg, tiles.multiprocessors(g.device))
    turned = w.reshape(groups, kg, cg, -1).permute(0, 2, 3, 1).contiguous()
    launch(
        conv_grad_input.conv_grad_input,
        (blocks(rows, tile.rows), blocks(cg, tile.columns) * groups, phases),
        *(rows_of(g), turned, dx, factor),
        *(*plan.image, plan.k, cg, kg, *plan.out, *plan.steps, *apart, *back, *where),
        **plan.constants(),
        **_tile(tile),
        IMAGES=f0 != 0,
    )


def _grad_weight(plan: Plan, g: Tensor, x: Tensor, dw: Tensor, scaled: Scaled) -> None:
    if not plan.depthwise:
        _dense_grad_weight(plan, pack(g), pack(x), dw, scaled)
        return
    pixels, taps = math.prod(plan.out), plan.tap_count()
    channels = power_of_two(plan.c, 16, 64)
    per, slices = _sliced(plan.image[0] * pixels, 64, blocks(plan.c, channels) * taps, tiles.multiprocessors(g.device), 1)
    part = torch.empty((slices, plan.c, taps, 1), dtype=torch.int32, device=g.device)
    arguments = (*plan.image, plan.c, *plan.out, *plan.steps, per)
    grid = blocks(plan.c, channels), taps, slices
    tensors = rows_of(g), rows_of(x), part
    launch(depthwise.grad_weight, grid, *tensors, *arguments, **plan.constants(), BP=64, BC=channels)
    _finish(plan, part, dw, scaled)


def _dense_grad_weight(plan: Plan, gp: Tensor, xp: Tensor, dw: Tensor, scaled: Scaled) -> None:
    """gp and xp are packed by 16 images."""
    pixels, taps = math.prod(plan.out), plan.tap_count()
    cg, kg, packed = plan.c // plan.groups, plan.k // plan.groups, gp.shape[0]
    tile = tiles.choose(kg, cg, 64, 1)._replace(depth=64)
    grid_k, grid_c = blocks(kg, tile.rows) * plan.groups, blocks(cg, tile.columns) * taps
    per, slices = _sliced(packed * pixels, tile.depth // _G, grid_k * grid_c, tiles.multiprocessors(gp.device), _G)
    part = torch.empty((slices, plan.k, taps, cg), dtype=torch.int32, device=gp.device)
    arguments = (packed, *plan.image[1:], plan.c, plan.k, cg, kg, *plan.out, *plan.steps, per)
    grid = grid_k, grid_c, slices
    launch(conv_grad_weight.grad_weight, grid, gp, xp, part, *arguments, **plan.constants(), **_tile(tile), G=_G)
    _finish(plan, part, dw, scaled)


def _finish(plan: Plan, part: Tensor, dw: Tensor, scaled: Scaled) -> None:
    """Adds the slices `part`."""
    taps, cg = plan.tap_count(), plan.c // plan.groups
    factor, f0, f1 = scaled
    w0, w1, tap = plan.strides
    total = plan.k * taps * cg
    where = (part.shape[0], total, taps, cg, w0, tap, w1, f0, f1)
    launch(conv_grad_weight.finish, (blocks(total, 256),), part, dw, factor, *where, B=256)


def _sliced(steps: int, least: int, programs: int, processors: int, terms: int) -> tuple[int, int]:
    """Returns the length and the number of slices of a sum over `steps` groups of `terms` products.

    There are enough slices for four programs on each multiprocessor, but each is at least eight blocks long. None adds more
    than 133,144 products.
    """
    wanted = max(1, min(blocks(4 * processors, programs), steps // (8 * least)))
    most = MAX_INT32_DEPTH // terms // least * least
    per = min(blocks(blocks(steps, wanted), least) * least, most)
    return per, blocks(steps, per)


def pack(x: Tensor) -> Tensor:
    """Returns int8 (N, C, ...) packed by 16 images: (N/16, pixels, C, 16)."""
    n, c = x.shape[:2]
    pixels = x.numel() // (n * c)
    channels = power_of_two(c, 16, 64)
    packed = torch.empty((blocks(n, _G), pixels, c, _G), dtype=torch.int8, device=x.device)
    grid = blocks(pixels, 4), blocks(c, channels), packed.shape[0]
    launch(conv_grad_weight.pack, grid, rows_of(x), packed, n, pixels, c, G=_G, BP=4, BC=channels)
    return packed


def _depthwise(kernel: Any, plan: Plan, rows: int, tensors: tuple[Tensor, ...], where: tuple[int, ...]) -> None:
    channels = power_of_two(plan.c, 16, 64)
    grid = blocks(rows, 32), blocks(plan.c, channels)
    arguments = (*plan.image, plan.c, *plan.out, *plan.steps, *where)
    launch(kernel, grid, *tensors, *arguments, **plan.constants(), BP=32, BC=channels)


def _tile(tile: tiles.Tile) -> dict[str, int]:
    return {"BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "warps": tile.warps, "stages": tile.stages}


_RUN: dict[str, Any] = {"output": _output, "grad_input": _grad_input, "grad_weight": _grad_weight}
_GATHERED: dict[str, Any] = {kind: getattr(gathered, kind) for kind in _RUN}


@torch.no_grad()
def matmul_int8(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """A convolution of M images of one pixel with a kernel of one tap."""
    (m, depth), n = a.shape, b.shape[1]
    result = a.new_empty((m, n), dtype=torch.float32)
    if depth > MAX_INT32_DEPTH or not fits(a, b, result):
        return reference.matmul_int8(a, a_scale, b, b_scale)
    factor = (a_scale * b_scale).contiguous()
    steps = (1, 1, 1, 0, 0, 0, 1, 1, 1)
    plan = Plan((m, 1, 1, 1), depth, n, 1, (1, 1, 1), steps, (1, 1, 1), False, (n, 1, n), False)
    strides = (factor.stride(axis) if factor.shape[axis] > 1 else 0 for axis in (0, 1))
    run = _output if tiles.multiplies_int8(a.device) else gathered.output
    run(plan, a, b.t(), result, (factor, *strides))  # type: ignore[arg-type]
    return result


def explain(
    kind: str, x_size: Sequence[int], w_size: Sequence[int], out_size: Sequence[int], geometry: Geometry, device: torch.device
) -> str:
    """Returns which kernel and tile run a product, and why."""
    plan = plan_of(kind, x_size, w_size, out_size, geometry)
    if plan.reference:
        return f"reference: the sum is longer than {MAX_INT32_DEPTH} products, which int32 may not hold"
    if plan.depthwise:
        return "triton/depthwise: one channel per group, too little for tensor cores"
    if not tiles.multiplies_int8(device):
        return "triton/gathered, matrix product of PyTorch: Triton has no int8 products for this GPU"
    cg, kg = plan.c // plan.groups, plan.k // plan.groups
    rows = plan.image[0] * math.prod(plan.out if kind == "output" else plan.image[1:])
    if kind == "grad_weight":
        return f"triton/packed, tile {tiles.choose(kg, cg, 64, 1).why}"
    size, columns, depth = (rows, kg, cg) if kind == "output" else (rows, cg, kg)
    return f"triton/implicit, tile {tiles.choose(size, columns, depth, tiles.multiprocessors(device)).why}"
