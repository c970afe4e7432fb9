# SPDX-License-Identifier: Apache-2.0
"""TensorRule: how one tensor is quantized. A recipe has one for inputs, one for weights and one or two for gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

from byteback.quantize.clipping import ClipRule, MaxAbs

ROUNDINGS = ("nearest", "stochastic")
GRANULARITIES = ("tensor", "N", "C", "K")


@dataclass(frozen=True)
class TensorRule:
    """The clip rule, the rounding, and the axis (N, C, K) along which the scale varies, if any.

    >>> TensorRule(rounding="stochastic", per="K")
    TensorRule(clip=MaxAbs(), rounding='stochastic', per='K')
    """

    clip: ClipRule = field(default_factory=MaxAbs)
    rounding: str = "nearest"
    per: str = "tensor"

    def __post_init__(self) -> None:
        if not isinstance(self.clip, ClipRule) or "__dataclass_fields__" not in type(self.clip).__dict__:
            raise TypeError(
                f"TensorRule: clip is {self.clip!r}; it must be a ClipRule whose own class is a frozen dataclass, because "
                "rules are compared by their fields. Decorate its class with @dataclass(frozen=True)."
            )
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"TensorRule: rounding is {self.rounding!r}; choose one of {', '.join(ROUNDINGS)}.")
        if self.per not in GRANULARITIES:
            raise ValueError(f"TensorRule: per is {self.per!r}; choose one of {', '.join(GRANULARITIES)}.")
        if not self.clip.allows(self.per):
            raise ValueError(
                f"TensorRule: per is {self.per!r}, but {type(self.clip).__name__} chooses clips only per "
                f"{', '.join(filter(self.clip.allows, GRANULARITIES))}. Change `per` or the clip rule."
            )
