# SPDX-License-Identifier: Apache-2.0
"""Signals, damaged files and bad input: a clear error, nothing lost, and the other members go on."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from byteback import cli
from byteback.train import checkpoint, config_file, data, interrupt, side_by_side
from byteback.train.config import TrainConfig
from byteback.train.config_file import from_command_line
from byteback.train.data import pictures, scan
from byteback.train.data.from_disk import FromDisk
from byteback.train.detect import coco, voc
from byteback.train.files import read_lines
from byteback.train.variants import Variant, parse

SMALL = ("--no-tensorboard", "--histogram-every", "0", "--batch-size", "720", "--threads", "1")


def train(*args: str) -> tuple[int, str]:
    """`byteback train` within this process: its exit code, and what it prints."""
    console = Console(file=io.StringIO(), width=200, markup=False)
    code = side_by_side.run(from_command_line(args), console)
    return code, console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    train(*SMALL, "--epochs", "2", "--recipe", "plain-int8", "float32", "--output-dir", str(run))
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a run in which no member has ended."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for metrics in run.glob("*/seed0/metrics.jsonl"):
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    return run


def ends(run: Path) -> list[str]:
    return [read_lines(file)[-1].get("state_sha256", "") for file in sorted(run.glob("*/seed0/metrics.jsonl"))]


# ---- signals ----


def picture_folder(root: Path, images: int = 48) -> Path:
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(images):
        place = root / ("val" if number % 8 > 5 else "train") / ("cat" if number % 2 else "dog") / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (12, 12, 3), dtype=np.uint8)).save(place)
    return root


def test_a_signal_to_the_whole_group_saves_and_says_so(tmp_path: Path) -> None:
    """As a job scheduler sends it: the workers get it too. Again while it is on its way, as torchrun passes it on."""
    folder = picture_folder(tmp_path / "pictures", 96)
    args = ("--data", f"folder:{folder}", "--image-size", "32", "--batch-size", "4", "--epochs", "500", "--workers", "2")
    command = [sys.executable, "-m", "byteback", "train", *SMALL[:3], *args, "--recipe", "plain-int8", "--model", "resnet8"]
    process = subprocess.Popen(
        [*command, "--threads", "1", "--log-every", "1", "--output-dir", "run"],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path, "start_new_session": True},
    )
    metrics = tmp_path / "run" / "plain-int8" / "seed0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size > 6000):
        time.sleep(0.01)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGTERM)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, error
    assert "received SIGTERM; training stops after this step" in error and "Traceback" not in error
    assert "byteback train --resume run" in out
    last = checkpoint.load(metrics.with_name("last.pt"))["progress"]["step"]
    assert last >= max(record["step"] for record in read_lines(metrics) if record["kind"] == "step") > 0


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_each_signal_asks_for_a_checkpoint_and_ends_with_its_number(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with interrupt.Stop() as stop:
        with pytest.raises(SystemExit) as ended:  # nothing to save yet
            os.kill(os.getpid(), number)
        assert ended.value.code == 128 + number
        with stop.training():
            for _ in range(3):  # the same request
                os.kill(os.getpid(), number)
            assert f"received {name}" in capfd.readouterr().err
            with pytest.raises(interrupt.Stopped) as stopped:
                stop.check()
    assert stopped.value.code == 128 + number and signal.getsignal(number) == before


def test_only_a_later_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    with interrupt.Stop(speaks=False) as stop, stop.training():
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] = 5.0
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler that repeats itself
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


class _Endless(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, pid: Path) -> None:
        self.pid = pid

    def __len__(self) -> int:
        return 100

    def __getitem__(self, key: tuple[int, int, int]) -> int:
        if not self.pid.exists():
            self.pid.write_text(str(os.getpid()))
        return key[2]


def test_a_worker_that_was_killed_is_an_error_that_says_so(tmp_path: Path) -> None:
    source = FromDisk(_Endless(tmp_path / "pid"), 1, list)
    batches = source.batches(list(torch.arange(100).split(2)), 0, 0)
    next(batches)
    worker = int((tmp_path / "pid").read_text())
    os.kill(worker, signal.SIGTERM)  # is ignored
    next(batches)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(data.DataError, match="has died"):
        list(batches)


# ---- the same command again; damaged files of a run ----


def test_resume_auto_starts_goes_on_and_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = (*SMALL, "--epochs", "1", "--recipe", "plain-int8", "--resume", "auto")
    for said in ("plain-int8 seed 0  epoch 1/1", "plain-int8 seed 0 is already finished"):
        code, out = train(*command)
        assert code == 0 and said in out
    assert os.listdir("runs") == ["digits-resnet8"]
    assert "float32 seed 0  epoch 1/1" in train(*command, "--recipe", "float32")[1]
    with pytest.raises(ValueError, match=r"started with lr = 0\.1"):
        from_command_line([*command, "--lr", "0.3"])
    file = tmp_path / "run.toml"
    file.write_text("epochs = 1\n")
    assert from_command_line(["--config", str(file), "--resume", "auto", "--output-dir", "new"]).resume is None


def test_a_damaged_checkpoint_falls_back_to_the_one_before_it(finished: Path, run: Path) -> None:
    last, previous = (run / "plain-int8" / "seed0" / name for name in ("last.pt", "previous.pt"))
    whole = last.read_bytes()
    assert checkpoint.load(previous)["progress"]["step"] <= checkpoint.load(last)["progress"]["step"]
    earlier = checkpoint.load(previous)
    earlier["progress"].update(epoch=0, step=0)
    last.write_bytes(whole[:-500])
    code, out = train("--resume", str(run))
    assert code == 0 and "last.pt: the checkpoint is damaged" in out and "Going on from the checkpoint before it" in out
    assert ends(run) == ends(finished)


def test_a_member_without_a_readable_checkpoint_does_not_stop_the_others(finished: Path, run: Path) -> None:
    for name in ("last.pt", "previous.pt"):
        (run / "plain-int8" / "seed0" / name).write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"(?s)1 of 2 members in .* could not go on.*previous\.pt: the checkpoint is damaged"):
        train("--resume", str(run))
    assert ends(run)[0] == ends(finished)[0], "float32 was trained to its end"
    assert (run / "plain-int8" / "seed0" / "last.pt").read_bytes() == b"nothing"


@pytest.mark.parametrize("how", ["deleted", "cut", "no records"])
def test_a_damaged_journal_is_an_error_of_its_member(how: str, run: Path) -> None:
    metrics = run / "plain-int8" / "seed0" / "metrics.jsonl"
    metrics.write_bytes({"deleted": b"", "cut": metrics.read_bytes()[:200], "no records": b"[1]\n7\n\xff\n"}[how])
    if how == "deleted":
        metrics.unlink()
    with pytest.raises(ValueError, match=r"1 of 2 members.*\n.*metrics\.jsonl has .* the file was truncated"):
        train("--resume", str(run))


class _Hostile:
    def __reduce__(self) -> object:
        return os.system, ("touch hostile-code-ran",)


def test_a_hostile_checkpoint_is_called_so_and_not_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pt"
    torch.save({"progress": _Hostile()}, path)
    with pytest.raises(ValueError, match=r"contains the Python object posix\.system.*could run code") as error:
        checkpoint.load(path)
    assert "weights_only" not in str(error.value) and not Path("hostile-code-ran").exists()
    path.write_bytes(pickle.dumps({"progress": _Hostile()}))
    with pytest.raises(ValueError) as error:
        checkpoint.load(path)
    assert "weights_only" not in str(error.value) and not Path("hostile-code-ran").exists()


@pytest.mark.parametrize("name", ["config", "random", "lengths", "progress", "optimizer", "format"])
def test_a_checkpoint_without_a_field_is_not_complete(name: str, run: Path, tmp_path: Path) -> None:
    contents = checkpoint.load(run / "plain-int8" / "seed0" / "last.pt")
    for changed in ({key: value for key, value in contents.items() if key != name}, {**contents, name: 7.5}):
        torch.save(changed, tmp_path / "x.pt")
        with pytest.raises(ValueError, match=rf"x\.pt: .*{name}"):
            checkpoint.load(tmp_path / "x.pt")
    contents["progress"]["steps"] = 1
    torch.save(contents, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"x\.pt: its progress has other fields"):
        checkpoint.load(tmp_path / "x.pt")


def test_a_flipped_bit_in_the_weights_of_a_backbone_is_found(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    weight = torch.randn(64)
    torch.save({"conv.weight": weight}, path)
    whole = bytearray(path.read_bytes())
    whole[whole.index(weight.numpy().tobytes()) + 5] ^= 0x10
    path.write_bytes(whole)
    assert zipfile.is_zipfile(path)
    with pytest.raises(ValueError, match=r"weights\.pt: the checkpoint is damaged.*checksum"):
        checkpoint.read(path)
    old = tmp_path / "resnet18-0123abcd.pth"  # without checksums; PyTorch puts one into the name
    torch.save({"conv.weight": weight}, old, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"its name says 0123abcd"):
        checkpoint.read(old)
    torch.testing.assert_close(checkpoint.read(old.rename(tmp_path / "old.pth"))["conv.weight"], weight, rtol=0, atol=0)


def test_the_folder_of_a_member_that_vanishes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    save = checkpoint.save

    def vanished(path: Path, contents: dict[str, object]) -> None:
        shutil.rmtree(path.parent)
        save(path, contents)

    monkeypatch.setattr(checkpoint, "save", vanished)
    with pytest.raises(OSError, match=r"(best|last)\.pt could not be written .*No such file"):
        train(*SMALL, "--epochs", "1", "--recipe", "float32", "--output-dir", str(run))


# ---- names, flags and paths ----


def test_every_recipe_has_a_folder_of_its_own_within_the_run() -> None:
    names = ["a/b", "a_b", "..", ".", "a+b", "a:b=1", "a:b=1,c=2", "a:b=1+c=2", "a%2Fb", "a\\b", "...", "a,b"]
    folders = [Variant(name, None).folder for name in names]
    assert len(set(folders)) == len(names)
    for folder in folders:
        assert (Path("run") / folder).resolve().parent == Path("run").resolve() and not folder.startswith(".")
    for name in ("", "x" * 300):
        with pytest.raises(ValueError, match=r"Choose a name of 1 to"):
            parse(name, {name: {"base": "plain-int8"}})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"threads": 100_000}, "--threads is 100000; it must be between 1 and"),
        ({"momentum": 1.5}, "--momentum is 1.5; it must be less than 1"),
        ({"lr_gamma": -0.5}, "--lr-gamma is -0.5; it must be positive"),
        ({"warmup_epochs": 3.0, "epochs": 2}, "--warmup-epochs is 3, but the training has 2"),
        ({"output_dir": ""}, "--output-dir is empty"),
        ({"resume": ""}, "--resume is empty"),
    ],
)
def test_values_that_cannot_train_are_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as error:
        TrainConfig(**change).complete()  # type: ignore[arg-type]
    assert says in str(error.value)


def test_a_path_with_brackets_is_printed_and_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """rich would take [/x] for the end of a style, and raise."""
    monkeypatch.chdir(tmp_path)
    args = ("train", *SMALL, "--epochs", "1", "--recipe", "float32", "--output-dir", "a[b][/x]")
    monkeypatch.setattr(sys, "argv", ["byteback", *args])
    with monkeypatch.context() as patch, warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)  # main writes its own
        cli.main()
    assert ended.value.code == 0 and "in a[b][/x]" in capsys.readouterr().out
    path = tmp_path / "a[b][" / "x]" / "float32" / "seed0" / "last.pt"
    from byteback.train.evaluate import EvalConfig
    from byteback.train.evaluate import run as evaluate

    with pytest.raises(ValueError, match=r"eval: .* was trained for --task classify, which does not work with --data voc:/x"):
        evaluate(EvalConfig(str(path), data="voc:/x"), Console(file=io.StringIO()))


def test_eval_on_other_data_takes_all_of_it(tmp_path: Path) -> None:
    contents = {"train_images": 1000, "data": "digits"}
    config = TrainConfig(**contents)  # type: ignore[arg-type]
    begun = config_file.parse(config_file.to_text(config.complete()), Path("x"))
    assert begun.train_images == 1000
    run = tmp_path / "run"
    train(*SMALL, "--epochs", "1", "--recipe", "float32", "--train-images", "800", "--output-dir", str(run))
    from byteback.train.evaluate import EvalConfig
    from byteback.train.evaluate import run as evaluate

    console = Console(file=io.StringIO())
    folder = picture_folder(tmp_path / "pictures")
    with pytest.raises(ValueError, match=r"^eval: .*was trained on 10 classes, but folder:.* has 2 classes"):
        evaluate(EvalConfig(str(run / "float32" / "seed0" / "last.pt"), data=f"folder:{folder}"), console)


# ---- images ----


def test_16_bits_per_channel_are_not_white(tmp_path: Path) -> None:
    from PIL import Image

    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "x.png")
    read = np.asarray(pictures.read(tmp_path / "x.png"))
    assert read.shape == (8, 8, 3) and np.array_equal(read[:, :, 0], values >> 8)
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "x.tiff")
    assert "floating-point" in pictures.problem(tmp_path / "x.tiff")


def test_a_scan_names_every_bad_image_and_may_leave_them_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = picture_folder(tmp_path / "pictures")
    cut, empty, huge = (folder / "train" / "dog" / name for name in ("0.png", "4.png", "8.png"))
    cut.write_bytes(cut.read_bytes()[:200])
    empty.write_bytes(b"")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)  # Pillow refuses twice as many
    Image.new("RGB", (30, 30)).save(huge)
    with pytest.raises(ValueError, match=r"3 of 48 images cannot be read") as error:
        data.load(f"folder:{folder}", image_size=8)
    for path in (cut, empty, huge):
        assert str(path) in str(error.value)
    assert "--skip-bad-images" in str(error.value)
    asked: list[int] = []
    monkeypatch.setattr(scan, "_scanned", lambda _, paths, __: asked.append(len(paths)) or [""] * len(paths))
    assert len(data.load(f"folder:{folder}", image_size=8, skip_bad_images=True).train) == 36 - 3
    assert asked == [], "what the first scan found was kept"
    Image.new("RGB", (4, 4)).save(empty)
    assert len(data.load(f"folder:{folder}", image_size=8, skip_bad_images=True).train) == 36 - 2 and asked == [1]


def test_an_image_that_is_damaged_during_training_loses_nothing(tmp_path: Path) -> None:
    folder = picture_folder(tmp_path / "pictures", 16)
    images = data.load(f"folder:{folder}", image_size=8)
    (folder / "train" / "dog" / "0.png").write_bytes(b"")
    with pytest.raises(data.DataError, match=r"0\.png cannot be read.* Restore it, then continue with --resume"):
        list(images.train.batches([torch.arange(12)], 0, 0))


# ---- files of others ----


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[" * 100_000, b'{"images": ' + b"9" * 5000 + b"}", b"[1]"])
def test_a_broken_file_of_coco_is_named(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    for split in ("train", "val"):
        (tmp_path / "annotations" / f"instances_{split}.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"instances_train\.json"):
        coco.load(tmp_path)


def test_a_broken_list_of_voc_and_a_broken_config_are_named(tmp_path: Path) -> None:
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (tmp_path / part).mkdir(parents=True)
    for split in ("train", "val"):
        (tmp_path / "ImageSets" / "Main" / f"{split}.txt").write_bytes(b"\xe9t\xe9\n")
    with pytest.raises(ValueError, match=r"train\.txt: this is not text in UTF-8"):
        voc.load(tmp_path)
    file = tmp_path / "run.toml"
    for text in (b"a = \xff", b"epochs = " + b"9" * 5000, b"recipe = 7", b"x = " + b"[" * 50_000):
        file.write_bytes(text)
        with pytest.raises(ValueError, match=r"run\.toml: "):
            config_file.read(file)
