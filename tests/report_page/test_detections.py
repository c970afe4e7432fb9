# SPDX-License-Identifier: Apache-2.0
"""The page of detectors without a browser: what it takes from detections.json, and what it says of a file that is none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from byteback.report_page import groups
from byteback.report_page.command import write
from byteback.report_page.runs import read_run

SECTIONS = ('id="detections"', 'id="precision"')


def group_of(*runs: Path) -> dict[str, Any]:
    return groups.build([member for run in runs for member in read_run(run)[0]])[0]


def text_of(run: Path) -> str:
    write([run], run / "report.html")
    return (run / "report.html").read_text(encoding="utf-8")


def test_a_group_has_what_its_members_found(make_run: Any) -> None:
    seen = group_of(make_run(detect=True, data="voc:/somewhere/BCCD"))["detection"]
    assert seen["classes"] == ["disc", "square"] and seen["seeds"] == [0, 1] and seen["recipes"] == ["float32", "unified-int8"]
    assert [image["name"] for image in seen["images"]] == ["a.jpg", "b.jpg"] and len(seen["images"][0]["truth"]) == 2
    assert [[member["seed"] for member in own] for own in seen["members"]] == [[0, 1], [0, 1]]
    assert [len(found) for found in seen["members"][1][0]["found"]] == [2, 1] and seen["members"][1][0]["epochs"] == 4
    every, disc, square = seen["precision"][0]["50"]
    assert disc[0] == 1.0 and square[0] == 0.9 and every[0] == 0.95 and len(every) == 101
    assert seen["precision"][0]["50-95"][0][0] == 0.475


def test_the_table_has_every_score_of_every_recipe(make_run: Any) -> None:
    run = make_run(detect=True, data="voc:/somewhere/BCCD")
    text = text_of(run)
    for label, shown in (
        ("<b>mAP</b>", "96.05 % ± 0.07"),
        ("<b>AP50</b>", "98.05 % ± 0.07"),
        ("AP of square", "86.05 % ± 0.07"),
    ):
        row = text[text.index(f'<th scope="row">{label}') :].partition("</tr>")[0]
        assert shown in row and 'data-label="unified-int8"' in row, (label, row)
    assert all(section in text for section in SECTIONS)
    assert "<h1>resnet8 with resnet18 on BCCD</h1>" in text
    assert 'data-label="mAP">95.85 % ± 0.07' in text and "test loss" not in text.partition("<script")[0]


def test_the_titles_state_the_scores(make_run: Any) -> None:
    found = group_of(make_run(detect=True))["findings"]
    assert found["accuracy"] == "unified-int8 ends 0.20 ± 0.00 points below float32"
    assert found["precision"] == (
        "The average precision at an overlap of 50 % is 98.05 % in float32 and 97.85 % in unified-int8"
    )


def test_other_pages_have_nothing_of_it(make_run: Any) -> None:
    text = text_of(make_run())
    assert not any(section in text for section in SECTIONS) and "#detections" not in text and "boxChart" not in text


def test_an_older_run_has_a_page_without_the_sections(make_run: Any) -> None:
    run = make_run(detect=True)
    for path in run.rglob("detections.json"):
        path.unlink()
    text = text_of(run)
    assert not any(section in text for section in SECTIONS) and 'data-label="mAP"' in text


def test_what_only_some_members_wrote_is_shown(make_run: Any) -> None:
    run = make_run(detect=True)
    for path in run.glob("recipe1/seed*/detections.json"):
        path.unlink()
    seen = group_of(run)["detection"]
    assert [len(own) for own in seen["members"]] == [2, 0] and seen["precision"][1] is None
    assert all(section in text_of(run) for section in SECTIONS)


def test_a_class_without_objects_has_no_curve(make_run: Any) -> None:
    run = make_run(detect=True)
    for path in run.rglob("detections.json"):
        change(path, lambda record: record["precision"].update({"50": [record["precision"]["50"][0], None]}))
    every, _, square = group_of(run)["detection"]["precision"][0]["50"]
    assert square is None and every[0] == 1.0


def test_a_seed_that_diverged_is_in_no_mean(make_run: Any) -> None:
    lost = make_run("lost", ("plain-int8",), done=2, diverged=True, detect=True)
    seen = group_of(make_run("a", detect=True), lost)["detection"]
    assert seen["recipes"][2] == "plain-int8" and seen["precision"][2] is None and len(seen["members"][2]) == 2
    assert seen["scores"][0]["recipes"][2] is None


def change(path: Path, how: Any) -> None:
    record = json.loads(path.read_text())
    how(record)
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda r: r.pop("images"), "detections.json is damaged (KeyError"),
        (lambda r: r.pop("format"), "detections.json is damaged (KeyError"),
        (lambda r: r.update(images=None), "detections.json is damaged (TypeError"),
        (lambda r: r["images"][0].update(jpeg="<svg/>"), "detections.json is damaged"),
        (lambda r: r["images"][0].update(jpeg="aaaa"), "an image that is no JPEG"),
        (lambda r: r["images"][0]["found"][0].update(label=3), "a box"),
        (lambda r: r["images"][0]["truth"][0].update(box=[1, 2, 3]), "a box"),
        (lambda r: r["images"][0]["found"][0].update(score="high"), "a score"),
        (lambda r: r["precision"].update({"50": [[0.5], None]}), "precision"),
        (lambda r: r.update(format=2), "has format 2, but this version reads 1. Update byteback"),
        (lambda r: r.update(classes=["square", "disc"]), "has other classes than"),
    ],
)
def test_a_file_that_is_none_is_named(make_run: Any, how: Any, says: str) -> None:
    run = make_run(detect=True)
    path = run / "recipe1/seed1/detections.json"
    change(path, how)
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        write([run], run / "report.html")
    assert str(path) in str(error.value) and not (run / "report.html").exists()


def test_half_a_file_is_named(make_run: Any) -> None:
    run = make_run(detect=True)
    path = run / "recipe0/seed0/detections.json"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"seed0/detections\.json is damaged \(JSONDecodeError"):
        write([run], run / "report.html")


def test_names_of_classes_and_images_cannot_break_out(make_run: Any) -> None:
    wicked = "</script><img src=x onerror=alert(1)>"
    run = make_run(detect=True, classes=(wicked, "square"))
    for path in run.rglob("detections.json"):
        change(path, lambda record: record["images"][0].update(name=wicked))
    assert "<img" not in text_of(run)
