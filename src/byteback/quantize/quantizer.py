# SPDX-License-Identifier: Apache-2.0
"""Quantizer: what a run remembers of one tensor of one layer, and the step from that tensor to int8.

The step depends on its data (is it time to search a clip? did too much saturate? is anything NaN?), so for PyTorch it is
one operator that declares which buffers it writes; `torch.compile` then sees no data-dependent branch. In eager mode the
same function is called directly.

Buffers have a fixed shape from the start, one row for each of 8 call slots: a module that is called several times in one
forward keeps its calls apart.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from byteback import ops
from byteback.ops import ledger
from byteback.ops.contract.scale_rule import AXES
from byteback.ops.dispatch import define
from byteback.ops.ledger import WORST_CHANNEL, Buffers
from byteback.quantize.clipping import Choice, MaxAbs, Memory
from byteback.quantize.qtensor import QTensor
from byteback.quantize.rule import TensorRule

CALL_SLOTS = 8


class NonFiniteError(RuntimeError):
    """A tensor that had to be quantized holds NaN or Inf."""


class Settings(NamedTuple):
    """What does not change from step to step: the constants of one quantizer call."""

    rule: TensorRule
    role: str
    layer: str
    on_nonfinite: str
    observe_every: int
    momentum: float
    by_channel: bool = False  # measure the deviation of each channel too: a depthwise convolution keeps channels apart

    def axis(self) -> int:
        """The axis along which the scale varies; -1 for none."""
        return AXES[self.role].get(self.rule.per, -1)


_settings: list[Settings] = []
_handles: dict[Settings, int] = {}


def register(settings: Settings) -> int:
    """A number that stands for `settings` in this process: an operator's arguments cannot hold Python objects."""
    if settings not in _handles:
        _handles[settings] = len(_settings)
        _settings.append(settings)
    return _handles[settings]


def deviation_of(xq: float, qq: float, xx: float) -> float:
    """1 - cosine from x·x̂, x̂·x̂ and x·x; 0 for a zero tensor, 1 where a tensor became all zeros.

    >>> deviation_of(50.0, 100.0, 25.0), deviation_of(0.0, 0.0, 4.0)
    (0.0, 1.0)
    """
    square = qq * xx
    norm = math.sqrt(square) if square > 0.0 else 0.0
    cosine = xq / norm if norm > 0.0 else 0.0
    return max(1.0 - cosine, 0.0) if xx > 0.0 else 0.0


def _shaped(remembered: Tensor, x: Tensor, axis: int) -> Tensor:
    return remembered.reshape([-1 if dim == axis else 1 for dim in range(x.dim())])


def _refuse(values: Tensor, scale: Tensor, settings: Settings, bad: int, iteration: int) -> tuple[Tensor, Tensor]:
    """What a tensor with NaN or Inf becomes under the recipe's policy."""
    if settings.on_nonfinite == "raise":
        raise NonFiniteError(
            f"{settings.layer}: {settings.role} holds {bad} NaN or Inf values at iteration {iteration}; int8 has neither, so "
            "it cannot be quantized. Lower the learning rate or look for the layer that overflowed; "
            'on_nonfinite="skip" drops such steps, on_nonfinite="propagate" hands NaN on (for a GradScaler).'
        )
    factor = float("nan") if settings.on_nonfinite == "propagate" else 1.0
    return values.zero_(), scale.fill_(factor)


def refuse_step(
    buffers: Buffers, settings: Settings, remember: bool, values: Tensor, scale: Tensor, bad: int, now: int
) -> tuple[Tensor, Tensor]:
    """Counts a tensor with NaN or Inf and deals with it."""
    # Outside training, and in a forward that is run again, there is no step to skip and nothing to count.
    counts_for_step = remember or settings.role == "grad_output"
    if counts_for_step:
        ledger.write_nonfinite(buffers)
    return _refuse(values, scale, settings if counts_for_step else _outside_training(settings), bad, now)


class _Chosen(NamedTuple):
    """A tensor under the clip that its rule chose, and what the cast saw: share saturated, NaN or Inf values, max|x|."""

    values: Tensor
    scale: Tensor
    choice: Choice
    saturated: float
    bad: int
    peak: Tensor


