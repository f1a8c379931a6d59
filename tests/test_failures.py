"""Which error of many ranks is printed last (F6), and metrics that only some ranks log (F11)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fault_runs import At, Job
from fault_stories import Story
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from probe import Probe, batches, long_run, trainer
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torchmetrics import MeanMetric

from lightning_par.errors import ParallelConfigError
from lightning_par.resilience.errors import DesyncError
from lightning_par.resilience.failures import (
    TORCHRUN_VARIABLE,
    VARIABLE,
    Failure,
    forget_failure,
    is_consequence,
    read_failures,
    record_failure,
    verdict,
)
from lightning_par.strategies import fabric as fabric_strategies
from lightning_par.strategies.launcher import RankLauncher
from lightning_par.testing import run_ranks

LOST = RuntimeError("[pair.cc:537] Read error: Connection closed by peer [127.0.0.1]:1")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as e:
        return e


def test_the_first_that_is_no_consequence_is_the_cause(tmp_path: Path) -> None:
    environment = {VARIABLE: str(tmp_path)}
    record_failure(raised(LOST), 0, environment=environment, clock=lambda: 10.0)
    record_failure(raised(ValueError("too late")), 2, environment=environment, clock=lambda: 12.0)
    cause = raised(ArithmeticError("division"))
    for time in (11.0, 13.0):
        record_failure(cause, 1, environment=environment, clock=lambda: time)  # noqa: B023
    record_failure(SystemExit(75), 3, environment=environment)
    (tmp_path / "rank-4.json").write_text("{")
    failures = read_failures(tmp_path)
    assert [(f.rank, f.time, f.consequence) for f in failures] == [(1, 11.0, False), (2, 12.0, False), (0, 10.0, True)]
    told = verdict(failures, {1: 1, 2: 1})
    assert told is not None
    first, *stack = told.splitlines()
    assert first == "rank 1 failed first: ArithmeticError: division"
    assert stack[0].startswith("Traceback")
    assert "raised" in told


def waited_in_vain() -> bool:
    group = dist.new_group(backend="gloo", timeout=timedelta(milliseconds=300))
    barrier = dist.new_group(backend="gloo")
    try:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.zeros(1), group=group)
    except RuntimeError as error:
        return is_consequence(error)
    finally:
        dist.barrier(barrier)
    return dist.get_rank() == 1


def test_a_rank_that_has_waited_for_another_in_vain_is_not_the_cause() -> None:
    assert run_ranks(2, waited_in_vain) == [True, True]
    assert not is_consequence(ValueError("Timed out waiting for the data"))


def test_a_rank_that_was_killed_is_the_cause_of_lost_connections() -> None:
    lost = Failure(0, "RuntimeError: Connection closed by peer", 1.0, True, "")
    assert verdict([lost], {3: -11}) == "rank 3 was killed by signal 11"
    assert "memory" in str(verdict([], {3: -9}))
    assert "rank 1 failed first" in str(verdict([Failure(1, "E: x", 2.0, False, ""), lost], {3: -9}))
    assert verdict([], {1: 75, 2: 0}) is None
    assert verdict([], {1: 75, 2: 3}) == "rank 2 ended with status 3, of no error"
    assert verdict([lost, Failure(1, lost.error, 3.0, False, "")], {1: 1}) is None


def test_who_lost_another_rank_is_not_named_for_it() -> None:
    lost = [Failure(rank, "RuntimeError: Connection closed by peer", 1.0, True, "") for rank in (0, 1)]
    assert verdict(lost, {0: 1, 1: 1, 2: -9}).startswith("rank 2 was killed by signal 9")  # type: ignore[union-attr]
    assert verdict(lost, {0: 1, 1: 1, 2: 5}) == "rank 2 ended with status 5, of no error"


@pytest.mark.parametrize("left", [SystemExit(0), SystemExit(3), KeyboardInterrupt()])
def test_a_rank_that_left_alone_is_the_cause(tmp_path: Path, left: BaseException) -> None:
    environment = {VARIABLE: str(tmp_path)}
    record_failure(raised(LOST), 0, environment=environment)
    record_failure(raised(left), 1, environment=environment)
    told = str(verdict(read_failures(tmp_path), {1: 3}))
    assert told.startswith(f"rank 1 failed first: {type(left).__name__}")


def test_an_error_that_was_caught_is_forgotten(tmp_path: Path) -> None:
    environment = {VARIABLE: str(tmp_path)}
    for rank in (0, 1):
        record_failure(raised(ValueError("memory is used up")), rank, environment=environment)
    for _ in range(2):
        forget_failure(1, environment=environment)
    assert [failure.rank for failure in read_failures(tmp_path)] == [0]
    forget_failure(0, environment={})


def test_torchrun_takes_the_cause_for_the_first(tmp_path: Path) -> None:
    """Its agent reads the files, compares whole seconds, and takes the lowest rank of equals."""
    failures = []
    for rank, error in enumerate((LOST, ArithmeticError("division"))):
        file = tmp_path / f"{rank}.json"
        record_failure(raised(error), rank, environment={TORCHRUN_VARIABLE: str(file)}, clock=lambda: 7.9)
        failures.append(ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(file)))
    first = min(failures, key=lambda failure: failure.timestamp)
    assert first.local_rank == 1
    assert "ArithmeticError: division" in first.message["message"]
    assert "raised" in first.message["extraInfo"]["py_callstack"]


def test_a_file_that_cannot_be_written_hides_no_error(tmp_path: Path) -> None:
    record_failure(raised(LOST), 0, environment={VARIABLE: str(tmp_path / "gone")})


SCRIPT = """
import os, sys
import torch
from fault_runs import At
from lightning_par.callbacks import RankZeroLogger
from parity import make_trainer
from probe import Probe, numbers
from datetime import timedelta
from lightning_par.strategies import FSDP2Strategy
fault = At(2, sys.argv[1], *map(int, sys.argv[2].split(",")))
strategy = FSDP2Strategy(timeout=timedelta(seconds=20))
trainer = make_trainer(2, strategy, max_steps=4, callbacks=[fault, RankZeroLogger()])
trainer.fit(Probe(), numbers(8))
"""


def run_script(folder: Path, *arguments: str, torchrun: bool = False) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    agent = ["-m", "torch.distributed.run", "--standalone", "--local_addr=localhost", "--nproc_per_node=2"]
    command = [sys.executable, *(agent if torchrun else ()), str(script), *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("patience", [None, 0.0])
def test_F6_the_launcher_prints_what_came_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], patience: float | None
) -> None:
    """Rank 0 has lost rank 1, which failed; rank 2 does not notice, and is ended when the time is over."""
    launcher = RankLauncher(LightningEnvironment(), 3, 1)
    programs = ["exit 1", "exec sleep 60" if patience == 0.0 else "exit 1"]
    launcher.procs = [subprocess.Popen(["sh", "-c", program]) for program in programs]
    launcher.procs[0].wait()
    record_failure(raised(LOST), 0, environment={VARIABLE: str(tmp_path)}, clock=lambda: 1.0)
    record_failure(raised(ArithmeticError("division")), 1, environment={VARIABLE: str(tmp_path)}, clock=lambda: 2.0)
    launcher._finish(str(tmp_path), patience)
    assert launcher.procs[1].wait(5) == (-9 if patience == 0.0 else 1)
    assert "lightning-par: rank 1 failed first: ArithmeticError: division" in capfd.readouterr().err
    assert not tmp_path.exists()


def test_F6_where_all_went_well_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launcher = RankLauncher(LightningEnvironment(), 2, 1)
    launcher.procs = [subprocess.Popen(["sleep", "60"])]
    launcher._finish(str(tmp_path / "folder"))
    assert launcher.procs[0].poll() is None
    launcher.kill(signal.SIGKILL)
    assert launcher.procs[0].wait(5) == -9
    record_failure(raised(LOST), 0, environment={VARIABLE: str(tmp_path)})
    # Who interrupts a run knows why it ended.
    launcher._finish(str(tmp_path))
    assert not any(capfd.readouterr())


@pytest.mark.parametrize(("own", "other", "status"), [(None, 3, 3), (None, 0, None), (7, 3, None), (None, 75, None)])
def test_F6_the_status_is_not_that_all_went_well_where_a_rank_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: int | None, other: int, status: int | None
) -> None:
    """Only where the first rank has no status of its own that says so, and nobody was told to end."""
    left: list[int] = []
    monkeypatch.setattr("lightning_par.strategies.launcher.os._exit", left.append)
    monkeypatch.setattr("lightning_par.strategies.launcher.logging.shutdown", lambda: None)
    launcher = RankLauncher(LightningEnvironment(), 2, 1)
    launcher.procs = [subprocess.Popen(["sh", "-c", f"exit {other}"])]
    launcher.procs[0].wait()
    if own is not None:
        record_failure(SystemExit(own), 0, environment={VARIABLE: str(tmp_path)})
    launcher._at_exit(str(tmp_path))
    assert left == ([] if status is None else [status])


@pytest.mark.parametrize("launcher", [RankLauncher, fabric_strategies.MeshStrategy._launcher_class])
def test_the_ranks_that_are_started_have_their_part_of_the_cores(launcher: Any) -> None:
    with patch.dict(os.environ), patch("subprocess.Popen") as started:
        for name in ("OMP_NUM_THREADS", "LOCAL_RANK"):
            os.environ.pop(name, None)
        started.return_value.configure_mock(returncode=0, **{"poll.return_value": 0})
        threads = launcher(LightningEnvironment(), 3, 1).launch(torch.get_num_threads)
    others = [call.kwargs["env"]["OMP_NUM_THREADS"] for call in started.call_args_list]
    assert others == 2 * [str(threads)]


@pytest.mark.parametrize("launcher", [RankLauncher, fabric_strategies.MeshStrategy._launcher_class])
def test_a_program_without_a_file_is_refused_at_once(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``python - < train.py``: the other ranks would find no script, and this one would wait for them."""
    monkeypatch.setattr("__main__.__spec__", None)
    monkeypatch.setattr(sys, "argv", ["-"])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    nothing_starts = patch("subprocess.Popen", side_effect=AssertionError("no process is started"))
    with nothing_starts, pytest.raises(ParallelConfigError, match="there is no file '-' to run"):
        launcher(LightningEnvironment(), 2, 1).launch(lambda: None)


