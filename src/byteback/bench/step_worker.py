# SPDX-License-Identifier: Apache-2.0
"""The process for one measurement of `byteback bench step`: python -m byteback.bench.step_worker '{...}'.

The settings of malloc cannot be undone within a process, and peak memory can only be measured if nothing ran before. So every
malloc setting and every memory measurement gets a new process. The job is JSON in the first argument. The process writes lines
of JSON to stdout: {"done": n, "total": n, "text": "..."} for progress, and at the end {"result": {...}} or {"error": "..."}.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics as stats
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

import byteback
from byteback.bench import step_parts
from byteback.bench.training_step import PHASES, Numbers, Setting, Side, Variant
from byteback.inspect.memory import highest, tune_malloc
from byteback.ops.backends import paths
from byteback.torchvision_compat import load

LOSSES = 3  # steps whose losses are compared
MIN_ROUNDS, MAX_ROUNDS = 5, 101
_WARM = 3  # steps before the first round: one to warm up, two to choose the memory format
_HOPELESS = 1.3  # a format that is slower by this factor in the first of the two steps skips the second

Say = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Job:
    """The measurement that a process makes."""

    what: str  # "time" or "memory"
    setting: Setting
    tuned_malloc: bool = False
    rounds: int | None = None  # None: as many as fit into `seconds`
    seconds: float = 20.0
    parts: bool = True  # whether to also split the time by phase and kind
    compile: bool = False
    bf16: bool = False  # whether to also time bf16 autocast
    variant: Variant | None = None  # for memory

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        fields = json.loads(text)
        variant = fields.pop("variant")
        return Job(**{**fields, "setting": Setting(**fields["setting"]), "variant": Variant(**variant) if variant else None})


def malloc_name(tuned: bool) -> str:
    """Returns the name of the malloc of this process, and its settings."""
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else ""
    name = next((other for other in ("jemalloc", "tcmalloc", "mimalloc") if other in loaded), "")
    name = name or ("glibc" if "libc.so.6" in loaded or "libc-2." in loaded else "the system's malloc")
    own = [v for v in ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_CONF") if v in os.environ]
    state = "tuned by byteback.tune_malloc" if tuned else "set by " + ", ".join(own) if own else "default"
    return f"{name}, {state}"


def measure_time(job: Job, say: Say) -> dict[str, Any]:
    """Times steps of float32 and bf16, each in its faster memory format, and of int8 in channels_last, interleaved."""
    groups = _variants(job)
    total = _WARM * sum(map(len, groups.values()))
    done = 0
    chosen: dict[str, Side] = {}
    warm: dict[str, float] = {}
    round_ms = 0.0
    for numbers, variants in groups.items():
        best: tuple[float, Side] | None = None
        for variant in variants:
            side = Side(job.setting, variant)
            times: list[float] = []
            for step in range(_WARM):
                say(done + step, total, f"warming up {_name(variant)}")
                if step < 2 or best is None or min(times[1:]) < _HOPELESS * best[0]:
                    times.append(sum(side.step()[0].values()))
            done += _WARM
            fastest = warm[_name(variant)] = min(times[1:])
            if best is None or fastest < best[0]:
                best = (fastest, side)
            del side
        assert best is not None
        round_ms += best[0]
        chosen[numbers] = best[1]
    rounds = job.rounds or min(max(int(1e3 * job.seconds / round_ms), MIN_ROUNDS), MAX_ROUNDS)
    total = done + rounds
    samples: list[dict[str, dict[str, float]]] = []
    for index in range(rounds):
        say(done + index, total, f"{', '.join(chosen)} in turns")
        samples.append({numbers: side.step()[0] for numbers, side in chosen.items()})
    say(total, total, "where the time goes")
    parts = _parts(chosen, samples) if job.parts else {}
    return {**_summary(samples), **parts, "rounds": rounds, "warm_ms": warm} | {
        "formats": {numbers: str(side.variant) for numbers, side in chosen.items()},
        "channels_last": {numbers: side.variant.channels_last for numbers, side in chosen.items()},
    }


def _variants(job: Job) -> dict[str, list[Variant]]:
    """Returns numbers -> the variants of which the fastest is timed, in the order of the turns."""
    compiled = (False, True) if job.compile else (False,)

    def floats(numbers: Numbers) -> list[Variant]:
        return [Variant(numbers, last, c) for c in compiled for last in (False, True)]

    # Our kernels read channels_last; contiguous models need conversions at their input and output.
    int8 = Variant("int8", True)
    return {"fp32": floats("fp32"), **({"bf16": floats("bf16")} if job.bf16 else {}), "int8": [int8]}


def _name(variant: Variant) -> str:
    return f"{variant.numbers} {variant}"


def _summary(samples: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Returns the median milliseconds of every side, and those of the ratios to int8 in a round. What was not timed is None."""
    whole = [{numbers: sum(phases.values()) for numbers, phases in row.items()} for row in samples]

    def median(numbers: str, ratio: bool) -> float | None:
        if numbers not in whole[0]:
            return None
        return stats.median(row[numbers] / (row["int8"] if ratio else 1.0) for row in whole)

    milliseconds = {f"{numbers}_ms": median(numbers, False) for numbers in ("fp32", "bf16", "int8")}
    return {"ratio": median("fp32", True), "ratio_bf16": median("bf16", True), **milliseconds}


