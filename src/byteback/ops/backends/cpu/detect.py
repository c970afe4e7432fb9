# SPDX-License-Identifier: Apache-2.0
"""Two float operators of detectors in the native library: nms and roi_align (csrc/detect/detect.h).

The registry returns this module for tensors that it can take. byteback/detection_ops.py does the same in PyTorch for others.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.ops.backends.cpu import library
from byteback.ops.backends.cpu.addresses import CPU, flat, last

_native: Any = library.native


class RoiCall(NamedTuple):
    """The arguments of roi_align, and the sizes of the feature map and of the result."""

    images: int
    channels: int
    size: tuple[int, int]  # height and width of the feature map
    boxes: int
    bins: tuple[int, int]
    scale: float
    samples: int
    aligned: bool


def nms(boxes: Tensor, iou_threshold: float) -> Tensor:
    """Returns which boxes are kept. `boxes` is dense and sorted by score, highest first."""
    kept, count = torch.empty(len(boxes), dtype=torch.bool, device=CPU), len(boxes)
    _native.nms(
        count=count,
        boxes=flat(boxes, torch.float32, 4 * count),
        threshold=iou_threshold,
        kept=flat(kept, torch.bool, count),
    )
    return kept


def roi_align(call: RoiCall, input: Tensor, rois: Tensor) -> Tensor:
    """Returns the pooled boxes, channels last. `rois` is dense."""
    size = call.boxes, call.channels, *call.bins
    output = torch.empty(size, dtype=torch.float32, device=CPU, memory_format=torch.channels_last)
    _run(_native.roi_align, call, input, rois, output)
    return output


def roi_align_grad(call: RoiCall, grad_output: Tensor, rois: Tensor) -> Tensor:
    """Returns the gradient of the feature map, channels last."""
    size = call.images, call.channels, *call.size
    grad_input = torch.empty(size, dtype=torch.float32, device=CPU, memory_format=torch.channels_last)
    _run(_native.roi_align_grad, call, grad_output, rois, grad_input)
    return grad_input


def _run(kernel: Any, call: RoiCall, source: Tensor, rois: Tensor, target: Tensor) -> None:
    """Runs a kernel that reads `source` and writes `target`, which is channels last."""
    source = source.permute(0, 2, 3, 1).contiguous()  # no copy if it is channels_last
    images, channels, size, boxes, bins, scale, samples, aligned = call
    shape = _native.RoiShape(
        batch=images,
        channels=channels,
        size=size,
        rois=boxes,
        bins=bins,
        scale=scale,
        samples=samples,
        aligned=aligned,
    )
    large, small = images * channels * math.prod(size), boxes * channels * math.prod(bins)
    read, written = (large, small) if kernel is _native.roi_align else (small, large)
    kernel(
        shape,
        source=flat(source, torch.float32, read),
        rois=flat(rois, torch.float32, 5 * boxes),
        result=last(target, torch.float32, written),
        threads=torch.get_num_threads(),
    )
