# SPDX-License-Identifier: Apache-2.0
"""Old module names, so that pickles of prepared models from earlier versions can be loaded.

A pickle names each class by its module. `sys.modules` maps the old module names to the current modules. The two classes that
became `Block` load as one. New code does not use this module.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from byteback.nn.fused.block import Block
from byteback.nn.layers import calls, conv, frozen_norm, layer, linear, numerics, subclass, weights

_MOVED = {
    "calls": calls,
    "conv": conv,
    "frozen": frozen_norm,
    "layer": layer,
    "linear": linear,
    "model_hooks": calls,
    "numerics": numerics,
    "subclass": subclass,
    "weights": weights,
}


class BoundBlock(Block):
    """The class of nn/begin.py, which had modules and a plan from nn/pending.py. Loads as a Block, without the names."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        fresh = Block("", None, False, "none", None, consumers=(), swallowed=state["swallowed"], **vars(state["plan"]))
        self.__dict__.update(vars(fresh))
        object.__setattr__(self, "__class__", Block)


def _module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(f"byteback.nn.{name}", "An old name; see byteback/nn/_old_names.py.")
    made.__dict__.update(members)
    return made


_MOVED |= {"begin": _module("begin", BoundBlock=BoundBlock), "pending": _module("pending", BlockPlan=SimpleNamespace)}
sys.modules.update({f"byteback.nn.{name}": module for name, module in _MOVED.items()})
