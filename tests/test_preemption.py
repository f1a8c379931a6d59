"""Runs that are told to end (E): all ranks stop after one step, saved, with status 75, and go on as if never told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from fault_runs import AtPoint, Job
from fault_stories import Story, valid_steps
from faults import Exit
from probe import Probe, batches, launched, long_run, trainer

from lightning_par.callbacks import PreemptionGuard
from lightning_par.errors import ParallelConfigError
from lightning_par.resilience.control import StepControl
from lightning_par.resilience.errors import PREEMPTED, PreemptedError
from lightning_par.resilience.events import read_events
from lightning_par.resilience.preemption import SAME_WISH, Preemption, Stop, requeue_slurm_job, slurm_end
from lightning_par.resilience.signals import SignalListener
from lightning_par.testing import run_ranks


class Told(pl.Callback):
    """Sends a signal to this process, on some ranks, the first time that it comes to a place in a step."""

    def __init__(self, place: str, step: int, *ranks: int, number: int = signal.SIGTERM) -> None:
        self.place, self.at, self.ranks, self.number = place, step, ranks, number

    def come(self, place: str, step: int) -> None:
        if place == self.place and step == self.at and dist.get_rank() in self.ranks:
            self.place = ""
            os.kill(os.getpid(), self.number)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.come("fit start", self.at)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self.come("sanity", self.at)

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.come("validation", trainer.global_step)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.first.register_forward_pre_hook(lambda *_: self.come("forward", trainer.global_step + 1))
        optimizer = trainer.optimizers[0]
        optimizer.register_step_pre_hook(lambda *_: self.come("optimizer", trainer.global_step + 1))

        # Called before a batch is read.
        trainer.fit_loop.epoch_loop._on_before_fetch = lambda: self.come("data", trainer.global_step + 1)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.come("batch", trainer.global_step + 1)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self.place == "backward":
            loss.register_hook(lambda _: self.come("backward", trainer.global_step + 1))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.come("batch end", trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.come("end", self.at)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.come("teardown", self.at)


def stopped(exits: list[Exit]) -> None:
    """Assert that all ranks ended by themselves, with the status that says so, and no traceback."""
    for rank, e in enumerate(exits):
        assert (e.code, e.left) == (PREEMPTED, False), f"rank {rank}: {e}\n{e.log[-3000:]}"
        assert "Traceback" not in e.log, e.log[-3000:]


VALIDATING = (("val_check_interval", 4), ("check_val_every_n_epoch", None))
ASYNC = (("asynchronous", True),)
PLACES = [
    # Where, in which step, whom; and the step after which all stop.
    ("E1-between-steps", "batch end", 5, (0,), 5),
    ("E2-forward-rank-1", "forward", 5, (1,), 5),
    ("E2-forward-all", "forward", 5, (0, 1), 5),
    ("E3-backward", "backward", 5, (0,), 5),
    ("E3-optimizer", "optimizer", 5, (1,), 5),
    ("E5-data-wait", "data", 5, (1,), 5),
    ("E5-validation", "validation", 4, (1,), 5),
    ("E6-before-the-first-step", "fit start", 0, (1,), 0),
    ("E5-sanity-check", "sanity", 0, (0,), 0),
]
QUICK = ("E2-forward-rank-1", "E6-before-the-first-step")
# From the others it goes on in the same way.
GO_ON = {("forward", (1,)), ("optimizer", (1,)), ("data", (1,)), ("validation", (1,)), ("fit start", (1,))}


@pytest.mark.parametrize(
    ("place", "step", "ranks", "last"),
    [pytest.param(*p[1:], id=p[0], marks=[] if p[0] in QUICK else pytest.mark.slow) for p in PLACES],
)
def test_told_to_end(tmp_path: Path, place: str, step: int, ranks: tuple[int, ...], last: int) -> None:
    sanity = () if place != "sanity" else (("num_sanity_val_steps", 1),)
    story = Story(tmp_path, Job(trainer=(*VALIDATING, *sanity)))
    stopped(story.run(Told(place, step, *ranks), PreemptionGuard()))
    saved = valid_steps(story.root)
    # The thread that hears it may come to run a moment later.
    assert saved in ([[3, last], [3, last + 1]] if last else [[]])
    (event,) = (event for event in read_events(story.folder) if event["kind"] == "stop")
    assert (event["kind"], event["signal"], event["rank"] in ranks) == ("stop", "SIGTERM", True)
    assert event["saved"] == (str(story.root / f"step-{saved[-1]:08d}") if saved else None)
    if (place, ranks) in GO_ON:
        story.finish(PreemptionGuard())
        assert story.starts == [0, saved[-1] if saved else 0]


SAVES = [
    # While a save is under way: where in it, and whom.
    ("E4-shard", "async", "shard_written", (1,)),
    ("E4-gather", "async", "outcome_gathered", (0,)),
    ("E4-renamed", "sync", "renamed", (0,)),
    ("E4-shard-sync", "sync", "shard_written", (0, 1)),
]


@pytest.mark.parametrize(
    ("mode", "point", "ranks"),
    [pytest.param(*s[1:], id=s[0], marks=[] if s[0] == "E4-gather" else pytest.mark.slow) for s in SAVES],
)
def test_told_to_end_in_a_save(tmp_path: Path, mode: str, point: str, ranks: tuple[int, ...]) -> None:
    story = Story(tmp_path, Job(saver=ASYNC if mode == "async" else ()))
    stopped(story.run(*(AtPoint(point, 2, "term", rank) for rank in ranks), PreemptionGuard()))
    assert valid_steps(story.root)[-1] >= 6
    if point == "renamed":
        story.finish(PreemptionGuard())
        assert story.starts[1] >= 6


@pytest.mark.parametrize("strategy", ["FSDP2Strategy", long_run("DataParallelStrategy")])
def test_E5_in_the_validation_of_a_step_that_is_saved(tmp_path: Path, strategy: str) -> None:
    """It need not come to its end, which may take longer than there is time; it is run again as a whole."""
    story = Story(tmp_path, Job(every=4, strategy=strategy, trainer=VALIDATING))
    stopped(story.run(Told("validation", 4, 1), PreemptionGuard()))
    story.finish(PreemptionGuard())
    assert story.starts[1] in (4, 5)


LAYOUTS = {
    "accumulation": Job(accumulate=3, steps=8),
    "hsdp": Job(ranks=4, strategy="HSDPStrategy", options=(("dp_shard_size", 2),), timeout=60.0),
    "pp": Job(strategy="PipelineParallelStrategy", options=(("pp_microbatches", 2),), batch=8),
    "one": Job(ranks=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_E2_in_each_layout(tmp_path: Path, name: str) -> None:
    job = LAYOUTS[name]
    story = Story(tmp_path, job)
    stopped(story.run(Told("forward" if name != "pp" else "batch", 5, job.ranks - 1), PreemptionGuard()))
    story.finish(PreemptionGuard())
    assert story.starts[1] in (5, 6)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["end", "teardown"])
def test_E5_told_to_end_at_the_end(tmp_path: Path, place: str) -> None:
    """What has ended ends."""
    story = Story(tmp_path, Job(steps=4))
    story.finish(Told(place, 0, 1), PreemptionGuard())
    assert valid_steps(story.root) == [3, 4]


class Twice(pl.Callback):
    """Two signals before the step's end, the second one after so many seconds by the guard's clock, in a hung save."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.guard = next(one for one in trainer.callbacks if isinstance(one, PreemptionGuard))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_step + 1 == 5 and dist.get_rank() == 1:
            preemption = self.guard.preemption
            os.kill(os.getpid(), signal.SIGTERM)
            wait(lambda: signal.SIGTERM in preemption._first)
            now = time.time()
            preemption._clock = lambda: now + self.seconds
            os.kill(os.getpid(), signal.SIGTERM)
            if self.seconds > SAME_WISH:
                # Blocked outside of Python, as in a collective that nobody joins.
                dist.recv(torch.zeros(1), src=0)


