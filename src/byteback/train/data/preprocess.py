# SPDX-License-Identifier: Apache-2.0
"""How an image or a clip becomes the input of a network: the same steps as for the test images, as data.

pixels   small images: a border of zeros, (x - mean) / std of the values 0 to `white`
photo    images of a folder: the shorter side is resized, the center is cropped
clip     clips: frames are chosen, then as for photos
detect   images with boxes: values 0 to 1; the detector resizes them
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from byteback.train.data import pictures

PHOTO_MEAN, PHOTO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
CLIP_MEAN, CLIP_STD = (0.43216, 0.394666, 0.37645), (0.22803, 0.22145, 0.216989)  # Kinetics', as torchvision's networks use


@dataclass(frozen=True)
class Preprocess:
    """Makes a float tensor (C, H, W), or (C, T, H, W) for a clip, of a file, a PIL image, or an array or tensor of uint8."""

    kind: str
    size: int
    channels: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    border: int = 0
    white: float = 255.0
    frames: int = 0
    stride: int = 1
    network_channels: int = 0  # of the network: a grey image is repeated; 0 for no change

    def as_data(self) -> dict[str, Any]:
        """Returns plain data, which `from_data` reads."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_data(data: dict[str, Any]) -> Preprocess:
        """Returns the object that `as_data` described."""
        made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return Preprocess(**made)

    def transform(self) -> Any:
        """Returns the transform of torchvision for a photo (a PIL image), or for the frames of a clip (T, C, H, W)."""
        from torchvision.transforms import v2

        shorter = round(self.size * (256 / 224 if self.kind == "photo" else 128 / 112))
        made = [v2.ToImage()] if self.kind == "photo" else []
        end = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(self.mean), list(self.std))]
        return v2.Compose([v2.Resize(shorter, antialias=True), v2.CenterCrop(self.size), *made, *end])

    def __call__(self, image: Any) -> Tensor:
        """Returns the input of the network for one image or clip, without a batch axis."""
        made = self._made(image)
        return made if made.shape[0] >= self.network_channels else made.expand(self.network_channels, *made.shape[1:])

    def _made(self, image: Any) -> Tensor:
        if self.kind == "none":
            raise ValueError(
                "preprocess: it is unknown how the network's images were made: its data set has no image files, or the "
                "checkpoint is of an earlier version. Make the input yourself."
            )
        if self.kind == "clip":
            return self._clip(image)
        if self.kind == "photo":
            photo: Tensor = self.transform()(_opened(image, self.channels)).as_subclass(Tensor)
            return photo
        pixels = torch.from_numpy(np.array(_opened(image, self.channels)))
        pixels = pixels.reshape(*pixels.shape[:2], self.channels)
        if self.kind == "detect":
            return pixels.permute(2, 0, 1).float().div_(255.0)
        return self._small(image, pixels)

    def _small(self, image: Any, pixels: Tensor) -> Tensor:
        inner = self.size - 2 * self.border
        if tuple(pixels.shape[:2]) not in ((inner, inner), (self.size, self.size)):
            resized = _opened(image, self.channels).resize((inner, inner))
            pixels = torch.from_numpy(np.array(resized)).reshape(inner, inner, self.channels)
        if pixels.shape[0] == inner and self.border:
            pixels = torch.nn.functional.pad(pixels, (0, 0, *(self.border,) * 4))
        scale = 1.0 / torch.tensor(self.std, dtype=torch.float32)
        shift = -torch.tensor(self.mean, dtype=torch.float32) * scale
        values = pixels.float() if self.white == 255.0 else (pixels.float() * (self.white / 255.0)).round_()
        return values.mul_(scale).add_(shift).permute(2, 0, 1).contiguous()

    def _clip(self, clip: Any) -> Tensor:
        from byteback.train.data import clip_files

        frames = clip_files.read(Path(clip), self.frames, self.stride, None) if isinstance(clip, (str, Path)) else clip
        made: Tensor = self.transform()(torch.as_tensor(np.asarray(frames)).permute(0, 3, 1, 2))
        return made.transpose(0, 1)

    def batch(self, images: Sequence[Any]) -> Tensor:
        """Returns the input for several images."""
        return torch.stack([self(image) for image in images])


def _opened(image: Any, channels: int) -> Any:
    """Returns a PIL image with one or three channels."""
    from PIL import Image

    mode = "L" if channels == 1 else "RGB"
    if isinstance(image, (str, Path)):
        if not Path(image).is_file():
            raise ValueError(f"{image}: no such image.")
        opened = pictures.read(image)
        return opened if mode == "RGB" else opened.convert(mode)
    if isinstance(image, Image.Image):
        return image.convert(mode)
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise ValueError(
            f"preprocess: an image must be a file, a PIL image, or an array of uint8 (H, W, C), but got {array.dtype} of shape "
            f"{array.shape}. Convert it."
        )
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array).convert(mode)
