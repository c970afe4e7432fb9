# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that several operators use. Those of the fused block return the argument as a dense tensor.

For every backend, another layout is copied, and a wrong dtype or shape is an error. The registry checks that all tensors are on
the same device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from byteback.ops.activations import ACTIVATIONS, TABLE
from byteback.ops.contract.layout import channels_last, is_part
from byteback.ops.types import BatchNorm, Extremes, GradientParts, Into, Kept, QTensor, Residual, Running

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_float32 = torch.float32


def check_int8(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int8:
            raise TypeError(
                f"{op}: {name} has dtype {tensor.dtype}, but must be int8. Quantize it first with byteback.ops.quantize."
            )


def check_float(op: str, name: str, x: Tensor, least_rank: int = 2) -> None:
    if x.dtype != torch.float32:
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, but only float32 is quantized. Call .float() on it.")
    if x.dim() < least_rank:
        raise ValueError(
            f"{op}: {name} has shape {tuple(x.shape)}, but it needs an N and a C axis, because noise and statistics are "
            "defined in N, ..., C order. Reshape it, for example with unsqueeze(0)."
        )


# ---- the fused block -------------------------------------------------------------------------------------------------


def _dense(x: Tensor) -> Tensor:
    """Returns x in channels-last memory format, copied if needed."""
    memory_format = _FORMATS.get(x.dim())
    if memory_format is not None:
        return x if x.is_contiguous(memory_format=memory_format) else x.contiguous(memory_format=memory_format)
    return x.contiguous() if x.dim() == 2 else channels_last(x)


def check_tensor(op: str, name: str, x: Tensor) -> Tensor:
    """Returns x, checked and channels last."""
    if x.dtype is not _float32:
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, but must be float32. Call .float() on it.")
    elif x.dim() < 2:
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, but it needs an N and a C axis. Reshape it.")
    return _dense(x)


def check_stream(op: str, name: str, x: Tensor) -> Tensor:
    """Returns x, checked and channels last: float32, or rounded to bfloat16."""
    return _dense(x) if x.dtype is torch.bfloat16 and x.dim() >= 2 else check_tensor(op, name, x)


def check_stored(op: str, **dtypes: torch.dtype) -> None:
    """Raises an error if a result cannot be stored in this dtype."""
    for name, dtype in dtypes.items():
        if dtype not in (_float32, torch.bfloat16):
            raise ValueError(f"{op}: {name} is {dtype}, but floats are stored as torch.float32 or torch.bfloat16. Choose one.")


def check_residual(op: str, residual: Residual, shape: Sequence[int]) -> Residual:
    """Returns the residual of a tensor of this shape, checked and channels last: float32, bfloat16, or int8 with one scale."""
    if residual is None:
        return None
    if isinstance(residual, Tensor):
        _check_like(op, "residual", residual, shape, (_float32, torch.bfloat16))
        return _dense(residual)
    values, scale = residual[:2]
    _check_like(op, "residual", values, shape, (torch.int8,))
    return QTensor(_dense(values), check_one(op, "the residual's scale", scale))


def check_into(op: str, into: Into | None, shape: Sequence[int], clip: Tensor | None, want_float: bool) -> tuple[Tensor, ...]:
    """Returns the output tensors for a result of this shape. They must be channel slices of channels-last tensors."""
    if into is None:
        return ()
    places = []
    for name, there, dtype, wanted in (
        ("values", into.values, torch.int8, clip is not None),
        ("output", into.output, _float32, want_float),
    ):
        if not wanted:
            continue
        if there is None or there.shape != shape or there.dtype is not dtype or not is_part(there, into.pitch):
            found = None if there is None else f"{there.dtype} of shape {tuple(there.shape)} and strides {there.stride()}"
            raise ValueError(
                f"{op}: into.{name} is {found}, but must be {dtype} of shape {tuple(shape)}: a slice along axis 1 of a dense "
                f"channels-last tensor with {into.pitch} channels. Pass such a slice."
            )
        places.append(there)
    return tuple(places)


def check_vector(op: str, name: str, vector: Tensor | None, channels: int, dtype: torch.dtype = _float32) -> Tensor:
    """Returns a vector with one number per channel, checked and dense."""
    if vector is not None and vector.dtype is dtype and vector.dim() == 1 and vector.numel() == channels:
        return vector.contiguous()
    if vector is None:
        raise TypeError(f"{op}: {name} is None, but this activation needs z = a·x + b. Pass the vectors of the forward pass.")
    if vector.dtype is not dtype:
        short = str(dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} has dtype {vector.dtype}, but must be {short}. Call .to({dtype}) on it.")
    raise ValueError(
        f"{op}: {name} has shape {tuple(vector.shape)}, but there are {channels} channels; it must have one number per "
        f"channel. Pass a vector of shape ({channels},)."
    )


def check_running(op: str, running: Running, channels: int) -> None:
    """Raises an error if the running statistics are not vectors. They are written to, so they are not copied."""
    if running is not None:
        check_vector(op, "running mean", running[0], channels)
        check_vector(op, "running variance", running[1], channels)


def check_optional(op: str, name: str, vector: Tensor | None, channels: int) -> Tensor | None:
    """Returns a vector with one number per channel, checked; None stays None."""
    return None if vector is None else check_vector(op, name, vector, channels)


def check_one(op: str, name: str, number: Tensor) -> Tensor:
    if number.dtype is not _float32 or number.numel() != 1:
        raise ValueError(
            f"{op}: {name} has shape {tuple(number.shape)} and dtype {number.dtype}, but must be one float32 number. "
            "Use ops.quantize for a clip per channel or per sample."
        )
    return number


def check_activation(op: str, activation: str) -> None:
    if activation not in TABLE:
        raise ValueError(f"{op}: unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}.")


def check_key(op: str, key: Tensor | None) -> Tensor | None:
    """Returns the noise key, dense; None means rounding to nearest."""
    if key is None:
        return None
    if key.dtype is not torch.int64 or key.numel() != 2:
        raise ValueError(
            f"{op}: key has shape {tuple(key.shape)} and dtype {key.dtype}, but a noise key is two int64 numbers. Create it "
            "with byteback.ops.noise_key."
        )
    return key.contiguous()


def check_kept(op: str, x: Kept, g: Tensor) -> Kept:
    """Returns the saved input of a BatchNorm, checked: float32, bfloat16 or (values int8, step, centre)."""
    if isinstance(x, tuple) and len(x) == 3:
        values, step, centre = x
        _check_like(op, "x", values, g.shape, (torch.int8,))
        return _dense(values), check_vector(op, "step", step, g.shape[1]), check_vector(op, "centre", centre, g.shape[1])
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{op}: x is a {type(x).__name__}, but it must be a float32 or bfloat16 tensor, or a tuple (values int8, step, "
            "centre). Pass what the forward pass saved."
        )
    _check_like(op, "x", x, g.shape, (_float32, torch.bfloat16))
    return _dense(x)


def _check_like(op: str, name: str, x: Tensor, shape: Sequence[int], dtypes: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in dtypes:
        names = " or ".join(map(str, dtypes))
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, but must be {names}. Convert it, or pass the saved tensor.")
    if x.shape != shape:
        raise ValueError(
            f"{op}: {name} has shape {tuple(x.shape)}, but must have shape {tuple(shape)}; it is not broadcast. "
            "Expand it first."
        )


def check_gate(
    op: str, g: Tensor, a: Tensor | None, b: Tensor | None, mask: Tensor | None, activation: str
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns a, b and mask, checked; None for those that are not needed."""
    check_activation(op, activation)
    channels = g.shape[1]
    if TABLE[activation].is_smooth or (mask is None and activation != "none"):
        return check_vector(op, "a", a, channels), check_vector(op, "b", b, channels), None
    if mask is not None:
        shape = (g.numel() // channels if channels else mask.shape[0], (channels + 7) // 8)
        if mask.dtype is not torch.uint8 or mask.shape != shape:
            raise ValueError(
                f"{op}: mask has shape {tuple(mask.shape)} and dtype {mask.dtype}, but for a gradient of shape "
                f"{tuple(g.shape)} it must be uint8 {shape}, one bit per element. Pass the mask of the forward pass."
            )
        mask = mask.contiguous()
    return None, None, mask


def check_parts(op: str, parts: GradientParts) -> GradientParts:
    """Returns the parts of a gradient that is not stored, checked."""
    g, x, a, b, mask, activation, p, q, r = parts
    g = check_stream(op, "g", g)
    x = check_kept(op, x, g)
    a, b, mask = check_gate(op, g, a, b, mask, activation)
    channels = g.shape[1]
    p, q, r = check_vector(op, "p", p, channels), check_vector(op, "q", q, channels), check_vector(op, "r", r, channels)
    return GradientParts(g, x, a, b, mask, activation, p, q, r)


def check_norm(op: str, norm: BatchNorm, channels: int) -> BatchNorm:
    """Returns the parameters of a norm in training, checked and dense. The running statistics are not copied."""
    gamma, beta, bias, eps, running, momentum = norm
    gamma, beta = check_optional(op, "gamma", gamma, channels), check_optional(op, "beta", beta, channels)
    bias = check_optional(op, "bias", bias, channels)
    check_running(op, running, channels)
    return BatchNorm(gamma, beta, bias, eps, running, momentum)


def check_extremes(
    op: str, x: Tensor, low: Tensor | None, high: Tensor | None, mean: Tensor | None, kind: str
) -> Extremes | None:
    """Returns what is needed to save x as int8: low, high and mean of each channel; None for bfloat16."""
    if kind == "bfloat16":
        return None
    if kind != "int8":
        raise ValueError(f"{op}: the input of BatchNorm cannot be saved as {kind!r}; choose 'bfloat16' or 'int8'.")
    if low is None or high is None or mean is None:
        raise TypeError(f"{op}: int8 needs low, high and mean of each channel. Pass those of channel_stats.")
    channels = x.shape[1]
    centre = check_vector(op, "mean", mean.to(torch.float32), channels)
    return check_vector(op, "low", low, channels), check_vector(op, "high", high, channels), centre
