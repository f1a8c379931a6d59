"""Where the time of a step goes: the timer, FLOPs, peaks, and what is made of them."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_par.planner.flops import FlopCounter
from lightning_par.planner.hardware import peak_flops
from lightning_par.resilience.phases import PHASES
from lightning_par.resilience.step_timer import StepTimer, StepTimes, WallClock
from lightning_par.resilience.throughput import Throughput, memory_in_use
from lightning_par.testing import run_ranks


class Ticks:
    """A clock that goes on by one each time it is looked at."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def __call__(self) -> float:
        return float(next(self._count))


def times(index: int = 2, **split: float) -> StepTimes:
    return StepTimes(index, dict.fromkeys(PHASES, 0.0) | split)  # type: ignore[arg-type]


def test_each_moment_of_a_step_is_of_one_phase() -> None:
    seen: list[StepTimes] = []
    timer = StepTimer(WallClock(Ticks()))
    timer.listeners.append(seen.append)
    with timer.running():
        for _ in timer.iterate([1, 2]):
            timer.phase("forward_backward")
            timer.phase("optimizer")
            with timer.within("checkpoint"):
                pass
            timer.phase(None)
            timer.phase("other")
            timer.end_step()
    first, second = seen
    assert first.split == dict.fromkeys(PHASES, 1.0) | {"communication": 0.0, "optimizer": 2.0, "other": 3.0}
    assert (first.index, second.index, first.seconds, first.own) == (0, 1, 8.0, 4.0)


def test_a_save_after_a_validation_counts_though_the_validation_does_not() -> None:
    seen: list[StepTimes] = []
    timer = StepTimer(WallClock(Ticks()))
    timer.listeners.append(seen.append)
    with timer.running():
        timer.phase(None)
        with timer.within("checkpoint"):
            pass
        timer.phase("data")
        timer.end_step()
    assert seen[0].split == dict.fromkeys(PHASES, 0.0) | {"other": 1.0, "checkpoint": 1.0, "data": 1.0}


def waits() -> Any:
    original = dist.Work.wait
    seen: list[StepTimes] = []
    timer = StepTimer(WallClock(Ticks()))
    timer.listeners.append(seen.append)
    x = torch.ones(2, requires_grad=True)
    with timer.running():
        timer.phase("forward_backward")
        y = x * 2
        y.register_hook(lambda grad: dist.all_reduce(grad))
        y.sum().backward()
        work = dist.all_reduce(torch.ones(1), async_op=True)
        work.wait()
        # As the thread that writes a checkpoint does.
        other = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
        other.start()
        other.join()
        with timer.within("checkpoint"):
            dist.barrier()
        timer.end_step()
    dist.barrier()
    return seen[0].split, dist.Work.wait is original


def test_waits_for_collectives_are_taken_out_of_their_phase() -> None:
    for split, put_back in run_ranks(2, waits):
        # Each wait is one tick: in the backward and of the work; none in the other thread and in the checkpoint.
        assert (split["communication"], split["checkpoint"], split["forward_backward"]) == (2.0, 1.0, 4.0)
        assert put_back, "torch's own method is back"


def test_flops_of_forward_and_backward_are_the_formulas() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.ones(5, 8, requires_grad=True)
    with FlopCounter() as counter:
        module(x).sum().backward()
    assert counter.model == 3 * 2 * 5 * (8 * 16 + 16 * 4)
    assert counter.hardware == counter.model
    with FlopCounter() as again:
        checkpoint(module, x, use_reentrant=False).sum().backward()
    assert again.model == counter.model
    # The last Linear is not run again: nothing in it is needed but its input.
    assert again.hardware - again.model == 2 * 5 * 8 * 16
    with FlopCounter() as nothing:
        module.to("meta")(x.detach().to("meta")).sum().backward()
    assert nothing.hardware == 0


def test_flops_of_attention_count_its_scores_once() -> None:
    q, k, v = (torch.ones(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    with FlopCounter() as counter:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    product = 2 * 2 * 3 * 16 * 16 * 8
    assert (counter.model, counter.hardware) == (6 * product, 7 * product)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.linear(x).relu()


@pytest.mark.parametrize("compiled_before", [True, False])
def test_what_is_compiled_stays_compiled_after_the_count(compiled_before: bool) -> None:
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: (calls.append(1), graph(*args))[1]

    torch._dynamo.reset()
    layer, x = Layer(), torch.ones(2, 4)
    layer.compile(backend=backend)
    if compiled_before:
        layer(x)
    before = len(calls)
    with FlopCounter() as counter:
        layer(x).sum().backward()
    assert counter.model == 2 * 2 * 2 * 4 * 4
    assert len(calls) == before, "it ran uncompiled"
    layer(x)
    assert len(calls) == before + 1


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA H100 NVL", "fp8", 1671),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA A10", "bf16", 125),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "fp16", 65),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI300X OAM", "bf16", 1307.4),
        ("NVIDIA A10G", "bf16", None),
        ("Intel Xeon", "fp32", None),
    ],
)
def test_peaks_by_the_name_of_the_device(name: str, dtype: str, tflops: float | None) -> None:
    assert peak_flops(name, dtype) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_a_report_of_one_process() -> None:
    throughput = Throughput("tokens", peak_flops=1e6)
    assert throughput.report() is None
    throughput.calibrate(1000, 1200, 10)
    for _ in range(2):
        throughput.add(times(data=0.5, forward_backward=1.0, communication=0.5))
        throughput.count(40)
    report = throughput.report(loss=3.0)
    assert report is not None
    assert (report.steps, report.step_seconds, report.per_second, report.loss) == (2, 2.0, 20.0, 3.0)
    assert (report.tflops, report.hardware_tflops, report.mfu) == (2000 / 1e12, 2400 / 1e12, 2000 / 1e6)
    assert report.metrics()["throughput/data_share"] == 0.25
    assert report.memory_bytes[0] == pytest.approx(memory_in_use("cpu"), rel=0.2)
    assert throughput.report() is None, "it begins afresh"


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ({"data": 41, "forward_backward": 59}, "data loading is 41 % of the step: more workers"),
        ({"communication": 40, "forward_backward": 60}, "waiting for other ranks is 40 % of the step: a larger batch"),
        ({"checkpoint": 30, "forward_backward": 70}, "saving is 30 % of the step: save less often"),
        ({"optimizer": 40, "forward_backward": 60}, "the optimizer is 40 % of the step: fused=True"),
        ({"other": 20, "forward_backward": 80}, "what is outside of the steps is 20 %"),
        ({"data": 5, "communication": 10, "forward_backward": 85}, "computation is 85 % of the step"),
        # The one that is furthest above what is usual.
        ({"data": 30, "communication": 35, "forward_backward": 35}, "data loading is 30 %"),
    ],
)
def test_the_verdict_names_what_to_do(split: dict[str, float], words: str) -> None:
    throughput = Throughput()
    throughput.add(times(**split))
    report = throughput.report()
    assert report is not None
    assert words in report.verdict
