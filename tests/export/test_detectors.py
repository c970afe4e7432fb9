# SPDX-License-Identifier: Apache-2.0
"""A detector of torchvision is exported whole, for one image of one size: boxes in the file are those of the model."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import byteback
from byteback.export import check, detectors, onnx_bytes
from byteback.export.comparing import session
from byteback.torchvision_compat import load

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
detection: Any = load().models.detection
SIZE = 48, 64


class Levels(nn.Module):
    """A backbone with two levels, and the way from the coarse one to the fine one."""

    out_channels = 16

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm0 = nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16)
        self.fine, self.norm1 = nn.Conv2d(16, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.coarse, self.norm2 = nn.Conv2d(16, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.side, self.last = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        x = F.relu(self.norm1(self.fine(F.relu(self.norm0(self.first(x))))))
        coarse = F.relu(self.norm2(self.coarse(x)))
        fine = self.last(self.side(x) + F.interpolate(coarse, size=x.shape[-2:], mode="nearest"))
        return OrderedDict([("0", fine), ("1", coarse)])


def images(count: int, first: int = 0) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Bright squares of two classes on noise."""
    made, targets = [], []
    for number in range(first, first + count):
        random = torch.Generator().manual_seed(number)
        image = 0.4 + 0.2 * torch.rand(3, *SIZE, generator=random)
        x, y = (int(torch.randint(0, SIZE[axis] - 16, (), generator=random)) for axis in (1, 0))
        image[number % 2, y : y + 16, x : x + 16] = 1.0
        made.append(image)
        targets.append({"boxes": torch.tensor([[x, y, x + 16.0, y + 16.0]]), "labels": torch.tensor([1 + number % 2])})
    return made, targets


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    anchors = detection.anchor_utils.AnchorGenerator(((12,), (20,)), ((1.0,), (1.0,)))
    sizes: dict[str, Any] = {"min_size": SIZE[0], "max_size": SIZE[1]}
    if name == "fasterrcnn":
        pool = load().ops.MultiScaleRoIAlign(["0", "1"], 3, 2, canonical_scale=20, canonical_level=3)
        head = detection.faster_rcnn.TwoMLPHead(16 * 9, 32)
        last = detection.faster_rcnn.FastRCNNPredictor(32, 3)
        given = {"rpn_anchor_generator": anchors, "box_roi_pool": pool, "box_head": head, "box_predictor": last}
        model: nn.Module = detection.FasterRCNN(Levels(), **given, **sizes, rpn_post_nms_top_n_test=40)
    else:
        model = detection.RetinaNet(Levels(), 3, anchor_generator=anchors, **sizes)
    kept = ("*cls_logits", "*bbox_reg", "*bbox_pred")
    byteback.prepare(model, byteback.UnifiedInt8(strict=True), keep_float=[key for key in kept if _matches(model, key)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    byteback.scale_learning_rates(optimizer, model)
    for step in range(200):
        optimizer.zero_grad()
        sum(model(*images(4, 4 * step)).values()).backward()
        optimizer.step()
    return model.eval()


def _matches(model: nn.Module, pattern: str) -> bool:
    return any(name.endswith(pattern.removeprefix("*")) for name, _ in model.named_modules())


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("fasterrcnn", True),
        ("retinanet", False),
        pytest.param("fasterrcnn", False, marks=pytest.mark.slow),
        pytest.param("retinanet", True, marks=pytest.mark.slow),
    ],
)
def test_the_boxes_and_integers_are_those_of_the_model(name: str, exact: bool) -> None:
    model = build(name)
    tests, _ = images(12, 1000)
    before = load().ops.boxes.batched_nms, load().ops.poolers._multiscale_roi_align
    data = onnx_bytes(model, tests[0], exact=exact)
    found = check(model, data, tests, exact=exact, integers=12)
    assert not found.failures(), found.failures()
    assert found.layers.compared > 50_000 and (not exact or found.layers.equal == 1.0)
    assert found.images == 12
    assert found.boxes.compared > 8 or name == "retinanet", "a RetinaNet is not sure of any box after so few steps"
    assert before == (load().ops.boxes.batched_nms, load().ops.poolers._multiscale_roi_align), "torchvision is as it was"
    outputs = session(data).run(None, {"input": torch.zeros(3, *SIZE).numpy()})  # an image with nothing to find
    assert [array.ndim for array in outputs] == [2, 1, 1]
    assert [value.name for value in onnx.load_from_string(data).graph.output] == ["boxes", "labels", "scores"]
    with pytest.raises(ValueError, match=r"example has shape \(2, 3, 48, 64\), but the file of a detector takes one image"):
        onnx_bytes(model, torch.zeros(2, 3, *SIZE))


@pytest.mark.slow
def test_a_thousand_images_have_the_same_boxes() -> None:
    model, (tests, _) = build("fasterrcnn"), images(1000, 1000)
    for exact in (True, False):
        found = check(model, onnx_bytes(model, tests[0], exact=exact), tests, exact=exact, integers=12)
        print(f"{exact=}: {found}")
        assert found.images == 1000 and found.boxes.compared > 1000 and not found.failures(), found.failures()


def test_masks_are_refused_in_a_sentence() -> None:
    model = detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=2).eval()
    with pytest.raises(ValueError, match="MaskRCNN finds masks or keypoints, which an export does not support"):
        detectors.check_example(model, torch.zeros(3, 32, 32))


def test_only_the_thread_that_exports_calls_the_replacements() -> None:
    nms = load().ops.boxes
    given = torch.tensor([[0.0, 0.0, 9.0, 9.0]] * 2), torch.tensor([0.5, 0.9]), torch.tensor([0, 0])
    none = torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    with detectors.exportable(), ThreadPoolExecutor(1) as pool:
        assert nms.batched_nms(*given, 0.5).tolist() == [1]
        with pytest.raises(RuntimeError):  # it has no branch for no box; the operators of the file need none
            nms.batched_nms(*none, 0.5)
        assert pool.submit(nms.batched_nms, *none, 0.5).result().tolist() == []


def test_boxes_are_the_same_if_class_and_place_are() -> None:
    boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [20.0, 0.0, 30.0, 10.0], [0.0, 20.0, 10.0, 30.0]])
    labels, scores = torch.tensor([1, 1, 2]), torch.tensor([0.9, 0.8, 0.3])
    found = detectors.SameBoxes()
    found.add((boxes, labels, scores), (boxes, labels, scores))
    assert (found.compared, found.found) == (4, 4), "two boxes in both directions; the third has a low score"
    found = detectors.SameBoxes()
    found.add((boxes, labels, scores), (boxes + torch.tensor([0.5, 0.0, 0.0, 0.0]), torch.tensor([1, 2, 2]), scores))
    assert (found.compared, found.found) == (4, 2), "IoU 0.95 is the same box, another class is not"
    found.add((boxes, labels, scores), (boxes[:0], labels[:0], scores[:0]))
    assert (found.compared, found.found) == (6, 2)
    found = detectors.SameBoxes()
    found.add((boxes, labels, scores), (boxes + 1.0, labels, scores))
    assert (found.compared, found.found) == (4, 0), "IoU 81 / 119"
    assert detectors.SameBoxes().share == 1.0 and found.share == 0.0
