# SPDX-License-Identifier: Apache-2.0
"""The step of a quantizer on a GPU, without waiting for the device: clip, integers, counts and state stay in its memory.

A step is a few passes over the tensor and one small kernel that writes the state (kernels/ledger.py). Passes that are needed in
some steps only are launched in each, and end at once where a number in device memory says so.

Programs of clip rules run here (ops/programs.py): maxima, magnitude-aware clips, and the held clip with a grid search
(search.py). Rules without a program, and other searches, run on the reference, which reads values. So does a prediction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from byteback.ops import refusals
from byteback.ops.backends.reference.deferred import DeferredSteps
from byteback.ops.backends.triton import magnitude, search
from byteback.ops.backends.triton.kernels import ledger
from byteback.ops.backends.triton.launch import blocks, fits, launch
from byteback.ops.backends.triton.quantize import absmax, quantize, quantize_packing, quantize_pair
from byteback.ops.backends.triton.statistics import channel_cosine_terms, dots, moments
from byteback.ops.programs import Averaged, Held, Maximum
from byteback.ops.quantizer import DEVIATION, BlockGradient, Gradient, Moment, State, floats_of
from byteback.ops.refusals import scale_of
from byteback.ops.types import QTensor, for_grad_weight

_adopted = WeakTensorKeyDictionary()  # calls per slot of each quantizer, by its buffer `observed`


class TritonSteps(DeferredSteps):
    """The operations of ops/quantizer.py. What is not here is the reference's."""

    def step(self, x: Gradient, state: State, settings: Any, key: Tensor | None, moment: Moment) -> QTensor:
        program = settings.rule.clip.program()
        tensor = x.parts.g if isinstance(x, BlockGradient) else x
        if tensor.dim() < 2 or not fits(tensor) or settings.axis() > 1:
            return super().step(x, state, settings, key, moment)
        if type(program) is Maximum:
            floats = floats_of(x)
            clip = absmax(floats, settings.axis())
            flags = search.schedule(state, settings, moment, 1)
            made = search.Made(quantize_packing(floats, clip, key, settings.packs), clip, clip, flags, lambda: floats)
        elif type(program) is Held and search.runs(settings.rule.clip, settings.axis()):
            made = search.held(x, state, settings, key, moment, program)
        else:
            return super().step(x, state, settings, key, moment)
        return _finish(made, state, settings, moment)

    def step_pair(
        self,
        x: Gradient,
        states: tuple[State, State],
        settings: tuple[Any, Any],
        key: Tensor | None,
        moment: Moment,
        want_first: bool,
    ) -> tuple[QTensor | None, QTensor] | None:
        rule = settings[0].rule.clip.program()
        tensor = x.parts.g if isinstance(x, BlockGradient) else x
        if type(rule) is not Averaged or not fits(tensor):
            return super().step_pair(x, states, settings, key, moment, want_first)
        # Before the first step the memory is 0, and then a clip is the maximum, as without a memory.
        before = [state.clip[moment.slot] for state in states]
        if isinstance(x, BlockGradient):
            assert x.sums is not None, "a block whose layer makes two copies requests the sums"
            made = magnitude.gradient_pair(rule, x.parts, x.sums, before[0], before[1], key, True, settings[1].packs)
            clips, copies = made.clips, (made.one, made.each)
        else:
            clips = magnitude.magnitude_clips(rule, x, *moments(x), before[0], before[1])
            copies = quantize_pair(x, clips.one, clips.each, key, settings[1].packs)
        results: list[QTensor | None] = []
        for index, copy in enumerate(copies):
            if copy is None or (index == 0 and not want_first):
                results.append(None)
                continue
            clip, gaussian = clips.of(index)
            flags = search.schedule(states[index], settings[index], moment, 1)
            own = search.Made(copy, clip, clip, flags, lambda: floats_of(x), gaussian)
            results.append(_finish(own, states[index], settings[index], moment))
        return results[0], results[1]  # type: ignore[return-value]

    def adopt(self, q: QTensor, clip: Tensor, x: Callable[[], Tensor], state: State, settings: Any, moment: Moment) -> QTensor:
        """The float tensor may not exist, and only every `observe_every`-th call of a quantizer computes it to measure."""
        if not fits(q.values) or q.values.dim() < 2:
            return super().adopt(q, clip, x, state, settings, moment)
        flags = search.schedule(state, settings, moment, 1)
        measures = False
        if moment.remember:
            calls = _adopted.setdefault(state.observed, Counter())
            measures = calls[moment.slot] % settings.observe_every == 0
            calls[moment.slot] += 1
        made = search.Made(q, clip, clip, flags, x if measures else None)
        return _finish(made, state, settings, moment)

    def fresh(self, x: Tensor, iteration: Tensor, settings: Any, flags: Tensor | None = None) -> QTensor:
        if type(settings.rule.clip.program()) is not Maximum or x.dim() < 2 or not fits(x) or settings.axis() > 1:
            return super().fresh(x, iteration, settings, flags)
        q = quantize(x, absmax(x, settings.axis()), None)
        policy = "propagate"
        if flags is not None and settings.on_nonfinite != "propagate":
            policy = "raise"
            launch(ledger.flag, (1,), flags, q.counts, iteration, _next_order(), warps=1)
        return _void(q, policy)

    def factors(self, observed: Sequence[Sequence[Tensor]], rules: Sequence[Any]) -> list[Any]:
        largest = [torch.stack([copy[:, DEVIATION].amax() for copy in copies]).amax().double() for copies in observed]
        return [rule.factor(deviation) for deviation, rule in zip(largest, rules, strict=True)]


