# SPDX-License-Identifier: Apache-2.0
"""The command `byteback`. Its flags come from dataclasses; there is no parser here.

byteback train            a small ResNet on embedded data in float32 and in int8, side by side
byteback bench step       a network's whole training step against PyTorch FP32, with its parts and its memory
byteback bench growth     the same ratio over batch and image sizes
byteback bench inference  the forward pass in eval mode against PyTorch FP32
byteback bench kernels    the three products of a network's layers against PyTorch FP32
byteback verify           every native path against the reference on this machine
byteback doctor           what this machine and this build can run, and why
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, Union

_NEEDS = "the command line needs {name}, which is not installed. Install it: pip install 'byteback[train]'"


def main() -> None:
    """Entry point of the console script."""
    try:
        import tyro
        from rich.console import Console

        from byteback import __version__
        from byteback.bench import doctor, growth, inference, kernels, step, verify
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
        "bench kernels": (kernels.KernelsConfig, kernels.run),
        "bench step": (step.StepConfig, step.run),
        "bench growth": (growth.GrowthConfig, growth.run),
        "bench inference": (inference.InferenceConfig, inference.run),
        "verify": (verify.VerifyConfig, verify.run),
        "doctor": (doctor.DoctorConfig, doctor.run),
    }
    bench = _bench({name.split()[1]: kind for name, (kind, _) in commands.items() if name.startswith("bench ")})
    flags: dict[str, Any] = {name.split()[0]: bench if " " in name else kind for name, (kind, _) in commands.items()}
    config = tyro.extras.subcommand_cli_from_dict(flags, prog="byteback", description="INT8 training of CNNs.")
    run = next(command for kind, command in commands.values() if kind is type(config))
    try:
        # A pipe has no width of its own, and rich would fold wide tables to 80 columns.
        failed = run(config, Console(width=None if sys.stdout.isatty() else 180)) is False
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        sys.exit(f"byteback: {error}")
    except KeyboardInterrupt:
        sys.exit("\nbyteback: stopped. Nothing was written.")
    sys.exit(1 if failed else 0)


def _bench(kinds: dict[str, type]) -> Callable[[Any], Any]:
    """The command of commands `byteback bench`: a function whose only argument is one of them."""
    import tyro

    def bench(what: Any) -> Any:
        """Measure against PyTorch FP32: the kernels alone, a whole training step, or inference."""
        return what

    named = tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in kinds.items())
    bench.__annotations__["what"] = Annotated[Union[named], tyro.conf.arg(name="")]  # noqa: UP007
    return bench
