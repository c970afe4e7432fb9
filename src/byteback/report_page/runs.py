# SPDX-License-Identifier: Apache-2.0
"""Reads what the members of a run wrote, and checks it: a page with wrong numbers would be worse than no page.

A run may be in progress: the last line may be incomplete, and members that have not started are left out. Anything else that
cannot be read raises an error that names the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from byteback.train.checkpoints.files import from_json
from byteback.train.loop import HISTOGRAMS, METRICS
from byteback.train.results import result_of
from byteback.train.side_by_side import SUMMARY

Record = dict[str, Any]


@dataclass(frozen=True)
class RunMember:
    """One recipe with one seed, as recorded in its journal."""

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
        """Returns the records of a kind."""
        return [record for record in self.records if record["kind"] == kind]

    def result(self) -> Record:
        """Returns its entry in summary.json, from the current journal."""
        return result_of(self.records, self.recipe, self.seed, self.folder, self.run)

    def pictures(self) -> list[Record]:
        """Returns the records of histograms.jsonl; an empty list if there is no such file."""
        path = self.folder / HISTOGRAMS
        return read_journal(path) if path.exists() else []

    @property
    def detects(self) -> bool:
        """Whether it is a detector. In runs of older versions the first record does not say so, but they have its scores."""
        return self.start.get("task") == "detect" or any("mAP" in record for record in self.of_kind("epoch"))


def read_run(run: Path) -> tuple[list[RunMember], list[str]]:
    """Reads the members of a run. Returns them, and a note for each member that has no records yet."""
    if not run.is_dir():
        raise ValueError(f"report: there is no folder {run}. Give the folder of a run, such as runs/digits-resnet8.")
    paths = sorted(run.glob(f"*/seed*/{METRICS}")) or sorted(run.glob(f"seed*/{METRICS}")) or sorted(run.glob(METRICS))
    if not paths:
        raise ValueError(
            f"report: {run} is not a run of `byteback train`: there is no file RECIPE/seedN/{METRICS}. "
            "Give the folder that was its --output-dir."
        )
    members, waiting = [], []
    for path in sorted(paths, key=_as_asked(run)):
        member = _read_member(run, path)
        if member is None:
            waiting.append(f"{path} is empty, so there is nothing to show yet")
        else:
            members.append(member)
    return members, waiting


def _as_asked(run: Path) -> Callable[[Path], int]:
    """Returns a sort key for the order in which the members are trained, if the summary of the run can be read."""
    order: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        summary = from_json((run / SUMMARY).read_bytes())
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
            f"report: {path} does not start with a complete record of kind `start`"
            + (f" (no {', '.join(missing)})" if missing else "")
            + ": its start is lost, or another program wrote it. Remove the member, or train it again."
        )
    return RunMember(run, path.parent, start, records)


def read_journal(path: Path) -> list[Record]:
    """Returns the records of a file of JSON lines. Only its last line may be incomplete, while the file is being written."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise OSError(f"report: {path} could not be read: {error.strerror}.") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = from_json(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and (path.name != METRICS or "kind" in record):
            records.append(record)
        elif number < len(lines):
            raise ValueError(
                f"report: {path}, line {number}, is not a JSON record: the file is damaged. Remove the line, or train the "
                "member again."
            )
    return records
