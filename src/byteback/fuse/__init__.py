# SPDX-License-Identifier: Apache-2.0
"""The graph pass: which layers of a model form a block that can be computed at once.

A block is convolution → norm → (sum with a residual) → activation, or the same without the norm. `tracing` turns a model into
graphs, `nodes` says what their nodes are, `blocks` puts them together. Nothing here changes the model.
"""

from byteback.fuse.blocks import Plan, find_blocks
from byteback.nn.fused.block import Block

__all__ = ["Block", "Plan", "find_blocks"]
