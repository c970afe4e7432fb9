# SPDX-License-Identifier: Apache-2.0
"""FLOOR 3: layers. Subclasses of torch's own, with the same parameters under the same names.

Read `functional.py` (where the three products meet), then `layer.py` (what the layers share), `conv.py`, `linear.py`,
`numerics.py` (what a layer remembers), `ranks.py` (how several processes come to remember the same), `products.py` (the
products themselves) and `float_table.py` (where float is faster).
"""

from byteback.nn import max_pool  # noqa: F401 (makes itself known to activations)
from byteback.nn.conv import FusedConvolution, Int8Conv1d, Int8Conv2d, Int8Conv3d
from byteback.nn.layer import Int8Layer
from byteback.nn.linear import Int8Linear

__all__ = ["FusedConvolution", "Int8Conv1d", "Int8Conv2d", "Int8Conv3d", "Int8Layer", "Int8Linear"]
