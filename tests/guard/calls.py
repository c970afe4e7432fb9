# SPDX-License-Identifier: Apache-2.0
"""All guarded calls by the name of the native function, and the functions that need none."""

from __future__ import annotations

from collections.abc import Callable

from guard import calls_block, calls_elementwise, calls_products, calls_step
from guard.memory import Arena

ALL: dict[str, Callable[[Arena, int, int], None]] = {
    call.__name__: call for module in (calls_products, calls_elementwise, calls_block, calls_step) for call in module.CALLS
}
STRUCTS = {
    *("ConvShape", "Rows", "Windows", "Pixels", "RoiShape", "Operands", "ForwardPass", "BatchGiven", "BatchMade", "Backward"),
    *("QuantizePlan", "QuantizedTo", "MagnitudeClips", "BlockPlan", "QuantizerRow", "ForwardTensors", "BackwardTensors"),
    *("GradientPlan", "CopyPlan", "PredictPlan"),
}
"""What shapes and addresses are handed over in: they read and write nothing."""
WITHOUT_MEMORY = {
    "is_compiled": "asks about a path",
    "cpu_supports": "asks about a path",
    "self_check": "makes its own operands; make sanitize watches them",
    "peaks": "multiplies registers and reads no memory",
    "explain": "asks the planner about a shape",
    "pool_lend": "hands memory out and reads none",
    "pool_offer": "hands memory back",
    "pool_release": "hands memory back",
    "pool_sizes": "asks the pool about itself",
}
