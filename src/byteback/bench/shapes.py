# SPDX-License-Identifier: Apache-2.0
"""The convolutions of real networks, found by running the network on meta tensors."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from byteback import models
from byteback.convert import first_convolution
from byteback.nn.layers.float_table import Geometry

# network -> (name for models.build, image size, batch): the settings of the README
NETWORKS = {
    "resnet18": ("resnet18", 32, 128),
    "resnet20": ("resnet20", 32, 128),
    "resnet50": ("resnet50", 224, 16),
    "mobilenet_v2": ("mobilenet_v2", 224, 16),
    "vgg16": ("vgg16_bn", 32, 128),
    "inception_v3": ("inception_v3", 299, 8),
}


@dataclass(frozen=True, order=True)
class ConvCase:
    """One 2-D convolution: batch, channels, image, kernel. `count` is how often the network has it."""

    batch: int
    in_channels: int
    out_channels: int
    height: int
    width: int
    kernel_h: int
    kernel_w: int
    stride: int = 1
    padding_h: int = 0
    padding_w: int = 0
    dilation: int = 1
    groups: int = 1
    count: int = 1

    @property
    def kind(self) -> str:
        """The class in the summary of the benchmark: depthwise, strided, 1x1, 3x3_s1 or other."""
        if self.groups == self.in_channels == self.out_channels and self.groups > 1:
            return "depthwise"
        if self.stride > 1:
            return "strided"
        kernel = (self.kernel_h, self.kernel_w)
        if self.groups > 1 or self.dilation > 1:
            return "other"
        return {(1, 1): "1x1", (3, 3): "3x3_s1"}.get(kernel, "other")

    @property
    def out(self) -> tuple[int, int]:
        """Output height and width."""
        spans = (
            self.height + 2 * self.padding_h - self.dilation * (self.kernel_h - 1) - 1,
            self.width + 2 * self.padding_w - self.dilation * (self.kernel_w - 1) - 1,
        )
        return spans[0] // self.stride + 1, spans[1] // self.stride + 1

    @property
    def geometry(self) -> Geometry:
        """The geometry for the float table."""
        kernel, stride = (self.kernel_h, self.kernel_w), (self.stride, self.stride)
        return Geometry(self.in_channels, self.out_channels, self.groups, kernel, stride, (self.dilation, self.dilation))

    @property
    def macs(self) -> int:
        """Multiplications of one product."""
        per_output = self.in_channels // self.groups * self.kernel_h * self.kernel_w
        return self.batch * self.out_channels * self.out[0] * self.out[1] * per_output

    def __str__(self) -> str:
        kernel = f"{self.kernel_h}x{self.kernel_w}" + (f" s{self.stride}" if self.stride > 1 else "")
        groups = f" g{self.groups}" if self.groups > 1 else ""
        return f"{kernel} {self.in_channels}→{self.out_channels}{groups} @{self.height}x{self.width}"


def network_cases(name: str, batch: int | None = None) -> list[ConvCase]:
    """Returns the int8 convolutions of a network (not the first one, which stays float), each shape once."""
    if name not in NETWORKS:
        raise ValueError(f"bench: unknown network {name!r}. Use one of {', '.join(NETWORKS)}, or a CSV file of shapes.")
    model_name, size, default_batch = NETWORKS[name]
    model = models.build(model_name, image_size=size).to("meta")
    first = first_convolution(model)
    seen: Counter[ConvCase] = Counter()

    def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, nn.Conv2d) and module is not first:
            seen[_case_of(module, args[0])] += 1

    for module in model.modules():
        module.register_forward_hook(record)
    with torch.no_grad():
        model.eval()(torch.empty(batch or default_batch, 3, size, size, device="meta"))
    return [ConvCase(**{**_values(case), "count": count}) for case, count in seen.items()]


def _case_of(module: nn.Conv2d, x: torch.Tensor) -> ConvCase:
    padding_h, padding_w = module.padding if not isinstance(module.padding, str) else (0, 0)
    return ConvCase(
        batch=x.shape[0],
        in_channels=module.in_channels,
        out_channels=module.out_channels,
        height=x.shape[2],
        width=x.shape[3],
        kernel_h=module.kernel_size[0],
        kernel_w=module.kernel_size[1],
        stride=module.stride[0],
        padding_h=padding_h,
        padding_w=padding_w,
        dilation=module.dilation[0],
        groups=module.groups,
    )


def _values(case: ConvCase) -> dict[str, int]:
    return {field.name: getattr(case, field.name) for field in fields(case)}


def file_cases(path: Path) -> list[ConvCase]:
    """Reads shapes from a CSV file with the fields of ConvCase as columns. Missing columns have their default values."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    known = {field.name for field in fields(ConvCase)}
    for row in rows:
        unknown = set(row) - known
        if unknown:
            raise ValueError(f"{path}: unknown columns {sorted(unknown)}; a shape has {', '.join(sorted(known))}.")
    return [ConvCase(**{key: int(value) for key, value in row.items() if value}) for row in rows]


def cases(which: str) -> list[ConvCase]:
    """Returns the cases of a network by name, or of a CSV file by path."""
    return file_cases(Path(which)) if which.endswith(".csv") else network_cases(which)
