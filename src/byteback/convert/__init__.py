# SPDX-License-Identifier: Apache-2.0
"""Converts a model to int8 and back, in place.

    prepare.py   chooses the layers and makes them int8
    graph/       finds convolutions that can be fused with the norm, add and activation after them
    bind.py      attaches those blocks to their convolutions
    restore.py   restore: back to the float model; float_state_dict: its state
    enabled.py   switches a prepared model to float and back to int8
    freeze.py    keeps the int8 weights of a model that only predicts
    layers.py    the int8 layers of a model

The functions are public as `byteback.prepare` and so on.
"""

from byteback.convert.enabled import enabled
from byteback.convert.freeze import freeze, unfreeze
from byteback.convert.layers import FLOAT_REASON, int8_layers
from byteback.convert.prepare import first_convolution, prepare
from byteback.convert.restore import float_state_dict, restore

__all__ = [
    "FLOAT_REASON",
    "enabled",
    "first_convolution",
    "float_state_dict",
    "freeze",
    "int8_layers",
    "prepare",
    "restore",
    "unfreeze",
]
