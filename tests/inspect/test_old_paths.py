# SPDX-License-Identifier: Apache-2.0
"""Pickles of earlier versions can be loaded: the modules that they name still exist, and hide nothing."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import byteback
from small_training import trained

MOVED = {"byteback.inspect.summary": "byteback.report", "byteback.inspect.health": "byteback.report"}
MOVED["byteback.inspect.memory"] = "byteback.memory"


def as_before(value: Any) -> bytes:
    """A pickle with the module names of earlier versions. Protocol 0 is text in which names have no length."""
    data = pickle.dumps(value, protocol=0)
    for new, old in MOVED.items():
        data = data.replace(f"c{new}\n".encode(), f"c{old}\n".encode())
    assert b"byteback.inspect" not in data
    return data


@pytest.mark.parametrize("what", ["summary", "health"])
def test_reports_of_models_are_loaded(what: str) -> None:
    report = getattr(byteback, what)(trained("unified-int8", steps=1))
    loaded = pickle.loads(as_before(report))
    assert type(loaded) is type(report) and loaded == report and str(loaded) == str(report)


def test_reports_of_memory_are_loaded() -> None:
    report = byteback.memory(nn.Linear(4, 4), torch.ones(2, 4))
    assert b"byteback.memory\n" in as_before(report)
    assert pickle.loads(as_before(report)) == report


def test_the_function_is_not_replaced_by_the_module_of_its_name() -> None:
    import byteback.memory
    from byteback.memory import MemoryReport, tune_malloc
    from byteback.report import Health

    assert callable(byteback.memory)
    assert (MemoryReport, tune_malloc, Health) == (byteback.MemoryReport, byteback.tune_malloc, byteback.Health)


def test_a_prepared_model_names_no_module_that_moved() -> None:
    model = trained("unified-int8", steps=1)
    data = pickle.dumps(model, protocol=0)
    assert b"byteback.nn" in data
    assert not any(name in data for name in (b"byteback.convert", b"byteback.inspect", b"byteback.suggestions"))
