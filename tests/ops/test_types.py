# SPDX-License-Identifier: Apache-2.0
"""QTensor: values times scale, and granularity by the shape of the scale alone."""

import pytest
import torch

from byteback import QTensor, ops


def test_dequantize_by_hand():
    values = torch.tensor([[127, -64], [1, 0]], dtype=torch.int8)
    assert QTensor(values, torch.tensor([[0.5]])).dequantize().tolist() == [[63.5, -32.0], [0.5, 0.0]]
    assert QTensor(values, torch.tensor([[0.5], [2.0]])).dequantize().tolist() == [[63.5, -32.0], [2.0, 0.0]]
    assert QTensor(values, torch.tensor([[0.5, 2.0]])).dequantize().tolist() == [[63.5, -128.0], [0.5, 0.0]]


def test_dequantize_is_float32():
    assert QTensor(torch.ones(1, 1, dtype=torch.int8), torch.ones(1, 1)).dequantize().dtype == torch.float32


def test_the_old_name_of_the_type_is_an_alias():
    with pytest.warns(DeprecationWarning, match="use byteback.QTensor"):
        assert ops.Quantized is QTensor
    with pytest.raises(AttributeError, match="no attribute 'quantized'"):
        ops.quantized  # noqa: B018


def test_quantize_returns_one_and_it_unpacks():
    q = ops.quantize(torch.tensor([[-4.0, 0.1, torch.nan]]), torch.tensor([[2.0]]))
    values, scale, counts, peak = q
    assert type(q) is QTensor and q.counts is counts and q.peak is peak and values.dtype == torch.int8
    assert counts.tolist() == [1, 1] and scale.item() == torch.tensor(2.0).div(127).item() and peak.isnan()
    assert type(torch.compile(ops.quantize, backend="eager")(torch.ones(1, 2), torch.ones(1, 1))) is QTensor
