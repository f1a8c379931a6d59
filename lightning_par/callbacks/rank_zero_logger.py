"""Readable output of many ranks, for runs without a progress bar."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_par.errors import ParallelConfigError, Problems, is_number
from lightning_par.resilience.errors import OF_ALL_RANKS
from lightning_par.resilience.failures import record_failure
from lightning_par.resilience.logging import Policy, RankLogging, check_policy

log = logging.getLogger(__name__)


class RankZeroLogger(Callback):
    """Keeps the console to what one reads, and prints a line of metrics every few steps.

    Below WARNING the ranks of `policy` print, WARNING one rank a node, ERROR every rank; a message that is repeated is
    printed once, and later with the number of its repetitions. Records carry ``rank``, ``local_rank``, ``host`` and
    ``step`` for the formatters of other handlers. The loggers are as before when the Trainer is done.

    Args:
        policy: Who prints INFO: ``rank0``, ``node0`` (local rank 0 of each node) or ``all``.
        every_n_steps: Rank 0 prints step, epoch, loss, learning rate and what was logged every n optimizer steps, and
            after each validation; 0 never. The loss is that of the last batch on rank 0.
        directory: Where each rank appends all its records to ``rank-N.jsonl``, one JSON object a line; None: nowhere.
        repeat_interval: A message that is repeated within this many seconds is folded; 0 prints all.

    Raises:
        ParallelConfigError: With everything that is wrong with the arguments.

    Example (Lightning CLI)::

        trainer:
          enable_progress_bar: false
          callbacks:
            - class_path: lightning_par.callbacks.RankZeroLogger
              init_args: {every_n_steps: 20, directory: logs}
    """

    def __init__(
        self,
        policy: Policy = "rank0",
        every_n_steps: int = 50,
        directory: str | None = None,
        repeat_interval: float = 60.0,
    ) -> None:
        problems = Problems()
        try:
            check_policy(policy)
        except ParallelConfigError as error:
            problems.extend(error.problems)
        if type(every_n_steps) is not int or every_n_steps < 0:
            problems.add(
                f"every_n_steps of RankZeroLogger is {every_n_steps!r}; it is an int >= 0, of which 0 prints no lines",
                "every_n_steps=50",
            )
        if not is_number(repeat_interval) or not repeat_interval >= 0:
            problems.add(
                f"repeat_interval of RankZeroLogger is {repeat_interval!r}; it is a number of seconds >= 0",
                "repeat_interval=60.0",
            )
        problems.raise_if_any()
        self.policy = policy
        self.every_n_steps = every_n_steps
        self.directory = directory
        self.repeat_interval = repeat_interval
        self._logging: RankLogging | None = None
        self._last_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Install the filters; the ranks are known by now."""
        if self._logging is None:
            self._logging = RankLogging(
                self.policy,
                rank=trainer.global_rank,
                local_rank=trainer.local_rank,
                directory=self.directory,
                repeat_interval=self.repeat_interval,
            )
        self._logging.install()
        self._logging.step = trainer.global_step

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the loggers back."""
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Record the exception of this rank and put the loggers back: Lightning calls no teardown after it."""
        record_failure(exception, trainer.global_rank)
        if isinstance(exception, Exception):
            if self._logging is not None:
                self._logging.tell_repetitions()
            # What all ranks have found together one of them says.
            level = logging.INFO if trainer.global_rank and isinstance(exception, OF_ALL_RANKS) else logging.ERROR
            what = trainer.global_rank, type(exception).__name__, exception
            log.log(level, "rank %d: %s: %s", *what, extra={"exception": exception})
        self._remove()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from the step of the checkpoint, which is restored by now."""
        self._last_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Mark records with the step that begins."""
        if self._logging is not None:
            self._logging.step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print a line when another `every_n_steps` optimizer steps are done."""
        step, before, self._last_step = trainer.global_step, self._last_step, trainer.global_step
        # A step may count by more than one (several optimizers) and may go back (a rewind).
        if not self.every_n_steps or step // self.every_n_steps == before // self.every_n_steps:
            return
        metrics = {"loss": loss_of_batch(trainer, pl_module, outputs), **_learning_rates(trainer), **_metrics(trainer)}
        self._print(trainer, "", metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what is known after a validation."""
        if self.every_n_steps and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._print(trainer, "validation | ", _metrics(trainer))

    def _print(self, trainer: Trainer, what: str, metrics: dict[str, float | None]) -> None:
        known = {name: value for name, value in metrics.items() if value is not None}
        if trainer.global_rank == 0:
            numbers = [f"{name} {value:.5g}" for name, value in known.items()]
            line = " | ".join([f"step {trainer.global_step}", f"epoch {trainer.current_epoch}", *numbers])
            log.info("%s%s", what, line, extra={"metrics": known})

    def _remove(self) -> None:
        if self._logging is not None:
            self._logging.remove()
            self._logging = None


def _metrics(trainer: Trainer) -> dict[str, float | None]:
    """Return everything logged. Every rank calls it: reading a metric may compute it, which may communicate."""
    metrics = {**trainer.callback_metrics, **trainer.progress_bar_metrics}
    # A metric that is logged on step and epoch appears as `x`, `x_step` and `x_epoch`.
    forks = {name + suffix for name in metrics for suffix in ("_step", "_epoch")}
    return {name: _number(value) for name, value in metrics.items() if name not in forks}


def _learning_rates(trainer: Trainer) -> dict[str, float | None]:
    rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
    if len(rates) == 1:
        return {"lr": _number(rates[0])}
    return {f"lr-{i}": _number(rate) for i, rate in enumerate(rates)}


def loss_of_batch(trainer: Trainer, pl_module: LightningModule, outputs: Any) -> float | None:
    """The loss that a training step returned, on this rank; None where it returned none."""
    loss = _number(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)
    # In automatic optimization Lightning hands the loss over as it is accumulated.
    scale = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
    return None if loss is None else loss * scale


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None
