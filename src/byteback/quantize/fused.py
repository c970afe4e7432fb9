# SPDX-License-Identifier: Apache-2.0
"""A quantizer's step where a fused block makes the integers: the same clips, checks and memory, fewer readings of the tensor.

    adopt           an activation that was quantized when it was written
    quantize_held   a gradient under a clip that is known in advance: quantized while it is computed, never written as floats
    quantize_both   a gradient whose two copies are chosen and made together, from statistics gathered while it was written

Each returns None (or is not called) where the tensor itself has to be looked at; then Quantizer.quantize takes the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from byteback import ops
from byteback.ops.ledger import Buffers
from byteback.quantize.clipping import Choice, Memory
from byteback.quantize.qtensor import QTensor
from byteback.quantize.quantizer import Quantizer, Settings, refuse_step, remember_step, settings_of

Made = tuple[Tensor, Tensor, Tensor, Tensor]
"""values, scale, (saturated, nonfinite), max|x|: what ops.quantize returns."""


class Adopted(NamedTuple):
    """A tensor that somebody else has quantized under its own maximum (or under a clip that was asked for)."""

    q: QTensor
    clip: Tensor
    counts: Tensor  # (saturated, nonfinite)
    x: Callable[[], Tensor]  # the float tensor, where its direction has to be measured


class Step(NamedTuple):
    """What all tensors of one step share."""

    iteration: Tensor | int
    nonfinite: Tensor
    slot: int
    remember: bool


def adopt(quantizer: Quantizer, adopted: Adopted, handle: int, step: Step) -> QTensor:
    """Takes over integers that were made elsewhere by a rule without memory, and remembers what `quantize` would have."""
    q, clip, counts, x = adopted
    saturated, bad = counts.tolist()
    count = q.values.numel()
    if not bad and not (step.remember and count):
        return q
    buffers, settings, now = quantizer.state(step.nonfinite), settings_of(handle), int(step.iteration)
    if bad:
        return QTensor(*refuse_step(buffers, settings, step.remember, q.values.clone(), q.scale.clone(), bad, now))
    remember_step(buffers, settings, step.slot, now, Choice(clip, remember=clip), saturated / count, q, x)
    return q


def quantize_held(
    quantizer: Quantizer, make: Callable[[Tensor, Tensor | None], Made | None], handle: int, key: Tensor | None, step: Step
) -> QTensor | None:
    """The integers under a clip that is held for a period, by make(clip, key); None where the rule must see the tensor."""
    settings, now, slot = settings_of(handle), int(step.iteration), step.slot
    rule = settings.rule.clip
    if not rule.looks_back or now % settings.observe_every == 0:
        return None
    buffers = quantizer.state(step.nonfinite)
    if not buffers.initialized.tolist()[slot]:
        return None
    held = rule.held(Memory(buffers.clip[slot], True, buffers.updated_at.tolist()[slot], now))
    made = None if held is None else make(held, key)
    if held is None or made is None:
        return None
    values, scale, counts, peak = made
    saturated, bad = counts.tolist()
    share, choice = saturated / max(values.numel(), 1), Choice(held)
    if bad or rule.is_stale(choice, share, float(peak)):
        return None
    q = QTensor(values, scale)
    if step.remember and values.numel():
        remember_step(buffers, settings, slot, now, choice, share, q, _unseen)
    return q


def _unseen() -> Tensor:
    raise AssertionError("a held clip is measured only where the tensor is written out")


class Moments(NamedTuple):
    """A gradient and what one sweep saw of each channel: max|x|, sum, sum of squares, each (1, C, 1, ...)."""

    x: Tensor
    peak: Tensor
    total: Tensor
    squares: Tensor


def quantize_both(
    quantizers: tuple[Quantizer, Quantizer],
    moments: Callable[[], Moments | None],
    handles: tuple[int, int],
    key: Tensor | None,
    step: Step,
) -> tuple[QTensor, QTensor] | None:
    """Two copies of a gradient, per tensor and per channel; None where their rules do not choose together."""
    one, each = (settings_of(handle) for handle in handles)
    rule = one.rule.clip
    together = rule == each.rule.clip and (one.rule.per, each.rule.per) == ("tensor", "K")
    if not together or one.rule.rounding != each.rule.rounding or not rule.chooses_both:
        return None
    seen = moments()
    if seen is None or not seen.x.numel():
        return None
    now, slot = int(step.iteration), step.slot
    memories = tuple(
        Memory(q.clip[slot], bool(q.initialized.tolist()[slot]), q.updated_at.tolist()[slot], now) for q in quantizers
    )
    choices = rule.choose_both(*seen, *memories)
    made = ops.quantize_pair(seen.x, choices[0].clip, choices[1].clip, key)
    results = []
    for quantizer, settings, choice, (values, scale, counts, _) in zip(quantizers, (one, each), choices, made, strict=True):
        saturated, bad = counts.tolist()
        results.append(
            _settle(quantizer.state(step.nonfinite), settings, choice, QTensor(values, scale), saturated, bad, seen.x, step)
        )
    return results[0], results[1]


def _settle(
    buffers: Buffers, settings: Settings, choice: Choice, q: QTensor, saturated: int, bad: int, x: Tensor, step: Step
) -> QTensor:
    now = int(step.iteration)
    if bad:
        return QTensor(*refuse_step(buffers, settings, step.remember, *q, bad, now))
    if step.remember:
        remember_step(buffers, settings, step.slot, now, choice, saturated / x.numel(), q, lambda: x)
    return q
