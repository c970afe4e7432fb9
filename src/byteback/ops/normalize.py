# SPDX-License-Identifier: Apache-2.0
"""The elementwise passes of the fused training block: convolution → BatchNorm → (residual add) → activation → int8.

BatchNorm with the statistics of its batch is one multiplication and one addition per channel, so that forward is one or two
passes over the convolution's output and backward two passes over (g, x). Plain functions for tensors without gradients,
outside torch.compile; `normalize_reference.py` is their definition, `csrc/norm.h` the fast path, and both give the same bits.

Legend: x, g, residual are float32 (N, C, ...); a, b, p, q, r are float32 vectors (C,). Each operation rounds to float32 once,
in the order written. z = a·x + b (+ residual). Results lie channels last. NaN inputs give NaN.

    activation   value                           derivative
    none         z                               1
    relu         max(z, 0)                       z > 0
    relu6        min(max(z, 0), 6)               0 < z < 6
    hardswish    (z · min(max(z+3, 0), 6)) / 6   0 below -3, z/3 + 0.5 up to 3, then 1
    silu         z / (1 + exp(-z))               s · (1 + z · (1 - s)), s = 1 / (1 + exp(-z))

A mask keeps the derivative of none, relu and relu6 as bits: uint8 (pixels, ceil(C / 8)), bit c % 8 of byte c // 8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from byteback.ops import native, reference
from byteback.ops import normalize_native as kernels
from byteback.ops import normalize_reference as plain
from byteback.ops.normalize_reference import Kept

ACTIVATIONS = ("none", "relu", "relu6", "hardswish", "silu")
_INDEX = {name: index for index, name in enumerate(ACTIVATIONS)}
_SMOOTH = ("hardswish", "silu")
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_float32 = torch.float32


class Normalized(NamedTuple):
    """What one pass of `normalize` gave; None where it was not asked for."""

    values: Tensor | None
    scale: Tensor | None
    output: Tensor | None
    mask: Tensor | None
    counts: Tensor | None


# ---- checks at the door ----------------------------------------------------------------------------------------------


def _dense(x: Tensor) -> Tensor:
    """x, copied if it does not lie channels last."""
    memory_format = _FORMATS.get(x.dim())
    if memory_format is not None:
        return x if x.is_contiguous(memory_format=memory_format) else x.contiguous(memory_format=memory_format)
    return x.contiguous() if x.dim() == 2 else plain.channels_last(x)


def _tensor(op: str, name: str, x: Tensor, like: Tensor | None = None) -> Tensor:
    """x, checked and channels last."""
    if x.dtype is not _float32:
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, but this pass is defined in float32. Call .float() on it.")
    if like is None:
        if x.dim() < 2:
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, but it needs an N and a C axis. Reshape it.")
    elif x.shape != like.shape:
        raise ValueError(
            f"{op}: {name} has shape {tuple(x.shape)}, but it is taken element by element with a tensor of shape "
            f"{tuple(like.shape)}; nothing is broadcast. Expand it first."
        )
    return _dense(x)


def _vector(op: str, name: str, vector: Tensor | None, channels: int) -> Tensor:
    """A per-channel vector, checked and dense."""
    if vector is None:
        raise TypeError(f"{op}: {name} is None, but this activation needs z = a·x + b. Pass the vectors of the forward pass.")
    if vector.dtype is not _float32:
        raise TypeError(f"{op}: {name} has dtype {vector.dtype}, but this pass is defined in float32. Call .float() on it.")
    if vector.dim() != 1 or vector.shape[0] != channels:
        raise ValueError(
            f"{op}: {name} has shape {tuple(vector.shape)}, but there are {channels} channels; it needs one number for each, "
            f"as shape ({channels},). Flatten it."
        )
    return vector.contiguous()


def _one(op: str, name: str, number: Tensor) -> Tensor:
    if number.dtype is not _float32 or number.numel() != 1:
        raise ValueError(
            f"{op}: {name} has shape {tuple(number.shape)} and dtype {number.dtype}; it is one float32 for the whole tensor. "
            "Use ops.quantize for a clip per channel or per sample."
        )
    return number


def _activation(op: str, activation: str) -> int:
    index = _INDEX.get(activation)
    if index is None:
        raise ValueError(f"{op}: activation {activation!r} is unknown; there are {', '.join(ACTIVATIONS)}.")
    return index


def _path(x: Tensor) -> int | None:
    """The native path for this tensor; None for the reference, which takes other devices and empty tensors."""
    native.last_kernel = ""
    return native.number() if x.is_cpu and x.numel() else None


# ---- forward ---------------------------------------------------------------------------------------------------------


def channel_stats(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per channel Σx, Σx² (float64, defined bits), min x and max x (float32; NaN if any element is): four vectors (C,).

    >>> [s.tolist() for s in channel_stats(torch.tensor([[1.0, -3.0], [2.0, 0.5]]))]
    [[3.0, -2.5], [5.0, 9.25], [1.0, -3.0], [2.0, 0.5]]
    """
    x = _tensor("channel_stats", "x", x)
    path = _path(x)
    if path is not None:
        return kernels.channel_stats(path, x)
    with torch.no_grad():
        return plain.channel_stats(x)


