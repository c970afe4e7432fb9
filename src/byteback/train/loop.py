# SPDX-License-Identifier: Apache-2.0
"""Trains one member of a run, from its first step to its last. Read it from top to bottom.

    start or resume → for each epoch: histograms of gradients · train · test · write · checkpoint → end

The whole state of training is in the model, the optimizer, torch's generator and `Progress`; see checkpoint.py.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import byteback
from byteback.ops.backends import paths
from byteback.recipes import Recipe
from byteback.train import compact, config_file, layout, networks, optimizers, ranks, schedule, weights
from byteback.train.checkpoints import checkpoint, files
from byteback.train.checkpoints.checkpoint import BEST, LAST, Progress
from byteback.train.config import TrainConfig, float_layers
from byteback.train.data import Batch, Data, DataError, Source, draws
from byteback.train.interrupt import Stop, Stopped
from byteback.train.ranks.world import World
from byteback.train.records import histograms, watch
from byteback.train.records.board import Board
from byteback.train.variants import Variant

AnyJournal = files.Journal | files.NoJournal
METRICS, HISTOGRAMS = "metrics.jsonl", "histograms.jsonl"
_TEST_BATCH, _TEST_CLIPS = 250, 16
NO_JOURNALS: tuple[AnyJournal, AnyJournal] = (files.NoJournal(), files.NoJournal())


class Diverged(Exception):
    """Loss became NaN or Inf, or a gradient with NaN or Inf could not be quantized."""


class Listener(Protocol):
    """Is called after every step and every epoch: the progress bar. `say` prints a line."""

    def on_step(self, progress: Progress, loss: float, steps: int, model: nn.Module) -> None: ...

    def on_epoch(self, record: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


@dataclass(frozen=True)
class Member:
    """One recipe with one seed, and the folder that it writes to."""

    variant: Variant
    seed: int
    folder: Path


def train(config: TrainConfig, member: Member, data: Data, listener: Listener, stop: Stop, world: World | None = None) -> None:
    """Trains a member to its end, from its checkpoint if it has one. Saves and raises Stopped when interrupted."""
    Run(config.complete(), member, data, listener, stop, world).run()


class Run:
    """A member in training."""

    counts_correct: ClassVar[bool] = True  # whether there is a training accuracy

    finds_unused: ClassVar[bool] = False  # whether a step may leave out parameters, on one rank only

    def __init__(
        self, config: TrainConfig, member: Member, data: Data, listener: Listener, stop: Stop, world: World | None = None
    ) -> None:
        assert config.model and config.epochs and config.batch_size and config.lr  # complete() filled them in
        self.config, self.member, self.data, self.listener, self.stop = config, member, data, listener, stop
        self.world = world or World()
        self.epochs, self.model_name = config.epochs, config.model
        self.batch_size = config.batch_size * config.processes  # of all ranks together
        self.steps = draws.steps(len(data.train), self.batch_size, self.world.size)  # of an epoch
        self.begun = self.world.from_first(lambda: checkpoint.exists(member.folder))
        recipe = member.variant.recipe
        # An error on one rank would leave the others waiting. A skipped step is agreed on, and then ends training on all.
        self.raises_late = self.world.size > 1 and recipe is not None and recipe.on_nonfinite == "raise"
        self.recipe = replace(recipe, on_nonfinite="skip") if self.raises_late and recipe is not None else recipe
        self.channels = networks.channels_for(config.model, data.channels)

        torch.manual_seed(member.seed)
        self.model = self._build()
        self.frozen_norms = weights.freeze(self.model, config.freeze)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = optimizers.build(config.optimizer, trained, config.lr, config.momentum, config.weight_decay)
        self.scaling = byteback.scale_learning_rates(self.optimizer, self.model) if member.variant.recipe else None
        self.average = optimizers.averaged(self.model, config.ema) if config.ema else None
        self.progress = Progress()
        self.saved_at = time.monotonic()
        self.network = ranks.replicate(self.model, self.world, self.finds_unused)
        ranks.seed_apart(self.world, member.seed)

    # ---- the whole of it ----

    def run(self) -> None:
        member = self.member
        lengths = self._resume()
        self.metrics, self.pictures = NO_JOURNALS
        self.world.from_first(lambda: self._open(lengths))
        self.board = Board(member.folder, self.progress.step, self.config.tensorboard and self.world.is_first)
        try:
            if not lengths:
                self.world.from_first(self._begin)  # an image that rank 0 cannot read ends training on all ranks
            while self.progress.epoch < self.epochs:
                self._epoch()
            contents = self._save(LAST)
            self.metrics.write(self._end(checkpoint.fingerprint(contents)))
            self.metrics.synced()
        except (Stopped, DataError):
            self._save(LAST)
            raise
        except (Diverged, byteback.NonFiniteError) as error:
            # This is a result, too: the other members are still trained. The last checkpoint before it is kept.
            now = self.progress
            self.metrics.write({"kind": "diverged", "epoch": now.epoch, "step": now.step, "why": str(error)})
            self.metrics.synced()
        finally:
            self.metrics.close()
            self.pictures.close()
            self.board.close()

    def _open(self, lengths: dict[str, int]) -> None:
        files.make_folder(self.member.folder)
        self.metrics, self.pictures = (
            files.Journal(self.member.folder / name, lengths.get(name, 0)) for name in (METRICS, HISTOGRAMS)
        )

    def _begin(self) -> None:
        own = replace(self.config, recipe=(self.member.variant.name,), seed=(self.member.seed,))
        files.replace(self.member.folder / config_file.NAME, config_file.to_text(own).encode())
        self.metrics.write(self._start())

    def _epoch(self) -> None:
        now, world = self.progress, self.world
        chosen = draws.batches(self.member.seed, now.epoch, len(self.data.train), self.batch_size, world.size)
        looks = now.in_epoch == 0 and self.config.histogram_every > 0
        if looks and now.epoch % self.config.histogram_every == 0:
            world.from_first(lambda: self._look(chosen[0]))  # rank 0 takes the images of all ranks

        self._train_mode()
        for images, labels in self._timed(self.data.train, chosen[now.in_epoch :]):
            skipped = now.skipped
            for group in self.optimizer.param_groups:
                group["lr"] = self._lr(now.step)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.config.amp):
                loss, correct = self._loss(images, labels)
            step = ranks.agree_on_step(world, loss.item(), correct, len(labels), self._wishes())
            if not math.isfinite(step.loss):
                raise Diverged(f"the loss became {step.loss} in step {now.step} of epoch {now.epoch}")
            self.optimizer.zero_grad(set_to_none=True)
            (loss * step.weight if step.weight != 1.0 else loss).backward()
            if self.config.clip_grad_norm:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad_norm)
            self.optimizer.step()
            ranks.share_norms(world, self.model)
            if self.average is not None:
                self.average.update_parameters(self.model)
            self._count(step)
            if self.raises_late and now.skipped > skipped:
                raise Diverged(f"a tensor with NaN or Inf could not be quantized in step {now.step - 1} of epoch {now.epoch}")

        start = time.perf_counter()
        accuracy, test_loss, more = self._test()
        if math.isinf(test_loss) or (math.isnan(test_loss) and "mAP" not in more):  # a detector's test has no loss
            raise Diverged(f"the test loss became {test_loss} after epoch {now.epoch}")
        self._close_epoch(accuracy, test_loss, time.perf_counter() - start, more)

    # ---- what a task may override ----

    def _build(self) -> nn.Module:
        """Builds the network, ready to train."""
        return build(self.config, self.recipe, self.data, self.channels, self.begun)

    @property
    def tested(self) -> nn.Module:
        """The network that is tested and saved as the best: the trained one, or its average."""
        return self.model if self.average is None else self.average.module

    def _train_mode(self) -> None:
        self.model.train()
        for norm in self.frozen_norms:
            norm.eval()

    def _loss(self, images: Any, labels: Any) -> tuple[Tensor, int]:
        """Returns the loss of a batch, and how many of its images were classified correctly."""
        logits = self.network(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.config.label_smoothing)
        return loss, int((logits.detach().argmax(1) == labels).sum())

    def _test(self) -> tuple[float, float, dict[str, Any]]:
        """Returns the score that selects the best epoch, the loss, and further fields for the record of the epoch."""
        self.world.share(list(self.tested.buffers()))  # the running statistics of BatchNorm are each rank's own
        return *test(self.tested, self.data.test, self._as_asked, self.stop, self.data.frames, self.world), {}

    def _memory(self, images: Any, labels: Any) -> byteback.MemoryReport:
        """Measures the memory of a step."""
        return byteback.memory(self.model, images)

    # ---- within an epoch ----

    def _timed(self, source: Source, chosen: list[Tensor]) -> Iterator[Batch]:
        """Yields the batches. Measures the time of each step and the time spent waiting for data."""
        own = [draws.share(batch, self.world.rank, self.world.size) for batch in chosen]
        batches = source.batches(own, self.member.seed, self.progress.epoch)
        while True:
            start = time.perf_counter()
            try:
                batch = next(batches, None)
            except DataError as error:
                ranks.fail_together(self.world, error)
                raise
            if batch is None:
                return
            images, labels = self._as_asked(batch[0]), batch[1]
            self.progress.wait_seconds += time.perf_counter() - start
            yield images, labels
            elapsed = time.perf_counter() - start
            self.progress.seconds += elapsed
            self.progress.log_seconds += elapsed
            self._after_step()

    def _as_asked(self, images: Tensor) -> Tensor:
        """Converts images to the channels and the memory format of the network."""
        return layout.as_asked(images, self.channels, self.config.channels_last)

    def _lr(self, step: int) -> float:
        config = self.config
        assert config.lr
        warmup, every = round((config.warmup_epochs or 0.0) * self.steps), config.lr_step_size * self.steps
        total = self.epochs * self.steps
        return config.lr * schedule.factor(config.lr_schedule, step, total, warmup, every, config.lr_gamma)

    def _wishes(self) -> ranks.Wishes:
        """Returns what this rank wants to happen after the step."""
        late = time.monotonic() - self.saved_at > self.config.checkpoint_seconds
        return ranks.Wishes(self.stop.number, late and self.world.is_first)

    def _count(self, step: ranks.Step) -> None:
        now, loss, correct, images = self.progress, step.loss, step.correct, step.images
        self.agreed = step.wishes
        now.step += 1
        now.in_epoch += 1
        now.loss, now.correct, now.images = now.loss + loss * images, now.correct + correct, now.images + images
        now.log_loss, now.log_correct = now.log_loss + loss * images, now.log_correct + correct
        now.log_images += images
        now.skipped = self.scaling.skipped if self.scaling else 0
        self.last_loss = loss

    def _after_step(self) -> None:
        """After each step: writes a record or a checkpoint if it is time, and stops if there was a signal."""
        now = self.progress
        if now.step % self.config.log_every == 0 or now.in_epoch == self.steps:
            health = watch.health_line(self.model)  # the same on all ranks
            loss = now.log_loss / now.log_images
            self.metrics.write(
                {
                    **{"kind": "step", "epoch": now.epoch, "step": now.step, "loss": loss},
                    "accuracy": now.log_correct / now.log_images if self.counts_correct else None,
                    "lr": self._lr(now.step - 1),
                    "images_per_second": now.log_images / max(now.log_seconds, 1e-9),
                    "deviation": health.deviation,
                    "layers_at_floor": health.at_floor,
                }
            )
            self.board.step(now.step, loss)
            now.log_loss, now.log_correct, now.log_images, now.log_seconds = 0.0, 0, 0, 0.0
        self.listener.on_step(now, self.last_loss, self.steps, self.model)
        if self.agreed.save if self.world.size > 1 else self._wishes().save:
            self._save(LAST)
        if self.world.size > 1:
            self.stop.number = self.agreed.stop  # of any rank
        self.stop.check()

    # ---- between epochs ----

    def _look(self, first: Tensor) -> None:
        """Writes histograms of the gradients of the first batch, without changing the state of training."""
        images, labels = next(iter(self.data.train.batches([first], self.member.seed, self.progress.epoch)))
        self._train_mode()
        smoothing = self.config.label_smoothing
        for record in histograms.look(
            self.model, self._as_asked(images), lambda logits: F.cross_entropy(logits, labels, label_smoothing=smoothing)
        ):
            self.pictures.write({"epoch": self.progress.epoch, "step": self.progress.step, **record})

    def _close_epoch(self, accuracy: float, test_loss: float, test_seconds: float, more: dict[str, Any]) -> None:
        now = self.progress
        best = accuracy > now.best_accuracy
        now.train_loss, now.test_loss, now.test_accuracy = now.loss / now.images, test_loss, accuracy
        now.best_accuracy = max(accuracy, now.best_accuracy)
        record = {
            **{"kind": "epoch", "epoch": now.epoch, "step": now.step},
            "train_loss": now.train_loss,
            "train_accuracy": now.correct / now.images if self.counts_correct else None,
            **{"test_loss": test_loss, "test_accuracy": accuracy, "best_accuracy": now.best_accuracy},
            "lr": self._lr(now.step - 1),
            "images_per_second": now.images / max(now.seconds, 1e-9),
            "data_wait": now.wait_seconds / max(now.seconds, 1e-9),
            **{"seconds": now.seconds, "test_seconds": test_seconds, "skipped": now.skipped, **more},
        }
        layers = watch.numerics(self.model) if self.member.variant.recipe else None
        self.metrics.write(record)
        if layers is not None:
            self.metrics.write({"kind": "layers", "epoch": now.epoch, "step": now.step, "layers": layers})
        self.board.epoch(record, layers)
        self.listener.on_epoch(record)
        now.speeds.append(record["images_per_second"])
        now.waits.append(record["data_wait"])
        now.total_seconds += now.seconds
        now.epoch, now.in_epoch = now.epoch + 1, 0
        now.loss, now.correct, now.images, now.seconds, now.wait_seconds = 0.0, 0, 0, 0.0, 0.0
        if best and self.world.is_first:
            compact.save(self.member.folder / compact.NAME, self.tested, self._facts())
        if best:
            self._save(BEST)
        self._save(LAST)

    # ---- first and last record, checkpoints ----

    def _start(self) -> dict[str, Any]:
        """Returns the first record: the settings, and the memory of a step."""
        config, recipe = self.config, self.member.variant.recipe
        batch = draws.batches(self.member.seed, 0, len(self.data.train), self.batch_size, self.world.size)[0]
        first = draws.share(batch, self.world.rank, self.world.size)
        images, labels = next(iter(self.data.train.batches([first], self.member.seed, 0)))
        kept = self._memory(self._as_asked(images), labels)
        return {
            "kind": "start",
            "recipe": self.member.variant.name,
            "recipe_data": recipe.to_dict() if recipe else None,
            **{"seed": self.member.seed, "model": config.model, "data": config.data, "classes": self.data.classes},
            **{"train_images": len(self.data.train), "test_images": len(self.data.test)},
            **{"image_size": self.data.image_size, "channels": self.channels, "frames": self.data.frames},
            **{"steps_per_epoch": self.steps, "epochs": self.epochs, "batch_size": self.batch_size},
            "ranks": self.world.size,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            **{"threads": torch.get_num_threads(), "path": paths.current()},
            **{"saved_bytes": kept.saved, "peak_bytes": kept.peak},
            "settings": config_file.settings(config),
            "layers": watch.described(self.model, recipe is not None),
        }

    def _end(self, sha256: str) -> dict[str, Any]:
        now = self.progress
        return {
            **{"kind": "end", "epochs": now.epoch, "step": now.step},
            **{"test_accuracy": now.test_accuracy, "test_loss": now.test_loss, "best_accuracy": now.best_accuracy},
            "train_loss": now.train_loss,
            "images_per_second": statistics.median(now.speeds),
            "data_wait": statistics.median(now.waits),
            "seconds": now.total_seconds,
            "state_sha256": sha256,
        }

    def _facts(self) -> dict[str, Any]:
        """Returns what is needed to build the network again, and to use it."""
        member, recipe, preprocess = self.member, self.member.variant.recipe, self.data.preprocess
        return {
            "config": config_file.to_text(self.config),
            **{"variant": member.variant.name, "recipe": recipe.to_dict() if recipe else None, "seed": member.seed},
            **{"classes": self.data.classes, "image_size": self.data.image_size, "channels": self.channels},
            **{"frames": self.data.frames, "class_names": list(self.data.names)},
            "preprocess": preprocess.as_data() if preprocess else None,
        }

    def _save(self, name: str) -> dict[str, Any]:
        """Writes a checkpoint and returns its contents."""
        member = self.member
        contents = {
            **self._facts(),
            "images": [len(self.data.train), len(self.data.test)],
            "model": self.model.state_dict(),
            **({"average": self.average.state_dict()} if self.average is not None else {}),
            "optimizer": self.optimizer.state_dict(),
            "random": ranks.random_states(self.world),
            "progress": checkpoint.as_data(self.progress),
            "lengths": {METRICS: self.metrics.synced(), HISTOGRAMS: self.pictures.synced()},
        }
        if self.world.is_first:
            checkpoint.save(member.folder / name, contents)
        self.saved_at = time.monotonic()
        return contents

    def _resume(self) -> dict[str, int]:
        """Loads the last checkpoint. Returns the lengths of its journals; an empty dict if there is no checkpoint."""
        found = self.world.from_first(lambda: checkpoint.newest(self.member.folder, self.listener.say))
        if found is None:
            return {}
        path, contents = found
        self._must_be_of_this_run(path, contents)
        try:
            self.model.load_state_dict(contents["model"])
            self.optimizer.load_state_dict(contents["optimizer"])
            if self.average is not None:
                self.average.load_state_dict(contents["average"])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise files.Damaged(f"{path} does not fit {self.model_name}: {reason}") from error
        ranks.set_random_state(self.world, contents["random"], self.member.seed, contents["progress"]["step"])
        self.progress = checkpoint.progress_of(contents)
        if self.scaling is not None:
            self.scaling.skipped = self.progress.skipped
        lengths: dict[str, int] = contents["lengths"]
        return lengths

    def _must_be_of_this_run(self, path: Path, contents: dict[str, Any]) -> None:
        """Raises an error if the checkpoint was made with another recipe, other settings or other images."""
        recipe = self.member.variant.recipe
        asked: dict[str, Any] = {"recipe": recipe.to_dict() if recipe else None, "seed": self.member.seed}
        asked["images"] = [len(self.data.train), len(self.data.test)]
        then = {name: contents.get(name, value) for name, value in asked.items()}  # old checkpoints have no "images"
        asked |= config_file.settings(self.config)
        then |= config_file.settings(config_file.parse(contents["config"], path).complete())
        for name, value in asked.items():
            if then[name] != value:
                raise ValueError(
                    f"{path} was started with another {name}: {then[name]} instead of {value}. --resume continues bit for bit; "
                    "change it back, or start a new run with another --output-dir."
                )


def build(config: TrainConfig, recipe: Recipe | None, data: Data, channels: int, begun: bool = False) -> nn.Module:
    """Builds the network of a member, ready to train. If `begun`, the weights of a checkpoint are loaded into it afterwards."""
    assert config.model
    model = networks.build(config.model, data.image_size, data.classes, channels, data.frames)
    if config.weights and not begun:
        weights.fit(model, weights.read(config.weights, config.model), config.weights, data.classes)
    model = layout.lay_out(model, config.channels_last)
    return byteback.prepare(model, recipe, keep_float=float_layers(config.keep_float)) if recipe else model


@torch.no_grad()
def test(
    model: nn.Module,
    source: Source,
    as_asked: Any,
    stop: Stop | None = None,
    frames: int = 0,
    world: World | None = None,
) -> tuple[float, float]:
    """Returns (accuracy, loss) on the images or clips of a split, of which each rank takes a part."""
    world = world or World()
    model.eval()
    correct, loss = 0, 0.0
    chosen = ranks.test_batches(len(source), _TEST_CLIPS if frames else _TEST_BATCH, world)
    for images, labels in ranks.stoppable(source, chosen, stop, world):
        logits = model(as_asked(images))
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        correct += int((logits.argmax(1) == labels).sum())
    right, lost = world.total([correct, loss])
    return right / len(source), lost / len(source)
