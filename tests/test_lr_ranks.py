# SPDX-License-Identifier: Apache-2.0
"""Several ranks that train one model: the same weights to the last bit, and one learning-rate factor for each weight."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replicas import RECIPES
from two_ranks import HEADER, run_ranks


def lines(output: str) -> list[Any]:
    return [json.loads(line) for line in output.splitlines()]


# ---- DistributedDataParallel -----------------------------------------------------------------------------------------

REPLICATED = """
    import json, sys
    from replicas import RECIPES, leave, meet, replicated
    meet(int(sys.argv[1]), sys.argv[2])
    for recipe in RECIPES:
        print(json.dumps(replicated(recipe, "skip", steps=25, spoiled=(3, 4, 17))), flush=True)
    leave()
"""


def test_replicas_stay_replicas_in_every_recipe(tmp_path: Path) -> None:
    """Each rank has its own data and noise, and rank 1 meets NaN, twice in a row: DDP brings rank 0's buffers in between."""
    here, there = (lines(output) for output in run_ranks(REPLICATED, tmp_path))
    assert len(here) == len(RECIPES)
    for recipe, one, other in zip(RECIPES, here, there, strict=True):
        assert one == other, recipe
        assert one["skipped"] == 3 and one["finite"], recipe
    scaled = here[RECIPES.index("unified-int8")]["factors"]
    assert scaled.keys() == {"2.0", "2.3"} and all(0.1 < factor < 1.0 for factor in scaled.values())


# ---- what else several ranks can do ----------------------------------------------------------------------------------

FACTS = """
    import sys
    from rank_facts import tell
    from replicas import leave, meet
    meet(int(sys.argv[1]), sys.argv[2])
    tell()
    leave()
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found out."""
    return [json.loads(output) for output in run_ranks(FACTS, tmp_path_factory.mktemp("ranks"))]


def agreed(facts: list[dict[str, Any]], name: str) -> Any:
    here, there = facts
    assert here[name] == there[name], name
    return here[name]


def test_two_collectives_in_a_step(facts: list[dict[str, Any]]) -> None:
    assert agreed(facts, "collectives_of_a_step") == [2, 2, 2]


def test_nan_in_a_micro_batch_is_not_forgotten_when_buffers_are_broadcast(facts: list[dict[str, Any]]) -> None:
    skipped, _ = agreed(facts, "nan_in_a_micro_batch")
    assert skipped == 1


def test_a_layer_that_one_rank_never_calls(facts: list[dict[str, Any]]) -> None:
    count, factors, _ = agreed(facts, "layer_that_rank_0_never_calls")
    assert count == 4, "DDP would set it back to the 0 of rank 0, and the noise of rank 1 would be the same in every step"
    assert 0.1 <= factors["level"] < 1.0


def test_ranks_agree_within_a_closure(facts: list[dict[str, Any]]) -> None:
    for optimizer, (factors, _) in agreed(facts, "closures").items():
        assert all(0.1 <= factor < 1.0 for factor in factors.values()), optimizer


def test_a_checkpoint_of_rank_0_resumes_every_rank(facts: list[dict[str, Any]]) -> None:
    """All ranks remember what rank 0 does, so they go on bit for bit."""
    uninterrupted, from_checkpoint = agreed(facts, "resumed")
    assert uninterrupted == from_checkpoint


def test_a_rank_that_steps_only_some_weights(facts: list[dict[str, Any]]) -> None:
    """The rank that steps a weight shortens the step, and the others get the weight from it."""
    whole, parts = agreed(facts, "partitioned").values()
    assert whole == parts and whole[0] == 12


def test_a_group_of_one_rank_asks_nobody(facts: list[dict[str, Any]]) -> None:
    assert agreed(facts, "group_of_one") == 0


@pytest.mark.parametrize(("order", "like"), [("prepare, shard", "ddp"), ("shard, prepare", "ddp without blocks")])
def test_the_shards_of_a_weight_take_one_factor(facts: list[dict[str, Any]], order: str, like: str) -> None:
    """The weights that FSDP2 holds in parts are, put together, bit for bit those of DDP."""
    found = agreed(facts, "sharded")
    if found is None:
        pytest.skip("this torch has no torch.distributed.fsdp.fully_shard")
    kind, factors, weights = found[order]
    assert kind == "DTensor" and all(0.1 <= factor < 1.0 for factor in factors.values())
    assert [factors, weights] == found[like][1:]


def test_an_optimizer_may_hold_shards_and_whole_weights(facts: list[dict[str, Any]]) -> None:
    assert agreed(facts, "partly_sharded") in (["DTensor", "Parameter"], None)


def test_every_way_to_reduce_gradients_keeps_ranks_the_same(facts: list[dict[str, Any]]) -> None:
    """Micro-batches under no_sync, a static graph, bucket views, compression to bfloat16, and buffers left alone."""
    found = agreed(facts, "options_of_ddp")
    assert {count for count, _ in found.values()} == {12}
    for name in ("bucket views", "no buffers"):
        assert found[name] == found["plain"], name
    assert found["bf16 hook"] != found["plain"]


def test_a_sharded_checkpoint_goes_on_bit_for_bit(facts: list[dict[str, Any]]) -> None:
    found = agreed(facts, "sharded_checkpoint")
    if found is None:
        pytest.skip("this torch has no torch.distributed.fsdp.fully_shard")
    for order, (whole, from_checkpoint) in found.items():
        assert whole == from_checkpoint, order


def test_two_ranks_have_the_first_gradients_of_one_large_batch(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        found = rank["gradients_of_one_large_batch"]
        assert found["float"][0] < 1e-5
        assert found["fixed clips"][0] < 1e-5 and 0.9 < found["fixed clips"][2] < 0.99999, "in int8, and not all saturated"
        for live in ("live clips", "unified-int8"):
            assert found[live][1] >= 0.999 and 0.9 < found[live][2] < 0.99999, live


@pytest.mark.slow
def test_a_hundred_steps_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        HEADER
        + "import json, os, pathlib\n"
        + "import torch, torch.distributed as dist\n"
        + "from replicas import RECIPES, leave, replicated\n"
        + "torch.set_num_threads(1)\n"
        + "dist.init_process_group('gloo')\n"
        + "runs = {f'{recipe} {policy}': replicated(recipe, policy, 100, (5, 6, 50) if policy == 'skip' else ())\n"
        + "        for recipe in RECIPES for policy in ('raise', 'skip')}\n"
        + "pathlib.Path(__file__).with_name(f'rank{dist.get_rank()}.json').write_text(json.dumps(runs))\n"
        + "dist.barrier()\n"
        + "leave()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    here, there = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert len(here) == 2 * len(RECIPES)
    for name, run in here.items():
        assert run == there[name], name
        assert run["skipped"] == (3 if name.endswith("skip") else 0) and run["finite"], name
