# SPDX-License-Identifier: Apache-2.0
"""The backend of one native path: the functions of this folder, with the number of the path as first argument."""

from __future__ import annotations

import functools

from byteback.ops.backends import reference
from byteback.ops.backends.cpu import block, block_grad, magnitude, norm, pooling, products, quantize, statistics

_FAMILIES = (products, quantize, statistics, block, norm, block_grad, magnitude, pooling)
FUNCTIONS = {name: next(getattr(f, name) for f in _FAMILIES if name in vars(f)) for name in reference.__all__}
"""Each function of a backend, with the path as its first parameter."""


class Cpu:
    """The native library on one path."""

    steps = "cpu.quantizer"
    """The module with the steps of a quantizer."""

    def __init__(self, path: int) -> None:
        self.path = path
        for name, function in FUNCTIONS.items():
            setattr(self, name, functools.partial(function, path))
