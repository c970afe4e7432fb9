# SPDX-License-Identifier: Apache-2.0
"""A whole training step, float32 against the recipes, interleaved in one process: median ratios.

    .venv/bin/python benchmarks/step.py resnet18                 default malloc
    .venv/bin/python benchmarks/step.py resnet18 --tuned-malloc  both sides keep freed memory

The loop is the README's: model, loss, backward, optimizer, learning-rate hook. Both sides use channels_last.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

import byteback
from byteback.bench.shapes import NETWORKS

RECIPES = (None, "unified-int8", "distribution-adaptive-int8")


def build(name: str, size: int, recipe: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = byteback.models.build(name, image_size=size).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if recipe:
        byteback.prepare(model, recipe)
        byteback.scale_learning_rates(optimizer, model)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor) -> float:
    start = time.perf_counter()
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tuned-malloc", action="store_true")
    options = parser.parse_args()
    if options.tuned_malloc:
        byteback.tune_malloc()
    name, size, batch = NETWORKS[options.network]
    images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch,))
    runs = {recipe or "float32": build(name, size, recipe) for recipe in RECIPES}
    for run in runs.values():
        step(*run, images, labels)
    times = {recipe: [] for recipe in runs}
    for _ in range(options.rounds):
        for recipe, run in runs.items():
            times[recipe].append(step(*run, images, labels))
    malloc = "tuned" if options.tuned_malloc else "default"
    print(
        f"{options.network}, {size}x{size}, batch {batch}, {torch.get_num_threads()} threads, {malloc} malloc, "
        f"PyTorch on {torch.backends.cpu.get_cpu_capability()}, ours on {byteback.ops.native.current()}"
    )
    for recipe, measured in times.items():
        ratio = statistics.median(a / b for a, b in zip(times["float32"], measured, strict=True))
        print(f"{recipe:<28} {1e3 * statistics.median(measured):8.1f} ms   {ratio:.2f}x")


if __name__ == "__main__":
    main()
