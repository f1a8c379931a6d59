"""What the callbacks that look at the time of steps have in common: one timer for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_par.callbacks._common import call_all, refuse_two
from lightning_par.errors import Problems, is_count
from lightning_par.resilience.phases import Phase
from lightning_par.resilience.step_timer import StepTimer, StepTimes
from lightning_par.strategies import _compat

SAVES = ("save_checkpoint", "commit_checkpoint")


class TimedSteps(Callback):
    """Has the steps of a fit timed. The first callback of this kind in a Trainer moves the timer on; others listen.

    Args:
        every_n_steps: Of the report.
        problems: To which what is wrong with it is added; the subclass raises it with what is wrong with its own.
    """

    def __init__(self, every_n_steps: int, problems: Problems) -> None:
        if not is_count(every_n_steps):
            name = type(self).__name__
            problems.add(f"every_n_steps of {name} is {every_n_steps!r}; it is an int >= 1", "every_n_steps=10")
        self.every_n_steps = every_n_steps
        self._timer: StepTimer | None = None
        self._drives = False
        self._undo: list[Callable[[], None]] = []
        self._step = 0
        self._reported = 0

    # -- for subclasses ------------------------------------------------------------------------------------------

    def timed(self, times: StepTimes) -> None:
        """Hear how long a step took."""

    def report(self, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> None:
        """Report on the last steps; on all ranks, after the same step."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second one of the same kind."""
        refuse_two(trainer, type(self))

    # -- hooks ---------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the timer."""
        self._stop()
        self._step = self._reported = trainer.global_step
        first = next(one for one in trainer.callbacks if isinstance(one, TimedSteps))  # type: ignore[attr-defined]
        self._drives = first is self
        if self._drives:
            self._timer = StepTimer(device=trainer.strategy.root_device)
            self._drive(trainer, pl_module, self._timer)
        else:
            self._timer = first._timer
        assert self._timer is not None
        self._timer.listeners.append(self.timed)

    def _drive(self, trainer: Trainer, pl_module: LightningModule, timer: StepTimer) -> None:
        after_step: Phase = "other" if pl_module.automatic_optimization else "forward_backward"

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            timer.phase(after_step)

        self._undo = [
            _compat.before_fetch(trainer, lambda: timer.phase("data")),
            register_optimizer_step_post_hook(stepped).remove,
            *(_timed_saves(trainer.strategy, name, timer) for name in SAVES if hasattr(trainer.strategy, name)),
            timer.stop,
        ]
        timer.start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin the forward."""
        if self._drives and self._timer is not None:
            self._timer.phase("forward_backward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Begin the optimizer's work, with what other callbacks do before it."""
        if self._drives and self._timer is not None:
            self._timer.phase("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step, if this batch made one, and report when it is time to."""
        if self._timer is None:
            return
        if self._drives:
            self._timer.phase("other")
        step, before, self._step = trainer.global_step, self._step, trainer.global_step
        # A step may count by more than one (several optimizers) and may go back (a rewind).
        if step == before:
            return
        if self._drives:
            self._timer.end_step()
        if step // self.every_n_steps != self._reported // self.every_n_steps:
            self._reported = step
            self._timer.settle()
            self.report(trainer, pl_module, outputs)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What ended the epoch was an attempt to fetch one more batch."""
        if self._drives and self._timer is not None:
            self._timer.phase("other")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A validation is no part of a step, nor are its last hooks: a step goes on with the next batch."""
        if self._drives and self._timer is not None:
            self._timer.phase(None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave nothing behind."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind: Lightning calls no end of training after an exception."""
        self._stop()

    def _stop(self) -> None:
        call_all(self._undo)
        self._timer, self._drives = None, False


def _timed_saves(strategy: Any, name: str, timer: StepTimer) -> Callable[[], None]:
    """Count the time in a method of the strategy as that of checkpoints; returns what undoes it."""
    original = getattr(strategy, name)

    def save(*args: Any, **kwargs: Any) -> Any:
        with timer.within("checkpoint"):
            return original(*args, **kwargs)

    setattr(strategy, name, save)
    return lambda: strategy.__dict__.pop(name, None) and None
