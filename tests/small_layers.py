# SPDX-License-Identifier: Apache-2.0
"""One small convolution and its image, for tests of a single int8 layer."""

import pytest
import torch

from byteback import Int8Conv2d

RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]
recipes = pytest.mark.parametrize("recipe", RECIPES)
NAN = float("nan")


def image(seed=0, batch=2, channels=4):
    return torch.randn(batch, channels, 6, 6, generator=torch.Generator().manual_seed(seed))


def conv(fresh, recipe="plain-int8", **options):
    return fresh(Int8Conv2d, 4, 6, 3, recipe=recipe, bias=False, **options)


def with_nan(x):
    x = x.clone()
    x.view(-1)[3] = NAN
    return x
