"""What ranks do while a watchdog looks at them: small loops with a fault in them, and how they end."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from probe import Probe, batches

from lightning_par.callbacks import CommittedCheckpoint, StallWatchdog, ThroughputMonitor
from lightning_par.resilience.board import Board
from lightning_par.resilience.events import EventLog, read_events
from lightning_par.resilience.watchdog import Action, Watchdog
from models import loader
from parity import Run, build_strategy, make_trainer

LIMIT = 1.5
PATIENCE = 30.0
BAD_STEP = 2


def report_of(folder: Path, name: str = "1") -> Path:
    return folder / "stalls" / name / "report.txt"


def come(condition: Callable[[], Any]) -> None:
    """Look until something has come true: what a fault does, which lasts until it was noticed."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def until_reported(folder: Path) -> None:
    come(report_of(folder).exists)


def watchdog(folder: Path, limit: float = LIMIT, **options: Any) -> Watchdog:
    """With the same limit in each phase; ranks that start late are none of its business."""
    limits = {"first_step": limit, "save": limit, "validation": limit, "load": limit}
    return Watchdog(
        folder / "stalls",
        timeout=limit,
        phase_timeouts=limits,
        events=EventLog(folder),
        **({"interval": 0.1} | options),
    )


def loop(folder: Path, fault: str, rank: int, action: Action = "report", limit: float = LIMIT) -> int:
    """A raw loop of which one rank has a fault at one step; returns the steps made."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    mine = dist.get_rank() == rank
    x = torch.ones(3)
    with suppress(ArithmeticError), watchdog(folder, limit, action=action) as watching:
        for step in range(4):
            watching.enter("data", step)
            if mine and step == BAD_STEP and fault == "sleep":
                until_reported(folder)
            watching.enter("forward")
            if mine and step == BAD_STEP and fault == "raise":
                raise ArithmeticError("the fault that the test asked for")
            if mine and step == BAD_STEP and fault == "hold":
                # Keeps Python's lock, as it is told nothing about threads.
                ctypes.PyDLL(None).sleep(int(2 * limit))
            watching.enter("backward")
            if mine and step == BAD_STEP and fault == "broadcast":
                dist.broadcast(x, 0)
            elif not (mine and step == BAD_STEP and fault == "skip"):
                dist.all_reduce(x)
            watching.enter("optimizer")
    owed = {"skip": 1, "raise": 2}.get(fault, 0) if mine else 0
    if owed:
        until_reported(folder)
    for _ in range(owed):
        dist.all_reduce(x)
    return step + 1


def without_rank_0(folder: Path) -> None:
    """Rank 0 serves the store, as without torchrun, and is killed; rank 1 waits for what nobody ends, as in NCCL."""
    rank, file = int(os.environ["RANK"]), folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        (folder / "port.part").write_text(str(store.port))
        (folder / "port.part").rename(file)
    else:
        come(file.exists)
        store = dist.TCPStore("127.0.0.1", int(file.read_text()), 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE))
    with watchdog(folder, action="abort") as watching:
        watching.enter("backward")
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(PATIENCE)


def beats_while_waiting(folder: Path) -> int:
    """How often rank 0 shows signs of life while its main thread keeps the other connection to the store."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    with watchdog(folder, limit=10.0) as watching:
        board = watching._board
        assert board is not None
        come(lambda: len(board.records()) == 2)
        before = board.records()[0]["beat"]
        waiting = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            waiting.wait(["enough"], timedelta(seconds=PATIENCE))
        else:
            come(lambda: board.records()[0]["beat"] >= before + 5)
            waiting.set("enough", "")
        after = board.records()[0]["beat"]
        dist.barrier()
    return int(after - before)


class StopAndGoOn(pl.Callback):
    """Stops one rank as SIGSTOP does; another one lets it go on when that was reported."""

    def __init__(self, folder: Path, step: int, rank: int) -> None:
        self.folder = folder
        self.step = step
        self.rank = rank

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (self.folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
        if dist.get_rank() != self.rank:
            threading.Thread(target=self.let_go_on, daemon=True).start()

    def let_go_on(self) -> None:
        until_reported(self.folder)
        os.kill(int((self.folder / f"pid-{self.rank}").read_text()), signal.SIGCONT)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_step + 1 == self.step and dist.get_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGSTOP)


