# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a norm per channel: from sums to coefficients, from sums of gradients to gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from byteback import ops
from fuzz.fields import YES, Case, Choice, Number
from fuzz.harness import Check, Kind
from fuzz.kind_forward import ACTIVATIONS, VECTORS, Norm, arrays, tensors, vector
from fuzz.operands import VECTOR_LAYOUTS, floats, laid_out, magnitudes
from oracles import norms, statistics


def _wide(count: int, case: Case, rng: np.random.Generator) -> Tensor:
    return laid_out(floats([count], case["vectors"], rng).double() * float(rng.random() + 0.5), case["sum_layout"])


def _build_forward(case: Case, rng: np.random.Generator) -> Check:
    count, pixels = case["channels"], case["pixels"]
    x = floats([pixels, count], case["x"], rng).numpy()
    stats = tuple(laid_out(torch.from_numpy(part), case["sum_layout"]) for part in statistics.channel_stats(x))
    norm, activation = Norm(count, case, rng), case["activation"]

    def call() -> Any:
        fresh = norm.fresh()
        got = ops.norm_coefficients(stats, pixels, *fresh[:4], fresh.running, fresh.momentum, activation)  # type: ignore[arg-type]
        return tuple(got), fresh.running

    vectors = arrays(norm.gamma), arrays(norm.beta), arrays(norm.bias)
    given = tuple(part.numpy() for part in stats)
    expected = norms.norm_coefficients(given, pixels, *vectors, norm.eps, arrays(norm.running), norm.momentum, activation)
    return Check(call, expected, tensors(*stats, norm.gamma, norm.beta, norm.bias))


def _build_folded(case: Case, rng: np.random.Generator) -> Check:
    count = case["channels"]
    mean, *others = (vector(count, case["vectors"], case["sum_layout"], rng) for _ in range(4))
    var = laid_out(magnitudes([count], case["var"], rng), case["sum_layout"])
    if case["invstd"]:
        alone = 1.0 / np.sqrt(var.numpy().astype(np.float64) + case["eps"])
        return Check(lambda: ops.norm_invstd(var, case["eps"]), alone, [var])
    gamma, beta, bias = (v if wanted else None for v, wanted in zip(others, case["has"], strict=True))
    expected = norms.norm_folded(mean.numpy(), var.numpy(), arrays(gamma), arrays(beta), arrays(bias), case["eps"])
    return Check(
        lambda: ops.norm_folded(mean, var, gamma, beta, bias, case["eps"]), expected, tensors(mean, var, gamma, beta, bias)
    )


def _build_backward(case: Case, rng: np.random.Generator) -> Check:
    count, pixels = case["channels"], case["pixels"]
    a, q, r = (vector(count, case["vectors"], case["sum_layout"], rng) for _ in range(3))
    mean, total, dot, squares = (_wide(count, case, rng) for _ in range(4))
    invstd = laid_out(magnitudes([count], "ordinary", rng).double(), case["sum_layout"])
    given = a.double() if case["wide_a"] else a
    inputs = [a, q, r, mean, total, dot, squares, invstd]
    if case["sums"]:
        rest = (mean, invstd, case["eps"], total, dot, squares, pixels)
        expected = norms.gradient_sums(*(part.numpy() if isinstance(part, Tensor) else part for part in (a, q, r, *rest)))
        return Check(lambda: ops.gradient_sums(given, q, r, *rest), expected, inputs, may_refuse=case["wide_a"])
    rest = (mean, invstd, total, dot, pixels)
    expected = norms.norm_gradient(*(part.numpy() if isinstance(part, Tensor) else part for part in (a, *rest)))
    return Check(lambda: ops.norm_gradient(given, *rest), expected, inputs, may_refuse=case["wide_a"])


_COMMON = {
    "channels": Number(1, 70),
    "pixels": Number(1, 200),
    "vectors": VECTORS,
    "sum_layout": VECTOR_LAYOUTS,
    "eps": Choice((1e-5, 1e-3, 0.0)),
}
_HAS = Choice(((False,) * 3, (True, True, False), (True,) * 3, (True, False, False), (False, True, True)))
KINDS = [
    Kind(
        "norm_coefficients",
        2,
        {
            **_COMMON,
            "x": VECTORS,
            "vector_layout": VECTOR_LAYOUTS,
            "activation": ACTIVATIONS,
            "running": YES,
            "momentum": Choice((0.1, 0.3, 1.0, 0.0)),
            "has": _HAS,
        },
        _build_forward,
    ),
    Kind(
        "norm_folded", 1, {**_COMMON, "var": Choice(("ordinary", "wild", "mixed")), "has": _HAS, "invstd": YES}, _build_folded
    ),
    Kind("norm_gradient", 2, {**_COMMON, "sums": YES, "wide_a": Choice((False, False, False, True))}, _build_backward),
]
