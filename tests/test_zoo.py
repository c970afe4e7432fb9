# SPDX-License-Identifier: Apache-2.0
"""Networks that nobody tuned for take two training steps in every recipe: finite, and the same losses on two paths.

Most are torchvision's, on images as small as they take; a U-Net, a discriminator with spectral norm and a 1-D network are
written here. The paths are the reference, which is plain PyTorch, and the fastest one. The share of the weights that runs in
int8 is printed and must not be zero. Slow: a few minutes.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import byteback
from byteback.nn import Int8Layer
from byteback.ops.backends import paths
from byteback.recipes import resolve
from byteback.torchvision_compat import load

pytestmark = pytest.mark.slow
RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]
STEPS, CLASSES = 2, 5


class Entry(NamedTuple):
    build: Callable[[Any], nn.Module]  # from torchvision's models
    size: tuple[int, ...]
    linear: bool = False  # a network of Linear layers: they run in int8 too


def small_vit(models: Any) -> nn.Module:
    options = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64, "num_classes": CLASSES}
    return models.VisionTransformer(image_size=32, patch_size=8, **options)


class UNet(nn.Module):
    """Two levels down and up; what comes up is joined with what went down."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner, self.bottom = self._pair(3, 8), self._pair(8, 16), self._pair(16, 32)
        self.up_inner, self.up = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.join_inner, self.join, self.head = self._pair(32, 16), self._pair(16, 8), nn.Conv2d(8, CLASSES, 1)

    @staticmethod
    def _pair(c: int, k: int) -> nn.Module:
        first = [nn.Conv2d(c, k, 3, padding=1, bias=False), nn.BatchNorm2d(k), nn.ReLU(inplace=True)]
        return nn.Sequential(*first, nn.Conv2d(k, k, 3, padding=1), nn.BatchNorm2d(k), nn.LeakyReLU(0.1))

    def forward(self, x: Tensor) -> Tensor:
        top = self.down(x)
        inner = self.inner(F.max_pool2d(top, 2))
        bottom = self.up_inner(self.bottom(F.max_pool2d(inner, 2)))
        middle = self.up(self.join_inner(torch.cat([bottom, inner], 1)))
        return self.head(self.join(torch.cat([middle, top], 1))).mean((2, 3))


def discriminator(_: Any) -> nn.Module:
    """Of a GAN: strided convolutions, spectral norm on the first and the last, whose weights are computed."""
    norm = nn.utils.parametrizations.spectral_norm
    layers: list[nn.Module] = [norm(nn.Conv2d(3, 16, 4, 2, 1)), nn.LeakyReLU(0.2)]
    for c, k in ((16, 32), (32, 64)):
        layers += [nn.Conv2d(c, k, 4, 2, 1), nn.BatchNorm2d(k), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, norm(nn.Conv2d(64, CLASSES, 4)), nn.Flatten())


