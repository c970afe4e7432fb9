# SPDX-License-Identifier: Apache-2.0
"""`make sanitize`: the kernel and block tests under ASan and UBSan, then the kernels in several threads under TSan.

make sanitize                                  everything
make sanitize ARGS='--only memory -k winograd' ASan and UBSan; further options go to pytest
make sanitize ARGS='--only threads'            TSan
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from sanitize import build, threads

# Everything that drives a kernel. Left out: what asks the pool to use memory again, which this build does not
# (csrc/core/aligned.h), what starts processes of its own with the ordinary library, and torch.compile.
TESTS = [
    "tests/sanitize/cases.py",
    "tests/fuzz",
    "tests/ops",
    "tests/nn",
    "tests/test_detection_ops.py",
    "tests/test_ten_losses.py",
]
LEFT_OUT = [
    "tests/ops/test_allocator.py",
    "tests/ops/test_guard_pages.py",
    "tests/ops/test_opcheck.py",
    "tests/nn/test_compile.py",
]

ASAN = {
    "detect_leaks": 0,  # Python and PyTorch keep what they have until the process ends, by design
    "halt_on_error": 1,
    "strict_init_order": 1,
    "detect_stack_use_after_return": 1,
    "malloc_fill_byte": 255,  # of new memory, NaN and -1: whoever uses what nobody wrote gives another result, and a test fails
    "max_malloc_fill_size": 1 << 30,
    "allocator_may_return_null": 1,  # a test asks for more memory than there is
}
UBSAN = {"halt_on_error": 1, "print_stacktrace": 1}


def _options(options: dict[str, int]) -> str:
    return ":".join(f"{name}={value}" for name, value in options.items())


def memory(rest: list[str]) -> int:
    """pytest's exit code on the sanitized library."""
    build.build()
    # The sanitizer's runtime must come before Python's own libraries; and libstdc++ with it, or it does not find its throw.
    preload = f"{build.runtime('libasan.so')} {build.runtime('libstdc++.so.6')}"
    environment = {
        **os.environ,
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": _options(ASAN),
        "UBSAN_OPTIONS": _options(UBSAN),
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": str(build.ROOT / "tests"),
        "PYTHONMALLOC": "malloc",  # Python's own objects too
    }
    left_out = [f"--ignore={path}" for path in LEFT_OUT]
    # A report goes to the file descriptor itself; captured there it would be lost with the process.
    options = ["-q", "-p", "sanitize.plugin", "-p", "no:cacheprovider", "--capture=sys"]
    command = [sys.executable, "-m", "pytest", *options, *TESTS, *left_out, *rest]
    return subprocess.run(command, cwd=build.ROOT, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="sanitize", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["memory", "threads"])
    arguments, rest = parser.parse_known_args()
    code = 0
    if arguments.only != "threads":
        code = memory(rest)
    if arguments.only != "memory":
        code = threads.run() or code
    return code


if __name__ == "__main__":
    sys.exit(main())
