# SPDX-License-Identifier: Apache-2.0
"""Runs guarded calls and says after each that it is over: `python -m guard [FUNCTION ...]`.

A fault ends the process, so whoever started it knows from the last lines which function was at fault, on which path and where.
"""

from __future__ import annotations

import faulthandler
import sys

import torch

from byteback.ops.backends import paths
from byteback.ops.backends.cpu import library
from guard import calls
from guard.memory import Arena

RUNS = (("end", 1), ("end", 3), ("begin", 3))  # where the buffers are, and how many threads take part


def outcome(name: str, placement: str, path: str, threads: int) -> list[torch.Tensor]:
    arena = Arena(placement, seed=len(name))
    calls.ALL[name](arena, library.NUMBERS[path], threads)
    made = [result.view(torch.uint8).clone() for result in arena.results]
    arena.close()
    return made


def main() -> int:
    faulthandler.enable()
    native_paths = [path for path in paths.available() if path != "reference"]
    for name in sys.argv[1:] or calls.ALL:
        for path in native_paths:
            plain = outcome(name, "plain", path, 1)
            for placement, threads in RUNS:
                print(f"{name} on path {path} with {threads} threads, buffers at the {placement} of their pages", flush=True)
                guarded = outcome(name, placement, path, threads)
                different = [i for i, (a, b) in enumerate(zip(guarded, plain, strict=True)) if not torch.equal(a, b)]
                assert guarded and not different, f"{name}: results {different} of {len(guarded)} differ from ordinary memory's"
        print(f"end {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
