"""Errors that end a run, each with the exit status by which what starts it again can tell them apart."""

from __future__ import annotations

# Of sysexits.h: EX_SOFTWARE, do not start again; EX_TEMPFAIL, start again; and one of ours, ranks that hung.
DIVERGED = 70
PREEMPTED = 75
STALLED = 76


class TrainingDivergedError(RuntimeError):
    """Training went wrong again and again, and starting it again would not help; exit status 70."""


class DesyncError(RuntimeError):
    """Ranks are not at the same step, or exchange different things."""


class PreemptedError(SystemExit):
    """The process was told to end, and training has stopped; status 75 in every rank, to be started again.

    As a `SystemExit` it ends the process without a traceback.

    Args:
        message: What told the run to end, and what was saved.
    """

    def __init__(self, message: str) -> None:
        super().__init__(PREEMPTED)
        self.message = message

    def __str__(self) -> str:
        return self.message


class ParityError(RuntimeError):
    """Ranks hold different bytes where they must hold the same."""


OF_ALL_RANKS = (TrainingDivergedError, DesyncError, PreemptedError, ParityError)
"""What all ranks raise in the same step, with the same words: one of them tells it."""
