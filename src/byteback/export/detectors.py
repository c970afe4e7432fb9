# SPDX-License-Identifier: Apache-2.0
"""What an export needs to know about the detectors of torchvision: one image in, boxes out, and how boxes are selected.

torch.export cannot follow two functions of torchvision, which branch on how many boxes there are. `exportable` replaces them
meanwhile by functions with the same result and no branch:

    batched_nms              always in one call, with boxes of different classes moved apart (the exporter of TorchScript in
                             torchvision does the same; elsewhere more than 1,000 boxes are taken class by class)
    _multiscale_roi_align    the boxes of each level in one RoiAlign, then back into the order of the boxes
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

OUTPUTS = ("boxes", "labels", "scores")
LEAST_SCORE, LEAST_OVERLAP = 0.5, 0.9
"""Two boxes are the same if their class is, and their intersection over union is at least LEAST_OVERLAP."""
_FAMILY = "torchvision.models.detection."
_patching = threading.Lock()


def is_detector(model: nn.Module) -> bool:
    """Whether a model is one of torchvision's detectors, or derived from one."""
    return any(kind.__module__.startswith(_FAMILY) for kind in type(model).__mro__)


def check_example(model: Any, example: Tensor) -> None:
    """Raises an error for a detector that cannot be exported, and for an example that is not one image."""
    heads = getattr(model, "roi_heads", None)
    if getattr(heads, "mask_roi_pool", None) is not None or getattr(heads, "keypoint_roi_pool", None) is not None:
        raise ValueError(
            f"export_onnx: {type(model).__name__} finds masks or keypoints, which an export does not support. Use "
            "byteback.load and the model itself, or a detector of boxes."
        )
    if example.dim() != 3:
        raise ValueError(
            f"export_onnx: example has shape {tuple(example.shape)}, but the file of a detector takes one image (C, H, W), of "
            "that size. Give an image."
        )


def predict(model: Any, image: Tensor) -> tuple[Tensor, ...]:
    """Returns the boxes, labels and scores of one image."""
    found = model([image])[0]
    return tuple(found[name] for name in OUTPUTS)


@dataclass
class SameBoxes:
    """How many boxes with a score of at least LEAST_SCORE were looked for on the other side, and how many were found there."""

    compared: int = 0
    found: int = 0

    def add(self, ours: Sequence[Tensor], theirs: Sequence[Any]) -> None:
        """Compares the boxes, labels and scores of an image in both directions."""
        given = tuple(torch.as_tensor(array) for array in theirs)
        for (boxes, labels, scores), (others, other_labels, _) in ((ours, given), (given, ours)):
            kept = scores >= LEAST_SCORE
            same = (_overlap(boxes[kept], others) >= LEAST_OVERLAP) & (labels[kept, None] == other_labels)
            self.compared += int(kept.sum())
            self.found += int(same.any(1).sum())

    @property
    def share(self) -> float:
        """The share of boxes that were found."""
        return self.found / self.compared if self.compared else 1.0


def _overlap(boxes: Tensor, others: Tensor) -> Tensor:
    """Returns intersection over union of every pair."""
    low = torch.maximum(boxes[:, None, :2], others[:, :2])
    high = torch.minimum(boxes[:, None, 2:], others[:, 2:])
    both = (high - low).clamp(min=0.0).prod(2)
    areas = [(box[:, 2:] - box[:, :2]).prod(1) for box in (boxes, others)]
    return both / (areas[0][:, None] + areas[1] - both)


@contextlib.contextmanager
def exportable() -> Iterator[None]:
    """Replaces the functions of torchvision inside the `with`, for this thread. Other threads wait with their exports."""
    boxes, poolers = (sys.modules.get(f"torchvision.ops.{name}") for name in ("boxes", "poolers"))
    if boxes is None or poolers is None:
        yield
        return
    with _patching, _replaced(boxes, "batched_nms", _batched_nms), _replaced(poolers, "_multiscale_roi_align", _roi_align):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    before, thread = getattr(owner, name), threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:  # other threads may predict meanwhile
        return (function if threading.get_ident() == thread else before)(*args, **kwargs)

    setattr(owner, name, chosen)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    """Returns which boxes are kept, without suppression between classes."""
    apart = idxs.to(boxes) * (boxes.max() + 1.0)
    kept: Tensor = torch.ops.torchvision.nms(boxes + apart[:, None], scores, iou_threshold)
    return kept


def _roi_align(
    x_filtered: Sequence[Tensor],
    boxes: Sequence[Tensor],
    output_size: Sequence[int],
    sampling_ratio: int,
    scales: Sequence[float],
    mapper: Any,
) -> Tensor:
    """Returns the features in each box, of the level that the mapper chooses."""
    rois = torch.cat(list(boxes))  # (boxes, 4), of one image
    levels = mapper(boxes)
    found, places = [], []
    for level, (features, scale) in enumerate(zip(x_filtered, scales, strict=True)):
        place = torch.where(levels == level)[0]
        found.append(_of_one_level(features, rois[place], output_size, sampling_ratio, scale))
        places.append(place)
    order = torch.cat(places)
    back = torch.zeros_like(levels).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    return torch.cat(found)[back]


def _of_one_level(features: Tensor, rois: Tensor, size: Sequence[int], sampling_ratio: int, scale: float) -> Tensor:
    attributes: dict[str, Any] = {
        **{"output_height": size[0], "output_width": size[1], "sampling_ratio": max(sampling_ratio, 0)},
        **{"spatial_scale": float(scale), "mode": "avg", "coordinate_transformation_mode": "output_half_pixel"},
    }
    image = torch.zeros_like(rois[:, 0], dtype=torch.int64)
    shape = [rois.shape[0], features.shape[1], *size]
    return torch.onnx.ops.symbolic("RoiAlign", [features, rois, image], attributes, dtype=features.dtype, shape=shape)
