"""Where the time of each optimizer step goes, by phase."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from lightning_par.parallel._compat import in_backward
from lightning_par.resilience import _compat
from lightning_par.resilience.phases import PHASES, Phase

T = TypeVar("T")


class StepClock(Protocol):
    """Makes marks in time, and says how far apart they are, perhaps later."""

    def mark(self) -> Any:
        """Mark this moment."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks."""

    def ready(self, mark: Any) -> bool:
        """Whether the moment of a mark has come, so that reading it waits for nothing."""

    def wait(self, mark: Any) -> None:
        """Wait until it has."""


class WallClock:
    """Marks are seconds of a clock of the host."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.mark = clock

    def seconds(self, start: float, end: float) -> float:
        """Seconds between two marks."""
        return end - start

    def ready(self, mark: float) -> bool:
        """Always."""
        return True

    def wait(self, mark: float) -> None:
        """Nothing to wait for."""


class CudaClock:
    """Marks are events on the current stream: a phase lasts as long as the device takes for it, idle time included."""

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds between two events that have happened."""
        return start.elapsed_time(end) / 1e3

    def ready(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has come to the event."""
        return mark.query()

    def wait(self, mark: torch.cuda.Event) -> None:
        """Wait for the device to come to it."""
        mark.synchronize()


@dataclass(frozen=True)
class StepTimes:
    """How long a step took.

    Args:
        index: How many steps this timer had seen before.
        split: Seconds by phase; each phase is there.
    """

    index: int
    split: Mapping[Phase, float]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(self.split.values())

    @property
    def own(self) -> float:
        """Seconds of this rank's own work: loading data, computing, the optimizer; no waiting for others."""
        return self.split["data"] + self.split["forward_backward"] + self.split["optimizer"]


class StepTimer:
    """Splits each optimizer step into phases; a loop says where one begins.

    Waits for collectives inside of the other phases are taken out of them and counted as ``communication``, but for
    those of ``checkpoint``. They are seen where Python waits (`Work.wait`; on CUDA also where the current stream is
    told to wait for an event or a stream), while the timer is started. Collectives that C++ waits for by itself
    (torch's `DistributedDataParallel`, functional collectives of DTensor) count as the phase in which they happen.

    Args:
        clock: `WallClock`; by default `CudaClock` where the device is CUDA.
        device: What computes.

    Attributes:
        listeners: Called with the `StepTimes` of each step; on CUDA some steps late, or in `settle`.

    Example::

        timer = StepTimer()
        timer.listeners.append(print)
        with timer.running():
            for batch in timer.iterate(loader):  # phase "data"
                timer.phase("forward_backward")
                model(batch).sum().backward()
                timer.phase("optimizer")
                optimizer.step()
                timer.end_step()
    """

    def __init__(self, clock: StepClock | None = None, device: torch.device | str = "cpu") -> None:
        on_cuda = torch.device(device).type == "cuda"
        self.listeners: list[Callable[[StepTimes], None]] = []
        self._clock: StepClock = clock or (CudaClock() if on_cuda else WallClock())
        self._phase: Phase | None = None
        self._since: Any = None
        self._pieces: list[tuple[Phase, Any, Any]] = []
        self._unread: deque[tuple[int, list[tuple[Phase, Any, Any]]]] = deque()
        self._steps = 0
        self._thread = 0
        self._undo: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin with phase ``other``, and see waits of this thread and of its backward from now on."""
        self.stop()
        self._thread = threading.get_ident()
        self._undo = _compat.around_waits(self._begin_wait, self._end_wait)
        self.phase("other")

    def stop(self) -> None:
        """Forget the step under way, and see no more waits."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
        self._phase = None
        self._pieces = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """`start`, and in the end `settle` and `stop`."""
        self.start()
        try:
            yield
            self.settle()
        finally:
            self.stop()

    def iterate(self, batches: Iterable[T]) -> Iterator[T]:
        """Go through batches in phase ``data``."""
        iterator = iter(batches)
        while True:
            self.phase("data")
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.phase("other")
            yield batch

    def phase(self, phase: Phase | None) -> None:
        """Say what begins now; with None time is no part of any step (a validation) until the next phase."""
        now = self._clock.mark()
        if self._phase is not None:
            self._pieces.append((self._phase, self._since, now))
        self._phase, self._since = phase, now

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Count what happens inside as `phase`, then go on with the phase before, also with None."""
        before = self._phase
        self.phase(phase)
        try:
            yield
        finally:
            self.phase(before)

    def end_step(self) -> None:
        """End an optimizer step; the phase goes on, in the next one."""
        self.phase(self._phase)
        if self._pieces:
            self._unread.append((self._steps, self._pieces))
        self._steps += 1
        self._pieces = []
        while self._unread and self._clock.ready(self._unread[0][1][-1][2]):
            self._read()

    def settle(self) -> None:
        """Tell the listeners of all steps that have ended; waits for the device."""
        if self._unread:
            self._clock.wait(self._unread[-1][1][-1][2])
        while self._unread:
            self._read()

    def _read(self) -> None:
        index, pieces = self._unread.popleft()
        split = dict.fromkeys(PHASES, 0.0)
        for phase, start, end in pieces:
            split[phase] += self._clock.seconds(start, end)
        times = StepTimes(index, split)
        for listener in self.listeners:
            listener(times)

    def _begin_wait(self) -> Phase | None:
        """Return the phase to go on with; None where the wait is none of ours."""
        before = self._phase
        if before in (None, "communication", "checkpoint"):
            return None
        # A checkpoint is written in a thread of its own, and on CUDA a backward runs in one.
        if threading.get_ident() != self._thread and not in_backward():
            return None
        self.phase("communication")
        return before

    def _end_wait(self, before: Phase | None) -> None:
        if before is not None:
            self.phase(before)
