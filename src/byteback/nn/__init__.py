# SPDX-License-Identifier: Apache-2.0
"""FLOOR 3: layers. Subclasses of torch's own, with the same parameters under the same names.

layers/         Int8Conv1d/2d/3d and Int8Linear, what they share, what each remembers, and where float is faster
autograd.py     the three products of a layer, and where they meet
quantizing.py   how input, weight and gradient of a layer become int8
fused/          a convolution, its norm, residual add and activation as one block
flags.py        NaN and Inf where errors are deferred: read once per step
ranks.py        how several processes come to remember the same
undo.py         a training step that is refused or dropped leaves no trace
"""

from byteback.nn import _old_names  # noqa: F401  (pickles of earlier versions find their classes)
from byteback.nn.fused import pooling  # noqa: F401  (registers pools and concatenations)
from byteback.nn.layers.conv import FusedConvolution, Int8Conv1d, Int8Conv2d, Int8Conv3d
from byteback.nn.layers.layer import Int8Layer
from byteback.nn.layers.linear import Int8Linear

__all__ = ["FusedConvolution", "Int8Conv1d", "Int8Conv2d", "Int8Conv3d", "Int8Layer", "Int8Linear"]
