# SPDX-License-Identifier: Apache-2.0
"""The handwritten digits that come inside scikit-learn: 1797 images of 8x8 pixels, no download."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Split(NamedTuple):
    """Images (N, 1, 8, 8) with zero mean and unit variance, and their labels."""

    images: Tensor
    labels: Tensor

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch in an order that `generator` draws; a last batch of a single image is left out."""
        for chosen in torch.randperm(len(self.labels), generator=generator).split(size):
            if len(chosen) > 1:
                yield self.images[chosen], self.labels[chosen]

    def steps(self, size: int) -> int:
        """How many batches an epoch has."""
        full, rest = divmod(len(self.labels), size)
        return full + (rest > 1)


def digits() -> tuple[Split, Split]:
    """(train, test): every fifth image is for the test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "byteback train: the digits come inside scikit-learn, which is not installed. "
            "Install what the trainer needs: pip install 'byteback[train]'."
        ) from error
    raw = load_digits()
    images = torch.from_numpy(raw.images).float().unsqueeze(1)  # (1797, 1, 8, 8)
    labels = torch.from_numpy(raw.target).long()
    for_test = torch.arange(len(labels)) % 5 == 0
    mean, std = images[~for_test].mean(), images[~for_test].std()
    images = (images - mean) / std
    return Split(images[~for_test], labels[~for_test]), Split(images[for_test], labels[for_test])
