# SPDX-License-Identifier: Apache-2.0
"""A quantizer's step where a fused block makes the integers: the same clips, checks and memory, fewer readings of the tensor.

    adopt           an activation that was quantized when it was written
    quantize_held   a gradient under a clip that is known in advance, or that follows from its channels' maxima by a known
                    ratio: quantized while it is computed, never written as floats
    quantize_both   a gradient whose two copies are chosen and made together

Each returns None (or is not called) where the tensor itself has to be looked at; then Quantizer.quantize takes the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol

from torch import Tensor

from byteback.quantize.clipping import Choice, ClipRule, Memory, PairedGradient
from byteback.quantize.qtensor import QTensor
from byteback.quantize.quantizer import Quantizer, refuse_step, remember_step, settings_of

Made = tuple[Tensor, Tensor, Tensor, Tensor]
"""values, scale, (saturated, nonfinite), max|x|: what ops.quantize returns."""


class LazyGradient(Protocol):
    """A gradient that may be quantized without being written as floats; None where it cannot."""

    def quantized(self, clip: Tensor, key: Tensor | None) -> Made | None:
        """Its integers under one clip."""
        ...

    def by_ratio(self, ratio: float, key: Tensor | None) -> tuple[Tensor, Made] | None:
        """The clip ratio · max|g| of each channel, and its integers under those."""
        ...


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


def quantize_held(quantizer: Quantizer, gradient: LazyGradient, handle: int, key: Tensor | None, step: Step) -> QTensor | None:
    """The integers under a clip that a rule holds for a period; None where the rule, or a measurement, must see the tensor."""
    settings, now, slot = settings_of(handle), int(step.iteration), step.slot
    rule = settings.rule.clip
    if not rule.looks_back or now % settings.observe_every == 0:
        return None
    buffers = quantizer.state(step.nonfinite)
    if not buffers.initialized.tolist()[slot]:
        return None
    memory = Memory(buffers.clip[slot], True, buffers.updated_at.tolist()[slot], now, settings.rule.rounding == "stochastic")
    known = _by_ratio(rule, memory, gradient, key) if settings.rule.per == "K" else _by_clip(rule, memory, gradient, key)
    if known is None:
        return None
    choice, (values, scale, counts, peak) = known
    saturated, bad = counts.tolist()
    share = saturated / max(values.numel(), 1)
    if bad or rule.is_stale(choice, share, float(peak)):
        return None
    q = QTensor(values, scale)
    if step.remember and values.numel():
        remember_step(buffers, settings, slot, now, choice, share, q, _unseen)
    return q


def _by_clip(rule: ClipRule, memory: Memory, gradient: LazyGradient, key: Tensor | None) -> tuple[Choice, Made] | None:
    held = rule.held(memory)
    made = None if held is None else gradient.quantized(held, key)
    if held is None or made is None:
        return None
    choice = Choice(held)
    other = rule.corrected(choice, made[3], memory)
    if other is None:
        return choice, made
    again = gradient.quantized(other.clip, key)
    return None if again is None else (other, again)


def _by_ratio(rule: ClipRule, memory: Memory, gradient: LazyGradient, key: Tensor | None) -> tuple[Choice, Made] | None:
    ratio = rule.ratio(memory)
    known = None if ratio is None else gradient.by_ratio(ratio, key)
    return None if known is None else (Choice(known[0]), known[1])


def _unseen() -> Tensor:
    raise AssertionError("a held clip is measured only where the tensor is written out")


def quantize_both(
    quantizers: tuple[Quantizer, Quantizer],
    gradient: PairedGradient,
    handles: tuple[int, int],
    key: Tensor | None,
    step: Step,
    want_one: bool = True,
) -> tuple[QTensor | None, QTensor] | None:
    """Copies of a gradient, per tensor (if wanted) and per channel; None where their rules do not choose together."""
    settings = tuple(settings_of(handle) for handle in handles)
    one, each = (s.rule for s in settings)
    numbers = one.clip.averages()
    together = one.clip == each.clip and (one.per, each.per) == ("tensor", "K") and one.rounding == each.rounding
    if numbers is None or not together or not gradient.elements():
        return None
    now, slot = int(step.iteration), step.slot
    before = tuple(q.clip[slot] if q.initialized.tolist()[slot] else None for q in quantizers)
    made = gradient.pair(numbers, before, key, want_one)  # type: ignore[arg-type]
    clips, shares = made.clips[:2], made.clips[2:]
    floats = lru_cache(maxsize=1)(gradient.written)  # both copies may measure their direction, and it is written once
    results: list[QTensor | None] = []
    for index, copy in enumerate((made.one, made.each)):
        if copy is None:
            results.append(None)
            continue
        buffers, q = quantizers[index].state(step.nonfinite), QTensor(*copy)
        if made.nonfinite:
            q = QTensor(*refuse_step(buffers, settings[index], step.remember, *q, made.nonfinite, now))
        elif step.remember:
            choice = Choice(clips[index], remember=clips[index], gaussian_share=shares[index])
            share = made.saturated[index] / gradient.elements()
            remember_step(buffers, settings[index], slot, now, choice, share, q, floats)
        results.append(q)
    return results[0], results[1]  # type: ignore[return-value]
