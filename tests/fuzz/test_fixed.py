# SPDX-License-Identifier: Apache-2.0
"""A few hundred fixed cases of `make fuzz`, and proof that the fuzz would see a wrong bit, a written input or a crash."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from byteback import ops
from fuzz import harness, kind_products, workers

SEED, EACH = 1, 15
MATMUL = {"kind": "matmul", "rows": 3, "columns": 9, "depth": 40, "a": "random", "b": "random", "a_layout": "sliced",
          "b_layout": "permuted", "vary": "both", "scale": "ordinary", "scale_layout": "sliced", "threads": 2,
          "data": 5}  # fmt: skip


@pytest.fixture(autouse=True)
def _restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", harness.kinds())
def test_fixed_cases_equal_their_oracle_on_every_path(kind: str) -> None:
    found = []
    for index in range(EACH):
        failure = harness.failure_of(harness.draw(SEED, index, (kind,)))
        if failure is not None:
            found.append(f"--seed {SEED} --kinds {kind} --index {index}: path {failure.path!r}: {failure.message}")
    assert not found, f"{len(found)} of {EACH} cases differ; make fuzz ARGS='...' shows one:\n" + "\n".join(found)


def test_a_case_is_the_same_whoever_draws_it_and_every_kind_is_drawn() -> None:
    drawn = [harness.draw(3, index) for index in range(400)]
    assert drawn == [harness.draw(3, index) for index in range(400)]
    assert {case["kind"] for case in drawn} == set(harness.kinds())
    assert harness.draw(4, 0) != drawn[0]


def test_every_operator_is_drawn() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in Path(harness.__file__).parent.glob("kind_*.py"))
    operators = [name for name in ops.__all__ if name[0].islower()]
    # The three products are one kind, which makes the operator's name.
    missing = [name for name in operators if not re.search(rf"\b{name}\b", text) and not name.startswith("conv_int8_grad")]
    assert len(operators) > 30 and not missing, f"no kind of tests/fuzz draws {missing}"


def test_one_wrong_bit_is_seen_and_named_with_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert harness.failure_of(MATMUL) is None

    def wrong(*arguments: Any) -> Tensor:
        result = right(*arguments)
        if harness.kernel_paths.current() == "generic":
            result.view(torch.int32)[1, 2] += 1
        return result

    right = ops.matmul_int8
    monkeypatch.setattr(kind_products.ops, "matmul_int8", wrong)
    failure = harness.failure_of(MATMUL)
    assert failure is not None and failure.path == "generic" and "1 of 27 differ; at (1, 2)" in failure.message


def test_a_zero_of_the_other_sign_and_an_input_that_is_written_to_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.matmul_int8
    monkeypatch.setattr(kind_products.ops, "matmul_int8", lambda *given: -right(*given))
    zeros = {**MATMUL, "a": "zeros"}
    failure = harness.failure_of(zeros)
    assert failure is not None and "-0.0" in failure.message
    monkeypatch.setattr(kind_products.ops, "matmul_int8", lambda a, *rest: (right(a, *rest), a.add_(1))[0])
    failure = harness.failure_of(zeros)
    assert failure is not None


def test_a_failing_case_shrinks_to_the_smallest_one() -> None:
    case = harness.draw(1, 0, ("product",))
    case.update(per_group=37, stride=[3, 2, 4], x_layout="sliced")
    small = harness.shrink(case, lambda c: c["per_group"] > 5 and c["stride"][1] > 1)
    assert small["per_group"] == 6 and small["stride"] == [1, 2, 1] and small["x_layout"] == "contiguous"
    assert small["data"] == 0 and small["threads"] == 1
    assert harness.failure_of(small) is None  # every combination of fields is a case


def test_every_simpler_case_can_be_built() -> None:
    for kind in harness.kinds():
        for candidate in list(harness.simpler_cases(harness.draw(2, 1, (kind,))))[::7]:
            with np.errstate(all="ignore"):
                harness.KINDS[kind].build(candidate, np.random.default_rng(0))


@pytest.mark.slow
def test_a_process_that_dies_is_a_finding_and_another_takes_its_place() -> None:
    runner = workers.Runner()
    try:
        runner.ask(1, MATMUL)
        assert runner.answer() is None
        os.kill(runner.process.pid, signal.SIGSEGV)
        runner.process.join()
        runner.asked = (2, MATMUL)
        found = runner.answer()
        assert found is not None and found.crashed and found.index == 2 and "SIGSEGV" in found.failure.message
        runner.ask(3, MATMUL)
        assert runner.answer() is None
    finally:
        runner.close()
