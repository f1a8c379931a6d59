"""What the callbacks of a Trainer share: one collective of each step, one file of events, their order and their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_par.errors import Problems
from lightning_par.resilience.control import StepControl
from lightning_par.resilience.events import EventLog
from lightning_par.strategies import MeshStrategy, _compat

_CONTROL = "_step_control"


def control_of(trainer: Trainer, undo: list[Callable[[], None]]) -> StepControl:
    """The collective of each optimizer step, one for all callbacks; it is kept by the strategy.

    Args:
        trainer: Runs the fit.
        undo: To which closing it is added under Lightning's own strategies, which do not close it themselves.
    """
    strategy: Any = trainer.strategy
    if isinstance(strategy, MeshStrategy):
        return strategy.control
    control: StepControl = vars(strategy).setdefault(_CONTROL, StepControl())
    undo.append(control.close)
    return control


def events_of(trainer: Trainer) -> EventLog:
    """Where rank 0 writes the events of a run; nowhere if the fit only tries something out."""
    if "://" in trainer.default_root_dir:
        rank_zero_warn(
            f"no events are written for lightning-par report, as default_root_dir is {trainer.default_root_dir}: "
            "a local directory keeps them, and CommittedCheckpoint(dirpath=URL) the checkpoints where they are"
        )
    return EventLog(trainer.default_root_dir if trainer.is_global_zero and not is_tried_out(trainer) else None)


def is_tried_out(trainer: Trainer) -> bool:
    """Whether a fit only tries something out, and leaves no events."""
    return bool(trainer.fast_dev_run or _compat.is_tuning(trainer))  # type: ignore[attr-defined]


def refuse_two(trainer: Trainer, kind: type[Callback]) -> None:
    """Raise `ParallelConfigError` if a Trainer has more than one callback of a kind that writes down the run."""
    problems = Problems()
    if sum(isinstance(one, kind) for one in trainer.callbacks) > 1:  # type: ignore[attr-defined]
        problems.add(f"more than one callback is {kind.__name__}", "keep one of them")
    problems.raise_if_any()


def call_all(functions: list[Callable[[], None]]) -> None:
    """Call all, the last one first, and forget them."""
    while functions:
        functions.pop()()


def put_last(trainer: Trainer, *callbacks: Callback) -> None:
    """Let hooks of these callbacks run after those of all others, in this order."""
    everyone: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    rest = [one for one in everyone if not any(one is last for last in callbacks)]
    trainer.callbacks = [*rest, *callbacks]  # type: ignore[attr-defined]
