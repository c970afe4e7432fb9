# SPDX-License-Identifier: Apache-2.0
"""`byteback bench step`: times a whole training step of a network, int8 against PyTorch FP32 and bf16 autocast.

The step is the loop of the README: data, loss, backward, optimizer with its learning-rate hook. The sides take turns in one
process, float32 and bf16 in their faster memory format, and a ratio is the median over rounds. It is measured with default
malloc and with tuned malloc, each in a separate process. Further processes measure the memory of each side. A CPU without
bfloat16 instructions has no bf16 side.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from byteback import models, tables
from byteback.bench.shapes import NETWORKS
from byteback.bench.step_worker import Job
from byteback.bench.training_step import CAN_FUSE, Setting, Variant
from byteback.inspect import machine
from byteback.suggestions import unknown
from byteback.train.variants import parse

# model -> (image size, batch) of the published tables; for other networks of torchvision 224 pixels and 16 images
DEFAULTS = {
    **{model: (size, batch) for model, size, batch in NETWORKS.values()},
    "resnet8": (32, 128),
    "resnet56": (32, 128),
    "vgg16": (32, 128),
    **dict.fromkeys(("r3d_18", "mc3_18", "r2plus1d_18"), (112, 2)),
}
_ELSE = (224, 16)
LOSS_TOLERANCE = 0.02
_TIMES = ("ratio", "ratio_bf16", "fp32_ms", "bf16_ms", "int8_ms")  # None for a bf16 that the CPU does not have


@dataclass(frozen=True)
class StepConfig:
    """Time a network's training step in int8 against PyTorch FP32 and bf16 autocast, part by part, and measure its memory."""

    model: str = "resnet18"
    """resnet18, resnet20, resnet50, resnet56, mobilenet_v2, vgg16_bn, inception_v3, r3d_18, or any of torchvision's."""
    image_size: int | None = None
    """Pixels of a side. The default depends on the network."""
    batch: int | None = None
    """Images per step. The default depends on the network."""
    recipe: str = "unified-int8"
    """plain-int8, unified-int8 or distribution-adaptive-int8, optionally with options: unified-int8:norm_memory=int8."""
    json: Path | None = None
    """Write the results to this file."""
    rounds: int | None = None
    """Number of rounds of one step per side. Default: as many as fit into --seconds, but at least 5."""
    seconds: float = 20.0
    """Approximate duration of all rounds with one malloc setting."""
    device: str = "cpu"
    """cpu, or a GPU such as cuda or cuda:1. On a GPU only times are measured (docs/13-gpus.md)."""
    compile: bool = False
    """Also run FP32 and bf16 with torch.compile, and use the fastest."""
    explain: bool = False
    """Also list the slowest operators of every side."""

    def setting(self) -> Setting:
        """Checks the flags. Returns the network and its sizes, without building it."""
        size, batch = DEFAULTS.get(self.model, _ELSE)
        size = size if self.image_size is None else self.image_size
        batch = batch if self.batch is None else self.batch
        if batch < 2:
            raise ValueError(
                f"bench step: batch is {batch}; BatchNorm needs at least 2 images to average. Pass --batch 2 or more."
            )
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"bench step: rounds is {self.rounds}; it must be at least 1. Remove it to use the default.")
        if self.seconds <= 0:
            raise ValueError(f"bench step: seconds is {self.seconds}; it must be positive.")
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise ValueError(f"bench step: cannot write {self.json}, there is no folder {self.json.parent}. Create it first.")
        if parse(self.recipe).recipe is None:
            raise ValueError("bench step: the recipe is float32, which int8 is compared with. Choose an int8 recipe.")
        _check_name(self.model)
        setting = Setting(self.model, size, batch, self.recipe)
        _check_fits(setting)
        return setting


def _check_name(name: str) -> None:
    known = sorted({*models.names(models.SMALL_IMAGE), *models.names(_ELSE[0])})
    if name not in known:
        raise unknown("bench step", "network", name, known)


def _check_fits(setting: Setting) -> None:
    """Runs the network on meta tensors, so that a size that does not fit fails now and not in a worker."""
    with torch.device("meta"):
        model = setting.build().eval()
        try:
            with torch.no_grad():
                output = model(torch.empty(setting.batch, *setting.sample))
        except (RuntimeError, ValueError, TypeError) as error:
            raise ValueError(
                f"bench step: {setting.model} cannot take {setting.batch} inputs of shape {setting.sample}: "
                f"{str(error).splitlines()[0]}. Try another --image-size, or a network for classification."
            ) from error
    if not isinstance(output, torch.Tensor) or output.shape != (setting.batch, setting.classes):
        raise ValueError(
            f"bench step: {setting.model} is not a network for classification: its output is not one tensor of "
            f"{setting.classes} logits per image. Choose another network."
        )


