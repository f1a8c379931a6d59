"""Ranks that stand still are found, named and described, and nothing else is; F are the rows of the fault matrix."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from fault_runs import At, Job, train
from fault_stories import Story, outcome, reference, succeeded
from faults import launch
from probe import Probe, batches, launched, some, strategy_of
from probe import numbers as numbers_of
from watchdog_runs import (
    AXES,
    BAD_STEP,
    LIMIT,
    Cluster,
    Phases,
    StopAndGoOn,
    beats_while_waiting,
    loop,
    report_of,
    sleeps_under,
    takes_long,
    without_rank_0,
)

from lightning_par.callbacks import CommittedCheckpoint, StallWatchdog
from lightning_par.errors import ParallelConfigError
from lightning_par.resilience.errors import STALLED
from lightning_par.resilience.events import read_events
from lightning_par.resilience.heartbeat import PHASES, TRAINING, Heartbeat
from lightning_par.resilience.watchdog import QUIET_PHASES, Watchdog
from lightning_par.testing import run_ranks
from parity import make_trainer

# -- with a clock of the test's ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_process_ends() -> Iterator[Any]:
    with mock.patch("os._exit") as leave:
        yield leave


def test_a_stall_is_reported_once_and_its_end_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(tmp_path, 3)
    for _ in range(3):
        cluster.step()
        cluster.pass_time(1)
    cluster.step(1)
    cluster.pass_time(9)
    assert not cluster.events("stall")
    cluster.pass_time(8)
    (event,) = cluster.events("stall")
    assert event["guilty"] == [1]
    assert event["verdicts"]["1"] == "behind; ranks 0, 2 came as far as step 4"
    assert report_of(tmp_path).read_text().splitlines()[1].startswith("Look first at rank 1 on ")
    assert {p.name for p in report_of(tmp_path).parent.glob("*stacks*")} == {f"rank-{r}-stacks.txt" for r in range(3)}
    cluster.pass_time(60)
    cluster.step()
    cluster.pass_time(2)
    (over,) = cluster.events("stall_over")
    assert over["seconds"] > 60
    assert [r.levelno for r in caplog.records] == [logging.ERROR, logging.WARNING]
    cluster.pass_time(30)
    assert report_of(tmp_path, "2").exists()


def test_F8_what_may_take_long_is_no_stall(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    cluster.pass_time(60)  # before the first step
    cluster.step()
    cluster.pass_time(60)  # in it
    cluster.step()
    for phase in ("save", "validation", "load", "idle"):
        for dog in cluster.dogs:
            dog.enter(phase)
        cluster.pass_time(60)
    cluster.pass_time(5000)
    assert not cluster.events("stall")


@pytest.mark.parametrize("phase", ["save", "validation", "load", "init"])
def test_a_phase_has_a_limit_of_its_own(tmp_path: Path, phase: str) -> None:
    cluster = Cluster(tmp_path, 2, phase_timeouts={phase: 30})
    for dog in cluster.dogs:
        dog.enter(phase)
    cluster.pass_time(29)
    assert not cluster.events("stall")
    cluster.pass_time(6)
    assert cluster.events("stall")


def test_the_first_step_has_a_limit_of_its_own(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2, phase_timeouts={"first_step": 30})
    for dog in cluster.dogs:
        dog.enter("forward", 7)
    cluster.pass_time(29)
    assert not cluster.events("stall")
    cluster.pass_time(6)
    assert cluster.events("stall")


def test_steps_that_take_long_are_learned_but_not_from_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    heartbeat = cluster.dogs[0].heartbeat
    for seconds in (1, 1, 1, 200):
        heartbeat.enter("forward")
        cluster.seconds += seconds
    heartbeat.enter("backward", 5)
    assert cluster.dogs[0].limit("forward") == pytest.approx(10)
    for _ in range(30):
        heartbeat.enter("forward")
        cluster.seconds += 4
    heartbeat.enter("backward")
    heartbeat.has_stepped = True
    assert cluster.dogs[0].limit("forward") == pytest.approx(20)
    assert cluster.dogs[0].limit("backward") == pytest.approx(10)


def test_F2_a_rank_without_a_sign_of_life_is_missing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 3)
    for _ in range(2):
        cluster.step()
        cluster.pass_time(1)
    cluster.stopped = {2}
    cluster.step(2)
    cluster.pass_time(16)
    (event,) = cluster.events("stall")
    assert event["guilty"] == [2]
    assert event["verdicts"]["2"].startswith("missing; no sign of life for 1")
    # It goes on where it was, and was not at fault while it stood.
    cluster.stopped = set()
    cluster.step()
    cluster.pass_time(9)
    assert len(cluster.events("stall")) == len(cluster.events("stall_over")) == 1


@pytest.mark.parametrize("stopped", [{0}, {0, 1}])
def test_F2_another_rank_reports_that_rank_0_is_missing(tmp_path: Path, stopped: set[int]) -> None:
    cluster = Cluster(tmp_path, 4)
    for _ in range(2):
        cluster.step()
        cluster.pass_time(1)
    cluster.stopped = stopped
    cluster.step(*stopped)
    cluster.pass_time(16)
    (event,) = cluster.events("stall")
    assert event["guilty"] == sorted(stopped)
    cluster.stopped = set()
    cluster.step()
    cluster.pass_time(9)
    assert len(cluster.events("stall")) == len(cluster.events("stall_over")) == 1


def test_F6_a_rank_that_ended_is_told_to_be_why_the_others_wait(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    for _ in range(2):
        cluster.step()
        cluster.pass_time(1)
    # Without threads: what it says last is in its next look.
    cluster.dogs[1]._ended = "ArithmeticError: 1/0"
    cluster.pass_time(16)
    (event,) = cluster.events("stall")
    assert event["guilty"] == [1]
    assert event["verdicts"]["1"] == "its training has ended: ArithmeticError: 1/0"


def test_F7_without_a_store_each_rank_looks_at_itself(tmp_path: Path, no_process_ends: Any) -> None:
    cluster = Cluster(tmp_path, 2, action="abort")
    for _ in range(2):
        cluster.step()
        cluster.pass_time(1)
    cluster.stopped = {0}
    board = cluster.dogs[1]._board
    assert board is not None
    board._store = mock.Mock(set=mock.Mock(side_effect=RuntimeError("connection reset")))
    cluster.pass_time(9)
    assert not cluster.events("stall")
    cluster.pass_time(8)
    (event,) = cluster.events("stall")
    assert "the agent that serves the store is missing (RuntimeError: connection reset)" in event["verdicts"]["1"]
    no_process_ends.assert_called_with(STALLED)


def test_F7_a_store_that_is_lost_after_the_question_costs_no_report(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    for _ in range(2):
        cluster.step()
        cluster.pass_time(1)
    cluster.stopped = {1}
    cluster.step(1)
    cluster.pass_time(11)
    assert cluster.dogs[0]._stall is not None
    assert not cluster.events("stall")
    board = cluster.dogs[0]._board
    assert board is not None
    board._store = mock.Mock(set=mock.Mock(side_effect=RuntimeError("connection reset")))
    cluster.pass_time(2)
    assert len(cluster.events("stall")) == 1


def test_a_store_that_does_not_answer_keeps_no_rank_from_looking(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    for _ in range(2):
        cluster.step()
        cluster.pass_time(1)
    for _ in range(20):
        cluster.seconds += 1
        cluster.dogs[1].guard()
    assert [event["report"] for event in cluster.events("stall")] == [str(tmp_path / "stalls" / "1-rank-1")]


def test_F10_clocks_that_jump_are_no_stall(tmp_path: Path) -> None:
    """The wall clock does not matter, and where the whole process was stopped its ranks begin to count again."""
    cluster = Cluster(tmp_path, 2)
    for _ in range(3):
        cluster.step()
        with mock.patch("time.time", return_value=1e12):
            cluster.pass_time(2)
    cluster.seconds += 5000
    cluster.pass_time(9)
    assert not cluster.events("stall")
    cluster.pass_time(8)
    assert cluster.events("stall")


def test_abort_ends_all_ranks_the_one_that_tells_last(tmp_path: Path, no_process_ends: Any) -> None:
    cluster = Cluster(tmp_path, 2, action="abort")
    for _ in range(2):
        cluster.step()
        cluster.pass_time(1)
    ended: list[int] = []
    for _ in range(20):
        cluster.seconds += 1
        for rank, dog in enumerate(cluster.dogs):
            dog.tick()
            dog.guard()
            if no_process_ends.called and rank not in ended:
                ended.append(rank)
            no_process_ends.reset_mock()
    assert ended == [1, 0]
    assert cluster.events("end")[0]["status"] == STALLED


def test_one_process_watches_itself(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    for _ in range(2):
        cluster.step()
        cluster.pass_time(1)
    cluster.dogs[0].enter("data", 3)
    cluster.pass_time(12)
    text = report_of(tmp_path).read_text()
    assert "1 rank, for 11.0 s" in text
    assert "rank 0" in text
    assert "step 3, data: makes no progress" in text


def test_a_folder_that_cannot_be_written_costs_the_files_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "stalls").write_text("")
    cluster = Cluster(tmp_path, 1)
    with cluster.dogs[0]:
        assert "Reports of stalls go to the log only" in caplog.text
    cluster.dogs[0]._ended = None
    cluster.dogs[0].enter("data")
    cluster.pass_time(2000)
    assert "rank 0" in caplog.text
    assert cluster.events("stall")


def test_phases_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="one of init, data"):
        Heartbeat().enter("thinking")


def test_options_that_make_no_sense_are_refused_together() -> None:
    with pytest.raises(ParallelConfigError) as error:
        StallWatchdog(timeout=0, action="panic", phase_timeouts={"nap": 3, "save": -1})  # type: ignore[arg-type]
    assert len(error.value.problems) == 4
    for words in ("timeout is 0", "'panic'", "'nap': 3", "'save': -1", 'phase_timeouts={"save": 900.0}'):
        assert words in str(error.value)
    for options in {"timeout": "120"}, {"timeout": None}, {"phase_timeouts": {"save": "900"}}, {"phase_timeouts": [3]}:
        with pytest.raises(ParallelConfigError, match="StallWatchdog: "):
            StallWatchdog(**options)


@pytest.mark.parametrize("timeout", [math.inf, 1e300])
def test_a_limit_beyond_all_times_is_none(timeout: float, tmp_path: Path) -> None:
    with Watchdog(tmp_path, timeout=timeout) as watchdog:
        watchdog.guard()


@pytest.mark.parametrize("found", [False, True])
def test_stacks_of_a_process_that_was_only_stopped_are_not_left_behind(found: bool, tmp_path: Path) -> None:
    directory = tmp_path / "stalls"
    with Watchdog(directory) as watchdog:
        (directory / "stuck-rank-0.txt").write_text("Timeout (0:04:00)!")
        if found:
            (directory / "1").mkdir()
    assert watchdog.directory.exists() == found
    assert (directory / "stuck-rank-0.txt").exists() == found


# -- real ranks -------------------------------------------------------------------------------------------------------


def test_F1_a_rank_that_sleeps_is_named_with_its_stack_and_goes_on(tmp_path: Path) -> None:
    assert run_ranks(2, loop, tmp_path, "sleep", 1) == [4, 4]
    text = report_of(tmp_path).read_text()
    assert "Look first at rank 1 on " in text.splitlines()[1]
    assert re.search(rf"rank 1 .*, step {BAD_STEP}, data: in no collective; rank 0 waits for it in all_reduce", text)
    assert re.search(r"watchdog_runs.py:\d+ in come: time.sleep\(0.02\)", text)
    assert re.search(r"rank 0 .*, backward: waits for rank 1 in all_reduce \[3\] Float, number \d+ in group 0", text)
    (event,) = (event for event in read_events(tmp_path) if event["kind"] == "stall")
    assert event["guilty"] == [1]
    folder = report_of(tmp_path).parent
    assert "in come" in (folder / "rank-1-stacks.txt").read_text()
    assert "all_reduce" in (folder / "rank-0-flight-recorder.json").read_text()


def test_F4_another_collective_is_named_with_its_number_and_all_ranks_end(tmp_path: Path) -> None:
    exits = launch(2, loop, tmp_path, "broadcast", 1, "abort", logs=tmp_path / "logs")
    assert [e.code for e in exits] == [STALLED, STALLED], exits[0].log + exits[1].log
    text = report_of(tmp_path).read_text()
    assert re.search(r"rank 1 .*it calls broadcast \[3\] Float as number \d+ in group 0 .*rank 0: all_reduce", text)
    assert "Look first at" in exits[0].log


@pytest.mark.slow
def test_F3_a_rank_that_keeps_pythons_lock_shows_its_stack(tmp_path: Path) -> None:
    run_ranks(2, loop, tmp_path, "hold", 1, "report", 2.0)
    text = report_of(tmp_path).read_text()
    assert "rank 1" in text.splitlines()[1]
    assert "missing; no sign of life" in text
    assert re.search(r'File ".*watchdog_runs.py", line \d+ in loop', text)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "how"), [("skip", "it came to its end"), ("raise", "ArithmeticError: the fault")])
def test_F5_F6_a_rank_that_skips_collectives_or_leaves_is_named(tmp_path: Path, fault: str, how: str) -> None:
    run_ranks(2, loop, tmp_path, fault, 1)
    (event,) = (event for event in read_events(tmp_path) if event["kind"] == "stall")
    assert event["guilty"] == [1]
    assert event["verdicts"]["1"].startswith(f"its training has ended: {how}")
    assert "waits for rank 1 in all_reduce" in event["verdicts"]["0"]


@pytest.mark.slow
def test_F7_ranks_end_in_time_when_the_host_of_the_store_is_killed(tmp_path: Path) -> None:
    exits = launch(2, without_rank_0, tmp_path, logs=tmp_path / "logs", grace=20.0)
    assert exits[0].killed
    assert exits[1].code == STALLED, exits[1].log
    assert "serves the store is missing" in report_of(tmp_path, "1-rank-1").read_text()


def test_F9_signs_of_life_go_on_while_training_waits_for_the_store(tmp_path: Path) -> None:
    assert min(run_ranks(2, beats_while_waiting, tmp_path, init_group=False)) >= 5


@pytest.mark.parametrize("rank", some([0, 1], 1))
def test_F2_a_rank_that_was_stopped_goes_on_as_if_nothing_had_happened(tmp_path: Path, rank: int) -> None:
    job = Job(steps=6)
    watching = StallWatchdog(timeout=LIMIT, phase_timeouts={"save": LIMIT})
    exits = launch(2, train, job, tmp_path, 0, None, (watching, StopAndGoOn(tmp_path, 3, rank)), logs=tmp_path / "logs")
    succeeded(exits)
    (event,) = (event for event in read_events(tmp_path) if event["kind"] == "stall")
    assert event["guilty"] == [rank]
    assert event["verdicts"][str(rank)].startswith("missing; ")
    assert len([event for event in read_events(tmp_path) if event["kind"] == "stall_over"]) == 1
    assert outcome(tmp_path, 2) == reference(Job(steps=6))


@pytest.mark.slow
def test_F2_ranks_abort_when_one_is_stopped_and_the_next_start_goes_on(tmp_path: Path) -> None:
    story = Story(tmp_path, Job())
    exits = story.run(StallWatchdog(timeout=LIMIT, action="abort"), At(8, "stop", 1), grace=1.0)
    assert exits[0].code == STALLED, exits[0].log
    assert exits[1].left
    assert "Look first at rank 1 on " in exits[0].log
    assert [event["status"] for event in read_events(tmp_path) if event["kind"] == "end"] == [STALLED]
    story.job = Job()
    story.finish()
    assert story.starts == [0, 6]


# -- under a Trainer --------------------------------------------------------------------------------------------------


def phases(layout: str, folder: str) -> Any:
    watching = StallWatchdog()
    noting = Phases(watching)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    saving = [CommittedCheckpoint(every_n_steps=2)] if layout not in ("one", "lightning") else []
    strategy = {"one": "auto", "lightning": "ddp"}.get(layout) or strategy_of(layout)
    trainer = make_trainer(
        ranks,
        strategy,
        max_steps=2,
        precision="64-true",
        default_root_dir=folder,
        accumulate_grad_batches=2,
        enable_checkpointing=bool(saving),
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=[watching, noting, *saving],
    )
    loaders = [batches(4), batches(1)] if dist.is_initialized() else [numbers_of(16, 4), numbers_of(4, 4)]
    trainer.fit(Probe(), *loaders)
    threads = [thread.name for thread in threading.enumerate() if thread.name == "stall watchdog"]
    return noting.seen, threads, read_events(folder)


@pytest.mark.parametrize("layout", ["fsdp", *some(["one", "lightning", "ddp", "zero2", "hsdp2x2"])])
def test_each_phase_of_a_fit_is_seen(tmp_path: Path, layout: str) -> None:
    ranks = {"one": 1, "hsdp2x2": 4}.get(layout, 2)
    for seen, threads, events in run_ranks(ranks, phases, layout, str(tmp_path), init_group=ranks > 1):
        for step in (0, 1):
            places = [("forward", 0), ("backward", 0), ("data", 1), ("forward", 1), ("backward", 1)]
            assert [place[1:] for place in seen if place[0] == step and place[1:] in places] == places
        assert (0, "optimizer", 1) in seen
        assert seen.index((0, "data", 0)) < seen.index((0, "optimizer", 1)) < seen.index((1, "forward", 0))
        names = {name for _, name, _ in seen}
        assert {"validation", "idle"} <= names
        assert ("save" in names) == (layout not in ("one", "lightning"))
        if "save" in names:
            # As long as training waits for it, and not until the next phase; and for what is written yet, in the end.
            assert [seen[i + 1][1] for i, place in enumerate(seen) if place[1] == "save"] == ["data", "idle"]
        assert not threads
        assert not [event for event in events if event["kind"] == "stall"]
    assert not list(tmp_path.glob("stalls/*"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("axis", AXES)
def test_F1_a_rank_that_sleeps_is_named_in_each_layout(tmp_path: Path, axis: str, rank: int) -> None:
    assert run_ranks(2, sleeps_under, axis, tmp_path, rank) == [3, 3]
    text = report_of(tmp_path).read_text()
    assert re.search(rf"Look first at rank {rank} on \S+\.$", text, re.MULTILINE), text
    assert re.search(rf"rank {rank} .*, step 2, forward: in no c", text), text
    assert re.search(rf"rank {1 - rank} .*: waits ", text), text


@pytest.mark.slow
@pytest.mark.parametrize(("where", "stalls"), [("quiet phases", 0), ("a later step", 1)])
def test_F8_what_takes_long_in_a_fit_is_no_stall_but_in_a_later_step(tmp_path: Path, where: str, stalls: int) -> None:
    run_ranks(2, takes_long, where, tmp_path)
    assert len([event for event in read_events(tmp_path) if event["kind"] == "stall"]) == stalls


def two_of_them(folder: str) -> str:
    trainer = make_trainer(1, "auto", default_root_dir=folder, callbacks=[StallWatchdog(), StallWatchdog()])
    with pytest.raises(ParallelConfigError) as error:
        trainer.fit(Probe(), batches(1))
    return str(error.value)


def test_two_of_them_are_refused(tmp_path: Path) -> None:
    assert "more than one callback is StallWatchdog" in run_ranks(1, two_of_them, str(tmp_path))[0]


# -- the page about it ------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parent.parent / "docs" / "watchdog.md").read_text()


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def loop_of_the_page(folder: str) -> tuple[list[str], bool]:
    os.chdir(folder)
    fabric = launched(strategy_of("fsdp", "fabric"))
    module = Probe()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    entered: list[str] = []
    enter = Heartbeat.enter

    def noted(self: Heartbeat, phase: str, *args: Any, **kwargs: Any) -> None:
        entered.append(phase)
        enter(self, phase, *args, **kwargs)

    with mock.patch.object(Heartbeat, "enter", noted):
        exec(examples("python")[1], {"fabric": fabric, "model": model, "optimizer": optimizer, "loader": batches(2)})
    return entered, Path("runs/gpt/checkpoint").is_dir()


def test_the_loop_of_the_page_runs(tmp_path: Path) -> None:
    for entered, is_saved in run_ranks(2, loop_of_the_page, str(tmp_path)):
        step = ["forward", "backward", "optimizer", "save", "optimizer", "data"]
        assert entered == ["data", *step, *step]
        assert is_saved
    assert not (tmp_path / "runs" / "gpt" / "stalls").exists()


def test_the_trainer_and_the_file_of_the_page_ask_for_the_same() -> None:
    (written,) = re.findall(r"StallWatchdog\(.*?\)", examples("python")[0])
    (given,) = yaml.safe_load(examples("yaml")[0])["trainer"]["callbacks"]
    by_hand, by_file = eval(written, {"StallWatchdog": StallWatchdog}), StallWatchdog(**given["init_args"])
    assert (by_hand.timeout, by_hand.action) == (by_file.timeout, by_file.action) == (120, "abort")


def test_the_limits_of_the_page_are_those_of_the_code(tmp_path: Path) -> None:
    limits = Watchdog(tmp_path)._limits
    assert "| data, forward, backward, optimizer | `timeout`, 300 s |" in PAGE
    assert {limits[phase] for phase in TRAINING} == {300}
    assert "| init, load, save, validation | 900 s each" in PAGE
    assert {limits[phase] for phase in QUIET_PHASES} == {900}
    assert limits.keys() == {*PHASES, "first_step"}
