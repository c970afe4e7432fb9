# SPDX-License-Identifier: Apache-2.0
"""No native function reads or writes a byte outside its tensors, on any path: one byte too many is a fault (tests/guard).

The calls run in another process, which a fault ends; then the next one goes on after the function at fault.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from byteback.ops.backends.cpu import library as native_library
from guard import calls
from guard.memory import Arena

pytestmark = [
    pytest.mark.skipif(native_library.native is None, reason="this build has no native library"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guard pages are made with Linux's mmap"),
]
TESTS = Path(__file__).parents[1]


def run(names: list[str]) -> tuple[list[str], str]:
    """Which of the functions are over, and the last lines of whatever came after."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "guard", *names],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_WAIT_POLICY": "passive"},  # more threads than cores must not spin
        timeout=600,
        check=False,
    )
    over = [line.removeprefix("end ") for line in done.stdout.splitlines() if line.startswith("end ")]
    tail = "\n".join([*done.stdout.splitlines()[-2:], *done.stderr.splitlines()[:25]])
    return over, f"exit code {done.returncode}\n{tail}"


@functools.cache
def outcomes() -> dict[str, str]:
    """An empty string for each function that was quiet, else what is known about its end."""
    found: dict[str, str] = {}
    names = list(calls.ALL)
    while names:
        over, end = run(names)
        found.update(dict.fromkeys(over, ""))
        names = names[len(over) :]
        if names:
            found[names.pop(0)] = end
    return found


@pytest.mark.parametrize("name", calls.ALL)
def test_it_stays_within_its_tensors(name: str) -> None:
    end = outcomes()[name]
    assert not end, f"{name} touched memory beside a tensor, or gave another result there: {end}"


def test_every_native_function_has_a_guarded_call() -> None:
    names = {name for name in dir(native_library.native) if not name.startswith("_")}
    assert names == set(calls.ALL) | set(calls.WITHOUT_MEMORY) | calls.STRUCTS
    assert not set(calls.ALL) & set(calls.WITHOUT_MEMORY)


@pytest.mark.parametrize(("placement", "offset"), [("end", 16), ("begin", -1)])
def test_a_byte_beside_a_guarded_buffer_is_a_fault(placement: str, offset: int) -> None:
    """Guards the tests above: without faults they would prove nothing."""
    code = (
        "import ctypes, torch\nfrom guard.memory import Arena\n"
        f"at = Arena({placement!r}, 0).put(torch.arange(16, dtype=torch.uint8))\n"
        f"assert list((ctypes.c_uint8 * 16).from_address(at)) == list(range(16))\n"
        f"ctypes.c_uint8.from_address(at + {offset}).value\n"
    )
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=False)
    assert done.returncode == -11, done.stderr.decode()


def test_two_arenas_of_one_seed_are_filled_alike() -> None:
    values = []
    for placement in ("plain", "end"):
        arena = Arena(placement, 3)
        arena.floats(5), arena.int8(7), arena.wide(2)
        values.append([part.clone() for part in arena._alive])
        arena.close()
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))
