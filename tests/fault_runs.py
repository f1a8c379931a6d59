"""A small deterministic training for tests that kill it, as each of its ranks sees it, and the faults."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_par import strategies
from lightning_par.callbacks import CommittedCheckpoint
from lightning_par.checkpoint import optimizer_state
from lightning_par.checkpoint.crash_points import crash_point
from lightning_par.parallel.random import random_state
from lightning_par.parallel.shards import full_tensor
from parity import gathered, make_trainer

SAMPLES = 40


@dataclass(frozen=True)
class Job:
    """What is trained; two runs of the same job without a fault leave the same behind, bit for bit.

    Attributes:
        ranks: Number of processes.
        strategy: A class of `lightning_par.strategies`.
        options: Its options.
        steps: Optimizer steps.
        every: Steps between two checkpoints.
        saver: Options of the callback that saves.
        accumulate: Batches of an optimizer step.
        batch: Samples of a batch on all ranks together.
        data: An ordinary ``"loader"``, or a ``"stateful"`` one.
        workers: Worker processes of the ordinary loader, which persist or not.
        states: Whether to record what training goes on from.
        timeout: Seconds that a collective may take.
        trainer: More options of the Trainer.
        pair: Whether there are two optimizers.
        averaged: Whether a callback averages the weights.
    """

    ranks: int = 2
    strategy: str = "FSDP2Strategy"
    options: tuple[tuple[str, Any], ...] = ()
    steps: int = 12
    every: int = 3
    saver: tuple[tuple[str, Any], ...] = ()
    accumulate: int = 1
    batch: int = 8
    data: str = "loader"
    workers: int = 0
    persistent: bool = False
    states: bool = False
    timeout: float = 20.0
    trainer: tuple[tuple[str, Any], ...] = ()
    pair: bool = False
    averaged: bool = False


class Tiny(pl.LightningModule):
    """Equal blocks with dropout; a sample is its number, so that the batch tells what was seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2))
        self.last = nn.Linear(8, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        powers = torch.arange(1, 5, device=numbers.device)
        h = self.first(torch.sin(numbers[:, None] * powers))
        for block in self.blocks:
            h = block(h)
        return self.last(h)[:, 0]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) - torch.cos(batch)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Pair(Tiny):
    """Two optimizers with a schedule each, stepped by hand, the second one in every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for i, (optimizer, schedule) in enumerate(zip(self.optimizers(), self.lr_schedulers(), strict=True)):
            if i == 0 or batch_idx % 2:
                optimizer.zero_grad()
                self.manual_backward(loss, retain_graph=True)
                optimizer.step()
                schedule.step()
                loss = super().training_step(batch, batch_idx)
        return loss.detach()

    def configure_optimizers(self) -> Any:
        first, last = [self.first, self.blocks], [self.last]
        parameters = [[p for module in modules for p in module.parameters()] for modules in (first, last)]
        optimizers = [torch.optim.AdamW(parameters[0], lr=1e-2), torch.optim.SGD(parameters[1], lr=1e-2, momentum=0.9)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 3) for optimizer in optimizers]


class Numbers(Dataset[Tensor]):
    """Sample `i` is the number `i`."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Stateful:
    """A loader of the user's own, whose order depends on the epoch only, and which goes on where it was saved."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank = int(os.environ["RANK"])
        self.epoch = 0
        self.next = 0

    def __len__(self) -> int:
        return SAMPLES // self.job.batch

    def __iter__(self) -> Iterator[Tensor]:
        if self.next == len(self):
            self.epoch, self.next = self.epoch + 1, 0
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        for batch in order[: len(self) * self.job.batch].view(len(self), self.job.ranks, -1)[self.next :]:
            self.next += 1
            yield batch[self.rank]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.next = state["epoch"], state["next"]


def loader_of(job: Job) -> Any:
    if job.data == "stateful":
        return Stateful(job)
    workers: dict[str, Any] = {"num_workers": job.workers, "persistent_workers": job.persistent}
    return DataLoader(Numbers(), batch_size=job.batch // job.ranks, shuffle=True, **workers)


class Recorder(pl.Callback):
    """Appends what happens to a file that survives the process."""

    def __init__(self, folder: Path, incarnation: int) -> None:
        self.folder = folder
        self.incarnation = incarnation
        self.validations: list[list[float]] = []
        self.ended = False

    def write(self, **entry: Any) -> None:
        line = json.dumps({"incarnation": self.incarnation, **entry}) + "\n"
        number = os.open(self.folder / f"record-{dist.get_rank()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(number, line.encode())
        os.close(number)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.write(start=trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        # Of the optimizer step that the batch is a part of.
        self.step = trainer.global_step + 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self.write(step=self.step, samples=batch.tolist(), loss=float(outputs["loss"]), lr=lr)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validations.append([trainer.global_step, float(trainer.callback_metrics["val_loss"])])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.ended = True
        end = {"step": trainer.global_step, "epoch": trainer.current_epoch, "validations": self.validations}
        self.write(end=end | state_digests(trainer, pl_module))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # A start that finds the last checkpoint has nothing left to do, and draws nothing.
        if not self.ended:
            self.on_train_end(trainer, pl_module)

    # What a checkpoint holds is what the state in it has seen.

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self.validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validations = list(state_dict["validations"])


class At(pl.Callback):
    """Does something to its process in the middle of a step, on some ranks: ``"kill"``, ``"raise"``, ``"term"``."""

    def __init__(self, step: int, action: str, *ranks: int) -> None:
        self.step = step
        self.action = action
        self.ranks = ranks

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_step + 1 == self.step and dist.get_rank() in self.ranks:
            act(self.action)


class AtPoint(pl.Callback):
    """Does something at the n-th time that some ranks come to a crash point, or holds the writer there.

    A writer that is held goes on when training has failed.
    """

    def __init__(self, point: str, nth: int, action: str, *ranks: int) -> None:
        self.point = point
        self.nth = nth
        self.action = action
        self.ranks = ranks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.times = 0
        self.failed = threading.Event()
        watch_points(self.come)

    def come(self, point: str, rank: int) -> None:
        if point != self.point or rank not in self.ranks:
            return
        self.times += 1
        if self.times == self.nth:
            self.failed.wait() if self.action == "hold" else act(self.action)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.failed.set()


def act(action: str) -> None:
    """What a fault does to this process."""
    if action == "raise":
        raise ArithmeticError("the fault that the test asked for")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}[action])


class States(pl.Callback):
    """Records what training goes on from, at its start and after each step at which a checkpoint is saved."""

    def __init__(self, recorder: Recorder, every: int) -> None:
        self.recorder = recorder
        self.every = every

    def record(self, trainer: Any, module: Any) -> None:
        digests = state_digests(trainer, module)
        self.recorder.write(at=trainer.global_step, digests={k: v for k, v in digests.items() if k != "random"})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.record(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every == 0:
            self.record(trainer, pl_module)


def state_digests(trainer: Any, module: Any) -> dict[str, str]:
    """SHA-256 of all that training goes on from; collective, the same on all ranks but for the random state."""
    parameters = gathered({name: value.detach() for name, value in module.state_dict().items()})
    optimizers: dict[str, Any] = {}
    for i, optimizer in enumerate(trainer.optimizers):
        state = optimizer_state(module, getattr(optimizer, "_optimizer", optimizer))
        for name, values in state["state"].items():
            for key, value in values.items():
                optimizers[f"{i}/{name}/{key}"] = full_tensor(value) if isinstance(value, Tensor) else value
        optimizers[f"{i}/groups"] = state["param_groups"]
    schedules: dict[str, Any] = {
        str(i): config.scheduler.state_dict() for i, config in enumerate(trainer.lr_scheduler_configs)
    }
    schedules["scaler"] = trainer.precision_plugin.state_dict()
    parts = {"parameters": parameters, "optimizers": optimizers, "schedules": schedules, "random": random_state()}
    for callback in trainer.callbacks:
        if isinstance(callback, EMAWeightAveraging):
            parts["averages"] = gathered(callback._average_model.state_dict())
    return {name: digest(part) for name, part in parts.items()}


def digest(value: Any) -> str:
    """SHA-256 of nested containers of tensors and plain values."""
    sha = hashlib.sha256()
    _add(sha, value)
    return sha.hexdigest()


def _add(sha: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        value = value.detach().contiguous()
        sha.update(f"{value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value):
            sha.update(f"{key}:".encode())
            _add(sha, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _add(sha, item)
    else:
        sha.update(repr(value).encode())


class Settle(pl.Callback):
    """Lets a save that is written beside training end in the last step before the next one, which were skipped else."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every == self.every - 1:
            trainer.strategy.saver.join()


