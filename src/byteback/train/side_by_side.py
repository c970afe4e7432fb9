# SPDX-License-Identifier: Apache-2.0
"""`byteback train`: trains several recipes with several seeds on the same data, and prints a table.

All recipes are trained with one seed before the next seed, so that an interrupted run has some complete comparisons.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import byteback
from byteback.ops.backends import paths
from byteback.train import config_file, data, results, tasks
from byteback.train.checkpoints import checkpoint, files
from byteback.train.config import TrainConfig
from byteback.train.display import Display
from byteback.train.evaluate import evaluate
from byteback.train.interrupt import Stop, Stopped
from byteback.train.loop import Member
from byteback.train.ranks import setup
from byteback.train.ranks.world import LostRank, World, join
from byteback.train.tasks import SCORES

SUMMARY = "summary.json"
_NAMED = 8  # how many classes the first line lists


def run(config: TrainConfig, console: Console, when_done: Callable[[Path, Console], None] | None = None) -> int:
    """Trains every member that is not finished, and prints the comparison. Returns the exit code.

    `when_done` is called with the folder of the run when all members are finished: the command line writes a page there.
    """
    world = join(config.rank_timeout)
    if not world.is_first:
        console = Console(quiet=True)
        warnings.simplefilter("ignore")
    with Stop(speaks=world.is_first) as stop:
        try:
            return _run(config, console, stop, world, when_done)
        except RuntimeError as error:
            why = world.why_lost(error, stop.where)
            if why is None:
                raise
            raise LostRank(why) from error


def _run(
    config: TrainConfig, console: Console, stop: Stop, world: World, when_done: Callable[[Path, Console], None] | None
) -> int:
    byteback.tune_malloc()
    if config.threads:
        torch.set_num_threads(config.threads)
    config = dataclasses.replace(config.complete(), threads=torch.get_num_threads())
    assert config.model and config.image_size and config.epochs and config.frames and config.batch_size
    if config.resume is None:
        config = dataclasses.replace(config, processes=world.size)
    paths.current()  # an unknown BYTEBACK_PATH should fail now
    images, parameters = world.together(lambda: _loaded(config))
    setup.check(world, config, images)
    folder = world.from_first(lambda: _folder(config))
    world.from_first(lambda: files.make_folder(folder))
    lock = contextlib.ExitStack()
    with lock:
        world.from_first(lambda: lock.enter_context(files.locked(folder)))
        setup.check_folder(world, folder)
        config = dataclasses.replace(config, output_dir=str(folder))
        members = [
            Member(variant, seed, folder / variant.folder / f"seed{seed}")
            for seed in config.seed
            for variant in config.variants()
        ]
        if config.test_only:
            return _test(members, config, images, console) if world.is_first else 0
        world.from_first(lambda: _begin(config, folder, members, images, parameters, world, console))
        try:
            with stop.training():
                broken = _train(config, folder, members, images, console, stop, world)
        except Stopped as stopped:
            again = resume_command(folder)
            console.print(f"\nStopped; everything is saved. Continue with:\n\n    {again}\n", highlight=False)
            return stopped.code
        finally:
            images.close()
        return world.from_first(lambda: _close(config, folder, members, images, broken, console, when_done))


def _loaded(config: TrainConfig) -> tuple[data.Data, int]:
    images = tasks.load(config)
    return images, tasks.check(config, images)


def _begin(
    config: TrainConfig, folder: Path, members: list[Member], images: data.Data, parameters: int, world: World, console: Console
) -> None:
    """Writes config.toml, and prints what is trained."""
    assert config.batch_size
    _must_fit(folder, members)
    before = config_file.read(folder / config_file.NAME) if config.resume is not None else None
    files.replace(folder / config_file.NAME, config_file.to_text(config).encode())
    size = (
        f"{images.image_size} pixels (shorter side)"
        if config.task == "detect"
        else f"{images.image_size}x{images.image_size} pixels"
    )
    what = f"clips of {images.frames} frames of {size}" if images.frames else f"images of {size}"
    if images.names:
        what += f" with {', '.join(images.names[:_NAMED])}" + (", ..." if len(images.names) > _NAMED else "")
    step = config.batch_size * config.processes
    processes = f" x {config.processes} processes = {step} images per step" if config.processes > 1 else ""
    console.print(
        f"{config.model} ({parameters:,} parameters) on {config.data}: {len(images.train):,} {what}, "
        f"{len(images.test):,} for the test; {config.epochs} epochs, batch size "
        f"{config.batch_size}{processes}, {len(config.recipe)} recipes x {len(config.seed)} seeds, {config.threads} threads, "
        f"path {paths.current()}\nin {folder}\n",
        highlight=False,
    )
    for note in (images.note, _begins_with(config, images)):
        if note:
            console.print(f"{note}\n", highlight=False)
    if before is not None and before.threads != config.threads:
        console.print(
            f"The run was started with {before.threads} threads. Float layers may round differently with {config.threads}, "
            "so the results may not be bit for bit those of an uninterrupted run.\n",
            highlight=False,
        )
    if config.processes != world.size:
        console.print(
            f"The run was started with {config.processes} processes and goes on with {world.size}. A step still has {step} "
            "images, in the same order; rounding noise, BatchNorm and sums differ, so the results are not bit for bit those "
            "of an uninterrupted run.\n",
            highlight=False,
        )
    summarize(config, folder, members, images)  # stores the command, also for a run that is interrupted


def _close(
    config: TrainConfig,
    folder: Path,
    members: list[Member],
    images: data.Data,
    broken: list[str],
    console: Console,
    when_done: Callable[[Path, Console], None] | None,
) -> int:
    """Prints the comparison, and has the page written. Returns the exit code."""
    found = summarize(config, folder, members, images)
    console.print()
    console.print(results.comparison(found["rows"], SCORES[config.task]))
    console.print(f"\nThe run is in {folder}", highlight=False)
    if when_done is not None and not broken:
        when_done(folder, console)
    return _verdict(found["members"], broken, len(members), folder, console)


def _begins_with(config: TrainConfig, images: data.Data) -> str:
    """Returns what --weights loads into the network, for the user."""
    if config.weights is None or config.resume is not None:
        return ""
    fresh = tasks.fresh_layers(config, images)
    kept = f", except {', '.join(fresh)}, which has other classes and starts anew" if fresh else ""
    return f"The weights of {config.weights} are loaded{kept}."


def _verdict(found: list[dict[str, Any]], broken: list[str], members: int, folder: Path, console: Console) -> int:
    """Returns the exit code: 1 if no member has a result, or if one could not be trained. Raises the error of the latter."""
    if broken:
        raise ValueError(f"train: {len(broken)} of {members} members in {folder} could not go on.\n" + "\n".join(broken))
    if all(result["state"] == "diverged" for result in found):
        console.print(f"\nEvery member diverged, so there is no result. First: {found[0]['why']}", highlight=False)
        return 1
    return 0


def _train(
    config: TrainConfig, folder: Path, members: list[Member], images: data.Data, console: Console, stop: Stop, world: World
) -> list[str]:
    """Trains the members one after the other. Returns the errors of those whose files are damaged."""
    assert config.epochs
    broken: list[str] = []
    with Display(console, len(members), config.epochs, SCORES[config.task]) as display:
        try:
            for member in members:
                stop.check()
                display.begin(member)
                stop.where = f"in {member.variant.name} seed {member.seed}"
                if world.from_first(functools.partial(results.is_finished, member.folder)):
                    display.say(f"{member.variant.name} seed {member.seed} is already finished")
                else:
                    try:
                        tasks.train(config, member, images, display, stop, world)
                    except files.Damaged as error:
                        broken.append(str(error))
                        display.say(f"{member.variant.name} seed {member.seed} cannot go on: {error}")
                        continue
                    done = world.from_first(functools.partial(results.member_result, member, folder))
                    if done["state"] == "diverged":
                        display.say(
                            f"{member.variant.name} seed {member.seed} diverged in epoch {done['epochs'] + 1}: {done['why']}"
                        )
                    elif console.is_terminal:
                        display.say(
                            f"{member.variant.name} seed {member.seed}: {done['accuracy']:.2%} in {done['seconds']:.0f} s"
                        )
                world.from_first(lambda: summarize(config, folder, members, images))
        except Stopped:
            if world.is_first:
                summarize(config, folder, members, images)
            raise
    return broken


def _folder(config: TrainConfig) -> Path:
    """Returns the folder of the run: a new one, unless a run is resumed."""
    if config.resume is not None:
        return config_file.run_folder(config.resume)
    if config.output_dir is not None:
        folder = Path(config.output_dir)
        if (folder / config_file.NAME).exists():
            raise ValueError(
                f"train: {folder} already contains a run. Continue it with {resume_command(folder)}, or choose another "
                "--output-dir. With --resume auto the same command starts a run or continues it."
            )
        return folder
    base = config_file.default_folder(config)
    number, folder = 1, base
    while (folder / config_file.NAME).exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def resume_command(folder: Path) -> str:
    """Returns the command that continues the run in a folder."""
    return f"byteback train --resume {shlex.quote(str(folder))}"


def summarize(config: TrainConfig, folder: Path, members: list[Member], images: data.Data) -> dict[str, Any]:
    """Writes summary.json with the results of the members so far, and returns them."""
    found = [results.member_result(member, folder) for member in members]
    summary = {
        **{"format": checkpoint.FORMAT, "task": config.task, "score": SCORES[config.task]},
        **{"data": config.data, "model": config.model, "image_size": images.image_size, "classes": images.classes},
        **{"epochs": config.epochs, "batch_size": config.batch_size, "seeds": list(config.seed)},
        **{"threads": config.threads, "path": paths.current(), "byteback": byteback.__version__, "torch": torch.__version__},
        "finished": all(result["state"] in ("finished", "diverged") for result in found),
        "command": _first_command(folder),
        "rows": results.rows(found),
        "members": found,
    }
    files.replace(folder / SUMMARY, json.dumps(summary, indent=1).encode())
    return summary


def _first_command(folder: Path) -> str:
    """Returns the command that started the run. A command that resumed it would not reproduce it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(files.from_json((folder / SUMMARY).read_bytes())["command"])
    return shlex.join(["byteback", *sys.argv[1:]])


