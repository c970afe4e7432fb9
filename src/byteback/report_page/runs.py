# SPDX-License-Identifier: Apache-2.0
"""What the members of a run wrote, read strictly: a page of wrong numbers would be worse than none.

A run that is still going is fine: its last line may be half written, and members that have not begun are left out. Anything
else that cannot be read is an error that names the file.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from byteback.train.loop import HISTOGRAMS, METRICS
from byteback.train.results import result_of
from byteback.train.side_by_side import SUMMARY

Record = dict[str, Any]


@dataclass(frozen=True)
class RunMember:
    """One recipe with one seed, as its journal tells it."""

    run: Path
    folder: Path
    start: Record
    records: Sequence[Record]

    @property
    def recipe(self) -> str:
        return str(self.start["recipe"])

    @property
    def seed(self) -> int:
        return int(self.start["seed"])

    def of_kind(self, kind: str) -> list[Record]:
        """The records of this kind."""
        return [record for record in self.records if record["kind"] == kind]

    def result(self) -> Record:
        """Its line of summary.json, from the journal as it is now."""
        return result_of(self.records, self.recipe, self.seed, self.folder, self.run)

    def pictures(self) -> list[Record]:
        """histograms.jsonl; empty where the run took none."""
        path = self.folder / HISTOGRAMS
        return read_journal(path) if path.exists() else []

    @property
    def detects(self) -> bool:
        """Whether it is a detector; runs of before the first record said so have its scores."""
        return self.start.get("task") == "detect" or any("mAP" in record for record in self.of_kind("epoch"))


def read_run(run: Path) -> tuple[list[RunMember], list[str]]:
    """The members of a run's folder, and a sentence for each that has nothing to show yet."""
    if not run.is_dir():
        raise ValueError(f"report: there is no folder {run}. Name the folder of a run, such as runs/digits-resnet8.")
    paths = sorted(run.glob(f"*/seed*/{METRICS}")) or sorted(run.glob(f"seed*/{METRICS}")) or sorted(run.glob(METRICS))
    if not paths:
        raise ValueError(
            f"report: {run} is no run of `byteback train`: it has no file RECIPE/seedN/{METRICS}. "
            "Name the folder that --output-dir named."
        )
    members, waiting = [], []
    for path in sorted(paths, key=_as_asked(run)):
        member = _read_member(run, path)
        if member is None:
            waiting.append(f"{path} is empty: nothing to show of it yet")
        else:
            members.append(member)
    return members, waiting


def _as_asked(run: Path) -> Callable[[Path], int]:
    """The order in which the run was asked to train its members, where its summary can be read."""
    order: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        summary = json.loads((run / SUMMARY).read_bytes())
        order = {str(member["folder"]): i for i, member in enumerate(summary["members"])}
    return lambda path: order.get(str(path.parent.relative_to(run)), len(order))


def _read_member(run: Path, path: Path) -> RunMember | None:
    records = read_journal(path)
    if not records:
        return None
    start = records[0]
    missing = [key for key in ("recipe", "seed", "model", "data", "epochs", "layers") if key not in start]
    if start.get("kind") != "start" or missing:
        raise ValueError(
            f"report: {path} does not open with a whole record of kind `start`"
            + (f" (no {', '.join(missing)})" if missing else "")
            + ": its beginning is lost, or another program wrote it. Leave its member out, or train it again."
        )
    return RunMember(run, path.parent, start, records)


def read_journal(path: Path) -> list[Record]:
    """The records of a file of JSON lines; only its last line may be cut short, as it is while it is written."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise OSError(f"report: {path} could not be read: {error.strerror}.") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and (path.name != METRICS or "kind" in record):
            records.append(record)
        elif number < len(lines):
            raise ValueError(
                f"report: {path}, line {number}, is not a record in JSON: the file is damaged. Remove that line to go "
                "without it, or train the member again."
            )
    return records
