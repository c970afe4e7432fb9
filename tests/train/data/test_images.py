# SPDX-License-Identifier: Apache-2.0
"""The images: the same for any number of workers and from any place in an epoch, and errors that name the file."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from byteback.torchvision_compat import load as load_torchvision
from byteback.train import data, tasks
from byteback.train.config import TrainConfig
from byteback.train.data import draws, source


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in ImageNet's layout: two classes with six images each, four for training."""
    from PIL import Image

    root = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for name in ("cat", "dog"):
        for number in range(6):
            place = root / ("train" if number < 4 else "val") / name / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 255, (40, 48, 3), dtype=np.uint8)).save(place)
    return root


def taken(root: Path, workers: int, first: int = 0, seed: int = 3, epoch: int = 1) -> list[tuple[Tensor, Tensor]]:
    images = data.load(f"folder:{root}", image_size=16, workers=workers)
    return list(images.train.batches(draws.batches(seed, epoch, len(images.train), 3)[first:], seed, epoch))


def test_a_folder_gives_the_same_batches_for_any_number_of_workers(pictures: Path) -> None:
    state = torch.get_rng_state()
    alone, together = taken(pictures, 0), taken(pictures, 2)
    assert torch.equal(torch.get_rng_state(), state), "loading drew from the generator that dropout uses"
    assert len(alone) == 3
    for (images, labels), (others, same) in zip(alone, together, strict=True):
        assert torch.equal(images, others) and torch.equal(labels, same)
    (images, _), (others, _) = taken(pictures, 0, first=1)[0], alone[1]
    assert torch.equal(images, others), "an epoch that is begun in its middle has other images"
    assert not torch.equal(taken(pictures, 0, epoch=2)[0][0], alone[0][0])


def test_a_part_is_spread_over_the_classes_and_augmented_as_in_the_whole(pictures: Path) -> None:
    asked = TrainConfig(data=f"folder:{pictures}", image_size=16, workers=0, train_images=4)
    part, whole = tasks.load(asked.complete()).train, tasks.load(replace(asked, train_images=None).complete()).train
    assert (len(part), len(whole)) == (4, 8)
    (images, labels), (others, _) = (
        next(iter(split.batches([index], 3, 1))) for split, index in ((part, torch.arange(4)), (whole, torch.arange(0, 8, 2)))
    )
    assert torch.equal(images, others) and labels.tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match=r"--train-images is 9, but folder:.* has 8 for training"):
        tasks.load(replace(asked, train_images=9).complete())


def test_an_image_in_memory_does_not_depend_on_its_neighbours() -> None:
    images = torch.arange(6 * 5 * 5 * 2, dtype=torch.uint8).reshape(6, 5, 5, 2)
    held = source.InMemory(images, torch.arange(6), [0.0, 0.0], [1.0, 1.0], crop=2, flip=True)
    together = held.take(torch.arange(6), seed=1, epoch=2)
    assert together.is_contiguous(memory_format=torch.channels_last)
    for index in range(6):
        assert torch.equal(held.take(torch.tensor([index]), 1, 2)[0], together[index])
    assert not torch.equal(held.take(torch.arange(6), 1, 3), together)
    assert not torch.equal(held.take(torch.arange(6), 2, 2), together)


