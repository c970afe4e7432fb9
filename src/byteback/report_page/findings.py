# SPDX-License-Identifier: Apache-2.0
"""Describes the results of a group in one sentence for each part of the page: the titles of its charts.

Every sentence contains the numbers: nothing is called equal, better or faster without them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

Group = dict[str, Any]


def build(group: Group) -> dict[str, str]:
    """Returns part of the page → sentence."""
    return {
        "accuracy": _accuracy(group),
        "curves": _curves(group),
        "speed": _speed(group),
        "deviation": _deviation(group),
        "learning_rate": _learning_rate(group),
        "clip": _clip(group),
        **({"precision": _precision(group)} if "detection" in group else {}),
    }


def signed(difference: float) -> str:
    """Formats a difference of accuracies in points, with its sign; a zero has no minus.

    >>> signed(-0.0019), signed(-0.00001), signed(0.0028)
    ('−0.19', '0.00', '+0.28')
    """
    text = f"{100 * difference:+.2f}"
    return "0.00" if float(text) == 0.0 else text.replace("-", "−")


def points(difference: float, error: float | None = None) -> str:
    """Formats a difference of accuracies in words.

    >>> points(-0.0019, 0.0008)
    '0.19 ± 0.08 points below'
    """
    size = f"{100 * abs(difference):.2f}" + ("" if error is None else f" ± {100 * error:.2f}")
    side = "below" if round(10_000 * difference) < 0 else "above"
    return f"{size} points {side}" if round(10_000 * abs(difference)) else f"{size} points from"


def _accuracy(group: Group) -> str:
    rows = [recipe["row"] for recipe in group["recipes"] if recipe["row"]]
    compared = [row for row in rows if row["difference"] is not None]
    if compared:
        parts = [f"{row['recipe']} ends {points(row['difference'], row['difference_error'])} float32" for row in compared]
        if len(parts) <= 2:
            return " and ".join([parts[0], *(part.replace(" ends", "", 1) for part in parts[1:])])
        low, high = (pick(compared, key=lambda row: row["difference"]) for pick in (min, max))
        return (
            f"In {group.get('score', 'accuracy')} int8 ends {signed(low['difference'])} points ({low['recipe']}) to "
            f"{signed(high['difference'])} points ({high['recipe']}) from float32"
        )
    known = [row for row in rows if row["accuracy"] is not None]
    if not known:
        return "No member has finished an epoch yet"
    best = max(known, key=lambda row: row["accuracy"])
    score = f" {group['score']}" if "score" in group else ""
    return f"{best['recipe']} is at {best['accuracy']:.2%}{score}" + ("" if len(rows) == 1 else ", the best of those here")


def _curves(group: Group) -> str:
    base = next((recipe["mean"] for recipe in group["recipes"] if recipe["float"]), None)
    gaps = []
    for recipe in group["recipes"]:
        if base and not recipe["float"]:
            pairs = zip(recipe["mean"]["test_accuracy"], base["test_accuracy"], strict=False)
            apart = [abs(own - other) for own, other in pairs if own is not None and other is not None]
            if apart:
                gaps.append((statistics.fmean(apart), recipe["name"]))
    if not gaps:
        return f"Loss and {group.get('score', 'accuracy')}, epoch by epoch"
    gap, name = max(gaps)
    if len(gaps) == 1:
        return f"On average over epochs, {name} is {100 * gap:.2f} points from float32"
    return f"On average over epochs, int8 is within {100 * gap:.2f} points of float32 (largest difference: {name})"


def _speed(group: Group) -> str:
    rows = [recipe["row"] for recipe in group["recipes"] if recipe["row"]]
    compared = [row for row in rows if row["ratio_to_float32"] is not None]
    if not compared:
        return "Training speed, and what a step stores for its backward pass"
    best = max(compared, key=lambda row: row["ratio_to_float32"])
    memory = "" if best["saved_ratio"] is None else f" and stores {best['saved_ratio']:.2f} times its bytes for backward"
    return f"{best['recipe']} trains at {best['ratio_to_float32']:.2f} times the speed of float32{memory}"


def _last(group: Group, role: str, number: str) -> Iterator[tuple[float, str, str]]:
    """Yields (value after the last epoch, layer, recipe)."""
    for recipe in group["recipes"]:
        layers = recipe["layers"] or {"names": [], "roles": {}}
        for name, values in zip(layers["names"], layers["roles"].get(role, {}).get(number, []), strict=False):
            if values[-1] is not None:
                yield values[-1], name, recipe["name"]


def _deviation(group: Group) -> str:
    worst = max(_last(group, "grad_output", "deviation"), default=None)
    if worst is None:
        return "No int8 layer has been observed yet"
    return f"The largest final direction deviation (1 − cosine) of a gradient is {worst[0]:.2g}: {worst[1]}, {worst[2]}"


def _learning_rate(group: Group) -> str:
    lowest = min(_last(group, "grad_output", "learning_rate_factor"), default=None)
    if lowest is None:
        return "No recipe here scales learning rates"
    return f"After the last epoch the lowest learning-rate factor is {lowest[0]:.2f}: {lowest[1]}, {lowest[2]}"


def _clip(group: Group) -> str:
    ratios = []
    for recipe in group["recipes"]:
        layers = recipe["layers"] or {"roles": {}}
        for values in layers["roles"].get("grad_output", {}).get("clip", []):
            if values[0] and values[-1] and len(values) > 1:
                ratios.append(values[-1] / values[0])
    if not ratios:
        return "Clips by epoch"
    ratio = statistics.median(ratios)
    how = f"{1 / ratio:.3g} times smaller" if ratio < 1 else f"{ratio:.3g} times larger"
    return f"From the first epoch to the last the clips become {how} (median layer)"


def _precision(group: Group) -> str:
    known = [(own[0], name) for name, own in zip(group["detection"]["recipes"], _measure(group, "AP50"), strict=True) if own]
    if not known:
        return "Precision and recall"
    parts = [f"{100 * value:.2f} % in {name}" for value, name in known]
    return "The average precision at an overlap of 50 % is " + " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _measure(group: Group, name: str) -> list[Any]:
    """Returns (mean, spread) or None for each recipe."""
    return next((row["recipes"] for row in group["detection"]["scores"] if row["name"] == name), [])