@pytest.mark.slow
def test_F6_a_rank_ends_when_the_one_that_started_it_was_killed(tmp_path: Path) -> None:
    """It ends at once here; without this it would wait for half an hour for the rendezvous."""
    rank = tmp_path / "rank.py"
    rank.write_text("""
import time
from lightning_par.strategies.launcher import begin_run
begin_run(1, 1)
begin_run(1, 1)
time.sleep(100)
""")
    (tmp_path / "folder").mkdir()
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"""
import pathlib, os, subprocess, sys, time
pathlib.Path({str(tmp_path / "folder" / "parent")!r}).write_text(str(os.getpid()))
environment = os.environ | {{{VARIABLE!r}: {str(tmp_path / "folder")!r}}}
child = subprocess.Popen([sys.executable, {str(rank)!r}], env=environment)
print("started", flush=True)
time.sleep(100)
""",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "started\n"
    # The rank has not begun yet: it must notice all the same.
    parent.kill()
    # The pipe ends with the last process that holds it.
    _, told = parent.communicate(timeout=60)
    assert told == "lightning-par: the process that has started this rank was killed\n"
    assert not (tmp_path / "folder").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1])
def test_F6_the_rank_that_failed_first_is_printed_last(tmp_path: Path, rank: int) -> None:
    done = run_script(tmp_path, "raise", str(rank))
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("lightning-par: ") :]
    assert last.startswith(
        f"lightning-par: rank {rank} failed first: ArithmeticError: the fault that the test asked for"
    )
    assert last.rstrip().endswith("ArithmeticError: the fault that the test asked for")


