# SPDX-License-Identifier: Apache-2.0
"""FLOOR 1: from a float tensor to int8 and a scale.

    x ─ choose clip (clipping.py) ─ scale = clip/127 ─ saturate ─ round ─► QTensor (qtensor.py)

`rule.py` says how one tensor is to be quantized, `quantizer.py` remembers and does it.
"""

from byteback.ops.ledger import CLIP, DEVIATION, GAUSSIAN, MEASURED, NONFINITE, QQ, SATURATED, WORST_CHANNEL, XQ, XX
from byteback.quantize.clipping import Choice, ClipRule, MaxAbs, Memory, PairedGradient
from byteback.quantize.fused import Adopted, LazyGradient, Step, adopt, quantize_both, quantize_held
from byteback.quantize.qtensor import QTensor
from byteback.quantize.quantizer import (
    CALL_SLOTS,
    NonFiniteError,
    Quantizer,
    Settings,
    deviation_of,
    moved,
    quantize_fresh,
    register,
)
from byteback.quantize.rule import TensorRule

__all__ = [
    "Adopted",
    "CALL_SLOTS",
    "CLIP",
    "Choice",
    "ClipRule",
    "DEVIATION",
    "GAUSSIAN",
    "LazyGradient",
    "MEASURED",
    "NONFINITE",
    "QQ",
    "SATURATED",
    "WORST_CHANNEL",
    "XQ",
    "XX",
    "MaxAbs",
    "Memory",
    "NonFiniteError",
    "PairedGradient",
    "QTensor",
    "Quantizer",
    "Settings",
    "Step",
    "TensorRule",
    "adopt",
    "deviation_of",
    "moved",
    "quantize_both",
    "quantize_held",
    "quantize_fresh",
    "register",
]
