# SPDX-License-Identifier: Apache-2.0
"""`byteback doctor`: what this machine and this build can run, and why other paths cannot."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch

from byteback import tables
from byteback.inspect import machine
from byteback.ops.backends import gpu
from byteback.ops.backends import paths as kernel_paths
from byteback.ops.backends.cpu import library as native_library

_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16")


@dataclass(frozen=True)
class DoctorConfig:
    """Show what this machine and this build can run, and which data sets are present."""

    data_path: str | None = None
    """Folder of the data sets. Default: $BYTEBACK_DATA, or ./data."""


@dataclass(frozen=True)
class Facts:
    """What the rooms above know: the command line fills it in."""

    version: str
    """Of Byteback."""
    data_variable: str
    """The environment variable that names the folder of the data sets."""
    data_sets: Callable[[str | None], list[tuple[str, str]]]
    """From a folder to (name, where it is) of every data set."""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _peak_rows(peaks: dict[str, float]) -> list[list[str]]:
    """Returns the peaks of one core, each with its ratio to float multiply-adds."""
    fastest_float = max((gmacs for name, gmacs in peaks.items() if name.startswith("vfmadd")), default=0.0)
    return [[name, f"{gmacs:.0f}", f"{gmacs / fastest_float:.2f}x"] for name, gmacs in peaks.items()]


def gpu_rows() -> list[list[str]]:
    """Returns each GPU and what runs its operators."""
    if not torch.cuda.is_available():
        return [["none", f"PyTorch {torch.__version__} sees no GPU (docs/13-gpus.md: which are supported)"]]
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    states = [gpu.why_not(device) for device in devices]
    return [
        [f"{device} {torch.cuda.get_device_name(device)}", f"reference: {why}" if why else "triton, after its self-check"]
        for device, why in zip(devices, states, strict=True)
    ]


def run(config: DoctorConfig, console: tables.Console, facts: Facts) -> None:
    """Runs the command."""
    model, flags = machine.cpu()
    peaks = machine.peaks()
    rows = [
        ["byteback", facts.version],
        ["python", sys.version.split()[0]],
        ["torch", torch.__version__],
        *([name, _version(name)] for name in ("torchvision", "numpy", "rich", "tyro", "scikit-learn", "tensorboard", "timm")),
        ["system", f"{platform.system()} {platform.machine()}"],
        ["cpu", model],
        ["flags", " ".join(flag for flag in _FLAGS if flag in flags) or ("none that is used" if flags else "unknown")],
        *([["512 bits", machine.width(peaks)], ["bf16", machine.bf16(flags)]] if flags else []),
        ["threads", str(torch.get_num_threads())],
        *([name, os.environ.get(name, "not set")] for name in (kernel_paths.VARIABLE, facts.data_variable)),
    ]
    console.print(tables.build("This machine", ["what", "is"], rows, left=2))
    if peaks:
        console.print()
        title = "What one core can do, measured on registers"
        console.print(tables.build(title, ["instruction", "GMAC/s", "times float"], _peak_rows(peaks)))
    paths = [[path, kernel_paths.why_not(path) or "can run"] for path in reversed(kernel_paths.PATHS)]
    console.print()
    console.print(tables.build("Paths, fastest first", ["path", "state"], paths, left=2))
    console.print()
    console.print(tables.build("GPUs", ["device", "operators"], gpu_rows(), left=2))
    console.print()
    data_sets = [list(row) for row in facts.data_sets(config.data_path)]
    console.print(tables.build("Data sets", ["name", "where"], data_sets, left=2))
    console.print(f"\noperators use the path {kernel_paths.current()}")
    if native_library.native is None:
        console.print("There is no native library, so all operators use the reference path: correct, but slower than float32.")
