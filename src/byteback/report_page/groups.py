# SPDX-License-Identifier: Apache-2.0
"""Forms groups of members that can be compared: the same network, schedule and images. A page shows one group at a time.

The result is plain data, small enough to embed in the page: four digits, at most `COLUMNS` epochs per heat map.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from byteback.report_page import detections, findings, pictures
from byteback.report_page.numbers import mean, short, spaced
from byteback.report_page.runs import Record, RunMember
from byteback.train import results
from byteback.train.variants import FLOAT

COLUMNS = 60
CURVES = ("test_accuracy", "train_accuracy", "test_loss", "train_loss")
DETECTION_CURVES = (*CURVES, "AP50")
NUMBERS = ("deviation", "learning_rate_factor", "clip", "saturated")
_NOT_SHOWN = (*NUMBERS, "nonfinite")
ROLES = ("grad_output", "grad_output_for_weight", "input", "weight")
_SAME = ("model", "backbone", "image_size", "epochs", "batch_size", "train_images", "test_images")
_FACTS = (*_SAME, "classes", "channels", "steps_per_epoch", "parameters", "threads", "path")


def build(members: Sequence[RunMember]) -> list[dict[str, Any]]:
    """Returns the groups, in the order of the runs on the command line."""
    data = {member.start["data"]: member for member in members}
    if len(data) > 1:
        named = "; ".join(f"{name} in {member.run}" for name, member in data.items())
        raise ValueError(f"report: these runs were trained on different data ({named}). Write a page for each data set.")
    together: dict[tuple[Any, ...], list[RunMember]] = {}
    for member in members:
        settings = json.dumps(_settings(member.start), sort_keys=True)
        together.setdefault((*(member.start.get(key) for key in _SAME), settings), []).append(member)
    groups: list[tuple[str, list[RunMember]]] = []
    for own in together.values():
        label = _label(own[0].start, [other[0].start for other in together.values()])
        once = len({(member.recipe, member.seed) for member in own}) == len(own)
        recipes = {(member.recipe, json.dumps(member.start.get("recipe_data"), sort_keys=True)) for member in own}
        if once and len(recipes) == len({name for name, _ in recipes}):
            groups.append((label, own))
        else:  # the same member in several runs, or two recipes with the same name: one group per run
            runs: dict[Path, list[RunMember]] = {}
            for member in own:
                runs.setdefault(member.run, []).append(member)
            groups.extend((f"{label} ({run.name})", part) for run, part in runs.items())
    return [_group(label, own) for label, own in groups]


def _label(start: Record, others: Sequence[Record]) -> str:
    """Returns the name of the network, and the settings in which it differs from groups with the same network."""
    namesakes = [other for other in others if network(other) == network(start)]
    units = {"epochs": "{} epochs", "batch_size": "batch {}", "image_size": "{} pixels", "train_images": "{} images"}
    apart = [unit.format(start.get(key)) for key, unit in units.items() if len({other.get(key) for other in namesakes}) > 1]
    own, theirs = _settings(start), [_settings(other) for other in namesakes]
    apart += [f"{key} {own.get(key)}" for key in own if any(other.get(key) != own[key] for other in theirs)]
    return ", ".join([network(start), *apart])


def _settings(start: Record) -> Record:
    """Returns further settings, such as schedule and augmentation. Runs of older versions do not have them."""
    return {key: value for key, value in (start.get("settings") or {}).items() if key not in (*_SAME, "data")}


def network(start: Record) -> str:
    """Returns the name of the network; for a detector with its backbone, if that is not the one in its name."""
    model, backbone = str(start["model"]), str(start.get("backbone") or "")
    return model if backbone in model else f"{model} with {backbone}"


def _group(label: str, members: Sequence[RunMember]) -> dict[str, Any]:
    names = list(dict.fromkeys(member.recipe for member in members))
    names.sort(key=lambda name: name != FLOAT)  # float32 first, the others as they come
    found = [member.result() for member in members]
    rows = _rows(found, names)
    recipes = []
    for name in names:
        own = sorted((member for member in members if member.recipe == name), key=lambda member: member.seed)
        recipes.append(
            {
                "name": name,
                "float": name == FLOAT,
                "row": next((row for row in rows if row["recipe"] == name), None),
                "seeds": [{"seed": member.seed, **_curves(member)} for member in own],
                "mean": _mean_curves(own),
                "layers": _numerics(own),
                "pictures": pictures.build(own),
            }
        )
    start = members[0].start
    group = {
        "label": label,
        "data": start["data"],
        "facts": {"network": network(start), **{key: start.get(key) for key in _FACTS}},
        "recipes": recipes,
        "unfinished": [_progress(r, start) for r in found if r["state"] not in ("finished", "diverged")],
        "diverged": [f"{r['recipe']} seed {r['seed']} in epoch {r['epochs'] + 1}" for r in found if r["state"] == "diverged"],
    }
    if any(member.detects for member in members):
        group["score"] = "mAP"  # what a detector is judged by, instead of accuracy
        seen = detections.build(members, names)
        if seen is not None:
            group["detection"] = seen
    group["findings"] = findings.build(group)
    return group


def _progress(result: Record, start: Record) -> str:
    return f"{result['recipe']} seed {result['seed']} at epoch {result['epochs']} of {start['epochs']}"


def _rows(found: Sequence[Record], names: Sequence[str]) -> list[Record]:
    """Returns the table of the trainer. A recipe without a finished seed gets a row with its current state."""
    rows = results.rows(found)
    there = {row["recipe"] for row in rows}
    for name in names:
        going = [result for result in found if result["recipe"] == name and result["epochs"]]
        if name not in there and going:
            row = results.rows([{**result, "state": "finished"} for result in going])[0]
            rows.append({**row, "epochs_so_far": min(result["epochs"] for result in going)})
    return sorted(rows, key=lambda row: names.index(row["recipe"]))


def _curves(member: RunMember) -> dict[str, Any]:
    epochs = member.of_kind("epoch")
    if not epochs:  # the first epoch is in progress
        steps, whole = member.of_kind("step"), member.start.get("steps_per_epoch") or 1
        begun = {"at": [short(s["step"] / whole) for s in steps], "train_loss": [short(s.get("loss")) for s in steps]}
        return {"epoch": [], "begun": begun}
    return {
        "epoch": [record["epoch"] + 1 for record in epochs],
        **{name: [short(record.get(name)) for record in epochs] for name in _names(member)},
    }


def _mean_curves(members: Sequence[RunMember]) -> dict[str, Any]:
    """Returns the mean over the seeds that did not diverge, for the epochs that all of them have finished."""
    sound = [member for member in members if not member.of_kind("diverged")] or list(members)
    curves = [member.of_kind("epoch") for member in sound]
    length = min(len(curve) for curve in curves)
    return {
        "epoch": [record["epoch"] + 1 for record in curves[0][:length]],
        **{name: [mean([curve[i].get(name) for curve in curves]) for i in range(length)] for name in _names(members[0])},
    }


def _names(member: RunMember) -> tuple[str, ...]:
    return DETECTION_CURVES if member.detects else CURVES


def _numerics(members: Sequence[RunMember]) -> dict[str, Any] | None:
    """Returns role → number → [layer][epoch], each the mean over seeds; None for float32."""
    by_seed = [{record["epoch"] + 1: record["layers"] for record in member.of_kind("layers")} for member in members]
    epochs = spaced(sorted(set().union(*by_seed)), COLUMNS)
    if not epochs:
        return None
    names = list(dict.fromkeys(name for seed in by_seed for layers in seed.values() for name in layers))
    own = _diagnostics(by_seed)
    roles: dict[str, Any] = {}
    for role in ROLES:
        table = {
            number: [
                [
                    mean([seed[epoch].get(name, {}).get(role, {}).get(number) for seed in by_seed if epoch in seed])
                    for epoch in epochs
                ]
                for name in names
            ]
            for number in (*NUMBERS, *own)
        }
        kept = {number: rows for number, rows in table.items() if any(value is not None for row in rows for value in row)}
        if kept:
            roles[role] = kept
    return {"names": names, "epochs": epochs, "roles": roles, "diagnostics": own}


def _diagnostics(by_seed: Sequence[dict[int, Any]]) -> list[str]:
    """Returns the names of the diagnostics of clip rules: all numbers of a tensor except those that every tensor has."""
    rows = (row for seed in by_seed for layers in seed.values() for roles in layers.values() for row in roles.values())
    return sorted({name for row in rows for name in row} - set(_NOT_SHOWN))
