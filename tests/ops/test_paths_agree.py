# SPDX-License-Identifier: Apache-2.0
"""Every native path equals the reference: drawn convolutions, the layers of real networks, and the Winograd bound.

Drawn: 2000 convolutions, three products each, on every native path with one and two threads.
"""

from __future__ import annotations

import random
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import byteback
from byteback import ops
from byteback.bench.shapes import NETWORKS, ConvCase, network_cases
from byteback.inspect.verify import FIXED, Geometry, drawn, drawn_clip, products
from byteback.ops.backends import paths as kernel_paths

NATIVE = [path for path in kernel_paths.available() if path != "reference"]
CSRC = Path(__file__).parents[2] / "csrc"
pytestmark = pytest.mark.skipif(not NATIVE, reason="this build has no native library")


@pytest.fixture(autouse=True)
def _threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_paths_agree(case: Geometry, rng: random.Random, paths: list[str]) -> None:
    for name, product in products(case, rng):
        with byteback.path("reference"):
            expected = product()
        for path in paths:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                with byteback.path(path):
                    result = product()
                assert kernel_paths.belongs(kernel_paths.last_kernel(), path), (
                    f"{name} of {case} was served by {kernel_paths.last_kernel()!r}"
                )
                assert torch.equal(result, expected), f"{name} by {kernel_paths.last_kernel()}, {threads} threads: {case}"
                assert result.stride() == expected.stride(), f"{name} by {kernel_paths.last_kernel()}: {case}"


@pytest.mark.parametrize("part", range(20))
def test_drawn_convolutions_are_equal_on_every_path(part: int) -> None:
    rng = random.Random(part)
    for _ in range(100):
        assert_paths_agree(drawn(rng), rng, NATIVE)


@pytest.mark.parametrize("part", range(4))
def test_drawn_clips_are_equal_on_every_path(part: int) -> None:
    rng = random.Random(part)
    for _ in range(25):
        assert_paths_agree(drawn_clip(rng), rng, NATIVE)


@pytest.mark.parametrize("case", FIXED, ids=str)
def test_fixed_convolutions_are_equal_on_every_path(case: Geometry) -> None:
    assert_paths_agree(case, random.Random(1), NATIVE)


def _geometry(case: ConvCase) -> Geometry:
    return Geometry(
        case.batch,
        (case.in_channels, case.out_channels),
        case.groups,
        (case.height, case.width),
        (case.kernel_h, case.kernel_w),
        (case.stride,) * 2,
        (case.padding_h, case.padding_w),
        (case.dilation,) * 2,
    )


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("path", [pytest.param(path, marks=[pytest.mark.slow] if path == "generic" else []) for path in NATIVE])
def test_layers_of_real_networks_are_equal(network: str, path: str) -> None:
    for case in network_cases(network, batch=1):
        assert_paths_agree(_geometry(case), random.Random(0), [path])


# No grad_weight that direct convolution runs: multiples of 16 up to 64.
CHANNELS = [(1, 2), (3, 64), (15, 17), (16, 80), (31, 33), (32, 96), (37, 5), (64, 65), (100, 20)]


@pytest.mark.parametrize("path", [path for path in NATIVE if path != "generic"])
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
def test_winograd_is_equal_for_every_tail_of_tiles_and_channels(channels: tuple[int, int], path: str) -> None:
    """Images that end inside a tile or are wider than a strip, tiles that end inside a block, channels inside a vector."""
    rng = random.Random(0)
    for batch, image, padding in [(1, (12, 12), 1), (3, (7, 8), 1), (5, (8, 15), 0), (2, (11, 45), 2), (7, (14, 16), 1)]:
        case = Geometry(batch, channels, 1, image, (3, 3), (1, 1), (padding,) * 2, (1, 1))
        assert_paths_agree(case, rng, [path])
        assert kernel_paths.last_kernel() == f"{path}/winograd", case


@pytest.mark.parametrize("path", [path for path in NATIVE if path != "generic"])
@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [(3, 64), (15, 17), (37, 5), (64, 65)], ids=str)
def test_winograd_over_clips_is_equal_for_every_number_of_time_taps(channels: tuple[int, int], taps: int, path: str) -> None:
    """Clips of one frame and of more, time paddings of 0 to 2, frames that no tap reaches, images that end inside a tile."""
    rng = random.Random(taps)
    for batch, image, padding in [(1, (4, 8, 8), 1), (3, (1, 7, 12), 2), (2, (5, 12, 11), 0), (2, (2, 8, 15), 2)]:
        if image[0] + 2 * padding < taps:
            continue
        spatial = rng.randint(0, 2)
        pads = (padding, spatial, spatial)
        case = Geometry(batch, channels, 1, image, (taps, 3, 3), (1,) * 3, pads, (1,) * 3)
        assert_paths_agree(case, rng, [path])
        assert kernel_paths.last_kernel() == f"{path}/winograd", case


