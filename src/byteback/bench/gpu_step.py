# SPDX-License-Identifier: Apache-2.0
"""`byteback bench step --device cuda`: times a whole training step on a GPU, int8 against TF32 and bf16 autocast.

The sides take turns, one step of each per round; a ratio is the median over rounds. Every step ends with a synchronization.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

import byteback
from byteback import tables
from byteback.ops.backends import gpu
from byteback.train.variants import parse

if TYPE_CHECKING:
    from byteback.bench.step import StepConfig
    from byteback.bench.training_step import Setting

_WARM_UP, _ROUNDS = 3, 20


def run(config: StepConfig, console: tables.Console) -> None:
    """Runs the command."""
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"bench step: device is {config.device}, but PyTorch {torch.__version__} sees no GPU. Use --device cpu."
        )
    why = gpu.why_not(torch.device("cuda", device.index or 0)) if device.type == "cuda" else ""
    if why:
        raise ValueError(f"bench step: int8 has no kernels for {config.device}: {why}.")
    setting = config.setting()
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
        True  # else float32 would be slower than it can be
    )
    try:
        times = measure(setting, device, _ROUNDS if config.rounds is None else config.rounds)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    rows = [
        [name, f"{median(own):.2f}", f"{median(a / b for a, b in zip(own, times['int8'], strict=True)):.2f}x"]
        for name, own in times.items()
    ]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    title = f"A training step of {setting.model}, {setting.batch} images of {setting.sample}, on {name}"
    console.print(tables.build(title, ["side", "ms", "times int8"], rows))
    if config.json is not None:
        config.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "ms": times}, indent=1))


def measure(setting: Setting, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each round, for each side."""
    sides = {name: _step(setting, device, name) for name in ("TF32", "bf16", "int8")}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(_WARM_UP + rounds):
        for name, step in sides.items():
            begun = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if index >= _WARM_UP:
                times[name].append((time.perf_counter() - begun) * 1e3)
    return times


def _step(setting: Setting, device: torch.device, side: str) -> Callable[[], None]:
    """Returns a function that runs one training step of a side."""
    torch.manual_seed(0)
    model = setting.build()
    if side == "int8":
        recipe = parse(setting.recipe).recipe
        assert recipe is not None  # StepConfig.setting has checked it
        byteback.prepare(model, recipe)
    model = model.to(device)
    if len(setting.sample) == 3:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if side == "int8":
        byteback.scale_learning_rates(optimizer, model)
    images = torch.randn(setting.batch, *setting.sample, device=device)
    labels = torch.randint(0, setting.classes, (setting.batch,), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=side == "bf16"):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step
