# SPDX-License-Identifier: Apache-2.0
"""The results of a run: read from the journals of its members, averaged over seeds, compared with float32.

The journals are the only source, so the table is the same whether or not a run was interrupted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from byteback import tables
from byteback.train.checkpoints import checkpoint, files
from byteback.train.loop import METRICS, Member
from byteback.train.variants import FLOAT

TITLE = "Same seeds, same data order"
_DETECTION = ("mAP", "AP50", "AP75", "per_class_AP")
_MEANS = ("accuracy", "best_accuracy", "train_loss", "test_loss", "images_per_second", "data_wait", "saved_bytes", "seconds")


def is_finished(folder: Path) -> bool:
    """Whether the member in this folder is finished."""
    return any(record.get("kind") in ("end", "diverged") for record in files.read_lines(folder / METRICS)[-1:])


def member_result(member: Member, run: Path) -> dict[str, Any]:
    """Returns the entry of a member in summary.json."""
    records = files.read_lines(member.folder / METRICS)
    return result_of(records, member.variant.name, member.seed, member.folder, run)


def result_of(records: Sequence[dict[str, Any]], recipe: str, seed: int, folder: Path, run: Path) -> dict[str, Any]:
    """Returns the result of the member in `folder`, from the records of its journal."""
    try:
        return _result_of(records, recipe, seed, folder, run)
    except (KeyError, TypeError) as error:
        raise files.Damaged(
            f"{folder / METRICS} has a record without a field that it must have ({error}): the file is damaged. Restore it, or "
            "remove the folder of the member to train it again."
        ) from error


def _result_of(records: Sequence[dict[str, Any]], recipe: str, seed: int, folder: Path, run: Path) -> dict[str, Any]:
    start = next((record for record in records if record.get("kind") == "start"), {})
    epochs = [record for record in records if record.get("kind") == "epoch"]
    last = epochs[-1] if epochs else {}
    end = next((record for record in records if record.get("kind") == "end"), None)
    diverged = next((record for record in records if record.get("kind") == "diverged"), None)
    state = "finished" if end else "diverged" if diverged else "stopped" if checkpoint.exists(folder) else "waiting"
    return {
        "recipe": recipe,
        "folder": str(folder.relative_to(run)),
        "seed": seed,
        "state": state,
        "epochs": len(epochs),
        "accuracy": last.get("test_accuracy"),
        "best_accuracy": last.get("best_accuracy"),
        "train_loss": last.get("train_loss"),
        "test_loss": last.get("test_loss"),
        "images_per_second": statistics.median(e["images_per_second"] for e in epochs) if epochs else None,
        "data_wait": statistics.median(e["data_wait"] for e in epochs) if epochs else None,
        "seconds": sum(e["seconds"] for e in epochs),
        "saved_bytes": start.get("saved_bytes"),
        "state_sha256": end["state_sha256"] if end else None,
        "why": diverged["why"] if diverged else None,
        **{name: last[name] for name in _DETECTION if name in last},
    }


def begun_with(folder: Path) -> dict[str, Any] | None:
    """Returns the recipe that a member was started with, as data; None for float32 and for a member that was not started."""
    start: dict[str, Any] = next((record for record in files.read_lines(folder / METRICS) if record.get("kind") == "start"), {})
    recipe: dict[str, Any] | None = start.get("recipe_data")
    return recipe


def rows(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row per recipe: means over its finished seeds, the seeds that diverged, the paired difference to float32."""
    over = [result for result in results if result["state"] in ("finished", "diverged")]
    done = [result for result in over if result["state"] == "finished"]
    base = {result["seed"]: result for result in done if result["recipe"] == FLOAT}
    table = []
    for recipe in dict.fromkeys(result["recipe"] for result in over):
        lost = [result for result in over if result["recipe"] == recipe and result["state"] == "diverged"]
        own = [result for result in done if result["recipe"] == recipe]
        row: dict[str, Any] = {
            "recipe": recipe,
            "folder": (own or lost)[0]["folder"].rsplit("/", 1)[0],
            "seeds": [result["seed"] for result in own],
            "diverged": [result["seed"] for result in lost],
        }
        row.update({name: _mean([result[name] for result in own]) for name in _MEANS})
        row.update({name: _mean([result[name] for result in own]) for name in _DETECTION[:3] if any(name in r for r in own)})
        row["accuracy_spread"] = _spread([result["accuracy"] for result in own])
        paired = [(result, base[result["seed"]]) for result in own if result["seed"] in base and recipe != FLOAT]
        differences = [result["accuracy"] - other["accuracy"] for result, other in paired]
        row["difference"] = _mean(differences)
        spread = _spread(differences)
        row["difference_error"] = None if spread is None else spread / math.sqrt(len(differences))
        row["ratio_to_float32"] = _mean([result["images_per_second"] / other["images_per_second"] for result, other in paired])
        row["saved_ratio"] = _mean([r["saved_bytes"] / o["saved_bytes"] for r, o in paired if o["saved_bytes"]])
        table.append(row)
    return table


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _spread(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def comparison(table: Sequence[dict[str, Any]], score: str = "accuracy") -> Any:
    """Returns the table that is printed at the end."""
    lines = []
    for row in table:
        lost = f"{len(row['diverged'])} diverged" if row["diverged"] else ""
        if not row["seeds"]:
            lines.append([row["recipe"], "0", lost, *[""] * 6])
            continue
        spread, error = row["accuracy_spread"], row["difference_error"]
        difference = "" if row["difference"] is None else f"{100 * row['difference']:+.2f}"
        lines.append(
            [
                row["recipe"],
                str(len(row["seeds"])) + (f" ({lost})" if lost else ""),
                f"{row['accuracy']:.2%}" + (f" ± {100 * spread:.2f}" if spread is not None else ""),
                difference + (f" ± {100 * error:.2f}" if error is not None else ""),
                *("" if row[name] is None else f"{row[name]:.4f}" for name in ("train_loss", "test_loss")),
                tables.rate(row["images_per_second"]),
                "" if row["ratio_to_float32"] is None else f"{row['ratio_to_float32']:.2f}x",
                f"{row['saved_bytes'] / 2**20:.1f} MB" + ("" if row["saved_ratio"] is None else f" {row['saved_ratio']:.2f}x"),
            ]
        )
    columns = ["recipe", "seeds", score, "points", "train loss", "test loss", "images/s", "speed", "saved"]
    return tables.build(TITLE, columns, lines)
