# SPDX-License-Identifier: Apache-2.0
"""Quantization operators: from floats to int8 values with a scale, and the noise of stochastic rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback.ops.backends import meta
from byteback.ops.backends.registry import backend_for
from byteback.ops.checks import check_float, check_key, check_one, check_tensor
from byteback.ops.contract.geometry import whole
from byteback.ops.dispatch import define, remembered
from byteback.ops.types import QTensor

_plans: dict[tuple[Any, ...], Any] = {}


def broadcasts(per_scale: Tensor, x: Tensor) -> bool:
    """Whether a clip or a scale has the rank of x, with size 1 along the axes that share it."""
    if per_scale.dim() != x.dim():
        return False
    return per_scale.numel() == 1 or all(c in (1, n) for c, n in zip(per_scale.shape, x.shape, strict=True))


def _check_quantize(x: Tensor, clip: Tensor, key: Tensor | None) -> None:
    check_float("quantize", "x", x)
    if clip.dtype != torch.float32 or not broadcasts(clip, x):
        raise ValueError(
            f"quantize: clip has shape {tuple(clip.shape)} and dtype {clip.dtype}, x has shape {tuple(x.shape)}; the clip "
            "must be float32 with the rank of x, with size 1 along the axes that share it. Reshape the clip."
        )
    _check_key("quantize", key)


def _check_key(op: str, key: Tensor | None) -> None:
    if key is not None and (key.shape != (2,) or key.dtype != torch.int64):
        raise ValueError(
            f"{op}: key has shape {tuple(key.shape)} and dtype {key.dtype}, but a noise key is two int64 numbers. Create it "
            "with byteback.ops.noise_key."
        )


def _quantize(x: Tensor, clip: Tensor, key: Tensor | None) -> QTensor:
    _check_quantize(x, clip, key)
    return backend_for("quantize", x, clip, key).quantize(x, clip, key)


def _quantize_fake(x: Tensor, clip: Tensor, key: Tensor | None) -> QTensor:
    _check_quantize(x, clip, key)
    return meta.quantize(x, clip, key)


def check_axis(op: str, x: Tensor, axis: int) -> None:
    if not -1 <= axis < x.dim():
        raise ValueError(f"{op}: axis is {axis}, but x has shape {tuple(x.shape)}; pass one of its axes, or -1 for all.")


def _check_quantize_max(x: Tensor, axis: int, key: Tensor | None) -> None:
    check_float("quantize_max", "x", x)
    check_axis("quantize_max", x, axis)
    _check_key("quantize_max", key)


def _quantize_max(x: Tensor, axis: int, key: Tensor | None) -> Any:
    backend = backend_for("quantize_max", x, key)
    known = (backend, axis, x.dtype, x.shape, x.stride())  # arguments are checked once for each plan
    plan = _plans.get(known)
    if plan is None:
        _check_quantize_max(x, axis, key)
        plan = remembered(_plans, known, backend.quantize_plan(x, axis))
    elif key is not None:
        _check_key("quantize_max", key)
    return backend.quantize_max(plan, x, axis, key)


def _quantize_max_fake(x: Tensor, axis: int, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_quantize_max(x, axis, key)
    return meta.quantize_max((), x, axis, key)


def _noise_key(seed: Tensor, layer: Tensor, count: Tensor, rank: int) -> Tensor:
    for name, tensor in (("seed", seed), ("layer", layer), ("count", count)):
        if tensor.dtype != torch.int64 or tensor.numel() != 1:
            raise TypeError(
                f"noise_key: {name} has dtype {tensor.dtype} and shape {tuple(tensor.shape)}, but must be a single int64 "
                "number. Pass torch.tensor(number)."
            )
    return backend_for("noise_key", seed, layer, count).noise_key(seed, layer, count, rank)


_quantize_operator = define(
    "quantize(Tensor x, Tensor clip, Tensor? key) -> (Tensor, Tensor, Tensor, Tensor)", _quantize, _quantize_fake
)
_quantize_max_operator = define(
    "quantize_max(Tensor x, int axis, Tensor? key) -> (Tensor, Tensor, Tensor, Tensor)", _quantize_max, _quantize_max_fake
)
_noise_key_operator = define(
    "noise_key(Tensor seed, Tensor layer, Tensor count, int rank) -> Tensor", _noise_key, meta.noise_key
)


# ---- the functions of byteback.ops -----------------------------------------------------------------------------------


def quantize(x: Tensor, clip: Tensor, key: Tensor | None = None) -> QTensor:
    """Quantizes x: q = round(clamp(x * (127 / clip), ±127)), scale = clip / 127. Rounds stochastically with a noise key.

    Without a key it rounds to nearest. Returns the int8 values, the scale (in the shape of `clip`), the counts (|x| > clip,
    non-finite) and max|x|.

    >>> x = torch.tensor([[-4.0, 0.1, 2.0]])
    >>> values, scale, counts, peak = quantize(x, torch.tensor([[2.0]]))
    >>> values.tolist(), counts.tolist(), peak.item()
    ([[-127, 6, 127]], [1, 0], 4.0)
    """
    made = _quantize_operator(x, clip, key)
    return made if type(made) is QTensor else QTensor(*made)  # PyTorch's dispatcher returns a tuple


def quantize_max(x: Tensor, axis: int = -1, key: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantizes x with clip = max|x| of the whole tensor (-1) or for each index of `axis`: `absmax` and `quantize` in one call.

    Returns the int8 values, the scale, the clip (both in the shape of `absmax`) and the counts (saturated, non-finite).

    >>> values, scale, clip, counts = quantize_max(torch.tensor([[-4.0, 0.1, 2.0]]))
    >>> values.tolist(), clip.tolist(), counts.tolist()
    ([[-127, 3, 64]], [[4.0]], [0, 0])
    """
    return _quantize_max_operator(x, whole("quantize_max", "axis", axis), key)


