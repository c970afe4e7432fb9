# SPDX-License-Identifier: Apache-2.0
"""The page without a browser: whole, self-contained, escaped, and true to the journals; and errors that name the file."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from byteback.report_page import groups
from byteback.report_page.command import ReportConfig, after_training, run, write
from byteback.report_page.runs import read_run

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Parsed(HTMLParser):
    """Elements and texts of a page; an element that is closed out of turn fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.cells: list[str] = []
        self.scripts: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        named = dict(attrs)
        self.ids += [named["id"]] if named.get("id") else []
        self.links += [str(named[key]) for key in ("src", "href") if key in named]
        for kind, where in (("td", self.cells), ("th", self.cells), ("script", self.scripts)):
            if tag == kind:
                where.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def page_of(*runs: Path) -> tuple[str, Parsed, Any]:
    target = runs[0] / "report.html"
    write(runs, target)
    text = target.read_text(encoding="utf-8")
    parsed = Parsed(text)
    return text, parsed, json.loads(parsed.scripts[0])


def test_a_page_is_whole_and_needs_nothing_beside_it(make_run: Any) -> None:
    text, parsed, data = page_of(make_run())
    assert {"table", "curves", "speed", "numerics", "gradients", "data", "tip"} <= set(parsed.ids)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert all(link.startswith(("#", "data:")) for link in parsed.links)
    assert set(re.findall(r"https?://[^'\" ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "@import" not in text and "{{" not in text
    group = data["groups"][0]
    assert [recipe["name"] for recipe in group["recipes"]] == ["float32", "unified-int8"]
    int8 = group["recipes"][1]
    assert int8["mean"]["epoch"] == [1, 2, 3, 4] and len(int8["seeds"]) == 2
    assert int8["layers"]["names"] == ["layer1.0.conv1", "layer1.0.conv2", "layer1.0.downsample.0"]
    assert [layer["place"] for layer in int8["pictures"]["layers"]][1:] == [
        f"{where}, conv 3x3" for where in ("conv1", "conv2", "downsample")
    ]


def test_the_table_says_what_the_trainer_says(make_run: Any) -> None:
    _, parsed, _ = page_of(make_run())
    at = parsed.cells.index("unified-int8")
    assert parsed.cells[at : at + 10] == [
        *("unified-int8", "2", "95.85 % ± 0.07", "−0.20 ± 0.00", "0.0312", "0.1250", "1,800", "1.80x", "1.1 MB (0.50x)"),
        "1.0 %",
    ]


def test_the_titles_state_the_numbers(make_run: Any) -> None:
    _, _, data = page_of(make_run())
    found = data["groups"][0]["findings"]
    assert found["accuracy"] == "unified-int8 ends 0.20 ± 0.00 points below float32"
    assert (
        found["speed"] == "unified-int8 trains at 1.80 times the speed of float32 and stores 0.50 times its bytes for backward"
    )
    assert "0.012" in found["deviation"] and "layer1.0.downsample.0" in found["deviation"]
    assert "factor is 0.90" in found["learning_rate"]
    assert "27 times smaller" in found["clip"]


def test_names_from_files_cannot_break_out(make_run: Any) -> None:
    wicked = "</script><script>alert(1)</script><b>&\"'"
    text, parsed, data = page_of(make_run(recipes=("float32", wicked), data=f"folder:{wicked}", model=wicked))
    assert len(parsed.scripts) == 2 and "<b>&" not in text and "<script>alert" not in text
    assert data["groups"][0]["recipes"][1]["name"] == wicked and wicked in parsed.cells


def test_runs_of_one_experiment_are_compared_with_each_other(make_run: Any) -> None:
    _, parsed, data = page_of(make_run("a", ("float32",)), make_run("b", ("unified-int8",)))
    assert len(data["groups"]) == 1 and "−0.20 ± 0.00" in parsed.cells


def test_networks_and_repeated_runs_stand_for_themselves(make_run: Any) -> None:
    runs = [make_run("a"), make_run("b", model="vgg11"), make_run("c", model="vgg11", epochs=3), make_run("d")]
    _, _, data = page_of(*runs)
    assert [group["label"] for group in data["groups"]] == ["resnet8 (a)", "resnet8 (d)", "vgg11, 4 epochs", "vgg11, 3 epochs"]


def test_runs_with_other_settings_or_another_recipe_of_the_same_name_are_not_compared(make_run: Any) -> None:
    fast, slow = ({"settings": {"lr": lr, "momentum": 0.9}} for lr in (0.1, 0.001))
    runs = [make_run("a", ("float32",), start_with=fast), make_run("b", ("unified-int8",), start_with=slow)]
    _, _, data = page_of(*runs)
    assert [group["label"] for group in data["groups"]] == ["resnet8, lr 0.1", "resnet8, lr 0.001"]
    other = {"recipe_data": {"norm_memory": "float32"}}
    _, _, data = page_of(make_run("c", seeds=1), make_run("d", ("unified-int8",), 2, start_with=other))
    assert [group["label"] for group in data["groups"]] == ["resnet8 (c)", "resnet8 (d)"]


def test_recipes_stand_as_they_were_asked_for(make_run: Any) -> None:
    folder = make_run(recipes=("z", "float32", "a"), seeds=1)
    members = [{"folder": f"recipe{i}/seed0"} for i in (2, 1, 0)]
    (folder / "summary.json").write_text(json.dumps({"members": members, "command": "byteback train --x '<y>'"}))
    text, _, data = page_of(folder)
    assert [recipe["name"] for recipe in data["groups"][0]["recipes"]] == ["float32", "a", "z"]
    assert "byteback train --x &#x27;&lt;y&gt;&#x27;" in text


def test_a_run_that_is_still_going_shows_what_there_is(make_run: Any) -> None:
    folder = make_run(done=2)
    path = folder / "recipe1/seed1/metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "epo')  # a line that is being written
    fresh = folder / "recipe2/seed0/metrics.jsonl"
    fresh.parent.mkdir(parents=True)
    fresh.write_text("")
    assert write([folder], folder / "report.html") == [f"{fresh} is empty, so there is nothing to show yet"]
    text, parsed, _ = page_of(folder)
    assert "2, epoch 2 of 4" in parsed.cells and "in progress: float32 seed 0 at epoch 2 of 4" in text


def test_a_run_before_its_first_epoch_has_a_page_too(make_run: Any) -> None:
    _, _, data = page_of(make_run(done=0))
    assert data["groups"][0]["findings"]["accuracy"] == "No member has finished an epoch yet"
    assert data["groups"][0]["recipes"][1]["seeds"][0]["begun"] == {"at": [0.2174, 0.4348], "train_loss": [1.5, 1.0]}


def test_a_member_that_diverged_is_said(make_run: Any) -> None:
    folder = make_run(recipes=("float32",))
    lost = make_run("other", ("plain-int8",), done=1, diverged=True)
    text, parsed, _ = page_of(folder, lost)
    assert "diverged: plain-int8 seed 0 in epoch 2, plain-int8 seed 1 in epoch 2" in text
    assert parsed.cells[parsed.cells.index("plain-int8") + 2] == "diverged"


def test_a_run_without_pictures_has_a_page(make_run: Any) -> None:
    folder = make_run()
    for path in folder.rglob("histograms.jsonl"):
        path.unlink()
    _, _, data = page_of(folder)
    assert all(recipe["pictures"] is None for recipe in data["groups"][0]["recipes"])


@pytest.mark.parametrize(
    ("name", "contents", "says"),
    [
        ("metrics.jsonl", b"", "metrics.jsonl is empty"),
        ("metrics.jsonl", b'{"kind": "st', "metrics.jsonl is empty"),
        ("metrics.jsonl", b'{"kind": "epoch", "epoch": 3}\n', "does not start with a complete record of kind `start`"),
        ("metrics.jsonl", b'{"kind": "start"}\n', "no recipe, seed, model"),
        ("metrics.jsonl", b'\xff\xfe\n{"kind": "end"}\n', "metrics.jsonl, line 1, is not a JSON record"),
        ("metrics.jsonl", b"[1, 2]\n", "metrics.jsonl, line 1, is not a JSON record"),
        ("histograms.jsonl", b'{"epoch": \n{}\n', "histograms.jsonl, line 1, is not a JSON record"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(make_run: Any, name: str, contents: bytes, says: str) -> None:
    folder = make_run(recipes=("float32",), seeds=1)
    (folder / "recipe0/seed0" / name).write_bytes(contents)
    with pytest.raises(ValueError, match=re.escape(says)):
        write([folder], folder / "report.html")
    assert not (folder / "report.html").exists()


def test_mistakes_are_explained(make_run: Any, tmp_path: Path) -> None:
    digits, other = make_run("a"), make_run("b", data="cifar10")
    with pytest.raises(ValueError, match=r"different data \(digits in .*a; cifar10 in .*b\)"):
        write([digits, other], tmp_path / "x.html")
    with pytest.raises(ValueError, match=r"there is no folder .*absent"):
        write([tmp_path / "absent"], tmp_path / "x.html")
    with pytest.raises(ValueError, match="is not a run of `byteback train`"):
        write([tmp_path], tmp_path / "x.html")
    with pytest.raises(ValueError, match=r"no folder .*nowhere for the page"):
        write([digits], tmp_path / "nowhere/x.html")
    with pytest.raises(ValueError, match="give the folder of a run"):
        run(ReportConfig(()), Console())


def test_the_command_names_its_page(make_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run()
    run(ReportConfig((str(folder),)), Console())
    assert f"The page is {folder / 'report.html'}" in capsys.readouterr().out


def test_a_page_that_fails_does_not_fail_the_training_before_it(make_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run()
    (folder / "recipe0/seed0/metrics.jsonl").write_bytes(b"damaged\n")
    after_training(folder, Console())
    assert "The report page could not be written" in capsys.readouterr().out


def test_long_runs_are_thinned(make_run: Any) -> None:
    members, _ = read_run(make_run(epochs=200, seeds=1))
    int8 = groups.build(members)[0]["recipes"][1]
    assert len(int8["layers"]["epochs"]) == groups.COLUMNS and int8["layers"]["epochs"][-1] == 200
    assert len(int8["mean"]["epoch"]) == 200  # curves keep every epoch
    assert list(int8["pictures"]["histograms"][0]) == ["0", "50", "100", "149", "199"]
