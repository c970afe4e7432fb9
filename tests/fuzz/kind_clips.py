# SPDX-License-Identifier: Apache-2.0
"""Magnitude-aware clips with their int8 copies, and what a quantizer writes down."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from byteback import ops
from byteback.ops.backends import paths
from byteback.ops.backends.cpu import quantizer as cpu
from byteback.ops.backends.reference import quantizer as reference
from byteback.ops.magnitude import float_pair, gradient_clips, gradient_pair, magnitude_clips
from byteback.ops.programs import Averaged
from byteback.ops.quantizer import State
from fuzz.fields import YES, Case, Choice, Number, channels
from fuzz.harness import Check, Kind
from fuzz.kind_backward import GRADIENT, Gradient
from fuzz.kind_quantize import SHAPE, bias_shape, shape_of
from fuzz.operands import FLOATS, KEYS, LAYOUTS, VECTOR_LAYOUTS, floats, key_of, laid_out, magnitudes
from oracles import clips, quantize, statistics

RULE = Averaged(0.3, 1.0 - 0.8, 0.8)


class Before:
    """The clips of the last time: none, or one and one for each channel, some of them 0."""

    def __init__(self, count: int, case: Case, rng: np.random.Generator) -> None:
        self.one: Tensor | None = None
        self.each: Tensor | None = None
        if case["before"]:
            each = magnitudes([count], "ordinary", rng)
            each[torch.from_numpy(rng.random(count) < 0.2)] = 0.0
            self.one, self.each = magnitudes([1], "ordinary", rng), laid_out(each, case["before_layout"])
        self.tensors = [part for part in (self.one, self.each) if part is not None]

    def arrays(self) -> tuple[Any, Any]:
        return (None, None) if self.one is None or self.each is None else (self.one.numpy(), self.each.numpy())


def _pair(x: np.ndarray, made: tuple[Any, ...], words: Any, want_one: bool) -> tuple[Any, ...]:
    """The int8 copies under the clips: clips, one, each, saturated, non-finite."""
    one, each = (quantize.quantize(x, clip, words) for clip in made[:2])
    saturated = int(one[2][0]) if want_one else 0, int(each[2][0])
    return tuple(made), one[:2] if want_one else None, each[:2], saturated, int(each[2][1])


def _numbers(value: Any) -> Any:
    """A Paired or Clips as nested tuples; an int8 copy as values and scale."""
    if isinstance(value, ops.QTensor):
        return tuple(value[:2])
    return tuple(_numbers(part) for part in value) if isinstance(value, tuple) else value


def _build(case: Case, rng: np.random.Generator) -> Check:
    x = laid_out(floats(shape_of(case), case["x"], rng), case["layout"])
    before = Before(x.shape[1], case, rng)
    array = x.numpy()
    sums = statistics.moments(array)
    made = clips.magnitude_clips(RULE, array, (sums[1].reshape(-1), sums[2].reshape(-1)), *before.arrays())
    if case["name"] == "clips":
        moments = ops.moments(x)
        return Check(lambda: magnitude_clips(RULE, x, moments, before.one, before.each), made, [x, *moments, *before.tensors])
    key, words = key_of(case["key"], rng)
    return Check(
        lambda: _numbers(float_pair(RULE, x, before.one, before.each, key, want_one=case["want_one"])),
        _pair(array, made, words, case["want_one"]),
        [x, *before.tensors],
    )


def _build_gradient(case: Case, rng: np.random.Generator) -> Check:
    of = Gradient(case, rng)
    dx = of.dx()
    before = Before(dx.shape[1], case, rng)
    _, total, squares = statistics.moments(dx)
    sums = tuple(torch.from_numpy(np.ascontiguousarray(part.reshape(-1))) for part in (total, squares))
    sums = tuple(laid_out(part, case["sum_layout"]) for part in sums)
    made = clips.magnitude_clips(RULE, dx, (sums[0].numpy(), sums[1].numpy()), *before.arrays())
    inputs = [*of.inputs, *sums, *before.tensors]
    if case["name"] == "clips":
        return Check(lambda: gradient_clips(RULE, of.parts, sums, before.one, before.each), made, inputs)  # type: ignore[arg-type]
    key, words = key_of(case["key"], rng)
    want = case["want_one"]
    return Check(
        lambda: _numbers(gradient_pair(RULE, of.parts, sums, before.one, before.each, key, want_one=want)),  # type: ignore[arg-type]
        _pair(dx, made, words, want),
        inputs,
    )


def _build_ledger(case: Case, rng: np.random.Generator) -> Check:
    slots, count, slot = 8, case["channels"], case["slot"]

    def rows(*shape: int) -> Tensor:
        return floats((slots, *shape), "normal", rng)

    shapes = {"clip": (count,), "initialized": (), "observed": (5,), "tracked": (count,)}
    buffers = {name: rows(*shape) for name, shape in shapes.items()}
    buffers["seen"] = (rows() > 0).float()
    buffers["updated_at"] = torch.from_numpy(rng.integers(0, 99, slots))
    if not case["tracked"]:
        del buffers["tracked"]
    sizes = {"each": count, "one": 1, "samples": count + 3}
    clip = laid_out(magnitudes([sizes[case["clips"]]], case["clip"], rng), case["clip_layout"])
    remember = {"none": None, "same": clip}.get(case["remember"], magnitudes([count], "ordinary", rng))
    shares = [float("nan") if rng.random() < 0.3 else float(np.float32(rng.random())) for _ in range(3)]
    *seen, own = shares
    entry = reference.Entry(clip, remember, case["searched"], int(rng.integers(0, 2**40)), *seen, (own,), case["momentum"])

    def call() -> Any:
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        untouched = {"nonfinite": torch.zeros(slots), "unshared": torch.zeros(slots, 5, dtype=torch.float64)}
        steps = reference.STEPS if paths.number() is None else cpu.STEPS
        steps.write(State(**{"tracked": None, **copies, **untouched}), slot, entry)
        return [copies[name] for name in sorted(copies)]

    expected = clips.ledger({name: buffer.numpy() for name, buffer in buffers.items()}, slot, entry)
    return Check(call, [expected[name] for name in sorted(expected)], [clip])


_CLIPPED = {"name": Choice(("clips", "pair")), "before": YES, "before_layout": VECTOR_LAYOUTS, "key": KEYS, "want_one": YES}
KINDS = [
    Kind("magnitude", 2, {**SHAPE, "x": FLOATS, "layout": LAYOUTS, **_CLIPPED}, _build, bias_shape),
    Kind("gradient_pair", 3, {**GRADIENT, **_CLIPPED, "sum_layout": VECTOR_LAYOUTS}, _build_gradient, bias_shape),
    Kind(
        "ledger",
        1,
        {
            "channels": channels(70),
            "slot": Number(0, 7),
            "clips": Choice(("each", "one", "samples")),
            "clip": Choice(("ordinary", "mixed")),
            "clip_layout": VECTOR_LAYOUTS,
            "remember": Choice(("none", "same", "other")),
            "searched": YES,
            "tracked": YES,
            "momentum": Choice((0.1, 0.01, 1.0)),
        },
        _build_ledger,
    ),
]
