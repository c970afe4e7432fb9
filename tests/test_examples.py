# SPDX-License-Identifier: Apache-2.0
"""examples/: other trainers give the losses of a plain loop, also where they stop and go on."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import byteback
from byteback.torchvision_compat import load as load_torchvision

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """Imports an example by its name."""
    load_torchvision()  # Lightning imports torchvision, which not every build of torch can load by itself
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module


@pytest.fixture(scope="module")
def losses(example: Any) -> list[float]:
    """Those of the plain loop of README.md, over two epochs."""
    digits = example("digits")
    model = byteback.prepare(digits.network(), "unified-int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    byteback.scale_learning_rates(optimizer, model)
    found = []
    for epoch in range(2):
        for images, labels in digits.batches(epoch):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


@pytest.mark.filterwarnings("ignore")
def test_lightning_fits_resumes_and_fits_again(example: Any, losses: list[float], tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: pip install 'byteback[adapters]'")
    own = example("lightning_callback")
    first = own.Classifier()
    trainer = own.trainer(1, str(tmp_path))
    trainer.fit(first)
    assert first.losses == losses[:4]
    assert 0.0 < float(trainer.callback_metrics["int8/worst_deviation"]) < 0.5
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    second = own.Classifier()
    own.trainer(2, str(tmp_path)).fit(second, ckpt_path=tmp_path / "one.ckpt")
    assert second.losses == losses[4:]
    again = own.Classifier()
    own.trainer(2, str(tmp_path)).fit(again)
    assert again.losses == losses


@pytest.mark.filterwarnings("ignore")
def test_accelerate_fits_resumes_and_fits_again(example: Any, losses: list[float], tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'byteback[adapters]'")
    train = example("accelerate_loop").train
    folder = str(tmp_path / "state")
    assert train(1, folder) == losses[:4]
    assert train(2, folder, resume=True) == losses[4:]
    assert train(2) == losses


@pytest.mark.slow
def test_plain_ddp_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "plain_ddp.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=EXAMPLES, env=env)
    assert done.returncode == 0, done.stderr
    found = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss")]
    assert len(found) == 8 and found[-1] < found[0]


def test_the_job_file_is_a_shell_script() -> None:
    assert subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sh")], check=False).returncode == 0
    assert "--resume auto" in (EXAMPLES / "slurm.sh").read_text()
