"""`PreemptionGuard`: a run that is told to end saves on all ranks after the same step, and ends with status 75."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_par.callbacks._common import call_all, control_of, events_of, put_last
from lightning_par.callbacks.committed_checkpoint import committed_checkpoint_of
from lightning_par.checkpoint import CheckpointError
from lightning_par.errors import Problems
from lightning_par.resilience.errors import PreemptedError
from lightning_par.resilience.events import EventLog
from lightning_par.resilience.preemption import Preemption, Requeue, Stop, check_requeue, check_signals, slurm_end
from lightning_par.strategies import MeshStrategy, _compat, _compat_signals

log = logging.getLogger(__name__)

# In a validation, one batch of so many ends with an exchange.
_VALIDATION_BATCHES = 10


class PreemptionGuard(pl.Callback):
    """Stops a fit that is told to end: all ranks after the same optimizer step, with a checkpoint and exit status 75.

    A signal to any rank is noted at once and travels in the collective of the next optimizer step. Then the state is
    saved and every process ends with status 75, which makes torchrun and schedulers start the run again. The checkpoint
    is one of `CommittedCheckpoint`, which with ``resume="auto"`` finds it again; without that callback it is
    ``preempted-step-00001200.ckpt`` beside the others of the run, to be given as `ckpt_path`. Lightning's own handlers
    of SIGTERM, and of SLURM's signals, are not installed.

    Args:
        signals: What tells a run to end.
        grace: The time from a signal to the end by force (SLURM's KillWait, `--shutdown-timeout` of torchrun). A save
            that has usually taken longer than what is left of it is left out. None: there is always a save.
        time_limit: Stop by itself when the process has trained so long, less `grace` (two minutes if that is None).
            The end of a SLURM job counts in the same way, where SLURM tells it.
        requeue: Whether rank 0 calls ``scontrol requeue`` in a SLURM job, after the commit: ``"notice"`` does for
            SIGUSR1 and a limit of time, ``"always"`` for SIGTERM too, or ``"never"``.

    Raises:
        ParallelConfigError: If an option is wrong.
        PreemptedError: A `SystemExit`, from `fit` on all ranks.

    Example (Lightning CLI)::

        trainer:
          callbacks:
            - class_path: lightning_par.callbacks.PreemptionGuard
              init_args: {grace: "00:01:00"}
    """

    def __init__(
        self,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        grace: timedelta | None = None,
        time_limit: timedelta | None = None,
        requeue: Requeue = "notice",
    ) -> None:
        problems = Problems()
        for name, value in {"grace": grace, "time_limit": time_limit}.items():
            if value is not None and not (isinstance(value, timedelta) and value > timedelta(0)):
                problems.add(
                    f"{name} of PreemptionGuard is {value!r}; it is a timedelta above 0",
                    f"{name}=timedelta(minutes=1)",
                    f'{name}: "00:01:00"',
                )
        problems.raise_if_any()
        check_signals(signals, None)
        check_requeue(requeue)
        self._signals = tuple(signals)
        self._grace = grace
        self._time_limit = time_limit
        self._requeue: Requeue = requeue
        self._began = time.time()
        self.preemption: Preemption | None = None
        """What hears the signals, during a fit; `remove` puts them back for who goes on after a `PreemptedError`."""
        self._undo: list[Callable[[], None]] = []
        self._events = EventLog(None)
        self._step = 0

    # -- begin and end -------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if _compat.is_tuning(trainer):
            return
        # One that was told to end and did not.
        self._remove()
        self._undo.append(_compat_signals.without_signal_handlers(trainer))
        if stage != "fit":
            # Nothing is lost: a signal ends the process, or does what the program has said.
            return
        strategy: Any = trainer.strategy
        ours = isinstance(strategy, MeshStrategy)
        control = control_of(trainer, self._undo)
        ends = [slurm_end()]
        if self._time_limit is not None:
            ends.append(self._began + self._time_limit.total_seconds())
        self.preemption = Preemption(
            control,
            rank=trainer.global_rank,
            signals=self._signals,
            grace=None if self._grace is None else self._grace.total_seconds(),
            deadline=min((end for end in ends if end is not None), default=None),
            usual_save=lambda: strategy.saver.written if ours else 0.0,
        )
        self._events = events_of(trainer)
        self.preemption.install()

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # What the others do after a batch belongs to the state that is saved.
        put_last(trainer, self)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        if self.preemption is None:
            return
        stop = self.preemption.agreed(self._step)
        if stop is not None:
            self._leave(trainer, stop, None, "nothing was trained in this start")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._remove()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # What told this process to end may tell it again while it is ending.
        if not isinstance(exception, PreemptedError):
            self._remove()

    def _remove(self) -> None:
        if self.preemption is not None:
            self.preemption.remove()
            self.preemption = None
        call_all(self._undo)

    # -- steps ---------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # By hand a step may be hidden from the Trainer.
        stepped = trainer.global_step != self._step or not pl_module.automatic_optimization
        self._step = trainer.global_step
        if stepped:
            self._stop_if_told(trainer)

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        # Within a validation nothing can be saved: weights may be exchanged for their average. What is saved is enough.
        strategy, committed = trainer.strategy, committed_checkpoint_of(trainer)
        if (
            trainer.state.fn == TrainerFn.FITTING
            and not trainer.sanity_checking
            and batch_idx % _VALIDATION_BATCHES == 0
            and isinstance(strategy, MeshStrategy)
            and strategy.evaluates_together
            and committed is not None
            and committed.has_begun_to_save(trainer.global_step)
        ):
            self._stop_if_told(trainer)

    def _stop_if_told(self, trainer: pl.Trainer) -> None:
        if self.preemption is None:
            return
        stop = self.preemption.agreed(trainer.global_step)
        if stop is None:
            return
        if not stop.saves:
            why = f"{stop.left:.0f} s are left, and a save has taken longer: the last checkpoint is an earlier one"
            self._leave(trainer, stop, None, why)
        saved = self._save(trainer)
        self._leave(trainer, stop, saved, f"the state is saved as {saved}" if saved else "the state is not saved")

    def _save(self, trainer: pl.Trainer) -> str | None:
        """Save this step and return where; None if that failed, or there is no place for it."""
        committed = committed_checkpoint_of(trainer)
        try:
            if committed is not None and trainer.validating:
                trainer.strategy.saver.wait()  # type: ignore[attr-defined]
            if committed is not None:
                return committed.save_now(trainer)
            places = [getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks]
            directory = next((place for place in places if place), Path(trainer.default_root_dir) / "checkpoints")
            path = str(Path(directory) / f"preempted-step-{trainer.global_step:08d}.ckpt")
            trainer.save_checkpoint(path)
            if isinstance(trainer.strategy, MeshStrategy):
                trainer.strategy.saver.wait()
        except CheckpointError as e:
            log.error("rank %d: the state was not saved before the end: %s", trainer.global_rank, e)
            return None
        return path

    def _leave(self, trainer: pl.Trainer, stop: Stop, saved: str | None, what: str) -> NoReturn:
        assert self.preemption is not None
        step = trainer.global_step
        self._events.write("stop", step, signal=stop.reason, rank=stop.rank, saved=saved)
        if trainer.is_global_zero:
            # No Python warning: those can be turned off, and this is the last word of a run.
            told = "%s (rank %d): training stops after step %d; %s. Exit status 75."
            log.warning(told, stop.reason, stop.rank, step, what)
        self.preemption.leave(stop, saved, step=step, requeue=self._requeue)
