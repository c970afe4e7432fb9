# SPDX-License-Identifier: Apache-2.0
"""The table of a run: means over seeds, and differences to float32 with the same seed."""

from __future__ import annotations

import pytest

from byteback.train import results


def test_the_table_pairs_seeds_with_those_of_float32() -> None:
    def member(recipe: str, seed: int, accuracy: float, speed: float) -> dict[str, object]:
        names = ("best_accuracy", "train_loss", "test_loss", "data_wait", "seconds")
        same = {"state": "finished", "folder": f"{recipe}/seed{seed}", "saved_bytes": 8 if recipe == "float32" else 4}
        return {
            "recipe": recipe,
            "seed": seed,
            "accuracy": accuracy,
            "images_per_second": speed,
            **same,
            **dict.fromkeys(names, 1.0),
        }

    found = [member("float32", 0, 0.90, 10.0), member("float32", 1, 0.92, 10.0)]
    found += [member("plain-int8", 0, 0.91, 20.0), member("plain-int8", 1, 0.90, 10.0), member("plain-int8", 2, 0.5, 9.0)]
    float_row, row = results.rows(found)
    assert float_row["difference"] is None and float_row["accuracy"] == pytest.approx(0.91)
    # differences +0.01 and -0.02: mean -0.005, sample deviation 0.03/√2, standard error that over √2 = 0.015
    assert row["difference"] == pytest.approx(-0.005) and row["difference_error"] == pytest.approx(0.015)
    assert row["ratio_to_float32"] == pytest.approx(1.5) and row["saved_ratio"] == pytest.approx(0.5)
    assert row["seeds"] == [0, 1, 2] and row["diverged"] == []
    lost = {**member("unified-int8", 0, 0.1, 1.0), "state": "diverged"}
    (*_, last) = results.rows([*found, lost])
    assert last["diverged"] == [0] and last["accuracy"] is None
    assert results.comparison([float_row, row, last])