def normalize_peak(x: Tensor, a: Tensor, b: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    """max|activation(a·x + b + residual)| as a 0-dim tensor; NaN if any element is, 0 for an empty tensor.

    >>> normalize_peak(torch.tensor([[1.0], [-4.0]]), torch.tensor([2.0]), torch.tensor([1.0]), None, "relu").item()
    3.0
    """
    op = "normalize_peak"
    x = _tensor(op, "x", x)
    channels = x.shape[1]
    a, b, index = _vector(op, "a", a, channels), _vector(op, "b", b, channels), _activation(op, activation)
    residual = None if residual is None else _tensor(op, "residual", residual, x)
    path = _path(x)
    if path is not None:
        return kernels.normalize_peak(path, x, a, b, residual, index)
    with torch.no_grad():
        return plain.normalize_peak(x, a, b, residual, activation)


def normalize(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    residual: Tensor | None,
    activation: str,
    clip: Tensor | None,
    *,
    want_float: bool,
    want_mask: bool,
) -> Normalized:
    """y = activation(a·x + b + residual): as int8 by `clip` (one float32; None: no int8), as float32, its mask; in one pass.

    values, scale and counts are those of ops.quantize(y, clip). hardswish and silu have no mask (None): backward takes z again.

    >>> x, one = torch.tensor([[1.0, -3.0]]), torch.ones(2)
    >>> result = normalize(x, one, one, None, "relu", torch.tensor(2.0), want_float=True, want_mask=True)
    >>> result.values.tolist(), result.output.tolist(), result.mask.tolist(), result.counts.tolist()
    ([[127, 0]], [[2.0, 0.0]], [[1]], [0, 0])
    """
    op = "normalize"
    x = _tensor(op, "x", x)
    channels = x.shape[1]
    a, b, index = _vector(op, "a", a, channels), _vector(op, "b", b, channels), _activation(op, activation)
    residual = None if residual is None else _tensor(op, "residual", residual, x)
    clip = None if clip is None else _one(op, "clip", clip)
    want_mask = want_mask and activation not in _SMOOTH
    path = _path(x)
    if path is not None:
        return Normalized(*kernels.normalize(path, x, a, b, residual, index, clip, want_float, want_mask))
    with torch.no_grad():
        values, scale, output, mask, counts = plain.normalize(x, a, b, residual, activation, clip, want_mask)
    return Normalized(values, scale, output if want_float else None, mask, counts)


# ---- backward --------------------------------------------------------------------------------------------------------


def _kept(op: str, x: Kept, g: Tensor) -> Kept:
    if isinstance(x, Tensor):
        return _tensor(op, "x", x, g)
    raise TypeError(f"{op}: x is a {type(x).__name__}, but it must be a float32 tensor.")


def _gate(
    op: str, g: Tensor, a: Tensor | None, b: Tensor | None, mask: Tensor | None, activation: str
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """a, b and mask as far as they are needed, checked."""
    _activation(op, activation)
    channels = g.shape[1]
    if activation in _SMOOTH or (mask is None and activation != "none"):
        return _vector(op, "a", a, channels), _vector(op, "b", b, channels), None
    if mask is not None:
        shape = (g.numel() // channels if channels else mask.shape[0], (channels + 7) // 8)
        if mask.dtype is not torch.uint8 or mask.shape != shape:
            raise ValueError(
                f"{op}: mask has shape {tuple(mask.shape)} and dtype {mask.dtype}, but for a gradient of shape "
                f"{tuple(g.shape)} it is uint8 {shape}: one bit for each element. Pass the mask of the forward pass."
            )
        mask = mask.contiguous()
    return None, None, mask


def normalize_grad_sums(
    g: Tensor,
    x: Kept,
    a: Tensor | None,
    b: Tensor | None,
    mask: Tensor | None,
    activation: str,
    *,
    want_masked: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Per channel Σgm and Σ gm·x (float64, defined bits), and gm itself if wanted: the gradient of the residual branch.

    gm = g · activation'(z). For none, relu and relu6 it is g or 0 by the mask if there is one, else by z; hardswish and silu
    always take z = a·x + b. `none` without a mask needs neither a nor b.

    >>> g, x = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [-1.0]])
    >>> total, dot, gm = normalize_grad_sums(g, x, torch.ones(1), torch.zeros(1), None, "relu", want_masked=True)
    >>> total.item(), dot.item(), gm.tolist()
    (1.0, 3.0, [[1.0], [0.0]])
    """
    op = "normalize_grad_sums"
    g = _tensor(op, "g", g)
    x = _kept(op, x, g)
    a, b, mask = _gate(op, g, a, b, mask, activation)
    path = _path(g)
    if path is not None:
        return kernels.normalize_grad_sums(path, g, kernels.backward_numbers(g, x, a, b, mask, activation), want_masked)
    with torch.no_grad():
        total, dot, masked = plain.normalize_grad_sums(g, x, a, b, mask, activation)
    return total, dot, masked if want_masked else None


def normalize_grad(
    g: Tensor,
    x: Kept,
    a: Tensor | None,
    b: Tensor | None,
    mask: Tensor | None,
    activation: str,
    p: Tensor,
    q: Tensor,
    r: Tensor,
) -> Tensor:
    """dx = (p·gm + q·x) + r, with gm as in normalize_grad_sums.

    >>> g, x, one = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]]), torch.ones(2)
    >>> normalize_grad(g, x, None, None, None, "none", 2 * one, one, 10 * one).tolist()
    [[15.0, 13.0]]
    """
    op = "normalize_grad"
    g = _tensor(op, "g", g)
    x = _kept(op, x, g)
    a, b, mask = _gate(op, g, a, b, mask, activation)
    channels = g.shape[1]
    p, q, r = _vector(op, "p", p, channels), _vector(op, "q", q, channels), _vector(op, "r", r, channels)
    path = _path(g)
    if path is not None:
        return kernels.normalize_grad(path, g, kernels.backward_numbers(g, x, a, b, mask, activation, p, q, r))
    with torch.no_grad():
        return plain.normalize_grad(g, x, a, b, mask, activation, p, q, r)


def normalize_grad_quantize(
    g: Tensor,
    x: Kept,
    a: Tensor | None,
    b: Tensor | None,
    mask: Tensor | None,
    activation: str,
    p: Tensor,
    q: Tensor,
    r: Tensor,
    clip: Tensor,
    key: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ops.quantize(dx, clip, key) with the dx of normalize_grad, which is never written: values, scale, counts, max|dx|.

    >>> g, x, one = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]]), torch.ones(2)
    >>> values, *_ = normalize_grad_quantize(g, x, None, None, None, "none", one, one, one, torch.tensor(10.0), None)
    >>> values.tolist()
    [[64, 25]]
    """
    op = "normalize_grad_quantize"
    g = _tensor(op, "g", g)
    x = _kept(op, x, g)
    a, b, mask = _gate(op, g, a, b, mask, activation)
    channels = g.shape[1]
    p, q, r = _vector(op, "p", p, channels), _vector(op, "q", q, channels), _vector(op, "r", r, channels)
    clip = _one(op, "clip", clip)
    path = _path(g)
    if path is not None:
        numbers = kernels.backward_numbers(g, x, a, b, mask, activation, p, q, r)
        return kernels.normalize_grad_quantize(path, g, numbers, clip, None if key is None else key.contiguous())
    with torch.no_grad():
        dx = plain.normalize_grad(g, x, a, b, mask, activation, p, q, r)
        return reference.quantize(dx, clip.reshape((1,) * dx.dim()), key)