def test_winograd_over_clips_stays_exact_where_three_time_taps_just_fit_and_just_do_not() -> None:
    """The bound counts all time taps: 3 x 171 channels of full weights are deeper than one chunk."""
    one = torch.ones(1, 1, 1, 1, 1)
    for total in (264208, 264209, 27 * 171 * 127):
        w = torch.zeros(1, 27 * 171, dtype=torch.int8)
        full, rest = divmod(total, 127)
        w[0, :full] = 127
        w[0, full : full + (rest > 0)] = rest
        w = w.reshape(1, 171, 3, 3, 3)
        x = torch.full((1, 171, 3, 8, 8), 127, dtype=torch.int8)
        result = ops.conv_int8(x, one, w, one, [1, 1, 1], [1, 1, 1], [1, 1, 1])
        assert result[0, 0, 1, 3, 3].item() == torch.tensor(127.0 * total, dtype=torch.float32).item()


def test_winograd_stays_exact_where_merged_chunks_just_fit_and_just_do_not() -> None:
    """512 channels are one chunk only if Σ|w| · 127 < 2^25, that is Σ|w| <= 264208; one more must be split."""
    one = torch.ones(1, 1, 1, 1)
    for total in (264208, 264209):
        w = torch.zeros(1, 512 * 9, dtype=torch.int8)
        full, rest = divmod(total, 127)
        w[0, :full], w[0, full] = 127, rest
        w = w.reshape(1, 512, 3, 3)
        x = torch.full((1, 512, 8, 8), 127, dtype=torch.int8)
        expected = 127.0 * total
        result = ops.conv_int8(x, one, w, one, [1, 1], [1, 1], [1, 1])
        assert result[0, 0, 3, 3].item() == torch.tensor(expected, dtype=torch.float32).item()


DRIVER = """
#include <cstdio>
#include <vector>
#include "core/PATH.h"
#include "core/generic.h"
using namespace byteback;
int main() {
    const ConvShape s{1, 512, 16, 1, {1, 8, 8}, {1, 3, 3}, {1, 8, 8}, {1, 1, 1}, {0, 1, 1}, {1, 1, 1}};
    std::vector<s8> x(8 * 8 * 512, 127), w(16 * 9 * 512, 127);
    std::vector<f32> a(8 * 8 * 16), b(a.size());
    const f32 one = 1.0f;
    generic::conv_output(s, x.data(), w.data(), {&one, 0, 0}, a.data(), 1);
    PATH::winograd_output(s, x.data(), w.data(), {&one, 0, 0}, b.data(), 1);
    std::puts(a == b ? "equal" : "different");
}
"""


FLAGS = {
    "avx2": ["-mavx2", "-mfma"],
    "avx512vnni": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"],
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("path", FLAGS)
@pytest.mark.parametrize(("bound", "says"), [("<< 25", "equal"), ("<< 40", "different")], ids=["as it is", "bound removed"])
def test_removing_the_winograd_bound_is_caught(tmp_path: Path, path: str, bound: str, says: str) -> None:
    """The mutation test: without the bound the sums wrap, and the comparison with the textbook kernel must see it."""
    if path not in NATIVE:
        pytest.skip(f"{path} cannot run here: {kernel_paths.why_not(path)}")
    shutil.copytree(CSRC, tmp_path / "csrc")
    header = tmp_path / "csrc" / "conv" / "winograd" / "winograd_transform.h"
    text = header.read_text()
    assert text.count("(s64{1} << 25)") == 1
    header.write_text(text.replace("(s64{1} << 25)", f"(s64{{1}} {bound})"))
    (tmp_path / "driver.cpp").write_text(DRIVER.replace("PATH", path))
    sources = [f"csrc/conv/winograd/x86/winograd_{path}.cpp", "csrc/conv/conv_generic.cpp", "csrc/core/pool.cpp", "driver.cpp"]
    flags = ["-std=c++17", "-O2", *FLAGS[path], "-fopenmp", "-Icsrc", "-o", "driver"]
    subprocess.run(["g++", *flags, *sources], cwd=tmp_path, check=True, capture_output=True, timeout=300)
    done = subprocess.run(["./driver"], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == says


def test_memory_does_not_grow_over_many_calls_with_changing_shapes() -> None:
    rng = random.Random(0)
    one = torch.ones(1, 1, 1, 1)

    def calls(count: int) -> None:
        for _ in range(count):
            c, k, size = rng.choice([3, 16, 40]), rng.choice([5, 16, 33]), rng.randint(3, 24)
            x = torch.ones(2, c, size, size, dtype=torch.int8)
            w = torch.ones(k, c, 3, 3, dtype=torch.int8)
            ops.conv_int8(x, one, w, one, [1, 1], [1, 1], [1, 1])
            ops.conv_int8_grad_weight(
                torch.ones(2, k, size, size, dtype=torch.int8), one, x, one, w.shape, [1, 1], [1, 1], [1, 1]
            )

    calls(1000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls(4500)  # two kernels each
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 30_000, f"{grown} kB more after 9000 calls; a leak of one result per call would be far more than 30 MB"
