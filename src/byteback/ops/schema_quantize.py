# SPDX-License-Identifier: Apache-2.0
"""quantize, the noise and the statistics as operators: what may be asked of them, and who serves it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback.ops import native_kernels, pool, reference, statistics
from byteback.ops.schema import check_float, check_int8, define, path_of, plainly, remembered

_quantize_plans: dict[tuple[Any, ...], native_kernels.QuantizePlan] = {}


def _broadcasts(per_scale: Tensor, x: Tensor) -> bool:
    if per_scale.dim() != x.dim():
        return False
    return per_scale.numel() == 1 or all(c in (1, n) for c, n in zip(per_scale.shape, x.shape, strict=True))


def _check_quantize(x: Tensor, clip: Tensor, key: Tensor | None) -> None:
    check_float("quantize", "x", x)
    if clip.dtype != torch.float32 or not _broadcasts(clip, x):
        raise ValueError(
            f"quantize: clip has shape {tuple(clip.shape)} and dtype {clip.dtype}, x has shape {tuple(x.shape)}; the clip "
            "must be float32 with the rank of x and ones along the axes that share it. Reshape the clip."
        )
    _check_key("quantize", key)


def _check_key(op: str, key: Tensor | None) -> None:
    if key is not None and (key.shape != (2,) or key.dtype != torch.int64):
        raise ValueError(
            f"{op}: key has shape {tuple(key.shape)} and dtype {key.dtype}; stochastic rounding needs the int64 pair "
            "that byteback.ops.noise_key makes."
        )


def _quantize(x: Tensor, clip: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_quantize(x, clip, key)
    path = path_of(x, clip)
    # The native kernels know clips per tensor, sample and channel; the reference knows all.
    if path is not None and (clip.numel() == 1 or all(size == 1 for size in clip.shape[2:])):
        return native_kernels.quantize(path, x, clip, key)
    return plainly(reference.quantize, x, clip, key)


def _quantize_fake(x: Tensor, clip: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_quantize(x, clip, key)
    counts = x.new_empty(2, dtype=torch.int64)
    return torch.empty_like(x, dtype=torch.int8), torch.empty_like(clip), counts, x.new_empty(())


def _noise_key(seed: Tensor, layer: Tensor, count: Tensor, rank: int) -> Tensor:
    for name, tensor in (("seed", seed), ("layer", layer), ("count", count)):
        if tensor.dtype != torch.int64 or tensor.numel() != 1:
            raise TypeError(
                f"noise_key: {name} has dtype {tensor.dtype} and shape {tuple(tensor.shape)}; the key is made of single int64 "
                "numbers. Pass torch.tensor(number)."
            )
    if path_of(seed, layer, count) is not None:
        return native_kernels.noise_key(seed, layer, count, rank)
    return reference.noise_key(seed, layer, count, rank)


quantize = define("quantize(Tensor x, Tensor clip, Tensor? key) -> (Tensor, Tensor, Tensor, Tensor)", _quantize, _quantize_fake)
noise_key = define(
    "noise_key(Tensor seed, Tensor layer, Tensor count, int rank) -> Tensor",
    _noise_key,
    lambda seed, layer, count, rank: count.new_empty(2, dtype=torch.int64),
)


def _kept(x: Tensor, axis: int) -> list[int]:
    return [x.shape[dim] if dim == axis else 1 for dim in range(x.dim())]


def _statistic(name: str, x: Tensor, *arguments: Any) -> Any:
    """One of the statistics that both modules have, from the one that serves x."""
    if path_of(x, *(argument for argument in arguments if isinstance(argument, Tensor))) is not None:
        return getattr(native_kernels, name)(x, *arguments)
    return plainly(getattr(statistics, name), x, *arguments)


def _check_axis(op: str, x: Tensor, axis: int) -> None:
    if not -1 <= axis < x.dim():
        raise ValueError(f"{op}: axis is {axis}, but x has shape {tuple(x.shape)}; give one of its axes, or -1 for all.")


def _absmax(x: Tensor, axis: int) -> Tensor:
    check_float("absmax", "x", x, least_rank=1)
    _check_axis("absmax", x, axis)
    path = path_of(x)
    if path is not None and x.dim() > 1 and axis < 2:
        return native_kernels.absmax(path, x, axis)
    return plainly(statistics.absmax, x, axis)


absmax = define("absmax(Tensor x, int axis) -> Tensor", _absmax, lambda x, axis: x.new_empty(_kept(x, axis)))


def _check_quantize_max(x: Tensor, axis: int, key: Tensor | None) -> None:
    check_float("quantize_max", "x", x)
    _check_axis("quantize_max", x, axis)
    _check_key("quantize_max", key)


def _quantize_max(x: Tensor, axis: int, key: Tensor | None) -> Any:
    path = path_of(x)
    if path is None or axis > 1 or x.dim() > pool.MOST_AXES:
        _check_quantize_max(x, axis, key)
        return plainly(reference.quantize_max, x, axis, key)
    known = (axis, x.dtype, x.shape, x.stride())  # as with _planned, checked once for each; path_of has seen the device
    plan = _quantize_plans.get(known)
    if plan is None:
        _check_quantize_max(x, axis, key)
        plan = remembered(_quantize_plans, known, native_kernels.quantize_plan(x, axis))
    elif key is not None:
        _check_key("quantize_max", key)
    return native_kernels.quantize_max(path, plan, x, axis, key)


def _quantize_max_fake(x: Tensor, axis: int, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_quantize_max(x, axis, key)
    shape, counts = _kept(x, axis), x.new_empty(2, dtype=torch.int64)
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(shape), x.new_empty(shape), counts


quantize_max = define(
    "quantize_max(Tensor x, int axis, Tensor? key) -> (Tensor, Tensor, Tensor, Tensor)", _quantize_max, _quantize_max_fake
)


def _moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_float("moments", "x", x)
    return _statistic("moments", x)


def _moments_fake(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shape = _kept(x, 1)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.float64), x.new_empty(shape, dtype=torch.float64)


moments = define("moments(Tensor x) -> (Tensor, Tensor, Tensor)", _moments, _moments_fake)


def _tail_count(x: Tensor, threshold: Tensor) -> Tensor:
    check_float("tail_count", "x", x)
    one, each = [1] * x.dim(), _kept(x, 1)
    if threshold.dtype != torch.float32 or list(threshold.shape) not in (one, each):
        raise ValueError(
            f"tail_count: threshold has shape {tuple(threshold.shape)} and dtype {threshold.dtype}, x has shape "
            f"{tuple(x.shape)}; it must be float32, one for all {tuple(one)} or one per channel {tuple(each)}."
        )
    return _statistic("tail_count", x, threshold)


tail_count = define(
    "tail_count(Tensor x, Tensor threshold) -> Tensor",
    _tail_count,
    lambda x, threshold: x.new_empty(_kept(x, 1), dtype=torch.int64),
)


def _dot_terms(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    check_float("dot_terms", "x", x)
    check_int8("dot_terms", values=values)
    if values.shape != x.shape or scale.dtype != torch.float32 or not _broadcasts(scale, x):
        raise ValueError(
            f"dot_terms: x has shape {tuple(x.shape)}, values {tuple(values.shape)}, scale {tuple(scale.shape)} of "
            f"{scale.dtype}; values must have the shape of x, and scale is float32 with its rank and ones along shared axes."
        )
    # The native kernels know scales per tensor, sample and channel; the reference knows all.
    if all(size == 1 for size in scale.shape[2:]):
        return _statistic("dot_terms", x, values, scale)
    return plainly(statistics.dot_terms, x, values, scale)


dot_terms = define(
    "dot_terms(Tensor x, Tensor values, Tensor scale) -> Tensor",
    _dot_terms,
    lambda x, values, scale: x.new_empty(3, dtype=torch.float64),
)


def _check_clips(op: str, x: Tensor, clips: Tensor, rank: int) -> None:
    check_float(op, "x", x)
    if clips.dtype != torch.float32 or clips.dim() != rank:
        raise ValueError(
            f"{op}: the clip has shape {tuple(clips.shape)} and dtype {clips.dtype}; it must be float32 with {rank} axes, "
            "since this operator measures clips for the whole tensor. Reshape it."
        )


def _cosine_terms(x: Tensor, clips: Tensor, stochastic: bool) -> Tensor:
    _check_clips("cosine_terms", x, clips, 1)
    return _statistic("cosine_terms", x, clips, stochastic)


def _channel_cosine_terms(x: Tensor, clips: Tensor, stochastic: bool) -> Tensor:
    check_float("channel_cosine_terms", "x", x)
    if clips.dtype != torch.float32 or clips.dim() != 2 or clips.shape[1] != x.shape[1]:
        raise ValueError(
            f"channel_cosine_terms: clips has shape {tuple(clips.shape)} and dtype {clips.dtype}, x has shape "
            f"{tuple(x.shape)}; it must be float32 (candidates, {x.shape[1]}), one clip for each channel. Expand it."
        )
    return _statistic("channel_cosine_terms", x, clips, stochastic)


def _cosine_slope_terms(x: Tensor, clip: Tensor) -> Tensor:
    _check_clips("cosine_slope_terms", x, clip, 0)
    return _statistic("cosine_slope_terms", x, clip)


cosine_terms = define(
    "cosine_terms(Tensor x, Tensor clips, bool stochastic) -> Tensor",
    _cosine_terms,
    lambda x, clips, stochastic: x.new_empty(clips.shape[0], 3, dtype=torch.float64),
)
channel_cosine_terms = define(
    "channel_cosine_terms(Tensor x, Tensor clips, bool stochastic) -> Tensor",
    _channel_cosine_terms,
    lambda x, clips, stochastic: x.new_empty(clips.shape[0], 3, x.shape[1], dtype=torch.float64),
)
cosine_slope_terms = define(
    "cosine_slope_terms(Tensor x, Tensor clip) -> Tensor",
    _cosine_slope_terms,
    lambda x, clip: x.new_empty(5, dtype=torch.float64),
)
