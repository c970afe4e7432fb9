# SPDX-License-Identifier: Apache-2.0
"""The definition of a quantizer's step (ops/quantizer.py), in PyTorch and with the methods of its clip rule.

    choose a clip      from the memory of the rule if it has one (`held`), else from the tensor (`choose`)
    quantize           with that clip; a held clip may be corrected (`refit`), or be stale and then chosen again
    refuse             handle a tensor with NaN or Inf by the policy of the recipe
    remember           store what the rule needs later, the observed values, and the clip for eval

This code reads values of tensors. It belongs to a backend, and on a CPU reading is free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback import ops
from byteback.ops import magnitude
from byteback.ops.block_grad import normalize_grad_quantize, normalize_grad_quantize_by_ratio
from byteback.ops.programs import Averaged
from byteback.ops.quantizer import (
    CLIP,
    COLUMNS,
    DEVIATION,
    NONFINITE,
    OWN,
    SATURATED,
    WORST_CHANNEL,
    BlockGradient,
    Choice,
    Gradient,
    Memory,
    Moment,
    State,
    deviation_of,
    floats_of,
)
from byteback.ops.refusals import refusal, scale_of
from byteback.ops.types import QTensor


class Entry(NamedTuple):
    """How one tensor was quantized. A number that was not measured is NaN."""

    clip: Tensor
    remember: Tensor | None  # the memory of the clip rule for the next step
    searched: bool
    iteration: int
    saturated: float
    deviation: float
    own: tuple[float, ...]  # the diagnostics of the rule
    momentum: float  # of the tracked clip


class Made(NamedTuple):
    """A tensor quantized with the chosen clip, its share of saturated values, and its number of NaN or Inf values."""

    q: QTensor
    choice: Choice
    clip: Tensor
    saturated: float
    nonfinite: int

    def peak(self) -> float:
        """Returns max|x| as a number."""
        assert self.q.peak is not None
        return float(self.q.peak)


class Steps:
    """The operations of ops/quantizer.py. A backend overrides those that it can do in fewer calls."""

    defers = False

    # ---- operations ----

    def step(self, x: Gradient, state: State, settings: Any, key: Tensor | None, moment: Moment) -> QTensor:
        now = int(moment.iteration)
        made = self._made(x, settings, self._memory(state, settings, moment.slot, now), key)
        if made.nonfinite:
            return self._refuse_step(state, settings, moment.remember, made.q, made.nonfinite, now)
        if moment.remember and made.q.values.numel():
            self._remember(state, settings, moment.slot, now, made, lambda: floats_of(x))
        return made.q

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
        if type(rule) is not Averaged or not (x.parts.g if isinstance(x, BlockGradient) else x).numel():
            return None
        now, slot = int(moment.iteration), moment.slot
        one, each = (state.clip[slot] if state.initialized.tolist()[slot] else None for state in states)
        if isinstance(x, BlockGradient):
            assert x.sums is not None, "a block whose layer makes two copies requests the sums"
            made = magnitude.gradient_pair(rule, x.parts, x.sums, one, each, key, want_one=want_first)
        else:
            made = magnitude.float_pair(rule, x, one, each, key, want_one=want_first)
        results: list[QTensor | None] = []
        for index, copy in enumerate((made.one, made.each)):
            state, setting = states[index], settings[index]
            if copy is not None and made.nonfinite:
                copy = self._refuse_step(state, setting, moment.remember, copy, made.nonfinite, now)
            elif copy is not None and moment.remember:
                clip, gaussian = made.clips.of(index)
                share = made.saturated[index] / copy.values.numel()
                choice = Choice(clip, remember=clip, diagnostics=(gaussian,))
                own = Made(copy, choice, clip, share, 0)
                self._remember(state, setting, slot, now, own, lambda: floats_of(x))
            results.append(copy)
        return results[0], results[1]  # type: ignore[return-value]

    def adopt(
        self,
        q: QTensor,
        clip: Tensor,
        x: Callable[[], Tensor],
        state: State,
        settings: Any,
        moment: Moment,
    ) -> QTensor:
        assert q.counts is not None
        saturated, nonfinite = q.counts.tolist()
        count = q.values.numel()
        if nonfinite:
            own = QTensor(q.values.clone(), q.scale.clone(), q.counts)  # other layers may read the same integers
            return self._refuse_step(state, settings, moment.remember, own, nonfinite, int(moment.iteration))
        if moment.remember and count:
            made = Made(q, Choice(clip, remember=clip), clip, saturated / count, 0)
            self._remember(state, settings, moment.slot, int(moment.iteration), made, x)
        return q

    def predict(
        self,
        x: Tensor,
        tracked: Tensor,
        seen: Tensor,
        iteration: Tensor,
        settings: Any,
        slot: int,
        per_sample: bool,
        ordinal_known: bool,
    ) -> QTensor:
        axis = settings.axis()
        if _is_tracked(seen, slot, ordinal_known):
            clip = _shaped(tracked[slot], x, axis)
            clip = clip.expand(x.shape[0], *clip.shape[1:]).contiguous() if per_sample else clip
            q = ops.quantize(x, clip, None)
        else:
            q = quantized_max(x, 0 if per_sample else axis, None)
        assert q.counts is not None
        nonfinite = q.counts.tolist()[1]
        return refuse(q, settings, _outside_training(settings), nonfinite, int(iteration)) if nonfinite else q

    def tracked_clip(self, tracked: Tensor, seen: Tensor, slot: int, ordinal_known: bool) -> Tensor | None:
        return tracked[slot].clone() if tracked.shape[1] == 1 and _is_tracked(seen, slot, ordinal_known) else None

    def fresh(self, x: Tensor, iteration: Tensor, settings: Any, flags: Tensor | None = None) -> QTensor:
        made = self._made(x, settings, Memory(x.new_zeros(1), False, 0, 0), None)
        if made.nonfinite:
            # Skipping steps would not make a weight finite again.
            policy = settings.on_nonfinite if settings.on_nonfinite == "propagate" else "raise"
            return refuse(made.q, settings, policy, made.nonfinite, int(iteration))
        return made.q

    def factors(self, observed: Sequence[Sequence[Tensor]], rules: Sequence[Any]) -> list[Any]:
        every = [copy for copies in observed for copy in copies]
        if len({copy.shape for copy in every}) > 1:  # rules with more diagnostics have more columns
            every = [copy[:, : DEVIATION + 1] for copy in every]
        largest = iter(torch.stack(every)[:, :, DEVIATION].amax(1).tolist())  # one synchronization for all layers
        return [rule.factor(max(next(largest) for _ in copies)) for copies, rule in zip(observed, rules, strict=True)]

    def same_clip(self, clip: Tensor, other: Tensor) -> bool:
        return not self.defers and torch.equal(clip.reshape(()), other.reshape(()))

    def block_site(self, shape: Any, settings: tuple[Any, ...], for_tensor: bool, slot: int) -> Any:
        """Returns None: the reference does not have a step in two operations (ops/block_step.py)."""
        return None

    def block_prediction(self, shape: Any) -> Any:
        """Returns None: the reference checks its operands in every call."""
        return None

    # ---- clip and integers ----

    def _memory(self, state: State, settings: Any, slot: int, now: int) -> Memory:
        rule = settings.rule
        # Without `looks_back` a rule must not use its memory: a recomputed forward has to choose the same clip.
        known = rule.clip.looks_back and bool(state.initialized[slot])
        updated_at = int(state.updated_at[slot]) if known else 0
        return Memory(state.clip[slot], known, updated_at, now, rule.rounding == "stochastic", settings.axis())

    def _made(self, x: Gradient, settings: Any, memory: Memory, key: Tensor | None) -> Made:
        rule = settings.rule.clip
        held = rule.held(memory) if memory.initialized else None
        if held is not None:
            # If the direction will be measured, the float tensor is needed anyway.
            measures = memory.iteration % settings.observe_every == 0
            source = floats_of(x) if measures else x
            made = self._under(source, held, memory.axis, key)
            fitting = None if made.nonfinite else rule.refit(held, made.peak(), memory)
            if fitting is not None:
                made = self._under(source, fitting, memory.axis, key)
            if made.nonfinite or not rule.is_stale(made.choice, made.saturated, made.peak()):
                return made
            memory = replace(memory, initialized=False)
        floats = floats_of(x)
        return self._under(floats, rule.choose(floats, settings.axis(), memory), settings.axis(), key)

    def _under(self, x: Gradient, choice: Choice, axis: int, key: Tensor | None) -> Made:
        """Returns x quantized with the clip of a choice, which is a tensor or a ratio of the maximum."""
        if choice.clip is None:
            clip, q = self._by_ratio(x, choice.ratio, axis, key)
        elif isinstance(x, BlockGradient) and choice.clip.numel() == 1:
            clip, q = choice.clip, normalize_grad_quantize(x.parts, choice.clip, key)
        else:
            floats = floats_of(x)
            clip = _shaped(choice.clip, floats, axis) if choice.clip.dim() != floats.dim() else choice.clip
            q = ops.quantize(floats, clip, key)
        return made_of(q, choice, clip)

    def _by_ratio(self, x: Gradient, ratio: float, axis: int, key: Tensor | None) -> tuple[Tensor, QTensor]:
        if isinstance(x, BlockGradient) and axis == 1:
            return normalize_grad_quantize_by_ratio(x.parts, ratio, key)
        floats = floats_of(x)
        clip = ops.absmax(floats, axis) * ratio
        return clip, ops.quantize(floats, clip, key)

    # ---- state ----

    def _remember(self, state: State, settings: Any, slot: int, now: int, made: Made, x: Callable[[], Tensor]) -> None:
        choice, deviation = made.choice, math.nan
        if choice.searched or now % settings.observe_every == 0:
            terms = ops.dot_terms(x(), made.q.values, made.q.scale).tolist()
            deviation = deviation_of(*terms)
            state.unshared[slot, :NONFINITE].copy_(state.unshared.new_tensor([*terms, 1.0]))
            if settings.by_channel:
                stochastic = settings.rule.rounding == "stochastic"
                state.observed[slot, WORST_CHANNEL] = worst_channel(x(), made.clip, stochastic)
        own = tuple(float(value) for value in choice.diagnostics)
        self.write(
            state,
            slot,
            Entry(made.clip, choice.remember, choice.searched, now, made.saturated, deviation, own, settings.momentum),
        )

    def write(self, state: State, slot: int, entry: Entry) -> None:
        """Writes one entry to row `slot`."""
        if entry.remember is not None:
            row = state.clip[slot]
            row.copy_(_fitting(entry.remember, row))
            state.initialized[slot] = 1.0
        if entry.searched:
            state.updated_at[slot] = entry.iteration
        columns = state.observed[slot].tolist()
        own = [OWN, *range(COLUMNS, COLUMNS + len(entry.own) - 1)][: len(entry.own)]
        for column, value in ((SATURATED, entry.saturated), (DEVIATION, entry.deviation), *zip(own, entry.own, strict=True)):
            if not math.isnan(value):
                columns[column] = value
        columns[CLIP] = float(entry.clip.amax())
        state.observed[slot].copy_(torch.tensor(columns, dtype=torch.float32, device=state.observed.device))
        if state.tracked is not None:
            _track(state.tracked[slot], entry.clip, bool(state.seen[slot]), entry.momentum)
        state.seen[slot] = 1.0

    def _refuse_step(self, state: State, settings: Any, remember: bool, q: QTensor, nonfinite: int, now: int) -> QTensor:
        """Counts a tensor with NaN or Inf and applies the policy."""
        # Outside training, and in a recomputed forward, there is no step to skip and nothing to count.
        policy = _outside_training(settings)
        if remember or settings.role == "grad_output":
            state.nonfinite.add_(1)
            state.unshared[0, NONFINITE] += 1.0
            policy = settings.on_nonfinite
        return refuse(q, settings, policy, nonfinite, now)


def made_of(q: QTensor, choice: Choice, clip: Tensor) -> Made:
    """Returns a quantized tensor that was counted, with the numbers of its counts."""
    assert q.counts is not None
    saturated, nonfinite = q.counts.tolist()
    return Made(q, choice, clip, saturated / max(q.values.numel(), 1), nonfinite)


def quantized_max(x: Tensor, axis: int, key: Tensor | None) -> QTensor:
    """Returns x quantized with its maximum; the peak has one number for each index of the axis."""
    values, scale, peak, counts = ops.quantize_max(x, axis, key)
    return QTensor(values, scale, counts, peak)


def refuse(q: QTensor, settings: Any, policy: str, nonfinite: int, iteration: int) -> QTensor:
    """Raises the error of a tensor with NaN or Inf, or fills it with zeros and the scale of the policy."""
    if policy == "raise":
        raise refusal(settings.layer, settings.role, nonfinite, iteration)
    q.values.zero_()
    q.scale.fill_(scale_of(policy))
    return q


def _outside_training(settings: Any) -> str:
    """Returns the policy outside training. There is no step to skip: a prediction from NaN is NaN."""
    return "raise" if settings.on_nonfinite == "raise" else "propagate"


def _is_tracked(seen: Tensor, slot: int, ordinal_known: bool) -> bool:
    """Whether training has tracked a clip for this call, and it is known which."""
    flags = seen.tolist()
    # If a layer with several call sites is called on its own, it is not known which of its clips to use.
    return bool(flags[slot]) and (ordinal_known or int(sum(flags)) == 1)


def worst_channel(x: Tensor, clip: Tensor, stochastic: bool) -> Tensor:
    """Returns the largest expected deviation of a channel. That of a channel of zeros is 0."""
    clips = clip.reshape(1, -1).expand(1, x.shape[1])
    xq, qq, xx = ops.channel_cosine_terms(x, clips, stochastic)[0]
    norm = (qq * xx).sqrt()
    deviation = 1.0 - torch.where(norm > 0.0, xq / norm, 0.0)
    return torch.where(xx > 0.0, deviation, 0.0).amax()


def _shaped(remembered: Tensor, x: Tensor, axis: int) -> Tensor:
    return remembered.reshape([-1 if dim == axis else 1 for dim in range(x.dim())])


def _track(tracked: Tensor, clip: Tensor, seen: bool, momentum: float) -> None:
    """Updates the exponential average of the clips in training, for eval."""
    entries = _fitting(clip, tracked)
    if seen:
        tracked.mul_(1.0 - momentum).add_(entries * momentum)
    else:
        tracked.copy_(entries)


def _fitting(clip: Tensor, row: Tensor) -> Tensor:
    """Returns the clips for a row of the state; for clips per sample, which have no fixed number, the largest."""
    entries = clip.reshape(-1)
    return entries if entries.numel() == row.numel() else entries.amax()


STEPS = Steps()
