# SPDX-License-Identifier: Apache-2.0
"""Proves the noise of stochastic rounding: its bits by an independent computation, its quality by statistics.

Keys are fixed, so every test here is deterministic: it passes or fails for ever. The false-alarm rate stated with a
statistical test is the chance that a *perfect* generator would have failed it for the keys we happened to choose.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from byteback import ops
from byteback.ops.backends import paths
from byteback.ops.contract.noise import key_words, philox4x32, uniform_like

MASK = 2**32 - 1
KEY = (0x9D2C5680, 0xEFC60000)
SIGMAS = 5.0  # two-sided normal tail: 5.7e-7


# ---- the definition, once more, one element at a time ----------------------------------------------------------------


def python_mix32(h: int) -> int:
    h ^= h >> 16
    h = h * 0x85EBCA6B % 2**32
    h ^= h >> 13
    h = h * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def python_u(key: tuple[int, int], shape: tuple[int, ...], at: tuple[int, ...]) -> float:
    """u of the element at (n, c, ...) of a tensor of `shape`."""
    n, c, *position = at
    _, channels, *spatial = shape
    pixel = n
    for size, coordinate in zip(spatial, position, strict=True):
        pixel = pixel * size + coordinate
    index = pixel * ((channels + 1) // 2) + c // 2
    h = python_mix32(((index * 0x9E3779B1 + key[0]) % 2**32) ^ key[1])
    half = h % 65536 if c % 2 == 0 else h // 65536
    return (half + 0.5) / 65536


def python_philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Philox 4x32-10 after the paper's figure: two S-boxes, a permutation, a Weyl sequence for the key."""
    k, c = list(key), list(counter)
    for _ in range(10):
        left, right = divmod(c[0] * 0xD2511F53, 2**32), divmod(c[2] * 0xCD9E8D57, 2**32)
        c = [right[0] ^ c[1] ^ k[0], right[1], left[0] ^ c[3] ^ k[1], left[1]]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


# Random123 1.14, examples/kat_vectors: philox4x32 10.
@pytest.mark.parametrize(
    ("key", "counter", "answer"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK, MASK), (MASK,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "all_ones", "digits_of_pi"],
)
def test_philox_gives_the_known_answers(key: Any, counter: Any, answer: Any) -> None:
    assert philox4x32(key, counter) == answer
    assert tuple(python_philox(key, counter)) == answer


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1, -1])
@pytest.mark.parametrize(("rank", "layer", "count"), [(0, 0, 0), (1, 2, 3), (7, 2**31, 2**40 + 5)])
def test_the_key_is_philox_of_seed_and_count_layer_rank(seed: int, rank: int, layer: int, count: int) -> None:
    words = python_philox((seed % 2**32, seed % 2**64 >> 32), (count % 2**32, count >> 32, layer, rank))
    result = ops.noise_key(torch.tensor(seed), torch.tensor(layer), torch.tensor(count), rank)
    assert result.dtype == torch.int64 and result.tolist() == words[:2]
    assert all(0 <= word <= MASK for word in result.tolist())


