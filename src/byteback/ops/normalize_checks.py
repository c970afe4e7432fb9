# SPDX-License-Identifier: Apache-2.0
"""The checks at the door of the fused block's functions: each returns its argument, dense and ready for a kernel.

An unusual layout is copied, a wrong dtype or shape refused, on every path. `path_for` comes after them: it refuses tensors on
different devices and says who serves the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from byteback.addresses import is_part, same_device
from byteback.ops import native
from byteback.ops import normalize_reference as plain
from byteback.ops.normalize_reference import GradientParts, Into, Kept, Residual

ACTIVATIONS = ("none", "relu", "relu6", "hardswish", "silu")
SMOOTH = ("hardswish", "silu")  # their derivative is no mask
_INDEX = {name: index for index, name in enumerate(ACTIVATIONS)}
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_RUNNING = ("running mean", "running variance")
_float32 = torch.float32


def _dense(x: Tensor) -> Tensor:
    """x, copied if it does not lie channels last."""
    memory_format = _FORMATS.get(x.dim())
    if memory_format is not None:
        return x if x.is_contiguous(memory_format=memory_format) else x.contiguous(memory_format=memory_format)
    return x.contiguous() if x.dim() == 2 else plain.channels_last(x)


def check_tensor(op: str, name: str, x: Tensor, like: Tensor | None = None) -> Tensor:
    """x, checked and channels last."""
    if like is not None:
        _check_like(op, name, x, like, (_float32,))
    elif x.dtype is not _float32:
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, but this pass is defined in float32. Call .float() on it.")
    elif x.dim() < 2:
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, but it needs an N and a C axis. Reshape it.")
    return _dense(x)


def check_residual(op: str, residual: Residual, x: Tensor) -> Residual:
    """The residual, checked and channels last: float32, or int8 with one scale."""
    if residual is None or isinstance(residual, Tensor):
        return None if residual is None else check_tensor(op, "residual", residual, x)
    values, scale = residual
    _check_like(op, "residual", values, x, (torch.int8,))
    return _dense(values), check_one(op, "the residual's scale", scale)


def check_into(op: str, into: Into | None, x: Tensor, clip: Tensor | None, want_float: bool) -> tuple[Tensor, ...]:
    """The places that will be written to. Refuses one that is missing or is no slice of a channels-last tensor."""
    if into is None:
        return ()
    places = []
    for name, there, dtype, wanted in (
        ("values", into.values, torch.int8, clip is not None),
        ("output", into.output, _float32, want_float),
    ):
        if not wanted:
            continue
        if there is None or there.shape != x.shape or there.dtype is not dtype or not _is_slice(there, into.pitch):
            found = None if there is None else f"{there.dtype} of shape {tuple(there.shape)} and strides {there.stride()}"
            raise ValueError(
                f"{op}: into.{name} is {found}, but the result is {dtype} of shape {tuple(x.shape)}, and its channels are "
                f"neighbours among the {into.pitch} of a pixel. Pass a slice along axis 1 of a channels-last tensor."
            )
        places.append(there)
    return tuple(places)


def _is_slice(x: Tensor, pitch: int) -> bool:
    return is_part(x, x.dtype, pitch) if x.is_cpu else True  # PyTorch, which writes to other devices, takes any layout


def check_vector(op: str, name: str, vector: Tensor | None, channels: int, dtype: torch.dtype = _float32) -> Tensor:
    """A per-channel vector, checked and dense."""
    if vector is not None and vector.dtype is dtype and vector.dim() == 1 and vector.numel() == channels:
        return vector.contiguous()
    if vector is None:
        raise TypeError(f"{op}: {name} is None, but this activation needs z = a·x + b. Pass the vectors of the forward pass.")
    if vector.dtype is not dtype:
        short = str(dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} has dtype {vector.dtype}, but this pass takes it in {short}. Call .to({dtype}) on it.")
    raise ValueError(
        f"{op}: {name} has shape {tuple(vector.shape)}, but there are {channels} channels; it needs one number for each, "
        f"as shape ({channels},). Pass such a vector."
    )


Running = tuple[Tensor, Tensor] | None


def check_running(op: str, running: Running, channels: int) -> bool:
    """Whether a kernel can write to the running statistics, which are never copied; refuses those that nobody can."""
    if running is None:
        return True
    dense = [vector is check_vector(op, name, vector, channels) for name, vector in zip(_RUNNING, running, strict=True)]
    return all(dense)


def check_optional(op: str, name: str, vector: Tensor | None, channels: int) -> Tensor | None:
    """A per-channel vector that may be missing."""
    return None if vector is None else check_vector(op, name, vector, channels)


def check_one(op: str, name: str, number: Tensor) -> Tensor:
    if number.dtype is not _float32 or number.numel() != 1:
        raise ValueError(
            f"{op}: {name} has shape {tuple(number.shape)} and dtype {number.dtype}; it is one float32 for the whole tensor. "
            "Use ops.quantize for a clip per channel or per sample."
        )
    return number


def check_activation(op: str, activation: str) -> int:
    index = _INDEX.get(activation)
    if index is None:
        raise ValueError(f"{op}: activation {activation!r} is unknown; there are {', '.join(ACTIVATIONS)}.")
    return index


def check_key(op: str, key: Tensor | None) -> Tensor | None:
    """The noise key, dense; None stands for rounding to nearest."""
    if key is None:
        return None
    if key.dtype is not torch.int64 or key.numel() != 2:
        raise ValueError(
            f"{op}: key has shape {tuple(key.shape)} and dtype {key.dtype}; a noise key is two int64 words. Take it from "
            "byteback.ops.noise_key."
        )
    return key.contiguous()


def path_for(op: str, x: Tensor, *others: Tensor | None) -> int | None:
    """The native path for these tensors; None for the reference, which takes other devices and empty tensors.

    All of them must be on one device. A tensor whose sign is a bit (x.conj().imag) goes to the reference: its memory holds -x.
    """
    native.last_kernel = ""
    for tensor in (x, *others):
        if tensor is not None and (not tensor.is_cpu or tensor.is_neg()):
            same_device(op, (x, *others))
            return None
    return native.number() if x.numel() else None


def check_kept(op: str, x: Kept, g: Tensor) -> Kept:
    """BatchNorm's input as it was kept: float32, bfloat16 or (values int8, step, centre)."""
    if isinstance(x, tuple) and len(x) == 3:
        values, step, centre = x
        _check_like(op, "x", values, g, (torch.int8,))
        return _dense(values), check_vector(op, "step", step, g.shape[1]), check_vector(op, "centre", centre, g.shape[1])
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{op}: x is a {type(x).__name__}, but it must be a float32 or bfloat16 tensor, or a tuple (values int8, step, "
            "centre). Pass what the forward pass kept."
        )
    _check_like(op, "x", x, g, (_float32, torch.bfloat16))
    return _dense(x)


