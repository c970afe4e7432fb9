# SPDX-License-Identifier: Apache-2.0
"""The command `byteback`. Its flags come from dataclasses; there is no parser here.

byteback train            trains a network in float32 and in int8 with the same seeds and data, and compares them
byteback report           writes an HTML page about runs: table, curves, speed, memory, layers, gradients
byteback eval             evaluates a checkpoint on the test images
byteback predict          prints and saves the predictions of a trained network for images
byteback export           writes a trained network to an ONNX file, and compares the file with it
byteback recipes, models  lists the recipes, or the networks
byteback bench step       times a training step of a network against PyTorch FP32 and bf16, with its parts and its memory
byteback bench memory     measures the peak memory of training a network against PyTorch FP32, part by part
byteback bench recipes    times a training step under several recipes, in turns
byteback bench growth     the same ratios for several batch sizes and image sizes
byteback bench ranks      counts what several ranks send in a step, and calculates its time for more of them
byteback bench inference  times the forward pass in eval mode against PyTorch FP32
byteback bench roofline   estimates a training step on a GPU, layer by layer, beside bf16 and TF32
byteback bench detect     times a training step of a detector, and the part of its network
byteback bench kernels    times the three products of the layers of a network against PyTorch FP32
byteback verify           compares every native path with the reference on this machine
byteback doctor           shows what this machine and this build can run, and why
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, Union

_NEEDS = "the command line needs {name}, which is not installed. Install it: pip install 'byteback[train]'"


def main() -> None:
    """Entry point of the console script."""
    try:
        import tyro
        from rich.console import Console

        from byteback import __version__
        from byteback.bench import detect, gpu_step, growth, inference, kernels, memory, ranks, recipes, roofline, step
        from byteback.inspect import doctor, verify
        from byteback.report_page import command as report
        from byteback.train import config_file, data, evaluate, export, listing, predict, side_by_side
        from byteback.train.config import TrainConfig
    except ImportError as error:
        sys.exit(f"byteback: {_NEEDS.format(name=error.name)}")

    if sys.argv[1:] == ["--version"]:
        print(f"byteback {__version__}")
        return
    if not sys.argv[1:]:
        sys.argv.append("--help")
    warnings.formatwarning = lambda message, *_, **__: (
        f"byteback: warning: {message}\n"
    )  # the line of code does not help a user
    facts = doctor.Facts(__version__, data.VARIABLE, data.state)
    # name -> (dataclass of the flags, function); a function that returns False has failed, a number is the exit code
    commands: dict[str, tuple[type, Callable[[Any, Console], Any]]] = {
        "train": (TrainConfig, functools.partial(side_by_side.run, when_done=report.after_training)),
        "report": (report.ReportConfig, report.run),
        "eval": (evaluate.EvalConfig, evaluate.run),
        "predict": (predict.PredictConfig, predict.run),
        "export": (export.ExportConfig, export.run),
        "recipes": (listing.RecipesConfig, listing.recipes),
        "models": (listing.ModelsConfig, listing.model_names),
        "bench kernels": (kernels.KernelsConfig, kernels.run),
        "bench step": (
            step.StepConfig,
            lambda config, console: (gpu_step if config.device != "cpu" else step).run(config, console),
        ),
        "bench memory": (memory.MemoryConfig, memory.run),
        "bench recipes": (recipes.RecipesConfig, recipes.run),
        "bench growth": (growth.GrowthConfig, growth.run),
        "bench ranks": (ranks.RanksConfig, ranks.run),
        "bench roofline": (roofline.RooflineConfig, roofline.run),
        "bench inference": (inference.InferenceConfig, inference.run),
        "bench detect": (detect.DetectConfig, detect.run),
        "verify": (verify.VerifyConfig, verify.run),
        "doctor": (doctor.DoctorConfig, functools.partial(doctor.run, facts=facts)),
    }
    bench = _bench({name.split()[1]: kind for name, (kind, _) in commands.items() if name.startswith("bench ")})
    flags: dict[str, Any] = {name.split()[0]: bench if " " in name else kind for name, (kind, _) in commands.items()}
    try:
        if sys.argv[1] == "train":  # its default values may come from a file
            config = config_file.from_command_line(sys.argv[2:])
        else:
            config = tyro.extras.subcommand_cli_from_dict(flags, prog="byteback", description="INT8 training of CNNs.")
        run = next(command for kind, command in commands.values() if kind is type(config))
        # A pipe has no width, and rich would wrap wide tables at 80 columns.
        code = run(config, Console(width=None if sys.stdout.isatty() else 180, markup=False))
    except BrokenPipeError:
        # The reader has closed the output (`byteback models | head`): print nothing, also not when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        _end(f"byteback: {error}" if str(error) and not _another_says(error) else "", 1)
    except KeyboardInterrupt:
        print("\nbyteback: stopped at once; the last saved checkpoint is still there.", file=sys.stderr)
        sys.exit(130)
    _end("", 1 if code is False else code if isinstance(code, int) and code is not True else 0)


def _another_says(error: Exception) -> bool:
    """Whether this is not the first of several ranks, and all of them raise the same error."""
    from byteback.train.ranks.world import is_shared

    return is_shared(error) and os.environ.get("RANK", "0") != "0"


def _end(message: str, code: int) -> None:
    """Ends the process. One of several leaves without clean-up, in which threads of gloo may abort it (pytorch#179291)."""
    if message:
        print(message, file=sys.stderr)
    if os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _bench(kinds: dict[str, type]) -> Callable[[Any], Any]:
    """Returns the command `byteback bench`: a function whose only argument is one of its subcommands."""
    import tyro

    def bench(what: Any) -> Any:
        """Time int8 against PyTorch FP32: kernels alone, a step, its memory, its growth, ranks, inference, a detector."""
        return what

    named = tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in kinds.items())
    bench.__annotations__["what"] = Annotated[Union[named], tyro.conf.arg(name="")]  # noqa: UP007
    return bench
