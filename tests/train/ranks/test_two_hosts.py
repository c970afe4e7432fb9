# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: network namespaces with a cable between them, which is cut while they train together."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from launched import RECIPE, SMALL, TORCHRUN, TRAIN, ended, sha, start, torchrun, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed"),
]
NAMES = [f"byteback{os.getpid()}-{number}" for number in range(2)]
CABLE, ADDRESSES = "byteback", ("10.77.22.1", "10.77.22.2")


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two namespaces; the interface of each is called as CABLE says."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        for name in NAMES:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this system gives no network namespaces: {error.stderr}")
    try:
        ip("link", "add", CABLE, "netns", NAMES[0], "type", "veth", "peer", "name", CABLE, "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            for link in ("lo", CABLE):
                ip("-n", name, "link", "set", link, "up")
        yield
    finally:
        for name in NAMES:
            ip("netns", "del", name)


def on(cwd: Path, host: int, *args: str) -> subprocess.Popen[str]:
    """What a person types on one of two machines."""
    place = ("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(host))
    meeting = ("--master-addr", ADDRESSES[0], "--master-port", "29622")
    inside = ("ip", "netns", "exec", NAMES[host])
    return start([*inside, *TORCHRUN, *place, *meeting, *TRAIN, *SMALL, *RECIPE, *args], cwd, GLOO_SOCKET_IFNAME=CABLE)


def test_two_hosts_train_one_run_and_a_cut_cable_loses_nothing(hosts: None, tmp_path: Path) -> None:
    together = torchrun(tmp_path, *SMALL, *RECIPE, "--output-dir", "one-host")
    _, error = together.communicate(timeout=900)
    assert together.returncode == 0, error
    for code, error in ended([on(tmp_path, host, "--output-dir", "two-hosts") for host in range(2)]):
        assert code == 0, error
    assert sha(tmp_path / "two-hosts") == sha(tmp_path / "one-host")

    args = ("--output-dir", "cut", "--resume", "auto", "--checkpoint-seconds", "0", "--rank-timeout", "150")
    machines = [on(tmp_path, host, *args) for host in range(2)]
    wait_for(machines[0], tmp_path / "cut", 8)
    ip("-n", NAMES[0], "link", "set", CABLE, "down")
    cut = time.monotonic()
    (here, first), (there, second) = ended(machines)
    print(f"both ended within {time.monotonic() - cut:.0f} s\n{first}\n----\n{second}")
    assert here != 0 and there != 0
    for text in (first, second):
        said = [line for line in text.splitlines() if line.startswith("byteback: train:")]
        assert len(said) == 1 and "--resume auto" in said[0], text
    assert "rank 1" in first and "did not answer in unified-int8 seed 0" in first
    assert "the connection to the other processes is lost in unified-int8 seed 0" in second

    ip("-n", NAMES[0], "link", "set", CABLE, "up")
    for code, error in ended([on(tmp_path, host, *args) for host in range(2)]):
        assert code == 0, error
    assert sha(tmp_path / "cut") == sha(tmp_path / "one-host")
