# SPDX-License-Identifier: Apache-2.0
"""A quantizer's step as one operation: tensor and state go in; integers, their scale and the new state come out.

    step         a tensor by its clip rule
    step_pair    two copies of a gradient, per tensor and per channel, by a rule that chooses both at once
    adopt        integers that a fused block has written already
    predict      an input in eval, by the clip that training tracked
    fresh        a tensor without a state, such as a weight
    factors      the learning-rate factors of all layers, from the deviations that their quantizers measured

The clip, the counts of saturated and non-finite values, the measurement of the direction, the memory of the clip rule and the
tracked clip are all dealt with inside, by the backend that the tensor belongs to. The code above (nn, quantize, recipes, the
optimizer's hooks) never looks at a number: a look is free on a CPU, but on a GPU it waits for all that was launched before.
`backends/reference/quantizer.py` says what a step means; `backends/cpu/quantizer.py` is the same with fewer calls. Those raise
NonFiniteError at once; a backend on whose device a look costs says that it `defers` (ops/refusals.py).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.ops.backends.registry import backend_of
from byteback.ops.block_grad import normalize_grad
from byteback.ops.dispatch import define
from byteback.ops.types import GradientParts

SATURATED, DEVIATION, OWN, CLIP, WORST_CHANNEL = range(5)
"""Columns of `State.observed`. OWN is the first diagnostic of the clip rule, if it has one; others follow from column 5 on."""
COLUMNS = 5

XQ, QQ, XX, MEASURED, NONFINITE = range(5)
"""Columns of `State.unshared`."""


class NonFiniteError(RuntimeError):
    """A tensor that had to be quantized holds NaN or Inf."""


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
    """What a clip rule may look back at: one call slot of one quantizer.

    `clip` is what an earlier `Choice.remember` held (any finite value before the first): `ClipRule.entries` numbers, by default
    one per scale. `stochastic` says how the tensor will be rounded, `axis` along which axis the clip varies (-1 for none).
    """

    clip: Tensor
    initialized: bool
    updated_at: int
    iteration: int
    stochastic: bool = False
    axis: int = -1

    def numbers(self, count: int) -> list[float]:
        """The first `count` numbers of `clip`."""
        return look(self.clip[:count])


@dataclass(frozen=True)
class Choice:
    """A clip rule's answer: the clip to use now, a tensor that broadcasts over the quantized one; or, in its place, a `ratio`:
    clip = ratio · max|x|, of the tensor or of each index of its axis.

    `remember` goes into the memory (None leaves it alone), `searched` restarts the period, and `diagnostics` are values for
    the names in `ClipRule.diagnostics`.
    """

    clip: Tensor | None = None
    remember: Tensor | None = None
    searched: bool = False
    ratio: float = 1.0
    diagnostics: tuple[Tensor | float, ...] = ()


def look(x: Tensor) -> Any:
    """The numbers of a tensor. Clip rules, which a backend calls inside its own operation, take them from here: where looks
    cost time, a backend runs the rule's program (ops/programs.py) instead of its methods.
    """
    return x.tolist()


class BlockGradient:
    """The gradient of a fused block's convolution output, p·g' + q·y + r, which exists as floats only where they are needed.

    `sums` are its Σ and Σ² per channel, for rules that choose two copies at once.
    """

    __slots__ = ("_floats", "parts", "sums")

    def __init__(self, parts: GradientParts, sums: tuple[Tensor, Tensor] | None = None) -> None:
        self.parts, self.sums = parts, sums
        self._floats: Tensor | None = None

    def floats(self) -> Tensor:
        """The gradient as a float tensor, written at the first call."""
        if self._floats is None:
            self._floats = normalize_grad(self.parts)
        return self._floats


Gradient = Tensor | BlockGradient


def floats_of(x: Gradient) -> Tensor:
    """x as a float tensor."""
    return x.floats() if isinstance(x, BlockGradient) else x


def deviation_of(xq: float, qq: float, xx: float) -> float:
    """1 - cosine from x·x̂, x̂·x̂ and x·x; 0 for a zero tensor, 1 where a tensor became all zeros.

    >>> deviation_of(50.0, 100.0, 25.0), deviation_of(0.0, 0.0, 4.0)
    (0.0, 1.0)
    """
    square = qq * xx
    norm = math.sqrt(square) if square > 0.0 else 0.0
    cosine = xq / norm if norm > 0.0 else 0.0
    return max(1.0 - cosine, 0.0) if xx > 0.0 else 0.0


# ---- the operations --------------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """When a step is taken: at which iteration, in which call slot, and whether its quantizers remember it."""

    iteration: Tensor
    slot: int
    remember: bool


def step(x: Gradient, state: State, settings: Any, key: Tensor | None, moment: Moment) -> tuple[Tensor, Tensor]:
    """Chooses the clip, quantizes and remembers: int8 values and their scale. `settings` are quantize.Settings."""
    return backend_steps(x).step(x, state, settings, key, moment)


def step_pair(
    x: Gradient, states: tuple[State, State], settings: tuple[Any, Any], key: Tensor | None, moment: Moment, want_first: bool
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor]] | None:
    """`step` for a copy per tensor (if wanted) and one per channel; None where their rules do not choose together."""
    return backend_steps(x).step_pair(x, states, settings, key, moment, want_first)


def adopt(q: tuple[Tensor, Tensor], clip: Tensor, counts: Tensor, x: Any, state: State, settings: Any, moment: Moment) -> Any:
    """Remembers what `step` would have, of integers made elsewhere under max|x|; x() is the float tensor, for a measurement."""
    return backend_steps(q[0]).adopt(q, clip, counts, x, state, settings, moment)


def predict(
    x: Tensor, tracked: Tensor, seen: Tensor, iteration: Tensor, settings: Any, slot: int, per_sample: bool, ordinal_known: bool
) -> tuple[Tensor, Tensor]:
    """By the clip that training tracked; without one, each sample's own maximum (or the batch's, for a gradient)."""
    return backend_steps(x).predict(x, tracked, seen, iteration, settings, slot, per_sample, ordinal_known)


def tracked_clip(tracked: Tensor, seen: Tensor, slot: int, ordinal_known: bool) -> Tensor | None:
    """The single clip that `predict` would use; None where training has left none, or one per channel."""
    return backend_steps(tracked).tracked_clip(tracked, seen, slot, ordinal_known)


def fresh(x: Tensor, iteration: Tensor, settings: Any, flags: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A tensor that keeps no state, by a rule that looks at nothing but the tensor.

    A backend that defers writes to `flags`, which has the shape of `State.unshared`; None outside training.
    """
    return backend_steps(x).fresh(x, iteration, settings, flags)


