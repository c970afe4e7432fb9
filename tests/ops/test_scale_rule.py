# SPDX-License-Identifier: Apache-2.0
"""Proves the scale rule: which scales may meet in which product, what the refusal says, and the factor that results.

The factor is checked against an explicit loop over result indices, with groups, in one to three dimensions.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from byteback.ops.contract.scale_rule import ALLOWED, AXES, advice, check_scale, combine_scales, violation

N, C, K = 3, 12, 24
SUMMED = {"output": "C", "grad_input": "K", "grad_weight": "N"}
by_rank = pytest.mark.parametrize("rank", [3, 4, 5], ids=lambda rank: f"{rank - 2}d")
by_groups = pytest.mark.parametrize("groups", [1, 2, 3, 4, 12], ids=lambda groups: f"{groups}_groups")
varying = pytest.mark.parametrize("varies", list(itertools.product([False, True], repeat=2)), ids=str)


def scale(length: int, axis: int, rank: int, varies: bool, seed: int) -> torch.Tensor:
    sizes = [1] * rank
    sizes[axis] = length if varies else 1
    return torch.rand(sizes, generator=torch.Generator().manual_seed(seed)) + 0.1


def at(s: torch.Tensor, index: int) -> np.float32:
    flat = s.numpy().reshape(-1)
    return flat[index] if flat.size > 1 else flat[0]


def assert_factor(result: torch.Tensor, rows: list[list[np.float32]], rank: int) -> None:
    full = np.broadcast_to(result.numpy(), (len(rows), len(rows[0]), *result.shape[2:]))
    assert result.dim() == rank and result.shape[2:] == (1,) * (rank - 2)
    assert np.array_equal(full.reshape(len(rows), len(rows[0])), np.array(rows))


@by_rank
@by_groups
@varying
def test_the_factor_of_output_belongs_to_n_and_k(rank: int, groups: int, varies: tuple[bool, bool]) -> None:
    first, second = scale(N, 0, rank, varies[0], 1), scale(K, 0, rank, varies[1], 2)
    rows = [[at(first, n) * at(second, k) for k in range(K)] for n in range(N)]
    assert_factor(combine_scales("output", first, second, groups, K), rows, rank)


@by_rank
@by_groups
@varying
def test_the_factor_of_grad_input_repeats_the_weights_channels_in_every_group(
    rank: int, groups: int, varies: tuple[bool, bool]
) -> None:
    per_group = C // groups
    first, second = scale(N, 0, rank, varies[0], 1), scale(per_group, 1, rank, varies[1], 2)
    rows = [[at(first, n) * at(second, c % per_group) for c in range(C)] for n in range(N)]
    assert_factor(combine_scales("grad_input", first, second, groups, K), rows, rank)


@by_rank
@by_groups
@varying
def test_the_factor_of_grad_weight_gives_each_filter_its_own_groups_channels(
    rank: int, groups: int, varies: tuple[bool, bool]
) -> None:
    per_group = C // groups
    first, second = scale(K, 1, rank, varies[0], 1), scale(C, 1, rank, varies[1], 2)
    rows = [[at(first, k) * at(second, k // (K // groups) * per_group + c) for c in range(per_group)] for k in range(K)]
    assert_factor(combine_scales("grad_weight", first, second, groups, K), rows, rank)


@pytest.mark.parametrize("product", list(ALLOWED))
def test_each_operand_may_vary_along_the_axis_that_survives_and_no_other(product: str) -> None:
    table = {
        "output": {"input": "N", "weight": "K"},
        "grad_input": {"grad_output": "N", "weight": "C"},
        "grad_weight": {"grad_output": "K", "input": "C"},
    }
    assert set(ALLOWED[product]) == set(table[product])
    for operand, allowed in table[product].items():
        for letter, axis in AXES[operand].items():
            why = violation(product, operand, letter)
            if letter == allowed:
                assert why is None
                assert ALLOWED[product][operand] == (axis, letter)
            else:
                assert letter == SUMMED[product]
                assert why == (
                    f"varies along {letter}; but {product} sums over {letter}, and terms with different scales cannot be added"
                )
                assert advice(product, operand).startswith(f"Quantize {operand} per tensor")


def test_a_scale_is_checked_against_every_axis_of_its_tensor() -> None:
    values = torch.zeros(3, 4, 5, 6, dtype=torch.int8)
    for dim, length in enumerate(values.shape):
        sizes = [1, 1, 1, 1]
        sizes[dim] = length
        if dim == 0:
            check_scale("op", "output", "input", values, torch.ones(sizes))
            continue
        with pytest.raises(ValueError, match=r"input\.scale has shape") as error:
            check_scale("op", "output", "input", values, torch.ones(sizes))
        assert str(tuple(sizes)) in str(error.value)