class Points(pl.Callback):
    """Appends each crash point that a rank comes to to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        watch_points(self.note)

    def note(self, name: str, rank: int) -> None:
        with (self.folder / f"points-{rank}").open("a") as file:
            file.write(f"{name}\n")

    def reached(self, ranks: int) -> Counter[tuple[str, int]]:
        """How often each rank came to each point."""
        files = {rank: self.folder / f"points-{rank}" for rank in range(ranks)}
        return Counter((name, rank) for rank, file in files.items() for name in file.read_text().splitlines())


def watch_points(note: Callable[[str, int], None]) -> ExitStack:
    """Let this process call a function at each crash point, before what the point itself does; until the exit."""

    def watched(name: str, rank: int) -> None:
        note(name, rank)
        crash_point(name, rank)

    watching = ExitStack()
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning_par.checkpoint.") and getattr(module, "crash_point", None) is crash_point:
            watching.enter_context(mock.patch.object(module, "crash_point", watched))
    return watching


def train(job: Job, folder: Path, incarnation: int, ckpt_path: Path | None, callbacks: tuple[pl.Callback, ...]) -> None:
    """Train on this rank, or go on with training."""
    strategy = getattr(strategies, job.strategy)(timeout=timedelta(seconds=job.timeout), **dict(job.options))
    options: Any = {"asynchronous": False, "resume": "auto"} | dict(job.saver)
    saver = CommittedCheckpoint(folder / "root", every_n_steps=job.every, **options)
    recorder = Recorder(folder, incarnation)
    looking: list[pl.Callback] = [States(recorder, job.every)] if job.states else []
    if job.averaged:
        looking.append(EMAWeightAveraging(decay=0.9))
    trainer = make_trainer(
        job.ranks,
        strategy,
        max_steps=job.steps,
        accumulate_grad_batches=job.accumulate,
        enable_checkpointing=True,
        use_distributed_sampler=True,
        callbacks=[recorder, *looking, Settle(job.every), *callbacks, saver],
        default_root_dir=folder,
        **dict(job.trainer),
    )
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    val = DataLoader(Numbers(), batch_size=10) if "val_check_interval" in dict(job.trainer) else None
    trainer.fit(Pair() if job.pair else Tiny(), loader_of(job), val, ckpt_path=ckpt_path)


if __name__ == "__main__":
    # As torchrun starts it: the faults of each start, which it counts.
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    steps = [int(step) for step in sys.argv[2:]]
    faults = tuple(At(step, "kill", 1) for step in steps[start : start + 1])
    train(Job(ranks=int(os.environ["WORLD_SIZE"])), Path(sys.argv[1]), start, None, faults)
