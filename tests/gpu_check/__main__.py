# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check`: everything that can be proven about the GPU's kernels on a machine without a GPU.

make gpu-check                             the checks
make gpu-check ARGS='--table'              the table of docs/13-gpus.md
make gpu-check ARGS='--targets sm_80'      one target only
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

os.environ["TRITON_INTERPRET"] = "0"  # this process compiles


def main() -> int:
    from byteback.nn.layers import float_table
    from gpu_check import compiled, report

    parser = argparse.ArgumentParser(prog="make gpu-check")
    parser.add_argument("--table", action="store_true", help="print the table of the products")
    parser.add_argument("--targets", default=",".join((*compiled.NVIDIA, *compiled.AMD)))
    parser.add_argument("--compile-only", action="store_true", help="leave out the tests that run kernels in the interpreter")
    parser.add_argument("--products", action="store_true", help="only the three products")
    asked = parser.parse_args()
    float_table.RULES = ()  # small layers run in int8 too
    targets = asked.targets.split(",")
    launches = report.recorded()
    if asked.table:
        print("\n".join(report.table(launches, targets)))
        return 0
    print(f"a training step launches {len(launches)} different kernels and looks at no value", flush=True)
    chosen = report.core(launches)
    if asked.products:
        chosen = report.largest(chosen)
    found = report.check(chosen, targets, lambda line: print(line, flush=True))
    print("\n".join(found) or "no faults")
    if asked.compile_only or found:
        return int(bool(found))
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "tests/ops/triton"]
    return subprocess.run(tests, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
