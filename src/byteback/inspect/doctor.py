# SPDX-License-Identifier: Apache-2.0
"""`byteback doctor`: what this machine and this build can run, and why other paths cannot."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from byteback import tables
from byteback.ops.backends import paths as kernel_paths
from byteback.ops.backends.cpu import library as native_library

_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")


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


def _cpu() -> tuple[str, str]:
    """Returns (model, relevant instruction sets), as far as they are known."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine(), "unknown"
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    flags = set(fields.get("flags", "").split())
    return fields.get("model name", platform.machine()), " ".join(f for f in _FLAGS if f in flags) or "none that is used"


def run(config: DoctorConfig, console: tables.Console, facts: Facts) -> None:
    """Runs the command."""
    model, flags = _cpu()
    rows = [
        ["byteback", facts.version],
        ["python", sys.version.split()[0]],
        ["torch", torch.__version__],
        *([name, _version(name)] for name in ("torchvision", "numpy", "rich", "tyro", "scikit-learn", "tensorboard", "timm")),
        ["system", f"{platform.system()} {platform.machine()}"],
        ["cpu", model],
        ["flags", flags],
        ["threads", str(torch.get_num_threads())],
        *([name, os.environ.get(name, "not set")] for name in (kernel_paths.VARIABLE, facts.data_variable)),
    ]
    console.print(tables.build("This machine", ["what", "is"], rows, left=2))
    paths = [[path, kernel_paths.why_not(path) or "can run"] for path in reversed(kernel_paths.PATHS)]
    console.print()
    console.print(tables.build("Paths, fastest first", ["path", "state"], paths, left=2))
    console.print()
    data_sets = [list(row) for row in facts.data_sets(config.data_path)]
    console.print(tables.build("Data sets", ["name", "where"], data_sets, left=2))
    console.print(f"\noperators use the path [bold]{kernel_paths.current()}[/]")
    if native_library.native is None:
        console.print("There is no native library, so all operators use the reference path: correct, but slower than float32.")
