# SPDX-License-Identifier: Apache-2.0
"""`byteback bench ranks`: what the agreement of several ranks sends in a step, beside the gradients that DDP sends.

Calls and bytes are counted in two processes of this machine. They do not depend on the number of ranks, images and pixels. The
times for more ranks are calculated: a ring sends 2 (N - 1) / N times the bytes through each link, and a message needs
2 log2(N) hops, there and back through a tree. Nothing overlaps with backward.
"""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, distributed, multiprocessing
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from byteback import tables
from byteback.bench.training_step import Setting, Side, Variant

_RANKS = (8, 32, 128, 512)
_GBITS = (10, 100, 400)


@dataclass(frozen=True)
class RanksConfig:
    """Count what ranks send in a training step, and calculate its time for more ranks and for several networks."""

    models: tuple[str, ...] = ("resnet18", "resnet50", "mobilenet_v2")
    """Names of networks, as in `byteback bench step`."""
    recipe: str = "unified-int8"
    """Name of the recipe."""
    image_size: int = 64
    """Image size in pixels."""
    hop: float = 10.0
    """Microseconds that a small message takes from one machine to the next."""


@dataclass(frozen=True)
class Sent:
    """What each rank gives to all-reduces in a step: for the agreement, and for the gradients."""

    calls: int
    bytes: int
    gradient_calls: int
    gradient_bytes: int


def run(config: RanksConfig, console: Console) -> None:
    """Runs the command."""
    if not distributed.is_available():
        raise RuntimeError("bench ranks: this build of PyTorch has no torch.distributed, which several ranks need.")
    counted = {name: measured(Setting(name, config.image_size, 2, config.recipe)) for name in config.models}
    columns = ["network", "our calls", "our KiB", "calls of DDP", "MiB of DDP", "bytes"]
    title = f"All-reduces of a step, counted on two ranks, {config.recipe}"
    console.print(tables.build(title, columns, [_row(name, sent) for name, sent in counted.items()]))
    console.print()
    title = f"Calculated milliseconds of a step: ours / DDP's, {config.hop:g} µs for a hop"
    rows = [
        [name, str(ranks), *(_cell(sent, ranks, gbit, config.hop) for gbit in _GBITS)]
        for name, sent in counted.items()
        for ranks in _RANKS
    ]
    console.print(tables.build(title, ["network", "ranks", *(f"{gbit} Gbit/s" for gbit in _GBITS)], rows))


def _row(name: str, sent: Sent) -> list[str]:
    sizes = f"{sent.bytes / 2**10:.1f}", str(sent.gradient_calls), f"{sent.gradient_bytes / 2**20:.1f}"
    return [name, str(sent.calls), *sizes, f"{sent.bytes / sent.gradient_bytes:.2%}"]


def _cell(sent: Sent, ranks: int, gbit: float, hop: float) -> str:
    own = milliseconds(sent.calls, sent.bytes, ranks, gbit, hop)
    return f"{own:.2f} / {milliseconds(sent.gradient_calls, sent.gradient_bytes, ranks, gbit, hop):.1f}"


def milliseconds(calls: int, size: int, ranks: int, gbit: float, hop: float) -> float:
    """Returns the time of all-reduces that have `size` bytes together.

    >>> milliseconds(1, 125_000_000, 2, 10, 0.0), milliseconds(2, 0, 8, 10, 10.0)
    (100.0, 0.12)
    """
    ring = 2 * (ranks - 1) / ranks * size * 8 / (gbit * 1e9)
    return round(1e3 * ring + calls * 2 * math.ceil(math.log2(ranks)) * hop / 1e3, 6)


def measured(setting: Setting) -> Sent:
    """Counts the second step in two processes; in the first one DDP has not yet put the gradients into its buckets."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_count, (folder, setting), nprocs=2)  # type: ignore[attr-defined]
        found: list[int] = torch.load(Path(folder) / "found", weights_only=True)
    return Sent(*found)


def _count(rank: int, folder: str, setting: Setting) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")  # as in train/ranks/step.py
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    side = Side(setting, Variant("int8", channels_last=False))
    parallel = DistributedDataParallel(side.model)
    side.call = parallel
    parallel.register_comm_hook(distributed.group.WORLD, allreduce_hook)
    own: list[int] = []
    gradients: list[int] = []
    distributed.all_reduce = _counted(distributed.all_reduce, own, gradients)
    for _ in range(2):
        own.clear()
        gradients.clear()
        side.step()
    if rank == 0:
        torch.save([len(own), sum(own), len(gradients), sum(gradients)], Path(folder) / "found")
    distributed.barrier()
    os._exit(0)  # threads of gloo may abort a process that cleans up (pytorch#179291)


def _counted(reduce: Callable[..., Any], own: list[int], gradients: list[int]) -> Callable[..., Any]:
    """Returns all_reduce that also notes the bytes of its tensor. Only DDP does not wait for the result."""

    def counted(tensor: Tensor, *rest: Any, async_op: bool = False, **named: Any) -> Any:
        (gradients if async_op else own).append(tensor.numel() * tensor.element_size())
        return reduce(tensor, *rest, async_op=async_op, **named)

    return counted
