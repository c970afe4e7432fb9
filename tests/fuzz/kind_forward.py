# SPDX-License-Identifier: Apache-2.0
"""The fused block's passes forward: with given coefficients, with those of the batch, and behind a convolution."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from byteback import ops
from fuzz.fields import YES, Case, Choice, channels
from fuzz.harness import Check, Kind
from fuzz.kind_products import CONVOLUTION, SCALES, VARY, bias_convolution, scale_for, sizes_of
from fuzz.kind_quantize import SHAPE, bias_shape, shape_of
from fuzz.operands import FLOATS, LAYOUTS, VECTOR_LAYOUTS, floats, integers, laid_out, magnitudes
from oracles import norms, passes, statistics
from oracles.bits import array_of
from oracles.products import Oracle

ACTIVATIONS = Choice(("none", "relu", "relu6", "hardswish", "silu", "gelu"))
KEEP = Choice(("none", "none", "bfloat16", "int8"))
VECTORS = Choice(("normal", "normal", "special", "wild", "zeros", "constant"))
WIDER = 7  # channels of a tensor that a pass writes a part of


def vector(count: int, pattern: str, layout: str, rng: np.random.Generator) -> Tensor:
    return laid_out(floats([count], pattern, rng), layout)


def residual_for(shape: tuple[int, ...], case: Case, rng: np.random.Generator) -> Any:
    """None, floats, or (values int8, scale)."""
    kind = case["residual"]
    if kind == "none":
        return None
    if kind in ("float", "bfloat16"):
        made = laid_out(floats(shape, case["x"] if "x_floats" not in case else "normal", rng), case["residual_layout"])
        return made if kind == "float" else rounded(made)
    return laid_out(integers(shape, "random", rng), case["residual_layout"]), magnitudes([1, 1], "ordinary", rng)


def rounded(x: Tensor) -> Tensor:
    """x as bfloat16, by the oracle, laid out alike."""
    made = torch.empty_like(x, dtype=torch.bfloat16)
    return made.copy_(torch.from_numpy(passes.to_bfloat16(x.numpy())))


def stored(x: Tensor, case: Case) -> Tensor:
    return rounded(x) if case["x_rounded"] else x


def arrays(value: Any) -> Any:
    return tuple(map(array_of, value)) if isinstance(value, tuple) else None if value is None else array_of(value)


def tensors(*values: Any) -> list[Tensor]:
    flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return [part for part in flat if part is not None]


class Place:
    """Parts of wider tensors to write to, for a concatenation; nothing around them may change."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        n, c, *spatial = shape
        self.start, self.width = 3, c + WIDER
        wide = (n, *spatial, self.width)
        self.values, self.output = torch.full(wide, 99, dtype=torch.int8).movedim(-1, 1), torch.full(wide, 99.0).movedim(-1, 1)
        part = slice(self.start, self.start + c)
        self.into = ops.Into(self.values[:, part], self.output[:, part], self.width)

    def expected(self, made: dict[str, Any], want_int8: bool, want_float: bool) -> tuple[np.ndarray, np.ndarray]:
        wide = np.full(self.values.shape, 99, np.int8), np.full(self.values.shape, 99.0, np.float32)
        for array, name, wanted in zip(wide, ("values", "output"), (want_int8, want_float), strict=True):
            if wanted:
                array[:, self.start : self.start + made[name].shape[1]] = made[name]
        return wide


def _parts(made: ops.Normalized) -> tuple[Any, ...]:
    """values, scale, output, mask, counts and kept, as the oracle returns them."""
    values, scale, counts, _ = made.q or (None,) * 4
    return values, scale, made.output, made.mask, counts, made.kept


def _build(case: Case, rng: np.random.Generator) -> Check:
    shape = shape_of(case)
    x = stored(laid_out(floats(shape, case["x"], rng), case["layout"]), case)
    wide_x = arrays(x)
    a, b = (vector(shape[1], case["vectors"], case["vector_layout"], rng) for _ in range(2))
    residual, activation = residual_for(shape, case, rng), case["activation"]
    clip = None if case["clip"] == "none" else magnitudes([], case["clip"], rng)
    made = passes.normalize(wide_x, a.numpy(), b.numpy(), arrays(residual), activation, arrays(clip))
    inputs = tensors(x, a, b, residual, clip)
    if case["name"] == "normalize_peak":
        return Check(lambda: ops.normalize_peak(x, a, b, residual, activation), made["peak"], inputs)
    _, _, low, high = (torch.from_numpy(part) for part in statistics.channel_stats(wide_x))
    mean = torch.from_numpy(rng.standard_normal(shape[1])).to(torch.float32 if case["float_mean"] else torch.float64)
    kept = None if case["keep"] == "none" else passes.pack_norm(wide_x, low.numpy(), high.numpy(), mean.numpy(), case["keep"])
    if case["name"] == "pack_norm":
        kind = "int8" if case["keep"] == "none" else case["keep"]
        kept = passes.pack_norm(wide_x, low.numpy(), high.numpy(), mean.numpy(), kind)
        return Check(lambda: ops.pack_norm(x, low, high, mean, kind), kept, [x, low, high, mean])
    want_float = case["want_float"]
    options: dict[str, Any] = {"want_float": want_float, "want_mask": case["want_mask"]}
    if kept is not None:
        options.update(keep=case["keep"], low=low, high=high, mean=mean)
    wide: tuple[np.ndarray, ...] = ()
    if case["into"]:
        wide = Place(shape).expected(made, clip is not None, want_float)

    def call() -> Any:
        place = Place(shape) if case["into"] else None
        got = ops.normalize(x, a, b, residual, activation, clip, **options, into=None if place is None else place.into)
        return (*_parts(got), *(() if place is None else (place.values, place.output)))

    output, mask = made["output"] if want_float else None, made["mask"] if case["want_mask"] else None
    expected = (made["values"], made["scale"], output, mask, made["counts"], kept, *wide)
    return Check(call, expected, inputs)


