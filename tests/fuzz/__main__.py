# SPDX-License-Identifier: Apache-2.0
"""`make fuzz`: draws cases from a seed, compares every path with the oracles, and shows the smallest case that fails.

make fuzz                                   10,000 new cases
make fuzz ARGS='--seed 7 --cases 500'       the same cases as ever
make fuzz ARGS='--kinds product,quantize'   only these
make fuzz ARGS='--seed 7 --index 1234'      one case of a seed
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
from collections import Counter

from fuzz import harness, workers
from fuzz.fields import Case
from fuzz.workers import Found

SHRUNK = 5  # different failures that are made smaller; each takes up to a minute


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, help="which cases are drawn; another one each time unless it is given")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--kinds", default="", help="comma-separated; all unless given")
    parser.add_argument("--index", type=int, help="only this case of the seed")
    parser.add_argument("--case", help="only this case, as JSON")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def _command(case: Case) -> str:
    return f"PYTHONPATH=tests .venv/bin/python -m fuzz --case '{json.dumps(case)}'"


def _show(found: Found, seed: int | None) -> None:
    case, failure = found.case, found.failure
    print(f"\ncase {found.index} of seed {seed}: {case['kind']} on path {failure.path!r}\n  {failure.message}")
    small = workers.smallest(found)
    print(f"the smallest case that fails so:\n  {small.failure.message}\n  {_command(small.case)}", flush=True)


def _one(case: Case) -> int:
    failure = harness.failure_of(case)
    print("no difference on any path" if failure is None else f"path {failure.path!r}: {failure.message}")
    return int(failure is not None)


def main() -> int:
    arguments = _arguments()
    if arguments.case:
        return _one(json.loads(arguments.case))
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    only = tuple(name for name in arguments.kinds.split(",") if name)
    if arguments.index is not None:
        case = harness.draw(seed, arguments.index, only)
        print(_command(case))
        return _one(case)
    print(f"seed {seed}, {arguments.cases:,} cases on paths {', '.join(harness.PATHS)}", flush=True)
    started, differences, done, kinds = time.monotonic(), 0, 0, Counter[str]()
    shown: dict[tuple[object, ...], Found] = {}
    cases = ((index, harness.draw(seed, index, only)) for index in range(arguments.cases))
    for _, case, found in workers.run(cases, arguments.workers):
        done += 1
        kinds[case["kind"]] += 1
        if found is not None:
            differences += 1
            shown.setdefault((case["kind"], case.get("name", case.get("product")), found.failure.path), found)
        if done % 1000 == 0:
            print(f"  {done:,} cases, {differences} differences, {time.monotonic() - started:.0f} s", flush=True)
    for found in list(shown.values())[:SHRUNK]:
        _show(found, seed)
    for found in list(shown.values())[SHRUNK:]:
        print(f"\nalso case {found.index}: {found.case['kind']} on path {found.failure.path!r}\n  {found.failure.message}")
    print("\n" + ", ".join(f"{name} {count}" for name, count in sorted(kinds.items())))
    print(f"{done:,} cases, {differences} differences, seed {seed}, {time.monotonic() - started:.0f} s")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
