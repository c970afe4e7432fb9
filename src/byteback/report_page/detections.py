# SPDX-License-Identifier: Apache-2.0
"""The results of detectors, from detections.json: boxes on a few test images, precision by recall, and a table of the scores.

Runs of older versions do not have this file. A file that exists must be complete; otherwise an error names it.
"""

from __future__ import annotations

import base64
import math
import statistics
from collections.abc import Sequence
from typing import Any

from byteback.report_page.numbers import mean, short
from byteback.report_page.runs import Record, RunMember
from byteback.train.checkpoints.files import from_json
from byteback.train.detect.showcase import FORMAT, NAME

OVERLAPS = ("50", "50-95")
_RECALLS = 101


def build(members: Sequence[RunMember], names: Sequence[str]) -> dict[str, Any] | None:
    """Returns the detections of a group; None if no member has any. `names` are the recipes in their order."""
    found = [(member, seen) for member in members if (seen := read(member)) is not None]
    if not found:
        return None
    first, seen = found[0]
    for member, other in found:
        if other["classes"] != seen["classes"]:
            raise ValueError(
                f"report: {member.folder / NAME} has other classes than {first.folder / NAME}, so they cannot be compared. "
                "Write a page for each run."
            )
    images = [{key: image[key] for key in ("name", "width", "height", "jpeg", "truth")} for image in seen["images"]]
    return {
        "classes": seen["classes"],
        "least_score": seen["least_score"],
        "images": images,
        "recipes": list(names),
        "seeds": sorted({member.seed for member, _ in found}),
        "members": [
            [_member(member, own, images) for member, own in found if member.recipe == name] for name in names
        ],  # recipe by recipe
        "precision": [
            _mean_curves([own for member, own in found if member.recipe == name and not member.of_kind("diverged")])
            for name in names
        ],
        "scores": _scores(members, names, seen["classes"]),
    }


def read(member: RunMember) -> Record | None:
    """Reads and checks the file of a member; None if there is no file."""
    path = member.folder / NAME
    if not path.exists():
        return None
    try:
        record = from_json(path.read_bytes())
        version = record["format"]
        if version == FORMAT:
            _check(record)
    except OSError as error:
        raise OSError(f"report: {path} could not be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"report: {path} is damaged ({type(error).__name__}: {error}). Remove it to write a page without detections."
        ) from error
    if version != FORMAT:
        raise ValueError(f"report: {path} has format {version}, but this version reads {FORMAT}. Update byteback.")
    return dict(record)


def _check(record: Record) -> None:
    """Raises an error if the page could not show the record."""
    classes = record["classes"]
    _must(bool(classes) and all(isinstance(name, str) for name in classes), "classes")
    _must(isinstance(record["epochs"], int) and 0 <= record["least_score"] <= 1, "epochs, least_score")
    for image in record["images"]:
        _must(isinstance(image["name"], str) and image["width"] > 0 and image["height"] > 0, "an image's name and size")
        _must(base64.b64decode(image["jpeg"], validate=True).startswith(b"\xff\xd8"), "an image that is no JPEG")
        for box in (*image["truth"], *image["found"]):
            _must(1 <= box["label"] <= len(classes) and _numbers(box["box"]) and len(box["box"]) == 4, "a box")
        _must(_numbers([box["score"] for box in image["found"]]), "a score")
    for overlap in OVERLAPS:
        curves = record["precision"][overlap]
        _must(len(curves) == len(classes), "precision")
        _must(all(own is None or (len(own) == _RECALLS and _numbers(own)) for own in curves), "precision")


def _must(right: bool, what: str) -> None:
    if not right:
        raise ValueError(what)


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, float)) and math.isfinite(value) for value in values)


def _member(member: RunMember, seen: Record, images: Sequence[Record]) -> dict[str, Any]:
    by_name = {image["name"]: image["found"] for image in seen["images"]}
    return {
        "seed": member.seed,
        "epochs": seen["epochs"],
        "found": [by_name.get(image["name"]) for image in images],
        "precision": {overlap: _with_mean(seen["precision"][overlap]) for overlap in OVERLAPS},
    }


def _with_mean(curves: Sequence[list[float] | None]) -> list[list[float | None] | None]:
    """Returns the mean over classes, followed by the curve of each class."""
    short_ = [None if own is None else [short(value, 3) for value in own] for own in curves]
    return [_mean_of([own for own in curves if own is not None]), *short_]


def _mean_of(curves: Sequence[Sequence[float]]) -> list[float | None] | None:
    return [mean(values) for values in zip(*curves, strict=True)] if curves else None


def _mean_curves(found: Sequence[Record]) -> dict[str, Any] | None:
    """Returns overlap → the mean over seeds, for all classes and for each class."""
    if not found:
        return None
    own = {overlap: [_with_mean(seen["precision"][overlap]) for seen in found] for overlap in OVERLAPS}
    return {
        overlap: [_mean_of([curve for curve in of_class if curve is not None]) for of_class in zip(*seeds, strict=True)]
        for overlap, seeds in own.items()
    }


def _scores(members: Sequence[RunMember], names: Sequence[str], classes: Sequence[str]) -> list[dict[str, Any]]:
    """Returns mAP, AP50, AP75 and the AP of every class, each with (mean, spread over seeds) per recipe."""
    results = [member.result() for member in members]
    chosen = []
    for name in names:
        own = [result for result in results if result["recipe"] == name and "mAP" in result and result["state"] != "diverged"]
        chosen.append([result for result in own if result["state"] == "finished"] or own)
    rows: list[dict[str, Any]] = []
    for name in ("mAP", "AP50", "AP75"):
        rows.append({"name": name, "recipes": [_over([result[name] for result in own]) for own in chosen]})
    for name in classes:
        found = [_over([result["per_class_AP"].get(name) for result in own]) for own in chosen]
        rows.append({"name": name, "class": True, "recipes": found})
    return rows


def _over(values: Sequence[float | None]) -> tuple[float, float | None] | None:
    known = [value for value in values if value is not None]
    return (statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None) if known else None
