# SPDX-License-Identifier: Apache-2.0
"""`byteback verify`: compares every native path with the reference on this machine, bit for bit.

Also fails if a path falls back to another one: a kernel that did not run was not tested.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from byteback import ops, tables
from byteback.inspect import verify_gpu
from byteback.ops.backends import paths as kernel_paths


@dataclass(frozen=True)
class VerifyConfig:
    """Compare every native path with the reference on this machine, bit for bit."""

    cases: int = 120
    """Number of random convolutions per path, in addition to the fixed ones."""
    seed: int = 0
    """Seed of the random convolutions."""
    gpu: bool = False
    """Compare the kernels of every GPU with the reference on the CPU instead."""


@dataclass(frozen=True)
class Geometry:
    """A convolution with one to three spatial dimensions."""

    batch: int
    channels: tuple[int, int]
    groups: int
    image: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def out(self) -> tuple[int, ...]:
        """The spatial size of the output."""
        axes = zip(self.image, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((i + 2 * p - d * (k - 1) - 1) // s + 1 for i, k, s, p, d in axes)


def _plain(batch: int, c: int, k: int, size: int, kernel: int, stride: int = 1, groups: int = 1) -> Geometry:
    pair = (kernel, kernel)
    return Geometry(batch, (c, k), groups, (size, size), pair, (stride,) * 2, (kernel // 2,) * 2, (1, 1))


def _clip(batch: int, c: int, k: int, image: tuple[int, int, int], taps: int, padding: int = 1) -> Geometry:
    return Geometry(batch, (c, k), 1, image, (taps, 3, 3), (1,) * 3, (padding, 1, 1), (1,) * 3)


FIXED = [
    _plain(2, 64, 64, 14, 3),
    _plain(1, 232, 24, 9, 3),  # one channel more than a Winograd chunk holds
    _plain(3, 37, 45, 8, 3),  # Winograd with channels that end inside a vector
    _plain(2, 64, 128, 14, 1),
    _plain(2, 32, 64, 15, 3, stride=2),
    _plain(2, 32, 64, 15, 1, stride=2),
    _plain(2, 32, 64, 16, 5),  # direct convolution: rows of whole groups of pixels, of 4 and of 7, and others
    _plain(3, 22, 45, 14, 3, stride=2),
    _plain(2, 16, 48, 19, 5),
    _plain(4, 16, 32, 18, 3, stride=2),  # grad_weight by quads of pixels, rows that end inside one
    _plain(2, 32, 16, 13, 5),
    _plain(2, 48, 48, 13, 3, groups=48),
    _plain(2, 48, 48, 13, 5, stride=2, groups=48),
    _plain(2, 64, 64, 13, 3, groups=64),  # depthwise with whole vectors of 512 bits
    _plain(1, 32, 32, 13, 3, stride=2, groups=32),
    _plain(1, 32, 32, 13, 5, groups=32),
    _plain(2, 12, 18, 9, 3, groups=3),
    _plain(3, 2, 3, 220, 3),  # a gradient sum that does not fit into an int32
    _plain(2, 3, 16, 31, 7, stride=2),
    Geometry(2, (8, 12), 1, (5, 9, 9), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    _clip(2, 37, 20, (4, 9, 10), 3),  # Winograd with three time taps, channels that end inside a vector
    _clip(1, 160, 24, (3, 7, 7), 3),  # 480 summed channels, more than a Winograd chunk holds
    _clip(2, 20, 33, (1, 6, 11), 5, padding=2),  # most time taps read outside of the clip
    _clip(2, 20, 33, (5, 8, 7), 2, padding=0),
    _clip(2, 16, 16, (2, 8, 8), 1, padding=2),  # frames of nothing but padding
    Geometry(2, (8, 12), 1, (40,), (5,), (2,), (2,), (1,)),
    # Of transposed convolutions, whose output is the grad_input here.
    Geometry(2, (32, 64), 1, (28, 28), (2, 2), (2, 2), (0, 0), (1, 1)),
    Geometry(2, (20, 40), 1, (16, 18), (4, 4), (2, 2), (1, 1), (1, 1)),
    Geometry(2, (24, 36), 1, (14, 13), (3, 3), (2, 2), (1, 1), (1, 1)),  # with a pixel that the stride leaves over
    Geometry(2, (33, 17), 1, (11, 12), (3, 3), (3, 3), (1, 1), (2, 2)),
]


def drawn(rng: random.Random) -> Geometry:
    axes = rng.choice([1, 2, 2, 2, 3])
    groups = rng.choice([1, 1, 1, 2, 3])
    c, k = groups * rng.choice([1, 2, 3, 7, 16, 17, 33]), groups * rng.choice([1, 2, 5, 16, 17, 40])
    if rng.random() < 0.2:
        groups = k = c
    kernel = tuple(rng.randint(1, 4) for _ in range(axes))
    dilation = tuple(rng.randint(1, 2) for _ in range(axes))
    padding = tuple(rng.randint(0, 2) for _ in range(axes))
    image = tuple(max(rng.randint(1, 12), d * (n - 1) + 1 - 2 * p) for n, d, p in zip(kernel, dilation, padding, strict=True))
    stride = tuple(rng.randint(1, 3) for _ in range(axes))
    return Geometry(rng.randint(1, 3), (c, k), groups, image, kernel, stride, padding, dilation)


def drawn_clip(rng: random.Random) -> Geometry:
    """Draws a clip with a kernel of 3x3 in space and stride 1. Winograd is used if its tiles are filled well enough."""
    channels = rng.choice([1, 5, 16, 31, 33, 80]), rng.choice([1, 4, 16, 17, 48])
    taps, padding = rng.randint(1, 5), tuple(rng.randint(0, 2) for _ in range(3))
    image = (max(rng.randint(1, 6), taps - 2 * padding[0]), rng.randint(3, 14), rng.randint(3, 14))
    return Geometry(rng.randint(1, 3), channels, 1, image, (taps, 3, 3), (1,) * 3, padding, (1,) * 3)


def _integers(size: tuple[int, ...], rng: random.Random, nonnegative: bool) -> Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(30))
    values = torch.randint(-127, 128, size, generator=generator, dtype=torch.int8)
    if rng.random() < 0.3:
        values = values.sign().where(values != 0, torch.ones_like(values)) * 127  # full amplitude finds overflows
    values = values.abs() if nonnegative else values
    return values.contiguous(memory_format=torch.channels_last) if values.dim() == 4 and rng.random() < 0.7 else values


def products(case: Geometry, rng: random.Random) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yields the three products of a case on random operands."""
    n, (c, k), g = case.batch, case.channels, case.groups
    x = _integers((n, c, *case.image), rng, rng.random() < 0.5)
    w = _integers((k, c // g, *case.kernel), rng, False)
    gradient = _integers((n, k, *case.out), rng, False)
    one = torch.full((1,) * x.dim(), 0.37)
    geometry = (case.stride, case.padding, case.dilation, g)
    yield "output", lambda: ops.conv_int8(x, one, w, one, *geometry)
    yield "grad_input", lambda: ops.conv_int8_grad_input(gradient, one, w, one, x.shape, *geometry)
    yield "grad_weight", lambda: ops.conv_int8_grad_weight(gradient, one, x, one, w.shape, *geometry)


def _elementwise(rng: random.Random) -> Iterator[tuple[str, Callable[[], tuple[Tensor, ...]]]]:
    """Yields calls of quantize and of the statistics, in both memory formats."""
    for size in ((3, 17, 9, 11), (2, 64, 16, 16), (5, 8, 1, 1), (700, 3)):
        generator = torch.Generator().manual_seed(rng.getrandbits(30))
        x = torch.randn(size, generator=generator)
        if x.dim() == 4 and rng.random() < 0.5:
            x = x.contiguous(memory_format=torch.channels_last)
        key = torch.tensor([rng.getrandbits(32), rng.getrandbits(32)])
        clip = x.abs().amax().reshape((1,) * x.dim()) * 0.7
        q, scale, _, _ = ops.quantize(x, clip)
        yield "quantize", lambda x=x, clip=clip: ops.quantize(x, clip)  # type: ignore[misc]
        yield "quantize stochastic", lambda x=x, clip=clip, key=key: ops.quantize(x, clip, key)  # type: ignore[misc]
        yield "quantize_max", lambda x=x: (*ops.quantize_max(x), *ops.quantize_max(x, 0), *ops.quantize_max(x, 1))  # type: ignore[misc]
        yield "absmax", lambda x=x: (ops.absmax(x), ops.absmax(x, 0), ops.absmax(x, 1))  # type: ignore[misc]
        yield "moments", lambda x=x: ops.moments(x)  # type: ignore[misc]
        yield "tail_count", lambda x=x: (ops.tail_count(x, torch.ones((1,) * x.dim())),)  # type: ignore[misc]
        yield "cosine_terms", lambda x=x: (ops.cosine_terms(x, torch.tensor([0.5, 1.0, 2.0])),)  # type: ignore[misc]
        yield "cosine_terms stochastic", lambda x=x: (ops.cosine_terms(x, torch.tensor([0.5, 2.0]), stochastic=True),)  # type: ignore[misc]
        yield "cosine_slope_terms", lambda x=x: (ops.cosine_slope_terms(x, torch.tensor(1.5)),)  # type: ignore[misc]
        yield "dot_terms", lambda x=x, q=q, scale=scale: (ops.dot_terms(x, q, scale),)  # type: ignore[misc]


_ROUNDED: Any = {"want_int8": True, "want_float": True, "want_mask": True, "keep": "int8", "output_dtype": torch.bfloat16}
"""What a block writes in a training step, with floats in bfloat16."""


def _block(rng: random.Random) -> Iterator[tuple[str, Callable[[], tuple[Tensor | None, ...]]]]:
    """Yields calls of the passes of a fused block."""
    for size in ((3, 17, 9, 11), (2, 64, 16, 16), (2, 24, 7, 7), (1, 136, 5, 5)):
        generator = torch.Generator().manual_seed(rng.getrandbits(30))
        x, g = (torch.randn(size, generator=generator).contiguous(memory_format=torch.channels_last) for _ in range(2))
        a, b, p, q, r = (torch.randn(size[1], generator=generator) for _ in range(5))
        clip, clips = torch.tensor(1.5), (r.abs() + 0.5).reshape(1, -1, 1, 1)
        key = torch.tensor([rng.getrandbits(32), rng.getrandbits(32)])
        rounded, added = x.to(torch.bfloat16), g.to(torch.bfloat16)
        yield "channel_stats", lambda x=x, r=rounded: (*ops.channel_stats(x), *ops.channel_stats(r))  # type: ignore[misc]
        for activation in ("relu", "silu"):
            forward, sums = (x, a, b, g, activation, clip), (g, x, a, b, None, activation)
            parts = ops.GradientParts(*sums, p, q, r)
            yield (
                f"normalize {activation}",
                lambda args=forward: tuple(ops.normalize(*args, want_float=True, want_mask=True)),  # type: ignore[misc]
            )
            norm = ops.BatchNorm(a, b, None, 1e-5, None, 0.1)
            yield (
                f"normalize_batch bfloat16 {activation}",
                lambda args=(rounded, norm, added, activation): _flat(ops.normalize_batch(*args, **_ROUNDED)),  # type: ignore[misc]
            )
            yield f"normalize_grad_sums {activation}", lambda args=sums: tuple(ops.normalize_grad_sums(*args, want_masked=True))  # type: ignore[misc]
            mask = ops.normalize(*forward, want_float=False, want_mask=True).mask
            yield f"add_waiting {activation}", lambda x=x, g=g, mask=mask: (ops.add_waiting(x, g, mask),)  # type: ignore[misc]
            small = parts._replace(g=added, mask=mask, x=ops.pack_norm(x, -b.abs(), b.abs(), a.double(), "int8"))
            yield (
                f"gradients in bfloat16 {activation}",
                lambda x=x, parts=small, clip=clip, key=key: _of_rounded_gradient(x, parts, clip, key),  # type: ignore[misc]
            )
            yield f"normalize_grad {activation}", lambda parts=parts: (ops.normalize_grad(parts),)  # type: ignore[misc]
            pair = (parts, clip, clips, key)
            yield f"normalize_grad_quantize_pair {activation}", lambda args=pair: _flat(ops.normalize_grad_quantize_pair(*args))  # type: ignore[misc]


def _of_rounded_gradient(x: Tensor, parts: ops.GradientParts, clip: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:
    """The passes back where the gradient is bfloat16, as between two blocks with stream="bfloat16"."""
    sums = ops.normalize_grad_sums(*parts[:6], want_masked=True)
    waiting = ops.add_waiting(x, parts.g, parts.mask)
    return _flat((sums, waiting, ops.normalize_grad(parts), ops.normalize_grad_quantize(parts, clip, key)))


def _flat(results: object) -> tuple[Tensor | None, ...]:
    """The tensors of nested tuples."""
    if isinstance(results, tuple):
        return tuple(tensor for result in results for tensor in _flat(result))
    return (results if isinstance(results, Tensor) else None,)


def run(config: VerifyConfig, console: tables.Console) -> bool:
    """Runs the command. Returns True if every path agrees with the reference."""
    if config.gpu:
        return verify_gpu.run(config.cases, config.seed, console)
    paths = [path for path in kernel_paths.available() if path != "reference"]
    if not paths:
        console.print(f"No native path can run here ({kernel_paths.why_not('generic')}); all operators use the reference path.")
        return True
    good = True
    for path in paths:
        rng = random.Random(config.seed)
        used: Counter[tuple[str, str]] = Counter()
        wrong: list[str] = []
        clips = (drawn_clip(rng) for _ in range(config.cases // 10))
        for case in [*FIXED, *(drawn(rng) for _ in range(config.cases)), *clips]:
            _compare_products(path, case, rng, used, wrong)
        for name, function in (*_elementwise(rng), *_block(rng)):
            _compare_elementwise(path, name, function, used, wrong)
        rows = [[name, kernel, str(count)] for (name, kernel), count in sorted(used.items())]
        console.print(tables.build(f"path {path}", ["operator", "kernel", "cases"], rows, left=2))
        for line in wrong[:10]:
            console.print(f"{line}")
        console.print(f"{sum(used.values())} cases, {len(wrong)} wrong\n")
        good = good and not wrong
    return good


def _compare_products(path: str, case: Geometry, rng: random.Random, used: Counter[tuple[str, str]], wrong: list[str]) -> None:
    for name, product in products(case, rng):
        with kernel_paths.path("reference"):
            expected = product()
        with kernel_paths.path(path):
            result = product()
        kernel = kernel_paths.last_kernel()
        used[name, kernel or "reference"] += 1
        if not torch.equal(result, expected) or result.stride() != expected.stride():
            wrong.append(f"{name} by {kernel} differs from the reference: {case}")
        if not kernel_paths.belongs(kernel, path):
            wrong.append(f"{name} used {kernel or 'reference'} instead of {path}: {case}")


def _compare_elementwise(
    path: str,
    name: str,
    function: Callable[[], tuple[Tensor | None, ...]],
    used: Counter[tuple[str, str]],
    wrong: list[str],
) -> None:
    with kernel_paths.path("reference"):
        expected = function()
    with kernel_paths.path(path):
        result = function()
    used[name, path] += 1
    if not all(_equal(a, b) for a, b in zip(_flat(result), _flat(expected), strict=True)):
        wrong.append(f"{name} on {path} differs from the reference")


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