class Sleeps(pl.Callback):
    """Lets one rank sleep before a step until that was reported."""

    def __init__(self, folder: Path, step: int, rank: int) -> None:
        self.folder = folder
        self.step = step
        self.rank = rank

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 == self.step and dist.get_rank() == self.rank:
            until_reported(self.folder)


class Phases(pl.Callback):
    """Notes the phases that a watchdog is told; comes after it."""

    def __init__(self, watchdog: Any) -> None:
        self.watchdog = watchdog
        self.seen: list[tuple[int, str, int]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        heartbeat = self.watchdog._watchdog.heartbeat
        enter = heartbeat.enter

        def noted(*args: Any, **kwargs: Any) -> None:
            enter(*args, **kwargs)
            place = tuple(heartbeat.now[:3])
            if not self.seen or self.seen[-1] != place:
                self.seen.append(place)

        heartbeat.enter = noted


AXES = {
    "ddp": {"dp_replicate_size": 2, "dp_shard_size": 1},
    "fsdp": {"dp_shard_size": 2},
    "tp": {"dp_shard_size": 1, "tp_size": 2},
    "pp": {"dp_shard_size": 1, "pp_size": 2},
}


def sleeps_under(axis: str, folder: Path, rank: int) -> int:
    run = Run(steps=3, batch_size=4)
    trainer = make_trainer(
        2,
        build_strategy(("MeshStrategy", AXES[axis]), "trainer"),
        max_steps=3,
        default_root_dir=folder,
        # As in `lightning-par fit`, where waits are timed.
        callbacks=[StallWatchdog(timeout=LIMIT), Sleeps(folder, 3, rank), ThroughputMonitor()],
    )
    trainer.fit(run.build(), loader(run.batches(0, 1)))
    return trainer.global_step


class TakesLong(pl.Callback):
    """Needs longer than a step may, in what is known to be quiet or in a step that is not the first."""

    def __init__(self, where: str, seconds: float) -> None:
        self.where = where
        self.seconds = seconds

    def wait(self, where: str) -> None:
        if where == self.where:
            time.sleep(self.seconds)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.wait({0: "quiet phases", 2: "a later step"}.get(trainer.global_step, ""))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.wait("quiet phases")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.wait("quiet phases")


def takes_long(where: str, folder: Path) -> None:
    limit = 1.0
    trainer = make_trainer(
        2,
        "par_fsdp",
        max_steps=3,
        default_root_dir=folder,
        enable_checkpointing=True,
        val_check_interval=3,
        callbacks=[StallWatchdog(limit), TakesLong(where, 2 * limit), CommittedCheckpoint(every_n_steps=3)],
    )
    trainer.fit(Probe(), batches(3), batches(1))


class Cluster:
    """Watchdogs of several ranks in this process, whose clock stands until it is told."""

    def __init__(self, folder: Path, ranks: int, **options: Any) -> None:
        self.seconds = 100.0
        store = dist.HashStore()  # type: ignore[attr-defined]
        self.folder = folder
        self.stopped: set[int] = set()
        self.dogs = [
            Watchdog(
                folder / "stalls",
                **({"timeout": 10.0, "interval": 1.0} | options),
                board=Board(store, rank, ranks) if ranks > 1 else None,
                events=EventLog(folder),
                clock=lambda: self.seconds,
            )
            for rank in range(ranks)
        ]

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.seconds += 1
            for rank, dog in enumerate(self.dogs):
                if rank not in self.stopped:
                    dog.tick()
                    dog.guard()

    def step(self, *without: int) -> None:
        """A step of all ranks but for those that do not come."""
        for rank, dog in enumerate(self.dogs):
            if rank not in without:
                for phase in ("data", "forward", "backward", "optimizer"):
                    dog.enter(phase, dog.heartbeat.now.step + (phase == "data"))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.folder) if event["kind"] == kind]