class Norm:
    """A norm's parameters; running statistics are moved, so that every call gets copies."""

    def __init__(self, count: int, case: Case, rng: np.random.Generator) -> None:
        made = [vector(count, case["vectors"], case["vector_layout"], rng) for _ in range(3)]
        self.gamma, self.beta, self.bias = (v if wanted else None for v, wanted in zip(made, case["has"], strict=True))
        running = floats([count], "normal", rng), magnitudes([count], "ordinary", rng)
        self.running = running if case["running"] else None
        self.eps, self.momentum = case["eps"], case["momentum"]

    def fresh(self) -> ops.BatchNorm:
        running = None if self.running is None else tuple(part.clone() for part in self.running)
        return ops.BatchNorm(self.gamma, self.beta, self.bias, self.eps, running, self.momentum)  # type: ignore[arg-type]

    def of(self, x: np.ndarray, activation: str) -> Any:
        vectors = arrays(self.gamma), arrays(self.beta), arrays(self.bias)
        stats = statistics.channel_stats(x)
        count = x.size // x.shape[1]
        return norms.norm_coefficients(stats, count, *vectors, self.eps, arrays(self.running), self.momentum, activation)


def expected_batch(x: np.ndarray, norm: Norm, residual: Any, case: Case) -> tuple[Any, ...]:
    """a, b, mean, invstd, peak, values, scale, output, mask, counts, kept, running."""
    activation, want_int8 = case["activation"], case["want_int8"]
    (a, b, mean, invstd, peak), moved = norm.of(x, activation)
    known = residual is None and activation in norms.CEILINGS
    added = arrays(residual)
    if not known:
        peak = passes.normalize(x, a, b, added, activation, None)["peak"]
    made = passes.normalize(x, a, b, added, activation, peak if want_int8 else None)
    kept = None
    if case["keep"] != "none":
        _, _, low, high = statistics.channel_stats(x)
        kept = passes.pack_norm(x, low, high, mean, case["keep"])
    output, mask = made["output"] if case["want_float"] else None, made["mask"] if case["want_mask"] else None
    if output is not None and case["output_rounded"]:
        output = passes.to_bfloat16(output)
    tail = (made["values"], made["scale"], output, mask, made["counts"], kept, moved)
    return a, b, mean, invstd, peak if known or want_int8 else None, *tail


def _dtype(is_rounded: bool) -> torch.dtype:
    return torch.bfloat16 if is_rounded else torch.float32


def _options(case: Case) -> dict[str, Any]:
    wants = {name: case[name] for name in ("want_int8", "want_float", "want_mask")}
    keep = None if case["keep"] == "none" else case["keep"]
    return {**wants, "keep": keep, "output_dtype": _dtype(case["output_rounded"])}


def _build_batch(case: Case, rng: np.random.Generator) -> Check:
    shape = shape_of(case)
    x = stored(laid_out(floats(shape, case["x"], rng), case["layout"]), case)
    norm, residual = Norm(shape[1], case, rng), residual_for(shape, case, rng)

    def call() -> Any:
        fresh = norm.fresh()
        got = ops.normalize_batch(x, fresh, residual, case["activation"], **_options(case))
        return (*got.norm, *_parts(got), fresh.running)

    expected = expected_batch(arrays(x), norm, residual, case)
    return Check(call, expected, tensors(x, residual, norm.gamma, norm.beta, norm.bias))


class Convolved:
    """The operands of a convolution, and its output by the oracle."""

    def __init__(self, case: Case, rng: np.random.Generator) -> None:
        input_size, weight_size, self.geometry = sizes_of(case)
        self.x = laid_out(integers(input_size, case["x"], rng), case["layout"])
        self.w = laid_out(integers(weight_size, case["w"], rng), case["w_layout"])
        shapes = [[1] * self.x.dim(), [1] * self.x.dim()]
        for shape, size, name in zip(shapes, (input_size[0], weight_size[0]), ("first", "second"), strict=True):
            shape[0] = size if case["vary"] in (name, "both") else 1
        self.scales = [scale_for(shape, case["scale"], "contiguous", rng) for shape in shapes]
        factor = Oracle.factor("output", *(scale.numpy() for scale in self.scales), self.geometry[3], weight_size[0])
        self.y = Oracle.conv(self.x, self.w, self.geometry).astype(np.float32) * factor
        self.operands = (self.x, self.scales[0], self.w, self.scales[1], self.geometry)


