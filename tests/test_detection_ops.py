# SPDX-License-Identifier: Apache-2.0
"""nms and roi_align mean what torchvision's own mean, in both of their forms: native for float32, PyTorch for the rest.

They are compared with slow loops written from torchvision's documentation, both directly and through torchvision.ops, so
that these tests also say something next to a wheel that brings its own kernels.
"""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from byteback import detection_ops, torchvision_compat
from byteback.ops.backends.cpu import library as native_library

NATIVE = pytest.mark.skipif(native_library.native is None, reason="this build has no native library")


@pytest.fixture(scope="module")
def torchvision() -> ModuleType:
    try:
        return torchvision_compat.load()
    except ImportError:
        pytest.skip("torchvision is not installed")


def slow_nms(boxes: Tensor, scores: Tensor, threshold: float) -> list[int]:
    def area(box: list[float]) -> float:
        return (box[2] - box[0]) * (box[3] - box[1])

    def iou(a: list[float], b: list[float]) -> float:
        shared = [max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])]
        if shared[2] <= shared[0] or shared[3] <= shared[1]:
            return 0.0
        return area(shared) / (area(a) + area(b) - area(shared))

    listed = boxes.tolist()
    kept: list[int] = []
    for candidate in sorted(range(len(listed)), key=lambda index: -float(scores[index])):
        if all(iou(listed[candidate], listed[better]) <= threshold for better in kept):
            kept.append(candidate)
    return kept


def random_boxes(count: int, generator: torch.Generator) -> Tensor:
    # Whole coordinates: overlaps then often hit the threshold exactly, where > and >= differ.
    corner = torch.randint(0, 12, (count, 2), generator=generator)
    size = torch.randint(1, 9, (count, 2), generator=generator)
    return torch.cat([corner, corner + size], 1).double()


