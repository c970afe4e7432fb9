# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser, at the size of a phone and of a desk, by day and by night.

Needs Playwright (in the dev extra) and a Chromium, Chrome or Edge that is already there; without them these tests are skipped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from byteback.report_page.command import write

playwright = pytest.importorskip("playwright.sync_api", reason="the page is not looked at: pip install playwright")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
SIZES = {"phone": (360, 740), "desk": (1280, 900)}
KINDS = {"lines", "bars", "heat", "clips", "histogram", "dots", "ranks"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        own = started.chromium.executable_path
        found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), own if Path(own).exists() else None)
        if found is None:
            pytest.skip("the page is not looked at: no Chromium or Chrome on PATH, and $CHROMIUM names none")
        # Without a sandbox it also runs as root and in containers; it only ever opens our own page.
        running = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def opened(browser: Any, make_run: Any) -> Iterator[Any]:
    """opened(size, scheme, *runs): the page of those runs, with everything it complained about in `complaints`."""
    contexts = []

    def open_page(size: str = "desk", scheme: str = "light", *runs: Path) -> Any:
        runs = runs or (make_run(),)
        write(runs, runs[0] / "report.html")
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.complaints = []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or page.complaints.append(request.url))
        page.goto((runs[0] / "report.html").resolve().as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_every_chart_is_drawn_and_nothing_leaves_the_page(opened: Any, size: str, scheme: str) -> None:
    page = opened(size, scheme)
    assert page.complaints == []
    charts = page.eval_on_selector_all(
        "figure[data-chart]", "all => all.map(f => [f.dataset.chart, f.querySelectorAll('.mark').length, f.innerText])"
    )
    assert {kind for kind, _, _ in charts} == KINDS
    assert [chart for chart in charts if not chart[1]] == []
    width = SIZES[size][0]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        """width => [...document.querySelectorAll('h1, h2, h3, p, figure, table, select, figure svg, figure svg text')].filter(
             node => { const b = node.getBoundingClientRect(); return b.width && (b.left < -0.5 || b.right > width + 0.5); }
           ).map(node => node.textContent.slice(0, 60))""",
        width,
    )
    assert outside == []


@pytest.mark.parametrize("size", list(SIZES))
def test_no_label_of_a_chart_covers_another_or_is_cut(opened: Any, size: str) -> None:
    clashes = opened(size).evaluate(
        """() => [...document.querySelectorAll('figure svg')].flatMap(svg => {
             const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
             const frame = svg.getBoundingClientRect();
             const cut = texts.filter(([, b]) =>
               b.left < frame.left - 1 || b.right > frame.right + 1 || b.bottom > frame.bottom + 1);
             const meet = (a, b) =>
               a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4;
             const pairs = texts.flatMap(([s, a], i) =>
               texts.slice(i + 1).filter(([, b]) => meet(a, b)).map(([t]) => `${s} | ${t}`));
             return [...cut.map(([t]) => `cut: ${t}`), ...pairs];
           })"""
    )
    assert clashes == []


def test_day_and_night_differ(opened: Any, make_run: Any) -> None:
    run = make_run()
    seen = [
        opened("desk", scheme, run).evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        for scheme in ("light", "dark")
    ]
    assert seen[0][0] != seen[1][0] and seen[0][1] != seen[1][1]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_pointing_shows_a_value(opened: Any, kind: str) -> None:
    page = opened()
    chart = page.locator(f"figure[data-chart={kind}] svg").first
    chart.scroll_into_view_if_needed()
    assert not page.locator("#tip").is_visible()
    chart.hover()
    shown = page.locator("#tip").inner_text()
    assert any(letter.isdigit() for letter in shown), shown
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= SIZES["desk"][0]


def test_touch_and_keyboard_show_values_too(opened: Any) -> None:
    page = opened("phone")
    chart = page.locator("figure[data-chart=lines] svg").first
    chart.scroll_into_view_if_needed()
    chart.dispatch_event("pointerdown", {"pointerType": "touch", "clientX": 200, "clientY": 300, "bubbles": True})
    assert "epoch" in page.locator("#tip").inner_text()
    page.locator("h1").click()
    assert not page.locator("#tip").is_visible()
    page.keyboard.press("Tab")
    chart.focus()
    assert "epoch 1" in page.locator("#tip").inner_text()
    page.keyboard.press("ArrowRight")
    assert "epoch 2" in page.locator("#tip").inner_text() and "unified-int8" in page.locator("#tip").inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()


def test_choices_redraw_the_charts(opened: Any, make_run: Any) -> None:
    page = opened("desk", "light", make_run("a"), make_run("b", model="vgg11"))
    page.select_option("#group", label="vgg11")
    assert page.locator("#facts").inner_text().startswith("vgg11")
    page.select_option("#picture-layer", "layer1.0.conv1")
    page.select_option("#picture-scale", "linear")
    page.select_option("#role", "weight")
    assert "layer1.0.conv1" in page.locator("#gradient-charts h3").first.inner_text()
    assert "clip of the weight" in page.locator("#clip-charts").inner_text()
    assert page.complaints == []


def test_runs_that_have_hardly_begun_are_drawn_without_complaint(opened: Any, make_run: Any) -> None:
    for page in (
        opened("phone", "light", make_run("a", done=0)),
        opened("phone", "dark", make_run("b", ("x",), done=1, seeds=1)),
    ):
        assert page.complaints == [] and page.locator("#curve-charts .mark").count()


def test_names_are_shown_as_they_are(opened: Any, make_run: Any) -> None:
    wicked = "<img src=x onerror=alert(1)>"
    page = opened("phone", "light", make_run(recipes=("float32", wicked), model=wicked))
    assert page.complaints == [] and wicked in page.locator(".legend").first.inner_text()
    assert page.locator("img").count() == 0
