# SPDX-License-Identifier: Apache-2.0
"""Networks that classify clips [N, C, T, H, W]: our small R3D, torchvision's, and tsn:NAME, an image network over frames."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from byteback.models.small_r3d import SmallR3D
from byteback.suggestions import unknown
from byteback.torchvision_compat import load

SMALL, TSN = "r3d_8", "tsn:"


class TemporalSegments(nn.Module):
    """The logits of a network for images, averaged over the frames of a clip (Wang et al., 2016). It cannot see their order."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, clips: Tensor) -> Tensor:
        # Frames become images; where the clips are channels last this copies nothing.
        images = clips.transpose(1, 2).flatten(0, 1)
        logits: Tensor = self.network(images).unflatten(0, (clips.shape[0], clips.shape[2])).mean(dim=1)
        return logits


def names() -> list[str]:
    """Ours and torchvision's networks for video."""
    vision = load().models
    return [SMALL, *vision.list_models(module=vision.video)]


def build(name: str, classes: int, channels: int, build_image: Callable[[str], nn.Module]) -> nn.Module:
    """The untrained network; `build_image` builds one for single frames by its name."""
    if name.startswith(TSN):
        return TemporalSegments(build_image(name.removeprefix(TSN)))
    if name == SMALL:
        return SmallR3D(classes, channels)
    known = names()
    if name not in known:
        raise unknown("train", "model for video", name, known, f"{TSN}NAME runs a network for images over the frames.")
    model: nn.Module = load().models.get_model(name, weights=None, num_classes=classes)
    return model
