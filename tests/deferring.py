# SPDX-License-Identifier: Apache-2.0
"""CPU tensors quantized by steps that defer their errors, as steps on a GPU will."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from byteback.ops import quantizer
from byteback.ops.backends import reference
from byteback.ops.backends.cpu.backend import Cpu

DEFERRED = "reference.deferred"


@contextmanager
def deferring() -> Iterator[None]:
    """On every path of the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cpu, "steps", DEFERRED)
        patch.setattr(reference, "steps", DEFERRED)
        yield
    quantizer._loaded.pop(DEFERRED, None)
