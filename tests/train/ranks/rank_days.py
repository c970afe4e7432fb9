# SPDX-License-Identifier: Apache-2.0
"""What test_ranks.py starts with torchrun: `byteback train` several times in the same processes, with one rank that differs.

Each rank has a working folder of its own, as on machines of its own, and writes what it saw to rank0.json, rank1.json, ...
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch import distributed as dist

from byteback import cli
from byteback.nn.layers import float_table
from byteback.train import loop
from byteback.train.ranks import setup

SECOND = os.environ.get("RANK") == "1"  # pytest imports this file to look for examples in docstrings
SMALL = ("--epochs", "1", "--batch-size", "8", "--threads", "1", "--no-tensorboard", "--log-every", "1", "--workers", "0")
FOLDER = (*SMALL, "--data", "folder:pictures", "--image-size", "16", "--model", "resnet8", "--recipe", "plain-int8")
DIGITS = (*SMALL, "--batch-size", "60", "--train-images", "240", "--histogram-every", "0")
own_exit, process, attempts = os._exit, os.getpid(), 0
saved: list[str] = []


def _exit(code: int) -> None:
    """The command line ends one of several ranks by os._exit; workers that read data are to end."""
    if os.getpid() != process:
        own_exit(code)
    raise SystemExit(code)


def train(*args: str) -> dict[str, Any]:
    """`byteback train` on this rank: exit code, what it printed, and checksums of the weights that it would have saved."""
    global attempts
    attempts += 1
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempts)  # keys of their own in torchrun's store
    out, error = io.StringIO(), io.StringIO()
    saved.clear()
    code = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), mock.patch.object(os, "_exit", _exit):
        sys.argv = ["byteback", "train", *args]
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
    if dist.is_initialized():
        dist.destroy_process_group()
    return {"code": code, "out": out.getvalue(), "error": error.getvalue(), "saved": list(saved)}


def _recorded(save: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(run: loop.Run, name: str) -> Any:
        digest = hashlib.sha256()
        for parameter in run.model.parameters():
            digest.update(parameter.detach().contiguous().numpy().tobytes())
        saved.append(digest.hexdigest()[:16])
        return save(run, name)

    return recorded


# ---- set-ups ----


def other_code() -> dict[str, Any]:
    with mock.patch.object(setup, "_code", lambda: f"9.9, checksum {'beef' if SECOND else 'cafe'}"):
        return train(*DIGITS, "--recipe", "plain-int8", "--output-dir", "../run-code")


def other_images() -> dict[str, Any]:
    return train(*FOLDER, "--data", "folder:fewer", "--output-dir", "../run-images")


def other_settings() -> dict[str, Any]:
    return train(*DIGITS, "--lr", "0.2" if SECOND else "0.1", "--recipe", "plain-int8", "--output-dir", "../run-settings")


def other_recipe() -> dict[str, Any]:
    return train(*DIGITS, "--recipe", f"unified-int8:period={20 if SECOND else 10}", "--output-dir", "../run-recipe")


def no_shared_folder() -> dict[str, Any]:
    with mock.patch.object(setup, "_PATIENCE", 0.2):
        return train(*DIGITS, "--recipe", "plain-int8", "--output-dir", "own")


def a_run_is_there() -> dict[str, Any]:
    return train(*DIGITS, "--recipe", "plain-int8", "--output-dir", "../there")


# ---- nothing bad ----


def whole_run() -> dict[str, Any]:
    return train(*SMALL, "--epochs", "2", "--batch-size", "60", "--recipe", "unified-int8", "--output-dir", "../whole")


# ---- images ----


def _damaged(split: str, on_second: bool) -> dict[str, Any]:
    """After images were scanned, and before the first step."""
    begin = loop.Run.run

    def run(self: loop.Run) -> None:
        for path in Path("pictures", split).rglob("*.png") if on_second == SECOND else ():
            path.rename(path.with_suffix(".gone"))
        begin(self)

    with mock.patch.object(loop.Run, "run", run):
        found = train(*FOLDER, "--output-dir", f"../run-{split}-{on_second}")
    for path in Path("pictures").rglob("*.gone"):
        path.rename(path.with_suffix(".png"))
    return found


def bad_image_of_rank_1() -> dict[str, Any]:
    return _damaged("train", True)


def bad_image_of_rank_0() -> dict[str, Any]:
    return _damaged("train", False)


def bad_image_in_the_test() -> dict[str, Any]:
    return _damaged("val", True)


def goes_on_after_a_bad_image() -> dict[str, Any]:
    return train("--resume", "../run-val-True")


# ---- NaN ----


def _spoiled(name: str, spoil: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """On rank 1, in the second step of the first of two members."""
    own = loop.Run._loss

    def loss(self: loop.Run, images: Any, labels: Any) -> tuple[Tensor, int]:
        found, correct = own(self, images, labels)
        bad = SECOND and self.member.variant.name == "plain-int8" and self.progress.step == 1
        return spoil(found) if bad else found, correct

    with mock.patch.object(loop.Run, "_loss", loss):
        return train(*DIGITS, "--recipe", "plain-int8", "unified-int8", "--output-dir", f"../{name}")


def nan_loss() -> dict[str, Any]:
    return _spoiled("nan-loss", lambda loss: loss * float("nan"))


def nan_gradient() -> dict[str, Any]:
    return _spoiled("nan-gradient", lambda loss: loss + (0.0 * loss).sqrt())  # the derivative of a root at 0


# ---- tasks ----


def detection() -> dict[str, Any]:
    shapes = ("--task", "detect", "--data", "voc:../shapes", "--backbone", "resnet18", "--image-size", "64")
    return train(*SMALL, *shapes, "--batch-size", "2", "--recipe", "unified-int8", "--output-dir", "../detection")


def video() -> dict[str, Any]:
    clips = ("--task", "video", "--data", "frames:../frames", "--frames", "4", "--image-size", "16", "--model", "r3d_8")
    return train(*SMALL, *clips, "--batch-size", "2", "--recipe", "unified-int8", "--output-dir", "../video")


# ---- every recipe ----


def _hundred_steps(task: str, recipe: str) -> dict[str, Any]:
    """Steps of 8 images, shared by 2 or 4 ranks."""
    where = {
        "digits": ("--train-images", "800"),
        "detection": ("--task", "detect", "--data", "voc:../shapes", "--backbone", "resnet18", "--image-size", "32"),
        "video": ("--task", "video", "--data", "frames:../frames", "--frames", "4", "--image-size", "16", "--model", "r3d_8"),
    }
    epochs = {"digits": "1", "detection": "5", "video": "5"}[task]
    each = str(8 // int(os.environ["WORLD_SIZE"]))
    args = (*SMALL, *where[task], "--epochs", epochs, "--batch-size", each, "--histogram-every", "0", "--recipe", recipe)
    return train(*args, "--output-dir", f"../{task}-{recipe}")


def _every(task: str) -> dict[str, Callable[[], dict[str, Any]]]:
    recipes = ("float32", "plain-int8", "unified-int8", "distribution-adaptive-int8")
    return {recipe: functools.partial(_hundred_steps, task, recipe) for recipe in recipes}


SETS = {
    "days": (
        whole_run,
        other_code,
        other_images,
        other_settings,
        other_recipe,
        no_shared_folder,
        bad_image_of_rank_1,
        bad_image_of_rank_0,
        bad_image_in_the_test,
        goes_on_after_a_bad_image,
        nan_loss,
        nan_gradient,
        a_run_is_there,
    ),
    "tasks": (detection, video),
}


def main(name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    float_table.RULES = ()  # small layers in int8, too
    loop.Run._save = _recorded(loop.Run._save)  # type: ignore[method-assign]
    os.chdir(folder / f"machine{os.environ['RANK']}")
    task = name.removeprefix("recipes-")
    checks = {check.__name__: check for check in SETS[name]} if task == name else _every(task)
    found = {called: check() for called, check in checks.items()}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    own_exit(0)  # two_ranks.py says why


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
