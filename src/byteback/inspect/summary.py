# SPDX-License-Identifier: Apache-2.0
"""summary: which layers of a prepared model run in int8, which stay float, and why; and their share of the multiplications."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from byteback import tables
from byteback.convert.bind import BLOCK_REASON, BLOCK_TEXT
from byteback.convert.layers import FLOAT_REASON, int8_layers
from byteback.inspect.multiplications import multiplications
from byteback.nn import Int8Layer

FASTER = "float is faster here"
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
    multiplications: int | None = None  # of one product, for the last input that the model has seen

    @property
    def int8_products(self) -> int:
        """How many of the three products run in int8."""
        return (self.output, self.grad_input, self.grad_weight).count("int8")


class Summary(tables.Table, list[LayerSummary]):
    """The layers of a model in registration order. Prints as a table."""

    recipe = ""

    @property
    def multiplications(self) -> int:
        """Multiplications of one product of all layers, for the last input that the model has seen; 0 if there is none."""
        return sum(row.multiplications or 0 for row in self)

    def int8_share(self, fused: bool | None = None) -> float:
        """Returns the share of the multiplications of all three products that runs in int8: all, in blocks, or without one.

        It is NaN if the model has seen no input yet.
        """
        rows = [row for row in self if fused is None or fused == bool(row.block)]
        done = sum((row.multiplications or 0) * row.int8_products for row in rows)
        return done / (3 * self.multiplications) if self.multiplications else math.nan

    def most_to_gain(self) -> list[LayerSummary]:
        """Returns the three layers with the most multiplications in float, or else in int8 without a block.

        Layers for which float is faster, and those without multiplications, are not listed.
        """
        rest = [row for row in self if row.multiplications and FASTER not in row.note and not (row.int8_products and row.block)]
        rest.sort(key=lambda row: (3 - row.int8_products, row.multiplications or 0), reverse=True)
        return rest[:3]

    def _shares(self) -> str:
        text = (
            f"{self.int8_share():.0%} of the multiplications of the last input in int8, {self.int8_share(True):.0%} in blocks"
        )
        rest = [f"{row.name} ({(row.multiplications or 0) / self.multiplications:.1%})" for row in self.most_to_gain()]
        return f"{text}; most to gain: {', '.join(rest)}" if rest else text

    def _table(self) -> tables.Content:
        int8 = [row for row in self if "int8" in (row.output, row.grad_input, row.grad_weight)]
        share = sum(row.parameters for row in int8) / max(sum(row.parameters for row in self), 1)
        blocks = sum(row.block != "" for row in self)
        title = f"{self.recipe}: {len(int8)} of {len(self)} layers in int8, {share:.0%} of their weights; {blocks} fused blocks"
        if self.multiplications:
            title += f"; {self._shares()}"
        columns = ["layer", "kind", "shape", "block", "note", "output", "grad_input", "grad_weight"]
        rows = [[r.name, r.kind, r.shape, r.block, r.note, r.output, r.grad_input, r.grad_weight] for r in self]
        return title, columns, rows, 5


def summary(model: nn.Module) -> Summary:
    """Returns which layers of a prepared model run in int8, which stay float, and why.

    >>> from byteback import prepare
    >>> [row.output for row in summary(prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), "plain-int8"))]
    ['float', 'int8']
    """
    layers, counts = int8_layers(model, "summary"), multiplications(model) or {}
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
        result.append(
            LayerSummary(name or kind, kind, _shape(module), size, runs[0], runs[1], runs[2], block, note, counts.get(name))
        )
    return result


def _runs(layer: Int8Layer, product: str) -> str:
    return "int8" if layer.runs_int8() and getattr(layer.recipe, product) else "float"


def _note(layer: Int8Layer) -> str:
    """Returns why an int8 layer does not run as its recipe says."""
    if layer.runs_int8():
        return ""
    if not layer.enabled:
        return "switched to float by byteback.enabled"
    return f"{FASTER}: {layer.faster_in_float} (Recipe.strict forces int8)"


def _shape(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return f"{module.in_features}→{module.out_features}"
    channels = f"{module.in_channels}→{module.out_channels} "
    kernel = "x".join(map(str, module.kernel_size))  # type: ignore[arg-type]
    stride = max(module.stride)  # type: ignore[arg-type]
    groups = f" g{module.groups}" if module.groups != 1 else ""
    return channels + kernel + (f" s{stride}" if stride != 1 else "") + groups
