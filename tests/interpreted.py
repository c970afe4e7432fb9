# SPDX-License-Identifier: Apache-2.0
"""CPU tensors on the GPU's kernels, which Triton's interpreter runs. tests/conftest.py chooses the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from byteback.ops import quantizer
from byteback.ops.backends import paths, registry


@contextmanager
def interpreting() -> Iterator[None]:
    """Runs every operator on CPU tensors with the backend of GPUs."""
    from byteback.ops.backends import triton

    with pytest.MonkeyPatch.context() as patch:
        for path in paths.PATHS:
            if path in registry._BY_PATH:
                patch.setitem(registry._BY_PATH, path, triton)
        yield
    quantizer._loaded.pop(triton.steps, None)
