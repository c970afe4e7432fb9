# SPDX-License-Identifier: Apache-2.0
"""Every kernel, around every depth at which it splits a sum, widens one or leaves it to another kernel: at full amplitude.

An int32 holds 133 144 products of 127 · 127. Kernels count that depth in different ways: taps times channels, channels rounded
up to whole vectors, pixels, chunks of Winograd tiles. Here operands are ±127 throughout, so every sum is known: 127² times the
number of taps that meet the image, times the channels. Both signs of both operands are tried, because some kernels choose by
sign and one adds an offset to an operand. One thread is enough, but for grad_weight, whose sums threads share.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import byteback
from byteback import ops
from byteback.inspect.verify import Geometry
from byteback.ops.backends import paths
from byteback.ops.contract.limits import MAX_INT32_DEPTH

NATIVE = [path for path in paths.available() if path != "reference"]
pytestmark = pytest.mark.skipif(not NATIVE, reason="this build has no native library")


SIGNS = [(-127, 127), (127, -127), (127, 127)]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def line(channels: tuple[int, int], image: int, kernel: int, padding: int = 0, groups: int = 1) -> Geometry:
    return Geometry(1, channels, groups, (image,), (kernel,), (1,), (padding,), (1,))


def square(channels: tuple[int, int], image: tuple[int, int], stride: int = 1, batch: int = 1, groups: int = 1) -> Geometry:
    return Geometry(batch, channels, groups, image, (3, 3), (stride, stride), (1, 1), (1, 1))


def summed_channels() -> Iterator[tuple[int, Geometry]]:
    """(depth of the sum, a convolution with that many input channels and few output channels)."""
    for channels in (133_143, 133_144, 133_145, 266_289):
        yield channels, line((channels, 2), 2, 1)
    for channels in (44_380, 44_381, 44_382):  # 133 140, 133 143, 133 146; in whole vectors of four 133 140, 133 152, 133 152
        yield 3 * channels, line((channels, 2), 5, 3, 1)
    yield 3 * 44_381, line((2 * 44_381, 2), 5, 3, 1, groups=2)
    for channels in (14_793, 14_794):  # 133 137, 133 146
        yield 9 * channels, square((channels, 2), (5, 5), stride=2)
        yield 9 * channels, square((channels, 1), (8, 12))
    for channels in (4_931, 4_932):  # 133 137, 133 164
        yield 27 * channels, Geometry(1, (channels, 1), 1, (3, 8, 8), (3, 3, 3), (1,) * 3, (1,) * 3, (1,) * 3)


def many_taps(image: int, padding: int) -> Iterator[tuple[int, Geometry]]:
    """One channel a group: a kernel that takes four channels at a time sees four times the depth.

    The image is one pixel, or as wide as the kernel; the padding nothing, or all but one pixel of the kernel.
    """
    for taps in (33_286, 33_287, 133_144, 133_145):
        for groups in (1, 2):
            sizes = 1 + image * (taps - 1), taps, padding * (taps - 1)
            yield taps, line((groups, 2), *sizes, groups=groups)


def turned(case: Geometry) -> Geometry:
    """The convolution whose grad_input sums over what `case` sums over."""
    out, back = case.channels[::-1]
    return Geometry(case.batch, (out, back), case.groups, case.image, case.kernel, case.stride, case.padding, case.dilation)


def summed_pixels() -> Iterator[tuple[int, Geometry]]:
    """(pixels of the output, a convolution with that many)."""
    for pixels in (131_072, 131_073, 133_144, 133_145, 262_145, 266_289):
        yield pixels, line((2, 3), pixels, 1)
    yield 133_145, line((16, 16), 133_145 + 99, 100)  # a gradient too large for each thread to have its own
    for image, batch in (((364, 365), 1), ((365, 365), 1), ((365, 365), 2)):
        yield batch * image[0] * image[1], square((2, 3), image, batch=batch)
        yield batch * image[0] * image[1], square((16, 16), image, batch=batch, groups=16)
        yield batch * image[0] * image[1], square((16, 16), image, batch=batch)
    yield 3 * 365 * 365, square((16, 16), (729, 729), stride=2, batch=3)  # more than an int32 holds, in each of two threads


OUTPUT = [*summed_channels(), *many_taps(1, 0)]  # one output pixel meets all taps
GRAD_INPUT = [
    *((depth, turned(case)) for depth, case in [*summed_channels(), *many_taps(0, 1)]),  # one input pixel does
    # With a stride, in whole panels: all phases of the image together, or one after the other.
    *((9 * channels, square((16, channels), (3, 17), stride=2)) for channels in (14_784, 14_800)),
]
GRAD_WEIGHT = list(summed_pixels())


def name(case: tuple[int, Geometry]) -> str:
    _, geometry = case
    channels, sizes = "-".join(map(str, geometry.channels)), "x".join(map(str, geometry.image))
    return f"{channels}-g{geometry.groups}-{sizes}-k{geometry.kernel[0]}-s{geometry.stride[0]}"


def met(case: Geometry, which: str) -> Tensor:
    """How many products of one channel each element of a result sums, in float64: (1, 1, ...), the product over the axes."""
    counts = torch.ones(1, 1, *(1,) * len(case.image), dtype=torch.float64)
    sizes = zip(case.image, case.kernel, case.out, case.stride, case.padding, case.dilation, strict=True)
    for axis, (image, kernel, out, stride, padding, dilation) in enumerate(sizes):
        shape = [1] * counts.dim()
        shape[axis + 2] = -1
        o, t = torch.arange(out), torch.arange(kernel)
        if which == "grad_input":
            from_o = torch.arange(image)[:, None] + padding - t * dilation
            meets = (from_o % stride == 0) & (from_o >= 0) & (from_o < out * stride)
        else:
            rows, columns = (o[:, None], t) if which == "output" else (o, t[:, None])
            at = rows * stride - padding + columns * dilation
            meets = (at >= 0) & (at < image)
        counts = counts * meets.sum(1).reshape(shape)
    return counts


def results(case: Geometry, which: str, a: int, b: int) -> Tensor:
    """The product of operands that are all `a` and all `b`."""
    (c, k), groups = case.channels, case.groups
    sizes = {
        "input": (case.batch, c, *case.image),
        "weight": (k, c // groups, *case.kernel),
        "gradient": (case.batch, k, *case.out),
    }
    one, geometry = torch.ones((1,) * (len(case.image) + 2)), (case.stride, case.padding, case.dilation, groups)

    def full(operand: str, value: int) -> Tensor:
        return torch.full(sizes[operand], value, dtype=torch.int8)

    if which == "output":
        return ops.conv_int8(full("input", a), one, full("weight", b), one, *geometry)
    if which == "grad_input":
        return ops.conv_int8_grad_input(full("gradient", a), one, full("weight", b), one, list(sizes["input"]), *geometry)
    return ops.conv_int8_grad_weight(full("gradient", a), one, full("input", b), one, list(sizes["weight"]), *geometry)


def assert_exact(case: Geometry, which: str, path: str) -> None:
    (c, k), groups = case.channels, case.groups
    summed = {"output": c // groups, "grad_input": k // groups, "grad_weight": case.batch}[which]
    products = met(case, which) * summed
    for a, b in SIGNS:
        expected = (products * (a * b)).float()
        with byteback.path(path):
            result = results(case, which, a, b)
        assert paths.belongs(paths.last_kernel(), path), paths.last_kernel()
        assert torch.equal(result, expected.expand_as(result)), f"{which} of {a} and {b} by {paths.last_kernel()}: {case}"


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("case", OUTPUT, ids=name)
def test_output_is_exact(case: tuple[int, Geometry], path: str) -> None:
    assert_exact(case[1], "output", path)


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("case", GRAD_INPUT, ids=name)
def test_grad_input_is_exact(case: tuple[int, Geometry], path: str) -> None:
    assert_exact(case[1], "grad_input", path)


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("case", GRAD_WEIGHT, ids=name)
def test_grad_weight_is_exact(case: tuple[int, Geometry], path: str) -> None:
    _, geometry = case
    if path == "generic" and geometry.channels == (16, 16):
        pytest.skip("the generic path has one algorithm, which the smaller cases try too")
    torch.set_num_threads(2)
    assert_exact(geometry, "grad_weight", path)


@pytest.mark.parametrize("cases", [OUTPUT, GRAD_INPUT, GRAD_WEIGHT], ids=["output", "grad_input", "grad_weight"])
def test_the_cases_lie_on_both_sides_of_the_bound(cases: list[tuple[int, Geometry]]) -> None:
    depths = {depth for depth, _ in cases}
    assert {MAX_INT32_DEPTH, MAX_INT32_DEPTH + 1} <= depths
