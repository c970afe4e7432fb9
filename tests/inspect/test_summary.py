# SPDX-License-Identifier: Apache-2.0
"""summary: the right rows with the right values, printed with rich and without it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import byteback
from byteback import Summary, models
from html_tables import read_html


def test_summary_lists_every_layer_of_resnet20_and_why_two_stay_float() -> None:
    summary = byteback.summary(byteback.prepare(models.build("resnet20"), "unified-int8"))
    blocks = [f"layer{stage}.{block}.conv{number}" for stage in (1, 2, 3) for block in (0, 1, 2) for number in (1, 2)]
    assert [row.name for row in summary] == ["conv1", *blocks, "fc"]
    by_name = {row.name: row for row in summary}
    for name in blocks:
        row = by_name[name]
        assert (row.kind, row.output, row.grad_input, row.grad_weight, row.note) == ("Int8Conv2d", *["int8"] * 3, "")
        assert row.block == "conv + norm + relu" if name.endswith("conv1") else "conv + norm + add + relu"
    for name, kind, why in (("conv1", "FusedConv2d", "first convolution"), ("fc", "Linear", "Linear, as in the first paper")):
        row = by_name[name]
        assert (row.kind, row.output, row.grad_input, row.grad_weight) == (kind, *["float"] * 3)
        assert why in row.note
    assert by_name["conv1"].shape == "3→16 3x3"
    assert by_name["layer2.0.conv1"].shape == "16→32 3x3 s2"
    assert by_name["fc"].shape == "64→10"
    # 3 · 16 · 9, 16 · 32 · 9, and 64 · 10 + 10 with the bias
    assert [by_name[name].parameters for name in ("conv1", "layer2.0.conv1", "fc")] == [432, 4608, 650]


def test_summary_shows_groups_and_dimensions() -> None:
    model = nn.ModuleList([nn.Conv1d(4, 4, 3, groups=4), nn.Conv3d(4, 8, (1, 3, 3), stride=(1, 2, 2))])
    byteback.prepare(model, byteback.PlainInt8(first_conv=True))
    assert [row.shape for row in byteback.summary(model)] == ["4→4 3 g4", "4→8 1x3x3 s2"]


def test_summary_shows_products_that_a_recipe_keeps_in_float() -> None:
    recipe = byteback.PlainInt8(grad_weight=False)
    row = byteback.summary(byteback.prepare(models.build("resnet8", image_size=8), recipe))[1]
    assert (row.output, row.grad_input, row.grad_weight) == ("int8", "int8", "float")


def test_summary_says_when_layers_are_switched_off() -> None:
    model = byteback.enabled(byteback.prepare(models.build("resnet8", image_size=8), "plain-int8"), False)
    row = byteback.summary(model)[1]
    assert (row.output, row.grad_input, row.grad_weight) == ("float", "float", "float")
    assert "enabled" in row.note


def _check_summary_text(summary: Summary) -> None:
    lines = str(summary).splitlines()
    # 18 of 20 layers; (269 722 - BatchNorm's 1 376 - 432 - 650) / (269 722 - 1 376) = 99.6 %
    assert lines[0] == "UnifiedInt8: 18 of 20 layers in int8, 100% of their weights; 19 fused blocks"
    assert lines[1].split() == ["layer", "kind", "shape", "block", "note", "output", "grad_input", "grad_weight"]
    assert len(lines) == 2 + 20
    cells = [cell for cell in lines[3].split("  ") if cell]
    assert [cell.strip() for cell in cells] == [
        "layer1.0.conv1",
        "Int8Conv2d",
        "16→16 3x3",
        "conv + norm + relu",
        *["int8"] * 3,
    ]
    assert "the first convolution, as in the first paper" in lines[2]
    assert not any(line != line.rstrip() for line in lines)


def test_summary_prints_as_a_table() -> None:
    pytest.importorskip("rich")
    _check_summary_text(byteback.summary(byteback.prepare(models.build("resnet20"), "unified-int8")))


def test_summary_prints_without_rich(no_rich: None) -> None:
    with pytest.raises(ImportError):
        import rich  # noqa: F401
    _check_summary_text(byteback.summary(byteback.prepare(models.build("resnet20"), "unified-int8")))


def test_brackets_in_a_wildcard_are_printed_as_they_are() -> None:
    """rich reads [a-z] as markup, which would swallow it; [/x] would even be an error."""
    pytest.importorskip("rich")
    model = nn.ModuleDict({"a": nn.Conv2d(3, 3, 1), "b": nn.Conv2d(3, 3, 1), "c": nn.Conv2d(3, 3, 1)})
    byteback.prepare(model, byteback.PlainInt8(first_conv=True), keep_float=["[a-b]"])
    assert str(byteback.summary(model)).count("kept float by '[a-b]'") == 2


def test_summary_is_a_rich_renderable() -> None:
    pytest.importorskip("rich")
    summary = byteback.summary(byteback.prepare(models.build("resnet8", image_size=8), "plain-int8"))
    title, table = summary.__rich__().renderables
    assert "PlainInt8" in title.plain
    assert table.row_count == len(summary) == 8


def test_summary_is_an_html_table_in_a_notebook() -> None:
    model = nn.ModuleDict({"<b>": nn.Conv2d(3, 3, 1), "c": nn.Conv2d(3, 3, 1)})
    byteback.prepare(model, byteback.PlainInt8(first_conv=True), keep_float=["<b>"])
    summary = byteback.summary(model)
    title, header, rows = read_html(summary._repr_html_())
    assert title == str(summary).splitlines()[0]
    assert header == ["layer", "kind", "shape", "block", "note", "output", "grad_input", "grad_weight"]
    assert [row[0] for row in rows] == ["<b>", "c"], "names are escaped"
    assert rows[0][4].startswith("kept float by '<b>'") and rows[1][5:] == ["int8", "int8", "int8"]


class Parts(nn.Module):
    """Every kind of layer, one of them called twice, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.twice, self.norm = nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.grouped, self.up = nn.Conv2d(32, 64, 1, groups=2), nn.ConvTranspose2d(64, 32, 2, 2)
        self.fc, self.unused = nn.Linear(32, 5), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.twice(self.first(x))).relu()
        out: Tensor = self.fc(self.up(self.grouped(self.norm(self.twice(x)).relu())).mean((2, 3)))
        return out


