# SPDX-License-Identifier: Apache-2.0
"""The fused block's passes back: sums, the gradient as floats, as int8 once and twice, and all of it in one call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from byteback import ops
from byteback.ops import normalize_grad_batch
from fuzz.fields import YES, Case, Choice
from fuzz.harness import Check, Kind
from fuzz.kind_forward import ACTIVATIONS, VECTORS, arrays, tensors, vector
from fuzz.kind_quantize import SHAPE, bias_shape, shape_of
from fuzz.operands import FLOATS, KEYS, LAYOUTS, VECTOR_LAYOUTS, floats, integers, key_of, laid_out, magnitudes
from oracles import norms, passes, quantize, statistics

NAMES = ("grad", "grad", "sums", "quantize", "quantize_pair", "by_ratio", "tails", "waiting")


class Kept:
    """BatchNorm's input as it was kept: as the operators take it, and as the oracle does."""

    def __init__(self, shape: tuple[int, ...], case: Case, rng: np.random.Generator) -> None:
        kind = case["kept"]
        self.tensor: Any
        if kind == "int8":
            values = laid_out(integers(shape, "random", rng), case["layout"])
            step = magnitudes([shape[1]], "ordinary", rng)
            centre = vector(shape[1], case["vectors"], case["vector_layout"], rng)
            self.tensor = values, laid_out(step, case["vector_layout"]), centre
            self.array = arrays(self.tensor)
            return
        x = laid_out(floats(shape, case["x"], rng), case["layout"])
        self.tensor = x.to(torch.bfloat16) if kind == "bfloat16" else x
        self.array = self.tensor.float().numpy()


def mask_for(shape: tuple[int, ...], case: Case, rng: np.random.Generator) -> Tensor | None:
    """Random bits, those beyond the last channel 0."""
    if not case["mask"]:
        return None
    packed = passes.pack_mask(rng.random(shape) < 0.5)
    return laid_out(torch.from_numpy(packed), "sliced" if case["vector_layout"] == "sliced" else "contiguous")


class Gradient:
    """The parts of a gradient that is not written out, for the operators and for the oracle."""

    def __init__(self, case: Case, rng: np.random.Generator) -> None:
        shape = shape_of(case)
        self.g = laid_out(floats(shape, case["g"], rng), case["g_layout"])
        if case["g_stored"] == "bfloat16":
            self.g = self.g.to(torch.bfloat16)
        self.x, self.mask = Kept(shape, case, rng), mask_for(shape, case, rng)
        count = shape[1]
        self.a, self.b, p, q, r = (vector(count, case["vectors"], case["vector_layout"], rng) for _ in range(5))
        gate = (self.a, self.b, self.mask, case["activation"])
        self.parts = ops.GradientParts(self.g, self.x.tensor, *gate, p, q, r)
        gate_arrays = (self.a.numpy(), self.b.numpy(), arrays(self.mask), case["activation"])
        self.gated = (self.g.float().numpy(), self.x.array, *gate_arrays)
        self.inputs = tensors(self.g, self.a, self.b, self.mask, p, q, r)
        self.vectors = p.numpy(), q.numpy(), r.numpy()

    def dx(self) -> np.ndarray:
        return passes.normalize_grad(*self.gated, *self.vectors)


