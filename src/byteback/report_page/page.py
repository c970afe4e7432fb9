# SPDX-License-Identifier: Apache-2.0
"""Writes groups as one HTML file that contains its style, its scripts and its data.

The table is HTML, so it can be read without scripts and searched. static/*.js draw everything else from the data. Names come
from files, so all text is escaped here, and the scripts only set textContent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from byteback import __version__
from byteback.report_page.findings import signed
from byteback.tables import rate
from byteback.train.variants import FLOAT

SCRIPTS = ("draw.js", "read.js", "charts.js", "curves.js", "gradients.js", "page.js")
DETECTION_SCRIPTS = ("draw.js", "read.js", "charts.js", "curves.js", "gradients.js", "boxes.js", "precision.js", "page.js")
_DASH = "–"
_COLUMNS = (
    ("recipe", ""),
    ("seeds", "Number of finished members"),
    ("accuracy", "On the test images after the last epoch: mean ± standard deviation over seeds"),
    ("to float32", "Points of accuracy above or below float32 with the same seed: mean ± standard error"),
    ("train loss", "Mean of the last epoch"),
    ("test loss", "After the last epoch"),
    ("images/s", "Training only, median over epochs"),
    ("speed", "Images per second relative to float32"),
    ("saved", "Bytes that a step stores for its backward pass, and their ratio to float32"),
    ("data wait", "Share of the training time spent waiting for data"),
)


def build(groups: Sequence[dict[str, Any]], commands: Sequence[str] = ()) -> str:
    """Returns the page."""
    static = resources.files("byteback.report_page") / "static"
    networks = list(dict.fromkeys(str(group["facts"]["network"]) for group in groups))
    title = f"{', '.join(networks)} on {_data(groups[0])}"
    detection = any("detection" in group for group in groups)
    scripts = DETECTION_SCRIPTS if detection else SCRIPTS
    parts = {
        "TITLE": escape(title),
        "STYLE": (static / "style.css").read_text(encoding="utf-8"),
        "LINKS": '<a href="#detections">Detections</a> <a href="#precision">Precision and recall</a>\n' if detection else "",
        "DETECTIONS": _detections(groups) if detection else "",
        "TABLES": "\n".join(_table(group, i, len(groups) > 1) for i, group in enumerate(groups)),
        "COMMANDS": "".join(f"<pre><code>{escape(command)}</code></pre>" for command in commands),
        "VERSION": escape(__version__),
        "DATA": _embedded({"title": title, "groups": groups}),
        "SCRIPT": "\n".join((static / name).read_text(encoding="utf-8") for name in scripts),
    }
    return _filled("page.html", parts)


def _filled(name: str, parts: dict[str, str]) -> str:
    """Fills in a template of static/, in one pass, so that nothing inside a part is replaced."""
    text = (resources.files("byteback.report_page") / "static" / name).read_text(encoding="utf-8")
    head, *pieces = text.split("{{")
    return head + "".join(parts[name] + rest for name, rest in (piece.split("}}", 1) for piece in pieces))


def _data(group: dict[str, Any]) -> str:
    """Returns the name of the data set; for voc:PATH and coco:PATH the name of the folder."""
    kind, _, path = str(group["data"]).partition(":")
    return Path(path).name or kind if "score" in group and path else str(group["data"])


def _embedded(value: Any) -> str:
    """Returns JSON for a script element: it contains no `<`, so no text can end that element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _table(group: dict[str, Any], number: int, several: bool) -> str:
    head = "".join(f'<th scope="col" title="{escape(why)}">{escape(name)}</th>' for name, why in _columns(group))
    rows = "\n".join(_row(recipe, group) for recipe in group["recipes"])
    caption = f"<caption>{escape(group['label'])}</caption>" if several else ""
    notes = [f"in progress: {', '.join(group['unfinished'])}"] if group["unfinished"] else []
    notes += [f"diverged: {', '.join(group['diverged'])}"] if group["diverged"] else []
    note = f'<p class="note">{escape("; ".join(notes))}.</p>' if notes else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Comparison: {escape(group["label"])}">'
        f'<table data-group="{number}">{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>{note}'
    )


