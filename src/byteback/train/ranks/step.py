# SPDX-License-Identifier: Apache-2.0
"""What the loop does where several ranks train together: one small sum per step, shares of the test, random states.

DistributedDataParallel averages gradients over ranks. The batch of a step is cut into parts that may differ by one image, so
each rank weighs its mean loss by its share. Buffers are not broadcast in forward, where a rank that met an unreadable
image would be missed; those of rank 0 are shared after each step, and only those are in checkpoints.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from byteback.train.data import DataError, Source, draws
from byteback.train.interrupt import SIGNALS, Stop
from byteback.train.ranks.world import World, shared

_NOTHING = [0.0] * 4  # in place of what `agree_on_step` sums: all ranks send the same number of values


class Wishes(NamedTuple):
    """What must happen after a step: stop because of a signal (0 for none), save a checkpoint."""

    stop: int = 0
    save: bool = False


class Step(NamedTuple):
    """A step as all ranks see it: mean loss, correct and all images; `weight` is what this rank's loss counts for."""

    loss: float
    correct: int
    images: int
    weight: float
    wishes: Wishes


def replicate(model: nn.Module, world: World, finds_unused: bool) -> nn.Module:
    """Returns the network to call in training: the model itself, or one whose gradients are averaged over all ranks."""
    if world.size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")  # of weights with one channel
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
    return DistributedDataParallel(model, find_unused_parameters=finds_unused, gradient_as_bucket_view=True, **buffers)


def agree_on_step(world: World, loss: float, correct: int, images: int, wishes: Wishes) -> Step:
    """Sums a step over all ranks, once the loss is known. All ranks get the same numbers, and so do the same."""
    if world.size == 1:
        return Step(loss, correct, images, 1.0, wishes)
    finite = math.isfinite(loss)
    total = _exchange(world, [loss * images if finite else 0.0, correct, images, float(not finite)], wishes, None)
    mean = total.values[0] / total.values[2] if total.values[3] == 0.0 else math.nan
    count = int(total.values[2])
    return Step(mean, int(total.values[1]), count, images * world.size / count, total.wishes)


def share_norms(world: World, model: nn.Module) -> None:
    """Gives all ranks the running statistics of rank 0, as DDP does in forward. Checkpoints have only those."""
    if world.size > 1:
        own = [buffer for name, buffer in model.named_buffers() if "quantizers." not in name]
        for kind in dict.fromkeys(buffer.dtype for buffer in own):
            same = [buffer for buffer in own if buffer.dtype == kind]
            flat = torch.cat([buffer.reshape(-1) for buffer in same])
            world.share([flat])
            for buffer, part in zip(same, flat.split([buffer.numel() for buffer in same]), strict=True):
                buffer.copy_(part.view_as(buffer))


def fail_together(world: World, error: DataError) -> None:
    """Tells the other ranks that this one has no batch: all of them raise the error at this step."""
    if world.size > 1:
        _exchange(world, _NOTHING, Wishes(), error)


class _Total(NamedTuple):
    values: list[float]
    wishes: Wishes


def _exchange(world: World, values: list[float], wishes: Wishes, error: DataError | None) -> _Total:
    """One sum over all ranks. Raises DataError on every rank if one of them has an error."""
    signals = [float(wishes.stop == number) for number in SIGNALS]
    sums = world.total([*values, *signals, float(wishes.save), float(error is not None)])
    if sums[-1]:
        told = world.gather(str(error) if error is not None else "")
        rank, why = next((rank, why) for rank, why in enumerate(told) if why)
        raise shared(DataError(f"rank {rank} of {world.size}: {why}"))
    count = len(values)
    heard = next((int(number) for number, ranks in zip(SIGNALS, sums[count:-2], strict=True) if ranks), 0)
    return _Total(sums[:count], Wishes(heard, bool(sums[-2])))


# ---- the test ----


def test_batches(images: int, size: int, world: World) -> list[Tensor]:
    """Returns the batches of this rank: each image of the test is in one batch of one rank.

    >>> [batch.tolist() for batch in test_batches(5, 2, World())]
    [[0, 1], [2, 3], [4]]
    """
    return list(torch.arange(images)[world.rank :: world.size].split(size))


def stoppable(source: Source, chosen: Sequence[Tensor], stop: Stop | None, world: World) -> Iterator[Any]:
    """Yields the batches of the test. A signal, or an unreadable image of any rank, ends the test on all of them."""
    batches = source.batches(chosen, 0, 0)
    most = max(world.gather(len(chosen)))
    for number in range(most):
        try:
            batch = next(batches) if number < len(chosen) else None
        except DataError as error:
            fail_together(world, error)
            raise
        if batch is not None:
            yield batch
        if stop is not None:
            if world.size > 1:
                stop.number = _exchange(world, _NOTHING, Wishes(stop.number), None).wishes.stop
            stop.check()


# ---- random states ----


def seed_apart(world: World, seed: int, step: int = 0) -> None:
    """Gives the ranks after the first other random numbers, for dropout; all have built the same network before."""
    if world.rank:
        torch.manual_seed(int(draws.bits(seed, step, world.rank)[0, 0]) >> 1)


def random_states(world: World) -> Tensor:
    """Returns the state of torch's generator on every rank; on a single one without that axis."""
    own = torch.get_rng_state()
    return own if world.size == 1 else torch.stack(world.gather(own))


def set_random_state(world: World, states: Tensor, seed: int, step: int) -> None:
    """Continues with the stored state of this rank, or with new random numbers for a rank that was not there."""
    each = states if states.dim() == 2 else states[None]
    if len(each) == world.size or world.rank == 0:
        torch.set_rng_state(each[world.rank].clone())  # of a view PyTorch would read the whole storage
    else:
        seed_apart(world, seed, step)
