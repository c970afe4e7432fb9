# SPDX-License-Identifier: Apache-2.0
"""Pickles of prepared models made by earlier versions: where they look for classes and functions that have moved since.

A pickle names each class by its module. `sys.modules` maps the old module names to those of today; the two classes that became
`Block` load as one. Nothing here is used by new code.
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
    """What nn/begin.py had: modules, and a plan from nn/pending.py. Loads as a Block, without the names that it never had."""

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
