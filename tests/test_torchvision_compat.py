# SPDX-License-Identifier: Apache-2.0
"""torchvision can be had from `load()` whichever wheel is installed; test_detection_ops.py has the operators it may lack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

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