def wait(until: Callable[[], bool]) -> None:
    for _ in range(1000):
        if until():
            return
        threading.Event().wait(0.01)
    raise AssertionError("in vain")


def test_E7_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    story = Story(tmp_path, Job())
    exits = story.run(Twice(SAME_WISH + 1), PreemptionGuard())
    assert exits[1].code == PREEMPTED
    assert valid_steps(story.root) == [3]
    assert not exits[0].left


@pytest.mark.slow
def test_E7_a_signal_that_arrives_twice_is_one(tmp_path: Path) -> None:
    """A scheduler signals the whole process group, and the agent of torchrun passes its own signal on."""
    story = Story(tmp_path, Job())
    stopped(story.run(Twice(1.0), PreemptionGuard()))
    assert valid_steps(story.root)[-1] >= 5


class SlowDisk(pl.Callback):
    """Pretends that a save has taken that long, on one rank."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if dist.get_rank() == 1:
            trainer.strategy.saver.written = self.seconds


def test_E8_a_save_that_takes_longer_than_what_is_left_is_left_out(tmp_path: Path) -> None:
    story = Story(tmp_path, Job())
    exits = story.run(Told("forward", 5, 0), SlowDisk(90.0), PreemptionGuard(grace=timedelta(seconds=60)))
    stopped(exits)
    assert valid_steps(story.root) == [3]
    assert "a save has taken longer: the last checkpoint is an earlier one" in exits[0].log
    story.finish()
    assert story.starts == [0, 3]


@pytest.mark.slow
def test_a_deadline_is_a_signal(tmp_path: Path) -> None:
    """Three quarters of an hour are less than an hour."""
    story = Story(tmp_path, Job(saver=(("max_no_progress", 1),)))
    guard = PreemptionGuard(grace=timedelta(hours=1), time_limit=timedelta(minutes=45))
    exits = story.run(guard)
    stopped(exits)
    assert re.search(
        r"deadline \(rank \d\): training stops after step 0; nothing was trained in this start", exits[0].log
    )
    # What was told to end has not failed.
    story.finish()


# -- without a checkpoint callback of ours, under Lightning's own strategies, in a loop of one's own -------------------


def handlers() -> tuple[Any, Any]:
    return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)


class Broadcasts(pl.Callback):
    """Counts broadcasts from the first batch to the last."""

    def __init__(self) -> None:
        self.seen = 0
        self.watch = mock.patch.object(dist, "broadcast", self.broadcast)
        self.original = dist.broadcast

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        self.seen += 1
        return self.original(*args, **kwargs)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.watch.start()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.watch.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.watch.stop()


class InEvaluation(pl.Callback):
    """Looks at who handles signals in a validation of its own."""

    handlers: Any = None

    def on_validation_batch_start(self, *args: Any) -> None:
        self.handlers = handlers()


def plain_fit(folder: str, strategy: str, told: bool) -> tuple[Any, bool]:
    """Tell the last rank to end in the second step; how the fit ended, and whether the handlers are as before."""
    before, guard, broadcasts = handlers(), PreemptionGuard(), Broadcasts()
    faults = [Told("forward", 2, dist.get_world_size() - 1)] if told else []
    options: dict[str, Any] = {"default_root_dir": folder, "max_epochs": None, "max_steps": 5}
    fit = trainer(strategy, callbacks=[*faults, broadcasts, guard], **options)
    try:
        fit.fit(Probe(), batches(6))
    except PreemptedError as error:
        assert guard.preemption is not None
        assert handlers() != before
        guard.preemption.remove()
        return (error.code, str(error)), handlers() == before
    # Lightning's own, before each batch, has no purpose any more.
    assert broadcasts.seen == 0
    if not told:
        # Lightning's handler waits for a collective there too, in the middle of another one.
        seen = InEvaluation()
        fit.callbacks.append(seen)
        fit.validate(Probe(), batches(2), verbose=False)
        assert seen.handlers == before
        assert "register_signal_handlers" not in vars(fit._signal_connector)
    return fit.global_step, handlers() == before


@pytest.mark.parametrize("strategy", ["par_fsdp", long_run("par_ddp"), long_run("ddp")])
def test_without_a_committed_checkpoint_the_state_is_saved_beside_the_others(tmp_path: Path, strategy: str) -> None:
    for (code, text), restored in run_ranks(2, plain_fit, str(tmp_path), strategy, True):
        assert restored
        assert code == PREEMPTED
        assert "stopped after SIGTERM to rank 1; saved as" in text
    (saved,) = (tmp_path / "checkpoints").glob("preempted-*")
    assert saved.name in ("preempted-step-00000002.ckpt", "preempted-step-00000003.ckpt")
    assert saved.is_dir() == strategy.startswith("par")


def test_handlers_are_as_before_when_nobody_was_told(tmp_path: Path) -> None:
    assert run_ranks(2, plain_fit, str(tmp_path), "par_fsdp", False) == [(5, True)] * 2


def fabric_loop(folder: str) -> tuple[int, str, bool]:
    before = handlers()
    fabric = launched("par_fsdp")
    module = Probe()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    preemption = Preemption(fabric.strategy.control, rank=fabric.global_rank)
    try:
        with preemption:
            for step, batch in enumerate(batches(6), 1):
                if step == 3 and fabric.global_rank == 1:
                    preemption.hear(signal.SIGUSR1)
                fabric.backward((model(batch) - batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                state["step"] = step
                if stop := preemption.agreed(step):
                    fabric.save(f"{folder}/last", state)
                    preemption.leave(stop, saved=f"{folder}/last")
    except PreemptedError as error:
        preemption.remove()
        return int(state["step"]), str(error), handlers() == before
    raise AssertionError("nobody stopped")


def test_in_a_fabric_loop(tmp_path: Path) -> None:
    told = (3, f"stopped after SIGUSR1 to rank 1; saved as {tmp_path}/last", True)
    assert run_ranks(2, fabric_loop, str(tmp_path)) == [told] * 2
    assert (tmp_path / "last").is_dir()


# -- schedulers and agents --------------------------------------------------------------------------------------------


class TellGroup(Told):
    """Signals the process group of a rank, its loader's workers too, or the agent that has started it."""

    def __init__(self, whom: str, step: int, *ranks: int) -> None:
        super().__init__(whom, step, *ranks)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_step + 1 != self.at or dist.get_rank() not in self.ranks:
            return
        # From outside of the group: torch's workers know what their parent sends.
        whom = os.getppid() if self.place == "agent" else -os.getpid()
        subprocess.run(["kill", "-TERM", "--", str(whom)], start_new_session=True, check=True)


