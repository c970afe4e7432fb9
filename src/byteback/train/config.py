# SPDX-License-Identifier: Apache-2.0
"""TrainConfig defines the flags of `byteback train`, the keys of its TOML files, and their default values.

The default of a field that is None depends on the data set; `complete` fills it in. `config_file.py` reads and writes TOML.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from byteback.suggestions import unknown
from byteback.train import optimizers
from byteback.train.variants import FLOAT, Variant, parse

# Default values by data set: model, epochs, batch size, image size.
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
_MOST_THREADS = 256  # more than the processors of a machine are allowed up to here; it is slow, but works
# Default values by task: learning rate, epochs of warm-up, maximum norm of the gradient.
_DETECTION = ("voc", "coco")
_SCHEDULES: dict[str, tuple[float, float, float]] = {
    "classify": (0.1, 0.0, 0.0),
    "video": (0.1, 0.0, 0.0),
    "detect": (0.02, 1.0, 2.0),
}


@dataclass(frozen=True)
class TrainConfig:
    """Train a network in float32 and in int8 with the same seeds and the same data in the same order, and compare them.

    Without flags it trains a small ResNet on handwritten digits, in about 15 seconds.
    """

    task: Literal["classify", "detect", "video"] = "classify"
    """What to train: the class of an image, boxes around objects (docs/7-detection.md), or the class of a clip
    (docs/8-video.md)."""
    model: str | None = None
    """Name of the network (`byteback models` lists them). Default: resnet8 for digits, resnet18 for folders, r3d_8 for
    moving-items, r3d_18 for other clips, retinanet_resnet50_fpn for detection, resnet20 for the rest."""
    data: str = "digits"
    """digits, cifar10, cifar100, fashion-mnist, or folder:PATH with PATH/train/CLASS/IMAGE and PATH/val/CLASS/IMAGE.
    Detection: voc:PATH or coco:PATH. Video: moving-items, frames:PATH with PATH/CLASS/CLIP/FRAME.png, or clips:PATH with
    PATH/CLASS/CLIP.mp4 or PATH/labels.csv."""
    data_path: str | None = None
    """Folder of the data sets. Default: $BYTEBACK_DATA, or ./data."""
    backbone: str | None = None
    """Backbone of a detector: resnet18, resnet50 or mobilenet_v3_large. Default: the one in its name."""
    backbone_checkpoint: str | None = None
    """Checkpoint of a classifier to initialize the backbone of a detector. Its norms are then frozen. Default: random
    weights."""
    anchor_size: int | None = None
    """Side in pixels of the smallest anchors of RetinaNet and Faster R-CNN; they double with every level. Default: 32 as in
    torchvision, for images of 800 pixels."""
    box_samples: int | None = None
    """Proposals per image that train the second stage of Faster R-CNN. Default: 512 as in torchvision, which is most of the
    time of a step with small images."""
    weights: str | None = None
    """Initial weights: a file (state dict, checkpoint or safetensors) or the folder of a run, torchvision:NAME such as
    torchvision:DEFAULT, or timm. A head for another number of classes starts anew. Default: random weights."""
    freeze: tuple[str, ...] = ()
    """Wildcards of modules that are not trained, such as 'layer1*'. Their norms keep their statistics."""
    ema: float | None = None
    """Decay of an exponential average of the weights, such as 0.999; it is what is tested and saved as the best. Default:
    none."""
    amp: bool = False
    """Run the float layers of training in bfloat16 (autocast). Blocks are not fused then."""
    keep_float: tuple[str, ...] = ()
    """Wildcards of layers that stay float. Default: the predictors of a detector; "none" for no layer."""
    recipe: tuple[str, ...] = (FLOAT, "unified-int8", "distribution-adaptive-int8")
    """Recipes to compare, in this order (`byteback recipes` lists them). NAME:field=value,field=value changes fields."""
    seed: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--seeds"])] = (0,)
    """Seeds of weights, data order, augmentation and rounding noise. Every recipe is trained once per seed."""
    epochs: int | None = None
    """Passes over the training images. Default: 12 for digits, 10 for fashion-mnist, 15 for cifar, 30 for folders."""
    batch_size: int | None = None
    """Images per step of each process. Default: 64 for digits and folders, 128 for the rest."""
    processes: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = 1
    """With how many processes the run was started: a step has `processes * batch_size` images, however many go on with it."""
    sync_bn: bool = False
    """Compute the statistics of BatchNorm over all processes. PyTorch has no such layer for CPUs."""
    rank_timeout: float = 600.0
    """Seconds after which a process of torchrun that does not answer is named, and the run ends."""
    lr: float | None = None
    """Initial learning rate. Default: 0.1, or 0.02 for detection; 0.001 for optimizers other than SGD."""
    optimizer: str = "sgd"
    """Optimizer of torch.optim by its name in lower case: sgd, adamw, adam, rmsprop, ..."""
    momentum: float = 0.9
    """Momentum of SGD, and of the other optimizers that have one."""
    weight_decay: float = 1e-4
    """Weight decay of the optimizer."""
    lr_schedule: Literal["cosine", "step", "linear", "constant"] = "cosine"
    """Decay of the learning rate: to zero along a cosine or a line, in steps, or none."""
    lr_step_size: int = 30
    """Epochs between two steps of the schedule "step"."""
    lr_gamma: float = 0.1
    """Factor of the learning rate at each step of the schedule "step"."""
    warmup_epochs: float | None = None
    """Epochs in which the learning rate first rises from zero; fractions are allowed. Default: 0, or 1 for detection."""
    clip_grad_norm: float | None = None
    """Maximum norm of the gradient of all parameters; 0 for no limit. Default: 0, or 2 for detection."""
    label_smoothing: float = 0.0
    """Share of the target that is distributed over all classes."""
    augment: bool = True
    """Augment the training images: padded crops and flips for small images, resized crops and flips for folders, zoom and
    flips for detection, nothing for digits."""
    image_size: int | None = None
    """Pixels per side of the images of a folder, or of the shorter side for detection. Digits are enlarged to it. Default:
    224 for folders, 320 for detection, 112 for clips, 32 for moving-items, 8 for digits."""
    train_images: int | None = None
    """Train on only this many images (or clips), evenly spaced in the data set, for a quick test. Default: all."""
    frames: int | None = None
    """Frames per clip. Default: 8 for moving-items, 16 for the rest."""
    frame_stride: int = 1
    """Read every n-th frame of a clip on disk."""
    download: bool = True
    """Download a data set that is missing."""
    skip_bad_images: bool = False
    """Leave out the images that cannot be read, which the scan before training finds. Default: stop and name them."""
    workers: int = 2
    """Processes that read the images of a folder. Data sets in memory need none."""
    threads: int | None = None
    """Number of CPU threads. Default: chosen by PyTorch."""
    channels_last: bool = True
    """Use the memory format channels_last for images and weights, which int8 kernels read."""
    output_dir: str | None = None
    """Folder of the run. Default: runs/DATA-MODEL, with a number appended if it exists."""
    resume: str | None = None
    """Continue the run in this folder, bit for bit. Finished members are skipped; new seeds and recipes are added. "auto"
    continues the run in --output-dir if there is one, and else starts it: the same command for a job that is queued again."""
    test_only: bool = False
    """Do not train: test the checkpoints of the run given by --resume."""
    config: str | None = None
    """A TOML file with these flags as keys. Flags on the command line override it."""
    log_every: int = 50
    """Steps between two records in metrics.jsonl."""
    checkpoint_seconds: float = 60.0
    """Seconds between two checkpoints within an epoch. There is always one at the end of an epoch."""
    histogram_every: int = 1
    """Epochs between two records of gradient histograms in histograms.jsonl; 0 for none."""
    tensorboard: bool = True
    """Write event files for TensorBoard, if it is installed."""
    recipes: Annotated[dict[str, dict[str, Any]], tyro.conf.Fixed, tyro.conf.Suppress] = field(default_factory=dict)
    """Recipes that a TOML file defines in tables [recipes.NAME]: a `base` and the fields that differ from it."""

    def __post_init__(self) -> None:
        _check(self)
        self.variants()

    def variants(self) -> list[Variant]:
        """Returns the variants that `recipe` names."""
        return [parse(spec, self.recipes) for spec in self.recipe]

    def kind(self) -> str:
        """Returns the data set without its path."""
        return self.data.partition(":")[0]

    def complete(self) -> TrainConfig:
        """Returns the config with all default values that depend on the data set.

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
            lr=self.lr or optimizers.default_rate(self.optimizer, lr),
            warmup_epochs=warmup_epochs if self.warmup_epochs is None else self.warmup_epochs,
            clip_grad_norm=clip_grad_norm if self.clip_grad_norm is None else self.clip_grad_norm,
        )


