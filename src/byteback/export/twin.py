# SPDX-License-Identifier: Apache-2.0
"""The twin of a prepared model that is exported: a copy whose int8 layers are replaced by modules that record ONNX (served.py).

The user's forward runs unchanged, so everything between the layers is translated by torch.onnx.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from byteback import ops
from byteback.convert.graph.norm_act import after_norm
from byteback.convert.graph.tracing import TRANSPOSED
from byteback.convert.restore import restore
from byteback.export import detectors
from byteback.export.served import KINDS, Constants, Folded, Served
from byteback.nn import FusedConvolution, Int8Layer
from byteback.nn.fused.norm import given_coefficients
from byteback.nn.layers.computed import OwnForward
from byteback.nn.quantizing import fresh_weight
from byteback.quantize import CALL_SLOTS


class Twin(nn.Module):
    """Calls the copy. Its counters start from zero in every call."""

    model: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.is_detector = model, detectors.is_detector(model)

    def forward(self, x: Any) -> Any:
        for module in self.modules():
            if isinstance(module, Served):
                module.calls = 0
            elif isinstance(module, Folded):
                module.expected = 0
        return detectors.predict(self.model, x) if self.is_detector else self.model(x)


@torch.no_grad()
def twin_of(model: nn.Module, exact: bool) -> Twin:
    """Returns the twin of a model in eval mode. The model is not changed."""
    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, (Int8Layer, FusedConvolution))
    }
    modules = dict(model.named_modules())
    twin = restore(copy.deepcopy(model))
    norms: dict[str, Folded] = {}
    for name, layer in layers.items():
        _must_be_fixed(layer)
        block = getattr(layer, "int8_block", None)
        norm = None
        if block is not None and block.norm is not None and layer.enabled:
            if block.norm not in norms:
                norms[block.norm] = Folded(block.norm, after_norm(twin.get_submodule(block.norm)))
            norm = norms[block.norm]
            _replace(twin, block.norm, norm)
        a, b = _coefficients(layer, modules[norm.name] if norm is not None else None)
        if layer.runs_int8("output"):
            constants = Constants(name, fresh_weight(layer, layer.weight), _clips(layer), a, b)
            _replace(twin, name, KINDS[exact](constants, layer, norm))
        elif norm is not None:
            _replace(twin, name, _FoldedConv(twin.get_submodule(name), norm, a, b))
    return Twin(twin)


def _must_be_fixed(layer: Any) -> None:
    """Raises an error for a recipe whose predictions depend on their batch, and for a layer with its own forward."""
    recipe = layer.recipe
    if isinstance(layer, Int8Layer) and isinstance(layer, TRANSPOSED) and layer.runs_int8("output"):
        raise ValueError(
            f"export_onnx: {layer.int8_name}: transposed convolutions in int8 are not exported yet. Keep them in float: "
            "prepare(..., keep_float=[...])."
        )
    if isinstance(layer, OwnForward):
        raise ValueError(
            f"export_onnx: {layer.int8_name}: a {layer.float_class.__name__} overrides forward, which an export does not "
            "support. Keep it in float: prepare(..., keep_float=[...])."
        )
    if recipe.eval_clip == "batch":
        raise ValueError(
            f"export_onnx: {layer.int8_name}: the recipe has eval_clip='batch', so its clips depend on the batch and cannot be "
            "constants of a file. Use eval_clip='tracked'."
        )
    if recipe.residual_memory == "int8":
        raise ValueError(
            f"export_onnx: {layer.int8_name}: the recipe has residual_memory='int8', which an export does not support. "
            "Train with residual_memory='float32'."
        )
    if isinstance(layer, Int8Layer) and layer.recipe.input.per != "tensor":
        raise ValueError(
            f"export_onnx: {layer.int8_name}: the recipe has input.per={recipe.input.per!r}, so its clips depend on the batch "
            "and cannot be constants of a file. Use input.per='tensor'."
        )


def _clips(layer: Any) -> list[Tensor | None]:
    return [layer.quantizers.input.tracked_clip(slot, True) for slot in range(CALL_SLOTS)]


def _coefficients(layer: Any, norm: Any) -> tuple[Tensor | None, Tensor | None]:
    """Returns a and b of the norm after a layer; without one, b is the bias of the layer."""
    bias = layer.bias
    if norm is None:
        return None, bias
    if norm.running_mean is None:
        raise ValueError(
            f"export_onnx: the norm after {layer.int8_name} has no running statistics, so its output depends on the batch and "
            "cannot be exported."
        )
    given = ops.BatchNorm(norm.weight, norm.bias, bias, norm.eps, (norm.running_mean, norm.running_var), 0.0)
    return given_coefficients(given, bias, layer.weight)


class _FoldedConv(nn.Module):
    """A float convolution that computes the norm after it."""

    def __init__(self, conv: Any, norm: Folded, a: Tensor | None, b: Tensor | None) -> None:
        super().__init__()
        assert a is not None and b is not None
        self.norm, self.conv = (norm,), conv
        column = (-1, *(1,) * (conv.weight.dim() - 1))
        conv.weight = nn.Parameter((conv.weight.double() * a.double().reshape(column)).float(), requires_grad=False)
        conv.bias = nn.Parameter(b.clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.norm[0].expected += 1
        y: Tensor = self.conv(x)
        return y


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
