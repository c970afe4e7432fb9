# SPDX-License-Identifier: Apache-2.0
"""Many tensors copied in one call: the bits of PyTorch's copies, also after tensors have moved."""

from __future__ import annotations

import torch

from byteback.ops.backends.cpu.copying import Copying


def test_copies_what_is_there_now() -> None:
    tensors = [torch.arange(5.0), torch.tensor(3), torch.empty(0), torch.ones(2, 3, dtype=torch.float64)]
    copies = [torch.zeros_like(x) for x in tensors]
    copying = Copying(copies, tensors)
    for _ in range(3):
        copying.copy()
        assert all(torch.equal(copy, x) for copy, x in zip(copies, tensors, strict=True))
        tensors[0].add_(1.0)
        tensors[1].data = tensors[1] + 1  # now it is in another place
        tensors[3].data = tensors[3].t().contiguous().t() * 2.0  # and in another layout


def test_other_layouts_are_pytorchs() -> None:
    x, bits = torch.arange(12.0).reshape(3, 4), torch.arange(4.0)
    tensors = [x.t(), bits[::2], torch.ones(2, device="cpu", dtype=torch.bfloat16)]
    copies = [torch.zeros_like(x) for x in tensors]
    Copying(copies, tensors).copy()
    assert all(torch.equal(copy, x) for copy, x in zip(copies, tensors, strict=True))
