# SPDX-License-Identifier: Apache-2.0
"""Attaches the blocks that `graph/` found to the convolutions at their start, in place.

An int8 convolution gets an attribute. The class of a float convolution is changed to one that can start a block, and the
class of a frozen norm to one that can be part of it. A convolution without a block gets an attribute that says why; `summary`
prints it.
"""

from __future__ import annotations

from torch import nn

from byteback.convert.graph import Block, Plan
from byteback.convert.graph.tracing import TRANSPOSED
from byteback.nn import Int8Layer
from byteback.nn.layers.block_stages import bind_stage
from byteback.nn.layers.conv import FUSED_CLASSES
from byteback.nn.layers.frozen_norm import bind_frozen
from byteback.nn.layers.subclass import clash
from byteback.recipes import Recipe

BLOCK_REASON = "byteback_block_reason"
BLOCK_TEXT = "byteback_block_text"


def bind_blocks(model: nn.Module, plan: Plan, recipe: Recipe) -> None:
    """Attaches every block of `plan` to its convolution, and the reason to every convolution without a block."""
    modules = dict(model.named_modules())
    for name, block in plan.blocks.items():
        conv = modules[name]
        inner = [modules[part] for part in (block.norm, block.activation_module) if part is not None]
        bound = block.bound(inner, recipe)
        if isinstance(conv, Int8Layer):
            conv.int8_block = bound  # type: ignore[assignment]
        elif type(conv) not in FUSED_CLASSES:
            setattr(conv, BLOCK_REASON, f"a float convolution of the subclass {type(conv).__name__}")
            continue
        elif taken := clash(conv, FUSED_CLASSES[type(conv)]):
            setattr(conv, BLOCK_REASON, f"a float {type(conv).__name__} with an attribute {taken!r}, which blocks need")
            continue
        else:
            conv.__class__ = FUSED_CLASSES[type(conv)]
            conv.attach(recipe, name, bound)
        for module in inner:
            bind_frozen(module)
            bind_stage(module)
        setattr(conv, BLOCK_TEXT, describe(block))
    for name, reason in plan.reasons.items():
        setattr(modules[name], BLOCK_REASON, reason)
    for module in modules.values():
        if isinstance(module, Int8Layer) and isinstance(module, TRANSPOSED):
            setattr(module, BLOCK_REASON, "a transposed convolution, which starts no block")


def describe(block: Block) -> str:
    """Returns a short description of a block for `summary`.

    >>> describe(Block("conv1", "bn1", True, "relu", None, "activation", True, False, ()))
    'conv + norm + add + relu'
    """
    parts = ["conv", "norm" if block.norm else "", "add" if block.adds else ""]
    parts.append("" if block.activation == "none" else block.activation)
    return " + ".join(part for part in parts if part)