def test_summary_counts_the_multiplications_of_the_last_input() -> None:
    model = byteback.prepare(Parts(), "plain-int8")
    before = byteback.summary(model)
    assert before[0].multiplications is None and math.isnan(before.int8_share()) and "multiplications" not in str(before)
    model(torch.randn(5, 3, 4, 4))
    model.eval()(torch.randn(2, 3, 8, 8))
    found = byteback.summary(model)
    counts = {row.name: row.multiplications for row in found}
    pixels = 2 * 8 * 8
    assert counts == {
        "first": pixels * 32 * 27,
        "twice": 2 * pixels * 32 * 32 * 9,
        "grouped": pixels * 64 * 16,
        "up": pixels * 64 * 32 * 4,
        "fc": 2 * 32 * 5,
        "unused": 0,
    }
    whole = sum(counts.values())
    assert found.int8_share() == pytest.approx((counts["twice"] + counts["grouped"] + counts["up"]) / whole)
    assert found.int8_share(fused=True) == pytest.approx(counts["twice"] / whole)
    assert found.int8_share(fused=True) + found.int8_share(fused=False) == pytest.approx(found.int8_share())
    assert [row.name for row in found.most_to_gain()] == ["first", "fc", "up"]
    share = f"{found.int8_share():.0%} of the multiplications of the last input in int8, {found.int8_share(True):.0%} in blocks"
    assert f"{share}; most to gain: first ({counts['first'] / whole:.1%}), fc" in " ".join(str(found).split())
    assert model.norm.num_batches_tracked == 2, "counting must not run the model itself"
    with byteback.enabled(model, False):
        assert byteback.summary(model).int8_share() == 0.0


def test_summary_counts_nothing_for_inputs_that_are_not_tensors() -> None:
    class OfDict(nn.Sequential):
        def forward(self, x: dict[str, Tensor]) -> Tensor:
            return super().forward(x["x"])  # type: ignore[no-any-return]

    class Looks(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if float(x.sum()) > 0 else -x)  # type: ignore[no-any-return]

    layers = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
    for model, x in ((OfDict(*layers), {"x": torch.ones(1, 3, 8, 8)}), (Looks(*layers), torch.ones(1, 3, 8, 8))):
        byteback.prepare(model, "plain-int8")(x)
        assert byteback.summary(model)[0].multiplications is None
        byteback.restore(model)