@pytest.mark.parametrize("persistent", [True, long_run(False)])
def test_E9_workers_of_a_loader_live_on(tmp_path: Path, persistent: bool) -> None:
    story = Story(tmp_path, Job(steps=20, workers=2, persistent=persistent))
    exits = story.run(TellGroup("group", 12, 0, 1), PreemptionGuard())
    stopped(exits)
    assert not any("DataLoader worker" in e.log for e in exits)
    assert valid_steps(story.root)[-1] in (12, 13)


SCONTROL = """#!/bin/sh
echo "$@" $(ls {folder}/root | grep -c step) >> {folder}/requeued
"""


def test_E10_slurm_is_asked_once_after_the_commit(tmp_path: Path) -> None:
    stub = tmp_path / "bin" / "scontrol"
    stub.parent.mkdir()
    stub.write_text(SCONTROL.format(folder=tmp_path))
    stub.chmod(0o755)
    variables = {"SLURM_JOB_ID": "17", "PATH": f"{stub.parent}:{os.environ['PATH']}"}
    story = Story(tmp_path, Job())
    told = Told("forward", 2, 0, 1, number=signal.SIGUSR1)
    stopped(story.run(told, PreemptionGuard(), environment=variables))
    assert (tmp_path / "requeued").read_text() == "requeue 17 1\n"


