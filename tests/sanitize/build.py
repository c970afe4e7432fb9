# SPDX-License-Identifier: Apache-2.0
"""Builds the native library with AddressSanitizer and UndefinedBehaviorSanitizer in build/sanitize, beside the ordinary one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "sanitize"
SOURCES = [ROOT / "CMakeLists.txt", *sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())]


def library() -> Path | None:
    """The sanitized library; None where there is none."""
    return next(iter(FOLDER.glob("package/byteback/_native*.so")), None)


def is_older(made: Path | None, sources: list[Path]) -> bool:
    return made is None or not made.exists() or any(source.stat().st_mtime > made.stat().st_mtime for source in sources)


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def runtime(name: str) -> str:
    """Where the compiler keeps one of its libraries; it must be loaded before Python's own."""
    path = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        raise SystemExit(
            f"make sanitize: {compiler()} has no {name}. Install the sanitizers of your compiler (they come with Debian's "
            "g++), or name another compiler: CXX=g++-12 make sanitize"
        )
    return str(Path(path).resolve())


def build() -> Path:
    """The library, built if a source is newer."""
    made = library()
    if is_older(made, SOURCES):
        print("Building the native library with its sanitizers (some minutes)", flush=True)
        shutil.rmtree(FOLDER / "package", ignore_errors=True)
        settings = {
            "build-dir": str(FOLDER / "objects"),
            "cmake.build-type": "RelWithDebInfo",
            "cmake.define.BYTEBACK_SANITIZE": "ON",
        }
        command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
        command += [f"--config-settings={name}={value}" for name, value in settings.items()]
        subprocess.run([*command, "--target", str(FOLDER / "package"), str(ROOT)], check=True)
        made = library()
    assert made is not None
    return made
