# SPDX-License-Identifier: Apache-2.0
"""health: the right rows with the right values, printed with rich and without it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import byteback
from byteback import Health, models
from byteback.ops.contract.exponential import exponential
from html_tables import read_html
from small_training import trained

RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]


def test_health_before_any_step_knows_the_weights_only() -> None:
    model = byteback.prepare(models.build("resnet8", image_size=8, in_channels=1), "plain-int8")
    assert {row.role for row in byteback.health(model)} == {"weight"}


@pytest.mark.parametrize("slug", RECIPES)
def test_health_has_every_tensor_once_and_sane_values(slug: str) -> None:
    rows = byteback.health(trained(slug))
    roles = ["input", "grad_output", "weight"] + ["grad_output_for_weight"] * (slug == "distribution-adaptive-int8")
    layers = [f"layer{stage}.0.conv{number}" for stage in (1, 2, 3) for number in (1, 2)]
    assert sorted((row.layer, row.role) for row in rows) == sorted((layer, role) for layer in layers for role in roles)
    for row in rows:
        assert row.clip > 0 and math.isfinite(row.clip), row
        assert 0.0 <= row.saturated <= 0.02, row
        # Rounding to 127 steps bends a direction a little, but never by nothing.
        assert 0.0 < row.deviation < 0.1, row
        assert (row.nonfinite, row.calls) == (0, 1), row


@pytest.mark.parametrize("slug", RECIPES)
def test_health_is_sorted_worst_first(slug: str) -> None:
    deviations = [row.deviation for row in byteback.health(trained(slug))]
    assert deviations == sorted(deviations, reverse=True)
    assert deviations[0] > deviations[-1]


def test_health_reports_phi_of_the_deviation_for_the_unified_recipe() -> None:
    model = trained("unified-int8")
    model.layer2[0].conv1.quantizers.grad_output.observed[0, 1] = 0.05  # exp(-20 · 0.05) = 0.3679
    rows = {(row.layer, row.role): row for row in byteback.health(model)}
    for (_, role), row in rows.items():
        if role == "grad_output":
            assert row.learning_rate_factor == max(exponential(-20.0 * row.deviation), 0.1)
        else:
            assert row.learning_rate_factor is None
    assert rows["layer2.0.conv1", "grad_output"].learning_rate_factor == pytest.approx(0.3679, abs=1e-4)


@pytest.mark.parametrize("slug", ["plain-int8", "distribution-adaptive-int8"])
def test_health_has_no_factor_where_the_recipe_has_no_rule(slug: str) -> None:
    assert all(row.learning_rate_factor is None for row in byteback.health(trained(slug)))


@pytest.mark.parametrize("slug", RECIPES)
def test_health_has_a_gaussian_share_for_magnitude_aware_gradients_only(slug: str) -> None:
    for row in byteback.health(trained(slug)):
        if slug == "distribution-adaptive-int8" and row.role.startswith("grad_output"):
            assert row.gaussian_share is not None and 0.0 <= row.gaussian_share <= 1.0
        else:
            assert row.gaussian_share is None


def test_the_weight_rows_are_measured_now() -> None:
    """A weight of 1, 0.5 and 0.1: clip 1, and integers 127, 64 (63.5 to even) and 13 (12.7)."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(3, 1, 1, bias=False))
    byteback.prepare(model, "plain-int8")
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([1.0, 0.5, 0.1]).reshape(1, 3, 1, 1))
    (row,) = byteback.health(model)
    assert (row.layer, row.role, row.clip, row.saturated) == ("1", "weight", 1.0, 0.0)
    cosine = (127 + 0.5 * 64 + 0.1 * 13) / math.sqrt((1 + 0.25 + 0.01) * (127**2 + 64**2 + 13**2))
    assert row.deviation == pytest.approx(1 - cosine, rel=1e-3)


def test_health_counts_the_calls_of_a_shared_layer() -> None:
    shared = nn.Conv2d(3, 3, 3, padding=1)
    model = byteback.prepare(nn.Sequential(nn.Conv2d(3, 3, 1), shared, nn.ReLU(), shared), "plain-int8")
    model(torch.randn(2, 3, 6, 6)).sum().backward()
    calls = {row.role: row.calls for row in byteback.health(model)}
    assert calls == {"input": 2, "grad_output": 2, "weight": 1}


def test_health_counts_nonfinite_tensors() -> None:
    model = byteback.prepare(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)), byteback.PlainInt8(on_nonfinite="skip"))
    model(torch.randn(2, 3, 4, 4)).sum().backward()
    (model(torch.randn(2, 3, 4, 4)).sum() * float("nan")).backward()
    assert {row.nonfinite for row in byteback.health(model)} == {1}


def test_health_still_reports_when_a_weight_is_nan() -> None:
    """The moment at which one asks for it."""
    model = trained("plain-int8", steps=1)
    with torch.no_grad():
        model.layer1[0].conv1.weight[0, 0, 0, 0] = float("nan")
    row = next(r for r in byteback.health(model) if (r.layer, r.role) == ("layer1.0.conv1", "weight"))
    assert math.isnan(row.clip)


def _check_health_text(health: Health) -> None:
    lines = str(health).splitlines()
    assert lines[0] == f"18 of {len(health)} quantized tensors, largest direction deviation first"
    assert lines[1].split()[:5] == ["layer", "role", "clip", "saturated", "deviation"]
    assert len(lines) == 2 + len(health) == 20
    worst = health[0]
    assert lines[2].split()[:2] == [worst.layer, worst.role]
    assert f"{worst.deviation:.2e}" in lines[2]


def test_health_prints_as_a_table() -> None:
    pytest.importorskip("rich")
    _check_health_text(byteback.health(trained("unified-int8")))


def test_health_prints_without_rich(no_rich: None) -> None:
    _check_health_text(byteback.health(trained("unified-int8")))


def test_health_prints_the_worst_of_a_big_network_only() -> None:
    health = byteback.health(trained("distribution-adaptive-int8"))
    health.shown = 5
    lines = str(health).splitlines()
    assert lines[0].startswith("5 of 24 ") and len(lines) == 7


def test_health_is_an_html_table_in_a_notebook() -> None:
    health = byteback.health(trained("unified-int8"))
    health.shown = 5
    title, header, rows = read_html(health._repr_html_())
    assert title == str(health).splitlines()[0] and header[:5] == ["layer", "role", "clip", "saturated", "deviation"]
    assert [tuple(row[:2]) for row in rows] == [(row.layer, row.role) for row in health[:5]]
    assert rows[0][4] == f"{health[0].deviation:.2e}"
