# SPDX-License-Identifier: Apache-2.0
"""Every function of byteback.ops that reads tensors, with sound arguments, for tests that change one of them at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from byteback import ops
from byteback.ops import magnitude
from byteback.ops.programs import Averaged

CHANNELS = 6
X = torch.randn(2, CHANNELS, 4, 5, generator=torch.Generator().manual_seed(0))
G = torch.randn(2, CHANNELS, 4, 5, generator=torch.Generator().manual_seed(1))
Q = (X * 30).clamp(-127, 127).to(torch.int8)
SINGLE, ONE = torch.full((), 2.0), torch.ones(1, 1, 1, 1)
MASK = torch.randint(0, 64, (40, 1), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
W = torch.randint(-127, 128, (CHANNELS, CHANNELS, 1, 1), generator=torch.Generator().manual_seed(4)).to(torch.int8)
FLAT = ((1, 1), (0, 0), (1, 1), 1)
AVERAGE = Averaged(0.3, 0.9, 0.1)


def vector(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(CHANNELS, generator=torch.Generator().manual_seed(seed)).to(dtype) + 0.5


def wide(seed: int) -> Tensor:
    return vector(seed, torch.float64)


def batch_norm(gamma: Tensor, beta: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> ops.BatchNorm:
    return ops.BatchNorm(gamma, beta, bias, 1e-5, (mean, var), 0.1)


WANTS: dict[str, Any] = {"want_int8": True, "want_float": True, "want_mask": True}


def parts(g: Tensor, x: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, r: Tensor) -> ops.GradientParts:
    return ops.GradientParts(g, x, a, b, None, "relu", p, q, r)


PARTS = (G, X, vector(2), vector(3), vector(4), vector(5), vector(6))
RUNNING = (vector(5), vector(6))
# Each function with sound tensors; any of them may come in another layout.
CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "quantize": (ops.quantize, (X, ONE, torch.tensor([3, 4]))),
    "quantize_each": (ops.quantize, (X, vector(2).reshape(1, -1, 1, 1), torch.tensor([3, 4]))),
    "quantize_max": (lambda x, key: ops.quantize_max(x, 1, key), (X, torch.tensor([3, 4]))),
    "absmax": (lambda x: ops.absmax(x, 1), (X,)),
    "moments": (ops.moments, (X,)),
    "tail_count": (ops.tail_count, (X, vector(2).reshape(1, -1, 1, 1))),
    "dot_terms": (ops.dot_terms, (X, Q, vector(2).reshape(1, -1, 1, 1))),
    "cosine_terms": (ops.cosine_terms, (X, vector(2))),
    "cosine_slope_terms": (ops.cosine_slope_terms, (X, SINGLE)),
    "noise_key": (ops.noise_key, (torch.tensor(1), torch.tensor(2), torch.tensor(3))),
    "conv_int8": (lambda *t: ops.conv_int8(*t, *FLAT), (Q, ONE, W, vector(2).reshape(-1, 1, 1, 1))),
    "conv_int8_grad_input": (
        lambda *t: ops.conv_int8_grad_input(*t, list(X.shape), *FLAT),
        (Q, ONE, W, vector(2).reshape(1, -1, 1, 1)),
    ),
    "conv_int8_grad_weight": (
        lambda *t: ops.conv_int8_grad_weight(*t, list(W.shape), *FLAT),
        (Q, vector(2).reshape(1, -1, 1, 1), Q, ONE),
    ),
    "matmul_int8": (ops.matmul_int8, (Q[0, 0], vector(2)[:4].reshape(4, 1), W[:5, :, 0, 0], ONE[0, 0])),
    "channel_stats": (ops.channel_stats, (X,)),
    "normalize_peak": (lambda x, a, b, r: ops.normalize_peak(x, a, b, r, "relu"), (X, vector(2), vector(3), G)),
    "normalize": (
        lambda x, a, b, values, scale, clip, low, high, mean: ops.normalize(
            *(x, a, b, (values, scale), "relu", clip),
            want_float=True,
            want_mask=True,
            keep="int8",
            low=low,
            high=high,
            mean=mean,
        ),
        (X, vector(2), vector(3), Q, SINGLE, SINGLE, -vector(4), vector(5), vector(6)),
    ),
    "conv_normalize": (
        lambda x, xs, w, ws, a, b, r, clip: ops.conv_normalize(x, xs, w, ws, FLAT, a, b, r, "relu", clip, want_float=True),
        (Q, ONE, W, ONE, vector(2), vector(3), G, SINGLE),
    ),
    "normalize_batch": (
        lambda x, *norm: (ops.normalize_batch(x, batch_norm(*norm), None, "relu", **WANTS), norm[3:]),
        (X, vector(2), vector(3), vector(4), *RUNNING),
    ),
    "conv_normalize_batch": (
        lambda x, xs, w, ws, values, scale, *norm: (
            ops.conv_normalize_batch(x, xs, w, ws, FLAT, batch_norm(*norm), (values, scale), "relu", **WANTS, keep="int8"),
            norm[3:],
        ),
        (Q, ONE, W, ONE, Q, SINGLE, vector(2), vector(3), vector(4), *RUNNING),
    ),
    "pack_norm": (lambda x, *v: ops.pack_norm(x, *v, "int8"), (X, -vector(2), vector(3), vector(4))),
    "norm_coefficients": (
        lambda t, s, low, high, *norm: (
            ops.norm_coefficients((t, s, low, high), 40, *norm[:3], 1e-5, norm[3:], 0.1, "relu"),
            norm[3:],
        ),
        (wide(1), 90 * wide(2), -vector(3), vector(4), vector(5), vector(6), vector(7), *RUNNING),
    ),
    "norm_folded": (lambda *v: ops.norm_folded(*v, 1e-5), (vector(1), vector(2), vector(3), vector(4), vector(5))),
    "norm_gradient": (lambda *v: ops.norm_gradient(*v, 40), (vector(1), wide(2), wide(3), wide(4), wide(5))),
    "gradient_sums": (
        lambda *v: ops.gradient_sums(*v[:5], 1e-5, *v[5:], 40),
        (vector(1), vector(2), vector(3), wide(4), wide(5), wide(6), wide(7), wide(8)),
    ),
    "normalize_grad_sums": (
        lambda g, x, a, b: ops.normalize_grad_sums(g, x, a, b, None, "relu", want_masked=True, want_squares=True),
        (G, X, vector(2), vector(3)),
    ),
    "normalize_grad_sums_int8": (
        lambda g, v, step, centre, mask: ops.normalize_grad_sums(
            g, (v, step, centre), None, None, mask, "relu", want_masked=True, want_squares=True
        ),
        (G, Q, vector(2), vector(3), MASK),
    ),
    "add_waiting": (lambda x, g, mask: ops.add_waiting(x, g, mask), (X, G, MASK)),
    "normalize_grad": (lambda *t: ops.normalize_grad(parts(*t)), PARTS),
    "normalize_grad_quantize": (
        lambda clip, key, *t: ops.normalize_grad_quantize(parts(*t), clip, key),
        (SINGLE, torch.tensor([3, 4]), *PARTS),
    ),
    "normalize_grad_batch": (
        lambda g, x, a, b, mean, invstd: ops.normalize_grad_batch(
            g, x, a, b, None, "relu", mean, invstd, 1e-5, want_masked=True, want_sums=True
        ),
        (G, X, vector(2), vector(3), wide(4), wide(5)),
    ),
    "normalize_grad_batch_none": (
        lambda g, x, a, mean, invstd: ops.normalize_grad_batch(
            g, x, a, a, None, "none", mean, invstd, 1e-5, want_masked=False, want_sums=True
        ),
        (G, X, vector(2), wide(4), wide(5)),
    ),
    "tail_count_pair": (ops.tail_count_pair, (X, vector(2), SINGLE)),
    "normalize_grad_tails": (lambda each, one, *t: ops.normalize_grad_tails(parts(*t), each, one), (vector(2), SINGLE, *PARTS)),
    "quantize_pair": (ops.quantize_pair, (X, SINGLE, vector(2).reshape(1, -1, 1, 1), torch.tensor([3, 4]))),
    "normalize_grad_quantize_pair": (
        lambda clip, each, key, *t: ops.normalize_grad_quantize_pair(parts(*t), clip, each, key),
        (SINGLE, vector(2).reshape(1, -1, 1, 1), torch.tensor([3, 4]), *PARTS),
    ),
    "magnitude_clips": (
        lambda x, peak, total, squares, one, each: magnitude.magnitude_clips(AVERAGE, x, (peak, total, squares), one, each),
        (X, *ops.moments(X), SINGLE.reshape(1), vector(3)),
    ),
    "gradient_pair": (
        lambda total, squares, one, each, key, *t: magnitude.gradient_pair(
            AVERAGE, parts(*t), (total, squares), one, each, key, want_one=True
        ),
        (wide(2), 90 * wide(3), SINGLE.reshape(1), vector(3), torch.tensor([3, 4]), *PARTS),
    ),
}
"""Name: (function of tensors, those tensors)."""

WRITTEN = {(name, len(tensors) - back) for name, (_, tensors) in CALLS.items() for back in (1, 2) if tensors[-1] is RUNNING[1]}
"""Running statistics, which are written to: nobody can write to an expanded tensor, and a copy would be lost."""


def numbers(made: Any) -> list[Any]:
    """Everything that a function returned, as numbers."""
    if isinstance(made, (tuple, list)):
        return [number for part in made for number in numbers(part)]
    return [made.double().tolist()] if isinstance(made, Tensor) else [made]


def called(name: str, which: int = -1, change: Callable[[Tensor], Tensor] = Tensor.clone) -> list[Any]:
    """The function's results with one of its tensors changed."""
    function, tensors = CALLS[name]
    return numbers(function(*(change(t) if index == which else t.clone() for index, t in enumerate(tensors))))