def _build_conv_batch(case: Case, rng: np.random.Generator) -> Check:
    of = Convolved(case, rng)
    norm, residual = Norm(of.y.shape[1], case, rng), residual_for(of.y.shape, {**case, "x_floats": True}, rng)
    wanted, wide_y = {**_options(case), "y_dtype": _dtype(case["x_rounded"])}, of.y
    if case["x_rounded"]:
        wide_y = passes.to_bfloat16(of.y)

    def call() -> Any:
        fresh = norm.fresh()
        y, got = ops.conv_normalize_batch(*of.operands, fresh, residual, case["activation"], **wanted)
        return (y, *got.norm, *_parts(got), fresh.running)

    expected = wide_y, *expected_batch(wide_y, norm, residual, case)
    return Check(call, expected, tensors(of.x, of.w, *of.scales, residual, norm.gamma, norm.beta, norm.bias))


def _bias_conv_batch(case: Case, rng: np.random.Generator) -> None:
    bias_convolution(case, rng)
    if rng.random() < 0.01:  # 8 MB of output are counted on their way to memory (csrc/conv/conv.cpp)
        case.update(spatial=2, groups=1, batch=1, kernel=[1, 1, 1], stride=[1, 1, 1], padding=[0, 0, 0], dilation=[1, 1, 1])
        case.update(per_group=2, filters=64, depthwise=False, extra=[184, 184, 0])
        if rng.random() < 0.5:
            case.update(per_group=64, depthwise=True, kernel=[3, 3, 3], padding=[1, 1, 1])


def _build_conv(case: Case, rng: np.random.Generator) -> Check:
    of = Convolved(case, rng)
    count, activation = of.y.shape[1], case["activation"]
    a, b = (vector(count, case["vectors"], case["vector_layout"], rng) for _ in range(2))
    residual = residual_for(of.y.shape, {**case, "x_floats": True}, rng)
    clip = None if case["clip"] == "none" else magnitudes([], case["clip"], rng)
    want_float = case["want_float"] or clip is None
    made = passes.normalize(of.y, a.numpy(), b.numpy(), arrays(residual), activation, arrays(clip))
    wide: tuple[np.ndarray, ...] = ()
    if case["into"]:
        wide = Place(of.y.shape).expected(made, clip is not None, want_float)

    def call() -> Any:
        place = Place(of.y.shape) if case["into"] else None
        into = None if place is None else place.into
        got = ops.conv_normalize(*of.operands, a, b, residual, activation, clip, want_float=want_float, into=into)
        return (*_parts(got)[:5], *(() if place is None else (place.values, place.output)))

    expected = (made["values"], made["scale"], made["output"] if want_float else None, None, made["counts"], *wide)
    return Check(call, expected, tensors(of.x, of.w, *of.scales, residual, a, b, clip))


_ADDED = {
    "activation": ACTIVATIONS,
    "residual": Choice(("none", "none", "float", "bfloat16", "int8")),
    "residual_layout": LAYOUTS,
    "vectors": VECTORS,
    "vector_layout": VECTOR_LAYOUTS,
    "want_float": YES,
    "want_mask": YES,
}
_GIVEN = {**_ADDED, "clip": Choice(("none", "ordinary", "ones", "mixed")), "into": Choice((False, False, False, True))}
_OWN = {
    **_ADDED,
    "want_int8": YES,
    "x_rounded": Choice((False, False, True)),
    "output_rounded": Choice((False, False, True)),
    "keep": KEEP,
    "running": YES,
    "eps": Choice((1e-5, 1e-3, 0.0)),
    "momentum": Choice((0.1, 0.3, 1.0, 0.0)),
    "has": Choice(((False,) * 3, (True, True, False), (True,) * 3, (True, False, False), (False, True, True))),
}
_SHAPED = {**SHAPE, "x": FLOATS, "layout": LAYOUTS}
_CONVOLVED = {
    **{name: field for name, field in CONVOLUTION.items() if name != "g"},
    "filters": channels(40),
    "layout": LAYOUTS,
    "w_layout": LAYOUTS,
    "vary": VARY,
    "scale": SCALES,
}
KINDS = [
    Kind(
        "normalize",
        5,
        {
            "name": Choice(("normalize", "normalize", "normalize_peak", "pack_norm")),
            **_SHAPED,
            **_GIVEN,
            "x_rounded": Choice((False, False, True)),
            "keep": KEEP,
            "float_mean": YES,
        },
        _build,
        bias_shape,
    ),
    Kind("normalize_batch", 5, {**_SHAPED, **_OWN}, _build_batch, bias_shape),
    Kind("conv_normalize_batch", 4, {**_CONVOLVED, **_OWN}, _build_conv_batch, _bias_conv_batch),
    Kind("conv_normalize", 3, {**_CONVOLVED, **_GIVEN}, _build_conv, bias_convolution),
]
