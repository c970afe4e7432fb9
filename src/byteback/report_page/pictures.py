# SPDX-License-Identifier: Apache-2.0
"""The histograms of gradients of the papers, from histograms.jsonl: by layer, by epoch, by place in a block, by channel.

Only one seed of each recipe is shown, because other seeds look the same. The page has histograms of a few epochs (`EPOCHS`),
and the numbers of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from byteback.report_page.numbers import short, spaced
from byteback.report_page.runs import Record, RunMember

EPOCHS = 5


def build(members: Sequence[RunMember]) -> dict[str, Any] | None:
    """Returns the histograms of a recipe; None if no member has any."""
    for member in members:
        records = [record for record in member.pictures() if record.get("linear")]
        if records:
            return _build(records, member.seed)
    return None


def _build(records: Sequence[Record], seed: int) -> dict[str, Any]:
    epochs = sorted({record["epoch"] for record in records})
    layers = {record["layer"]: record for record in sorted(records, key=lambda record: record["index"])}
    found = {(record["layer"], record["epoch"]): record for record in records}
    looks = {layer: sorted(epoch for name, epoch in found if name == layer) for layer in layers}
    shown = set(spaced(epochs, EPOCHS))
    return {
        "seed": seed,
        "epochs": epochs,
        "layers": [
            {"name": name, "structure": record["structure"], "place": place(name, record["structure"]), "block": block(name)}
            for name, record in layers.items()
        ],
        "tail": [[short(found.get((name, epoch), {}).get("tail")) for epoch in epochs] for name in layers],
        "gaussian": [[_gaussian(found.get((name, epoch))) for epoch in epochs] for name in layers],
        "histograms": [
            {str(epoch): _picture(found[name, epoch]) for epoch in epochs if epoch in shown and (name, epoch) in found}
            for name in layers
        ],
        "last": [_operands(found[name, looks[name][-1]]) for name in layers],
        "channels": [
            [_channels(found[name, epoch]) for epoch in dict.fromkeys((looks[name][0], looks[name][-1]))] for name in layers
        ],
    }


def _gaussian(record: Record | None) -> float | None:
    return None if record is None else short(record["channels"]["gaussian_share"])


def _picture(record: Record) -> dict[str, Any]:
    return {**shares(record["linear"]), **{key: short(record[key]) for key in ("std", "tail", "zeros")}}


def _operands(record: Record) -> dict[str, Any]:
    return {"epoch": record["epoch"], "input": shares(record["input"]), "weight": shares(record["weight"])}


def _channels(record: Record) -> dict[str, Any]:
    channels = record["channels"]
    return {
        "epoch": record["epoch"],
        "count": channels["count"],
        "tails": sorted((short(tail, 3) or 0.0 for tail in channels["tail"]), reverse=True),
        "pictures": [
            {"channel": picture["channel"], "tail": short(picture["tail"], 3), **shares(picture)}
            for picture in sorted(channels["histograms"], key=lambda picture: -picture["tail"])
        ],
    }


def shares(histogram: Record) -> dict[str, Any]:
    """Converts counts to shares of the total, rounded to three digits.

    >>> shares({"edge": 1.0, "counts": [1, 2, 1]})
    {'edge': 1.0, 'shares': [0.25, 0.5, 0.25]}
    """
    total = sum(histogram["counts"]) or 1
    return {
        "edge": short(histogram["edge"]),
        "shares": [float(f"{count / total:.3g}") if count else 0 for count in histogram["counts"]],
    }


def block(name: str) -> str:
    """Returns the block of a layer: its name up to the first number; empty for a layer outside of blocks.

    >>> block("layer1.0.conv2"), block("features.3.conv.1.0"), block("conv1"), block("features.0")
    ('layer1.0', 'features.3', '', '')
    """
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdigit() and not all(rest.isdigit() for rest in parts[i + 1 :]):
            return ".".join(parts[: i + 1])
    return ""


def place(name: str, structure: str) -> str:
    """Returns the place of a layer in its block and its kind; only the kind for a layer outside of blocks.

    >>> place("layer1.0.conv2", "conv 3x3"), place("features.3.conv.1.0", "depthwise 3x3 stride 2"), place("conv1", "conv 3x3")
    ('conv2, conv 3x3', 'conv.1, depthwise 3x3', 'conv 3x3')
    """
    kind, inside = structure.partition(" stride")[0], block(name)
    where = name[len(inside) + 1 :].removesuffix(".0")  # of a Sequential around convolution and norm
    return f"{where}, {kind}" if inside else kind
