# SPDX-License-Identifier: Apache-2.0
"""Runs a script in several processes, the ranks of one gloo group, and hands back what each of them printed.

A script and not torch.multiprocessing: pytest imports a test file in a way that a spawned process could not repeat. The script
is called with its rank and the name of a file to meet at. It must end by os._exit(0): gloo's threads may still let go of
tensors while the interpreter shuts down, and then abort it, once in hundreds of runs (pytorch/pytorch#179291); what is tested
has been printed by then.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import byteback

HERE, SOURCE = Path(__file__).parent, Path(byteback.__file__).parents[1]
HEADER = f"import sys\nsys.path[:0] = [{str(SOURCE)!r}, {str(HERE)!r}]\n"


def run_ranks(script: str, folder: Path, ranks: int = 2, timeout: float = 300.0) -> list[str]:
    """The standard output of every rank. A rank that fails, or that waits for another one for ever, fails the test."""
    if not torch.distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    command = [sys.executable, "-c", HEADER + textwrap.dedent(script)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "meeting")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    outputs = []
    try:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=timeout)
            assert process.returncode == 0, f"rank {rank}: {err}"
            outputs.append(out)
    finally:
        for process in processes:
            process.kill()
    return outputs