def _choose(x: Tensor, settings: Settings, memory: Memory | None, key: Tensor | None) -> _Chosen:
    """Chooses the clip and quantizes; without a memory, as a rule does that looks at the tensor alone."""
    rule, axis = settings.rule.clip, settings.axis()
    if type(rule) is MaxAbs:
        values, scale, peak, counts = ops.quantize_max(x, axis, key)
        saturated, bad = counts.tolist()
        return _Chosen(values, scale, Choice(peak, remember=peak), saturated / max(x.numel(), 1), bad, peak)
    memory = memory or Memory(x.new_zeros(1), False, 0, 0)
    chosen = _under(x, rule.choose(x, axis, memory), key)
    other = None if chosen.bad else rule.corrected(chosen.choice, chosen.peak, memory)
    return chosen if other is None else _under(x, other, key)


def _under(x: Tensor, choice: Choice, key: Tensor | None) -> _Chosen:
    values, scale, counts, peak = ops.quantize(x, choice.clip, key)
    saturated, bad = counts.tolist()
    return _Chosen(values, scale, choice, saturated / max(x.numel(), 1), bad, peak)


def _remembering(
    x: Tensor,
    buffers: Buffers,
    iteration: Tensor | int,
    key: Tensor | None,
    settings: Settings,
    slot: int,
    remember: bool,
) -> tuple[Tensor, Tensor]:
    """Chooses the clip, quantizes, and writes down what happened: the whole life of one tensor in one step."""
    now = int(iteration)
    rule = settings.rule.clip
    memory = None
    # A rule that does not say so must not look back: a forward that is run again has to choose as before.
    if type(rule) is not MaxAbs:
        known = rule.looks_back and bool(buffers.initialized.tolist()[slot])
        stochastic = settings.rule.rounding == "stochastic"
        memory = Memory(buffers.clip[slot], known, buffers.updated_at.tolist()[slot], now, stochastic)
    chosen = _choose(x, settings, memory, key)
    if chosen.bad:
        return refuse_step(buffers, settings, remember, chosen.values, chosen.scale, chosen.bad, now)
    if memory is not None and rule.is_stale(chosen.choice, chosen.saturated, float(chosen.peak)):
        chosen = _choose(x, settings, replace(memory, initialized=False), key)
    values, scale, choice = chosen[:3]
    if not remember or not x.numel():
        return values, scale
    remember_step(buffers, settings, slot, now, choice, chosen.saturated, QTensor(values, scale), lambda: x)
    return values, scale


def remember_step(
    buffers: Buffers,
    settings: Settings,
    slot: int,
    now: int,
    choice: Choice,
    saturated: float,
    q: QTensor,
    x: Callable[[], Tensor],
) -> None:
    """Writes down how a tensor x became q at iteration `now`."""
    deviation = math.nan
    if choice.searched or now % settings.observe_every == 0:
        terms = ops.dot_terms(x(), q.values, q.scale).tolist()
        deviation = deviation_of(*terms)
        ledger.write_terms(buffers, slot, terms)
        if settings.by_channel:
            buffers.observed[slot, WORST_CHANNEL] = _worst_channel(x(), choice.clip, settings.rule.rounding == "stochastic")
    entry = ledger.Entry(
        choice.clip,
        choice.remember,
        choice.searched,
        now,
        saturated,
        deviation,
        math.nan if choice.gaussian_share is None else choice.gaussian_share,
        settings.momentum,
    )
    ledger.write(buffers, slot, entry)


def _worst_channel(x: Tensor, clip: Tensor, stochastic: bool) -> Tensor:
    """The largest deviation of a channel, as its rounding is expected to give it; a channel of zeros has none."""
    clips = clip.reshape(1, -1).expand(1, x.shape[1])
    xq, qq, xx = ops.channel_cosine_terms(x, clips, stochastic)[0]
    norm = (qq * xx).sqrt()
    deviation = 1.0 - torch.where(norm > 0.0, xq / norm, 0.0)
    return torch.where(xx > 0.0, deviation, 0.0).amax()


def _from_tracked(
    x: Tensor,
    tracked: Tensor,
    seen: Tensor,
    iteration: Tensor,
    settings: Settings,
    slot: int,
    per_sample: bool,
    ordinal_known: bool,
) -> tuple[Tensor, Tensor]:
    """Eval: the clip that training tracked; without one, each sample's own maximum (or the batch's, for a gradient)."""
    axis, flags = settings.axis(), seen.tolist()
    # A layer with several call sites that is called on its own: which of its clips is meant cannot be known.
    if flags[slot] and (ordinal_known or int(sum(flags)) == 1):
        clip = _shaped(tracked[slot], x, axis)
        clip = clip.expand(x.shape[0], *clip.shape[1:]).contiguous() if per_sample else clip
        values, scale, counts, _ = ops.quantize(x, clip)
    else:
        values, scale, _, counts = ops.quantize_max(x, 0 if per_sample else axis)
    bad = counts.tolist()[1]
    if bad:
        return _refuse(values, scale, _outside_training(settings), bad, int(iteration))
    return values, scale


