# SPDX-License-Identifier: Apache-2.0
"""INT8 training with Accelerate: prepare the model before `accelerator.prepare`, and connect the optimizer after it.

accelerate launch --cpu examples/accelerate_loop.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from digits import batches, network
from torch.nn import functional as F

import byteback


def train(epochs: int, folder: str | None = None, resume: bool = False) -> list[float]:
    """Trains, and saves after every epoch if there is a folder. Returns the losses."""
    accelerator = Accelerator(cpu=True)
    model = byteback.prepare(network(), "unified-int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parallel, wrapped = accelerator.prepare(model, optimizer)
    byteback.scale_learning_rates(wrapped, model)
    first, losses = 0, []
    if folder and resume:
        accelerator.load_state(folder)
        first = int((Path(folder) / "epochs").read_text())
    for epoch in range(first, epochs):
        for images, labels in batches(epoch, rank=accelerator.process_index, ranks=accelerator.num_processes):
            loss = F.cross_entropy(parallel(images), labels)
            wrapped.zero_grad()
            accelerator.backward(loss)
            wrapped.step()
            losses.append(loss.item())
        if folder:
            accelerator.save_state(folder)
            (Path(folder) / "epochs").write_text(str(epoch + 1))
    return losses


if __name__ == "__main__":
    print(*(f"loss {loss:.6f}" for loss in train(2, *sys.argv[1:2])), sep="\n")
