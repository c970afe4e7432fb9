# SPDX-License-Identifier: Apache-2.0
"""Networks that classify clips [N, C, T, H, W]: a small R3D, those of torchvision, and tsn:NAME for an image network."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from byteback.models.small_r3d import SmallR3D
from byteback.suggestions import unknown
from byteback.torchvision_compat import load

SMALL, TSN = "r3d_8", "tsn:"


class TemporalSegments(nn.Module):
    """Averages the logits of an image network over the frames of a clip (Wang et al., 2016). Their order has no effect."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, clips: Tensor) -> Tensor:
        # Frames become images; for clips in channels_last_3d this makes no copy.
        images = clips.transpose(1, 2).flatten(0, 1)
        logits: Tensor = self.network(images).unflatten(0, (clips.shape[0], clips.shape[2])).mean(dim=1)
        return logits


def names() -> list[str]:
    """Returns the names of the networks for video."""
    vision = load().models
    return [SMALL, *vision.list_models(module=vision.video)]


def build(name: str, classes: int, channels: int, build_image: Callable[[str], nn.Module]) -> nn.Module:
    """Builds the untrained network. `build_image` builds a network for single frames by its name."""
    if name.startswith(TSN):
        return TemporalSegments(build_image(name.removeprefix(TSN)))
    if name == SMALL:
        return SmallR3D(classes, channels)
    known = names()
    if name not in known:
        raise unknown("train", "model for video", name, known, f"{TSN}NAME runs an image network on every frame.")
    model: nn.Module = load().models.get_model(name, weights=None, num_classes=classes)
    return model
