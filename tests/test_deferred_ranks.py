# SPDX-License-Identifier: Apache-2.0
"""Errors that were deferred, with several ranks: all raise, or one would step while another does not."""

from __future__ import annotations

import re
from pathlib import Path

from two_ranks import run_ranks

RANK = """
    import os, sys, torch, byteback
    import torch.distributed as dist
    from torch import nn
    from deferring import deferring
    rank, file = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
    byteback.prepare(model, byteback.PlainInt8(strict=True), keep_float=["0"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)
    generator = torch.Generator().manual_seed(rank)

    def step(bad_input=False, bad_weight=False):
        optimizer.zero_grad()
        images = torch.randn(2, 2, 9, 9, generator=generator)
        if bad_input and rank == 1:
            images[0, 0, 4, 4] = float("nan")
        before = model[1].weight.detach().clone(), model[2].running_mean.clone()
        kept = model[3].weight.detach().clone()
        if bad_weight and rank == 0:
            model[3].weight.data[0, 0, 0, 0] = float("nan")
        model(images).square().mean().backward()
        try:
            optimizer.step()
        except byteback.NonFiniteError as error:
            model[3].weight.data.copy_(kept)
            same = torch.equal(before[0], model[1].weight) and torch.equal(before[1], model[2].running_mean)
            return f"{str(error).partition(';')[0]}, {'as before' if same else 'moved'}"
        return "moved" if not torch.equal(before[0], model[1].weight) else "as before"

    with deferring():
        print(*[step(), step(bad_input=True), step(), step(bad_weight=True), step()], sep="\\n", flush=True)
    dist.destroy_process_group()
    os._exit(0)
"""


def test_what_one_rank_has_met_all_ranks_raise(tmp_path: Path) -> None:
    for rank, output in enumerate(run_ranks(RANK, tmp_path)):
        first, refused, second, weight, third = output.splitlines()
        assert [first, second, third] == ["moved"] * 3, f"rank {rank}"
        assert re.fullmatch(r"1: input holds \d+ NaN or Inf values at iteration 1, as before", refused), refused
        assert weight == "3: weight holds 1 NaN or Inf values at iteration 2, as before", f"rank {rank}"
