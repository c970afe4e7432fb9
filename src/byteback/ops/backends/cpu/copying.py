# SPDX-License-Identifier: Apache-2.0
"""Copies many small tensors again and again, such as the buffers of a model before each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from byteback.ops.backends.cpu import library
from byteback.ops.backends.cpu.addresses import places

_native: Any = library.native


class Copying:
    """Copies `tensors` to `copies`, which have the same sizes, dtypes and strides.

    For some hundred dense tensors on the CPU the native library needs a few microseconds, and PyTorch one for each tensor.

    >>> x, y = torch.arange(3.0), torch.zeros(3)
    >>> Copying([y], [x]).copy()
    >>> y
    tensor([0., 1., 2.])
    """

    def __init__(self, copies: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        self._copies, self._tensors = list(copies), list(tensors)
        self._places: list[int] = []
        self._plan = self._checked()

    def copy(self) -> None:
        """Copies all of them."""
        there = None if self._plan is None else places(self._tensors)
        if there is not None and there != self._places:
            self._plan, self._places = self._checked(), there
        if self._plan is None:
            torch._foreach_copy_(self._copies, self._tensors)
        else:
            _native.copy_all(self._plan, there)

    def _checked(self) -> Any:
        """Returns the native plan; None if PyTorch must copy: on other devices, for other classes and layouts."""
        pairs = list(zip(self._copies, self._tensors, strict=True))
        if _native is None or not all(_is_dense(x) and _is_dense(copy) and _same(x, copy) for copy, x in pairs):
            return None
        return _native.CopyPlan(to=places(self._copies), bytes=[x.numel() * x.element_size() for x in self._tensors])


def _is_dense(x: Tensor) -> bool:
    return type(x) is Tensor and x.is_cpu and x.is_contiguous() and not x.is_neg() and not x.is_conj()


def _same(x: Tensor, copy: Tensor) -> bool:
    return x.dtype is copy.dtype and x.shape == copy.shape
