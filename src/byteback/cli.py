# SPDX-License-Identifier: Apache-2.0
"""The command `byteback`. Its flags come from dataclasses; there is no parser here.

byteback train      trains a small ResNet on embedded data in float32 and in int8, side by side
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from byteback.train.config import TrainConfig

_NEEDS = "the command line needs {name}, which is not installed. Install it: pip install 'byteback[train]'"


def main() -> None:
    """Entry point of the console script."""
    try:
        import tyro
        from rich.console import Console

        from byteback.train.config import TrainConfig
        from byteback.train.side_by_side import side_by_side
    except ImportError as error:
        sys.exit(f"byteback: {_NEEDS.format(name=error.name)}")

    commands: dict[str, Callable[..., TrainConfig]] = {"train": TrainConfig}
    config = tyro.extras.subcommand_cli_from_dict(commands, prog="byteback", description="INT8 training of CNNs.")
    console = Console()
    try:
        side_by_side(config, console)
    except (ValueError, ImportError) as error:
        sys.exit(f"byteback: {error}")
    except KeyboardInterrupt:
        sys.exit("\nbyteback: stopped. Nothing was written.")
