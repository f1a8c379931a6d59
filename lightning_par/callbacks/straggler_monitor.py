"""Which ranks are slow, and in what."""

from __future__ import annotations

import logging
import socket
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_par.callbacks._common import events_of
from lightning_par.callbacks.timed_steps import TimedSteps
from lightning_par.errors import Problems, is_number
from lightning_par.resilience.events import EventLog
from lightning_par.resilience.step_timer import StepTimes
from lightning_par.resilience.stragglers import Straggler, StragglerDetector, changes
from lightning_par.strategies import MeshStrategy

_WARM_UP = 2

log = logging.getLogger(__name__)


class StragglerMonitor(TimedSteps):
    """Names ranks that are slow for several intervals, with their host and the phase in which they are.

    All ranks of a synchronous step take equally long, as the fast ones wait for the slow one, so what is compared is
    the time of a rank's own work: loading data, forward and backward, and the optimizer, without waiting for
    collectives; among ranks of the same pipeline stage. Each interval costs one small all-gather. What becomes slow,
    or is no longer so, is a warning on rank 0; each interval of a straggler is an event for ``lightning-par report``.
    Works under any strategy; under torch's own `DistributedDataParallel` the waits of the backward are not seen, so
    a straggler there shows in the forward and the data only.

    Args:
        every_n_steps: Optimizer steps of an interval.
        threshold: A rank is slow if it has less than this share of the speed of the fastest, or of its own best.
        patience: For how many intervals in a row before it is named.

    Attributes:
        stragglers: Of the last interval, the same on all ranks.

    Raises:
        ParallelConfigError: With everything that is wrong with the arguments.

    Example (Lightning CLI)::

        trainer:
          callbacks:
            - class_path: lightning_par.callbacks.StragglerMonitor
              init_args: {every_n_steps: 100}
    """

    def __init__(self, every_n_steps: int = 100, *, threshold: float = 0.75, patience: int = 2) -> None:
        problems = Problems()
        super().__init__(every_n_steps, problems)
        if not is_number(threshold) or not 0 < threshold < 1:
            problems.add(f"threshold of StragglerMonitor is {threshold!r}; it lies between 0 and 1", "threshold=0.75")
        if not isinstance(patience, int) or patience < 1:
            problems.add(f"patience of StragglerMonitor is {patience!r}; it is an int >= 1", "patience=2")
        problems.raise_if_any()
        self.stragglers: list[Straggler] = []
        self._threshold, self._patience = threshold, patience
        self._detector = StragglerDetector()
        self._events = EventLog(None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the first interval."""
        super().on_train_start(trainer, pl_module)
        strategy = trainer.strategy
        stage = strategy.layout.coordinates(trainer.global_rank).pp if isinstance(strategy, MeshStrategy) else 0
        self.stragglers = []
        self._detector = StragglerDetector(
            stage=stage,
            host=socket.gethostname(),
            threshold=self._threshold,
            patience=self._patience,
            device=strategy.root_device,
        )
        self._events = events_of(trainer)

    def timed(self, times: StepTimes) -> None:
        """Add a step."""
        if times.index >= _WARM_UP:
            self._detector.add(times)

    def report(self, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> None:
        """End an interval."""
        before, self.stragglers = self.stragglers, self._detector.report()
        for one in self.stragglers:
            self._events.write(
                "straggler",
                trainer.global_step,
                rank=one.rank,
                host=one.host,
                phase=one.phase,
                relative=one.relative,
                individual=one.individual,
            )
        for line in changes(before, self.stragglers) if trainer.is_global_zero else ():
            log.warning("step %d: %s", trainer.global_step, line)