SCRIPT = """
import sys
from pathlib import Path
from fault_runs import Job, train
from test_preemption import TellGroup
from lightning_par.callbacks import PreemptionGuard
train(Job(), Path(sys.argv[1]), 0, None, (TellGroup("agent", 5, 1), PreemptionGuard()))
"""


@pytest.mark.slow
def test_E11_the_agent_of_torchrun_is_told_to_end(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local_addr=localhost"]
    command += ["--nproc_per_node=2", "--max_restarts=3", "--shutdown-timeout=20", str(script), str(tmp_path)]
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert valid_steps(tmp_path / "root")[-1] in (5, 6), done.stderr[-3000:]
    assert done.stderr.count("Exit status 75") == 1


LAUNCHED = """
import threading
import lightning.pytorch as pl
from parity import make_trainer
from probe import Probe, numbers
from test_preemption import Told
from lightning_par.callbacks import PreemptionGuard

class Slow(pl.Callback):
    def on_exception(self, trainer, pl_module, exception):
        if trainer.global_rank == 0:
            threading.Event().wait(8)
            print("the other rank has ended with", trainer.strategy.launcher.procs[0].poll())

told = Told("forward", 3, 0)
trainer = make_trainer(2, "par_fsdp", max_steps=9, default_root_dir=FOLDER, callbacks=[told, PreemptionGuard(), Slow()])
trainer.fit(Probe(), numbers(40))
"""


@pytest.mark.slow
def test_E1_ranks_that_the_trainer_has_started_end_alike(tmp_path: Path) -> None:
    """Rank 0 takes longer to end than Lightning's launcher would let it."""
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED.replace("FOLDER", repr(str(tmp_path))))
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == PREEMPTED, done.stderr[-3000:]
    assert "the other rank has ended with 75" in done.stdout
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "checkpoints").iterdir())


# -- the plain object -------------------------------------------------------------------------------------------------


