# SPDX-License-Identifier: Apache-2.0
"""Draws step.svg from the JSON files of `byteback bench step --json`: python docs/images/draw_step.py FILE... -o step.svg

Left: how many times faster a training step is, per network. Right: where the time of every side goes. Files of a machine with
bf16 autocast have a bar for it on both sides.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

WIDTH, BAR, GAP, TOP = 1000, 16, 14, 64
# key -> what a bar on the left compares with, and its colour
RATIOS = {
    "ratio": ("FP32", "#0072b2"),
    "ratio_tuned_malloc": ("FP32, tuned malloc", "#56b4e9"),
    "ratio_bf16": ("bf16", "#009e73"),
}
REST = "norms, activations, quantization, autograd"
COLORS = {"convolutions": "#0072b2", REST: "#e69f00", "data, optimizer": "#999999"}
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #222 } .title { font-weight: 600 } .small { font-size: 11px }
.axis { stroke: #bbb }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .axis { stroke: #555 } }
</style>"""


def kinds(result: dict[str, Any], side: str) -> dict[str, float]:
    """Milliseconds of one side by kind."""
    parts = {name: part[f"{side}_ms"] for name, part in result["parts"].items()}
    convolutions = parts.get("forward: convolution", 0.0) + parts.get("backward: convolution", 0.0)
    rest = parts["forward"] + parts["backward"] - convolutions
    return dict(zip(COLORS, (convolutions, rest, parts["data"] + parts["optimizer"]), strict=True))


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, color: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height}" fill="{color}">'
        f"<title>{escape(title)}</title></rect>"
    )


def legend(x: float, labels: Iterable[tuple[str, str]]) -> list[str]:
    """What the colours stand for, in one line."""
    parts = []
    for label, color in labels:
        parts += [bar(x, 31, 11, 11, color, label), text(x + 16, 41, label, kind="small")]
        x += 30 + 5.7 * len(label)
    return parts


def draw(results: list[dict[str, Any]]) -> str:
    """The picture."""
    has_bf16 = any(result.get("ratio_bf16") for result in results)
    row = BAR * (3 if has_bf16 else 2) + GAP
    height = TOP + row * len(results) + 40
    names, left, middle, right = 104, 112, 420, 985
    most = max(result.get(key) or 0 for result in results for key in RATIOS) * 1.12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="A training step in int8 against {"FP32 and bf16" if has_bf16 else "FP32"}">',
        STYLE,
        text(left, 20, "Times faster than PyTorch", kind="title"),
        text(middle + 40, 20, f"Where the time of a step goes: FP32, {'bf16, ' if has_bf16 else ''}int8", kind="title"),
    ]
    compared = [label for key, label in RATIOS.items() if any(result.get(key) for result in results)]
    parts += [*legend(left, compared), *legend(middle + 40, COLORS.items())]
    one = left + (middle - left) / most
    parts.append(f'<line class="axis" x1="{one:.1f}" x2="{one:.1f}" y1="{TOP - 8}" y2="{height - 34}" stroke-dasharray="3 3"/>')
    parts.append(text(one, height - 18, "1x: as fast as PyTorch", "middle", "small"))
    for index, result in enumerate(results):
        y = TOP + row * index
        parts.append(text(names, y + 20, result["model"], "end"))
        for number, key in enumerate(key for key in RATIOS if result.get(key)):
            width, top = (middle - left) * result[key] / most, y + BAR * number
            parts += [bar(left, top, width, 14, RATIOS[key][1], f"{result['model']}: {result[key]:.2f}x")]
            parts += [text(left + width + 4, top + 11, f"{result[key]:.2f}x", kind="small")]
        sides = [side for side in ("fp32", "bf16", "int8") if result.get(f"{side}_ms")]
        scale = (right - middle - 40) / max(sum(kinds(result, side).values()) for side in sides)
        for number, side in enumerate(sides):
            x = middle + 40.0
            for kind, ms in kinds(result, side).items():
                parts.append(bar(x, y + BAR * number, ms * scale, 14, COLORS[kind], f"{side}, {kind}: {ms:.0f} ms"))
                x += ms * scale
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Reads the files, writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.write_text(draw([json.loads(path.read_text()) for path in options.files]))


if __name__ == "__main__":
    main()
