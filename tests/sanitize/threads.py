# SPDX-License-Identifier: Apache-2.0
"""Builds threads.cpp with every kernel under ThreadSanitizer, and runs it.

gcc is enough: OpenMP's part is gomp.cpp's, whose threads ThreadSanitizer understands. With clang one would need libomp and its
tool archer to the same end.
"""

from __future__ import annotations

import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sanitize.build import FOLDER, ROOT, SOURCES, compiler, is_older

HERE = Path(__file__).parent
DRIVER = FOLDER / "threads"
FOUND = 66  # the exit code of a process in which ThreadSanitizer found something
FLAGS = ["-std=c++17", "-O1", "-g", "-fopenmp", "-ffp-contract=off", "-fsanitize=thread", "-DNDEBUG", f"-I{ROOT / 'csrc'}"]
VECTORS = {
    "_avx2": ["-mavx2", "-mfma"],
    "_avx512vnni": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"],
}


def _compile(source: Path) -> Path:
    made = FOLDER / "thread_objects" / f"{source.stem}.o"
    made.parent.mkdir(parents=True, exist_ok=True)
    headers = [path for path in SOURCES if path.suffix == ".h"]
    if is_older(made, [source, *headers]):
        flags = next((flags for suffix, flags in VECTORS.items() if source.stem.endswith(suffix)), [])
        paths = ["-DBYTEBACK_AVX2", "-DBYTEBACK_AVX512VNNI"]
        subprocess.run([compiler(), *FLAGS, *paths, *flags, "-c", str(source), "-o", str(made)], check=True)
    return made


def build() -> Path:
    kernels = [path for path in SOURCES if path.suffix == ".cpp" and path.parent.name != "bindings"]
    # The portable files first, as in CMakeLists.txt: of a function that several files carry the linker keeps the first.
    kernels.sort(key=lambda path: path.stem.endswith(tuple(VECTORS)))
    sources = [HERE / "threads.cpp", HERE / "gomp.cpp", *kernels]
    if is_older(DRIVER, [*SOURCES, *sources]):
        print("Building the kernels with ThreadSanitizer (some minutes)", flush=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(_compile, sources))
        # Without -fopenmp, so that gomp.cpp takes the place of libgomp.
        subprocess.run([compiler(), "-fsanitize=thread", *map(str, objects), "-pthread", "-o", str(DRIVER)], check=True)
    return DRIVER


def _driver(*arguments: str) -> subprocess.CompletedProcess[str]:
    options = {**os.environ, "TSAN_OPTIONS": f"halt_on_error=1:exitcode={FOUND}"}
    command = [str(build()), *arguments]
    done = subprocess.run(command, env=options, text=True, capture_output=True, check=False)
    if "unexpected memory mapping" in done.stderr:  # a kernel that scatters addresses more widely than this runtime expects
        done = subprocess.run(["setarch", "-R", *command], env=options, text=True, capture_output=True, check=False)
    return done


def run() -> int:
    """0 where ThreadSanitizer finds the race that is meant to be found, and the kernels have none and give no other bits."""
    if platform.machine() != "x86_64":
        print("make sanitize: threads.cpp calls the vector kernels, which are for x86-64; TSan is left out here.")
        return 0
    blind = _driver("race")
    if blind.returncode != FOUND or "data race" not in blind.stderr:
        print(f"make sanitize: TSan does not see a race that is there, so it proves nothing here.\n{blind.stderr[-2000:]}")
        return 1
    done = _driver()
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
    else:
        print(f"no data race under TSan in {done.stdout.splitlines()[-1]}")
    return done.returncode
