# SPDX-License-Identifier: Apache-2.0
"""Tensors for cases: values of a pattern, in a layout. Layouts named `expanded_*` repeat values along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fuzz.fields import Choice

LAYOUTS = Choice(
    ("contiguous", "channels_last", "channels_last", "permuted", "sliced", "offset", "odd_ones", "expanded_n", "expanded_c",
     "expanded_w", "wider")
)  # fmt: skip
VECTOR_LAYOUTS = Choice(("contiguous", "contiguous", "sliced", "offset", "expanded"))
INTEGERS = Choice(("random", "random", "signs", "plus", "minus", "alternating", "one_hot", "zeros", "positive"))
FLOATS = Choice(
    (
        "normal",
        "normal",
        "wild",
        "ties",
        "special",
        "special",
        "zeros",
        "minus_zeros",
        "constant",
        "denormal",
        "outlier",
        "huge",
    )
)
SPECIAL = (math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0, -0.0, 1e-42, 6.0, 3.0, -3.0, 88.8, -88.8, 1e-30)
KEYS = Choice(("none", "plain", "plain", "sliced", "expanded", "wide"))
MASK = 2**32 - 1


def integers(shape: Sequence[int], pattern: str, rng: np.random.Generator) -> Tensor:
    """int8 values in [-127, 127]."""
    count = math.prod(shape)
    if pattern == "random":
        flat = rng.integers(-127, 128, count)
    elif pattern == "positive":
        flat = rng.integers(0, 128, count)
    elif pattern == "signs":
        flat = 127 - 254 * rng.integers(0, 2, count)
    elif pattern == "alternating":
        flat = 127 - 254 * (np.arange(count) % 2)
    elif pattern == "one_hot":
        flat = np.where(np.arange(count) == int(rng.integers(max(count, 1))), -127, 0)
    else:
        flat = np.full(count, {"plus": 127, "minus": -127, "zeros": 0}[pattern])
    return torch.from_numpy(flat.astype(np.int8).reshape(tuple(shape)))


def floats(shape: Sequence[int], pattern: str, rng: np.random.Generator) -> Tensor:
    """float32 values: of one magnitude, of many, between integers (ties), not finite, all equal."""
    shape = tuple(shape)
    normal = rng.standard_normal(shape)
    if pattern == "wild":
        values = normal * np.exp(np.clip(12 * rng.standard_normal(shape), -30, 30))
    elif pattern == "ties":
        values = rng.integers(-260, 261, shape) / 2
    elif pattern == "constant":
        values = np.full(shape, float(np.float32(rng.standard_normal())))
    elif pattern in ("zeros", "minus_zeros"):
        values = np.full(shape, 0.0 if pattern == "zeros" else -0.0)
    else:
        values = normal * {"denormal": 1e-40, "huge": 1e37}.get(pattern, 3.0)
    values = np.asarray(values, np.float32)
    flat = values.reshape(-1)
    if pattern == "special" and flat.size:
        at = rng.integers(0, flat.size, max(flat.size // 20, 1))
        flat[at] = rng.choice(np.array(SPECIAL, np.float32), len(at))
    if pattern == "outlier" and flat.size:
        flat[int(rng.integers(flat.size))] = np.float32(1e6)
    return torch.from_numpy(values)


def magnitudes(count: Sequence[int], pattern: str, rng: np.random.Generator) -> Tensor:
    """Positive floats for scales and clips: ones, ordinary, of every magnitude, or such that count as zero."""
    count = tuple(count)
    if pattern == "ones":
        return torch.ones(count)
    spread = {"ordinary": 1.0, "wild": 20.0, "mixed": 1.0}[pattern]
    values = np.exp(spread * rng.standard_normal(count)).astype(np.float32)
    if pattern == "mixed":
        odd = np.array([0.0, -0.0, 2.0**-101, 2.0**-100, 1e-42, math.inf, math.nan, -1.0, 127.0], np.float32)
        values = np.where(rng.random(count) < 0.5, rng.choice(odd, count), values)
    return torch.from_numpy(np.asarray(values, np.float32))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of x in another layout; an axis that a layout speaks of but x lacks leaves it contiguous."""
    axis = {"expanded_n": 0, "expanded_c": 1, "expanded_w": -1, "expanded": 0}.get(layout)
    if axis is not None:
        return x.narrow(axis, 0, 1).expand(x.shape) if x.numel() else x
    if layout == "channels_last" and x.dim() > 2:
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "permuted":
        backwards = list(range(x.dim()))[::-1]
        return x.permute(backwards).contiguous().permute(backwards)
    if layout == "sliced":
        wide = torch.full([*x.shape[:-1], 2 * x.shape[-1] + 1], 99, dtype=x.dtype)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if layout == "offset":
        longer = torch.full([x.numel() + 1], 99, dtype=x.dtype)
        longer[1:] = x.reshape(-1)
        return longer[1:].reshape(x.shape)
    if layout == "wider" and x.dim() > 1:  # the first channels of a channels-last tensor that has more
        wide = torch.full([x.shape[0], *x.shape[2:], x.shape[1] + 3], 99, dtype=x.dtype).movedim(-1, 1)
        wide[:, : x.shape[1]] = x
        return wide[:, : x.shape[1]]
    if layout == "odd_ones":  # an axis of one element may have any stride
        dense = x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 1 and x.numel() % 2 else x.contiguous()
        strides = [
            7 * axis + 1 if size == 1 else step for axis, (size, step) in enumerate(zip(x.shape, dense.stride(), strict=True))
        ]
        return dense.as_strided(x.shape, strides)
    return x.contiguous()


def key_of(layout: str, rng: np.random.Generator) -> tuple[Tensor | None, tuple[int, int] | None]:
    """A noise key as an operator takes it, and the two words of 32 bits that it stands for."""
    words = [int(word) for word in rng.integers(0, MASK, 2, endpoint=True)]
    if rng.random() < 0.1:
        words = [MASK, MASK] if rng.random() < 0.5 else [0, 0]
    if layout == "none":
        return None, None
    if layout == "expanded":
        return torch.tensor(words[:1]).expand(2), (words[0], words[0])
    if layout == "sliced":
        return torch.tensor([words[0], -1, words[1], -1])[::2], (words[0], words[1])
    if layout == "wide":  # what is above 32 bits must not count
        return torch.tensor([words[0] + 2**40, words[1] - 2**35]), (words[0], words[1])
    return torch.tensor(words), (words[0], words[1])
