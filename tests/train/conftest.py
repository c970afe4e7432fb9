# SPDX-License-Identifier: Apache-2.0
"""Tests of the trainer write nothing into the home folder of whoever runs them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The scan of images keeps what it found in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
