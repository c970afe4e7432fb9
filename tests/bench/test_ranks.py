# SPDX-License-Identifier: Apache-2.0
"""`byteback bench ranks` counts what two ranks really send."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from byteback import models
from byteback.bench import ranks


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
def test_calls_and_bytes_are_those_of_a_step() -> None:
    console = Console(record=True, width=150)
    ranks.run(ranks.RanksConfig(("resnet8",), image_size=16), console)
    said = console.export_text()
    row = next(line for line in said.splitlines() if line.strip().startswith("resnet8")).split()
    gradients = 4 * sum(parameter.numel() for parameter in models.build("resnet8", image_size=16, num_classes=10).parameters())
    name, calls, kib, of_ddp, mib, share = row
    assert (name, calls) == ("resnet8", "2") and int(of_ddp) >= 1
    assert float(mib) == pytest.approx(gradients / 2**20, abs=0.05)
    assert 0.0 < float(kib) * 2**10 < 0.1 * gradients
    assert float(share.rstrip("%")) / 100 == pytest.approx(float(kib) * 2**10 / gradients, abs=1e-3)
    assert said.count("resnet8 ") >= 1 + 4 and "400 Gbit/s" in said


def test_times_grow_with_ranks_and_shrink_with_the_link() -> None:
    times = [ranks.milliseconds(2, 10**6, count, 10, 10.0) for count in (8, 32, 128, 512)]
    assert times == sorted(times) and times[0] == pytest.approx(1.4 + 0.12)
    assert ranks.milliseconds(2, 10**6, 8, 100, 10.0) == pytest.approx(0.14 + 0.12)
