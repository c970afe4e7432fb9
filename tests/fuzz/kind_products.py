# SPDX-License-Identifier: Apache-2.0
"""The three products of a convolution, and the matrix product: any geometry, layout, scale and depth."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from byteback import ops
from byteback.ops.contract.limits import MAX_INT32_DEPTH
from fuzz.fields import YES, Axes, Case, Choice, Number, channels
from fuzz.harness import Check, Kind
from fuzz.operands import INTEGERS, LAYOUTS, VECTOR_LAYOUTS, integers, laid_out, magnitudes
from oracles.products import Oracle

SCALES = Choice(("ones", "ordinary", "wild"))
VARY = Choice(("none", "first", "second", "both"))
PRODUCTS = ("output", "grad_input", "grad_weight")

CONVOLUTION = {
    "spatial": Choice((2, 2, 1, 3)),
    "batch": Number(1, 4),
    "groups": Choice((1, 1, 1, 2, 3, 5)),
    "per_group": channels(70),  # C / groups
    "filters": channels(70),  # K / groups
    "depthwise": Choice((False, False, False, True)),  # then groups · per_group channels, each a group
    "kernel": Axes(Number(1, 5, (1, 3))),
    "stride": Axes(Choice((1, 1, 1, 2, 3, 4))),
    "padding": Axes(Choice((0, 1, 1, 2, 3))),
    "dilation": Axes(Choice((1, 1, 1, 2, 3))),
    "extra": Axes(Number(0, 13)),  # pixels beyond the smallest image that gives an output
    "x": INTEGERS,
    "w": INTEGERS,
    "g": INTEGERS,
}

Sizes = tuple[list[int], list[int], tuple[list[int], list[int], list[int], int]]


def bias_convolution(case: Case, rng: np.random.Generator) -> None:
    """Keeps the work small, and sends some cases to Winograd, to direct kernels and to the depth where int32 ends."""
    kind = rng.random()
    if kind < 0.25:
        case.update(depthwise=False, groups=1, stride=[1, 1, 1], dilation=[1, 1, 1])
        case["kernel"] = [3, 3, 3] if case["spatial"] == 2 else [case["kernel"][0], 3, 3]
    elif kind < 0.275:
        _make_deep(case, rng)
        return
    elif kind < 0.375:  # whole vectors of channels: direct kernels
        case.update(depthwise=False, groups=1, spatial=2)
        case.update({name: 16 * int(rng.integers(1, 4)) for name in ("per_group", "filters")})
        return
    work = case["per_group"] * case["filters"] * case["batch"]
    if case["spatial"] == 3 or work > 4000 or case["groups"] > 1:
        case["extra"] = [min(extra, 4) for extra in case["extra"]]
    if case["groups"] > 1 or case["spatial"] == 3:
        case.update(per_group=min(case["per_group"], 17), filters=min(case["filters"], 17))


def _make_deep(case: Case, rng: np.random.Generator) -> None:
    """A sum of about 133 144 products of full amplitude: over channels, filters or pixels."""
    depth = MAX_INT32_DEPTH + int(rng.choice([0, 1, -1, 2, *rng.integers(-70, 71, 4)]))
    case.update(
        spatial=1, batch=1, groups=1, depthwise=False, kernel=[1, 1, 1], stride=[1] * 3, padding=[0] * 3, dilation=[1] * 3
    )
    case.update(per_group=int(rng.integers(1, 4)), filters=int(rng.integers(1, 4)), extra=[int(rng.integers(0, 3)), 0, 0])
    sign = ("plus", "minus")
    case.update(x=str(rng.choice(sign)), w=str(rng.choice(sign)), g=str(rng.choice(sign)))
    where = str(rng.choice(["per_group", "filters", "extra", "kernel"]))
    if where == "kernel":  # channels that fill no vector, times taps: the padded sum is deeper than the sum
        where = str(rng.choice(["per_group", "filters"]))
        case[where] = int(rng.integers(5, 40))
        case["kernel"] = [depth // case[where], 1, 1]
    else:
        case[where] = [depth - 1, 0, 0] if where == "extra" else depth
    if "product" in case:
        case["product"] = {"per_group": "output", "filters": "grad_input", "extra": "grad_weight"}[where]


def sizes_of(case: Case) -> Sizes:
    """Input size, weight size and geometry; the kernel always fits."""
    spatial = case["spatial"]
    kernel, stride, padding, dilation, extra = (case[n][:spatial] for n in ("kernel", "stride", "padding", "dilation", "extra"))
    size = [max(d * (r - 1) + 1 - 2 * p, 1) + e for r, p, d, e in zip(kernel, padding, dilation, extra, strict=True)]
    groups, per_group, filters = case["groups"], case["per_group"], case["filters"]
    if case["depthwise"]:
        groups, per_group, filters = groups * per_group, 1, 1
    geometry = (stride, padding, dilation, groups)
    return [case["batch"], groups * per_group, *size], [groups * filters, per_group, *kernel], geometry


def scale_for(shape: list[int], values: str, layout: str, rng: np.random.Generator) -> Tensor:
    """A scale of this shape, most of whose axes are one."""
    flat = laid_out(magnitudes([int(np.prod(shape))], values, rng), layout)
    axis = next((axis for axis, size in enumerate(shape) if size > 1), 0)
    return flat.reshape(shape) if flat.is_contiguous() else flat.as_strided(shape, _strides(shape, axis, flat.stride(0)))


def _strides(shape: list[int], axis: int, step: int) -> list[int]:
    return [step if dim == axis else 1 for dim in range(len(shape))]


def _build(case: Case, rng: np.random.Generator) -> Check:
    input_size, weight_size, geometry = sizes_of(case)
    groups = geometry[3]
    out = [input_size[0], weight_size[0], *Oracle.output_size(input_size[2:], weight_size[2:], geometry)]
    shapes = {"x": input_size, "w": weight_size, "g": out}
    made = {name: laid_out(integers(shape, case[name], rng), case[f"{name}_layout"]) for name, shape in shapes.items()}
    x, w, g = made["x"], made["w"], made["g"]
    product = case["product"]
    first, second = {"output": (x, w), "grad_input": (g, w), "grad_weight": (g, x)}[product]
    axes = {"output": (0, 0), "grad_input": (0, 1), "grad_weight": (1, 1)}[product]
    if product == "grad_input" and groups == input_size[1] == weight_size[0] and case["varies_k"]:
        axes = (1, 1)
    scales = []
    for operand, axis, name in ((first, axes[0], "first"), (second, axes[1], "second")):
        shape = [1] * operand.dim()
        if case["vary"] in (name, "both"):
            shape[axis] = operand.shape[axis]
        scales.append(scale_for(shape, case["scale"], case["scale_layout"], rng))
    factor = Oracle.factor(product, scales[0].numpy(), scales[1].numpy(), groups, weight_size[0])
    if product == "output":
        acc, size = Oracle.conv(x, w, geometry), ()
    elif product == "grad_input":
        acc, size = Oracle.grad_input(g, w, input_size, geometry), (input_size,)
    else:
        acc, size = Oracle.grad_weight(g, x, weight_size, geometry), (weight_size,)
    operator = {"output": ops.conv_int8, "grad_input": ops.conv_int8_grad_input, "grad_weight": ops.conv_int8_grad_weight}[
        product
    ]
    return Check(
        lambda: operator(first, scales[0], second, scales[1], *size, *geometry),
        acc.astype(np.float32) * factor,
        [first, second, *scales],
        same_strides=True,
    )


def _bias_matmul(case: Case, rng: np.random.Generator) -> None:
    if rng.random() < 0.05:
        case["depth"] = MAX_INT32_DEPTH + int(rng.integers(-70, 71))
        case.update(
            rows=int(rng.integers(1, 4)), columns=int(rng.integers(1, 4)), a="plus", b=str(rng.choice(["plus", "minus"]))
        )


def _build_matmul(case: Case, rng: np.random.Generator) -> Check:
    rows, depth, columns = case["rows"], case["depth"], case["columns"]
    a = laid_out(integers([rows, depth], case["a"], rng), case["a_layout"])
    b = laid_out(integers([depth, columns], case["b"], rng), case["b_layout"])
    shapes = [rows if case["vary"] in ("first", "both") else 1, 1], [1, columns if case["vary"] in ("second", "both") else 1]
    scales = [scale_for(shape, case["scale"], case["scale_layout"], rng) for shape in shapes]
    acc = a.numpy().astype(np.int64) @ b.numpy().astype(np.int64)
    return Check(
        lambda: ops.matmul_int8(a, scales[0], b, scales[1]),
        acc.astype(np.float32) * (scales[0].numpy() * scales[1].numpy()),
        [a, b, *scales],
        same_strides=True,
    )


_SCALED = {"vary": VARY, "scale": SCALES, "scale_layout": VECTOR_LAYOUTS}
KINDS = [
    Kind(
        "product",
        10,
        {
            "product": Choice(PRODUCTS),
            **CONVOLUTION,
            "x_layout": LAYOUTS,
            "w_layout": LAYOUTS,
            "g_layout": LAYOUTS,
            **_SCALED,
            "varies_k": YES,
        },
        _build,
        bias_convolution,
    ),
    Kind(
        "matmul",
        2,
        {
            "rows": channels(70),
            "columns": channels(70),
            "depth": Number(1, 200, (1, 2, 15, 16, 17, 63, 64, 65, 1040, 1041)),
            "a": INTEGERS,
            "b": INTEGERS,
            "a_layout": LAYOUTS,
            "b_layout": LAYOUTS,
            **_SCALED,
        },
        _build_matmul,
        _bias_matmul,
    ),
]