def one_dimension(_: Any) -> nn.Module:
    """A network for sound: long strided kernels, groups, dilation."""
    layers: list[nn.Module] = []
    for c, k, r, s, d, g in ((1, 16, 9, 4, 1, 1), (16, 32, 5, 2, 1, 4), (32, 32, 3, 1, 4, 32), (32, 64, 1, 1, 1, 1)):
        layers += [nn.Conv1d(c, k, r, s, (r // 2) * d, d, g, bias=False), nn.BatchNorm1d(k), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, CLASSES))


IMAGES = (2, 3, 64, 64)
ZOO = {
    "regnet_y_400mf": Entry(lambda m: m.regnet_y_400mf(num_classes=CLASSES), IMAGES),
    "shufflenet_v2": Entry(lambda m: m.shufflenet_v2_x0_5(num_classes=CLASSES), IMAGES),
    "densenet": Entry(lambda m: m.DenseNet(16, (2, 2, 2, 2), 16, num_classes=CLASSES), IMAGES),
    "googlenet": Entry(lambda m: m.googlenet(num_classes=CLASSES, aux_logits=False, init_weights=False), IMAGES),
    "mnasnet": Entry(lambda m: m.mnasnet0_5(num_classes=CLASSES), IMAGES),
    "efficientnet_b0": Entry(lambda m: m.efficientnet_b0(num_classes=CLASSES), IMAGES),
    "convnext": Entry(lambda m: m.convnext_tiny(num_classes=CLASSES), (2, 3, 32, 32)),
    "mobilenet_v3": Entry(lambda m: m.mobilenet_v3_small(num_classes=CLASSES), IMAGES),
    "squeezenet": Entry(lambda m: m.squeezenet1_1(num_classes=CLASSES), IMAGES),
    "wide_resnet50_2": Entry(lambda m: m.wide_resnet50_2(num_classes=CLASSES), (2, 3, 32, 32)),
    "resnext50": Entry(lambda m: m.resnext50_32x4d(num_classes=CLASSES), (2, 3, 32, 32)),
    "swin_t": Entry(lambda m: m.swin_t(num_classes=CLASSES), (1, 3, 32, 32), linear=True),
    "vit": Entry(small_vit, (2, 3, 32, 32), linear=True),
    "fcn_resnet50": Entry(lambda m: m.segmentation.fcn_resnet50(weights_backbone=None, num_classes=CLASSES), (2, 3, 32, 32)),
    "lraspp": Entry(
        lambda m: m.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=CLASSES), (2, 3, 64, 64)
    ),
    "mc3_18": Entry(lambda m: m.video.mc3_18(num_classes=CLASSES), (2, 3, 4, 32, 32)),
    "r2plus1d_18": Entry(lambda m: m.video.r2plus1d_18(num_classes=CLASSES), (2, 3, 4, 32, 32)),
    "unet": Entry(lambda _: UNet(), (2, 3, 32, 32)),
    "discriminator": Entry(discriminator, (3, 3, 32, 32)),
    "one_dimension": Entry(one_dimension, (4, 1, 400)),
}


def timm_network(name: str) -> nn.Module:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    import timm

    return timm.create_model(name, num_classes=CLASSES)


ZOO.update({f"timm {name}": Entry(lambda _, n=name: timm_network(n), IMAGES) for name in ("resnest14d", "ghostnet_100")})


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    output = output["out"] if isinstance(output, dict) else output  # segmentation
    labels = torch.arange(x.shape[0]) % CLASSES
    return F.cross_entropy(output if output.dim() == 2 else output.flatten(2).mean(-1), labels)


def losses(model: nn.Module, x: Tensor, path: str) -> list[float]:
    """The losses of some steps on one path."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    byteback.scale_learning_rates(optimizer, model)
    seen = []
    with paths.path(path):
        for step in range(STEPS):
            torch.manual_seed(step)  # for dropout and stochastic depth
            loss = loss_of(model, x)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return seen


@pytest.mark.parametrize("slug", RECIPES)
@pytest.mark.parametrize("name", ZOO)
def test_two_steps_are_finite_and_the_same_on_two_paths(name: str, slug: str, capsys: pytest.CaptureFixture[str]) -> None:
    entry = ZOO[name]
    try:
        models = load().models
    except ImportError:
        pytest.skip("torchvision is not installed")
    torch.manual_seed(0)
    model, x = entry.build(models), torch.randn(entry.size)
    recipe = dataclasses.replace(resolve(slug), linear=entry.linear)
    byteback.prepare(model, recipe)
    layers = {key: layer for key, layer in model.named_modules() if isinstance(layer, Int8Layer)}
    share = sum(layer.weight.numel() for layer in layers.values()) / sum(p.numel() for p in model.parameters())
    with capsys.disabled():
        print(f"\n{name} in {slug}: {len(layers)} layers in int8, {share:.0%} of the weights", end=" ")
    assert layers and share > 0
    twin = copy.deepcopy(model)
    fastest, plain = losses(model, x, paths.available()[0]), losses(twin, x, "reference")
    assert all(map(math.isfinite, fastest)) and fastest == plain
    assert fastest[0] != fastest[1], "the first step changed nothing"
    for (key, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert one.grad is None or bool(one.grad.isfinite().all()), key
        assert torch.equal(one, other), f"{key} is not the same on both paths after {STEPS} steps"
