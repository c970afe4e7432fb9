# SPDX-License-Identifier: Apache-2.0
"""On the digits, each paper's recipe ends within one point of float32: the mean over three paired seeds.

Same seed, same data order, the demo's own settings. `make test ARGS='-m convergence'` runs it.
"""

from __future__ import annotations

import dataclasses

import pytest

import byteback
from byteback.train.config import FLOAT, TrainConfig
from byteback.train.data import digits
from byteback.train.loop import train

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def float_accuracies() -> list[float]:
    return [accuracy(FLOAT, seed) for seed in SEEDS]


def accuracy(recipe: str | byteback.Recipe, seed: int) -> float:
    return train(dataclasses.replace(TrainConfig(), seed=seed), recipe, digits(), lambda loss: None).accuracy


@pytest.mark.convergence
@pytest.mark.parametrize(
    "recipe",
    [
        "unified-int8",
        "distribution-adaptive-int8",
        pytest.param(byteback.UnifiedInt8(residual_memory="int8"), id="unified-int8, residuals in int8"),
    ],
)
def test_recipe_ends_within_one_point_of_float(recipe: str | byteback.Recipe, float_accuracies: list[float]) -> None:
    differences = [accuracy(recipe, seed) - base for seed, base in zip(SEEDS, float_accuracies, strict=True)]
    print(f"{recipe}: {[f'{100 * d:+.2f}' for d in differences]} points against {float_accuracies}")
    assert min(float_accuracies) > 0.96, "the float baseline itself did not train"
    assert sum(differences) / len(differences) > -0.01
