"""Says which rank holds up the others when training stands still."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_par.callbacks._common import refuse_two
from lightning_par.resilience.events import EventLog
from lightning_par.resilience.watchdog import Action, Watchdog, check_options, leaders_of
from lightning_par.strategies import MeshStrategy


class StallWatchdog(Callback):
    """Watches training from a thread of each rank, and reports when it stands still: which rank, where, and why.

    A report goes to the log and to ``<default_root_dir>/stalls/<n>/report.txt``, with the Python stacks of all threads
    and torch's flight recorder of each rank beside it (where that directory is a URL, in a folder for temporary files
    that the log names); there is one for each stall, and a line when training goes on.
    Works under any strategy and on one device, in fit, validate, test and predict.

    Args:
        timeout: Seconds without progress in the phases of a step (data, forward, backward, optimizer) after which
            training stands still. Never less than five times what the phase usually takes in this run.
        action: ``"report"``, or ``"abort"`` to end all processes with status 76, so that what started them can start
            them again.
        phase_timeouts: The same for other phases (init, load, save, validation) and for ``first_step``; 900, or
            `timeout` if that is more, for each that it does not name.

    Raises:
        ParallelConfigError: If an option makes no sense, or a Trainer has two of them.

    Example (Lightning CLI)::

        trainer:
          callbacks:
            - class_path: lightning_par.callbacks.StallWatchdog
              init_args: {timeout: 120, action: abort, phase_timeouts: {save: 600}}
    """

    def __init__(
        self, timeout: float = 300.0, action: Action = "report", phase_timeouts: Mapping[str, float] | None = None
    ) -> None:
        check_options("StallWatchdog", timeout, phase_timeouts or {}, action)
        self.timeout = timeout
        self.action = action
        self.phase_timeouts = phase_timeouts
        self._watchdog: Watchdog | None = None
        self._micro = 0

    # -- begin and end -------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to watch; the ranks have met by now."""
        refuse_two(trainer, StallWatchdog)
        self._close(trainer, "it began anew")
        name = str(trainer.strategy.broadcast(uuid.uuid4().hex))
        root = trainer.default_root_dir
        events = EventLog(root if trainer.global_rank in leaders_of(trainer.world_size) else None)
        # Threads that have no lock of Python write to files only.
        stalls = Path(tempfile.gettempdir(), f"stalls-{name}") if "://" in root else Path(root, "stalls")
        self._watchdog = Watchdog(
            stalls,
            timeout=self.timeout,
            phase_timeouts=self.phase_timeouts,
            action=self.action,
            events=events,
        )
        self._watchdog.start(name)
        strategy = trainer.strategy
        if isinstance(strategy, MeshStrategy):
            strategy.saver.during = lambda: self._watchdog_of().phase("save")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching."""
        self._close(trainer, "it came to its end")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop watching, and tell the other ranks why this one will not come again."""
        self._close(trainer, f"{type(exception).__name__}: {exception}".splitlines()[0])

    def _close(self, trainer: Trainer, how: str) -> None:
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.close(how)
            strategy = trainer.strategy
            if isinstance(strategy, MeshStrategy):
                strategy.saver.during = contextlib.nullcontext

    def _watchdog_of(self) -> Watchdog:
        assert self._watchdog is not None
        return self._watchdog

    # -- phases --------------------------------------------------------------------------------------------------

    def _enter(self, trainer: Trainer, phase: str) -> None:
        if self._watchdog is not None:
            self._watchdog.enter(phase, trainer.global_step, self._micro)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note that a checkpoint is loaded."""
        self._enter(trainer, "load")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note that a checkpoint is saved, until the next phase begins."""
        self._enter(trainer, "save")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the first batch is awaited."""
        self._micro = 0
        self._enter(trainer, "data")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the first batch of an epoch is awaited."""
        self._enter(trainer, "data")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note that a batch is there."""
        self._enter(trainer, "forward")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Note that a backward begins."""
        self._enter(trainer, "backward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Note that an optimizer steps."""
        self._enter(trainer, "optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note that the next batch is awaited."""
        before = 0 if self._watchdog is None else self._watchdog.heartbeat.now.step
        self._micro = 0 if trainer.global_step != before else self._micro + 1
        self._enter(trainer, "data")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that what is done at the end of an epoch begins: as much as in a validation, sometimes."""
        self._enter(trainer, "validation")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that nothing is expected any more."""
        self._enter(trainer, "idle")

    def _evaluate(self, trainer: Trainer, *_: Any) -> None:
        self._enter(trainer, "validation")

    def _evaluated(self, trainer: Trainer, *_: Any) -> None:
        # In a fit until the next batch or epoch: the hooks of the module come after this one, and may take their time.
        self._enter(trainer, "validation" if trainer.state.fn == TrainerFn.FITTING else "idle")

    on_validation_start = on_validation_batch_start = on_validation_batch_end = _evaluate  # type: ignore[assignment]
    on_test_start = on_test_batch_start = on_test_batch_end = _evaluate  # type: ignore[assignment]
    on_predict_start = on_predict_batch_start = on_predict_batch_end = _evaluate  # type: ignore[assignment]
    on_validation_end = on_test_end = on_predict_end = _evaluated  # type: ignore[assignment]