def noise_key(seed: Tensor, layer: Tensor, count: Tensor, rank: int = 0) -> Tensor:
    """Returns the noise key of one gradient: two int64 numbers, different for each (seed, rank, layer, count).

    All 64 bits of seed and count are used, and the low 32 bits of layer and rank. Both numbers of the key are below 2^32. For
    other keys, the operators that take a key use only the low 32 bits of each number.
    """
    return _noise_key_operator(seed, layer, count, whole("noise_key", "rank", rank))


def check_clips(
    op: str, x: Tensor, clip: Tensor, per_channel: Tensor, key: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the clips and the key of a tensor that is quantized twice, checked."""
    clip, key = check_one(op, "clip", clip), check_key(op, key)
    shape = (1, x.shape[1], *(1,) * (x.dim() - 2))
    if per_channel.shape != shape or per_channel.dtype is not torch.float32:
        raise ValueError(
            f"{op}: clip_per_channel has shape {tuple(per_channel.shape)} and dtype {per_channel.dtype}, but for a tensor of "
            f"shape {tuple(x.shape)} it must be float32 {shape}. Reshape it."
        )
    return clip, per_channel.contiguous(), key


def quantize_pair(x: Tensor, clip: Tensor, clip_per_channel: Tensor, key: Tensor | None) -> tuple[QTensor, QTensor]:
    """Returns quantize(x, clip, key) and quantize(x, clip_per_channel, key), with the same noise, in one pass over x.

    For recipes with one scale per tensor for grad_input and one per channel for grad_weight. This is a plain function for
    tensors without gradients, outside of torch.compile.

    >>> x = torch.tensor([[1.0, -3.0]])
    >>> both = quantize_pair(x, torch.tensor(3.0), torch.tensor([[1.0, 6.0]]), None)
    >>> [values.tolist() for values, *_ in both]
    [[[42, -127]], [[127, -64]]]
    """
    op = "quantize_pair"
    x = check_tensor(op, "x", x)
    clip, clip_per_channel, key = check_clips(op, x, clip, clip_per_channel, key)
    return backend_for(op, x, clip, clip_per_channel, key).quantize_pair(x, clip, clip_per_channel, key)
