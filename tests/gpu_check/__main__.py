# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check`: everything that can be proven about the GPU's kernels on a machine without a GPU.

make gpu-check                             the checks
make gpu-check ARGS='--table'              the table of docs/13-gpus.md
make gpu-check ARGS='--targets sm_80'      one target only
make gpu-check ARGS='--ptx'                only PTX on the CPU: products and quantize on NVIDIA's targets, and the mutants
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

os.environ["TRITON_INTERPRET"] = "0"  # this process compiles


def _say(line: str) -> None:
    print(line, flush=True)


def _ptx(targets: list[str], quick: bool) -> list[str]:
    """Runs PTX on the CPU. Returns and prints the faults."""
    from gpu_check.ptx import cases, mutants

    found = cases.run([target for target in targets if target.startswith("sm_")], quick, _say)
    found += [] if quick else mutants.survivors(_say)
    print("\n".join(found) or "no faults in the PTX")
    return found


def main() -> int:
    from byteback.nn.layers import float_table
    from gpu_check import compiled, report

    parser = argparse.ArgumentParser(prog="make gpu-check")
    parser.add_argument("--table", action="store_true", help="print the table of the products")
    parser.add_argument("--targets", default=",".join(report.TARGETS))
    parser.add_argument("--compile-only", action="store_true", help="leave out the tests that run kernels in the interpreter")
    parser.add_argument("--products", action="store_true", help="only the three products")
    parser.add_argument("--ptx", action="store_true", help="only run PTX on the CPU")
    parser.add_argument("--quick", action="store_true", help="with --ptx: one shape, and no mutants")
    asked = parser.parse_args()
    float_table.RULES = ()  # small layers run in int8 too
    targets = asked.targets.split(",")
    if asked.ptx:
        return int(bool(_ptx(targets, asked.quick)))
    launches = report.recorded()
    if asked.table:
        print("\n".join(report.table(launches, [target for target in targets if target != compiled.TURING])))
        return 0
    _say(f"a training step launches {len(launches)} different kernels and looks at no value")
    chosen = report.core(launches)
    if asked.products:
        chosen = report.largest(chosen)
    found = report.check(chosen, targets, _say)
    print("\n".join(found) or "no faults")
    if asked.compile_only or found:
        return int(bool(found))
    if _ptx(targets, asked.quick):
        return 1
    # The test of PTX on all targets is what has just run.
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "-k", "not all_targets", "tests/ops/triton"]
    return subprocess.run(tests, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
