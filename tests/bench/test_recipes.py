# SPDX-License-Identifier: Apache-2.0
"""`byteback bench recipes` times each recipe in turns with the first one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from byteback.bench import recipes
from byteback.bench.recipes import RecipesConfig


def test_every_recipe_has_its_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "tune_malloc", lambda: True)  # which could not be undone in this process
    file, console = tmp_path / "recipes.json", Console(record=True, width=120)
    recipes.run(RecipesConfig("resnet8", 8, 2, seconds=1e-6, json=file), console)
    found = json.loads(file.read_text())
    assert (found["model"], found["image_size"], found["batch"]) == ("resnet8", 8, 2)
    first, second = found["recipes"]
    assert (first["recipe"], first["ratio"]) == ("unified-int8", 1.0)
    assert second["recipe"] == "unified-int8:stream=bfloat16" and second["ratio"] > 0 and second["ms"] > 0
    assert "unified-int8:stream=bfloat16" in console.export_text()


def test_one_recipe_has_nothing_to_be_compared_with() -> None:
    with pytest.raises(ValueError, match=r"1 recipe to compare\. Pass two or more"):
        recipes.run(RecipesConfig("resnet8", 8, 2, recipes=("unified-int8",)), Console())
