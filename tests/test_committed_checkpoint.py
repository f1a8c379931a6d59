"""The callback: when it saves, what it keeps, and how the next start goes on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from probe import long_run
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par.callbacks import CommittedCheckpoint
from lightning_par.checkpoint import (
    CheckpointError,
    CheckpointMismatch,
    NoProgressError,
    Retention,
    RunDirectory,
    SupersededError,
    candidates,
    read_manifest,
    verify,
)
from lightning_par.checkpoint.ranks import Ranks
from lightning_par.errors import ParallelConfigError
from lightning_par.strategies import FSDP2Strategy
from lightning_par.testing import run_ranks


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
        self.seen: list[int] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen.append(index)
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)]


def data() -> DataLoader[Any]:
    return DataLoader(torch.arange(64.0).reshape(16, 4) / 64, batch_size=2)  # type: ignore[arg-type]


def fit(*callbacks: Any, strategy: Any = "par_ddp", epochs: int = 1, **kwargs: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": bool(callbacks)} | kwargs,
    )
    torch.manual_seed(0)
    trainer.fit(Net(), data())
    return trainer


def steps(directory: Path) -> list[int]:
    return sorted(one.manifest.step or 0 for one in candidates(directory) if one.manifest is not None)


def test_it_saves_every_n_steps_and_at_the_end_and_nothing_else(tmp_path: Path) -> None:
    fit(CommittedCheckpoint(tmp_path, every_n_steps=3, keep_last=9, asynchronous=False))
    assert steps(tmp_path) == [3, 6, 8]
    assert sorted(os.listdir(tmp_path)) == [".starts", "LATEST", *(f"step-0000000{step}" for step in (3, 6, 8))]
    assert not [problem for one in candidates(tmp_path) for problem in verify(one.path, "checksum")]
    start = json.loads((tmp_path / ".starts" / "00000001.json").read_text())
    assert (start["from"], start["end"], start["step"]) == (None, "finished", 8)
    manifest = read_manifest(tmp_path / "step-00000008")
    assert manifest.incarnation == 1
    assert manifest.layout is not None
    assert manifest.layout["dp_replicate_size"] == 1


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    callback = CommittedCheckpoint(tmp_path, every_n_steps=2, keep_last=9, asynchronous=False)
    with mock.patch.object(callback, "_save", wraps=callback._save) as saves:
        fit(callback, accumulate_grad_batches=3)
    assert steps(tmp_path) == [2, 3]
    assert saves.call_count == 2


def test_it_saves_by_the_clock(tmp_path: Path) -> None:
    clock = iter(range(0, 1000, 20))
    callback = CommittedCheckpoint(tmp_path, train_time_interval=timedelta(seconds=50), keep_last=9, asynchronous=False)
    with mock.patch("lightning_par.callbacks.committed_checkpoint.time") as time:
        time.monotonic = lambda: float(next(clock))
        fit(callback)
    # 20 s for each look at the clock; the save looks too.
    assert steps(tmp_path) == [3, 6, 8]


def test_ten_minutes_are_the_default(tmp_path: Path) -> None:
    fit(CommittedCheckpoint(tmp_path))
    assert steps(tmp_path) == [8]


def test_the_directory_is_below_the_root_of_the_trainer(tmp_path: Path) -> None:
    fit(CommittedCheckpoint(), default_root_dir=tmp_path)
    assert steps(tmp_path / "checkpoints") == [8]


def test_it_says_what_saves_cost(tmp_path: Path) -> None:
    with mock.patch("lightning_par.callbacks.committed_checkpoint.rank_zero_info") as said:
        fit(CommittedCheckpoint(tmp_path, every_n_steps=2, asynchronous=False))
    (text,) = said.call_args.args
    assert "4 saves kept training waiting" in text
    assert "steps) at one failure in 4 h, every" in text


def test_lightnings_own_callback_keeps_the_best_beside_it(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "best", save_top_k=1, monitor=None, every_n_train_steps=4)
    trainer = fit(CommittedCheckpoint(tmp_path / "run", every_n_steps=3, keep_last=9, asynchronous=False), best)
    assert steps(tmp_path / "run") == [3, 6, 8]
    assert os.listdir(tmp_path / "best") == ["epoch=0-step=8.ckpt"]
    assert len(trainer.checkpoint_callbacks) == 2


# -- restarts -------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    pass


class Stop(pl.Callback):
    """Ends a run in the middle."""

    def __init__(self, step: int, error: BaseException | None = None) -> None:
        self.step = step
        self.error = error or Stopped("here")

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise self.error


def committed(directory: Path, **kwargs: Any) -> CommittedCheckpoint:
    return CommittedCheckpoint(directory, **{"every_n_steps": 3, "asynchronous": False, "resume": "auto"} | kwargs)


def test_a_start_goes_on_from_the_newest_and_the_first_one_afresh(tmp_path: Path) -> None:
    with mock.patch("lightning_par.strategies.trainer_checkpoints.rank_zero_info") as said:
        with pytest.raises(Stopped):
            fit(committed(tmp_path), Stop(7))
        assert "There is no checkpoint directory in" in said.call_args.args[0]
        assert steps(tmp_path) == [3, 6]
        trainer = fit(committed(tmp_path))
        assert said.call_args.args[0] == f"The run goes on from {tmp_path}/step-00000006."
    assert trainer.lightning_module.seen == [6, 7]  # type: ignore[union-attr]
    starts = [json.loads(file.read_text()) for file in sorted((tmp_path / ".starts").iterdir())]
    assert [(start["from"], start["end"]) for start in starts] == [(None, "Stopped: here"), (6, "finished")]
    # The end of the run was saved; the next start has nothing to do.
    done = fit(committed(tmp_path))
    assert done.lightning_module.seen == []  # type: ignore[union-attr]
    assert done.global_step == 8


def test_ckpt_path_is_where_the_first_start_begins(tmp_path: Path) -> None:
    fit(CommittedCheckpoint(tmp_path / "before", every_n_steps=2, keep_last=9, asynchronous=False))
    path = str(tmp_path / "before" / "step-00000004")

    def start(*callbacks: Any) -> Net:
        module = Net()
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy="par_ddp", max_epochs=1, callbacks=list(callbacks), logger=False
        )
        with contextlib.suppress(Stopped):
            trainer.fit(module, data(), ckpt_path=path)
        return module

    assert start(committed(tmp_path / "run", every_n_steps=2), Stop(7)).seen == [4, 5, 6]
    assert start(committed(tmp_path / "run")).seen == [6, 7]


def test_a_second_fit_of_the_same_trainer_goes_on_from_what_it_has(tmp_path: Path) -> None:
    trainer = fit(committed(tmp_path))
    module = trainer.lightning_module
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data())
    assert trainer.global_step == 16
    assert module.seen == [*range(8), *range(8)]  # type: ignore[union-attr]
    assert steps(tmp_path)[-1] == 16


def test_a_run_that_is_over_may_be_started_again_and_again(tmp_path: Path) -> None:
    for _ in range(5):
        assert fit(committed(tmp_path)).global_step == 8
    ends = [json.loads(file.read_text())["end"] for file in sorted((tmp_path / ".starts").iterdir())]
    assert ends == ["finished"] * 5


def test_a_start_that_does_not_look_for_checkpoints_says_so_and_so_does_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(committed(tmp_path))
    with pytest.warns(UserWarning, match="the newest of step 8, and this start does not look for them"):
        fit(committed(tmp_path, resume=None), max_steps=2)
    fit(committed(tmp_path), max_steps=3)
    assert f"an earlier start had come further, to {tmp_path}/step-00000008" in caplog.text


def test_fast_dev_run_touches_nothing(tmp_path: Path) -> None:
    fit(committed(tmp_path, every_n_steps=1), fast_dev_run=2)
    assert os.listdir(tmp_path) == []


def weights(module: Any) -> list[Tensor]:
    return [value.clone() for value in module.state_dict().values()]


def test_a_search_for_a_rate_before_the_resume_leaves_no_trace(tmp_path: Path) -> None:
    whole = fit(epochs=2).lightning_module
    with pytest.raises(Stopped):
        fit(committed(tmp_path), Stop(7), epochs=2)
    resumed = fit(committed(tmp_path), LearningRateFinder(num_training_steps=4, update_attr=False), epochs=2)
    module: Any = resumed.lightning_module
    assert all(map(torch.equal, weights(whole), weights(module)))
    (optimizer,) = resumed.optimizers
    assert {float(state["step"]) for state in optimizer.state.values()} == {16.0}


def test_a_tuner_is_no_start_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        fit(committed(tmp_path), Stop(7))
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy="par_ddp", max_epochs=1, callbacks=[committed(tmp_path)], logger=False
    )
    module = Net()
    Tuner(trainer).lr_find(module, data(), num_training=3, update_attr=False)
    assert len(list((tmp_path / ".starts").iterdir())) == 1
    module.seen.clear()
    trainer.fit(module, data())
    assert module.seen == [6, 7]


def test_single_files_are_named_where_they_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").touch()
    with pytest.warns(UserWarning, match=r"holds single files \(last.ckpt\).*give it as ckpt_path"):
        fit(committed(tmp_path))


def test_a_run_that_was_taken_over_ends_with_its_next_save(tmp_path: Path) -> None:
    class TakeOver(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 4:
                RunDirectory(tmp_path, Retention()).begin(Ranks.of(None), None)

    with pytest.raises(SupersededError, match="start 2 .* has taken over"):
        fit(committed(tmp_path), TakeOver())
    assert steps(tmp_path) == [3]


def test_mistakes_of_a_person_are_no_failures(tmp_path: Path) -> None:
    fit(committed(tmp_path))

    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net[0], self.net[3] = nn.Linear(4, 9), nn.Linear(9, 1)

    for _ in range(4):
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy="par_ddp", callbacks=[committed(tmp_path)], logger=False
        )
        with pytest.raises(CheckpointMismatch) as caught:
            trainer.fit(Wider(), data())
        assert "save in another directory than" in caught.value.__notes__[0]
        assert len([line for line in str(caught.value).splitlines() if "net.0.weight" in line]) == 1
    assert fit(committed(tmp_path)).global_step == 8


def test_starts_count_on_where_their_notes_were_removed(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        with pytest.raises(Stopped):
            fit(committed(tmp_path, every_n_steps=1), Stop(step))
    shutil.rmtree(tmp_path / ".starts")
    fit(committed(tmp_path, every_n_steps=1))
    assert [one.manifest.incarnation for one in candidates(tmp_path) if one.manifest is not None] == [4, 4]


def test_an_interruption_by_hand_is_no_failure(tmp_path: Path) -> None:
    for _ in range(4):
        with pytest.raises(SystemExit):
            fit(committed(tmp_path), Stop(1, KeyboardInterrupt()))
    for _ in range(3):
        with pytest.raises(Stopped):
            fit(committed(tmp_path), Stop(1))
    with pytest.raises(NoProgressError, match=r"3 starts(.|\n)*ended at step 1 with Stopped: here"):
        fit(committed(tmp_path), Stop(1))


def test_the_last_save_of_a_run_must_not_fail(tmp_path: Path) -> None:
    failing = mock.patch("lightning_par.checkpoint.writer.ShardWriter.write_data", side_effect=OSError("full"))
    with failing, pytest.raises(CheckpointError, match="full"):
        fit(CommittedCheckpoint(tmp_path))


def test_the_end_is_saved_if_the_save_before_was_left_out_or_failed(tmp_path: Path) -> None:
    busy = mock.patch("lightning_par.strategies.trainer_checkpoints.save", side_effect=[False, False, True])
    callback = committed(tmp_path / "a", every_n_steps=4, asynchronous=True)
    with busy as saves, pytest.warns(UserWarning, match="No checkpoint of step 4") as warned:
        fit(callback)
    # Said once; then the end, which waits.
    assert len([one for one in warned if "No checkpoint of step" in str(one.message)]) == 1
    assert [call.args[4].when_busy for call in saves.call_args_list] == ["skip", "skip", "wait"]

    failing = mock.patch(
        "lightning_par.checkpoint.storage.LocalStorage.publish",
        autospec=True,
        side_effect=[OSError("full"), None],
    )
    with failing as published:
        fit(committed(tmp_path / "b", every_n_steps=8, asynchronous=True))
    assert published.call_count == 2


def two_ranks(directory: str, stop: int | None) -> tuple[int, list[int]]:
    module = Net()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=FSDP2Strategy(),
        max_epochs=1,
        callbacks=[committed(Path(directory), every_n_steps=1, asynchronous=True), *([Stop(stop)] if stop else [])],
        logger=False,
        enable_progress_bar=False,
    )
    with contextlib.suppress(Stopped):
        trainer.fit(module, data())
    return trainer.global_step, module.seen


def test_all_ranks_go_on_from_the_same_step(tmp_path: Path) -> None:
    assert run_ranks(2, two_ranks, str(tmp_path), 3) == [(3, [0, 1, 2])] * 2
    # What was under way when the run stopped came to its end.
    newest = steps(tmp_path)[-1]
    assert newest >= 1
    assert run_ranks(2, two_ranks, str(tmp_path), None) == [(4, list(range(newest, 4)))] * 2


def test_paths_beside_and_inside_a_checkpoint_are_explained(tmp_path: Path) -> None:
    tmp_path /= "my newest run"
    fit(committed(tmp_path))
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="par_ddp", max_epochs=1, logger=False, barebones=True)
    newest = tmp_path / "step-00000008"
    cases = {
        tmp_path: f"{tmp_path} is a directory of checkpoints; the newest whole one is {newest}",
        tmp_path / "LATEST": f"LATEST only has the name of a checkpoint; {tmp_path} is a directory of checkpoints",
        newest / "meta.pt": f"meta.pt is a file of the checkpoint {newest}: give the directory",
        newest / "ranks" / "rank-00000.pt": f"is a file of the checkpoint {newest}",
        tmp_path / ".starts": "is a directory and holds no whole checkpoint",
    }
    fix = f'ckpt_path="{newest}"'
    for path, message in cases.items():
        with pytest.raises(ParallelConfigError, match=message) as raised:
            trainer.fit(Net(), data(), ckpt_path=str(path))
        assert (fix in str(raised.value)) == ("the newest whole one" in str(raised.value))


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    class Odd(pl.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"inner": {"function": lambda: 0}}

    with pytest.raises(CheckpointError, match=r"meta/callbacks/\S*Odd/inner/function cannot be saved: \w+: .*lambda"):
        fit(committed(tmp_path), Odd())


def test_the_order_of_checkpoint_callbacks_does_not_matter(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "best", save_top_k=1, every_n_train_steps=4)
    trainer = fit(committed(tmp_path / "run"), best)
    assert trainer.checkpoint_callback is best


# -- what is refused ------------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    wrong: Any = {"every_n_steps": 0, "keep_last": 0, "resume": "always", "verify": "sha", "train_time_interval": 600}
    with pytest.raises(ParallelConfigError) as caught:
        CommittedCheckpoint(tmp_path, **wrong)
    for part in ("every_n_steps is 0", "keep_last is 0", "resume is 'always'", "verify is 'sha'", "interval is 600"):
        assert part in str(caught.value)
    with pytest.raises(
        ParallelConfigError, match="needs a strategy of lightning_par, also on one device; this is SingleDevice"
    ):
        fit(CommittedCheckpoint(tmp_path), strategy="auto")
    with pytest.raises(ParallelConfigError, match=r"state_dict_type='full'(.|\n)*2 callbacks are CommittedCheckpoint"):
        fit(
            CommittedCheckpoint(tmp_path),
            CommittedCheckpoint(tmp_path),
            strategy=FSDP2Strategy(state_dict_type="full"),
        )
    assert os.listdir(tmp_path) == []


# -- the command line -----------------------------------------------------------------------------------------------


def command(tmp_path: Path, callback: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightning_par", "fit", "--model", "test_committed_checkpoint.Net"]
        + ["--data", "test_committed_checkpoint.Data", "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
        + ["--trainer.strategy", "par_ddp", "--trainer.max_epochs", "1", "--trainer.logger", "false"]
        + ["--trainer.enable_progress_bar", "false", "--trainer.callbacks", callback]
        + [*options],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parent.parent}"},
    )


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return data()


@pytest.mark.parametrize(
    ("callback", "option"),
    [
        long_run("lightning_par.callbacks.CommittedCheckpoint", "every_n_steps"),
        long_run("lightning.pytorch.callbacks.ModelCheckpoint", "every_n_train_steps"),
    ],
)
def test_resume_on_the_command_line(tmp_path: Path, callback: str, option: str) -> None:
    options = [f"--trainer.callbacks.dirpath={tmp_path}/run", f"--trainer.callbacks.{option}=3", "--resume", "auto"]
    first = command(tmp_path, callback, *options, "--trainer.max_steps", "4")
    assert first.returncode == 0, first.stderr
    assert "There is no checkpoint directory in" in first.stdout + first.stderr
    second = command(tmp_path, callback, *options)
    assert second.returncode == 0, second.stderr
    assert "The run goes on from" in second.stdout + second.stderr
