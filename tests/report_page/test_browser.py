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
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    assert outside(page, SIZES[size][0]) == []


@pytest.mark.parametrize("size", list(SIZES))
def test_no_label_of_a_chart_covers_another_or_is_cut(opened: Any, size: str) -> None:
    assert clashes(opened(size)) == []


def clashes(page: Any) -> Any:
    """Labels of charts that are cut, or pairs of which one covers the other."""
    return page.evaluate(
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


def outside(page: Any, width: int) -> Any:
    """What reaches beyond the window."""
    return page.evaluate(
        """width => [...document.querySelectorAll('h1, h2, h3, p, figure, table, select, figure svg, figure svg text')].filter(
             node => { const b = node.getBoundingClientRect(); return b.width && (b.left < -0.5 || b.right > width + 0.5); }
           ).map(node => node.textContent.slice(0, 60))""",
        width,
    )


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


# ---- detectors ----


@pytest.fixture
def detector(opened: Any, make_run: Any) -> Any:
    """detector(size, scheme, **how): the page of a made-up detector."""
    return lambda size="desk", scheme="light", **how: opened(size, scheme, make_run(detect=True, **how))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_a_detectors_page_is_drawn_and_fits(detector: Any, size: str, scheme: str) -> None:
    page = detector(size, scheme)
    assert page.complaints == []
    kinds = page.eval_on_selector_all("figure[data-chart]", "all => all.map(f => f.dataset.chart)")
    assert kinds.count("boxes") == 2 * 3 and kinds.count("precision") == 3 and {"lines", "bars", "heat", "clips"} <= set(kinds)
    assert outside(page, SIZES[size][0]) == [] and clashes(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    assert not page.locator("#gradients").is_visible() and not page.locator("nav [href='#gradients']").is_visible()
    assert "Test mAP" in page.locator("#curve-charts").inner_text()


def drawn(page: Any) -> list[list[int]]:
    """Of every image with boxes: how many are solid, and how many dashed."""
    return page.eval_on_selector_all(
        "figure[data-chart=boxes]",
        "all => all.map(f => [f.querySelectorAll('.box:not(.wrong)').length, f.querySelectorAll('.wrong').length])",
    )


def test_boxes_are_drawn_where_they_are_and_judged(detector: Any) -> None:
    page = detector()
    assert page.locator("#box-score").input_value() == "0.1"  # three boxes of four objects: none is hidden at first
    page.select_option("#box-score", "0.5")
    assert drawn(page) == [[2, 0], [1, 1], [1, 1], [2, 0], [0, 0], [0, 0]]  # truth, float32, unified-int8 of two images
    captions = page.locator("figure[data-chart=boxes] figcaption").all_inner_texts()
    assert "1 of 2 found, 1 wrong" in captions[1] and "0 of 2 found, 0 wrong" in captions[4]
    assert page.locator("#detections-title").inner_text() == (
        "Of 4 objects on these images float32 finds 1 (1 wrong), unified-int8 1 (1)"
    )
    box, image = (page.locator(f"figure[data-chart=boxes] {what}").first.bounding_box() for what in (".box", "image"))
    by = image["width"] / 72
    assert abs(box["x"] - image["x"] - 4 * by) < 2 and abs(box["width"] - 20 * by) < 3
    page.select_option("#box-score", "0.3")
    assert drawn(page)[4:] == [[1, 0], [1, 0]] and "at least 0.3" in page.locator("#detections-note").inner_text()
    page.select_option("#box-seed", "1")
    assert "seed 1" in page.locator("#detections-note").inner_text() and page.complaints == []


def test_images_load_and_boxes_and_curves_tell_their_values(detector: Any) -> None:
    page = detector()
    loads = "i => new Promise(done => { const t = new Image(); t.onload = () => done(t.width); t.src = i.href.baseVal; })"
    assert page.locator("figure[data-chart=boxes] image").first.evaluate(loads) == 72
    page.locator("figure[data-chart=boxes] svg").nth(1).hover()
    assert "score" in page.locator("#tip").inner_text() and "0." in page.locator("#tip").inner_text()
    page.locator("figure[data-chart=precision] svg").first.hover()
    assert "recall" in page.locator("#tip").inner_text() and "float32" in page.locator("#tip").inner_text()
    before = page.locator("figure[data-chart=precision] path.mark-line").last.get_attribute("d")
    page.select_option("#overlap", "50-95")
    assert page.locator("figure[data-chart=precision] path.mark-line").last.get_attribute("d") != before


def test_of_many_classes_one_is_chosen_and_tags_name_them(detector: Any) -> None:
    page = detector("phone", classes=tuple(f"class {i}" for i in range(20)))
    assert page.locator("figure[data-chart=precision]").count() == 2
    page.select_option("#class", label="class 7")
    assert "class 7" in page.locator("figure[data-chart=precision] figcaption").nth(1).inner_text()
    assert "class 0 0.95" in page.locator("figure[data-chart=boxes] .tag").all_text_contents()
    assert page.complaints == [] and page.evaluate("document.documentElement.scrollWidth") <= SIZES["phone"][0]


def test_a_group_without_detections_hides_their_sections(opened: Any, make_run: Any) -> None:
    older = make_run("b", detect=True, model="vgg11")
    for path in older.rglob("detections.json"):
        path.unlink()
    page = opened("desk", "light", make_run("a", detect=True), older)
    assert page.locator("#detections").is_visible()
    page.select_option("#group", label="vgg11 with resnet18")
    assert not page.locator("#detections").is_visible() and not page.locator("#precision").is_visible()
    assert page.complaints == []


def test_names_of_classes_are_shown_as_they_are(detector: Any) -> None:
    wicked = "<img src=x onerror=alert(1)>"
    page = detector("phone", classes=(wicked, "square"))
    assert page.complaints == [] and wicked in page.locator("#box-legend").inner_text() and page.locator("img").count() == 0
