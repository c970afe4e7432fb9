# SPDX-License-Identifier: Apache-2.0
"""Quantizer: the state of one tensor of one layer over a run.

A step depends on its data (is a new search due? did too much saturate? is anything NaN?), so it is one operation of a backend
(ops/quantizer.py), which gets the tensor and this state. For `torch.compile` it is one operator that declares which buffers it
writes, so the graph has no data-dependent branch. In eager mode the same function is called directly.

Buffers have a fixed shape from the start, with one row for each of 8 call slots: a module that is called several times in one
forward has separate state for each call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from byteback.ops import quantizer as steps
from byteback.ops.contract.scale_rule import AXES
from byteback.ops.quantizer import COLUMNS, Gradient, Moment, State, settings_of
from byteback.ops.types import QTensor
from byteback.quantize.rule import TensorRule

CALL_SLOTS = 8


class Settings(NamedTuple):
    """The settings of one quantizer call, which are the same in every step."""

    rule: TensorRule
    role: str
    layer: str
    on_nonfinite: str
    observe_every: int
    momentum: float
    by_channel: bool = False  # measure the deviation of each channel too: a depthwise convolution does not mix channels
    packs: bool = False  # grad_weight reads the integers, and on a GPU packed by 16 images (ops/contract/packing.py)

    def axis(self) -> int:
        """Returns the axis along which the scale varies; -1 for none."""
        return AXES[self.role].get(self.rule.per, -1)


def columns_of(rule: TensorRule) -> dict[str, int]:
    """Returns the columns of `Quantizer.observed` by name: those of every step, and the diagnostics of the clip rule.

    >>> columns_of(TensorRule())
    {'saturated': 0, 'deviation': 1, 'clip': 3, 'worst_channel': 4}
    """
    own = rule.clip.diagnostics
    named = {
        "saturated": steps.SATURATED,
        "deviation": steps.DEVIATION,
        "clip": steps.CLIP,
        "worst_channel": steps.WORST_CHANNEL,
    }
    places = [steps.OWN, *range(COLUMNS, COLUMNS + len(own))]
    return {**named, **dict(zip(own, places, strict=False))}


def quantize_fresh(x: Tensor, settings: int, iteration: Tensor, flags: Tensor | None = None) -> QTensor:
    """Quantizes x by a rule that needs no memory. `settings` is the number of registered settings; `flags`: in a step."""
    if torch.compiler.is_compiling():
        return QTensor(*torch.ops.byteback.quantize_fresh(x, iteration, settings))
    return steps.fresh(x, iteration, settings_of(settings), flags)


def moved(buffer: Tensor, fn: Callable[[Tensor], Tensor], initial: int) -> Tensor:
    """Returns a buffer after Module._apply(fn): on the device that fn moves it to, with the same values and dtype as before.

    The values are copied because fn may be `to_empty`. A buffer on the meta device has no values and is filled with `initial`.
    """
    made = fn(buffer).to(buffer.dtype)
    if made.device == buffer.device:
        return buffer
    if made.is_meta:
        return made
    with torch.no_grad():
        return made.fill_(initial) if buffer.is_meta else made.copy_(buffer)


def new_unshared(device: torch.device | None) -> Tensor:
    """`Quantizer.unshared`, before anything was measured."""
    return torch.zeros(CALL_SLOTS, 5, dtype=torch.float64, device=device)


class Quantizer(nn.Module):
    """The state of one tensor (input, grad_output) of one layer: buffers of fixed shape, saved in the state_dict.

    clip         numbers that the clip rule remembers, one row per call slot (`ClipRule.entries`)
    initialized  whether `clip` was written yet
    updated_at   the iteration of the last search
    observed     the last observations, in the columns of `columns_of`: saturated share, direction deviation, largest clip, ...
    seen         whether `observed` was written yet
    tracked      (inputs only) the average clip in training, used in eval mode

    Flags are floats, 0 or 1, because averages of models (an EMA of buffers) subtract them.

    One tensor is no buffer and not in the state_dict, because DistributedDataParallel overwrites buffers with those of rank 0:
    unshared     measurements of this process since the last optimizer step, not yet shared with other ranks (nn/ranks.py):
                 x·x̂, x̂·x̂, x·x and whether they were measured, for each call slot; tensors with NaN or Inf, in row 0 of
                 the last column, whose other rows are flags if errors are deferred (ops/refusals.py)
    """

    clip: Tensor
    initialized: Tensor
    updated_at: Tensor
    observed: Tensor
    seen: Tensor
    tracked: Tensor | None

    def __init__(self, entries: int, tracks: bool, device: torch.device | None = None, columns: int = COLUMNS) -> None:
        super().__init__()

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.register_buffer("clip", zeros(CALL_SLOTS, entries))
        self.register_buffer("initialized", zeros(CALL_SLOTS))
        self.register_buffer("updated_at", zeros(CALL_SLOTS, dtype=torch.int64))
        self.register_buffer("observed", zeros(CALL_SLOTS, columns))
        self.register_buffer("seen", zeros(CALL_SLOTS))
        self.register_buffer("tracked", zeros(CALL_SLOTS, entries) if tracks else None)
        self.unshared = new_unshared(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantizer:
        """Moves with the model, but stays float32 under .half() and .bfloat16(), because integers depend on the clips."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = moved(buffer, fn, 0)
        self.unshared = moved(self.unshared, fn, 0)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Ignores a checkpoint of a rule that remembered other numbers (of an earlier version, or of another recipe)."""
        observed = state_dict.get(prefix + "observed")
        if observed is not None and observed.shape[-1] < self.observed.shape[1]:  # the checkpoint is older than a column
            missing = self.observed.shape[1] - observed.shape[-1]
            state_dict[prefix + "observed"] = torch.nn.functional.pad(observed, (0, missing))
        loaded = state_dict.get(prefix + "clip")
        if loaded is not None and loaded.shape != self.clip.shape:
            warnings.warn(
                f"{prefix[:-1]}: the checkpoint has {loaded.shape[-1]} numbers per call, but the clip rule in use has "
                f"{self.clip.shape[1]}; the state of this quantizer is reset, as at the first step. The weights are loaded.",
                stacklevel=2,
            )
            self.reset()
            state_dict.update(self.state_dict(prefix=prefix))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def reset(self) -> None:
        """Sets all state to zero."""
        for tensor in (*self.buffers(), self.unshared):
            tensor.zero_()

    def quantize(self, x: Gradient, settings: int, moment: Moment, nonfinite: Tensor, key: Tensor | None = None) -> QTensor:
        """Quantizes x with the clip that the rule of the registered `settings` chooses."""
        state = self.state(nonfinite)
        if torch.compiler.is_compiling():
            iteration, slot, remember = moment
            return QTensor(*torch.ops.byteback.quantize_remembering(x, *state, iteration, key, settings, slot, remember))
        return steps.step(x, state, settings_of(settings), key, moment)

    def adopt(
        self,
        q: QTensor,
        clip: Tensor,
        x: Callable[[], Tensor],
        settings: int,
        moment: Moment,
        nonfinite: Tensor,
    ) -> QTensor:
        """Updates the state as `quantize` does, for integers `q` that another function computed with this clip, and counted."""
        return steps.adopt(q, clip, x, self.state(nonfinite), settings_of(settings), moment)

    def state(self, nonfinite: Tensor) -> State:
        """Returns the tensors that a step may write to."""
        own: dict[str, Any] = self._buffers  # faster than nn.Module.__getattr__
        fixed = own["clip"], own["initialized"], own["updated_at"], own["observed"], own["seen"]
        return State(*fixed, own["tracked"], nonfinite, self.unshared)

    def tracked_clip(self, slot: int, ordinal_known: bool) -> Tensor | None:
        """Returns the clip for eval mode, or None if training tracked no single clip or the call slot is not known."""
        assert self.tracked is not None, "only input quantizers track a clip"
        return steps.tracked_clip(self.tracked, self.seen, slot, ordinal_known)

    def quantize_tracked(
        self, x: Tensor, settings: int, iteration: Tensor, slot: int, per_sample: bool, ordinal_known: bool = True
    ) -> QTensor:
        """Quantizes x with the clip tracked in training, so that a prediction does not depend on its batch."""
        assert self.tracked is not None, "only input quantizers track a clip"
        if torch.compiler.is_compiling():
            args = (x, self.tracked, self.seen, iteration, settings, slot, per_sample, ordinal_known)
            return QTensor(*torch.ops.byteback.quantize_tracked(*args))
        known = settings_of(settings)
        return steps.predict(x, self.tracked, self.seen, iteration, known, slot, per_sample, ordinal_known)


def quantize_pair(
    quantizers: tuple[Quantizer, Quantizer],
    x: Gradient,
    settings: tuple[int, int],
    moment: Moment,
    nonfinite: Tensor,
    key: Tensor | None,
    want_first: bool,
) -> tuple[QTensor | None, QTensor] | None:
    """Quantizes a gradient per tensor (if wanted) and per channel. Returns None if the backend cannot do both at once."""
    states = quantizers[0].state(nonfinite), quantizers[1].state(nonfinite)
    known = settings_of(settings[0]), settings_of(settings[1])
    return steps.step_pair(x, states, known, key, moment, want_first)
