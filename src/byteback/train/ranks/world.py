# SPDX-License-Identifier: Apache-2.0
"""The processes that train together, as torchrun starts them: who they are, and what they tell each other.

Without torchrun there is one process, and everything here does nothing. Rank 0 speaks and writes. Whatever decides how training
goes on (a signal, a NaN, an unreadable image, the time for a checkpoint) is agreed on, so no rank waits for one that has gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

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
        lost = f"train: the connection to the other processes is lost {where}. {_NEXT}"
        found = _within(2 * _GRACE, lambda: self._who_answers(where))
        if found is None:  # the process that holds the store has gone, or the network to it
            return lost
        alive, names = found
        if alive[0] != self.rank:
            return ""  # another rank says it
        if not names:
            return f"train: the connection between the ranks was cut {where}. {_NEXT}"
        who = ", ".join(f"rank {rank} ({name})" for rank, name in names.items())
        return (
            f"train: {who} did not answer {where}: it has died, hangs, or is cut off; the others waited up to "
            f"{self.timeout:g} s (--rank-timeout). {_NEXT}"
        )

    def _who_answers(self, where: str) -> tuple[list[int], dict[int, str]]:
        """Returns the ranks that can still say something, and the names of those that cannot."""
        keys = [f"alive/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], where)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and not all(self.store.check([key]) for key in keys):
            time.sleep(0.1)
        alive = [rank for rank, key in enumerate(keys) if self.store.check([key])]
        return alive, {rank: self.store.get(f"name/{rank}").decode() for rank in range(self.size) if rank not in alive}

    def name_myself(self) -> None:
        """Tells the others who this rank is, for their errors."""
        self.store.set(f"name/{self.rank}", f"{socket.gethostname()}, process {os.getpid()}")

    def leave(self) -> None:
        dist.destroy_process_group()


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Returns the answer; None if it fails, or does not come in time (PyTorch waits for ever after a cut cable)."""
    answers: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(ask())

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None


_NEXT = "Start the same command again with --resume auto to go on from the last checkpoint."


_TOGETHER = "Start all of them with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or let torchrun do it."


def join(timeout: float) -> World:
    """Joins the other processes if torchrun has started several."""
    size = int(os.environ.get("WORLD_SIZE") or "1")
    if size < 2:
        return World()
    if not dist.is_available():
        raise RuntimeError("train: this build of PyTorch has no torch.distributed. Start one process without torchrun.")
    rank = int(os.environ.get("RANK") or "0")
    address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    try:
        store = _store(rank, timeout)
        missing = _missing(store, rank, size, timeout)
    except RuntimeError as error:  # nobody can speak for the others
        why = (str(error).splitlines() or [""])[0]
        raise RuntimeError(f"train: rank {rank} of {size} processes cannot reach {address}: {why} {_TOGETHER}") from error
    if missing:
        who, first = ", ".join(map(str, missing)), min({*range(size)} - {*missing})
        text = f"train: rank {who} of {size} processes did not come to {address} within {timeout:g} s. {_TOGETHER}"
        raise RuntimeError(text if rank == first else "")
    ranks = Ranks(store, rank, size, timeout)
    ranks.name_myself()
    return ranks


def _store(rank: int, timeout: float) -> Any:
    """Returns the store where the processes meet. torchrun has one; else rank 0 does."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdigit():
        raise RuntimeError("MASTER_ADDR and MASTER_PORT must name a machine and a port.")
    holds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not holds:
        _await_listener(address, int(port), timeout)
    # It does not wait for the other ranks: `_missing` does, and knows their names.
    store = TCPStore(address, int(port), None, holds, timedelta(seconds=timeout), wait_for_workers=False)
    # After a restart torchrun may hand out the same store, with the addresses of processes that have died.
    return PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _await_listener(address: str, port: int, timeout: float) -> None:
    """Waits until somebody listens there. PyTorch waits too, but then prints pages of addresses of functions."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((address, port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{error.strerror or error} for {timeout:g} s.") from error
        time.sleep(0.1)


def _missing(store: Any, rank: int, size: int, timeout: float) -> list[int]:
    """Returns the ranks that do not come."""
    missing = _silent(store, "here", rank, range(size), timeout)
    if missing:  # the others are to see that before the one that holds the store ends
        _silent(store, "seen", rank, [other for other in range(size) if other not in missing], _GRACE)
    return missing


def _silent(store: Any, word: str, rank: int, ranks: Sequence[int], patience: float) -> list[int]:
    """Says a word to the others, and waits until `ranks` have said it. Returns those that have not."""
    said = PrefixStore(word, store)
    said.set(str(rank), word)
    deadline = time.monotonic() + patience
    while True:
        silent = [other for other in ranks if not said.check([str(other)])]
        if not silent or time.monotonic() > deadline:
            return silent
        time.sleep(0.05)
