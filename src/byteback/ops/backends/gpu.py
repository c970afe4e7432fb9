# SPDX-License-Identifier: Apache-2.0
"""Which backend runs the tensors of a GPU: Triton's kernels if they run there and their bits are right, else the reference.

    no Triton installed                  the reference, with a warning
    NVIDIA before compute capability 7.5 the reference: PyTorch does not run on it either, or without int8 products
    AMD other than CDNA                  the reference: never compiled without spills
    other devices                        checked once against the reference on the CPU (self_check), then Triton

Each device of the process is decided by itself, when its first tensor arrives.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from typing import Any

import torch

from byteback.ops.backends import reference

LEAST_CAPABILITY = (7, 5)
AMD = ("gfx90a", "gfx942", "gfx950")


def why_not(device: torch.device) -> str:
    """Returns why Triton's kernels cannot run on a device; empty if they may be tried."""
    if device.type != "cuda":
        return f"there are no kernels for devices of type {device.type!r}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed. Install it with: pip install 'byteback[gpu]'"
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        name = properties.gcnArchName.split(":")[0]
        return "" if name in AMD else f"the kernels are compiled for {', '.join(AMD)} only, but this GPU is {name}"
    capability = properties.major, properties.minor
    if capability < LEAST_CAPABILITY:
        return f"its compute capability is {capability[0]}.{capability[1]}, but the kernels need 7.5 (Turing) or later"
    return ""


@functools.cache
def backend(device: torch.device) -> Any:
    """Returns the backend of a device."""
    if device.type != "cuda":
        return reference
    reason = why_not(device)
    if not reason:
        from byteback.ops.backends import triton
        from byteback.ops.backends.triton.self_check import self_check

        reason = self_check(device)
        if not reason:
            return triton
    warnings.warn(
        f"byteback: {device} runs on the reference, which is slow: {reason}. Results are the same. (details: byteback doctor)",
        stacklevel=2,
    )
    return reference
