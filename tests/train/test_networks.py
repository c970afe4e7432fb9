# SPDX-License-Identifier: Apache-2.0
"""Networks by name, and the errors for names and sizes that do not fit."""

from __future__ import annotations

import pytest

from byteback.train import networks


def test_networks_by_name() -> None:
    assert networks.channels_for("resnet20", 1) == 1 and networks.channels_for("resnet18", 1) == 3
    assert networks.check("resnet56", 32, 10, 3) == 853_018
    assert networks.check("resnet50", 32, 10, 3) > 20_000_000, "any network of torchvision, by its name"
    for name, says in (("resnet55", "resnet56"), ("mobilenetv2", "mobilenet_v2")):
        with pytest.raises(ValueError, match=f"Did you mean .*{says}"):
            networks.check(name, 32, 10, 3)
    if networks.timm() is None:
        with pytest.raises(ImportError, match="pip install timm"):
            networks.check("timm:resnet18", 32, 10, 3)
