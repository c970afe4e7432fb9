# SPDX-License-Identifier: Apache-2.0
"""freeze and unfreeze: a model that only predicts keeps its int8 weights from one prediction to the next.

An ordinary prediction quantizes every weight, since nothing tells for certain that a weight is the one of last time
(nn/weights.py). For a single image that is a good part of the time. With `freeze` the user says that the weights stay.
"""

from __future__ import annotations

from torch import nn

from byteback.convert import int8_layers
from byteback.nn.layers.weights import Frozen, unwatch_loading, watch_loading


def freeze(model: nn.Module) -> nn.Module:
    """Makes a model in eval mode keep its int8 weights until `unfreeze`, in place: the same predictions, sooner.

    A frozen model refuses to train and to load weights. Of other writes to a weight it sees those that autograd counts, which
    are an error. It does not see those through `weight.data` or numpy: call `unfreeze` before them, or `freeze` again after.

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
                f"freeze: {name or type(model).__name__!r} is in training mode, where every step makes another int8 weight, so "
                "there is nothing to keep. Call model.eval() first."
            )
    made = {layer: Frozen() for layer in layers.values()}
    for layer, frozen in made.items():  # all before any is touched: a weight with NaN is an error
        if layer.runs_int8("output"):
            frozen.weight(layer, layer.weight)
    for layer, frozen in made.items():
        layer.int8_frozen = frozen
    watch_loading(model)
    return model


def unfreeze(model: nn.Module) -> nn.Module:
    """Makes a frozen model an ordinary one again, in place: it quantizes the weights that it has, and it trains.

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
