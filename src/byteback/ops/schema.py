# SPDX-License-Identifier: Apache-2.0
"""The operators as PyTorch sees them: schemas, kernels, fake kernels, and the checks at the door.

Every operator is defined once here. Its kernel is the reference or the native library, whichever path is current; its
fake gives the shape, dtype and strides that the kernel will give, so that `torch.compile` can trace through it. Arguments
are checked here and trusted from here on. Plain eager tensors take a short way past the dispatcher (`eager.py`) to the same
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from byteback.ops import eager, layout, native, native_kernels, reference, statistics
from byteback.ops.scale_rule import check_scale

_library = torch.library.Library("byteback", "DEF")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers one operator, `schema` starting with its name, and returns the function that calls it."""
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    # Integers have no derivative: whatever an operator returns is a constant, and autograd passes by.
    _library.impl(name, torch.no_grad()(kernel), "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"byteback::{name}", fake, lib=_library)
    operator = getattr(torch.ops.byteback, name)

    def call(*arguments: Any) -> Any:
        return kernel(*arguments) if eager.is_plain(arguments) else operator(*arguments)

    return call


def _path(*tensors: Tensor) -> int | None:
    """The native path that serves these tensors; None for the reference, which takes other devices and empty tensors."""
    native.last_kernel = ""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.numel() == 0:
            return None
    return native.number()


def _plainly(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function of plain PyTorch, unseen by autograd. The native kernels need no such care: they return new tensors."""
    with torch.no_grad():
        return function(*arguments)


# ---- checks at the door ----------------------------------------------------------------------------------------------


def _check_int8(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int8:
            raise TypeError(
                f"{op}: {name} has dtype {tensor.dtype}, but the product is of int8 integers. "
                "Quantize it first with byteback.ops.quantize."
            )


def check_float(op: str, name: str, x: Tensor, least_rank: int = 2) -> None:
    if x.dtype != torch.float32:
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, but only float32 is quantized. Call .float() on it.")
    if x.dim() < least_rank:
        raise ValueError(
            f"{op}: {name} has shape {tuple(x.shape)}, but it needs an N and a C axis: the noise and the statistics are "
            "defined in N, ..., C order. Reshape it, for example with unsqueeze(0)."
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt))


def _output_size(
    op: str,
    input_size: Sequence[int],
    weight_size: Sequence[int],
    geometry: tuple[list[int], list[int], list[int], int],
) -> list[int]:
    """The output's shape, after everything about the geometry was checked."""
    stride, padding, dilation, groups = geometry
    spatial = len(input_size) - 2
    if spatial not in (1, 2, 3) or len(weight_size) != spatial + 2:
        raise ValueError(
            f"{op}: input has shape {tuple(input_size)} and weight {tuple(weight_size)}; a convolution takes N, C and one "
            "to three spatial axes on both sides. Add the missing axis."
        )
    for name, values, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        if len(values) != spatial or not all(_is_integer(value) and value >= least for value in values):
            raise ValueError(
                f"{op}: {name} is {list(values)}; it needs {spatial} integers of at least {least}, one for each spatial axis."
            )
    if groups < 1 or weight_size[0] % groups or input_size[1] != weight_size[1] * groups:
        raise ValueError(
            f"{op}: input has {input_size[1]} channels, weight has shape {tuple(weight_size)} and groups is {groups}; the "
            "input needs weight.shape[1] * groups channels and groups must divide weight.shape[0]."
        )
    size = [input_size[0], weight_size[0]]
    for i in range(spatial):
        reach = dilation[i] * (weight_size[2 + i] - 1) + 1
        length = input_size[2 + i] + 2 * padding[i]
        if reach > length or weight_size[2 + i] < 1:
            raise ValueError(
                f"{op}: the kernel reaches over {reach} pixels on spatial axis {i}, but the padded input has only {length} "
                "there, so no output pixel exists. Use a larger image, more padding or a smaller kernel."
            )
        size.append((length - reach) // stride[i] + 1)
    return size


def _check_grad_output(op: str, g: Tensor, expected: list[int]) -> None:
    if list(g.shape) != expected:
        raise ValueError(
            f"{op}: grad_output has shape {tuple(g.shape)}, but this convolution's output has shape {tuple(expected)}; "
            "a gradient has the shape of what it is the gradient of. Check stride, padding, dilation and groups."
        )


# ---- the three products ----------------------------------------------------------------------------------------------

_plans: dict[tuple[Any, ...], native_kernels.Plan] = {}
_quantize_plans: dict[tuple[Any, ...], native_kernels.QuantizePlan] = {}
_MOST_PLANS = 4096  # a network has a few hundred; one that sees images of every size would fill the memory


def _planned(product: str, check: Callable[..., list[int]], arguments: tuple[Any, ...]) -> native_kernels.Plan:
    """The plan of a product, from the memory or made now, after `check` which returns the result's size.

    Whether a call is right, and how it is served, depends on shapes, strides and dtypes only: it is found out once for each.
    """
    a, a_scale, b, b_scale, *rest, groups = arguments
    operands = a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype
    key = (product, groups, *operands, a_scale.shape, a_scale.dtype, b_scale.shape, b_scale.dtype, *map(tuple, rest))
    return _plans.get(key) or _remembered(_plans, key, native_kernels.plan(product, check(*arguments), *arguments))


def _remembered(plans: dict[tuple[Any, ...], Any], key: tuple[Any, ...], plan: Any) -> Any:
    """A plan that is new, after it was put with the others."""
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


def _conv_checked(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, *geometry: Any) -> list[int]:
    op = "conv_int8"
    _check_int8(op, input=x, weight=w)
    size = _output_size(op, x.shape, w.shape, geometry)
    check_scale(op, "output", "input", x, x_scale)
    check_scale(op, "output", "weight", w, w_scale)
    return size


def output_plan(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, *geometry: Any) -> native_kernels.Plan:
    """The checked plan of a convolution's output, for operators around it."""
    return _planned("output", _conv_checked, (x, x_scale, w, w_scale, *geometry))


def _conv(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, *geometry: Any) -> Tensor:
    arguments = (x, x_scale, w, w_scale, *geometry)
    path = _path(x, x_scale, w, w_scale)
    if path is not None:
        return native_kernels.run(path, _planned("output", _conv_checked, arguments), x, x_scale, w, w_scale)
    size = _conv_checked(*arguments)
    if 0 in x.shape or 0 in w.shape:
        return layout.empty_like_product(size, x, w).zero_()
    return _plainly(reference.conv_int8, *arguments)


def _conv_fake(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, *geometry: Any) -> Tensor:
    return layout.empty_like_product(_conv_checked(x, x_scale, w, w_scale, *geometry), x, w)


def _grad_input_checked(
    g: Tensor, g_scale: Tensor, w: Tensor, w_scale: Tensor, input_size: list[int], *geometry: Any
) -> list[int]:
    op = "conv_int8_grad_input"
    _check_int8(op, grad_output=g, weight=w)
    _check_grad_output(op, g, _output_size(op, input_size, w.shape, geometry))
    depthwise = geometry[-1] == g.shape[1] == input_size[1]
    check_scale(op, "grad_input", "grad_output", g, g_scale, depthwise)
    check_scale(op, "grad_input", "weight", w, w_scale)
    return input_size


def _grad_input(g: Tensor, g_scale: Tensor, w: Tensor, w_scale: Tensor, *rest: Any) -> Tensor:
    arguments = (g, g_scale, w, w_scale, *rest)
    path = _path(g, g_scale, w, w_scale)
    if path is not None:
        plan = _planned("grad_input", _grad_input_checked, arguments)
        return native_kernels.run(path, plan, g, g_scale, w, w_scale)
    _grad_input_checked(*arguments)
    return _plainly(reference.conv_int8_grad_input, *arguments)


def _grad_input_fake(g: Tensor, g_scale: Tensor, w: Tensor, w_scale: Tensor, input_size: list[int], *geometry: Any) -> Tensor:
    _grad_input_checked(g, g_scale, w, w_scale, input_size, *geometry)
    return layout.empty_like_product(input_size, g, w)


def _grad_weight_checked(
    g: Tensor, g_scale: Tensor, x: Tensor, x_scale: Tensor, weight_size: list[int], *geometry: Any
) -> list[int]:
    op = "conv_int8_grad_weight"
    _check_int8(op, grad_output=g, input=x)
    _check_grad_output(op, g, _output_size(op, x.shape, weight_size, geometry))
    check_scale(op, "grad_weight", "grad_output", g, g_scale)
    check_scale(op, "grad_weight", "input", x, x_scale)
    return weight_size


def _grad_weight(g: Tensor, g_scale: Tensor, x: Tensor, x_scale: Tensor, *rest: Any) -> Tensor:
    arguments = (g, g_scale, x, x_scale, *rest)
    path = _path(g, g_scale, x, x_scale)
    if path is not None:
        plan = _planned("grad_weight", _grad_weight_checked, arguments)
        return native_kernels.run(path, plan, g, g_scale, x, x_scale)
    _grad_weight_checked(*arguments)
    return _plainly(reference.conv_int8_grad_weight, *arguments)


def _grad_weight_fake(g: Tensor, g_scale: Tensor, x: Tensor, x_scale: Tensor, weight_size: list[int], *geometry: Any) -> Tensor:
    _grad_weight_checked(g, g_scale, x, x_scale, weight_size, *geometry)
    return layout.empty_like_product(weight_size, g, x)


_GEOMETRY = "int[] stride, int[] padding, int[] dilation, int groups"
conv_int8 = define(f"conv_int8(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, {_GEOMETRY}) -> Tensor", _conv, _conv_fake)
conv_int8_grad_input = define(
    f"conv_int8_grad_input(Tensor g, Tensor g_scale, Tensor w, Tensor w_scale, SymInt[] input_size, {_GEOMETRY}) -> Tensor",
    _grad_input,
    _grad_input_fake,
)
conv_int8_grad_weight = define(
    f"conv_int8_grad_weight(Tensor g, Tensor g_scale, Tensor x, Tensor x_scale, SymInt[] weight_size, {_GEOMETRY}) -> Tensor",
    _grad_weight,
    _grad_weight_fake,
)


def _check_matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    _check_int8("matmul_int8", a=a, b=b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"matmul_int8: a has shape {tuple(a.shape)} and b {tuple(b.shape)}; it takes (M, K) and (K, N). "
            "Flatten or transpose the operands."
        )
    for name, tensor, scale, axis in (("a", a, a_scale, 0), ("b", b, b_scale, 1)):
        shape = [1, 1]
        shape[axis] = tensor.shape[axis]
        if list(scale.shape) not in ([1, 1], shape) or scale.dtype != torch.float32:
            raise ValueError(
                f"matmul_int8: {name}_scale has shape {tuple(scale.shape)} and dtype {scale.dtype}; the product sums over K, "
                f"and terms with different scales cannot be added, so it must be float32 of shape (1, 1) or {tuple(shape)}."
            )


def _matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    _check_matmul(a, a_scale, b, b_scale)
    path = _path(a, a_scale, b, b_scale)
    if path is not None:
        return native_kernels.matmul_int8(path, a, a_scale, b, b_scale)
    return _plainly(reference.matmul_int8, a, a_scale, b, b_scale)


def _matmul_fake(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    _check_matmul(a, a_scale, b, b_scale)
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


matmul_int8 = define("matmul_int8(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale) -> Tensor", _matmul, _matmul_fake)


# ---- quantize and its statistics -------------------------------------------------------------------------------------


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
    path = _path(x, clip)
    # The native kernels know clips per tensor, sample and channel; the reference knows all.
    if path is not None and (clip.numel() == 1 or all(size == 1 for size in clip.shape[2:])):
        return native_kernels.quantize(path, x, clip, key)
    return _plainly(reference.quantize, x, clip, key)


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
    if _path(seed, layer, count) is not None:
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


def _statistic(name: str, x: Tensor, *arguments: Tensor) -> Any:
    """One of the statistics that both modules have, from the one that serves x."""
    if _path(x, *arguments) is not None:
        return getattr(native_kernels, name)(x, *arguments)
    return _plainly(getattr(statistics, name), x, *arguments)


def _check_axis(op: str, x: Tensor, axis: int) -> None:
    if not -1 <= axis < x.dim():
        raise ValueError(f"{op}: axis is {axis}, but x has shape {tuple(x.shape)}; give one of its axes, or -1 for all.")


def _absmax(x: Tensor, axis: int) -> Tensor:
    check_float("absmax", "x", x, least_rank=1)
    _check_axis("absmax", x, axis)
    path = _path(x)
    if path is not None and x.dim() > 1 and axis < 2:
        return native_kernels.absmax(path, x, axis)
    return _plainly(statistics.absmax, x, axis)


absmax = define("absmax(Tensor x, int axis) -> Tensor", _absmax, lambda x, axis: x.new_empty(_kept(x, axis)))


def _check_quantize_max(x: Tensor, axis: int, key: Tensor | None) -> None:
    check_float("quantize_max", "x", x)
    _check_axis("quantize_max", x, axis)
    _check_key("quantize_max", key)


def _quantize_max(x: Tensor, axis: int, key: Tensor | None) -> Any:
    path = _path(x)
    if path is None or axis > 1:
        _check_quantize_max(x, axis, key)
        return _plainly(reference.quantize_max, x, axis, key)
    known = (axis, x.dtype, x.shape, x.stride())  # as with _planned, checked once for each
    plan = _quantize_plans.get(known)
    if plan is None:
        _check_quantize_max(x, axis, key)
        plan = _remembered(_quantize_plans, known, native_kernels.quantize_plan(x, axis))
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
    _check_int8("dot_terms", values=values)
    if values.shape != x.shape or scale.dtype != torch.float32 or not _broadcasts(scale, x):
        raise ValueError(
            f"dot_terms: x has shape {tuple(x.shape)}, values {tuple(values.shape)}, scale {tuple(scale.shape)} of "
            f"{scale.dtype}; values must have the shape of x, and scale its rank with ones along shared axes."
        )
    # The native kernels know scales per tensor, sample and channel; the reference knows all.
    if all(size == 1 for size in scale.shape[2:]):
        return _statistic("dot_terms", x, values, scale)
    return _plainly(statistics.dot_terms, x, values, scale)


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


def _cosine_terms(x: Tensor, clips: Tensor) -> Tensor:
    _check_clips("cosine_terms", x, clips, 1)
    return _statistic("cosine_terms", x, clips)


def _cosine_slope_terms(x: Tensor, clip: Tensor) -> Tensor:
    _check_clips("cosine_slope_terms", x, clip, 0)
    return _statistic("cosine_slope_terms", x, clip)


cosine_terms = define(
    "cosine_terms(Tensor x, Tensor clips) -> Tensor",
    _cosine_terms,
    lambda x, clips: x.new_empty(clips.shape[0], 3, dtype=torch.float64),
)
cosine_slope_terms = define(
    "cosine_slope_terms(Tensor x, Tensor clip) -> Tensor",
    _cosine_slope_terms,
    lambda x, clip: x.new_empty(5, dtype=torch.float64),
)