@pytest.mark.parametrize("threshold", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("rows", [7, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nms_equals_the_slow_loop_with_many_equal_scores(
    torchvision: ModuleType, monkeypatch: pytest.MonkeyPatch, threshold: float, rows: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(detection_ops, "_NMS_ROWS", rows)
    generator = torch.Generator().manual_seed(1)
    boxes = random_boxes(60, generator).to(dtype)
    scores = torch.randint(0, 5, (60,), generator=generator).double()
    expected = slow_nms(boxes, scores, threshold)
    assert detection_ops.nms(boxes, scores, threshold).tolist() == expected
    kept = torchvision.ops.nms(boxes, scores, threshold)
    assert kept.dtype == torch.int64 and kept.tolist() == expected


def test_nms_of_ties_keeps_the_first_and_of_nothing_keeps_nothing(torchvision: ModuleType) -> None:
    same = torch.tensor([[0.0, 0.0, 2.0, 2.0]]).repeat(3, 1)
    assert torchvision.ops.nms(same, torch.ones(3), 0.5).tolist() == [0]
    assert torchvision.ops.nms(same, torch.ones(3), 1.0).tolist() == [0, 1, 2]
    assert torchvision.ops.nms(same[:0], torch.ones(0), 0.5).shape == (0,)


def test_nms_compares_with_the_threshold_itself_and_not_with_its_float32() -> None:
    """The overlap is float32's 0.3, which lies above 0.3."""
    boxes, scores = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 3.0]]), torch.tensor([0.9, 0.8])
    assert detection_ops.nms(boxes, scores, 0.3).tolist() == [0]
    assert detection_ops._plain_nms(boxes, 0.3).tolist() == [True, False]


def test_nms_refuses_boxes_and_scores_that_do_not_match() -> None:
    with pytest.raises(ValueError, match=r"boxes have shape \(3, 4\) and scores \(2,\)"):
        detection_ops.nms(torch.zeros(3, 4), torch.zeros(2), 0.5)


def pixel(image: Tensor, y: float, x: float) -> Tensor:
    """The bilinear sample of [C, H, W] at one position, zero when more than a pixel outside."""
    height, width = image.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return torch.zeros(image.shape[0], dtype=image.dtype)
    y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    upper = image[:, top, left] * (1 - (x - left)) + image[:, top, right] * (x - left)
    lower = image[:, bottom, left] * (1 - (x - left)) + image[:, bottom, right] * (x - left)
    return upper * (1 - (y - top)) + lower * (y - top)


def slow_roi_align(images: Tensor, roi: Tensor, scale: float, size: tuple[int, int], ratio: int, aligned: bool) -> Tensor:
    left, top, right, bottom = ((roi[1:] * scale) - (0.5 if aligned else 0.0)).tolist()
    extent = [bottom - top, right - left] if aligned else [max(bottom - top, 1.0), max(right - left, 1.0)]
    step = [extent[0] / size[0], extent[1] / size[1]]
    count = [ratio, ratio] if ratio > 0 else [math.ceil(step[0]), math.ceil(step[1])]
    out = torch.zeros(images.shape[1], *size, dtype=images.dtype)
    for row in range(size[0]):
        for column in range(size[1]):
            for sub_y in range(count[0]):
                for sub_x in range(count[1]):
                    y = top + (row + (sub_y + 0.5) / count[0]) * step[0]
                    x = left + (column + (sub_x + 0.5) / count[1]) * step[1]
                    out[:, row, column] += pixel(images[int(roi[0])], y, x) / (count[0] * count[1])
    return out


ROIS = torch.tensor(
    [
        [0, 1.0, 2.0, 9.0, 7.0],
        [1, 0.0, 0.0, 12.0, 14.0],
        [1, 5.2, 5.1, 5.4, 5.3],
        [0, -6.0, -7.0, 4.0, 3.0],
        [0, 8.0, 9.0, 21.0, 19.0],
        [1, 3.0, 3.0, 3.0, 6.0],
    ],
    dtype=torch.float64,
)


@pytest.mark.parametrize("ratio", [2, -1])
@pytest.mark.parametrize("aligned", [False, True])
def test_roi_align_equals_the_slow_loop(torchvision: ModuleType, ratio: int, aligned: bool) -> None:
    images = torch.randn(2, 3, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = torch.stack([slow_roi_align(images, roi, 0.5, (2, 3), ratio, aligned) for roi in ROIS])
    torch.testing.assert_close(detection_ops.roi_align(images, ROIS, 0.5, 2, 3, ratio, aligned), expected)
    torch.testing.assert_close(torchvision.ops.roi_align(images, ROIS, (2, 3), 0.5, ratio, aligned), expected)


def test_roi_align_has_the_right_gradient_and_takes_no_boxes() -> None:
    images = torch.randn(2, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: detection_ops.roi_align(x, ROIS, 0.5, 2, 2, 2, False), (images,))
    assert detection_ops.roi_align(images, ROIS[:0], 0.5, 2, 3, -1, True).shape == (0, 2, 2, 3)


@NATIVE
@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7])
def test_native_nms_equals_its_definition_on_drawn_boxes(threshold: float) -> None:
    generator = torch.Generator().manual_seed(3)
    corner = 100 * torch.rand(700, 2, generator=generator)
    boxes = torch.cat([corner, corner + 40 * torch.rand(700, 2, generator=generator)], 1)
    scores = torch.rand(700, generator=generator)
    order = scores.argsort(descending=True, stable=True)
    expected = order[detection_ops._plain_nms(boxes[order], threshold)]
    assert torch.equal(detection_ops.nms(boxes, scores, threshold), expected)
    assert 0 < len(expected) < 700


