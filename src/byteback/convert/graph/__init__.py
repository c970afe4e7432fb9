# SPDX-License-Identifier: Apache-2.0
"""The graph pass: finds the layers of a model that can be fused into a block.

A block is convolution → norm → (add of a residual) → activation, or the same without the norm. `tracing` turns a model into
graphs, `nodes` classifies their nodes, `blocks` finds the blocks in them. The model is not changed.
"""

from byteback.convert.graph.blocks import Plan, find_blocks
from byteback.nn.fused.block import Block

__all__ = ["Block", "Plan", "find_blocks"]