def _build(case: Case, rng: np.random.Generator) -> Check:
    of = Gradient(case, rng)
    g, count = of.g, of.g.shape[1]
    if case["name"] == "sums":
        total, dot, squares, masked = passes.normalize_grad_sums(*of.gated)
        options = {"want_masked": case["want_masked"], "want_squares": case["want_squares"]}
        expected = total, dot, squares if case["want_squares"] else None, masked if case["want_masked"] else None
        return Check(lambda: ops.normalize_grad_sums(*of.parts[:6], **options), expected, of.inputs)
    if case["name"] == "waiting":
        x = laid_out(floats(tuple(g.shape), case["x"], rng), case["layout"])
        gm = passes.masked_gradient(g.float().numpy(), x.numpy(), None, None, arrays(of.mask), "none")
        return Check(lambda: ops.add_waiting(x, g, of.mask), x.numpy() + gm, [x, *tensors(g, of.mask)])
    dx = of.dx()
    if case["name"] == "grad":
        return Check(lambda: ops.normalize_grad(of.parts), dx, of.inputs)
    one = magnitudes([], case["clip"], rng)
    each = laid_out(magnitudes([count], case["clip"], rng), case["vector_layout"])
    column, single = statistics.column(each.numpy(), g.dim()), one.numpy().reshape((1,) * g.dim())
    if case["name"] == "tails":
        expected = quantize.absmax(dx, 1), statistics.tail_count(dx, column), statistics.tail_count(dx, single)
        return Check(lambda: ops.normalize_grad_tails(of.parts, each, one), expected, [*of.inputs, one, each])
    key, words = key_of(case["key"], rng)
    inputs = [*of.inputs, one, each, *([] if key is None else [key])]
    if case["name"] == "by_ratio":
        ratio = case["ratio"]
        clip = quantize.absmax(dx, 1) * np.float32(ratio)
        expected = clip, quantize.quantize(dx, clip, words)
        return Check(lambda: ops.normalize_grad_quantize_by_ratio(of.parts, ratio, key), expected, inputs)
    if case["name"] == "quantize":
        expected = quantize.quantize(dx, single, words)
        return Check(lambda: ops.normalize_grad_quantize(of.parts, one, key), expected, inputs)
    clips = each.as_strided(column.shape, [each.stride(0) if size > 1 else 1 for size in column.shape])
    both = quantize.quantize(dx, single, words), quantize.quantize(dx, column, words)
    return Check(lambda: ops.normalize_grad_quantize_pair(of.parts, one, clips, key), both, inputs)


def _build_batch(case: Case, rng: np.random.Generator) -> Check:
    of = Gradient(case, rng)
    count, rows = of.g.shape[1], of.g.numel() // of.g.shape[1]
    mean = laid_out(torch.from_numpy(rng.standard_normal(count)), case["vector_layout"])
    invstd = laid_out(torch.from_numpy(np.exp(rng.standard_normal(count))), case["vector_layout"])
    a = of.a.double() if case["wide_a"] else of.a
    total, dot, squares, masked = passes.normalize_grad_sums(*of.gated)
    q, r, gamma, beta = norms.norm_gradient(of.a.numpy(), mean.numpy(), invstd.numpy(), total, dot, rows)
    sums = None
    if case["want_sums"]:
        given = (of.a.numpy(), q, r, mean.numpy(), invstd.numpy(), case["eps"], total, dot, squares, rows)
        sums = norms.gradient_sums(*given)
    options = {"want_masked": case["want_masked"], "want_sums": case["want_sums"]}
    return Check(
        lambda: normalize_grad_batch(*of.parts[:2], a, of.b, of.mask, case["activation"], mean, invstd, case["eps"], **options),
        (q, r, gamma, beta, masked if case["want_masked"] else None, sums, None),
        [*of.inputs, mean, invstd],
        may_refuse=case["wide_a"],
    )


GRADIENT = {
    **SHAPE,
    "g": FLOATS,
    "g_layout": LAYOUTS,
    "g_stored": Choice(("float32", "bfloat16")),
    "x": FLOATS,
    "kept": Choice(("float32", "bfloat16", "int8")),
    "layout": LAYOUTS,
    "activation": ACTIVATIONS,
    "mask": YES,
    "vectors": VECTORS,
    "vector_layout": VECTOR_LAYOUTS,
    "want_masked": YES,
}
KINDS = [
    Kind(
        "gradient",
        6,
        {
            "name": Choice(NAMES),
            **GRADIENT,
            "want_squares": YES,
            "clip": Choice(("ordinary", "ones", "mixed")),
            "key": KEYS,
            "ratio": Choice((1.0, 0.5, 0.3, 1.7)),
        },
        _build,
        bias_shape,
    ),
    Kind(
        "normalize_grad_batch",
        3,
        {**GRADIENT, "want_sums": YES, "eps": Choice((1e-5, 1e-3, 0.0)), "wide_a": Choice((False, False, False, True))},
        _build_batch,
        bias_shape,
    ),
]
