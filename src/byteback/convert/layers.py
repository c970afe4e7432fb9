# SPDX-License-Identifier: Apache-2.0
"""The int8 layers of a model, and the attribute that says why another layer stayed float.

`prepare` sets FLOAT_REASON on the layers that it does not convert, `summary` prints it and `restore` removes it.
"""

from __future__ import annotations

from torch import nn

from byteback.nn import Int8Layer

FLOAT_REASON = "byteback_float_reason"


def int8_layers(model: nn.Module, asked_by: str) -> dict[str, Int8Layer]:
    """Returns the int8 layers of a model by name. Raises an error if there are none.

    `asked_by` is the name of the function that needs them, for the error message.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, Int8Layer)}
    if not found:
        raise ValueError(
            f"{asked_by}: this {type(model).__name__} has no int8 layer, so there is nothing to do. "
            "Call byteback.prepare(model, recipe) first."
        )
    return found
