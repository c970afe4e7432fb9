# SPDX-License-Identifier: Apache-2.0
"""torchvision can be had from `load()` whichever wheel is installed, and our operators mean what its own mean.

The operators are compared with slow loops written from torchvision's documentation, both directly and through
torchvision.ops, so that these tests also say something next to a wheel that brings its own kernels.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from byteback import torchvision_compat

SOURCE = str(Path(torchvision_compat.__file__).parents[1])


@pytest.fixture(scope="module")
def torchvision() -> ModuleType:
    try:
        return torchvision_compat.load()
    except ImportError:
        pytest.skip("torchvision is not installed")


def run(program: str, *paths: str) -> str:
    """A fresh interpreter: what an import leaves behind cannot be undone in this one."""
    header = f"import sys\nsys.path[:0] = {[*paths, SOURCE]!r}\n"
    done = subprocess.run([sys.executable, "-c", header + program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_load_works_in_a_fresh_interpreter_after_a_failed_import(torchvision: ModuleType) -> None:
    program = """
try:
    import torchvision
except RuntimeError:
    assert "torchvision" not in sys.modules
from byteback.torchvision_compat import load
module = load()
assert load() is module
import torchvision
assert torchvision is module
import torchvision.models.detection, torchvision.models.video, torchvision.transforms.v2
from torchvision.models.detection import fasterrcnn_resnet50_fpn, fcos_resnet50_fpn, retinanet_resnet50_fpn
from torchvision.models.detection import ssdlite320_mobilenet_v3_large
print("fine")
"""
    assert run(program).strip() == "fine"


def test_nothing_is_declared_where_torchvision_imports_by_itself(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("healthy = True\n")
    program = """
import torch
from byteback import torchvision_compat
assert torchvision_compat.load().healthy
assert torchvision_compat._library is None and not hasattr(torch.ops.torchvision, "nms")
"""
    run(program, str(tmp_path))


def test_other_failures_are_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('something else')\n")
    program = """
from byteback import torchvision_compat
try:
    torchvision_compat.load()
except RuntimeError as error:
    print(error, torchvision_compat._library)
"""
    assert run(program, str(tmp_path)).strip() == "something else None"


def test_missing_torchvision_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match=r"torchvision is not installed.*pip install byteback\[train\]"):
        torchvision_compat.load()


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
def test_nms_equals_the_slow_loop_with_many_equal_scores(
    torchvision: ModuleType, monkeypatch: pytest.MonkeyPatch, threshold: float, rows: int
) -> None:
    monkeypatch.setattr(torchvision_compat, "_NMS_ROWS", rows)
    generator = torch.Generator().manual_seed(1)
    boxes = random_boxes(60, generator)
    scores = torch.randint(0, 5, (60,), generator=generator).double()
    expected = slow_nms(boxes, scores, threshold)
    assert torchvision_compat._nms(boxes, scores, threshold).tolist() == expected
    kept = torchvision.ops.nms(boxes, scores, threshold)
    assert kept.dtype == torch.int64 and kept.tolist() == expected


def test_nms_of_ties_keeps_the_first_and_of_nothing_keeps_nothing(torchvision: ModuleType) -> None:
    same = torch.tensor([[0.0, 0.0, 2.0, 2.0]]).repeat(3, 1)
    assert torchvision.ops.nms(same, torch.ones(3), 0.5).tolist() == [0]
    assert torchvision.ops.nms(same, torch.ones(3), 1.0).tolist() == [0, 1, 2]
    assert torchvision.ops.nms(same[:0], torch.ones(0), 0.5).shape == (0,)


def test_nms_refuses_boxes_and_scores_that_do_not_match() -> None:
    with pytest.raises(ValueError, match=r"boxes have shape \(3, 4\) and scores \(2,\)"):
        torchvision_compat._nms(torch.zeros(3, 4), torch.zeros(2), 0.5)


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
    torch.testing.assert_close(torchvision_compat._roi_align(images, ROIS, 0.5, 2, 3, ratio, aligned), expected)
    torch.testing.assert_close(torchvision.ops.roi_align(images, ROIS, (2, 3), 0.5, ratio, aligned), expected)


def test_roi_align_has_the_right_gradient_and_takes_no_boxes() -> None:
    images = torch.randn(2, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: torchvision_compat._roi_align(x, ROIS, 0.5, 2, 2, 2, False), (images,))
    assert torchvision_compat._roi_align(images, ROIS[:0], 0.5, 2, 3, -1, True).shape == (0, 2, 2, 3)


def test_faster_rcnn_trains_and_detects(torchvision: ModuleType) -> None:
    torch.manual_seed(0)
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64
    )
    images = [torch.rand(3, 64, 64), torch.rand(3, 64, 48)]
    target = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 50.0]]), "labels": torch.tensor([1])}
    losses = model.train()(images, [target, target])
    assert set(losses) == {"loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg"}
    assert all(torch.isfinite(loss) for loss in losses.values())
    # The box head sees the image only through roi_align, so this gradient must have come back through it.
    losses["loss_classifier"].backward()
    stem = next(model.backbone.parameters())
    assert stem.grad is not None and stem.grad.abs().sum() > 0
    with torch.no_grad():
        assert model.eval()(images[:1])[0]["boxes"].shape[1] == 4
