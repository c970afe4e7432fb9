# SPDX-License-Identifier: Apache-2.0
"""The networks of the papers, by name: `build("resnet20")` and `names()`.

At 32x32 a name is the variant for small images of the papers (the files next to this one). At every other size it is the
network of torchvision with that name, untrained. The small ResNets resnet8, resnet20 and resnet56 also take smaller images,
down to 8x8, and any number of input channels.

Every classification network built here maps images [N, C, H, W] to one tensor of logits [N, num_classes].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from torch import nn

from byteback.models.alexnet import alexnet
from byteback.models.inception_v3 import inception_v3
from byteback.models.mobilenet_v2 import mobilenet_v2
from byteback.models.resnet import SmallResNet, resnet18
from byteback.models.vgg import vgg16, vgg16_bn
from byteback.suggestions import unknown
from byteback.torchvision_compat import load

__all__ = ["build", "names"]

SMALL_IMAGE = 32
MIN_IMAGE = 8  # after two strides the last stage of a small ResNet still has 2x2 pixels

_SMALL_RESNET_BLOCKS = {"resnet8": 1, "resnet20": 3, "resnet56": 9}
_VARIANTS: dict[str, Callable[[int], nn.Module]] = {
    "resnet18": resnet18,
    "mobilenet_v2": mobilenet_v2,
    "mobilenet_v2_x0_25": partial(mobilenet_v2, width=0.25),  # a quarter of the channels: for long runs on a CPU
    "vgg16": vgg16,
    "vgg16_bn": vgg16_bn,
    "inception_v3": inception_v3,
    "alexnet": alexnet,
}


def build(name: str, image_size: int = 32, num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Builds the untrained network `name` for square images of `image_size` pixels.

    >>> sum(p.numel() for p in build("resnet20").parameters())
    269722
    """
    known = names(image_size)
    if name not in known:
        raise _unknown(name, image_size, known)
    if num_classes < 1 or in_channels < 1:
        raise ValueError(
            f"byteback.models.build: num_classes is {num_classes} and in_channels is {in_channels} for {name}; both must be at "
            "least 1."
        )
    if name in _SMALL_RESNET_BLOCKS:
        return SmallResNet(_SMALL_RESNET_BLOCKS[name], num_classes, in_channels)
    if in_channels != 3:
        raise ValueError(
            f"byteback.models.build: in_channels is {in_channels}, but {name} is a network of torchvision, whose first layer "
            f"takes 3 channels. Repeat the channels, or use one of {', '.join(_SMALL_RESNET_BLOCKS)}."
        )
    return _VARIANTS[name](num_classes) if image_size == SMALL_IMAGE else torchvision_network(name, image_size, num_classes)


def names(image_size: int = 32) -> list[str]:
    """Returns the names of the networks for this image size, sorted."""
    if image_size < MIN_IMAGE:
        raise ValueError(
            f"byteback.models: image_size is {image_size}; it must be at least {MIN_IMAGE}, because of the strides of the "
            "networks. Enlarge the images."
        )
    if image_size < SMALL_IMAGE:
        return sorted(_SMALL_RESNET_BLOCKS)
    if image_size == SMALL_IMAGE:
        return sorted([*_SMALL_RESNET_BLOCKS, *_VARIANTS])
    # Quantized models are for inference only, and the optical flow networks have no classes.
    known: list[str] = load().models.list_models(exclude=["quantized_*", "raft_*"])
    return known


def _unknown(name: str, image_size: int, known: list[str]) -> ValueError:
    why = "It is not a network of torchvision."
    if name in _SMALL_RESNET_BLOCKS:
        why = f"It is for images of {MIN_IMAGE} to {SMALL_IMAGE} pixels, not {image_size}."
    elif image_size == SMALL_IMAGE:
        why = f"It has no variant for images of {image_size} pixels."
    elif image_size < SMALL_IMAGE:
        why = f"For images of {image_size} pixels there are only the small ResNets."
    return unknown("byteback.models.build", "network", name, known, why)


def torchvision_network(name: str, image_size: int, num_classes: int) -> nn.Module:
    """Builds the network of torchvision with that name, untrained, for images of any size."""
    models = load().models
    smallest = max(models.get_model_weights(name).DEFAULT.meta.get("min_size", (1, 1)))
    if image_size < smallest:
        raise ValueError(
            f"byteback.models.build: image_size {image_size} is too small for torchvision's {name}, which needs at least "
            f"{smallest}x{smallest} pixels. Enlarge the images, or use {SMALL_IMAGE}x{SMALL_IMAGE} pixels, for which there are "
            f"variants of {', '.join(_VARIANTS)}."
        )
    options: dict[str, object] = {}
    if name in ("inception_v3", "googlenet"):
        # With auxiliary heads the output would be a tuple in training. init_weights is the default, but torchvision warns if
        # it is not given.
        options = {"aux_logits": False, "init_weights": True}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None  # its default would download a trained backbone
    model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
    return model
