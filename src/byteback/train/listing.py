# SPDX-License-Identifier: Apache-2.0
"""`byteback recipes` and `byteback models`: list the recipes and the networks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from byteback import models, tables
from byteback.models import SMALL_IMAGE
from byteback.recipes import recipe_classes
from byteback.train import networks, video_networks
from byteback.train.detect import networks as detectors
from byteback.train.variants import FLOAT


@dataclass(frozen=True)
class RecipesConfig:
    """List the recipes, and the fields that NAME:field=value can change."""


@dataclass(frozen=True)
class ModelsConfig:
    """List the networks for --model."""


def recipes(config: RecipesConfig, console: Console) -> None:
    """Runs the command `byteback recipes`."""
    rows = [[FLOAT, "Plain PyTorch, which the other recipes are compared with."]]
    rows += [[slug, " ".join((kind.__doc__ or "").split())] for slug, kind in recipe_classes().items()]
    console.print(tables.build("Recipes", ["name", "what it does"], rows, left=2))
    for slug, kind in recipe_classes().items():
        console.print()
        fields = [[path, shown] for path, shown in _fields(kind())]
        console.print(tables.build(slug, ["field", "default"], fields, left=2))
    console.print(
        "\nTo change a field, give its path, or its last part to change it everywhere: --recipe "
        "unified-int8:period=100,norm_memory=int8\n"
        "The value of a rule is the name of its class, or none: unified-int8:clip=MaxAbs, unified-int8:learning_rate=none",
        highlight=False,
    )


def _fields(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            rows.append((prefix + field.name, type(inner).__name__))
            rows += _fields(inner, f"{prefix}{field.name}.")
        else:
            rows.append((prefix + field.name, "none" if inner is None else str(inner)))
    return rows


def model_names(config: ModelsConfig, console: Console) -> None:
    """Runs the command `byteback models`."""
    small = models.names(SMALL_IMAGE - 1)
    rows = []
    for name in models.names(SMALL_IMAGE):
        size = sum(parameter.numel() for parameter in models.build(name).parameters())
        rows.append([name, "8x8 to 32x32" if name in small else "32x32", f"{size:,}"])
    console.print(tables.build("For small images", ["name", "pixels", "parameters"], rows, left=2))
    console.print("\ntorchvision, for other image sizes (at 32x32 the names above are the small variants)")
    console.print(", ".join(networks.torchvision_names()), highlight=False)
    console.print("\nfor --task video, and tsn:NAME, which averages the logits of NAME over the frames of a clip")
    console.print(", ".join(video_networks.names()), highlight=False)
    console.print("\nfor --task detect, with --backbone " + ", ".join(detectors.BACKBONES))
    console.print(", ".join(detectors.NAMES), highlight=False)
    package = networks.timm()
    if package is None:
        console.print("\ntimm:NAME any network of timm, which is not installed: pip install timm")
    else:
        console.print(
            f"\ntimm:NAME {len(package.list_models())} networks of timm {package.__version__}; timm.list_models() lists them"
        )
