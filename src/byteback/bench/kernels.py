# SPDX-License-Identifier: Apache-2.0
"""`byteback bench kernels`: times the three products of the layers of a network, int8 against PyTorch FP32, in one run.

Every product is checked against the reference before it is timed. The two sides are interleaved, and the ratio is the median
over rounds. PyTorch uses the faster of contiguous and channels_last. The int8 side starts from int8 operands and includes
quantizing and packing the weight; a second ratio also includes the clip and quantization of the activation or gradient.
Layers that fall back to float (nn/float_table.py) are timed like the others and marked: their ratio is still that of the int8
kernel, and a second geometric mean counts them as 1.0, which is what a user gets. malloc is tuned for both sides by default.
The machine's peaks are measured first, and "of peak" is the share of them that a kernel reaches alone (peaks.py): from operands
that are all int8, in the second of two calls, because a layer's operands were just written by the layer before.
"""

from __future__ import annotations

import json
import math
import statistics as stats
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from byteback import ops, tables
from byteback.bench import peaks
from byteback.bench.shapes import ConvCase, cases
from byteback.inspect import machine
from byteback.inspect.memory import tune_malloc
from byteback.nn.layers.float_table import why_float
from byteback.ops.backends import paths
from byteback.ops.products import explain

PRODUCTS = ("output", "grad_input", "grad_weight")


@dataclass(frozen=True)
class KernelsConfig:
    """Time the three products of the layers of a network in int8 against PyTorch FP32."""

    shapes: tuple[str, ...] = ("resnet18", "resnet50", "mobilenet_v2")
    """Networks (resnet18, resnet20, resnet50, mobilenet_v2, vgg16, inception_v3) or CSV files of shapes."""
    json: Path | None = None
    """Write the results to this file."""
    explain: bool = False
    """Also print which algorithm each product uses, and why."""
    rounds: int = 9
    """Number of interleaved rounds, of which the median is reported."""
    malloc: Literal["tuned", "default"] = "tuned"
    """tuned: both sides keep freed memory (byteback.tune_malloc), so that page faults do not dominate the times."""
    kind: str | None = None
    """Only shapes of this class: 3x3_s1, 1x1, strided, depthwise, other."""


@dataclass(frozen=True)
class Timing:
    """One product of one shape."""

    network: str
    case: ConvCase
    product: str
    kernel: str
    int8_ms: float
    alone_ms: float
    float_ms: float
    ratio: float
    ratio_with_quantize: float

    @property
    def falls_back(self) -> str | None:
        """Why such a layer falls back to float; None if it runs in int8."""
        return why_float(self.case.geometry)

    @property
    def user_ratio(self) -> float:
        """The ratio without Recipe.strict: 1.0 for a layer that falls back to float."""
        return 1.0 if self.falls_back else self.ratio

    @property
    def gmacs(self) -> float:
        """Billions of multiplications per second of the kernel alone, as the textbook counts them."""
        return self.case.macs / self.alone_ms / 1e6

    def share(self, measured: dict[str, float]) -> float | None:
        """Returns the share of the machine's peak that the kernel alone reaches; None if no peak is known."""
        return peaks.share(measured, self.kernel, self.gmacs)