def run_job(job: Job, on_progress: Callable[[int, int, str], None]) -> dict[str, Any]:
    """Runs a job in a separate process. The process has always ended when this returns or raises."""
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            [sys.executable, "-m", "byteback.bench.step_worker", job.to_json()],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        result: dict[str, Any] | None = None
        failure = ""
        try:
            assert worker.stdout is not None
            for line in worker.stdout:
                answer = json.loads(line)
                result, failure = answer.get("result", result), answer.get("error", failure)
                if "done" in answer:
                    on_progress(answer["done"], answer["total"], answer["text"])
            code = worker.wait()
        finally:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
        if result is None:
            errors.seek(0)
            lines = errors.read().strip().splitlines()
            why = failure or (
                lines[-1] if lines else f"Its process ended with code {code}, perhaps because of too little memory"
            )
            raise RuntimeError(f"bench step: measuring {job.what} of {job.setting.model} failed. {why}")
    return result


def measure(config: StepConfig, setting: Setting, console: Console) -> dict[str, Any]:
    """Runs every job, with a progress bar for each. Returns the results for the JSON file."""
    bars = (TextColumn("{task.description:<16}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*bars, console=console, transient=True) as progress:

        def do(title: str, job: Job) -> dict[str, Any]:
            task = progress.add_task(title, total=None, text="starting")
            result = run_job(job, lambda done, total, text: progress.update(task, completed=done, total=total, text=text))
            progress.update(task, completed=1, total=1, text="done")
            return result

        bf16 = not machine.why_no_bf16()
        timing = {"rounds": config.rounds, "seconds": config.seconds, "compile": config.compile, "bf16": bf16}
        plain = do("default malloc", Job("time", setting, **timing))  # type: ignore[arg-type]
        tuned = do("tuned malloc", Job("time", setting, tuned_malloc=True, parts=False, **timing))  # type: ignore[arg-type]
        variants = {numbers: Variant(numbers, last) for numbers, last in plain["channels_last"].items()}
        if CAN_FUSE:
            variants["unfused"] = Variant("int8", plain["channels_last"]["int8"], fused=False)
        memory = {name: do(f"memory {name}", Job("memory", setting, variant=v)) for name, v in variants.items()}
    return figures(setting, plain, tuned, memory)


def figures(setting: Setting, plain: dict[str, Any], tuned: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    """Returns the contents of the JSON file. Ratios of time are FP32 (or bf16) / int8, ratios of memory int8 / FP32."""
    fp32, int8 = memory["fp32"], memory["int8"]
    losses = {name: result["losses"] for name, result in memory.items()}
    peaks = (fp32["peak"], int8["peak"])
    return {
        "model": setting.model,
        "image_size": setting.image_size,
        "batch": setting.batch,
        "recipe": setting.recipe,
        **{name: plain[name] for name in _TIMES},
        **{f"{name}_tuned_malloc": tuned[name] for name in _TIMES},
        "saved_ratio": int8["saved"] / fp32["saved"],
        "peak_ratio": peaks[1] / peaks[0] if all(peaks) else None,
        "parts": plain["parts"],
        "saved_bytes": {name: result["saved"] for name, result in memory.items()},
        "saved_by_dtype": {name: result["saved_by_dtype"] for name, result in memory.items()},
        "peak_bytes": {name: result["peak"] for name, result in memory.items()},
        "losses": losses,
        "loss_difference_unfused": _difference(losses["int8"], losses["unfused"]) if "unfused" in losses else None,
        "loss_difference_fp32": _difference(losses["int8"], losses["fp32"]),
        "operators": plain["operators"],
        **{name: plain[name] for name in ("malloc", "formats", "rounds", "path", "threads", "capability")},
        "malloc_tuned": tuned["malloc"],
        "formats_tuned_malloc": tuned["formats"],
    }


def _difference(ours: list[float], theirs: list[float]) -> float:
    """Returns the largest relative difference; infinity if a loss is NaN."""
    apart = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True)]
    return max(value if value == value else float("inf") for value in apart)


def _rounded(value: Any) -> Any:
    """Rounds all numbers to four digits after the point: smaller differences are noise."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def run(config: StepConfig, console: Console) -> bool:
    """Runs the command. Returns False if the losses of the fused and the unfused path differ."""
    setting = config.setting()
    console.print(
        f"{setting.model}, {'x'.join(map(str, setting.sample[1:]))} pixels, batch {setting.batch}, {setting.recipe}\n"
    )
    if why := machine.why_no_bf16():
        console.print(f"bf16 autocast is left out: {why}\n")
    result = measure(config, setting, console)
    show(result, console, config.explain)
    if config.json:
        config.json.write_text(json.dumps(_rounded(result), indent=2) + "\n")
        console.print(f"written to {config.json}")
    return result["loss_difference_unfused"] is None or result["loss_difference_unfused"] <= LOSS_TOLERANCE


def show(result: dict[str, Any], console: Console, explain: bool) -> None:
    """Prints the results as tables."""
    formats = ", ".join(f"{numbers} {form}" for numbers, form in result["formats"].items())
    console.print(
        f"path {result['path']}, {result['threads']} threads, PyTorch uses {result['capability']}; median of "
        f"{result['rounds']} interleaved rounds; {formats}\n"
    )
    console.print(tables.build("A training step", *_time_table(result)))
    console.print()
    console.print(tables.build("Where the time goes (default malloc)", *_part_table(result)))
    console.print()
    columns = ["", *result["saved_bytes"], "int8 / fp32"]
    console.print(tables.build("Memory, MB", columns, _memory_rows(result)))
    if explain:
        for side, operators in result["operators"].items():
            rows = [[name, f"{value:.1f}"] for name, value in operators.items()]
            console.print()
            console.print(tables.build(f"Slowest operators, {side}", ["operator", "ms"], rows))
    console.print(f"\n{_losses(result)}")


def _time_table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows: the milliseconds of the sides, and how many times faster int8 is than the others."""
    ratios = {"fp32": "ratio", "bf16": "ratio_bf16"}
    others = [numbers for numbers in ratios if numbers in result["formats"]]
    columns = ["malloc", *(f"{numbers} ms" for numbers in (*others, "int8")), *(f"faster than {numbers}" for numbers in others)]
    rows = [
        [malloc, *(f"{result[f'{numbers}_ms{suffix}']:.1f}" for numbers in (*others, "int8"))]
        + [f"{result[ratios[numbers] + suffix]:.2f}x" for numbers in others]
        for malloc, suffix in ((result["malloc"], ""), (result["malloc_tuned"], "_tuned_malloc"))
    ]
    return columns, rows


def _part_table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows: the phases in order, each followed by its kinds of operators that take a relevant time."""
    sides = [f"{numbers}_ms" for numbers in result["formats"]]
    rows = []
    for phase in ("data", "forward", "backward", "optimizer"):
        own = {name: part for name, part in result["parts"].items() if name == phase or name.startswith(f"{phase}: ")}
        for name, part in sorted(own.items(), key=lambda item: (item[0] != phase, -item[1]["int8_ms"])):
            if name != phase and all(part[side] < 0.005 * result[side] for side in sides):
                continue
            label = name if name == phase else f"  {name.split(': ')[1]}"
            rows.append([label, *(f"{part[side]:.1f}" for side in sides), f"{part['int8_ms'] / result['int8_ms']:.0%}"])
    return ["part", *(f"{numbers} ms" for numbers in result["formats"]), "of int8"], rows


def _memory_rows(result: dict[str, Any]) -> list[list[str]]:
    def cells(sizes: dict[str, int | None]) -> list[str]:
        return ["unknown" if size is None else f"{size / 2**20:.1f}" for size in sizes.values()]

    peak = "" if result["peak_ratio"] is None else f"{result['peak_ratio']:.2f}"
    return [
        ["saved for backward", *cells(result["saved_bytes"]), f"{result['saved_ratio']:.2f}"],
        ["peak of training", *cells(result["peak_bytes"]), peak],
    ]


def _losses(result: dict[str, Any]) -> str:
    shown = "; ".join(f"{name} {', '.join(f'{loss:.4f}' for loss in values)}" for name, values in result["losses"].items())
    apart = result["loss_difference_unfused"]
    text = f"first losses: {shown}; int8 is {result['loss_difference_fp32']:.2%} from fp32"
    if apart is None:
        return text
    verdict = f"{apart:.2%} from its unfused path"
    return f"{text} and {verdict}" + ("" if apart <= LOSS_TOLERANCE else f" (more than {LOSS_TOLERANCE:.0%})")