def _row(recipe: dict[str, Any], group: dict[str, Any]) -> str:
    row, name = recipe["row"], escape(recipe["name"])
    first = f'<th scope="row">{name}</th>'
    labels = [label for label, _ in _columns(group)[1:]]
    cells = _cells(row, group) if row else [_DASH] * len(labels)
    if row and not row["seeds"]:
        cells = [f"0 of {len(row['diverged'])}", "diverged", *[_DASH] * (len(labels) - 2)]
    own = ' class="float"' if recipe["name"] == FLOAT else ""
    body = "".join(f'<td data-label="{label}">{escape(cell)}</td>' for label, cell in zip(labels, cells, strict=True))
    return f"<tr{own}>{first}{body}</tr>"


def _columns(group: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the columns with their description. Detectors have another score, and no test loss."""
    if "score" not in group:
        return list(_COLUMNS)
    score = (
        group["score"],
        "Mean average precision of COCO on the test images after the last epoch: mean ± standard deviation",
    )
    return [score if name == "accuracy" else (name, why) for name, why in _COLUMNS if name != "test loss"]


def _cells(row: dict[str, Any], group: dict[str, Any]) -> list[str]:
    seeds = str(len(row["seeds"])) + (f" ({len(row['diverged'])} diverged)" if row["diverged"] else "")
    if "epochs_so_far" in row:
        seeds += f", epoch {row['epochs_so_far']} of {group['facts']['epochs']}"
    difference = _DASH if row["difference"] is None else signed(row["difference"])
    saved = _DASH if row["saved_bytes"] is None else f"{row['saved_bytes'] / 2**20:.1f} MB"
    return [
        seeds,
        _number(row["accuracy"], "{:.2f} %", 100) + _number(row["accuracy_spread"], " ± {:.2f}", 100, ""),
        difference + _number(row["difference_error"], " ± {:.2f}", 100, ""),
        _number(row["train_loss"], "{:.4f}"),
        *([] if "score" in group else [_number(row["test_loss"], "{:.4f}")]),
        _DASH if row["images_per_second"] is None else rate(row["images_per_second"]),
        _number(row["ratio_to_float32"], "{:.2f}x"),
        saved + _number(row["saved_ratio"], " ({:.2f}x)", 1, ""),
        _number(row["data_wait"], "{:.1f} %", 100),
    ]


def _detections(groups: Sequence[dict[str, Any]]) -> str:
    """Returns the sections about detections. Their table is HTML, too."""
    tables = [_scores(group, i, len(groups) > 1) for i, group in enumerate(groups) if "detection" in group]
    return _filled("detections.html", {"SCORES": "\n".join(tables)})


def _scores(group: dict[str, Any], number: int, several: bool) -> str:
    """Returns a table with a row for each score and class, and a column for each recipe."""
    names = [escape(name) for name in group["detection"]["recipes"]]
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = []
    for row in group["detection"]["scores"]:
        label = f"AP of {escape(row['name'])}" if row.get("class") else f"<b>{row['name']}</b>"
        shown = [
            _DASH if own is None else f"{100 * own[0]:.2f} %" + _number(own[1], " ± {:.2f}", 100, "") for own in row["recipes"]
        ]
        cells = "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in zip(names, shown, strict=True))
        rows.append(f'<tr><th scope="row">{label}</th>{cells}</tr>')
    caption = f"<caption>{escape(group['label'])}</caption>" if several else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Average precision: {escape(group["label"])}">'
        f'<table data-scores="{number}">{caption}<thead><tr><th scope="col">average precision</th>{head}</tr></thead>\n'
        + "\n".join(["<tbody>", *rows])
        + "\n</tbody></table></div>"
    )


def _number(value: float | None, shape: str, times: float = 1.0, absent: str = _DASH) -> str:
    return absent if value is None else shape.format(times * value)
