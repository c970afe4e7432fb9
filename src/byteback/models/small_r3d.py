# SPDX-License-Identifier: Apache-2.0
"""A small R3D for clips of small frames: like torchvision's r3d_18, but three stages of one block, and narrower.

Names follow torchvision's VideoResNet. The stem halves height and width and keeps all frames; the second and third stage halve
all three axes. It has eight layers, so it is to r3d_18 what resnet8 is to resnet18.
"""

from __future__ import annotations

from torch import Tensor, nn

WIDTHS = (32, 64, 128)


class SmallBlock3d(nn.Module):
    """Two 3x3x3 convolutions with a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3x3(in_channels, channels, stride)
        self.bn1 = nn.BatchNorm3d(channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3x3(channels, channels)
        self.bn2 = nn.BatchNorm3d(channels)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            convolution = nn.Conv3d(in_channels, channels, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm3d(channels))
        self.relu2 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: Tensor = self.relu2(y + self.downsample(x))
        return out


class SmallR3D(nn.Module):
    """Maps clips [N, C, T, H, W] to logits [N, num_classes]; T, H and W must be at least 4, 8 and 8."""

    def __init__(self, num_classes: int, in_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(in_channels, WIDTHS[0], 3, stride=(1, 2, 2), padding=1, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.bn1 = nn.BatchNorm3d(WIDTHS[0])
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = SmallBlock3d(WIDTHS[0], WIDTHS[0], 1)
        self.layer2 = SmallBlock3d(WIDTHS[0], WIDTHS[1], 2)
        self.layer3 = SmallBlock3d(WIDTHS[1], WIDTHS[2], 2)
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(WIDTHS[2], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(self.flatten(self.avgpool(x)))
        return logits


def _conv3x3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv3d:
    conv = nn.Conv3d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
