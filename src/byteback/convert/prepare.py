# SPDX-License-Identifier: Apache-2.0
"""prepare: converts a float model to int8, in place.

A layer is converted by changing its class, so the model stays the same object with the same parameters under the same names.
A layer that stays float gets an attribute that says why; `summary` prints it.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from byteback.convert.bind import bind_blocks
from byteback.convert.graph import find_blocks
from byteback.convert.graph.tracing import CONVOLUTIONS, TRANSPOSED, copy_of, graph_of
from byteback.convert.layers import FLOAT_REASON, int8_layers
from byteback.nn import Int8Layer
from byteback.nn.layers.calls import SHARED, Shared, begin_forward, end_forward
from byteback.nn.layers.computed import convolutions_of, stored_weight
from byteback.nn.layers.layer import weight_number
from byteback.nn.layers.subclass import INT8_CLASSES, clash, int8_class_of, overrides_forward, torch_class
from byteback.nn.undo import Watch
from byteback.recipes import Recipe, resolve


def prepare(
    model: nn.Module, recipe: Recipe | str = "unified-int8", *, keep_float: Sequence[str] = (), fuse: bool = True
) -> nn.Module:
    """Converts a model to int8 training in place, and returns it.

    The first convolution and all Linear layers stay float, as in the first paper, unless the recipe converts them. `keep_float`
    is a list of shell wildcards: matching layers, and all layers inside matching modules, stay float too. If `fuse` is True, a
    convolution runs as one block with the norm, residual add and activation that follow it.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    >>> prepare(model, "plain-int8")[2].__class__.__name__
    'Int8Conv2d'
    """
    recipe = resolve(recipe)
    _check_fresh(model)
    layers = _layers(model)
    reasons = {name: _why_float(module, recipe) for name, module in layers.items()}
    _keep_by_wildcard(layers, reasons, keep_float)
    first = None if recipe.first_conv else first_convolution(model)
    for name, module in layers.items():
        if module is first and reasons[name] is None:
            reasons[name] = "the first convolution, as in the first paper"
    if all(reason is not None for reason in reasons.values()):
        raise ValueError(_nothing_to_convert(model, reasons))
    plan = find_blocks(model) if fuse else None
    shared, seed = Shared(), torch.initial_seed()
    for number, (name, module) in enumerate(layers.items()):
        reason = reasons[name]
        if reason is not None:
            setattr(module, FLOAT_REASON, reason)
            continue
        # The number distinguishes layers within a model, the contents of the weight distinguish models.
        noise = weight_number(stored_weight(module)) << 16 | number  # type: ignore[arg-type]
        module.__class__ = int8_class_of(module)
        assert isinstance(module, Int8Layer)
        module.attach(recipe, seed=seed, layer=noise, name=name or type(model).__name__, shared=shared)
    if not any(layer.runs_int8() for layer in int8_layers(model, "prepare").values()):
        warnings.warn(
            f"prepare: float is faster than int8 for every layer of this {type(model).__name__}, so all of them fall back to "
            "float; byteback.summary(model) says why. Use a recipe with strict=True to run them in int8 anyway.",
            stacklevel=2,
        )
    if plan is not None:
        bind_blocks(model, plan, recipe)
    setattr(model, SHARED, shared)
    Watch(model)
    model.register_forward_pre_hook(begin_forward)
    model.register_forward_hook(end_forward, always_call=True)
    return model


def first_convolution(model: nn.Module) -> nn.Module | None:
    """Returns the first convolution in execution order, or in registration order if the model cannot be traced."""
    registered = [module for module in model.modules() if isinstance(module, CONVOLUTIONS)]
    if isinstance(model, CONVOLUTIONS) or len(registered) < 2:
        return registered[0] if registered else None
    try:
        graph = graph_of(model)
    except Exception:
        return registered[0]
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(layer := model.get_submodule(str(node.target)), CONVOLUTIONS):
            return layer
    return registered[0]


def _check_fresh(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare: model must be an nn.Module, but got a {type(model).__name__}.")
    for name, module in model.named_modules():
        if isinstance(module, Int8Layer):
            raise ValueError(
                f"prepare: {name or type(model).__name__!r} is already an {type(module).__name__}; preparing a model twice "
                "would lose its quantizer state. Call byteback.restore(model) first."
            )


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns all convolutions and Linear layers by name, also those that cannot be converted."""
    kinds = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def _why_float(module: nn.Module, recipe: Recipe) -> str | None:
    """Returns why a layer cannot be converted; None if it can."""
    if isinstance(module, TRANSPOSED) and recipe.weight.per != "tensor":
        return "transposed, and the recipe has one scale per channel of a weight"
    if isinstance(module, nn.Linear) and not recipe.linear:
        return "Linear, as in the first paper (Recipe.linear converts it)"
    base = torch_class(type(module))
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance, so it would not run in int8"
    if overrides_forward(type(module)) and (base not in CONVOLUTIONS or convolutions_of(copy_of(module)) == "none"):
        return f"a subclass of {base.__name__} ({type(module).__name__}) that overrides forward"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "the module that owns it uses its weight without calling it"
    taken = clash(module, INT8_CLASSES[base])
    if taken:
        return f"it already has an attribute {taken!r}, which int8 layers need"
    weight = stored_weight(module)
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) or weight is None:
        return f"it has no weight yet, or none that is a parameter ({type(module).__name__})"
    dtype = weight.dtype
    if dtype != torch.float32:
        return f"its weight is {dtype}, but master weights must be float32"
    return None


def _keep_by_wildcard(layers: dict[str, nn.Module], reasons: dict[str, str | None], keep_float: Sequence[str]) -> None:
    if isinstance(keep_float, str):
        raise TypeError(
            f"prepare: keep_float must be a list of wildcards, but got the string {keep_float!r}. Pass [{keep_float!r}]."
        )
    for pattern in keep_float or ():
        if not isinstance(pattern, str):
            raise TypeError(
                f"prepare: keep_float contains {pattern!r}, but takes shell wildcards of layer names, such as 'layer4.*'."
            )
        matched = [name for name in layers if any(fnmatchcase(part, pattern) for part in _ancestry(name))]
        if not matched:
            near = difflib.get_close_matches(pattern, layers, n=3, cutoff=0.4) or list(layers)[:3]
            raise ValueError(
                f"prepare: keep_float contains {pattern!r}, which matches none of the model's {len(layers)} convolutions and "
                f"Linear layers, so it would have no effect. Similar names: {', '.join(near)}."
            )
        for name in matched:
            reasons[name] = reasons[name] or f"kept float by {pattern!r}"


def _ancestry(name: str) -> list[str]:
    """Returns the name of a layer and the names of the modules that contain it.

    >>> _ancestry("layer1.0.conv1")
    ['layer1.0.conv1', 'layer1.0', 'layer1']
    """
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _nothing_to_convert(model: nn.Module, reasons: dict[str, str | None]) -> str:
    where = f"prepare: {type(model).__name__} has"
    if not reasons:
        return f"{where} no convolution and no Linear layer, so no part of it can run in int8."
    listed = "; ".join(f"{name or 'the model itself'}: {reason}" for name, reason in list(reasons.items())[:5])
    return (
        f"{where} no layer left for int8 ({listed}). Change keep_float, or the recipe's first_conv and linear, so that at "
        "least one layer runs in int8."
    )
