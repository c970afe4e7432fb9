# SPDX-License-Identifier: Apache-2.0
"""`byteback report RUN...`, and the page that `byteback train` writes into the folder of a finished run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from byteback.report_page import groups, page
from byteback.report_page.runs import read_run
from byteback.train.checkpoints import files
from byteback.train.side_by_side import SUMMARY

NAME = "report.html"


@dataclass(frozen=True)
class ReportConfig:
    """Write an HTML page about one or several runs: table, curves, speed and memory, numerics by layer, gradient histograms.

    The page is a single file and needs no network. Runs may still be in progress.
    """

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Folders of runs that were trained on the same data set."""
    output: str | None = None
    """The file to write. Default: report.html in the folder of the run, or in the current folder for several runs."""


def run(config: ReportConfig, console: Console) -> None:
    """Runs the command."""
    runs = [Path(name) for name in dict.fromkeys(config.runs)]
    if not runs:
        raise ValueError("report: give the folder of a run, such as runs/digits-resnet8.")
    target = Path(config.output) if config.output else runs[0] / NAME if len(runs) == 1 else Path(NAME)
    for note in write(runs, target):
        console.print(note, highlight=False, soft_wrap=True)
    console.print(f"The page is {target} ({target.stat().st_size / 2**20:.1f} MB)", highlight=False, soft_wrap=True)


def write(runs: Sequence[Path], target: Path) -> list[str]:
    """Writes the page. Returns notes about members that are not on it."""
    found = [read_run(run) for run in runs]
    members = [member for own, _ in found for member in own]
    notes = [note for _, own in found for note in own]
    if not members:
        raise ValueError(f"report: nothing to show yet. {'; '.join(notes)}.")
    if not target.parent.is_dir():
        raise ValueError(f"report: there is no folder {target.parent} for the page. Create it, or choose another --output.")
    files.replace(target, page.build(groups.build(members), _commands(runs)).encode())
    return notes


def after_training(folder: Path, console: Console) -> None:
    """Writes the page of a finished run into its folder. An error is only printed, because training has succeeded."""
    try:
        write([folder], folder / NAME)
    except (ValueError, OSError) as error:
        console.print(f"The report page could not be written: {error}", highlight=False, soft_wrap=True)
    else:
        console.print(f"Its report page is {folder / NAME}: open it in a browser", highlight=False, soft_wrap=True)


def _commands(runs: Sequence[Path]) -> list[str]:
    """Returns the commands that started the runs, as far as they are known."""
    commands = []
    for run in runs:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            commands.append(str(files.from_json((run / SUMMARY).read_bytes())["command"]))
    return list(dict.fromkeys(commands))
