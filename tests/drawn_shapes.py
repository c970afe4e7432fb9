# SPDX-License-Identifier: Apache-2.0
"""A small data set for detectors, drawn on the fly: bright squares and dark discs on noise, in the layout of PASCAL VOC."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("disc", "square")


def draw(root: Path, train: int = 6, test: int = 3, size: tuple[int, int] = (96, 80), seed: int = 0) -> Path:
    """Writes the data set; `size` is (width, height)."""
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / part).mkdir(parents=True)
    names = [f"image{number}" for number in range(train + test)]
    for number, name in enumerate(names):
        _image(root, name, size, np.random.default_rng((seed, number)))
    (root / "ImageSets/Main/train.txt").write_text("\n".join(names[:train]) + "\n")
    (root / "ImageSets/Main/val.txt").write_text("\n".join(names[train:]) + "\n")
    return root


def _image(root: Path, name: str, size: tuple[int, int], random: np.random.Generator) -> None:
    width, height = size
    pixels = random.integers(100, 130, (height, width, 3), dtype=np.uint8)
    objects = []
    for half in range(2):  # one object in either half, so that none covers another
        side = int(random.integers(20, 32))
        x = half * width // 2 + int(random.integers(0, width // 2 - side))
        y = int(random.integers(0, height - side))
        label = CLASSES[int(random.integers(2))]
        rows, columns = np.mgrid[0:side, 0:side]
        inside = np.ones((side, side), bool) if label == "square" else np.hypot(rows - side / 2, columns - side / 2) < side / 2
        pixels[y : y + side, x : x + side][inside] = (250, 240, 60) if label == "square" else (20, 30, 90)
        objects.append((label, x, y, x + side, y + side))
    Image.fromarray(pixels).save(root / "JPEGImages" / f"{name}.png")
    (root / "Annotations" / f"{name}.xml").write_text(annotation(f"{name}.png", size, objects))


def annotation(file: str, size: tuple[int, int], objects: list[tuple[str, float, float, float, float]]) -> str:
    """The XML of an image."""
    entries = "".join(
        f"<object><name>{label}</name><bndbox><xmin>{a}</xmin><ymin>{b}</ymin><xmax>{c}</xmax><ymax>{d}</ymax></bndbox></object>"
        for label, a, b, c, d in objects
    )
    head = f"<filename>{file}</filename><size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    return f"<annotation>{head}{entries}</annotation>"
