"""`ParityMonitor`: finds copies of a parameter that are not the same any more."""

from __future__ import annotations

import logging
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from lightning_par.callbacks._common import events_of
from lightning_par.errors import Problems, is_count
from lightning_par.resilience.errors import ParityError
from lightning_par.resilience.events import EventLog
from lightning_par.resilience.parity import Difference, ParityCheck
from lightning_par.strategies import MeshStrategy

log = logging.getLogger(__name__)


class ParityMonitor(pl.Callback):
    """Compares the parameters that several ranks hold, in one optimizer step of every n.

    One flipped bit is found, and rank and parameter are named; with two copies nobody can tell which one is right.
    Needs a strategy of lightning_par.

    Args:
        every_n_steps: One optimizer step of so many ends with a comparison.
        action: ``"report"`` warns, once for each difference; ``"abort"`` ends the run on all ranks.

    Attributes:
        found: What the last comparison has found, the same on all ranks.

    Raises:
        ParallelConfigError: If an option is wrong, or the strategy is one of Lightning's own.
        ParityError: With ``action="abort"``.

    Example (Lightning CLI)::

        trainer:
          callbacks:
            - class_path: lightning_par.callbacks.ParityMonitor
              init_args: {every_n_steps: 500, action: abort}
    """

    def __init__(self, every_n_steps: int = 500, action: Literal["report", "abort"] = "report") -> None:
        problems = Problems()
        if not is_count(every_n_steps):
            problems.add(f"every_n_steps of ParityMonitor is {every_n_steps!r}; it is an int >= 1", "every_n_steps=500")
        if action not in ("report", "abort"):
            problems.add(f"action of ParityMonitor is {action!r}; it is 'report' or 'abort'", "action='report'")
        problems.raise_if_any()
        self.every_n_steps = every_n_steps
        self.action = action
        self.found: list[Difference] = []
        self._parity = ParityCheck()
        self._events = EventLog(None)
        self._step = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        problems = Problems()
        if not isinstance(trainer.strategy, MeshStrategy):
            problems.add(
                f"ParityMonitor needs a strategy of lightning_par, which says who holds the same; this is "
                f"{type(trainer.strategy).__name__}",
                'strategy="par_ddp"',
            )
        problems.raise_if_any()
        self._parity = ParityCheck()
        self._events = events_of(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step, self.found = trainer.global_step, []

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # A step may count by more than one (several optimizers) and may go back (a rewind).
        step, before, self._step = trainer.global_step, self._step, trainer.global_step
        if step // self.every_n_steps == before // self.every_n_steps:
            return
        known, self.found = self.found, self._parity.check(dict(pl_module.named_parameters()))
        new = [one for one in self.found if one not in known]
        if not new:
            return
        for one in new:
            self._events.write("parity", step, rank=one.ranks[0], ranks=one.ranks, parameter=one.parameter)
        lines = "\n".join(f"  - {one}" for one in new)
        what = f"{len(new)} parameter{'' if len(new) == 1 else 's'}"
        text = f"ranks hold different bytes of {what} that must be the same, at step {step}:\n{lines}"
        if self.action == "abort":
            raise ParityError(text)
        if trainer.is_global_zero:
            log.warning(text)
