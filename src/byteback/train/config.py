# SPDX-License-Identifier: Apache-2.0
"""TrainConfig: the single source of the command line's flags, of what a TOML file may say, and of the defaults.

A field that is None depends on the data set; `complete` fills it in. `config_file.py` reads and writes TOML.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from byteback.train.variants import FLOAT, Variant, parse

# What a data set brings along where the user says nothing: model, epochs, batch size, image size.
_VIDEO: dict[str, tuple[str, int, int, int]] = {
    "moving-items": ("r3d_8", 4, 32, 32),
    "frames": ("r3d_18", 30, 8, 112),
    "clips": ("r3d_18", 30, 8, 112),
}
_DEFAULTS: dict[str, tuple[str, int, int, int]] = {
    **_VIDEO,
    "digits": ("resnet8", 12, 64, 8),
    "cifar10": ("resnet20", 15, 128, 32),
    "cifar100": ("resnet20", 15, 128, 32),
    "fashion-mnist": ("resnet20", 10, 128, 32),
    "folder": ("resnet18", 30, 64, 224),
    "voc": ("retinanet_resnet50_fpn", 24, 4, 320),
    "coco": ("retinanet_resnet50_fpn", 24, 4, 320),
}
# What a task brings along: learning rate, epochs of warm-up, bound of the gradient's norm.
_DETECTION = ("voc", "coco")
_SCHEDULES: dict[str, tuple[float, float, float]] = {
    "classify": (0.1, 0.0, 0.0),
    "video": (0.1, 0.0, 0.0),
    "detect": (0.02, 1.0, 2.0),
}


@dataclass(frozen=True)
class TrainConfig:
    """Train a network in float32 and in int8, with the same seeds and the same data in the same order, and compare them.

    Without any flag: a small ResNet on handwritten digits, in a quarter of a minute.
    """

    task: Literal["classify", "detect", "video"] = "classify"
    """What is learnt: the class of an image, boxes around objects (docs/7-detection.md), or the class of a clip
    (docs/8-video.md)."""
    model: str | None = None
    """A network by name (`byteback models` lists them). Default: resnet8 for digits, resnet18 for folders, else resnet20;
    r3d_8 for moving-items, r3d_18 for other clips; retinanet_resnet50_fpn for boxes."""
    data: str = "digits"
    """digits, cifar10, cifar100, fashion-mnist, or folder:PATH with PATH/train/CLASS/IMAGE and PATH/val/CLASS/IMAGE.
    Detection: voc:PATH or coco:PATH. Video: moving-items, frames:PATH with PATH/CLASS/CLIP/FRAME.png, or clips:PATH with
    PATH/CLASS/CLIP.mp4 or PATH/labels.csv."""
    data_path: str | None = None
    """Where the data sets lie. Default: $BYTEBACK_DATA, else ./data."""
    backbone: str | None = None
    """Of a detector: resnet18, resnet50 or mobilenet_v3_large. Default: the one in its name."""
    backbone_checkpoint: str | None = None
    """Weights of a classifier to begin a detector's backbone with; its norms are then frozen. Default: from nothing."""
    anchor_size: int | None = None
    """Side in pixels of the smallest anchors of RetinaNet and Faster R-CNN; those of every further level are twice as large.
    Default: 32, torchvision's, which fits images of 800 pixels."""
    box_samples: int | None = None
    """Proposals of an image that Faster R-CNN's second stage is trained on. Default: 512, torchvision's: most of a step
    of small images."""
    keep_float: tuple[str, ...] = ()
    """Wildcards of layers that stay float. Default: a detector's predictors; "none" for none."""
    recipe: tuple[str, ...] = (FLOAT, "unified-int8", "distribution-adaptive-int8")
    """What to compare, in this order (`byteback recipes` lists them). Fields change by NAME:field=value,field=value."""
    seed: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--seeds"])] = (0,)
    """Seeds of weights, data order, augmentation and rounding noise; every recipe trains once with each."""
    epochs: int | None = None
    """Passes over the training images. Default: 12 for digits, 10 for fashion-mnist, 15 for cifar, 30 for folders."""
    batch_size: int | None = None
    """Images per step. Default: 64 for digits and folders, else 128."""
    lr: float | None = None
    """Learning rate of SGD at the start of the schedule. Default: 0.1, for detection 0.02."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 1e-4
    """Weight decay of SGD."""
    lr_schedule: Literal["cosine", "step", "linear", "constant"] = "cosine"
    """How the learning rate falls: to zero along a cosine or a line, in steps, or not at all."""
    lr_step_size: int = 30
    """Epochs between two steps of the schedule "step"."""
    lr_gamma: float = 0.1
    """What such a step multiplies the learning rate with."""
    warmup_epochs: float | None = None
    """Epochs in which the learning rate first grows from zero; parts of one are fine. Default: 0, for detection 1."""
    clip_grad_norm: float | None = None
    """Longer gradients of a step, all parameters together, are shortened to this; 0: never. Default: 0, for detection 2."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""
    augment: bool = True
    """Customary augmentation: padded crops and flips for small images, resized crops and flips for folders, zoom and flips
    for detection, none for digits."""
    image_size: int | None = None
    """Pixels per side of the images of a folder; of the shorter side for detection; digits are enlarged to it. Default: 224;
    320 for detection, 112 for clips, 32 for moving-items, 8 for digits."""
    train_images: int | None = None
    """Train on so many images (or clips) only, spread evenly over the data set, for a first look. Default: all of them."""
    frames: int | None = None
    """Frames of a clip. Default: 8 for moving-items, else 16."""
    frame_stride: int = 1
    """Take every such frame of a clip on disk."""
    download: bool = True
    """Download a data set that is not there."""
    workers: int = 2
    """Processes that read a folder's images; data sets in memory need none."""
    threads: int | None = None
    """Threads for computing. Default: as many as PyTorch chooses."""
    channels_last: bool = True
    """Keep images and weights in the memory format channels_last, which int8 kernels read."""
    output_dir: str | None = None
    """Folder of the run. Default: runs/DATA-MODEL, with a number behind it when there is one already."""
    resume: str | None = None
    """Go on with the run in this folder, bit for bit; finished members are skipped, new seeds and recipes may join."""
    test_only: bool = False
    """Train nothing: test the checkpoints of the run named by --resume."""
    config: str | None = None
    """A TOML file with the names of these flags; flags given besides it win."""
    log_every: int = 50
    """Steps between two records in metrics.jsonl."""
    checkpoint_seconds: float = 60.0
    """Seconds between two checkpoints within an epoch; there is one at the end of every epoch in any case."""
    histogram_every: int = 1
    """Epochs between two looks at the gradients for histograms.jsonl; 0 for none."""
    tensorboard: bool = True
    """Write TensorBoard's event files, where tensorboard is installed."""
    recipes: Annotated[dict[str, dict[str, Any]], tyro.conf.Fixed, tyro.conf.Suppress] = field(default_factory=dict)
    """Recipes that a TOML file defines in tables [recipes.NAME]; each says its `base` and what differs."""

    def __post_init__(self) -> None:
        _check(self)
        self.variants()

    def variants(self) -> list[Variant]:
        """What `recipe` names."""
        return [parse(spec, self.recipes) for spec in self.recipe]

    def kind(self) -> str:
        """The data set without its path."""
        return self.data.partition(":")[0]

    def complete(self) -> TrainConfig:
        """The same with every default that depends on the data set filled in.

        >>> TrainConfig(data="cifar10").complete().model
        'resnet20'
        """
        model, epochs, batch_size, image_size = _DEFAULTS.get(self.kind(), _DEFAULTS["folder"])
        lr, warmup_epochs, clip_grad_norm = _SCHEDULES[self.task]
        return dataclasses.replace(
            self,
            model=self.model or model,
            epochs=self.epochs or epochs,
            batch_size=self.batch_size or batch_size,
            image_size=self.image_size or image_size,
            frames=self.frames or (8 if self.kind() == "moving-items" else 16),
            lr=self.lr or lr,
            warmup_epochs=warmup_epochs if self.warmup_epochs is None else self.warmup_epochs,
            clip_grad_norm=clip_grad_norm if self.clip_grad_norm is None else self.clip_grad_norm,
        )


