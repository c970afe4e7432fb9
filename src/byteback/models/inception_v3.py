# SPDX-License-Identifier: Apache-2.0
"""Inception-v3 for 32x32 images: torchvision's network with a stem that halves the image once instead of three times.

The convolutions of the stem are padded and have stride 1, and only the first of its two max-pools remains. The first Inception
blocks have 16x16 pixels, the middle ones 7x7 and the last ones 3x3. There is no auxiliary head.
"""

from __future__ import annotations

from torch import nn

from byteback.torchvision_compat import load


def inception_v3(num_classes: int) -> nn.Module:
    """Builds torchvision's Inception3 with 16x16 pixels in the A blocks."""
    models = load().models
    blocks = models.inception
    # torchvision builds only the stem from the first entry of this list.
    parts = [_stem_conv, *(getattr(blocks, f"Inception{kind}") for kind in ("A", "B", "C", "D", "E", "Aux"))]
    model: nn.Module = models.Inception3(num_classes, aux_logits=False, inception_blocks=parts, init_weights=True)
    model.maxpool1 = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
    model.maxpool2 = nn.Identity()
    return model


def _stem_conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0) -> nn.Module:
    """Builds torchvision's convolution block with a stride and padding that keep the size."""
    block = load().models.inception.BasicConv2d
    conv: nn.Module = block(in_channels, out_channels, kernel_size=kernel_size, stride=1, padding=kernel_size // 2)
    return conv
