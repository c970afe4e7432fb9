# SPDX-License-Identifier: Apache-2.0
"""What the processes of test_lr_ranks.py run: one small network on several ranks, each of which sees data of its own."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import byteback
from byteback.recipes import resolve

RECIPES = ("plain-int8", "unified-int8", "distribution-adaptive-int8")


def network(recipe: str, on_nonfinite: str = "raise", fuse: bool = True) -> nn.Sequential:
    """Float, int8 with a norm in one block, int8 that is called twice, float."""
    torch.manual_seed(0)
    twice = nn.Conv2d(8, 8, 3, padding=1)
    inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), twice, nn.ReLU(), twice)
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), inner, nn.Flatten(), nn.Linear(288, 3))
    return byteback.prepare(model, replace(resolve(recipe), on_nonfinite=on_nonfinite, strict=True), fuse=fuse)


def images(draw: torch.Generator) -> Tensor:
    return torch.randn(4, 2, 8, 8, generator=draw)


def step(run: nn.Module, optimizer: Optimizer, draw: torch.Generator, factor: float = 1.0) -> None:
    """One training step; a `factor` of NaN spoils its gradients."""
    batch, labels = images(draw), torch.randint(0, 3, (4,), generator=draw)
    optimizer.zero_grad()
    (nn.functional.cross_entropy(run(batch), labels) * factor).backward()
    optimizer.step()


def digest(tensors: Iterable[Tensor]) -> str:
    """Equal where all bits are."""
    summary = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        summary.update(whole.detach().contiguous().numpy().tobytes())
    return summary.hexdigest()[:16]


def replicated(recipe: str, on_nonfinite: str, steps: int, spoiled: Sequence[int] = ()) -> dict[str, Any]:
    """Trains under DistributedDataParallel; rank 1 meets NaN in the `spoiled` steps. What all ranks must have in common."""
    model = network(recipe, on_nonfinite)
    run, optimizer = DistributedDataParallel(model), SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaling = byteback.scale_learning_rates(optimizer, model)
    draw = torch.Generator().manual_seed(dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that steps are dropped
        for number in range(steps):
            bad = number in spoiled and dist.get_rank() == 1
            step(run, optimizer, draw, float("nan") if bad else 1.0)
    memory = {name: buffer for name, buffer in model.named_buffers() if "quantizers" in name}
    norm = model[2][1]
    norm.running_mean.zero_(), norm.running_var.fill_(1.0)  # those are each rank's own, as in float
    with torch.no_grad():
        predicted = model.eval()(torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(9)))
    return {
        "weights": digest(model.parameters()),
        "memory": {name: digest([buffer]) for name, buffer in memory.items()},
        "predictions": digest([predicted]),
        "factors": scaling.factors(),
        "skipped": scaling.skipped,
        "finite": all(bool(parameter.isfinite().all()) for parameter in model.parameters()),
    }


def meet(rank: int, file: str, ranks: int = 2) -> None:
    """Joins the other processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)


def leave() -> None:
    """Ends the process; two_ranks.py says why in this way."""
    dist.destroy_process_group()
    os._exit(0)
