# SPDX-License-Identifier: Apache-2.0
"""`byteback bench roofline`: an estimate of a training step on a GPU, layer by layer. Nothing is measured.

The time of a pass is the larger of two: its operations at 55 % of the peak of the tensor cores, and its bytes at 80 % of the
peak of the memory. The passes are those of the GPU's backend:

    int8    product, statistics, one pass that normalizes and quantizes; backward: sums, one pass that quantizes, two products
    bf16    the same layer in PyTorch: convolution, BatchNorm with ReLU, and their gradients; tf32: in float32 with TF32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from byteback import tables
from byteback.bench.shapes import ConvCase, network_cases
from byteback.suggestions import unknown

OPERATIONS, BYTES = 0.55, 0.80  # shares of the peaks


class Gpu(NamedTuple):
    """Peaks from the vendors' data sheets, without sparsity: tera-operations per second, and GB/s of the memory."""

    name: str
    int8: float
    bf16: float
    tf32: float
    bandwidth: float


GPUS = {
    "a100": Gpu("A100 40 GB", 624, 312, 156, 1555),
    "rtx3090": Gpu("RTX 3090", 284, 71, 35.6, 936),
    "rtx4090": Gpu("RTX 4090", 661, 165, 82.6, 1008),
    "l40s": Gpu("L40S", 733, 362, 183, 864),
    "h100": Gpu("H100 SXM", 1979, 989, 495, 3350),
    "rtx5090": Gpu("RTX 5090", 838, 209, 105, 1792),
}


@dataclass(frozen=True)
class RooflineConfig:
    """Estimate a training step on a GPU, layer by layer: int8 beside bf16 and TF32. An estimate, not a measurement."""

    device: str = "a100"
    """a100, rtx3090, rtx4090, l40s, h100 or rtx5090."""
    model: str = "resnet50"
    """resnet18, resnet20, resnet50, mobilenet_v2, vgg16 or inception_v3, with the image sizes of the other benchmarks."""
    batch: int = 128
    """Images per step."""


class Sides(NamedTuple):
    """Milliseconds of a layer's training step."""

    tf32: float
    bf16: float
    int8: float


def estimate(case: ConvCase, gpu: Gpu) -> Sides:
    """Returns the estimate of one convolution with its norm and ReLU."""
    height, width = case.out
    x = case.batch * case.in_channels * case.height * case.width
    y = case.batch * case.out_channels * height * width
    operations = 2.0 * case.macs

    def time(rate: float, work: float, moved: float) -> float:
        return max(work / (rate * 1e12 * OPERATIONS), moved / (gpu.bandwidth * 1e9 * BYTES)) * 1e3

    def floats(rate: float, size: int) -> float:
        convolutions = 3 * time(rate, operations, (x + y) * size)
        return convolutions + time(rate, 0.0, y * size * (3 + 1 + 5 + 1.5))  # norm and ReLU, forward and backward

    tf32, bf16 = floats(gpu.tf32, 4), floats(gpu.bf16, 2)
    forward = time(gpu.int8, operations, x + 4 * y) + time(gpu.int8, 0.0, y * (4 + 4 + 1 + 1 + 0.125))
    quantized = time(gpu.int8, 0.0, y * (4 + 1 + 0.125) * 2 + y)
    # grad_weight reads copies packed by 16 images, which the passes that make the integers write too.
    packed = time(gpu.int8, 0.0, x + y)
    backward = time(gpu.int8, operations, y + 4 * x) + time(gpu.int8, operations, x + y)
    return Sides(tf32, bf16, forward + quantized + packed + backward)


def run(config: RooflineConfig, console: tables.Console) -> None:
    """Runs the command."""
    gpu = GPUS.get(config.device.lower())
    if gpu is None:
        raise unknown("bench roofline", "device", config.device, list(GPUS))
    rows, total = [], Sides(0.0, 0.0, 0.0)
    for case in network_cases(config.model, config.batch):
        sides = Sides(*(case.count * side for side in estimate(case, gpu)))
        total = Sides(*(one + other for one, other in zip(total, sides, strict=True)))
        rows.append([str(case), str(case.count), *_cells(sides)])
    rows.append(["all layers", "", *_cells(total)])
    title = f"ESTIMATE, not measured: a training step of {config.model}, batch {config.batch}, on {gpu.name}, in ms"
    columns = ["convolution, norm and ReLU", "times", "TF32", "bf16", "int8", "TF32 / int8", "bf16 / int8"]
    console.print(tables.build(title, columns, rows))
    console.print(
        f"Assumed: {OPERATIONS:.0%} of the peak operations, {BYTES:.0%} of the memory's bandwidth. The first convolution, "
        "which stays float, is not included. To measure: byteback bench step --device cuda"
    )


def _cells(sides: Sides) -> list[str]:
    ratios = f"{sides.tf32 / sides.int8:.2f}x", f"{sides.bf16 / sides.int8:.2f}x"
    return [*(f"{side:.2f}" for side in sides), *ratios]
