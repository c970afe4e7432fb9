# SPDX-License-Identifier: Apache-2.0
"""Writes event files for TensorBoard, if it is installed: the curves of metrics.jsonl, and the numerics by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from byteback.train.records.watch import Layers

_SCALARS = {
    "train_loss": "loss/train",
    "test_loss": "loss/test",
    "train_accuracy": "accuracy/train",
    "test_accuracy": "accuracy/test",
    "images_per_second": "speed/images_per_second",
    "data_wait": "speed/data_wait",
    "lr": "optimizer/lr",
}
_NOT_SHOWN = ("nonfinite",)


class Board:
    """Writes event files. Does nothing if TensorBoard is not wanted or not installed."""

    def __init__(self, folder: Path, step: int, wanted: bool) -> None:
        self._writer: Any = None
        if wanted:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
            # Hides what an interrupted run wrote after its last checkpoint.
            self._writer = SummaryWriter(str(folder), purge_step=step or None)

    def step(self, step: int, loss: float) -> None:
        """Writes the loss of a step."""
        if self._writer is not None:
            self._writer.add_scalar("loss/step", loss, step)

    def epoch(self, record: dict[str, Any], layers: Layers | None) -> None:
        """Writes the record of an epoch, and the numerics of its layers."""
        if self._writer is None:
            return
        for field, tag in _SCALARS.items():
            if record[field] is not None:
                self._writer.add_scalar(tag, record[field], record["step"])
        for name, roles in (layers or {}).items():
            for role, values in roles.items():
                if role.startswith("grad"):
                    for what in values.keys() - _NOT_SHOWN:
                        if values[what] is not None:
                            self._writer.add_scalar(f"{role}.{what}/{name}", values[what], record["step"])
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
