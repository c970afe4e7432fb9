# SPDX-License-Identifier: Apache-2.0
"""Draws step.svg from the JSON files of `byteback bench step --json`: python docs/images/draw_step.py FILE... -o step.svg

Left: how many times faster a training step is, per network. Right: where the time of both sides goes.
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

WIDTH, ROW, TOP = 1000, 46, 64
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


def draw(results: list[dict[str, Any]]) -> str:
    """The picture."""
    height = TOP + ROW * len(results) + 40
    names, left, middle, right = 104, 112, 420, 985
    most = max(max(r["ratio"], r["ratio_tuned_malloc"]) for r in results) * 1.12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="A training step in int8 against FP32">',
        STYLE,
        text(left, 20, "Times faster than PyTorch FP32", kind="title"),
        text(left, 40, "default malloc (dark), malloc tuned on both sides (light)", kind="small"),
        text(middle + 40, 20, "Where the time of a step goes, FP32 above int8", kind="title"),
    ]
    legend = middle + 40.0
    for label, color in COLORS.items():
        parts += [bar(legend, 31, 11, 11, color, label), text(legend + 16, 41, label, kind="small")]
        legend += 30 + 5.7 * len(label)
    one = left + (middle - left) / most
    parts.append(f'<line class="axis" x1="{one:.1f}" x2="{one:.1f}" y1="{TOP - 8}" y2="{height - 34}" stroke-dasharray="3 3"/>')
    parts.append(text(one, height - 18, "1x: as fast as FP32", "middle", "small"))
    for index, result in enumerate(results):
        y = TOP + ROW * index
        parts.append(text(names, y + 20, result["model"], "end"))
        for offset, key, color in ((0, "ratio", "#0072b2"), (16, "ratio_tuned_malloc", "#56b4e9")):
            width = (middle - left) * result[key] / most
            parts += [bar(left, y + offset, width, 14, color, f"{result['model']}: {result[key]:.2f}x")]
            parts += [text(left + width + 4, y + offset + 11, f"{result[key]:.2f}x", kind="small")]
        scale = (right - middle - 40) / max(sum(kinds(result, "fp32").values()), result["fp32_ms"])
        for offset, side in ((0, "fp32"), (16, "int8")):
            x = middle + 40.0
            for kind, ms in kinds(result, side).items():
                parts.append(bar(x, y + offset, ms * scale, 14, COLORS[kind], f"{side}, {kind}: {ms:.0f} ms"))
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
