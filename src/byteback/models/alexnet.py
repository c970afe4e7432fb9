# SPDX-License-Identifier: Apache-2.0
"""AlexNet for 32x32 images: torchvision's network with the stem, pools and first linear layer made smaller.

A 3x3 stem of stride 2 and three 2x2 max-pools take 32x32 to 2x2, where torchvision's 11x11 stem of stride 4 would
leave nothing to pool. The widths are the original's.
"""

from __future__ import annotations

from torch import nn

from byteback.torchvision_compat import load


def alexnet(num_classes: int) -> nn.Module:
    """torchvision's AlexNet whose classifier reads 2x2 pixels of 256 channels."""
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
