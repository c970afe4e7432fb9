# SPDX-License-Identifier: Apache-2.0
"""grad_input with a stride: the matrix paths make all phases of a band of the image together, and give the reference's bits.

Drawn: whole panels of channels and images wide enough for that way, with every reach of the taps to the left and to the right.
"""

from __future__ import annotations

import random

import pytest
import torch

import byteback
from byteback import ops
from byteback.inspect.verify import Geometry
from byteback.ops.backends import paths

PATHS = [path for path in paths.available() if path not in ("reference", "generic")]


def drawn(rng: random.Random) -> Geometry:
    groups = rng.choice([1, 1, 2])
    channels = groups * rng.choice([16, 32]), groups * rng.choice([16, 48])
    stride = rng.choice([(2, 2), (2, 2), (1, 2), (2, 1), (3, 3)])
    dilation = rng.choice([1, 1, 2]), rng.choice([1, 1, 3])
    kernel = tuple(rng.randint(s, s + 2) for s in stride)
    padding = tuple(rng.randint(0, 3) for _ in range(2))
    image = rng.randint(13, 20), rng.randint(13, 60)
    return Geometry(rng.randint(1, 3), channels, groups, image, kernel, stride, padding, dilation)


@pytest.fixture(autouse=True)
def _threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_equal(case: Geometry, per_index: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    (c, k), n = case.channels, case.batch
    g = torch.randint(-127, 128, (n, k, *case.out), generator=generator, dtype=torch.int8)
    w = torch.randint(-127, 128, (k, c // case.groups, *case.kernel), generator=generator, dtype=torch.int8)
    g_scale = torch.rand((n if per_index else 1, 1, 1, 1), generator=generator) * 0.01
    w_scale = torch.rand((1, c // case.groups if per_index else 1, 1, 1), generator=generator) * 0.01
    geometry = ([n, c, *case.image], case.stride, case.padding, case.dilation, case.groups)
    with byteback.path("reference"):
        expected = ops.conv_int8_grad_input(g, g_scale, w, w_scale, *geometry)
    for path in PATHS:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with byteback.path(path):
                result = ops.conv_int8_grad_input(g, g_scale, w, w_scale, *geometry)
            assert torch.equal(result, expected), f"{paths.last_kernel()}, {threads} threads: {case}"


@pytest.mark.parametrize("per_index", [False, True], ids=["one_scale", "a_scale_per_image_and_channel"])
@pytest.mark.parametrize("part", range(4))
def test_drawn_strided_grad_inputs_equal_the_reference(part: int, per_index: bool) -> None:
    rng = random.Random(part)
    for seed in range(25):
        assert_equal(drawn(rng), per_index, seed)


@pytest.mark.parametrize("size", [17, 18, 35, 36])
def test_odd_and_even_images_equal_the_reference(size: int) -> None:
    """The phases of an odd image have grids of different sizes."""
    for padding in (0, 1, 2):
        case = Geometry(3, (32, 64), 1, (size, size), (3, 3), (2, 2), (padding, padding), (1, 1))
        assert_equal(case, True, size)


def test_an_empty_batch_gives_an_empty_gradient() -> None:
    assert_equal(Geometry(0, (16, 16), 1, (16, 16), (3, 3), (2, 2), (1, 1), (1, 1)), False, 0)


def test_a_large_result_past_the_caches_equals_the_reference() -> None:
    """More than 16 MB, which is written past the caches, in bands of several rows."""
    assert_equal(Geometry(2, (64, 128), 1, (190, 182), (3, 3), (2, 2), (1, 1), (1, 1)), False, 0)
