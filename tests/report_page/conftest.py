# SPDX-License-Identifier: Apache-2.0
"""Tiny runs, made up: what `byteback train` would have written, in a few milliseconds."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

LAYERS = ("conv1", "layer1.0.conv1", "layer1.0.conv2", "layer1.0.downsample.0")
Writer = Callable[..., Path]


def member(
    folder: Path,
    recipe: str,
    seed: int,
    *,
    data: str = "digits",
    model: str = "resnet8",
    epochs: int = 4,
    done: int | None = None,
    diverged: bool = False,
    detect: bool = False,
    classes: tuple[str, ...] = ("disc", "square"),
    start_with: dict[str, Any] | None = None,
) -> None:
    """One member's journals; `done` epochs of it, all by default. With `detect` it is a detector's."""
    folder.mkdir(parents=True)
    in_int8 = recipe != "float32"
    done = epochs if done is None else done
    start = {
        "kind": "start",
        "recipe": recipe,
        "recipe_data": {} if in_int8 else None,
        "seed": seed,
        "model": model,
        "data": data,
    }
    start |= {"classes": 10, "train_images": 1437, "test_images": 360, "image_size": 8, "channels": 1, "steps_per_epoch": 23}
    start |= {"epochs": epochs, "batch_size": 64, "parameters": 75002, "threads": 2, "path": "avx2", "peak_bytes": 4_000_000}
    start |= {"saved_bytes": 1_200_000 if in_int8 else 2_400_000, "layers": [{"name": name} for name in LAYERS]}
    if detect:
        start |= {"task": "detect", "backbone": "resnet18", "class_names": list(classes)}
    records: list[dict[str, Any]] = [start | (start_with or {})]
    records += [{"kind": "step", "epoch": 0, "step": step, "loss": 2.0 - 0.1 * step, "accuracy": 0.5} for step in (5, 10)]
    for epoch in range(done):
        accuracy = 0.9 + 0.02 * epoch + 0.001 * seed - 0.002 * in_int8
        records.append(
            {
                **{"kind": "epoch", "epoch": epoch, "step": 23 * (epoch + 1), "train_loss": 2.0 / 4**epoch, "skipped": 0},
                **{"train_accuracy": accuracy + 0.01, "test_loss": 1.0 / 2**epoch, "test_accuracy": accuracy},
                **{"best_accuracy": accuracy, "lr": 0.1, "images_per_second": 1800.0 if in_int8 else 1000.0},
                **{"data_wait": 0.01, "seconds": 1.5, "test_seconds": 0.1},
            }
        )
        if detect:
            per_class = {name: accuracy - 0.1 * i for i, name in enumerate(classes)}
            records[-1] |= {"mAP": accuracy, "AP50": accuracy + 0.02, "AP75": accuracy - 0.3, "per_class_AP": per_class}
            records[-1] |= {"test_loss": None, "train_accuracy": 0.0}
        if in_int8:
            layers = {
                name: {role: numerics(epoch, i) for role in ("grad_output", "weight")} for i, name in enumerate(LAYERS[1:])
            }
            records.append({"kind": "layers", "epoch": epoch, "step": 23 * (epoch + 1), "layers": layers})
    if diverged:
        records.append({"kind": "diverged", "epoch": done, "step": 23 * done, "why": "the loss is NaN"})
    elif done == epochs:
        records.append({"kind": "end", "epochs": epochs, "step": 23 * epochs, "state_sha256": "0" * 64})
    write_lines(folder / "metrics.jsonl", records)
    if detect and done:
        (folder / "detections.json").write_text(json.dumps(detections(seed, done, classes)), encoding="utf-8")
    if detect:
        return
    write_lines(folder / "histograms.jsonl", [picture(e, i) for e in range(done) for i in range(len(LAYERS))])


def detections(seed: int, epochs: int, classes: tuple[str, ...]) -> dict[str, Any]:
    """Two images with two objects each; on the first one is found and one box is wrong, on the second one is unsure."""
    truth = [{"label": 1, "box": [4, 5, 24, 25], "crowd": False}, {"label": 2, "box": [40, 10, 60, 40], "crowd": False}]
    first = [{"label": 1, "score": 0.95, "box": [5, 5, 24, 25]}, {"label": 1, "score": 0.6, "box": [40, 10, 60, 40]}]
    second = [{"label": 2, "score": 0.35, "box": [41, 11, 60, 40]}]
    drawn = io.BytesIO()
    Image.new("RGB", (72, 48), (120, 140, 90 + seed)).save(drawn, "JPEG")
    image = {"width": 72, "height": 48, "jpeg": base64.b64encode(drawn.getvalue()).decode(), "truth": truth}
    falling = [[round(max(0.0, 1 - r / 80 - 0.1 * i), 4) for r in range(101)] for i in range(len(classes))]
    return {
        **{"format": 1, "epochs": epochs, "classes": list(classes), "least_score": 0.1},
        "images": [{"name": "a.jpg", **image, "found": first}, {"name": "b.jpg", **image, "found": second}],
        "precision": {"50": falling, "50-95": [[value / 2 for value in own] for own in falling]},
    }


def numerics(epoch: int, layer: int) -> dict[str, Any]:
    return {
        **{"clip": 0.01 / 3**epoch, "saturated": 0.001, "deviation": 0.001 * (1 + layer) * (1 + epoch)},
        **{"learning_rate_factor": 1.0 - 0.05 * layer, "gaussian_share": None, "nonfinite": 0},
    }


def picture(epoch: int, layer: int) -> dict[str, Any]:
    def bell(bins: int, width: float) -> list[int]:
        return [round(10_000 * math.exp(-((((i - bins // 2) / bins) / width) ** 2))) for i in range(bins)]

    tail = 0.32 / (1 + epoch)
    channels = [{"channel": c, "tail": 0.35 - 0.1 * c, "edge": 1e-3, "counts": bell(61, 0.2 / (1 + c))} for c in range(4)]
    return {
        **{"epoch": epoch, "step": 23 * epoch, "layer": LAYERS[layer], "index": layer, "structure": "conv 3x3"},
        **{"shape": [64, 4, 8, 8], "max": 1e-3, "mean": 0.0, "std": 1e-4, "zeros": 0.0, "tail": tail},
        "linear": {"edge": 1e-3, "counts": bell(101, 0.2 / (1 + epoch))},
        "channels": {
            "count": 4,
            "gaussian_share": 0.25,
            "which": [0, 1, 2, 3],
            "tail": [0.35, 0.25, 0.15, 0.05],
            "histograms": channels,
        },
        "input": {"edge": 4.9, "counts": bell(101, 0.3)},
        "weight": {"edge": 0.4, "counts": bell(101, 0.3)},
    }


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.fixture
def make_run(tmp_path: Path) -> Writer:
    """make_run(name, recipes, seeds, **how) writes a run and returns its folder."""

    def make(name: str = "run", recipes: tuple[str, ...] = ("float32", "unified-int8"), seeds: int = 2, **how: Any) -> Path:
        for i, recipe in enumerate(recipes):
            for seed in range(seeds):
                member(tmp_path / name / f"recipe{i}" / f"seed{seed}", recipe, seed, **how)
        return tmp_path / name

    return make