def _check_like(op: str, name: str, x: Tensor, like: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in dtypes:
        names = " or ".join(map(str, dtypes))
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, but it must be {names}. Convert it, or pass what was kept.")
    if x.shape != like.shape:
        raise ValueError(
            f"{op}: {name} has shape {tuple(x.shape)}, but it is taken element by element with a tensor of shape "
            f"{tuple(like.shape)}; nothing is broadcast. Expand it first."
        )


def check_gate(
    op: str, g: Tensor, a: Tensor | None, b: Tensor | None, mask: Tensor | None, activation: str
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """a, b and mask as far as they are needed, checked."""
    check_activation(op, activation)
    channels = g.shape[1]
    if activation in SMOOTH or (mask is None and activation != "none"):
        return check_vector(op, "a", a, channels), check_vector(op, "b", b, channels), None
    if mask is not None:
        shape = (g.numel() // channels if channels else mask.shape[0], (channels + 7) // 8)
        if mask.dtype is not torch.uint8 or mask.shape != shape:
            raise ValueError(
                f"{op}: mask has shape {tuple(mask.shape)} and dtype {mask.dtype}, but for a gradient of shape "
                f"{tuple(g.shape)} it is uint8 {shape}: one bit for each element. Pass the mask of the forward pass."
            )
        mask = mask.contiguous()
    return None, None, mask


def check_parts(op: str, parts: GradientParts) -> GradientParts:
    """A gradient that is not written out, checked."""
    g, x, a, b, mask, activation, p, q, r = parts
    g = check_tensor(op, "g", g)
    x = check_kept(op, x, g)
    a, b, mask = check_gate(op, g, a, b, mask, activation)
    channels = g.shape[1]
    p, q, r = check_vector(op, "p", p, channels), check_vector(op, "q", q, channels), check_vector(op, "r", r, channels)
    return GradientParts(g, x, a, b, mask, activation, p, q, r)


def path_of_parts(op: str, parts: GradientParts, *others: Tensor | None) -> int | None:
    """The native path for a gradient that is not written out and for what else is read with it."""
    g, x, a, b, mask, _, p, q, r = parts
    return path_for(op, g, *tensors_of(x), a, b, mask, p, q, r, *others)


def tensors_of(x: Kept | Residual) -> tuple[Tensor, ...]:
    """The tensors that stand for a kept input or a residual."""
    return (x,) if isinstance(x, Tensor) else x or ()
