# SPDX-License-Identifier: Apache-2.0
"""What the tests of floor 0 share: the integer oracle of tests/oracles, and threads that are put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from oracles.products import Oracle


@pytest.fixture(scope="session")
def oracle() -> type[Oracle]:
    return Oracle


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
