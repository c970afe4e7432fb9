# SPDX-License-Identifier: Apache-2.0
"""VGG-16, with and without batch norm, for 32x32 images: torchvision's features, and a single linear layer as the head.

Five max-pools reduce 32x32 to 1x1, so the 512 features are the input of the head. torchvision's head of three layers is for
7x7 feature maps and has 120 million parameters; the VGG class is not used, because it would build that head.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from byteback.torchvision_compat import load


def vgg16_bn(num_classes: int) -> nn.Module:
    """Builds torchvision's vgg16_bn features and one linear layer, initialized as in torchvision."""
    return _vgg16(num_classes, batch_norm=True)


def vgg16(num_classes: int) -> nn.Module:
    """Builds the same network without batch norm."""
    return _vgg16(num_classes, batch_norm=False)


def _vgg16(num_classes: int, batch_norm: bool) -> nn.Module:
    vgg = load().models.vgg
    features: nn.Sequential = vgg.make_layers(vgg.cfgs["D"], batch_norm=batch_norm)
    classifier = nn.Linear(512, num_classes)
    for layer in features:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    nn.init.normal_(classifier.weight, 0.0, 0.01)
    nn.init.zeros_(classifier.bias)
    return nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier))
