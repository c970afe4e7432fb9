# SPDX-License-Identifier: Apache-2.0
"""A RetinaNet learns a handful of images by heart, in float32 and with each paper's recipe: almost every box is found.

The images are drawn (tests/drawn_shapes.py), the detector starts from nothing, and it is tested on what it was trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pycocotools")
from byteback.train.config import TrainConfig
from byteback.train.detect.run import train
from byteback.train.interrupt import Stop
from byteback.train.loop import Member
from byteback.train.results import member_result
from byteback.train.tasks import load
from byteback.train.variants import parse
from drawn_shapes import draw


class Silent:
    """Nobody listens."""

    def on_step(self, *_: Any) -> None: ...

    def on_epoch(self, *_: Any) -> None: ...

    def say(self, text: str) -> None: ...


@pytest.mark.convergence
@pytest.mark.parametrize("recipe", ["float32", "unified-int8", "distribution-adaptive-int8"])
def test_a_handful_of_images_is_learnt_by_heart(recipe: str, tmp_path: Path) -> None:
    root = draw(tmp_path / "shapes", train=8, test=0)
    names = (root / "ImageSets/Main/train.txt").read_text()
    (root / "ImageSets/Main/val.txt").write_text(names)
    (root / "ImageSets/Main/train.txt").write_text(15 * names)  # few epochs, as each ends with large checkpoints
    config = TrainConfig(
        task="detect",
        data=f"voc:{root}",
        backbone="resnet18",
        image_size=96,
        epochs=5,
        batch_size=4,
        warmup_epochs=0.3,
        augment=False,
        workers=0,
        tensorboard=False,
    ).complete()
    member = Member(parse(recipe), 0, tmp_path / "run" / "member")
    images = load(config)
    train(config, member, images, Silent(), Stop())
    result = member_result(member, tmp_path / "run")
    print(f"{recipe}: mAP {result['mAP']:.3f}, AP50 {result['AP50']:.3f}, loss {result['train_loss']:.3f}")
    assert result["AP50"] > 0.9 and result["mAP"] > 0.8
