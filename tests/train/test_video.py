# SPDX-License-Identifier: Apache-2.0
"""Video: a step has the same bits on every path, data are a function of seed, epoch and index, and errors name the file."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import byteback
from byteback.ops.backends import paths
from byteback.train import data, layout, networks, video_networks
from byteback.train.checkpoints.files import read_lines
from byteback.train.config import TrainConfig
from byteback.train.data import clip_files, draws
from byteback.train.data.moving_items import DIRECTIONS, MovingItems

NATIVE = [path for path in paths.available() if path != "reference"]


def write_fashion(root: Path, train: int = 40, test: int = 12) -> None:
    """A Fashion-MNIST of random items, in the files that torchvision reads."""
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in (("train", train), ("t10k", test)):
        size = count.to_bytes(4, "big")
        pixels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + size + 2 * b"\0\0\0\x1c" + pixels.tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + size + bytes(count))


@pytest.fixture(scope="module")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fashion")
    write_fashion(root)
    return root


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of six clips, each a folder of 7 frames whose brightness is their number."""
    from PIL import Image

    root = tmp_path_factory.mktemp("frames")
    for name in ("walk", "run"):
        for clip in range(6):
            folder = root / name / f"clip{clip}"
            folder.mkdir(parents=True)
            for number in range(7):
                shade = np.full((24, 30, 3), 10 * number + clip, dtype=np.uint8)
                Image.fromarray(shade).save(folder / f"{number:03}.png")
    return root


# ---- a step ----


