"""Slow ranks are named, and no others."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from probe import long_run
from test_throughput_monitor import FakeTime, batches

from lightning_par.callbacks import StragglerMonitor, ThroughputMonitor, timed_steps
from lightning_par.errors import ParallelConfigError
from lightning_par.resilience.events import read_events
from lightning_par.resilience.phases import PHASES
from lightning_par.resilience.step_timer import StepTimer, StepTimes, WallClock
from lightning_par.resilience.stragglers import StragglerDetector, changes
from lightning_par.testing import run_ranks
from models import NanoGPT
from parity import build_strategy, make_trainer

STEPS = 12


class Working(NanoGPT):
    """A step takes as long as it is told to, on a clock."""

    def __init__(self, seconds: float, clock: FakeTime | None) -> None:
        super().__init__()
        self.seconds, self.clock = seconds, clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.clock is None:
            time.sleep(self.seconds)
        else:
            self.clock.now += self.seconds
        return super().training_step(batch, batch_idx)


def fit(spec: Any, seconds: list[float], directory: str, fake: bool = True) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    clock = FakeTime() if fake else None
    timer = partial(StepTimer, WallClock(clock)) if clock is not None else StepTimer
    monitor = StragglerMonitor(every_n_steps=3)
    # Whichever is first has the timer.
    callbacks = [ThroughputMonitor(every_n_steps=3), monitor]
    torch.manual_seed(0)
    trainer = make_trainer(
        ranks, build_strategy(spec, "trainer"), max_steps=STEPS, callbacks=callbacks, default_root_dir=directory
    )
    # Stages of a pipeline see the same batches.
    share = (0, 1) if spec[0].startswith("Pipeline") else (rank, ranks)
    with mock.patch.object(timed_steps, "StepTimer", timer):
        trainer.fit(Working(seconds[rank], clock), batches(*share, STEPS))
    return monitor.stragglers, callbacks[0].last.own_seconds


DDP = ("DataParallelStrategy", {})


def check_events(directory: Path) -> None:
    events = [event for event in read_events(directory) if event["kind"] == "straggler"]
    # Flagged from the second interval on: the first one has step 3, the second one steps 4 to 6.
    assert [(event["step"], event["rank"]) for event in events] == [(6, 1), (9, 1), (12, 1)]
    assert events[0]["host"]


def test_F12_a_rank_that_computes_longer_is_named(tmp_path: Path) -> None:
    (one,), own = run_ranks(2, fit, DDP, [1.0, 1.6], str(tmp_path))[0]
    assert (one.rank, one.phase) == (1, "forward_backward")
    assert one.relative == pytest.approx(1 / 1.6, abs=0.001)
    assert one.individual == pytest.approx(1.0, abs=0.001)
    assert own == pytest.approx([1.0, 1.6])
    check_events(tmp_path)


def test_F12_the_control_run_names_nobody(tmp_path: Path) -> None:
    assert run_ranks(2, fit, DDP, [1.0, 1.0], str(tmp_path))[0][0] == []


# By the clock of the machine: on a busy one a step takes some tenths of a second more, on any of the ranks.
@pytest.mark.parametrize("slow", [long_run(True)])
def test_F12_a_rank_that_takes_longer_in_real_time_is_named(slow: bool, tmp_path: Path) -> None:
    (one,), own = run_ranks(2, fit, DDP, [0.2, 1.0], str(tmp_path), False)[0]
    assert (one.rank, one.phase) == (1, "forward_backward")
    assert one.relative < 0.6
    assert own[1] > 1.0
    check_events(tmp_path)


@pytest.mark.parametrize("slow", [long_run(True)])
def test_F12_the_control_run_in_real_time_names_nobody(slow: bool, tmp_path: Path) -> None:
    assert run_ranks(2, fit, DDP, [1.0, 1.0], str(tmp_path), False)[0][0] == []


@pytest.mark.parametrize("pp", [long_run(True)])
def test_stages_of_a_pipeline_are_not_compared(pp: bool, tmp_path: Path) -> None:
    spec = ("PipelineParallelStrategy", {"pp_size": 2, "dp_replicate_size": 1, "pp_microbatches": 2})
    assert run_ranks(2, fit, spec, [1.0, 1.6], str(tmp_path))[0][0] == []


def interval(detector: StragglerDetector, own: list[float], stages: list[int] | None = None) -> list[int]:
    """Let a detector see what all ranks would tell it."""
    rows = [[3.0, float((stages or [0] * len(own))[rank]), t, 0.0, t, 0.0] for rank, t in enumerate(own)]
    return [one.rank for one in detector._evaluate(rows, [f"host{rank}" for rank in range(len(own))])]


def test_one_slow_interval_is_nothing_and_a_fast_one_ends_it() -> None:
    detector = StragglerDetector()
    seen = [interval(detector, [1.0, 1.0, slow]) for slow in (1.6, 1.0, 1.6, 1.6, 1.6, 1.0)]
    assert seen == [[], [], [], [2], [2], []]


def test_a_rank_that_falls_behind_its_own_best_is_named_unless_all_do() -> None:
    alone, everyone = StragglerDetector(), StragglerDetector()
    # A rank without one to compare with: alone in its stage.
    assert [interval(alone, [3.0, own], [0, 1]) for own in (1.0, 1.6, 1.6)] == [[], [], [1]]
    assert [interval(everyone, [own, own]) for own in (1.0, 1.6, 1.6)] == [[], [], []]


def test_one_process_is_compared_with_itself() -> None:
    detector = StragglerDetector(host="here")
    assert detector.report() == []
    detector.add(StepTimes(2, dict.fromkeys(PHASES, 1.0)))
    assert detector.report() == []


def test_people_hear_of_changes_only() -> None:
    detector = StragglerDetector(patience=1)
    before = detector._evaluate([[1.0, 0.0, 1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 2.0, 1.0, 1.0, 0.0]], ["a", "b"])
    (line,) = changes([], before)
    assert line.startswith("rank 1 on b is slow in data: 0.50 of the speed of the fastest")
    assert changes(before, before) == []
    assert changes(before, []) == ["rank 1 on b is as fast as the others again"]


def test_all_wrong_arguments_are_named() -> None:
    with pytest.raises(ParallelConfigError, match="threshold of StragglerMonitor is 1.5") as error:
        StragglerMonitor(0, threshold=1.5, patience=0)
    assert len(error.value.problems) == 3
    with pytest.raises(ParallelConfigError, match="threshold of StragglerMonitor is '0.5'"):
        StragglerMonitor(threshold="0.5")  # type: ignore[arg-type]
