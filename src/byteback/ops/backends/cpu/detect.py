# SPDX-License-Identifier: Apache-2.0
"""Two float operators of detectors on the native library: nms and roi_align (csrc/detect/detect.h).

`is_ready` says whether it can take these tensors; byteback/detection_ops.py has the same in PyTorch for the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback.ops.backends.cpu import library
from byteback.ops.backends.cpu.addresses import CPU, flat, last

_native: Any = library.native
Call = tuple[tuple[int, ...], float, bool]
"""(images, height, width, channels, boxes, bins high, bins wide, samples), the scale of the boxes, aligned"""


def is_ready(*tensors: Tensor) -> bool:
    """Whether the library is there and these tensors are float32 on the CPU."""
    return library.native is not None and all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)


def nms(boxes: Tensor, iou_threshold: float) -> Tensor:
    """Which of the boxes, best first and dense, survive."""
    kept, count = torch.empty(len(boxes), dtype=torch.bool, device=CPU), len(boxes)
    _native.nms(count, flat(boxes, torch.float32, 4 * count), iou_threshold, flat(kept, torch.bool, count))
    return kept


def roi_align(call: Call, input: Tensor, rois: Tensor) -> Tensor:
    """The pooled boxes, channels last; `rois` is dense."""
    _, _, _, channels, boxes, *bins, _ = call[0]
    output = torch.empty((boxes, channels, *bins), dtype=torch.float32, device=CPU, memory_format=torch.channels_last)
    _run(_native.roi_align, call, input, rois, output)
    return output


def roi_align_grad(call: Call, grad_output: Tensor, rois: Tensor) -> Tensor:
    """The gradient of the map, channels last."""
    images, height, width, channels, *_ = call[0]
    size = images, channels, height, width
    grad_input = torch.empty(size, dtype=torch.float32, device=CPU, memory_format=torch.channels_last)
    _run(_native.roi_align_grad, call, grad_output, rois, grad_input)
    return grad_input


def _run(kernel: Any, call: Call, source: Tensor, rois: Tensor, target: Tensor) -> None:
    """A kernel from `source` to `target`, which is channels last."""
    source = source.permute(0, 2, 3, 1).contiguous()  # no copy where it is channels_last
    read, written = source.numel(), target.numel()
    addresses = flat(source, torch.float32, read), flat(rois, torch.float32, rois.numel()), last(target, torch.float32, written)
    kernel(*call, *addresses, torch.get_num_threads())
