# SPDX-License-Identifier: Apache-2.0
"""nms and roi_align with the results of torchvision's C++ kernels, used if its library cannot be loaded.

torchvision_compat registers them as torchvision's operators, so both sides of a comparison, float and int8, use them. Float32
tensors on the CPU use native kernels (ops/backends/cpu/detect.py). Other tensors, and builds without the native library, use
PyTorch code.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from byteback.ops.backends.registry import detection_of, same_device

_NMS_ROWS = 512  # limits the overlap table to 512 x boxes: RPNs pass thousands of boxes at once


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Returns the indices of the boxes that are kept, sorted by descending score; of equal scores the earlier box is first."""
    if dets.dim() != 2 or dets.shape[1] != 4 or scores.shape != dets.shape[:1]:
        raise ValueError(
            f"torchvision::nms: boxes have shape {tuple(dets.shape)} and scores {tuple(scores.shape)}; "
            "every box (x1, y1, x2, y2) needs one score. Pass boxes [N, 4] and scores [N]."
        )
    same_device("torchvision::nms", (dets, scores))
    order = scores.argsort(descending=True, stable=True)
    boxes = dets.detach()[order].contiguous()
    native = detection_of(boxes)
    return order[(_plain_nms if native is None else native.nms)(boxes, iou_threshold)]


def roi_align(
    input: Tensor, rois: Tensor, spatial_scale: float, height: int, width: int, sampling_ratio: int, aligned: bool
) -> Tensor:
    """Returns the mean of bilinear samples in each of `height` x `width` bins of every box (image, x1, y1, x2, y2)."""
    if input.dim() != 4 or rois.dim() != 2 or rois.shape[1] != 5:
        raise ValueError(
            f"torchvision::roi_align: the map has shape {tuple(input.shape)} and the boxes {tuple(rois.shape)}. Pass a map "
            "[N, C, H, W] and boxes [K, 5], each (image, x1, y1, x2, y2)."
        )
    same_device("torchvision::roi_align", (input, rois))
    native = detection_of(input, rois)
    if native is None or input.numel() == 0:
        return _plain_roi_align(input, rois, spatial_scale, height, width, sampling_ratio, aligned)
    if len(rois) and not (rois[:, 0].min() >= 0 and rois[:, 0].max() < len(input)):
        raise ValueError(
            f"torchvision::roi_align: the boxes are of images {rois[:, 0].min():g} to {rois[:, 0].max():g}, but the map "
            f"has {len(input)} images. The first number of a box is the index of its image."
        )
    out: Tensor = _RoiAlign.apply(native, input, rois.detach(), spatial_scale, (height, width), sampling_ratio, aligned)
    return out


class _RoiAlign(torch.autograd.Function):
    """Calls the native kernels. Boxes get no gradient, as in torchvision."""

    @staticmethod
    def forward(
        ctx: Any, native: Any, input: Tensor, rois: Tensor, scale: float, bins: tuple[int, int], samples: int, aligned: bool
    ) -> Tensor:
        rois = rois.contiguous()
        N, C, H, W = input.shape
        ctx.save_for_backward(rois)
        ctx.native, ctx.call = native, native.RoiCall(N, C, (H, W), len(rois), bins, scale, samples, aligned)
        return native.roi_align(ctx.call, input, rois)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (rois,) = ctx.saved_tensors
        return None, ctx.native.roi_align_grad(ctx.call, grad_output, rois), None, None, None, None, None


def _plain_nms(boxes: Tensor, iou_threshold: float) -> Tensor:
    """Returns which boxes are kept. The boxes are sorted by descending score."""
    kept = torch.ones(len(boxes), dtype=torch.bool, device=boxes.device)
    for start in range(0, len(boxes), _NMS_ROWS):
        overlaps = _iou(boxes[start : start + _NMS_ROWS], boxes[start:]).double() > iou_threshold  # as in C++: not rounded
        for row, suppressed in enumerate(overlaps):
            if kept[start + row]:
                kept[start + row + 1 :] &= ~suppressed[row + 1 :]
    return kept


def _iou(one: Tensor, other: Tensor) -> Tensor:
    overlap = (torch.minimum(one[:, None, 2:], other[:, 2:]) - torch.maximum(one[:, None, :2], other[:, :2])).clamp(0)
    shared = overlap.prod(-1)
    return shared / ((one[:, 2:] - one[:, :2]).prod(-1)[:, None] + (other[:, 2:] - other[:, :2]).prod(-1) - shared)


def _plain_roi_align(
    input: Tensor, rois: Tensor, spatial_scale: float, height: int, width: int, sampling_ratio: int, aligned: bool
) -> Tensor:
    """Computes each output bin as a weighted sum of pixels. embedding_bag sums them without a copy of every sample."""
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
    """Returns the pixels that every bin reads along one axis, and their weights, both [rois, bins, 2 x samples]."""
    length = (end - start if aligned else (end - start).clamp(min=1.0))[:, None, None]
    count = torch.full_like(length, sampling_ratio) if sampling_ratio > 0 else (length / bins).ceil()
    per_bin = count.clamp(min=1.0)
    sample = torch.arange(int(per_bin.max()) if len(per_bin) else 1, device=start.device)
    bin_ = torch.arange(bins, device=start.device)[:, None]
    position = start[:, None, None] + (bin_ + (sample + 0.5) / per_bin) * (length / bins)
    # As in the C++ kernel: up to one pixel outside the image a sample has the value of the border, further out it is zero.
    used = (sample < count) & (position >= -1.0) & (position <= size)
    position = position.clamp(0, size - 1)
    low = position.long()
    fraction = position - low
    weight = torch.cat([1 - fraction, fraction], -1) * torch.cat([used, used], -1) / per_bin
    return torch.cat([low, (low + 1).clamp(max=size - 1)], -1), weight
