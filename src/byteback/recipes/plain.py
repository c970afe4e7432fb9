# SPDX-License-Identifier: Apache-2.0
"""Plain INT8: max-abs clips everywhere, stochastic rounding of gradients. The baseline that both papers improve on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from byteback.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class PlainInt8(Recipe):
    """Clips every tensor at max|x|. No clip is searched and no learning rate is scaled."""

    slug: ClassVar[str] = "plain-int8"

    depthwise_shares: bool = False  # the baseline does exactly what the papers describe
