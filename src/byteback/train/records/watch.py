# SPDX-License-Identifier: Apache-2.0
"""The numerics of a network in training, layer by layer, for metrics.jsonl and TensorBoard."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

import byteback
from byteback.nn import Int8Layer
from byteback.quantize import DEVIATION

Layers = dict[str, dict[str, dict[str, Any]]]


class HealthLine(NamedTuple):
    """The state of the int8 layers in one line; None and 0 if there are none."""

    deviation: float | None = None
    layer: str = ""
    at_floor: int = 0

    def __str__(self) -> str:
        if self.deviation is None:
            return ""
        return f"largest deviation {self.deviation:.1e} in {self.layer}; {self.at_floor} layers at the lowest lr factor"


def health_line(model: nn.Module) -> HealthLine:
    """Returns the largest direction deviation of a gradient, and how many layers have the lowest learning-rate factor."""
    worst, name, floor = -1.0, "", 0
    for path, layer in model.named_modules():
        if not isinstance(layer, Int8Layer) or not layer.runs_int8():
            continue
        copies = (layer.quantizers.grad_output, layer.quantizers.grad_output_for_weight)
        deviation = max(float(copy.observed[:, DEVIATION].max()) for copy in copies if copy is not None)
        if deviation > worst:
            worst, name = deviation, path
        beta = getattr(layer.recipe.learning_rate, "beta", None)
        floor += beta is not None and layer.learning_rate_factor() <= beta
    return HealthLine(worst, name, floor) if worst >= 0.0 else HealthLine()


def numerics(model: nn.Module) -> Layers:
    """Returns layer → role → clip, saturated, deviation, learning_rate_factor, nonfinite, and the clip rule's diagnostics."""
    layers: Layers = {}
    for row in byteback.health(model):
        layers.setdefault(row.layer, {})[row.role] = {
            "clip": row.clip,
            "saturated": row.saturated,
            "deviation": row.deviation,
            "learning_rate_factor": row.learning_rate_factor,
            "nonfinite": row.nonfinite,
            **row.diagnostics,
        }
    return {name: layers[name] for name, _ in model.named_modules() if name in layers}


def described(model: nn.Module, in_int8: bool) -> list[dict[str, Any]]:
    """Returns a description of every convolution and Linear layer."""
    notes = {row.name: row for row in byteback.summary(model)} if in_int8 else {}
    rows: list[dict[str, Any]] = []
    for name, layer in watched(model):
        note = notes.get(name)
        rows.append(
            {
                "name": name,
                "index": len(rows),
                "structure": structure(layer),
                "shape": list(layer.weight.shape),  # type: ignore[arg-type]
                "parameters": sum(parameter.numel() for parameter in layer.parameters(recurse=False)),
                "int8": note is not None and note.output == "int8",
                "note": note.note if note is not None else "",
            }
        )
    return rows


def watched(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns (name, layer) of the convolutions and Linear layers."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def structure(layer: Any) -> str:
    """Returns a short description of a layer.

    >>> structure(nn.Conv2d(8, 8, 3, groups=8, stride=2))
    'depthwise 3x3 stride 2'
    """
    if isinstance(layer, nn.Linear):
        return "linear"
    kind = "conv" if layer.groups == 1 else "depthwise" if layer.groups == layer.in_channels else "grouped"
    stride = max(layer.stride)
    return f"{kind} {'x'.join(map(str, layer.kernel_size))}" + (f" stride {stride}" if stride > 1 else "")
