# SPDX-License-Identifier: Apache-2.0
"""What a task loads and builds, for the trainer and for `eval`. Only this file depends on --task."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from byteback.recipes import Recipe
from byteback.train import data, layout, loop, networks, weights
from byteback.train.config import TrainConfig
from byteback.train.data import Data, Part
from byteback.train.detect import metrics, source
from byteback.train.detect import run as detect
from byteback.train.interrupt import Stop
from byteback.train.ranks.world import World

SCORES = {"classify": "accuracy", "video": "accuracy", "detect": "mAP"}  # the name of the score of each task


def load(config: TrainConfig) -> Data:
    """Loads the data set, or the part of it that --train-images selects."""
    images, asked = _load(config), config.train_images
    if asked is None or asked == len(images.train):
        return images
    if asked > len(images.train):
        raise ValueError(
            f"train: --train-images is {asked}, but {config.data} has {len(images.train)} for training. Use a smaller number, "
            "or remove the flag to use all."
        )
    return replace(images, train=Part(images.train, asked))


def _load(config: TrainConfig) -> Data:
    assert config.image_size and config.frames  # complete() filled them in
    if config.task == "detect":
        metrics.pycocotools()  # if it is missing, fail now and not after the first epoch
        return source.load(config.data, config.image_size, config.augment, config.workers, config.skip_bad_images)
    return data.load(
        *(config.data, config.data_path),
        image_size=config.image_size,
        augment=config.augment,
        download=config.download,
        workers=config.workers,
        frames=config.frames,
        frame_stride=config.frame_stride,
        skip_bad_images=config.skip_bad_images,
    )


def check(config: TrainConfig, images: Data) -> int:
    """Builds the network for every recipe, so that mistakes show before training. Returns the number of parameters."""
    assert config.model
    if images.image_size != config.image_size:
        raise ValueError(
            f"train: {config.data} has images of {images.image_size}x{images.image_size} pixels, which are not resized. Remove "
            f"--image-size {config.image_size}."
        )
    if len(images.train) < 2:
        raise ValueError(f"train: {config.data} has {len(images.train)} image for training; BatchNorm needs at least two.")
    random = torch.get_rng_state()
    begun = config.resume is not None
    if config.task == "detect":
        parameters = sum(parameter.numel() for parameter in build(config, None, images, begun).parameters())
    else:
        channels = networks.channels_for(config.model, images.channels)
        parameters = networks.check(config.model, images.image_size, images.classes, channels, images.frames)
    for variant in config.variants():
        if variant.recipe is not None or config.weights or config.freeze:
            weights.freeze(build(config, variant.recipe, images, begun), config.freeze)
    torch.set_rng_state(random)
    return parameters


def build(config: TrainConfig, recipe: Recipe | None, images: Data, begun: bool) -> nn.Module:
    """Builds the network. If `begun`, the weights of a checkpoint are loaded into it afterwards."""
    assert config.model
    if config.task == "detect":
        return detect.build(config, recipe, images.classes, begun)
    return loop.build(config, recipe, images, networks.channels_for(config.model, images.channels), begun)


def fresh_layers(config: TrainConfig, images: Data) -> list[str]:
    """Returns the layers that --weights does not fill."""
    assert config.model and config.weights
    network = build(replace(config, weights=None), None, images, begun=False)
    return weights.fit(network, weights.read(config.weights, config.model), config.weights, images.classes)


def train(config: TrainConfig, member: loop.Member, images: Data, listener: loop.Listener, stop: Stop, world: World) -> None:
    """Trains a member to its end, from its checkpoint if it has one. Saves and raises Stopped when interrupted."""
    begin = detect.train if config.task == "detect" else loop.train
    begin(config, member, images, listener, stop, world)


def tested(config: TrainConfig, model: nn.Module, images: Data, channels: int) -> str:
    """Tests a network on the test images. Returns the scores as text."""
    if isinstance(images, source.DetectData):
        return str(detect.test(model, images))

    def as_asked(x: torch.Tensor) -> torch.Tensor:
        return layout.as_asked(x, channels, config.channels_last)

    accuracy, loss = loop.test(model, images.test, as_asked, frames=images.frames)
    return f"accuracy {accuracy:.2%}, loss {loss:.4f}"
