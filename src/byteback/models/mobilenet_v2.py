# SPDX-License-Identifier: Apache-2.0
"""MobileNetV2 for 32x32 images: torchvision's network with a total stride of 8 instead of 32.

The stem and the second stage have stride 1, as is usual for CIFAR; otherwise the last stages would have a single pixel. The
layers have the same shapes as in the ImageNet network, except the head.
"""

from __future__ import annotations

from torch import nn

from byteback.torchvision_compat import load

# Per stage: expansion, channels, blocks, stride of the first block. Only the stride of the 24-channel stage is changed.
_STAGES = [
    [1, 16, 1, 1],
    [6, 24, 2, 1],
    [6, 32, 3, 2],
    [6, 64, 4, 2],
    [6, 96, 3, 1],
    [6, 160, 3, 2],
    [6, 320, 1, 1],
]


def mobilenet_v2(num_classes: int, width: float = 1.0) -> nn.Module:
    """Builds torchvision's MobileNetV2 with 4x4 pixels in the last stage; `width` multiplies its channels."""
    model = load().models.MobileNetV2(num_classes=num_classes, width_mult=width, inverted_residual_setting=_STAGES)
    # torchvision has no argument for the stride of the stem; changing it in place keeps its initialization.
    model.features[0][0].stride = (1, 1)
    network: nn.Module = model
    return network
