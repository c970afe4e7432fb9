# SPDX-License-Identifier: Apache-2.0
"""`byteback bench step`: its defaults, its processes, and what it makes of their figures. tests/test_cli.py runs it whole."""

from __future__ import annotations

import io
import subprocess
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from rich.console import Console

from byteback.bench import step, step_parts, step_worker
from byteback.bench.step import DEFAULTS, StepConfig
from byteback.bench.step_worker import Job
from byteback.bench.training_step import PHASES, Setting, Side, Variant
from byteback.nn import Int8Layer
from byteback.torchvision_compat import load

TINY = Setting("resnet8", 8, 4, "unified-int8")

try:
    load()
    have_torchvision = True
except ImportError:
    have_torchvision = False
needs_torchvision = pytest.mark.skipif(not have_torchvision, reason="torchvision is not installed")


@needs_torchvision
@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_every_network_of_the_table_takes_its_default_size(name: str) -> None:
    setting = StepConfig(model=name).setting()
    assert (setting.image_size, setting.batch) == DEFAULTS[name]


@needs_torchvision
def test_sizes_come_from_the_table_unless_given() -> None:
    assert StepConfig(model="resnet34").setting() == Setting("resnet34", 224, 16, "unified-int8")
    assert StepConfig(model="resnet18", image_size=64, batch=3).setting() == Setting("resnet18", 64, 3, "unified-int8")
    assert StepConfig(model="r3d_18").setting().sample == (3, 16, 112, 112)


