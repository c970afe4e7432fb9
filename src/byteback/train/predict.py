# SPDX-License-Identifier: Apache-2.0
"""`byteback predict RUN IMAGE...`: prints and saves the predictions of a trained network; boxes are drawn into the images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from torch import Tensor, nn

import byteback
from byteback.train import saved
from byteback.train.checkpoints import files

NAME = "predictions.json"
_BATCH = 32


@dataclass(frozen=True)
class PredictConfig:
    """Predict the classes of images or clips, or the boxes in images, with a trained network."""

    run: tyro.conf.Positional[str]
    """Folder of a run or of a member, best.safetensors, or a checkpoint."""
    images: tyro.conf.Positional[tuple[str, ...]]
    """Image files (or clips: videos, or folders of frames)."""
    output_dir: str = "predictions"
    """Folder for predictions.json, and for the images with boxes."""
    top: int = 3
    """How many classes to print for an image."""
    least_score: float = 0.5
    """Boxes below this score are left out."""
    float32: bool = False
    """Run in float32 instead of in int8."""
    threads: int | None = None
    """Number of CPU threads. Default: chosen by PyTorch."""


def run(config: PredictConfig, console: Console) -> None:
    """Runs the command."""
    if not config.images:
        raise ValueError("predict: there is no image. Give one or more files after the run.")
    if config.top < 1:
        raise ValueError(f"predict: --top is {config.top}; it must be at least 1.")
    if config.threads:
        torch.set_num_threads(config.threads)
    model = saved.load(config.run, "float" if config.float32 else "int8")
    about: Any = model.byteback
    inputs = [about.preprocess(image) for image in config.images]  # a file that cannot be read is an error before any output
    if about.variant != "float32" and not config.float32:
        byteback.freeze(model)
    folder = Path(config.output_dir)
    files.make_folder(folder, "predict")
    if about.task == "detect":
        rows = _boxes(model, inputs, config, about.classes, folder)
    else:
        rows = _scores(model, inputs, config, about.classes)
    for row in rows:
        console.print(_line(row), highlight=False, markup=False)
    files.replace(folder / NAME, json.dumps({"model": str(about.path), "predictions": rows}, indent=1).encode())
    console.print(f"\nSaved in {folder}", highlight=False)


@torch.no_grad()
def _scores(model: nn.Module, inputs: Sequence[Tensor], config: PredictConfig, classes: Sequence[str]) -> list[dict[str, Any]]:
    logits = torch.cat([model(torch.stack(list(inputs[start : start + _BATCH]))) for start in range(0, len(inputs), _BATCH)])
    scores, order = logits.softmax(1).topk(min(config.top, len(classes)))
    rows = []
    for image, numbers, values in zip(config.images, order.tolist(), scores.tolist(), strict=True):
        found = [{"class": classes[number], "score": round(value, 6)} for number, value in zip(numbers, values, strict=True)]
        rows.append({"image": image, "classes": found})
    return rows


@torch.no_grad()
def _boxes(
    model: nn.Module, inputs: Sequence[Tensor], config: PredictConfig, classes: Sequence[str], folder: Path
) -> list[dict[str, Any]]:
    rows = []
    for name, image in zip(config.images, inputs, strict=True):
        found = model([image])[0]
        kept = found["scores"] >= config.least_score
        boxes, labels, scores = (found[key][kept] for key in ("boxes", "labels", "scores"))
        names = [classes[label - 1] for label in labels.tolist()]  # 0 is the background
        drawn = folder / f"{Path(name).stem}-boxes.png"
        _draw(image, boxes, [f"{label} {score:.2f}" for label, score in zip(names, scores.tolist(), strict=True)], drawn)
        listed = zip(names, scores.tolist(), boxes.tolist(), strict=True)
        rows.append(
            {
                **{"image": name, "drawn": str(drawn)},
                "boxes": [
                    {"class": label, "score": round(score, 6), "box": [round(side, 2) for side in box]}
                    for label, score, box in listed
                ],
            }
        )
    return rows


def _draw(image: Tensor, boxes: Tensor, labels: list[str], path: Path) -> None:
    """Writes the image with its boxes."""
    import io

    from torchvision.transforms.v2.functional import to_pil_image
    from torchvision.utils import draw_bounding_boxes

    pixels = (image * 255.0).round().to(torch.uint8)
    drawn = draw_bounding_boxes(pixels, boxes, labels, width=2) if len(boxes) else pixels
    buffer = io.BytesIO()
    to_pil_image(drawn).save(buffer, "PNG")
    files.replace(path, buffer.getvalue())


def _line(row: dict[str, Any]) -> str:
    if "boxes" in row:
        found = [f"{box['class']} {box['score']:.0%}" for box in row["boxes"]]
        return f"{row['image']}: " + (", ".join(found) if found else "nothing")
    return f"{row['image']}: " + ", ".join(f"{item['class']} {item['score']:.1%}" for item in row["classes"])