def steps(name: str, recipe: str, count: int = 2) -> list[Tensor]:
    """Losses and weights of a few steps of a network for clips."""
    torch.manual_seed(0)
    model = layout.lay_out(networks.build(name, 32, 4, 3, 4), channels_last=True)
    byteback.prepare(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    byteback.scale_learning_rates(optimizer, model)
    found = []
    for _ in range(count):
        loss = F.cross_entropy(model(layout.as_asked(torch.randn(2, 3, 4, 32, 32), 3, True)), torch.tensor([1, 3]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.skipif(not NATIVE, reason="this build has no native library")
@pytest.mark.parametrize("recipe", ["unified-int8", "distribution-adaptive-int8"])
@pytest.mark.parametrize("name", ["r3d_8", "tsn:resnet8"])
def test_a_step_of_video_has_the_same_bits_on_every_path(name: str, recipe: str) -> None:
    with byteback.path("reference"):
        expected = steps(name, recipe)
    for path in NATIVE:
        with byteback.path(path):
            for ours, theirs in zip(steps(name, recipe), expected, strict=True):
                assert torch.equal(ours, theirs), path


@pytest.mark.parametrize("name", ["r3d_8", "r3d_18", "mc3_18", "r2plus1d_18"])
def test_every_convolution_of_a_network_for_video_is_in_a_block(name: str) -> None:
    model = networks.build(name, 32, 4, 3, 8)
    byteback.prepare(model, "unified-int8")
    rows = [row for row in byteback.summary(model) if "Conv3" in row.kind]
    assert all("norm" in row.block for row in rows), [row.name for row in rows if "norm" not in row.block]
    assert sum(row.output == "int8" for row in rows) == len(rows) - 1, "all but the first are int8"


def test_segments_average_the_logits_of_frames_and_do_not_see_their_order() -> None:
    torch.manual_seed(0)
    model = networks.build("tsn:resnet8", 16, 4, 1, 3).eval()
    clip = torch.randn(2, 1, 3, 16, 16)
    with torch.no_grad():
        single = torch.stack([model.network(clip[:, :, t]) for t in range(3)]).mean(dim=0)  # type: ignore[operator]
        torch.testing.assert_close(model(clip), single)
        torch.testing.assert_close(model(clip.flip(2)), single)
        torch.testing.assert_close(model(clip.contiguous(memory_format=torch.channels_last_3d)), single)


# ---- moving items ----


def test_items_move_as_their_labels_say() -> None:
    items = torch.zeros(64, 14, 14, dtype=torch.uint8)
    items[:, 0, 0] = 255
    still = MovingItems(items, 0, 6, 32, 0.0, 1.0, augment=False)
    clips = 4.0 * still.take(torch.arange(64), 0, 0)[:, 0] - 3.0 * still._noise(torch.arange(64), 0, 0).float()
    for clip, label, speed in zip(clips, still.labels, still.speed, strict=True):
        places = [divmod(int(frame.argmax()), 32) for frame in clip]
        for before, after in itertools.pairwise(places):
            moved = tuple((a - b) % 32 for a, b in zip(after, before, strict=True))
            assert moved == tuple(int(speed) * axis % 32 for axis in DIRECTIONS[int(label)])
    assert set(still.labels.tolist()) == {0, 1, 2, 3} and set(still.speed.tolist()) == {1, 2, 3}


def test_moving_items_are_a_function_of_seed_epoch_and_index(fashion: Path) -> None:
    made = [data.load("moving-items", str(fashion), image_size=20, frames=5) for _ in range(2)]
    assert (made[0].classes, made[0].channels, made[0].frames, len(made[0].train), len(made[0].test)) == (4, 1, 5, 40, 12)
    chosen = [torch.tensor([3, 9, 30])]
    ((clips, labels),), ((same, others),) = (list(one.train.batches(chosen, 1, 2)) for one in made)
    assert clips.shape == (3, 1, 5, 20, 20) and torch.equal(clips, same) and torch.equal(labels, others)
    ((alone, _),) = made[0].train.batches([torch.tensor([9])], 1, 2)
    assert torch.equal(alone[0], clips[1]), "a clip depends on its neighbours"
    for seed, epoch in ((1, 3), (2, 2)):
        ((moved, kept),) = made[0].train.batches(chosen, seed, epoch)
        assert not torch.equal(moved, clips) and torch.equal(kept, labels)
    ((first, _),), ((second, _),) = (list(made[0].test.batches([torch.arange(12)], seed, 0)) for seed in (0, 1))
    assert torch.equal(first, second), "the test is the same for every seed"
    ((every, _),) = made[0].train.batches([torch.arange(40)], 0, 0)
    assert abs(float(every.mean())) < 0.05 and abs(float(every.std()) - 1.0) < 0.05


# ---- clips on disk ----


def taken(root: Path, workers: int, epoch: int = 1, **options: int) -> list[tuple[Tensor, Tensor]]:
    found = data.load(f"frames:{root}", image_size=16, workers=workers, **{"frames": 3, "frame_stride": 2, **options})
    return list(found.train.batches(draws.batches(3, epoch, len(found.train), 4), 3, epoch))


def test_clips_of_frames_are_the_same_for_any_number_of_workers(frames: Path) -> None:
    alone, together = taken(frames, 0), taken(frames, 2)
    assert [len(labels) for _, labels in alone] == [4, 4, 2], "every fifth clip of a class is for the test"
    for (clips, labels), (others, same) in zip(alone, together, strict=True):
        assert clips.shape[1:] == (3, 3, 16, 16) and clips.is_contiguous(memory_format=torch.channels_last_3d)
        assert torch.equal(clips, others) and torch.equal(labels, same)
    assert any(not torch.equal(a, b) for (a, _), (b, _) in zip(alone, taken(frames, 0, epoch=2), strict=True))


def test_frames_come_in_order_with_their_stride(frames: Path) -> None:
    found = data.load(f"frames:{frames}", image_size=16, frames=3, frame_stride=2, augment=False)
    ((clips, labels),) = found.test.batches([torch.tensor([0, 1])], 0, 0)
    assert labels.tolist() == [0, 1] and found.classes == 2
    mean, std = 0.43216, 0.22803
    shades = (clips[:, 0, :, 8, 8] * std + mean) * 255
    torch.testing.assert_close(shades, torch.tensor([[11.0, 31.0, 51.0]] * 2), atol=0.5, rtol=0)  # frames 1, 3, 5 of clip 1


def test_a_table_names_sheets_of_frames(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "clips").mkdir()
    lines = ["file,label,class"]
    for number in range(4):
        cells = np.arange(16, dtype=np.uint8).reshape(4, 1, 4, 1, 1) * 10 + number
        sheet = np.broadcast_to(cells, (4, 8, 4, 10, 3)).reshape(32, 40, 3)
        Image.fromarray(sheet).save(tmp_path / "clips" / f"{number}.png")
        lines.append(f"clips/{number}.png,{number % 2},{'fight' if number % 2 else 'calm'}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    listing = clip_files.find("clips", tmp_path)
    assert listing.classes == ["calm", "fight"] and [len(listing.train), len(listing.test)] == [2, 2]
    pixels = clip_files.read(tmp_path / "clips" / "3.png", 16, 1, None)
    assert pixels.shape == (16, 8, 10, 3)
    assert [int(pixel) for pixel in pixels[:, 4, 4, 0]] == [10 * number + 3 for number in range(16)]
    (tmp_path / "labels.csv").write_text("\n".join([*lines, "clips/none.png,0,calm"]))
    with pytest.raises(ValueError, match=r"labels\.csv, line 6: there is no file"):
        clip_files.find("clips", tmp_path)


def table(root: Path, text: str) -> Path:
    from PIL import Image

    for name in "abcd":
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(root / f"{name}.png")
    (root / "labels.csv").write_bytes(text.encode())
    return root


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\na.png,0\nb.png,0\n", "every clip has the label '0'; a classifier needs two"),
        ("file,label\na.png,0\nb.png\n", r"labels\.csv, line 3: the file or the label is missing"),
        ("file,label\na.png,0\nb.png,\n", r"labels\.csv, line 3: the file or the label"),
        ("file,label,split\na.png,0,train\nb.png,0,test\nc.png,1,test\n", "no training clip has the label '1'"),
    ],
)
def test_a_table_that_cannot_be_right(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clip_files.find("clips", table(tmp_path, text))


def test_a_table_as_spreadsheets_write_it(tmp_path: Path) -> None:
    found = clip_files.find("clips", table(tmp_path, "\ufefffile,label\r\na.png,0\r\nb.png,0\r\nc.png,1\r\nd.png,1\r\n"))
    assert [clip.path.name for clip in found.train] == ["a.png", "c.png"] and found.classes == ["0", "1"]


def test_frames_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    from PIL import Image

    for number in (1, 2, 10, 9):
        Image.fromarray(np.full((4, 4, 3), number, dtype=np.uint8)).save(tmp_path / f"frame{number}.png")
    assert clip_files.read(tmp_path, 4, 1, None)[:, 0, 0, 0].tolist() == [1, 2, 9, 10]


def test_the_choice_of_frames_covers_every_start() -> None:
    random = draws.bits(0, 0, np.arange(400))[:, 0]
    starts = {clip_files.choose(10, 3, 2, number)[0] for number in random}
    assert starts == set(range(6)), "the last one takes frames 5, 7 and 9"
    assert clip_files.choose(10, 16, 1, random[0])[-1] == 9


def encoded(path: Path, frames: int, height: int = 32, width: int = 48) -> Path:
    """A video whose frame i is one grey of 10 + 20 i: what comes back says which frame it was."""
    av = pytest.importorskip("av", reason="video files are not decoded: pip install 'byteback[video]'")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            pixels = np.full((height, width, 3), 10 + 20 * number, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def test_videos_are_decoded_by_pyav(tmp_path: Path) -> None:
    pixels = clip_files.read(encoded(tmp_path / "a.mp4", 9), 3, 2, None)
    assert pixels.shape == (3, 32, 48, 3)
    assert np.round((pixels[:, 16, 24, 0] - 10.0) / 20).tolist() == [2, 4, 6]
    short = clip_files.read(encoded(tmp_path / "short.avi", 2), 4, 1, None)
    assert np.round((short[:, 0, 0, 0] - 10.0) / 20).tolist() == [0, 1, 1, 1]


def test_a_video_cut_short_is_named(tmp_path: Path) -> None:
    whole = encoded(tmp_path / "a.mp4", 9).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 3])
    with pytest.raises(ValueError, match=r"cut\.mp4 cannot be decoded"):
        clip_files.read(tmp_path / "cut.mp4", 3, 2, None)


def test_folders_of_videos_are_trained_on(tmp_path: Path) -> None:
    for label in ("dark", "bright"):
        (tmp_path / "videos" / label).mkdir(parents=True)
        for number in range(3):
            encoded(tmp_path / "videos" / label / f"{number}.mp4", 6 + number)
    images = data.load(f"clips:{tmp_path}/videos", image_size=24, frames=4)
    clips, labels = next(iter(images.train.batches([torch.arange(len(images.train))], 0, 0)))
    assert clips.shape == (4, 3, 4, 24, 24) and sorted(labels.tolist()) == [0, 0, 1, 1]
    images.close()


# ---- what can be wrong ----


def test_what_is_wrong_with_clips_is_said(frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        data.load(f"frames:{tmp_path}/none")
    with pytest.raises(ValueError, match="has 0 classes"):
        data.load(f"frames:{tmp_path}")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.mp4").write_bytes(b"no video")
        (tmp_path / name / "2.mp4").write_bytes(b"no video")
    with pytest.raises(ValueError, match=r"a has no folder of frames\. The layout is"):
        data.load(f"frames:{tmp_path}")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"pip install 'byteback\[video\]'; or extract the frames"):
        data.load(f"clips:{tmp_path}")
    broken = frames / "run" / "clip2" / "003.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:60])
    try:
        with pytest.raises(ValueError, match=r"clip2/003\.png cannot be read as an image"):
            taken(frames, 0, frames=7, frame_stride=1)
    finally:
        broken.write_bytes(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "moving-items"}, "--task classify does not work with --data moving-items"),
        ({"task": "video"}, "--task video does not work with --data digits. Use --task video with moving-items"),
        ({"task": "video", "data": "moving-items", "frames": 0}, "--frames is 0"),
    ],
    ids=str,
)
def test_tasks_and_data_must_fit(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**change)  # type: ignore[arg-type]


