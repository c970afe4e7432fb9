# SPDX-License-Identifier: Apache-2.0
"""freeze and unfreeze: a model that is only used for prediction stores its int8 weights instead of quantizing them each time.

Without `freeze` a prediction quantizes every weight, because there is no reliable way to tell that a weight did not change
(nn/layers/weights.py). For a single image this takes a large part of the time. With `freeze` the user promises not to change
them.
"""

from __future__ import annotations

from torch import nn

from byteback.convert.layers import int8_layers
from byteback.nn.layers.computed import is_weight
from byteback.nn.layers.weights import Frozen, unwatch_loading, watch_loading


def freeze(model: nn.Module) -> nn.Module:
    """Stores the int8 weights of a model in eval mode until `unfreeze`, in place: the same predictions in less time.

    Training a frozen model or loading weights into it raises an error. So does any other write to a weight that autograd
    counts. Writes through `weight.data` or numpy are not detected: call `unfreeze` before them, or `freeze` again afterwards.

    >>> import torch
    >>> from byteback.convert import prepare
    >>> model = prepare(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)), "plain-int8").eval()
    >>> images = torch.randn(1, 3, 8, 8)
    >>> with torch.inference_mode():
    ...     before = model(images)
    ...     torch.equal(freeze(model)(images), before)
    True
    """
    layers = int8_layers(model, "freeze")
    for name, layer in layers.items():
        if layer.training:
            raise RuntimeError(
                f"freeze: {name or type(model).__name__!r} is in training mode, where the int8 weight changes in every step. "
                "Call model.eval() first."
            )
    made = {layer: Frozen() for layer in layers.values()}
    for layer, frozen in made.items():  # quantize all before changing any layer: a weight with NaN raises an error
        if layer.runs_int8("output") and is_weight(layer):
            frozen.weight(layer, layer.weight)
    for layer, frozen in made.items():
        layer.int8_frozen = frozen
    watch_loading(model)
    return model


def unfreeze(model: nn.Module) -> nn.Module:
    """Undoes `freeze` in place: the model quantizes its weights in every pass and can be trained again.

    >>> from byteback.convert import prepare
    >>> model = prepare(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)), "plain-int8").eval()
    >>> unfreeze(freeze(model)) is model
    True
    """
    for layer in int8_layers(model, "unfreeze").values():
        layer.int8_frozen = None
    for module in model.modules():
        unwatch_loading(module)
    return model
