# SPDX-License-Identifier: Apache-2.0
"""float64 numbers in device memory: Triton passes Python numbers to kernels as float32."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.lru_cache(maxsize=1024)
def float64(value: float, device: torch.device) -> Tensor:
    """Returns one float64 number on a device. It is written by a kernel, so nothing waits for the host."""
    return torch.full((1,), value, dtype=torch.float64, device=device)