def test_the_gather_is_a_padded_crop_and_a_flip() -> None:
    """Every result is one of the 5 x 5 x 2 that padding by 2, cropping and flipping can give, and all of them occur."""
    image = torch.randint(1, 255, (1, 4, 4, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    held = source.InMemory(image.expand(2000, -1, -1, -1), torch.zeros(2000), [0.0], [1.0], crop=2, flip=True)
    padded = torch.nn.functional.pad(image[0, :, :, 0], (2, 2, 2, 2))
    possible = {}
    for row in range(5):
        for column in range(5):
            cut = padded[row : row + 4, column : column + 4]
            possible[cut.numpy().tobytes()] = 0
            possible[cut.flip(1).numpy().tobytes()] = 0
    for made in held.take(torch.arange(2000), 0, 0).to(torch.uint8):
        possible[made[0].numpy().tobytes()] += 1
    # 2000 draws from 50: each is expected 40 times; none below 10 but with a chance of 1e-8.
    assert len(possible) == 50 and min(possible.values()) >= 10


def test_the_order_of_an_epoch_is_a_function_of_seed_and_epoch() -> None:
    first = draws.order(0, 0, 100)
    assert torch.equal(first, draws.order(0, 0, 100)) and sorted(first.tolist()) == list(range(100))
    for other in (draws.order(0, 1, 100), draws.order(1, 0, 100)):
        assert not torch.equal(first, other)
    batches = draws.batches(0, 0, 9, 4)
    assert [len(batch) for batch in batches] == [4, 4] and draws.steps(9, 4) == 2, "a single image cannot train a BatchNorm"


def test_the_digits_are_normalized() -> None:
    digits = data.load("digits")
    ((images, _),) = digits.train.batches([torch.arange(len(digits.train))], 0, 0)
    assert abs(float(images.mean())) < 1e-3 and abs(float(images.std()) - 1.0) < 1e-3
    assert (len(digits.train), len(digits.test)) == (1437, 360)


def test_the_digits_can_be_enlarged() -> None:
    small, large = data.load("digits"), data.load("digits", image_size=32)
    assert (small.image_size, large.image_size) == (8, 32)
    ((few, labels),) = small.train.batches([torch.arange(50)], 0, 0)
    ((many, same),) = large.train.batches([torch.arange(50)], 0, 0)
    assert many.shape == (50, 1, 32, 32) and labels.equal(same)
    back = torch.nn.functional.avg_pool2d(many, 4)  # a pixel has become 4x4 of about its brightness
    assert float(torch.corrcoef(torch.stack([few.flatten(), back.flatten()]))[0, 1]) > 0.97


# ---- what can be wrong ----


def cifar(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny CIFAR-10 in the layout of the real one, whose sums torchvision is told."""
    import hashlib

    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    kind = load_torchvision().datasets.CIFAR10
    random = np.random.default_rng(0)

    def written(name: str, contents: dict[str, object]) -> str:
        path = folder / name
        path.write_bytes(pickle.dumps(contents))
        return hashlib.md5(path.read_bytes()).hexdigest()

    def batch() -> dict[str, object]:
        return {"data": random.integers(0, 255, (4, 3072), dtype=np.uint8), "labels": [0, 1, 2, 3]}

    monkeypatch.setattr(kind, "train_list", [[name, written(name, batch())] for name, _ in kind.train_list])
    monkeypatch.setattr(kind, "test_list", [[name, written(name, batch())] for name, _ in kind.test_list])
    names = [f"class {number}" for number in range(10)]
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": written("batches.meta", {"label_names": names})})
    return folder


def test_cifar_is_read_as_torchvision_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar(tmp_path, monkeypatch)
    images = data.load("cifar10", str(tmp_path), augment=False)
    assert (len(images.train), len(images.test), images.classes, images.channels) == (20, 4, 10, 3)
    plain = load_torchvision().datasets.CIFAR10(tmp_path, train=True)
    ((batch, labels),) = images.train.batches([torch.tensor([7])], 0, 0)
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    expected = (torch.from_numpy(plain.data[7]) / 255.0 - mean) / std
    torch.testing.assert_close(batch[0], expected.permute(2, 0, 1))
    assert labels.tolist() == [plain.targets[7]]
    assert ("cifar10", str(tmp_path)) in data.state(str(tmp_path))


def test_a_missing_or_damaged_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cifar(tmp_path, monkeypatch)
    third = folder / "data_batch_3"
    whole = third.read_bytes()
    third.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match="data_batch_3 is damaged or truncated: its MD5"):
        data.load("cifar10", str(tmp_path))
    third.unlink()
    with pytest.raises(ValueError, match="data_batch_3 is missing"):
        data.load("cifar10", str(tmp_path))
    third.mkdir()
    with pytest.raises(ValueError, match="data_batch_3 cannot be read"):
        data.load("cifar10", str(tmp_path))


def test_a_truncated_idx_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name in ("train", "t10k"):
        (folder / f"{name}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + b"\0\0\0\x02" + 2 * b"\0\0\0\x1c" + bytes(2 * 784))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x02\x01\x02")
    images = data.load("fashion-mnist", str(tmp_path))
    assert (len(images.train), images.channels, images.image_size) == (2, 1, 32)
    (folder / "t10k-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + b"\0\0\0\x02" + 2 * b"\0\0\0\x1c" + bytes(784))
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte is damaged or truncated: it has 800 bytes"):
        data.load("fashion-mnist", str(tmp_path))


def test_what_is_absent_and_cannot_be_fetched_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: object) -> None:
        raise OSError("network is unreachable")

    monkeypatch.setattr(load_torchvision().datasets.CIFAR100, "download", unreachable)
    with pytest.raises(ValueError) as error:
        data.load("cifar100", str(tmp_path))
    for said in ("network is unreachable", f"{tmp_path}/cifar-100-python: train, test, meta", "--data-path", "BYTEBACK_DATA"):
        assert said in str(error.value)
    with pytest.raises(ValueError, match="--no-download"):
        data.load("cifar100", str(tmp_path), download=False)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named(pictures: Path, workers: int) -> None:
    broken = pictures / "train" / "dog" / "0.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:200])
    try:
        with pytest.raises(ValueError, match=r"dog/0\.png cannot be read as an image"):
            taken(pictures, workers)
    finally:
        broken.write_bytes(whole)


def test_a_folder_without_the_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no folder .*/train\. The layout is"):
        data.load(f"folder:{tmp_path}")
    with pytest.raises(ValueError, match="Did you mean cifar10"):
        data.load("cifar-10")
