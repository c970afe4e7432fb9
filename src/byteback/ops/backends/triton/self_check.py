# SPDX-License-Identifier: Apache-2.0
"""The check of a device before its kernels are trusted: small products, quantize and sums, bit by bit against the reference.

It runs once in each process and for each GPU, and takes the time to compile a few kernels (Triton keeps them on disk).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from byteback.ops.backends import reference, triton
from byteback.ops.backends.triton import tiles
from byteback.ops.backends.triton.quantize import quantize_packing
from byteback.ops.contract.layout import channels_last, empty_like_product
from byteback.ops.contract.packing import packed
from byteback.ops.types import ProductCall, for_grad_weight

_CPU = torch.device("cpu")
_GEOMETRY = (2, 2), (1, 1), (1, 1), 1


def self_check(device: torch.device) -> str:
    """Returns what is wrong with the kernels on this device; empty if their bits are those of the reference."""
    for name, run in cases():
        try:
            found = [result.cpu() for result in run(triton, device)]
        except Exception as error:
            return f"{name} failed on it: {type(error).__name__}: {error}"
        expected = run(reference, _CPU)
        if not all(map(torch.equal, found, expected)):
            return f"{name} gives other bits on it than the reference"
    return ""


Case = Callable[[object, torch.device], list[Tensor]]


def cases() -> Iterator[tuple[str, Case]]:
    """Returns the name of each check, and a function of a backend and a device that returns its results."""
    draw = torch.Generator().manual_seed(0)
    x, g = (
        torch.randint(-127, 128, size, generator=draw, device=_CPU).to(torch.int8) for size in ((18, 24, 7, 9), (18, 40, 4, 5))
    )
    w = torch.randint(-127, 128, (40, 24, 3, 3), generator=draw, device=_CPU).to(torch.int8)
    for kind, size, a, b in (("output", g.shape, x, w), ("grad_input", x.shape, g, w), ("grad_weight", w.shape, g, x)):
        yield kind, _product(kind, tuple(size), a, b)
    floats = torch.randn(3, 20, 9, 9, generator=draw, device=_CPU) * torch.exp(
        torch.randn(3, 20, 9, 9, generator=draw, device=_CPU) * 3
    )
    clip, key = floats.abs().amax().reshape(1, 1, 1, 1) * 0.5, torch.tensor([123456789, 987654321], device=_CPU)
    yield "quantize", lambda backend, to: list(backend.quantize(floats.to(to), clip.to(to), key.to(to)))  # type: ignore[attr-defined]
    batch = channels_last(torch.randn(16, 20, 3, 5, generator=draw, device=_CPU))
    yield "quantize with a packed copy", _packs(batch, clip, key)
    yield "moments", lambda backend, to: list(backend.moments(floats.to(to)))  # type: ignore[attr-defined]
    yield "channel_stats", lambda backend, to: list(backend.channel_stats(floats.to(to)))  # type: ignore[attr-defined]


def _packs(x: Tensor, clip: Tensor, key: Tensor) -> Case:
    def run(backend: object, device: torch.device) -> list[Tensor]:
        if backend is reference:
            values = reference.quantize(x, clip, key).values
            return [values, packed(values)]
        q = quantize_packing(x.to(device), clip.to(device), key.to(device), True)
        return [q.values, for_grad_weight(q)] if tiles.multiplies_int8(device) else [q.values, packed(q.values)]

    return run


def _product(kind: str, size: tuple[int, ...], a: Tensor, b: Tensor) -> Case:
    def run(backend: object, device: torch.device) -> list[Tensor]:
        first, second, one = a.to(device), b.to(device), torch.full((1, 1, 1, 1), 0.37, device=device)
        strides = empty_like_product(list(size), first, second).stride()
        call = ProductCall(kind, size, strides, first, second, _GEOMETRY, True)
        call.plan = backend.product_plan(call, first, second)  # type: ignore[attr-defined]
        return [backend.product(call, first, one, second, one)]  # type: ignore[attr-defined]

    return run
