# SPDX-License-Identifier: Apache-2.0
"""ResNets for small images.

`SmallResNet` is the network of He et al. (2015), section 4.2: three stages of 16, 32 and 64 channels with n blocks
each, 6n + 2 layers in all, so n = 3 is ResNet-20, n = 9 ResNet-56, and n = 1 the ResNet-8 of the digits demo. Its shortcuts
have no parameters (option A of the paper). torchvision does not have this network, and it does not need torchvision.
`resnet18` is torchvision's network with a stem of stride 1.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from byteback.torchvision_compat import load


class PadShortcut(nn.Module):
    """A shortcut without parameters: every other pixel, and zeros for the channels that the stage adds."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.before = new_channels // 2
        self.after = new_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        # A pool of single pixels is x[:, :, ::2, ::2], but its gradient is channels_last if x is.
        return F.pad(F.avg_pool2d(x, 1, 2), (0, 0, 0, 0, self.before, self.after))


class SmallBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, channels, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        # Two modules, not one used twice: a conversion may add separate state to each.
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3(channels, channels)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity() if stride == 1 else PadShortcut(channels - in_channels)
        self.relu2 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: Tensor = self.relu2(y + self.shortcut(x))
        return out


class SmallResNet(nn.Module):
    """The ResNet of 6 x `blocks` + 2 layers for images of 8 to 32 pixels; names follow torchvision's ResNet."""

    def __init__(self, blocks: int, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, 16)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(16, 16, blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(self.flatten(self.avgpool(x)))
        return logits


def resnet18(num_classes: int) -> nn.Module:
    """Builds torchvision's ResNet-18 with a 3x3 stem of stride 1 and no max-pool; the last stage has 4x4 pixels."""
    models = load().models
    model: nn.Module = models.ResNet(models.resnet.BasicBlock, [2, 2, 2, 2], num_classes=num_classes)
    model.conv1 = _conv3x3(3, 64)
    model.maxpool = nn.Identity()
    return model


def _stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = SmallBlock(in_channels, channels, stride)
    return nn.Sequential(first, *(SmallBlock(channels, channels, stride=1) for _ in range(blocks - 1)))


def _conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
    # fan_out, as in torchvision's ResNet: it preserves the magnitude of the gradients.
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
