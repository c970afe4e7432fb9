# SPDX-License-Identifier: Apache-2.0
"""health: clip, saturation and direction deviation of every quantized tensor, as last seen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import nn

from byteback import ops, tables
from byteback.convert.layers import int8_layers
from byteback.nn import Int8Layer
from byteback.nn.layers.computed import OwnForward
from byteback.quantize import Memory, Quantizer, columns_of, deviation_of


@dataclass(frozen=True)
class RoleHealth:
    """One tensor of one int8 layer, as last seen. Values that the recipe does not use are None.

    `worst_channel` is the largest deviation of a single channel. It is measured for the gradients of depthwise convolutions,
    whose channels are independent: a channel of small values may be mostly noise although the tensor as a whole is accurate.
    `diagnostics` are the other numbers of the clip rule, by name.
    """

    layer: str
    role: str
    clip: float
    saturated: float
    deviation: float
    learning_rate_factor: float | None
    nonfinite: int
    calls: int
    worst_channel: float | None = None
    diagnostics: dict[str, float] = field(default_factory=dict)

    @property
    def gaussian_share(self) -> float | None:
        """The diagnostic of magnitude-aware rules: the share of scales whose gradients are Gaussian by their test."""
        return self.diagnostics.get("gaussian_share")


class Health(tables.Table, list[RoleHealth]):
    """All quantized tensors, sorted by direction deviation (of the tensor or of a channel), largest first.

    Prints as a table of the first `shown`.
    """

    shown = 24

    def _table(self) -> tables.Content:
        title = f"{min(self.shown, len(self))} of {len(self)} quantized tensors, largest direction deviation first"
        own = list(dict.fromkeys(name for row in self for name in row.diagnostics))
        columns = ["layer", "role", "clip", "saturated", "deviation", "worst channel", "lr factor"]
        columns += [*(name.replace("_", " ") for name in own), "NaN/Inf", "calls"]
        rows = [
            [
                r.layer,
                r.role,
                f"{r.clip:.3g}",
                f"{r.saturated:.3%}",
                f"{r.deviation:.2e}",
                "-" if r.worst_channel is None else f"{r.worst_channel:.2e}",
                "-" if r.learning_rate_factor is None else f"{r.learning_rate_factor:.3f}",
                *(f"{r.diagnostics[name]:.3g}" if name in r.diagnostics else "-" for name in own),
                str(r.nonfinite),
                str(r.calls),
            ]
            for r in self[: self.shown]
        ]
        return title, columns, rows, 2


def health(model: nn.Module) -> Health:
    """Returns clip, saturated share, direction deviation, learning-rate factor and distribution of every int8 tensor."""
    result = Health()
    for name, layer in int8_layers(model, "health").items():
        for role in ("input", "grad_output", "grad_output_for_weight"):
            quantizer = getattr(layer.quantizers, role)
            if quantizer is not None and bool(quantizer.seen.any()):
                result.append(_role_health(name, layer, role, quantizer))
        if (layer.faster_in_float is None or layer.runs_int8()) and not isinstance(layer, OwnForward):  # its weight is computed
            result.append(_weight_health(name, layer))
    result.sort(key=lambda row: (not math.isnan(row.deviation), -max(row.deviation, row.worst_channel or 0.0)))
    return result


def _role_health(name: str, layer: Int8Layer, role: str, quantizer: Quantizer) -> RoleHealth:
    used = quantizer.seen > 0
    settings, factor = layer.quantizers.settings[role], layer.recipe.learning_rate
    observed = {name: quantizer.observed[used, column] for name, column in columns_of(settings.rule).items()}
    return RoleHealth(
        layer=name,
        role=role,
        clip=float(observed["clip"].max()),
        saturated=float(observed["saturated"].max()),
        deviation=float(observed["deviation"].max()),
        learning_rate_factor=layer.learning_rate_factor() if factor and role == "grad_output" else None,
        nonfinite=int(layer.quantizers.nonfinite),
        calls=int(used.sum()),
        worst_channel=float(observed["worst_channel"].max()) if settings.by_channel else None,
        diagnostics={name: float(observed[name].mean()) for name in settings.rule.clip.diagnostics},
    )


def _weight_health(name: str, layer: Int8Layer) -> RoleHealth:
    """Measures a weight now, because weights have no quantizer state."""
    weight, settings = layer.weight.detach(), layer.quantizers.settings["weight"]
    clip = settings.rule.clip.choose(weight, settings.axis(), Memory(weight.new_zeros(1), False, 0, 0)).clip
    assert clip is not None, "a rule that gets a tensor returns its clip"
    values, scale, counts, _ = ops.quantize(weight, clip)
    assert counts is not None
    finite = not int(counts[1])
    deviation = deviation_of(*ops.dot_terms(weight, values, scale).tolist()) if finite else math.nan
    saturated = int(counts[0]) / max(weight.numel(), 1)
    nonfinite = int(layer.quantizers.nonfinite)
    return RoleHealth(name, "weight", float(clip.amax()), saturated, deviation, None, nonfinite, 1)
