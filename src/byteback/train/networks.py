# SPDX-License-Identifier: Apache-2.0
"""Builds networks by name: ours for small images, those of torchvision, and those of timm as timm:NAME.

Networks for video are in video_networks.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from byteback import models
from byteback.models import SMALL_IMAGE
from byteback.suggestions import unknown
from byteback.torchvision_compat import load
from byteback.train import video_networks

TIMM = "timm:"


def channels_for(name: str, channels: int) -> int:
    """Returns the input channels of a network for images of `channels`. torchvision's networks take 3, so grey is repeated."""
    name = name.removeprefix(video_networks.TSN)
    return channels if name.startswith(TIMM) or name in (*models.names(SMALL_IMAGE - 1), video_networks.SMALL) else 3


def build(name: str, image_size: int, classes: int, channels: int, frames: int = 0) -> nn.Module:
    """Builds the untrained network, for clips if `frames` is not 0."""
    if frames:
        return video_networks.build(name, classes, channels, lambda image: build(image, image_size, classes, channels))
    if name.startswith(TIMM):
        return _timm(name.removeprefix(TIMM), classes, channels)
    if image_size == SMALL_IMAGE and name not in models.names(SMALL_IMAGE):
        known = torchvision_names()
        if name not in known:
            raise unknown("train", "model", name, [*models.names(SMALL_IMAGE), *known], "`byteback models` lists all.")
        return models.torchvision_network(name, image_size, classes)
    return models.build(name, image_size, classes, channels)


def torchvision_names() -> list[str]:
    """Returns the names of torchvision's networks for image classification."""
    known: list[str] = load().models.list_models(module=load().models)
    return known


def check(name: str, image_size: int, classes: int, channels: int, frames: int = 0) -> int:
    """Builds the network and runs it on two inputs, so that mistakes show before training. Returns the number of parameters."""
    state = torch.get_rng_state()
    model = build(name, image_size, classes, channels, frames).eval()
    shape = (channels, frames, image_size, image_size) if frames else (channels, image_size, image_size)
    torch.set_rng_state(state)
    try:
        with torch.no_grad():
            output = model(torch.zeros(2, *shape))
    except Exception as error:  # networks raise different errors for a size that does not fit
        raise ValueError(
            f"train: {name} cannot take {'clips' if frames else 'images'} of {' x '.join(map(str, shape))}: {error}. Choose "
            f"another network, or larger images with --image-size{' or more --frames' if frames else ''}."
        ) from error
    if not isinstance(output, Tensor) or output.shape != (2, classes):
        got = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise ValueError(
            f"train: {name} returns {got} for two inputs, not logits (2, {classes}). Choose a network for classification."
        )
    return sum(parameter.numel() for parameter in model.parameters())


def timm() -> Any:
    """Returns the package timm, or None if it is not installed."""
    try:
        import timm as package
    except ImportError:
        return None
    return package


def _timm(name: str, classes: int, channels: int) -> nn.Module:
    package = timm()
    if package is None:
        raise ImportError(f"train: {TIMM}{name} needs timm, which is not installed. Install it: pip install timm", name="timm")
    known = package.list_models()
    if name.split(".")[0] not in known:
        raise unknown("train", "model of timm", name, known)
    model: nn.Module = package.create_model(name, pretrained=False, num_classes=classes, in_chans=channels)
    return model