def factors(observed: Sequence[Sequence[Tensor]], rules: Sequence[Any]) -> list[Any]:
    """rule.factor(the largest deviation) for each list of `observed` tensors; numbers where a look is free, else tensors."""
    return backend_steps(observed[0][0]).factors(observed, rules) if observed else []


def same_clip(clip: Tensor, other: Tensor) -> bool:
    """Whether two clips are known to be equal: one of them may then stand for the other. False where a look costs time."""
    return clip is other or backend_steps(clip).same_clip(clip, other)


def defers(x: Tensor) -> bool:
    """Whether steps where x is flag NaN and Inf, to be read once per step, and raise nothing (ops/refusals.py)."""
    return bool(backend_steps(x).defers)


def may_defer() -> bool:
    """Whether a backend that defers was used in this process."""
    return any(steps.defers for steps in _loaded.values())


def backend_steps(x: Gradient) -> Any:
    """The steps of the backend that x belongs to."""
    tensor = x.parts.g if isinstance(x, BlockGradient) else x
    name = backend_of(tensor).steps
    return _loaded.get(name) or _load(name)


_loaded: dict[str, Any] = {}


def _load(name: str) -> Any:
    """The steps of a backend, which itself needs this module."""
    _loaded[name] = importlib.import_module(f"byteback.ops.backends.{name}").STEPS
    return _loaded[name]


# ---- the same as operators, for torch.compile: their arguments cannot hold Python objects, so numbers stand for settings ----

_settings: list[Any] = []
_handles: dict[Any, int] = {}


def register(settings: Any) -> int:
    """A number that stands for `settings` in this process."""
    if settings not in _handles:
        _handles[settings] = len(_settings)
        _settings.append(settings)
    return _handles[settings]


def settings_of(handle: int) -> Any:
    """The settings that a number stands for."""
    return _settings[handle]


def shapes(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Integers and scale of x as empty tensors."""
    scale = [x.shape[dim] if dim == axis else 1 for dim in range(x.dim())]
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(scale)


def _step_op(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *state, iteration, key, settings, slot, remember = rest
    return step(x, State(*state), _settings[settings], key, Moment(iteration, slot, remember))


define(
    "quantize_remembering(Tensor x, Tensor(a!) clip, Tensor(b!) initialized, Tensor(c!) updated_at, Tensor(d!) observed, "
    "Tensor(e!) seen, Tensor(f!)? tracked, Tensor(g!) nonfinite, Tensor(h!) unshared, Tensor iteration, Tensor? key, "
    "int settings, int slot, bool remember) -> (Tensor, Tensor)",
    _step_op,
    lambda x, *rest: shapes(x, _settings[rest[-3]].axis()),
)
define(
    "quantize_tracked(Tensor x, Tensor tracked, Tensor seen, Tensor iteration, int settings, int slot, bool per_sample, "
    "bool ordinal_known) -> (Tensor, Tensor)",
    lambda x, tracked, seen, iteration, settings, *rest: predict(x, tracked, seen, iteration, _settings[settings], *rest),
    lambda x, tracked, seen, iteration, settings, slot, per_sample, ordinal_known: shapes(
        x, 0 if per_sample else _settings[settings].axis()
    ),
)
define(
    "quantize_fresh(Tensor x, Tensor iteration, int settings) -> (Tensor, Tensor)",
    lambda x, iteration, settings: fresh(x, iteration, _settings[settings]),
    lambda x, iteration, settings: shapes(x, _settings[settings].axis()),
)