class Operands:
    """The tensors of one case: float in both memory formats, and int8."""

    def __init__(self, case: ConvCase) -> None:
        generator = torch.Generator().manual_seed(0)
        last = torch.channels_last
        oh, ow = case.out
        # After a ReLU, as most inputs of a layer are: half of the values are zero, none is negative.
        self.x = torch.randn(case.batch, case.in_channels, case.height, case.width, generator=generator).relu_()
        weight_size = (case.out_channels, case.in_channels // case.groups, case.kernel_h, case.kernel_w)
        self.w = torch.randn(weight_size, generator=generator)
        self.g = torch.randn(case.batch, case.out_channels, oh, ow, generator=generator)
        self.geometry = (
            [case.stride] * 2,
            [case.padding_h, case.padding_w],
            [case.dilation] * 2,
            case.groups,
        )
        self.x_last, self.w_last, self.g_last = (t.to(memory_format=last) for t in (self.x, self.w, self.g))
        self.key = torch.tensor([1, 2])
        self.x_q, self.x_scale = self.quantized(self.x_last)
        self.w_q, self.w_scale = self.quantized(self.w_last)
        self.g_q, self.g_scale = self.quantized(self.g_last, self.key)

    @staticmethod
    def quantized(x: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return ops.quantize_max(x, -1, key)[:2]

    def int8(self, product: str) -> Tensor:
        """Computes a product from int8 activations; the weight is quantized each time, as in a training step."""
        if product != "grad_weight":
            self.w_q, self.w_scale = self.quantized(self.w_last)
        return self.alone(product)

    def alone(self, product: str) -> Tensor:
        """Computes a product from operands that are all int8."""
        if product == "grad_weight":
            return ops.conv_int8_grad_weight(self.g_q, self.g_scale, self.x_q, self.x_scale, self.w.shape, *self.geometry)
        if product == "output":
            return ops.conv_int8(self.x_q, self.x_scale, self.w_q, self.w_scale, *self.geometry)
        return ops.conv_int8_grad_input(self.g_q, self.g_scale, self.w_q, self.w_scale, self.x.shape, *self.geometry)

    def with_quantize(self, product: str) -> Tensor:
        """The same, with the clip and quantization of the activation (output) or of the gradient (the others)."""
        if product == "output":
            self.x_q, self.x_scale = self.quantized(self.x_last)
        else:
            self.g_q, self.g_scale = self.quantized(self.g_last, self.key)
        return self.int8(product)

    def float32(self, product: str, last: bool) -> Tensor:
        x, w, g = (self.x_last, self.w_last, self.g_last) if last else (self.x, self.w, self.g)
        stride, padding, dilation, groups = self.geometry
        if product == "output":
            return F.conv2d(x, w, None, stride, padding, dilation, groups)
        which = PRODUCTS.index(product) - 1
        mask = [which == 0, which == 1, False]
        return torch.ops.aten.convolution_backward(g, x, w, None, stride, padding, dilation, False, [0, 0], groups, mask)[which]


def _timed(run: Callable[[], object], again: bool) -> float:
    """Returns the milliseconds of a call; with `again` those of a second one."""
    if again:
        run()
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def _check(case: ConvCase, operands: Operands, product: str) -> str:
    """Compares the result of a product with the reference. Returns the name of its kernel."""
    result = operands.int8(product)
    kernel = paths.last_kernel() or "reference"
    with paths.path("reference"):
        expected = operands.int8(product)
    if not torch.equal(result, expected):
        raise RuntimeError(f"bench: {product} of {case} by {kernel} differs from the reference. Run byteback verify.")
    return kernel


def measure(network: str, case: ConvCase, rounds: int) -> list[Timing]:
    """Times the three products of one case."""
    operands = Operands(case)
    timings = []
    for product in PRODUCTS:
        kernel = _check(case, operands, product)
        sides: list[Callable[[], object]] = [
            lambda p=product: operands.int8(p),  # type: ignore[misc]
            lambda p=product: operands.with_quantize(p),  # type: ignore[misc]
            lambda p=product: operands.float32(p, True),  # type: ignore[misc]
            lambda p=product: operands.float32(p, False),  # type: ignore[misc]
            lambda p=product: operands.alone(p),  # type: ignore[misc]
        ]
        for side in sides:
            side()
        samples = [[_timed(side, side is sides[-1]) for side in sides] for _ in range(rounds)]
        medians = [stats.median(column) for column in zip(*samples, strict=True)]
        best = 2 if medians[2] <= medians[3] else 3
        timings.append(
            Timing(
                network,
                case,
                product,
                kernel,
                medians[0],
                medians[4],
                medians[best],
                stats.median(row[best] / row[0] for row in samples),
                stats.median(row[best] / row[1] for row in samples),
            )
        )
    return timings


def _geomean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _by_class(timings: list[Timing], value: Callable[[Timing], float | None]) -> dict[str, dict[str, float | None]]:
    """Returns geometric means of a value by class and product; None where it is not known."""

    def mean(kind: str, product: str) -> float | None:
        values = [value(t) for t in timings if t.case.kind == kind and t.product == product]
        known = [v for v in values if v is not None]
        return round(_geomean(known), 3) if known else None

    return {kind: {product: mean(kind, product) for product in PRODUCTS} for kind in sorted({t.case.kind for t in timings})}


def summarize(timings: list[Timing], measured_peaks: dict[str, float]) -> dict[str, object]:
    """Returns geometric means by class and product and over all, and the slowest product."""
    slowest = min(timings, key=lambda t: t.ratio)
    return {
        "classes": _by_class(timings, lambda t: t.ratio),
        "shares": _by_class(timings, lambda t: t.share(measured_peaks)),
        "geomean": round(_geomean([t.ratio for t in timings]), 3),
        "geomean_served": round(_geomean([t.user_ratio for t in timings]), 3),
        "float_serves": sum(t.falls_back is not None for t in timings),
        "products": len(timings),
        "slowest": {
            "network": slowest.network,
            "shape": str(slowest.case),
            "product": slowest.product,
            "ratio": round(slowest.ratio, 3),
        },
        "path": paths.current(),
        "threads": torch.get_num_threads(),
    }


def run(config: KernelsConfig, console: Console) -> list[Timing]:
    """Runs the command."""
    if config.malloc == "tuned":
        tune_malloc()
    measured_peaks = machine.peaks(torch.get_num_threads())
    console.print(
        f"path {paths.current()}, {torch.get_num_threads()} threads, {config.malloc} malloc, PyTorch uses "
        f"{torch.backends.cpu.get_cpu_capability()}; ratios are against the faster of contiguous and channels_last FP32, "
        f"median of interleaved rounds\npeaks in GMAC/s, from registers: {peaks.describe(measured_peaks)}\n"
    )
    timings: list[Timing] = []
    for network in config.shapes:
        rows = []
        for case in cases(network):
            if config.kind and case.kind != config.kind:
                continue
            with console.status(f"{network}: {case}"):
                measured = measure(network, case, config.rounds)
            timings += measured
            for t in measured:
                rows.append(
                    [str(case), t.case.kind, t.product, t.kernel + (" (falls back to float)" if t.falls_back else "")]
                    + [f"{t.int8_ms:.2f}", f"{t.float_ms:.2f}", f"{t.ratio:.2f}", f"{t.ratio_with_quantize:.2f}"]
                    + [f"{t.gmacs:.0f}", _percent(t.share(measured_peaks))]
                    + ([_reason(case, t)] if config.explain else [])
                )
        columns = ["shape", "class", "product", "kernel", "int8 ms", "fp32 ms", "ratio", "+quantize", "alone GMAC/s", "of peak"]
        console.print(tables.build(network, columns + (["why"] if config.explain else []), rows, left=4))
        console.print()
    if not timings:
        raise ValueError(f"bench: no shape of class {config.kind!r} in {', '.join(config.shapes)}.")
    summary = summarize(timings, measured_peaks)
    shares = [f"{product} of peak" for product in PRODUCTS]
    console.print(tables.build("Geometric means", ["class", *PRODUCTS, *shares], _summary_rows(summary)))
    console.print(f"\nall {summary['geomean']}, slowest {summary['slowest']}")
    if summary["float_serves"]:
        console.print(
            f"{summary['float_serves']} of {summary['products']} products fall back to float unless a recipe is strict; with "
            f"those counted as 1.0: all {summary['geomean_served']}"
        )
    if config.json:
        details = [
            {**asdict(t), "case": str(t.case), "kind": t.case.kind, "float_serves": t.falls_back}
            | {"gmacs": t.gmacs, "of_peak": t.share(measured_peaks)}
            for t in timings
        ]
        config.json.write_text(json.dumps({**summary, "peaks": measured_peaks, "layers": details}, indent=2) + "\n")
        console.print(f"written to {config.json}")
    return timings


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _summary_rows(summary: dict[str, object]) -> list[list[str]]:
    classes, shares = summary["classes"], summary["shares"]
    assert isinstance(classes, dict) and isinstance(shares, dict)
    return [
        [kind, *(f"{ratios[p]:.2f}" for p in PRODUCTS)] + [_percent(shares[kind][p]) for p in PRODUCTS]
        for kind, ratios in classes.items()
    ]


def _reason(case: ConvCase, timing: Timing) -> str:
    oh, ow = case.out
    int8 = explain(
        timing.product,
        [case.batch, case.in_channels, case.height, case.width],
        [case.out_channels, case.in_channels // case.groups, case.kernel_h, case.kernel_w],
        [case.batch, case.out_channels, oh, ow],
        ([case.stride] * 2, [case.padding_h, case.padding_w], [case.dilation] * 2, case.groups),
    )
    return int8 + (f"; falls back to float: {timing.falls_back}" if timing.falls_back else "")