def test_unknown_networks_and_small_canvases_are_refused(fashion: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown model for video 'r3d18'\. Did you mean r3d_18"):
        networks.build("r3d18", 32, 4, 3, 8)
    with pytest.raises(ValueError, match="needs room to move"):
        data.load("moving-items", str(fashion), image_size=15)
    assert "r3d_8" in video_networks.names() and "r2plus1d_18" in video_networks.names()


# ---- the command ----


def test_the_command_trains_tests_and_evaluates(fashion: Path, tmp_path: Path) -> None:
    env = {**os.environ, "BYTEBACK_DATA": str(fashion), "COLUMNS": "160"}

    def byteback_(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "byteback", *args], capture_output=True, text=True, timeout=200, cwd=tmp_path, env=env
        )

    options = ["--epochs", "1", "--batch-size", "10", "--frames", "4", "--image-size", "16", "--no-tensorboard"]
    done = byteback_(
        *("train", "--task", "video", "--data", "moving-items", "--recipe", "unified-int8", "--output-dir", "run"), *options
    )
    assert done.returncode == 0, done.stderr
    assert "40 clips of 4 frames of 16x16 pixels" in done.stdout
    member = tmp_path / "run" / "unified-int8" / "seed0"
    records = read_lines(member / "metrics.jsonl")
    assert records[0]["frames"] == 4 and records[-1]["kind"] == "end"
    assert any("3x3x3" in picture["structure"] for picture in read_lines(member / "histograms.jsonl"))
    tested = byteback_("eval", str(member / "last.pt"))
    assert tested.returncode == 0, tested.stderr
    assert f"accuracy {records[-1]['test_accuracy']:.2%}" in tested.stdout