def _check(config: TrainConfig) -> None:
    """Refuses what cannot train; every sentence says what would."""
    positive = {"epochs": 1, "batch_size": 2, "threads": 1, "image_size": 8, "log_every": 1, "lr_step_size": 1}
    positive |= {"train_images": 2, "frames": 1, "frame_stride": 1, "anchor_size": 1, "box_samples": 1}
    for name, least in positive.items():
        value = getattr(config, name)
        if value is not None and value < least:
            why = " (BatchNorm needs two images)" if least == 2 else ""
            raise ValueError(f"train: {_flag(name)} is {value}; it must be at least {least}{why}.")
    for name in (
        "momentum",
        "weight_decay",
        "warmup_epochs",
        "clip_grad_norm",
        "workers",
        "histogram_every",
        "checkpoint_seconds",
    ):
        if not (getattr(config, name) or 0) >= 0:
            raise ValueError(f"train: {_flag(name)} is {getattr(config, name)}; it must not be negative.")
    for name in ("momentum", "weight_decay", "warmup_epochs", "clip_grad_norm", "lr", "lr_gamma"):
        if not math.isfinite(getattr(config, name) or 0.0):
            raise ValueError(f"train: {_flag(name)} is {getattr(config, name)}; it must be finite.")
    if config.lr is not None and not config.lr > 0.0:
        raise ValueError(f"train: --lr is {config.lr}; it must be positive.")
    if not 0.0 <= config.label_smoothing < 1.0:
        raise ValueError(f"train: --label-smoothing is {config.label_smoothing}; it must lie in [0, 1).")
    for name in ("recipe", "seed"):
        values = getattr(config, name)
        if not values or len(set(values)) != len(values):
            raise ValueError(f"train: {_flag(name)} is {' '.join(map(str, values)) or 'empty'}; name at least one, each once.")
    if not all(0 <= seed < 2**63 for seed in config.seed):
        raise ValueError(f"train: --seed is {' '.join(map(str, config.seed))}; seeds lie between 0 and 2^63 - 1.")
    task = "video" if config.kind() in _VIDEO else "detect" if config.kind() in _DETECTION else None
    if task != config.task and (task or (config.task == "video" and config.kind() in _DEFAULTS)):
        raise ValueError(
            f"train: --task {config.task} does not go with --data {config.data}. Video has moving-items, frames:PATH and "
            "clips:PATH, all of them with --task video; --task detect has voc:PATH and coco:PATH; every other data set is for "
            "--task classify."
        )
    for_detectors = ("backbone", "backbone_checkpoint", "anchor_size", "box_samples")
    given = [_flag(name) for name in for_detectors if getattr(config, name) is not None]
    if config.task != "detect" and given:
        raise ValueError(f"train: {', '.join(given)}: for detectors only; add --task detect, or leave it out.")
    if config.test_only and config.resume is None:
        raise ValueError("train: --test-only tests the checkpoints of a run; name it: --resume RUN.")


def float_layers(asked: Sequence[str], default: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The wildcards of the layers that stay float: those asked for, the default, or nothing for "none".

    >>> float_layers(("backbone.fpn",), ("head",)), float_layers((), ("head",)), float_layers(("none",), ("head",))
    (('backbone.fpn',), ('head',), ())
    """
    return () if tuple(asked) == ("none",) else tuple(asked) or default


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
