# SPDX-License-Identifier: Apache-2.0
"""QTensor: values times scale, and granularity by the scale's shape alone."""

import torch

from byteback import QTensor


def test_dequantize_by_hand():
    values = torch.tensor([[127, -64], [1, 0]], dtype=torch.int8)
    assert QTensor(values, torch.tensor([[0.5]])).dequantize().tolist() == [[63.5, -32.0], [0.5, 0.0]]
    assert QTensor(values, torch.tensor([[0.5], [2.0]])).dequantize().tolist() == [[63.5, -32.0], [2.0, 0.0]]
    assert QTensor(values, torch.tensor([[0.5, 2.0]])).dequantize().tolist() == [[63.5, -128.0], [0.5, 0.0]]


def test_dequantize_is_float32():
    assert QTensor(torch.ones(1, 1, dtype=torch.int8), torch.ones(1, 1)).dequantize().dtype == torch.float32
