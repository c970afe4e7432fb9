# SPDX-License-Identifier: Apache-2.0
"""Runs a case on every path and compares it with its oracle; makes a failing case smaller."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from byteback.ops.backends import paths as kernel_paths
from fuzz.fields import SEED, THREADS, Case, Field
from oracles.bits import array_of, difference

PATHS = tuple(reversed(kernel_paths.available()))  # from the plainest to the fastest


@dataclass
class Check:
    """What a case asks: a call, what it must return, and the tensors that it must leave alone."""

    call: Callable[[], Any]
    expected: Any
    inputs: list[Tensor]
    paths: tuple[str, ...] = PATHS
    may_refuse: bool = False  # a TypeError or ValueError is as good, if every path raises it
    same_strides: bool = False  # every path lays its result out alike


@dataclass(frozen=True)
class Kind:
    """A family of cases: its fields, how often it is drawn, and what a case of it asks."""

    name: str
    weight: int
    fields: dict[str, Field]
    build: Callable[[Case, np.random.Generator], Check]
    bias: Callable[[Case, np.random.Generator], None] = field(default=lambda case, rng: None)

    def all_fields(self) -> dict[str, Field]:
        return {**self.fields, "threads": THREADS, "data": SEED}

    def draw(self, rng: np.random.Generator) -> Case:
        case = {"kind": self.name, **{name: one.draw(rng) for name, one in self.all_fields().items()}}
        self.bias(case, rng)
        return case


class Failure(NamedTuple):
    path: str
    message: str


_MODULES = ("products", "quantize", "statistics", "forward", "backward", "clips", "coefficients", "pools", "transposed")


def kinds() -> dict[str, Kind]:
    modules = [importlib.import_module(f"fuzz.kind_{name}") for name in _MODULES]
    return {kind.name: kind for module in modules for kind in module.KINDS}


KINDS: dict[str, Kind] = {}


def _kind(name: str) -> Kind:
    if not KINDS:
        KINDS.update(kinds())
    return KINDS[name]


def draw(seed: int, index: int, only: tuple[str, ...] = ()) -> Case:
    """The case number `index` of a seed: always the same, whoever draws it."""
    if not KINDS:
        KINDS.update(kinds())
    rng = np.random.default_rng((seed, index))
    names = [kind.name for kind in KINDS.values() if not only or kind.name in only for _ in range(kind.weight)]
    return KINDS[names[int(rng.integers(len(names)))]].draw(rng)


def failure_of(case: Case, paths: tuple[str, ...] = ()) -> Failure | None:
    """How a case fails, on these paths or on all; None where every path gives what the oracle says."""
    torch.set_num_threads(case["threads"])
    with np.errstate(all="ignore"):
        check = _kind(case["kind"]).build(case, np.random.default_rng(case["data"]))
        before = [tensor.clone() for tensor in check.inputs]
        wanted = [path for path in check.paths if not paths or path in paths]
        failure = _on_paths(check, wanted)
    if failure is None:
        for number, (tensor, copy) in enumerate(zip(check.inputs, before, strict=True)):
            if difference(tensor, array_of(copy), "input") is not None:
                return Failure(wanted[-1], f"input {number} was written to")
    return failure


def _on_paths(check: Check, paths: list[str]) -> Failure | None:
    refused: dict[str, str] = {}
    strides: dict[str, Any] = {}
    for path in paths:
        try:
            with kernel_paths.path(path):
                made = check.call()
        except (TypeError, ValueError) as error:
            if not check.may_refuse:
                return Failure(path, f"{type(error).__name__}: {error}")
            refused[path] = type(error).__name__
            continue
        except Exception:
            return Failure(path, traceback.format_exc(limit=-3))
        found = difference(made, check.expected)
        if found is not None:
            return Failure(path, found)
        if check.same_strides:
            strides[path] = [(s, n) for s, n in zip(made.stride(), made.shape, strict=True) if n > 1]
            first = next(iter(strides))
            if strides[path] != strides[first]:
                return Failure(path, f"the result has strides {strides[path]}, but {strides[first]} on path {first!r}")
    if refused and len(refused) != len(paths):
        return Failure(next(iter(refused)), f"refused on {sorted(refused)}, but not on the other paths")
    return None


def simpler_cases(case: Case) -> Iterator[Case]:
    """Cases that differ in one field, which is simpler."""
    for name, one in _kind(case["kind"]).all_fields().items():
        for value in one.simpler(case[name]):
            yield {**case, name: value}


def shrink(case: Case, still_fails: Callable[[Case], bool], attempts: int = 600) -> Case:
    """The smallest failing case that is found by simplifying one field at a time."""
    improved = True
    while improved and attempts > 0:
        improved = False
        for candidate in simpler_cases(case):
            attempts -= 1
            if still_fails(candidate):
                case, improved = candidate, True
                break
            if attempts <= 0:
                break
    return case