SHAPES = [(3, 1), (2, 5), (2, 7, 3), (2, 2, 3), (2, 3, 4, 5), (1, 5, 3, 2), (2, 4, 2, 3), (2, 3, 2, 3, 2), (1, 1, 2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("key", [KEY, (MASK, MASK), (0, 0)], ids=["usual_key", "all_ones_key", "zero_key"])
def test_u_equals_the_definition_element_by_element(shape: tuple[int, ...], key: tuple[int, int]) -> None:
    u = uniform_like(torch.zeros(shape), torch.tensor(key))
    assert u.shape == shape and u.dtype == torch.float32
    for at in itertools.product(*map(range, shape)):
        assert u[at].item() == python_u(key, shape, at)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted", "sliced"])
def test_stochastic_rounding_is_the_floor_of_y_plus_u(oracle: Any, shape: tuple[int, ...], layout: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 60
    clip = torch.full((1,) * len(shape), 127.0)  # 127 / 127 = 1, so y = x
    q = ops.quantize(oracle.laid_out(x, layout), clip, torch.tensor(KEY))[0]
    for at in itertools.product(*map(range, shape)):
        y = min(max(x[at].item(), -127.0), 127.0)
        assert q[at].item() == math.floor(np.float32(y) + np.float32(python_u(KEY, shape, at)))


@pytest.mark.parametrize("layout", ["channels_last", "permuted", "sliced"])
@pytest.mark.parametrize("threads", [1, 2])
def test_neither_layout_nor_threads_change_the_noise(oracle: Any, layout: str, threads: int, restore_threads: None) -> None:
    x = torch.randn(4, 33, 31, 17, generator=torch.Generator().manual_seed(1))
    clip = torch.full((1, 1, 1, 1), 3.0)
    expected = ops.quantize(x, clip, torch.tensor(KEY))[0]
    torch.set_num_threads(threads)
    assert torch.equal(ops.quantize(oracle.laid_out(x, layout), clip, torch.tensor(KEY))[0], expected)


def test_two_tensors_of_one_shape_share_u_under_one_key() -> None:
    # Both int8 copies of a grad_output are rounded with the same u, whatever their clips are.
    x = torch.full((2, 5, 7, 7), 0.5)
    per_tensor = ops.quantize(x, torch.full((1, 1, 1, 1), 127.0), torch.tensor(KEY))[0]
    per_channel = ops.quantize(x, torch.full((1, 5, 1, 1), 127.0), torch.tensor(KEY))[0]
    assert torch.equal(per_tensor, per_channel) and 0 < per_tensor.sum() < x.numel()


def test_exact_integers_and_zeros_stay_themselves() -> None:
    integers = torch.arange(-127.0, 128.0).reshape(1, 255, 1).expand(40, 255, 9)
    for count in range(5):
        key = torch.tensor(key_words(1, 0, 0, count))
        assert torch.equal(ops.quantize(integers, torch.full((1, 1, 1), 127.0), key)[0].float(), integers)


def test_u_lies_strictly_between_0_and_1_and_takes_its_extremes() -> None:
    u = uniform_like(torch.empty(1, 4, 1_000_000), torch.tensor(KEY))
    assert u.min().item() == 0.5 / 65536 and u.max().item() == 65535.5 / 65536


# ---- quality ---------------------------------------------------------------------------------------------------------


def u_of(seed: int = 1, rank: int = 0, layer: int = 0, count: int = 0, shape: tuple[int, ...] = (1, 512, 32, 32)) -> Tensor:
    key = ops.noise_key(torch.tensor(seed), torch.tensor(layer), torch.tensor(count), rank)
    return uniform_like(torch.empty(shape), key)


def assert_independent(a: Tensor, b: Tensor) -> None:
    """No linear correlation (5 sigma) and a flat joint histogram (chi-square of 256 cells, 6 sigma).

    False alarm of a perfect generator: 5.7e-7 for the first, below 1e-7 for the second.
    """
    a, b = a.reshape(-1).double(), b.reshape(-1).double()
    n = a.numel()
    assert n >= 400_000
    correlation = float(((a - 0.5) * (b - 0.5)).mean() * 12)
    assert abs(correlation) < SIGMAS / math.sqrt(n)
    cells = torch.bincount((a * 16).long() * 16 + (b * 16).long(), minlength=256).double()
    chi_square = float(((cells - n / 256) ** 2).sum() / (n / 256))
    assert abs(chi_square - 255) < 6 * math.sqrt(2 * 255)


NEIGHBOURS = {
    "the_two_channels_of_a_pair": lambda u: (u[:, 0::2], u[:, 1::2]),
    "channels_of_adjacent_pairs": lambda u: (u[:, 1:-1:2], u[:, 2::2]),
    "even_channels_of_adjacent_pairs": lambda u: (u[:, :-2:2], u[:, 2::2]),
    "columns": lambda u: (u[..., :-1], u[..., 1:]),
    "rows": lambda u: (u[..., :-1, :], u[..., 1:, :]),
}


@pytest.mark.parametrize("which", list(NEIGHBOURS))
def test_neighbours_are_not_correlated(which: str) -> None:
    """False alarm 7e-7 (see assert_independent)."""
    assert_independent(*NEIGHBOURS[which](u_of(shape=(1, 1024, 32, 32))))


def test_images_of_a_batch_are_not_correlated() -> None:
    """False alarm 7e-7 (see assert_independent)."""
    u = u_of(shape=(2, 512, 32, 32))
    assert_independent(u[0], u[1])


OTHERS = {
    "the_next_layer": {"layer": 1},
    "the_next_count": {"count": 1},
    "a_count_past_32_bits": {"count": 2**32},
    "the_next_rank": {"rank": 1},
    "the_next_seed": {"seed": 2},
    "a_seed_that_differs_above_32_bits": {"seed": 1 + 2**32},
}


@pytest.mark.parametrize("other", list(OTHERS))
def test_keys_that_differ_in_one_word_are_not_correlated(other: str) -> None:
    """False alarm 7e-7 (see assert_independent)."""
    assert_independent(u_of(), u_of(**OTHERS[other]))


def test_layer_count_and_rank_do_not_stand_in_for_each_other() -> None:
    words = {key_words(5, rank, layer, count) for rank in range(8) for layer in range(8) for count in range(8)}
    assert len(words) == 512  # 2^-64 · 512² / 2: a collision by chance is out of the question


def test_the_noise_is_flat() -> None:
    """chi-square over 256 cells of 4e6 draws, 6 sigma; false alarm below 1e-7."""
    u = u_of(shape=(1, 4, 1_000_000))
    cells = torch.bincount((u * 256).long().reshape(-1), minlength=256).double()
    assert abs(float(((cells - u.numel() / 256) ** 2).sum() / (u.numel() / 256)) - 255) < 6 * math.sqrt(2 * 255)


@pytest.mark.parametrize("y", [1e-3, -1e-3, 0.25, -0.5, 0.999, 3.7, -126.3])
def test_rounding_is_unbiased_with_variance_f_times_one_minus_f(y: float) -> None:
    """Mean and variance of 1e7 draws for |y| = 1e-3 (1e6 for the others) within 5 sigma; false alarm 1.2e-6 for each y.

    u has 65536 values, so the mean may be off by 2^-17 in all eternity: that is granted on top.
    """
    steps, pixels = (5, 500_000) if abs(y) == 1e-3 else (1, 250_000)
    clip, total, squares, n = torch.full((1, 1, 1), 127.0), 0, 0, steps * pixels * 4
    f = y - math.floor(y)
    for count in range(steps):
        key = ops.noise_key(torch.tensor(77), torch.tensor(1), torch.tensor(count))
        up = ops.quantize(torch.full((1, 4, pixels), y), clip, key)[0].long() - math.floor(y)
        assert set(up.unique().tolist()) <= {0, 1}
        total, squares = total + int(up.sum()), squares + int((up * up).sum())
    mean, variance = total / n, squares / n - (total / n) ** 2
    sigma = math.sqrt(f * (1 - f) / n)
    assert abs(mean - f) < SIGMAS * sigma + 2**-17
    # The variance of a Bernoulli estimate: f(1-f) ± |1-2f| sigma, plus the same grain.
    assert abs(variance - f * (1 - f)) < SIGMAS * sigma * abs(1 - 2 * f) + 2**-17 + 30 * sigma**2


def test_a_mean_over_many_counts_converges_for_every_element() -> None:
    """Each of 512 elements, over 2000 steps, within 5.5 sigma of y; false alarm 512 · 3.8e-8 = 2e-5."""
    x = torch.linspace(-2, 2, 512).reshape(1, 8, 64)
    clip, total = torch.full((1, 1, 1), 127.0), torch.zeros(1, 8, 64)
    for count in range(2000):
        total += ops.quantize(x, clip, torch.tensor(key_words(3, 0, 0, count)))[0]
    f = x - x.floor()
    assert ((total / 2000 - x).abs() <= 5.5 * (f * (1 - f) / 2000).sqrt() + 2**-17 + 1e-6).all()


@pytest.mark.parametrize("path", paths.available())
@pytest.mark.parametrize("words", [(2**32 + 5, 9), (5, 2**40 + 9), (5 - 2**63, -(2**32) + 9), (-1, -2)], ids=str)
def test_of_a_keys_words_the_low_32_bits_count(path: str, words: tuple[int, int]) -> None:
    """Whoever makes a key by hand gets the same noise on every path, from every function that takes one."""
    x, one = torch.randn(2, 6, 5, 5, generator=torch.Generator().manual_seed(3)), torch.ones(1, 1, 1, 1)
    each, nothing = one.expand(1, 6, 1, 1), torch.zeros(6)
    parts = ops.GradientParts(x, x, None, None, None, "none", torch.ones(6), nothing, nothing)
    low = torch.tensor([word & MASK for word in words])
    with paths.path(path):
        for quantized in (
            lambda key: ops.quantize(x, one, key)[0],
            lambda key: ops.quantize_max(x, 1, key)[0],
            lambda key: ops.quantize_pair(x, one, each, key)[1][0],
            lambda key: ops.normalize_grad_quantize(parts, one, key)[0],
            lambda key: ops.normalize_grad_quantize_pair(parts, one, each, key)[0][0],
        ):
            assert torch.equal(quantized(torch.tensor(words)), quantized(low))
    with paths.path("reference"):
        expected = ops.quantize(x, one, low)[0]
    with paths.path(path):
        assert torch.equal(ops.quantize(x, one, torch.tensor(words))[0], expected)


@pytest.mark.parametrize("path", paths.available())
def test_of_layer_and_rank_the_low_32_bits_count(path: str) -> None:
    one = torch.tensor(1)
    with paths.path(path):
        expected = list(key_words(1, 2**32 - 1, 7, 1))
        assert ops.noise_key(one, torch.tensor(7), one, -1).tolist() == expected
        assert ops.noise_key(one, torch.tensor(2**40 + 7), one, -1).tolist() == expected
