# SPDX-License-Identifier: Apache-2.0
"""Builds the detectors of torchvision by name, with a choice of backbone, untrained or with the checkpoint of a backbone.

Without a checkpoint the BatchNorm of the backbone is trained. With --backbone-checkpoint it is frozen (FrozenBatchNorm2d), and
only the last three stages of the backbone are trained, as in torchvision.

By default (--keep-float) the convolutions that predict class scores and boxes stay float. They have few channels, so they take
little time, and their gradient comes directly from the loss: a few large values at the objects, and very many small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from byteback.suggestions import unknown
from byteback.torchvision_compat import load
from byteback.train import compact
from byteback.train.checkpoints import checkpoint
from byteback.train.config import float_layers

BACKBONES = ("resnet18", "resnet50", "mobilenet_v3_large")
KEEP_FLOAT = {
    "retinanet_resnet50_fpn": ("*.cls_logits", "*.bbox_reg"),
    "fasterrcnn_resnet50_fpn": ("rpn.head.cls_logits", "rpn.head.bbox_pred"),
    "fcos_resnet50_fpn": ("*.cls_logits", "*.bbox_reg", "*.bbox_ctrness"),
    "ssdlite320_mobilenet_v3_large": ("head.*.module_list.*.1",),
}
NAMES = tuple(KEEP_FLOAT)
_ANCHORED = {"retinanet_resnet50_fpn": "anchor_generator", "fasterrcnn_resnet50_fpn": "rpn_anchor_generator"}
_SSD = "ssdlite320_mobilenet_v3_large"
_TWO_STAGES = "fasterrcnn_resnet50_fpn"
_LONGEST = 1333 / 800  # the ratio of the longest to the shortest side in torchvision
_TRAINED_STAGES = 3  # of a backbone with a checkpoint


def keep_float(model: str, asked: Sequence[str]) -> tuple[str, ...]:
    """Returns the wildcards of the layers that stay float: those given, the default, or nothing for "none"."""
    return float_layers(asked, KEEP_FLOAT[model])


def default_backbone(model: str) -> str:
    """Returns the backbone that is in the name of the detector."""
    return "mobilenet_v3_large" if model == _SSD else "resnet50"


def small_backbone(model: str) -> str:
    """Returns the smallest backbone for the detector."""
    return "mobilenet_v3_large" if model == _SSD else "resnet18"


def build(
    model: str,
    backbone: str | None,
    classes: int,
    image_size: int,
    checkpoint: str | None = None,
    anchor_size: int | None = None,
    box_samples: int | None = None,
    frozen: bool = False,
) -> nn.Module:
    """Builds the detector for `classes` classes, including the background. With a checkpoint the norms are frozen."""
    if model not in NAMES:
        raise unknown("train", "detector", model, NAMES)
    backbone = backbone or default_backbone(model)
    if backbone not in BACKBONES:
        raise unknown("train", "backbone", backbone, BACKBONES)
    if anchor_size is not None and model not in _ANCHORED:
        raise ValueError(f"train: the anchors of {model} cannot be changed, so --anchor-size cannot be used. Remove it.")
    if box_samples is not None and model != _TWO_STAGES:
        raise ValueError(f"train: {model} has no second stage, so --box-samples cannot be used. Remove it.")
    detection: Any = load().models.detection
    frozen = frozen or checkpoint is not None
    if model == _SSD:
        return _ssd(detection, backbone, classes, image_size, checkpoint)
    longest = round(_LONGEST * image_size)
    if model == _TWO_STAGES:
        body: Any = _pyramid(detection, backbone, [1, 2, 3, 4], frozen, None)
        kind = detection.FasterRCNN
    else:
        extra = load().ops.feature_pyramid_network.LastLevelP6P7(256, 256)
        body = _pyramid(detection, backbone, [2, 3, 4], frozen, extra)
        kind = detection.RetinaNet if model == "retinanet_resnet50_fpn" else detection.FCOS
    if checkpoint:
        _load_backbone(body.body, backbone, Path(checkpoint))
    options: dict[str, Any] = {}
    if anchor_size is not None:
        options[_ANCHORED[model]] = _anchors(detection, model, anchor_size)
    if box_samples is not None:
        options["box_batch_size_per_image"] = box_samples
    return kind(body, classes, min_size=image_size, max_size=longest, **options)


def _anchors(detection: Any, model: str, smallest: int) -> Any:
    """Returns the anchors of torchvision with another smallest size: five levels, with three sizes each for RetinaNet."""
    between = (0, 1, 2) if model == "retinanet_resnet50_fpn" else (0,)
    sizes = tuple(tuple(int(smallest * 2 ** (level + third / 3)) for third in between) for level in range(5))
    return detection.anchor_utils.AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))


def _pyramid(detection: Any, backbone: str, stages: list[int], frozen: bool, extra: Any) -> Any:
    """Builds a backbone with a feature pyramid over the stages of stride 2^(stage + 1)."""
    norm = load().ops.misc.FrozenBatchNorm2d if frozen else nn.BatchNorm2d
    given: dict[str, Any] = {"weights": None, "norm_layer": norm, "extra_blocks": extra}
    utils = detection.backbone_utils
    if backbone == "mobilenet_v3_large":
        last = stages[-1] + 1  # the last but one has the same stride and fewer channels
        return utils.mobilenet_backbone(
            backbone_name=backbone,
            fpn=True,
            returned_layers=[*stages[:-1], last],
            trainable_layers=_TRAINED_STAGES if frozen else 6,
            **given,
        )
    return utils.resnet_fpn_backbone(
        backbone_name=backbone, returned_layers=stages, trainable_layers=_TRAINED_STAGES if frozen else 5, **given
    )


def _ssd(detection: Any, backbone: str, classes: int, image_size: int, checkpoint: str | None) -> nn.Module:
    if backbone != "mobilenet_v3_large" or checkpoint:
        what = "--backbone-checkpoint" if checkpoint else f"--backbone {backbone}"
        raise ValueError(f"train: {_SSD} has a special MobileNet as its backbone, so {what} cannot be used. Remove it.")
    model: Any = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=classes)
    model.transform.fixed_size = (image_size, image_size)
    return model


def _load_backbone(body: nn.Module, name: str, path: Path) -> None:
    """Loads the weights of the classifier `name` into the backbone of a detector, without its head and quantizers."""
    if path.suffix == ".safetensors":
        contents: Any = compact.read_state(path)
    else:
        contents = checkpoint.read(path, "It cannot be used for --backbone-checkpoint.")
    state = contents.get("model", contents) if isinstance(contents, dict) else None
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise ValueError(f"{path}: this is not a checkpoint of a network: it contains no state dict.")
    state = {key.removeprefix("features."): value for key, value in state.items() if "quantizers." not in key}
    needed = body.state_dict()
    missing = [key for key in needed if key not in state]
    differ = [key for key in needed if key in state and needed[key].shape != state[key].shape]
    if missing or differ:
        what = f"it has no {missing[0]}" if missing else f"its {differ[0]} has shape {tuple(state[differ[0]].shape)}"
        raise ValueError(f"{path}: these are not the weights of {name}: {what}. Choose the --backbone of this checkpoint.")
    body.load_state_dict({key: state[key] for key in needed})
