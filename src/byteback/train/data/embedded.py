# SPDX-License-Identifier: Apache-2.0
"""The handwritten digits of scikit-learn: 1797 images of 8x8 pixels, or enlarged. They need no download."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from byteback.train.data.preprocess import Preprocess
from byteback.train.data.source import Data, InMemory

_SIZE = 8


def digits(image_size: int = _SIZE) -> Data:
    """Loads the digits. Every fifth image is a test image. There is no augmentation: a mirrored digit is not that digit.

    Networks for 8x8 pixels train in seconds, but are too small to show the speed of the kernels; enlarged images do.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "byteback train: the digits are part of scikit-learn, which is not installed. "
            "Install it with the other packages of the trainer: pip install 'byteback[train]'."
        ) from error
    raw = load_digits()
    images = torch.from_numpy(raw.images).to(torch.uint8).unsqueeze(3)  # (1797, 8, 8, 1), values 0 to 16
    if image_size != _SIZE:
        images = _enlarged(images, image_size)
    labels = torch.from_numpy(raw.target).long()
    test = torch.arange(len(labels)) % 5 == 0
    values = images[~test].float()
    mean, std = [float(values.mean())], [float(values.std())]
    return Data(
        *("digits", 10, image_size, 1),
        InMemory(images[~test], labels[~test], mean, std),
        InMemory(images[test], labels[test], mean, std),
        preprocess=Preprocess("pixels", image_size, 1, tuple(mean), tuple(std), white=16.0 if image_size == _SIZE else 240.0),
    )


def _enlarged(images: Tensor, size: int) -> Tensor:
    """Enlarges to (N, size, size, C) uint8. Values are multiplied by 15, so that interpolated values are not rounded away."""
    pixels = images.permute(0, 3, 1, 2).float() * 15.0
    pixels = F.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False)
    return pixels.round_().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
