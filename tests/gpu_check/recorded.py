# SPDX-License-Identifier: Apache-2.0
"""The launches of a training step, recorded on the meta device. Every look of the host at a value raises an error there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import byteback
from byteback.ops import dispatch
from byteback.ops.backends import registry, triton
from byteback.ops.backends.triton import launch


class Launch(NamedTuple):
    """One launch as Triton sees it: the kernel, the type of each argument, and which are constants or multiples of 16."""

    kernel: Any
    types: tuple[str, ...]
    aligned: tuple[int, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int

    @property
    def name(self) -> str:
        function = self.kernel.fn  # a kernel that is interpreted has no name of its own
        return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


_UNKNOWN = ("ORDER",)  # kernels are compiled once for all values


def specialized(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], warps: int, stages: int) -> Launch:
    """Specializes a launch as Triton does: an integer of 1 is a constant, multiples of 16 and pointers are aligned."""
    types, aligned, fixed = [], [], dict(constants)
    for index, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if isinstance(value, Tensor):
            types.append(_TYPES[value.dtype])
            if value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(index)
        elif isinstance(value, float):
            types.append("fp32")
        elif name in _UNKNOWN:
            types.append("i32")
        elif value == 1:
            types.append("constexpr")
            fixed[name] = 1
        else:
            types.append("i32" if -(2**31) <= value < 2**31 else "i64")
            if value % 16 == 0:
                aligned.append(index)
    return Launch(kernel, tuple(types), tuple(aligned), tuple(sorted(fixed.items())), warps, stages)


@contextmanager
def recording() -> Iterator[dict[Launch, int]]:
    """Runs meta tensors on the backend of GPUs, and counts launches by what they would compile to."""
    seen: dict[Launch, int] = {}

    def record(kernel: Any, grid: Any, arguments: Any, constants: Any, warps: int, stages: int) -> None:
        made = specialized(kernel, arguments, constants, warps, stages)
        assert len({value.device for value in arguments if isinstance(value, Tensor)}) == 1, made.name
        seen[made] = seen.get(made, 0) + 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._BY_DEVICE, "meta", triton)
        patch.setattr(launch, "on_launch", record)
        patch.setattr(dispatch, "is_plain", lambda _: True)  # else PyTorch calls the fake kernels of operators on meta tensors
        yield seen


class Net(nn.Module):
    """A stem, a pool, a residual block, a block with a stride, a depthwise convolution and a linear layer; all activations."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        c = channels
        self.stem, self.norm = nn.Conv2d(3, c, 7, 2, 3, bias=False), nn.BatchNorm2d(c)
        self.conv1, self.norm1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.norm2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.down, self.norm3 = nn.Conv2d(c, 2 * c, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * c)
        self.deep, self.norm4 = nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c, bias=False), nn.BatchNorm2d(2 * c)
        self.wide, self.norm5 = nn.Conv2d(2 * c, 4 * c, 1, bias=False), nn.BatchNorm2d(4 * c)
        self.head = nn.Linear(4 * c, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        y = F.gelu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(y)) + x)
        x = F.hardswish(self.norm3(self.down(x)))
        x = F.relu6(self.norm4(self.deep(x)))
        x = F.silu(self.norm5(self.wide(x)))
        return self.head(x.mean((2, 3)))


def train(
    recipe: str | byteback.recipes.Recipe, batch: int = 128, pixels: int = 112, build: Callable[[], nn.Module] = Net
) -> None:
    """Two training steps on meta tensors. The flags of NaN, which the optimizer's hook looks at once, are not asked for."""
    torch.manual_seed(0)
    chosen = replace(byteback.recipes.resolve(recipe), on_nonfinite="propagate")
    model = byteback.prepare(build(), chosen).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    byteback.scale_learning_rates(optimizer, model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.empty(batch, 3, pixels, pixels, device="meta")).square().mean().backward()
        optimizer.step()