def _outside_training(settings: Settings) -> Settings:
    """There is no step to skip: a prediction from NaN is NaN."""
    return settings if settings.on_nonfinite == "raise" else settings._replace(on_nonfinite="propagate")


def _fresh(x: Tensor, iteration: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """A tensor without memory, such as a weight."""
    chosen = _choose(x, settings, None, None)
    if chosen.bad:
        # Skipping steps would never mend a weight that is NaN already.
        policy = settings if settings.on_nonfinite == "propagate" else settings._replace(on_nonfinite="raise")
        return _refuse(chosen.values, chosen.scale, policy, chosen.bad, int(iteration))
    return chosen.values, chosen.scale


# ---- the same three steps as operators, for torch.compile ------------------------------------------------------------


def _fake(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    shape = [x.shape[dim] if dim == axis else 1 for dim in range(x.dim())]
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(shape)


def _axis(handle: int) -> int:
    return _settings[handle].axis()


def _remembering_op(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *buffers, iteration, key, settings, slot, remember = rest
    return _remembering(x, Buffers(*buffers), iteration, key, _settings[settings], slot, remember)


def _remembering_fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake(x, _axis(rest[-3]))


define(
    "quantize_remembering(Tensor x, Tensor(a!) clip, Tensor(b!) initialized, Tensor(c!) updated_at, Tensor(d!) observed, "
    "Tensor(e!) seen, Tensor(f!)? tracked, Tensor(g!) nonfinite, Tensor(h!) unshared, Tensor iteration, Tensor? key, "
    "int settings, int slot, bool remember) -> (Tensor, Tensor)",
    _remembering_op,
    _remembering_fake,
)
define(
    "quantize_tracked(Tensor x, Tensor tracked, Tensor seen, Tensor iteration, int settings, int slot, bool per_sample, "
    "bool ordinal_known) -> (Tensor, Tensor)",
    lambda x, tracked, seen, iteration, settings, *rest: _from_tracked(x, tracked, seen, iteration, _settings[settings], *rest),
    lambda x, tracked, seen, iteration, settings, slot, per_sample, ordinal_known: _fake(
        x, 0 if per_sample else _axis(settings)
    ),
)
define(
    "quantize_fresh(Tensor x, Tensor iteration, int settings) -> (Tensor, Tensor)",
    lambda x, iteration, settings: _fresh(x, iteration, _settings[settings]),
    lambda x, iteration, settings: _fake(x, _axis(settings)),
)


def settings_of(handle: int) -> Settings:
    """The settings that a number stands for."""
    return _settings[handle]


def quantize_fresh(x: Tensor, settings: int, iteration: Tensor) -> QTensor:
    """x as int8 by a rule that needs no memory; `settings` is registered."""
    if torch.compiler.is_compiling():
        return QTensor(*torch.ops.byteback.quantize_fresh(x, iteration, settings))
    return QTensor(*_fresh(x, iteration, _settings[settings]))


def moved(buffer: Tensor, fn: Callable[[Tensor], Tensor], initial: int) -> Tensor:
    """A buffer after Module._apply(fn): on the device that fn takes it to, with the numbers and the dtype that it had.

    `to_empty` takes it to memory that holds anything. From the meta device, where it had no numbers, it begins with `initial`.
    """
    made = fn(buffer).to(buffer.dtype)
    if made.device == buffer.device:
        return buffer
    if made.is_meta:
        return made
    with torch.no_grad():
        return made.fill_(initial) if buffer.is_meta else made.copy_(buffer)


class Quantizer(nn.Module):
    """The memory of one tensor (input, grad_output) of one layer: fixed-shape buffers, in the state_dict.

    clip         what the clip rule remembers, one row per call slot (`ClipRule.entries`)
    initialized  whether it remembers anything yet
    updated_at   the iteration of its last search
    observed     saturated share, direction deviation, Gaussian share, largest clip, worst channel's deviation, as last seen
    seen         whether anything was observed yet
    tracked      (inputs only) the average clip of training, which eval uses

    Flags are floats, 0 or 1: an average of models (an EMA of buffers) can subtract those.

    One tensor is no buffer and not in the state_dict, because DistributedDataParallel overwrites buffers with those of rank 0:
    unshared     what this process measured since the optimizer's last step and other ranks have yet to hear of (nn/ranks.py):
                 x·x̂, x̂·x̂, x·x and whether they were measured, for each call slot; tensors with NaN or Inf, in row 0
    """

    clip: Tensor
    initialized: Tensor
    updated_at: Tensor
    observed: Tensor
    seen: Tensor
    tracked: Tensor | None

    def __init__(self, entries: int, tracks: bool, device: torch.device | None = None) -> None:
        super().__init__()

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.register_buffer("clip", zeros(CALL_SLOTS, entries))
        self.register_buffer("initialized", zeros(CALL_SLOTS))
        self.register_buffer("updated_at", zeros(CALL_SLOTS, dtype=torch.int64))
        self.register_buffer("observed", zeros(CALL_SLOTS, 5))
        self.register_buffer("seen", zeros(CALL_SLOTS))
        self.register_buffer("tracked", zeros(CALL_SLOTS, entries) if tracks else None)
        self.unshared = zeros(CALL_SLOTS, 5, dtype=torch.float64)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantizer:
        """Moves with the model, but stays float32 under .half() and .bfloat16(): clips steer integers."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = moved(buffer, fn, 0)
        self.unshared = moved(self.unshared, fn, 0)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """A checkpoint whose rule remembered other numbers (of an earlier version, or of another recipe) is not taken over."""
        observed = state_dict.get(prefix + "observed")
        if observed is not None and observed.shape[-1] < self.observed.shape[1]:  # a column is younger than the checkpoint
            missing = self.observed.shape[1] - observed.shape[-1]
            state_dict[prefix + "observed"] = torch.nn.functional.pad(observed, (0, missing))
        loaded = state_dict.get(prefix + "clip")
        if loaded is not None and loaded.shape != self.clip.shape:
            warnings.warn(
                f"{prefix[:-1]}: the checkpoint remembers {loaded.shape[-1]} numbers of each call, but the clip rule in use "
                f"remembers {self.clip.shape[1]}; this quantizer starts anew, as at the first step. The weights are loaded.",
                stacklevel=2,
            )
            self.reset()
            state_dict.update(self.state_dict(prefix=prefix))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def reset(self) -> None:
        """Forgets everything."""
        for tensor in (*self.buffers(), self.unshared):
            tensor.zero_()

    def quantize(
        self,
        x: Tensor,
        settings: int,
        iteration: Tensor | int,
        nonfinite: Tensor,
        key: Tensor | None = None,
        slot: int = 0,
        remember: bool = True,
    ) -> QTensor:
        """x as int8, with the clip that the rule of the registered `settings` chooses now."""
        buffers = self.state(nonfinite)
        if torch.compiler.is_compiling():
            return QTensor(*torch.ops.byteback.quantize_remembering(x, *buffers, iteration, key, settings, slot, remember))
        return QTensor(*_remembering(x, buffers, iteration, key, _settings[settings], slot, remember))

    def state(self, nonfinite: Tensor) -> Buffers:
        """The buffers that a step may write to."""
        own: dict[str, Any] = self._buffers  # past nn.Module's search for each name
        fixed = own["clip"], own["initialized"], own["updated_at"], own["observed"], own["seen"]
        return Buffers(*fixed, own["tracked"], nonfinite, self.unshared)

    def tracked_clip(self, slot: int, ordinal_known: bool) -> Tensor | None:
        """The clip that eval uses, where training has left one (a single one: not per channel) and it is known which."""
        assert self.tracked is not None, "only input quantizers track a clip"
        if self.tracked.shape[1] == 1 and bool(self.seen[slot]) and (ordinal_known or int(self.seen.sum()) == 1):
            return self.tracked[slot].clone()
        return None

    def quantize_tracked(
        self, x: Tensor, settings: int, iteration: Tensor, slot: int, per_sample: bool, ordinal_known: bool = True
    ) -> QTensor:
        """x as int8 with the clip that training tracked, so that a prediction does not depend on its batch."""
        assert self.tracked is not None, "only input quantizers track a clip"
        if torch.compiler.is_compiling():
            args = (x, self.tracked, self.seen, iteration, settings, slot, per_sample, ordinal_known)
            return QTensor(*torch.ops.byteback.quantize_tracked(*args))
        known = _settings[settings]
        return QTensor(*_from_tracked(x, self.tracked, self.seen, iteration, known, slot, per_sample, ordinal_known))
