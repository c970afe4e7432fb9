# SPDX-License-Identifier: Apache-2.0
"""`byteback doctor`: what this machine and this build can run, and why not more."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console

from byteback import __version__, tables
from byteback.ops.backends import paths as kernel_paths
from byteback.ops.backends.cpu import library as native_library
from byteback.train import data

_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")


@dataclass(frozen=True)
class DoctorConfig:
    """Say what this machine and this build can run, and why; and which data sets are here."""

    data_path: str | None = None
    """Where the data sets lie. Default: $BYTEBACK_DATA, else ./data."""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> tuple[str, str]:
    """(model, flags that matter), as far as the system tells."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine(), "unknown"
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    flags = set(fields.get("flags", "").split())
    return fields.get("model name", platform.machine()), " ".join(f for f in _FLAGS if f in flags) or "none of note"


def run(config: DoctorConfig, console: Console) -> None:
    """The command."""
    model, flags = _cpu()
    rows = [
        ["byteback", __version__],
        ["python", sys.version.split()[0]],
        ["torch", torch.__version__],
        *([name, _version(name)] for name in ("torchvision", "numpy", "rich", "tyro", "scikit-learn", "tensorboard", "timm")),
        ["system", f"{platform.system()} {platform.machine()}"],
        ["cpu", model],
        ["flags", flags],
        ["threads", str(torch.get_num_threads())],
        *([name, os.environ.get(name, "not set")] for name in (kernel_paths.VARIABLE, data.VARIABLE)),
    ]
    console.print(tables.build("This machine", ["what", "is"], rows, left=2))
    paths = [[path, kernel_paths.why_not(path) or "can run"] for path in reversed(kernel_paths.PATHS)]
    console.print()
    console.print(tables.build("Paths, fastest first", ["path", "state"], paths, left=2))
    console.print()
    console.print(tables.build("Data sets", ["name", "where"], [list(row) for row in data.state(config.data_path)], left=2))
    console.print(f"\noperators take the path [bold]{kernel_paths.current()}[/]")
    if native_library.native is None:
        console.print("There is no native library, so everything runs on the reference path: right, but slower than float32.")
