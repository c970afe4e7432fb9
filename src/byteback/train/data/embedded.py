# SPDX-License-Identifier: Apache-2.0
"""The handwritten digits that come inside scikit-learn: 1797 images of 8x8 pixels, no download."""

from __future__ import annotations

import torch

from byteback.train.data.source import Data, InMemory


def digits() -> Data:
    """Every fifth image is for the test. Nothing is augmented: a mirrored digit is another sign."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "byteback train: the digits come inside scikit-learn, which is not installed. "
            "Install what the trainer needs: pip install 'byteback[train]'."
        ) from error
    raw = load_digits()
    images = torch.from_numpy(raw.images).to(torch.uint8).unsqueeze(3)  # (1797, 8, 8, 1), values 0 to 16
    labels = torch.from_numpy(raw.target).long()
    test = torch.arange(len(labels)) % 5 == 0
    values = images[~test].float()
    mean, std = [float(values.mean())], [float(values.std())]
    return Data(
        *("digits", 10, 8, 1),
        InMemory(images[~test], labels[~test], mean, std),
        InMemory(images[test], labels[test], mean, std),
    )
