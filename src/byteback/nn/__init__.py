# SPDX-License-Identifier: Apache-2.0
"""FLOOR 3: layers. Subclasses of the torch layers, with the same parameters under the same names.

layers/         Int8Conv1d/2d/3d and Int8Linear, their state, and the table of layers that are faster in float
autograd.py     the three products of a layer as an autograd function
quantizing.py   how input, weight and gradient of a layer are quantized
fused/          a convolution, its norm, residual add and activation as one block
flags.py        reads NaN and Inf flags once per step, where errors are deferred
ranks.py        gives the int8 layers of several processes the same state
undo.py         restores the buffers of a model after a training step that failed or was dropped
"""

from byteback.nn import _old_names  # noqa: F401  (pickles of earlier versions find their classes)
from byteback.nn.fused import pooling  # noqa: F401  (registers pools and concatenations)
from byteback.nn.layers.conv import FusedConvolution, Int8Conv1d, Int8Conv2d, Int8Conv3d
from byteback.nn.layers.layer import Int8Layer
from byteback.nn.layers.linear import Int8Linear
from byteback.nn.layers.transposed import Int8ConvTranspose1d, Int8ConvTranspose2d, Int8ConvTranspose3d

__all__ = [
    "FusedConvolution",
    "Int8Conv1d",
    "Int8Conv2d",
    "Int8Conv3d",
    "Int8ConvTranspose1d",
    "Int8ConvTranspose2d",
    "Int8ConvTranspose3d",
    "Int8Layer",
    "Int8Linear",
]