@NATIVE
@pytest.mark.parametrize("ratio", [2, -1])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("threads", [1, 2])
def test_native_roi_align_and_its_gradient(
    ratio: int, aligned: bool, layout: torch.memory_format, threads: int, request: pytest.FixtureRequest
) -> None:
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(2, 5, 7, 6, dtype=torch.float64, generator=generator).requires_grad_()
    expected = torch.stack([slow_roi_align(images, roi, 0.5, (2, 3), ratio, aligned) for roi in ROIS])
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    (expected_grad,) = torch.autograd.grad(expected, images, grad)
    x = images.detach().float().contiguous(memory_format=layout).requires_grad_()
    output = detection_ops.roi_align(x, ROIS.float(), 0.5, 2, 3, ratio, aligned)
    assert type(output.grad_fn).__name__ == "_RoiAlignBackward"
    torch.testing.assert_close(output, expected.float(), rtol=1e-5, atol=1e-5)
    (got,) = torch.autograd.grad(output, x, grad.float())
    torch.testing.assert_close(got, expected_grad.float(), rtol=1e-5, atol=1e-5)


@NATIVE
def test_native_roi_align_of_nothing_and_of_nonsense() -> None:
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    output = detection_ops.roi_align(x, torch.zeros(0, 5), 0.5, 2, 3, -1, True)
    assert output.shape == (0, 3, 2, 3)
    output.sum().backward()
    assert x.grad is not None and not x.grad.any()  # a level without boxes still gives a gradient
    wild = torch.tensor([[0, float("nan"), 0, 3, 3], [1, -1e30, -1e30, 1e30, 1e30], [0, 5, 5, 1, 1]])
    assert detection_ops.roi_align(x, wild, 1.0, 2, 2, 2, True).shape == (3, 3, 2, 2)
    assert not detection_ops.roi_align(x, wild[2:], 1.0, 2, 2, -1, True).any()  # turned inside out: no samples
    for image in (-1.0, 2.0):
        with pytest.raises(ValueError, match="the map has 2 images"):
            detection_ops.roi_align(x, torch.tensor([[image, 0, 0, 3, 3]]), 1.0, 2, 2, 2, True)
    with pytest.raises(ValueError, match=r"boxes \[K, 5\]"):
        detection_ops.roi_align(x, torch.zeros(2, 4), 1.0, 2, 2, 2, True)


@NATIVE
def test_another_default_dtype_changes_nothing() -> None:
    images, rois = torch.rand(1, 2, 8, 8, requires_grad=True), torch.tensor([[0.0, 1.0, 1.0, 6.0, 6.0]])
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            pooled = detection_ops.roi_align(images, rois, 1.0, 2, 2, 2, True)
            results.append((pooled, *torch.autograd.grad(pooled.sum(), images)))
        finally:
            torch.set_default_dtype(torch.float32)
    for one, other in zip(*results, strict=True):
        assert other.dtype == torch.float32 and torch.equal(one, other)


def test_a_box_of_no_image_is_refused() -> None:
    for index in (1.0, -1.0, float("nan")):
        rois = torch.tensor([[index, 0.0, 0.0, 4.0, 4.0]])
        with pytest.raises(ValueError, match="the boxes are of images"):
            detection_ops.roi_align(torch.rand(1, 2, 8, 8), rois, 1.0, 2, 2, 2, True)


def test_pyramid_pooling_leaves_a_level_empty(torchvision: ModuleType) -> None:
    """All boxes are small, so the coarse level has none: its share of the gradient is zero, not missing."""
    pool = torchvision.ops.MultiScaleRoIAlign(["0", "1"], output_size=3, sampling_ratio=2)
    maps = {"0": torch.randn(1, 4, 16, 16, requires_grad=True), "1": torch.randn(1, 4, 8, 8, requires_grad=True)}
    out = pool(maps, [torch.tensor([[4.0, 4.0, 20.0, 20.0], [1.0, 2.0, 9.0, 12.0]])], [(64, 64)])
    out.square().sum().backward()
    fine, coarse = maps["0"].grad, maps["1"].grad
    assert fine is not None and fine.any() and (coarse is None or not coarse.any())