def _next_order() -> int:
    return next(refusals._order)


def _void(q: QTensor, policy: str) -> QTensor:
    """Sets q to zeros with the scale of the policy if the tensor was not finite."""
    total, scales = q.values.numel(), q.scale.numel()
    grid = (max(blocks(total, 4096), blocks(scales, 4096)),)
    launch(ledger.void, grid, q.values, q.scale, q.counts, total, scales, scale_of(policy), B=4096)
    packed = for_grad_weight(q)
    if packed is not q.values:
        grid = (blocks(packed.numel(), 4096),)
        launch(ledger.void, grid, packed, q.scale, q.counts, packed.numel(), 0, scale_of(policy), B=4096)
    return q


def _finish(made: search.Made, state: State, settings: Any, moment: Moment) -> QTensor:
    """Writes the state, counts and flags NaN and Inf, and returns the integers by the policy."""
    q, flags = made.q, made.flags
    assert q.counts is not None
    policy, counts = "propagate", moment.remember or settings.role == "grad_output"
    if counts:
        policy = settings.on_nonfinite
    terms = worst = q.counts
    measures = moment.remember and made.floats is not None
    if measures:
        floats = made.floats()  # type: ignore[misc]
        terms = dots(floats, q.values, q.scale, flags[search.OBSERVES :])
        if settings.by_channel:
            worst = _worst_channel(floats, made.clip, settings.rule.rounding == "stochastic")
    elif moment.remember:
        flags[search.OBSERVES].zero_()
    used, remembered = made.clip.reshape(-1).contiguous(), made.remembered.reshape(-1).contiguous()
    entries = state.clip.shape[1]
    own = made.own
    tracked = state.clip if state.tracked is None else state.tracked
    launch(
        ledger.write,
        (1,),
        *(state.clip, state.initialized, state.updated_at, state.observed, state.seen, tracked),
        *(state.nonfinite, state.unshared, used, remembered),
        *(flags[search.CHANGES :], flags[search.SEARCHES :], flags[search.OBSERVES :], terms, q.counts),
        *(q.counts if own is None else own, worst, moment.iteration),
        *(moment.slot, entries, state.observed.shape[1], used.numel(), remembered.numel()),
        *(1.0 - settings.momentum, settings.momentum, q.values.numel(), _next_order() if counts else 0),
        REMEMBER=moment.remember,
        TRACKS=state.tracked is not None,
        DIAGNOSTICS=int(own is not None),
        WORST=measures and settings.by_channel,
        RAISES=policy == "raise",
        COUNTS=counts,
        B=1 << (max(used.numel(), remembered.numel(), entries, 2) - 1).bit_length(),
        warps=1,
    )
    return _void(q, policy)


def _worst_channel(x: Tensor, clip: Tensor, stochastic: bool) -> Tensor:
    """Returns the largest expected deviation of a channel (reference/quantizer.py: worst_channel)."""
    clips = clip.reshape(1, -1).expand(1, x.shape[1]).contiguous()
    xq, qq, xx = channel_cosine_terms(x, clips, stochastic)[0]
    norm = (qq * xx).sqrt()
    deviation = 1.0 - torch.where(norm > 0.0, xq / norm, 0.0)
    return torch.where(xx > 0.0, deviation, 0.0).amax()


STEPS = TritonSteps()
