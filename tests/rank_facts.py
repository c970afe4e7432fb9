# SPDX-License-Identifier: Apache-2.0
"""What two ranks find out about themselves, one function for each fact; test_lr_ranks.py runs them and compares the ranks."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Optimizer

import byteback
from byteback import Choice, Recipe, TensorRule
from byteback.recipes import resolve
from replicas import digest, images, network, step

collectives: list[str] = []
all_reduce = dist.all_reduce


def _counted(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *rest: Any, **named: Any) -> Any:
    collectives.append(str(op))
    return all_reduce(tensor, op, *rest, **named)


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(dist.get_rank())


def collectives_of_a_step() -> list[int]:
    """Of a step that is taken, of one that is dropped, and of one after it."""
    model = network("unified-int8", "skip")
    run, optimizer = DistributedDataParallel(model), SGD(model.parameters(), lr=0.05)
    byteback.scale_learning_rates(optimizer, model)
    draw, counted = _draw(), []
    for bad in (False, True, False):
        collectives.clear()
        step(run, optimizer, draw, float("nan") if bad and dist.get_rank() else 1.0)
        counted.append(len(collectives))
    return counted


def nan_in_a_micro_batch() -> tuple[int, str]:
    """On rank 1, in the first of two; DDP overwrites the buffers of rank 1 before the second."""
    model = network("unified-int8", "skip")
    run, optimizer = DistributedDataParallel(model), SGD(model.parameters(), lr=0.05)
    scaling = byteback.scale_learning_rates(optimizer, model)
    draw = _draw()
    for factor in (float("nan") if dist.get_rank() else 1.0, 1.0):
        (run(images(draw)).square().mean() * factor).backward()
    optimizer.step()
    return scaling.skipped, digest(model.parameters())


class Levels(nn.Module):
    """As the heads of a detector: what has no objects is not called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.body, self.level = nn.Conv2d(2, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        return self.level(x) if dist.get_rank() else x


def layer_that_rank_0_never_calls() -> tuple[int, dict[str, float], str]:
    """How often it drew noise; the factors; the weights."""
    model: Any = byteback.prepare(Levels(), byteback.UnifiedInt8(strict=True))
    run = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = SGD(model.parameters(), lr=0.05)
    scaling = byteback.scale_learning_rates(optimizer, model)
    draw = _draw()
    for _ in range(4):
        optimizer.zero_grad()
        run(images(draw)).square().mean().backward()
        optimizer.step()
    return int(model.level.quantizers.count), scaling.factors(), digest(model.parameters())


def closures() -> dict[str, tuple[dict[str, float], str]]:
    """The gradients, and so the agreement, come during the step."""
    builders: dict[str, Callable[[Any], Optimizer]] = {
        "sgd": lambda p: SGD(p, lr=0.05),
        "lbfgs": lambda p: LBFGS(p, lr=0.1, max_iter=2),
    }
    found = {}
    for name, build in builders.items():
        model = network("unified-int8")
        run, optimizer = DistributedDataParallel(model), build(model.parameters())
        scaling, draw = byteback.scale_learning_rates(optimizer, model), _draw()
        for _ in range(3):
            batch = images(draw)

            def closure(run: nn.Module = run, optimizer: Optimizer = optimizer, batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = run(batch).square().mean()
                loss.backward()
                shared = loss.detach().clone()
                all_reduce(shared)  # LBFGS decides by it
                return shared

            optimizer.step(closure)  # type: ignore[arg-type]
        found[name] = scaling.factors(), digest(model.parameters())
    return found


def resumed() -> list[str]:
    """The weights of a run, and those of one that goes on from a checkpoint that rank 0 wrote."""
    found = []
    for interrupted in (False, True):
        draw, saved = _draw(), None
        for steps in (13, 12):
            if saved is None or interrupted:
                model = network("unified-int8")
                run, optimizer = DistributedDataParallel(model), SGD(model.parameters(), lr=0.05, momentum=0.9)
                byteback.scale_learning_rates(optimizer, model)
            if saved is not None and interrupted:
                dist.broadcast_object_list(saved)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            for _ in range(steps):
                step(run, optimizer, draw)
            saved = [model.state_dict(), optimizer.state_dict()]
        found.append(digest(model.parameters()))
    return found


def partitioned() -> dict[str, tuple[int, str]]:
    """Iterations and weights, where each rank steps all weights, and where it steps its part of them."""
    found = {}
    for name in ("every rank steps all", "ZeroRedundancyOptimizer"):
        model = network("unified-int8")
        optimizer: Optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        if name != "every rank steps all":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.05, momentum=0.9)
        run, draw = DistributedDataParallel(model), _draw()
        byteback.scale_learning_rates(optimizer, model)
        for _ in range(12):
            step(run, optimizer, draw)
        found[name] = int(model[2][0].quantizers.iteration), digest(model.parameters())
    return found


def group_of_one() -> int:
    """How many collectives there are where each rank trains a model by itself."""
    alone = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    model = network("unified-int8")
    optimizer = SGD(model.parameters(), lr=0.05)
    byteback.scale_learning_rates(optimizer, model, process_group=alone)
    collectives.clear()
    step(model, optimizer, _draw())
    return len(collectives)


def sharded() -> dict[str, tuple[str, dict[str, float], str]] | None:
    """Kind of weight, factors and weights under DDP (with blocks and without) and FSDP2; None where there is no FSDP2."""
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        return None
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for order in ("ddp", "ddp without blocks", "prepare, shard", "shard, prepare"):
        model = network("unified-int8", fuse=order != "ddp without blocks")
        recipe, run = model[2][0].recipe, model
        if order.startswith("ddp"):
            run = DistributedDataParallel(model)  # type: ignore[assignment]
        else:
            if order == "shard, prepare":
                byteback.restore(model)
            fully_shard(model[2], mesh=mesh)
            fully_shard(model, mesh=mesh)
            if order == "shard, prepare":
                byteback.prepare(model, recipe)
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaling, draw = byteback.scale_learning_rates(optimizer, model), _draw()
        for _ in range(12):
            step(run, optimizer, draw)
        found[order] = type(model[2][0].weight).__name__, scaling.factors(), digest(model.parameters())
    return found


def partly_sharded() -> list[str] | None:
    """The kinds of weights in one optimizer, where FSDP2 has only some of them."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        return None
    model = network("unified-int8")
    fully_shard(model[2][0], mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = SGD(model.parameters(), lr=0.05, foreach=False)  # torch's own foreach does not mix them
    byteback.scale_learning_rates(optimizer, model)
    for _ in range(2):
        step(model, optimizer, _draw())
    return [type(layer.weight).__name__ for layer in (model[2][0], model[2][3])]


def _compressed(state, bucket):  # type: ignore[no-untyped-def]
    """bf16_compress_hook by another name: DDP accepts that one with NCCL only, but it runs on gloo as well."""
    return default_hooks.bf16_compress_hook(state, bucket)


def options_of_ddp() -> dict[str, tuple[int, str]]:
    """How often a layer drew noise, and the weights, for each way to reduce gradients; two micro-batches in a step."""
    found = {}
    for name in ("plain", "static_graph", "bucket views", "bf16 hook", "no buffers"):
        given: dict[str, Any] = {
            "static_graph": name == "static_graph",
            "gradient_as_bucket_view": name == "bucket views",
            "broadcast_buffers": name not in ("no buffers", "static_graph"),
        }
        model = network("unified-int8")
        run, optimizer = DistributedDataParallel(model, **given), SGD(model.parameters(), lr=0.05, momentum=0.9)
        if name == "bf16 hook":
            run.register_comm_hook(None, _compressed)
        byteback.scale_learning_rates(optimizer, model)
        draw = _draw()
        for _ in range(6):
            optimizer.zero_grad()
            # PyTorch has no no_sync in the first step of a static graph.
            with run.no_sync() if name != "static_graph" else contextlib.nullcontext():
                run(images(draw)).square().mean().backward()
            run(images(draw)).square().mean().backward()
            optimizer.step()
        found[name] = int(model[2][0].quantizers.count), digest(model.parameters())
    return found


def sharded_checkpoint() -> dict[str, list[str]] | None:
    """The weights of a sharded run, and of one that goes on from a checkpoint of torch.distributed.checkpoint."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        return None
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))

    def shard(model: nn.Sequential) -> None:
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)

    found = {}
    for order in ("prepare, shard", "shard, prepare"):
        places: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(places)
        found[order] = [_sharded_run(order, shard, places[0], goes_on) for goes_on in (False, True)]
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(places[0])
    return found


