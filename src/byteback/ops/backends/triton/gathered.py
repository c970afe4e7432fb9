# SPDX-License-Identifier: Apache-2.0
"""Dense products on GPUs whose tensor cores Triton does not use (NVIDIA Turing): gather the operand, then multiply matrices.

Each row of the gathered operand has all terms of one result pixel, so that a product is one multiplication of int8 matrices,
which PyTorch leaves to cuBLAS. It takes both operands with the terms of a sum side by side. The images are gathered in parts
that take at most 128 MiB of memory.

    output        rows of x under the taps, times w
    grad_input    the same of g, with zeros between its pixels for a stride and the taps in reverse order
    grad_weight   g, times the rows of x under the taps; a part of the images sums at most 133,144 products
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from byteback.ops.backends.triton.kernels import conv_grad_weight
from byteback.ops.backends.triton.launch import blocks, launch
from byteback.ops.backends.triton.plan import Plan, Scaled, rows_of
from byteback.ops.contract.limits import MAX_INT32_DEPTH

MOST_BYTES = 2**27
"""Of a gathered operand."""

_UNIT = 16  # cuBLAS takes sizes that are multiples of this with its fastest kernels
_LEAST_ROWS = 32  # PyTorch needs more than 16


def fits(plan: Plan) -> bool:
    """Whether the sum over the pixels of one image fits in int32."""
    return math.prod(plan.out) <= MAX_INT32_DEPTH


def output(plan: Plan, x: Tensor, w: Tensor, y: Tensor, scaled: Scaled) -> None:
    rows = rows_of(x).view(*plan.image, plan.c)
    taps = rows_of(w).reshape(plan.k, -1)
    _convolve(plan.out, plan.taps, plan.groups, plan.steps, rows, taps, (y, plan.strides), scaled)


def grad_input(plan: Plan, g: Tensor, w: Tensor, dx: Tensor, scaled: Scaled) -> None:
    """A convolution of g with stride 1."""
    stride, padding, dilation = plan.steps[:3], plan.steps[3:6], plan.steps[6:]
    rows = rows_of(g).view(plan.image[0], *plan.out, plan.k)
    if any(step > 1 for step in stride):
        size = ((count - 1) * step + 1 for count, step in zip(plan.out, stride, strict=True))
        spread = rows.new_zeros((plan.image[0], *size, plan.k))
        spread[:, :: stride[0], :: stride[1], :: stride[2]] = rows
        rows = spread
    before = ((taps - 1) * step - pad for taps, step, pad in zip(plan.taps, dilation, padding, strict=True))
    kg, cg = plan.k // plan.groups, plan.c // plan.groups
    turned = w.reshape(plan.groups, kg, cg, *plan.taps).flip(3, 4, 5).permute(0, 2, 3, 4, 5, 1).reshape(plan.c, -1)
    steps = (1, 1, 1, *before, *dilation)
    _convolve(plan.image[1:], plan.taps, plan.groups, steps, rows, turned, (dx, plan.strides), scaled)


def _convolve(
    size: tuple[int, ...],
    taps: tuple[int, ...],
    groups: int,
    steps: tuple[int, ...],
    rows: Tensor,
    w: Tensor,
    result: tuple[Tensor, tuple[int, int, int]],
    scaled: Scaled,
) -> None:
    """Writes rows (N, D, H, W, C) ⋆ w (K, terms), which has `size` pixels for each image."""
    windows = _windows(rows, size, taps, steps, groups)
    (y, (y0, y1, pixel)), (factor, f0, f1) = result, scaled
    pixels, k = math.prod(size), w.shape[0] // groups
    for first, part in _parts(windows, windows.shape[0]):
        for group in range(groups):
            own = slice(group * k, group * k + k)
            count = part.shape[0]
            sums = _multiplied(part[..., group, :].reshape(count * pixels, -1), w[own])
            to = y[first : first + count, own]
            of = factor[first if f0 else 0 :, group * k if f1 else 0 :]
            where = 1, sums.numel(), pixels, k, y0, pixel, y1, f0, f1
            launch(conv_grad_weight.finish, (blocks(sums.numel(), 256),), sums, to, of, *where, B=256)


def grad_weight(plan: Plan, g: Tensor, x: Tensor, dw: Tensor, scaled: Scaled) -> None:
    rows = rows_of(g).view(plan.image[0], -1, plan.groups, plan.k // plan.groups)
    windows = _windows(rows_of(x).view(*plan.image, plan.c), plan.out, plan.taps, plan.steps, plan.groups)
    made = []
    for first, part in _parts(windows, MAX_INT32_DEPTH // math.prod(plan.out)):
        own = rows[first : first + part.shape[0]]
        for group in range(plan.groups):
            terms = own[:, :, group].permute(2, 0, 1).reshape(own.shape[3], -1)
            under = part[..., group, :].permute(4, 5, 6, 7, 0, 1, 2, 3).reshape(-1, terms.shape[1])
            made.append(_multiplied(terms, under))
    parts = torch.stack(made) if len(made) > 1 else made[0]
    (w0, w1, tap), (factor, f0, f1) = plan.strides, scaled
    total, taps = dw.numel(), plan.tap_count()
    where = len(made) // plan.groups, total, taps, plan.c // plan.groups, w0, tap, w1, f0, f1
    launch(conv_grad_weight.finish, (blocks(total, 256),), parts, dw, factor, *where, B=256)


def _windows(rows: Tensor, size: tuple[int, ...], taps: tuple[int, ...], steps: tuple[int, ...], groups: int) -> Tensor:
    """Returns a view (N, OD, OH, OW, T, R, S, groups, C/groups) of the pixels under each tap."""
    stride, padding, dilation = steps[:3], steps[3:6], steps[6:]
    pads = [0, 0]
    for axis in (2, 1, 0):
        reach = (size[axis] - 1) * stride[axis] + (taps[axis] - 1) * dilation[axis] + 1
        pads += [padding[axis], reach - rows.shape[1 + axis] - padding[axis]]
    padded = F.pad(rows, pads).contiguous() if any(pads) else rows
    image, *apart, c = padded.stride()
    each = rows.shape[4] // groups
    moves = (step * far for step, far in zip(stride, apart, strict=True))
    under = (step * far for step, far in zip(dilation, apart, strict=True))
    shape = (rows.shape[0], *size, *taps, groups, each)
    return padded.as_strided(shape, (image, *moves, *under, each, c))


def _parts(windows: Tensor, most: int) -> Iterator[tuple[int, Tensor]]:
    """Returns windows of at most `most` images each, that take at most MOST_BYTES, and the number of the first image."""
    count = windows.shape[0]
    each = max(1, min(most, MOST_BYTES // math.prod(windows.shape[1:])))
    for first in range(0, count, each):
        yield first, windows[first : first + each]


def _multiplied(a: Tensor, b: Tensor) -> Tensor:
    """Returns a (M, terms) times b (N, terms), transposed, in int32, dense."""
    m, terms, n = a.shape[0], a.shape[1], b.shape[0]
    more = -terms % _UNIT
    a = F.pad(a, (0, more, 0, max(_LEAST_ROWS - m, 0)))
    b = F.pad(b, (0, more, 0, -n % _UNIT))
    return torch._int_mm(a.contiguous(), b.contiguous().t())[:m, :n].contiguous()
