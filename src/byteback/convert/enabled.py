# SPDX-License-Identifier: Apache-2.0
"""enabled: switches a prepared model to float and back to int8.

It works as torch.set_grad_enabled does: the call switches at once, and as a context manager it restores the state before.
A context manager cannot be the model itself, so the object passes calls and attribute reads on to the model, for code that
uses the return value of earlier versions, which was the model.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from byteback.convert.layers import int8_layers
from byteback.nn import FusedConvolution, Int8Layer


class enabled:
    """Runs a prepared model in int8 (True, the default) or in float (False). Also works as a context manager.

    Use it for a warm-up in float, or to find out if a problem comes from int8. The call switches at once. After a `with`
    block every layer has the state that it had before.

    >>> import torch
    >>> from byteback.convert import prepare
    >>> model = prepare(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)), "plain-int8")
    >>> with enabled(model, False):
    ...     model[1].enabled
    False
    >>> model[1].enabled
    True
    """

    def __init__(self, model: nn.Module, on: bool = True) -> None:
        self.model = model
        self.on = bool(on)
        self._before: list[tuple[Any, bool]] | None = None
        self._switch()

    def _switch(self) -> None:
        int8_layers(self.model, "enabled")  # raises an error if there are none
        layers: list[Any] = [module for module in self.model.modules() if isinstance(module, (Int8Layer, FusedConvolution))]
        self._before = [(layer, layer.enabled) for layer in layers]
        for layer in layers:
            layer.enabled = self.on

    def __enter__(self) -> nn.Module:
        if self._before is None:  # entered for the second time
            self._switch()
        return self.model

    def __exit__(self, *_: object) -> None:
        for layer, before in self._before or ():
            if isinstance(layer, (Int8Layer, FusedConvolution)):  # byteback.restore may have been called inside
                layer.enabled = before
        self._before = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "model" not in self.__dict__:  # copy and pickle look for special methods
            raise AttributeError(name)
        return getattr(self.model, name)
