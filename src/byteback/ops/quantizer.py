# SPDX-License-Identifier: Apache-2.0
"""The step of a quantizer as one operation: from a tensor and a state to integers, their scale and the new state.

    step         quantizes a tensor by its clip rule
    step_pair    makes two copies of a gradient, per tensor and per channel, by a rule that chooses both clips together
    adopt        updates the state for integers that a fused block has computed already
    predict      quantizes an input in eval, by the clip that training has tracked
    fresh        quantizes a tensor without state, such as a weight
    factors      returns the learning-rate factors of all layers, from the deviations that their quantizers measured

The backend of the tensor does all of it: the clip, the counts of saturated and non-finite values, the measurement of the
direction, the memory of the clip rule and the tracked clip. The packages above (nn, quantize, recipes, the optimizer's hooks)
never read a value from a tensor: this is free on a CPU, but on a GPU it synchronizes. `backends/reference/quantizer.py`
defines a step. `backends/cpu/quantizer.py` is the same with fewer calls. Both raise NonFiniteError immediately. A backend for
a device on which reading synchronizes sets `defers` (ops/refusals.py).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.ops.backends.registry import backend_of
from byteback.ops.block_grad import normalize_grad
from byteback.ops.dispatch import define
from byteback.ops.types import GradientParts, QTensor

SATURATED, DEVIATION, OWN, CLIP, WORST_CHANNEL = range(5)
"""Columns of `State.observed`. OWN is the first diagnostic of the clip rule, if it has one; others follow from column 5 on."""
COLUMNS = 5

XQ, QQ, XX, MEASURED, NONFINITE = range(5)
"""Columns of `State.unshared`."""


class NonFiniteError(RuntimeError):
    """Raised if a tensor that must be quantized contains NaN or Inf."""


class State(NamedTuple):
    """The tensors of a quantizer that a step may write to (`quantize/quantizer.py` explains them). One row per call slot."""

    clip: Tensor
    initialized: Tensor
    updated_at: Tensor
    observed: Tensor
    seen: Tensor
    tracked: Tensor | None
    nonfinite: Tensor
    unshared: Tensor


@dataclass(frozen=True)
class Memory:
    """The memory of a clip rule: one call slot of one quantizer.

    `clip` is the last `Choice.remember` (any finite values before the first): `ClipRule.entries` numbers, by default one per
    scale. `stochastic` is whether the tensor will be rounded stochastically. `axis` is the axis of the clip (-1 for none).
    """

    clip: Tensor
    initialized: bool
    updated_at: int
    iteration: int
    stochastic: bool = False
    axis: int = -1

    def numbers(self, count: int) -> list[float]:
        """Returns the first `count` numbers of `clip`."""
        return look(self.clip[:count])


@dataclass(frozen=True)
class Choice:
    """The result of a clip rule: a clip, which broadcasts over the quantized tensor. If it is None, clip = ratio · max|x|, of
    the tensor or of each index of its axis.

    `remember` is written to the memory (None: the memory is not changed), `searched` restarts the period, and `diagnostics`
    are values for the names in `ClipRule.diagnostics`.
    """

    clip: Tensor | None = None
    remember: Tensor | None = None
    searched: bool = False
    ratio: float = 1.0
    diagnostics: tuple[Tensor | float, ...] = ()


def look(x: Tensor) -> Any:
    """Returns the values of a tensor as Python numbers, for clip rules, which a backend calls inside its own operation. If this
    takes time on a device, its backend runs the program of the rule (ops/programs.py) instead of its methods.
    """
    return x.tolist()


class BlockGradient:
    """The gradient of the convolution output in a fused block, p·g' + q·y + r. It is stored as float only if needed.

    `sums` are its Σ and Σ² per channel, for rules that choose the clips of two copies together.
    """

    __slots__ = ("_floats", "parts", "sums")

    def __init__(self, parts: GradientParts, sums: tuple[Tensor, Tensor] | None = None) -> None:
        self.parts, self.sums = parts, sums
        self._floats: Tensor | None = None

    def floats(self) -> Tensor:
        """Returns the gradient as a float tensor. It is computed at the first call."""
        if self._floats is None:
            self._floats = normalize_grad(self.parts)
        return self._floats


Gradient = Tensor | BlockGradient


def floats_of(x: Gradient) -> Tensor:
    """Returns x as a float tensor."""
    return x.floats() if isinstance(x, BlockGradient) else x


def deviation_of(xq: float, qq: float, xx: float) -> float:
    """Returns 1 - cosine from x·x̂, x̂·x̂ and x·x: 0 if x is all zeros, 1 if only x̂ is all zeros.

    >>> deviation_of(50.0, 100.0, 25.0), deviation_of(0.0, 0.0, 4.0)
    (0.0, 1.0)
    """
    square = qq * xx
    norm = math.sqrt(square) if square > 0.0 else 0.0
    cosine = xq / norm if norm > 0.0 else 0.0
    return max(1.0 - cosine, 0.0) if xx > 0.0 else 0.0


# ---- the operations --------------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """The iteration and the call slot of a step, and whether the state of its quantizers is updated."""

    iteration: Tensor
    slot: int
    remember: bool


def step(x: Gradient, state: State, settings: Any, key: Tensor | None, moment: Moment) -> QTensor:
    """Chooses the clip, quantizes x and updates the state. `settings` is a quantize.Settings."""
    return backend_steps(x).step(x, state, settings, key, moment)


def step_pair(
    x: Gradient, states: tuple[State, State], settings: tuple[Any, Any], key: Tensor | None, moment: Moment, want_first: bool
) -> tuple[QTensor | None, QTensor] | None:
    """`step` for a copy per tensor (if wanted) and one per channel. Returns None if their rules do not choose together."""
    return backend_steps(x).step_pair(x, states, settings, key, moment, want_first)


def adopt(q: QTensor, clip: Tensor, x: Callable[[], Tensor], state: State, settings: Any, moment: Moment) -> QTensor:
    """Updates the state as `step` would, for integers that were computed with this clip, and counted. x() returns the float
    tensor."""
    return backend_steps(q.values).adopt(q, clip, x, state, settings, moment)


def predict(
    x: Tensor, tracked: Tensor, seen: Tensor, iteration: Tensor, settings: Any, slot: int, per_sample: bool, ordinal_known: bool
) -> QTensor:
    """Quantizes x by the tracked clip. Without one, the clip is the maximum per sample (or of the batch, for a gradient)."""
    return backend_steps(x).predict(x, tracked, seen, iteration, settings, slot, per_sample, ordinal_known)


def tracked_clip(tracked: Tensor, seen: Tensor, slot: int, ordinal_known: bool) -> Tensor | None:
    """Returns the single clip that `predict` would use; None if there is no tracked clip, or one per channel."""
    return backend_steps(tracked).tracked_clip(tracked, seen, slot, ordinal_known)


def fresh(x: Tensor, iteration: Tensor, settings: Any, flags: Tensor | None = None) -> QTensor:
    """Quantizes a tensor without state, by a rule that depends only on the tensor.

    A backend that defers writes to `flags`, which has the shape of `State.unshared`. It is None outside training.
    """
    return backend_steps(x).fresh(x, iteration, settings, flags)


def factors(observed: Sequence[Sequence[Tensor]], rules: Sequence[Any]) -> list[Any]:
    """Returns rule.factor(largest deviation) of each list in `observed`: numbers, or tensors where reading synchronizes."""
    return backend_steps(observed[0][0]).factors(observed, rules) if observed else []


def same_clip(clip: Tensor, other: Tensor) -> bool:
    """Whether two clips are known to be equal: one of them may then stand for the other. False where a look costs time."""
    return clip is other or backend_steps(clip).same_clip(clip, other)


def defers(x: Tensor) -> bool:
    """Whether steps on the device of x set flags for NaN and Inf instead of raising an error (ops/refusals.py)."""
    return bool(backend_steps(x).defers)


def may_defer() -> bool:
    """Whether a backend that defers was used in this process."""
    return any(steps.defers for steps in _loaded.values())


def backend_steps(x: Gradient) -> Any:
    """Returns the steps of the backend of x."""
    tensor = x.parts.g if isinstance(x, BlockGradient) else x
    name = backend_of(tensor).steps
    return _loaded.get(name) or _load(name)


_loaded: dict[str, Any] = {}


def _load(name: str) -> Any:
    """Imports the steps of a backend. This is done late because they import this module."""
    _loaded[name] = importlib.import_module(f"byteback.ops.backends.{name}").STEPS
    return _loaded[name]


# ---- the same as operators, for torch.compile: their arguments cannot be Python objects, so settings have numbers ----

_settings: list[Any] = []
_handles: dict[Any, int] = {}


def register(settings: Any) -> int:
    """Returns the number of `settings` in this process."""
    if settings not in _handles:
        _handles[settings] = len(_settings)
        _settings.append(settings)
    return _handles[settings]


def settings_of(handle: int) -> Any:
    """Returns the settings with this number."""
    return _settings[handle]


def shapes(x: Tensor, axis: int) -> QTensor:
    """Returns empty tensors for the integers and the scale of x."""
    scale = [x.shape[dim] if dim == axis else 1 for dim in range(x.dim())]
    return QTensor(torch.empty_like(x, dtype=torch.int8), x.new_empty(scale))


def _step_op(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *state, iteration, key, settings, slot, remember = rest
    return _pair(step(x, State(*state), _settings[settings], key, Moment(iteration, slot, remember)))


def _pair(q: QTensor) -> tuple[Any, ...]:
    """Returns what an operator returns: values and scale."""
    return q[:2]


define(
    "quantize_remembering(Tensor x, Tensor(a!) clip, Tensor(b!) initialized, Tensor(c!) updated_at, Tensor(d!) observed, "
    "Tensor(e!) seen, Tensor(f!)? tracked, Tensor(g!) nonfinite, Tensor(h!) unshared, Tensor iteration, Tensor? key, "
    "int settings, int slot, bool remember) -> (Tensor, Tensor)",
    _step_op,
    lambda x, *rest: _pair(shapes(x, _settings[rest[-3]].axis())),
)
define(
    "quantize_tracked(Tensor x, Tensor tracked, Tensor seen, Tensor iteration, int settings, int slot, bool per_sample, "
    "bool ordinal_known) -> (Tensor, Tensor)",
    lambda x, tracked, seen, iteration, settings, *rest: _pair(
        predict(x, tracked, seen, iteration, _settings[settings], *rest)
    ),
    lambda x, tracked, seen, iteration, settings, slot, per_sample, ordinal_known: _pair(
        shapes(x, 0 if per_sample else _settings[settings].axis())
    ),
)
define(
    "quantize_fresh(Tensor x, Tensor iteration, int settings) -> (Tensor, Tensor)",
    lambda x, iteration, settings: _pair(fresh(x, iteration, _settings[settings])),
    lambda x, iteration, settings: _pair(shapes(x, _settings[settings].axis())),
)
