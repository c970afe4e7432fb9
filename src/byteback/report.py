# SPDX-License-Identifier: Apache-2.0
"""summary and health: what runs in int8 and why, and how well it is doing.

Both return data (a list of dataclasses) that also prints as a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from byteback import ops, tables
from byteback.bind import BLOCK_REASON, BLOCK_TEXT
from byteback.convert import FLOAT_REASON, int8_layers
from byteback.nn import Int8Layer
from byteback.ops.quantizer import OWN as GAUSSIAN
from byteback.quantize import CLIP, DEVIATION, SATURATED, WORST_CHANNEL, Memory, Quantizer, deviation_of
from byteback.recipes import MagnitudeAware

_PRODUCTS = ("output", "grad_input", "grad_weight")


@dataclass(frozen=True)
class LayerSummary:
    """One convolution or Linear layer: what its three products run in, why where that is float, and the block it begins."""

    name: str
    kind: str
    shape: str
    parameters: int
    output: str
    grad_input: str
    grad_weight: str
    block: str
    note: str


@dataclass(frozen=True)
class RoleHealth:
    """One tensor of one int8 layer, as last seen. None where the recipe does not know the notion.

    `worst_channel` is the largest deviation of a single channel, for the gradients of depthwise convolutions: they keep
    channels apart, and a quiet one may be all noise where the tensor as a whole looks well.
    """

    layer: str
    role: str
    clip: float
    saturated: float
    deviation: float
    learning_rate_factor: float | None
    gaussian_share: float | None
    nonfinite: int
    calls: int
    worst_channel: float | None = None


class Summary(list[LayerSummary]):
    """The layers of a model in registration order; prints as a table."""

    recipe = ""

    def _table(self) -> tuple[str, list[str], list[list[str]], int]:
        int8 = [row for row in self if "int8" in (row.output, row.grad_input, row.grad_weight)]
        share = sum(row.parameters for row in int8) / max(sum(row.parameters for row in self), 1)
        blocks = sum(row.block != "" for row in self)
        title = f"{self.recipe}: {len(int8)} of {len(self)} layers in int8, {share:.0%} of their weights; {blocks} fused blocks"
        columns = ["layer", "kind", "shape", "block", "note", "output", "grad_input", "grad_weight"]
        rows = [[r.name, r.kind, r.shape, r.block, r.note, r.output, r.grad_input, r.grad_weight] for r in self]
        return title, columns, rows, 5

    def __str__(self) -> str:
        return tables.as_text(*self._table())

    def __rich__(self) -> Any:
        return tables.build(*self._table())


class Health(list[RoleHealth]):
    """Every quantized tensor, worst direction deviation (of it or of a channel) first; prints as a table of the worst."""

    shown = 24

    def _table(self) -> tuple[str, list[str], list[list[str]], int]:
        title = f"{min(self.shown, len(self))} of {len(self)} quantized tensors, worst direction first"
        columns = ["layer", "role", "clip", "saturated", "deviation", "worst channel", "lr factor", "gaussian"]
        columns += ["NaN/Inf", "calls"]
        rows = [
            [
                r.layer,
                r.role,
                f"{r.clip:.3g}",
                f"{r.saturated:.3%}",
                f"{r.deviation:.2e}",
                "-" if r.worst_channel is None else f"{r.worst_channel:.2e}",
                "-" if r.learning_rate_factor is None else f"{r.learning_rate_factor:.3f}",
                "-" if r.gaussian_share is None else f"{r.gaussian_share:.0%}",
                str(r.nonfinite),
                str(r.calls),
            ]
            for r in self[: self.shown]
        ]
        return title, columns, rows, 2

    def __str__(self) -> str:
        return tables.as_text(*self._table())

    def __rich__(self) -> Any:
        return tables.build(*self._table())


def summary(model: nn.Module) -> Summary:
    """Which layers of a prepared model run in int8, which stay float, and why.

    >>> from byteback import prepare
    >>> [row.output for row in summary(prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), "plain-int8"))]
    ['float', 'int8']
    """
    layers = int8_layers(model, "summary")
    result = Summary()
    result.recipe = ", ".join(dict.fromkeys(type(layer.recipe).__name__ for layer in layers.values()))
    for name, module in model.named_modules():
        reason = getattr(module, FLOAT_REASON, None)
        if isinstance(module, Int8Layer):
            runs = [_runs(module, product) for product in _PRODUCTS]
            note = _note(module)
        elif reason is not None:
            runs, note = ["float"] * 3, reason
        else:
            continue
        kind = type(module).__name__
        size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        block, why_none = getattr(module, BLOCK_TEXT, ""), getattr(module, BLOCK_REASON, "")
        note = "; ".join(part for part in (note, f"not fused: {why_none}" if why_none else "") if part)
        result.append(LayerSummary(name or kind, kind, _shape(module), size, runs[0], runs[1], runs[2], block, note))
    return result


def _runs(layer: Int8Layer, product: str) -> str:
    return "int8" if layer.runs_int8() and getattr(layer.recipe, product) else "float"


def _note(layer: Int8Layer) -> str:
    """Why an int8 layer does not run as its recipe says."""
    if layer.runs_int8():
        return ""
    if not layer.enabled:
        return "switched to float by byteback.enabled"
    return f"float is faster here: {layer.faster_in_float} (Recipe.strict forces int8)"


def _shape(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return f"{module.in_features}→{module.out_features}"
    channels = f"{module.in_channels}→{module.out_channels} "
    kernel = "x".join(map(str, module.kernel_size))  # type: ignore[arg-type]
    stride = max(module.stride)  # type: ignore[arg-type]
    groups = f" g{module.groups}" if module.groups != 1 else ""
    return channels + kernel + (f" s{stride}" if stride != 1 else "") + groups


def health(model: nn.Module) -> Health:
    """Clip, saturated share, direction deviation, learning-rate factor and distribution class of every int8 tensor."""
    result = Health()
    for name, layer in int8_layers(model, "health").items():
        for role in ("input", "grad_output", "grad_output_for_weight"):
            quantizer = getattr(layer.quantizers, role)
            if quantizer is not None and bool(quantizer.seen.any()):
                result.append(_role_health(name, layer, role, quantizer))
        if layer.faster_in_float is None or layer.runs_int8():
            result.append(_weight_health(name, layer))
    result.sort(key=lambda row: (not math.isnan(row.deviation), -max(row.deviation, row.worst_channel or 0.0)))
    return result


def _role_health(name: str, layer: Int8Layer, role: str, quantizer: Quantizer) -> RoleHealth:
    used = quantizer.seen > 0
    observed = quantizer.observed[used]
    rule = layer.quantizers.settings[role].rule.clip
    adaptive, factor = isinstance(rule, MagnitudeAware), layer.recipe.learning_rate
    return RoleHealth(
        layer=name,
        role=role,
        clip=float(observed[:, CLIP].max()),
        saturated=float(observed[:, SATURATED].max()),
        deviation=float(observed[:, DEVIATION].max()),
        learning_rate_factor=layer.learning_rate_factor() if factor and role == "grad_output" else None,
        gaussian_share=float(observed[:, GAUSSIAN].mean()) if adaptive else None,
        nonfinite=int(layer.quantizers.nonfinite),
        calls=int(used.sum()),
        worst_channel=float(observed[:, WORST_CHANNEL].max()) if layer.quantizers.settings[role].by_channel else None,
    )


def _weight_health(name: str, layer: Int8Layer) -> RoleHealth:
    """Weights have no memory, so theirs is measured now."""
    weight, settings = layer.weight.detach(), layer.quantizers.settings["weight"]
    clip = settings.rule.clip.choose(weight, settings.axis(), Memory(weight.new_zeros(1), False, 0, 0)).clip
    assert clip is not None, "a rule that looks at a tensor gives its clip"
    values, scale, counts, _ = ops.quantize(weight, clip)
    finite = not int(counts[1])
    deviation = deviation_of(*ops.dot_terms(weight, values, scale).tolist()) if finite else math.nan
    saturated = int(counts[0]) / max(weight.numel(), 1)
    nonfinite = int(layer.quantizers.nonfinite)
    return RoleHealth(name, "weight", float(clip.amax()), saturated, deviation, None, None, nonfinite, 1)
