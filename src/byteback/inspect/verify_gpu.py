# SPDX-License-Identifier: Apache-2.0
"""`byteback verify --gpu`: compares the kernels of every GPU with the reference on the CPU, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from byteback import ops, tables
from byteback.ops.backends import gpu, paths


def run(cases: int, seed: int, console: tables.Console) -> bool:
    """Runs the command. Returns True if every GPU agrees with the reference."""
    if not torch.cuda.is_available():
        console.print(f"PyTorch {torch.__version__} sees no GPU here. On a machine with one: docs/13-gpus.md.")
        return False
    good = True
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        why = gpu.why_not(device)
        if why:
            console.print(f"{device} {torch.cuda.get_device_name(device)}: runs on the reference. {why}")
            continue
        wrong = compare(device, cases, seed)
        console.print(f"{device} {torch.cuda.get_device_name(device)}: {cases} cases, {len(wrong)} wrong")
        for line in wrong[:10]:
            console.print(f"[red]{line}[/]")
        good = good and not wrong
    return good


def compare(device: torch.device, cases: int, seed: int) -> list[str]:
    """Returns which operators give other bits on the device than the reference on the CPU."""
    draw, wrong = torch.Generator().manual_seed(seed), []
    for case in range(cases):
        for name, function, arguments in drawn(draw):
            with paths.path("reference"):
                expected = _tensors(function(*arguments))
            found = _tensors(function(*(_on(device, argument) for argument in arguments)))
            if not all(map(torch.equal, (result.cpu() for result in found), expected)):
                wrong.append(f"{name} differs in case {case}, seed {seed}: {[tuple(a.shape) for a in _tensors(arguments)]}")
    return wrong


def _on(device: torch.device, argument: Any) -> Any:
    return argument.to(device) if isinstance(argument, Tensor) else argument


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [result for result in results if isinstance(result, Tensor)]


def _number(draw: torch.Generator, least: int, most: int) -> int:
    return int(torch.randint(least, most + 1, (), generator=draw))


def drawn(draw: torch.Generator) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Returns operators with drawn arguments: the products of one convolution, quantize and statistics of one tensor."""
    n, c, k, size = (_number(draw, 1, most) for most in (40, 80, 80, 14))
    kernel, stride = _number(draw, 1, min(size, 5)), _number(draw, 1, 3)
    padding = _number(draw, 0, kernel // 2)
    out = (size + 2 * padding - kernel) // stride + 1
    shapes = (n, c, size, size), (k, c, kernel, kernel), (n, k, out, out)
    x, w, g = (torch.randint(-127, 128, shape, generator=draw).to(torch.int8) for shape in shapes)
    one, geometry = torch.full((1, 1, 1, 1), 0.37), (stride, padding, 1, 1)
    yield "conv_int8", ops.conv_int8, (x, one, w, one, *geometry)
    yield "conv_int8_grad_input", ops.conv_int8_grad_input, (g, one, w, one, x.shape, *geometry)
    yield "conv_int8_grad_weight", ops.conv_int8_grad_weight, (g, one, x, one, w.shape, *geometry)
    floats = torch.randn(n, c, size, size, generator=draw)
    if _number(draw, 0, 1):
        floats = floats.contiguous(memory_format=torch.channels_last)
    key = torch.randint(0, 2**32, (2,), generator=draw)
    yield "quantize", ops.quantize, (floats, floats.abs().amax().reshape(1, 1, 1, 1) * 0.7, key)
    yield "moments", ops.moments, (floats,)
    yield "absmax", ops.absmax, (floats, 1)
