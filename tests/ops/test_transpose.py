# SPDX-License-Identifier: Apache-2.0
"""The native transpose between memory formats: every size around its tiles and blocks, bytes and words, any threads."""

from __future__ import annotations

import pytest
import torch

from byteback.ops.backends import paths
from byteback.ops.backends.cpu import library

PATHS = [path for path in paths.available() if path != "reference"]
SIZES = [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 130]


def transposed(path: str, x: torch.Tensor, threads: int) -> torch.Tensor:
    """x (batch, rows, columns) as (batch, columns, rows), with guards around the result that must survive."""
    assert library.native is not None
    room = torch.full((x.numel() + 64,), 77, dtype=x.dtype)
    result = room[32:-32]
    sizes = dict(zip(("batch", "rows", "columns"), x.shape, strict=True))
    memory = {"bytes": x.element_size(), "source": x.data_ptr(), "result": result.data_ptr()}
    library.native.transpose(library.NUMBERS[path], **sizes, **memory, threads=threads)
    assert (room[:32] == 77).all() and (room[-32:] == 77).all(), "written outside of the result"
    return result.reshape(x.shape[0], x.shape[2], x.shape[1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32], ids=["bytes", "words"])
def test_every_size_is_transposed(path: str, dtype: torch.dtype) -> None:
    for rows in SIZES:
        for columns in SIZES:
            x = torch.randint(-127, 128, (2, rows, columns), generator=torch.Generator().manual_seed(rows)).to(dtype)
            for threads in (1, 2, 3):
                assert torch.equal(transposed(path, x, threads), x.mT), (rows, columns, threads)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(2, 48 * 48, 1000), (2, 1000, 48 * 48)], ids=str)
def test_results_too_large_for_the_cache_are_transposed(path: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(transposed(path, x, 2), x.mT)
