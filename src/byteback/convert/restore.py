# SPDX-License-Identifier: Apache-2.0
"""restore: turns a prepared model back into the float model, in place. float_state_dict: the state of that float model."""

from __future__ import annotations

from torch import Tensor, nn

from byteback.convert.bind import BLOCK_REASON, BLOCK_TEXT
from byteback.convert.layers import FLOAT_REASON, int8_layers
from byteback.nn import FusedConvolution, Int8Layer
from byteback.nn.layers.block_module import BlockModule
from byteback.nn.layers.calls import SHARED, begin_forward, end_forward
from byteback.nn.layers.computed import was_parametrized
from byteback.nn.layers.weights import unwatch_loading
from byteback.nn.undo import unwatch


def restore(model: nn.Module) -> nn.Module:
    """Converts a prepared model back to plain PyTorch in place, and returns it.

    The model stays the same object with the same weights. Everything that `prepare` added is removed.

    >>> from byteback.convert import prepare
    >>> model = prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), "plain-int8")
    >>> type(restore(model)[1]).__name__
    'Conv2d'
    """
    layers = int8_layers(model, "restore")
    for name, layer in layers.items():  # check all layers before changing any: an error must leave the model as it was
        if not was_parametrized(layer):
            raise ValueError(
                f"restore: {name!r} got a parametrization after prepare. The parametrization owns its weight now, and "
                "restoring the layer would lose it. Call torch.nn.utils.parametrize.remove_parametrizations first."
            )
    for layer in layers.values():
        layer.detach()
    for module in model.modules():
        if isinstance(module, (FusedConvolution, BlockModule)):
            module.detach()
        for attribute in (FLOAT_REASON, BLOCK_REASON, BLOCK_TEXT, SHARED):
            module.__dict__.pop(attribute, None)
        unwatch_loading(module)
        unwatch(module)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for handle, hook in list(hooks.items()):
                if hook in (begin_forward, end_forward):
                    del hooks[handle]
                    module._forward_hooks_always_called.pop(handle, None)
    return model


def float_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict without the quantizers. The float model loads it with strict=True."""
    int8_layers(model, "float_state_dict")
    everywhere = model.named_modules(remove_duplicate=False)  # a module with two names has its state under both
    names = [name for name, module in everywhere if isinstance(module, Int8Layer)]
    own = tuple(f"{name}.quantizers." if name else "quantizers." for name in names)
    state = model.state_dict()  # an OrderedDict with module versions, which load_state_dict reads
    for key in [key for key in state if key.startswith(own)]:
        del state[key]
    return state
