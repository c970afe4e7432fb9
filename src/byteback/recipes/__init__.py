# SPDX-License-Identifier: Apache-2.0
"""FLOOR 2: recipes. A recipe is frozen data that says how a network is quantized; here are also the papers' equations.

`recipe.py` has the base class. `plain.py`, `unified.py` and `distribution_adaptive.py` have one recipe each.
`direction_search.py` and `magnitude_aware.py` choose clips as the papers do.
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
