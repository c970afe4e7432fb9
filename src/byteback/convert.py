# SPDX-License-Identifier: Apache-2.0
"""prepare and restore: a float model becomes an int8 one in place, and back.

Layers are swapped by class, so the user's model stays the same object with the same parameters under the same names.
What stays float keeps a sentence that says why; `summary` prints it.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from byteback.bind import BLOCK_REASON, BLOCK_TEXT, bind_blocks
from byteback.fuse import find_blocks
from byteback.fuse.tracing import CONVOLUTIONS, graph_of
from byteback.nn import FusedConvolution, Int8Layer
from byteback.nn.layers.calls import SHARED, Shared, begin_forward, end_forward
from byteback.nn.layers.frozen_norm import FusedNorm
from byteback.nn.layers.layer import weight_number
from byteback.nn.layers.subclass import INT8_CLASSES, clash, int8_class
from byteback.nn.layers.weights import unwatch_loading
from byteback.nn.undo import Watch, unwatch
from byteback.recipes import Recipe, resolve

FLOAT_REASON = "byteback_float_reason"
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def prepare(
    model: nn.Module, recipe: Recipe | str = "unified-int8", *, keep_float: Sequence[str] = (), fuse: bool = True
) -> nn.Module:
    """Makes the model train in int8, in place, and returns it.

    The first convolution and every Linear stay float unless the recipe says otherwise, as in the first paper. `keep_float`
    lists shell wildcards of layers (or of modules, with all that is in them) that stay float too. Convolutions run as one block
    with the norm, residual add and activation that follow them, unless `fuse` is False.

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
        # The number tells layers of one model apart, the weights' contents those of several models.
        noise = weight_number(module.weight) << 16 | number  # type: ignore[arg-type]
        module.__class__ = int8_class(type(module))
        assert isinstance(module, Int8Layer)
        module.attach(recipe, seed=seed, layer=noise, name=name or type(model).__name__, shared=shared)
    if not any(layer.runs_int8() for layer in int8_layers(model, "prepare").values()):
        warnings.warn(
            f"prepare: float is faster for every layer of this {type(model).__name__} that could run in int8, so float serves "
            "them all; byteback.summary(model) says why. Use a recipe with strict=True to run them in int8 all the same.",
            stacklevel=2,
        )
    if plan is not None:
        bind_blocks(model, plan, recipe)
    setattr(model, SHARED, shared)
    Watch(model)
    model.register_forward_pre_hook(begin_forward)
    model.register_forward_hook(end_forward, always_call=True)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Gives the plain torch model back, in place: same object, same weights, no trace of int8.

    >>> model = prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), "plain-int8")
    >>> type(restore(model)[1]).__name__
    'Conv2d'
    """
    layers = int8_layers(model, "restore")
    for name, layer in layers.items():  # all of them before any is touched: a refusal must leave the model as it was
        if parametrize.is_parametrized(layer):
            raise ValueError(
                f"restore: {name!r} got a parametrization after prepare, which owns its weight now; turning the layer back "
                "would lose it. Call torch.nn.utils.parametrize.remove_parametrizations first."
            )
    for layer in layers.values():
        layer.detach()
    for module in model.modules():
        if isinstance(module, (FusedConvolution, FusedNorm)):
            module.detach()
        module.__dict__.pop(FLOAT_REASON, None)
        module.__dict__.pop(BLOCK_REASON, None)
        module.__dict__.pop(BLOCK_TEXT, None)
        module.__dict__.pop(SHARED, None)
        unwatch_loading(module)
        unwatch(module)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for handle, hook in list(hooks.items()):
                if hook in (begin_forward, end_forward):
                    del hooks[handle]
                    module._forward_hooks_always_called.pop(handle, None)
    return model


def enabled(model: nn.Module, on: bool = True) -> nn.Module:
    """Switches a prepared model to float (False) and back to int8 (True): for a warm-up, or to find a problem."""
    for layer in int8_layers(model, "enabled").values():
        layer.enabled = bool(on)
    for module in model.modules():
        if isinstance(module, FusedConvolution):
            module.enabled = bool(on)
    return model


def float_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state without quantizers: it loads with strict=True into the model as it was before `prepare`."""
    int8_layers(model, "float_state_dict")
    everywhere = model.named_modules(remove_duplicate=False)  # a module with two names has its state under both
    names = [name for name, module in everywhere if isinstance(module, Int8Layer)]
    own = tuple(f"{name}.quantizers." if name else "quantizers." for name in names)
    state = model.state_dict()  # an OrderedDict with module versions, which loading wants to see
    for key in [key for key in state if key.startswith(own)]:
        del state[key]
    return state


