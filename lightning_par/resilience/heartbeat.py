"""What this process is doing, written by training and read by a thread that watches it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

PHASES = ("init", "data", "forward", "backward", "optimizer", "save", "load", "validation", "idle")
TRAINING = ("data", "forward", "backward", "optimizer")
REMEMBERED = 128  # durations of each phase


class Beat(NamedTuple):
    """Where training is.

    Attributes:
        step: The optimizer step.
        phase: One of `PHASES`.
        micro: The batch of the step, 0 without accumulation.
        since: When it came there, in seconds of a monotonic clock.
    """

    step: int
    phase: str
    micro: int
    since: float


class Heartbeat:
    """The record of this process; one thread writes it, others read it without a lock, and nothing here waits.

    Args:
        clock: Seconds that never go back.

    Attributes:
        now: Where training is.
        has_stepped: Whether a step has been finished, so that what is compiled and allocated in the first one is there.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._durations: dict[str, deque[float]] = {phase: deque(maxlen=REMEMBERED) for phase in PHASES}
        self.now = Beat(0, "init", 0, clock())
        self.has_stepped = False

    def enter(self, phase: str, step: int | None = None, micro: int = 0) -> None:
        """Training comes to a phase, or begins the same one again, which is progress too.

        Args:
            phase: One of `PHASES`.
            step: The optimizer step; None where it is the same as before.
            micro: The batch of the step.

        Raises:
            ValueError: If there is no such phase.
        """
        if phase not in self._durations:
            raise ValueError(f"phase is {phase!r}; it is one of {', '.join(PHASES)}")
        before, time_now = self.now, self._clock()
        self._durations[before.phase].append(time_now - before.since)
        if step is None:
            step = before.step
        elif step != before.step and before.phase in TRAINING:
            self.has_stepped = True
        # One assignment: a reader sees the old record or the new one.
        self.now = Beat(step, phase, micro, time_now)

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Be in a phase for a while, then again in the one before."""
        before = self.now
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before.phase, micro=before.micro)

    def usual(self, phase: str) -> float:
        """The longest of the last durations of a phase but for one in a hundred, and at least for the longest."""
        recent = sorted(self._durations[phase].copy())
        return recent[int(0.99 * (len(recent) - 1))] if len(recent) > 1 else 0.0
