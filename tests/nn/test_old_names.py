# SPDX-License-Identifier: Apache-2.0
"""Pickles made before modules of byteback.nn moved still load, train and predict.

tests/data/prepared_by_0.1.pt was written by a version that had nn/conv.py, nn/begin.py, nn/pending.py and the like: a model
with several kinds of blocks after two steps, the same model frozen, and what the next step and a prediction gave.
"""

from __future__ import annotations

import lzma
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import byteback
from byteback.nn.fused.block import Block, FusedBlock

FILE = Path(__file__).parents[1] / "data" / "prepared_by_0.1.pt"


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    found = torch.load(FILE, weights_only=True)
    return {**found, "models": lzma.decompress(found["models"])}


def test_the_file_names_modules_that_are_gone(stored: dict[str, Any]) -> None:
    for name in (
        b"byteback.nn.conv",
        b"byteback.nn.begin",
        b"byteback.nn.pending",
        b"byteback.nn.model_hooks",
        b"byteback.nn.weights",
    ):
        assert name in stored["models"]


def test_a_model_of_then_trains_on_in_blocks(stored: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = FusedBlock.apply
    monkeypatch.setattr(FusedBlock, "apply", lambda *args: calls.append(args) or original(*args))
    model: nn.Sequential = pickle.loads(stored["models"])["training"]
    loss = model(stored["x"]).square().sum()
    loss.backward()
    assert len(calls) == 3 and all(type(model[index].int8_block) is Block for index in (0, 3, 7))
    assert model[3].int8_block.swallowed == (model[4], model[5])
    # The stem is a float convolution, whose last bits depend on the machine.
    torch.testing.assert_close(loss.detach(), stored["loss"], rtol=1e-2, atol=0.0)
    for parameter, expected in zip(model.parameters(), stored["grads"], strict=True):
        assert (parameter.grad - expected).norm() <= 0.05 * expected.norm() + 1e-6


def test_a_frozen_model_of_then_predicts(stored: dict[str, Any]) -> None:
    model = pickle.loads(stored["models"])["frozen"]
    with torch.no_grad():
        torch.testing.assert_close(model(stored["x"]) + 0.0, stored["prediction"], rtol=1e-2, atol=1e-2)
    with pytest.raises(RuntimeError, match="frozen for predictions"):
        model.train()(stored["x"])


def test_what_was_loaded_is_restored_and_pickled_again(stored: dict[str, Any]) -> None:
    model = pickle.loads(stored["models"])["training"]
    again = pickle.dumps(model)
    assert b"byteback.nn.begin" not in again and b"byteback.nn.conv" not in again
    assert type(byteback.restore(model)[3]) is nn.Conv2d