@needs_torchvision
@pytest.mark.parametrize(
    ("config", "says"),
    [
        (StepConfig(model="deeplabv3_resnet50"), "not a network for classification"),
        (StepConfig(model="resnet50", image_size=32), "no variant for images of 32 pixels"),
        (StepConfig(rounds=0), "rounds is 0"),
        (StepConfig(seconds=0.0), "seconds is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(config: StepConfig, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config.setting()


def test_sides_start_from_the_same_weights_and_data() -> None:
    contiguous, last, int8 = (Side(TINY, v) for v in (Variant("fp32", False), Variant("fp32", True), Variant("int8", True)))
    times, loss = contiguous.step()
    assert tuple(times) == PHASES and min(times.values()) > 0
    assert last.step()[1] == pytest.approx(loss, rel=1e-4)
    assert int8.step()[1] == pytest.approx(loss, rel=0.1)


def test_bf16_is_autocast_around_forward_and_loss_of_a_float32_network() -> None:
    seen: dict[str, object] = {}
    bf16, fp32 = Side(TINY, Variant("bf16", True)), Side(TINY, Variant("fp32", True))
    weight = next(bf16.model.parameters())
    weight.register_hook(lambda grad: seen.update(backward=torch.is_autocast_enabled("cpu"), grad=grad.dtype))
    bf16.model.register_forward_hook(lambda module, args, output: seen.update(output=output.dtype))
    loss = bf16.step()[1]
    assert seen == {"output": torch.bfloat16, "backward": False, "grad": torch.float32}
    assert weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    assert loss != (exact := fp32.step()[1]) and loss == pytest.approx(exact, rel=0.02)


@needs_torchvision
@pytest.mark.parametrize("name", ["resnet18", "resnet20", "resnet50", "mobilenet_v2", "vgg16_bn", "inception_v3"])
def test_every_network_of_the_readme_trains_in_bf16(name: str) -> None:
    size = {"inception_v3": 80, "resnet50": 64, "mobilenet_v2": 64}.get(name, 32)
    side = Side(Setting(name, size, 2, "unified-int8"), Variant("bf16", True))
    losses = [side.step()[1] for _ in range(2)]
    assert all(0 < loss < 100 for loss in losses)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in side.model.parameters())


def test_a_recipe_can_have_options() -> None:
    setting = StepConfig(model="resnet20", batch=2, recipe="unified-int8:norm_memory=int8").setting()
    side = Side(replace(TINY, recipe=setting.recipe), Variant("int8", True))
    recipes = {layer.recipe.norm_memory for layer in side.model.modules() if isinstance(layer, Int8Layer)}
    assert recipes == {"int8"}
    with pytest.raises(ValueError, match="the recipe is float32"):
        StepConfig(recipe="float32").setting()
    with pytest.raises(ValueError, match="norm_memory"):
        StepConfig(recipe="unified-int8:norm_memori=int8").setting()


def test_a_job_survives_its_journey() -> None:
    job = Job("memory", TINY, rounds=3, variant=Variant("int8", False, fused=False))
    assert Job.from_json(job.to_json()) == job
    assert Job.from_json(Job("time", TINY).to_json()).variant is None


def test_what_a_worker_says_of_its_failure_reaches_the_user() -> None:
    job = Job("memory", replace(TINY, recipe="absent-int8"), variant=Variant("int8", False))
    with pytest.raises(RuntimeError, match=r"measuring memory of resnet8 failed.*absent-int8"):
        step.run_job(job, lambda *_: None)


def test_an_interrupt_takes_the_worker_along(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(step.subprocess, "Popen", Popen)
    with pytest.raises(KeyboardInterrupt):
        step.run_job(Job("time", TINY, rounds=100), interrupt)
    assert [worker.poll() is not None for worker in started] == [True]


def test_rounds_follow_from_the_time_there_is() -> None:
    assert step_worker.measure_time(Job("time", TINY, seconds=1e-6), lambda *_: None)["rounds"] == step_worker.MIN_ROUNDS


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # Ratios 2, 4 and 1.5; the medians of the sides (30 and 10) would give 3.
    rounds = [
        {"fp32": {"forward": 20.0}, "int8": {"forward": 10.0}},
        {"fp32": {"forward": 40.0}, "int8": {"forward": 10.0}},
        {"fp32": {"forward": 30.0}, "int8": {"forward": 20.0}},
    ]
    expected = {"ratio": 2.0, "ratio_bf16": None, "fp32_ms": 30.0, "bf16_ms": None, "int8_ms": 10.0}
    assert step_worker._summary(rounds) == expected
    rounds = [{**row, "bf16": {"forward": ms}} for row, ms in zip(rounds, (10.0, 15.0, 40.0), strict=True)]  # 1, 1.5 and 2
    assert step_worker._summary(rounds) == {**expected, "ratio_bf16": 1.5, "bf16_ms": 15.0}


@pytest.mark.parametrize("bf16", [False, True])
def test_sides_take_turns_with_every_float_side_in_its_faster_format(bf16: bool) -> None:
    said: list[str] = []
    result = step_worker.measure_time(Job("time", TINY, rounds=2, bf16=bf16), lambda done, total, text: said.append(text))
    sides = ["fp32", "bf16", "int8"] if bf16 else ["fp32", "int8"]
    assert list(result["formats"]) == list(result["channels_last"]) == list(result["operators"]) == sides
    assert said.count(f"{', '.join(sides)} in turns") == 2
    tried = {f"{numbers} {layout}" for numbers in sides[:-1] for layout in ("contiguous", "channels_last")}
    assert set(result["warm_ms"]) == {*tried, "int8 channels_last"}
    assert all(set(part) == {f"{numbers}_ms" for numbers in sides} for part in result["parts"].values())
    assert (result["ratio_bf16"] is not None) == (result["bf16_ms"] is not None) == bf16


@dataclass
class Event:
    name: str
    self_cpu_time_total: float
    cpu_parent: Event | None = None


def test_parts_are_found_by_phase_and_kind() -> None:
    forward, backward = Event("forward", 10.0), Event("backward", 0.0)
    convolution = Event("aten::convolution", 5.0, forward)
    events = [
        forward,
        backward,
        convolution,
        Event("aten::mkldnn_convolution", 60.0, convolution),
        Event("byteback::absmax", 25.0, forward),
        Event("byteback::conv_int8_grad_weight", 100.0, backward),
        Event("aten::empty", 7.0),  # outside every phase
    ]
    by_phase, by_operator = step_parts._shares(events)
    assert by_phase["forward"] == {"convolution": 0.65, "quantize": 0.25, "other": 0.1}
    assert by_phase["backward"] == {"convolution": 1.0, "other": 0.0}
    assert by_operator["byteback::conv_int8_grad_weight"] == 0.5
    assert by_operator["python"] == 0.05


def worker_results(bf16: bool = False) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    timed = {
        **{"ratio": 2.0, "fp32_ms": 20.0, "int8_ms": 10.0, "rounds": 5, "path": "avx2", "threads": 2, "capability": "AVX2"},
        **{"malloc": "glibc, default", "formats": {"fp32": "contiguous", "int8": "channels_last"}},
        **{"parts": {"forward": {"fp32_ms": 20.0, "int8_ms": 10.0}}, "operators": {}, "bf16_ms": None, "ratio_bf16": None},
    }
    side = {"saved": 100, "saved_by_dtype": {"float32": [1, 100]}, "peak": 400, "losses": [2.0, 1.0, 0.5]}
    memory = {"fp32": side, "int8": {**side, "saved": 40, "peak": 300}, "unfused": {**side, "losses": [2.0, 1.0, 0.52]}}
    if bf16:
        timed |= {"bf16_ms": 15.0, "ratio_bf16": 1.5, "formats": {**timed["formats"], "bf16": "channels_last"}}
        timed["parts"] = {"forward": {"fp32_ms": 20.0, "bf16_ms": 15.0, "int8_ms": 10.0}}
        memory["bf16"] = side
    return timed, {**timed, "ratio": 2.5, "ratio_bf16": 1.25 if bf16 else None}, memory


def test_ratios_of_memory_are_int8_to_fp32() -> None:
    plain, tuned, memory = worker_results()
    result = step.figures(TINY, plain, tuned, memory)
    assert (result["saved_ratio"], result["peak_ratio"]) == (0.4, 0.75)
    assert (result["ratio"], result["ratio_tuned_malloc"]) == (2.0, 2.5)
    memory["fp32"] = {**memory["fp32"], "peak": None}
    assert step.figures(TINY, plain, tuned, memory)["peak_ratio"] is None


@pytest.mark.parametrize("bf16", [False, True])
def test_both_ratios_are_shown_where_there_is_bf16(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, tuned, memory = worker_results(bf16)
    monkeypatch.setattr(step.machine, "why_no_bf16", lambda: "" if bf16 else "this CPU has none")
    monkeypatch.setattr(step, "measure", lambda config, setting, console: step.figures(setting, plain, tuned, memory))
    output = io.StringIO()
    step.run(StepConfig(model="resnet8"), Console(file=output, width=180))
    said = output.getvalue()
    assert ("bf16 autocast is left out: this CPU has none" in said) is not bf16
    for words in ("faster than bf16", "bf16 ms", "1.50x", "1.25x", "15.0"):
        assert (words in said) is bf16, words
    assert "faster than fp32" in said and "2.00x" in said and "2.50x" in said
    figures = step.figures(TINY, plain, tuned, memory)
    expected = (15.0, 1.5, 1.25) if bf16 else (None, None, None)
    assert tuple(figures[name] for name in ("bf16_ms", "ratio_bf16", "ratio_bf16_tuned_malloc")) == expected


@pytest.mark.parametrize(
    ("unfused", "good"), [([2.0, 1.0, 0.52], False), ([2.0, 1.0, 0.505], True), ([2.0, float("nan"), 0.5], False)]
)
def test_the_command_fails_where_fused_and_unfused_losses_differ(
    unfused: list[float], good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, tuned, memory = worker_results()
    memory["unfused"] = {**memory["unfused"], "losses": unfused}
    monkeypatch.setattr(step, "measure", lambda config, setting, console: step.figures(setting, plain, tuned, memory))
    output = io.StringIO()
    assert step.run(StepConfig(model="resnet8"), Console(file=output, width=180)) is good
    assert ("more than 2%" in output.getvalue()) is not good
    assert torch.get_default_device().type == "cpu"  # the check on the meta device is over
