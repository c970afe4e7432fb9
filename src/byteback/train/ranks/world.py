# SPDX-License-Identifier: Apache-2.0
"""The processes that train together, as torchrun starts them: who they are, and what they tell each other.

Without torchrun there is one process, and everything here does nothing. Rank 0 speaks and writes. Whatever decides how training
goes on (a signal, a NaN, an unreadable image, the time for a checkpoint) is agreed on, so no rank waits for one that has gone.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
_LOADING = timedelta(days=2)  # rank 0 may download data or scan images while the others wait
_GRACE = 5.0  # seconds for the other ranks to say that they are alive
_LOST = ("gloo", "Connection closed", "Timed out waiting", "NCCL", "Connection reset", "socketTimeout", "Broken pipe")


def shared(error: E) -> E:
    """Marks an error that all ranks raise together: only rank 0 prints it."""
    error.byteback_shared = True  # type: ignore[attr-defined]
    return error


def is_shared(error: Exception) -> bool:
    """Whether all ranks raise this error together."""
    return getattr(error, "byteback_shared", False)


class LostRank(RuntimeError):
    """Another rank no longer answers. The message is empty on ranks that leave it to another one to say so."""


class World:
    """One process that trains alone; `Ranks` are several."""

    rank, size = 0, 1

    @property
    def is_first(self) -> bool:
        """Whether this process speaks and writes files."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, to every rank."""
        return [value]

    def total(self, values: Sequence[float]) -> list[float]:
        """Returns the sums over all ranks."""
        return list(values)

    def from_first(self, compute: Callable[[], T]) -> T:
        """Returns what rank 0 computes. If it raises an error, all ranks do."""
        return compute()

    def together(self, compute: Callable[[], T]) -> T:
        """Returns what this rank computes, rank 0 before the others. If one of them raises an error, all ranks do."""
        return compute()

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites tensors with those of rank 0."""

    def why_lost(self, error: Exception, where: str) -> str | None:
        """Returns which ranks no longer answer, after a collective has failed; None for another error."""
        return None

    def leave(self) -> None:
        """Ends the connection to the other processes."""


class Ranks(World):
    """Several processes that train one network together."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.store = PrefixStore("byteback", store)
        dist.init_process_group(
            "gloo", store=PrefixStore("training", store), rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def total(self, values: Sequence[float]) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return [float(value) for value in sums.tolist()]

    def from_first(self, compute: Callable[[], T]) -> T:
        found: list[Any] = [None, None]
        error: Exception | None = None
        if self.is_first:
            try:
                found = [None, compute()]
            except Exception as raised:
                error = raised
                found = [(type(raised), str(raised)), None]
        dist.broadcast_object_list(found)
        if error is not None:
            raise error
        if found[0] is not None:
            kind, text = found[0]
            raise shared(kind(text) if issubclass(kind, (ValueError, OSError, RuntimeError)) else ValueError(text))
        value: T = found[1]
        return value

    def together(self, compute: Callable[[], T]) -> T:
        value, error = None, ""
        if not self.is_first:
            self.store.wait(["first"], _LOADING)
        try:
            value = compute()
        except (ValueError, ImportError, RuntimeError, OSError) as raised:
            error = str(raised)
        if self.is_first:
            self.store.set("first", "done")
        self._raise_first(self.gather(error))
        assert value is not None
        return value

    def _raise_first(self, errors: list[str]) -> None:
        rank = next((rank for rank, error in enumerate(errors) if error), None)
        if rank is not None:
            raise shared(ValueError(errors[rank] if errors[0] else f"rank {rank} of {self.size}: {errors[rank]}"))

    def share(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0)

    def why_lost(self, error: Exception, where: str) -> str | None:
        if not isinstance(error, RuntimeError) or not any(sign in str(error) for sign in _LOST):
            return None
        try:
            self.store.set(f"alive/{self.rank}", where)
            deadline = time.monotonic() + _GRACE
            keys = [f"alive/{rank}" for rank in range(self.size)]
            while time.monotonic() < deadline and not all(self.store.check([key]) for key in keys):
                time.sleep(0.1)
            alive = [rank for rank, key in enumerate(keys) if self.store.check([key])]
            names = {rank: self.store.get(f"name/{rank}").decode() for rank in range(self.size) if rank not in alive}
        except RuntimeError:  # the process that holds the store has gone
            return f"train: the connection to the other processes is lost {where}. {_NEXT}"
        if alive[0] != self.rank:
            return ""  # another rank says it
        if not names:
            return f"train: the connection between the ranks was cut {where}. {_NEXT}"
        who = ", ".join(f"rank {rank} ({name})" for rank, name in names.items())
        return (
            f"train: {who} did not answer {where}: it has died, hangs, or is cut off; the others waited up to "
            f"{self.timeout:g} s (--rank-timeout). {_NEXT}"
        )

    def name_myself(self) -> None:
        """Tells the others who this rank is, for their errors."""
        self.store.set(f"name/{self.rank}", f"{socket.gethostname()}, process {os.getpid()}")

    def leave(self) -> None:
        dist.destroy_process_group()


_NEXT = "Start the same command again with --resume auto to go on from the last checkpoint."


def join(timeout: float) -> World:
    """Joins the other processes if torchrun has started several."""
    size = int(os.environ.get("WORLD_SIZE") or "1")
    if size < 2:
        return World()
    if not dist.is_available():
        raise RuntimeError("train: this build of PyTorch has no torch.distributed. Start one process without torchrun.")
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
        store.set_timeout(timedelta(seconds=timeout))
        # After a restart torchrun may hand out the same store, with the addresses of processes that have died.
        store = PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        missing = _missing(store, rank, size, timeout)
    except RuntimeError as error:
        rank, missing = int(os.environ.get("RANK") or "0"), []
        text = (str(error).splitlines() or [""])[0]
        raise _absent(
            rank, f"not all of the {size} processes could meet at {_address()} within {timeout:g} s: {text}"
        ) from error
    if missing:
        who = ", ".join(map(str, missing))
        raise _absent(rank, f"rank {who} of {size} processes did not come to {_address()} within {timeout:g} s")
    ranks = Ranks(store, rank, size, timeout)
    ranks.name_myself()
    return ranks


def _missing(store: Any, rank: int, size: int, timeout: float) -> list[int]:
    """Returns the ranks that do not come."""
    here = PrefixStore("here", store)
    here.set(str(rank), "here")
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        missing = [other for other in range(size) if not here.check([str(other)])]
        if not missing:
            return []
        time.sleep(0.05)
    return missing


def _absent(rank: int, what: str) -> RuntimeError:
    advice = "Start all of them with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or let torchrun do it."
    error = RuntimeError(f"train: {what}. {advice}" if rank == 0 else "")
    return error


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
