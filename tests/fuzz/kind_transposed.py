# SPDX-License-Identifier: Apache-2.0
"""The three products of a transposed convolution: those of the convolution from its output to its input."""

from __future__ import annotations

import numpy as np

from byteback.nn.autograd import ConvProducts, TransposedProducts
from byteback.quantize import QTensor
from fuzz.fields import Case, Choice
from fuzz.harness import Check, Kind
from fuzz.kind_products import CONVOLUTION, PRODUCTS, SCALES, VARY, bias_convolution, scale_for, sizes_of
from fuzz.operands import LAYOUTS, VECTOR_LAYOUTS, integers, laid_out
from oracles.products import Oracle


def _build(case: Case, rng: np.random.Generator) -> Check:
    """`g` of the convolution is the input of the transposed one, `x` is its gradient."""
    size, weight_size, geometry = sizes_of(case)
    stride, padding, dilation, groups = geometry
    out = [size[0], weight_size[0], *Oracle.output_size(size[2:], weight_size[2:], geometry)]
    shapes = {"g": out, "x": size, "w": weight_size}
    made = {name: laid_out(integers(shape, case[name], rng), case[f"{name}_layout"]) for name, shape in shapes.items()}
    input, gradient, weight = made["g"], made["x"], made["w"]
    product = case["product"]
    first, second = {"output": (input, weight), "grad_input": (gradient, weight), "grad_weight": (gradient, input)}[product]
    axes = {"output": (0, 1), "grad_input": (0, 0), "grad_weight": (1, 1)}[product]
    scales = []
    for operand, axis, name in ((first, axes[0], "first"), (second, axes[1], "second")):
        shape = [1] * operand.dim()
        if case["vary"] in (name, "both"):
            shape[axis] = operand.shape[axis]
        scales.append(scale_for(shape, case["scale"], case["scale_layout"], rng))
    one, other = scales[0].numpy(), scales[1].numpy()
    products = TransposedProducts(ConvProducts(tuple(stride), tuple(padding), tuple(dilation), groups), tuple(size[2:]))
    q, p = QTensor(first, scales[0]), QTensor(second, scales[1])
    if product == "output":
        acc, factor = Oracle.grad_input(input, weight, size, geometry), Oracle.factor("grad_input", one, other, groups, out[1])
        call = lambda: products.output(q, p)  # noqa: E731
    elif product == "grad_input":
        acc, factor = Oracle.conv(gradient, weight, geometry), Oracle.factor("output", one, other, groups, out[1])
        call = lambda: products.grad_input(q, p, out)  # noqa: E731
    else:
        acc = Oracle.grad_weight(input, gradient, weight_size, geometry)
        factor = Oracle.factor("grad_weight", other, one, groups, out[1])
        call = lambda: products.grad_weight(q, p, weight_size)  # noqa: E731
    return Check(call, acc.astype(np.float32) * factor, [first, second, *scales], same_strides=True)


KINDS = [
    Kind(
        "transposed",
        3,
        {
            "product": Choice(PRODUCTS),
            **CONVOLUTION,
            "x_layout": LAYOUTS,
            "w_layout": LAYOUTS,
            "g_layout": LAYOUTS,
            "vary": VARY,
            "scale": SCALES,
            "scale_layout": VECTOR_LAYOUTS,
        },
        _build,
        bias_convolution,
    ),
]
