# SPDX-License-Identifier: Apache-2.0
"""TrainConfig: the single source of the command line's flags and defaults."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT = "float32"


@dataclass(frozen=True)
class TrainConfig:
    """Train a small ResNet on handwritten digits, in float32 and in int8, with the same seed and data order."""

    recipe: tuple[str, ...] = (FLOAT, "unified-int8", "distribution-adaptive-int8")
    """What to compare, in this order: float32, plain-int8, unified-int8, distribution-adaptive-int8."""
    model: str = "resnet8"
    """resnet8 or resnet20."""
    epochs: int = 12
    """Passes over the training images."""
    batch_size: int = 64
    """Images per step."""
    lr: float = 0.1
    """Learning rate at the start; it falls to zero along a cosine."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 1e-4
    """Weight decay of SGD."""
    seed: int = 0
    """Seed of the weights, the data order and the rounding noise."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 2 or self.lr <= 0.0 or not self.recipe:
            raise ValueError(
                f"train: epochs {self.epochs}, batch size {self.batch_size}, lr {self.lr}, recipes {list(self.recipe)}; there "
                "must be at least 1 epoch, 2 images per batch (BatchNorm needs them), a positive lr and one recipe."
            )