@pytest.mark.slow
def test_F6_a_rank_that_was_killed(tmp_path: Path) -> None:
    done = run_script(tmp_path, "kill", "1")
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith("lightning-par: rank 1 was killed by signal 9")


@pytest.mark.slow
def test_F6_under_torchrun(tmp_path: Path) -> None:
    done = run_script(tmp_path, "raise", "1", torchrun=True)
    assert done.returncode == 1
    root = done.stderr[done.stderr.rindex("Root Cause") :]
    assert "rank      : 1" in root
    assert "ArithmeticError: the fault that the test asked for" in root


@pytest.mark.slow
def test_C15_a_save_on_the_exception_of_one_rank_hangs_nobody(tmp_path: Path) -> None:
    story = Story(tmp_path, Job(timeout=15.0))
    exits = story.run(At(5, "raise", 1), OnExceptionCheckpoint(tmp_path / "on_exception"), grace=25.0, timeout=60.0)
    assert [(e.code, e.left) for e in exits] == [(1, False)] * 2
    assert "ArithmeticError: the fault that the test asked for" in exits[1].log
    assert not list((tmp_path / "on_exception").glob("*"))
    story.finish()
    assert story.starts == [0, 3]


# -- names that only some ranks log -----------------------------------------------------------------------------------


class Logs(Probe):
    """Rank 1 logs one name more."""

    def __init__(self, where: str, metric: bool) -> None:
        super().__init__()
        self.where = where
        self.metric = MeanMetric() if metric else None

    def more(self, where: str, value: Tensor) -> None:
        self.log("all", value, sync_dist=True, on_step=False, on_epoch=True)
        self.log(f"only {dist.get_rank()}", value, on_step=False, on_epoch=True)
        if where == self.where and dist.get_rank() == 1:
            if self.metric is not None:
                self.metric(value)
            self.log("rare", self.metric or value, sync_dist=True, on_step=False, on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.more("train", loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.more("end", torch.tensor(1.0))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.more("val", torch.tensor(1.0))


def logged(where: str, metric: bool) -> str:
    try:
        trainer("par_fsdp", num_sanity_val_steps=0).fit(Logs(where, metric), batches(2), batches(1))
    except DesyncError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("where", "metric"),
    [("train", False), ("val", True), long_run("end", False), long_run("train", True), long_run("val", False)],
)
def test_F11_names_that_only_some_ranks_log_are_named_on_all(where: str, metric: bool) -> None:
    for message in run_ranks(2, logged, where, metric):
        assert "'rare': logged by ranks [1], not by [0]" in message
        assert "only" not in message.replace("'only", "")
        assert "'all'" not in message


def test_F11_what_all_log_is_no_error() -> None:
    assert run_ranks(2, logged, "nowhere", False) == ["nothing"] * 2
