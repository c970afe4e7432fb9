# SPDX-License-Identifier: Apache-2.0
"""quantize, quantize_max, quantize_pair and noise_key: any clip, key, layout and value."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from byteback import ops
from fuzz.fields import Axes, Case, Choice, Number, channels
from fuzz.harness import Check, Kind
from fuzz.operands import FLOATS, KEYS, LAYOUTS, VECTOR_LAYOUTS, floats, key_of, laid_out, magnitudes
from oracles import quantize as oracle

SHAPE = {"rank": Choice((4, 4, 2, 3, 5)), "batch": Number(1, 5), "channels": channels(70), "pixels": Axes(Number(1, 12))}
CLIPS = Choice(("peak", "ordinary", "ones", "wild", "mixed"))


def bias_shape(case: Case, rng: np.random.Generator) -> None:
    """Few cases are so large that several threads take part, or so wide that channels come in several tiles."""
    kind = rng.random()
    if kind < 0.03:
        case.update(rank=4, batch=2, pixels=[int(rng.integers(20, 40)), int(rng.integers(20, 40)), 1])
    elif kind < 0.05:
        case.update(rank=2, batch=int(rng.integers(1, 30)), channels=int(rng.integers(1000, 3000)))
    elif case["rank"] == 5:
        case["pixels"] = [min(size, 5) for size in case["pixels"]]


def shape_of(case: Case) -> tuple[int, ...]:
    return (case["batch"], case["channels"], *case["pixels"][: case["rank"] - 2])


def clip_for(x: Tensor, axes: list[int], case: Case, rng: np.random.Generator) -> Tensor:
    """A clip that varies along some axes of x; x under `peak` reaches its clip exactly."""
    shape = [size if dim in axes else 1 for dim, size in enumerate(x.shape)]
    if case["clip"] == "peak":
        others = tuple(dim for dim in range(x.dim()) if dim not in axes)
        values = np.abs(x.numpy()).max(axis=others, keepdims=True) if others else np.abs(x.numpy())
        clip = torch.from_numpy(np.ascontiguousarray(values))
    else:
        clip = magnitudes(shape, case["clip"], rng)
    if case["clip_layout"] == "expanded":
        return clip.reshape(-1)[:1].reshape([1] * x.dim()).expand(shape)
    return laid_out(clip, case["clip_layout"])


def _build(case: Case, rng: np.random.Generator) -> Check:
    x = laid_out(floats(shape_of(case), case["x"], rng), case["layout"])
    key, words = key_of(case["key"], rng)
    inputs = [x, *([key] if key is not None else [])]
    if case["axis"] != "given":
        axis = {"all": -1, "n": 0, "c": 1, "last": x.dim() - 1}[case["axis"]]
        expected = oracle.quantize_max(x.numpy(), axis, words)
        return Check(lambda: ops.quantize_max(x, axis, key), expected, inputs)
    axes = {"tensor": [], "n": [0], "c": [1], "nc": [0, 1], "last": [x.dim() - 1], "all": list(range(x.dim()))}[case["per"]]
    clip = clip_for(x, axes, case, rng)
    expected = oracle.quantize(x.numpy(), clip.numpy(), words)
    return Check(lambda: ops.quantize(x, clip, key), expected, [*inputs, clip])


def _build_pair(case: Case, rng: np.random.Generator) -> Check:
    x = laid_out(floats(shape_of(case), case["x"], rng), case["layout"])
    key, words = key_of(case["key"], rng)
    one, each = clip_for(x, [], case, rng), clip_for(x, [1], case, rng)
    one = one.reshape(()) if case["scalar"] else one
    array = x.numpy()
    expected = tuple(oracle.quantize(array, clip.numpy().reshape(shape), words) for clip, shape in (
        (one, (1,) * x.dim()), (each, each.shape)))  # fmt: skip
    inputs = [x, one, each, *([key] if key is not None else [])]
    return Check(lambda: ops.quantize_pair(x, one, each, key), expected, inputs)


def _build_key(case: Case, rng: np.random.Generator) -> Check:
    numbers = [
        int(rng.choice([0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63), int(rng.integers(-(2**63), 2**63 - 1))])) for _ in range(3)
    ]
    seed, layer, count = numbers[0], abs(numbers[1]) % 2**32, numbers[2]
    tensors = [torch.tensor(number).reshape((1,) * case["axes"]) for number in (seed, layer, count)]
    expected = oracle.noise_key(seed, layer, count, case["rank"])
    return Check(lambda: ops.noise_key(*tensors, case["rank"]), expected, tensors)


_QUANTIZED = {**SHAPE, "x": FLOATS, "layout": LAYOUTS, "key": KEYS, "clip": CLIPS, "clip_layout": VECTOR_LAYOUTS}
KINDS = [
    Kind(
        "quantize",
        8,
        {
            **_QUANTIZED,
            "axis": Choice(("given", "given", "given", "all", "n", "c", "last")),
            "per": Choice(("tensor", "n", "c", "nc", "last", "all")),
        },
        _build,
        bias_shape,
    ),
    Kind("quantize_pair", 3, {**_QUANTIZED, "scalar": Choice((True, False))}, _build_pair, bias_shape),
    Kind("noise_key", 1, {"rank": Number(0, 70), "axes": Number(0, 2)}, _build_key),
]