def _check(config: TrainConfig) -> None:
    """Raises an error for values that cannot work."""
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
    _check_ranges(config)
    if config.lr is not None and not config.lr > 0.0:
        raise ValueError(f"train: --lr is {config.lr}; it must be positive.")
    if config.optimizer not in optimizers.names():
        raise unknown("train", "optimizer", config.optimizer, optimizers.names())
    if config.ema is not None and not 0.0 < config.ema < 1.0:
        raise ValueError(f"train: --ema is {config.ema}; it must be between 0 and 1, such as 0.999.")
    if not 0.0 <= config.label_smoothing < 1.0:
        raise ValueError(f"train: --label-smoothing is {config.label_smoothing}; it must be in [0, 1).")
    for name in ("recipe", "seed"):
        values = getattr(config, name)
        if not values or len(set(values)) != len(values):
            raise ValueError(
                f"train: {_flag(name)} is {' '.join(map(str, values)) or 'empty'}; give at least one value, and each only once."
            )
    if not all(0 <= seed < 2**63 for seed in config.seed):
        raise ValueError(f"train: --seed is {' '.join(map(str, config.seed))}; seeds must be between 0 and 2^63 - 1.")
    task = "video" if config.kind() in _VIDEO else "detect" if config.kind() in _DETECTION else None
    if task != config.task and (task or (config.task == "video" and config.kind() in _DEFAULTS)):
        raise ValueError(
            f"train: --task {config.task} does not work with --data {config.data}. Use --task video with moving-items, "
            "frames:PATH and clips:PATH, --task detect with voc:PATH and coco:PATH, and --task classify with the others."
        )
    for_detectors = ("backbone", "backbone_checkpoint", "anchor_size", "box_samples")
    given = [_flag(name) for name in for_detectors if getattr(config, name) is not None]
    if config.task != "detect" and given:
        raise ValueError(f"train: {', '.join(given)}: for detectors only. Add --task detect, or remove the flag.")
    if config.test_only and config.resume is None:
        raise ValueError("train: --test-only tests the checkpoints of a run. Add --resume RUN.")