def _sharded_run(order: str, shard: Callable[[nn.Sequential], None], place: str, goes_on: bool) -> str:
    """12 steps with a checkpoint in the middle, or the last 6 of them from that checkpoint. Returns the weights."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, draw = network("unified-int8"), _draw()
    if order == "shard, prepare":
        recipe = model[2][0].recipe
        byteback.restore(model)
        shard(model)
        byteback.prepare(model, recipe)
    else:
        shard(model)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    byteback.scale_learning_rates(optimizer, model)
    if goes_on:
        weights, momentum = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": momentum}
        checkpoint.load(state, checkpoint_id=place)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for _ in range(6):  # the data of the first half
            images(draw), torch.randint(0, 3, (4,), generator=draw)
    for number in range(6 if goes_on else 12):
        if number == 6:
            weights, momentum = get_state_dict(model, optimizer)
            checkpoint.save({"model": weights, "optimizer": momentum}, checkpoint_id=place)
        step(model, optimizer, draw)
    return digest(model.parameters())


@dataclass(frozen=True)
class Fixed(byteback.ClipRule):
    """A clip that does not depend on the images."""

    clip: float = 1.0

    def choose(self, x: Tensor, axis: int, memory: Any) -> Choice:
        return Choice(torch.full([1] * x.dim(), self.clip))


def _without_norms(arithmetic: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)),
    )
    if arithmetic == "float":
        return model
    kept = Recipe(
        **{"input": TensorRule(Fixed(2.0)), "weight": TensorRule(Fixed(0.3)), "grad_output": TensorRule(Fixed(1e-3))},
        strict=True,
    )
    live = Recipe(grad_output=TensorRule(), strict=True)
    recipes = {"fixed clips": kept, "live clips": live, "unified-int8": resolve("unified-int8")}
    return byteback.prepare(model, replace(recipes[arithmetic], strict=True))


def gradients_of_one_large_batch() -> dict[str, tuple[float, float, float]]:
    """For each arithmetic: relative difference and cosine of the first gradients of 2 x 64 images and of 1 x 128, and the
    cosine of the latter with those of float.
    """
    draw, rank, found = torch.Generator().manual_seed(5), dist.get_rank(), {}
    exact: list[Tensor] = []
    batch, labels = torch.randn(128, 3, 8, 8, generator=draw), torch.randint(0, 10, (128,), generator=draw)
    for arithmetic in ("float", "fixed clips", "live clips", "unified-int8"):
        sides = []
        for own in (slice(64 * rank, 64 * rank + 64), slice(None)):
            model = _without_norms(arithmetic)
            run = model if own == slice(None) else DistributedDataParallel(model)
            # Gradients of a mean over half the images are twice as large, and a fixed clip would not follow.
            (nn.functional.cross_entropy(run(batch[own]), labels[own], reduction="sum") / 128).backward()
            scale = 1.0 if own == slice(None) else 2.0  # DDP takes the mean over ranks
            sides.append(torch.cat([scale * parameter.grad.flatten() for parameter in model.parameters()]).double())
        parts, whole = sides
        exact.append(whole)
        cosines = [float(nn.functional.cosine_similarity(whole, other, dim=0)) for other in (parts, exact[0])]
        found[arithmetic] = float((parts - whole).norm() / whole.norm()), *cosines
    return found


def tell() -> None:
    """Prints all facts as JSON."""
    warnings.simplefilter("ignore")  # that steps are dropped
    dist.all_reduce = _counted
    every = (
        collectives_of_a_step,
        nan_in_a_micro_batch,
        layer_that_rank_0_never_calls,
        closures,
        resumed,
        partitioned,
        group_of_one,
        sharded,
        partly_sharded,
        options_of_ddp,
        sharded_checkpoint,
        gradients_of_one_large_batch,
    )
    print(json.dumps({fact.__name__: fact() for fact in every}), flush=True)
