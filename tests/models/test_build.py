# SPDX-License-Identifier: Apache-2.0
"""The networks have the sizes and resolutions the papers give them, and a wrong request is told what to do."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import byteback.models
from byteback.models import build, names
from byteback.models.resnet import PadShortcut
from byteback.torchvision_compat import load

SOURCE = str(Path(byteback.models.__file__).parents[2])

try:
    load()
    have_torchvision = True
except ImportError:
    have_torchvision = False
needs_torchvision = pytest.mark.skipif(not have_torchvision, reason="torchvision is not installed")

# Name, parameters in all, the layer that sees the last feature map, that map's side. The counts are worked out from
# the published layer tables with 10 classes; resnet20's and resnet56's are the 0.27M and 0.85M of He et al., table 6.
VARIANTS = [
    pytest.param("resnet8", 75_290, "layer3", 8),
    pytest.param("resnet20", 269_722, "layer3", 8),
    pytest.param("resnet56", 853_018, "layer3", 8),
    pytest.param("resnet18", 11_173_962, "layer4", 4, marks=needs_torchvision),
    pytest.param("mobilenet_v2", 2_236_682, "features", 4, marks=needs_torchvision),
    pytest.param("mobilenet_v2_x0_25", 250_922, "features", 4, marks=needs_torchvision),
    pytest.param("vgg16", 14_719_818, "features", 1, marks=needs_torchvision),
    pytest.param("vgg16_bn", 14_728_266, "features", 1, marks=needs_torchvision),
    pytest.param("inception_v3", 21_806_058, "Mixed_7c", 3, marks=needs_torchvision),
    pytest.param("alexnet", 23_272_266, "features", 2, marks=needs_torchvision),
]


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def output_side(model: nn.Module, layer: str, images: Tensor) -> tuple[int, Tensor]:
    """The side of what `layer` gives, and the logits."""
    sides: list[int] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda _, __, out: sides.append(out.shape[-1]))
    logits = model(images)
    handle.remove()
    return sides[0], logits


@pytest.mark.parametrize(("name", "count", "layer", "side"), VARIANTS)
def test_variants_for_small_images(name: str, count: int, layer: str, side: int) -> None:
    torch.manual_seed(0)
    model = build(name)
    assert parameters(model) == count
    last_side, logits = output_side(model.train(), layer, torch.randn(2, 3, 32, 32))
    assert last_side == side
    assert logits.shape == (2, 10) and torch.isfinite(logits).all()


def test_all_variants_are_tested_and_listed() -> None:
    assert sorted(str(variant.values[0]) for variant in VARIANTS) == names(32)


@needs_torchvision
def test_inception_halves_the_image_once_before_its_blocks() -> None:
    side, logits = output_side(build("inception_v3", num_classes=7), "Mixed_5b", torch.randn(2, 3, 32, 32))
    assert side == 16
    assert logits.shape == (2, 7)


@pytest.mark.parametrize("name", ["resnet8", "resnet20"])
@pytest.mark.parametrize(("image_size", "in_channels"), [(8, 1), (28, 1), (8, 3), (32, 4)])
def test_small_resnets_take_small_images_of_any_channels(name: str, image_size: int, in_channels: int) -> None:
    model = build(name, image_size, num_classes=5, in_channels=in_channels)
    assert model(torch.randn(2, in_channels, image_size, image_size)).shape == (2, 5)


def test_shortcut_subsamples_and_pads_with_zeros() -> None:
    x = torch.randn(1, 16, 6, 6)
    out = PadShortcut(16)(x)
    assert out.shape == (1, 32, 3, 3)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any() and not out[:, 24:].any()
    assert not list(PadShortcut(16).parameters())


def test_small_resnet_starts_with_kaiming_fan_out() -> None:
    torch.manual_seed(0)
    weight = build("resnet20").get_parameter("layer3.1.conv1.weight")
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)


@needs_torchvision
@pytest.mark.parametrize(("name", "count"), [("resnet18", 11_689_512), ("mobilenet_v2", 3_504_872)])
def test_other_sizes_give_torchvision(name: str, count: int) -> None:
    model = build(name, image_size=224, num_classes=1000)
    assert parameters(model) == count
    assert type(model).__module__.startswith("torchvision.models")


@needs_torchvision
def test_torchvision_inception_gives_plain_logits_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build("inception_v3", image_size=299)
    assert model.get_submodule("fc").out_features == 10
    assert not any("AuxLogits" in name for name, _ in model.named_parameters())


@needs_torchvision
def test_detection_models_are_built_without_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a download was started")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    assert "ssdlite320_mobilenet_v3_large" in names(320)
    assert isinstance(build("ssdlite320_mobilenet_v3_large", image_size=320, num_classes=4), nn.Module)


@pytest.mark.parametrize(
    ("name", "image_size", "message"),
    [
        (
            "resnt20",
            32,
            r"unknown network 'resnt20'.*Did you mean resnet20.*alexnet, inception_v3.*no variant for images of 32 pixels",
        ),
        ("resnet50", 32, r"Known names: alexnet.*no variant for images of 32 pixels"),
        ("resnet18", 16, r"resnet20, resnet56, resnet8.*of 16 pixels there are only the small ResNets"),
        ("resnet20", 4, r"image_size is 4; it must be at least 8.*Enlarge"),
        pytest.param("resnet20", 64, r"for images of 8 to 32 pixels", marks=needs_torchvision),
        pytest.param("resnet19", 224, r"Did you mean resnet1.*not a network of torchvision", marks=needs_torchvision),
        pytest.param("alexnet", 48, r"48 is too small for torchvision's alexnet.*63x63", marks=needs_torchvision),
    ],
)
def test_wrong_names_and_sizes_are_explained(name: str, image_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, image_size)


def test_wrong_counts_are_explained() -> None:
    with pytest.raises(ValueError, match=r"in_channels is 1, but resnet18.*Repeat the channels"):
        build("resnet18", in_channels=1)
    with pytest.raises(ValueError, match=r"num_classes is 0 .* for resnet20"):
        build("resnet20", num_classes=0)


def test_resnet20_needs_no_torchvision() -> None:
    program = (
        f"import sys; sys.path.insert(0, {SOURCE!r}); sys.modules['torchvision'] = None\n"
        "from byteback.models import build\nbuild('resnet20')\n"
        "try: build('resnet18')\nexcept ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "pip install byteback[train]" in done.stdout
