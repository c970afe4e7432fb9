# SPDX-License-Identifier: Apache-2.0
"""How a result is compared with what the oracle says: bit by bit, so +0.0 and -0.0 differ; only NaN equals any NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def array_of(x: Tensor) -> np.ndarray:
    """The values of a tensor, strides and all; bfloat16 becomes float32, which holds it exactly."""
    return (x.float() if x.dtype is torch.bfloat16 else x).detach().numpy()


def difference(actual: Any, expected: Any, name: str = "result") -> str | None:
    """Where a tensor (or a tuple of them, a number, None) is not what was expected; None where all is equal."""
    if isinstance(expected, dict):
        parts = ((f"{name}.{key}", getattr(actual, key), value) for key, value in expected.items())
        return next((found for key, one, other in parts if (found := difference(one, other, key))), None)
    if isinstance(expected, (tuple, list)):
        if not isinstance(actual, (tuple, list)) or len(actual) != len(expected):
            return f"{name} is {actual!r}, not a tuple of {len(expected)}"
        parts = ((f"{name}[{i}]", *pair) for i, pair in enumerate(zip(actual, expected, strict=True)))
        return next((found for key, one, other in parts if (found := difference(one, other, key))), None)
    if expected is None or actual is None:
        return None if actual is expected else f"{name} is {actual!r}, not {expected!r}"
    actual = array_of(actual) if isinstance(actual, Tensor) else np.asarray(actual)
    return _compare(name, actual, np.asarray(expected))


def _compare(name: str, actual: np.ndarray, expected: np.ndarray) -> str | None:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f"{name} is {actual.dtype} {actual.shape}, not {expected.dtype} {expected.shape}"
    words = _WORDS[expected.dtype.itemsize]
    wrong = np.ascontiguousarray(actual).view(words) != np.ascontiguousarray(expected).view(words)
    wrong = wrong.reshape(expected.shape)
    if expected.dtype.kind == "f":
        wrong &= ~(np.isnan(actual) & np.isnan(expected))
    if not wrong.any():
        return None
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{name}: {int(wrong.sum())} of {wrong.size} differ; at {at} it is {actual[at]!r}, not {expected[at]!r}"