def _check_ranges(config: TrainConfig) -> None:
    """Raises an error for values that PyTorch accepts, but that cannot train, or that end the process."""
    if config.momentum >= 1.0:
        raise ValueError(f"train: --momentum is {config.momentum}; it must be less than 1, or the weights grow without limit.")
    if config.lr_gamma <= 0.0:
        raise ValueError(f"train: --lr-gamma is {config.lr_gamma}; it must be positive, or the learning rate is not.")
    for name in ("data", "output_dir", "resume", "data_path", "weights", "backbone", "backbone_checkpoint", "model", "config"):
        if getattr(config, name) == "":
            raise ValueError(f"train: {_flag(name)} is empty; give a value, or remove the flag.")
    if config.warmup_epochs and config.epochs and config.warmup_epochs > config.epochs:
        raise ValueError(
            f"train: --warmup-epochs is {config.warmup_epochs:g}, but the training has {config.epochs} epochs, so the learning "
            "rate would never be reached. Use fewer."
        )
    if not 1.0 <= config.rank_timeout < 1e6:
        raise ValueError(f"train: --rank-timeout is {config.rank_timeout:g}; it must be between 1 and a million seconds.")
    if config.sync_bn:
        raise ValueError(
            "train: --sync-bn: PyTorch's SyncBatchNorm runs on GPUs only, and this trainer runs on CPUs. Remove it, and give "
            "each process enough images with --batch-size."
        )
    check_threads("train", config.threads)


def check_threads(command: str, threads: int | None) -> None:
    """Raises an error for a number of threads that the process cannot have: OpenMP would end it without a message."""
    most = max(_MOST_THREADS, 4 * (os.cpu_count() or 1))
    if threads is not None and not 1 <= threads <= most:
        raise ValueError(f"{command}: --threads is {threads}; it must be between 1 and {most} on this machine.")


def float_layers(asked: Sequence[str], default: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Returns the wildcards of the layers that stay float: those given, the default, or nothing for "none".

    >>> float_layers(("backbone.fpn",), ("head",)), float_layers((), ("head",)), float_layers(("none",), ("head",))
    (('backbone.fpn',), ('head',), ())
    """
    return () if tuple(asked) == ("none",) else tuple(asked) or default


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