def int8_layers(model: nn.Module, asked_by: str) -> dict[str, Int8Layer]:
    """The int8 layers of a model by name; an error where there are none."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Int8Layer)}
    if not found:
        raise ValueError(
            f"{asked_by}: this {type(model).__name__} has no int8 layer, so there is nothing to do. "
            "Call byteback.prepare(model, recipe) first."
        )
    return found


def first_convolution(model: nn.Module) -> nn.Module | None:
    """The first convolution in execution order; in registration order where the model cannot be traced."""
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
        raise TypeError(f"prepare: got a {type(model).__name__}, but only an nn.Module can be prepared.")
    for name, module in model.named_modules():
        if isinstance(module, Int8Layer):
            raise ValueError(
                f"prepare: {name or type(model).__name__!r} is an {type(module).__name__} already; preparing a model twice "
                "would lose its quantizer state. Call byteback.restore(model) first."
            )


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer that could be meant for int8, whether it can or not."""
    kinds = (*CONVOLUTIONS, *_TRANSPOSED, nn.Linear)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def _why_float(module: nn.Module, recipe: Recipe) -> str | None:
    """Why a layer stays float, whatever the user asked for; None where it can be int8."""
    if isinstance(module, _TRANSPOSED):
        return "transposed convolutions have no int8 kernel yet"
    if isinstance(module, nn.Linear) and not recipe.linear:
        return "Linear, as in the first paper (Recipe.linear converts it)"
    base = _torch_class(type(module))
    if any(getattr(type(module), name, None) is not getattr(base, name, None) for name in ("forward", "_conv_forward")):
        return f"a subclass of {base.__name__} ({type(module).__name__}) with a forward of its own"
    if "forward" in module.__dict__:
        return "its forward was replaced on this very object, so it would not run in int8"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "its owner reads the weight itself and never calls it"
    taken = clash(module, INT8_CLASSES[base])
    if taken:
        return f"it has a {taken!r} of its own, a name that int8 layers need"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) or "weight" not in module._parameters:
        return f"its weight is not a plain parameter ({type(module).__name__}: lazy, or computed by a hook)"
    dtype = module.weight.dtype
    if dtype != torch.float32:
        return f"its weight is {dtype}, and master weights are float32"
    return None


def _torch_class(cls: type[nn.Module]) -> type[nn.Module]:
    return next(base for base in cls.__mro__ if base in INT8_CLASSES)


def _keep_by_wildcard(layers: dict[str, nn.Module], reasons: dict[str, str | None], keep_float: Sequence[str]) -> None:
    if isinstance(keep_float, str):
        raise TypeError(f"prepare: keep_float is the string {keep_float!r}; pass a list of wildcards, [{keep_float!r}].")
    for pattern in keep_float or ():
        if not isinstance(pattern, str):
            raise TypeError(
                f"prepare: keep_float holds {pattern!r}; it takes shell wildcards of layer names, such as 'layer4.*'."
            )
        matched = [name for name in layers if any(fnmatchcase(part, pattern) for part in _ancestry(name))]
        if not matched:
            near = difflib.get_close_matches(pattern, layers, n=3, cutoff=0.4) or list(layers)[:3]
            raise ValueError(
                f"prepare: keep_float has {pattern!r}, which matches none of the model's {len(layers)} convolutions and "
                f"Linear layers, so it would silently do nothing. Near names: {', '.join(near)}."
            )
        for name in matched:
            reasons[name] = reasons[name] or f"kept float by {pattern!r}"


def _ancestry(name: str) -> list[str]:
    """The layer's name and those of the modules around it.

    >>> _ancestry("layer1.0.conv1")
    ['layer1.0.conv1', 'layer1.0', 'layer1']
    """
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _nothing_to_convert(model: nn.Module, reasons: dict[str, str | None]) -> str:
    where = f"prepare: {type(model).__name__} has"
    if not reasons:
        return f"{where} no convolution and no Linear layer, so nothing in it could run in int8."
    listed = "; ".join(f"{name or 'the model itself'}: {reason}" for name, reason in list(reasons.items())[:5])
    return (
        f"{where} no layer left for int8 ({listed}). Change keep_float, or the recipe's first_conv and linear, so that at "
        "least one layer runs in int8."
    )