def _parts(chosen: dict[str, Side], samples: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Returns phase -> milliseconds of every side, and the same for the kinds of operators in it."""
    parts: dict[str, dict[str, float]] = {}
    operators: dict[str, dict[str, float]] = {}
    for numbers, side in chosen.items():
        phase_ms = {phase: stats.median(row[numbers][phase] for row in samples) for phase in PHASES}
        kinds, by_operator = step_parts.shares(side, steps=1 if sum(phase_ms.values()) > 1e3 else 3)
        operators[numbers] = {name: share * sum(phase_ms.values()) for name, share in list(by_operator.items())[:16]}
        for phase in PHASES:
            parts.setdefault(phase, {})[f"{numbers}_ms"] = phase_ms[phase]
            for kind, share in kinds[phase].items():
                if phase in ("forward", "backward"):
                    parts.setdefault(f"{phase}: {kind}", {})[f"{numbers}_ms"] = share * phase_ms[phase]
    for values in parts.values():
        for numbers in chosen:
            values.setdefault(f"{numbers}_ms", 0.0)
    return {"parts": parts, "operators": operators}


def measure_memory(job: Job, say: Say) -> dict[str, Any]:
    """Measures the peak memory of training, its parts, and the first losses, in a process that has done nothing yet.

    The peak is the highest resident memory (VmHWM) less what it was after the imports.
    """
    assert job.variant is not None
    with contextlib.suppress(ImportError):
        load()  # torchvision is an import too
    base = highest()
    side = Side(job.setting, job.variant)
    losses: list[float] = []
    for step in range(LOSSES if job.rounds is None else job.rounds):
        say(step, LOSSES + 1, _name(job.variant))
        losses.append(side.step()[1])
    most = highest()
    images, _ = side.batch()
    side.optimizer.zero_grad(set_to_none=True)
    with side.autocast():
        report = byteback.memory(side.model, images, side.optimizer)
    parts: dict[str, int | None] = report.parts()
    parts.pop("peak")
    parts["transient"] = None
    # All storages that the hooks see, including the float weights that FP32 needs for its input gradients: int8 stores copies.
    saved = report.saved + report.parameters
    peak = None if most is None or base is None else most - base
    if peak is not None:
        # What a pass needs for a moment, and what the heap holds without need. The process is asked, not the report.
        parts["transient"] = peak - sum(size for size in parts.values() if size is not None)
    return {"losses": losses, "peak": peak, "parts": parts, "saved": saved, "saved_by_dtype": report.saved_by_dtype}


def work(job: Job, say: Say) -> dict[str, Any]:
    """Runs the job. Returns its result, and the settings of the process."""
    tuned = job.tuned_malloc and tune_malloc()
    start = time.perf_counter()
    result = measure_time(job, say) if job.what == "time" else measure_memory(job, say)
    return {
        **result,
        "malloc": malloc_name(tuned),
        "path": paths.current(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Reads the job and writes lines of JSON."""
    # Only these lines may go to stdout: other output (of a compiler or a library) is redirected to stderr.
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        result = work(Job.from_json(sys.argv[1]), lambda done, total, text: tell({"done": done, "total": total, "text": text}))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        tell({"error": f"{type(error).__name__}: {error}"})
        raise
    tell({"result": result})


if __name__ == "__main__":
    main()
