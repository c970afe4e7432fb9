# SPDX-License-Identifier: Apache-2.0
"""Fields of a case: each knows how a value is drawn and which values are simpler than a given one, the simplest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Case = dict[str, Any]
# Around the widths of vectors, blocks and panels: where a kernel changes its way.
EDGES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 70)


class Field(Protocol):
    def draw(self, rng: np.random.Generator) -> Any: ...

    def simpler(self, value: Any) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Choice:
    """One of some options, the simplest first; an option that is written twice is drawn twice as often."""

    options: tuple[Any, ...]

    def draw(self, rng: np.random.Generator) -> Any:
        return self.options[int(rng.integers(len(self.options)))]

    def simpler(self, value: Any) -> Iterator[Any]:
        for option in dict.fromkeys(self.options):
            if option == value:
                return
            yield option


@dataclass(frozen=True)
class Number:
    """An integer in [low, high], one of `favoured` half of the time."""

    low: int
    high: int
    favoured: tuple[int, ...] = ()

    def draw(self, rng: np.random.Generator) -> int:
        if self.favoured and rng.random() < 0.5:
            return int(rng.choice(self.favoured))
        return int(rng.integers(self.low, self.high + 1))

    def simpler(self, value: int) -> Iterator[int]:
        seen = {value}
        for candidate in (self.low, (self.low + value) // 2, value - 1):
            if candidate >= self.low and candidate not in seen:
                seen.add(candidate)
                yield candidate


@dataclass(frozen=True)
class Axes:
    """Three numbers, one for each spatial axis that there may be; those in front are used."""

    each: Number | Choice

    def draw(self, rng: np.random.Generator) -> list[Any]:
        return [self.each.draw(rng) for _ in range(3)]

    def simpler(self, value: list[Any]) -> Iterator[list[Any]]:
        for axis in range(3):
            for candidate in self.each.simpler(value[axis]):
                yield [*value[:axis], candidate, *value[axis + 1 :]]


CHANNELS = Number(1, 40, EDGES)
THREADS = Choice((1, 2, 3))
SEED = Number(0, 2**31)
YES = Choice((False, True))


def channels(most: int) -> Number:
    return Number(1, most, tuple(edge for edge in EDGES if edge <= most))
