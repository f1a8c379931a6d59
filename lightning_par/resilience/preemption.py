"""The end of a run that is told to end: all ranks after the same optimizer step, with exit status 75.

A signal may reach any rank at any moment. It is noted, and nothing else; what was noted travels in the collective of
the next optimizer step, so that all ranks hear of it in the same one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, NoReturn, get_args

from lightning_par.errors import Problems
from lightning_par.resilience.control import StepControl
from lightning_par.resilience.errors import PREEMPTED, PreemptedError
from lightning_par.resilience.signals import SignalListener

log = logging.getLogger(__name__)

Requeue = Literal["notice", "always", "never"]

# torchrun and schedulers that signal a whole process group make one wish arrive twice.
SAME_WISH = 5.0  # seconds
# How long before a deadline to stop when nobody says how long the end takes.
DEFAULT_MARGIN = 120.0  # seconds

_WISH, _SAVE_TIME = "preemption", "preemption/save_time"
_DEADLINE = 0
_RANK_BITS, _SIGNAL_BITS = 32, 8


@dataclass(frozen=True)
class Stop:
    """That all ranks stop now.

    Attributes:
        rank: The rank that was told so.
        reason: The name of the signal, or ``"deadline"``.
        saves: Whether there is time to save.
        left: Seconds until the process is ended by force; None where that is unknown.
    """

    rank: int
    reason: str
    saves: bool
    left: float | None


class Preemption:
    """Hears that the run is to end, and lets all ranks agree on the step after which it does.

    Between `install` and `remove`, or in a `with` statement, the signals have no other effect. A second one of a kind,
    5 seconds or more after the first, ends the process at once.

    Args:
        control: The collective of each optimizer step, on all ranks.
        rank: Global rank.
        signals: Names of signals.
        grace: Seconds from a signal to the end by force. A save that has usually taken longer than what is left of them
            is left out. None: unknown, so there is always a save.
        deadline: When the process will be ended, in seconds since the epoch; less than `grace` before it (two minutes
            if that is None) acts as a signal. `slurm_end` says when a SLURM job ends.
        usual_save: Gives the seconds that a save has taken, 0 for unknown.
        clock: Seconds since the epoch.

    Raises:
        ParallelConfigError: If a signal has no such name or cannot be caught, or times are not positive.

    Example::

        with Preemption(fabric.strategy.control, rank=fabric.global_rank, grace=60) as preemption:
            for step, batch in enumerate(loader, 1):
                ...
                optimizer.step()
                if stop := preemption.agreed(step):
                    if stop.saves:
                        fabric.save("last", state)
                    preemption.leave(stop, saved="last" if stop.saves else None)
    """

    def __init__(
        self,
        control: StepControl,
        *,
        rank: int,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        grace: float | None = None,
        deadline: float | None = None,
        usual_save: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        check_signals(signals, grace)
        self._control = control
        self._rank = rank
        self._grace = grace
        self._deadline = deadline
        self._usual_save = usual_save
        self._clock = clock
        self._first: dict[int, float] = {}
        self._exchanges = 0
        self._listener = SignalListener([getattr(signal, name) for name in signals], self.hear)
        self._take_away: list[Callable[[], None]] = []

    def install(self) -> None:
        """Begin to hear; on all ranks, a second call does nothing. Outside the main thread only a deadline counts."""
        if self._take_away:
            return
        self._exchanges = self._control.exchanges
        self._take_away = [
            self._control.add(_WISH, self._wish),
            self._control.add(_SAVE_TIME, lambda: int(1000 * self._usual_save())),
        ]
        try:
            self._listener.start()
        except RuntimeError:
            log.warning("PreemptionGuard hears no signals: training does not run in the main thread of this process")

    def remove(self) -> None:
        """Put signals back as they were; a second call does nothing."""
        while self._take_away:
            self._take_away.pop()()
        self._listener.stop()

    def __enter__(self) -> Preemption:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # What told this process to end may tell it again while it is ending.
        if not isinstance(error, PreemptedError):
            self.remove()

    def hear(self, number: int) -> None:
        """Note a signal."""
        now = self._clock()
        first = self._first.setdefault(number, now)
        if now - first >= SAME_WISH:
            os._exit(PREEMPTED)

    def agreed(self, step: int) -> Stop | None:
        """Whether all ranks stop now; collective, after each optimizer step.

        Args:
            step: The number of this step, the same on all ranks.
        """
        self._exchanges = self._control.attend(step, self._exchanges)
        wish = self._control.take(_WISH)
        save_time = (self._control.take(_SAVE_TIME) or 0) / 1000
        if not wish:
            return None
        number = wish & ((1 << _SIGNAL_BITS) - 1)
        rank = wish >> _SIGNAL_BITS & ((1 << (_RANK_BITS - _SIGNAL_BITS)) - 1)
        margin = self._margin if number == _DEADLINE else self._grace
        left = None if margin is None else margin - (wish >> _RANK_BITS) / 1000
        reason = "deadline" if number == _DEADLINE else signal.Signals(number).name
        return Stop(rank, reason, saves=left is None or left > save_time, left=left)

    def leave(self, stop: Stop, saved: str | None, *, step: int = 0, requeue: Requeue = "notice") -> NoReturn:
        """End the process with status 75, on all ranks together, after SLURM was asked to start the job again.

        Args:
            stop: What was agreed.
            saved: Where this step was saved.
            step: The number of this step.
            requeue: Whether rank 0 calls ``scontrol requeue`` in a SLURM job: ``"notice"`` does after SIGUSR1 and a
                deadline; SIGTERM comes of ``scancel`` too, and where SLURM preempts it starts a job again itself.

        Raises:
            PreemptedError: Always.
        """
        if self._rank == 0 and (requeue == "always" or (requeue == "notice" and stop.reason != "SIGTERM")):
            requeue_slurm_job()
        # Launchers end the others when one has ended: nobody leaves before rank 0 is done, unless one is gone already.
        with contextlib.suppress(RuntimeError):
            self._control.exchange(step)
        told = f"a deadline of rank {stop.rank}" if stop.reason == "deadline" else f"{stop.reason} to rank {stop.rank}"
        what = f"saved as {saved}" if saved else "nothing was saved"
        raise PreemptedError(f"stopped after {told}; {what}")

    @property
    def _margin(self) -> float:
        return DEFAULT_MARGIN if self._grace is None else self._grace

    def _wish(self) -> int:
        """What this rank tells the others: 0, or milliseconds since it was told, its rank and the signal."""
        now = self._clock()
        wishes = [(now - time, number) for number, time in list(self._first.items())]
        if self._deadline is not None and now > self._deadline - self._margin:
            wishes.append((now - self._deadline + self._margin, _DEADLINE))
        if not wishes:
            return 0
        spent, number = max(wishes)
        return (int(1000 * max(spent, 0.0)) + 1) << _RANK_BITS | self._rank << _SIGNAL_BITS | number


def check_signals(signals: Sequence[str], grace: float | None) -> None:
    """Refuse names that are no signals which a process can catch, and times that are none.

    Raises:
        ParallelConfigError: With all that is wrong.
    """
    problems = Problems()
    for name in signals:
        if not isinstance(getattr(signal, str(name), None), signal.Signals) or name in ("SIGKILL", "SIGSTOP"):
            problems.add(
                f"signals of PreemptionGuard name {name!r}, no signal that can be caught", "signals=['SIGTERM']"
            )
    if grace is not None and grace <= 0:
        problems.add(f"grace of PreemptionGuard is {grace} seconds; it is above 0", "grace=timedelta(seconds=60)")
    problems.raise_if_any()


def check_requeue(requeue: str) -> None:
    """Raise `ParallelConfigError` unless `requeue` is one of ``notice``, ``always`` and ``never``."""
    problems = Problems()
    if requeue not in get_args(Requeue):
        problems.add(
            f"requeue of PreemptionGuard is {requeue!r}; it is one of notice, always, never", "requeue='notice'"
        )
    problems.raise_if_any()


def slurm_end(environment: Mapping[str, str] = os.environ) -> float | None:
    """When this SLURM job ends, in seconds since the epoch, if SLURM says so."""
    end = environment.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() else None


def requeue_slurm_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Ask SLURM to start this job again; False outside a SLURM job, and with a warning where SLURM does not do it."""
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return False
    if "SLURM_ARRAY_JOB_ID" in environment and "SLURM_ARRAY_TASK_ID" in environment:
        job = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as e:
        log.warning("SLURM job %s was not requeued: %s %s", job, e, getattr(e, "stderr", None) or "")
        return False
    log.info("SLURM job %s is requeued", job)
    return True