class Clock:
    """Tells a time that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def alone(**options: Any) -> tuple[Preemption, Clock]:
    clock = Clock()
    preemption = Preemption(StepControl(), rank=0, clock=clock, **options)
    preemption._take_away = [preemption._control.add("preemption", preemption._wish)]
    preemption._control.add("preemption/save_time", lambda: int(1000 * preemption._usual_save()))
    return preemption, clock


def test_what_is_left_is_counted_from_the_signal() -> None:
    preemption, clock = alone(grace=30.0, usual_save=lambda: 12.0)
    assert preemption.agreed(1) is None
    preemption.hear(signal.SIGUSR1)
    clock.now += 17.5
    stop = preemption.agreed(2)
    assert stop is not None
    assert (stop.rank, stop.reason, stop.saves) == (0, "SIGUSR1", True)
    assert stop.left == pytest.approx(12.5, abs=0.01)
    clock.now += 1.0
    stop = preemption.agreed(3)
    assert stop is not None
    assert not stop.saves


def test_a_deadline_acts_when_the_grace_begins() -> None:
    preemption, clock = alone(deadline=2000.0, grace=100.0)
    clock.now = 1899.0
    assert preemption.agreed(1) is None
    clock.now = 1901.0
    stop = preemption.agreed(2)
    assert stop is not None
    assert (stop.reason, stop.saves) == ("deadline", True)
    assert stop.left == pytest.approx(99.0, abs=0.01)


def test_an_exchange_of_somebody_else_counts() -> None:
    preemption, _ = alone()
    preemption.hear(signal.SIGTERM)
    preemption._control.exchange(1, nonfinite=0)
    stop = preemption.agreed(1)
    assert stop is not None
    assert stop.left is None
    assert preemption._control.exchanges == 1


@pytest.mark.parametrize(
    ("reason", "requeue", "rank", "asked"),
    [
        ("SIGUSR1", "notice", 0, True),
        ("deadline", "notice", 0, True),
        ("SIGTERM", "notice", 0, False),
        ("SIGTERM", "always", 0, True),
        ("SIGTERM", "always", 1, False),
        ("SIGUSR1", "never", 0, False),
    ],
)
def test_who_asks_slurm_and_when(
    monkeypatch: pytest.MonkeyPatch, reason: str, requeue: Any, rank: int, asked: bool
) -> None:
    calls: list[int] = []
    monkeypatch.setattr("lightning_par.resilience.preemption.requeue_slurm_job", lambda: calls.append(rank))
    preemption = Preemption(StepControl(), rank=rank)
    with pytest.raises(PreemptedError) as error:
        preemption.leave(Stop(3, reason, True, None), saved=None, requeue=requeue)
    assert error.value.code == PREEMPTED
    assert "rank 3; nothing was saved" in str(error.value)
    assert bool(calls) == asked


def test_slurm_says_when_a_job_ends() -> None:
    assert slurm_end({"SLURM_JOB_END_TIME": "1700000000"}) == 1.7e9
    assert slurm_end({}) is None


def test_slurm_that_refuses_costs_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not requeue_slurm_job({})
    monkeypatch.setenv("PATH", "")
    assert not requeue_slurm_job({"SLURM_JOB_ID": "1", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"})
    assert "SLURM job 7_3 was not requeued" in caplog.text


def test_a_listener_hears_at_once_and_leaves_nothing_behind() -> None:
    heard: list[int] = []
    before, wakeup = handlers(), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    listener = SignalListener([signal.SIGUSR1], heard.append)
    for _ in range(2):
        listener.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    wait(lambda: heard == [signal.SIGUSR1])
    for _ in range(2):
        listener.stop()
    assert handlers() == before
    assert signal.set_wakeup_fd(wakeup) == wakeup
    wait(lambda: "signals" not in {thread.name for thread in threading.enumerate()})


def test_what_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ParallelConfigError) as error:
        PreemptionGuard(grace=timedelta(0), time_limit=3)  # type: ignore[arg-type]
    assert len(error.value.problems) == 2
    with pytest.raises(ParallelConfigError, match="'SIGKILL', no signal that can be caught"):
        PreemptionGuard(signals=["SIGTERM", "SIGKILL", "TERM"])
    with pytest.raises(ParallelConfigError, match="one of notice, always, never"):
        PreemptionGuard(requeue="yes")  # type: ignore[arg-type]


def outside_the_main_thread(folder: str) -> list[Any]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(plain_fit(folder, "par_fsdp", False)))
    thread.start()
    thread.join()
    return results


@pytest.mark.slow
def test_outside_the_main_thread_training_goes_on(tmp_path: Path) -> None:
    assert run_ranks(1, outside_the_main_thread, str(tmp_path)) == [[(5, True)]]
