# SPDX-License-Identifier: Apache-2.0
"""Reads an image file as RGB with 8 bits per channel, or says what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


class Unreadable(ValueError):
    """A file that is not an image that can be read. The message names it."""


def read(path: Path | str) -> Any:
    """Returns the image as a PIL.Image in mode RGB. Raises Unreadable if that is impossible."""
    return _opened(path, _as_rgb)


def problem(path: Path | str) -> str:
    """Returns what is wrong with an image file, or "". All of it is decoded, JPEGs at an eighth of their size."""
    if Path(path).exists() and not Path(path).is_file():
        return f"{path} cannot be read as an image: it is not a file."  # a pipe would wait for a writer
    try:
        _opened(path, _decoded)
    except Unreadable as error:
        return str(error)
    return ""


def _opened(path: Path | str, use: Any) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return use(image)
    except Image.DecompressionBombError as error:
        raise Unreadable(
            f"{path} is larger than Pillow reads: {error} Make the image smaller, or remove it before training."
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError, OverflowError, MemoryError) as error:  # SyntaxError: a broken PNG
        raise Unreadable(f"{path} cannot be read as an image: {error}.") from error


def _decoded(image: Any) -> None:
    image.draft("RGB", (image.width // 8, image.height // 8))  # only JPEG does this
    image.load()
    _refuse_floats(image)


def _as_rgb(image: Any) -> Any:
    """Converts to RGB. Pillow's `convert` would set every 16-bit value above 255 to white."""
    from PIL import Image

    _refuse_floats(image)
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64) >> 8  # 16 bits, also in mode "I", which holds 32
        image = Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
    return image.convert("RGB")


def _refuse_floats(image: Any) -> None:
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range is unknown")
