# SPDX-License-Identifier: Apache-2.0
"""Tests of the trainer write nothing into the home folder of whoever runs them, and leave the number of threads as it was."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The scan of images keeps what it found in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
