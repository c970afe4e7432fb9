# SPDX-License-Identifier: Apache-2.0
"""FLOOR 2: what was asked. Frozen data, and the papers' equations.

`recipe.py` is the vocabulary; `plain.py`, `unified.py` and `distribution_adaptive.py` are one recipe each;
`direction_search.py` and `magnitude_aware.py` are the papers' ways to choose a clip.
"""

from byteback.recipes.distribution_adaptive import DistributionAdaptiveInt8
from byteback.recipes.magnitude_aware import MagnitudeAware
from byteback.recipes.plain import PlainInt8
from byteback.recipes.recipe import LearningRateRule, Recipe, recipe_classes, resolve
from byteback.recipes.unified import DeviationCounteractive, DirectionSensitive, UnifiedInt8

__all__ = [
    "DeviationCounteractive",
    "DirectionSensitive",
    "DistributionAdaptiveInt8",
    "LearningRateRule",
    "MagnitudeAware",
    "PlainInt8",
    "Recipe",
    "UnifiedInt8",
    "recipe_classes",
    "resolve",
]