def _must_fit(folder: Path, members: list[Member]) -> None:
    """Raises an error if members of the same name were started with another recipe: a row of the table must have one recipe."""
    for name in dict.fromkeys(member.variant.name for member in members):
        own = [member for member in members if member.variant.name == name]
        if all(results.is_finished(member.folder) for member in own):
            continue
        recipe = own[0].variant.recipe
        for member in own:
            then = results.begun_with(member.folder)
            if then is not None and recipe is not None and then != recipe.to_dict():
                differ = ", ".join(f"{key} = {then.get(key)}" for key, now in recipe.to_dict().items() if then.get(key) != now)
                raise ValueError(
                    f"train: {name} with seed {member.seed} in {folder} was started with {differ}, but the name now refers to "
                    "another recipe, so a row would mix two recipes. Start a new run with another --output-dir."
                )


def _test(members: list[Member], config: TrainConfig, images: data.Data, console: Console) -> int:
    """--test-only: tests the last checkpoint of every member."""
    for member in members:
        found = checkpoint.newest(member.folder, functools.partial(console.print, highlight=False))
        if found is None:
            console.print(f"{member.variant.name} seed {member.seed}: no checkpoint yet", highlight=False)
            continue
        tested = evaluate(config, found[1], images)
        console.print(f"{member.variant.name} seed {member.seed}: {tested}", highlight=False)
    return 0
