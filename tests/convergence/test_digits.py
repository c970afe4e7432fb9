# SPDX-License-Identifier: Apache-2.0
"""On the digits, each paper's recipe ends within one point of float32: the mean over three paired seeds.

Same seed, same data order, the demo's own settings. `make test ARGS='-m convergence'` runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from byteback.train import data
from byteback.train.config import TrainConfig
from byteback.train.interrupt import Stop
from byteback.train.loop import Member, train
from byteback.train.results import member_result
from byteback.train.variants import FLOAT, parse

SEEDS = (0, 1, 2)


class Silent:
    """Nobody listens."""

    def on_step(self, *_: Any) -> None: ...

    def on_epoch(self, *_: Any) -> None: ...

    def say(self, text: str) -> None: ...


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def float_accuracies(run: Path) -> list[float]:
    return [accuracy(run, FLOAT, seed) for seed in SEEDS]


def accuracy(run: Path, recipe: str, seed: int) -> float:
    member = Member(parse(recipe), seed, run / recipe / str(seed))
    train(TrainConfig(tensorboard=False, histogram_every=0), member, data.load("digits"), Silent(), Stop())
    result: float = member_result(member, run)["accuracy"]
    return result


@pytest.mark.convergence
@pytest.mark.parametrize("recipe", ["unified-int8", "distribution-adaptive-int8", "unified-int8:residual_memory=int8"])
def test_recipe_ends_within_one_point_of_float(recipe: str, run: Path, float_accuracies: list[float]) -> None:
    differences = [accuracy(run, recipe, seed) - base for seed, base in zip(SEEDS, float_accuracies, strict=True)]
    print(f"{recipe}: {[f'{100 * d:+.2f}' for d in differences]} points against {float_accuracies}")
    assert min(float_accuracies) > 0.96, "the float baseline itself did not train"
    assert sum(differences) / len(differences) > -0.01
