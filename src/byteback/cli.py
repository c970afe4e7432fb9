# SPDX-License-Identifier: Apache-2.0
"""The command `byteback`. Its flags come from dataclasses; there is no parser here.

byteback train            a small ResNet on embedded data in float32 and in int8, side by side
byteback bench kernels    the three products of a network's layers against PyTorch FP32
byteback verify           every native path against the reference on this machine
byteback doctor           what this machine and this build can run, and why
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_NEEDS = "the command line needs {name}, which is not installed. Install it: pip install 'byteback[train]'"


def main() -> None:
    """Entry point of the console script."""
    try:
        import tyro
        from rich.console import Console

        from byteback import __version__
        from byteback.bench import doctor, kernels, verify
        from byteback.train import side_by_side
        from byteback.train.config import TrainConfig
    except ImportError as error:
        sys.exit(f"byteback: {_NEEDS.format(name=error.name)}")

    if sys.argv[1:] == ["--version"]:
        print(f"byteback {__version__}")
        return
    if not sys.argv[1:]:
        sys.argv.append("--help")
    # name -> (dataclass with the flags, what to do with it); a command that returns False has failed
    commands: dict[str, tuple[type, Callable[[Any, Console], Any]]] = {
        "train": (TrainConfig, side_by_side.run),
        "bench": (kernels.KernelsConfig, kernels.run),
        "verify": (verify.VerifyConfig, verify.run),
        "doctor": (doctor.DoctorConfig, doctor.run),
    }
    config = tyro.extras.subcommand_cli_from_dict(
        {name: flags for name, (flags, _) in commands.items()}, prog="byteback", description="INT8 training of CNNs."
    )
    run = next(command for flags, command in commands.values() if flags is type(config))
    try:
        # A pipe has no width of its own, and rich would fold wide tables to 80 columns.
        failed = run(config, Console(width=None if sys.stdout.isatty() else 180)) is False
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        sys.exit(f"byteback: {error}")
    except KeyboardInterrupt:
        sys.exit("\nbyteback: stopped. Nothing was written.")
    sys.exit(1 if failed else 0)
