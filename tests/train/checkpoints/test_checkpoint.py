# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is read back bit for bit, and a damaged one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from byteback.train.checkpoints import checkpoint
from byteback.train.checkpoints.checkpoint import Progress


def contents() -> dict[str, object]:
    torch.manual_seed(0)
    state = {"weight": torch.randn(3, 4), "count": torch.tensor(7)}
    data = {"model": state, "optimizer": {"lr": 0.1}, "random": torch.get_rng_state(), "lengths": {}}
    about = {"config": "", "variant": "float32", "recipe": None, "seed": 0, "classes": 2, "image_size": 8, "channels": 1}
    return {**about, **data, "progress": checkpoint.as_data(Progress(epoch=2, seconds=1.5))}


def test_a_checkpoint_comes_back_and_its_fingerprint_knows_every_bit(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save(path, contents())
    loaded = checkpoint.load(path)
    assert checkpoint.progress_of(loaded).epoch == 2
    same = checkpoint.fingerprint(loaded)
    assert same == checkpoint.fingerprint(contents())
    loaded["progress"]["seconds"] = 99.0  # a time is no state
    assert checkpoint.fingerprint(loaded) == same
    loaded["model"]["weight"].view(torch.int32)[1, 2] ^= 1
    assert checkpoint.fingerprint(loaded) != same


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "other"])
def test_a_damaged_checkpoint_is_refused_by_name(how: str, tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save(path, contents())
    whole = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "flipped":
        place = whole.index(contents()["model"]["weight"].numpy().tobytes())  # type: ignore[index]
        whole[place + 5] ^= 0x10
        path.write_bytes(whole)
    elif how == "empty":
        path.write_bytes(b"")
    else:
        torch.save({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"last\.pt: (the checkpoint is damaged|this is not a checkpoint).*best\.pt"):
        checkpoint.load(path)
    with pytest.raises(ValueError, match="no such checkpoint"):
        checkpoint.load(tmp_path / "absent.pt")
