# SPDX-License-Identifier: Apache-2.0
"""FLOOR 1: from a float tensor to int8 and a scale.

    x ─ choose clip (clipping.py) ─ scale = clip/127 ─ saturate ─ round ─► QTensor (ops/types.py)

`rule.py` says how one tensor is quantized, and `quantizer.py` has the state over a run. The step itself is one operation of a
backend (ops/quantizer.py).
"""

from byteback.ops.quantizer import (
    CLIP,
    DEVIATION,
    MEASURED,
    NONFINITE,
    QQ,
    SATURATED,
    WORST_CHANNEL,
    XQ,
    XX,
    BlockGradient,
    Gradient,
    Moment,
    NonFiniteError,
    deviation_of,
    floats_of,
    register,
)
from byteback.ops.types import QTensor
from byteback.quantize.clipping import Choice, ClipRule, MaxAbs, Memory
from byteback.quantize.quantizer import (
    CALL_SLOTS,
    Quantizer,
    Settings,
    columns_of,
    moved,
    new_unshared,
    quantize_fresh,
    quantize_pair,
)
from byteback.quantize.rule import TensorRule

__all__ = [
    "BlockGradient",
    "CALL_SLOTS",
    "CLIP",
    "Choice",
    "ClipRule",
    "DEVIATION",
    "Gradient",
    "MEASURED",
    "MaxAbs",
    "Memory",
    "Moment",
    "NONFINITE",
    "NonFiniteError",
    "QQ",
    "QTensor",
    "Quantizer",
    "SATURATED",
    "Settings",
    "TensorRule",
    "WORST_CHANNEL",
    "XQ",
    "XX",
    "columns_of",
    "deviation_of",
    "floats_of",
    "moved",
    "new_unshared",
    "quantize_fresh",
    "quantize_pair",
    "register",
]
