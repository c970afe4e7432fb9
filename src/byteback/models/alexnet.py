# SPDX-License-Identifier: Apache-2.0
"""AlexNet for 32x32 images: torchvision's network with a smaller stem, smaller pools and a smaller first linear layer.

A 3x3 stem of stride 2 and three 2x2 max-pools reduce 32x32 to 2x2 pixels. With torchvision's 11x11 stem of stride 4 no pixels
would be left. The widths are those of the original.
"""

from __future__ import annotations

from torch import nn

from byteback.torchvision_compat import load


def alexnet(num_classes: int) -> nn.Module:
    """Builds torchvision's AlexNet with a classifier for 2x2 pixels of 256 channels."""
    model = load().models.AlexNet(num_classes=num_classes)
    model.features[0] = nn.Conv2d(3, 64, kernel_size=3, stride=2, padding=1)
    model.features[3] = nn.Conv2d(64, 192, kernel_size=3, padding=1)
    for index, layer in enumerate(model.features):
        if isinstance(layer, nn.MaxPool2d):
            model.features[index] = nn.MaxPool2d(kernel_size=2, stride=2)
    model.avgpool = nn.Identity()
    model.classifier[1] = nn.Linear(256 * 2 * 2, 4096)
    network: nn.Module = model
    return network
