# SPDX-License-Identifier: Apache-2.0
"""The networks of the papers, by name: `build("resnet20")` and `names()`.

At 32x32 a name gives the variant for small images that the papers train (the files next to this one). At every
other size it gives torchvision's network of that name, untrained. The hand-written small ResNets, resnet8, resnet20 and
resnet56, also take smaller images, down to 8x8, and any number of input channels.

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
MIN_IMAGE = 8  # two halvings then still leave the last stage of a small ResNet 2x2 pixels to average

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
    """The untrained network `name` for square images of `image_size` pixels.

    >>> sum(p.numel() for p in build("resnet20").parameters())
    269722
    """
    known = names(image_size)
    if name not in known:
        raise _unknown(name, image_size, known)
    if num_classes < 1 or in_channels < 1:
        raise ValueError(
            f"byteback.models.build: {name} was asked for {num_classes} classes and {in_channels} input channels; "
            "a network has at least one of each. Pass positive numbers."
        )
    if name in _SMALL_RESNET_BLOCKS:
        return SmallResNet(_SMALL_RESNET_BLOCKS[name], num_classes, in_channels)
    if in_channels != 3:
        raise ValueError(
            f"byteback.models.build: {name} was asked for {in_channels} input channels; it is torchvision's network, "
            f"whose first layer takes 3. Repeat the channels to 3, or use one of {', '.join(_SMALL_RESNET_BLOCKS)}."
        )
    return _VARIANTS[name](num_classes) if image_size == SMALL_IMAGE else torchvision_network(name, image_size, num_classes)


def names(image_size: int = 32) -> list[str]:
    """The names `build` knows at this image size, sorted."""
    if image_size < MIN_IMAGE:
        raise ValueError(
            f"byteback.models: image_size is {image_size}; below {MIN_IMAGE}x{MIN_IMAGE} nothing is left of an image "
            "after the strides of a network. Enlarge the images."
        )
    if image_size < SMALL_IMAGE:
        return sorted(_SMALL_RESNET_BLOCKS)
    if image_size == SMALL_IMAGE:
        return sorted([*_SMALL_RESNET_BLOCKS, *_VARIANTS])
    # Quantized models are inference only, and the optical flow networks have no classes.
    known: list[str] = load().models.list_models(exclude=["quantized_*", "raft_*"])
    return known


def _unknown(name: str, image_size: int, known: list[str]) -> ValueError:
    why = "it is no network of torchvision"
    if name in _SMALL_RESNET_BLOCKS:
        why = f"it is built for images of {MIN_IMAGE} to {SMALL_IMAGE} pixels"
    elif image_size == SMALL_IMAGE:
        why = "it has no variant for such small images"
    elif image_size < SMALL_IMAGE:
        why = "only the small ResNets take images that small"
    return unknown("byteback.models.build", "network", name, known, f"At image size {image_size} {why}.")


def torchvision_network(name: str, image_size: int, num_classes: int) -> nn.Module:
    """torchvision's own network of that name, untrained, whatever the size of the images."""
    models = load().models
    smallest = max(models.get_model_weights(name).DEFAULT.meta.get("min_size", (1, 1)))
    if image_size < smallest:
        raise ValueError(
            f"byteback.models.build: image_size {image_size} is too small for torchvision's {name}, whose strides need "
            f"{smallest}x{smallest} pixels or more. Enlarge the images, or use {SMALL_IMAGE}x{SMALL_IMAGE} ones, for "
            f"which there are variants of {', '.join(_VARIANTS)}."
        )
    options: dict[str, object] = {}
    if name in ("inception_v3", "googlenet"):
        # The auxiliary heads would turn the output into a tuple in training; the initialization is torchvision's own,
        # said aloud because it warns otherwise.
        options = {"aux_logits": False, "init_weights": True}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None  # its default would download a trained backbone
    model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
    return model
