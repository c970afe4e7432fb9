# SPDX-License-Identifier: Apache-2.0
"""Counts the multiplications of each layer for the last input that a prepared model has seen.

A copy of the model on the meta device, where a forward computes shapes only, runs once on an input of that shape. Each product
of a layer, forward or backward, has as many multiplications as its output.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from byteback.nn.layers.calls import SHARED, Shared


def multiplications(model: nn.Module) -> dict[str, int] | None:
    """Returns the multiplications of one product of each convolution and Linear layer, over all of its calls.

    None if the model has seen no input yet, if its inputs are not just tensors, or if it does not run on the meta device.
    """
    shared: Shared | None = model.__dict__.get(SHARED)
    if shared is None or shared.last_input is None:
        return None
    try:
        twin = _on_meta(model)
        names = {module: name for name, module in twin.named_modules() if _kind(module)}
        found = dict.fromkeys(names.values(), 0)

        def count(module: Any, args: Any, output: Any) -> None:
            found[names[module]] += _count(module, args[0], output)

        for module in names:
            module.register_forward_hook(count)
        with torch.no_grad():
            twin.eval()(*(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shared.last_input))
    except Exception:  # of the user's forward: it may need numbers, or make tensors on another device
        return None
    return found


def _on_meta(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    for module in model.modules():  # a weight that a hook computes
        memo.update({id(one): one.detach().to("meta") for one in vars(module).values() if isinstance(one, Tensor)})
    return copy.deepcopy(model, memo)


def _kind(module: nn.Module) -> bool:
    return isinstance(module, (nn.modules.conv._ConvNd, nn.Linear))


def _count(module: Any, x: Tensor, output: Tensor) -> int:
    if isinstance(module, nn.Linear):
        return output.numel() * int(module.in_features)
    taps = math.prod(module.kernel_size)
    if module.transposed:
        return x.numel() * int(module.out_channels) // int(module.groups) * taps
    return output.numel() * int(module.in_channels) // int(module.groups) * taps
