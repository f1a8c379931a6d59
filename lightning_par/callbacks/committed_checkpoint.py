"""`CommittedCheckpoint`: checkpoints of which the last whole one is always there, and starts that go on from it."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_par.callbacks._common import call_all, put_last
from lightning_par.checkpoint import CheckpointMismatch, Retention, RunDirectory, Verify, best_interval, together
from lightning_par.checkpoint.ranks import Ranks
from lightning_par.errors import ParallelConfigError, Problems
from lightning_par.resilience.errors import PreemptedError
from lightning_par.resilience.events import EventLog
from lightning_par.strategies import MeshStrategy, _compat
from lightning_par.strategies.saving import SaveOptions

log = logging.getLogger(__name__)

_DEFAULT_INTERVAL = timedelta(minutes=10)
# Its name in the exchange of each step.
_OVER = "time to save"
_TYPICAL_MTBF_HOURS = (4, 24)


class CommittedCheckpoint(Checkpoint):
    """Saves the whole state of a run at intervals, and goes on from it after a crash.

    Each checkpoint is a directory ``step-00001200`` in `dirpath`, which gets its name when all ranks have written it
    and it is on the disk, so a crash at any moment leaves the one before. Old ones are removed after that only. Works
    beside Lightning's `ModelCheckpoint`, which keeps the best. Needs a strategy of lightning_par.

    Args:
        dirpath: The directory or URL, the same in each start of the run; ``<default_root_dir>/checkpoints`` when None.
        every_n_steps: Save after every n optimizer steps.
        train_time_interval: Save when this much time has passed since the last save; ten minutes when neither is given.
        keep_last: How many checkpoints to keep.
        keep_every_n_steps: Never remove those of steps that this divides.
        asynchronous: Let training go on while a checkpoint is written; it waits only for copies.
        resume: ``"auto"`` goes on from the newest whole checkpoint in `dirpath`, or starts afresh where there is none;
            a `ckpt_path` of `fit` is then where the first start begins. None leaves it to `ckpt_path`.
        verify: What a resume compares with the manifest: ``"size"``, ``"checksum"`` or ``"none"``.
        max_failed_saves: How many saves may fail in a row before the run ends; each is reported on every rank.
        max_no_progress: With ``resume="auto"``: how many starts of the run may end without a new checkpoint before the
            next one is refused.

    Raises:
        ParallelConfigError: When the fit begins, with everything that is wrong.
        CheckpointError: On all ranks, if too many saves failed, or the last one of the run did.
        NoValidCheckpointError: If there are checkpoints to resume from and none is whole.
        NoProgressError: If the run was started too often without a new checkpoint.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        every_n_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        keep_last: int = 2,
        keep_every_n_steps: int | None = None,
        asynchronous: bool = True,
        resume: Literal["auto"] | None = None,
        verify: Verify = "size",
        max_failed_saves: int = 3,
        max_no_progress: int = 3,
    ) -> None:
        super().__init__()
        problems = Problems()
        counts = {
            "every_n_steps": every_n_steps,
            "keep_last": keep_last,
            "keep_every_n_steps": keep_every_n_steps,
            "max_failed_saves": max_failed_saves,
            "max_no_progress": max_no_progress,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                problems.add(f"CommittedCheckpoint: {name} is {value}; it is at least 1", f"{name}=1")
        interval = train_time_interval
        if interval is not None and not (isinstance(interval, timedelta) and interval > timedelta(0)):
            problems.add(
                f"CommittedCheckpoint: train_time_interval is {interval!r}; it is a timedelta above 0",
                'train_time_interval=timedelta(minutes=10); in YAML "00:10:00"',
            )
        if resume not in (None, "auto"):
            problems.add(f"CommittedCheckpoint: resume is {resume!r}; it is 'auto' or None", 'resume="auto"')
        if verify not in ("size", "checksum", "none"):
            problems.add(
                f"CommittedCheckpoint: verify is {verify!r}; it is 'size', 'checksum' or 'none'", 'verify="size"'
            )
        problems.raise_if_any()
        self.dirpath = dirpath
        self.resume = resume
        self._every_n_steps = every_n_steps
        self._interval = train_time_interval
        if every_n_steps is None and train_time_interval is None:
            self._interval = _DEFAULT_INTERVAL
        self._retention = Retention(keep_last, keep_every_n_steps)
        self._asynchronous = asynchronous
        self._verify = verify
        self._max_failed_saves = max_failed_saves
        self._max_no_progress = max_no_progress
        # Lightning asks any checkpoint callback for it.
        self.best_model_path = ""
        self._directory: RunDirectory | None = None
        self._active = False
        self._ended = False
        self._tried_step = 0
        self._tried_at = 0.0
        self._saved_step = 0
        self._step = self._exchanges = 0
        self._undo: list[Callable[[], None]] = []
        self._begun: tuple[float, int] = (0.0, 0)
        self._blocked: list[float] = []
        self._left_out = 0

    # -- begin ---------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Lightning asks the first of them for the best.
        put_last(trainer, self)
        self._active = stage == "fit" and not trainer.fast_dev_run and not _compat.is_tuning(trainer)  # type: ignore[attr-defined]
        if not self._active:
            return
        strategy = self._strategy(trainer)
        path = self.dirpath or Path(trainer.default_root_dir) / "checkpoints"
        path = str(strategy.broadcast(str(path)))
        again = self._directory is not None
        self._directory, self._ended = RunDirectory(path, self._retention), False
        automatic = self.resume == "auto"
        newest = self._directory.begin(Ranks.of(None), self._max_no_progress if automatic else None)
        strategy.saver.max_failed_saves = self._max_failed_saves
        call_all(self._undo)
        self._undo.append(strategy.control.add(_OVER, self._is_over))
        # A second fit of the same objects goes on from what they are.
        if automatic and not again:
            strategy.resume_from(self._directory.path, self._verify)
        elif newest is not None and not again:
            rank_zero_warn(
                f"{self._directory.path} holds checkpoints, the newest of step {newest}, and this start does not look "
                'for them. What it saves comes before them in later starts. If that is not meant: resume="auto" '
                "(lightning-par fit --resume auto), or another dirpath."
            )

    def _strategy(self, trainer: pl.Trainer) -> MeshStrategy:
        strategy = trainer.strategy
        problems = Problems()
        if not isinstance(strategy, MeshStrategy):
            problems.add(
                f"CommittedCheckpoint needs a strategy of lightning_par, also on one device; this is "
                f"{type(strategy).__name__}",
                'strategy="par_ddp"',
            )
        elif strategy.state_dict_type != "sharded":
            problems.add(
                "CommittedCheckpoint writes directories, and the strategy has state_dict_type='full'",
                "state_dict_type='sharded'; `lightning-par convert` makes files of directories",
            )
        others = [one for one in trainer.checkpoint_callbacks if isinstance(one, CommittedCheckpoint)]
        if len(others) > 1:
            problems.add(f"{len(others)} callbacks are CommittedCheckpoint", "keep one of them")
        problems.raise_if_any()
        assert isinstance(strategy, MeshStrategy)
        return strategy

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._active:
            return
        control = trainer.strategy.control  # type: ignore[attr-defined]
        control.take(_OVER)
        self._exchanges = control.exchanges
        self._step = self._saved_step = self._tried_step = trainer.global_step
        self._tried_at = time.monotonic()
        self._begun = self._tried_at, trainer.global_step
        self._blocked, self._left_out = [], 0

    # -- saves ---------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, before, self._step = trainer.global_step, self._step, trainer.global_step
        if self._active and step != before and step > self._tried_step and self._is_due(trainer, step):
            self._save(trainer, asynchronous=self._asynchronous, may_fail=True)

    def _is_due(self, trainer: pl.Trainer, step: int) -> bool:
        # Several optimizers count several steps a batch.
        every = self._every_n_steps
        due = every is not None and step // every > self._tried_step // every
        if due or self._interval is None:
            return due
        # Clocks differ between ranks: it is time for all when it was for one of them in the exchange of this step.
        control = trainer.strategy.control  # type: ignore[attr-defined]
        self._exchanges = control.attend(step, self._exchanges)
        return bool(control.take(_OVER))

    def _is_over(self) -> int:
        return int(self._interval is not None and time.monotonic() - self._tried_at >= self._interval.total_seconds())

    def _save(self, trainer: pl.Trainer, *, asynchronous: bool, may_fail: bool) -> None:
        directory, strategy = self._directory, trainer.strategy
        assert directory is not None
        assert isinstance(strategy, MeshStrategy)
        path = directory.path_of(trainer.global_step)
        options = SaveOptions(
            asynchronous=asynchronous,
            when_busy="skip" if asynchronous else "wait",
            may_fail=may_fail,
            may_commit=directory.refuse_if_superseded,
            committed=partial(self._committed, directory, path, trainer, asynchronous),
            incarnation=directory.start,
        )
        self._tried_step, self._tried_at = trainer.global_step, time.monotonic()
        strategy.control.take(_OVER)
        if strategy.commit_checkpoint(lambda: _compat.dump_checkpoint(trainer), path, options):
            self._saved_step = trainer.global_step
            self._blocked.append(strategy.saver.blocked)
            return
        self._left_out += 1
        if self._left_out == 1:
            rank_zero_warn(
                f"No checkpoint of step {trainer.global_step}: the one before is still being written. Save less often; "
                "how many more are left out is said at the end."
            )

    def _committed(self, directory: RunDirectory, path: str, trainer: pl.Trainer, asynchronous: bool) -> None:
        """Follow a commit on the first rank; an asynchronous one in the thread that writes."""
        directory.committed(path)
        saver = trainer.strategy.saver  # type: ignore[attr-defined]
        blocked = saver.blocked if asynchronous else saver.written
        step = int(path.rpartition("-")[2])
        EventLog(trainer.default_root_dir).write("checkpoint", step, path=path, blocked=blocked, written=saver.written)

    def has_begun_to_save(self, step: int) -> bool:
        """Whether a save of this step was begun, the same on all ranks; it may fail yet."""
        return self._active and self._saved_step == step

    def save_now(self, trainer: pl.Trainer) -> str | None:
        """Save the state of this step, if it is not saved, and wait until it is on the disk; collective.

        Returns:
            The checkpoint of the step; None where nothing is saved, as in a `fast_dev_run`.

        Raises:
            CheckpointError: On all ranks, if it failed.
        """
        if not self._active or self._directory is None:
            return None
        saver = trainer.strategy.saver  # type: ignore[attr-defined]
        saver.join()
        if trainer.global_step > self._saved_step or saver.failed:
            self._save(trainer, asynchronous=False, may_fail=False)
        return self._directory.path_of(trainer.global_step)

    # -- going back ----------------------------------------------------------------------------------------------

    def take_back(self, trainer: pl.Trainer) -> None:
        """Let no later start go on from checkpoints of later steps, since training has gone back; on all ranks.

        Where there would be none left, the present state is saved first.
        """
        if not self._active:
            return
        self._save_again_from(trainer.global_step)
        if not self._go_back(trainer, trainer.global_step):
            self._save(trainer, asynchronous=False, may_fail=True)
            self._go_back(trainer, trainer.global_step)

    def reload(self, trainer: pl.Trainer, at_most: int) -> dict[str, Any] | None:
        """Load the newest whole checkpoint of at most that step, or else the oldest, in the middle of a fit.

        Later ones are superseded first, so that a start after a crash goes on from the same one. On all ranks.

        Returns:
            What is left to restore; None if there is no checkpoint.
        """
        directory, strategy = self._directory, trainer.strategy
        if not self._active or directory is None:
            return None
        assert isinstance(strategy, MeshStrategy)
        strategy.saver.join()
        found = lambda: directory.step_at_most(at_most) if trainer.is_global_zero else None
        step = strategy.broadcast(together(f"cannot read the checkpoints in {directory.path}", found))
        if step is None:
            return None
        self._go_back(trainer, step)
        checkpoint = strategy.go_back(directory.path, self._verify)
        self._save_again_from(step)
        return checkpoint

    def _save_again_from(self, step: int) -> None:
        self._saved_step = self._tried_step = step

    def _go_back(self, trainer: pl.Trainer, step: int) -> bool:
        directory, strategy = self._directory, trainer.strategy
        assert directory is not None
        assert isinstance(strategy, MeshStrategy)
        strategy.saver.join()
        failure = f"cannot mark the checkpoints in {directory.path} after step {step}"
        done = together(failure, lambda: trainer.is_global_zero and directory.go_back(step))
        return strategy.broadcast(done)

    # -- end -----------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._active:
            self.save_now(trainer)
            self._report(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        call_all(self._undo)
        # A fit that has nothing left to do comes here without a start of training.
        if self._active:
            self._note_end("finished", trainer.global_step)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        how = f"{type(exception).__name__}: {exception}".splitlines()[0]
        if isinstance(exception, KeyboardInterrupt):
            how = "interrupted"
        elif isinstance(exception, PreemptedError):
            how = "preempted"
        elif isinstance(exception, ParallelConfigError | CheckpointMismatch):
            how = "refused"
        call_all(self._undo)
        self._note_end(how, trainer.global_step)

    def _note_end(self, how: str, step: int) -> None:
        directory, ended, self._ended = self._directory, self._ended, True
        if (
            ended
            or not self._active
            or directory is None
            or not directory.start
            or (dist.is_initialized() and dist.get_rank() != 0)
        ):
            return
        try:
            directory.end(how, step)
        except OSError as e:
            log.warning("The end of this start could not be noted in %s: %s", directory.path, e)

    def _report(self, trainer: pl.Trainer) -> None:
        """Say what saves cost, and how often they should be made."""
        began, first = self._begun
        steps = trainer.global_step - first
        if len(self._blocked) < 2 or steps == 0:
            return
        blocked = statistics.median(self._blocked)
        written = trainer.strategy.saver.written  # type: ignore[attr-defined]
        a_step = max((time.monotonic() - began - sum(self._blocked)) / steps, 1e-9)
        advice = []
        for hours in _TYPICAL_MTBF_HOURS:
            # The next save can begin when this one is on the disk.
            interval = max(best_interval(blocked, hours * 3600), written)
            advice.append(f"{interval:.0f} s ({max(1, round(interval / a_step))} steps) at one failure in {hours} h")
        left_out = f" {self._left_out} were left out, as the one before was not written yet." if self._left_out else ""
        rank_zero_info(
            f"CommittedCheckpoint: {len(self._blocked)} saves kept training waiting {blocked:.2f} s each (median), the "
            f"last was on the disk after {written:.2f} s.{left_out} Least work is lost with one every "
            f"{', every '.join(advice)}."
        )


def committed_checkpoint_of(trainer: pl.Trainer) -> CommittedCheckpoint | None:
    """The callback of a Trainer that commits checkpoints, if there is one."""
    return next((one for one in trainer.checkpoint_callbacks if isinstance(one, CommittedCheckpoint)), None)
