"""Callbacks that look after one run share the collective of each step, and leave nothing of a run that is none."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from probe import Probe, numbers

from lightning_par.callbacks import CommittedCheckpoint, NaNRewind, ParityMonitor, PreemptionGuard, ThroughputMonitor
from lightning_par.checkpoint.candidates import candidates
from lightning_par.resilience.control import StepControl
from lightning_par.resilience.errors import TrainingDivergedError
from lightning_par.resilience.events import read_events
from lightning_par.strategies import FSDP2Strategy
from lightning_par.testing import run_ranks
from parity import make_trainer

STEPS = 6


class Exchanges(pl.Callback):
    """Notes what was exchanged in each batch."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.steps.append(0)

    def heard(self, *args: Any) -> None:
        if self.steps:
            self.steps[-1] += 1


def exchanges(folder: str, kind: str, accumulate: int) -> tuple[list[int], int]:
    counted = Exchanges()
    ours = kind != "ddp"
    callbacks: list[Any] = [counted, PreemptionGuard()]
    if kind != "without NaNRewind":
        callbacks.append(NaNRewind())
    if ours:
        callbacks.append(CommittedCheckpoint(folder, train_time_interval=timedelta(hours=1)))
    strategy = FSDP2Strategy() if ours else DDPStrategy(process_group_backend="gloo")
    trainer = make_trainer(
        2, strategy, max_steps=STEPS, accumulate_grad_batches=accumulate, callbacks=callbacks, enable_checkpointing=ours
    )
    exchange = StepControl.exchange
    with mock.patch.object(StepControl, "exchange", lambda *a, **k: (counted.heard(), exchange(*a, **k))[1]):
        trainer.fit(Probe(), numbers(40))
    return counted.steps, trainer.global_step


@pytest.mark.parametrize("kind", ["par", "without NaNRewind", "ddp"])
def test_all_callbacks_share_the_one_collective_of_a_step(kind: str, tmp_path: Path) -> None:
    accumulate = 1 if kind == "ddp" else 2
    window = [0] * (accumulate - 1) + [1]
    assert run_ranks(2, exchanges, str(tmp_path), kind, accumulate) == [(STEPS * window, STEPS)] * 2


def by_a_clock(folder: str) -> list[int]:
    """Rank 1 has a clock that runs; that of rank 0 stands still."""
    ticks = iter(range(0, 10_000, 20))
    callback = CommittedCheckpoint(folder, train_time_interval=timedelta(seconds=50), keep_last=9, asynchronous=False)
    saves: list[int] = []
    save = callback._save
    note = lambda trainer, **options: (saves.append(trainer.global_step), save(trainer, **options))
    with (
        mock.patch("lightning_par.callbacks.committed_checkpoint.time") as time,
        mock.patch.object(callback, "_save", note),
    ):
        time.monotonic = lambda: float(next(ticks)) if dist.get_rank() else 0.0
        trainer = make_trainer(
            2, FSDP2Strategy(), max_steps=8, callbacks=[NaNRewind(), callback], enable_checkpointing=True
        )
        trainer.fit(Probe(), numbers(40))
    return saves


def test_it_is_time_to_save_for_all_ranks_when_it_is_for_one(tmp_path: Path) -> None:
    assert run_ranks(2, by_a_clock, str(tmp_path)) == [[3, 6, 8]] * 2
    assert sorted(one.manifest.step for one in candidates(tmp_path) if one.manifest) == [3, 6, 8]


class Infinite(Probe):
    """Its second loss is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) / (batch_idx != 1)


@pytest.mark.parametrize("tries", [True, False])
def test_a_fit_that_tries_something_out_leaves_no_events(tries: bool, tmp_path: Path) -> None:
    trainer = make_trainer(
        1,
        "par_ddp",
        default_root_dir=tmp_path,
        callbacks=[NaNRewind(), PreemptionGuard(), ParityMonitor(), ThroughputMonitor()],
        **({"fast_dev_run": 3} if tries else {"max_steps": 3}),
    )
    trainer.fit(Infinite(), numbers(10))
    assert trainer.callbacks[-1].state_key.startswith("PreemptionGuard")  # type: ignore[attr-defined]
    assert [event["kind"] for event in read_events(tmp_path)] == ([] if tries else ["start", "skip", "step", "end"])


def test_a_run_that_has_no_checkpoint_to_go_back_to_ends_with_what_was_wrong(tmp_path: Path) -> None:
    callbacks = [NaNRewind(max_rewinds=0, max_consecutive_skips=1), CommittedCheckpoint(tmp_path, every_n_steps=100)]
    trainer = make_trainer(1, "par_ddp", callbacks=callbacks, max_steps=3, enable_checkpointing=True)
    with pytest.raises(TrainingDivergedError, match=r"(?s)loss is not finite.*There is no checkpoint to go back"):
        trainer.fit(Infinite(), numbers(10))
