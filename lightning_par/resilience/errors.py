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
