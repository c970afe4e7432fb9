# SPDX-License-Identifier: Apache-2.0
"""The one room that gets torchvision imported, whichever wheel of it is installed.

A torchvision wheel built for CUDA cannot load its C++ library next to CPU torch, and then
`import torchvision` dies with "operator torchvision::nms does not exist". Only in that case this room
declares the operators torchvision needs to be imported, and gives the two that detection models call,
nms and roi_align, a plain PyTorch implementation with the meaning of torchvision's C++ kernels.

Everything else in Byteback gets torchvision from `load()`, never by importing it at the top of a file.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

# qnms has no kernel: torchvision only asks for its name while it is being imported.
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
}
_NMS_ROWS = 512  # bounds the overlap table to 512 x boxes: RPNs ask for thousands of boxes at once

# torch forgets a declared operator when its Library object is collected.
_library: torch.library.Library | None = None


def load() -> ModuleType:
    """Import torchvision, declaring the operators its wheel lacks if (and only if) it needs that; idempotent."""
    imported = sys.modules.get("torchvision")
    if imported is not None:
        return imported
    _forget_failed_import()
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise ImportError(
            "byteback.torchvision_compat.load: torchvision is not installed; the networks, image transforms and data "
            "sets of the reference trainer come from it. Install it: pip install byteback[train]",
            name="torchvision",
        ) from error
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    _forget_failed_import()
    _declare_missing_operators()
    torchvision = importlib.import_module("torchvision")
    _let_torchvision_call_them()
    return torchvision


def _forget_failed_import() -> None:
    """Python drops the failed package but keeps its submodules, which would mix into the next import."""
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]


def _declare_missing_operators() -> None:
    global _library
    missing = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    _library = _library or torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        _library.define(_SCHEMAS[name])
    # torchvision registers its own shape function for nms, which an implicit composite kernel would forbid;
    # roi_align is to be differentiated through its steps, which only an implicit composite kernel allows.
    if "nms" in missing:
        _library.impl("nms", _nms, "CompositeExplicitAutograd")
    if "roi_align" in missing:
        _library.impl("roi_align", _roi_align, "CompositeImplicitAutograd")


def _let_torchvision_call_them() -> None:
    """Lift the "C++ library is loaded" guard where our operators stand in, and only there.

    deform_conv2d and its like keep torchvision's own clear error. Without this roi_align would go through
    torch.compile, which needs a C++ compiler on the machine.
    """
    for name in ("boxes", "roi_align"):
        vars(sys.modules[f"torchvision.ops.{name}"]).update(_assert_has_ops=_true, _has_ops=_true)


def _true() -> bool:  # not a lambda: torchvision's exporters compile it with TorchScript
    return True


def _nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes that survive, best score first; of equal scores the earlier box goes first."""
    if dets.dim() != 2 or dets.shape[1] != 4 or scores.shape != dets.shape[:1]:
        raise ValueError(
            f"torchvision::nms: boxes have shape {tuple(dets.shape)} and scores {tuple(scores.shape)}; "
            "every box (x1, y1, x2, y2) needs one score. Pass boxes [N, 4] and scores [N]."
        )
    order = scores.argsort(descending=True, stable=True)
    boxes = dets[order]
    kept = torch.ones_like(order, dtype=torch.bool)
    for start in range(0, len(boxes), _NMS_ROWS):
        overlaps = _iou(boxes[start : start + _NMS_ROWS], boxes[start:]) > iou_threshold
        for row, suppressed in enumerate(overlaps):
            if kept[start + row]:
                kept[start + row + 1 :] &= ~suppressed[row + 1 :]
    return order[kept]


def _iou(one: Tensor, other: Tensor) -> Tensor:
    overlap = (torch.minimum(one[:, None, 2:], other[:, 2:]) - torch.maximum(one[:, None, :2], other[:, :2])).clamp(0)
    shared = overlap.prod(-1)
    return shared / ((one[:, 2:] - one[:, :2]).prod(-1)[:, None] + (other[:, 2:] - other[:, :2]).prod(-1) - shared)


def _roi_align(
    input: Tensor, rois: Tensor, spatial_scale: float, height: int, width: int, sampling_ratio: int, aligned: bool
) -> Tensor:
    """Each output bin is a weighted sum of pixels: embedding_bag sums them without a copy of every sample."""
    _, channels, rows, columns = input.shape
    boxes = rois.detach()[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)
    y, y_weight = _samples(boxes[:, 1], boxes[:, 3], height, rows, sampling_ratio, aligned)
    x, x_weight = _samples(boxes[:, 0], boxes[:, 2], width, columns, sampling_ratio, aligned)
    row = rois[:, 0].long()[:, None, None] * rows + y
    pixel = row[:, :, None, :, None] * columns + x[:, None, :, None, :]
    weight = (y_weight[:, :, None, :, None] * x_weight[:, None, :, None, :]).to(input.dtype)
    pixels = input.permute(0, 2, 3, 1).reshape(-1, channels)
    bags, bag_weights = pixel.flatten(3).flatten(0, 2), weight.flatten(3).flatten(0, 2)
    pooled = F.embedding_bag(bags, pixels, mode="sum", per_sample_weights=bag_weights)
    return pooled.view(len(rois), height, width, channels).permute(0, 3, 1, 2).contiguous()


def _samples(start: Tensor, end: Tensor, bins: int, size: int, sampling_ratio: int, aligned: bool) -> tuple[Tensor, Tensor]:
    """Along one axis: the pixels every bin reads, and their weights, both [rois, bins, 2 x samples]."""
    length = (end - start if aligned else (end - start).clamp(min=1.0))[:, None, None]
    count = torch.full_like(length, sampling_ratio) if sampling_ratio > 0 else (length / bins).ceil()
    per_bin = count.clamp(min=1.0)
    sample = torch.arange(int(per_bin.max()) if len(per_bin) else 1, device=start.device)
    bin_ = torch.arange(bins, device=start.device)[:, None]
    position = start[:, None, None] + (bin_ + (sample + 0.5) / per_bin) * (length / bins)
    # As in the C++ kernel: up to one pixel outside the image takes the border's value, further out counts as zero.
    used = (sample < count) & (position >= -1.0) & (position <= size)
    position = position.clamp(0, size - 1)
    low = position.long()
    fraction = position - low
    weight = torch.cat([1 - fraction, fraction], -1) * torch.cat([used, used], -1) / per_bin
    return torch.cat([low, (low + 1).clamp(max=size - 1)], -1), weight
