# SPDX-License-Identifier: Apache-2.0
"""`byteback export RUN`: writes the network of a run to an ONNX file, and compares the file with it on the test images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from torch import Tensor, nn

import byteback
from byteback.export import comparing, detectors, float_bytes, onnx_bytes
from byteback.train import layout, saved, tasks
from byteback.train.checkpoints import files

_BATCH, _CLIPS = 50, 10
_TIMED = 8  # images of a timed batch


@dataclass(frozen=True)
class ExportConfig:
    """Write a trained network to an ONNX file, which other runtimes can run in int8."""

    run: tyro.conf.Positional[str]
    """Folder of a run or of a member, best.safetensors, or a checkpoint."""
    format: Literal["onnx"] = "onnx"
    """Format of the file."""
    output: str | None = None
    """The file. Default: model.onnx beside the weights, or model-exact.onnx."""
    exact: bool = False
    """Use ConvInteger and float operators, which compute every integer as training does, instead of Q/DQ. Slower."""
    opset: int = 18
    """Version of ONNX's operators."""
    size: tuple[int, int] | None = None
    """Height and width of the images that the file of a detector takes. Default: those of the first test image."""
    check: bool = False
    """Compare the file with the network in onnxruntime, on test images, and print the speed. Fails if they differ too much."""
    images: int = 1000
    """How many test images --check uses."""
    data_path: str | None = None
    """Folder of the data sets for --check. Default: the same as in training, or $BYTEBACK_DATA, or ./data."""
    threads: int | None = None
    """Number of CPU threads. Default: chosen by PyTorch."""


def run(config: ExportConfig, console: Console) -> bool:
    """Runs the command. Returns False if --check found that the file does not keep its promise."""
    if config.images < 1:
        raise ValueError(f"export: --images is {config.images}; it must be at least 1.")
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.output:
        _check_place(Path(config.output))
    model = saved.load(config.run)
    about: Any = model.byteback
    if about.variant == "float32":
        raise ValueError(
            f"export: {about.path} was trained in float32 and has no clips. Export it with torch.onnx.export, or fine-tune "
            f"it in int8: byteback train --weights {about.path} --recipe unified-int8."
        )
    if config.size and about.task != "detect":
        raise ValueError(f"export: --size is for detectors, but {about.path} is a network of the task {about.task}. Remove it.")
    needs_size = about.task == "detect" and not config.size
    images = _images(config, about) if config.check or needs_size else []
    example = about.example if about.task != "detect" else torch.zeros(3, *(config.size or images[0].shape[1:]))
    images = [image for image in images if _fits(image, example)]
    if config.check and not images:
        raise ValueError(
            f"export: none of the test images has {example.shape[1]}x{example.shape[2]} pixels, so --check has nothing to "
            "compare. Remove --size or --check."
        )
    data = onnx_bytes(model, example, exact=config.exact, opset=config.opset)
    path = Path(config.output or about.path.with_name("model-exact.onnx" if config.exact else "model.onnx"))
    files.replace(path, data)
    console.print(f"{path}: {len(data) / 2**20:.1f} MB, opset {config.opset}", highlight=False)
    return not config.check or _checked(config, model, data, images, console)


def _check_place(path: Path) -> None:
    """Raises an error, before any work, for a place where no file can be."""
    if path.is_dir():
        raise ValueError(f"export: --output {path} is a folder. Give the name of a file, such as {path / 'model.onnx'}.")
    if not path.parent.is_dir():
        raise ValueError(f"export: --output {path}: there is no folder {path.parent}. Create it, or choose another place.")


def _fits(image: Tensor, example: Tensor) -> bool:
    """Whether the file takes an image: that of a detector takes images of one size, the others have one size."""
    return example.dim() != 3 or image.shape == example.shape


def _images(config: ExportConfig, about: Any) -> list[Tensor]:
    """Returns batches of test images; of a detector the images."""
    asked = replace(about.config, data_path=config.data_path or about.config.data_path, augment=False)
    data = tasks.load(asked)
    count = min(config.images, len(data.test)) if config.check else 1
    chosen = torch.arange(count) * len(data.test) // count
    if about.task == "detect":
        return [image for images, _ in data.test.batches(chosen.split(1), 0, 0) for image in images]
    batches = data.test.batches(chosen.split(_CLIPS if data.frames else _BATCH), 0, 0)
    channels = about.preprocess.network_channels
    return [layout.as_asked(batch[0], channels, about.config.channels_last) for batch in batches]


def _checked(config: ExportConfig, model: nn.Module, data: bytes, images: list[Tensor], console: Console) -> bool:
    found = comparing.check(model, data, images, exact=config.exact)
    made, behind = found.layers, found.behind_float
    lines = [
        f"{found.images:,} test images: {_same(found)}",
        f"integers between layers: {made.equal:.4%} of {made.compared:,} are equal, {made.by_one:,} differ by one, "
        f"{made.by_more:,} by more"
        + (f"; fewest are equal before {found.worst[0]}: {found.worst[1]:.3%}" if made.by_one else ""),
    ]
    if behind.compared:
        lines.append(
            f"integers behind float sums, which runtimes round differently: {behind.equal:.4%} of {behind.compared:,} are equal"
        )
    lines.append(_speeds(config, model, data, images[0] if images[0].dim() == 3 else images[0][:_TIMED]))
    for line in lines:
        console.print(line, highlight=False)
    for failure in found.failures():
        console.print(f"[red]The check failed:[/] {failure}.", highlight=False)
    return not found.failures()


def _same(found: comparing.Check) -> str:
    """Returns what was compared of the outputs, as text."""
    if found.boxes.compared:
        return (
            f"{found.boxes.share:.2%} of {found.boxes.compared:,} boxes with a score of {detectors.LEAST_SCORE} are in both, "
            f"with the same class and an overlap of {detectors.LEAST_OVERLAP}"
        )
    return (
        f"{found.same_top1:.2%} have the same class; the largest difference of an output is {found.largest_difference:.3g} of "
        f"{found.reach:.3g}"
    )


def _speeds(config: ExportConfig, model: nn.Module, data: bytes, images: Tensor) -> str:
    """Returns the time of a batch of images, or of an image of a detector, in each form, as text."""
    detects = detectors.is_detector(model)
    other = onnx_bytes(model, images, exact=not config.exact, opset=config.opset)
    sessions = {"float": comparing.session(float_bytes(model, images, opset=config.opset))}
    qdq, exact = (other, data) if config.exact else (data, other)
    sessions |= {"Q/DQ": comparing.session(qdq), "exact": comparing.session(exact)}
    given = {"input": images.contiguous().numpy()}
    times = {name: comparing.speed(partial(session.run, None, given)) for name, session in sessions.items()}
    byteback.freeze(model)
    with torch.inference_mode():
        ours = comparing.speed((lambda: detectors.predict(model, images)) if detects else (lambda: model(images)))
    byteback.unfreeze(model)
    listed = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in times.items())
    count = "an image" if detects else f"{len(images)} images"
    return f"time of {count} with {torch.get_num_threads()} threads: onnxruntime {listed}; byteback {1e3 * ours:.1f} ms"
