# SPDX-License-Identifier: Apache-2.0
"""INT8 training with Lightning: one callback. `Trainer(callbacks=[Int8("unified-int8")])`

Lightning's checkpoints hold the state of the quantizers, so `trainer.fit(module, ckpt_path=...)` goes on bit for bit.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from digits import batches, network
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import byteback


class Int8(lightning.Callback):
    """Makes the module int8 before its optimizers are created, connects them, and logs the health of the layers."""

    def __init__(self, recipe: Any = "unified-int8", attribute: str = "model") -> None:
        self.recipe, self.attribute = recipe, attribute

    def model(self, module: lightning.LightningModule) -> nn.Module:
        found: nn.Module = getattr(module, self.attribute)
        return found

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        model = self.model(pl_module)
        if not any(isinstance(layer, (byteback.Int8Conv2d, byteback.Int8Linear)) for layer in model.modules()):
            byteback.prepare(model, self.recipe)  # before a checkpoint is loaded

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            byteback.scale_learning_rates(optimizer, self.model(pl_module))

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        gradients = [row for row in byteback.health(self.model(pl_module)) if row.role == "grad_output"]
        worst = max((row.deviation or 0.0 for row in gradients), default=0.0)
        least = min((row.learning_rate_factor or 1.0 for row in gradients), default=1.0)
        pl_module.log_dict({"int8/worst_deviation": worst, "int8/least_learning_rate_factor": least})


class Classifier(lightning.LightningModule):
    """Your module, as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(batches(self.current_epoch), batch_size=None)  # type: ignore[arg-type]


def trainer(epochs: int, folder: str) -> lightning.Trainer:
    return lightning.Trainer(
        max_epochs=epochs,
        default_root_dir=folder,
        callbacks=[Int8("unified-int8")],
        reload_dataloaders_every_n_epochs=1,
        **{"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False},
    )


if __name__ == "__main__":
    module = Classifier()
    trainer(2, "runs/lightning").fit(module)
    print(*(f"loss {loss:.6f}" for loss in module.losses), sep="\n")
