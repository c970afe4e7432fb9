# SPDX-License-Identifier: Apache-2.0
"""summary: which layers of a prepared model run in int8, which stay float, and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from byteback import tables
from byteback.convert.bind import BLOCK_REASON, BLOCK_TEXT
from byteback.convert.layers import FLOAT_REASON, int8_layers
from byteback.nn import Int8Layer

_PRODUCTS = ("output", "grad_input", "grad_weight")


@dataclass(frozen=True)
class LayerSummary:
    """One convolution or Linear layer: the type of its three products, the block that it starts, and why it is float."""

    name: str
    kind: str
    shape: str
    parameters: int
    output: str
    grad_input: str
    grad_weight: str
    block: str
    note: str


class Summary(tables.Table, list[LayerSummary]):
    """The layers of a model in registration order. Prints as a table."""

    recipe = ""

    def _table(self) -> tables.Content:
        int8 = [row for row in self if "int8" in (row.output, row.grad_input, row.grad_weight)]
        share = sum(row.parameters for row in int8) / max(sum(row.parameters for row in self), 1)
        blocks = sum(row.block != "" for row in self)
        title = f"{self.recipe}: {len(int8)} of {len(self)} layers in int8, {share:.0%} of their weights; {blocks} fused blocks"
        columns = ["layer", "kind", "shape", "block", "note", "output", "grad_input", "grad_weight"]
        rows = [[r.name, r.kind, r.shape, r.block, r.note, r.output, r.grad_input, r.grad_weight] for r in self]
        return title, columns, rows, 5


def summary(model: nn.Module) -> Summary:
    """Returns which layers of a prepared model run in int8, which stay float, and why.

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
    """Returns why an int8 layer does not run as its recipe says."""
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
